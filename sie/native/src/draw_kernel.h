// Draws tokens from rows of logits, without sorting more of a row than a draw may keep.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "draw.h"
#include "lanes.h"
#include "share.h"

namespace {

class DrawnToken {
    static constexpr int kBlock = 512;  // logits whose weights are summed before the sum is kept

    struct Candidate {
        float logit;
        int32_t token;
        bool operator<(const Candidate& other) const {
            return logit != other.logit ? logit > other.logit : token < other.token;
        }
    };

    const SieDraw& draw_;
    Candidate* const candidates_;
    float top_ = -std::numeric_limits<float>::infinity();

  public:
    // room: draw_scratch_bytes.
    DrawnToken(const SieDraw& draw, void* room) : draw_(draw), candidates_(static_cast<Candidate*>(room)) {}

    int32_t token() {
        if (!find_top()) return -1;
        return draw_.top_k > 0 || draw_.top_p < 1 ? draw_likeliest() : draw_any();
    }

  private:
    Lanes lanes_at(int64_t i) const {
        const Lanes lanes = first_lanes(static_cast<int>(draw_.vocabulary - i));
        return allowed_lanes(lanes, i, draw_.hidden, draw_.num_hidden);
    }

    // Finds the largest logit; false if it is not finite, or a logit is not a number.
    bool find_top() {
        Vec top = broadcast(top_);
        Lanes odd = 0;
        for (int64_t i = 0; i < draw_.vocabulary; i += kLanes) {
            const Lanes lanes = lanes_at(i);
            const Vec logits = load(draw_.logits + i, lanes);
            odd |= not_numbers(logits);
            top = max_where(lanes, top, logits);
        }
        top_ = largest_of(top);
        return !odd && std::isfinite(top_);
    }

    // Weights of 16 logits: 1 for the largest.
    Vec weights(Vec logits) const {
        const Vec off = (logits - broadcast(top_)) / broadcast(draw_.temperature);
        return exp2(off * broadcast(1.44269504f));
    }

    Vec weights_at(int64_t i, Lanes lanes) const {
        return only(lanes, weights(load(draw_.logits + i, lanes)));
    }

    Vec kept_weights_at(int64_t i) const {
        const Vec own = weights_at(i, lanes_at(i));
        return only(at_least(own, broadcast(draw_.min_p)), own);
    }

    // Draws in the order of the vocabulary.
    int32_t draw_any() {
        double* sums = reinterpret_cast<double*>(candidates_);
        const int64_t blocks = (draw_.vocabulary + kBlock - 1) / kBlock;
        double total = 0;
        for (int64_t block = 0; block < blocks; ++block) {
            Vec sum = zero();
            const int64_t end = std::min<int64_t>(draw_.vocabulary, (block + 1) * kBlock);
            for (int64_t i = block * kBlock; i < end; i += kLanes) sum += kept_weights_at(i);
            sums[block] = sum_of(sum);
            total += sums[block];
        }
        double left = draw_.number * total;
        int64_t block = 0;
        while (block + 1 < blocks && left >= sums[block]) left -= sums[block++];
        // Rounding may leave something behind the last weight: then the last token with a weight is drawn.
        int32_t last = -1;
        for (; block >= 0; left = std::numeric_limits<double>::infinity(), --block) {
            const int64_t end = std::min<int64_t>(draw_.vocabulary, (block + 1) * kBlock);
            for (int64_t i = block * kBlock; i < end; i += kLanes) {
                float own[kLanes];
                store(own, kept_weights_at(i));
                for (int lane = 0; lane < kLanes; ++lane) {
                    if (own[lane] == 0) continue;
                    last = static_cast<int32_t>(i + lane);
                    if (left < own[lane]) return last;
                    left -= own[lane];
                }
            }
            if (last >= 0) return last;
        }
        return last;
    }

    double sum_all() const {
        double total = 0;
        for (int64_t first = 0; first < draw_.vocabulary; first += kBlock) {
            Vec sum = zero();
            const int64_t end = std::min<int64_t>(draw_.vocabulary, first + kBlock);
            for (int64_t i = first; i < end; i += kLanes) sum += weights_at(i, lanes_at(i));
            total += sum_of(sum);
        }
        return total;
    }

    // Collects the tokens whose logits reach `least`, and returns their number.
    int64_t collect(float least) {
        int64_t count = 0;
        for (int64_t i = 0; i < draw_.vocabulary; i += kLanes) {
            const Vec logits = load(draw_.logits + i, first_lanes(static_cast<int>(draw_.vocabulary - i)));
            Lanes found = at_least(logits, broadcast(least));
            if (!found || !(found &= lanes_at(i))) continue;
            for (; found; found &= static_cast<Lanes>(found - 1)) {
                const int64_t token = i + __builtin_ctz(found);
                candidates_[count++] = {draw_.logits[token], static_cast<int32_t>(token)};
            }
        }
        return count;
    }

    double weight(const Candidate& candidate) const {
        return first_of(weights(broadcast(candidate.logit)));
    }

    // Draws among the likeliest tokens, sorted by logit, then id.
    int32_t draw_likeliest() {
        const int64_t top_k = draw_.top_k > 0 ? draw_.top_k : draw_.vocabulary;
        const bool has_nucleus = draw_.top_p < 1;
        const double most = has_nucleus ? draw_.top_p * sum_all() : std::numeric_limits<double>::infinity();
        int64_t count = 0;
        for (const float depth : {2.0f, 5.0f, 10.0f, std::numeric_limits<float>::infinity()}) {
            count = collect(std::max(top_ - depth * draw_.temperature, std::numeric_limits<float>::lowest()));
            if (count >= top_k) break;
            if (has_nucleus && sum(count) >= most) break;
        }
        if (count > top_k) {
            std::nth_element(candidates_, candidates_ + top_k, candidates_ + count);
            count = top_k;
        }
        std::sort(candidates_, candidates_ + count);
        // The first candidate has a weight of one, so min_p is a least weight.
        int64_t kept = 0;
        double total = 0;
        for (double before = 0; kept < count && before < most; ++kept) {
            const double own = weight(candidates_[kept]);
            if (own < draw_.min_p) break;
            before += own, total += own;
        }
        double left = draw_.number * total;
        for (int64_t i = 0; i + 1 < kept; ++i) {
            const double own = weight(candidates_[i]);
            if (left < own) return candidates_[i].token;
            left -= own;
        }
        return candidates_[std::max<int64_t>(kept, 1) - 1].token;
    }

    double sum(int64_t count) const {
        double total = 0;
        for (int64_t i = 0; i < count; ++i) total += weight(candidates_[i]);
        return total;
    }
};

inline void draw_tokens(SieDraw* draws, int64_t count, char* scratch, int32_t num_threads) {
    share(count, num_threads, [&](int64_t i, int32_t thread) {
        draws[i].token = DrawnToken(draws[i], scratch + thread * draw_scratch_bytes(draws[0].vocabulary)).token();
    });
}

}  // namespace
