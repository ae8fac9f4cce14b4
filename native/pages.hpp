// Memory that is written once and then read from front to back, again and again: weights.
//
// It lies in pages of 2 MiB where the system has them, many weights to a page. Reading all weights
// of a small model takes a quarter less time so: the processor prefetches within a page only, and
// a new page of 4 KiB comes every 60 lines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace drumline {

// 64-byte aligned zeroed bytes that are freed with the object; those of a few neighbours together.
class AlignedBytes {
public:
    explicit AlignedBytes(std::size_t size);  // throws std::bad_alloc
    std::uint8_t* data() { return data_; }
    const std::uint8_t* data() const { return data_; }
    std::size_t size() const { return size_; }

    AlignedBytes(const AlignedBytes&) = delete;
    AlignedBytes& operator=(const AlignedBytes&) = delete;

private:
    std::shared_ptr<std::uint8_t> region_;  // what the bytes are a part of
    std::uint8_t* data_;
    std::size_t size_;
};

}  // namespace drumline
