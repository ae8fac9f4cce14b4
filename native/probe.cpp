#include "probe.hpp"

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "pool.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#define DRUMLINE_AVX2 __attribute__((target("avx2,fma,f16c")))
#define DRUMLINE_VNNI __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")))
#endif

namespace drumline {
namespace {

std::atomic<std::uint64_t> sink{0};  // what is computed must be of use to somebody

template <typename Body>
double seconds_of(int threads, const Body& body) {
    const auto began = std::chrono::steady_clock::now();
    Pool::instance().run(threads, threads, body);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

std::uint64_t read_plain(const std::uint8_t* from, std::int64_t size) {
    std::uint64_t sums[4] = {0, 0, 0, 0};
    for (std::int64_t at = 0; at + 32 <= size; at += 32) {
        std::uint64_t words[4];
        std::memcpy(words, from + at, sizeof words);
        for (int lane = 0; lane < 4; ++lane) {
            sums[lane] += words[lane];
        }
    }
    return sums[0] + sums[1] + sums[2] + sums[3];
}

#if defined(__x86_64__)
constexpr int chains = 10;  // independent sums, enough to hide an instruction's latency

DRUMLINE_AVX2 std::uint64_t read_avx2(const std::uint8_t* from, std::int64_t size) {
    __m256i sums[8];
    for (__m256i& sum : sums) {
        sum = _mm256_setzero_si256();
    }
    for (std::int64_t at = 0; at + 256 <= size; at += 256) {
        for (int lane = 0; lane < 8; ++lane) {
            const auto* line = reinterpret_cast<const __m256i*>(from + at + 32 * lane);
            sums[lane] = _mm256_add_epi64(sums[lane], _mm256_loadu_si256(line));
        }
    }
    std::uint64_t total = 0;
    for (const __m256i& sum : sums) {
        alignas(32) std::uint64_t words[4];
        _mm256_store_si256(reinterpret_cast<__m256i*>(words), sum);
        total += words[0] + words[1] + words[2] + words[3];
    }
    return total;
}

DRUMLINE_AVX2 std::uint64_t int8_avx2(std::int64_t rounds) {
    __m256i sums[chains];
    __m256i weights = _mm256_set1_epi8(3), x = _mm256_set1_epi8(1);
    const __m256i ones = _mm256_set1_epi16(1);
    for (__m256i& sum : sums) {
        sum = _mm256_setzero_si256();
    }
    for (std::int64_t round = 0; round < rounds; ++round) {
        __asm__ volatile("" : "+x"(weights), "+x"(x));
        for (__m256i& sum : sums) {
            const __m256i pairs = _mm256_maddubs_epi16(weights, x);
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
        }
    }
    std::uint64_t total = 0;
    for (const __m256i& sum : sums) {
        total += static_cast<std::uint32_t>(_mm256_extract_epi32(sum, 0));
    }
    return total;
}

DRUMLINE_VNNI std::uint64_t int8_vnni(std::int64_t rounds) {
    __m256i sums[chains];
    __m256i weights = _mm256_set1_epi8(3), x = _mm256_set1_epi8(1);
    for (__m256i& sum : sums) {
        sum = _mm256_setzero_si256();
    }
    for (std::int64_t round = 0; round < rounds; ++round) {
        __asm__ volatile("" : "+x"(weights), "+x"(x));
        for (__m256i& sum : sums) {
            sum = _mm256_dpbusd_epi32(sum, weights, x);
        }
    }
    std::uint64_t total = 0;
    for (const __m256i& sum : sums) {
        total += static_cast<std::uint32_t>(_mm256_extract_epi32(sum, 0));
    }
    return total;
}

DRUMLINE_AVX2 std::uint64_t float_avx2(std::int64_t rounds) {
    __m256 sums[chains];
    __m256 weights = _mm256_set1_ps(1e-9F), x = _mm256_set1_ps(1e-9F);
    for (__m256& sum : sums) {
        sum = _mm256_setzero_ps();
    }
    for (std::int64_t round = 0; round < rounds; ++round) {
        __asm__ volatile("" : "+x"(weights), "+x"(x));
        for (__m256& sum : sums) {
            sum = _mm256_fmadd_ps(weights, x, sum);
        }
    }
    std::uint64_t total = 0;
    for (const __m256& sum : sums) {
        total += _mm256_cvtss_f32(sum) > 0 ? 1 : 0;
    }
    return total;
}

template <typename Kernel>
double macs_per_second(Kernel kernel, std::int64_t rounds, int lanes, int threads) {
    const double seconds = seconds_of(threads, [&](int) { sink += kernel(rounds); });
    return static_cast<double>(rounds) * chains * lanes * threads / seconds;
}
#endif

}  // namespace

double read_seconds(const std::uint8_t* bytes, std::int64_t size, int threads, Path path) {
    auto read = read_plain;
#if defined(__x86_64__)
    read = path == Path::portable ? read_plain : read_avx2;
#endif
    const std::int64_t share = size / threads / 4096 * 4096;
    return seconds_of(threads, [&](int part) {
        const std::int64_t begin = part * share;
        sink += read(bytes + begin, part + 1 == threads ? size - begin : share);
    });
}

double signal_seconds(std::int64_t rounds) {
    alignas(64) static std::atomic<std::int64_t> ball;
    ball.store(0);
    // Even numbers are the caller's to answer, odd ones the other's. Whoever waits long lets others
    // have the core: there may be but one.
    const auto play = [rounds](std::int64_t first) {
        for (std::int64_t mine = first; mine < 2 * rounds; mine += 2) {
            for (int spins = 0; ball.load(std::memory_order_acquire) != mine; ++spins) {
                if (spins > 10000) {
                    std::this_thread::yield();
                }
            }
            ball.store(mine + 1, std::memory_order_release);
        }
    };
    std::thread other(play, 1);
    const auto began = std::chrono::steady_clock::now();
    play(0);
    other.join();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - began;
    return taken.count() / static_cast<double>(2 * rounds);
}

double int8_macs_per_second([[maybe_unused]] std::int64_t rounds, [[maybe_unused]] int threads,
                            [[maybe_unused]] Path path) {
#if defined(__x86_64__)
    if (path == Path::avx2) {
        return macs_per_second(int8_avx2, rounds, 32, threads);
    }
    if (path == Path::avx512_vnni) {
        return macs_per_second(int8_vnni, rounds, 32, threads);
    }
#endif
    return 0;
}

double float_macs_per_second([[maybe_unused]] std::int64_t rounds, [[maybe_unused]] int threads,
                             [[maybe_unused]] Path path) {
#if defined(__x86_64__)
    if (path != Path::portable) {
        return macs_per_second(float_avx2, rounds, 8, threads);
    }
#endif
    return 0;
}

}  // namespace drumline
