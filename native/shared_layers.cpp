#include "shared_layers.hpp"

#include <cstring>

namespace drumline {
namespace {

// x += the sum over all ranks of `sums.share`.
ShmOutcome add_shares(Sums& sums, float* x, std::size_t count,
                      const ShmGroup::Interrupted& interrupted) {
    ShmOutcome outcome =
        sums.group.reduce(sums.share, count, sums.share, sums.tag, sums.timeout_us, interrupted);
    if (outcome.good()) {
        ++sums.done;
        for (std::size_t at = 0; at < count; ++at) {
            x[at] = x[at] + sums.share[at];
        }
    }
    return outcome;
}

}  // namespace

ShmOutcome run_shared(const Stack& stack, const Run& run, const KVCache& cache,
                      const Places& places, float* x, const float* entry,
                      std::int64_t entry_stride, const std::vector<Tap>& taps, Sums& sums,
                      const ShmGroup::Interrupted& interrupted) {
    const auto layers = static_cast<std::int64_t>(stack.layers.size());
    const std::int64_t hidden = stack.layers.front().attention->o.outputs;
    const auto count = static_cast<std::size_t>(places.tokens * hidden);
    for (std::int64_t index = 0; index <= layers; ++index) {
        for (const Tap& tap : taps) {
            if (tap.layer == index) {
                std::memcpy(tap.out, x, sizeof(float) * count);
            }
        }
        if (index == layers) {
            break;
        }
        const bool enters = index == 0 && entry != nullptr;
        stack.attend(index, run, cache, places, enters ? entry : x,
                     enters ? entry_stride : hidden, nullptr, sums.share);
        ShmOutcome outcome = add_shares(sums, x, count, interrupted);
        if (!outcome.good()) {
            return outcome;
        }
        stack.feed_forward(index, run, x, places.tokens, nullptr, sums.share);
        outcome = add_shares(sums, x, count, interrupted);
        if (!outcome.good()) {
            return outcome;
        }
    }
    return {};
}

}  // namespace drumline
