#include "shared_layers.hpp"

#include <algorithm>
#include <cstring>

#include "rows.hpp"

namespace drumline {
namespace {

constexpr std::int32_t nobody = -1;  // the expert of a token without a slot

// One pass of one rank.
class SharedPass {
public:
    SharedPass(const Run& run, const Places& places, float* x, std::int64_t hidden,
               Meeting& meeting, const ShmGroup::Interrupted& interrupted)
        : run_(run), places_(places), x_(x), hidden_(hidden), meeting_(meeting),
          interrupted_(interrupted), kernels_(row_kernels(run.space.path)),
          share_(count(places.tokens)) {}

    float* share() { return share_.data(); }

    // x += the sum of all ranks' shares.
    ShmOutcome add_shares() {
        ShmOutcome outcome =
            meeting_.tp->reduce(share(), share_.size(), share(), meeting_.sum_tag,
                                meeting_.timeout_us, interrupted_);
        if (outcome.good()) {
            ++meeting_.done;
            add_to_stream();
        }
        return outcome;
    }

    // x += the weighted sum of the chosen experts' outputs, whoever holds them.
    ShmOutcome add_experts(const SpreadMixture& mixture) {
        choose(mixture);
        const std::int64_t ranks = meeting_.ep->ranks(), k = mixture.per_token;
        const std::int64_t tokens = places_.tokens, width = hidden_ + k;
        gathered_.resize(static_cast<std::size_t>(ranks * tokens * width));
        ShmOutcome outcome = meeting_.ep->gather(
            packed_.data(), packed_.size() * sizeof(float), gathered_.data(), meeting_.gather_tag,
            meeting_.timeout_us, interrupted_);
        if (!outcome.good()) {
            return outcome;
        }
        ++meeting_.done;
        held_ = std::min(k, (mixture.count + ranks - 1) / ranks);
        compute_own(mixture);
        received_.resize(outputs_.size());
        const std::size_t part = outputs_.size() / static_cast<std::size_t>(ranks);
        outcome = meeting_.ep->exchange(outputs_.data(), part * sizeof(float), received_.data(),
                                        meeting_.exchange_tag, meeting_.timeout_us, interrupted_);
        if (!outcome.good()) {
            return outcome;
        }
        ++meeting_.done;
        combine(mixture);
        add_to_stream();
        return {};
    }

private:
    std::size_t count(std::int64_t rows) const {
        return static_cast<std::size_t>(rows * hidden_);
    }

    void add_to_stream() {
        for (std::int64_t row = 0; row < places_.tokens; ++row) {
            float* own = x_ + row * hidden_;
            kernels_.add(own, share() + row * hidden_, hidden_, own);
        }
    }

    // Normed tokens, each with the ids of its experts behind it, as every rank is to see them.
    void choose(const SpreadMixture& mixture) {
        const std::int64_t tokens = places_.tokens, k = mixture.per_token, width = hidden_ + k;
        packed_.resize(static_cast<std::size_t>(tokens * width));
        normed_.resize(count(tokens));
        logits_.resize(static_cast<std::size_t>(tokens * mixture.count));
        ids_.resize(static_cast<std::size_t>(tokens * k));
        weights_.resize(ids_.size());
        for (std::int64_t row = 0; row < tokens; ++row) {
            kernels_.rms_norm(x_ + row * hidden_, hidden_, mixture.norm, mixture.eps,
                              normed_.data() + row * hidden_);
        }
        const Intake in =
            mixture.router.take_in(run_, nullptr, 0.0F, normed_.data(), tokens, hidden_);
        mixture.router.multiply(run_, in, logits_.data(), mixture.count);
        route(logits_.data(), tokens, mixture.count, k, mixture.normalize, ids_.data(),
              weights_.data(), run_.space.path);
        for (std::int64_t row = 0; row < tokens; ++row) {
            float* to = packed_.data() + row * width;
            std::memcpy(to, normed_.data() + row * hidden_, sizeof(float) * count(1));
            for (std::int64_t at = 0; at < k; ++at) {
                const bool alive = places_.slots[row] >= 0;
                const auto id = static_cast<std::int32_t>(ids_[index(row, at, k)]);
                const std::int32_t told = alive ? id : nobody;
                std::memcpy(to + hidden_ + at, &told, sizeof told);  // bits, not a number
            }
        }
    }

    static std::size_t index(std::int64_t row, std::int64_t at, std::int64_t k) {
        return static_cast<std::size_t>(row * k + at);
    }

    // outputs_ [ranks, tokens, held, hidden]: what each rank's tokens get of the experts here, in
    // their order, then zeros.
    void compute_own(const SpreadMixture& mixture) {
        const std::int64_t ranks = meeting_.ep->ranks(), tokens = places_.tokens;
        const std::int64_t k = mixture.per_token, width = hidden_ + k;
        outputs_.assign(static_cast<std::size_t>(ranks * tokens * held_ * hidden_), 0.0F);
        pair_ids_.clear();
        pair_rows_.clear();
        pair_places_.clear();
        const std::int64_t here =
            mixture.own == nullptr ? 0 : static_cast<std::int64_t>(mixture.own->experts.size());
        for (std::int64_t rank = 0; rank < ranks; rank += meeting_.shards) {
            for (std::int64_t token = 0; token < tokens; ++token) {
                const float* source = gathered_.data() + (rank * tokens + token) * width;
                std::int64_t place = (rank * tokens + token) * held_;
                for (std::int64_t at = 0; at < k; ++at) {
                    std::int32_t id;
                    std::memcpy(&id, source + hidden_ + at, sizeof id);
                    const std::int64_t local = id - mixture.first;
                    if (local >= 0 && local < here) {
                        pair_ids_.push_back(local);
                        pair_places_.push_back(place++);
                        pair_rows_.insert(pair_rows_.end(), source, source + hidden_);
                    }
                }
            }
        }
        const auto pairs = static_cast<std::int64_t>(pair_ids_.size());
        if (pairs != 0) {
            computed_.resize(pair_rows_.size());
            mixture.own->outputs(run_, pair_rows_.data(), pairs, pair_ids_.data(), 1,
                                 computed_.data());
            for (std::int64_t pair = 0; pair < pairs; ++pair) {
                std::memcpy(
                    outputs_.data() + pair_places_[static_cast<std::size_t>(pair)] * hidden_,
                    computed_.data() + pair * hidden_, sizeof(float) * count(1));
            }
        }
        const std::size_t part = static_cast<std::size_t>(tokens * held_ * hidden_);
        for (std::int64_t rank = 0; rank < ranks; ++rank) {  // the other ranks of a replica
            const std::int64_t first = rank / meeting_.shards * meeting_.shards;
            if (rank != first) {
                std::memcpy(outputs_.data() + static_cast<std::size_t>(rank) * part,
                            outputs_.data() + static_cast<std::size_t>(first) * part,
                            sizeof(float) * part);
            }
        }
    }

    // share_ = the weighted sum of what came back, by ascending id; zeros for tokens without a slot.
    void combine(const SpreadMixture& mixture) {
        const std::int64_t ranks = meeting_.ep->ranks(), tokens = places_.tokens;
        const std::int64_t k = mixture.per_token;
        for (std::int64_t row = 0; row < tokens; ++row) {
            float* own = share() + row * hidden_;
            std::fill(own, own + hidden_, 0.0F);
            if (places_.slots[row] < 0) {
                continue;
            }
            std::int64_t before = -1, place = 0;
            for (std::int64_t at = 0; at < k; ++at) {
                const std::int64_t id = ids_[index(row, at, k)];
                const std::int64_t owner = ((id + 1) * ranks - 1) / mixture.count;
                place = owner == before ? place + 1 : 0;  // ids of one owner stand side by side
                before = owner;
                const float* output =
                    received_.data() + (((owner * tokens + row) * held_) + place) * hidden_;
                kernels_.add_scaled(output, weights_[index(row, at, k)], hidden_, own);
            }
        }
    }

    const Run& run_;
    const Places& places_;
    float* x_;
    std::int64_t hidden_;
    Meeting& meeting_;
    const ShmGroup::Interrupted& interrupted_;
    const RowKernels& kernels_;
    std::int64_t held_ = 0;  // outputs that one rank sends for one token
    std::vector<float> share_, packed_, normed_, logits_, weights_, gathered_, outputs_, received_,
        pair_rows_, computed_;
    std::vector<std::int64_t> ids_, pair_ids_, pair_places_;
};

}  // namespace

ShmOutcome run_shared(const Stack& stack, const std::vector<Sharing>& sharing, const Run& run,
                      const KVCache& cache, const Places& places, float* x, const float* entry,
                      std::int64_t entry_stride, const std::vector<Tap>& taps, Meeting& meeting,
                      const ShmGroup::Interrupted& interrupted) {
    const auto layers = static_cast<std::int64_t>(stack.layers.size());
    const std::int64_t hidden = stack.layers.front().attention->o.outputs;
    SharedPass pass(run, places, x, hidden, meeting, interrupted);
    for (std::int64_t index = 0; index <= layers; ++index) {
        for (const Tap& tap : taps) {
            if (tap.layer == index) {
                std::memcpy(tap.out, x,
                            sizeof(float) * static_cast<std::size_t>(places.tokens * hidden));
            }
        }
        if (index == layers) {
            break;
        }
        const Sharing& shared = sharing[static_cast<std::size_t>(index)];
        const bool enters = index == 0 && entry != nullptr;
        const float* source = enters ? entry : x;
        const std::int64_t stride = enters ? entry_stride : hidden;
        ShmOutcome outcome;
        if (shared.attention) {
            stack.attend(index, run, cache, places, source, stride, nullptr, pass.share());
            outcome = pass.add_shares();
        } else {
            stack.attend(index, run, cache, places, source, stride, x, x);
        }
        if (!outcome.good()) {
            return outcome;
        }
        if (shared.spread != nullptr) {
            outcome = pass.add_experts(*shared.spread);
        } else if (shared.feed_forward) {
            stack.feed_forward(index, run, x, places.tokens, nullptr, pass.share());
            outcome = pass.add_shares();
        } else {
            stack.feed_forward(index, run, x, places.tokens, x, x);
        }
        if (!outcome.good()) {
            return outcome;
        }
    }
    return {};
}

}  // namespace drumline
