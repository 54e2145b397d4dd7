// Finds the pairs of a head's tiles that may hold a likeliest token, by a copy of the head in eight bits.
//
// A row x is divided: the inputs that are large in a sample are multiplied with the head's own weights; the others, r, with the
// rounded head v, after rounding to y. The product with an output w is then off by at most |r| |w - v| + |r - y| |v| (Cauchy
// and Schwarz), beside what float32 rounds. So a pair of tiles whose largest product, plus its bound, is below another token's
// product, less its own, cannot hold the likeliest token. Only the other pairs are multiplied as without this copy. The head
// is read in half of the time, and multiplied with half of the instructions.
#pragma once
#ifdef __AVX512BF16__
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "decoder.h"
#include "pairs.h"
#include "products_int8.h"

namespace {

#ifdef __AMX_BF16__
using ByteProducts = AmxProductsOf<AmxInt8>;
#else
using ByteProducts = DotProducts<ByteNumbers>;
#endif

class Screen {
    static constexpr float kLowest = -std::numeric_limits<float>::infinity();

    struct Row {
        float length, rest, off;  // |x|, |r|, |r - y|
    };

    const SieDecoder& decoder_;
    const SieDecoderStep& step_;
    const Rows rows_;
    const SieDense dense_;
    Row of_row_[kScreenRows];
    float* floats_;  // [row][input]: r
    const ByteRows<F32> bytes_;
    float* uppers_;  // [pair][row]: the largest product that is possible
    int32_t* found_;
    char* const lowers_;  // of thread 0, [row]: the largest product that is certain
    const int64_t apart_;
    Number::Stored kept_[kScreenRows][2 * kScreenKept];  // of x

  public:
    // rows: the head's input; room: screen_bytes; lowers: of thread 0, for each row; those of others are `apart` bytes further.
    Screen(const SieDecoder& decoder, const SieDecoderStep& step, const Rows& rows, char* room, char* lowers, int64_t apart)
        : decoder_(decoder),
          step_(step),
          rows_(rows),
          dense_{nullptr, nullptr, decoder.screen.scales, decoder.screen.sums, decoder.head.inputs, decoder.head.outputs},
          floats_(reinterpret_cast<float*>(room)),
          bytes_(dense_, split(), floats_apart(), step.num_kept, room + 4 * step.num_kept * floats_apart()),
          uppers_(reinterpret_cast<float*>(bytes_.bytes + step.num_kept * bytes_.stride)),
          found_(reinterpret_cast<int32_t*>(uppers_ + step.num_kept * pairs())),
          lowers_(lowers),
          apart_(apart) {
        for (int row = 0; row < step.num_kept; ++row) of_row_[row].off = off(row);
        for (int thread = 0; thread < step.num_threads; ++thread)
            for (int row = 0; row < step.num_kept; ++row) lowers_of(thread)[row] = kLowest;
    }

    // Returns the pairs that may hold a likeliest token, ascending.
    Chosen find() const {
        share_pairs(pairs(), step_.num_kept, step_.num_threads, [&](int64_t pair, int32_t thread) { see_pair(pair, thread); });
        float least[kScreenRows];
        for (int row = 0; row < step_.num_kept; ++row) {
            const Row& own = of_row_[row];
            least[row] = kLowest;
            if (!std::isfinite(own.length) || !std::isfinite(own.off)) continue;
            for (int thread = 0; thread < step_.num_threads; ++thread) least[row] = std::max(least[row], lowers_of(thread)[row]);
        }
        int64_t count = 0;
        for (int64_t pair = 0; pair < pairs(); ++pair) {
            bool is_kept = false;
            for (int row = 0; row < step_.num_kept; ++row) is_kept |= !(uppers_[pair * step_.num_kept + row] < least[row]);
            if (is_kept) found_[count++] = static_cast<int32_t>(pair);
        }
        return {found_, count};
    }

  private:
    int64_t pairs() const { return pairs_of(decoder_.head.outputs); }
    size_t floats_apart() const { return padded_inputs(decoder_.head.inputs); }
    int quads() const { return padded_inputs(decoder_.head.inputs) / 4; }
    int words() const { return quads() + kScreenKept; }
    const uint32_t* tile(int64_t number) const { return decoder_.screen.tiles + number * words() * kLanes; }
    float* lowers_of(int thread) const { return reinterpret_cast<float*>(lowers_ + thread * apart_); }

    // Fills in the rows, and returns what is rounded of them.
    const float* split() {
        for (int row = 0; row < step_.num_kept; ++row) split(row);
        return floats_;
    }

    void split(int row) {
        const int inputs = decoder_.head.inputs;
        float* rest = floats_ + row * floats_apart();
        Row& own = of_row_[row];
        Vec squares = zero(), of_rest = zero();
        for (int k = 0; k < inputs; k += kLanes) {
            const Lanes lanes = first_lanes(inputs - k);
            const Vec x = Number::load(rows_.numbers(row) + k, lanes), r = x * load(decoder_.screen.input_scales + k, lanes);
            squares = fmadd(x, x, squares);
            of_rest = fmadd(r, r, of_rest);
            store(rest + k, r);
        }
        own.length = std::sqrt(sum_of(squares));
        own.rest = std::sqrt(sum_of(of_rest));
        for (int i = 0; i < kScreenKept; ++i)
            std::memcpy(kept_[row] + 2 * i, rows_.halves(row) + 2 * decoder_.screen.kept[i], sizeof(uint32_t));
    }

    // Returns how far a row's bytes are from what they stand for.
    float off(int row) const {
        const float *from = floats_ + row * floats_apart(), step = bytes_.steps[row], low = bytes_.lows[row];
        float squares = 0;
        for (int k = 0; k < decoder_.head.inputs; ++k) {
            const float far = from[k] - (low + step * bytes_.at(row)[k]);
            squares += far * far;
        }
        return 1.001f * std::sqrt(squares);
    }

    void see_pair(int64_t pair, int32_t thread) const {
        constexpr int kMost = ByteProducts::kMaxRows;
        alignas(64) float sums[kMost * kPanel], kept[kMost * kPanel];
        const int num_rows = step_.num_kept, blocks = (num_rows + kMost - 1) / kMost;
        const uint32_t *left = tile(2 * pair), *right = tile(2 * pair + 1);
        const int apart = quads() * kLanes;  // of a tile's numbers and its kept inputs
        for (int block = 0; block < blocks; ++block) {
            const int row = num_rows * block / blocks, count = num_rows * (block + 1) / blocks - row;
            const Ahead ahead{ahead_of(2 * pair + 2, block, blocks), ahead_of(2 * pair + 3, block, blocks),
                              64 * words() / (quads() * blocks)};
            ByteProducts::run_halves<kLanes>(count, bytes_.at(row), bytes_.stride, left, right, quads(), sums, ahead);
            RowProducts::run_halves<kLanes>(count, kept_[row], 2 * kScreenKept, left + apart, right + apart, kScreenKept, kept,
                                            ahead);
            scale_tile(dense_, static_cast<int>(pair) * kPairOutputs, bytes_, row, count, sums);
            for (int r = 0; r < count; ++r)
                see(thread, row + r, pair, load(sums + r * kPanel) + load(kept + r * kPanel),
                    load(sums + r * kPanel + kLanes) + load(kept + r * kPanel + kLanes));
        }
    }

    // Returns the share of one block of rows in reading a tile. Behind the last one this reads nothing of use.
    const char* ahead_of(int64_t number, int block, int blocks) const {
        return reinterpret_cast<const char*>(tile(number)) + static_cast<int64_t>(words()) * 64 * block / blocks;
    }

    // Takes the products of a row and a pair.
    void see(int32_t thread, int row, int64_t pair, Vec left, Vec right) const {
        const Row& of = of_row_[row];
        const int64_t first = pair * kPairOutputs;
        const Lanes in_left = seen(row, first), in_right = seen(row, first + kTileOutputs);
        float upper = kLowest;
        if ((not_numbers(left) & in_left) | (not_numbers(right) & in_right)) {
            upper = -kLowest;
        } else if (in_left | in_right) {
            const float most = largest_of(max_where(in_right, max_where(in_left, broadcast(kLowest), left), right));
            // What float32 rounds in sums of so many values, here and in the exact product.
            const float rounding = 1.2e-7f * static_cast<float>(decoder_.head.inputs) * of.length;
            const SieScreen& screen = decoder_.screen;
            const float bound = screen.errors[pair] * of.rest + screen.lengths[pair] * of.off + screen.head_lengths[pair] * rounding;
            upper = most + bound;
            float& own = lowers_of(thread)[row];
            if (most - bound > own) own = most - bound;
        }
        uppers_[pair * step_.num_kept + row] = upper;
    }

    // Returns the lanes of 16 outputs that exist and may be chosen.
    Lanes seen(int row, int64_t first) const {
        const int begin = row ? step_.hidden_ends[row - 1] : 0;
        const Lanes lanes = first_lanes(static_cast<int>(decoder_.head.outputs - first));
        return allowed_lanes(lanes, first, step_.hidden + begin, step_.hidden_ends[row] - begin);
    }
};

}  // namespace
#endif
