// What this machine can do at best: sequential reading, and arithmetic in registers. For the limits
// that `drumline bench roofline` sets beside measured steps. Knows no model.
#pragma once

#include <cstdint>

#include "linear.hpp"

namespace drumline {

// Reads `size` bytes once, front to back, each thread a contiguous share; seconds that it took.
double read_seconds(const std::uint8_t* bytes, std::int64_t size, int threads, Path path);

// Multiply-adds per second of int8 products summed into int32, and of float32 products, over all
// threads together, each repeated `rounds` times in every thread. 0 where the path has no vectors.
double int8_macs_per_second(std::int64_t rounds, int threads, Path path);
double float_macs_per_second(std::int64_t rounds, int threads, Path path);

// How long a change that one thread makes takes to be seen by another: seconds, the mean of `rounds`
// there and back. Cores that share a cache take a third of what others do.
double signal_seconds(std::int64_t rounds);

}  // namespace drumline
