// Operations on single rows of float32, between matrix products. One row, one result: nothing here
// knows how many rows there are. Every instruction set gives the same bits.
#pragma once

#include <cstdint>

#include "linear.hpp"

namespace drumline {

struct RowKernels {
    // out = x / sqrt(mean(x^2) + eps) * weight; out may be x
    void (*rms_norm)(const float* x, std::int64_t width, const float* weight, float eps,
                     float* out);
    // out = silu(gate) * up
    void (*silu_and_mul)(const float* gate, const float* up, std::int64_t width, float* out);
    // Rotates channels 0 .. 2 * half - 1 of one head by halves; out may be x
    void (*rope)(const float* x, std::int64_t half, const float* cos, const float* sin,
                 float* out);
    // out = x + y; out may be either
    void (*add)(const float* x, const float* y, std::int64_t width, float* out);
    // out += x * scale
    void (*add_scaled)(const float* x, float scale, std::int64_t width, float* out);
    // Where the largest stands, the first of equals; not a number counts as larger than all
    std::int64_t (*argmax)(const float* x, std::int64_t width);
    // The k largest, in descending order, ties by ascending id; k <= width
    void (*top_k)(const float* x, std::int64_t width, std::int64_t k, float* values,
                  std::int64_t* ids);
};

const RowKernels& row_kernels(Path path);

}  // namespace drumline
