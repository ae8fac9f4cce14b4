// The Python face of the native code. Only bindings here: each function lives in a file of its own.
#include <nanobind/nanobind.h>

#include "cpu_features.hpp"

namespace nb = nanobind;

NB_MODULE(_native, module) {
    module.doc() = "drumline's native code: what the Python reference ops have a faster twin for.";
    module.def(
        "cpu_features",
        [] {
            nb::dict out;
            for (const auto &[name, present] : drumline::cpu_features()) {
                out[name] = present;
            }
            return out;
        },
        nb::sig("def cpu_features() -> dict[str, bool]"),
        "Instruction sets this process may use, by name. Its slow twin is drumline.core.cpu.");
}
