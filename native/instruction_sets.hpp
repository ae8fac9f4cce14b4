// Compiling the same portable vector code once per instruction set: what stands between
// DRUMLINE_BEGIN_AVX2 and DRUMLINE_END_AVX2 may use AVX2, FMA and F16C, whatever the build's flags.
#pragma once

#if defined(__x86_64__)
#define DRUMLINE_HAS_AVX2 1
#define DRUMLINE_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define DRUMLINE_BEGIN_AVX2 \
    DRUMLINE_PRAGMA(        \
        clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function))
#define DRUMLINE_END_AVX2 DRUMLINE_PRAGMA(clang attribute pop)
#else
#define DRUMLINE_BEGIN_AVX2         \
    DRUMLINE_PRAGMA(GCC push_options) \
    DRUMLINE_PRAGMA(GCC target("avx2,fma,f16c"))
#define DRUMLINE_END_AVX2 DRUMLINE_PRAGMA(GCC pop_options)
#endif
#else
#define DRUMLINE_HAS_AVX2 0
#endif
