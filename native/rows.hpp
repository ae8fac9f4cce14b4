// Row operations between matrix products, and paged attention. float32; one row, one result.
#pragma once

#include <cstdint>

#include "linear.hpp"

namespace drumline {

// out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight; `stride` floats between rows of x.
void rms_norm(const float* x, std::int64_t rows, std::int64_t width, std::int64_t stride,
              const float* weight, float eps, float* out, Path path);

// out[r] = silu(x[r, :width]) * x[r, width:]
void silu_and_mul(const float* x, std::int64_t rows, std::int64_t width, float* out, int threads,
                  Path path);

// Rotates the first 2 * half channels of every head by halves; the others are copied. x has
// `stride` floats between tokens and heads end to end; out is contiguous.
void rope(const float* x, std::int64_t tokens, std::int64_t heads, std::int64_t head_dim,
          std::int64_t stride, const std::int64_t* positions, const float* cos, const float* sin,
          std::int64_t half, float* out, Path path);

enum class KVType { f32, f16, bf16 };

struct AttentionJob {
    const float* query = nullptr;  // [tokens, heads, head_dim], contiguous
    const float* key = nullptr;    // [tokens, kv_heads, head_dim], `key_stride` between tokens
    const float* value = nullptr;
    std::int64_t key_stride = 0;
    std::int64_t value_stride = 0;
    void* keys = nullptr;    // one layer's cache: [blocks, kv_heads, head_dim, block_size]
    void* values = nullptr;  // [blocks, kv_heads, block_size, head_dim]
    KVType kv_type = KVType::f32;
    const std::int64_t* positions = nullptr;  // [tokens]
    const std::int64_t* slots = nullptr;      // [tokens], -1 writes nothing
    const std::int64_t* tables = nullptr;     // block ids of all sequences, end to end
    const std::int64_t* table_start = nullptr;  // [tokens] where the token's sequence begins there
    std::int64_t tokens = 0;
    std::int64_t heads = 0;
    std::int64_t kv_heads = 0;
    std::int64_t head_dim = 0;
    std::int64_t block_size = 0;
    std::int64_t first_key = 0;
    float scale = 1.0F;
    float* out = nullptr;  // [tokens, heads * head_dim]
};

// Writes keys and values to their slots; slot -1 writes nothing. Keys lie channel by channel within
// a block, so that the scores of 8 keys are one vector and need no sum across it.
void write_kv(const AttentionJob& job, Path path);

// write_kv, then softmax(scale * q k) v over keys first_key..position: scores (channels in ascending
// order), their maximum, exponentials, one weighted sum in ascending position.
void attention(const AttentionJob& job, int threads, Path path);

}  // namespace drumline
