// The Python face of ShmGroup: addresses in, None or a tuple that says what went wrong out.
#include "shm_module.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "shared_layers.hpp"
#include "shm.hpp"

namespace nb = nanobind;

namespace drumline {
namespace {

float* floats(std::uintptr_t address) { return reinterpret_cast<float*>(address); }

// None, or (kind, ranks, mine, theirs) of a collective that did not end well.
nb::object outcome_of(const ShmOutcome& outcome) {
    static constexpr const char* names[] = {"good",    "timeout", "died",
                                            "aborted", "differs", "orphaned"};
    if (outcome.good()) {
        return nb::none();
    }
    nb::list ranks;
    for (const int rank : outcome.ranks) {
        ranks.append(rank);
    }
    return nb::make_tuple(names[static_cast<int>(outcome.kind)], ranks, outcome.mine,
                          outcome.theirs);
}

// Lets Ctrl-C and other signals through while a collective waits.
void let_signals_in() {
    const nb::gil_scoped_acquire locked;
    if (PyErr_CheckSignals() != 0) {
        throw nb::python_error();
    }
}

template <typename Call>
nb::object collective(Call&& call) {
    ShmOutcome outcome;
    {
        const nb::gil_scoped_release unlocked;
        outcome = call();
    }
    return outcome_of(outcome);
}

}  // namespace

void bind_shm(nb::module_& module) {
    module.def("shm_segment_bytes", &ShmGroup::segment_bytes, nb::arg("ranks"),
               nb::arg("chunk_bytes"));
    nb::class_<ShmGroup>(module, "ShmGroup")
        .def(nb::init<int, int, int, std::size_t, int, int>(), nb::arg("fd"), nb::arg("rank"),
             nb::arg("ranks"), nb::arg("chunk_bytes"), nb::arg("spin_us"), nb::arg("watch_fd"))
        .def("gather",
             [](ShmGroup& self, std::uintptr_t src, std::size_t nbytes, std::uintptr_t dst,
                std::uint64_t tag, std::int64_t timeout_us) {
                 return collective([&] {
                     return self.gather(reinterpret_cast<const void*>(src), nbytes,
                                        reinterpret_cast<void*>(dst), tag, timeout_us,
                                        let_signals_in);
                 });
             })
        .def("reduce",
             [](ShmGroup& self, std::uintptr_t src, std::size_t count, std::uintptr_t dst,
                std::uint64_t tag, std::int64_t timeout_us) {
                 return collective([&] {
                     return self.reduce(floats(src), count, floats(dst), tag, timeout_us,
                                        let_signals_in);
                 });
             })
        .def("exchange",
             [](ShmGroup& self, std::uintptr_t src, std::size_t nbytes, std::uintptr_t dst,
                std::uint64_t tag, std::int64_t timeout_us) {
                 return collective([&] {
                     return self.exchange(reinterpret_cast<const void*>(src), nbytes,
                                          reinterpret_cast<void*>(dst), tag, timeout_us,
                                          let_signals_in);
                 });
             })
        .def("broadcast",
             [](ShmGroup& self, std::uintptr_t data, std::size_t nbytes, int root,
                std::uint64_t tag, std::int64_t timeout_us) {
                 return collective([&] {
                     return self.broadcast(reinterpret_cast<void*>(data), nbytes, root, tag,
                                           timeout_us, let_signals_in);
                 });
             })
        .def("raise_abort", &ShmGroup::raise_abort, nb::arg("code"))
        .def("abort_code", &ShmGroup::abort_code)
        .def("processes", &ShmGroup::processes)
        .def("close", &ShmGroup::close)
        .def_prop_ro("rank", &ShmGroup::rank)
        .def_prop_ro("ranks", &ShmGroup::ranks);
    nb::class_<Sharing>(module, "Sharing")
        .def("__init__", [](Sharing* self, bool attention, bool feed_forward) {
            new (self) Sharing{attention, feed_forward, nullptr};
        })
        .def("spread",
             [](Sharing& self, std::uintptr_t norm, const Dense& router,
                const std::shared_ptr<Experts>& own, std::int64_t first, std::int64_t count,
                std::int64_t per_token, bool normalize, float eps) {
                 self.spread = std::make_shared<SpreadMixture>(SpreadMixture{
                     floats(norm), router, own, first, count, per_token, normalize, eps});
             },
             nb::arg("norm"), nb::arg("router"), nb::arg("own").none(), nb::arg("first"),
             nb::arg("count"), nb::arg("per_token"), nb::arg("normalize"), nb::arg("eps"));
    // Returns how many collectives came to their end, and None or what went wrong with the next.
    module.def(
        "run_shared",
        [](const Stack& stack, const std::vector<Sharing>& sharing, Workspace& space,
           const KVCache& cache, const Places& places, std::uintptr_t x, std::uintptr_t entry,
           std::int64_t entry_stride,
           const std::vector<std::pair<std::int64_t, std::uintptr_t>>& taps, int threads,
           ShmGroup* tp, ShmGroup* ep, std::int64_t shards, std::uint64_t sum_tag,
           std::uint64_t gather_tag, std::uint64_t exchange_tag, std::int64_t timeout_us) {
            std::vector<Tap> copies;
            for (const auto& [layer, out] : taps) {
                copies.push_back({layer, floats(out)});
            }
            Meeting meeting{tp,      ep,         shards,       sum_tag,
                            gather_tag, exchange_tag, timeout_us, 0};
            const nb::object outcome = collective([&] {
                const std::lock_guard<std::mutex> alone(space.busy);
                return run_shared(stack, sharing, Run{space, threads}, cache, places, floats(x),
                                  floats(entry), entry_stride, copies, meeting, let_signals_in);
            });
            return nb::make_tuple(meeting.done, outcome);
        },
        nb::arg("stack"), nb::arg("sharing"), nb::arg("space"), nb::arg("cache"),
        nb::arg("places"), nb::arg("x"), nb::arg("entry"), nb::arg("entry_stride"),
        nb::arg("taps"), nb::arg("threads"), nb::arg("tp").none(), nb::arg("ep").none(),
        nb::arg("shards"), nb::arg("sum_tag"), nb::arg("gather_tag"), nb::arg("exchange_tag"),
        nb::arg("timeout_us"));
}

}  // namespace drumline
