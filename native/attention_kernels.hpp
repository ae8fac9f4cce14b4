// The bodies of paged attention. Included once per instruction set, inside a namespace of its own
// (hence no guard), after `multiply_add`, which rounds once or twice, and after `wide`, the longest
// vector there is, with `open_sums`, how many of them are added to at once. Its length changes no bit:
// a lane is a key or a channel of its own.

constexpr int unit_keys = 16;

template <typename Vector, typename Cell>
DRUMLINE_INLINE Vector load(const Cell* from) {
    if constexpr (lanes_of<Vector> == lanes) {
        return load8(from);
    } else {
        return load16(from);
    }
}

// ---- storing ------------------------------------------------------------------------------------

inline float finite(float value, float most = std::numeric_limits<float>::max()) {
    return value == value ? std::min(std::max(value, -most), most) : 0.0F;
}

inline void pack(float* to, float value) { *to = finite(value); }

inline void pack(_Float16* to, float value) {
    const float most = 65504.0F;
    *to = static_cast<_Float16>(std::min(std::max(finite(value), -most), most));
}

inline void pack(std::uint16_t* to, float value) {
    const float bounded = finite(value);
    std::uint32_t bits = 0;
    std::memcpy(&bits, &bounded, sizeof bits);
    const std::uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
    // Rounding up may have reached infinity: the largest finite number instead.
    *to = static_cast<std::uint16_t>((rounded & 0x7FFFU) == 0x7F80U ? rounded - 1 : rounded);
}

template <typename Cell>
inline float put(const float* from, std::int64_t dim, Cell* to, std::int64_t stride) {
    for (std::int64_t i = 0; i < dim; ++i) {
        pack(to + i * stride, from[i]);
    }
    return 0.0F;
}

template <>
inline float put(const float* from, std::int64_t dim, _Float16* to, std::int64_t stride) {
    const v8f most = splat(65504.0F);
    std::int64_t i = 0;
    for (; i + lanes <= dim; i += lanes) {
        v8f part = load8(from + i);
        part = part == part ? part : splat(0.0F);
        part = part > most ? most : part;
        part = part < -most ? -most : part;
        _Float16 eight[lanes];
        store8(eight, part);
        for (int lane = 0; lane < lanes; ++lane) {
            to[(i + lane) * stride] = eight[lane];
        }
    }
    for (; i < dim; ++i) {
        pack(to + i * stride, from[i]);
    }
    return 0.0F;
}

// Symmetric int8: scale = largest / 127, q = round(x / scale). Returns the scale. Beyond 3.4e38 127
// times the scale may be infinite.
template <>
inline float put(const float* from, std::int64_t dim, std::int8_t* to, std::int64_t stride) {
    const float most = 3.4e38F;
    float largest = 0.0F;
    for (std::int64_t i = 0; i < dim; ++i) {
        largest = std::max(largest, std::abs(finite(from[i], most)));
    }
    const float scale = largest / 127.0F;
    for (std::int64_t i = 0; i < dim; ++i) {
        const float quotient = scale > 0.0F ? finite(from[i], most) / scale : 0.0F;
        // A scale that lost bits below the smallest normal number may give more than 127.
        const float bounded = std::min(std::max(quotient, -127.0F), 127.0F);
        to[i * stride] = static_cast<std::int8_t>(std::nearbyint(bounded));
    }
    return scale;
}

template <typename Cell>
void write_cells(const KVCache& cache, std::int64_t layer, std::int64_t slot, const float* key,
                 const float* value) {
    const std::int64_t dim = cache.head_dim, size = cache.block_size;
    auto* keys = static_cast<Cell*>(cache.keys);
    auto* values = static_cast<Cell*>(cache.values);
    const std::int64_t block = slot / size * cache.layers + layer, offset = slot % size;
    for (std::int64_t h = 0; h < cache.kv_heads; ++h) {
        const std::int64_t line = (block * cache.kv_heads + h) * size;
        const float key_scale = put(key + h * dim, dim, keys + line * dim + offset, size);
        const float value_scale = put(value + h * dim, dim, values + (line + offset) * dim, 1);
        if (cache.key_scales != nullptr) {
            cache.key_scales[line + offset] = key_scale;
            cache.value_scales[line + offset] = value_scale;
        }
    }
}

// ---- one chunk of keys, one tile of query rows --------------------------------------------------

// Calls body(count, row) for rows 0 .. rows - 1 in groups whose size the compiler knows.
template <typename Body>
DRUMLINE_INLINE void in_groups(int rows, const Body& body) {
    int row = 0;
    for (; rows - row >= 6; row += 6) {
        body(std::integral_constant<int, 6>(), row);
    }
    for (; rows - row >= 3; row += 3) {
        body(std::integral_constant<int, 3>(), row);
    }
    switch (rows - row) {
        case 2:
            return body(std::integral_constant<int, 2>(), row);
        case 1:
            return body(std::integral_constant<int, 1>(), row);
    }
}

// Where some neighbouring keys of one block lie, and where their scores go.
template <typename Cell>
struct Keys {
    const Cell* cells;
    const float* scales;
    float* scores;  // of row 0
};

// Scores of R rows with U times V vectors of neighbouring keys.
template <typename Vector, int R, int U, int V, typename Cell>
DRUMLINE_INLINE void score_lanes(const Tile& tile, int row, const Keys<Cell>* units) {
    constexpr int lanes = lanes_of<Vector>;
    const std::int64_t dim = tile.cache->head_dim, size = tile.cache->block_size;
    const float* query[R];
    const Cell* cells[U];
    Vector total[R][U][V];
    for (int u = 0; u < U; ++u) {
        cells[u] = units[u].cells;
    }
    for (int r = 0; r < R; ++r) {
        query[r] = tile.query[row + r];
        for (int u = 0; u < U; ++u) {
            for (int v = 0; v < V; ++v) {
                total[r][u][v] = all<Vector>(0.0F);
            }
        }
    }
    for (std::int64_t i = 0; i < dim; ++i) {
        Vector channel[R];
        for (int r = 0; r < R; ++r) {
            channel[r] = all<Vector>(query[r][i]);
        }
        for (int u = 0; u < U; ++u) {
            for (int v = 0; v < V; ++v) {
                const Vector key = load<Vector>(cells[u] + v * lanes);
                for (int r = 0; r < R; ++r) {
                    total[r][u][v] = multiply_add(channel[r], key, total[r][u][v]);
                }
            }
            cells[u] += size;
        }
    }
    for (int u = 0; u < U; ++u) {
        for (int v = 0; v < V; ++v) {
            Vector scale = all<Vector>(tile.scale);
            if constexpr (std::is_same_v<Cell, std::int8_t>) {
                scale = scale * load<Vector>(units[u].scales + v * lanes);
            }
            for (int r = 0; r < R; ++r) {
                store(units[u].scores + (row + r) * chunk_keys + v * lanes, total[r][u][v] * scale);
            }
        }
    }
}

// R rows with 1 .. `most` units of 16 keys.
template <int R, int most, typename Cell>
DRUMLINE_INLINE void score_together(const Tile& tile, int row, const Keys<Cell>* units, int count) {
    if constexpr (most > 1) {
        if (count < most) {
            return score_together<R, most - 1>(tile, row, units, count);
        }
    }
    score_lanes<wide, R, most, unit_keys / lanes_of<wide>>(tile, row, units);
}

// All rows with some units; few rows take several at a time, so that enough sums are open.
template <typename Cell>
DRUMLINE_INLINE void score_units(const Tile& tile, const Keys<Cell>* units, int count) {
    in_groups(tile.rows(), [&](auto group, int row) {
        constexpr int sums = (group() <= 3 ? 3 : 6) * unit_keys / lanes_of<wide>;
        constexpr int most = open_sums / sums;
        for (int unit = 0, left = count; left > 0;) {
            const int passes = (left + most - 1) / most;
            const int some = (left + passes - 1) / passes;
            score_together<group(), most>(tile, row, units + unit, some);
            unit += some;
            left -= some;
        }
    });
}

// Scores of all rows with neighbouring keys of a block that is no whole number of units.
template <typename Cell>
DRUMLINE_INLINE void score_few(const Tile& tile, Keys<Cell> keys, std::int64_t count) {
    const std::int64_t dim = tile.cache->head_dim, size = tile.cache->block_size;
    if (count == lanes) {
        return in_groups(tile.rows(), [&](auto group, int row) {
            score_lanes<v8f, group(), 1, 1>(tile, row, &keys);
        });
    }
    for (std::int64_t at = 0; at < count; ++at) {
        float scale = tile.scale;
        if constexpr (std::is_same_v<Cell, std::int8_t>) {
            scale = scale * keys.scales[at];
        }
        for (int row = 0; row < tile.rows(); ++row) {
            float total = 0.0F;
            for (std::int64_t i = 0; i < dim; ++i) {
                total = multiply_add(tile.query[row][i], load1(keys.cells + i * size + at), total);
            }
            keys.scores[row * chunk_keys + at] = total * scale;
        }
    }
}

// Scores of all rows with the keys at positions low .. high - 1 of one chunk, and with what else lies
// beside them in units of 16: whatever it is, `weigh` puts its score aside. Channels are added in the
// same order in a vector lane as one by one, so it does not matter where a key lies.
template <typename Cell>
DRUMLINE_INLINE void score(const Tile& tile, std::int64_t begin, std::int64_t low,
                           std::int64_t high, float* scores) {
    const std::int64_t dim = tile.cache->head_dim, size = tile.cache->block_size;
    const auto keys_at = [&](std::int64_t p) {
        const std::int64_t line = tile.line(p), offset = p % size;
        const float* scales = tile.cache->key_scales;
        return Keys<Cell>{static_cast<const Cell*>(tile.cache->keys) + line * dim + offset,
                          scales == nullptr ? nullptr : scales + line + offset,
                          scores + (p - begin)};
    };
    if (size % unit_keys == 0) {
        Keys<Cell> units[chunk_keys / unit_keys];
        int count = 0;
        for (std::int64_t p = low / unit_keys * unit_keys; p < high; p += unit_keys) {
            units[count++] = keys_at(p);
        }
        return score_units(tile, units, count);
    }
    for (std::int64_t p = low; p < high;) {
        const std::int64_t end = std::min(high, (p / size + 1) * size);
        score_few(tile, keys_at(p), end - p);
        p = end;
    }
}

// Joins the maximum and the sum of another chunk to a row's. Returns what the row's sums and the
// chunk's are multiplied by.
DRUMLINE_INLINE Factors join_states(RowState& state, float peak, float total) {
    if (!state.begun) {
        state = {true, peak, total};
        return {0.0F, 1.0F};
    }
    const float higher = peak > state.peak ? peak : state.peak;
    const Factors factors = {exp1(state.peak - higher), exp1(peak - higher)};
    state.total = state.total * factors.keep + total * factors.join;
    state.peak = higher;
    return factors;
}

// Scores of one row → exponentials below their maximum, zeros where the row sees nothing.
DRUMLINE_INLINE Factors weigh(Tile& tile, int row, std::int64_t begin, std::int64_t padded,
                              float* scores) {
    const std::int64_t low = std::max(tile.first[row] - begin, std::int64_t{0});
    const std::int64_t high = std::min(tile.last[row] + 1 - begin, padded);
    const float nothing = -std::numeric_limits<float>::infinity();
    if (low >= high) {
        std::fill(scores, scores + padded, 0.0F);
        return {1.0F, 0.0F, false};
    }
    std::fill(scores, scores + low, nothing);
    std::fill(scores + high, scores + padded, nothing);
    v8f peaks = load8(scores);
    for (std::int64_t k = lanes; k < padded; k += lanes) {
        const v8f part = load8(scores + k);
        peaks = part > peaks ? part : peaks;
    }
    float peak = peaks[0];
    for (int lane = 1; lane < lanes; ++lane) {
        peak = peaks[lane] > peak ? peaks[lane] : peak;
    }
    v8f totals = splat(0.0F);
    std::int64_t k = 0;
    for (; k + lanes_of<wide> <= padded; k += lanes_of<wide>) {
        const wide weight = exponential(load<wide>(scores + k) - all<wide>(peak));
        store(scores + k, weight);
        totals = add_eights(totals, weight);
    }
    if (k < padded) {
        const v8f weight = exp8(load8(scores + k) - splat(peak));
        store8(scores + k, weight);
        totals = totals + weight;
    }
    return join_states(tile.state[row], peak, sum8(totals));
}

// Weights of int8 values take their scales in.
DRUMLINE_INLINE void scale_weights(const Tile& tile, std::int64_t begin, std::int64_t low,
                                   std::int64_t high, float* scores) {
    const std::int64_t size = tile.cache->block_size;
    for (std::int64_t p = low; p < high;) {
        const std::int64_t end = std::min(high, (p / size + 1) * size);
        const float* scales = tile.cache->value_scales + tile.line(p) + p % size;
        for (int row = 0; row < tile.rows(); ++row) {
            float* weights = scores + row * chunk_keys + (p - begin);
            for (std::int64_t k = 0; k < end - p; ++k) {
                weights[k] = weights[k] * scales[k];
            }
        }
        p = end;
    }
}

// The weighted sum of V vectors of channels of the values for R rows, positions in ascending order. What a
// row does not see has weight 0, which adds nothing: values are finite, and the 0 at the end takes
// away the sign that a zero may have got.
template <typename Vector, int R, int V, typename Cell>
DRUMLINE_INLINE void mix_lanes(const Tile& tile, int row, std::int64_t channel, std::int64_t begin,
                               std::int64_t low, std::int64_t high, const float* scores,
                               const Factors* factors) {
    constexpr int lanes = lanes_of<Vector>;
    const std::int64_t dim = tile.cache->head_dim, size = tile.cache->block_size;
    const float* weights = scores + row * chunk_keys;
    Vector total[R][V];
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) {
            total[r][v] = all<Vector>(0.0F);
        }
    }
    for (std::int64_t p = low; p < high;) {
        const std::int64_t end = std::min(high, (p / size + 1) * size);
        const Cell* line = static_cast<const Cell*>(tile.cache->values) +
                           (tile.line(p) + p % size) * dim + channel;
        for (; p < end; ++p, line += dim) {
            Vector value[V];
            for (int v = 0; v < V; ++v) {
                value[v] = load<Vector>(line + v * lanes);
            }
            for (int r = 0; r < R; ++r) {
                const Vector weight = all<Vector>(weights[r * chunk_keys + (p - begin)]);
                for (int v = 0; v < V; ++v) {
                    total[r][v] = multiply_add(weight, value[v], total[r][v]);
                }
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        const Factors& factor = factors[row + r];
        float* sums = tile.sums[row + r] + channel;
        for (int v = 0; factor.sees && v < V; ++v, sums += lanes) {
            const Vector part = (total[r][v] + all<Vector>(0.0F)) * all<Vector>(factor.join);
            store(sums, factor.keep == 0.0F
                            ? part
                            : load<Vector>(sums) * all<Vector>(factor.keep) + part);
        }
    }
}

template <typename Cell>
DRUMLINE_INLINE void mix(const Tile& tile, std::int64_t begin, std::int64_t low, std::int64_t high,
                         const float* scores, const Factors* factors) {
    const std::int64_t dim = tile.cache->head_dim, size = tile.cache->block_size;
    in_groups(tile.rows(), [&](auto group, int row) {
        constexpr int several = group() <= 3 ? open_sums / 3 : open_sums / 6;
        constexpr int step = several * lanes_of<wide>;
        std::int64_t i = 0;
        for (; i + step <= dim; i += step) {
            mix_lanes<wide, group(), several, Cell>(tile, row, i, begin, low, high, scores, factors);
        }
        for (; i + lanes <= dim; i += lanes) {
            mix_lanes<v8f, group(), 1, Cell>(tile, row, i, begin, low, high, scores, factors);
        }
    });
    for (std::int64_t i = dim / lanes * lanes; i < dim; ++i) {
        for (int row = 0; row < tile.rows(); ++row) {
            float total = 0.0F;
            for (std::int64_t p = low; p < high; ++p) {
                const Cell* line = static_cast<const Cell*>(tile.cache->values) +
                                   (tile.line(p) + p % size) * dim;
                total = multiply_add(scores[row * chunk_keys + (p - begin)], load1(line + i), total);
            }
            if (factors[row].sees) {
                const float part = (total + 0.0F) * factors[row].join;
                float& sum = tile.sums[row][i];
                sum = factors[row].keep == 0.0F ? part : sum * factors[row].keep + part;
            }
        }
    }
}

// Asks memory for the lines with keys or values of the positions low .. high - 1.
template <typename Cell>
DRUMLINE_INLINE void fetch(const Tile& tile, const void* from, bool keys, std::int64_t low,
                           std::int64_t high) {
    const std::int64_t dim = tile.cache->head_dim, size = tile.cache->block_size;
    const std::int64_t width = dim * static_cast<std::int64_t>(sizeof(Cell));
    for (std::int64_t p = low; p < high;) {
        const std::int64_t end = std::min(high, (p / size + 1) * size);
        // Channel by channel a block's keys lie all over it; values lie one after the other.
        const char* block = static_cast<const char*>(from) + tile.line(p) * width;
        const char* first = keys ? block : block + p % size * width;
        const char* last = keys ? block + size * width : first + (end - p) * width;
        for (; first < last; first += 64) {
            __builtin_prefetch(first, 0, 2);
        }
        p = end;
    }
}

template <typename Cell>
void attend_cells(Tile& tile, std::int64_t chunk) {
    const std::int64_t begin = chunk * chunk_keys;
    const auto [low, high] = tile.span(chunk);
    if (low >= high) {
        return;
    }
    fetch<Cell>(tile, tile.cache->values, false, low, high);
    const std::int64_t padded = (high - begin + lanes - 1) / lanes * lanes;
    alignas(64) float scores[tile_rows * chunk_keys];
    Factors factors[tile_rows];
    score<Cell>(tile, begin, low, high, scores);
    for (int row = 0; row < tile.rows(); ++row) {
        factors[row] = weigh(tile, row, begin, padded, scores + row * chunk_keys);
    }
    if constexpr (std::is_same_v<Cell, std::int8_t>) {
        scale_weights(tile, begin, low, high, scores);
    }
    if (tile.next != nullptr) {
        const auto [from, to] = tile.next->span(tile.next_chunk);
        fetch<Cell>(*tile.next, tile.cache->keys, true, from, to);
    }
    mix<Cell>(tile, begin, low, high, scores, factors);
}

void attend(Tile& tile, std::int64_t chunk) {
    switch (tile.cache->type) {
        case KVType::f32:
            return attend_cells<float>(tile, chunk);
        case KVType::f16:
            return attend_cells<_Float16>(tile, chunk);
        case KVType::bf16:
            return attend_cells<std::uint16_t>(tile, chunk);
        case KVType::i8:
            return attend_cells<std::int8_t>(tile, chunk);
    }
}

// The sums of one chunk that was attended to by itself, joined to a row's.
void join(RowState& state, float* sums, const RowState& chunk, const float* chunk_sums,
          std::int64_t dim) {
    const Factors factors = join_states(state, chunk.peak, chunk.total);
    for (std::int64_t i = 0; i < dim; ++i) {
        const float part = chunk_sums[i] * factors.join;
        sums[i] = factors.keep == 0.0F ? part : sums[i] * factors.keep + part;
    }
}

void finish(const RowState& state, float* sums, std::int64_t dim) {
    const float inverse = 1.0F / state.total;
    for (std::int64_t i = 0; i < dim; ++i) {
        sums[i] = sums[i] * inverse;
    }
}

void write(const KVCache& cache, std::int64_t layer, std::int64_t slot, const float* key,
           const float* value) {
    switch (cache.type) {
        case KVType::f32:
            return write_cells<float>(cache, layer, slot, key, value);
        case KVType::f16:
            return write_cells<_Float16>(cache, layer, slot, key, value);
        case KVType::bf16:
            return write_cells<std::uint16_t>(cache, layer, slot, key, value);
        case KVType::i8:
            return write_cells<std::int8_t>(cache, layer, slot, key, value);
    }
}

const AttentionKernels kernels = {write, attend, join, finish};
