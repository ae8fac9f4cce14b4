// The thread pool: every part of a job runs exactly once, and is done when `run` returns.
#include <atomic>
#include <memory>

#include "../pool.hpp"
#include "fuzz.hpp"

namespace drumline::fuzz {

void pool(Random& random) {
    for (int job = 0; job < 50; ++job) {
        const auto threads = static_cast<int>(random.whole(1, 5));
        const auto parts = static_cast<int>(random.whole(0, random.of({1, 9, 60, 700})));
        const std::int64_t uneven = random.of({0, 0, 100, 3000});
        const auto runs = std::make_unique<std::atomic<int>[]>(static_cast<std::size_t>(parts + 1));
        std::vector<int> written(static_cast<std::size_t>(parts), -1);  // seen without a lock
        Pool::instance().run(threads, parts, [&](int part) {
            for (volatile std::int64_t spin = 0; spin < part % 3 * uneven;) {
                spin = spin + 1;
            }
            ++runs[static_cast<std::size_t>(part)];
            written[static_cast<std::size_t>(part)] = part;
        });
        for (int part = 0; part < parts; ++part) {
            const auto at = static_cast<std::size_t>(part);
            expect(runs[at] == 1 && written[at] == part,
                   "part " + std::to_string(part) + " of " + std::to_string(parts) + " ran " +
                       std::to_string(runs[at]) + " times");
        }
    }
}

}  // namespace drumline::fuzz
