// Linear kernels for AVX2 + FMA + F16C, and for AVX-512 VNNI on 256-bit vectors.
//
// Every weight vector is unpacked once for up to 4 rows. In the 4-bit kernel the sums of a whole
// block of 32 columns fit 16 bits (8 x 2 x 15 x 127 = 30,480), so they are widened and scaled once
// per block and row. The two paths compute equal integers and the same float operations.
#include "linear_kernels.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

#define DRUMLINE_AVX2 __attribute__((target("avx2,fma,f16c")))
#define DRUMLINE_VNNI __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")))

namespace drumline {
namespace {

constexpr int rows_per_tile = 4;

template <int R>
struct Tile {
    const std::int8_t* q[R];
    const float* scale[R];
    const float* scaled_sum[R];
    const std::int32_t* sum[R];
};

template <int R>
Tile<R> tile_at(const GroupJob& job, std::int64_t first) {
    const std::int64_t blocks = job.columns / block_columns;
    Tile<R> tile;
    for (int r = 0; r < R; ++r) {
        tile.q[r] = job.quantized->q.data() + (first + r) * job.columns;
        tile.scale[r] = job.quantized->scale.data() + (first + r) * blocks;
        tile.scaled_sum[r] = job.quantized->scaled_sum.data() + (first + r) * blocks;
        tile.sum[r] = job.quantized->sum.data() + (first + r) * blocks;
    }
    return tile;
}

DRUMLINE_AVX2 inline void store(const GroupJob& job, std::int64_t row, __m256 total) {
    float* out = job.out + row * job.out_stride;
    if (job.outputs == group_outputs) {
        _mm256_storeu_ps(out, total);
    } else {
        alignas(32) float lanes[group_outputs];
        _mm256_store_ps(lanes, total);
        std::memcpy(out, lanes, sizeof(float) * job.outputs);
    }
}

DRUMLINE_AVX2 inline __m256i four_columns(const std::int8_t* q) {
    std::int32_t word = 0;
    std::memcpy(&word, q, sizeof word);
    return _mm256_set1_epi32(word);
}

DRUMLINE_AVX2 inline __m256 halves(const std::uint8_t* at) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}

DRUMLINE_AVX2 inline __m256i bytes32(const std::uint8_t* at) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}

template <int R>
DRUMLINE_AVX2 void q4_tile_avx2(const GroupJob& job, std::int64_t first) {
    const Tile<R> tile = tile_at<R>(job, first);
    const std::int64_t blocks = job.columns / block_columns;
    const __m256i low_nibbles = _mm256_set1_epi8(15);
    const __m256i ones = _mm256_set1_epi16(1);
    __m256 total[R];
    for (int r = 0; r < R; ++r) {
        total[r] = _mm256_setzero_ps();
    }
    for (std::int64_t b = 0; b < blocks; ++b) {
        const std::uint8_t* block = job.weights + b * q4_block_bytes;
        __m256i dots[R];
        for (int r = 0; r < R; ++r) {
            dots[r] = _mm256_setzero_si256();
        }
        for (int v = 0; v < 4; ++v) {
            const __m256i packed = bytes32(block + 32 + v * 32);
            const __m256i low = _mm256_and_si256(packed, low_nibbles);
            const __m256i high = _mm256_and_si256(_mm256_srli_epi16(packed, 4), low_nibbles);
            for (int r = 0; r < R; ++r) {
                const std::int8_t* q = tile.q[r] + b * block_columns + 8 * v;
                dots[r] = _mm256_add_epi16(dots[r], _mm256_maddubs_epi16(low, four_columns(q)));
                dots[r] = _mm256_add_epi16(dots[r], _mm256_maddubs_epi16(high, four_columns(q + 4)));
            }
        }
        const __m256 d = halves(block);
        const __m256 m = halves(block + 16);
        for (int r = 0; r < R; ++r) {
            const __m256 dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(dots[r], ones));
            const __m256 scale = _mm256_mul_ps(d, _mm256_set1_ps(tile.scale[r][b]));
            total[r] = _mm256_fmadd_ps(dot, scale, total[r]);
            total[r] = _mm256_fmadd_ps(m, _mm256_set1_ps(tile.scaled_sum[r][b]), total[r]);
        }
    }
    for (int r = 0; r < R; ++r) {
        store(job, first + r, total[r]);
    }
}

template <int R>
DRUMLINE_VNNI void q4_tile_vnni(const GroupJob& job, std::int64_t first) {
    const Tile<R> tile = tile_at<R>(job, first);
    const std::int64_t blocks = job.columns / block_columns;
    const __m256i low_nibbles = _mm256_set1_epi8(15);
    __m256 total[R];
    for (int r = 0; r < R; ++r) {
        total[r] = _mm256_setzero_ps();
    }
    for (std::int64_t b = 0; b < blocks; ++b) {
        const std::uint8_t* block = job.weights + b * q4_block_bytes;
        __m256i low_dots[R];
        __m256i high_dots[R];
        for (int r = 0; r < R; ++r) {
            low_dots[r] = _mm256_setzero_si256();
            high_dots[r] = _mm256_setzero_si256();
        }
        for (int v = 0; v < 4; ++v) {
            const __m256i packed = bytes32(block + 32 + v * 32);
            const __m256i low = _mm256_and_si256(packed, low_nibbles);
            const __m256i high = _mm256_and_si256(_mm256_srli_epi16(packed, 4), low_nibbles);
            for (int r = 0; r < R; ++r) {
                const std::int8_t* q = tile.q[r] + b * block_columns + 8 * v;
                low_dots[r] = _mm256_dpbusd_epi32(low_dots[r], low, four_columns(q));
                high_dots[r] = _mm256_dpbusd_epi32(high_dots[r], high, four_columns(q + 4));
            }
        }
        const __m256 d = halves(block);
        const __m256 m = halves(block + 16);
        for (int r = 0; r < R; ++r) {
            const __m256 dot = _mm256_cvtepi32_ps(_mm256_add_epi32(low_dots[r], high_dots[r]));
            const __m256 scale = _mm256_mul_ps(d, _mm256_set1_ps(tile.scale[r][b]));
            total[r] = _mm256_fmadd_ps(dot, scale, total[r]);
            total[r] = _mm256_fmadd_ps(m, _mm256_set1_ps(tile.scaled_sum[r][b]), total[r]);
        }
    }
    for (int r = 0; r < R; ++r) {
        store(job, first + r, total[r]);
    }
}

template <int R>
DRUMLINE_AVX2 void q8_tile_avx2(const GroupJob& job, std::int64_t first) {
    const Tile<R> tile = tile_at<R>(job, first);
    const std::int64_t blocks = job.columns / block_columns;
    const __m256i ones = _mm256_set1_epi16(1);
    __m256 total[R];
    for (int r = 0; r < R; ++r) {
        total[r] = _mm256_setzero_ps();
    }
    for (std::int64_t b = 0; b < blocks; ++b) {
        const std::uint8_t* block = job.weights + b * q8_block_bytes;
        __m256i dots[R];
        for (int r = 0; r < R; ++r) {
            dots[r] = _mm256_setzero_si256();
        }
        for (int g = 0; g < 8; ++g) {
            // maddubs wants one unsigned side: the weight's sign moves to the activation.
            const __m256i w = bytes32(block + 16 + g * 32);
            const __m256i magnitude = _mm256_abs_epi8(w);
            for (int r = 0; r < R; ++r) {
                const __m256i q = four_columns(tile.q[r] + b * block_columns + 4 * g);
                const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(q, w));
                dots[r] = _mm256_add_epi32(dots[r], _mm256_madd_epi16(pairs, ones));
            }
        }
        const __m256 d = halves(block);
        for (int r = 0; r < R; ++r) {
            const __m256 scale = _mm256_mul_ps(d, _mm256_set1_ps(tile.scale[r][b]));
            total[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r]), scale, total[r]);
        }
    }
    for (int r = 0; r < R; ++r) {
        store(job, first + r, total[r]);
    }
}

template <int R>
DRUMLINE_VNNI void q8_tile_vnni(const GroupJob& job, std::int64_t first) {
    const Tile<R> tile = tile_at<R>(job, first);
    const std::int64_t blocks = job.columns / block_columns;
    const __m256i flip = _mm256_set1_epi8(static_cast<char>(0x80));
    __m256 total[R];
    for (int r = 0; r < R; ++r) {
        total[r] = _mm256_setzero_ps();
    }
    for (std::int64_t b = 0; b < blocks; ++b) {
        const std::uint8_t* block = job.weights + b * q8_block_bytes;
        __m256i dots[R];
        for (int r = 0; r < R; ++r) {
            dots[r] = _mm256_setzero_si256();
        }
        for (int g = 0; g < 8; ++g) {
            // w + 128 is unsigned; 128 times the activations' sum comes off at the end.
            const __m256i w = _mm256_xor_si256(bytes32(block + 16 + g * 32), flip);
            for (int r = 0; r < R; ++r) {
                const __m256i q = four_columns(tile.q[r] + b * block_columns + 4 * g);
                dots[r] = _mm256_dpbusd_epi32(dots[r], w, q);
            }
        }
        const __m256 d = halves(block);
        for (int r = 0; r < R; ++r) {
            const __m256i dot = _mm256_sub_epi32(dots[r], _mm256_set1_epi32(128 * tile.sum[r][b]));
            const __m256 scale = _mm256_mul_ps(d, _mm256_set1_ps(tile.scale[r][b]));
            total[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, total[r]);
        }
    }
    for (int r = 0; r < R; ++r) {
        store(job, first + r, total[r]);
    }
}

struct F32 {
    static constexpr std::size_t bytes = 4;
    DRUMLINE_AVX2 static __m256 load(const std::uint8_t* at) {
        return _mm256_loadu_ps(reinterpret_cast<const float*>(at));
    }
};

struct F16 {
    static constexpr std::size_t bytes = 2;
    DRUMLINE_AVX2 static __m256 load(const std::uint8_t* at) { return halves(at); }
};

struct BF16 {
    static constexpr std::size_t bytes = 2;
    DRUMLINE_AVX2 static __m256 load(const std::uint8_t* at) {
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    }
};

template <typename Weight, int R>
DRUMLINE_AVX2 void dense_tile(const GroupJob& job, std::int64_t first) {
    const float* x[R];
    __m256 total[R];
    for (int r = 0; r < R; ++r) {
        x[r] = job.x + (first + r) * job.x_stride;
        total[r] = _mm256_setzero_ps();
    }
    for (std::int64_t k = 0; k < job.columns; ++k) {
        const __m256 w = Weight::load(job.weights + k * group_outputs * Weight::bytes);
        for (int r = 0; r < R; ++r) {
            total[r] = _mm256_fmadd_ps(_mm256_set1_ps(x[r][k]), w, total[r]);
        }
    }
    for (int r = 0; r < R; ++r) {
        store(job, first + r, total[r]);
    }
}

using TileKernel = void (*)(const GroupJob&, std::int64_t);

// Full tiles, then one of what is left; a row gets the same operations in either.
void tiles(const GroupJob& job, const TileKernel (&kernels)[rows_per_tile]) {
    std::int64_t row = 0;
    for (; row + rows_per_tile <= job.rows; row += rows_per_tile) {
        kernels[rows_per_tile - 1](job, row);
    }
    if (row < job.rows) {
        kernels[job.rows - row - 1](job, row);
    }
}

template <typename Weight>
void dense(const GroupJob& job) {
    static constexpr TileKernel kernels[] = {dense_tile<Weight, 1>, dense_tile<Weight, 2>,
                                             dense_tile<Weight, 3>, dense_tile<Weight, 4>};
    tiles(job, kernels);
}

}  // namespace

namespace avx2 {

DRUMLINE_AVX2 void quantize_row(const float* x, std::int64_t columns, QuantizedRows& rows,
                                std::int64_t row) {
    const std::int64_t blocks = columns / block_columns;
    const __m256 sign = _mm256_set1_ps(-0.0F);
    for (std::int64_t b = 0; b < blocks; ++b) {
        const float* from = x + b * block_columns;
        __m256 part[4];
        __m256 peak = _mm256_setzero_ps();
        for (int i = 0; i < 4; ++i) {
            part[i] = _mm256_loadu_ps(from + 8 * i);
            peak = _mm256_max_ps(peak, _mm256_andnot_ps(sign, part[i]));
        }
        alignas(32) float lanes[8];
        _mm256_store_ps(lanes, peak);
        float largest = 0;
        for (const float lane : lanes) {
            largest = lane > largest ? lane : largest;
        }
        const float scale = largest / 127.0F;
        const __m256 inverse = _mm256_set1_ps(largest > 0 ? 127.0F / largest : 0.0F);
        __m256i whole[4];
        for (int i = 0; i < 4; ++i) {
            whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps(part[i], inverse));
        }
        // Packing works within 128-bit lanes; the permutation puts the columns back in order.
        const __m256i low = _mm256_packs_epi32(whole[0], whole[1]);
        const __m256i high = _mm256_packs_epi32(whole[2], whole[3]);
        const __m256i packed = _mm256_permutevar8x32_epi32(
            _mm256_packs_epi16(low, high), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        std::int8_t* to = rows.q.data() + row * columns + b * block_columns;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), packed);
        std::int32_t sum = 0;
        for (int i = 0; i < block_columns; ++i) {
            sum += to[i];
        }
        const std::int64_t at = row * blocks + b;
        rows.scale[at] = scale;
        rows.sum[at] = sum;
        rows.scaled_sum[at] = scale * static_cast<float>(sum);
    }
}

void q4(const GroupJob& job) {
    static constexpr TileKernel kernels[] = {q4_tile_avx2<1>, q4_tile_avx2<2>, q4_tile_avx2<3>,
                                             q4_tile_avx2<4>};
    tiles(job, kernels);
}

void q8(const GroupJob& job) {
    static constexpr TileKernel kernels[] = {q8_tile_avx2<1>, q8_tile_avx2<2>, q8_tile_avx2<3>,
                                             q8_tile_avx2<4>};
    tiles(job, kernels);
}

void f32(const GroupJob& job) { dense<F32>(job); }
void f16(const GroupJob& job) { dense<F16>(job); }
void bf16(const GroupJob& job) { dense<BF16>(job); }

}  // namespace avx2

namespace avx512_vnni {

void q4(const GroupJob& job) {
    static constexpr TileKernel kernels[] = {q4_tile_vnni<1>, q4_tile_vnni<2>, q4_tile_vnni<3>,
                                             q4_tile_vnni<4>};
    tiles(job, kernels);
}

void q8(const GroupJob& job) {
    static constexpr TileKernel kernels[] = {q8_tile_vnni<1>, q8_tile_vnni<2>, q8_tile_vnni<3>,
                                             q8_tile_vnni<4>};
    tiles(job, kernels);
}

}  // namespace avx512_vnni
}  // namespace drumline

#else  // Never chosen elsewhere (available_paths says so); here so that the tables are complete.

namespace drumline {
namespace avx2 {
void quantize_row(const float* x, std::int64_t columns, QuantizedRows& rows, std::int64_t row) {
    portable::quantize_row(x, columns, rows, row);
}
void q4(const GroupJob& job) { portable::q4(job); }
void q8(const GroupJob& job) { portable::q8(job); }
void f32(const GroupJob& job) { portable::f32(job); }
void f16(const GroupJob& job) { portable::f16(job); }
void bf16(const GroupJob& job) { portable::bf16(job); }
}  // namespace avx2
namespace avx512_vnni {
void q4(const GroupJob& job) { portable::q4(job); }
void q8(const GroupJob& job) { portable::q8(job); }
}  // namespace avx512_vnni
}  // namespace drumline

#endif
