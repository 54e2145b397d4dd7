// Multiplies rows with a packed matrix. Threads share the work in pairs of tiles; the caller says what happens to the sums.
#pragma once
#include "few_rows.h"
#include "many_rows.h"
#include "share.h"

namespace {

// A pair is two consecutive tiles; in a gated layer, a tile of the first half and the matching tile of the second.
struct Product {
    const SieMatrix& matrix;
    Rows rows;  // in the form of form_of
    int64_t num_rows;
    bool is_gated;
    int32_t num_threads;
    char* unpacked;   // of thread 0, unpacked_bytes; not used for few rows
    int64_t apart;    // bytes from one thread's memory to the next thread's

    int64_t tiles() const { return (matrix.outputs + kTileOutputs - 1) / kTileOutputs; }
    int64_t pairs() const { return pairs_of(matrix.outputs); }
    int64_t left(int64_t pair) const { return is_gated ? pair : 2 * pair; }
    int64_t right(int64_t pair) const { return is_gated ? pair + pairs() : 2 * pair + 1; }
    int64_t words() const { return rows.groups() * kGroupInputs / Number::kPerWord; }  // of an output in tiles of two
    int64_t tile_bytes() const { return rows.groups() * group_bytes(matrix.format); }
    const uint8_t* tile(int64_t number) const {
        return static_cast<const uint8_t*>(matrix.weights) + number * tile_bytes();
    }
    // Returns the share of one block of rows in reading the next pair. Behind the last pair this reads nothing of use.
    Ahead ahead(int64_t pair, int64_t block, int64_t blocks) const {
        const int64_t skipped = tile_bytes() * block / blocks;
        const auto of = [&](int64_t number) { return reinterpret_cast<const char*>(tile(number)) + skipped; };
        return {of(left(pair + 1)), of(right(pair + 1)), tile_bytes() / (words() * blocks)};
    }
    // Returns the sums of a tile's outputs from a kernel's result.
    Vec finished(const float* sums, int64_t number) const {
        const int64_t first = number * kTileOutputs;
        const Vec sum = load(sums);
        if (!matrix.bias) return sum;
        const Lanes lanes = first_lanes(static_cast<int>(matrix.outputs - first));
        return sum + load(matrix.bias + first, lanes);
    }
};

// Rows are divided into blocks of nearly the same height; returns the greatest.
inline int64_t highest_block(int64_t num_rows) {
    const int64_t blocks = (num_rows + kMostAtOnce - 1) / kMostAtOnce;
    return blocks ? (num_rows + blocks - 1) / blocks : 1;
}

// Calls with(first, count, sums) for all rows and one pair.
template <class With>
void multiply_pair(const Product& product, int64_t pair, int32_t thread, const With& with) {
    alignas(64) float sums[(kMostAtOnce > kFewAtOnce ? kMostAtOnce : kFewAtOnce) * kPairOutputs];
    const int64_t num_rows = product.num_rows, left = product.left(pair), right = product.right(pair);
    const bool has_right = right < product.tiles();
    if (product.rows.form != Form::kFixed && num_rows > kMostDirect) {
        uint32_t* room = reinterpret_cast<uint32_t*>(product.unpacked + thread * product.apart);
        const int words = static_cast<int>(product.words());
        const uint32_t* first = number_tile(product.matrix, product.tile(left), room);
        const uint32_t* second = has_right ? number_tile(product.matrix, product.tile(right), room + words * kLanes) : first;
        const int64_t blocks = (num_rows + kMostAtOnce - 1) / kMostAtOnce;
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t row = num_rows * block / blocks;
            const int count = static_cast<int>(num_rows * (block + 1) / blocks - row);
            RowProducts::run_halves<kLanes>(count, product.rows.numbers(row), product.rows.stride(), first, second, words, sums,
                                            product.ahead(pair, block, blocks));
            with(row, count, sums);
        }
        return;
    }
    const int64_t blocks = (num_rows + kFewAtOnce - 1) / kFewAtOnce, height = (num_rows + blocks - 1) / blocks;
    for (int64_t row = 0; row < num_rows; row += height) {
        const int count = static_cast<int>(num_rows - row < height ? num_rows - row : height);
        const FewKernel kernel = few_kernel(product.matrix.format, count);
        kernel(product.matrix, product.tile(left), product.rows, row, sums);
        if (has_right) kernel(product.matrix, product.tile(right), product.rows, row, sums + kTileOutputs);
        with(row, count, sums);
    }
}

// Some of a product's pairs, ascending.
struct Chosen {
    const int32_t* pairs;
    int64_t count;
};

// Calls run(i, thread) for every i below count, several at a time; each thread comes to them in ascending order, and is
// prepared for products of num_rows rows.
template <class F>
void share_pairs(int64_t count, int64_t num_rows, int32_t num_threads, const F& run) {
    constexpr int64_t kPiecesPerThread = 8;
    const int64_t wanted = num_threads * kPiecesPerThread;
    const int64_t each = count > wanted ? (count < 64 * wanted ? count / wanted : 64) : 1;
    share((count + each - 1) / each, num_threads, [&](int64_t piece, int32_t thread) {
        const int64_t end = (piece + 1) * each < count ? (piece + 1) * each : count;
        [[maybe_unused]] const RowProducts::Tiles tiles(highest_block(num_rows));
        for (int64_t i = piece * each; i < end; ++i) run(i, thread);
    });
}

// Calls done(row, pair, left, right, thread) for the finished sums of all rows and one pair.
template <class Done>
void finish_pair(const Product& product, int64_t pair, int32_t thread, const Done& done) {
    multiply_pair(product, pair, thread, [&](int64_t first, int count, const float* sums) {
        for (int r = 0; r < count; ++r) {
            const float* own = sums + r * kPairOutputs;
            const Vec left = product.finished(own, product.left(pair));
            done(first + r, pair, left, product.finished(own + kTileOutputs, product.right(pair)), thread);
        }
    });
}

// Calls done for the finished sums of every row and pair; each thread comes to the pairs in ascending order. After the last
// tile, right has no meaning.
template <class Done>
void multiply_pairs(const Product& product, const Done& done) {
    share_pairs(product.pairs(), product.num_rows, product.num_threads,
                [&](int64_t pair, int32_t thread) { finish_pair(product, pair, thread, done); });
}

// The same for some pairs.
template <class Done>
void multiply_chosen(const Product& product, const Chosen& chosen, const Done& done) {
    share_pairs(chosen.count, product.num_rows, product.num_threads,
                [&](int64_t i, int32_t thread) { finish_pair(product, chosen.pairs[i], thread, done); });
}

}  // namespace
