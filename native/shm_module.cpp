// The Python face of ShmGroup: addresses in, None or a tuple that says what went wrong out.
#include "shm_module.hpp"

#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>

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
}

}  // namespace drumline
