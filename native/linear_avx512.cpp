// Linear kernels for AVX-512 with VNNI: one vector is 4 columns of 16 outputs, and a broadcast
// activation is an operand of the multiplication. Equal integers and equal float operations as in
// the AVX2 kernels, hence equal bits.
#include "linear_kernels.hpp"

#if defined(__x86_64__)

// GCC 12 takes the "undefined" operand of its own intrinsics for a mistake (bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <cstring>

#define DRUMLINE_VNNI __attribute__((target("avx2,fma,f16c,prfchw,avx512f,avx512bw,avx512vl,avx512vnni")))
#define DRUMLINE_VNNI_INLINE DRUMLINE_VNNI __attribute__((always_inline)) inline

namespace drumline::avx512_vnni {
namespace {

// Tiles of more than two rows take so long over a block that the processor does not read ahead. This
// far ahead may be beyond the weights' end: asking for memory that is not there does no harm.
constexpr std::size_t prefetch_bytes = 4096;

DRUMLINE_VNNI_INLINE __m512i line_at(const std::uint8_t* at) {
    return _mm512_loadu_si512(at);
}

DRUMLINE_VNNI_INLINE __m512i broadcast4(const std::int8_t* q) {
    std::int32_t word = 0;
    std::memcpy(&word, q, sizeof word);
    return _mm512_set1_epi32(word);
}

DRUMLINE_VNNI_INLINE __m512 halves16(const std::uint8_t* at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

DRUMLINE_VNNI_INLINE __m512 unsigned16(const std::uint8_t* at) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
}

DRUMLINE_VNNI_INLINE __m512 signed16(const std::uint8_t* at) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
}

DRUMLINE_VNNI_INLINE void store(const TileJob& job, int row, __m512 total) {
    const auto mask = static_cast<__mmask16>((1U << job.outputs) - 1U);
    _mm512_mask_storeu_ps(job.out + row * job.out_stride, mask, total);
}

// How far a line of nibbles that begins at an even or odd place is from being the upper ones.
constexpr std::int32_t up[2] = {4, 0};
// And from being the lower ones.
constexpr std::int32_t down[2] = {0, 4};

// Line g (columns 4g .. 4g + 3) of a block as bytes, its scale d and minimum m, and `add_far`:
// sum + far_step * (line g times the high parts).
struct Nibbles {
    static constexpr int halves = 1;
    DRUMLINE_VNNI_INLINE static __m512i line(const std::uint8_t* quanta, int g) {
        const __m512i packed = line_at(quanta + g / 2 * line_bytes);
        return _mm512_and_si512(g % 2 == 0 ? packed : _mm512_srli_epi16(packed, 4),
                                _mm512_set1_epi8(15));
    }
    // Nibbles that are left where they are in the upper half of their byte count 16 times.
    DRUMLINE_VNNI_INLINE static __m512i add_far(const std::uint8_t* quanta, int g, __m512i high,
                                                __m512i sum) {
        static_assert(far_step == 16);
        const __m512i w = _mm512_and_si512(
            _mm512_sllv_epi32(line_at(quanta + g / 2 * line_bytes), _mm512_set1_epi32(up[g % 2])),
            _mm512_set1_epi8(static_cast<char>(0xF0)));
        return _mm512_dpbusd_epi32(sum, w, high);
    }
    DRUMLINE_VNNI_INLINE static __m512 m(const std::uint8_t*, std::int64_t) {
        return _mm512_setzero_ps();
    }
};

DRUMLINE_VNNI_INLINE __m512i add_far_bytes(__m512i w, __m512i high, __m512i sum) {
    const __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w, high);
    return _mm512_add_epi32(sum, _mm512_slli_epi32(dot, far_shift));
}

struct Q4_0 : Nibbles {
    static constexpr WeightKind kind = WeightKind::q4_0;
    static constexpr bool minimum = false, offset = true;
    DRUMLINE_VNNI_INLINE static __m512 d(const std::uint8_t* scales, std::int64_t at, int) {
        return halves16(scales + 32 * at);
    }
};

struct Q4_1 : Nibbles {
    static constexpr WeightKind kind = WeightKind::q4_1;
    static constexpr bool minimum = true, offset = false;
    DRUMLINE_VNNI_INLINE static __m512 d(const std::uint8_t* scales, std::int64_t, int) {
        return halves16(scales);
    }
    DRUMLINE_VNNI_INLINE static __m512 m(const std::uint8_t* scales, std::int64_t) {
        return halves16(scales + 32);
    }
};

struct Q4_K : Nibbles {
    static constexpr WeightKind kind = WeightKind::q4_k;
    static constexpr bool minimum = true, offset = false;
    DRUMLINE_VNNI_INLINE static __m512 d(const std::uint8_t* scales, std::int64_t at, int) {
        return _mm512_mul_ps(halves16(scales), unsigned16(scales + 64 + 32 * at));
    }
    DRUMLINE_VNNI_INLINE static __m512 m(const std::uint8_t* scales, std::int64_t at) {
        return _mm512_mul_ps(halves16(scales + 32), unsigned16(scales + 80 + 32 * at));
    }
};

struct Q8_0 : Nibbles {
    static constexpr WeightKind kind = WeightKind::q8_0;
    static constexpr bool minimum = false, offset = true;
    DRUMLINE_VNNI_INLINE static __m512i line(const std::uint8_t* quanta, int g) {
        return line_at(quanta + g * line_bytes);
    }
    DRUMLINE_VNNI_INLINE static __m512i add_far(const std::uint8_t* quanta, int g, __m512i high,
                                                __m512i sum) {
        return add_far_bytes(line(quanta, g), high, sum);
    }
    DRUMLINE_VNNI_INLINE static __m512 d(const std::uint8_t* scales, std::int64_t at, int) {
        return halves16(scales + 32 * at);
    }
};

struct Q6_K : Nibbles {
    static constexpr WeightKind kind = WeightKind::q6_k;
    static constexpr int halves = 2;
    static constexpr bool minimum = false, offset = true;
    DRUMLINE_VNNI_INLINE static __m512i line(const std::uint8_t* quanta, int g) {
        const __m512i two = line_at(quanta + (4 + g / 4) * line_bytes);
        const __m512i high = g % 4 == 0   ? _mm512_slli_epi16(two, 4)
                             : g % 4 == 1 ? _mm512_slli_epi16(two, 2)
                             : g % 4 == 2 ? two
                                          : _mm512_srli_epi16(two, 2);
        return _mm512_or_si512(Nibbles::line(quanta, g),
                               _mm512_and_si512(high, _mm512_set1_epi8(48)));
    }
    DRUMLINE_VNNI_INLINE static __m512i add_far(const std::uint8_t* quanta, int g, __m512i high,
                                                __m512i sum) {
        const __m512i four = _mm512_srlv_epi32(line_at(quanta + g / 2 * line_bytes),
                                               _mm512_set1_epi32(down[g % 2]));
        const __m512i two = _mm512_srlv_epi32(line_at(quanta + (4 + g / 4) * line_bytes),
                                              _mm512_set1_epi32(2 * (g % 4)));
        const __m512i w = _mm512_or_si512(
            _mm512_and_si512(four, _mm512_set1_epi8(15)),
            _mm512_slli_epi32(_mm512_and_si512(two, _mm512_set1_epi8(3)), 4));
        return add_far_bytes(w, high, sum);
    }
    DRUMLINE_VNNI_INLINE static __m512 d(const std::uint8_t* scales, std::int64_t at, int half) {
        return _mm512_mul_ps(halves16(scales), signed16(scales + 64 + 16 * (2 * at + half)));
    }
};

// One block of weights times R rows.
template <typename Kind, int R, bool fine>
DRUMLINE_VNNI_INLINE void add_block(const TileJob& job, std::int64_t b, __m512 (&total)[R]) {
    constexpr int lines_per_half = 8 / Kind::halves;
    constexpr PackedLayout packed = packed_layout(Kind::kind);
    const std::uint8_t* scales = job.weights + packed.unit(b);
    const std::uint8_t* quanta = job.weights + packed.quanta(b);
    const std::int64_t at = b % packed.unit_blocks;
    const std::int8_t* q = job.q + b * R * block_columns;
    if constexpr (R > 2) {
#pragma GCC unroll 9
        for (std::size_t at = 0; at < packed.quanta_bytes + line_bytes; at += line_bytes) {
            __builtin_prefetch(quanta + prefetch_bytes + at);
        }
    }
#pragma GCC unroll 2
    for (int half = 0; half < Kind::halves; ++half) {
        const std::int64_t first = (b * Kind::halves + half) * R;
        __m512i dots[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            dots[r] = _mm512_setzero_si512();
            if constexpr (Kind::offset) {
                dots[r] = _mm512_set1_epi32(job.offset[first + r]);
            }
            if constexpr (fine) {
                dots[r] = Kind::add_far(quanta, job.far_line[first + r],
                                        _mm512_set1_epi32(job.far[first + r]), dots[r]);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < lines_per_half; ++i) {
            const int g = half * lines_per_half + i;
            const __m512i w = Kind::line(quanta, g);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                dots[r] = _mm512_dpbusd_epi32(dots[r], w, broadcast4(q + r * block_columns + 4 * g));
            }
        }
        const __m512 d = Kind::d(scales, at, half);
        const __m512 m = Kind::m(scales, at);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m512 scale = _mm512_mul_ps(d, _mm512_set1_ps(job.scale[b * R + r]));
            total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r]), scale, total[r]);
            if constexpr (Kind::minimum) {
                total[r] =
                    _mm512_fmadd_ps(m, _mm512_set1_ps(job.scaled_sum[b * R + r]), total[r]);
            }
        }
    }
}

template <typename Kind, int R, bool fine>
DRUMLINE_VNNI void tile(const TileJob& job) {
    __m512 total[R];
    for (int r = 0; r < R; ++r) {
        __builtin_prefetch(job.out + r * job.out_stride, 1);  // another core may have read it last
        total[r] = _mm512_setzero_ps();
    }
    for (std::int64_t b = 0; b < job.columns / block_columns; ++b) {
        add_block<Kind, R, fine>(job, b, total);
    }
    for (int r = 0; r < R; ++r) {
        store(job, r, total[r]);
    }
}

struct F32 {
    static constexpr std::size_t bytes = 4;
    DRUMLINE_VNNI_INLINE static __m512 load(const std::uint8_t* at) { return _mm512_loadu_ps(at); }
};

struct F16 {
    static constexpr std::size_t bytes = 2;
    DRUMLINE_VNNI_INLINE static __m512 load(const std::uint8_t* at) { return halves16(at); }
};

struct BF16 {
    static constexpr std::size_t bytes = 2;
    DRUMLINE_VNNI_INLINE static __m512 load(const std::uint8_t* at) {
        const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
};

template <typename Weight, int R>
DRUMLINE_VNNI void dense_tile(const TileJob& job) {
    __m512 total[R];
    for (int r = 0; r < R; ++r) {
        total[r] = _mm512_setzero_ps();
    }
    for (std::int64_t k = 0; k < job.columns; ++k) {
        const __m512 w = Weight::load(job.weights + k * group_outputs * Weight::bytes);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            total[r] = _mm512_fmadd_ps(_mm512_set1_ps(job.x[r * job.x_stride + k]), w, total[r]);
        }
    }
    for (int r = 0; r < R; ++r) {
        store(job, r, total[r]);
    }
}

template <typename Kind, bool fine>
Kernels bytes() {
    return {{8, Numbers::bytes, fine, packed_layout(Kind::kind).zero, Kind::halves},
            {tile<Kind, 1, fine>, tile<Kind, 2, fine>, tile<Kind, 3, fine>, tile<Kind, 4, fine>,
             tile<Kind, 5, fine>, tile<Kind, 6, fine>, tile<Kind, 7, fine>, tile<Kind, 8, fine>}};
}

template <typename Kind>
Kernels integers(bool fine) {
    return fine ? bytes<Kind, true>() : bytes<Kind, false>();
}

template <typename Weight>
Kernels floats() {
    return {{8, Numbers::none, false, 0, 1},
            {dense_tile<Weight, 1>, dense_tile<Weight, 2>, dense_tile<Weight, 3>,
             dense_tile<Weight, 4>, dense_tile<Weight, 5>, dense_tile<Weight, 6>,
             dense_tile<Weight, 7>, dense_tile<Weight, 8>}};
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

}  // namespace drumline::avx512_vnni

#else  // Never chosen elsewhere (available_paths says so); here so that the table is complete.

namespace drumline::avx512_vnni {
Kernels kernels(WeightKind kind, bool fine) { return portable::kernels(kind, fine); }
}  // namespace drumline::avx512_vnni

#endif
