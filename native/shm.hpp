// Collectives between processes of one host, over a piece of memory they share.
//
//   header    magic, ranks, chunk bytes, abort word
//   rank r    how many times it has published, who it is, how many wait for it
//             what it published last and the time before: a tag, and the bytes
//
// One wait per collective: a rank publishes its bytes as number n into buffer n % 2, waits until
// everybody has published n, and reads them all. Nobody can publish n + 2, which overwrites buffer
// n % 2, before everybody has published n + 1, and with that read n.
//
// Every wait has a deadline and ends early when a peer's process has died, when the abort word is
// raised, and when the far end of a watched descriptor is closed. Knows no tensors and no meaning
// of a tag but that all ranks must bring the same.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace drumline {

// How a collective ended. After anything but `good` the group is of no more use.
struct ShmOutcome {
    enum class Kind { good, timeout, died, aborted, differs, orphaned };
    Kind kind = Kind::good;
    std::vector<int> ranks;         // who did not come, has died, or brought another tag
    std::uint64_t mine = 0;         // differs: own tag; aborted: the code
    std::uint64_t theirs = 0;       // differs: the tag of ranks[0]
    bool good() const { return kind == Kind::good; }
};

class ShmGroup {
public:
    static constexpr int ranks_max = 1024;

    // Bytes of a segment for `ranks` ranks; a chunk is what a rank can publish at once.
    static std::size_t segment_bytes(int ranks, std::size_t chunk_bytes);

    // Maps the segment behind `fd`, which stays the caller's. A fresh segment is all zeros.
    // rank -1 only watches: it may raise the abort word and take part in nothing.
    // spin_us: how long a wait spins before it sleeps. watch_fd: -1, or a descriptor whose hangup
    // ends every wait. Throws std::runtime_error if the segment is too small or another group's.
    ShmGroup(int fd, int rank, int ranks, std::size_t chunk_bytes, int spin_us, int watch_fd);
    ~ShmGroup();
    ShmGroup(const ShmGroup&) = delete;
    ShmGroup& operator=(const ShmGroup&) = delete;

    using Interrupted = std::function<void()>;  // called about every 100 ms of waiting; may throw

    // dst [ranks][nbytes]: what every rank brought, in rank order.
    ShmOutcome gather(const void* src, std::size_t nbytes, void* dst, std::uint64_t tag,
                      std::int64_t timeout_us, const Interrupted& interrupted);
    // dst [count] = ((src of rank 0 + src of rank 1) + ...), float32. dst may be src.
    ShmOutcome reduce(const float* src, std::size_t count, float* dst, std::uint64_t tag,
                      std::int64_t timeout_us, const Interrupted& interrupted);
    // src [ranks][nbytes]: part r is for rank r. dst [ranks][nbytes]: part r is from rank r.
    ShmOutcome exchange(const void* src, std::size_t nbytes, void* dst, std::uint64_t tag,
                        std::int64_t timeout_us, const Interrupted& interrupted);
    // data [nbytes] of rank `root` goes to all.
    ShmOutcome broadcast(void* data, std::size_t nbytes, int root, std::uint64_t tag,
                         std::int64_t timeout_us, const Interrupted& interrupted);

    void raise_abort(std::uint32_t code);
    std::uint32_t abort_code() const;
    std::vector<int> processes() const;  // by rank, 0 where nobody has attached yet
    int rank() const { return rank_; }
    int ranks() const { return ranks_; }
    void close();

private:
    struct Header;
    struct Slot;

    Slot& slot(int rank) const;
    std::uint8_t* buffer(int rank, std::uint32_t number) const;
    void publish(std::uint32_t number, std::uint64_t tag);
    bool arrived(int rank, std::uint32_t number) const;
    ShmOutcome wait_for_all(std::uint32_t number, std::uint64_t tag, std::int64_t deadline_us,
                            const Interrupted& interrupted);
    ShmOutcome sleep_for(int rank, std::uint32_t number, std::int64_t deadline_us,
                         const Interrupted& interrupted);
    bool has_died(int rank);
    bool is_orphaned() const;
    ShmOutcome fail(ShmOutcome outcome);
    void check_usable() const;

    std::uint8_t* base_ = nullptr;
    std::size_t bytes_ = 0;
    int rank_;
    int ranks_;
    std::size_t chunk_;
    int spin_us_;
    int watch_fd_;
    std::uint32_t number_ = 0;
    bool broken_ = false;
    std::vector<int> pidfds_;  // of peers, opened when one is first slept for; -1 before
};

}  // namespace drumline
