#include "linear.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
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
            return path_available(Path::avx2) && has(features, "avx512f") &&
                   has(features, "avx512bw") && has(features, "avx512vl") &&
                   has(features, "avx512_vnni");
    }
    return false;
}

using KernelChoice = Kernels (*)(WeightKind, bool);

KernelChoice choice(Path path) {
    switch (path) {
        case Path::portable:
            return portable::kernels;
        case Path::avx2:
            return avx2::kernels;
        case Path::avx512_vnni:
            return avx512_vnni::kernels;
    }
    throw std::invalid_argument("unknown path");
}

RowQuantizer row_quantizer(Path path) {
    switch (path) {
        case Path::portable:
            return portable::quantize_blocks;
        case Path::avx2:
            return avx2::quantize_blocks;
        case Path::avx512_vnni:
            return avx512_vnni::quantize_blocks;
    }
    throw std::invalid_argument("unknown path");
}

std::int64_t number_bytes(Numbers numbers) {
    switch (numbers) {
        case Numbers::none:
            return 0;
        case Numbers::bytes:
            return 1;
        case Numbers::words:
        case Numbers::swapped:
            return 2;
    }
    return 0;
}

// As few tiles as possible, and of those the most even: 9 rows are 5 and 4, not 8 and 1.
std::int64_t even_tile(std::int64_t rows, std::int64_t most) {
    const std::int64_t tiles = (rows + most - 1) / most;
    return (rows + tiles - 1) / tiles;
}

// Rows whose activations stay in the second-level cache while weights pass by.
constexpr std::int64_t panel_bytes = 256 * 1024;

std::int64_t checked_columns(WeightKind kind, std::int64_t outputs, std::int64_t columns) {
    if (outputs < 1 || columns < 1) {
        throw std::invalid_argument("a weight needs at least one output and one column");
    }
    const std::int64_t block = packed_layout(kind).raw_columns;
    if (columns % block != 0) {
        throw std::invalid_argument("a quantized weight's columns come in whole blocks of " +
                                    std::to_string(block) + ", not " + std::to_string(columns));
    }
    return columns;
}

std::int64_t total(const std::vector<std::int64_t>& outputs) {
    return std::accumulate(outputs.begin(), outputs.end(), std::int64_t{0});
}

}  // namespace

WeightKind weight_kind(const std::string& name) {
    static const std::pair<const char*, WeightKind> names[] = {
        {"Q4_0", WeightKind::q4_0}, {"Q4_1", WeightKind::q4_1}, {"Q8_0", WeightKind::q8_0},
        {"Q4_K", WeightKind::q4_k}, {"Q6_K", WeightKind::q6_k}, {"F32", WeightKind::f32},   {"F16", WeightKind::f16},   {"BF16", WeightKind::bf16}};
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

void Activations::prepare(std::int64_t row_count, std::int64_t width,
                          const ActivationLayout& wanted) {
    rows = row_count;
    columns = width;
    layout = wanted;
    layout.tile = static_cast<int>(even_tile(rows, wanted.tile));
    const std::int64_t blocks = columns / block_columns;
    const auto room = [](auto& numbers, std::int64_t count) {
        if (numbers.size() < static_cast<std::size_t>(count)) {
            numbers.resize(static_cast<std::size_t>(count));
        }
    };
    room(q, rows * columns * number_bytes(layout.numbers));
    room(scale, rows * blocks);
    room(scaled_sum, rows * blocks);
    room(offset, rows * blocks * layout.halves);
    if (layout.fine && layout.numbers == Numbers::bytes) {
        room(far, rows * blocks * layout.halves);
        room(far_line, rows * blocks * layout.halves);
    }
}

void Activations::quantize_blocks(const float* x, std::int64_t x_stride, std::int64_t first,
                                  std::int64_t last, Path path) {
    const RowQuantizer quantizer = row_quantizer(path);
    for (std::int64_t r = 0; r < rows; ++r) {
        quantizer(x + r * x_stride, r, first, last, *this);
    }
}

void Activations::quantize_row(const float* x, std::int64_t row, Path path) {
    row_quantizer(path)(x, row, 0, columns / block_columns, *this);
}

void Activations::quantize(const float* x, std::int64_t row_count, std::int64_t width,
                           std::int64_t x_stride, const ActivationLayout& wanted, int threads,
                           Path path) {
    prepare(row_count, width, wanted);
    // Rows are quantized apart from each other, so who does which does not matter.
    const int parts = rows >= 8 ? threads : 1;
    struct Job {
        const float* x;
        std::int64_t x_stride;
        RowQuantizer quantizer;
        int parts;
    } const job{x, x_stride, row_quantizer(path), parts};
    const auto body = [this, &job](int part) {
        for (std::int64_t r = rows * part / job.parts; r < rows * (part + 1) / job.parts; ++r) {
            job.quantizer(job.x + r * job.x_stride, r, 0, columns / block_columns, *this);
        }
    };
    Pool::instance().run(threads, parts, body);
}

PackedLinear::PackedLinear(WeightKind kind, const std::vector<const std::uint8_t*>& raw,
                           const std::vector<std::int64_t>& outputs, std::int64_t columns)
    : kind_(kind),
      outputs_(total(outputs)),
      columns_(checked_columns(kind, outputs_, columns)),
      groups_((outputs_ + group_outputs - 1) / group_outputs),
      group_bytes_(packed_group_bytes(kind, columns)),
      bytes_(static_cast<std::size_t>(groups_) * group_bytes_) {
    const PackedLayout layout = packed_layout(kind);
    const std::size_t row_bytes =
        static_cast<std::size_t>(columns / layout.raw_columns) * layout.raw_bytes;
    std::int64_t at = 0;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
        for (std::int64_t o = 0; o < outputs[i]; ++o, ++at) {
            pack_row(kind, raw[i] + o * row_bytes,
                     bytes_.data() + (at / group_outputs) * group_bytes_,
                     static_cast<int>(at % group_outputs), columns);
        }
    }
}

bool PackedLinear::quantized() const {
    return kind_ != WeightKind::f32 && kind_ != WeightKind::f16 && kind_ != WeightKind::bf16;
}

ActivationLayout PackedLinear::layout(Path path, bool fine) const {
    return choice(path)(kind_, fine).layout;
}

void PackedLinear::multiply_groups(std::int64_t first, std::int64_t last, const float* x,
                                   std::int64_t rows, std::int64_t x_stride,
                                   const Activations& activations, float* out,
                                   std::int64_t out_stride, Path path, bool fine) const {
    const Kernels kernels = choice(path)(kind_, fine);
    const std::int64_t tile =
        quantized() ? activations.layout.tile : even_tile(rows, kernels.layout.tile);
    const std::int64_t number = number_bytes(kernels.layout.numbers);
    const std::int64_t row_bytes = columns_ * (number > 0 ? number : 4);
    const std::int64_t panel = std::max<std::int64_t>(1, panel_bytes / row_bytes / tile) * tile;
    const std::int64_t blocks = columns_ / block_columns;
    for (std::int64_t begin = 0; begin < rows; begin += panel) {
        const std::int64_t end = std::min(rows, begin + panel);
        for (std::int64_t g = first; g < last; ++g) {
            TileJob job;
            job.weights = bytes_.data() + g * group_bytes_;
            job.columns = columns_;
            job.x_stride = x_stride;
            job.out_stride = out_stride;
            job.outputs = static_cast<int>(
                std::min<std::int64_t>(group_outputs, outputs_ - g * group_outputs));
            for (std::int64_t r = begin; r < end; r += tile) {
                if (number > 0) {
                    job.q = activations.q.data() + r * columns_ * number;
                    job.scale = activations.scale.data() + r * blocks;
                    job.scaled_sum = activations.scaled_sum.data() + r * blocks;
                    const std::int64_t half = r * blocks * kernels.layout.halves;
                    job.offset = activations.offset.data() + half;
                    job.far = activations.far.data() + half;
                    job.far_line = activations.far_line.data() + half;
                } else {
                    job.x = x + r * x_stride;
                }
                job.out = out + r * out_stride + g * group_outputs;
                job.first = r == begin;
                job.last = r + tile >= end;
                kernels.by_rows[std::min(tile, rows - r) - 1](job);
            }
        }
    }
}

void PackedLinear::multiply(const float* x, std::int64_t rows, std::int64_t x_stride, float* out,
                            std::int64_t out_stride, int threads, Path path, bool fine,
                            Outputs some) const {
    if (rows == 0) {
        return;
    }
    // One per calling thread, for the memory it keeps.
    static thread_local Activations activations;
    if (quantized()) {
        activations.quantize(x, rows, columns_, x_stride, layout(path, fine), threads, path);
    }
    multiply_all(x, rows, x_stride, activations, out, out_stride, threads, path, fine, some);
}

void PackedLinear::multiply(const Activations& activations, float* out, std::int64_t out_stride,
                            int threads, Path path, bool fine, Outputs some) const {
    multiply_all(nullptr, activations.rows, 0, activations, out, out_stride, threads, path, fine,
                 some);
}

void PackedLinear::multiply_all(const float* x, std::int64_t rows, std::int64_t x_stride,
                                const Activations& activations, float* out,
                                std::int64_t out_stride, int threads, Path path, bool fine,
                                Outputs some) const {
    const std::int64_t end = std::min(some.end, outputs_);
    const std::int64_t first = some.begin / group_outputs;
    const std::int64_t groups = (end + group_outputs - 1) / group_outputs - first;
    // A few parts more than threads: who comes late, or is held up, gets fewer.
    const int parts =
        static_cast<int>(std::min<std::int64_t>(groups, threads > 1 ? 4 * threads : 1));
    Pool::instance().run(threads, parts, [&](int part) {
        multiply_groups(first + groups * part / parts, first + groups * (part + 1) / parts, x, rows,
                        x_stride, activations, out, out_stride, path, fine);
    });
}

void PackedLinear::take_rows(const std::int64_t* ids, std::int64_t count, float* out) const {
    for (std::int64_t i = 0; i < count; ++i) {
        unpack_row(kind_, bytes_.data() + (ids[i] / group_outputs) * group_bytes_,
                   static_cast<int>(ids[i] % group_outputs), columns_, out + i * columns_);
    }
}

}  // namespace drumline
