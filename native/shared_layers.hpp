// Layers of which several ranks each hold a share, all of them in one call:
//
//     blocks that are shares    added up over tp, in rank order, before they join the stream
//     experts spread over ep    tokens go to every rank, each computes its own experts, outputs come
//                               back to the token's rank, which adds them by ascending expert
//
// The same operations in the same order as ops/sharded.py and ops/spread.py, their slow twins.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "layer.hpp"
#include "shm.hpp"

namespace drumline {

// A feed-forward of `count` experts, of which those from `first` on are here; `own` is null where
// none is.
struct SpreadMixture {
    const float* norm = nullptr;
    Dense router;
    std::shared_ptr<const Experts> own;
    std::int64_t first = 0;
    std::int64_t count = 0;
    std::int64_t per_token = 0;
    bool normalize = false;
    float eps = 0.0F;
};

// How a layer is shared.
struct Sharing {
    bool attention = false;     // its attention is a share
    bool feed_forward = false;  // its feed-forward is a share
    std::shared_ptr<const SpreadMixture> spread;  // takes the feed-forward's place
};

// What ranks speak through, and what every rank must bring alike. tp may be null where nothing is a
// share, ep where nothing is spread. Every `shards` ranks of ep are one replica with the same tokens.
struct Meeting {
    ShmGroup* tp = nullptr;
    ShmGroup* ep = nullptr;
    std::int64_t shards = 1;
    std::uint64_t sum_tag = 0;
    std::uint64_t gather_tag = 0;
    std::uint64_t exchange_tag = 0;
    std::int64_t timeout_us = 0;  // of each collective
    std::int64_t done = 0;        // collectives that came to their end
};

// Like Stack::run. Whatever goes wrong in a collective ends it. Tokens without a slot cost no
// expert's time.
ShmOutcome run_shared(const Stack& stack, const std::vector<Sharing>& sharing, const Run& run,
                      const KVCache& cache, const Places& places, float* x, const float* entry,
                      std::int64_t entry_stride, const std::vector<Tap>& taps, Meeting& meeting,
                      const ShmGroup::Interrupted& interrupted);

}  // namespace drumline
