// Linear layers on repacked weights: out[r, o] = sum over k of x[r, k] * w[o, k].
//
// Weights are interleaved by groups of 8 outputs, so that one vector holds the same few columns of
// 8 outputs, and one stream of memory is read from front to back. Quantized weights keep their
// blocks of 32 columns; activations are quantized per row and block of 32 to int8. Sums within a
// block are integers, hence exact in any order; blocks are added in ascending order in float32. So
// a row's bits depend on the row alone, whatever the number of rows and threads (within one
// instruction-set path).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace drumline {

struct QuantizedRows;

enum class WeightKind { q4_0, q4_1, q8_0, f32, f16, bf16 };

WeightKind weight_kind(const std::string& name);  // throws std::invalid_argument

enum class Path { portable, avx2, avx512_vnni };

std::vector<std::string> available_paths();  // best first
Path path_by_name(const std::string& name);  // throws std::invalid_argument
std::string path_name(Path path);
Path best_path();

// 64-byte aligned bytes that are freed with the object.
class AlignedBytes {
public:
    explicit AlignedBytes(std::size_t size);
    ~AlignedBytes();
    AlignedBytes(const AlignedBytes&) = delete;
    AlignedBytes& operator=(const AlignedBytes&) = delete;
    std::uint8_t* data() { return data_; }
    const std::uint8_t* data() const { return data_; }
    std::size_t size() const { return size_; }

private:
    std::uint8_t* data_;
    std::size_t size_;
};

class PackedLinear {
public:
    // `raw`: [outputs, row_bytes] as a GGUF tensor of that kind stores it, rows end to end.
    PackedLinear(WeightKind kind, const std::uint8_t* raw, std::int64_t outputs, std::int64_t columns);

    // x [rows, columns] float32 with `x_stride` floats between rows → out [rows, outputs] likewise.
    // `fine`: activations of quantized weights as the sum of two int8 rows, the second of what the
    // first left over; about 14 bits, at the cost of a second row.
    void multiply(const float* x, std::int64_t rows, std::int64_t x_stride, float* out,
                  std::int64_t out_stride, int threads, Path path, bool fine) const;

    std::int64_t outputs() const { return outputs_; }
    std::int64_t columns() const { return columns_; }
    std::size_t nbytes() const { return bytes_.size(); }

private:
    bool quantized() const;
    void quantize(const float* x, std::int64_t rows, std::int64_t x_stride, int threads, Path path,
                  bool fine, QuantizedRows& to) const;

    WeightKind kind_;
    std::int64_t outputs_;
    std::int64_t columns_;
    std::int64_t groups_;  // of 8 outputs; the last may be filled up with zeros
    std::size_t group_bytes_;
    AlignedBytes bytes_;
};

}  // namespace drumline
