#include "pool.hpp"

#include <algorithm>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace drumline {
namespace {

// About 20 µs: the usual gap between two kernels of one layer. Longer gaps are slept through, so
// that an idle engine costs nothing and two engines can share the cores.
constexpr int spins_max = 4000;

void relax() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

}  // namespace

Pool& Pool::instance() {
    static Pool pool;
    return pool;
}

Pool::~Pool() {
    leaving_.store(true);
    job_.fetch_add(1);
    job_.notify_all();
    for (std::thread& worker : workers_) {
        worker.join();
    }
}

void Pool::grow(int workers) {
    while (static_cast<int>(workers_.size()) < workers) {
        workers_.emplace_back(&Pool::work, this, static_cast<int>(workers_.size()) + 1);
    }
}

void Pool::take_parts(std::uint32_t job, int seat, int seats) {
    std::uint32_t taken = 0;
    for (int at = 0; at < seats; ++at) {
        std::atomic<std::uint64_t>& ticket = shares_[(seat + at) % seats].ticket;
        std::uint64_t seen = ticket.load(std::memory_order_acquire);
        for (;;) {
            const auto end = static_cast<std::uint32_t>(seen >> 16) & 0xFFFFU;
            const auto next = static_cast<std::uint32_t>(seen) & 0xFFFFU;
            if (static_cast<std::uint32_t>(seen >> 32) != job || next >= end) {
                break;
            }
            if (!ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) {
                continue;
            }
            // The job cannot end before what was taken is reported, so call_ and body_ are its own.
            call_(body_, static_cast<int>(next));
            ++taken;
            seen = ticket.load(std::memory_order_acquire);
        }
    }
    if (taken > 0 && parts_left_.fetch_sub(taken, std::memory_order_acq_rel) == taken) {
        parts_left_.notify_all();
    }
}

void Pool::work(int seat) {
    std::uint32_t last = 0;
    for (;;) {
        int spins = 0;
        std::uint32_t job = job_.load(std::memory_order_acquire);
        while (job == last) {
            if (++spins < spins_max) {
                relax();
            } else {
                job_.wait(last, std::memory_order_acquire);
            }
            job = job_.load(std::memory_order_acquire);
        }
        last = job;
        if (leaving_.load()) {
            return;
        }
        // More workers may exist than this job wants; those without a seat sit it out.
        const int seats = seats_.load(std::memory_order_relaxed);
        if (seat < seats) {
            take_parts(job, seat, seats);
        }
    }
}

void Pool::run_job(int threads, int parts, Call call, const void* body) {
    const std::lock_guard<std::mutex> lock(one_job_);
    const int seats = std::min({threads, parts, threads_max});
    grow(seats - 1);
    call_ = call;
    body_ = body;
    parts_left_.store(static_cast<std::uint32_t>(parts));
    seats_.store(seats, std::memory_order_relaxed);
    const std::uint32_t job = job_.load() + 1;
    for (int seat = 0; seat < seats; ++seat) {
        const auto begin = static_cast<std::uint32_t>(parts * seat / seats);
        const auto end = static_cast<std::uint32_t>(parts * (seat + 1) / seats);
        shares_[seat].ticket.store(ticket(job, end, begin), std::memory_order_release);
    }
    job_.store(job, std::memory_order_release);
    job_.notify_all();
    take_parts(job, 0, seats);
    int spins = 0;
    for (auto left = parts_left_.load(std::memory_order_acquire); left != 0;
         left = parts_left_.load(std::memory_order_acquire)) {
        if (++spins < spins_max) {
            relax();
        } else {
            parts_left_.wait(left, std::memory_order_acquire);
        }
    }
}

}  // namespace drumline
