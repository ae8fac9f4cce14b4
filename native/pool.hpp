// A small thread pool for kernels: workers spin briefly for the next job, then sleep.
//
// A job is split by the caller into `parts` that do not depend on each other; which thread runs
// which part never changes a result. Knows no tensors.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
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
    // the caller takes its parts. One job at a time; later callers wait. parts <= parts_max.
    void run(int threads, int parts, const std::function<void(int)>& body);

    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

private:
    Pool() = default;
    ~Pool();

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
    std::atomic<std::uint64_t> ticket_{0};
    std::atomic<std::uint32_t> job_{0};
    std::atomic<int> seats_{0};
    std::atomic<std::uint32_t> parts_left_{0};
    std::atomic<bool> leaving_{false};
    const std::function<void(int)>* body_ = nullptr;
};

}  // namespace drumline
