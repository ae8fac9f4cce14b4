#include "attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
// GCC 12 takes the "undefined" operand of its own intrinsics for a mistake (bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#endif

#include "instruction_sets.hpp"
#include "pool.hpp"
#include "vec.hpp"

namespace drumline {
namespace {

constexpr int chunk_keys = 128;
constexpr int tile_rows = 12;  // query rows that share each load of keys and values

// Exponentials of a row's scores are below `peak`, and add up to `total`, once a chunk was seen.
struct RowState {
    bool begun = false;
    float peak = 0.0F;
    float total = 0.0F;
};

// What a row's sums and those of a chunk are multiplied by when they are joined; `keep` is 0 where
// nothing is to be kept, and only there: exp flushes to 0 what is too small to matter.
struct Factors {
    float keep = 0.0F;
    float join = 0.0F;
    bool sees = true;
};

// Neighbouring tokens of one sequence times query heads that share a key/value head. Row r is token
// r / heads, head r % heads.
struct Tile {
    const KVCache* cache = nullptr;
    const std::int64_t* table = nullptr;
    std::int64_t layer = 0;
    std::int64_t kv_head = 0;
    int tokens = 0;
    int heads = 0;
    float scale = 1.0F;
    const float* query[tile_rows];
    float* sums[tile_rows];         // [head_dim] each
    std::int64_t first[tile_rows];  // positions first .. last are what the row sees
    std::int64_t last[tile_rows];
    RowState state[tile_rows];
    // What is attended to next, if known: memory is asked for its keys in time.
    const Tile* next = nullptr;
    std::int64_t next_chunk = 0;

    int rows() const { return tokens * heads; }

    // Chunks that rows see some of.
    std::int64_t chunks() const {
        std::int64_t most = 0;
        for (int row = 0; row < rows(); ++row) {
            most = std::max(most, last[row]);
        }
        return most / chunk_keys + 1;
    }

    // Positions low .. high - 1 of a chunk are what some rows see.
    std::pair<std::int64_t, std::int64_t> span(std::int64_t chunk) const {
        const std::int64_t begin = chunk * chunk_keys;
        std::int64_t low = begin + chunk_keys, high = begin;
        for (int row = 0; row < rows(); ++row) {
            low = std::min(low, std::max(begin, first[row]));
            high = std::max(high, std::min(begin + chunk_keys, last[row] + 1));
        }
        return {low, high};
    }

    // Of the key/value head in the block that holds `position`, in units of block_size.
    std::int64_t line(std::int64_t position) const {
        const std::int64_t block = table[position / cache->block_size];
        return ((block * cache->layers + layer) * cache->kv_heads + kv_head) * cache->block_size;
    }
};

struct AttentionKernels {
    void (*write)(const KVCache& cache, std::int64_t layer, std::int64_t slot, const float* key,
                  const float* value);
    void (*attend)(Tile& tile, std::int64_t chunk);
    void (*join)(RowState& state, float* sums, const RowState& chunk, const float* chunk_sums,
                 std::int64_t dim);
    void (*finish)(const RowState& state, float* sums, std::int64_t dim);
};

namespace portable_attention {
DRUMLINE_INLINE v8f multiply_add(v8f a, v8f b, v8f c) { return a * b + c; }
DRUMLINE_INLINE float multiply_add(float a, float b, float c) { return a * b + c; }
using wide = v8f;
constexpr int open_sums = 12;
#include "attention_kernels.hpp"
}  // namespace portable_attention

#if DRUMLINE_HAS_X86
DRUMLINE_BEGIN_AVX2
namespace avx2_attention {
#include "vec_avx2.hpp"
using wide = v8f;
constexpr int open_sums = 12;
#include "attention_kernels.hpp"
}  // namespace avx2_attention
DRUMLINE_END
DRUMLINE_BEGIN_AVX512
namespace avx512_attention {
#include "vec_avx2.hpp"
#include "vec_avx512.hpp"
constexpr int open_sums = 12;
#include "attention_kernels.hpp"
}  // namespace avx512_attention
DRUMLINE_END
#endif

const AttentionKernels& attention_kernels(Path path) {
#if DRUMLINE_HAS_X86
    if (path == Path::avx512_vnni) {
        return avx512_attention::kernels;
    }
    if (path == Path::avx2) {
        return avx2_attention::kernels;
    }
#endif
    (void)path;
    return portable_attention::kernels;
}

// How the tokens of a call are cut into tiles: by sequence, as many as share loads well.
class Tiling {
public:
    Tiling(const KVCache& cache, const Places& places, const AttentionJob& job,
           std::int64_t begin, std::int64_t end, Buffer<std::int64_t>& memory)
        : cache_(cache), places_(places), job_(job) {
        group_ = job.heads / cache.kv_heads;
        heads_ = std::min<std::int64_t>(group_, tile_rows);
        parts_ = (group_ + heads_ - 1) / heads_;
        const std::int64_t most = tile_rows / heads_;
        starts_ = memory.take(static_cast<std::size_t>(end - begin + 1));
        for (std::int64_t token = begin; token < end;) {
            starts_[count_++] = token;
            const std::int64_t sequence = places.table_start[token];
            const std::int64_t limit = std::min(end, token + most);
            for (++token; token < limit && places.table_start[token] == sequence; ++token) {
            }
        }
        starts_[count_] = end;
    }

    std::int64_t items() const { return count_ * cache_.kv_heads * parts_; }

    // Item by item, token by token: neighbouring items share keys.
    Tile tile(std::int64_t item) const {
        const std::int64_t at = item / (cache_.kv_heads * parts_);
        const std::int64_t kv_head = item / parts_ % cache_.kv_heads;
        const std::int64_t from = item % parts_ * heads_;
        const std::int64_t token = starts_[at];
        Tile tile;
        tile.cache = &cache_;
        tile.table = places_.tables + places_.table_start[token];
        tile.layer = job_.layer;
        tile.kv_head = kv_head;
        tile.tokens = static_cast<int>(starts_[at + 1] - token);
        tile.heads = static_cast<int>(std::min(heads_, group_ - from));
        tile.scale = job_.scale;
        for (int row = 0; row < tile.rows(); ++row) {
            const std::int64_t t = token + row / tile.heads;
            const std::int64_t head = kv_head * group_ + from + row % tile.heads;
            tile.query[row] = job_.query + t * job_.query_stride + head * cache_.head_dim;
            tile.sums[row] = job_.out + (t * job_.heads + head) * cache_.head_dim;
            tile.last[row] = places_.positions[t];
            tile.first[row] = std::min(places_.first_key, tile.last[row]);
        }
        return tile;
    }

private:
    const KVCache& cache_;
    const Places& places_;
    const AttentionJob& job_;
    std::int64_t group_ = 1;  // query heads per key/value head
    std::int64_t heads_ = 1;  // of them in one tile
    std::int64_t parts_ = 1;  // tiles per group
    std::int64_t* starts_ = nullptr;
    std::int64_t count_ = 0;
};

// Few tokens that look far back: chunks are attended to apart and joined afterwards.
void attention_by_chunks(const Tiling& tiling, std::int64_t chunks, std::int64_t dim, int threads,
                         const AttentionKernels& kernels, Scratch& scratch) {
    const std::int64_t items = tiling.items(), rows = items * tile_rows;
    float* sums = scratch.chunk_sums.take(static_cast<std::size_t>(rows * chunks * dim));
    auto* states = reinterpret_cast<RowState*>(scratch.chunk_states.take(
        static_cast<std::size_t>(rows * chunks) * sizeof(RowState) / sizeof(float)));
    const auto place = [&](std::int64_t item, int row, std::int64_t chunk) {
        return (item * tile_rows + row) * chunks + chunk;
    };
    Pool::instance().run(threads, static_cast<int>(items * chunks), [&](int part) {
        const std::int64_t item = part / chunks, chunk = part % chunks;
        Tile tile = tiling.tile(item);
        for (int row = 0; row < tile.rows(); ++row) {
            tile.sums[row] = sums + place(item, row, chunk) * dim;
        }
        kernels.attend(tile, chunk);
        for (int row = 0; row < tile.rows(); ++row) {
            states[place(item, row, chunk)] = tile.state[row];
        }
    });
    for (std::int64_t item = 0; item < items; ++item) {
        Tile tile = tiling.tile(item);
        for (int row = 0; row < tile.rows(); ++row) {
            RowState state;
            for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
                const std::int64_t at = place(item, row, chunk);
                if (states[at].begun) {
                    kernels.join(state, tile.sums[row], states[at], sums + at * dim, dim);
                }
            }
            kernels.finish(state, tile.sums[row], dim);
        }
    }
}

}  // namespace

void write_kv(const KVCache& cache, std::int64_t layer, std::int64_t slot, const float* key,
              const float* value, Path path) {
    attention_kernels(path).write(cache, layer, slot, key, value);
}

void attention(const KVCache& cache, const Places& places, const AttentionJob& job,
               std::int64_t begin, std::int64_t end, int threads, Path path, Scratch& scratch) {
    const AttentionKernels& kernels = attention_kernels(path);
    const Tiling tiling(cache, places, job, begin, end, scratch.tile_starts);
    const std::int64_t items = tiling.items();
    if (threads > 1 && items < 4 * threads) {
        std::int64_t chunks = 1;
        for (std::int64_t item = 0; item < items; ++item) {
            chunks = std::max(chunks, tiling.tile(item).chunks());
        }
        if (chunks > 1) {
            return attention_by_chunks(tiling, chunks, cache.head_dim, threads, kernels, scratch);
        }
    }
    // A handful of parts per thread: contexts differ in length, and late threads get less.
    const int parts = static_cast<int>(std::min<std::int64_t>(items, threads > 1 ? 8 * threads : 1));
    Pool::instance().run(threads, parts, [&](int part) {
        const std::int64_t end = items * (part + 1) / parts;
        Tile tiles[2];
        tiles[0] = tiling.tile(items * part / parts);
        for (std::int64_t item = items * part / parts, at = 0; item < end; ++item, at ^= 1) {
            Tile& tile = tiles[at];
            Tile* const next = item + 1 < end ? &(tiles[at ^ 1] = tiling.tile(item + 1)) : nullptr;
            const std::int64_t chunks = tile.chunks();
            for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
                const bool stays = chunk + 1 < chunks;
                tile.next = stays ? &tile : next;
                tile.next_chunk = stays ? chunk + 1 : 0;
                kernels.attend(tile, chunk);
            }
            for (int row = 0; row < tile.rows(); ++row) {
                kernels.finish(tile.state[row], tile.sums[row], cache.head_dim);
            }
        }
    });
}

}  // namespace drumline
