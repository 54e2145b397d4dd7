// Computes attention within each of many sequences, one head at a time.
//
// The keys and values of a head are packed once in the order of the products. Then blocks of queries run through scores,
// softmax and the sum of values. All data of a short sequence stays in the level 1 or 2 cache. In a long sequence, some
// blocks of queries read one chunk of keys in turn, so that the chunk stays in the cache. Their sums continue with the next
// chunk. Source: Milakov and Gimelshein, arXiv 1805.02867.
#pragma once
#include <algorithm>

#include "attention.h"
#include "lanes.h"
#include "share.h"

namespace {

// The sums of a block's rows so far, and their factors.
struct SumsBefore {
    const float* sums;
    size_t apart;  // values from one row to the next
    const float* factors;

    Vec at(int row, int column) const { return load(sums + row * apart + column) * broadcast(factors[row]); }
};

// The two products of attention by dot products; sums stay in registers.
template <class T>
struct DotAttention {
    using Format = T;
    using Stored = typename T::Stored;
    static constexpr int kRows = 12;       // queries of a block
    static constexpr int kKeys = kLanes;   // the number of keys is a multiple of this
    static constexpr int kSumRows = kRows < ::kSumRows ? kRows : ::kSumRows;

    static bool takes(int) { return true; }  // heads of a width
    void fit(int) {}  // a number of queries

    // Writes the scores of `count` queries, `apart` values from one to the next, for num_keys packed keys.
    static void score(const Stored* queries, size_t apart, int count, const uint32_t* keys, int words, int num_keys, float* to,
                      size_t to_apart) {
        int key = 0;
        for (; key + kSumColumns <= num_keys; key += kSumColumns)
            score<kSumColumns / kLanes>(queries, apart, count, keys + static_cast<size_t>(key) * words, words, to + key, to_apart);
        if (key < num_keys) score<1>(queries, apart, count, keys + static_cast<size_t>(key) * words, words, to + key, to_apart);
    }

    // Calls done(row, column, sum) for the sums of values times weights, added to those before where there are some.
    template <class Done>
    static void sum(const Stored* weights, size_t apart, int count, const uint32_t* values, int columns, int num_keys,
                    const SumsBefore* before, const Done& done) {
        int column = 0;
        for (; column + kSumColumns <= columns; column += kSumColumns)
            sum<kSumColumns / kLanes>(weights, apart, count, values, columns, column, num_keys, before, done);
        if (column < columns) sum<1>(weights, apart, count, values, columns, column, num_keys, before, done);
    }

  private:
    // The last row repeats in the places after it, so that every block has the same shape.
    static const Stored* row(const Stored* first, size_t apart, int number, int count) {
        return first + (number < count ? number : count - 1) * apart;
    }

    template <int kTiles>
    static void score(const Stored* queries, size_t apart, int count, const uint32_t* keys, int words, float* to, size_t to_apart) {
        for (int first = 0; first < count; first += kSumRows) {
            const Stored* q[kSumRows];
            for (int r = 0; r < kSumRows; ++r) q[r] = row(queries, apart, first + r, count);
            Vec sums[kSumRows][kTiles];
            for (auto& each : sums)
                for (Vec& sum : each) sum = zero();
            for (int word = 0; word < words; ++word) {
                Words k[kTiles];
                for (int t = 0; t < kTiles; ++t) k[t] = load_words(keys + (t * words + word) * kLanes);
#pragma GCC unroll 12
                for (int r = 0; r < kSumRows; ++r) {
                    const Words one = broadcast_word(q[r] + word * T::kPerWord);
                    for (int t = 0; t < kTiles; ++t) sums[r][t] = T::dot(sums[r][t], one, k[t]);
                }
            }
            for (int r = 0; r < kSumRows && first + r < count; ++r)
                for (int t = 0; t < kTiles; ++t) store(to + (first + r) * to_apart + t * kLanes, sums[r][t]);
        }
    }

    template <int kTiles, class Done>
    static void sum(const Stored* weights, size_t apart, int count, const uint32_t* values, int columns, int column, int num_keys,
                    const SumsBefore* before, const Done& done) {
        for (int first = 0; first < count; first += kSumRows) {
            const Stored* own[kSumRows];
            for (int r = 0; r < kSumRows; ++r) own[r] = row(weights, apart, first + r, count);
            Vec sums[kSumRows][kTiles];
            for (int r = 0; r < kSumRows; ++r)
                for (int t = 0; t < kTiles; ++t)
                    sums[r][t] = before && first + r < count ? before->at(first + r, column + t * kLanes) : zero();
            const uint32_t* from = values + column;
            for (int word = 0; word < num_keys / T::kPerWord; ++word, from += columns) {
                Words v[kTiles];
                for (int t = 0; t < kTiles; ++t) v[t] = load_words(from + t * kLanes);
#pragma GCC unroll 12
                for (int r = 0; r < kSumRows; ++r) {
                    const Words one = broadcast_word(own[r] + word * T::kPerWord);
                    for (int t = 0; t < kTiles; ++t) sums[r][t] = T::dot(sums[r][t], one, v[t]);
                }
            }
            for (int r = 0; r < kSumRows && first + r < count; ++r)
                for (int t = 0; t < kTiles; ++t) done(first + r, column + t * kLanes, sums[r][t]);
        }
    }
};

template <class Products>
struct Attention {
    using T = typename Products::Format;
    using Stored = typename T::Stored;
    static constexpr int kRows = Products::kRows;
    static constexpr int kChunkRows = kMostChunkRows / kRows * kRows;  // queries that go through a chunk of keys together
    static_assert(kRows <= kMostQueryRows, "the scratch memory is laid out for it");

    const SieAttention& shape;
    const int columns;      // width, in whole lanes
    const int words;        // in a row
    uint32_t* keys;         // [tile of 16 keys][word][key]
    uint32_t* values;       // [word of keys][column]
    float* scores;          // [row][key of a chunk]
    Stored* weights;        // [row][key of a chunk]
    float *running, *tops, *totals;  // of long sequences: [row][column], [row], [row]
    Products products{};
    int padded_keys = 0;
    int origin = 0;         // the first key that scores and weights have
    const float* biases = nullptr;  // of the head, for a key at the query's own position

    Attention(const SieAttention& shape, int longest, void* scratch)
        : shape(shape), columns(attention_columns(shape.width)), words(shape.width / T::kPerWord) {
        const size_t room = static_cast<size_t>(attention_keys(longest));
        keys = reinterpret_cast<uint32_t*>((reinterpret_cast<uintptr_t>(scratch) + 63) & ~uintptr_t{63});
        values = keys + room * columns;
        const size_t chunk = room < kChunkKeys ? room : kChunkKeys;
        scores = reinterpret_cast<float*>(values + room * columns);
        running = scores + 2 * kMostQueryRows * (chunk + kChunkPadding);
        tops = running + kMostChunkRows * columns;
        totals = tops + kMostChunkRows;
        weights = reinterpret_cast<Stored*>(scores + kMostQueryRows * (chunk + kChunkPadding));
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
            const int most = shape.window ? 2 * (shape.window + kRows) : seen;
            if (padded_keys <= kChunkKeys || most + 2 * Products::kKeys <= kChunkKeys) {
                for (int first = 0; first < length; first += kRows) block(query, out, first, length, seen);
            } else {
                for (int first = 0; first < length; first += kChunkRows) blocks(query, out, first, length, seen);
            }
        }
    }

    static const Stored* rows(const void* base, int64_t offset) { return static_cast<const Stored*>(base) + offset; }
    static int padded(int count) { return (count + Products::kKeys - 1) / Products::kKeys * Products::kKeys; }

    void pack_keys(const Stored* from, int count) {
        for (int tile = 0; tile < padded_keys; tile += kLanes) {
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

    void put(Stored* out, int column, Vec values) const { T::store(out + column, first_lanes(shape.width - column), values); }

    // Computes attention for a block of queries of a sequence, from the query `first` on.
    void block(const Stored* query, Stored* out, int first, int length, int seen) {
        const int count = length - first < kRows ? length - first : kRows;
        const int begin = lowest(first) / Products::kKeys * Products::kKeys, end = padded(highest(first + count - 1, seen));
        origin = begin;
        score(query, first, count, begin, end);
        float scaling[kRows];
        for (int r = 0; r < count; ++r) {
            float top = kLeast, total = 0;
            softmax(r, first + r, seen, begin, end, top, total);
            scaling[r] = total > 0 ? 1.0f / total : 0.0f;
        }
        sum(count, begin, end, nullptr, [&](int r, int column, Vec sum) {
            put(out + (first + r) * shape.out_token, column, sum * broadcast(scaling[r]));
        });
    }

    // Computes attention for queries first .. first + kChunkRows of a long sequence.
    void blocks(const Stored* query, Stored* out, int first, int length, int seen) {
        const int rows = length - first < kChunkRows ? length - first : kChunkRows;
        for (int i = 0; i < rows * columns; i += kLanes) store(running + i, zero());
        for (int r = 0; r < rows; ++r) tops[r] = kLeast, totals[r] = 0;
        const int last = padded(highest(first + rows - 1, seen));
        for (origin = lowest(first) / Products::kKeys * Products::kKeys; origin < last; origin += kChunkKeys)
            for (int row = 0; row < rows; row += kRows)
                go_on(query, first + row, rows - row < kRows ? rows - row : kRows, row, seen);
        for (int r = 0; r < rows; ++r)
            for (int c = 0; c < shape.width; c += kLanes) {
                const Vec scaling = broadcast(totals[r] > 0 ? 1.0f / totals[r] : 0.0f);
                put(out + (first + r) * shape.out_token, c, load(running + r * columns + c) * scaling);
            }
    }

    // Continues a block of queries over the chunk of keys from origin on; row is the place of its sums.
    void go_on(const Stored* query, int first, int count, int row, int seen) {
        const int from = lowest(first) / Products::kKeys * Products::kKeys, to = padded(highest(first + count - 1, seen));
        const int begin = from > origin ? from : origin, end = to < origin + kChunkKeys ? to : origin + kChunkKeys;
        if (begin >= end) return;
        score(query, first, count, begin, end);
        float factors[kRows];
        for (int r = 0; r < count; ++r)
            factors[r] = softmax(r, first + r, seen, begin, end, tops[row + r], totals[row + r]);
        float* sums = running + static_cast<size_t>(row) * columns;
        const SumsBefore before{sums, static_cast<size_t>(columns), factors};
        sum(count, begin, end, &before, [&](int r, int column, Vec sum) { store(sums + r * columns + column, sum); });
    }

    // The range of keys that the query at a position attends to: from lowest, below highest.
    int lowest(int at) const { return shape.window && at >= shape.window ? at - shape.window + 1 : 0; }
    int highest(int at, int seen) const {
        int end = shape.is_causal ? at + 1 : shape.window ? at + shape.window : seen;
        return end < seen ? end : seen;
    }

    void score(const Stored* query, int first, int count, int begin, int end) {
        products.fit(count);
        products.score(query + first * shape.query_token, shape.query_token, count, keys + static_cast<size_t>(begin) * words, words,
                       end - begin, scores_of(0, begin), apart());
    }

    template <class Done>
    void sum(int count, int begin, int end, const SumsBefore* before, const Done& done) {
        products.sum(weights_of(0, begin), apart(), count, values + static_cast<size_t>(begin / T::kPerWord) * columns, columns,
                     end - begin, before, done);
    }

    float* scores_of(int row, int key) const { return scores + row * apart() + key - origin; }
    Stored* weights_of(int row, int key) const { return weights + row * apart() + key - origin; }
    size_t apart() const { return (padded_keys < kChunkKeys ? padded_keys : kChunkKeys) + kChunkPadding; }

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
            store(from + key, load(from + key) + load(biases + key - at, lanes_at(key)));
        Vec most = broadcast(kLeast);
        for (int key = begin; key < end; key += kLanes)
            most = max_where(lanes_at(key), most, load(from + key));
        const float factor = shape.scale * 1.44269504f, found = largest_of(most) * factor, before = top;
        if (found > top) top = found;
        const Vec scale = broadcast(factor), highest_score = broadcast(top);
        Vec sum = zero();
        const auto weigh = [&](int key) {
            const Vec exponent = fmsub(load(from + key), scale, highest_score);
            const Vec weight = only(lanes_at(key), sizeof(Stored) == 2 ? rough_exp2(exponent) : exp2(exponent));
            sum += weight;
            return weight;
        };
        int key = begin;
        for (; key + 2 * kLanes <= end; key += 2 * kLanes) {
            const Vec first = weigh(key);
            T::store_two(to + key, first, weigh(key + kLanes));
        }
        if (key < end) T::store(to + key, kAllLanes, weigh(key));
        const float so_far = before > kLeast ? __builtin_exp2f(before - top) : 0.0f;
        total = total * so_far + sum_of(sum);
        return so_far;
    }

    static Lanes between(int lowest, int highest) {
        return static_cast<Lanes>(first_lanes(highest) & ~first_lanes(lowest));
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

template <class Products>
void attend(const SieAttention& shape, int longest, void* scratch) {
    const size_t bytes = attention_scratch_bytes(longest, shape.width);
    const int64_t heads = shape.num_key_heads;
    share(shape.num_sequences * heads, shape.num_threads, [&](int64_t piece, int32_t thread) {
        char* own = static_cast<char*>(scratch) + thread * bytes;
        const int sequence = static_cast<int>(piece / heads), head = static_cast<int>(piece % heads);
        if (Products::takes(shape.width)) return Attention<Products>(shape, longest, own).run(sequence, head);
        Attention<DotAttention<typename Products::Format>>(shape, longest, own).run(sequence, head);
    });
}

}  // namespace
