// Attention within each of many short sequences, one head at a time.
//
// Keys and values of a head are brought into the order of the products once, then blocks of 12 queries run through
// scores, softmax and the sum of values. All of it stays in the first or second cache, since a sequence is short.
#pragma once
#include "attention.h"
#include "lanes.h"
#include "share.h"

namespace {

constexpr int kQueryRows = 12;

inline int padded(int count) { return (count + kLanes - 1) / kLanes * kLanes; }

template <class T>
struct Attention {
    using Stored = typename T::Stored;

    const SieAttention& shape;
    const int columns;      // width, in whole lanes
    const int words;        // of one row
    uint32_t* keys;         // [tile of 16 keys][word][key]
    uint32_t* values;       // [word of keys][column]
    float* scores;          // [row][key]
    Stored* weights;        // [row][key]
    int padded_keys = 0;

    Attention(const SieAttention& shape, int longest, void* scratch)
        : shape(shape), columns(padded(shape.width)), words(shape.width / T::kPerWord) {
        const size_t room = static_cast<size_t>(padded(longest));
        keys = reinterpret_cast<uint32_t*>((reinterpret_cast<uintptr_t>(scratch) + 63) & ~uintptr_t{63});
        values = keys + room * columns;
        scores = reinterpret_cast<float*>(values + room * columns);
        weights = reinterpret_cast<Stored*>(scores + kQueryRows * room);
    }

    // Attends within one sequence, with the queries that share a head of keys.
    void run(int sequence, int head) {
        const int group = shape.num_heads / shape.num_key_heads;
        const int64_t start = shape.bounds[sequence];
        const int length = shape.bounds[sequence + 1] - shape.bounds[sequence];
        const int seen = shape.seen ? shape.seen[sequence] : length;
        padded_keys = padded(seen);
        pack_keys(rows(shape.key, start * shape.key_token + head * shape.key_head), seen);
        pack_values(rows(shape.value, start * shape.value_token + head * shape.value_head), seen);
        for (int h = head * group; h < (head + 1) * group; ++h) {
            const Stored* query = rows(shape.query, start * shape.query_token + h * shape.query_head);
            Stored* out = static_cast<Stored*>(shape.out) + start * shape.out_token + h * shape.out_head;
            for (int first = 0; first < length; first += kQueryRows) block(query, out, first, length, seen);
        }
    }

    static const Stored* rows(const void* base, int64_t offset) { return static_cast<const Stored*>(base) + offset; }

    void pack_keys(const Stored* from, int count) {
        for (int tile = 0; tile < count; tile += kLanes) {
            for (int word = 0; word < words; word += kLanes) {
                const int num_words = words - word < kLanes ? words - word : kLanes;
                __m512i square[kLanes];
                for (int i = 0; i < kLanes; ++i) {
                    const Stored* row = from + (tile + i) * shape.key_token + word * T::kPerWord;
                    square[i] = tile + i < count ? _mm512_maskz_loadu_epi32(first_lanes(num_words), row)
                                                 : _mm512_setzero_si512();
                }
                transpose(square);
                uint32_t* to = keys + (static_cast<size_t>(tile) * words) + word * kLanes;
                for (int i = 0; i < num_words; ++i) _mm512_store_si512(to + i * kLanes, square[i]);
            }
        }
    }

    void pack_values(const Stored* from, int count) {
        uint32_t* to = values;
        for (int key = 0; key < padded_keys; key += T::kPerWord, to += columns) {
            const Stored* row = from + key * shape.value_token;
            for (int column = 0; column < columns; column += kLanes) {
                const __mmask16 lanes = first_lanes(key < count ? shape.width - column : 0);
                const Stored* next = key + 1 < count ? row + shape.value_token + column : nullptr;
                _mm512_store_si512(to + column, T::words(row + column, next, lanes));
            }
        }
    }

    // Attends with queries first .. first + 12 of a sequence.
    void block(const Stored* query, Stored* out, int first, int length, int seen) {
        const int count = length - first < kQueryRows ? length - first : kQueryRows;
        // Rows behind the last are the last again, so that every block has the same shape.
        const Stored* q[kQueryRows];
        for (int r = 0; r < kQueryRows; ++r) q[r] = query + (first + (r < count ? r : count - 1)) * shape.query_token;
        const int begin = lowest(first) / kLanes * kLanes;
        const int end = padded(highest(first + count - 1, seen));
        int tile = begin;
        for (; tile + 2 * kLanes <= end; tile += 2 * kLanes) score<2>(q, tile);
        if (tile < end) score<1>(q, tile);
        float scaling[kQueryRows];
        for (int r = 0; r < kQueryRows; ++r) {
            const int at = first + (r < count ? r : count - 1);
            scaling[r] = softmax(r, lowest(at), highest(at, seen), begin, end);
        }
        int column = 0;
        for (; column + 2 * kLanes <= columns; column += 2 * kLanes)
            sum<2>(out + first * shape.out_token, count, column, begin, end, scaling);
        if (column < columns) sum<1>(out + first * shape.out_token, count, column, begin, end, scaling);
    }

    // The keys that the query at a position attends to: from lowest, below highest.
    int lowest(int at) const { return shape.window && at >= shape.window ? at - shape.window + 1 : 0; }
    int highest(int at, int seen) const {
        int end = shape.is_causal ? at + 1 : shape.window ? at + shape.window : seen;
        return end < seen ? end : seen;
    }

    template <int kTiles>
    void score(const Stored* const (&q)[kQueryRows], int tile) {
        Vec sums[kQueryRows][kTiles];
        for (auto& row : sums)
            for (Vec& sum : row) sum = _mm512_setzero_ps();
        const uint32_t* from = keys + static_cast<size_t>(tile) * words;
        for (int word = 0; word < words; ++word) {
            __m512i k[kTiles];
            for (int t = 0; t < kTiles; ++t) k[t] = _mm512_load_si512(from + (t * words + word) * kLanes);
#pragma GCC unroll 12
            for (int r = 0; r < kQueryRows; ++r) {
                const __m512i one = broadcast_word(q[r] + word * T::kPerWord);
                for (int t = 0; t < kTiles; ++t) sums[r][t] = T::dot(sums[r][t], one, k[t]);
            }
        }
        for (int r = 0; r < kQueryRows; ++r)
            for (int t = 0; t < kTiles; ++t) _mm512_storeu_ps(scores + r * padded_keys + tile + t * kLanes, sums[r][t]);
    }

    // Writes the weights of one row, not normalised, zero outside of lowest .. highest; returns what they are to be
    // multiplied with.
    float softmax(int r, int lowest, int highest, int begin, int end) {
        const float* from = scores + r * padded_keys;
        Stored* to = weights + r * padded_keys;
        const auto lanes_at = [=](int key) {
            return key >= lowest && key + kLanes <= highest ? __mmask16{0xFFFF} : between(lowest - key, highest - key);
        };
        Vec top = _mm512_set1_ps(-3e38f);
        for (int key = begin; key < end; key += kLanes)
            top = _mm512_mask_max_ps(top, lanes_at(key), top, _mm512_loadu_ps(from + key));
        const Vec scale = _mm512_set1_ps(shape.scale * 1.44269504f);
        const Vec most = _mm512_mul_ps(_mm512_set1_ps(_mm512_reduce_max_ps(top)), scale);
        Vec sum = _mm512_setzero_ps();
        for (int key = begin; key < end; key += kLanes) {
            const Vec exponent = _mm512_fmsub_ps(_mm512_loadu_ps(from + key), scale, most);
            const Vec power = sizeof(Stored) == 2 ? rough_exp2(exponent) : exp2(exponent);
            const Vec weight = _mm512_maskz_mov_ps(lanes_at(key), power);
            sum = _mm512_add_ps(sum, weight);
            T::store(to + key, 0xFFFF, weight);
        }
        const float total = _mm512_reduce_add_ps(sum);
        return total > 0 ? 1.0f / total : 0.0f;
    }

    static __mmask16 between(int lowest, int highest) {
        return static_cast<__mmask16>(first_lanes(highest) & ~first_lanes(lowest));
    }

    template <int kTiles>
    void sum(Stored* out, int count, int column, int begin, int end, const float (&scaling)[kQueryRows]) {
        Vec sums[kQueryRows][kTiles];
        for (auto& row : sums)
            for (Vec& sum : row) sum = _mm512_setzero_ps();
        const uint32_t* from = values + column;
        for (int word = begin / T::kPerWord; word < end / T::kPerWord; ++word) {
            __m512i v[kTiles];
            for (int t = 0; t < kTiles; ++t)
                v[t] = _mm512_load_si512(from + static_cast<size_t>(word) * columns + t * kLanes);
#pragma GCC unroll 12
            for (int r = 0; r < kQueryRows; ++r) {
                const __m512i one = broadcast_word(weights + r * padded_keys + word * T::kPerWord);
                for (int t = 0; t < kTiles; ++t) sums[r][t] = T::dot(sums[r][t], one, v[t]);
            }
        }
        for (int r = 0; r < count; ++r)
            for (int t = 0; t < kTiles; ++t)
                T::store(out + r * shape.out_token + column + t * kLanes, first_lanes(shape.width - column - t * kLanes),
                         _mm512_mul_ps(sums[r][t], _mm512_set1_ps(scaling[r])));
    }
};

inline int longest_of(const SieAttention& shape) {
    int longest = 0;
    for (int i = 0; i < shape.num_sequences; ++i) {
        const int length = shape.bounds[i + 1] - shape.bounds[i];
        longest = length > longest ? length : longest;
    }
    return longest;
}

template <class T>
void attend(const SieAttention& shape, int longest, void* scratch) {
    const size_t bytes = attention_scratch_bytes(longest, shape.width);
    const int64_t heads = shape.num_key_heads;
    share(shape.num_sequences * heads, shape.num_threads, [&](int64_t piece, int32_t thread) {
        Attention<T>(shape, longest, static_cast<char*>(scratch) + thread * bytes).run(piece / heads, piece % heads);
    });
}

template <class T>
void attend(const SieAttention& shape, void* scratch) {
    attend<T>(shape, longest_of(shape), scratch);
}

}  // namespace
