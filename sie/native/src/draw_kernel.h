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
    __mmask16 lanes_at(int64_t i) const {
        const __mmask16 lanes = first_lanes(static_cast<int>(draw_.vocabulary - i));
        return allowed_lanes(lanes, i, draw_.hidden, draw_.num_hidden);
    }

    // Finds the largest logit; false if it is not finite, or a logit is not a number.
    bool find_top() {
        Vec top = _mm512_set1_ps(top_);
        __mmask16 odd = 0;
        for (int64_t i = 0; i < draw_.vocabulary; i += kLanes) {
            const __mmask16 lanes = lanes_at(i);
            const Vec logits = _mm512_maskz_loadu_ps(lanes, draw_.logits + i);
            odd |= _mm512_cmp_ps_mask(logits, logits, _CMP_UNORD_Q);
            top = _mm512_mask_max_ps(top, lanes, top, logits);
        }
        top_ = _mm512_reduce_max_ps(top);
        return !odd && std::isfinite(top_);
    }

    // Weights of 16 logits: 1 for the largest.
    Vec weights(Vec logits) const {
        const Vec off = _mm512_div_ps(_mm512_sub_ps(logits, _mm512_set1_ps(top_)), _mm512_set1_ps(draw_.temperature));
        return exp2(_mm512_mul_ps(off, _mm512_set1_ps(1.44269504f)));
    }

    Vec weights_at(int64_t i, __mmask16 lanes) const {
        return _mm512_maskz_mov_ps(lanes, weights(_mm512_maskz_loadu_ps(lanes, draw_.logits + i)));
    }

    Vec kept_weights_at(int64_t i) const {
        const Vec own = weights_at(i, lanes_at(i));
        return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(own, _mm512_set1_ps(draw_.min_p), _CMP_GE_OQ), own);
    }

    // Draws in the order of the vocabulary.
    int32_t draw_any() {
        double* sums = reinterpret_cast<double*>(candidates_);
        const int64_t blocks = (draw_.vocabulary + kBlock - 1) / kBlock;
        double total = 0;
        for (int64_t block = 0; block < blocks; ++block) {
            Vec sum = _mm512_setzero_ps();
            const int64_t end = std::min<int64_t>(draw_.vocabulary, (block + 1) * kBlock);
            for (int64_t i = block * kBlock; i < end; i += kLanes) sum = _mm512_add_ps(sum, kept_weights_at(i));
            sums[block] = _mm512_reduce_add_ps(sum);
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
                _mm512_storeu_ps(own, kept_weights_at(i));
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
            Vec sum = _mm512_setzero_ps();
            const int64_t end = std::min<int64_t>(draw_.vocabulary, first + kBlock);
            for (int64_t i = first; i < end; i += kLanes) sum = _mm512_add_ps(sum, weights_at(i, lanes_at(i)));
            total += _mm512_reduce_add_ps(sum);
        }
        return total;
    }

    // Collects the tokens whose logits reach `least`, and returns their number.
    int64_t collect(float least) {
        const __m512i places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        int64_t count = 0;
        for (int64_t i = 0; i < draw_.vocabulary; i += kLanes) {
            const Vec logits = _mm512_maskz_loadu_ps(first_lanes(static_cast<int>(draw_.vocabulary - i)), draw_.logits + i);
            __mmask16 found = _mm512_cmp_ps_mask(logits, _mm512_set1_ps(least), _CMP_GE_OQ);
            if (!found || !(found &= lanes_at(i))) continue;
            float values[kLanes];
            int32_t tokens[kLanes];
            _mm512_storeu_ps(values, _mm512_maskz_compress_ps(found, logits));
            const __m512i ids = _mm512_add_epi32(places, _mm512_set1_epi32(static_cast<int>(i)));
            _mm512_storeu_si512(tokens, _mm512_maskz_compress_epi32(found, ids));
            for (int k = 0, own = __builtin_popcount(found); k < own; ++k) candidates_[count++] = {values[k], tokens[k]};
        }
        return count;
    }

    double weight(const Candidate& candidate) const {
        return _mm512_cvtss_f32(weights(_mm512_set1_ps(candidate.logit)));
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
