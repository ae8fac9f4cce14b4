// The Python face of the native code. Only bindings here: each function lives in a file of its own.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>

#include "cpu_features.hpp"
#include "linear.hpp"
#include "ops_module.hpp"
#include "probe_module.hpp"
#include "sampling_module.hpp"
#include "shm_module.hpp"

namespace nb = nanobind;

NB_MODULE(_native, module) {
    // Objects that live as long as the interpreter are no leak.
    nb::set_leak_warnings(false);
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
    module.def("available_paths", &drumline::available_paths,
               "Instruction-set paths of the kernels that this processor can run, best first.");
    drumline::bind_shm(module);
    // Addresses rather than tensors: the caller has checked shapes, and a call costs a microsecond.
    nb::class_<drumline::PackedLinear>(module, "PackedLinear")
        .def(
            "__init__",
            [](drumline::PackedLinear* self, const std::string& kind, std::uintptr_t raw,
               std::int64_t outputs, std::int64_t columns) {
                new (self) drumline::PackedLinear(drumline::weight_kind(kind),
                                                  reinterpret_cast<const std::uint8_t*>(raw),
                                                  outputs, columns);
            },
            nb::arg("kind"), nb::arg("raw"), nb::arg("outputs"), nb::arg("columns"))
        .def_static(
            "stack",
            [](const std::string& kind, const std::vector<std::uintptr_t>& raw,
               const std::vector<std::int64_t>& outputs, std::int64_t columns) {
                std::vector<const std::uint8_t*> parts;
                for (const std::uintptr_t at : raw) {
                    parts.push_back(reinterpret_cast<const std::uint8_t*>(at));
                }
                return std::make_unique<drumline::PackedLinear>(drumline::weight_kind(kind), parts,
                                                                outputs, columns);
            },
            nb::arg("kind"), nb::arg("raw"), nb::arg("outputs"), nb::arg("columns"))
        .def("take_rows",
             [](const drumline::PackedLinear& self, std::uintptr_t ids, std::int64_t count,
                std::uintptr_t out) {
                 self.take_rows(reinterpret_cast<const std::int64_t*>(ids), count,
                                reinterpret_cast<float*>(out));
             })
        .def(
            "multiply",
            [](const drumline::PackedLinear& self, std::uintptr_t x, std::int64_t rows,
               std::int64_t x_stride, std::uintptr_t out, std::int64_t out_stride, int threads,
               const std::string& path, bool fine) {
                const drumline::Path chosen = drumline::path_by_name(path);
                const nb::gil_scoped_release unlocked;
                self.multiply(reinterpret_cast<const float*>(x), rows, x_stride,
                              reinterpret_cast<float*>(out), out_stride, threads, chosen, fine);
            },
            nb::arg("x"), nb::arg("rows"), nb::arg("x_stride"), nb::arg("out"),
            nb::arg("out_stride"), nb::arg("threads"), nb::arg("path"), nb::arg("fine"))
        .def_prop_ro("outputs", &drumline::PackedLinear::outputs)
        .def_prop_ro("columns", &drumline::PackedLinear::columns)
        .def_prop_ro("nbytes", &drumline::PackedLinear::nbytes);
    drumline::bind_ops(module);
    drumline::bind_sampling(module);
    drumline::bind_probe(module);
}
