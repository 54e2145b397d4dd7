// Lets other Python threads run while a thread is inside a library's compiled code that holds the interpreter lock.
//
// A timer signals the thread every millisecond. If the signal finds it in the code of a named library, the handler
// releases the lock for a moment, as a callback into Python might. In Python's or libc's code the thread may hold their
// own locks, so there, and in all other code, the handler does nothing until the next signal. See docs/decisions/026.
//
// This alone is not safe against the library's own locks. A thread that is paused inside such a lock, and another that
// holds the interpreter lock and wants it, wait for each other. So the caller lets one thread at a time into a library.

#include "features.h"

#include <dlfcn.h>
#include <link.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>

namespace {

constexpr long kEveryNs = 1'000'000;
constexpr int64_t kTurnNs = 500'000;  // of processor time between two pauses, so that a reader finishes
constexpr int64_t kFirstTurnNs = 5'000'000;
constexpr long kPauseNs = 50'000;  // so that a waiting thread, which has to wake up first, gets the lock
constexpr int kMostStopMs = 1'000;  // a forked child may have copied a pause that never ends
constexpr int kMostRanges = 16;
const int kSignal = SIGRTMIN + 5;

#ifndef sigev_notify_thread_id  // musl has this name, glibc has none
#define sigev_notify_thread_id _sigev_un._tid
#endif

struct Range {
    uintptr_t begin, end;
};
struct Reader {
    timer_t timer;
    int64_t turn_ends_ns;  // in processor time of its thread; no pause before that
};
Range ranges[kMostRanges];
std::atomic<int> num_ranges{0};
int (*has_lock)();
void* (*save_thread)();
void (*restore_thread)(void*);
thread_local Reader reader;  // the handler gets its address: it must not be the first to touch it
std::atomic<bool> is_stopped{false};
std::atomic<int> num_paused{0};

int64_t now_ns(clockid_t clock) {
    timespec now{};
    clock_gettime(clock, &now);
    return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

uintptr_t place_of(const void* context) {
    const auto& machine = static_cast<const ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
    return static_cast<uintptr_t>(machine.gregs[REG_RIP]);
#elif defined(__aarch64__)
    return static_cast<uintptr_t>(machine.pc);
#else
    return 0;
#endif
}

bool is_interruptible(uintptr_t place) {
    for (int i = 0; i < num_ranges.load(std::memory_order_acquire); i++)
        if (place >= ranges[i].begin && place < ranges[i].end) return true;
    return false;
}

void pause_holder() {
    void* state = save_thread();
    const timespec pause{0, kPauseNs};
    nanosleep(&pause, nullptr);
    restore_thread(state);
}

void on_signal(int, siginfo_t* info, void* context) {
    if (info->si_code != SI_TIMER) return;
    const int kept = errno;
    auto& own = *static_cast<Reader*>(info->si_value.sival_ptr);
    if (is_interruptible(place_of(context)) && now_ns(CLOCK_THREAD_CPUTIME_ID) >= own.turn_ends_ns && has_lock()) {
        num_paused.fetch_add(1);  // ORDER: before is_stopped is read; sie_preempt_stop sets it before it reads this
        if (!is_stopped.load()) {
            pause_holder();
            own.turn_ends_ns = now_ns(CLOCK_THREAD_CPUTIME_ID) + kTurnNs;  // a signal that came meanwhile is handled at once
        }
        num_paused.fetch_sub(1);
    }
    errno = kept;
}

int add_ranges(dl_phdr_info* info, size_t, void* path) {
    if (info->dlpi_name == nullptr || std::strcmp(info->dlpi_name, static_cast<const char*>(path)) != 0) return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const auto& part = info->dlpi_phdr[i];
        const int index = num_ranges.load(std::memory_order_relaxed);
        if (part.p_type != PT_LOAD || !(part.p_flags & PF_X) || index == kMostRanges) continue;
        const uintptr_t begin = info->dlpi_addr + part.p_vaddr;
        ranges[index] = {begin, begin + part.p_memsz};
        num_ranges.store(index + 1, std::memory_order_release);
    }
    return 1;
}

}  // namespace

// Name a loaded library by its path, once and before its threads are preempted. Returns whether it was found.
SIE_EXPORT int sie_preempt_allow(const char* path) {
    save_thread = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
    restore_thread = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
    has_lock = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
    if (save_thread == nullptr || restore_thread == nullptr || has_lock == nullptr) return 0;
    struct sigaction action{};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_RESTART;
    sigemptyset(&action.sa_mask);
    if (sigaction(kSignal, &action, nullptr) != 0) return 0;
    return dl_iterate_phdr(add_ranges, const_cast<char*>(path));
}

// Begin to preempt the calling thread, which holds the interpreter lock. Returns 0, or the errno.
SIE_EXPORT int sie_preempt_begin() {
    sigset_t own;
    sigemptyset(&own);
    sigaddset(&own, kSignal);
    pthread_sigmask(SIG_UNBLOCK, &own, nullptr);
    sigevent event{};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = kSignal;
    event.sigev_value.sival_ptr = &reader;
    event.sigev_notify_thread_id = static_cast<pid_t>(syscall(SYS_gettid));
    // The first pause comes late: at the beginning of a call the library works on Python's objects, and holds its own locks.
    reader.turn_ends_ns = now_ns(CLOCK_THREAD_CPUTIME_ID) + kFirstTurnNs;
    if (timer_create(CLOCK_MONOTONIC, &event, &reader.timer) != 0) return errno;
    const itimerspec every{{0, kEveryNs}, {0, kEveryNs}};
    return timer_settime(reader.timer, 0, &every, nullptr) == 0 ? 0 : errno;
}

// End what `sie_preempt_begin` began, on the same thread.
SIE_EXPORT void sie_preempt_end() { timer_delete(reader.timer); }

// Preempt no thread from now on. Call it without the interpreter lock before Python ends. Python unwinds a thread that
// asks for the lock later, and frames of other languages cannot be unwound.
SIE_EXPORT void sie_preempt_stop() {
    is_stopped.store(true);
    const timespec moment{0, kEveryNs};
    for (int i = 0; i < kMostStopMs && num_paused.load() != 0; i++) nanosleep(&moment, nullptr);
}
