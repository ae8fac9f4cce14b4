// Memory for what a pass leaves behind between two of its operations: grown on demand and kept, so
// that nothing is allocated once the largest pass has been seen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace drumline {

// A buffer whose contents do not outlive the next `take`.
template <typename Item>
class Buffer {
public:
    Buffer() = default;
    ~Buffer() { std::free(data_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    // At least `count` items, aligned to 64 bytes.
    Item* take(std::size_t count) {
#ifdef DRUMLINE_SEPARATE_BYTES  // for sanitizers: of just the size, and never where it was
        std::free(data_);
        data_ = static_cast<Item*>(std::malloc(count * sizeof(Item)));
        capacity_ = count;
        return data_;
#endif
        if (count > capacity_) {
            std::free(data_);
            const std::size_t bytes = (count * sizeof(Item) * 5 / 4 + 63) / 64 * 64;
            data_ = static_cast<Item*>(std::aligned_alloc(64, bytes));
            capacity_ = data_ == nullptr ? 0 : count;
            if (data_ == nullptr) {
                throw std::bad_alloc();
            }
            capacity_ = bytes / sizeof(Item);
        }
        return data_;
    }

    std::size_t nbytes() const { return capacity_ * sizeof(Item); }

private:
    Item* data_ = nullptr;
    std::size_t capacity_ = 0;
};

// One buffer per kind of value, since several are alive at once.
struct Scratch {
    Buffer<float> normed;
    Buffer<float> projected;
    Buffer<float> mixed;
    Buffer<float> product;
    Buffer<float> gate_up;
    Buffer<float> gated;
    Buffer<float> chunk_sums;
    Buffer<float> chunk_states;
    Buffer<std::int64_t> tile_starts;
    Buffer<float> router_logits;
    Buffer<std::int64_t> expert_ids;
    Buffer<float> expert_shares;
    Buffer<std::int64_t> expert_bounds;
    Buffer<std::int64_t> expert_pairs;
    Buffer<float> gathered;
    Buffer<float> expert_product;
    Buffer<float> expert_outputs;
    Buffer<float> read_entry;
    Buffer<float> read_stream;
    Buffer<std::int64_t> read_places;

    std::size_t nbytes() const {
        return normed.nbytes() + projected.nbytes() + mixed.nbytes() + product.nbytes() +
               gate_up.nbytes() + gated.nbytes() + chunk_sums.nbytes() + chunk_states.nbytes() +
               tile_starts.nbytes() + router_logits.nbytes() + expert_ids.nbytes() +
               expert_shares.nbytes() + expert_bounds.nbytes() + expert_pairs.nbytes() +
               gathered.nbytes() + expert_product.nbytes() + expert_outputs.nbytes() +
               read_entry.nbytes() + read_stream.nbytes() + read_places.nbytes();
    }
};

}  // namespace drumline
