// From the blocks of GGUF to packed groups, and back for single rows.
#include <algorithm>
#include <array>
#include <cstring>

#include "linear_kernels.hpp"

namespace drumline {
namespace {

void put_half(std::uint8_t* at, std::uint16_t value) { std::memcpy(at, &value, sizeof value); }

std::uint16_t get_half(const std::uint8_t* at) {
    std::uint16_t value = 0;
    std::memcpy(&value, at, sizeof value);
    return value;
}

float number(const std::uint8_t* at) { return half_to_float(get_half(at)); }

// Columns of one block of 32: the quanta as whole numbers.
using Column = std::array<std::uint8_t, block_columns>;

void put_nibbles(std::uint8_t* lines, int output, const Column& column) {
    for (int v = 0; v < 4; ++v) {
        for (int i = 0; i < 4; ++i) {
            lines[v * line_bytes + output * 4 + i] = static_cast<std::uint8_t>(
                (column[8 * v + i] & 15U) | ((column[8 * v + 4 + i] & 15U) << 4));
        }
    }
}

void get_nibbles(const std::uint8_t* lines, int output, Column& column) {
    for (int v = 0; v < 4; ++v) {
        for (int i = 0; i < 4; ++i) {
            const std::uint8_t byte = lines[v * line_bytes + output * 4 + i];
            column[8 * v + i] = byte & 15U;
            column[8 * v + 4 + i] = byte >> 4;
        }
    }
}

// Bits 4 and 5 of the quanta.
void put_high(std::uint8_t* lines, int output, const Column& column) {
    for (int g = 0; g < 8; ++g) {
        for (int i = 0; i < 4; ++i) {
            lines[g / 4 * line_bytes + output * 4 + i] |=
                static_cast<std::uint8_t>((column[4 * g + i] >> 4) << (2 * (g % 4)));
        }
    }
}

void get_high(const std::uint8_t* lines, int output, Column& column) {
    for (int g = 0; g < 8; ++g) {
        for (int i = 0; i < 4; ++i) {
            const int high = (lines[g / 4 * line_bytes + output * 4 + i] >> (2 * (g % 4))) & 3;
            column[4 * g + i] = static_cast<std::uint8_t>(column[4 * g + i] | (high << 4));
        }
    }
}

void put_bytes(std::uint8_t* lines, int output, const std::uint8_t* values) {
    for (int g = 0; g < 8; ++g) {
        for (int i = 0; i < 4; ++i) {
            lines[g * line_bytes + output * 4 + i] = values[4 * g + i] ^ 0x80U;
        }
    }
}

// Element i low, element i + 16 high.
Column split16(const std::uint8_t* nibbles) {
    Column column{};
    for (int i = 0; i < 16; ++i) {
        column[i] = nibbles[i] & 15U;
        column[i + 16] = nibbles[i] >> 4;
    }
    return column;
}

// Scale or minimum j of a Q4_K block: 6 bits each in 12 bytes, see ops/quant.py.
void scale_and_minimum(const std::uint8_t* packed, int j, std::uint8_t& scale,
                       std::uint8_t& minimum) {
    if (j < 4) {
        scale = packed[j] & 63U;
        minimum = packed[j + 4] & 63U;
        return;
    }
    scale = static_cast<std::uint8_t>((packed[j + 4] & 15U) | ((packed[j - 4] >> 6) << 4));
    minimum = static_cast<std::uint8_t>((packed[j + 4] >> 4) | ((packed[j] >> 6) << 4));
}

void pack_q4_k(const std::uint8_t* raw, std::uint8_t* scales, std::uint8_t* quanta, int output) {
    put_half(scales + 2 * output, get_half(raw));
    put_half(scales + 32 + 2 * output, get_half(raw + 2) ^ 0x8000U);
    for (int b = 0; b < 8; ++b) {
        scale_and_minimum(raw + 4, b, scales[64 + 32 * b + output], scales[80 + 32 * b + output]);
        Column column{};
        for (int i = 0; i < block_columns; ++i) {
            const std::uint8_t byte = raw[16 + b / 2 * 32 + i];
            column[i] = b % 2 != 0 ? byte >> 4 : byte & 15U;
        }
        put_nibbles(quanta + b * 4 * line_bytes, output, column);
    }
}

void pack_q6_k(const std::uint8_t* raw, std::uint8_t* scales, std::uint8_t* quanta, int output) {
    put_half(scales + 2 * output, get_half(raw + 208));
    for (int s = 0; s < 16; ++s) {
        scales[64 + 16 * s + output] = raw[192 + s];
    }
    for (int b = 0; b < 8; ++b) {
        const int part = b / 4, quarter = b % 4;
        Column column{};
        for (int i = 0; i < block_columns; ++i) {
            const std::uint8_t byte = raw[64 * part + 32 * (quarter % 2) + i];
            const int high = (raw[128 + 32 * part + i] >> (2 * quarter)) & 3;
            column[i] =
                static_cast<std::uint8_t>((quarter >= 2 ? byte >> 4 : byte & 15) | (high << 4));
        }
        std::uint8_t* lines = quanta + b * 6 * line_bytes;
        put_nibbles(lines, output, column);
        put_high(lines + 4 * line_bytes, output, column);
    }
}

float plain(WeightKind kind, const std::uint8_t* at) {
    std::uint32_t bits = 0;
    switch (kind) {
        case WeightKind::f32:
            std::memcpy(&bits, at, 4);
            break;
        case WeightKind::f16:
            return number(at);
        default:
            bits = static_cast<std::uint32_t>(get_half(at)) << 16;
    }
    float out = 0;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

// One raw block of one output, in the order of operations of ops/quant.py.
void unpack_block(WeightKind kind, const std::uint8_t* scales, const std::uint8_t* quanta,
                  int output, float* to) {
    const float d = number(scales + 2 * output);
    Column column{};
    switch (kind) {
        case WeightKind::q4_0:
            get_nibbles(quanta, output, column);
            for (int i = 0; i < block_columns; ++i) {
                to[i] = d * (static_cast<float>(column[i]) - 8.0F);
            }
            return;
        case WeightKind::q4_1: {
            const float m = number(scales + 32 + 2 * output);
            get_nibbles(quanta, output, column);
            for (int i = 0; i < block_columns; ++i) {
                to[i] = d * static_cast<float>(column[i]) + m;
            }
            return;
        }
        case WeightKind::q8_0:
            for (int i = 0; i < block_columns; ++i) {
                const std::uint8_t byte = quanta[i / 4 * line_bytes + output * 4 + i % 4];
                to[i] = d * static_cast<float>(static_cast<int>(byte) - 128);
            }
            return;
        case WeightKind::q4_k: {
            const float minus_dmin = number(scales + 32 + 2 * output);
            for (int b = 0; b < 8; ++b) {
                const float scale = d * static_cast<float>(scales[64 + 32 * b + output]);
                const float m = minus_dmin * static_cast<float>(scales[80 + 32 * b + output]);
                get_nibbles(quanta + b * 4 * line_bytes, output, column);
                for (int i = 0; i < block_columns; ++i) {
                    to[b * block_columns + i] = scale * static_cast<float>(column[i]) + m;
                }
            }
            return;
        }
        default:
            for (int b = 0; b < 8; ++b) {
                const std::uint8_t* lines = quanta + b * 6 * line_bytes;
                get_nibbles(lines, output, column);
                get_high(lines + 4 * line_bytes, output, column);
                for (int i = 0; i < block_columns; ++i) {
                    const auto s = static_cast<std::int8_t>(
                        scales[64 + 16 * (2 * b + i / 16) + output]);
                    to[b * block_columns + i] =
                        (d * static_cast<float>(s)) * (static_cast<float>(column[i]) - 32.0F);
                }
            }
    }
}

}  // namespace

std::size_t packed_group_bytes(WeightKind kind, std::int64_t columns) {
    const PackedLayout layout = packed_layout(kind);
    const std::int64_t blocks = layout.raw_columns == 1 ? columns : columns / block_columns;
    const std::int64_t rest = blocks % layout.unit_blocks;
    return layout.unit(blocks) +
           (rest > 0 ? layout.scale_bytes + static_cast<std::size_t>(rest) * layout.quanta_bytes
                     : 0);
}

void pack_row(WeightKind kind, const std::uint8_t* raw, std::uint8_t* group, int output,
              std::int64_t columns) {
    const PackedLayout layout = packed_layout(kind);
    const std::int64_t blocks_per_raw = std::max<std::int64_t>(1, layout.raw_columns / block_columns);
    for (std::int64_t i = 0; i < columns / layout.raw_columns; ++i, raw += layout.raw_bytes) {
        const std::int64_t block = i * blocks_per_raw;
        std::uint8_t* scales = group + layout.unit(block);
        std::uint8_t* quanta = group + layout.quanta(block);
        const std::int64_t in_unit = block % layout.unit_blocks;
        switch (kind) {
            case WeightKind::q4_0:
                put_half(scales + 32 * in_unit + 2 * output, get_half(raw));
                put_nibbles(quanta, output, split16(raw + 2));
                break;
            case WeightKind::q4_1:
                put_half(scales + 2 * output, get_half(raw));
                put_half(scales + 32 + 2 * output, get_half(raw + 2));
                put_nibbles(quanta, output, split16(raw + 4));
                break;
            case WeightKind::q8_0:
                put_half(scales + 32 * in_unit + 2 * output, get_half(raw));
                put_bytes(quanta, output, raw + 2);
                break;
            case WeightKind::q4_k:
                pack_q4_k(raw, scales, quanta, output);
                break;
            case WeightKind::q6_k:
                pack_q6_k(raw, scales, quanta, output);
                break;
            default:
                std::memcpy(quanta + output * layout.raw_bytes, raw, layout.raw_bytes);
        }
    }
}

void unpack_row(WeightKind kind, const std::uint8_t* group, int output, std::int64_t columns,
                float* to) {
    const PackedLayout layout = packed_layout(kind);
    const std::int64_t blocks_per_raw = std::max<std::int64_t>(1, layout.raw_columns / block_columns);
    for (std::int64_t i = 0; i < columns / layout.raw_columns; ++i, to += layout.raw_columns) {
        const std::int64_t block = i * blocks_per_raw;
        const std::uint8_t* quanta = group + layout.quanta(block);
        if (layout.raw_columns == 1) {
            *to = plain(kind, quanta + output * layout.raw_bytes);
            continue;
        }
        const bool shared = kind == WeightKind::q4_0 || kind == WeightKind::q8_0;
        const std::int64_t in_unit = shared ? block % layout.unit_blocks : 0;
        unpack_block(kind, group + layout.unit(block) + 32 * in_unit, quanta, output, to);
    }
}

float half_to_float(std::uint16_t half) {
    const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000U) << 16;
    std::uint32_t exponent = (half >> 10) & 0x1FU;
    std::uint32_t mantissa = half & 0x3FFU;
    std::uint32_t bits = 0;
    if (exponent == 0x1FU) {
        bits = sign | 0x7F800000U | (mantissa << 13);
    } else if (exponent != 0) {
        bits = sign | ((exponent + 112U) << 23) | (mantissa << 13);
    } else if (mantissa != 0) {
        exponent = 113;
        while ((mantissa & 0x400U) == 0) {
            mantissa <<= 1;
            --exponent;
        }
        bits = sign | (exponent << 23) | ((mantissa & 0x3FFU) << 13);
    } else {
        bits = sign;
    }
    float out = 0;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

}  // namespace drumline
