// Bindings of layers and row operations. Addresses rather than tensors: the caller has checked
// shapes and keeps the memory alive, and a call costs a microsecond.
#include "ops_module.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "layer.hpp"
#include "pool.hpp"
#include "rows.hpp"

namespace nb = nanobind;

namespace drumline {
namespace {

using Address = std::uintptr_t;

template <typename Item>
Item* at(Address address) {
    return reinterpret_cast<Item*>(address);
}

KVType kv_type_by_name(const std::string& name) {
    static const std::pair<const char*, KVType> names[] = {{"float32", KVType::f32},
                                                           {"float16", KVType::f16},
                                                           {"bfloat16", KVType::bf16},
                                                           {"int8", KVType::i8}};
    for (const auto& [known, type] : names) {
        if (name == known) {
            return type;
        }
    }
    throw std::invalid_argument("no cache of " + name);
}

using Taps = std::vector<std::pair<std::int64_t, Address>>;

std::vector<Tap> tap_copies(const Taps& taps) {
    std::vector<Tap> copies;
    for (const auto& [layer, out] : taps) {
        copies.push_back({layer, at<float>(out)});
    }
    return copies;
}

// The workspace is held, and Python's lock is not, while `body` computes.
template <typename Body>
void computed(Workspace& space, int threads, const Body& body) {
    const nb::gil_scoped_release unlocked;
    const std::lock_guard<std::mutex> alone(space.busy);
    body(Run{space, threads});
}

// body(row) for each row; a handful of rows each, or all by the caller.
template <typename Body>
void each_row(Workspace& space, int threads, std::int64_t rows, const Body& body) {
    computed(space, threads, [&](const Run&) {
        const int parts = static_cast<int>(
            std::max<std::int64_t>(1, std::min<std::int64_t>(rows / 4, 4 * threads)));
        Pool::instance().run(threads, parts, [&](int part) {
            for (std::int64_t r = rows * part / parts; r < rows * (part + 1) / parts; ++r) {
                body(r);
            }
        });
    });
}

void bind_weights(nb::module_& module) {
    nb::class_<Workspace>(module, "Workspace")
        .def(
            "__init__",
            [](Workspace* self, const std::string& path, bool fine) {
                new (self) Workspace(path_by_name(path), fine);
            },
            nb::arg("path"), nb::arg("fine"))
        .def_prop_ro("nbytes", [](const Workspace& self) { return self.nbytes(); });
    nb::class_<Dense>(module, "Dense")
        .def(
            "__init__",
            [](Dense* self, const std::vector<std::shared_ptr<PackedLinear>>& parts,
               Address bias) {
                new (self) Dense();
                self->bias = at<const float>(bias);
                for (const auto& part : parts) {
                    self->parts.push_back(part);
                    self->outputs += part->outputs();
                    self->columns = part->columns();
                }
            },
            nb::arg("parts"), nb::arg("bias"))
        .def("take_rows",
             [](const Dense& self, Address ids, std::int64_t count, Address out) {
                 self.take_rows(at<const std::int64_t>(ids), count, at<float>(out));
             })
        .def(
            "linear",
            [](const Dense& self, Workspace& space, Address norm, float eps, Address x,
               std::int64_t rows, std::int64_t x_stride, Address out, int threads) {
                computed(space, threads, [&](const Run& run) {
                    linear(run, self, at<const float>(norm), eps, at<const float>(x), rows,
                           x_stride, at<float>(out));
                });
            });
    nb::class_<Attention>(module, "Attention")
        .def("__init__", [](Attention* self, Address norm, const Dense& qkv, Address q_norm,
                            Address k_norm, const Dense& o, std::int64_t heads,
                            std::int64_t kv_heads, std::int64_t head_dim, float eps) {
            new (self) Attention{at<const float>(norm), qkv, at<const float>(q_norm),
                                 at<const float>(k_norm), o, heads, kv_heads, head_dim, eps};
        });
    nb::class_<FeedForward>(module, "FeedForward")
        .def("__init__", [](FeedForward* self, Address norm, const Dense& gate_up,
                            const Dense& down, float eps) {
            new (self) FeedForward{at<const float>(norm), gate_up, down, eps};
        });
    nb::class_<Experts>(module, "Experts")
        .def("__init__",
             [](Experts* self, const std::vector<std::pair<const Dense*, const Dense*>>& all) {
                 new (self) Experts();
                 for (const auto& [gate_up, down] : all) {
                     self->experts.push_back({*gate_up, *down});
                 }
             })
        .def("outputs", [](const Experts& self, Workspace& space, Address x, std::int64_t rows,
                           Address ids, std::int64_t per_token, Address out, int threads) {
            computed(space, threads, [&](const Run& run) {
                self.outputs(run, at<const float>(x), rows, at<const std::int64_t>(ids),
                             per_token, at<float>(out));
            });
        });
    nb::class_<MixtureOfExperts>(module, "MixtureOfExperts")
        .def("__init__",
             [](MixtureOfExperts* self, Address norm, const Dense& router,
                const std::shared_ptr<Experts>& experts, std::int64_t per_token, bool normalize,
                float eps) {
                 new (self) MixtureOfExperts{at<const float>(norm), router, experts, per_token,
                                             normalize, eps};
             });
}

void bind_stack(nb::module_& module) {
    nb::class_<KVCache>(module, "KVCache")
        .def("__init__", [](KVCache* self, Address keys, Address values, Address key_scales,
                            Address value_scales, const std::string& type, std::int64_t layers,
                            std::int64_t kv_heads, std::int64_t head_dim,
                            std::int64_t block_size) {
            new (self) KVCache{at<void>(keys), at<void>(values), at<float>(key_scales),
                               at<float>(value_scales), kv_type_by_name(type), layers,
                               kv_heads, head_dim, block_size};
        });
    nb::class_<Places>(module, "Places")
        .def("__init__", [](Places* self, std::int64_t tokens, Address positions, Address slots,
                            Address tables, Address table_start, std::int64_t first_key) {
            new (self) Places{tokens, at<const std::int64_t>(positions),
                              at<const std::int64_t>(slots), at<const std::int64_t>(tables),
                              at<const std::int64_t>(table_start), first_key};
        });
    nb::class_<Stack>(module, "Stack")
        .def("__init__",
             [](Stack* self, Address cos, Address sin, std::int64_t half) {
                 new (self) Stack();
                 self->rope = {at<const float>(cos), at<const float>(sin), half};
             })
        .def("add_dense",
             [](Stack& self, const std::shared_ptr<Attention>& attention,
                const std::shared_ptr<FeedForward>& dense) {
                 self.layers.push_back({attention, dense, nullptr});
             })
        .def("add_experts",
             [](Stack& self, const std::shared_ptr<Attention>& attention,
                const std::shared_ptr<MixtureOfExperts>& experts) {
                 self.layers.push_back({attention, nullptr, experts});
             })
        .def("attend",
             [](const Stack& self, std::int64_t index, Workspace& space, const KVCache& cache,
                const Places& places, Address x, std::int64_t x_stride, Address residual,
                Address out, int threads) {
                 computed(space, threads, [&](const Run& run) {
                     self.attend(index, run, cache, places, at<const float>(x), x_stride,
                                 at<const float>(residual), at<float>(out));
                 });
             })
        .def("feed_forward",
             [](const Stack& self, std::int64_t index, Workspace& space, Address x,
                std::int64_t rows, Address residual, Address out, int threads) {
                 computed(space, threads, [&](const Run& run) {
                     self.feed_forward(index, run, at<const float>(x), rows,
                                       at<const float>(residual), at<float>(out));
                 });
             })
        .def("run", [](const Stack& self, Workspace& space, const KVCache& cache,
                       const Places& places, Address x, Address entry, std::int64_t entry_stride,
                       const Taps& taps, Address read, std::int64_t reads_count, int threads) {
            const std::vector<Tap> copies = tap_copies(taps);
            const Reads reads = {at<const std::int64_t>(read), reads_count};
            computed(space, threads, [&](const Run& run) {
                self.run(run, cache, places, at<float>(x), at<const float>(entry), entry_stride,
                         copies, reads_count < 0 ? nullptr : &reads);
            });
        })
        .def("decode", [](const Stack& self, Workspace& space, const KVCache& cache,
                          const Places& places, Address ids, const Dense& table, Address x,
                          const Taps& taps, Address norm, float eps, const Dense& head,
                          Address rows, std::int64_t count, Address out, Address read,
                          std::int64_t reads_count, int threads) {
            const std::vector<Tap> copies = tap_copies(taps);
            const Reads reads = {at<const std::int64_t>(read), reads_count};
            const Logits logits = {at<const float>(norm), eps,   &head,
                                   at<const std::int64_t>(rows), count, at<float>(out)};
            computed(space, threads, [&](const Run& run) {
                self.decode(run, cache, places, at<const std::int64_t>(ids), table, at<float>(x),
                            copies, logits, reads_count < 0 ? nullptr : &reads);
            });
        });
}

void bind_rows(nb::module_& module) {
    module.def("rms_norm", [](Workspace& space, Address x, std::int64_t rows, std::int64_t width,
                              std::int64_t stride, Address weight, float eps, Address out,
                              int threads) {
        const RowKernels& kernels = row_kernels(space.path);
        each_row(space, threads, rows, [&](std::int64_t r) {
            kernels.rms_norm(at<const float>(x) + r * stride, width, at<const float>(weight), eps,
                             at<float>(out) + r * width);
        });
    });
    module.def("silu_and_mul", [](Workspace& space, Address x, std::int64_t rows,
                                  std::int64_t width, Address out, int threads) {
        const RowKernels& kernels = row_kernels(space.path);
        each_row(space, threads, rows, [&](std::int64_t r) {
            const float* gate = at<const float>(x) + r * 2 * width;
            kernels.silu_and_mul(gate, gate + width, width, at<float>(out) + r * width);
        });
    });
    module.def("rope", [](Workspace& space, Address x, std::int64_t tokens, std::int64_t heads,
                          std::int64_t head_dim, std::int64_t stride, Address positions,
                          Address cos, Address sin, std::int64_t half, Address out, int threads) {
        const RowKernels& kernels = row_kernels(space.path);
        each_row(space, threads, tokens, [&](std::int64_t t) {
            const std::int64_t angle = at<const std::int64_t>(positions)[t] * half;
            for (std::int64_t h = 0; h < heads; ++h) {
                const float* from = at<const float>(x) + t * stride + h * head_dim;
                float* to = at<float>(out) + (t * heads + h) * head_dim;
                kernels.rope(from, half, at<const float>(cos) + angle,
                             at<const float>(sin) + angle, to);
                std::copy(from + 2 * half, from + head_dim, to + 2 * half);
            }
        });
    });
    module.def("argmax", [](Workspace& space, Address x, std::int64_t rows, std::int64_t width,
                            std::int64_t stride, Address out, int threads) {
        const RowKernels& kernels = row_kernels(space.path);
        each_row(space, threads, rows, [&](std::int64_t r) {
            at<std::int64_t>(out)[r] = kernels.argmax(at<const float>(x) + r * stride, width);
        });
    });
    module.def("top_k", [](Workspace& space, Address x, std::int64_t rows, std::int64_t width,
                           std::int64_t stride, std::int64_t k, Address values, Address ids,
                           int threads) {
        const RowKernels& kernels = row_kernels(space.path);
        each_row(space, threads, rows, [&](std::int64_t r) {
            kernels.top_k(at<const float>(x) + r * stride, width, k, at<float>(values) + r * k,
                          at<std::int64_t>(ids) + r * k);
        });
    });
    module.def("route", [](Workspace& space, Address logits, std::int64_t rows,
                           std::int64_t count, std::int64_t per_token, bool normalize,
                           Address ids, Address weights) {
        computed(space, 1, [&](const Run&) {
            route(at<const float>(logits), rows, count, per_token, normalize,
                  at<std::int64_t>(ids), at<float>(weights), space.path);
        });
    });
    module.def("write_kv", [](Workspace& space, const KVCache& cache, std::int64_t layer,
                              Address slots, std::int64_t tokens, Address key, Address value,
                              std::int64_t key_stride, std::int64_t value_stride) {
        computed(space, 1, [&](const Run&) {
            for (std::int64_t t = 0; t < tokens; ++t) {
                const std::int64_t slot = at<const std::int64_t>(slots)[t];
                if (slot >= 0) {
                    write_kv(cache, layer, slot, at<const float>(key) + t * key_stride,
                             at<const float>(value) + t * value_stride, space.path);
                }
            }
        });
    });
    module.def("attention", [](Workspace& space, const KVCache& cache, const Places& places,
                               std::int64_t layer, Address query, std::int64_t query_stride,
                               std::int64_t heads, float scale, Address out, int threads) {
        computed(space, threads, [&](const Run& run) {
            const AttentionJob job = {at<const float>(query), query_stride, heads, layer, scale,
                                      at<float>(out)};
            attention(cache, places, job, 0, places.tokens, threads, run.space.path,
                      run.space.scratch);
        });
    });
}

}  // namespace

void bind_ops(nb::module_& module) {
    bind_weights(module);
    bind_stack(module);
    bind_rows(module);
}

}  // namespace drumline
