// Activations become integers of 8 bits, with AVX-512: the same ones as in the AVX2 path, in a fifth of
// its time. What is one number per block (its scale, its sum) is worked out for 16 blocks at once.
#include "linear_kernels.hpp"

#if defined(__x86_64__)

// GCC 12 takes the "undefined" operand of its own intrinsics for a mistake (bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#define DRUMLINE_AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl")))
#define DRUMLINE_AVX512_INLINE DRUMLINE_AVX512 __attribute__((always_inline)) inline

namespace drumline::avx512_vnni {
namespace {

constexpr int batch_blocks = 16;

// Of up to 16 blocks. Magnitudes are compared as bits: infinity and what is no number are largest.
struct Blocks {
    alignas(64) std::int32_t largest[batch_blocks] = {};
    alignas(64) std::int32_t others[batch_blocks] = {};  // outside of the far line
    int far_line[batch_blocks];                          // the first that has the largest
    alignas(64) float inverse[batch_blocks];
    alignas(64) float scale[batch_blocks];
    unsigned some = 0;  // a bit each, see BlockScale
};

// In all places of each quarter of a vector the largest of its four numbers.
DRUMLINE_AVX512_INLINE __m512i largest_of_four(__m512i v) {
    v = _mm512_max_epi32(v, _mm512_shuffle_epi32(v, _MM_PERM_BADC));
    return _mm512_max_epi32(v, _mm512_shuffle_epi32(v, _MM_PERM_CDAB));
}

// In all places the largest of eight numbers.
DRUMLINE_AVX512_INLINE __m256i largest_of_eight(__m256i v) {
    v = _mm256_max_epi32(v, _mm256_permute4x64_epi64(v, 0x4E));
    v = _mm256_max_epi32(v, _mm256_shuffle_epi32(v, 0x4E));
    return _mm256_max_epi32(v, _mm256_shuffle_epi32(v, 0xB1));
}

DRUMLINE_AVX512_INLINE void find_peaks(const float* x, int at, Blocks& to) {
    const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
    const __m512i first = largest_of_four(_mm512_and_si512(_mm512_loadu_si512(x), magnitude));
    const __m512i second = largest_of_four(_mm512_and_si512(_mm512_loadu_si512(x + 16), magnitude));
    const __m512i one_of_each =
        _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m256i lines =
        _mm512_castsi512_si256(_mm512_permutex2var_epi32(first, one_of_each, second));
    const __m256i largest = largest_of_eight(lines);
    const unsigned where = _mm256_cmpeq_epi32_mask(lines, largest);
    to.far_line[at] = __builtin_ctz(where);
    to.largest[at] = _mm_cvtsi128_si32(_mm256_castsi256_si128(largest));
    const auto rest = static_cast<__mmask8>(~(where & (~where + 1)));
    to.others[at] = _mm_cvtsi128_si32(
        _mm256_castsi256_si128(largest_of_eight(_mm256_maskz_mov_epi32(rest, lines))));
}

// `BlockScale` of all 16.
DRUMLINE_AVX512_INLINE void find_scales(Blocks& blocks, bool fine) {
    const __m512 largest = _mm512_castsi512_ps(_mm512_load_si512(blocks.largest));
    const __m512 others = _mm512_castsi512_ps(_mm512_load_si512(blocks.others));
    const __m512 smallest = _mm512_set1_ps(smallest_activation);
    const __mmask16 some =
        _mm512_cmp_ps_mask(largest, smallest, _CMP_GE_OQ) &
        _mm512_cmp_ps_mask(largest, _mm512_set1_ps(std::numeric_limits<float>::max()), _CMP_LE_OQ);
    const __mmask16 none = _mm512_cmp_ps_mask(largest, smallest, _CMP_LT_OQ);
    const __m512 far = _mm512_mul_ps(largest, _mm512_set1_ps(1.0F / far_step));
    const __m512 base = fine ? _mm512_max_ps(others, far) : largest;
    const __m512 byte = _mm512_set1_ps(largest_byte);
    _mm512_store_ps(blocks.inverse, _mm512_maskz_div_ps(some, byte, base));
    const __m512 otherwise = _mm512_mask_mov_ps(
        _mm512_set1_ps(std::numeric_limits<float>::quiet_NaN()), none, _mm512_setzero_ps());
    _mm512_store_ps(blocks.scale, _mm512_mask_div_ps(otherwise, some, base, byte));
    blocks.some = some;
}

// The sums of 16 numbers each: of `first` in place 0, of `second` in place 1.
DRUMLINE_AVX512_INLINE __m128i sums_of(__m512i first, __m512i second) {
    const __m256i a = _mm256_add_epi32(_mm512_castsi512_si256(first),
                                       _mm512_extracti64x4_epi64(first, 1));
    const __m256i b = _mm256_add_epi32(_mm512_castsi512_si256(second),
                                       _mm512_extracti64x4_epi64(second, 1));
    const __m256i pairs = _mm256_hadd_epi32(a, b);
    const __m256i fours = _mm256_hadd_epi32(pairs, pairs);
    return _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
}

// 32 integers of 16 bits at most → bytes in order.
DRUMLINE_AVX512_INLINE __m256i bytes_of(__m512i first, __m512i second) {
    const __m512i words = _mm512_packs_epi32(first, second);
    const __m512i bytes = _mm512_packs_epi16(words, words);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm512_castsi512_si256(_mm512_permutexvar_epi32(order, bytes));
}

}  // namespace

DRUMLINE_AVX512 void quantize_blocks(const float* x, std::int64_t row, std::int64_t begin,
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
    x += begin * block_columns;
    for (std::int64_t from = begin; from < end; from += batch_blocks) {
        const int count = static_cast<int>(std::min<std::int64_t>(batch_blocks, end - from));
        Blocks blocks;
        for (int i = 0; i < count; ++i) {
            find_peaks(x + i * block_columns, i, blocks);
        }
        find_scales(blocks, layout.fine);
        for (int i = 0; i < count; ++i, x += block_columns) {
            const std::int64_t at = place.block(from + i);
            const auto some = static_cast<__mmask16>((blocks.some >> i & 1U) != 0 ? 0xFFFF : 0);
            const __m512 inverse = _mm512_set1_ps(blocks.inverse[i]);
            const __m512i first =
                _mm512_maskz_cvtps_epi32(some, _mm512_mul_ps(_mm512_loadu_ps(x), inverse));
            const __m512i second =
                _mm512_maskz_cvtps_epi32(some, _mm512_mul_ps(_mm512_loadu_ps(x + 16), inverse));
            const __m128i both = sums_of(first, second);
            const std::int32_t sums[2] = {_mm_cvtsi128_si32(both), _mm_extract_epi32(both, 1)};
            const std::int32_t sum = sums[0] + sums[1];
            std::int8_t* const own = q + at * block_columns;
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(own), bytes_of(first, second));
            const int far_line = blocks.far_line[i];
            std::int32_t high_bytes = 0;
            if (layout.fine) {  // the far line again, which the bytes above do not hold
                const __m128i words = _mm_maskz_cvtps_epi32(
                    static_cast<__mmask8>(some),
                    _mm_mul_ps(_mm_loadu_ps(x + far_line * line_columns),
                               _mm512_castps512_ps128(inverse)));
                const __m128i high = _mm_srai_epi32(
                    _mm_add_epi32(words, _mm_set1_epi32(far_step / 2)), far_shift);
                const __m128i low = _mm_sub_epi32(words, _mm_slli_epi32(high, far_shift));
                const __m128i packed = _mm_packs_epi32(low, high);
                const std::int64_t two = _mm_cvtsi128_si64(_mm_packs_epi16(packed, packed));
                const auto low_bytes = static_cast<std::int32_t>(two);
                std::memcpy(own + far_line * line_columns, &low_bytes, sizeof low_bytes);
                high_bytes = static_cast<std::int32_t>(two >> 32);
            }
            for (int h = 0; h < layout.halves; ++h) {
                const std::int64_t half = place.half(from + i, h, layout.halves, row_in_tile);
                offset[half] = -layout.zero * (layout.halves == 1 ? sum : sums[h]);
                if (layout.fine) {
                    const int first_line = h * lines_per_half;
                    const bool here = far_line >= first_line && far_line < first_line + lines_per_half;
                    far_lines[half] = static_cast<std::uint8_t>(here ? far_line : first_line);
                    far[half] = here ? high_bytes : 0;
                }
            }
            scale[at] = blocks.scale[i];
            scaled_sum[at] = blocks.scale[i] * static_cast<float>(sum);
        }
    }
}

}  // namespace drumline::avx512_vnni

#else  // Never chosen elsewhere (available_paths says so); here so that the table is complete.

namespace drumline::avx512_vnni {
void quantize_blocks(const float* x, std::int64_t row, std::int64_t first, std::int64_t last,
                     Activations& to) {
    portable::quantize_blocks(x, row, first, last, to);
}
}  // namespace drumline::avx512_vnni

#endif
