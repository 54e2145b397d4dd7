// Runs the pieces of a task on the caller only, or on a team.
#pragma once
#include "team.h"

namespace {

// Calls piece(i, thread) for every i below count; thread is below num_threads.
template <class F>
void share(int64_t count, int32_t num_threads, const F& piece) {
    if (num_threads > 1 && count > 1) {
        const auto call = [](const void* task, int64_t i, int32_t thread) { (*static_cast<const F*>(task))(i, thread); };
        share_out(count, num_threads, call, &piece);
        return;
    }
    for (int64_t i = 0; i < count; ++i) piece(i, 0);
}

}  // namespace
