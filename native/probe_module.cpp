#include "probe_module.hpp"

#include <nanobind/stl/string.h>

#include "probe.hpp"

namespace nb = nanobind;

namespace drumline {

void bind_probe(nb::module_& module) {
    module.def("read_seconds", [](std::uintptr_t bytes, std::int64_t size, int threads,
                                  const std::string& path) {
        const Path chosen = path_by_name(path);
        const nb::gil_scoped_release unlocked;
        return read_seconds(reinterpret_cast<const std::uint8_t*>(bytes), size, threads, chosen);
    });
    module.def("signal_seconds", [](std::int64_t rounds) {
        const nb::gil_scoped_release unlocked;
        return signal_seconds(rounds);
    });
    module.def("int8_macs_per_second", [](std::int64_t rounds, int threads, const std::string& path) {
        const Path chosen = path_by_name(path);
        const nb::gil_scoped_release unlocked;
        return int8_macs_per_second(rounds, threads, chosen);
    });
    module.def("float_macs_per_second",
               [](std::int64_t rounds, int threads, const std::string& path) {
                   const Path chosen = path_by_name(path);
                   const nb::gil_scoped_release unlocked;
                   return float_macs_per_second(rounds, threads, chosen);
               });
}

}  // namespace drumline
