// Threads that share the pieces of one task: they spin for a moment between tasks, then sleep.
#include "team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <memory>
#include <mutex>
#include <vector>

#include "features.h"

namespace {

// About 50 microseconds, the time between two layers of a model. Longer waits must not take a core from others.
constexpr int kSpins = 2000;

inline void pause() {
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
}

inline void futex(std::atomic<uint32_t>* word, int operation, uint32_t value) {
    static_assert(sizeof(*word) == 4, "a futex is a word of four bytes");
    syscall(SYS_futex, word, operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

// Processor time of this thread: what other programs take of a lent core saves nothing.
int64_t processor_ns() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

bool pin_to(int32_t core) {
    if (core >= CPU_SETSIZE) return false;
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    return sched_setaffinity(0, sizeof cores, &cores) == 0;
}

// One thread beside the caller. A member with a core is a helper.
struct alignas(64) Member {
    std::atomic<uint32_t> is_asleep{0};
    std::atomic<bool> is_lost{false};  // it has no thread, or its core cannot be used
    const SieLentCore* const core;
    const uint32_t name;  // of this process, as a borrower

    Member(const SieLentCore* core, uint32_t name) : core(core), name(name) {}

    // Whether nobody else uses or needs its core.
    bool is_free() const {
        if (is_lost.load(std::memory_order_relaxed)) return false;
        if (!core) return true;
        if (core->is_needed->load(std::memory_order_relaxed)) return false;
        const uint32_t user = core->borrower->load(std::memory_order_relaxed);
        return !user || user == name;
    }

    bool must_leave() const { return core && core->is_needed->load(std::memory_order_relaxed); }

    bool borrow() {
        if (!core) return true;
        if (!is_free()) return false;
        uint32_t user = 0;
        return core->borrower->compare_exchange_strong(user, name, std::memory_order_relaxed) || user == name;
    }

    void give_back() {
        uint32_t user = name;
        if (core) core->borrower->compare_exchange_strong(user, 0, std::memory_order_relaxed);
    }

    void wake() {
        if (is_asleep.load(std::memory_order_seq_cst) && is_asleep.exchange(0)) futex(&is_asleep, FUTEX_WAKE, 1);
    }

    // Sleeps until `wake`, unless is_called() is true already.
    template <class F>
    void sleep(const F& is_called) {
        give_back();
        is_asleep.store(1, std::memory_order_seq_cst);  // before is_called: a caller opens its task, then looks who sleeps
        if (is_called()) is_asleep.store(0);
        while (is_asleep.load()) futex(&is_asleep, FUTEX_WAIT, 1);
    }
};

// One word has the whole state of the current task: its number, whether more threads may join it, and how many threads
// are in it. A thread that wakes late finds the task closed, so the caller never waits for a thread that has not begun.
constexpr uint64_t kOpen = 1 << 16, kInside = kOpen - 1;
constexpr int kNumberShift = 17;

struct Team {
    std::mutex callers;
    std::vector<std::unique_ptr<Member>> own, helpers;  // created when they are first wanted
    std::vector<SieLentCore> lent;
    std::vector<const std::atomic<uint32_t>*> owners;  // of lent cores, each once
    int32_t num_own = 0;   // threads of this process with the caller, if there are lent cores
    int32_t max_lent = 0;  // of one task
    uint32_t name = 0;     // of this process, as a borrower
    std::atomic<uint64_t> state{0};
    std::atomic<int64_t> next{0};
    std::atomic<int32_t> last_thread{0};
    std::atomic<int64_t> helped_ns{0};  // processor time of lent cores in pieces, since the start
    bool are_helpers_called = false;    // by the current task
    int32_t num_threads = 1;  // of the current task, with the caller
    int64_t count = 0;
    Piece piece = nullptr;
    const void* task = nullptr;

    bool is_new(uint64_t seen) { return state.load(std::memory_order_seq_cst) >> kNumberShift != seen; }

    bool join() {
        uint64_t now = state.load(std::memory_order_acquire);
        while (now & kOpen)
            if (state.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel)) return true;
        return false;
    }

    // Takes part in the current task; returns whether it called this member and had room for it. A helper that still spins
    // sees tasks that are not its own: those of a load, which measures times.
    bool help(const Member& member) {
        if (!join()) return true;
        const bool is_called = !member.core || are_helpers_called;
        const int32_t thread = is_called ? last_thread.fetch_add(1, std::memory_order_relaxed) + 1 : num_threads;
        if (thread < num_threads) {
            const int64_t begin = member.core ? processor_ns() : 0;
            for (int64_t i; !member.must_leave() && (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) piece(task, i, thread);
            if (member.core) helped_ns.fetch_add(processor_ns() - begin, std::memory_order_relaxed);
        }
        state.fetch_sub(1, std::memory_order_release);
        return thread < num_threads;
    }

    void serve(Member& member, uint64_t seen) {
        if (member.core && !pin_to(member.core->number)) {
            member.is_lost = true;
            return;
        }
        for (bool has_room = true;;) {
            for (int spin = 0; has_room && spin < kSpins && !is_new(seen) && !member.must_leave(); ++spin) pause();
            if (!has_room || !is_new(seen) || !member.borrow()) member.sleep([&] { return is_new(seen) && member.is_free(); });
            if (!is_new(seen) || !member.borrow()) continue;
            seen = state.load(std::memory_order_acquire) >> kNumberShift;
            has_room = help(member);
        }
    }

    // Starts a member's thread. A process may have as many threads as it is allowed.
    void begin(Member& member, uint64_t seen) {
        struct Start {
            Team* team;
            Member* member;
            uint64_t seen;
        };
        auto start = std::make_unique<Start>(Start{this, &member, seen});
        const auto enter = [](void* argument) -> void* {
            const Start own = *std::unique_ptr<Start>(static_cast<Start*>(argument));
            own.team->serve(*own.member, own.seen);
            return nullptr;
        };
        pthread_t thread;
        if (pthread_create(&thread, nullptr, enter, start.get())) {
            member.is_lost = true;
            return;
        }
        start.release();
        pthread_detach(thread);
    }

    // Wakes so many members of a group, or creates them, for the task after number `seen`. Those that are awake count.
    void call(std::vector<std::unique_ptr<Member>>& group, size_t most, int32_t wanted, uint64_t seen) {
        for (size_t i = 0; i < most && wanted > 0; ++i) {
            if (i == group.size()) {
                group.push_back(std::make_unique<Member>(&group == &own ? nullptr : &lent[i], name));
                begin(*group[i], seen);
            }
            if (!group[i]->is_free()) continue;
            group[i]->wake();
            --wanted;
        }
    }

    void run(int64_t pieces, int32_t threads, Piece function, const void* argument) {
        std::lock_guard<std::mutex> only(callers);
        threads = static_cast<int32_t>(std::min<int64_t>(threads, pieces));
        const int32_t num_helpers = lent.empty() ? 0 : std::max(0, threads - num_own), num_beside = threads - num_helpers - 1;
        const uint64_t number = state.load(std::memory_order_relaxed) >> kNumberShift;
        count = pieces, piece = function, task = argument, num_threads = threads, are_helpers_called = num_helpers > 0;
        next.store(0, std::memory_order_relaxed);
        last_thread.store(0, std::memory_order_relaxed);
        state.store((number + 1) << kNumberShift | kOpen, std::memory_order_seq_cst);
        call(own, num_beside, num_beside, number);
        call(helpers, lent.size(), num_helpers, number);
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) piece(task, i, 0);
        state.fetch_and(~kOpen, std::memory_order_acq_rel);
        for (int spin = 0; state.load(std::memory_order_acquire) & kInside; ++spin)
            spin < kSpins ? pause() : static_cast<void>(sched_yield());
    }

    // Returns this process's share of the cores that nobody needs.
    int32_t count_free() const {
        int32_t num_free = 0, num_asking = 1;
        for (const SieLentCore& core : lent) {
            const uint32_t user = core.borrower->load(std::memory_order_relaxed);
            num_free += !core.is_needed->load(std::memory_order_relaxed) && (!user || user == name);
        }
        for (const std::atomic<uint32_t>* is_needed : owners) num_asking += is_needed->load(std::memory_order_relaxed) != 0;
        return std::min(max_lent, (num_free + num_asking - 1) / num_asking);
    }
};

Team& team() {
    static Team* team = new Team;  // never destroyed: its threads may outlive everything else
    return *team;
}

}  // namespace

void share_out(int64_t count, int32_t num_threads, Piece piece, const void* task) {
    if (num_threads <= 1 || count <= 1) {
        for (int64_t i = 0; i < count; ++i) piece(task, i, 0);
        return;
    }
    team().run(count, num_threads, piece, task);
}

// Lets this process, called name (not 0), use at most max_lent of other processes' cores for a task, beside its own num_own
// threads. Call it once, before any task; the words must stay mapped.
SIE_EXPORT void sie_team_borrow(const SieLentCore* cores, int32_t count, int32_t max_lent, int32_t num_own, uint32_t name) {
    team().lent.assign(cores, cores + count);
    for (const SieLentCore& core : team().lent) team().owners.push_back(core.is_needed);
    std::sort(team().owners.begin(), team().owners.end());
    team().owners.erase(std::unique(team().owners.begin(), team().owners.end()), team().owners.end());
    team().max_lent = max_lent;
    team().num_own = num_own;
    team().name = name;
}

// The nanoseconds that lent cores have saved this process since its start: their time in pieces, divided by its own threads.
SIE_EXPORT int64_t sie_team_saved_ns() {
    return team().helped_ns.load(std::memory_order_relaxed) / std::max(1, team().num_own);
}

// The number of lent cores that a step may use, if it begins now.
SIE_EXPORT int32_t sie_team_free_cores() { return team().count_free(); }
