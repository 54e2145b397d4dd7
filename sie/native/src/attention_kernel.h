// Computes attention within each of many sequences, one head at a time.
//
// The keys and values of a head are packed once in the order of the products. Then blocks of 12 queries run through
// scores, softmax and the sum of values. All data of a short sequence stays in the level 1 or 2 cache. In a long sequence, 8
// blocks of queries read one chunk of keys in turn, so that the chunk stays in the cache. Their sums continue with the next
// chunk. Source: Milakov and Gimelshein, arXiv 1805.02867.
#pragma once
#include "attention.h"
#include "lanes.h"
#include "share.h"

namespace {

constexpr float kLeast = -3e38f;
constexpr int kSumQueries = kQueryRows < kSumRows ? kQueryRows : kSumRows;  // whose sums stay in registers

inline int padded(int count) { return (count + kLanes - 1) / kLanes * kLanes; }

template <class T>
struct Attention {
    using Stored = typename T::Stored;

    const SieAttention& shape;
    const int columns;      // width, in whole lanes
    const int words;        // in a row
    uint32_t* keys;         // [tile of 16 keys][word][key]
    uint32_t* values;       // [word of keys][column]
    float* scores;          // [row][key of a chunk]
    Stored* weights;        // [row][key of a chunk]
    float *running, *tops, *totals;  // of long sequences: [row][column], [row], [row]
    int padded_keys = 0;
    int origin = 0;         // the first key that scores and weights have
    const float* biases = nullptr;  // of the head, for a key at the query's own position

    Attention(const SieAttention& shape, int longest, void* scratch)
        : shape(shape), columns(padded(shape.width)), words(shape.width / T::kPerWord) {
        const size_t room = static_cast<size_t>(padded(longest));
        keys = reinterpret_cast<uint32_t*>((reinterpret_cast<uintptr_t>(scratch) + 63) & ~uintptr_t{63});
        values = keys + room * columns;
        const size_t chunk = room < kChunkKeys ? room : kChunkKeys;
        scores = reinterpret_cast<float*>(values + room * columns);
        running = scores + 2 * kQueryRows * chunk;
        tops = running + kChunkRows * columns;
        totals = tops + kChunkRows;
        weights = reinterpret_cast<Stored*>(scores + kQueryRows * chunk);
    }

    // Computes attention within one sequence, for the queries that share a key head.
    void run(int sequence, int head) {
        const int group = shape.num_heads / shape.num_key_heads;
        const int64_t start = shape.bounds[sequence];
        const int length = shape.bounds[sequence + 1] - shape.bounds[sequence];
        const int seen = shape.seen ? shape.seen[sequence] : length;
        padded_keys = padded(seen);
        pack_keys(rows(shape.key, start * shape.key_token + head * shape.key_head), seen);
        pack_values(rows(shape.value, start * shape.value_token + head * shape.value_head), seen);
        for (int h = head * group; h < (head + 1) * group; ++h) {
            if (shape.biases) biases = shape.biases + (2 * static_cast<size_t>(h) + 1) * shape.bias_reach;
            const Stored* query = rows(shape.query, start * shape.query_token + h * shape.query_head);
            Stored* out = static_cast<Stored*>(shape.out) + start * shape.out_token + h * shape.out_head;
            const int most = shape.window ? 2 * (shape.window + kQueryRows) : seen;
            if (padded_keys <= kChunkKeys || most + 2 * kLanes <= kChunkKeys) {
                for (int first = 0; first < length; first += kQueryRows) block(query, out, first, length, seen);
            } else {
                for (int first = 0; first < length; first += kChunkRows) blocks(query, out, first, length, seen);
            }
        }
    }

    static const Stored* rows(const void* base, int64_t offset) { return static_cast<const Stored*>(base) + offset; }

    void pack_keys(const Stored* from, int count) {
        for (int tile = 0; tile < count; tile += kLanes) {
            for (int word = 0; word < words; word += kLanes) {
                const int num_words = words - word < kLanes ? words - word : kLanes;
                Words square[kLanes];
                for (int i = 0; i < kLanes; ++i) {
                    const Stored* row = from + (tile + i) * shape.key_token + word * T::kPerWord;
                    square[i] = tile + i < count ? load_words(row, first_lanes(num_words))
                                                 : zero_words();
                }
                transpose(square);
                uint32_t* to = keys + (static_cast<size_t>(tile) * words) + word * kLanes;
                for (int i = 0; i < num_words; ++i) store_words(to + i * kLanes, square[i]);
            }
        }
    }

    void pack_values(const Stored* from, int count) {
        uint32_t* to = values;
        for (int key = 0; key < padded_keys; key += T::kPerWord, to += columns) {
            const Stored* row = from + key * shape.value_token;
            for (int column = 0; column < columns; column += kLanes) {
                const Lanes lanes = first_lanes(key < count ? shape.width - column : 0);
                const Stored* next = key + 1 < count ? row + shape.value_token + column : nullptr;
                store_words(to + column, T::words(row + column, next, lanes));
            }
        }
    }

    // A block of queries. The last row repeats in the places after it, so that every block has the same shape.
    struct Queries {
        const Stored* rows[kQueryRows];
        int first, count;

        int at(int row) const { return first + (row < count ? row : count - 1); }
    };

    template <int kTiles>
    struct Tiles {
        static constexpr int kCount = kTiles;
    };

    // The sums of a block so far, in this column, and their factors.
    struct Before {
        const float *sums, *factors;
    };

    // Calls run(tiles, column) for all columns, as many tiles at a time as stay in registers.
    template <class F>
    void for_columns(const F& run) const {
        int column = 0;
        for (; column + kSumColumns <= columns; column += kSumColumns) run(Tiles<kSumColumns / kLanes>{}, column);
        if (column < columns) run(Tiles<1>{}, column);
    }

    void put(Stored* out, int column, Vec values) const { T::store(out + column, first_lanes(shape.width - column), values); }

    Queries queries_of(const Stored* query, int first, int length) const {
        Queries found{{}, first, length - first < kQueryRows ? length - first : kQueryRows};
        for (int r = 0; r < kQueryRows; ++r) found.rows[r] = query + found.at(r) * shape.query_token;
        return found;
    }

    // Computes attention for queries first .. first + 12 of a sequence.
    void block(const Stored* query, Stored* out, int first, int length, int seen) {
        const Queries queries = queries_of(query, first, length);
        const int begin = lowest(first) / kLanes * kLanes, end = padded(highest(first + queries.count - 1, seen));
        origin = begin;
        score_all(queries, begin, end);
        float scaling[kQueryRows];
        for (int r = 0; r < kQueryRows; ++r) {
            float top = kLeast, total = 0;
            softmax(r, queries.at(r), seen, begin, end, top, total);
            scaling[r] = total > 0 ? 1.0f / total : 0.0f;
        }
        for_columns([&](auto tiles, int column) {
            this->template sum<decltype(tiles)::kCount>(queries.count, column, begin, end, nullptr, [&](int r, int t, Vec sum) {
                put(out + (first + r) * shape.out_token, column + t * kLanes, sum * broadcast(scaling[r]));
            });
        });
    }

    // Computes attention for queries first .. first + 96 of a long sequence.
    void blocks(const Stored* query, Stored* out, int first, int length, int seen) {
        const int rows = length - first < kChunkRows ? length - first : kChunkRows;
        for (int i = 0; i < rows * columns; i += kLanes) store(running + i, zero());
        for (int r = 0; r < rows; ++r) tops[r] = kLeast, totals[r] = 0;
        const int last = padded(highest(first + rows - 1, seen));
        for (origin = lowest(first) / kLanes * kLanes; origin < last; origin += kChunkKeys)
            for (int row = 0; row < rows; row += kQueryRows)
                go_on(queries_of(query, first + row, length), row, seen);
        for (int r = 0; r < rows; ++r)
            for (int c = 0; c < shape.width; c += kLanes) {
                const Vec scaling = broadcast(totals[r] > 0 ? 1.0f / totals[r] : 0.0f);
                put(out + (first + r) * shape.out_token, c, load(running + r * columns + c) * scaling);
            }
    }

    // Continues a block of queries over the chunk of keys from origin on; row is the place of its sums.
    void go_on(const Queries& queries, int row, int seen) {
        const int from = lowest(queries.first) / kLanes * kLanes, to = padded(highest(queries.at(kQueryRows), seen));
        const int begin = from > origin ? from : origin, end = to < origin + kChunkKeys ? to : origin + kChunkKeys;
        if (begin >= end) return;
        score_all(queries, begin, end);
        float factors[kQueryRows];
        for (int r = 0; r < queries.count; ++r)
            factors[r] = softmax(r, queries.at(r), seen, begin, end, tops[row + r], totals[row + r]);
        for_columns([&](auto tiles, int column) {
            float* sums = running + static_cast<size_t>(row) * columns + column;
            const Before before{sums, factors};
            this->template sum<decltype(tiles)::kCount>(queries.count, column, begin, end, &before, [&](int r, int t, Vec sum) {
                store(sums + r * columns + t * kLanes, sum);
            });
        });
    }

    // The range of keys that the query at a position attends to: from lowest, below highest.
    int lowest(int at) const { return shape.window && at >= shape.window ? at - shape.window + 1 : 0; }
    int highest(int at, int seen) const {
        int end = shape.is_causal ? at + 1 : shape.window ? at + shape.window : seen;
        return end < seen ? end : seen;
    }

    void score_all(const Queries& queries, int begin, int end) {
        int tile = begin;
        for (; tile + kSumColumns <= end; tile += kSumColumns) score<kSumColumns / kLanes>(queries.rows, tile);
        if (tile < end) score<1>(queries.rows, tile);
    }

    float* scores_of(int row, int key) const { return scores + row * chunk() + key - origin; }
    Stored* weights_of(int row, int key) const { return weights + row * chunk() + key - origin; }
    int chunk() const { return padded_keys < kChunkKeys ? padded_keys : kChunkKeys; }

    template <int kTiles>
    void score(const Stored* const (&q)[kQueryRows], int tile) {
        for (int row = 0; row < kQueryRows; row += kSumQueries) {
            Vec sums[kSumQueries][kTiles];
            for (auto& each : sums)
                for (Vec& sum : each) sum = zero();
            const uint32_t* from = keys + static_cast<size_t>(tile) * words;
            for (int word = 0; word < words; ++word) {
                Words k[kTiles];
                for (int t = 0; t < kTiles; ++t) k[t] = load_words(from + (t * words + word) * kLanes);
#pragma GCC unroll 12
                for (int r = 0; r < kSumQueries; ++r) {
                    const Words one = broadcast_word(q[row + r] + word * T::kPerWord);
                    for (int t = 0; t < kTiles; ++t) sums[r][t] = T::dot(sums[r][t], one, k[t]);
                }
            }
            for (int r = 0; r < kSumQueries; ++r)
                for (int t = 0; t < kTiles; ++t) store(scores_of(row + r, tile + t * kLanes), sums[r][t]);
        }
    }

    // Writes the weights of row r, of the query at a position: not normalised, and zero outside of its keys. top and total are
    // the largest scaled score and the sum of weights so far. Returns the factor of the sums so far.
    float softmax(int r, int at, int seen, int begin, int end, float& top, float& total) {
        const int lowest = this->lowest(at), highest = this->highest(at, seen);
        float* from = scores_of(r, 0);
        Stored* to = weights_of(r, 0);
        const auto lanes_at = [=](int key) {
            return key >= lowest && key + kLanes <= highest ? kAllLanes : between(lowest - key, highest - key);
        };
        for (int key = begin; key < end && biases; key += kLanes)
            store(from + key, load(from + key) + load(biases + key - at));
        Vec most = broadcast(kLeast);
        for (int key = begin; key < end; key += kLanes)
            most = max_where(lanes_at(key), most, load(from + key));
        const float factor = shape.scale * 1.44269504f, found = largest_of(most) * factor, before = top;
        if (found > top) top = found;
        const Vec scale = broadcast(factor), highest_score = broadcast(top);
        Vec sum = zero();
        for (int key = begin; key < end; key += kLanes) {
            const Vec exponent = fmsub(load(from + key), scale, highest_score);
            const Vec power = sizeof(Stored) == 2 ? rough_exp2(exponent) : exp2(exponent);
            const Vec weight = only(lanes_at(key), power);
            sum += weight;
            T::store(to + key, kAllLanes, weight);
        }
        const float so_far = before > kLeast ? __builtin_exp2f(before - top) : 0.0f;
        total = total * so_far + sum_of(sum);
        return so_far;
    }

    static Lanes between(int lowest, int highest) {
        return static_cast<Lanes>(first_lanes(highest) & ~first_lanes(lowest));
    }

    // Calls done(row, tile, sum) for the sums of values times weights, added to those before where there are some.
    template <int kTiles, class Done>
    void sum(int count, int column, int begin, int end, const Before* before, const Done& done) {
        for (int row = 0; row < count; row += kSumQueries) {
            Vec sums[kSumQueries][kTiles];
            for (int r = 0; r < kSumQueries; ++r)
                for (int t = 0; t < kTiles; ++t)
                    sums[r][t] = before && row + r < count ? load(before->sums + (row + r) * columns + t * kLanes) *
                                                                 broadcast(before->factors[row + r])
                                                           : zero();
            const uint32_t* from = values + column;
            const Stored* own = weights_of(row, 0);
            for (int word = begin / T::kPerWord; word < end / T::kPerWord; ++word) {
                Words v[kTiles];
                for (int t = 0; t < kTiles; ++t) v[t] = load_words(from + static_cast<size_t>(word) * columns + t * kLanes);
#pragma GCC unroll 12
                for (int r = 0; r < kSumQueries; ++r) {
                    const Words one = broadcast_word(own + r * chunk() + word * T::kPerWord);
                    for (int t = 0; t < kTiles; ++t) sums[r][t] = T::dot(sums[r][t], one, v[t]);
                }
            }
            for (int r = 0; r < kSumQueries && row + r < count; ++r)
                for (int t = 0; t < kTiles; ++t) done(row + r, t, sums[r][t]);
        }
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
