// A small thread pool for kernels: workers spin briefly for the next job, then sleep.
//
// A job is split by the caller into `parts` that do not depend on each other; which thread runs
// which part never changes a result. Each thread begins with a share of its own, the same one in
// every job of as many parts, so that what it wrote is still near it when it is read; who is
// through with that takes what is left of others' shares. With one thread there is no pool at all:
// a plain loop. Knows no tensors.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace drumline {

class Pool {
public:
    static constexpr int parts_max = 65535;
    static constexpr int threads_max = 1024;  // as many as a configuration may ask for

    static Pool& instance();

    // Calls body(part) for part = 0 .. parts - 1 on up to `threads` threads, the caller's included,
    // and returns when all have returned. A worker that is not scheduled in time holds nobody up:
    // the caller takes its parts. One job at a time; later callers wait. A body neither throws nor
    // runs a job of its own. parts <= parts_max.
    template <typename Body>
    void run(int threads, int parts, const Body& body) {
        if (threads <= 1 || parts <= 1) {
            for (int part = 0; part < parts; ++part) {
                body(part);
            }
            return;
        }
        const auto call = [](const void* of, int part) { (*static_cast<const Body*>(of))(part); };
        run_job(threads, parts, call, &body);
    }

    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

private:
    using Call = void (*)(const void* body, int part);

    Pool() = default;
    ~Pool();

    void run_job(int threads, int parts, Call call, const void* body);
    void grow(int workers);
    void work(int seat);
    void take_parts(std::uint32_t job, int seat, int seats);

    // The job that is on, the end of a seat's share of it and the next part to take, in one word: a
    // worker that wakes late finds either its job or none, never half of another.
    //     bits  63..32 job   31..16 end   15..0 next part
    static std::uint64_t ticket(std::uint32_t job, std::uint32_t end, std::uint32_t next) {
        return (static_cast<std::uint64_t>(job) << 32) | (end << 16) | next;
    }

    // On a cache line of its own: who takes from one share does not slow down who takes from another.
    struct alignas(64) Share {
        std::atomic<std::uint64_t> ticket{0};
    };

    std::mutex one_job_;
    std::vector<std::thread> workers_;
    Call call_ = nullptr;
    const void* body_ = nullptr;
    std::atomic<bool> leaving_{false};
    // Each on a cache line of its own: who waits for one is not slowed down by writes to another.
    alignas(64) std::atomic<std::uint32_t> job_{0};
    std::atomic<int> seats_{0};  // of the job that is on, the caller's included
    alignas(64) std::atomic<std::uint32_t> parts_left_{0};
    std::array<Share, threads_max> shares_;
};

}  // namespace drumline
