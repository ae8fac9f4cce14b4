// A small thread pool for kernels: workers spin briefly for the next job, then sleep.
//
// A job is split by the caller into `parts` that do not depend on each other; which thread runs
// which part never changes a result. With one thread there is no pool at all: a plain loop. Knows
// no tensors.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace drumline {

class Pool {
public:
    static constexpr int parts_max = 65535;

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
    void work();
    void take_parts(std::uint32_t job);

    // The job that is on, how many parts it has and the next to take, in one word: a worker that
    // wakes late finds either its job or none, never half of another.
    //     bits  63..32 job   31..16 parts   15..0 next part
    static std::uint64_t ticket(std::uint32_t job, std::uint32_t parts, std::uint32_t next) {
        return (static_cast<std::uint64_t>(job) << 32) | (parts << 16) | next;
    }

    std::mutex one_job_;
    std::vector<std::thread> workers_;
    Call call_ = nullptr;
    const void* body_ = nullptr;
    std::atomic<bool> leaving_{false};
    // Each on a cache line of its own: who waits for one is not woken by writes to another.
    alignas(64) std::atomic<std::uint32_t> job_{0};
    alignas(64) std::atomic<std::uint64_t> ticket_{0};
    alignas(64) std::atomic<int> seats_{0};
    alignas(64) std::atomic<std::uint32_t> parts_left_{0};
};

}  // namespace drumline
