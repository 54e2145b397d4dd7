// Finds the likeliest token of each row while a head's products are made, so that its logits are never stored.
#pragma once
#include <cmath>
#include <limits>

#include "decoder_layout.h"
#include "lanes.h"

namespace {

class BestTokens {
    const SieDecoderStep& step_;
    char* const room_;  // of thread 0: a BestLanes for each kept token
    const int64_t apart_;

  public:
    BestTokens(const SieDecoderStep& step, char* room, int64_t apart) : step_(step), room_(room), apart_(apart) {
        if (!step.best) return;
        for (int thread = 0; thread < step.num_threads; ++thread)
            for (int row = 0; row < step.num_kept; ++row) {
                BestLanes& own = at(thread, row);
                store(own.values, broadcast(-std::numeric_limits<float>::infinity()));
                store_words(own.tokens, broadcast_number(-1));
                own.has_nan = 0;
            }
    }

    // Takes the logits of tokens first to first + 15. A thread must come to a row's tokens in ascending order.
    void see(int32_t thread, int64_t row, int64_t first, Lanes lanes, Vec logits) const {
        BestLanes& own = at(thread, row);
        const int begin = row ? step_.hidden_ends[row - 1] : 0;
        lanes = allowed_lanes(lanes, first, step_.hidden + begin, step_.hidden_ends[row] - begin);
        own.has_nan |= not_numbers(logits) & lanes;
        const Lanes better = above(logits, load(own.values)) & lanes;
        if (!better) return;
        store(own.values, better, logits);
        store_words(own.tokens, better, numbers_from(static_cast<int>(first)));
    }

    // Writes the result of all threads.
    void finish() const {
        for (int row = 0; row < step_.num_kept; ++row) step_.best[row] = best(row);
    }

  private:
    BestLanes& at(int thread, int64_t row) const { return reinterpret_cast<BestLanes*>(room_ + thread * apart_)[row]; }

    int32_t best(int row) const {
        float value = -std::numeric_limits<float>::infinity();
        int32_t token = -1;
        for (int thread = 0; thread < step_.num_threads; ++thread) {
            const BestLanes& own = at(thread, row);
            if (own.has_nan) return -1;
            for (int lane = 0; lane < kLanes; ++lane)
                if (own.values[lane] > value || (own.values[lane] == value && own.tokens[lane] < token))
                    value = own.values[lane], token = own.tokens[lane];
        }
        return std::isfinite(value) ? token : -1;
    }
};

}  // namespace
