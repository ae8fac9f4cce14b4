#include "linear.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>

#include "cpu_features.hpp"
#include "linear_kernels.hpp"
#include "pool.hpp"

namespace drumline {
namespace {

bool has(const CpuFeatures& features, const char* name) {
    for (const auto& [feature, present] : features) {
        if (std::strcmp(feature, name) == 0) {
            return present;
        }
    }
    return false;
}

bool path_available(Path path) {
    // Read once: in a virtual machine every cpuid is a trip to the hypervisor.
    static const CpuFeatures features = cpu_features();
    switch (path) {
        case Path::portable:
            return true;
        case Path::avx2:
            return has(features, "avx2") && has(features, "fma") && has(features, "f16c");
        case Path::avx512_vnni:
            return path_available(Path::avx2) && has(features, "avx512_vnni") &&
                   has(features, "avx512vl");
    }
    return false;
}

struct RawLayout {
    std::int64_t columns;  // per block; 1 for plain numbers
    std::size_t bytes;
};

RawLayout raw_layout(WeightKind kind) {
    switch (kind) {
        case WeightKind::q4_0:
            return {32, 18};
        case WeightKind::q4_1:
            return {32, 20};
        case WeightKind::q8_0:
            return {32, 34};
        case WeightKind::f32:
            return {1, 4};
        case WeightKind::f16:
        case WeightKind::bf16:
            return {1, 2};
    }
    throw std::invalid_argument("unknown weight kind");
}

std::size_t packed_group_bytes(WeightKind kind, std::int64_t columns) {
    const auto blocks = static_cast<std::size_t>(columns / block_columns);
    switch (kind) {
        case WeightKind::q4_0:
        case WeightKind::q4_1:
            return blocks * q4_block_bytes;
        case WeightKind::q8_0:
            return blocks * q8_block_bytes;
        default:
            return static_cast<std::size_t>(columns) * group_outputs * raw_layout(kind).bytes;
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

// -8 * d as a half: exact unless it overflows or d is subnormal enough to matter; it is only a
// shift of the exponent. Zero stays zero.
std::uint16_t minus_eight_times(std::uint16_t half) {
    const std::uint16_t magnitude = half & 0x7FFFU;
    const auto sign = static_cast<std::uint16_t>((half & 0x8000U) ^ 0x8000U);
    if (magnitude == 0) {
        return sign;
    }
    if (magnitude < 0x0400U) {  // subnormal: multiply by shifting; may become normal
        std::uint32_t exponent = 1;
        std::uint32_t mantissa = static_cast<std::uint32_t>(magnitude) << 3;
        while (mantissa >= 0x800U) {
            mantissa >>= 1;
            ++exponent;
        }
        if (mantissa < 0x400U) {
            return sign | static_cast<std::uint16_t>(mantissa);
        }
        return sign | static_cast<std::uint16_t>((exponent << 10) | (mantissa & 0x3FFU));
    }
    if (magnitude >= 0x7000U) {
        throw std::invalid_argument("a Q4_0 scale is too large to repack");
    }
    return sign | static_cast<std::uint16_t>(magnitude + (3U << 10));
}

void put_half(std::uint8_t* at, std::uint16_t value) { std::memcpy(at, &value, sizeof value); }

std::uint16_t get_half(const std::uint8_t* at) {
    std::uint16_t value = 0;
    std::memcpy(&value, at, sizeof value);
    return value;
}

// One output's block of 32 nibbles (q4_0: element i low, i + 16 high, both kinds) → its bytes in
// the interleaved group: byte v*32 + o*4 + i holds column 8v + i low and 8v + 4 + i high.
void place_q4(std::uint8_t* block, int output, std::uint16_t d, std::uint16_t m,
              const std::uint8_t* nibbles) {
    put_half(block + 2 * output, d);
    put_half(block + 16 + 2 * output, m);
    std::uint8_t column[32];
    for (int i = 0; i < 16; ++i) {
        column[i] = nibbles[i] & 15U;
        column[i + 16] = nibbles[i] >> 4;
    }
    for (int v = 0; v < 4; ++v) {
        for (int i = 0; i < 4; ++i) {
            block[32 + v * 32 + output * 4 + i] =
                static_cast<std::uint8_t>(column[8 * v + i] | (column[8 * v + 4 + i] << 4));
        }
    }
}

void place_q8(std::uint8_t* block, int output, const std::uint8_t* raw) {
    put_half(block + 2 * output, get_half(raw));
    for (int g = 0; g < 8; ++g) {
        std::memcpy(block + 16 + g * 32 + output * 4, raw + 2 + 4 * g, 4);
    }
}

void pack_row(WeightKind kind, const std::uint8_t* raw, std::uint8_t* group, int output,
              std::int64_t columns) {
    const RawLayout layout = raw_layout(kind);
    if (layout.columns == 1) {
        for (std::int64_t k = 0; k < columns; ++k) {
            std::memcpy(group + (k * group_outputs + output) * layout.bytes, raw + k * layout.bytes,
                        layout.bytes);
        }
        return;
    }
    for (std::int64_t b = 0; b < columns / block_columns; ++b, raw += layout.bytes) {
        switch (kind) {
            case WeightKind::q4_0:
                place_q4(group + b * q4_block_bytes, output, get_half(raw),
                         minus_eight_times(get_half(raw)), raw + 2);
                break;
            case WeightKind::q4_1:
                place_q4(group + b * q4_block_bytes, output, get_half(raw), get_half(raw + 2),
                         raw + 4);
                break;
            default:
                place_q8(group + b * q8_block_bytes, output, raw);
        }
    }
}

std::int64_t checked_columns(WeightKind kind, std::int64_t outputs, std::int64_t columns) {
    if (outputs < 1 || columns < 1) {
        throw std::invalid_argument("a weight needs at least one output and one column");
    }
    if (columns % raw_layout(kind).columns != 0) {
        throw std::invalid_argument("a quantized weight's columns come in whole blocks of 32");
    }
    return columns;
}

using GroupKernel = void (*)(const GroupJob&);

GroupKernel choose(WeightKind kind, Path path) {
    const int row = path == Path::portable ? 0 : path == Path::avx2 ? 1 : 2;
    static constexpr GroupKernel q4[] = {portable::q4, avx2::q4, avx512_vnni::q4};
    static constexpr GroupKernel q8[] = {portable::q8, avx2::q8, avx512_vnni::q8};
    static constexpr GroupKernel f32[] = {portable::f32, avx2::f32, avx2::f32};
    static constexpr GroupKernel f16[] = {portable::f16, avx2::f16, avx2::f16};
    static constexpr GroupKernel bf16[] = {portable::bf16, avx2::bf16, avx2::bf16};
    switch (kind) {
        case WeightKind::q4_0:
        case WeightKind::q4_1:
            return q4[row];
        case WeightKind::q8_0:
            return q8[row];
        case WeightKind::f32:
            return f32[row];
        case WeightKind::f16:
            return f16[row];
        case WeightKind::bf16:
            return bf16[row];
    }
    throw std::invalid_argument("unknown weight kind");
}

}  // namespace

float load_half(const std::uint8_t* at) { return half_to_float(get_half(at)); }

WeightKind weight_kind(const std::string& name) {
    static const std::pair<const char*, WeightKind> names[] = {
        {"Q4_0", WeightKind::q4_0}, {"Q4_1", WeightKind::q4_1}, {"Q8_0", WeightKind::q8_0},
        {"F32", WeightKind::f32},   {"F16", WeightKind::f16},   {"BF16", WeightKind::bf16}};
    for (const auto& [known, kind] : names) {
        if (name == known) {
            return kind;
        }
    }
    throw std::invalid_argument("no native linear for weights of kind " + name);
}

std::string path_name(Path path) {
    switch (path) {
        case Path::portable:
            return "portable";
        case Path::avx2:
            return "avx2";
        case Path::avx512_vnni:
            return "avx512_vnni";
    }
    return "unknown";
}

std::vector<std::string> available_paths() {
    std::vector<std::string> names;
    for (const Path path : {Path::avx512_vnni, Path::avx2, Path::portable}) {
        if (path_available(path)) {
            names.push_back(path_name(path));
        }
    }
    return names;
}

Path path_by_name(const std::string& name) {
    for (const Path path : {Path::avx512_vnni, Path::avx2, Path::portable}) {
        if (name == path_name(path)) {
            if (!path_available(path)) {
                throw std::invalid_argument("this processor cannot run the path " + name);
            }
            return path;
        }
    }
    throw std::invalid_argument("no path " + name);
}

Path best_path() { return path_by_name(available_paths().front()); }

AlignedBytes::AlignedBytes(std::size_t size) : data_(nullptr), size_(size) {
    const std::size_t rounded = (size + 63) / 64 * 64;
    data_ = static_cast<std::uint8_t*>(std::aligned_alloc(64, rounded));
    if (data_ == nullptr) {
        throw std::bad_alloc();
    }
    std::memset(data_, 0, rounded);
}

AlignedBytes::~AlignedBytes() { std::free(data_); }

PackedLinear::PackedLinear(WeightKind kind, const std::uint8_t* raw, std::int64_t outputs,
                           std::int64_t columns)
    : kind_(kind),
      outputs_(outputs),
      columns_(checked_columns(kind, outputs, columns)),
      groups_((outputs + group_outputs - 1) / group_outputs),
      group_bytes_(packed_group_bytes(kind, columns)),
      bytes_(static_cast<std::size_t>(groups_) * group_bytes_) {
    const RawLayout layout = raw_layout(kind);
    const std::size_t row_bytes = static_cast<std::size_t>(columns / layout.columns) * layout.bytes;
    for (std::int64_t o = 0; o < outputs; ++o) {
        std::uint8_t* group = bytes_.data() + (o / group_outputs) * group_bytes_;
        pack_row(kind, raw + o * row_bytes, group, static_cast<int>(o % group_outputs), columns);
    }
}

bool PackedLinear::quantized() const {
    return kind_ == WeightKind::q4_0 || kind_ == WeightKind::q4_1 || kind_ == WeightKind::q8_0;
}

void PackedLinear::quantize(const float* x, std::int64_t rows, std::int64_t x_stride, int threads,
                            Path path, bool fine, QuantizedRows& to) const {
    const std::int64_t planes = fine ? 2 : 1;
    to.resize(rows * planes, columns_);
    const auto quantize_row = path == Path::portable ? portable::quantize_row : avx2::quantize_row;
    // Rows are quantized apart from each other, so who does which does not matter.
    const int parts = rows >= 8 ? threads : 1;
    const std::int64_t share = (rows + parts - 1) / parts;
    Pool::instance().run(threads, parts, [&](int part) {
        std::vector<float> rest(static_cast<std::size_t>(fine ? columns_ : 0));
        const std::int64_t end = std::min(rows, (part + 1) * share);
        for (std::int64_t r = part * share; r < end; ++r) {
            const float* row = x + r * x_stride;
            quantize_row(row, columns_, to, r * planes);
            if (fine) {
                const std::int8_t* q = to.q.data() + r * planes * columns_;
                const float* scale = to.scale.data() + r * planes * (columns_ / block_columns);
                for (std::int64_t k = 0; k < columns_; ++k) {
                    rest[k] = row[k] - scale[k / block_columns] * static_cast<float>(q[k]);
                }
                quantize_row(rest.data(), columns_, to, r * planes + 1);
            }
        }
    });
}

void PackedLinear::multiply(const float* x, std::int64_t rows, std::int64_t x_stride, float* out,
                            std::int64_t out_stride, int threads, Path path, bool fine) const {
    if (rows == 0) {
        return;
    }
    const bool two_planes = fine && quantized();
    QuantizedRows quantized_rows;
    if (quantized()) {
        quantize(x, rows, x_stride, threads, path, two_planes, quantized_rows);
    }
    const GroupKernel kernel = choose(kind_, path);
    // A few parts more than threads: who comes late, or is held up, gets fewer.
    const int parts =
        static_cast<int>(std::min<std::int64_t>(groups_, threads > 1 ? 4 * threads : 1));
    const std::int64_t share = (groups_ + parts - 1) / parts;
    Pool::instance().run(threads, parts, [&](int part) {
        std::vector<float> planes(static_cast<std::size_t>(two_planes ? 2 * rows * group_outputs : 0));
        const std::int64_t end = std::min(groups_, (part + 1) * share);
        for (std::int64_t g = part * share; g < end; ++g) {
            GroupJob job;
            job.weights = bytes_.data() + g * group_bytes_;
            job.columns = columns_;
            job.rows = two_planes ? 2 * rows : rows;
            job.x = x;
            job.x_stride = x_stride;
            job.quantized = &quantized_rows;
            job.out = two_planes ? planes.data() : out + g * group_outputs;
            job.out_stride = two_planes ? group_outputs : out_stride;
            job.outputs = static_cast<int>(
                std::min<std::int64_t>(group_outputs, outputs_ - g * group_outputs));
            kernel(job);
            for (std::int64_t r = 0; two_planes && r < rows; ++r) {
                const float* coarse = planes.data() + 2 * r * group_outputs;
                for (int o = 0; o < job.outputs; ++o) {
                    out[r * out_stride + g * group_outputs + o] =
                        coarse[o] + coarse[group_outputs + o];
                }
            }
        }
    });
}

}  // namespace drumline
