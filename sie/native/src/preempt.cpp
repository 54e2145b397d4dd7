// Lets other Python threads run while a thread is inside a library's compiled code that keeps the interpreter lock.
//
// A timer signals the thread every millisecond. Where that meets it in the code of a library that was named before, and
// not in Python's or libc's, whose own locks it may hold there, the handler gives the lock up for a moment, as a callback
// into Python might. Any other place is left alone until the next signal. See docs/decisions/026.

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
constexpr long kPauseNs = 50'000;  // so that a waiting thread, which has to wake up first, gets the lock
constexpr int kMostRanges = 16;
const int kSignal = SIGRTMIN + 5;

struct Range {
    uintptr_t begin, end;
};
Range ranges[kMostRanges];
std::atomic<int> num_ranges{0};
int (*has_lock)();
void* (*save_thread)();
void (*restore_thread)(void*);
thread_local timer_t timer;

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

void on_signal(int, siginfo_t*, void* context) {
    if (!is_interruptible(place_of(context)) || !has_lock()) return;
    const int kept = errno;
    void* state = save_thread();
    const timespec pause{0, kPauseNs};
    nanosleep(&pause, nullptr);
    restore_thread(state);
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

// Begin to preempt the calling thread, which holds the interpreter lock. Returns 0, or what errno says.
SIE_EXPORT int sie_preempt_begin() {
    sigset_t own;
    sigemptyset(&own);
    sigaddset(&own, kSignal);
    pthread_sigmask(SIG_UNBLOCK, &own, nullptr);
    sigevent event{};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = kSignal;
    event._sigev_un._tid = static_cast<pid_t>(syscall(SYS_gettid));
    if (timer_create(CLOCK_MONOTONIC, &event, &timer) != 0) return errno;
    const itimerspec every{{0, kEveryNs}, {0, kEveryNs}};
    return timer_settime(timer, 0, &every, nullptr) == 0 ? 0 : errno;
}

// End what `sie_preempt_begin` began, on the same thread.
SIE_EXPORT void sie_preempt_end() { timer_delete(timer); }
