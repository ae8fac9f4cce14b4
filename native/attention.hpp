// Keys and values in blocks, and causal attention over them.
//
// A token's keys are read in chunks of 128 positions that lie at fixed places (0, 128, 256, ...).
// Within a chunk: scores (channels in ascending order), their maximum, exponentials, one weighted
// sum in ascending position. Chunks are joined in ascending order by their maxima (Milakov and
// Gimelshein 2018). So a token's bits depend on its own keys alone: not on how many tokens share a
// call or a tile, nor on which thread took which chunk.
#pragma once

#include <cstdint>

#include "linear.hpp"
#include "scratch.hpp"

namespace drumline {

enum class KVType { f32, f16, bf16, i8 };

// All layers of one cache. Keys lie channel by channel within a block, so that 8 keys are one
// vector. int8 numbers have one scale per token and head: x = scale * q.
struct KVCache {
    void* keys = nullptr;           // [blocks, layers, kv_heads, head_dim, block_size]
    void* values = nullptr;         // [blocks, layers, kv_heads, block_size, head_dim]
    float* key_scales = nullptr;    // [blocks, layers, kv_heads, block_size], of int8 only
    float* value_scales = nullptr;  // likewise
    KVType type = KVType::f32;
    std::int64_t layers = 0;
    std::int64_t kv_heads = 0;
    std::int64_t head_dim = 0;
    std::int64_t block_size = 0;
};

// Where the tokens of a pass sit. Tokens of one sequence are adjacent.
struct Places {
    std::int64_t tokens = 0;
    const std::int64_t* positions = nullptr;    // [tokens] the last position each one sees
    const std::int64_t* slots = nullptr;        // [tokens], -1 writes nothing
    const std::int64_t* tables = nullptr;       // block ids of all sequences, end to end
    const std::int64_t* table_start = nullptr;  // [tokens] where the token's sequence begins there
    std::int64_t first_key = 0;                 // keys before this position do not exist
};

struct AttentionJob {
    const float* query = nullptr;  // of token 0: [heads, head_dim]
    std::int64_t query_stride = 0;
    std::int64_t heads = 0;
    std::int64_t layer = 0;
    float scale = 1.0F;
    float* out = nullptr;  // [tokens, heads * head_dim]
};

// Writes one token's keys and values [kv_heads, head_dim] to its slot, which is not negative.
// Rounds once, to nearest even, and keeps finite numbers only: blocks go from one request to the
// next, and 0 * infinity is no 0.
void write_kv(const KVCache& cache, std::int64_t layer, std::int64_t slot, const float* key,
              const float* value, Path path);

// softmax(scale * q k) v over keys first_key .. position of each token `begin` .. `end` - 1; all
// of them are in the cache already.
void attention(const KVCache& cache, const Places& places, const AttentionJob& job,
               std::int64_t begin, std::int64_t end, int threads, Path path, Scratch& scratch);

}  // namespace drumline
