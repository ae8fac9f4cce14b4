// Linear layers on repacked weights: out[r, o] = sum over k of x[r, k] * w[o, k].
//
// Weights are interleaved by groups of 16 outputs, so that one vector holds the same few columns of
// many outputs, and one stream of memory is read from front to back. Quantized weights keep their
// blocks of 32 columns; activations are quantized per row and block of 32 to integers of 8 bits, or
// where `fine`, of 12 bits in the four columns that hold the block's largest. Sums within a block are
// integers, hence exact in any order; blocks are added in ascending order in float32. So a row's
// bits depend on the row alone, whatever the number of rows and threads (within one
// instruction-set path).
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "pages.hpp"

namespace drumline {

constexpr int group_outputs = 16;

enum class WeightKind { q4_0, q4_1, q8_0, q4_k, q6_k, f32, f16, bf16 };

WeightKind weight_kind(const std::string& name);  // throws std::invalid_argument

enum class Path { portable, avx2, avx512_vnni };

std::vector<std::string> available_paths();  // best first
Path path_by_name(const std::string& name);  // throws std::invalid_argument
std::string path_name(Path path);
Path best_path();

// How a kernel wants its activations. `tile` rows lie together, block by block:
//
//   q           [tile, block, row, ...] what `numbers` says of 32 columns
//   scale       [tile, block, row]
//   scaled_sum  [tile, block, row]      scale * (sum of the block's integers)
//   offset      [tile, block, half, row]  -zero * (sum of them); halves are 16 columns or all 32
//   far_line    [tile, block, half, row]  of bytes: the line of 4 columns that reaches farthest
//   far         [tile, block, half, row]  the high parts int8[4] of its integers, 16 * high + low;
//                                       zeros in the half that does not have it
enum class Numbers : std::uint8_t {
    none,    // plain weights: float32 as it came
    bytes,   // int8[32], low parts in the far line
    words,   // int16[32]
    swapped  // int16[32], of every four columns the second and third exchanged
};

struct ActivationLayout {
    int tile = 1;
    Numbers numbers = Numbers::none;
    bool fine = false;  // with a far line
    int zero = 0;       // the quantum that means 0
    int halves = 1;

    bool operator==(const ActivationLayout&) const = default;
};

// Quantized activations of some rows; keeps its memory for the next ones. A block with a NaN or an
// infinity makes all outputs of its row NaN; values below 1e-30 are zero.
class Activations {
public:
    void quantize(const float* x, std::int64_t rows, std::int64_t columns, std::int64_t x_stride,
                  const ActivationLayout& layout, int threads, Path path);

    // The same in two steps: room for all, then blocks first .. last - 1 of every row. Blocks are
    // quantized apart from each other, so several threads may have some each.
    void prepare(std::int64_t rows, std::int64_t columns, const ActivationLayout& layout);
    void quantize_blocks(const float* x, std::int64_t x_stride, std::int64_t first,
                         std::int64_t last, Path path);
    void quantize_row(const float* x, std::int64_t row, Path path);  // x: the row's first number

    std::int64_t rows = 0;
    std::int64_t columns = 0;
    ActivationLayout layout;
    std::vector<std::int8_t> q;
    std::vector<float> scale;
    std::vector<float> scaled_sum;
    std::vector<std::int32_t> offset;
    std::vector<std::int32_t> far;
    std::vector<std::uint8_t> far_line;
};

// Of a product's outputs: begin .. end - 1, or up to its last. Those that share a group of 16 with
// them are written, too.
struct Outputs {
    std::int64_t begin = 0;
    std::int64_t end = std::numeric_limits<std::int64_t>::max();
};

class PackedLinear {
public:
    // Weights of one kind, stacked along the output: `raw[i]` is [outputs[i], row_bytes] as a GGUF
    // tensor of that kind stores it, rows end to end.
    PackedLinear(WeightKind kind, const std::vector<const std::uint8_t*>& raw,
                 const std::vector<std::int64_t>& outputs, std::int64_t columns);
    PackedLinear(WeightKind kind, const std::uint8_t* raw, std::int64_t outputs,
                 std::int64_t columns)
        : PackedLinear(kind, std::vector<const std::uint8_t*>{raw},
                       std::vector<std::int64_t>{outputs}, columns) {}

    // x [rows, columns] float32 with `x_stride` floats between rows → out [rows, outputs] likewise.
    // `fine`: activations of quantized weights are scaled to the largest of a block without the four
    // columns of its far line, which reach 16 times as far. Few columns stand out of a block, and most
    // of the error that 8 bits leave is what they cost the others.
    void multiply(const float* x, std::int64_t rows, std::int64_t x_stride, float* out,
                  std::int64_t out_stride, int threads, Path path, bool fine,
                  Outputs some = {}) const;

    // The same with activations that are ready, in the layout that `layout` says.
    void multiply(const Activations& activations, float* out, std::int64_t out_stride, int threads,
                  Path path, bool fine, Outputs some = {}) const;

    // The same in two steps, for callers that share activations between weights or split the groups
    // over threads themselves. `x` and `x_stride` are read by plain weights only, `activations` by
    // quantized ones only; its layout must be `layout(path, fine)`.
    ActivationLayout layout(Path path, bool fine) const;
    void multiply_groups(std::int64_t first, std::int64_t last, const float* x, std::int64_t rows,
                         std::int64_t x_stride, const Activations& activations, float* out,
                         std::int64_t out_stride, Path path, bool fine) const;

    // The weights of some outputs, dequantized: → out [count, columns]. Ids must be in range.
    void take_rows(const std::int64_t* ids, std::int64_t count, float* out) const;

    bool quantized() const;
    std::int64_t outputs() const { return outputs_; }
    std::int64_t columns() const { return columns_; }
    std::int64_t groups() const { return groups_; }
    std::size_t nbytes() const { return bytes_.size(); }

private:
    void multiply_all(const float* x, std::int64_t rows, std::int64_t x_stride,
                      const Activations& activations, float* out, std::int64_t out_stride,
                      int threads, Path path, bool fine, Outputs some) const;

    WeightKind kind_;
    std::int64_t outputs_;
    std::int64_t columns_;
    std::int64_t groups_;  // the last may be filled up with zeros
    std::size_t group_bytes_;
    AlignedBytes bytes_;
};

}  // namespace drumline
