// Compiling the same portable vector code once per instruction set: what stands between
// DRUMLINE_BEGIN_AVX2 and DRUMLINE_END may use AVX2, FMA and F16C, whatever the build's flags, and what
// stands after DRUMLINE_BEGIN_AVX512 the parts of AVX-512 that the path needs, too.
#pragma once

#if defined(__x86_64__)
#define DRUMLINE_HAS_X86 1
#define DRUMLINE_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define DRUMLINE_BEGIN(features) \
    DRUMLINE_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define DRUMLINE_END DRUMLINE_PRAGMA(clang attribute pop)
#else
#define DRUMLINE_BEGIN(features)      \
    DRUMLINE_PRAGMA(GCC push_options) \
    DRUMLINE_PRAGMA(GCC target(features))
#define DRUMLINE_END DRUMLINE_PRAGMA(GCC pop_options)
#endif
#define DRUMLINE_BEGIN_AVX2 DRUMLINE_BEGIN("avx2,fma,f16c")
#define DRUMLINE_BEGIN_AVX512 DRUMLINE_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512vl")
#else
#define DRUMLINE_HAS_X86 0
#endif
