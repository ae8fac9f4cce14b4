// Sixteen floats at a time. Included after vec_avx2.hpp, between DRUMLINE_BEGIN_AVX512 and
// DRUMLINE_END, inside a namespace of its own (hence no guard).

typedef float v16f __attribute__((vector_size(64)));
using wide = v16f;

DRUMLINE_INLINE v16f load16(const float* from) { return (v16f)_mm512_loadu_ps(from); }

DRUMLINE_INLINE v16f load16(const _Float16* from) {
    return (v16f)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// bfloat16
DRUMLINE_INLINE v16f load16(const std::uint16_t* from) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return (v16f)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
}

DRUMLINE_INLINE v16f load16(const std::int8_t* from) {
    const __m128i small = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return (v16f)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(small));
}

template <>
DRUMLINE_INLINE v16f all(float value) {
    return (v16f)_mm512_set1_ps(value);
}

// a * b + c, rounded once
DRUMLINE_INLINE v16f multiply_add(v16f a, v16f b, v16f c) {
    return (v16f)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

// total + the first eight + the others
DRUMLINE_INLINE v8f add_eights(v8f total, v16f v) {
    const __m512d pairs = _mm512_castps_pd((__m512)v);
    return (total + (v8f)_mm512_castps512_ps256((__m512)v)) +
           (v8f)_mm256_castpd_ps(_mm512_extractf64x4_pd(pairs, 1));
}
