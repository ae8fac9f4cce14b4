// Layers of which several ranks each hold a share: every block's share is added up over the ranks,
// in rank order, before it joins the residual stream. All of it in one call.
#pragma once

#include <cstdint>
#include <vector>

#include "layer.hpp"
#include "shm.hpp"

namespace drumline {

// The sums that are taken, and how they are taken.
struct Sums {
    ShmGroup& group;
    std::uint64_t tag;
    std::int64_t timeout_us;  // of each
    float* share;             // [tokens, hidden], scratch
    std::int64_t done = 0;    // sums that came to their end
};

// Like Stack::run, for layers whose blocks are all shares. Whatever goes wrong in a sum ends it.
ShmOutcome run_shared(const Stack& stack, const Run& run, const KVCache& cache,
                      const Places& places, float* x, const float* entry,
                      std::int64_t entry_stride, const std::vector<Tap>& taps, Sums& sums,
                      const ShmGroup::Interrupted& interrupted);

}  // namespace drumline
