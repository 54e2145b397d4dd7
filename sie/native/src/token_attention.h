// Computes attention of single tokens over blocks. Keys are read in place, once for all heads that share them.
//
// A long sequence is cut into segments of keys, whose sums are combined at the end (Dao et al., Flash-Decoding).
#pragma once
#include <algorithm>

#include "blocks.h"

namespace {

constexpr float kLeast = -3e38f;

// A token, and its segments in the partial sums.
struct TokenPiece {
    const SieSlot* slot;
    int64_t token, position;
    int64_t first, count;
};

// The result of one head for a segment of keys: the largest score, the sum of weights, and the sum of weighted values.
struct Partial {
    float *top, *total, *values;
};

class TokenAttention {
    const Attending& a_;
    float* partials_;
    const int64_t columns_;  // head_width in whole lanes

  public:
    TokenAttention(const Attending& attending, float* partials)
        : a_(attending), partials_(partials), columns_((attending.decoder.head_width + 15) / 16 * 16) {}

    static int64_t num_segments(const SieDecoderLayer& layer, int64_t position) {
        return (keys_seen(position, layer.window) + kSegmentKeys - 1) / kSegmentKeys;
    }

    // Computes attention for the heads of one key head, over one segment. room: scores, (group, kSegmentKeys).
    void run(const TokenPiece& piece, int64_t segment, int key_head, float* room) const {
        const int64_t begin = a_.lowest(piece.position) + segment * kSegmentKeys, rest = piece.position + 1 - begin;
        const int count = static_cast<int>(rest < kSegmentKeys ? rest : kSegmentKeys), group = a_.group();
        const SieSlot& slot = *piece.slot;
        for (int key = 0; key < count; key += kLanes) score(slot, piece.token, begin + key, count - key, key_head, room + key);
        for (int j = 0; j < group; ++j)
            weigh(room + j * kSegmentKeys, count, partial(piece.first + segment, key_head * group + j));
        for (int j = 0; j < group; j += 4) {
            const auto sum = [&](auto heads) {
                sum_values<decltype(heads)::kCount>(slot, begin, count, key_head, room + j * kSegmentKeys,
                                                    partial(piece.first + segment, key_head * group + j));
            };
            switch (group - j) {
                case 1: sum(Heads<1>{}); break;
                case 2: sum(Heads<2>{}); break;
                case 3: sum(Heads<3>{}); break;
                default: sum(Heads<4>{});
            }
        }
    }

    // Combines a token's segments.
    void merge(const TokenPiece& piece) const {
        for (int head = 0; head < a_.decoder.num_heads; ++head) {
            float top = kLeast, total = 0;
            for (int64_t i = 0; i < piece.count; ++i) top = std::max(top, *partial(piece.first + i, head).top);
            for (int64_t i = 0; i < piece.count; ++i) {
                const Partial part = partial(piece.first + i, head);
                total += share_of(part, top) * *part.total;
            }
            const Vec scale = _mm512_set1_ps(1.0f / total);
            for (int c = 0; c < a_.decoder.head_width; c += kLanes) {
                Vec sum = _mm512_setzero_ps();
                for (int64_t i = 0; i < piece.count; ++i) {
                    const Partial part = partial(piece.first + i, head);
                    sum = _mm512_fmadd_ps(_mm512_loadu_ps(part.values + c), _mm512_set1_ps(share_of(part, top)), sum);
                }
                a_.store(piece.token, head, c, _mm512_mul_ps(sum, scale));
            }
        }
    }

  private:
    template <int kHeads>
    struct Heads {
        static constexpr int kCount = kHeads;
    };

    static float share_of(const Partial& part, float top) { return __builtin_exp2f(*part.top - top); }

    Partial partial(int64_t segment, int head) const {
        float* at = partials_ + (segment * a_.decoder.num_heads + head) * (columns_ + 2);
        return {at + columns_, at + columns_ + 1, at};
    }

    // Computes the scores of 16 keys from a position on; the last key repeats in the places after it.
    void score(const SieSlot& slot, int64_t token, int64_t position, int count, int key_head, float* to) const {
        const int words = a_.decoder.head_width / Number::kPerWord;
        const Stored* keys[kLanes];
        for (int i = 0; i < kLanes; ++i) keys[i] = a_.key_of(slot, position + (i < count ? i : count - 1), key_head);
        for (int j = 0; j < a_.group(); ++j) {
            const Stored* query = a_.query_of(token, key_head * a_.group() + j);
            Vec sums[kLanes];
            for (Vec& sum : sums) sum = _mm512_setzero_ps();
            for (int word = 0; word < words; word += kLanes) {
                const __mmask16 lanes = first_lanes(words - word);
                const __m512i q = _mm512_maskz_loadu_epi32(lanes, query + word * Number::kPerWord);
#pragma GCC unroll 16
                for (int i = 0; i < kLanes; ++i)
                    sums[i] = Number::dot(sums[i], q, _mm512_maskz_loadu_epi32(lanes, keys[i] + word * Number::kPerWord));
            }
            _mm512_storeu_ps(to + j * kSegmentKeys, a_.scaled(sum_each(sums)));
        }
    }

    // Turns scores into weights, not normalised.
    static void weigh(float* scores, int count, const Partial& to) {
        Vec top = _mm512_set1_ps(kLeast), total = _mm512_setzero_ps();
        for (int key = 0; key < count; key += kLanes)
            top = _mm512_mask_max_ps(top, first_lanes(count - key), top, _mm512_loadu_ps(scores + key));
        *to.top = _mm512_reduce_max_ps(top);
        for (int key = 0; key < count; key += kLanes) {
            const Vec power = exp2(_mm512_sub_ps(_mm512_loadu_ps(scores + key), _mm512_set1_ps(*to.top)));
            const Vec weight = _mm512_maskz_mov_ps(first_lanes(count - key), power);
            total = _mm512_add_ps(total, weight);
            _mm512_storeu_ps(scores + key, weight);
        }
        *to.total = _mm512_reduce_add_ps(total);
    }

    // Sums values for kHeads heads, into partial sums from those of the first head on, in columns of four vectors.
    template <int kHeads>
    void sum_values(const SieSlot& slot, int64_t begin, int count, int key_head, const float* weights,
                    const Partial& first) const {
        constexpr int kVectors = 4;
        const int width = a_.decoder.head_width;
        for (int c = 0; c < width; c += kVectors * kLanes) {
            Vec sums[kHeads][kVectors];
            for (auto& each : sums)
                for (Vec& sum : each) sum = _mm512_setzero_ps();
            for (int key = 0; key < count; ++key) {
                const Stored* row = a_.value_of(slot, begin + key, key_head) + c;
                for (int v = 0; v < kVectors; ++v) {
                    const Vec values = Number::load(row + v * kLanes, first_lanes(width - c - v * kLanes));
                    for (int j = 0; j < kHeads; ++j)
                        sums[j][v] = _mm512_fmadd_ps(values, _mm512_set1_ps(weights[j * kSegmentKeys + key]), sums[j][v]);
                }
            }
            for (int j = 0; j < kHeads; ++j)
                for (int v = 0; v < kVectors && c + v * kLanes < width; ++v)
                    _mm512_storeu_ps(first.values + j * (columns_ + 2) + c + v * kLanes, sums[j][v]);
        }
    }
};

}  // namespace
