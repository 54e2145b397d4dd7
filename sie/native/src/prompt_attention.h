// Computes attention of a prefill chunk over blocks: for some tokens and all heads of a key head at a time, over a few
// hundred keys at a time, which are packed in the order of the products once for all these queries.
//
// Sums continue from one group of keys to the next (Milakov and Gimelshein, arXiv 1805.02867).
#pragma once
#include "blocks.h"

namespace {

class PromptAttention {
    static constexpr int kSumQueries = kPromptBlock < kSumRows ? kPromptBlock : kSumRows;  // whose sums stay in registers

    const Attending& a_;
    const SieSlot& slot_;
    const int key_head_, words_, columns_;  // words of a key; head_width in whole lanes
    const int64_t first_token_, first_position_;
    const int num_rows_;
    uint32_t *keys_, *values_;  // [tile of 16 keys][word][key]; [word of keys][column]
    float* scores_;             // [row of a block][key]
    Stored* weights_;           // [row of a block][key]
    float* sums_;               // [row][column]
    float *tops_, *totals_;     // [row]

  public:
    // Tokens from the slot's token `first` on.
    PromptAttention(const Attending& attending, const SieSlot& slot, int64_t first, int num_tokens, int key_head, char* room)
        : a_(attending),
          slot_(slot),
          key_head_(key_head),
          words_(attending.decoder.head_width / Number::kPerWord),
          columns_((attending.decoder.head_width + 15) / 16 * 16),
          first_token_(slot.first_token + first),
          first_position_(slot.start + first),
          num_rows_(num_tokens * attending.group()) {
        keys_ = reinterpret_cast<uint32_t*>(room);
        values_ = keys_ + kPromptKeys * columns_;
        scores_ = reinterpret_cast<float*>(values_ + kPromptKeys * columns_);
        weights_ = reinterpret_cast<Stored*>(scores_ + kPromptBlock * kPromptKeys);
        sums_ = reinterpret_cast<float*>(weights_ + kPromptBlock * kPromptKeys);
        tops_ = sums_ + num_rows_ * columns_;
        totals_ = tops_ + num_rows_;
    }

    // The number of tokens in a piece.
    static int tokens_of_piece(int group) { return group < kPromptRows ? kPromptRows / group : 1; }

    void run() {
        for (int i = 0; i < num_rows_ * columns_; i += kLanes) store(sums_ + i, zero());
        for (int r = 0; r < num_rows_; ++r) tops_[r] = -3e38f, totals_[r] = 0;
        const int64_t end = position_of(num_rows_ - 1) + 1;
        for (int64_t begin = a_.lowest(first_position_); begin < end; begin += kPromptKeys) {
            const int count = static_cast<int>(end - begin < kPromptKeys ? end - begin : kPromptKeys);
            pack(begin, count);
            for (int row = 0; row < num_rows_; row += kPromptBlock) block(row, begin, count);
        }
        for (int r = 0; r < num_rows_; ++r)
            for (int c = 0; c < a_.decoder.head_width; c += kLanes) {
                const Vec sum = load(sums_ + r * columns_ + c) * broadcast(1.0f / totals_[r]);
                a_.put(token_of(r), head_of(r), c, sum);
            }
    }

  private:
    int64_t token_of(int row) const { return first_token_ + row / a_.group(); }
    int64_t position_of(int row) const { return first_position_ + row / a_.group(); }
    int head_of(int row) const { return key_head_ * a_.group() + row % a_.group(); }

    void pack(int64_t begin, int count) {
        for (int tile = 0; tile < count; tile += kLanes) {
            const Stored* rows[kLanes];
            for (int i = 0; i < kLanes; ++i)
                rows[i] = tile + i < count ? a_.key_of(slot_, begin + tile + i, key_head_) : nullptr;
            for (int word = 0; word < words_; word += kLanes) {
                const int num_words = words_ - word < kLanes ? words_ - word : kLanes;
                Words square[kLanes];
                for (int i = 0; i < kLanes; ++i)
                    square[i] = rows[i] ? load_words(rows[i] + word * Number::kPerWord, first_lanes(num_words))
                                        : zero_words();
                transpose(square);
                uint32_t* to = keys_ + tile * words_ + word * kLanes;
                for (int i = 0; i < num_words; ++i) store_words(to + i * kLanes, square[i]);
            }
        }
        uint32_t* to = values_;
        for (int key = 0; key < whole(count); key += Number::kPerWord, to += columns_) {
            const Stored* row = key < count ? a_.value_of(slot_, begin + key, key_head_) : nullptr;
            const Stored* next = key + 1 < count ? a_.value_of(slot_, begin + key + 1, key_head_) : nullptr;
            for (int c = 0; c < columns_; c += kLanes) {
                const Lanes lanes = first_lanes(a_.decoder.head_width - c);
                const Stored* below = next ? next + c : nullptr;
                store_words(to + c, row ? Number::words(row + c, below, lanes) : zero_words());
            }
        }
    }

    static int whole(int count) { return (count + kLanes - 1) / kLanes * kLanes; }

    // Continues the sums of a block of queries, from row `row` on, over the packed keys.
    void block(int row, int64_t begin, int count) {
        const int rows = num_rows_ - row < kPromptBlock ? num_rows_ - row : kPromptBlock;
        const int64_t seen = position_of(row + rows - 1) + 1 - begin;
        if (seen <= 0) return;
        if (seen < count) count = static_cast<int>(seen);
        const int end = whole(count);
        // The last row repeats in the places after it, so that every block has the same shape.
        const Stored* queries[kPromptBlock];
        for (int r = 0; r < kPromptBlock; ++r) {
            const int own = row + (r < rows ? r : rows - 1);
            queries[r] = a_.query_of(token_of(own), head_of(own));
        }
        int tile = 0;
        for (; tile + kSumColumns <= end; tile += kSumColumns) score<kSumColumns / kLanes>(queries, rows, tile);
        if (tile < end) score<1>(queries, rows, tile);
        float factors[kPromptBlock];
        for (int r = 0; r < rows; ++r) factors[r] = weigh(row, r, begin, count);
        int column = 0;
        for (; column + kSumColumns <= columns_; column += kSumColumns)
            sum<kSumColumns / kLanes>(row, rows, column, end, factors);
        if (column < columns_) sum<1>(row, rows, column, end, factors);
    }

    template <int kTiles>
    void score(const Stored* const (&queries)[kPromptBlock], int rows, int tile) {
        for (int row = 0; row < rows; row += kSumQueries) {
            Vec sums[kSumQueries][kTiles];
            for (auto& each : sums)
                for (Vec& sum : each) sum = zero();
            const uint32_t* from = keys_ + tile * words_;
            for (int word = 0; word < words_; ++word) {
                Words keys[kTiles];
                for (int t = 0; t < kTiles; ++t) keys[t] = load_words(from + (t * words_ + word) * kLanes);
#pragma GCC unroll 12
                for (int r = 0; r < kSumQueries; ++r) {
                    const Words one = broadcast_word(queries[row + r] + word * Number::kPerWord);
                    for (int t = 0; t < kTiles; ++t) sums[r][t] = Number::dot(sums[r][t], one, keys[t]);
                }
            }
            for (int r = 0; r < kSumQueries && row + r < rows; ++r)
                for (int t = 0; t < kTiles; ++t)
                    store(scores_ + (row + r) * kPromptKeys + tile + t * kLanes, a_.scaled(sums[r][t]));
        }
    }

    // Writes the weights of a block's row r; returns the factor for its previous sums.
    float weigh(int first, int r, int64_t begin, int count) {
        const int row = first + r;
        const float* scores = scores_ + r * kPromptKeys;
        Stored* weights = weights_ + r * kPromptKeys;
        const int64_t position = position_of(row), low = a_.lowest(position) - begin, high = position + 1 - begin;
        const int from = low < 0 ? 0 : static_cast<int>(low < count ? low : count);
        const int to = high < count ? static_cast<int>(high) : count;
        const auto lanes_at = [=](int key) { return static_cast<Lanes>(first_lanes(to - key) & ~first_lanes(from - key)); };
        Vec most = broadcast(tops_[row]);
        for (int key = 0; key < count; key += kLanes)
            most = max_where(lanes_at(key), most, load(scores + key));
        const float top = largest_of(most);
        Vec total = zero();
        for (int key = 0; key < count; key += kLanes) {
            const Vec exponent = load(scores + key) - broadcast(top);
            const Vec power = sizeof(Stored) == 2 ? rough_exp2(exponent) : exp2(exponent);
            const Vec weight = only(lanes_at(key), power);
            total += weight;
            Number::store(weights + key, kAllLanes, weight);
        }
        const float factor = __builtin_exp2f(tops_[row] - top);
        totals_[row] = totals_[row] * factor + sum_of(total);
        tops_[row] = top;
        return factor;
    }

    template <int kTiles>
    void sum(int first, int rows, int column, int end, const float (&factors)[kPromptBlock]) {
        for (int row = 0; row < rows; row += kSumQueries) {
            Vec sums[kSumQueries][kTiles];
            const Stored* weights[kSumQueries];
            for (int r = 0; r < kSumQueries; ++r) {
                const int own = row + r < rows ? row + r : rows - 1;
                weights[r] = weights_ + own * kPromptKeys;
                const float* so_far = sums_ + (first + own) * columns_ + column;
                for (int t = 0; t < kTiles; ++t) sums[r][t] = load(so_far + t * kLanes) * broadcast(factors[own]);
            }
            const uint32_t* from = values_ + column;
            for (int word = 0; word < end / Number::kPerWord; ++word, from += columns_) {
                Words values[kTiles];
                for (int t = 0; t < kTiles; ++t) values[t] = load_words(from + t * kLanes);
#pragma GCC unroll 12
                for (int r = 0; r < kSumQueries; ++r) {
                    const Words one = broadcast_word(weights[r] + word * Number::kPerWord);
                    for (int t = 0; t < kTiles; ++t) sums[r][t] = Number::dot(sums[r][t], one, values[t]);
                }
            }
            for (int r = 0; r < kSumQueries && row + r < rows; ++r)
                for (int t = 0; t < kTiles; ++t)
                    store(sums_ + (first + row + r) * columns_ + column + t * kLanes, sums[r][t]);
        }
    }
};

}  // namespace
