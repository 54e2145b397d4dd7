// Computes attention of a prefill chunk over blocks: for some tokens and all heads of a key head at a time, over a few
// hundred keys at a time, which are packed in the order of the products once for all these queries.
//
// Sums continue from one group of keys to the next (Milakov and Gimelshein, arXiv 1805.02867).
#pragma once
#include "blocks.h"
#include "many_rows.h"

namespace {

class PromptAttention {
    using Tiles = RowProducts::Tiles;

    static constexpr int kBlock = RowProducts::kMaxRows;  // queries that are multiplied together
    static constexpr int kKeysAtOnce = Tiles::kWords * Number::kPerWord < kPanel ? kPanel : Tiles::kWords * Number::kPerWord;
    static constexpr int kWeightsApart = kPromptKeys + kPromptPadding;
    static_assert(kBlock <= kMostPromptBlock && kPromptKeys % kKeysAtOnce == 0, "the scratch memory is laid out for it");

    const Attending& a_;
    const SieSlot& slot_;
    const int key_head_, columns_;  // columns_: head_width in whole lanes
    const int words_;               // of a key, in whole tiles
    const int apart_;               // values from one query to the next
    const int64_t first_token_, first_position_;
    const int num_rows_;
    const Tiles tiles_;
    uint32_t *keys_, *values_;  // [tile of 16 keys][word][key]; [tile of 16 columns][word of keys][column]
    Stored *queries_, *weights_;  // [row][value]; [row of a block][key]
    float* scores_;             // [panel of 32 keys][row of a block][key]
    float* sums_;               // [row][column]
    float *tops_, *totals_;     // [row]

  public:
    // Tokens from the slot's token `first` on.
    PromptAttention(const Attending& attending, const SieSlot& slot, int64_t first, int num_tokens, int key_head, char* room)
        : a_(attending),
          slot_(slot),
          key_head_(key_head),
          columns_(prompt_columns(attending.decoder.head_width)),
          words_(whole_words(attending.decoder.head_width)),
          apart_(columns_ + kPromptPadding),
          first_token_(slot.first_token + first),
          first_position_(slot.start + first),
          num_rows_(num_tokens * attending.group()),
          tiles_(kBlock) {
        keys_ = reinterpret_cast<uint32_t*>(room);
        values_ = keys_ + kPromptKeys * columns_;
        queries_ = reinterpret_cast<Stored*>(values_ + kPromptKeys * columns_);
        weights_ = queries_ + (num_rows_ + kMostPromptBlock) * apart_;
        scores_ = reinterpret_cast<float*>(weights_ + kMostPromptBlock * kWeightsApart);
        sums_ = scores_ + kMostPromptBlock * kPromptKeys;
        tops_ = sums_ + num_rows_ * columns_;
        totals_ = tops_ + num_rows_;
    }

    // The number of tokens in a piece.
    static int tokens_of_piece(int group) { return group < kPromptRows ? kPromptRows / group : 1; }

    void run() {
        for (int i = 0; i < num_rows_ * columns_; i += kLanes) store(sums_ + i, zero());
        for (int r = 0; r < num_rows_; ++r) {
            tops_[r] = kLeast, totals_[r] = 0;
            copy_padded(queries_ + r * apart_, a_.query_of(token_of(r), head_of(r)));
        }
        const int64_t end = position_of(num_rows_ - 1) + 1;
        for (int64_t begin = a_.lowest(first_position_); begin < end; begin += kPromptKeys) {
            const int count = static_cast<int>(end - begin < kPromptKeys ? end - begin : kPromptKeys);
            pack(begin, count);
            for (int row = 0; row < num_rows_; row += kBlock) block(row, begin, count);
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

    static int whole(int count, int part) { return (count + part - 1) / part * part; }
    static int whole_words(int values) { return whole((values + Number::kPerWord - 1) / Number::kPerWord, Tiles::kWords); }

    // Copies the values of a head; those behind them, up to whole words, become zero.
    void copy_padded(Stored* to, const Stored* from) const {
        const int words = a_.decoder.head_width / Number::kPerWord;
        for (int word = 0; word < words_; word += kLanes)
            store_words(to + word * Number::kPerWord, first_lanes(words_ - word),
                        load_words(from + word * Number::kPerWord, first_lanes(words - word)));
    }

    void pack(int64_t begin, int count) {
        const int words = a_.decoder.head_width / Number::kPerWord, end = whole(count, kKeysAtOnce);
        for (int tile = 0; tile < end; tile += kLanes) {
            const Stored* rows[kLanes];
            for (int i = 0; i < kLanes; ++i)
                rows[i] = tile + i < count ? a_.key_of(slot_, begin + tile + i, key_head_) : nullptr;
            for (int word = 0; word < words_; word += kLanes) {
                const int num_words = words_ - word < kLanes ? words_ - word : kLanes;
                Words square[kLanes];
                for (int i = 0; i < kLanes; ++i)
                    square[i] = rows[i] ? load_words(rows[i] + word * Number::kPerWord, first_lanes(words - word))
                                        : zero_words();
                transpose(square);
                uint32_t* to = keys_ + tile * words_ + word * kLanes;
                for (int i = 0; i < num_words; ++i) store_words(to + i * kLanes, square[i]);
            }
        }
        for (int key = 0, word = 0; key < end; key += Number::kPerWord, ++word) {
            const Stored* row = key < count ? a_.value_of(slot_, begin + key, key_head_) : nullptr;
            const Stored* next = key + 1 < count ? a_.value_of(slot_, begin + key + 1, key_head_) : nullptr;
            for (int c = 0; c < columns_; c += kLanes) {
                const Lanes lanes = first_lanes(a_.decoder.head_width - c);
                const Stored* below = next ? next + c : nullptr;
                store_words(values_of(c) + word * kLanes, row ? Number::words(row + c, below, lanes) : zero_words());
            }
        }
    }

    uint32_t* values_of(int column) const { return values_ + column * (kPromptKeys / Number::kPerWord); }
    float* scores_of(int row, int key) const { return scores_ + (key / kPanel * kBlock + row) * kPanel + key % kPanel; }

    // Continues the sums of a block of queries, from row `row` on, over the packed keys.
    void block(int row, int64_t begin, int count) {
        const int rows = num_rows_ - row < kBlock ? num_rows_ - row : kBlock;
        const int64_t seen = position_of(row + rows - 1) + 1 - begin;
        if (seen <= 0) return;
        if (seen < count) count = static_cast<int>(seen);
        const int end = whole(count, kKeysAtOnce);
        for (int key = 0; key < end; key += kPanel) {
            const uint32_t* tile = keys_ + key * words_;
            RowProducts::run_halves<kLanes>(rows, queries_ + row * apart_, apart_, tile, tile + kLanes * words_, words_,
                                            scores_of(0, key));
        }
        float factors[kBlock];
        for (int r = 0; r < rows; ++r) factors[r] = weigh(row, r, begin, count, end);
        for (int column = 0; column < columns_; column += kPanel) {
            const bool is_pair = column + kLanes < columns_;
            alignas(64) float found[kBlock * kPanel];
            RowProducts::run_halves<kLanes>(rows, weights_, kWeightsApart, values_of(column),
                                            values_of(is_pair ? column + kLanes : column), end / Number::kPerWord, found);
            for (int r = 0; r < rows; ++r)
                for (int c = 0; c < (is_pair ? kPanel : kLanes); c += kLanes) {
                    float* to = sums_ + (row + r) * columns_ + column + c;
                    store(to, fmadd(load(to), broadcast(factors[r]), load(found + r * kPanel + c)));
                }
        }
    }

    // Writes the weights of a block's row r, zero behind its keys; returns the factor for its previous sums.
    float weigh(int first, int r, int64_t begin, int count, int end) {
        const int row = first + r;
        Stored* weights = weights_ + r * kWeightsApart;
        const int64_t position = position_of(row), low = a_.lowest(position) - begin, high = position + 1 - begin;
        const int from = low < 0 ? 0 : static_cast<int>(low < count ? low : count);
        const int to = high < count ? static_cast<int>(high) : count;
        const auto lanes_at = [=](int key) { return static_cast<Lanes>(first_lanes(to - key) & ~first_lanes(from - key)); };
        if (a_.layer.cap > 0)
            for (int key = 0; key < end; key += kLanes) store(scores_of(r, key), a_.scaled(load(scores_of(r, key))));
        const float scale = a_.layer.cap > 0 ? 1.0f : a_.scale();
        Vec most = broadcast(kLeast);
        for (int key = 0; key < end; key += kLanes) most = max_where(lanes_at(key), most, load(scores_of(r, key)));
        const float found = largest_of(most) * scale, top = found > tops_[row] ? found : tops_[row];
        Vec total = zero();
        for (int key = 0; key < end; key += kLanes) {
            const Vec exponent = fmsub(load(scores_of(r, key)), broadcast(scale), broadcast(top));
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
};

}  // namespace
