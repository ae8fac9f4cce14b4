// What compilers make poor code of from vec.hpp, in AVX2's own words. Included between
// DRUMLINE_BEGIN_AVX2 and DRUMLINE_END, inside a namespace of its own (hence no guard), whose
// names then hide those of vec.hpp. Same results.

DRUMLINE_INLINE v8f load8(const float* from) { return (v8f)_mm256_loadu_ps(from); }

DRUMLINE_INLINE v8f splat(float value) { return (v8f)_mm256_set1_ps(value); }

template <typename Vector>
DRUMLINE_INLINE Vector all(float value) {
    return splat(value);
}

DRUMLINE_INLINE v8f load8(const _Float16* from) {
    return (v8f)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

DRUMLINE_INLINE void store8(float* to, v8f value) { _mm256_storeu_ps(to, (__m256)value); }

DRUMLINE_INLINE void store8(_Float16* to, v8f value) {
    const __m128i half = _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), half);
}

// bfloat16
DRUMLINE_INLINE v8f load8(const std::uint16_t* from) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return (v8f)_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
}

DRUMLINE_INLINE v8f load8(const std::int8_t* from) {
    const __m128i small = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return (v8f)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(small));
}

// a * b + c, rounded once
DRUMLINE_INLINE v8f multiply_add(v8f a, v8f b, v8f c) {
    return (v8f)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

DRUMLINE_INLINE float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
