// The Python face of ShmGroup: addresses in, None or a tuple that says what went wrong out.
#include "shm_module.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
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
    // Returns how many sums came to their end, and None or what went wrong with the next.
    module.def("run_shared", [](const Stack& stack, Workspace& space, const KVCache& cache,
                                const Places& places, std::uintptr_t x, std::uintptr_t entry,
                                std::int64_t entry_stride,
                                const std::vector<std::pair<std::int64_t, std::uintptr_t>>& taps,
                                int threads, ShmGroup& group, std::uint64_t tag,
                                std::int64_t timeout_us, std::uintptr_t share) {
        std::vector<Tap> copies;
        for (const auto& [layer, out] : taps) {
            copies.push_back({layer, floats(out)});
        }
        Sums sums{group, tag, timeout_us, floats(share)};
        const nb::object outcome = collective([&] {
            const std::lock_guard<std::mutex> alone(space.busy);
            return run_shared(stack, Run{space, threads}, cache, places, floats(x), floats(entry),
                              entry_stride, copies, sums, let_signals_in);
        });
        return nb::make_tuple(sums.done, outcome);
    });
}

}  // namespace drumline
