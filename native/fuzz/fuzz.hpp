// What a fuzzed area needs: reproducible choices, and a way to say what is wrong.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace drumline::fuzz {

class Random {
public:
    explicit Random(std::uint64_t seed) : engine_(seed) {}

    std::int64_t whole(std::int64_t least, std::int64_t most) {
        return least + static_cast<std::int64_t>(
                           engine_() % static_cast<std::uint64_t>(most - least + 1));
    }
    bool one_in(std::int64_t count) { return whole(1, count) == 1; }
    template <typename T>
    T of(std::initializer_list<T> choices) {
        return choices.begin()[whole(0, static_cast<std::int64_t>(choices.size()) - 1)];
    }
    float normal() { return std::normal_distribution<float>()(engine_); }

    // Mostly ordinary numbers; now and then what no activation should be.
    float activation() {
        if (!one_in(200)) {
            return normal() * of({1.0F, 1.0F, 1.0F, 100.0F, 1e-3F});
        }
        using Limits = std::numeric_limits<float>;
        return of({Limits::quiet_NaN(), Limits::infinity(), -Limits::infinity(), Limits::max(),
                   Limits::lowest(), Limits::min(), Limits::denorm_min(), 0.0F, -0.0F, 1e-30F});
    }

    std::vector<std::uint8_t> bytes(std::size_t count) {
        std::vector<std::uint8_t> out(count);
        for (std::uint8_t& byte : out) {
            byte = static_cast<std::uint8_t>(engine_());
        }
        return out;
    }

private:
    std::mt19937_64 engine_;
};

inline void expect(bool kept, const std::string& what) {
    if (!kept) {
        throw std::runtime_error(what);
    }
}

// One round of each area; throws what `expect` says.
void linears(Random& random);
void layers(Random& random);
void rows(Random& random);
void pool(Random& random);

}  // namespace drumline::fuzz
