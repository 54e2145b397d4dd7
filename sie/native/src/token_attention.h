// Computes attention of single tokens over blocks. Keys are read in place, once for all heads that share them.
//
// A long sequence is cut into segments of keys, whose sums are combined at the end (Dao et al., Flash-Decoding).
#pragma once
#include <algorithm>

#include "blocks.h"

namespace {

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
    static constexpr int kKeysAtOnce = kRegisters / 2;  // whose sums stay in registers

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
            const Vec scale = broadcast(1.0f / total);
            for (int c = 0; c < a_.decoder.head_width; c += kLanes) {
                Vec sum = zero();
                for (int64_t i = 0; i < piece.count; ++i) {
                    const Partial part = partial(piece.first + i, head);
                    sum = fmadd(load(part.values + c), broadcast(share_of(part, top)), sum);
                }
                a_.put(piece.token, head, c, sum * scale);
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
#pragma GCC unroll 16
            for (int first = 0; first < kLanes; first += kKeysAtOnce) {
                Vec own[kKeysAtOnce];
                for (Vec& sum : own) sum = zero();
                for (int word = 0; word < words; word += kLanes) {
                    const Lanes lanes = first_lanes(words - word);
                    const Words q = load_words(query + word * Number::kPerWord, lanes);
#pragma GCC unroll 16
                    for (int i = 0; i < kKeysAtOnce; ++i)
                        own[i] = Number::dot(own[i], q, load_words(keys[first + i] + word * Number::kPerWord, lanes));
                }
                for (int i = 0; i < kKeysAtOnce; ++i) sums[first + i] = own[i];
            }
            store(to + j * kSegmentKeys, a_.scaled(sum_each(sums)));
        }
    }

    // Turns scores into weights, not normalised.
    static void weigh(float* scores, int count, const Partial& to) {
        Vec top = broadcast(kLeast), total = zero();
        for (int key = 0; key < count; key += kLanes)
            top = max_where(first_lanes(count - key), top, load(scores + key));
        *to.top = largest_of(top);
        for (int key = 0; key < count; key += kLanes) {
            const Vec power = exp2(load(scores + key) - broadcast(*to.top));
            const Vec weight = only(first_lanes(count - key), power);
            total += weight;
            store(scores + key, weight);
        }
        *to.total = sum_of(total);
    }

    // Sums values for kHeads heads, into partial sums from those of the first head on, in columns of some vectors.
    template <int kHeads>
    void sum_values(const SieSlot& slot, int64_t begin, int count, int key_head, const float* weights,
                    const Partial& first) const {
        constexpr int kVectors = kRegisters / 8;
        const int width = a_.decoder.head_width;
        for (int c = 0; c < width; c += kVectors * kLanes) {
            Vec sums[kHeads][kVectors];
            for (auto& each : sums)
                for (Vec& sum : each) sum = zero();
            for (int key = 0; key < count; ++key) {
                const Stored* row = a_.value_of(slot, begin + key, key_head) + c;
                for (int v = 0; v < kVectors; ++v) {
                    const Vec values = Number::load(row + v * kLanes, first_lanes(width - c - v * kLanes));
                    for (int j = 0; j < kHeads; ++j)
                        sums[j][v] = fmadd(values, broadcast(weights[j * kSegmentKeys + key]), sums[j][v]);
                }
            }
            for (int j = 0; j < kHeads; ++j)
                for (int v = 0; v < kVectors && c + v * kLanes < width; ++v)
                    store(first.values + j * (columns_ + 2) + c + v * kLanes, sums[j][v]);
        }
    }
};

}  // namespace
