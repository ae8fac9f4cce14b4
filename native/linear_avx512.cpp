// Linear kernels for AVX-512 with VNNI: one vector is 4 columns of 16 outputs, and a broadcast
// activation is an operand of the multiplication. Equal integers and equal float operations as in
// the AVX2 kernels, hence equal bits.
#include "linear_kernels.hpp"

#if defined(__x86_64__)

// GCC 12 takes the "undefined" operand of its own intrinsics for a mistake (bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <cstring>

#define DRUMLINE_VNNI __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")))
#define DRUMLINE_VNNI_INLINE DRUMLINE_VNNI __attribute__((always_inline)) inline

namespace drumline::avx512_vnni {
namespace {

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

// Line g (columns 4g .. 4g + 3) of a block as bytes, and its scale d and minimum m.
struct Nibbles {
    static constexpr int halves = 1;
    DRUMLINE_VNNI_INLINE static __m512i line(const std::uint8_t* quanta, int g) {
        const __m512i packed = line_at(quanta + g / 2 * line_bytes);
        return _mm512_and_si512(g % 2 == 0 ? packed : _mm512_srli_epi16(packed, 4),
                                _mm512_set1_epi8(15));
    }
    DRUMLINE_VNNI_INLINE static __m512 m(const std::uint8_t*, std::int64_t) {
        return _mm512_setzero_ps();
    }
};

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
    DRUMLINE_VNNI_INLINE static __m512 d(const std::uint8_t* scales, std::int64_t at, int half) {
        return _mm512_mul_ps(halves16(scales), signed16(scales + 64 + 16 * (2 * at + half)));
    }
};

// One block of weights times R rows, P of whose `stride` planes (high bytes, low bytes) count.
template <typename Kind, int R, int P, int stride>
DRUMLINE_VNNI_INLINE void add_block(const TileJob& job, std::int64_t b, __m512 (&total)[R]) {
    constexpr int lines_per_half = 8 / Kind::halves;
    constexpr PackedLayout packed = packed_layout(Kind::kind);
    const std::uint8_t* scales = job.weights + packed.unit(b);
    const std::uint8_t* quanta = job.weights + packed.quanta(b);
    const std::int64_t at = b % packed.unit_blocks;
    const std::int8_t* q = job.q + b * R * stride * block_columns;
#pragma GCC unroll 2
    for (int half = 0; half < Kind::halves; ++half) {
        const std::int32_t* offset = job.offset + (b * Kind::halves + half) * R;
        __m512i dots[R][P];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            dots[r][0] = _mm512_setzero_si512();
            dots[r][P - 1] = _mm512_setzero_si512();
            if constexpr (Kind::offset && P == stride) {
                dots[r][P - 1] = _mm512_set1_epi32(offset[r]);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < lines_per_half; ++i) {
            const int g = half * lines_per_half + i;
            const __m512i w = Kind::line(quanta, g);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
                for (int p = 0; p < P; ++p) {
                    const __m512i x = broadcast4(q + (r * stride + p) * block_columns + 4 * g);
                    dots[r][p] = _mm512_dpbusd_epi32(dots[r][p], w, x);
                }
            }
        }
        const __m512 d = Kind::d(scales, at, half);
        const __m512 m = Kind::m(scales, at);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            __m512i dot = dots[r][0];
            if constexpr (stride == 2) {
                dot = _mm512_slli_epi32(dot, 8);
                if constexpr (P == 2) {
                    dot = _mm512_add_epi32(dot, dots[r][1]);
                } else if constexpr (Kind::offset) {
                    dot = _mm512_add_epi32(dot, _mm512_set1_epi32(offset[r]));
                }
            }
            const __m512 scale = _mm512_mul_ps(d, _mm512_set1_ps(job.scale[b * R + r]));
            total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, total[r]);
            if constexpr (Kind::minimum) {
                total[r] =
                    _mm512_fmadd_ps(m, _mm512_set1_ps(job.scaled_sum[b * R + r]), total[r]);
            }
        }
    }
}

// R rows of P planes. Low bytes of a block where no row has any are left out.
template <typename Kind, int R, int P>
DRUMLINE_VNNI void tile(const TileJob& job) {
    __m512 total[R];
    for (int r = 0; r < R; ++r) {
        total[r] = _mm512_setzero_ps();
    }
    for (std::int64_t b = 0; b < job.columns / block_columns; ++b) {
        if (P == 2 && job.loud[b] != 0) {
            add_block<Kind, R, P, P>(job, b, total);
        } else {
            add_block<Kind, R, 1, P>(job, b, total);
        }
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

template <typename Kind, int P>
Kernels planes() {
    return {{8, P == 2 ? Numbers::pairs : Numbers::bytes, P == 2, packed_layout(Kind::kind).zero,
             Kind::halves},
            {tile<Kind, 1, P>, tile<Kind, 2, P>, tile<Kind, 3, P>, tile<Kind, 4, P>,
             tile<Kind, 5, P>, tile<Kind, 6, P>, tile<Kind, 7, P>, tile<Kind, 8, P>}};
}

template <typename Kind>
Kernels integers(bool fine) {
    return fine ? planes<Kind, 2>() : planes<Kind, 1>();
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
