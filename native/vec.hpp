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

DRUMLINE_INLINE v8f splat(float value) {
    return v8f{value, value, value, value, value, value, value, value};
}

// ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7))
DRUMLINE_INLINE float sum8(v8f v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// e to the x, for x <= 0 mostly: Cody and Waite reduction, then a polynomial of degree 5 (the
// coefficients of the Cephes library's expf). Relative error below 2e-7; exact 0 below -87.3.
DRUMLINE_INLINE v8f exp8(v8f x) {
    const v8f low = splat(-87.3365448F);
    const v8f high = splat(88.3762626F);
    const v8i under = x < low;
    v8f y = x > high ? high : x;
    y = y < low ? low : y;
    const v8f magic = splat(12582912.0F);  // 1.5 * 2^23: adding it rounds to an integer
    const v8f n = (y * splat(1.44269504F) + magic) - magic;
    const v8f r = (y - n * splat(0.693359375F)) - n * splat(-2.12194440e-4F);
    v8f p = splat(1.9875691500e-4F);
    p = p * r + splat(1.3981999507e-3F);
    p = p * r + splat(8.3334519073e-3F);
    p = p * r + splat(4.1665795894e-2F);
    p = p * r + splat(1.6666665459e-1F);
    p = p * r + splat(5.0000001201e-1F);
    p = (p * (r * r) + r) + splat(1.0F);
    const v8i exponent = (__builtin_convertvector(n, v8i) + 127) << 23;
    v8f scale;
    std::memcpy(&scale, &exponent, sizeof scale);
    const v8f value = p * scale;
    // Not a number stays one.
    const v8f kept = under ? splat(0.0F) : value;
    return x == x ? kept : x;
}

DRUMLINE_INLINE float exp1(float x) { return exp8(splat(x))[0]; }

}  // namespace drumline
