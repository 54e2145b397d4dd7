// Threads that share the pieces of one task: the process's own, and helpers on cores that other processes lend.
#pragma once
#include <atomic>
#include <cstdint>

using Piece = void (*)(const void* task, int64_t piece, int32_t thread);

// A core of another process, and its two words in memory that all processes share. Mirrored by sie.native.team.
struct SieLentCore {
    const std::atomic<uint32_t>* is_needed;  // written by the core's owner: 0 while it waits for work
    std::atomic<uint32_t>* borrower;         // the process that uses the core now; 0: none
    int32_t number;                          // the kernel's number of the core
};

// Runs piece(task, i, thread) for every i below count, on the caller (thread 0) and on up to num_threads - 1 others that
// wake in time. Returns when all pieces have ended; thread is below num_threads. One caller at a time; others wait. The
// threads stay, and sleep when they have no work. A helper ends its piece and leaves once its core's owner needs the core.
void share_out(int64_t count, int32_t num_threads, Piece piece, const void* task);
