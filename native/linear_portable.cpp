// Linear kernels in plain C++: the slow twin of every vector path, and the path of processors that
// have none. Products and sums are rounded one by one (the file is built without contraction).
#include <cmath>
#include <cstring>

#include "linear_kernels.hpp"

namespace drumline::portable {

void quantize_row(const float* x, std::int64_t columns, QuantizedRows& rows, std::int64_t row) {
    const std::int64_t blocks = columns / block_columns;
    for (std::int64_t b = 0; b < blocks; ++b) {
        const float* from = x + b * block_columns;
        float largest = 0;
        for (int i = 0; i < block_columns; ++i) {
            largest = std::fmax(largest, std::fabs(from[i]));
        }
        const float scale = largest / 127.0F;
        const float inverse = largest > 0 ? 127.0F / largest : 0.0F;
        std::int32_t sum = 0;
        std::int8_t* to = rows.q.data() + row * columns + b * block_columns;
        for (int i = 0; i < block_columns; ++i) {
            const float rounded = std::nearbyint(from[i] * inverse);
            // Not a number stays out of the integers; it comes back through the scale.
            const float bounded = std::fmin(std::fmax(rounded, -127.0F), 127.0F);
            to[i] = static_cast<std::int8_t>(bounded);
            sum += to[i];
        }
        const std::int64_t at = row * blocks + b;
        rows.scale[at] = scale;
        rows.sum[at] = sum;
        rows.scaled_sum[at] = scale * static_cast<float>(sum);
    }
}

void q4(const GroupJob& job) {
    const std::int64_t blocks = job.columns / block_columns;
    for (std::int64_t r = 0; r < job.rows; ++r) {
        const std::int8_t* q = job.quantized->q.data() + r * job.columns;
        const float* scale = job.quantized->scale.data() + r * blocks;
        const float* scaled_sum = job.quantized->scaled_sum.data() + r * blocks;
        float total[group_outputs] = {};
        for (std::int64_t b = 0; b < blocks; ++b) {
            const std::uint8_t* block = job.weights + b * q4_block_bytes;
            const std::int8_t* xb = q + b * block_columns;
            for (int o = 0; o < group_outputs; ++o) {
                std::int32_t dot = 0;
                for (int v = 0; v < 4; ++v) {
                    for (int i = 0; i < 4; ++i) {
                        const std::uint8_t byte = block[32 + v * 32 + o * 4 + i];
                        dot += (byte & 15) * xb[8 * v + i] + (byte >> 4) * xb[8 * v + 4 + i];
                    }
                }
                const float d = load_half(block + 2 * o);
                const float m = load_half(block + 16 + 2 * o);
                total[o] = total[o] + static_cast<float>(dot) * (d * scale[b]);
                total[o] = total[o] + m * scaled_sum[b];
            }
        }
        std::memcpy(job.out + r * job.out_stride, total, sizeof(float) * job.outputs);
    }
}

void q8(const GroupJob& job) {
    const std::int64_t blocks = job.columns / block_columns;
    for (std::int64_t r = 0; r < job.rows; ++r) {
        const std::int8_t* q = job.quantized->q.data() + r * job.columns;
        const float* scale = job.quantized->scale.data() + r * blocks;
        float total[group_outputs] = {};
        for (std::int64_t b = 0; b < blocks; ++b) {
            const std::uint8_t* block = job.weights + b * q8_block_bytes;
            const auto* w = reinterpret_cast<const std::int8_t*>(block + 16);
            const std::int8_t* xb = q + b * block_columns;
            for (int o = 0; o < group_outputs; ++o) {
                std::int32_t dot = 0;
                for (int g = 0; g < 8; ++g) {
                    for (int i = 0; i < 4; ++i) {
                        dot += w[g * 32 + o * 4 + i] * xb[4 * g + i];
                    }
                }
                const float d = load_half(block + 2 * o);
                total[o] = total[o] + static_cast<float>(dot) * (d * scale[b]);
            }
        }
        std::memcpy(job.out + r * job.out_stride, total, sizeof(float) * job.outputs);
    }
}

namespace {

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
    static float load(const std::uint8_t* at) { return load_half(at); }
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

template <typename Weight>
void dense(const GroupJob& job) {
    for (std::int64_t r = 0; r < job.rows; ++r) {
        const float* x = job.x + r * job.x_stride;
        float total[group_outputs] = {};
        for (std::int64_t k = 0; k < job.columns; ++k) {
            const std::uint8_t* w = job.weights + k * group_outputs * Weight::bytes;
            for (int o = 0; o < group_outputs; ++o) {
                total[o] = total[o] + x[k] * Weight::load(w + o * Weight::bytes);
            }
        }
        std::memcpy(job.out + r * job.out_stride, total, sizeof(float) * job.outputs);
    }
}

}  // namespace

void f32(const GroupJob& job) { dense<F32>(job); }
void f16(const GroupJob& job) { dense<F16>(job); }
void bf16(const GroupJob& job) { dense<BF16>(job); }

}  // namespace drumline::portable
