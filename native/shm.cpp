#include "shm.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <new>
#include <stdexcept>
#include <system_error>
#include <thread>

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace drumline {
namespace {

constexpr std::uint32_t magic = 0x64726d31;
constexpr std::size_t line = 64;
// A sleeper looks at the abort word, its peers' lives and the watched descriptor this often.
constexpr std::int64_t slice_us = 10000;
constexpr int slices_per_interrupt = 10;

std::size_t rounded(std::size_t bytes) { return (bytes + line - 1) / line * line; }

std::int64_t now_us() {
    using namespace std::chrono;
    return duration_cast<microseconds>(steady_clock::now().time_since_epoch()).count();
}

void relax() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Sleeps while `word` is `seen`, at most `us`.
void sleep_on(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::int64_t us) {
#ifdef __linux__
    timespec limit{};
    limit.tv_sec = us / 1000000;
    limit.tv_nsec = us % 1000000 * 1000;
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
    if (word.load() == seen) {
        std::this_thread::sleep_for(std::chrono::microseconds(std::min<std::int64_t>(us, 50)));
    }
#endif
}

void wake_all(std::atomic<std::uint32_t>& word) {
#ifdef __linux__
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

int open_process(int pid) {
#if defined(__linux__) && defined(SYS_pidfd_open)
    return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
#else
    (void)pid;
    return -1;
#endif
}

// Asks for lines that are read, or written, soon. Every x86-64 processor takes a prefetch for
// writing; those that know none do nothing.
void ask_to_read(const std::uint8_t* from, std::size_t nbytes) {
    for (std::size_t at = 0; at < nbytes; at += line) {
        __builtin_prefetch(from + at);
    }
}

#if defined(__x86_64__)
__attribute__((target("prfchw")))
#endif
void ask_to_write(std::uint8_t* to, std::size_t nbytes) {
    for (std::size_t at = 0; at < nbytes; at += line) {
        __builtin_prefetch(to + at, 1);
    }
}

// More than so much is read ahead by the processor itself, and falls out of near caches.
constexpr std::size_t asked_max = 16384;

// An empty tensor may have no address at all.
void copy(void* to, const void* from, std::size_t nbytes) {
    if (nbytes != 0) {
        std::memcpy(to, from, nbytes);
    }
}

bool hung_up(int fd, short events) {
    pollfd item{fd, events, 0};
    return poll(&item, 1, 0) > 0 && item.revents != 0;
}

}  // namespace

static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));

struct ShmGroup::Header {
    std::atomic<std::uint32_t> magic;
    std::atomic<std::uint32_t> abort_code;
    std::atomic<std::uint32_t> ranks;
    std::atomic<std::uint64_t> chunk;
};

struct ShmGroup::Slot {
    alignas(line) std::atomic<std::uint32_t> published;
    std::atomic<std::uint32_t> waiters;
    std::atomic<std::int32_t> pid;
    std::uint64_t tags[2];
};

std::size_t ShmGroup::segment_bytes(int ranks, std::size_t chunk_bytes) {
    const std::size_t per_rank = sizeof(Slot) + 2 * rounded(chunk_bytes);
    return rounded(sizeof(Header)) + static_cast<std::size_t>(ranks) * per_rank;
}

ShmGroup::ShmGroup(int fd, int rank, int ranks, std::size_t chunk_bytes, int spin_us, int watch_fd)
    : rank_(rank), ranks_(ranks), chunk_(rounded(chunk_bytes)), spin_us_(spin_us),
      watch_fd_(watch_fd) {
    if (ranks < 1 || ranks > ranks_max || rank < -1 || rank >= ranks ||
        chunk_bytes < line * static_cast<std::size_t>(ranks)) {
        throw std::runtime_error("shared memory group: no such rank or size");
    }
    struct stat found {};
    bytes_ = segment_bytes(ranks, chunk_);
    if (fstat(fd, &found) != 0) {
        throw std::system_error(errno, std::generic_category(), "shared memory segment");
    }
    if (static_cast<std::size_t>(found.st_size) < bytes_) {
        throw std::runtime_error("shared memory segment: smaller than its group needs");
    }
    void* at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) {
        throw std::system_error(errno, std::generic_category(), "shared memory segment");
    }
    base_ = static_cast<std::uint8_t*>(at);
    pidfds_.assign(static_cast<std::size_t>(ranks), -1);
    Header& header = *reinterpret_cast<Header*>(base_);
    // Whoever comes first writes the sizes; all write the same, or the later one is refused.
    std::uint32_t no_ranks = 0;
    std::uint64_t no_chunk = 0;
    const auto own = static_cast<std::uint32_t>(ranks);
    const bool same =
        (header.ranks.compare_exchange_strong(no_ranks, own) || no_ranks == own) &&
        (header.chunk.compare_exchange_strong(no_chunk, chunk_) || no_chunk == chunk_);
    header.magic.store(drumline::magic);
    std::int32_t nobody = 0;
    const auto pid = static_cast<std::int32_t>(getpid());
    if (!same || (rank >= 0 && !slot(rank).pid.compare_exchange_strong(nobody, pid))) {
        close();
        throw std::runtime_error(same ? "shared memory group: this rank is there already"
                                      : "shared memory segment: made for another group");
    }
}

ShmGroup::~ShmGroup() { close(); }

void ShmGroup::close() {
    if (base_ != nullptr) {
        munmap(base_, bytes_);
        base_ = nullptr;
    }
    for (int& fd : pidfds_) {
        if (fd >= 0) {
            ::close(fd);
            fd = -1;
        }
    }
}

ShmGroup::Slot& ShmGroup::slot(int rank) const {
    const std::size_t per_rank = sizeof(Slot) + 2 * chunk_;
    return *reinterpret_cast<Slot*>(base_ + rounded(sizeof(Header)) +
                                    static_cast<std::size_t>(rank) * per_rank);
}

std::uint8_t* ShmGroup::buffer(int rank, std::uint32_t number) const {
    return reinterpret_cast<std::uint8_t*>(&slot(rank)) + sizeof(Slot) + (number & 1U) * chunk_;
}

void ShmGroup::raise_abort(std::uint32_t code) {
    check_usable();
    std::uint32_t none = 0;
    reinterpret_cast<Header*>(base_)->abort_code.compare_exchange_strong(none, code);
    for (int rank = 0; rank < ranks_; ++rank) {
        wake_all(slot(rank).published);
    }
}

std::uint32_t ShmGroup::abort_code() const {
    if (base_ == nullptr) {
        throw std::runtime_error("shared memory group: closed");
    }
    return reinterpret_cast<const Header*>(base_)->abort_code.load();
}

std::vector<int> ShmGroup::processes() const {
    std::vector<int> found;
    for (int rank = 0; base_ != nullptr && rank < ranks_; ++rank) {
        found.push_back(slot(rank).pid.load());
    }
    return found;
}

void ShmGroup::check_usable() const {
    if (base_ == nullptr) {
        throw std::runtime_error("shared memory group: closed");
    }
}

// ---- one publication, one wait --------------------------------------------------------------

void ShmGroup::publish(std::uint32_t number, std::uint64_t tag) {
    Slot& own = slot(rank_);
    own.tags[number & 1U] = tag;
    // Sequentially consistent with the waiters' count: one of the two sees the other.
    own.published.store(number);
    if (own.waiters.load() != 0) {
        wake_all(own.published);
    }
}

bool ShmGroup::arrived(int rank, std::uint32_t number) const {
    // A peer is at this number, or already at the next one; the difference survives wrapping.
    return slot(rank).published.load(std::memory_order_acquire) - number <= 1;
}

bool ShmGroup::has_died(int rank) {
    int& fd = pidfds_[static_cast<std::size_t>(rank)];
    const int pid = slot(rank).pid.load();
    if (fd < 0 && pid > 0) {
        fd = open_process(pid);
        if (fd < 0) {
            return errno == ESRCH;
        }
    }
    return fd >= 0 && hung_up(fd, POLLIN);
}

bool ShmGroup::is_orphaned() const { return watch_fd_ >= 0 && hung_up(watch_fd_, 0); }

ShmOutcome ShmGroup::fail(ShmOutcome outcome) {
    broken_ = true;
    return outcome;
}

ShmOutcome ShmGroup::sleep_for(int rank, std::uint32_t number, std::int64_t deadline_us,
                               const Interrupted& interrupted) {
    using Kind = ShmOutcome::Kind;
    Slot& peer = slot(rank);
    for (int slice = 1; !arrived(rank, number); ++slice) {
        if (const std::uint32_t code = abort_code()) {
            return {Kind::aborted, {}, code, 0};
        }
        // Most sleeps end within their first slice and need no system call but their own.
        if (slice > 1 && has_died(rank) && !arrived(rank, number)) {
            return {Kind::died, {rank}, 0, 0};
        }
        if (slice > 1 && is_orphaned()) {
            return {Kind::orphaned, {}, 0, 0};
        }
        const std::int64_t left = deadline_us - now_us();
        if (left <= 0) {
            ShmOutcome late{Kind::timeout, {}, 0, 0};
            for (int other = 0; other < ranks_; ++other) {
                if (!arrived(other, number)) {
                    late.ranks.push_back(other);
                }
            }
            return late.ranks.empty() ? ShmOutcome{} : late;
        }
        if (slice % slices_per_interrupt == 0) {
            interrupted();
        }
        peer.waiters.fetch_add(1);
        const std::uint32_t seen = peer.published.load();
        if (seen - number > 1) {
            sleep_on(peer.published, seen, std::min(left, slice_us));
        }
        peer.waiters.fetch_sub(1);
    }
    return {};
}

ShmOutcome ShmGroup::wait_for_all(std::uint32_t number, std::uint64_t tag,
                                  std::int64_t deadline_us, const Interrupted& interrupted) {
    using Kind = ShmOutcome::Kind;
    std::int64_t spin_until = -1;
    for (int rank = 0; rank < ranks_; ++rank) {
        for (int spins = 0; !arrived(rank, number); ++spins) {
            if (spin_until < 0) {
                spin_until = now_us() + spin_us_;
            }
            if (spin_us_ == 0 || (spins % 64 == 63 && now_us() >= spin_until)) {
                ShmOutcome outcome = sleep_for(rank, number, deadline_us, interrupted);
                if (!outcome.good()) {
                    return fail(std::move(outcome));
                }
                break;
            }
            // Where ranks share a core, the one that is waited for gets it.
            if (spins % 64 == 63) {
                std::this_thread::yield();
            } else {
                relax();
            }
        }
        const std::uint64_t theirs = slot(rank).tags[number & 1U];
        if (theirs != tag) {
            return fail({Kind::differs, {rank}, tag, theirs});
        }
    }
    if (const std::uint32_t code = abort_code()) {
        return fail({Kind::aborted, {}, code, 0});
    }
    return {};
}

// ---- collectives ----------------------------------------------------------------------------

namespace {

void check_call(bool broken, int rank) {
    if (broken || rank < 0) {
        throw std::runtime_error(broken ? "shared memory group: an earlier collective failed"
                                        : "shared memory group: a watcher takes part in nothing");
    }
}

}  // namespace

ShmOutcome ShmGroup::gather(const void* src, std::size_t nbytes, void* dst, std::uint64_t tag,
                            std::int64_t timeout_us, const Interrupted& interrupted) {
    check_usable();
    check_call(broken_, rank_);
    const std::int64_t deadline = now_us() + timeout_us;
    const auto* from = static_cast<const std::uint8_t*>(src);
    auto* to = static_cast<std::uint8_t*>(dst);
    std::size_t at = 0;
    do {
        const std::size_t part = std::min(chunk_, nbytes - at);
        const std::uint32_t number = ++number_;
        copy(buffer(rank_, number), from + at, part);
        publish(number, tag);
        ShmOutcome outcome = wait_for_all(number, tag, deadline, interrupted);
        if (!outcome.good()) {
            return outcome;
        }
        for (int rank = 0; rank < ranks_; ++rank) {
            copy(to + static_cast<std::size_t>(rank) * nbytes + at, buffer(rank, number),
                        part);
        }
        at += part;
    } while (at < nbytes);
    return {};
}

ShmOutcome ShmGroup::reduce(const float* src, std::size_t count, float* dst, std::uint64_t tag,
                            std::int64_t timeout_us, const Interrupted& interrupted) {
    check_usable();
    check_call(broken_, rank_);
    const std::int64_t deadline = now_us() + timeout_us;
    const std::size_t chunk = chunk_ / sizeof(float);
    std::size_t at = 0;
    do {
        const std::size_t part = std::min(chunk, count - at);
        const std::uint32_t number = ++number_;
        copy(buffer(rank_, number), src + at, part * sizeof(float));
        publish(number, tag);
        ShmOutcome outcome = wait_for_all(number, tag, deadline, interrupted);
        if (!outcome.good()) {
            return outcome;
        }
        const std::size_t asked = std::min(part * sizeof(float), asked_max);
        for (int rank = 0; rank < ranks_; ++rank) {
            ask_to_read(buffer(rank, number), rank == rank_ ? 0 : asked);
        }
        copy(dst + at, buffer(0, number), part * sizeof(float));
        for (int rank = 1; rank < ranks_; ++rank) {
            const auto* other = reinterpret_cast<const float*>(buffer(rank, number));
            float* sum = dst + at;
            for (std::size_t i = 0; i < part; ++i) {
                sum[i] += other[i];
            }
        }
        // Everybody has read what this rank published before; its lines are in their caches, and
        // to write them next means to take them back, which takes as long as it takes.
        ask_to_write(buffer(rank_, number + 1), asked);
        at += part;
    } while (at < count);
    return {};
}

ShmOutcome ShmGroup::exchange(const void* src, std::size_t nbytes, void* dst, std::uint64_t tag,
                              std::int64_t timeout_us, const Interrupted& interrupted) {
    check_usable();
    check_call(broken_, rank_);
    const std::int64_t deadline = now_us() + timeout_us;
    const auto* from = static_cast<const std::uint8_t*>(src);
    auto* to = static_cast<std::uint8_t*>(dst);
    const std::size_t chunk = chunk_ / static_cast<std::size_t>(ranks_);
    std::size_t at = 0;
    do {
        const std::size_t part = std::min(chunk, nbytes - at);
        const std::uint32_t number = ++number_;
        for (int rank = 0; rank < ranks_; ++rank) {
            const auto r = static_cast<std::size_t>(rank);
            copy(buffer(rank_, number) + r * part, from + r * nbytes + at, part);
        }
        publish(number, tag);
        ShmOutcome outcome = wait_for_all(number, tag, deadline, interrupted);
        if (!outcome.good()) {
            return outcome;
        }
        for (int rank = 0; rank < ranks_; ++rank) {
            copy(to + static_cast<std::size_t>(rank) * nbytes + at,
                        buffer(rank, number) + static_cast<std::size_t>(rank_) * part, part);
        }
        at += part;
    } while (at < nbytes);
    return {};
}

ShmOutcome ShmGroup::broadcast(void* data, std::size_t nbytes, int root, std::uint64_t tag,
                               std::int64_t timeout_us, const Interrupted& interrupted) {
    check_usable();
    check_call(broken_, rank_);
    if (root < 0 || root >= ranks_) {
        throw std::runtime_error("shared memory group: no such root");
    }
    const std::int64_t deadline = now_us() + timeout_us;
    auto* bytes = static_cast<std::uint8_t*>(data);
    std::size_t at = 0;
    do {
        const std::size_t part = std::min(chunk_, nbytes - at);
        const std::uint32_t number = ++number_;
        if (rank_ == root) {
            copy(buffer(rank_, number), bytes + at, part);
        }
        publish(number, tag);
        // All wait for all, or a root could run two publications ahead of a slow reader.
        ShmOutcome outcome = wait_for_all(number, tag, deadline, interrupted);
        if (!outcome.good()) {
            return outcome;
        }
        if (rank_ != root) {
            copy(bytes + at, buffer(root, number), part);
        }
        at += part;
    } while (at < nbytes);
    return {};
}

}  // namespace drumline
