// Linear kernels in plain C++: the slow twin of every vector path, and the path of processors that
// have none. Products and sums are rounded one by one (the file is built without contraction).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "linear_kernels.hpp"

namespace drumline::portable {
namespace {

constexpr int rows_per_tile = 4;

float half_at(const std::uint8_t* at) {
    std::uint16_t value = 0;
    std::memcpy(&value, at, sizeof value);
    return half_to_float(value);
}

// The integers of one block of 16 outputs, output by output.
struct Quanta {
    std::int16_t of[group_outputs][block_columns];
};

void nibbles(const std::uint8_t* lines, Quanta& w) {
    for (int v = 0; v < 4; ++v) {
        for (int o = 0; o < group_outputs; ++o) {
            for (int i = 0; i < 4; ++i) {
                const std::uint8_t byte = lines[v * line_bytes + o * 4 + i];
                w.of[o][8 * v + i] = byte & 15;
                w.of[o][8 * v + 4 + i] = byte >> 4;
            }
        }
    }
}

// What a kind needs to know: its quanta, and the scale d and minimum m of output o in block b.
struct Q4_0 {
    static constexpr WeightKind kind = WeightKind::q4_0;
    static constexpr int halves = 1;
    static constexpr bool minimum = false;
    static void quanta(const std::uint8_t* at, Quanta& w) { nibbles(at, w); }
    static float d(const std::uint8_t* scales, std::int64_t at, int, int o) {
        return half_at(scales + 32 * at + 2 * o);
    }
    static float m(const std::uint8_t*, std::int64_t, int) { return 0; }
};

struct Q4_1 : Q4_0 {
    static constexpr WeightKind kind = WeightKind::q4_1;
    static constexpr bool minimum = true;
    static float d(const std::uint8_t* scales, std::int64_t, int, int o) {
        return half_at(scales + 2 * o);
    }
    static float m(const std::uint8_t* scales, std::int64_t, int o) {
        return half_at(scales + 32 + 2 * o);
    }
};

struct Q4_K : Q4_0 {
    static constexpr WeightKind kind = WeightKind::q4_k;
    static constexpr bool minimum = true;
    static float d(const std::uint8_t* scales, std::int64_t at, int, int o) {
        return half_at(scales + 2 * o) * static_cast<float>(scales[64 + 32 * at + o]);
    }
    static float m(const std::uint8_t* scales, std::int64_t at, int o) {
        return half_at(scales + 32 + 2 * o) * static_cast<float>(scales[80 + 32 * at + o]);
    }
};

struct Q8_0 : Q4_0 {
    static constexpr WeightKind kind = WeightKind::q8_0;
    static void quanta(const std::uint8_t* at, Quanta& w) {
        for (int g = 0; g < 8; ++g) {
            for (int o = 0; o < group_outputs; ++o) {
                for (int i = 0; i < 4; ++i) {
                    w.of[o][4 * g + i] = at[g * line_bytes + o * 4 + i];
                }
            }
        }
    }
};

struct Q6_K : Q4_0 {
    static constexpr WeightKind kind = WeightKind::q6_k;
    static constexpr int halves = 2;
    static void quanta(const std::uint8_t* at, Quanta& w) {
        nibbles(at, w);
        for (int g = 0; g < 8; ++g) {
            for (int o = 0; o < group_outputs; ++o) {
                for (int i = 0; i < 4; ++i) {
                    const int byte = at[(4 + g / 4) * line_bytes + o * 4 + i];
                    w.of[o][4 * g + i] = static_cast<std::int16_t>(
                        w.of[o][4 * g + i] | (((byte >> (2 * (g % 4))) & 3) << 4));
                }
            }
        }
    }
    static float d(const std::uint8_t* scales, std::int64_t at, int half, int o) {
        const auto s = static_cast<std::int8_t>(scales[64 + 16 * (2 * at + half) + o]);
        return half_at(scales + 2 * o) * static_cast<float>(s);
    }
};

std::int32_t dot(const std::int16_t* w, const std::int16_t* x, int count) {
    std::int32_t sum = 0;
    for (int i = 0; i < count; ++i) {
        sum += static_cast<std::int32_t>(w[i]) * static_cast<std::int32_t>(x[i]);
    }
    return sum;
}

template <typename Kind, int R>
void tile(const TileJob& job) {
    constexpr PackedLayout packed = packed_layout(Kind::kind);
    constexpr int width = block_columns / Kind::halves;
    float total[R][group_outputs] = {};
    for (std::int64_t b = 0; b < job.columns / block_columns; ++b) {
        Quanta w;
        Kind::quanta(job.weights + packed.quanta(b), w);
        const std::uint8_t* scales = job.weights + packed.unit(b);
        const std::int64_t at = b % packed.unit_blocks;
        for (int r = 0; r < R; ++r) {
            std::int16_t x[block_columns];
            std::memcpy(x, job.q + (b * R + r) * sizeof x, sizeof x);
            const float scale = job.scale[b * R + r];
            for (int h = 0; h < Kind::halves; ++h) {
                const std::int32_t offset = job.offset[(b * Kind::halves + h) * R + r];
                for (int o = 0; o < group_outputs; ++o) {
                    const std::int32_t sum = dot(w.of[o] + h * width, x + h * width, width) + offset;
                    const float d = Kind::d(scales, at, h, o) * scale;
                    total[r][o] = total[r][o] + static_cast<float>(sum) * d;
                }
            }
            for (int o = 0; Kind::minimum && o < group_outputs; ++o) {
                total[r][o] =
                    total[r][o] + Kind::m(scales, at, o) * job.scaled_sum[b * R + r];
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        std::memcpy(job.out + r * job.out_stride, total[r], sizeof(float) * job.outputs);
    }
}

struct F32 {
    static constexpr std::size_t bytes = 4;
    static float load(const std::uint8_t* at) {
        float value = 0;
        std::memcpy(&value, at, sizeof value);
        return value;
    }
};

struct F16 {
    static constexpr std::size_t bytes = 2;
    static float load(const std::uint8_t* at) { return half_at(at); }
};

struct BF16 {
    static constexpr std::size_t bytes = 2;
    static float load(const std::uint8_t* at) {
        std::uint16_t half = 0;
        std::memcpy(&half, at, sizeof half);
        const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
        float value = 0;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
};

template <typename Weight, int R>
void dense_tile(const TileJob& job) {
    float total[R][group_outputs] = {};
    for (std::int64_t k = 0; k < job.columns; ++k) {
        const std::uint8_t* w = job.weights + k * group_outputs * Weight::bytes;
        for (int o = 0; o < group_outputs; ++o) {
            const float weight = Weight::load(w + o * Weight::bytes);
            for (int r = 0; r < R; ++r) {
                total[r][o] = total[r][o] + job.x[r * job.x_stride + k] * weight;
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        std::memcpy(job.out + r * job.out_stride, total[r], sizeof(float) * job.outputs);
    }
}

template <typename Kind>
Kernels integers(bool fine) {
    const ActivationLayout layout{rows_per_tile, Numbers::words, fine, packed_layout(Kind::kind).zero,
                                  Kind::halves};
    return {layout, {tile<Kind, 1>, tile<Kind, 2>, tile<Kind, 3>, tile<Kind, 4>}};
}

template <typename Weight>
Kernels floats() {
    const ActivationLayout layout{rows_per_tile, Numbers::none, false, 0, 1};
    return {layout,
            {dense_tile<Weight, 1>, dense_tile<Weight, 2>, dense_tile<Weight, 3>,
             dense_tile<Weight, 4>}};
}

}  // namespace

Kernels kernels(WeightKind kind, bool fine) {
    switch (kind) {
        case WeightKind::q4_0:
            return integers<Q4_0>(fine);
        case WeightKind::q4_1:
            return integers<Q4_1>(fine);
        case WeightKind::q8_0:
            return integers<Q8_0>(fine);
        case WeightKind::q4_k:
            return integers<Q4_K>(fine);
        case WeightKind::q6_k:
            return integers<Q6_K>(fine);
        case WeightKind::f32:
            return floats<F32>();
        case WeightKind::f16:
            return floats<F16>();
        case WeightKind::bf16:
            return floats<BF16>();
    }
    return {};
}

void quantize_blocks(const float* x, std::int64_t row, std::int64_t begin,
                     std::int64_t end, Activations& to) {
    const ActivationLayout& layout = to.layout;
    const RowPlace place(to, layout, row);
    x += begin * block_columns;
    const int width = block_columns / layout.halves;
    for (std::int64_t b = begin; b < end; ++b, x += block_columns) {
        const std::int64_t at = place.block(b);
        // Compared as bits: infinity and what is no number are the largest.
        std::int32_t largest = 0, others = 0;
        for (int line = 0; line < block_lines; ++line) {
            std::int32_t peak = 0;
            for (int i = 0; i < line_columns; ++i) {
                std::int32_t bits = 0;
                std::memcpy(&bits, x + line * line_columns + i, sizeof bits);
                bits &= 0x7FFFFFFF;
                peak = bits > peak ? bits : peak;
            }
            others = std::max(others, std::min(peak, largest));
            largest = std::max(largest, peak);
        }
        float magnitudes[2];
        std::memcpy(&magnitudes[0], &largest, sizeof largest);
        std::memcpy(&magnitudes[1], &others, sizeof others);
        const BlockScale block(magnitudes[0], magnitudes[1], layout.fine);
        std::int16_t q[block_columns] = {};
        for (int i = 0; block.some && i < block_columns; ++i) {
            q[i] = static_cast<std::int16_t>(std::nearbyint(x[i] * block.inverse));
        }
        std::memcpy(to.q.data() + at * static_cast<std::int64_t>(sizeof q), q, sizeof q);
        std::int32_t sum = 0;
        for (int h = 0; h < layout.halves; ++h) {
            std::int32_t part = 0;
            for (int i = 0; i < width; ++i) {
                part += q[h * width + i];
            }
            to.offset[place.half(b, h, layout.halves, row % layout.tile)] = -layout.zero * part;
            sum += part;
        }
        to.scale[at] = block.scale;
        to.scaled_sum[at] = block.scale * static_cast<float>(sum);
    }
}

}  // namespace drumline::portable
