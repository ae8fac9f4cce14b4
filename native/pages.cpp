#include "pages.hpp"

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace drumline {
namespace {

constexpr std::size_t line = 64;
constexpr std::size_t page = std::size_t{2} << 20;
constexpr std::size_t region_size = 16 * page;

std::size_t round_up(std::size_t size, std::size_t to) { return (size + to - 1) / to * to; }

// Zeroed, whole pages. Untouched ones cost address space only.
std::shared_ptr<std::uint8_t> new_region(std::size_t size) {
#if defined(__linux__)
    // A page more than wanted, so that one can begin at a multiple of its size.
    const std::size_t mapped = size + page;
    void* const at =
        mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) {
        throw std::bad_alloc();
    }
    const std::shared_ptr<void> whole(at, [mapped](void* start) { munmap(start, mapped); });
    auto* const first = reinterpret_cast<std::uint8_t*>(
        round_up(reinterpret_cast<std::uintptr_t>(at), page));
    // Only advice: where the system has no large pages left, or none at all, small ones serve.
    madvise(first, size, MADV_HUGEPAGE);
    return {whole, first};
#else
    auto* const at = static_cast<std::uint8_t*>(std::aligned_alloc(page, size));
    if (at == nullptr) {
        throw std::bad_alloc();
    }
    std::memset(at, 0, size);
    return {at, [](std::uint8_t* start) { std::free(start); }};
#endif
}

// Cuts regions into pieces, front to back; a piece given back is not cut again.
class Regions {
public:
    std::shared_ptr<std::uint8_t> take(std::size_t size) {
#if defined(DRUMLINE_SEPARATE_BYTES)  // for sanitizers, which know where an allocation ends
        auto* const own = static_cast<std::uint8_t*>(std::aligned_alloc(line, size));
        std::memset(own, 0, size);
        return {own, [](std::uint8_t* start) { std::free(start); }};
#endif
        const std::lock_guard<std::mutex> lock(mutex_);
        if (size > region_size / 2) {
            return new_region(round_up(size, page));
        }
        if (current_ == nullptr || used_ + size > region_size) {
            current_ = new_region(region_size);
            used_ = 0;
        }
        std::uint8_t* const at = current_.get() + used_;
        used_ += size;
        return {current_, at};
    }

private:
    std::mutex mutex_;
    std::shared_ptr<std::uint8_t> current_;
    std::size_t used_ = 0;
};

Regions& regions() {
    static Regions all;
    return all;
}

}  // namespace

AlignedBytes::AlignedBytes(std::size_t size)
    : region_(regions().take(round_up(size, line))), data_(region_.get()), size_(size) {}

}  // namespace drumline
