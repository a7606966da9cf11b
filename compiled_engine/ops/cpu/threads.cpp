// A pool of threads that take indices of one job at a time, without locks.
//
// A job is published by one store to `ticket`, whose upper half is the job's number and whose lower half the next index
// to take. A thread takes an index by raising the ticket with compare-and-swap, which fails when the job has changed
// meanwhile; so who has taken an index holds the job open until it reports it done, and who comes late takes nothing.
// Threads without work spin for a while, because the kernels of a step follow each other within microseconds, and then
// sleep on a futex, because a spinning thread keeps its core from others.
#include "threads.h"

#include <atomic>
#include <climits>
#include <mutex>
#include <thread>

#include <linux/futex.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// Rounds of waiting before a thread sleeps: some tens of microseconds.
constexpr int kSpins = 4000;

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a futex is a plain word");

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake(std::atomic<uint32_t>& word, int count) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

// Returns true as soon as `word` is no longer `value`, false after a while.
bool changes_soon(const std::atomic<uint32_t>& word, uint32_t value) {
    for (int i = 0; i < kSpins; ++i) {
        if (word.load(std::memory_order_acquire) != value) return true;
        pause();
    }
    return false;
}

class Pool {
  public:
    void run(int64_t num_items, int threads, void (*run)(const void*, int64_t), const void* context) {
        // One job at a time: a second caller, or a job within a job, does its work alone.
        std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);
        if (threads <= 1 || num_items <= 1 || num_items >= UINT32_MAX || !lock.owns_lock()) {
            for (int64_t index = 0; index < num_items; ++index) run(context, index);
            return;
        }
        for (; num_helpers_ < threads - 1; ++num_helpers_)
            std::thread([this, helper = num_helpers_] { help(helper); }).detach();
        const uint32_t number = job_.load(std::memory_order_relaxed) + 1;
        // Closed while it is described: who still holds the last job's ticket must fail to raise it.
        ticket_.store(uint64_t{number} << 32 | UINT32_MAX, std::memory_order_seq_cst);
        run_ = run;
        context_ = context;
        done_.store(0, std::memory_order_relaxed);
        helpers_wanted_.store(threads - 1, std::memory_order_relaxed);
        num_items_.store(static_cast<uint32_t>(num_items), std::memory_order_release);
        ticket_.store(uint64_t{number} << 32, std::memory_order_release);
        job_.store(number, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) > 0) wake(job_, threads - 1);
        take_indices();
        wait_until_done(static_cast<uint32_t>(num_items));
    }

  private:
    // Takes and runs indices of the current job until there are none.
    void take_indices() {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while (static_cast<uint32_t>(ticket) < num_items_.load(std::memory_order_acquire)) {
            if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire))
                continue;
            run_(context_, static_cast<uint32_t>(ticket));
            const uint32_t done = done_.fetch_add(1, std::memory_order_seq_cst) + 1;
            if (done == num_items_.load(std::memory_order_relaxed) && caller_sleeps_.load(std::memory_order_seq_cst))
                wake(done_, 1);
            ticket = ticket_.load(std::memory_order_acquire);
        }
    }

    void wait_until_done(uint32_t num_items) {
        for (uint32_t done; (done = done_.load(std::memory_order_acquire)) != num_items;) {
            if (changes_soon(done_, done)) continue;
            caller_sleeps_.store(true, std::memory_order_seq_cst);
            sleep_while(done_, done);
            caller_sleeps_.store(false, std::memory_order_relaxed);
        }
    }

    [[noreturn]] void help(int helper) {
        for (uint32_t seen = 0;;) {
            const uint32_t job = job_.load(std::memory_order_acquire);
            if (job == seen && !changes_soon(job_, seen)) {
                sleepers_.fetch_add(1, std::memory_order_seq_cst);
                sleep_while(job_, seen);
                sleepers_.fetch_sub(1, std::memory_order_relaxed);
                continue;
            }
            seen = job_.load(std::memory_order_acquire);
            if (helper < helpers_wanted_.load(std::memory_order_relaxed)) take_indices();
        }
    }

    std::mutex busy_;
    int num_helpers_ = 0;
    void (*run_)(const void*, int64_t) = nullptr;
    const void* context_ = nullptr;
    std::atomic<uint32_t> num_items_{0};
    std::atomic<int> helpers_wanted_{0};
    // What threads wait on lies apart: each is written by others than read it.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<uint32_t> job_{0};
    std::atomic<int> sleepers_{0};
    alignas(64) std::atomic<uint32_t> done_{0};
    std::atomic<bool> caller_sleeps_{false};
};

std::atomic<int> chosen{0};

// Never destroyed: its threads run until the process ends. A forked process has none of them and works alone.
Pool& pool() {
    static Pool* const shared = new Pool;
    return *shared;
}

}  // namespace

int num_threads() {
    const int count = chosen.load(std::memory_order_relaxed);
    return count > 0 ? count : omp_get_max_threads();
}

void share_out(int64_t num_items, int threads, void (*run)(const void* context, int64_t index), const void* context) {
    pool().run(num_items, threads, run, context);
}

// For every kernel of this library from now on, at least 1.
extern "C" void set_num_threads(int64_t count) { chosen.store(static_cast<int>(count), std::memory_order_relaxed); }

// For what compiled pieces do themselves in the calling thread: OpenMP's own number.
extern "C" void set_piece_threads(int64_t count) { omp_set_num_threads(static_cast<int>(count)); }
