// Threads that share the pieces of one task: they spin for a moment between tasks, then sleep.
#include "team.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace {

// About 50 microseconds, the time between two layers of a model. Longer waits must not take a core from others.
constexpr int kSpins = 2000;

inline void pause() {
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
}

// One word has the whole state of the current task: its number, whether more threads may join it, and how many threads
// are in it. A thread that wakes late finds the task closed, so the caller never waits for a thread that has not begun.
constexpr uint64_t kOpen = 1 << 16, kInside = kOpen - 1;
constexpr int kNumberShift = 17;

struct Team {
    std::mutex callers, door;
    std::condition_variable bell;
    int32_t size = 1;     // with the caller
    int32_t members = 1;  // of the current task
    std::atomic<uint64_t> state{0};
    std::atomic<int64_t> next{0};
    int64_t count = 0;
    Piece piece = nullptr;
    const void* task = nullptr;

    bool is_new(uint64_t seen) { return state.load(std::memory_order_acquire) >> kNumberShift != seen; }

    void work(int32_t thread) {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) piece(task, i, thread);
    }

    bool join() {
        uint64_t now = state.load(std::memory_order_acquire);
        while (now & kOpen)
            if (state.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel)) return true;
        return false;
    }

    void serve(int32_t thread, uint64_t seen) {
        for (;;) {
            for (int spin = 0; spin < kSpins && !is_new(seen); ++spin) pause();
            if (!is_new(seen)) {
                std::unique_lock<std::mutex> lock(door);
                // `wait` without a time would need the libstdc++ of GCC 12, which hosts with glibc 2.34 do not have.
                bell.wait_for(lock, std::chrono::hours(1), [&] { return is_new(seen); });
            }
            if (!is_new(seen)) continue;
            seen = state.load(std::memory_order_acquire) >> kNumberShift;
            if (join()) {
                if (thread < members) work(thread);
                state.fetch_sub(1, std::memory_order_release);
            }
        }
    }

    void run(int64_t pieces, int32_t num_threads, Piece function, const void* argument) {
        std::lock_guard<std::mutex> only(callers);
        const uint64_t number = state.load(std::memory_order_relaxed) >> kNumberShift;
        for (; size < num_threads; ++size) std::thread([this, id = size, number] { serve(id, number); }).detach();
        count = pieces, piece = function, task = argument, members = num_threads;
        next.store(0, std::memory_order_relaxed);
        {
            std::lock_guard<std::mutex> lock(door);  // without it, a thread that is about to sleep would miss the notification
            state.store((number + 1) << kNumberShift | kOpen, std::memory_order_release);
        }
        bell.notify_all();
        work(0);
        state.fetch_and(~kOpen, std::memory_order_acq_rel);
        for (int spin = 0; state.load(std::memory_order_acquire) & kInside; ++spin)
            spin < kSpins ? pause() : std::this_thread::yield();
    }
};

}  // namespace

void share_out(int64_t count, int32_t num_threads, Piece piece, const void* task) {
    if (num_threads <= 1 || count <= 1) {
        for (int64_t i = 0; i < count; ++i) piece(task, i, 0);
        return;
    }
    static Team* team = new Team;  // never destroyed: its threads may outlive everything else
    team->run(count, num_threads, piece, task);
}
