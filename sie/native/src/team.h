// Threads that share the pieces of one task.
#pragma once
#include <cstdint>

using Piece = void (*)(const void* task, int64_t piece, int32_t thread);

// Runs piece(task, i, thread) for every i below count, on the caller (thread 0) and on up to num_threads - 1 others that
// wake in time. Returns when all pieces have ended; thread is below num_threads. One caller at a time; others wait. The
// threads stay, and sleep when they have no work.
void share_out(int64_t count, int32_t num_threads, Piece piece, const void* task);
