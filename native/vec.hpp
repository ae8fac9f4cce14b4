// Eight floats at a time in portable vector code, compiled once per instruction set.
//
// Products and sums are rounded one by one (no contraction), and reductions have a fixed order, so
// every instruction set gives the same bits here.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define DRUMLINE_INLINE inline __attribute__((always_inline))

#if defined(__aarch64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#define _Float16 __fp16  // GCC 12 has the type under Arm's name only
#endif

namespace drumline {

typedef float v8f __attribute__((vector_size(32)));
typedef std::int32_t v8i __attribute__((vector_size(32)));

constexpr int lanes = 8;

template <typename Vector>
constexpr int lanes_of = sizeof(Vector) / sizeof(float);

DRUMLINE_INLINE v8f load8(const float* from) {
    v8f out;
    std::memcpy(&out, from, sizeof out);
    return out;
}

typedef _Float16 v8h __attribute__((vector_size(16)));
typedef std::uint16_t v8u __attribute__((vector_size(16)));

DRUMLINE_INLINE v8f load8(const _Float16* from) {
    v8h half;
    std::memcpy(&half, from, sizeof half);
    return __builtin_convertvector(half, v8f);
}

// bfloat16: the upper half of a float32.
DRUMLINE_INLINE v8f load8(const std::uint16_t* from) {
    v8u half;
    std::memcpy(&half, from, sizeof half);
    const v8i bits = __builtin_convertvector(half, v8i) << 16;
    v8f out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

typedef std::int8_t v8c __attribute__((vector_size(8)));

DRUMLINE_INLINE v8f load8(const std::int8_t* from) {
    v8c small;
    std::memcpy(&small, from, sizeof small);
    return __builtin_convertvector(__builtin_convertvector(small, v8i), v8f);
}

DRUMLINE_INLINE float load1(const float* from) { return *from; }

DRUMLINE_INLINE float load1(const std::int8_t* from) { return static_cast<float>(*from); }

DRUMLINE_INLINE float load1(const _Float16* from) { return static_cast<float>(*from); }

DRUMLINE_INLINE float load1(const std::uint16_t* from) {
    const std::uint32_t bits = static_cast<std::uint32_t>(*from) << 16;
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

DRUMLINE_INLINE void store8(float* to, v8f value) { std::memcpy(to, &value, sizeof value); }

// Rounded to nearest even.
DRUMLINE_INLINE void store8(_Float16* to, v8f value) {
    const v8h half = __builtin_convertvector(value, v8h);
    std::memcpy(to, &half, sizeof half);
}

DRUMLINE_INLINE v8f splat(float value) {
    return v8f{value, value, value, value, value, value, value, value};
}

DRUMLINE_INLINE v8f add_eights(v8f total, v8f v) { return total + v; }

// ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7))
DRUMLINE_INLINE float sum8(v8f v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// Vectors of any length.
template <typename Vector>
DRUMLINE_INLINE Vector all(float value) {
    return value - Vector{};  // -0 stays -0
}

template <typename Vector>
DRUMLINE_INLINE void store(float* to, Vector value) {
    std::memcpy(to, &value, sizeof value);
}

// e to the x, for x <= 0 mostly: Cody and Waite reduction, then a polynomial of degree 5 (the
// coefficients of the Cephes library's expf). Relative error below 2e-7; exact 0 below -87.3.
template <typename Vector>
DRUMLINE_INLINE Vector exponential(Vector x) {
    using Integers = decltype(x < x);
    const Vector low = all<Vector>(-87.3365448F);
    const Vector high = all<Vector>(88.3762626F);
    const Integers under = x < low;
    Vector y = x > high ? high : x;
    y = y < low ? low : y;
    const Vector magic = all<Vector>(12582912.0F);  // 1.5 * 2^23: adding it rounds to an integer
    const Vector n = (y * all<Vector>(1.44269504F) + magic) - magic;
    const Vector r = (y - n * all<Vector>(0.693359375F)) - n * all<Vector>(-2.12194440e-4F);
    Vector p = all<Vector>(1.9875691500e-4F);
    p = p * r + all<Vector>(1.3981999507e-3F);
    p = p * r + all<Vector>(8.3334519073e-3F);
    p = p * r + all<Vector>(4.1665795894e-2F);
    p = p * r + all<Vector>(1.6666665459e-1F);
    p = p * r + all<Vector>(5.0000001201e-1F);
    p = (p * (r * r) + r) + all<Vector>(1.0F);
    const Integers exponent = (__builtin_convertvector(n, Integers) + 127) << 23;
    Vector scale;
    std::memcpy(&scale, &exponent, sizeof scale);
    const Vector value = p * scale;
    // Not a number stays one.
    const Vector kept = under ? all<Vector>(0.0F) : value;
    return x == x ? kept : x;
}

DRUMLINE_INLINE v8f exp8(v8f x) { return exponential(x); }

DRUMLINE_INLINE float exp1(float x) { return exp8(splat(x))[0]; }

}  // namespace drumline
