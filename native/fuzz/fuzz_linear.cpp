// Products on packed weights: random kinds, shapes and strides, in memory that ends where it must.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "../linear.hpp"
#include "../linear_kernels.hpp"
#include "fuzz.hpp"

namespace drumline::fuzz {
namespace {

struct Case {
    WeightKind kind;
    std::int64_t outputs, columns, rows, x_stride, out_stride;
    bool fine;
    std::vector<std::uint8_t> raw;
    std::vector<float> x;
};

Case draw(Random& random) {
    Case one;
    one.kind = random.of({WeightKind::q4_0, WeightKind::q4_1, WeightKind::q8_0, WeightKind::q4_k,
                          WeightKind::q6_k, WeightKind::f32, WeightKind::f16, WeightKind::bf16});
    const PackedLayout layout = packed_layout(one.kind);
    one.outputs = random.whole(1, random.of({3, 40, 150}));
    one.columns = layout.raw_columns * random.whole(1, layout.raw_columns == 1 ? 150 : 7);
    one.rows = random.whole(1, random.of({1, 4, 20, 70}));
    one.x_stride = one.columns + random.of({0, 0, 1, 7});
    one.out_stride = one.outputs + random.of({0, 0, 1, 16});
    one.fine = random.one_in(2);
    // Any bytes: scales that are infinite or not a number are a checkpoint's own affair.
    one.raw = random.bytes(static_cast<std::size_t>(one.outputs * one.columns /
                                                    layout.raw_columns) *
                           layout.raw_bytes);
    one.x.resize(static_cast<std::size_t>((one.rows - 1) * one.x_stride + one.columns));
    for (float& value : one.x) {
        value = random.activation();
    }
    return one;
}

// Every bit but which of the not-numbers it is.
bool same(float a, float b) {
    return (std::isnan(a) && std::isnan(b)) || std::memcmp(&a, &b, sizeof a) == 0;
}

std::vector<float> multiply(const Case& one, const PackedLinear& packed, std::int64_t first,
                            std::int64_t rows, int threads, Path path) {
    const auto size = static_cast<std::size_t>((rows - 1) * one.out_stride + one.outputs);
    std::vector<float> out(size, 12345.0F);
    const float* x = one.x.data() + first * one.x_stride;
    if (threads > 1) {
        packed.multiply(x, rows, one.x_stride, out.data(), one.out_stride, threads, path, one.fine);
    } else {  // activations in memory of just their size
        Activations activations;
        if (packed.quantized()) {
            activations.quantize(x, rows, one.columns, one.x_stride, packed.layout(path, one.fine),
                                 1, path);
        }
        packed.multiply_groups(0, packed.groups(), x, rows, one.x_stride, activations, out.data(),
                               one.out_stride, path, one.fine);
    }
    for (std::int64_t r = 0; r + 1 < rows; ++r) {
        for (std::int64_t o = one.outputs; o < one.out_stride; ++o) {
            expect(out[r * one.out_stride + o] == 12345.0F, "wrote between its rows");
        }
    }
    return out;
}

void expect_row(const Case& one, const std::vector<float>& whole, std::int64_t row,
                const std::vector<float>& other, std::int64_t at, const char* what) {
    for (std::int64_t o = 0; o < one.outputs; ++o) {
        expect(same(whole[row * one.out_stride + o], other[at * one.out_stride + o]), what);
    }
}

// The same columns in double precision, where everything is finite.
void expect_close(const Case& one, const PackedLinear& packed, const std::vector<float>& out) {
    std::vector<float> weights(static_cast<std::size_t>(one.columns));
    const std::int64_t o = one.outputs / 2;
    packed.take_rows(&o, 1, weights.data());
    for (std::int64_t r = 0; r < one.rows; ++r) {
        double exact = 0, size = 0;
        bool finite = true;
        for (std::int64_t k = 0; k < one.columns; ++k) {
            finite = finite && std::isfinite(one.x[r * one.x_stride + k]);
            // What is left of an activation is a part of its block's largest.
            double largest = 0;
            for (std::int64_t i = k / 32 * 32; i < std::min(one.columns, k / 32 * 32 + 32); ++i) {
                largest = std::fmax(largest, std::fabs(one.x[r * one.x_stride + i]));
            }
            exact += static_cast<double>(one.x[r * one.x_stride + k]) * weights[k];
            size += largest * std::fabs(static_cast<double>(weights[k]));
        }
        const float got = out[r * one.out_stride + o];
        if (!finite) {
            expect(!packed.quantized() || std::isnan(got), "infinity or no number became one");
            continue;
        }
        // Beyond that a sum in float32 may overflow, and parts of a block may on the way.
        if (!(size < 1e30) || size < 1e-20) {
            continue;
        }
        const double error = std::fabs(got - exact);
        const double bound = packed.quantized() ? 0.02 : 1e-3;
        expect(error <= bound * size + 1e-20, "far from the exact product");
    }
}

}  // namespace

void linears(Random& random) {
    const Case one = draw(random);
    const PackedLinear packed(one.kind, one.raw.data(), one.outputs, one.columns);
    std::vector<std::vector<float>> by_path;
    for (const std::string& name : available_paths()) {
        const Path path = path_by_name(name);
        const std::vector<float> whole = multiply(one, packed, 0, one.rows, 1, path);
        by_path.push_back(whole);
        const std::vector<float> shared = multiply(one, packed, 0, one.rows, 2, path);
        for (std::int64_t r = 0; r < one.rows; ++r) {
            expect_row(one, whole, r, shared, r, "two threads give other bits");
        }
        const std::int64_t first = random.whole(0, one.rows - 1);
        const std::int64_t count = random.whole(1, one.rows - first);
        const std::vector<float> part = multiply(one, packed, first, count, 1, path);
        for (std::int64_t r = 0; r < count; ++r) {
            expect_row(one, whole, first + r, part, r, "fewer rows give other bits");
        }
        expect_close(one, packed, whole);
    }
    for (std::size_t i = 1; i + 1 < by_path.size(); ++i) {  // the last is portable: it rounds more
        for (std::int64_t r = 0; r < one.rows; ++r) {
            expect_row(one, by_path[0], r, by_path[i], r, "vector paths differ");
        }
    }
}

}  // namespace drumline::fuzz
