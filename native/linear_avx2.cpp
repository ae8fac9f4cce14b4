// Linear kernels for AVX2 + FMA + F16C.
//
// 4-bit kinds multiply bytes: the sums of a block of 32 columns fit 16 bits (8 x 2 x 15 x 128 =
// 30,720), so they are widened and scaled once per block and row; every weight vector is unpacked
// once for all rows of a tile, and every broadcast activation serves 16 outputs. 6 and 8 bits
// multiply words, whose pairs need no second sum and hold far activations at no cost.
#include "linear_kernels.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

#define DRUMLINE_AVX2 __attribute__((target("avx2,fma,f16c")))
#define DRUMLINE_AVX2_INLINE DRUMLINE_AVX2 __attribute__((always_inline)) inline

namespace drumline::avx2 {
namespace {

constexpr int halves_of_outputs = 2;  // of 8 each, one vector

// Where several tiles follow each other on a block's weights, the processor no longer reads ahead by
// itself. This far ahead may be beyond the weights' end: asking for memory that is not there does no
// harm.
constexpr std::size_t prefetch_bytes = 4096;

DRUMLINE_AVX2_INLINE void ask_ahead(const TileJob& job, const std::uint8_t* quanta, std::size_t bytes) {
    if (job.first && !job.last) {
        for (std::size_t at = 0; at < bytes + line_bytes; at += line_bytes) {
            __builtin_prefetch(quanta + prefetch_bytes + at);
        }
    }
}

DRUMLINE_AVX2_INLINE __m256i bytes32(const std::uint8_t* at) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}

DRUMLINE_AVX2_INLINE __m256i broadcast4(const std::int8_t* q) {
    std::int32_t word = 0;
    std::memcpy(&word, q, sizeof word);
    return _mm256_set1_epi32(word);
}

DRUMLINE_AVX2_INLINE __m256 halves8(const std::uint8_t* at) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}

DRUMLINE_AVX2_INLINE __m256 unsigned8(const std::uint8_t* at) {
    return _mm256_cvtepi32_ps(
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
}

DRUMLINE_AVX2_INLINE __m256 signed8(const std::uint8_t* at) {
    return _mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
}

DRUMLINE_AVX2_INLINE void store(const TileJob& job, int row, int half, __m256 total) {
    float* out = job.out + row * job.out_stride + 8 * half;
    const int count = job.outputs - 8 * half;
    if (count >= 8) {
        _mm256_storeu_ps(out, total);
    } else if (count > 0) {
        alignas(32) float lanes[8];
        _mm256_store_ps(lanes, total);
        std::memcpy(out, lanes, sizeof(float) * count);
    }
}

// The compiler must not turn a chain of additions into a tree: its leaves would have to be spilled.
DRUMLINE_AVX2_INLINE void in_place(__m256i& sum) { __asm__("" : "+x"(sum)); }

// Scale d and minimum m of outputs 8 * half .. + 7 in block b.
struct Scales4_0 {
    static constexpr WeightKind kind = WeightKind::q4_0;
    static constexpr bool minimum = false, offset = true;
    DRUMLINE_AVX2_INLINE static __m256 d(const std::uint8_t* scales, std::int64_t at, int, int half) {
        return halves8(scales + 32 * at + 16 * half);
    }
    DRUMLINE_AVX2_INLINE static __m256 m(const std::uint8_t*, std::int64_t, int) {
        return _mm256_setzero_ps();
    }
};

struct Scales4_1 {
    static constexpr WeightKind kind = WeightKind::q4_1;
    static constexpr bool minimum = true, offset = false;
    DRUMLINE_AVX2_INLINE static __m256 d(const std::uint8_t* scales, std::int64_t, int, int half) {
        return halves8(scales + 16 * half);
    }
    DRUMLINE_AVX2_INLINE static __m256 m(const std::uint8_t* scales, std::int64_t, int half) {
        return halves8(scales + 32 + 16 * half);
    }
};

struct Scales4_K {
    static constexpr WeightKind kind = WeightKind::q4_k;
    static constexpr bool minimum = true, offset = false;
    DRUMLINE_AVX2_INLINE static __m256 d(const std::uint8_t* scales, std::int64_t at, int, int half) {
        return _mm256_mul_ps(halves8(scales + 16 * half),
                             unsigned8(scales + 64 + 32 * at + 8 * half));
    }
    DRUMLINE_AVX2_INLINE static __m256 m(const std::uint8_t* scales, std::int64_t at, int half) {
        return _mm256_mul_ps(halves8(scales + 32 + 16 * half),
                             unsigned8(scales + 80 + 32 * at + 8 * half));
    }
};

// A block's nibbles as bytes, line by line: any row may have its far line in any of them.
struct alignas(32) Unpacked {
    std::uint8_t lines[block_lines][line_bytes];

    DRUMLINE_AVX2_INLINE void keep(int line, __m256i w0, __m256i w1) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(lines[line]), w0);
        _mm256_store_si256(reinterpret_cast<__m256i*>(lines[line] + 32), w1);
    }
};

// The products of one block of 4-bit weights and R rows.
template <int R, bool fine>
DRUMLINE_AVX2_INLINE void nibble_products(const std::uint8_t* quanta, const std::int8_t* q,
                                          __m256i (&dots)[R][halves_of_outputs],
                                          Unpacked& unpacked) {
    const __m256i low_nibbles = _mm256_set1_epi8(15);
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
        const __m256i packed_0 = bytes32(quanta + v * line_bytes);
        const __m256i packed_1 = bytes32(quanta + v * line_bytes + 32);
        __m256i w0 = _mm256_and_si256(packed_0, low_nibbles);
        __m256i w1 = _mm256_and_si256(packed_1, low_nibbles);
#pragma GCC unroll 2
        for (int high = 0; high < 2; ++high) {
            if (high != 0) {
                w0 = _mm256_and_si256(_mm256_srli_epi16(packed_0, 4), low_nibbles);
                w1 = _mm256_and_si256(_mm256_srli_epi16(packed_1, 4), low_nibbles);
            }
            if constexpr (fine) {
                unpacked.keep(2 * v + high, w0, w1);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const __m256i x = broadcast4(q + r * block_columns + 8 * v + 4 * high);
                const __m256i d0 = _mm256_maddubs_epi16(w0, x);
                const __m256i d1 = _mm256_maddubs_epi16(w1, x);
                const bool first = v == 0 && high == 0;
                dots[r][0] = first ? d0 : _mm256_add_epi16(dots[r][0], d0);
                dots[r][1] = first ? d1 : _mm256_add_epi16(dots[r][1], d1);
                in_place(dots[r][0]);
                in_place(dots[r][1]);
            }
        }
    }
}

// What the high parts of a far line add to the sums of 8 outputs.
DRUMLINE_AVX2_INLINE __m256i nibble_far(const Unpacked& unpacked, int line, __m256i high, int half) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(bytes32(unpacked.lines[line] + 32 * half), high),
                             _mm256_set1_epi16(far_step));
}

// Scales the sums of one block and adds them up.
template <typename Scales, int R, bool fine>
DRUMLINE_AVX2_INLINE void nibble_sums(const TileJob& job, std::int64_t b,
                                      const __m256i (&dots)[R][halves_of_outputs],
                                      const Unpacked& unpacked,
                                      __m256 (&total)[R][halves_of_outputs]) {
    constexpr PackedLayout packed = packed_layout(Scales::kind);
    const std::uint8_t* scales = job.weights + packed.unit(b);
    const std::int64_t at = b % packed.unit_blocks;
    const __m256i ones = _mm256_set1_epi16(1);
    __m256 d[halves_of_outputs], m[halves_of_outputs];
    for (int half = 0; half < halves_of_outputs; ++half) {
        d[half] = Scales::d(scales, at, 0, half);
        m[half] = Scales::m(scales, at, half);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const std::int64_t place = b * R + r;
#pragma GCC unroll 2
        for (int half = 0; half < halves_of_outputs; ++half) {
            __m256i dot = _mm256_madd_epi16(dots[r][half], ones);
            if constexpr (fine) {
                dot = _mm256_add_epi32(
                    dot, nibble_far(unpacked, job.far_line[place],
                                    _mm256_set1_epi32(job.far[place]), half));
            }
            if constexpr (Scales::offset) {
                dot = _mm256_add_epi32(dot, _mm256_set1_epi32(job.offset[place]));
            }
            const __m256 scale = _mm256_mul_ps(d[half], _mm256_set1_ps(job.scale[place]));
            total[r][half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, total[r][half]);
            if constexpr (Scales::minimum) {
                total[r][half] = _mm256_fmadd_ps(m[half], _mm256_set1_ps(job.scaled_sum[place]),
                                                 total[r][half]);
            }
        }
    }
}

// R rows times 4-bit weights.
template <typename Scales, int R, bool fine>
DRUMLINE_AVX2 void nibble_tile(const TileJob& job) {
    constexpr PackedLayout packed = packed_layout(Scales::kind);
    __m256 total[R][halves_of_outputs];
    for (int r = 0; r < R; ++r) {
        total[r][0] = total[r][1] = _mm256_setzero_ps();
    }
    for (std::int64_t b = 0; b < job.columns / block_columns; ++b) {
        __m256i dots[R][halves_of_outputs];
        ask_ahead(job, job.weights + packed.quanta(b), packed.quanta_bytes);
        Unpacked unpacked;
        nibble_products<R, fine>(job.weights + packed.quanta(b), job.q + b * R * block_columns,
                                 dots, unpacked);
        nibble_sums<Scales, R, fine>(job, b, dots, unpacked, total);
    }
    for (int r = 0; r < R; ++r) {
        store(job, r, 0, total[r][0]);
        store(job, r, 1, total[r][1]);
    }
}

// Line g (columns 4g .. 4g + 3) of a block, outputs 8 * half .. + 7, as bytes.
struct Bytes8 {
    static constexpr WeightKind kind = WeightKind::q8_0;
    static constexpr int halves = 1;
    DRUMLINE_AVX2_INLINE static __m256i line(const std::uint8_t* quanta, int g, int half) {
        return bytes32(quanta + g * line_bytes + 32 * half);
    }
    DRUMLINE_AVX2_INLINE static __m256 d(const std::uint8_t* scales, std::int64_t at, int, int half) {
        return halves8(scales + 32 * at + 16 * half);
    }
};

struct Bits6 {
    static constexpr WeightKind kind = WeightKind::q6_k;
    static constexpr int halves = 2;
    DRUMLINE_AVX2_INLINE static __m256i line(const std::uint8_t* quanta, int g, int half) {
        const __m256i packed = bytes32(quanta + g / 2 * line_bytes + 32 * half);
        const __m256i nibbles = g % 2 == 0 ? packed : _mm256_srli_epi16(packed, 4);
        const __m256i two = bytes32(quanta + (4 + g / 4) * line_bytes + 32 * half);
        const __m256i high = g % 4 == 0   ? _mm256_slli_epi16(two, 4)
                             : g % 4 == 1 ? _mm256_slli_epi16(two, 2)
                             : g % 4 == 2 ? two
                                          : _mm256_srli_epi16(two, 2);
        return _mm256_or_si256(_mm256_and_si256(nibbles, _mm256_set1_epi8(15)),
                               _mm256_and_si256(high, _mm256_set1_epi8(48)));
    }
    DRUMLINE_AVX2_INLINE static __m256 d(const std::uint8_t* scales, std::int64_t at, int part,
                                         int half) {
        return _mm256_mul_ps(halves8(scales + 16 * half),
                             signed8(scales + 64 + 16 * (2 * at + part) + 8 * half));
    }
};

// R rows of words times weights of a byte: even columns, then odd ones.
template <typename Kind, int R>
DRUMLINE_AVX2 void word_tile(const TileJob& job) {
    constexpr int lines_per_half = 8 / Kind::halves;
    constexpr PackedLayout packed = packed_layout(Kind::kind);
    const std::int64_t blocks = job.columns / block_columns;
    const __m256i low_bytes = _mm256_set1_epi16(255);
    __m256 total[R][halves_of_outputs];
    for (int r = 0; r < R; ++r) {
        total[r][0] = total[r][1] = _mm256_setzero_ps();
    }
    for (std::int64_t b = 0; b < blocks; ++b) {
        const std::uint8_t* scales = job.weights + packed.unit(b);
        const std::uint8_t* quanta = job.weights + packed.quanta(b);
        const std::int64_t at = b % packed.unit_blocks;
        const std::int8_t* q = job.q + b * R * 2 * block_columns;
        ask_ahead(job, quanta, packed.quanta_bytes);
#pragma GCC unroll 2
        for (int part = 0; part < Kind::halves; ++part) {
            __m256i dots[R][halves_of_outputs];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                dots[r][0] = dots[r][1] =
                    _mm256_set1_epi32(job.offset[(b * Kind::halves + part) * R + r]);
            }
#pragma GCC unroll 8
            for (int i = 0; i < lines_per_half; ++i) {
                const int g = part * lines_per_half + i;
                const __m256i bytes_0 = Kind::line(quanta, g, 0);
                const __m256i bytes_1 = Kind::line(quanta, g, 1);
                __m256i w0 = _mm256_and_si256(bytes_0, low_bytes);
                __m256i w1 = _mm256_and_si256(bytes_1, low_bytes);
#pragma GCC unroll 2
                for (int odd = 0; odd < 2; ++odd) {
                    if (odd != 0) {
                        w0 = _mm256_srli_epi16(bytes_0, 8);
                        w1 = _mm256_srli_epi16(bytes_1, 8);
                    }
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) {
                        const __m256i x =
                            broadcast4(q + r * 2 * block_columns + 8 * g + 4 * odd);
                        dots[r][0] = _mm256_add_epi32(dots[r][0], _mm256_madd_epi16(w0, x));
                        dots[r][1] = _mm256_add_epi32(dots[r][1], _mm256_madd_epi16(w1, x));
                        in_place(dots[r][0]);
                        in_place(dots[r][1]);
                    }
                }
            }
#pragma GCC unroll 2
            for (int half = 0; half < halves_of_outputs; ++half) {
                const __m256 d = Kind::d(scales, at, part, half);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const __m256 scale = _mm256_mul_ps(d, _mm256_set1_ps(job.scale[b * R + r]));
                    total[r][half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r][half]), scale,
                                                     total[r][half]);
                }
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        store(job, r, 0, total[r][0]);
        store(job, r, 1, total[r][1]);
    }
}

struct F32 {
    static constexpr std::size_t bytes = 4;
    DRUMLINE_AVX2_INLINE static __m256 load(const std::uint8_t* at) {
        return _mm256_loadu_ps(reinterpret_cast<const float*>(at));
    }
};

struct F16 {
    static constexpr std::size_t bytes = 2;
    DRUMLINE_AVX2_INLINE static __m256 load(const std::uint8_t* at) { return halves8(at); }
};

struct BF16 {
    static constexpr std::size_t bytes = 2;
    DRUMLINE_AVX2_INLINE static __m256 load(const std::uint8_t* at) {
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    }
};

template <typename Weight, int R>
DRUMLINE_AVX2 void dense_tile(const TileJob& job) {
    __m256 total[R][halves_of_outputs];
    for (int r = 0; r < R; ++r) {
        total[r][0] = total[r][1] = _mm256_setzero_ps();
    }
    for (std::int64_t k = 0; k < job.columns; ++k) {
        const std::uint8_t* at = job.weights + k * group_outputs * Weight::bytes;
        const __m256 w0 = Weight::load(at);
        const __m256 w1 = Weight::load(at + 8 * Weight::bytes);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m256 x = _mm256_set1_ps(job.x[r * job.x_stride + k]);
            total[r][0] = _mm256_fmadd_ps(x, w0, total[r][0]);
            total[r][1] = _mm256_fmadd_ps(x, w1, total[r][1]);
        }
    }
    for (int r = 0; r < R; ++r) {
        store(job, r, 0, total[r][0]);
        store(job, r, 1, total[r][1]);
    }
}

template <typename Scales, bool fine>
Kernels nibble_kernels() {
    return {{4, Numbers::bytes, fine, packed_layout(Scales::kind).zero, 1},
            {nibble_tile<Scales, 1, fine>, nibble_tile<Scales, 2, fine>,
             nibble_tile<Scales, 3, fine>, nibble_tile<Scales, 4, fine>}};
}

template <typename Scales>
Kernels nibbles(bool fine) {
    return fine ? nibble_kernels<Scales, true>() : nibble_kernels<Scales, false>();
}

template <typename Kind>
Kernels words(bool fine) {
    return {{4, Numbers::swapped, fine, packed_layout(Kind::kind).zero, Kind::halves},
            {word_tile<Kind, 1>, word_tile<Kind, 2>, word_tile<Kind, 3>, word_tile<Kind, 4>}};
}

template <typename Weight>
Kernels floats() {
    return {{6, Numbers::none, false, 0, 1},
            {dense_tile<Weight, 1>, dense_tile<Weight, 2>, dense_tile<Weight, 3>,
             dense_tile<Weight, 4>, dense_tile<Weight, 5>, dense_tile<Weight, 6>}};
}

// The sum of 16 words.
DRUMLINE_AVX2_INLINE std::int32_t sum16(__m256i words) {
    const __m256i pairs = _mm256_madd_epi16(words, _mm256_set1_epi16(1));
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xB1));
    return _mm_cvtsi128_si32(sum);
}

// 32 words in two vectors → 32 bytes in order.
DRUMLINE_AVX2_INLINE __m256i bytes_of(__m256i first, __m256i second) {
    return _mm256_permute4x64_epi64(_mm256_packs_epi16(first, second), 0xD8);
}

DRUMLINE_AVX2_INLINE void put(std::int8_t* to, __m256i value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value);
}

// Numbers of block `at`: words a of columns 0 .. 15, b of the others.
DRUMLINE_AVX2_INLINE void put_numbers(std::int8_t* q, std::int64_t at, Numbers numbers, __m256i a,
                                      __m256i b) {
    switch (numbers) {
        case Numbers::none:
            return;
        case Numbers::bytes:
            return put(q + at * block_columns, bytes_of(a, b));
        case Numbers::swapped: {
            const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14,
                                                   15, 0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11,
                                                   14, 15);
            a = _mm256_shuffle_epi8(a, order);
            b = _mm256_shuffle_epi8(b, order);
            [[fallthrough]];
        }
        case Numbers::words:
            put(q + at * 2 * block_columns, a);
            return put(q + at * 2 * block_columns + block_columns, b);
    }
}

// 16 floats times `inverse`, rounded to words in order.
DRUMLINE_AVX2_INLINE __m256i words_of(const float* from, __m256 inverse) {
    const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(from), inverse));
    const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(from + 8), inverse));
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xD8);
}

// The largest of four numbers of each half of a vector, in all places of that half.
DRUMLINE_AVX2_INLINE __m256i largest_of_four(__m256i v) {
    v = _mm256_max_epi32(v, _mm256_shuffle_epi32(v, 0x4E));
    return _mm256_max_epi32(v, _mm256_shuffle_epi32(v, 0xB1));
}

DRUMLINE_AVX2_INLINE std::int32_t largest_of_eight(__m256i v) {
    const __m256i four = largest_of_four(v);
    return _mm_cvtsi128_si32(
        _mm_max_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1)));
}

DRUMLINE_AVX2_INLINE float float_of(std::int32_t bits) {
    float value = 0;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Magnitudes of one block, compared as bits: infinity and what is no number are largest.
struct Peaks {
    float largest;
    float others;  // the largest outside of the far line
    int far_line;  // the first that has the largest

    DRUMLINE_AVX2_INLINE static Peaks of(const float* from) {
        const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
        __m256i two[4];  // lines each
        for (int i = 0; i < 4; ++i) {
            const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 8 * i));
            two[i] = largest_of_four(_mm256_and_si256(bits, magnitude));
        }
        // Lines 0, 2, 4, 6, 1, 3, 5, 7, then in order.
        const __m256i mixed = _mm256_blend_epi32(_mm256_blend_epi32(two[0], two[1], 0x22),
                                                 _mm256_blend_epi32(two[2], two[3], 0x88), 0xCC);
        const __m256i lines =
            _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        const std::int32_t largest = largest_of_eight(lines);
        const auto where = static_cast<unsigned>(_mm256_movemask_ps(
            _mm256_castsi256_ps(_mm256_cmpeq_epi32(lines, _mm256_set1_epi32(largest)))));
        const int far_line = __builtin_ctz(where);
        const __m256i numbers = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        const __m256i others = _mm256_andnot_si256(
            _mm256_cmpeq_epi32(numbers, _mm256_set1_epi32(far_line)), lines);
        return {float_of(largest), float_of(largest_of_eight(others)), far_line};
    }
};

// Takes the high parts out of the words of a block's far line: int8[32], zeros but for that line.
DRUMLINE_AVX2_INLINE __m256i take_high(int far_line, __m256i& first, __m256i& second) {
    const __m256i line = _mm256_set1_epi16(static_cast<std::int16_t>(far_line));
    const __m256i numbers = _mm256_setr_epi16(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const __m256i half_step = _mm256_set1_epi16(far_step / 2);
    __m256i high[2];
    __m256i* const words[2] = {&first, &second};
    for (int i = 0; i < 2; ++i) {
        const __m256i mine = _mm256_cmpeq_epi16(
            _mm256_add_epi16(numbers, _mm256_set1_epi16(static_cast<std::int16_t>(4 * i))), line);
        high[i] = _mm256_and_si256(
            mine, _mm256_srai_epi16(_mm256_add_epi16(*words[i], half_step), far_shift));
        *words[i] = _mm256_sub_epi16(*words[i], _mm256_slli_epi16(high[i], far_shift));
    }
    return bytes_of(high[0], high[1]);
}

}  // namespace

Kernels kernels(WeightKind kind, bool fine) {
    switch (kind) {
        case WeightKind::q4_0:
            return nibbles<Scales4_0>(fine);
        case WeightKind::q4_1:
            return nibbles<Scales4_1>(fine);
        case WeightKind::q4_k:
            return nibbles<Scales4_K>(fine);
        case WeightKind::q8_0:
            return words<Bytes8>(fine);
        case WeightKind::q6_k:
            return words<Bits6>(fine);
        case WeightKind::f32:
            return floats<F32>();
        case WeightKind::f16:
            return floats<F16>();
        case WeightKind::bf16:
            return floats<BF16>();
    }
    return {};
}

DRUMLINE_AVX2 void quantize_blocks(const float* x, std::int64_t row, std::int64_t begin,
                                   std::int64_t end, Activations& to) {
    // Copies: bytes are written below, which might be anything for all that a compiler knows.
    const ActivationLayout layout = to.layout;
    const RowPlace place(to, layout, row);
    std::int8_t* const q = to.q.data();
    float* const scale = to.scale.data();
    float* const scaled_sum = to.scaled_sum.data();
    std::int32_t* const offset = to.offset.data();
    std::int32_t* const far = to.far.data();
    std::uint8_t* const far_lines = to.far_line.data();
    const std::int64_t row_in_tile = row % layout.tile;
    const int lines_per_half = block_lines / layout.halves;
    const bool split = layout.fine && layout.numbers == Numbers::bytes;
    x += begin * block_columns;
    for (std::int64_t b = begin; b < end; ++b, x += block_columns) {
        const std::int64_t at = place.block(b);
        const Peaks peaks = Peaks::of(x);
        const BlockScale block(peaks.largest, peaks.others, layout.fine);
        __m256i first = _mm256_setzero_si256();
        __m256i second = first;
        if (block.some) {
            const __m256 inverse = _mm256_set1_ps(block.inverse);
            first = words_of(x, inverse);
            second = words_of(x + 16, inverse);
        }
        const std::int32_t sums[2] = {sum16(first), sum16(second)};
        const std::int32_t sum = sums[0] + sums[1];
        alignas(32) std::int8_t high[block_columns];
        if (split) {
            put(high, take_high(peaks.far_line, first, second));
        }
        put_numbers(q, at, layout.numbers, first, second);
        for (int h = 0; h < layout.halves; ++h) {
            const std::int64_t half = place.half(b, h, layout.halves, row_in_tile);
            offset[half] = -layout.zero * (layout.halves == 1 ? sum : sums[h]);
            if (split) {
                const int first_line = h * lines_per_half;
                const bool here = peaks.far_line >= first_line &&
                                  peaks.far_line < first_line + lines_per_half;
                const int line = here ? peaks.far_line : first_line;
                far_lines[half] = static_cast<std::uint8_t>(line);
                std::memcpy(&far[half], high + line * line_columns, sizeof far[half]);
            }
        }
        scale[at] = block.scale;
        scaled_sum[at] = block.scale * static_cast<float>(sum);
    }
}

}  // namespace drumline::avx2

#else  // Never chosen elsewhere (available_paths says so); here so that the tables are complete.

namespace drumline::avx2 {
Kernels kernels(WeightKind kind, bool fine) { return portable::kernels(kind, fine); }
void quantize_blocks(const float* x, std::int64_t row, std::int64_t first, std::int64_t last,
                     Activations& to) {
    portable::quantize_blocks(x, row, first, last, to);
}
}  // namespace drumline::avx2

#endif
