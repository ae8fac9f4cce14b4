// The kernels behind PackedLinear: one group of 8 outputs times all rows, per instruction set.
#pragma once

#include <cstdint>
#include <vector>

namespace drumline {

constexpr int group_outputs = 8;
constexpr int block_columns = 32;

// Packed blocks of 32 columns x 8 outputs:
//   q4   d half[8], m half[8], 4 vectors of 32 bytes: output o's bytes at 4o .. 4o + 3, low nibbles
//        columns 8v .. 8v + 3, high nibbles columns 8v + 4 .. 8v + 7; w = d * q + m
//   q8   d half[8], 8 vectors of 32 bytes: columns 4g .. 4g + 3; w = d * q
constexpr std::size_t q4_block_bytes = 32 + 4 * 32;
constexpr std::size_t q8_block_bytes = 16 + 8 * 32;

// Activations of some rows: per block of 32 columns int8 values q, a scale d = largest / 127, and
// d * (sum of q), by which a weight's minimum is multiplied.
struct QuantizedRows {
    std::int64_t columns = 0;
    std::vector<std::int8_t> q;     // [rows, columns]
    std::vector<float> scale;       // [rows, blocks]
    std::vector<float> scaled_sum;  // [rows, blocks]
    std::vector<std::int32_t> sum;  // [rows, blocks]

    void resize(std::int64_t rows, std::int64_t width) {
        columns = width;
        q.resize(static_cast<std::size_t>(rows * width));
        const auto blocks = static_cast<std::size_t>(rows * (width / block_columns));
        scale.resize(blocks);
        scaled_sum.resize(blocks);
        sum.resize(blocks);
    }
};

struct GroupJob {
    const std::uint8_t* weights = nullptr;
    std::int64_t columns = 0;
    std::int64_t rows = 0;
    const float* x = nullptr;
    std::int64_t x_stride = 0;
    const QuantizedRows* quantized = nullptr;
    float* out = nullptr;  // the group's first output of row 0
    std::int64_t out_stride = 0;
    int outputs = group_outputs;  // fewer in the last group
};

float load_half(const std::uint8_t* at);

namespace portable {
void quantize_row(const float* x, std::int64_t columns, QuantizedRows& rows, std::int64_t row);
void q4(const GroupJob& job);
void q8(const GroupJob& job);
void f32(const GroupJob& job);
void f16(const GroupJob& job);
void bf16(const GroupJob& job);
}  // namespace portable

namespace avx2 {
void quantize_row(const float* x, std::int64_t columns, QuantizedRows& rows, std::int64_t row);
void q4(const GroupJob& job);
void q8(const GroupJob& job);
void f32(const GroupJob& job);
void f16(const GroupJob& job);
void bf16(const GroupJob& job);
}  // namespace avx2

namespace avx512_vnni {
void q4(const GroupJob& job);
void q8(const GroupJob& job);
}  // namespace avx512_vnni

}  // namespace drumline
