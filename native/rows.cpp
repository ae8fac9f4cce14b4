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

DRUMLINE_INLINE float dot(const float* a, const float* b, std::int64_t width) {
    v8f total = splat(0.0F);
    std::int64_t i = 0;
    for (; i + lanes <= width; i += lanes) {
        total = total + load8(a + i) * load8(b + i);
    }
    float sum = sum8(total);
    for (; i < width; ++i) {
        sum = sum + a[i] * b[i];
    }
    return sum;
}

DRUMLINE_INLINE void add_scaled(float* to, const float* from, float weight, std::int64_t width) {
    std::int64_t i = 0;
    for (; i + lanes <= width; i += lanes) {
        store8(to + i, load8(to + i) + splat(weight) * load8(from + i));
    }
    for (; i < width; ++i) {
        to[i] = to[i] + weight * from[i];
    }
}

// How keys and values are stored. Reads are exact; writes round once, to nearest even, and keep
// finite numbers only: blocks go from one request to the next, and 0 * infinity is no 0.
struct F32Cell {
    using type = float;
    static DRUMLINE_INLINE float finite(float value) {
        const float most = std::numeric_limits<float>::max();
        return value == value ? std::min(std::max(value, -most), most) : 0.0F;
    }
    static DRUMLINE_INLINE type pack(float value) { return finite(value); }
    static DRUMLINE_INLINE const float* row(const type* from, std::int64_t, float*) { return from; }
};

struct F16Cell {
    using type = _Float16;
    static DRUMLINE_INLINE type pack(float value) {
        const float most = 65504.0F;
        return static_cast<type>(std::min(std::max(F32Cell::finite(value), -most), most));
    }
    static DRUMLINE_INLINE const float* row(const type* from, std::int64_t width, float* buffer) {
        for (std::int64_t i = 0; i < width; ++i) {
            buffer[i] = static_cast<float>(from[i]);
        }
        return buffer;
    }
};

struct BF16Cell {
    using type = std::uint16_t;
    static DRUMLINE_INLINE type pack(float value) {
        const float bounded = F32Cell::finite(value);
        std::uint32_t bits = 0;
        std::memcpy(&bits, &bounded, sizeof bits);
        const std::uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
        // Rounding up may have reached infinity: the largest finite number instead.
        return static_cast<type>((rounded & 0x7FFFU) == 0x7F80U ? rounded - 1 : rounded);
    }
    static DRUMLINE_INLINE const float* row(const type* from, std::int64_t width, float* buffer) {
        for (std::int64_t i = 0; i < width; ++i) {
            const std::uint32_t bits = static_cast<std::uint32_t>(from[i]) << 16;
            std::memcpy(buffer + i, &bits, sizeof bits);
        }
        return buffer;
    }
};

struct Scratch {
    std::vector<float> scores;  // [group, keys]
    std::vector<float> row;     // [head_dim]
};

// Where the key or value of a position lies in one layer's cache, in numbers.
DRUMLINE_INLINE std::int64_t cell(const AttentionJob& job, const std::int64_t* table,
                                  std::int64_t kv_head, std::int64_t position) {
    const std::int64_t block = table[position / job.block_size];
    const std::int64_t line = (block * job.kv_heads + kv_head) * job.block_size;
    return (line + position % job.block_size) * job.head_dim;
}

// In place over count scores, of which the rest up to padded is filled up: softmax.
DRUMLINE_INLINE void softmax(float* row, std::int64_t count, std::int64_t padded) {
    float peak = row[0];
    for (std::int64_t k = 1; k < count; ++k) {
        peak = row[k] > peak ? row[k] : peak;
    }
    std::fill(row + count, row + padded, -std::numeric_limits<float>::infinity());
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

// One token and one key/value head: the query heads that share it, over all keys.
template <typename Cell>
DRUMLINE_INLINE void attend(const AttentionJob& job, std::int64_t token, std::int64_t kv_head,
                            Scratch& scratch) {
    const auto* keys = static_cast<const typename Cell::type*>(job.keys);
    const auto* values = static_cast<const typename Cell::type*>(job.values);
    const std::int64_t group = job.heads / job.kv_heads, dim = job.head_dim;
    const std::int64_t last = job.positions[token];
    const std::int64_t first = std::min(job.first_key, last);
    const std::int64_t count = last + 1 - first;
    const std::int64_t padded = (count + lanes - 1) / lanes * lanes;
    scratch.scores.resize(static_cast<std::size_t>(group * padded));
    scratch.row.resize(static_cast<std::size_t>(dim));
    float* scores = scratch.scores.data();
    const std::int64_t* table = job.tables + job.table_start[token];
    const float* query = job.query + (token * job.heads + kv_head * group) * dim;
    float* out = job.out + (token * job.heads + kv_head * group) * dim;

    for (std::int64_t k = 0; k < count; ++k) {
        const float* key =
            Cell::row(keys + cell(job, table, kv_head, first + k), dim, scratch.row.data());
        for (std::int64_t g = 0; g < group; ++g) {
            scores[g * padded + k] = job.scale * dot(query + g * dim, key, dim);
        }
    }
    for (std::int64_t g = 0; g < group; ++g) {
        softmax(scores + g * padded, count, padded);
    }
    std::fill(out, out + group * dim, 0.0F);
    for (std::int64_t k = 0; k < count; ++k) {
        const float* value =
            Cell::row(values + cell(job, table, kv_head, first + k), dim, scratch.row.data());
        for (std::int64_t g = 0; g < group; ++g) {
            add_scaled(out + g * dim, value, scores[g * padded + k], dim);
        }
    }
}

template <typename Cell>
DRUMLINE_INLINE void write(const AttentionJob& job) {
    auto* keys = static_cast<typename Cell::type*>(job.keys);
    auto* values = static_cast<typename Cell::type*>(job.values);
    const std::int64_t dim = job.head_dim, size = job.block_size;
    for (std::int64_t t = 0; t < job.tokens; ++t) {
        const std::int64_t slot = job.slots[t];
        for (std::int64_t h = 0; slot >= 0 && h < job.kv_heads; ++h) {
            const std::int64_t at = ((slot / size * job.kv_heads + h) * size + slot % size) * dim;
            for (std::int64_t i = 0; i < dim; ++i) {
                keys[at + i] = Cell::pack(job.key[t * job.key_stride + h * dim + i]);
                values[at + i] = Cell::pack(job.value[t * job.value_stride + h * dim + i]);
            }
        }
    }
}

template <typename Cell>
DRUMLINE_INLINE void attend_range(const AttentionJob& job, std::int64_t begin, std::int64_t end) {
    Scratch scratch;
    for (std::int64_t item = begin; item < end; ++item) {
        attend<Cell>(job, item / job.kv_heads, item % job.kv_heads, scratch);
    }
}

DRUMLINE_INLINE void attend_items(const AttentionJob& job, std::int64_t begin, std::int64_t end) {
    switch (job.kv_type) {
        case KVType::f32:
            return attend_range<F32Cell>(job, begin, end);
        case KVType::f16:
            return attend_range<F16Cell>(job, begin, end);
        case KVType::bf16:
            return attend_range<BF16Cell>(job, begin, end);
    }
}

DRUMLINE_INLINE void write_cells(const AttentionJob& job) {
    switch (job.kv_type) {
        case KVType::f32:
            return write<F32Cell>(job);
        case KVType::f16:
            return write<F16Cell>(job);
        case KVType::bf16:
            return write<BF16Cell>(job);
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

void attention(const AttentionJob& job, int threads, Path path) {
    (path == Path::portable ? write_plain : write_avx2)(job);
    const auto kernel = path == Path::portable ? attend_plain : attend_avx2;
    const std::int64_t items = job.tokens * job.kv_heads;
    // A handful of parts per thread: contexts differ in length, and late threads get less.
    const int parts = static_cast<int>(std::min<std::int64_t>(items, threads > 1 ? 8 * threads : 1));
    Pool::instance().run(threads, parts, [&](int part) {
        kernel(job, items * part / parts, items * (part + 1) / parts);
    });
}

}  // namespace drumline
