// The Python face of the native code. Only bindings here: each function lives in a file of its own.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>

#include "cpu_features.hpp"
#include "linear.hpp"
#include "rows.hpp"
#include "sampling_module.hpp"
#include "shm_module.hpp"

namespace nb = nanobind;

namespace {

float* floats(std::uintptr_t address) { return reinterpret_cast<float*>(address); }

const std::int64_t* integers(std::uintptr_t address) {
    return reinterpret_cast<const std::int64_t*>(address);
}

drumline::KVType kv_type_by_name(const std::string& name) {
    return name == "float16"    ? drumline::KVType::f16
           : name == "bfloat16" ? drumline::KVType::bf16
                                : drumline::KVType::f32;
}

}  // namespace

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
    module.def(
        "rms_norm",
        [](std::uintptr_t x, std::int64_t rows, std::int64_t width, std::int64_t stride,
           std::uintptr_t weight, float eps, std::uintptr_t out, const std::string& path) {
            drumline::rms_norm(floats(x), rows, width, stride, floats(weight), eps, floats(out),
                               drumline::path_by_name(path));
        });
    module.def("silu_and_mul", [](std::uintptr_t x, std::int64_t rows, std::int64_t width,
                                  std::uintptr_t out, int threads, const std::string& path) {
        drumline::silu_and_mul(floats(x), rows, width, floats(out), threads,
                               drumline::path_by_name(path));
    });
    module.def("rope", [](std::uintptr_t x, std::int64_t tokens, std::int64_t heads,
                          std::int64_t head_dim, std::int64_t stride, std::uintptr_t positions,
                          std::uintptr_t cos, std::uintptr_t sin, std::int64_t half,
                          std::uintptr_t out, const std::string& path) {
        drumline::rope(floats(x), tokens, heads, head_dim, stride, integers(positions), floats(cos),
                       floats(sin), half, floats(out), drumline::path_by_name(path));
    });
    module.def("attention", [](std::uintptr_t query, std::uintptr_t key, std::uintptr_t value,
                               std::int64_t key_stride, std::int64_t value_stride,
                               std::uintptr_t keys, std::uintptr_t values, const std::string& kv_type,
                               std::uintptr_t positions,
                               std::uintptr_t slots, std::uintptr_t tables,
                               std::uintptr_t table_start, std::int64_t tokens, std::int64_t heads,
                               std::int64_t kv_heads, std::int64_t head_dim, std::int64_t block_size,
                               std::int64_t first_key, float scale, std::uintptr_t out, int threads,
                               const std::string& path) {
        drumline::AttentionJob job;
        job.query = floats(query);
        job.key = floats(key);
        job.value = floats(value);
        job.key_stride = key_stride;
        job.value_stride = value_stride;
        job.keys = reinterpret_cast<void*>(keys);
        job.values = reinterpret_cast<void*>(values);
        job.kv_type = kv_type_by_name(kv_type);
        job.positions = integers(positions);
        job.slots = integers(slots);
        job.tables = integers(tables);
        job.table_start = integers(table_start);
        job.tokens = tokens;
        job.heads = heads;
        job.kv_heads = kv_heads;
        job.head_dim = head_dim;
        job.block_size = block_size;
        job.first_key = first_key;
        job.scale = scale;
        job.out = floats(out);
        const drumline::Path chosen = drumline::path_by_name(path);
        const nb::gil_scoped_release unlocked;
        drumline::attention(job, threads, chosen);
    });
    module.def("write_kv", [](std::uintptr_t key, std::uintptr_t value, std::int64_t key_stride,
                              std::int64_t value_stride, std::uintptr_t keys, std::uintptr_t values,
                              const std::string& kv_type, std::uintptr_t slots, std::int64_t tokens,
                              std::int64_t kv_heads, std::int64_t head_dim, std::int64_t block_size,
                              const std::string& path) {
        drumline::AttentionJob job;
        job.key = floats(key);
        job.value = floats(value);
        job.key_stride = key_stride;
        job.value_stride = value_stride;
        job.keys = reinterpret_cast<void*>(keys);
        job.values = reinterpret_cast<void*>(values);
        job.kv_type = kv_type_by_name(kv_type);
        job.slots = integers(slots);
        job.tokens = tokens;
        job.kv_heads = kv_heads;
        job.head_dim = head_dim;
        job.block_size = block_size;
        drumline::write_kv(job, drumline::path_by_name(path));
    });
    drumline::bind_sampling(module);
}
