#include "cpu_features.hpp"

#include <cstdint>

#if defined(__x86_64__) || defined(__i386__)
#define DRUMLINE_X86 1
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#define DRUMLINE_ARM_LINUX 1
#include <sys/auxv.h>
#endif

namespace drumline {
namespace {

constexpr bool bit(std::uint64_t word, unsigned index) { return ((word >> index) & 1U) != 0; }

#if defined(DRUMLINE_X86)

struct Leaf {
    std::uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// A leaf the processor does not have reads as all zeros: no feature.
Leaf cpuid(std::uint32_t leaf, std::uint32_t subleaf) {
    Leaf out;
    if (__get_cpuid_count(leaf, subleaf, &out.eax, &out.ebx, &out.ecx, &out.edx) == 0) {
        return Leaf{};
    }
    return out;
}

// XCR0: the register state that the operating system saves. Vector units it does not save must
// not be used, whatever CPUID says.
std::uint64_t saved_state() {
    std::uint32_t low = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (static_cast<std::uint64_t>(high) << 32) | low;
}

#endif

}  // namespace

CpuFeatures cpu_features() {
    bool avx2 = false, fma = false, f16c = false;
    bool avx512f = false, avx512bw = false, avx512vl = false, avx512_vnni = false;
    bool avx512_bf16 = false, avx_vnni = false;
    bool neon = false, dotprod = false, i8mm = false, sve = false;

#if defined(DRUMLINE_X86)
    const Leaf basic = cpuid(1, 0);
    const Leaf extended = cpuid(7, 0);
    const Leaf extended_1 = extended.eax >= 1 ? cpuid(7, 1) : Leaf{};
    const std::uint64_t saved = bit(basic.ecx, 27) ? saved_state() : 0;
    const bool ymm = (saved & 0x6U) == 0x6U;
    const bool zmm = ymm && (saved & 0xE0U) == 0xE0U;
    avx2 = ymm && bit(extended.ebx, 5);
    fma = ymm && bit(basic.ecx, 12);
    f16c = ymm && bit(basic.ecx, 29);
    avx512f = zmm && bit(extended.ebx, 16);
    avx512bw = zmm && bit(extended.ebx, 30);
    avx512vl = zmm && bit(extended.ebx, 31);
    avx512_vnni = zmm && bit(extended.ecx, 11);
    avx512_bf16 = zmm && bit(extended_1.eax, 5);
    avx_vnni = ymm && bit(extended_1.eax, 4);
#elif defined(DRUMLINE_ARM_LINUX)
    const std::uint64_t hwcap = getauxval(AT_HWCAP);
    const std::uint64_t hwcap2 = getauxval(AT_HWCAP2);
    neon = bit(hwcap, 1);      // HWCAP_ASIMD
    dotprod = bit(hwcap, 20);  // HWCAP_ASIMDDP
    sve = bit(hwcap, 22);      // HWCAP_SVE
    i8mm = bit(hwcap2, 13);    // HWCAP2_I8MM
#elif defined(__aarch64__)
    neon = true;  // part of the architecture; what lies beyond it needs the system's own query
#endif

    return {
        {"avx2", avx2},
        {"fma", fma},
        {"f16c", f16c},
        {"avx_vnni", avx_vnni},
        {"avx512f", avx512f},
        {"avx512bw", avx512bw},
        {"avx512vl", avx512vl},
        {"avx512_vnni", avx512_vnni},
        {"avx512_bf16", avx512_bf16},
        {"neon", neon},
        {"dotprod", dotprod},
        {"i8mm", i8mm},
        {"sve", sve},
    };
}

}  // namespace drumline
