// What the files behind PackedLinear share: packed weights, packed activations, kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "linear.hpp"

namespace drumline {

constexpr int block_columns = 32;
constexpr int super_columns = 256;  // of the K kinds

// A packed group is 16 outputs times all columns: units of one or more blocks of 32 columns from
// front to back, in a unit first the scales, then the quanta of its blocks. Everything that a
// vector is loaded from begins at a line of 64 bytes.
//
//   kind   unit     scales                                                 quanta of a block
//   q4_0   2 blocks   2 x d half[16]                                       4 lines of nibbles
//   q4_1   1 block    d half[16], m half[16]                               4 lines of nibbles
//   q8_0   2 blocks   2 x d half[16]                                       8 lines of bytes, 128 added
//   q4_k   8 blocks   d half[16], -dmin half[16], 8 x (s byte[16], m byte[16])   4 lines of nibbles
//   q6_k   8 blocks   d half[16], 32 bytes unused, 16 x s signed byte[16]  4 lines low, 2 lines high
//
// A line holds 4 columns of 16 outputs: output o's at 4o .. 4o + 3. Line v of nibbles has columns
// 8v .. 8v + 3 low and 8v + 4 .. 8v + 7 high; a line of high bits serves two such lines, the first
// from bits 0-1 (low) and 2-3 (high), the second from bits 4-5 and 6-7. Plain numbers lie
// column by column, 16 outputs each.
//
// (One stream: with the scales of a group in a place of their own, reading took twice as long.)
constexpr std::size_t line_bytes = 64;

struct PackedLayout {
    std::int64_t raw_columns;   // per raw block; 1 for plain numbers
    std::size_t raw_bytes;      // likewise
    std::int64_t unit_blocks;   // of 32 columns; for plain numbers a unit is one column
    std::size_t scale_bytes;    // per unit
    std::size_t quanta_bytes;   // per block of 32 columns; per column of plain numbers
    int zero;                   // what is subtracted from a quantum

    constexpr std::size_t unit_bytes() const {
        return scale_bytes + static_cast<std::size_t>(unit_blocks) * quanta_bytes;
    }
    // Where the unit of a block begins in its group, and the block's quanta.
    constexpr std::size_t unit(std::int64_t block) const {
        return static_cast<std::size_t>(block / unit_blocks) * unit_bytes();
    }
    constexpr std::size_t quanta(std::int64_t block) const {
        return unit(block) + scale_bytes +
               static_cast<std::size_t>(block % unit_blocks) * quanta_bytes;
    }
};

constexpr PackedLayout packed_layout(WeightKind kind) {
    switch (kind) {
        case WeightKind::q4_0:
            return {block_columns, 18, 2, 64, 4 * line_bytes, 8};
        case WeightKind::q4_1:
            return {block_columns, 20, 1, 64, 4 * line_bytes, 0};
        case WeightKind::q8_0:
            return {block_columns, 34, 2, 64, 8 * line_bytes, 128};
        case WeightKind::q4_k:
            return {super_columns, 144, 8, 320, 4 * line_bytes, 0};
        case WeightKind::q6_k:
            return {super_columns, 210, 8, 320, 6 * line_bytes, 32};
        case WeightKind::f32:
            return {1, 4, 1, 0, 4 * group_outputs, 0};
        case WeightKind::f16:
        case WeightKind::bf16:
            break;
    }
    return {1, 2, 1, 0, 2 * group_outputs, 0};
}

std::size_t packed_group_bytes(WeightKind kind, std::int64_t columns);

// Puts one output's row, as a GGUF tensor stores it, at `output` (0 .. 15) of a zeroed group.
void pack_row(WeightKind kind, const std::uint8_t* raw, std::uint8_t* group, int output,
              std::int64_t columns);

// The weights of one output of a group, dequantized in float32 as the formulas of the kind say.
void unpack_row(WeightKind kind, const std::uint8_t* group, int output, std::int64_t columns,
                float* to);

float half_to_float(std::uint16_t half);

// Sixteen outputs times the rows of one tile.
struct TileJob {
    const std::uint8_t* weights = nullptr;  // the packed group
    std::int64_t columns = 0;
    const std::int8_t* q = nullptr;     // of the tile, as `Activations` lays it out
    const float* scale = nullptr;       // [block, row]
    const float* scaled_sum = nullptr;  // [block, row]
    const std::int32_t* offset = nullptr;  // [block, half, row]
    const std::int32_t* far = nullptr;      // [block, half, row]
    const std::uint8_t* far_line = nullptr;  // likewise
    const float* x = nullptr;           // plain weights: the tile's first row
    std::int64_t x_stride = 0;
    float* out = nullptr;  // the group's first output of the tile's first row
    std::int64_t out_stride = 0;
    int outputs = group_outputs;  // fewer in the last group
    // Of the tiles that these weights meet one after the other. The first reads them from memory.
    bool first = true;
    bool last = true;
};

using TileKernel = void (*)(const TileJob&);

constexpr int tile_rows_max = 8;

struct Kernels {
    ActivationLayout layout;
    TileKernel by_rows[tile_rows_max];  // of 1 .. layout.tile rows; a row's bits are equal in all
};

// Where `Activations` keeps a row: index of its first block, and how far on the next ones are.
struct RowPlace {
    std::int64_t first;  // of the row's blocks in [tile, block, row]
    std::int64_t rows;   // of its tile, the distance between its blocks

    RowPlace(const Activations& of, const ActivationLayout& layout, std::int64_t row) {
        const std::int64_t begin = row / layout.tile * layout.tile;
        rows = of.rows - begin < layout.tile ? of.rows - begin : layout.tile;
        first = begin * (of.columns / block_columns) + (row - begin);
    }
    std::int64_t block(std::int64_t b) const { return first + b * rows; }
    // In [tile, block, half, row].
    std::int64_t half(std::int64_t b, int h, int halves, std::int64_t row_in_tile) const {
        return (first - row_in_tile) * halves + (b * halves + h) * rows + row_in_tile;
    }
};

constexpr float largest_byte = 127.0F;
// In a far line an integer is far_step * high + low, both of 8 bits.
constexpr int far_shift = 4;
constexpr int far_step = 1 << far_shift;
constexpr int line_columns = 4;
constexpr int block_lines = block_columns / line_columns;
constexpr float smallest_activation = 1e-30F;
constexpr std::int32_t infinity_bits = 0x7F800000;

// How the activations of one block become integers, from the largest of their magnitudes and, if
// they are `fine`, from the largest outside of the far line.
struct BlockScale {
    bool some;      // not all zeros; false, too, where one is infinite or no number
    float inverse;  // x * inverse is rounded
    float scale;    // what an integer stands for; no number where an activation was none

    BlockScale(float largest, float others, bool fine)
        : some(largest >= smallest_activation && largest <= std::numeric_limits<float>::max()) {
        const float far = largest * (1.0F / far_step);
        const float base = !fine ? largest : others > far ? others : far;
        inverse = some ? largest_byte / base : 0.0F;
        scale = some                            ? base / largest_byte
                : largest < smallest_activation ? 0.0F
                                                : std::numeric_limits<float>::quiet_NaN();
    }
};

// Blocks first .. last - 1 of a row that begins at x.
using RowQuantizer = void (*)(const float* x, std::int64_t row, std::int64_t first,
                              std::int64_t last, Activations& to);

namespace portable {
Kernels kernels(WeightKind kind, bool fine);
void quantize_blocks(const float* x, std::int64_t row, std::int64_t first, std::int64_t last,
                     Activations& to);
}  // namespace portable

namespace avx2 {
Kernels kernels(WeightKind kind, bool fine);
void quantize_blocks(const float* x, std::int64_t row, std::int64_t first, std::int64_t last,
                     Activations& to);
}  // namespace avx2

namespace avx512_vnni {
Kernels kernels(WeightKind kind, bool fine);
void quantize_blocks(const float* x, std::int64_t row, std::int64_t first, std::int64_t last,
                     Activations& to);
}  // namespace avx512_vnni

}  // namespace drumline
