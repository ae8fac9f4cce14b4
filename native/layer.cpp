#include "layer.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "pool.hpp"
#include "rows.hpp"

namespace drumline {
namespace {

// Rows that go through a block together: what lies between its products stays in the second-level
// cache, and each weight, read once per tile, is used often enough to cost nothing.
constexpr std::int64_t tile_rows = 128;

// Columns of gate and up that are multiplied before the next product's integers are made of them:
// they stay in the second-level cache, too.
constexpr std::int64_t gated_bytes = 256 * 1024;

// Threads with rows of their own all read all weights, so each wants so many rows that multiplying
// takes as long: one row for every so many bits that a weight has in memory, see `Stack::apart`.
constexpr double bits_per_row = 1.3, plain_bits_per_row = 3;
constexpr std::int64_t share_rows = 32;  // at most; who is through with one takes the next

std::size_t count_of(std::int64_t rows, std::int64_t width) {
    return static_cast<std::size_t>(rows * width);
}

// body(row) for each of `rows` rows, `least` or more to a thread: few rows are done by the caller,
// since handing them to others costs more.
template <typename Body>
void each_row(const Run& run, std::int64_t rows, const Body& body, std::int64_t least = 4) {
    const std::int64_t most = run.threads > 1 ? 4 * run.threads : 1;
    const int parts = static_cast<int>(std::max<std::int64_t>(1, std::min(rows / least, most)));
    Pool::instance().run(run.threads, parts, [&](int part) {
        for (std::int64_t row = rows * part / parts; row < rows * (part + 1) / parts; ++row) {
            body(row);
        }
    });
}

// body(first row, rows) tile by tile.
template <typename Body>
void each_tile(std::int64_t rows, const Body& body) {
    for (std::int64_t row = 0; row < rows; row += tile_rows) {
        body(row, std::min(tile_rows, rows - row));
    }
}

// product [rows, width] + bias + residual → out; the last two may be null.
void add_up(const Run& run, float* product, const float* bias, const float* residual,
            std::int64_t rows, std::int64_t width, float* out) {
    const RowKernels& kernels = row_kernels(run.space.path);
    each_row(run, rows, [&](std::int64_t row) {
        float* own = product + row * width;
        if (bias != nullptr) {
            kernels.add(own, bias, width, own);
        }
        if (residual != nullptr) {
            kernels.add(residual + row * width, own, width, out + row * width);
        } else if (out != product) {
            std::memcpy(out + row * width, own, sizeof(float) * static_cast<std::size_t>(width));
        }
    });
}

// silu(gate) * up of columns begin .. end - 1 of rows of gate_up(x).
void gate_columns(const Run& run, const Dense& gate_up, float* both, std::int64_t row,
                  std::int64_t begin, std::int64_t end, float* out) {
    const RowKernels& kernels = row_kernels(run.space.path);
    const std::int64_t width = gate_up.outputs / 2;
    float* gate = both + row * 2 * width + begin;
    float* up = gate + width;
    if (gate_up.bias != nullptr) {
        kernels.add(gate, gate_up.bias + begin, end - begin, gate);
        kernels.add(up, gate_up.bias + width + begin, end - begin, up);
    }
    kernels.silu_and_mul(gate, up, end - begin, out + row * width + begin);
}

// down(silu(gate) * up), where gate, up = gate_up(x), product by product.
void gated_plainly(const Run& run, const Dense& gate_up, const Dense& down, const Intake& in,
                   float* product) {
    Scratch& scratch = run.space.scratch;
    const std::int64_t rows = in.rows, width = gate_up.outputs / 2;
    float* both = scratch.gate_up.take(count_of(rows, 2 * width));
    float* inner = scratch.gated.take(count_of(rows, width));
    gate_up.multiply(run, in, both, 2 * width);
    each_row(run, rows, [&](std::int64_t row) {
        gate_columns(run, gate_up, both, row, 0, width, inner);
    });
    down.multiply(run, down.take_in(run, nullptr, 0.0F, inner, rows, width), product,
                  down.outputs);
}

// The same bits. Who has multiplied some columns of gate and up goes on with them, up to the
// integers of the second product: nothing of it is left to one thread, and all is still at hand.
void gated(const Run& run, const Dense& gate_up, const Dense& down, const Intake& in,
           float* product) {
    constexpr std::int64_t unit = 2 * group_outputs;  // a block of the second product's columns
    const std::int64_t rows = in.rows, width = gate_up.outputs / 2;
    const PackedLinear& first = *gate_up.parts.front();
    const PackedLinear& second = *down.parts.front();
    const bool whole = gate_up.parts.size() == 1 && down.parts.size() == 1 && width % unit == 0;
    if (!whole || in.ready == nullptr || !second.quantized()) {
        return gated_plainly(run, gate_up, down, in, product);
    }
    const Path path = run.space.path;
    const bool fine = run.space.fine;
    const Activations& outer = *in.ready;
    Activations& inner = run.space.inner;
    float* both = run.space.scratch.gate_up.take(count_of(rows, 2 * width));
    float* between = run.space.scratch.gated.take(count_of(rows, width));
    inner.prepare(rows, width, second.layout(path, fine));
    const std::int64_t units = width / unit, groups = width / group_outputs;
    const std::int64_t pieces = (rows * 2 * width * 4 + gated_bytes - 1) / gated_bytes;
    const int parts = static_cast<int>(std::min<std::int64_t>(
        units, std::max<std::int64_t>(pieces, run.threads > 1 ? 4 * run.threads : 1)));
    Pool::instance().run(run.threads, parts, [&](int part) {
        const std::int64_t begin = units * part / parts, end = units * (part + 1) / parts;
        for (const std::int64_t from : {std::int64_t{0}, groups}) {
            first.multiply_groups(from + 2 * begin, from + 2 * end, nullptr, rows, 0, outer, both,
                                  2 * width, path, fine);
        }
        for (std::int64_t row = 0; row < rows; ++row) {
            gate_columns(run, gate_up, both, row, begin * unit, end * unit, between);
        }
        inner.quantize_blocks(between, width, begin, end, path);
    });
    second.multiply(inner, product, down.outputs, run.threads, path, fine);
}

// One token's q, k, v: bias, norm per head, rope; keys and values go to their slot.
struct Projection {
    const Attention& weights;
    const KVCache& cache;
    const Places& places;
    const Rope& rope;
    std::int64_t layer;
    const RowKernels& kernels;
    Path path;

    Projection(const Attention& weights, const KVCache& cache, const Places& places,
               const Rope& rope, std::int64_t layer, Path path)
        : weights(weights),
          cache(cache),
          places(places),
          rope(rope),
          layer(layer),
          kernels(row_kernels(path)),
          path(path) {}

    // Of q, k and v together.
    std::int64_t heads() const { return weights.heads + 2 * weights.kv_heads; }

    // Heads begin .. end - 1 of them.
    void finish(float* qkv, std::int64_t token, std::int64_t begin, std::int64_t end) const {
        const std::int64_t dim = weights.head_dim, half = rope.half;
        const std::int64_t values = weights.heads + weights.kv_heads;
        const float* cos = rope.cos + places.positions[token] * half;
        const float* sin = rope.sin + places.positions[token] * half;
        if (weights.qkv.bias != nullptr) {
            float* own = qkv + begin * dim;
            kernels.add(own, weights.qkv.bias + begin * dim, (end - begin) * dim, own);
        }
        for (std::int64_t head = begin; head < std::min(end, values); ++head) {
            float* own = qkv + head * dim;
            const float* norm = head < weights.heads ? weights.q_norm : weights.k_norm;
            if (norm != nullptr) {
                kernels.rms_norm(own, dim, norm, weights.eps, own);
            }
            kernels.rope(own, half, cos, sin, own);
        }
        if (end > values && places.slots[token] >= 0) {
            write_kv(cache, layer, places.slots[token], qkv + weights.heads * dim,
                     qkv + values * dim, path);
        }
    }
};

}  // namespace

void Dense::take_rows(const std::int64_t* ids, std::int64_t count, float* out) const {
    for (std::int64_t i = 0; i < count; ++i) {
        if (ids[i] < 0 || ids[i] >= outputs) {
            throw std::out_of_range("no row " + std::to_string(ids[i]) + " in a table of " +
                                    std::to_string(outputs));
        }
    }
    parts.front()->take_rows(ids, count, out);
}

Intake Dense::take_in(const Run& run, const float* norm, float eps, const float* x,
                      std::int64_t rows, std::int64_t x_stride) const {
    const RowKernels& kernels = row_kernels(run.space.path);
    const Path path = run.space.path;
    Intake in{x, rows, x_stride, nullptr, {}};
    Activations& integers = run.space.outer;
    if (rows > 0 && parts.front()->quantized()) {
        in.layout = parts.front()->layout(path, run.space.fine);
        in.ready = &integers;
        integers.prepare(rows, columns, in.layout);
    }
    float* normed = norm == nullptr ? nullptr : run.space.scratch.normed.take(count_of(rows, columns));
    if (normed == nullptr && in.ready == nullptr) {
        return in;
    }
    each_row(run, rows, [&](std::int64_t row) {
        const float* own = x + row * x_stride;
        if (normed != nullptr) {
            kernels.rms_norm(own, columns, norm, eps, normed + row * columns);
            own = normed + row * columns;
        }
        if (in.ready != nullptr) {
            integers.quantize_row(own, row, path);
        }
    });
    if (normed != nullptr) {
        in.x = normed;
        in.stride = columns;
    }
    return in;
}

void Dense::multiply(const Run& run, const Intake& in, float* out, std::int64_t out_stride,
                     Outputs some) const {
    const Path path = run.space.path;
    const bool fine = run.space.fine;
    for (const auto& part : parts) {
        const std::int64_t count = part->outputs();
        const Outputs own = {std::max<std::int64_t>(some.begin, 0), std::min(some.end, count)};
        if (own.begin < own.end) {
            if (in.ready != nullptr && part->quantized() && part->layout(path, fine) == in.layout) {
                part->multiply(*in.ready, out, out_stride, run.threads, path, fine, own);
            } else {
                part->multiply(in.x, in.rows, in.stride, out, out_stride, run.threads, path, fine,
                               own);
            }
        }
        out += count;
        some = {some.begin - count, some.end - count};
    }
}

void linear(const Run& run, const Dense& dense, const float* norm, float eps, const float* x,
            std::int64_t rows, std::int64_t x_stride, float* out) {
    each_tile(rows, [&](std::int64_t row, std::int64_t count) {
        const Intake in = dense.take_in(run, norm, eps, x + row * x_stride, count, x_stride);
        float* to = out + row * dense.outputs;
        dense.multiply(run, in, to, dense.outputs);
        if (dense.bias != nullptr) {
            add_up(run, to, dense.bias, nullptr, count, dense.outputs, to);
        }
    });
}

void route(const float* logits, std::int64_t rows, std::int64_t count, std::int64_t per_token,
           bool normalize, std::int64_t* ids, float* weights, Path path) {
    const RowKernels& kernels = row_kernels(path);
    for (std::int64_t row = 0; row < rows; ++row) {
        const float* own = logits + row * count;
        std::int64_t* chosen = ids + row * per_token;
        float* share = weights + row * per_token;
        kernels.top_k(own, count, per_token, share, chosen);
        const float peak = share[0];
        std::sort(chosen, chosen + per_token);
        float total = 0.0F;
        for (std::int64_t at = 0; at < (normalize ? per_token : count); ++at) {
            total = total + std::exp(own[normalize ? chosen[at] : at] - peak);
        }
        for (std::int64_t at = 0; at < per_token; ++at) {
            share[at] = std::exp(own[chosen[at]] - peak) / total;
        }
    }
}

void Experts::outputs(const Run& run, const float* x, std::int64_t rows, const std::int64_t* ids,
                      std::int64_t per_token, float* out) const {
    Scratch& scratch = run.space.scratch;
    const std::int64_t hidden = experts.front().down.outputs;
    const auto count = static_cast<std::int64_t>(experts.size());
    // Pairs (token, place) by expert: `bounds` says where each expert's begin.
    std::int64_t* bounds = scratch.expert_bounds.take(static_cast<std::size_t>(count + 1));
    std::int64_t* pairs = scratch.expert_pairs.take(count_of(rows, per_token));
    std::fill(bounds, bounds + count + 1, 0);
    for (std::int64_t pair = 0; pair < rows * per_token; ++pair) {
        ++bounds[ids[pair] + 1];
    }
    for (std::int64_t expert = 0; expert < count; ++expert) {
        bounds[expert + 1] += bounds[expert];
    }
    for (std::int64_t pair = 0; pair < rows * per_token; ++pair) {
        pairs[bounds[ids[pair]]++] = pair;
    }
    for (std::int64_t expert = 0; expert < count; ++expert) {
        const std::int64_t begin = expert == 0 ? 0 : bounds[expert - 1];  // each moved on by one
        const std::int64_t own = bounds[expert] - begin;
        const Expert& weights = experts[static_cast<std::size_t>(expert)];
        each_tile(own, [&](std::int64_t first, std::int64_t some) {
            const std::int64_t* of = pairs + begin + first;
            float* gathered = scratch.gathered.take(count_of(some, hidden));
            float* product = scratch.expert_product.take(count_of(some, hidden));
            const auto bytes = sizeof(float) * static_cast<std::size_t>(hidden);
            for (std::int64_t at = 0; at < some; ++at) {
                std::memcpy(gathered + at * hidden, x + of[at] / per_token * hidden, bytes);
            }
            const Intake in =
                weights.gate_up.take_in(run, nullptr, 0.0F, gathered, some, hidden);
            gated(run, weights.gate_up, weights.down, in, product);
            for (std::int64_t at = 0; at < some; ++at) {
                std::memcpy(out + of[at] * hidden, product + at * hidden, bytes);
            }
        });
    }
}

namespace {

// Heads begin .. end - 1 of q, k, v, of rows first .. first + rows - 1, which x begins with. Keys and
// values, where they are among them, go to the cache.
void project(const Run& run, const Projection& projection, const float* x, std::int64_t x_stride,
             std::int64_t first, std::int64_t rows, float* qkv, std::int64_t begin,
             std::int64_t end) {
    const Attention& weights = projection.weights;
    const std::int64_t width = weights.qkv.outputs, dim = weights.head_dim;
    each_tile(rows, [&](std::int64_t row, std::int64_t count) {
        const Intake in = weights.qkv.take_in(run, weights.norm, weights.eps,
                                              x + row * x_stride, count, x_stride);
        float* own = qkv + (first + row) * width;
        weights.qkv.multiply(run, in, own, width, {begin * dim, end * dim});
        each_row(
            run, count,
            [&](std::int64_t at) {
                projection.finish(own + at * width, first + row + at, begin, end);
            },
            1);
    });
}

// What every head has found [rows, heads * head_dim] → out; `residual` may be null.
void bring_out(const Run& run, const Attention& weights, const float* mixed, std::int64_t rows,
               const float* residual, float* out) {
    const std::int64_t width = weights.heads * weights.head_dim, hidden = weights.o.outputs;
    each_tile(rows, [&](std::int64_t row, std::int64_t count) {
        float* product = run.space.scratch.product.take(count_of(count, hidden));
        const Intake in =
            weights.o.take_in(run, nullptr, 0.0F, mixed + row * width, count, width);
        weights.o.multiply(run, in, product, hidden);
        const float* before = residual == nullptr ? nullptr : residual + row * hidden;
        add_up(run, product, weights.o.bias, before, count, hidden, out + row * hidden);
    });
}

// Every query of a pass over the cache → mixed [tokens, heads * head_dim].
void look_back(const Run& run, const Attention& weights, const KVCache& cache, std::int64_t layer,
               const Places& places, const float* qkv, float* mixed) {
    AttentionJob job;
    job.query = qkv;
    job.query_stride = weights.qkv.outputs;
    job.heads = weights.heads;
    job.layer = layer;
    job.scale = 1.0F / std::sqrt(static_cast<float>(weights.head_dim));
    job.out = mixed;
    attention(cache, places, job, 0, places.tokens, run.threads, run.space.path,
              run.space.scratch);
}

void attend_block(const Run& run, const Attention& weights, const KVCache& cache, std::int64_t layer,
                  const Places& places, const Rope& rope, const float* x, std::int64_t x_stride,
                  const float* residual, float* out) {
    Scratch& scratch = run.space.scratch;
    const std::int64_t tokens = places.tokens;
    float* qkv = scratch.projected.take(count_of(tokens, weights.qkv.outputs));
    // All keys first: a token may see later ones of its own block.
    const Projection all(weights, cache, places, rope, layer, run.space.path);
    project(run, all, x, x_stride, 0, tokens, qkv, 0, all.heads());
    float* mixed = scratch.mixed.take(count_of(tokens, weights.heads * weights.head_dim));
    look_back(run, weights, cache, layer, places, qkv, mixed);
    bring_out(run, weights, mixed, tokens, residual, out);
}

void dense_block(const Run& run, const FeedForward& weights, const float* x, std::int64_t rows,
                  const float* residual, float* out) {
    const std::int64_t hidden = weights.gate_up.columns;
    each_tile(rows, [&](std::int64_t row, std::int64_t count) {
        const Intake in = weights.gate_up.take_in(run, weights.norm, weights.eps,
                                                  x + row * hidden, count, hidden);
        float* product = run.space.scratch.product.take(count_of(count, hidden));
        gated(run, weights.gate_up, weights.down, in, product);
        const float* before = residual == nullptr ? nullptr : residual + row * hidden;
        add_up(run, product, weights.down.bias, before, count, hidden, out + row * hidden);
    });
}

void expert_block(const Run& run, const MixtureOfExperts& weights, const float* x,
                  std::int64_t rows, const float* residual, float* out) {
    Scratch& scratch = run.space.scratch;
    const RowKernels& kernels = row_kernels(run.space.path);
    const std::int64_t hidden = weights.router.columns, k = weights.per_token;
    const std::int64_t count = weights.router.outputs;
    each_tile(rows, [&](std::int64_t row, std::int64_t some) {
        const Intake in = weights.router.take_in(run, weights.norm, weights.eps, x + row * hidden,
                                                 some, hidden);
        float* logits = scratch.router_logits.take(count_of(some, count));
        weights.router.multiply(run, in, logits, count);
        std::int64_t* ids = scratch.expert_ids.take(count_of(some, k));
        float* shares = scratch.expert_shares.take(count_of(some, k));
        route(logits, some, count, k, weights.normalize, ids, shares, run.space.path);
        float* outputs = scratch.expert_outputs.take(count_of(some * k, hidden));
        weights.experts->outputs(run, in.x, some, ids, k, outputs);
        float* product = scratch.product.take(count_of(some, hidden));
        each_row(run, some, [&](std::int64_t at) {
            float* own = product + at * hidden;
            std::fill(own, own + hidden, 0.0F);
            for (std::int64_t j = 0; j < k; ++j) {
                kernels.add_scaled(outputs + (at * k + j) * hidden, shares[at * k + j], hidden,
                                   own);
            }
        });
        const float* before = residual == nullptr ? nullptr : residual + row * hidden;
        add_up(run, product, nullptr, before, some, hidden, out + row * hidden);
    });
}

}  // namespace

void Stack::attend(std::int64_t index, const Run& run, const KVCache& cache, const Places& places,
                   const float* x, std::int64_t x_stride, const float* residual,
                   float* out) const {
    const Layer& layer = layers[static_cast<std::size_t>(index)];
    attend_block(run, *layer.attention, cache, index, places, rope, x, x_stride, residual, out);
}

void Stack::feed_forward(std::int64_t index, const Run& run, const float* x, std::int64_t rows,
                         const float* residual, float* out) const {
    const Layer& layer = layers[static_cast<std::size_t>(index)];
    if (layer.experts != nullptr) {
        expert_block(run, *layer.experts, x, rows, residual, out);
    } else {
        dense_block(run, *layer.dense, x, rows, residual, out);
    }
}

// What `bring_out`, `dense_block` and `project` take on a workspace, taken in time: threads of the pool
// do not throw.
static void reserve(Workspace& space, const Layer& layer, std::int64_t rows) {
    const std::int64_t count = std::min(rows, tile_rows);
    Scratch& scratch = space.scratch;
    const Attention& attention = *layer.attention;
    const FeedForward& dense = *layer.dense;
    const std::int64_t width = dense.gate_up.outputs / 2;
    scratch.normed.take(count_of(count, std::max(attention.qkv.columns, dense.gate_up.columns)));
    scratch.product.take(count_of(count, std::max(attention.o.outputs, dense.down.outputs)));
    scratch.gate_up.take(count_of(count, 2 * width));
    scratch.gated.take(count_of(count, width));
    for (const Dense* taken : {&attention.qkv, &attention.o, &dense.gate_up, &dense.down}) {
        const PackedLinear& part = *taken->parts.front();
        if (part.quantized()) {
            const ActivationLayout layout = part.layout(space.path, space.fine);
            space.outer.prepare(count, taken->columns, layout);
            space.inner.prepare(count, taken->columns, layout);
        }
    }
}

bool Stack::apart(const Run& run, std::int64_t rows) const {
    double weights = 0, enough = 0;  // rows for each thread, times the weights that want them
    for (const Layer& layer : layers) {
        if (layer.dense == nullptr || run.threads == 1) {
            return false;
        }
        for (const Dense* dense : {&layer.attention->qkv, &layer.attention->o,
                                   &layer.dense->gate_up, &layer.dense->down}) {
            for (const auto& part : dense->parts) {
                const double per_row = part->quantized() ? bits_per_row : plain_bits_per_row;
                weights += static_cast<double>(part->outputs() * part->columns());
                enough += static_cast<double>(8 * part->nbytes()) / per_row;
            }
        }
    }
    return static_cast<double>(rows) * weights >= enough * run.threads;
}

void Stack::run_apart(std::int64_t count, const Run& run, const KVCache& cache,
                      const Places& places, float* x, const float* entry,
                      std::int64_t entry_stride, const std::vector<Tap>& taps) const {
    const std::int64_t tokens = places.tokens, hidden = layers.front().attention->o.outputs;
    const std::int64_t rounds = (tokens + share_rows * run.threads - 1) / (share_rows * run.threads);
    const auto shares = static_cast<int>(std::min(tokens, rounds * run.threads));
    for (int share = 0; share < shares; ++share) {
        for (const Layer& layer : layers) {
            reserve(run.space.share(static_cast<std::size_t>(share)), layer,
                    (tokens + shares - 1) / shares);
        }
    }
    Scratch& scratch = run.space.scratch;
    const float* mixed = nullptr;
    for (std::int64_t index = 0; index <= count; ++index) {
        const Layer* before = index == 0 ? nullptr : &layers[static_cast<std::size_t>(index - 1)];
        const Layer* next = index == count ? nullptr : &layers[static_cast<std::size_t>(index)];
        float* qkv = nullptr;
        if (next != nullptr) {
            qkv = scratch.projected.take(count_of(tokens, next->attention->qkv.outputs));
        }
        Pool::instance().run(run.threads, shares, [&](int share) {
            const Run own{run.space.share(static_cast<std::size_t>(share)), 1};
            const std::int64_t first = tokens * share / shares;
            const std::int64_t rows = tokens * (share + 1) / shares - first;
            float* stream = x + first * hidden;
            if (before != nullptr) {
                const std::int64_t width = before->attention->heads * before->attention->head_dim;
                bring_out(own, *before->attention, mixed + first * width, rows, stream, stream);
                dense_block(own, *before->dense, stream, rows, stream, stream);
            }
            for (const Tap& tap : taps) {
                if (tap.layer == index) {
                    std::memcpy(tap.out + first * hidden, stream,
                                sizeof(float) * count_of(rows, hidden));
                }
            }
            if (next != nullptr) {
                const bool enters = index == 0 && entry != nullptr;
                const std::int64_t stride = enters ? entry_stride : hidden;
                const Projection all(*next->attention, cache, places, rope, index, own.space.path);
                project(own, all, (enters ? entry : x) + first * stride, stride, first, rows, qkv,
                        0, all.heads());
            }
        });
        if (next != nullptr) {
            const Attention& attention = *next->attention;
            float* to = scratch.mixed.take(count_of(tokens, attention.heads * attention.head_dim));
            look_back(run, attention, cache, index, places, qkv, to);
            mixed = to;
        }
    }
}

void Stack::run(const Run& run, const KVCache& cache, const Places& places, float* x,
                const float* entry, std::int64_t entry_stride, const std::vector<Tap>& taps,
                const Reads* reads) const {
    const auto count = static_cast<std::int64_t>(layers.size());
    const std::int64_t hidden = layers.front().attention->o.outputs;
    const bool spare = reads != nullptr && spares(*reads, places.tokens, taps);
    const std::int64_t whole = spare ? count - 1 : count;  // layers that all rows go through
    if (whole > 0 && apart(run, places.tokens)) {
        run_apart(whole, run, cache, places, x, entry, entry_stride, taps);
    } else {
        for (std::int64_t index = 0; index <= whole; ++index) {
            for (const Tap& tap : taps) {
                if (tap.layer == index) {
                    std::memcpy(tap.out, x, sizeof(float) * count_of(places.tokens, hidden));
                }
            }
            if (index < whole) {
                const bool enters = index == 0 && entry != nullptr;
                attend(index, run, cache, places, enters ? entry : x,
                       enters ? entry_stride : hidden, x, x);
                feed_forward(index, run, x, places.tokens, x, x);
            }
        }
    }
    if (spare) {
        const bool enters = whole == 0 && entry != nullptr;
        finish(run, cache, places, enters ? entry : x, enters ? entry_stride : hidden, x, *reads);
    }
}

// Whether leaving rows out of the last layer is worth making the others' integers twice.
bool Stack::spares(const Reads& reads, std::int64_t tokens, const std::vector<Tap>& taps) const {
    const auto count = static_cast<std::int64_t>(layers.size());
    const bool tapped = std::any_of(taps.begin(), taps.end(),
                                    [&](const Tap& tap) { return tap.layer == count; });
    return !tapped && 2 * reads.count <= tokens;
}

void Stack::finish(const Run& run, const KVCache& cache, const Places& places, const float* source,
                   std::int64_t source_stride, float* x, const Reads& reads) const {
    const auto index = static_cast<std::int64_t>(layers.size()) - 1;
    const Attention& attention = *layers.back().attention;
    const std::int64_t rows = reads.count, hidden = attention.o.outputs;
    const std::int64_t columns = attention.qkv.columns, width = attention.qkv.outputs;
    const Path path = run.space.path;
    Scratch& scratch = run.space.scratch;
    const Projection all(attention, cache, places, rope, index, path);
    float* qkv = scratch.projected.take(count_of(places.tokens, width));
    project(run, all, source, source_stride, 0, places.tokens, qkv, attention.heads, all.heads());
    if (rows == 0) {
        return;
    }
    float* entry = scratch.read_entry.take(count_of(rows, columns));
    float* stream = scratch.read_stream.take(count_of(rows, hidden));
    std::int64_t* seen = scratch.read_places.take(count_of(2, rows));
    for (std::int64_t row = 0; row < rows; ++row) {
        const std::int64_t token = reads.tokens[row];
        std::copy_n(source + token * source_stride, columns, entry + row * columns);
        std::copy_n(x + token * hidden, hidden, stream + row * hidden);
        seen[row] = places.positions[token];
        seen[rows + row] = places.table_start[token];
    }
    const Places own = {rows, seen, nullptr, places.tables, seen + rows, places.first_key};
    project(run, Projection(attention, cache, own, rope, index, path), entry, columns, 0, rows, qkv,
            0, attention.heads);
    float* mixed = scratch.mixed.take(count_of(rows, attention.heads * attention.head_dim));
    look_back(run, attention, cache, index, own, qkv, mixed);
    bring_out(run, attention, mixed, rows, stream, stream);
    feed_forward(index, run, stream, rows, stream, stream);
    for (std::int64_t row = 0; row < rows; ++row) {
        std::copy_n(stream + row * hidden, hidden, x + reads.tokens[row] * hidden);
    }
}

void Stack::decode(const Run& run, const KVCache& cache, const Places& places,
                   const std::int64_t* ids, const Dense& table, float* x,
                   const std::vector<Tap>& taps, const Logits& logits, const Reads* reads) const {
    table.take_rows(ids, places.tokens, x);
    this->run(run, cache, places, x, nullptr, 0, taps, reads);
    if (logits.count == 0) {
        return;
    }
    const std::int64_t hidden = logits.head->columns;
    const float* rows = x;
    if (logits.count < places.tokens) {
        float* gathered = run.space.scratch.gathered.take(count_of(logits.count, hidden));
        for (std::int64_t at = 0; at < logits.count; ++at) {
            std::memcpy(gathered + at * hidden, x + logits.rows[at] * hidden,
                        sizeof(float) * static_cast<std::size_t>(hidden));
        }
        rows = gathered;
    }
    linear(run, *logits.head, logits.norm, logits.eps, rows, logits.count, hidden, logits.out);
}

}  // namespace drumline
