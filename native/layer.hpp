// The layers of a decoder, fused: everything between the embedding and the final norm in one call.
//
//     x += o(attention(rope(q), rope(k), v))    q, k, v = qkv(norm(x)) [+ bias, + norm per head]
//     x += down(silu(gate) * up)                gate, up = gate_up(norm(x))
//     x += sum of weight * expert(norm(x))      in place of it, in layers with experts
//
// The norm may be missing, and so may the residual that is added: then what a block returns is its
// own share alone, for whoever adds up the shares of several ranks. Rows go through in tiles that
// stay in the cache; a row's bits depend on the row alone. Knows no sequence and no rank.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "attention.hpp"
#include "linear.hpp"
#include "scratch.hpp"

namespace drumline {

// What every call is made with. One call at a time.
class Workspace {
public:
    Workspace(Path path, bool fine) : path(path), fine(fine) {}

    // Of rows that go through on a thread of their own, beside those of others.
    Workspace& share(std::size_t index) {
        while (shares_.size() <= index) {
            shares_.push_back(std::make_unique<Workspace>(path, fine));
        }
        return *shares_[index];
    }

    std::size_t nbytes() const {
        std::size_t bytes = scratch.nbytes();
        for (const auto& share : shares_) {
            bytes += share->nbytes();
        }
        return bytes;
    }

    const Path path;
    const bool fine;  // see PackedLinear::multiply
    Scratch scratch;
    Activations outer;  // of what was taken in last
    Activations inner;  // of what a feed-forward's second product takes in
    std::mutex busy;

private:
    std::vector<std::unique_ptr<Workspace>> shares_;
};

// One call on a workspace, with its threads.
struct Run {
    Workspace& space;
    int threads;
};

// Rows on their way into a product: as they are or normed, and for quantized weights as integers.
struct Intake {
    const float* x = nullptr;
    std::int64_t rows = 0;
    std::int64_t stride = 0;
    const Activations* ready = nullptr;  // or null
    ActivationLayout layout;             // that `ready` was made for
};

// Weights that are stacked along the output, and a bias [outputs] or none.
struct Dense {
    std::vector<std::shared_ptr<const PackedLinear>> parts;
    const float* bias = nullptr;
    std::int64_t outputs = 0;
    std::int64_t columns = 0;

    // Rows of a table of one kind. std::out_of_range for an id it does not have.
    void take_rows(const std::int64_t* ids, std::int64_t count, float* out) const;

    // Rows for this product; `norm` [columns] may be null. Valid until the workspace's next intake.
    Intake take_in(const Run& run, const float* norm, float eps, const float* x, std::int64_t rows,
                   std::int64_t x_stride) const;

    // Without the bias: whoever comes next over the row adds it.
    void multiply(const Run& run, const Intake& in, float* out, std::int64_t out_stride,
                  Outputs some = {}) const;
};

// [rows, columns] → [rows, outputs], with the bias; `norm` [columns] may be null.
void linear(const Run& run, const Dense& dense, const float* norm, float eps, const float* x,
            std::int64_t rows, std::int64_t x_stride, float* out);

struct Rope {
    const float* cos = nullptr;  // [positions, half]
    const float* sin = nullptr;
    std::int64_t half = 0;
};

struct Attention {
    const float* norm = nullptr;
    Dense qkv;
    const float* q_norm = nullptr;  // [head_dim], or null
    const float* k_norm = nullptr;
    Dense o;
    std::int64_t heads = 0;
    std::int64_t kv_heads = 0;
    std::int64_t head_dim = 0;
    float eps = 0.0F;
};

struct FeedForward {
    const float* norm = nullptr;
    Dense gate_up;
    Dense down;
    float eps = 0.0F;
};

struct Expert {
    Dense gate_up;
    Dense down;
};

struct Experts {
    std::vector<Expert> experts;

    // ids [rows, per_token] → out [rows, per_token, hidden]: each chosen expert's own output.
    void outputs(const Run& run, const float* x, std::int64_t rows, const std::int64_t* ids,
                 std::int64_t per_token, float* out) const;
};

struct MixtureOfExperts {
    const float* norm = nullptr;
    Dense router;
    std::shared_ptr<const Experts> experts;
    std::int64_t per_token = 0;
    bool normalize = false;
    float eps = 0.0F;
};

// The `per_token` highest of each row's logits [rows, count], ties to the lowest id, by ascending
// id, weighted by the softmax over all, or over the chosen ones if `normalize`.
void route(const float* logits, std::int64_t rows, std::int64_t count, std::int64_t per_token,
           bool normalize, std::int64_t* ids, float* weights, Path path);

struct Layer {
    std::shared_ptr<const Attention> attention;
    std::shared_ptr<const FeedForward> dense;         // either this
    std::shared_ptr<const MixtureOfExperts> experts;  // or this
};

// A copy of the stream after `layer` layers.
struct Tap {
    std::int64_t layer = 0;
    float* out = nullptr;  // [rows, hidden]
};

// Logits of the tokens at `rows`: out [count, vocab].
struct Logits {
    const float* norm = nullptr;
    float eps = 0.0F;
    const Dense* head = nullptr;
    const std::int64_t* rows = nullptr;
    std::int64_t count = 0;
    float* out = nullptr;
};

// Tokens of a pass, ascending, whose rows are read when it is over. Of the others the last layer may
// leave out all but keys and values; their rows are then as they were before it.
struct Reads {
    const std::int64_t* tokens = nullptr;
    std::int64_t count = 0;
};

struct Stack {
    std::vector<Layer> layers;
    Rope rope;

    // One block of layer `index`, which keeps its keys and values at `index` of the cache. x
    // [tokens, columns of its first product]; `residual` may be null, and both may be `out`.
    void attend(std::int64_t index, const Run& run, const KVCache& cache, const Places& places,
                const float* x, std::int64_t x_stride, const float* residual, float* out) const;
    void feed_forward(std::int64_t index, const Run& run, const float* x, std::int64_t rows,
                      const float* residual, float* out) const;

    // All layers: x [tokens, hidden] in place. The first one attends to `entry` in place of x,
    // unless it is null. All rows are read where `reads` is null.
    void run(const Run& run, const KVCache& cache, const Places& places, float* x,
             const float* entry, std::int64_t entry_stride, const std::vector<Tap>& taps,
             const Reads* reads = nullptr) const;

    // The first `count` layers, the same bits: every thread takes some rows through all of a layer,
    // and all of them share the attention. No thread reads what another wrote, but keys and values.
    void run_apart(std::int64_t count, const Run& run, const KVCache& cache, const Places& places,
                   float* x, const float* entry, std::int64_t entry_stride,
                   const std::vector<Tap>& taps) const;
    bool apart(const Run& run, std::int64_t rows) const;  // whether that is quicker

    // The last layer for the rows that are read: it attends to `source`, and is added to x.
    void finish(const Run& run, const KVCache& cache, const Places& places, const float* source,
                std::int64_t source_stride, float* x, const Reads& reads) const;
    bool spares(const Reads& reads, std::int64_t tokens, const std::vector<Tap>& taps) const;

    // A whole pass: rows of `table` for ids [tokens] → x, all layers, logits of rows that are read.
    void decode(const Run& run, const KVCache& cache, const Places& places,
                const std::int64_t* ids, const Dense& table, float* x,
                const std::vector<Tap>& taps, const Logits& logits,
                const Reads* reads = nullptr) const;
};

}  // namespace drumline
