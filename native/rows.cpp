#include "rows.hpp"

#include <algorithm>
#include <limits>
#include <vector>

#include "pool.hpp"
#include "vec.hpp"

#if defined(__x86_64__)
#define DRUMLINE_AVX2 __attribute__((target("avx2,fma,f16c")))
#else
#define DRUMLINE_AVX2
#endif

namespace drumline {
namespace {

DRUMLINE_INLINE void rms_norm_rows(const float* x, std::int64_t rows, std::int64_t width,
                                   std::int64_t stride, const float* weight, float eps,
                                   float* out) {
    for (std::int64_t r = 0; r < rows; ++r, x += stride, out += width) {
        v8f squares = splat(0.0F);
        std::int64_t i = 0;
        for (; i + lanes <= width; i += lanes) {
            const v8f part = load8(x + i);
            squares = squares + part * part;
        }
        float sum = sum8(squares);
        for (std::int64_t k = i; k < width; ++k) {
            sum = sum + x[k] * x[k];
        }
        const float inverse = 1.0F / std::sqrt(sum / static_cast<float>(width) + eps);
        for (i = 0; i + lanes <= width; i += lanes) {
            store8(out + i, load8(x + i) * splat(inverse) * load8(weight + i));
        }
        for (; i < width; ++i) {
            out[i] = x[i] * inverse * weight[i];
        }
    }
}

DRUMLINE_INLINE void silu_row(const float* x, std::int64_t width, float* out) {
    const float* up = x + width;
    std::int64_t i = 0;
    for (; i + lanes <= width; i += lanes) {
        const v8f gate = load8(x + i);
        store8(out + i, gate / (splat(1.0F) + exp8(-gate)) * load8(up + i));
    }
    for (; i < width; ++i) {
        out[i] = x[i] / (1.0F + exp1(-x[i])) * up[i];
    }
}

DRUMLINE_INLINE void rope_rows(const float* x, std::int64_t tokens, std::int64_t heads,
                               std::int64_t head_dim, std::int64_t stride,
                               const std::int64_t* positions, const float* cos, const float* sin,
                               std::int64_t half, float* out) {
    for (std::int64_t t = 0; t < tokens; ++t) {
        const float* c = cos + positions[t] * half;
        const float* s = sin + positions[t] * half;
        for (std::int64_t h = 0; h < heads; ++h, out += head_dim) {
            const float* low = x + t * stride + h * head_dim;
            const float* high = low + half;
            std::int64_t i = 0;
            for (; i + lanes <= half; i += lanes) {
                const v8f a = load8(low + i), b = load8(high + i);
                const v8f cv = load8(c + i), sv = load8(s + i);
                store8(out + i, a * cv - b * sv);
                store8(out + half + i, b * cv + a * sv);
            }
            for (; i < half; ++i) {
                out[i] = low[i] * c[i] - high[i] * s[i];
                out[half + i] = high[i] * c[i] + low[i] * s[i];
            }
            std::copy(low + 2 * half, low + head_dim, out + 2 * half);
        }
    }
}

// How keys and values are stored. Reads are exact; writes round once, to nearest even, and keep
// finite numbers only: blocks go from one request to the next, and 0 * infinity is no 0.
DRUMLINE_INLINE float finite(float value) {
    const float most = std::numeric_limits<float>::max();
    return value == value ? std::min(std::max(value, -most), most) : 0.0F;
}

DRUMLINE_INLINE void pack(float* to, float value) { *to = finite(value); }

DRUMLINE_INLINE void pack(_Float16* to, float value) {
    const float most = 65504.0F;
    *to = static_cast<_Float16>(std::min(std::max(finite(value), -most), most));
}

DRUMLINE_INLINE void pack(std::uint16_t* to, float value) {
    const float bounded = finite(value);
    std::uint32_t bits = 0;
    std::memcpy(&bits, &bounded, sizeof bits);
    const std::uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
    // Rounding up may have reached infinity: the largest finite number instead.
    *to = static_cast<std::uint16_t>((rounded & 0x7FFFU) == 0x7F80U ? rounded - 1 : rounded);
}

template <typename Cell>
DRUMLINE_INLINE void write(const AttentionJob& job) {
    auto* keys = static_cast<Cell*>(job.keys);
    auto* values = static_cast<Cell*>(job.values);
    const std::int64_t dim = job.head_dim, size = job.block_size;
    for (std::int64_t t = 0; t < job.tokens; ++t) {
        const std::int64_t slot = job.slots[t];
        for (std::int64_t h = 0; slot >= 0 && h < job.kv_heads; ++h) {
            const std::int64_t line = (slot / size * job.kv_heads + h) * size * dim;
            const float* key = job.key + t * job.key_stride + h * dim;
            const float* value = job.value + t * job.value_stride + h * dim;
            for (std::int64_t i = 0; i < dim; ++i) {
                pack(keys + line + i * size + slot % size, key[i]);
                pack(values + line + slot % size * dim + i, value[i]);
            }
        }
    }
}

// In place over `padded` scores, some of them -infinity: softmax.
DRUMLINE_INLINE void softmax(float* row, std::int64_t padded) {
    v8f peaks = load8(row);
    for (std::int64_t k = lanes; k < padded; k += lanes) {
        const v8f part = load8(row + k);
        peaks = part > peaks ? part : peaks;
    }
    float peak = peaks[0];
    for (int lane = 1; lane < lanes; ++lane) {
        peak = peaks[lane] > peak ? peaks[lane] : peak;
    }
    v8f totals = splat(0.0F);
    for (std::int64_t k = 0; k < padded; k += lanes) {
        const v8f weight = exp8(load8(row + k) - splat(peak));
        store8(row + k, weight);
        totals = totals + weight;
    }
    const float inverse = 1.0F / sum8(totals);
    for (std::int64_t k = 0; k < padded; k += lanes) {
        store8(row + k, load8(row + k) * splat(inverse));
    }
}

// The keys one query head may see: whole blocks from `begin`, of which positions first .. last
// count.
struct Span {
    std::int64_t begin, first, last, padded;
};

// Scores of H query heads with V * 8 neighbouring keys of one block.
template <int H, int V, typename Cell>
DRUMLINE_INLINE void score_lanes(const AttentionJob& job, const Cell* keys, const float* query,
                                 const Span& span, float* row) {
    const std::int64_t dim = job.head_dim, size = job.block_size;
    v8f total[H][V];
    for (int h = 0; h < H; ++h) {
        for (int v = 0; v < V; ++v) {
            total[h][v] = splat(0.0F);
        }
    }
    for (std::int64_t i = 0; i < dim; ++i) {
        v8f key[V];
        for (int v = 0; v < V; ++v) {
            key[v] = load8(keys + i * size + v * lanes);
        }
        for (int h = 0; h < H; ++h) {
            const v8f channel = splat(query[h * dim + i]);
            for (int v = 0; v < V; ++v) {
                total[h][v] = total[h][v] + channel * key[v];
            }
        }
    }
    for (int h = 0; h < H; ++h) {
        for (int v = 0; v < V; ++v) {
            store8(row + h * span.padded + v * lanes, total[h][v] * splat(job.scale));
        }
    }
}

// Scores of H query heads with all keys of the span; channels are added in ascending order in a
// vector lane as in the scalar rest, so a key's score does not depend on where it lies.
template <int H, typename Cell>
DRUMLINE_INLINE void score(const AttentionJob& job, const Cell* keys, const std::int64_t* table,
                           std::int64_t kv_head, const float* query, const Span& span,
                           float* scores) {
    const std::int64_t dim = job.head_dim, size = job.block_size;
    for (std::int64_t p = span.begin; p <= span.last; p += size) {
        const Cell* block = keys + (table[p / size] * job.kv_heads + kv_head) * size * dim;
        float* row = scores + (p - span.begin);
        std::int64_t at = 0;
        for (; at + 2 * lanes <= size; at += 2 * lanes) {
            score_lanes<H, 2>(job, block + at, query, span, row + at);
        }
        for (; at + lanes <= size; at += lanes) {
            score_lanes<H, 1>(job, block + at, query, span, row + at);
        }
        for (; at < size; ++at) {
            for (int h = 0; h < H; ++h) {
                float total = 0.0F;
                for (std::int64_t i = 0; i < dim; ++i) {
                    total = total + query[h * dim + i] * load1(block + i * size + at);
                }
                row[h * span.padded + at] = total * job.scale;
            }
        }
    }
}

// The weighted sum of V * 8 channels of the values for H query heads, positions in order.
template <int H, int V, typename Cell>
DRUMLINE_INLINE void mix_lanes(const AttentionJob& job, const Cell* values,
                               const std::int64_t* table, std::int64_t kv_head,
                               const float* weights, const Span& span, float* out) {
    const std::int64_t dim = job.head_dim, size = job.block_size;
    v8f total[H][V];
    for (int h = 0; h < H; ++h) {
        for (int v = 0; v < V; ++v) {
            total[h][v] = splat(0.0F);
        }
    }
    for (std::int64_t p = span.first; p <= span.last;) {
        const std::int64_t end = std::min(span.last + 1, (p / size + 1) * size);
        const Cell* row = values + ((table[p / size] * job.kv_heads + kv_head) * size + p % size) * dim;
        for (; p < end; ++p, row += dim) {
            v8f value[V];
            for (int v = 0; v < V; ++v) {
                value[v] = load8(row + v * lanes);
            }
            for (int h = 0; h < H; ++h) {
                const v8f weight = splat(weights[h * span.padded + p - span.begin]);
                for (int v = 0; v < V; ++v) {
                    total[h][v] = total[h][v] + weight * value[v];
                }
            }
        }
    }
    for (int h = 0; h < H; ++h) {
        for (int v = 0; v < V; ++v) {
            store8(out + h * dim + v * lanes, total[h][v]);
        }
    }
}

template <int H, typename Cell>
DRUMLINE_INLINE void mix(const AttentionJob& job, const Cell* values, const std::int64_t* table,
                         std::int64_t kv_head, const float* weights, const Span& span, float* out) {
    const std::int64_t dim = job.head_dim, size = job.block_size;
    constexpr int wide = H <= 3 ? 4 : 2;  // as many sums as there are registers for
    std::int64_t i = 0;
    for (; i + wide * lanes <= dim; i += wide * lanes) {
        mix_lanes<H, wide>(job, values + i, table, kv_head, weights, span, out + i);
    }
    for (; i + lanes <= dim; i += lanes) {
        mix_lanes<H, 1>(job, values + i, table, kv_head, weights, span, out + i);
    }
    for (; i < dim; ++i) {
        for (int h = 0; h < H; ++h) {
            float total = 0.0F;
            for (std::int64_t p = span.first; p <= span.last; ++p) {
                const Cell* block = values + (table[p / size] * job.kv_heads + kv_head) * size * dim;
                const float weight = weights[h * span.padded + p - span.begin];
                total = total + weight * load1(block + p % size * dim + i);
            }
            out[h * dim + i] = total;
        }
    }
}

template <int H, typename Cell>
DRUMLINE_INLINE void attend_heads(const AttentionJob& job, std::int64_t token, std::int64_t kv_head,
                                  std::int64_t head, const Span& span, std::vector<float>& scores) {
    scores.resize(static_cast<std::size_t>(H * span.padded));
    const std::int64_t* table = job.tables + job.table_start[token];
    const std::int64_t at = (token * job.heads + head) * job.head_dim;
    score<H>(job, static_cast<const Cell*>(job.keys), table, kv_head, job.query + at, span,
             scores.data());
    for (int h = 0; h < H; ++h) {
        float* row = scores.data() + h * span.padded;
        std::fill(row, row + (span.first - span.begin), -std::numeric_limits<float>::infinity());
        std::fill(row + (span.last + 1 - span.begin), row + span.padded,
                  -std::numeric_limits<float>::infinity());
        softmax(row, span.padded);
    }
    mix<H>(job, static_cast<const Cell*>(job.values), table, kv_head, scores.data(), span,
           job.out + at);
}

// One token and one key/value head: the query heads that share it, up to 4 at a time.
template <typename Cell>
DRUMLINE_INLINE void attend(const AttentionJob& job, std::int64_t token, std::int64_t kv_head,
                            std::vector<float>& scores) {
    const std::int64_t group = job.heads / job.kv_heads, size = job.block_size;
    Span span;
    span.last = job.positions[token];
    span.first = std::min(job.first_key, span.last);
    span.begin = span.first / size * size;
    const std::int64_t covered = (span.last / size + 1) * size - span.begin;
    span.padded = (covered + lanes - 1) / lanes * lanes;
    for (std::int64_t g = 0; g < group;) {
        const std::int64_t head = kv_head * group + g;
        switch (std::min<std::int64_t>(4, group - g)) {
            case 4:
                attend_heads<4, Cell>(job, token, kv_head, head, span, scores);
                g += 4;
                break;
            case 3:
                attend_heads<3, Cell>(job, token, kv_head, head, span, scores);
                g += 3;
                break;
            case 2:
                attend_heads<2, Cell>(job, token, kv_head, head, span, scores);
                g += 2;
                break;
            default:
                attend_heads<1, Cell>(job, token, kv_head, head, span, scores);
                g += 1;
        }
    }
}

template <typename Cell>
DRUMLINE_INLINE void attend_range(const AttentionJob& job, std::int64_t begin, std::int64_t end) {
    std::vector<float> scores;
    for (std::int64_t item = begin; item < end; ++item) {
        attend<Cell>(job, item / job.kv_heads, item % job.kv_heads, scores);
    }
}

DRUMLINE_INLINE void attend_items(const AttentionJob& job, std::int64_t begin, std::int64_t end) {
    switch (job.kv_type) {
        case KVType::f32:
            return attend_range<float>(job, begin, end);
        case KVType::f16:
            return attend_range<_Float16>(job, begin, end);
        case KVType::bf16:
            return attend_range<std::uint16_t>(job, begin, end);
    }
}

DRUMLINE_INLINE void write_cells(const AttentionJob& job) {
    switch (job.kv_type) {
        case KVType::f32:
            return write<float>(job);
        case KVType::f16:
            return write<_Float16>(job);
        case KVType::bf16:
            return write<std::uint16_t>(job);
    }
}

void rms_norm_plain(const float* x, std::int64_t rows, std::int64_t width, std::int64_t stride,
                    const float* weight, float eps, float* out) {
    rms_norm_rows(x, rows, width, stride, weight, eps, out);
}

DRUMLINE_AVX2 void rms_norm_avx2(const float* x, std::int64_t rows, std::int64_t width,
                                 std::int64_t stride, const float* weight, float eps, float* out) {
    rms_norm_rows(x, rows, width, stride, weight, eps, out);
}

void silu_plain(const float* x, std::int64_t width, float* out) { silu_row(x, width, out); }

DRUMLINE_AVX2 void silu_avx2(const float* x, std::int64_t width, float* out) {
    silu_row(x, width, out);
}

void rope_plain(const float* x, std::int64_t tokens, std::int64_t heads, std::int64_t head_dim,
                std::int64_t stride, const std::int64_t* positions, const float* cos,
                const float* sin, std::int64_t half, float* out) {
    rope_rows(x, tokens, heads, head_dim, stride, positions, cos, sin, half, out);
}

DRUMLINE_AVX2 void rope_avx2(const float* x, std::int64_t tokens, std::int64_t heads,
                             std::int64_t head_dim, std::int64_t stride,
                             const std::int64_t* positions, const float* cos, const float* sin,
                             std::int64_t half, float* out) {
    rope_rows(x, tokens, heads, head_dim, stride, positions, cos, sin, half, out);
}

void attend_plain(const AttentionJob& job, std::int64_t begin, std::int64_t end) {
    attend_items(job, begin, end);
}

DRUMLINE_AVX2 void attend_avx2(const AttentionJob& job, std::int64_t begin, std::int64_t end) {
    attend_items(job, begin, end);
}

void write_plain(const AttentionJob& job) { write_cells(job); }

DRUMLINE_AVX2 void write_avx2(const AttentionJob& job) { write_cells(job); }

}  // namespace

void rms_norm(const float* x, std::int64_t rows, std::int64_t width, std::int64_t stride,
              const float* weight, float eps, float* out, Path path) {
    const auto kernel = path == Path::portable ? rms_norm_plain : rms_norm_avx2;
    kernel(x, rows, width, stride, weight, eps, out);
}

void silu_and_mul(const float* x, std::int64_t rows, std::int64_t width, float* out, int threads,
                  Path path) {
    const auto kernel = path == Path::portable ? silu_plain : silu_avx2;
    const int parts = rows >= 4 ? threads : 1;
    const std::int64_t share = (rows + parts - 1) / parts;
    Pool::instance().run(threads, parts, [&](int part) {
        const std::int64_t end = std::min(rows, (part + 1) * share);
        for (std::int64_t r = part * share; r < end; ++r) {
            kernel(x + r * 2 * width, width, out + r * width);
        }
    });
}

void rope(const float* x, std::int64_t tokens, std::int64_t heads, std::int64_t head_dim,
          std::int64_t stride, const std::int64_t* positions, const float* cos, const float* sin,
          std::int64_t half, float* out, Path path) {
    const auto kernel = path == Path::portable ? rope_plain : rope_avx2;
    kernel(x, tokens, heads, head_dim, stride, positions, cos, sin, half, out);
}

void write_kv(const AttentionJob& job, Path path) {
    (path == Path::portable ? write_plain : write_avx2)(job);
}

void attention(const AttentionJob& job, int threads, Path path) {
    write_kv(job, path);
    const auto kernel = path == Path::portable ? attend_plain : attend_avx2;
    const std::int64_t items = job.tokens * job.kv_heads;
    // A handful of parts per thread: contexts differ in length, and late threads get less.
    const int parts = static_cast<int>(std::min<std::int64_t>(items, threads > 1 ? 8 * threads : 1));
    Pool::instance().run(threads, parts, [&](int part) {
        kernel(job, items * part / parts, items * (part + 1) / parts);
    });
}

}  // namespace drumline
