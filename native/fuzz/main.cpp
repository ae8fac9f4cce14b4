// Random calls into the native code under the sanitizers: `fuzz_native [SECONDS [SEED]]`.
//
// Every round has a seed of its own, which is printed when something is wrong; given back as SEED
// it is the first round again. A sanitizer ends the process by itself.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "fuzz.hpp"

int main(int argc, char** argv) {
    using Clock = std::chrono::steady_clock;
    const double seconds = argc > 1 ? std::atof(argv[1]) : 60.0;
    std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
    struct Area {
        const char* name;
        void (*round)(drumline::fuzz::Random&);
    };
    const Area areas[] = {{"linears", drumline::fuzz::linears},
                          {"layers", drumline::fuzz::layers},
                          {"rows", drumline::fuzz::rows},
                          {"pool", drumline::fuzz::pool}};
    const auto end = Clock::now() + std::chrono::duration<double>(seconds);
    std::uint64_t rounds = 0;
    do {
        for (const Area& area : areas) {
            drumline::fuzz::Random random(seed);
            try {
                area.round(random);
            } catch (const std::exception& error) {
                std::fprintf(stderr, "%s, seed %llu: %s\n", area.name,
                             static_cast<unsigned long long>(seed), error.what());
                return 1;
            }
        }
        ++seed;
        ++rounds;
    } while (Clock::now() < end);
    std::printf("%llu rounds, nothing found\n", static_cast<unsigned long long>(rounds));
    return 0;
}
