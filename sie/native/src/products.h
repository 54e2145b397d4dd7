// Matrix products of packed weights with rows, a tile of rows and 32 columns at a time.
#pragma once
#include <array>
#include <utility>

#include "attention_kernel.h"
#include "encoder.h"
#include "lanes.h"
#include "share.h"

namespace {

// Rows in their stored form, `stride` values apart, for products that need no conversion.
template <class Stored>
struct StoredRows {
    const Stored* rows;
    size_t stride;

    StoredRows(const SieDense&, const Stored* rows, size_t stride, int, char*) : rows(rows), stride(stride) {}
    const Stored* at(int row) const { return rows + row * stride; }
};

// Memory to bring into the level 2 cache while a tile is computed: two streams, each `step` bytes further with every word.
// A core that multiplies and a memory that is read must not wait for each other.
struct Ahead {
    const char *first = nullptr, *second = nullptr;
    int64_t step = 0;
};

// What a thread prepares before it computes tiles of at most so many rows: nothing, unless a product needs it.
struct NoTiles {
    static constexpr int kWords = 1;  // the number of words in a row must be a multiple of it

    explicit NoTiles(int64_t) {}
};

// Computes one tile by dot products. The sums of kRows rows and a panel, or half of one, stay in registers.
template <class T>
struct DotProducts {
    using Format = T;
    using Stored = typename T::Stored;
    using Input = StoredRows<Stored>;
    using Tiles = NoTiles;
    using OfAttention = DotAttention<T>;
    static constexpr int kMaxRows = kSumRows;
    static constexpr int kVectors = kSumColumns / kLanes;

    // In each half of a panel, every column has a word every kStep words.
    template <int kRows, int kStep>
    static __attribute__((noinline)) void tile(const Stored* rows, size_t stride, const uint32_t* first,
                                               const uint32_t* second, int words, float* to, Ahead ahead) {
        if constexpr (kVectors == 2) {
            sum<kRows, kStep>(rows, stride, {first, second}, words, to, {ahead.first, ahead.second}, ahead.step);
        } else {
            sum<kRows, kStep>(rows, stride, {first}, words, to, {ahead.first}, ahead.step);
            sum<kRows, kStep>(rows, stride, {second}, words, to + kLanes, {ahead.second}, ahead.step);
        }
    }

    using Columns = std::array<const uint32_t*, kVectors>;
    using Lines = std::array<const char*, kVectors>;

    template <int kRows, int kStep>
    static inline __attribute__((always_inline)) void sum(const Stored* rows, size_t stride, Columns columns, int words,
                                                          float* to, [[maybe_unused]] Lines ahead, [[maybe_unused]] int64_t step) {
        Vec sums[kRows][kVectors];
#pragma GCC unroll 14
        for (auto& row : sums)
            for (Vec& sum : row) sum = zero();
        const Stored* half = rows + kRows / 2 * stride;
        for (int word = 0; word < words; ++word, rows += T::kPerWord, half += T::kPerWord) {
            Words weights[kVectors];
            for (int v = 0; v < kVectors; ++v) {
                weights[v] = load_words(columns[v]);
                _mm_prefetch(reinterpret_cast<const char*>(columns[v] + 16 * kStep), _MM_HINT_T0);
                columns[v] += kStep;
            }
            if constexpr (kStep != kPanel) {  // panels stay in the cache for many tiles; other weights come from memory
                for (const char*& line : ahead) _mm_prefetch(line, _MM_HINT_T1), line += step;
            }
#pragma GCC unroll 14
            for (int r = 0; r < kRows; ++r) {
                const Stored* at = r < kRows / 2 ? rows + r * stride : half + (r - kRows / 2) * stride;
                const Words one = broadcast_word(at);
                for (int v = 0; v < kVectors; ++v) sums[r][v] = T::dot(sums[r][v], one, weights[v]);
            }
        }
#pragma GCC unroll 14
        for (int r = 0; r < kRows; ++r)
            for (int v = 0; v < kVectors; ++v) store(to + r * kPanel + v * kLanes, sums[r][v]);
    }

    static int words(const SieDense& linear) { return linear.inputs / T::kPerWord; }

    static void run(int count, const Input& rows, int first, const SieDense& linear, int, const uint32_t* panel, float* to, Ahead) {
        run_halves<kPanel>(count, rows.at(first), rows.stride, panel, panel + kLanes, words(linear), to);
    }

    template <int kStep>
    static void run_halves(int count, const Stored* rows, size_t stride, const uint32_t* first, const uint32_t* second,
                           int words, float* to, const Ahead& ahead = {}) {
        static constexpr auto kTiles = tiles<kStep>(std::make_integer_sequence<int, kMaxRows>{});
        kTiles[count - 1](rows, stride, first, second, words, to, ahead);
    }

  private:
    using Tile = void (*)(const Stored*, size_t, const uint32_t*, const uint32_t*, int, float*, Ahead);

    template <int kStep, int... kFewer>
    static constexpr std::array<Tile, kMaxRows> tiles(std::integer_sequence<int, kFewer...>) {
        return {tile<kFewer + 1, kStep>...};
    }
};

// Runs a linear layer without its bias over num_rows rows, from.apart values apart; done(first, rows, column, tile) gets
// each finished tile, [rows][32] float. All tiles have the same height, and the last overlaps the one before it, so done may
// see a row twice. room is memory for converted rows, if the product needs another form. Threads share out the columns.
template <class Products, class Lines, class Done>
void multiply(const SieDense& linear, const Lines& from, int num_rows, char* room, int32_t num_threads, Done done) {
    constexpr int64_t kPiecesPerThread = 4;
    const typename Products::Input rows(linear, from.first, from.apart, num_rows, room);
    const size_t panel_words = static_cast<size_t>(Products::words(linear)) * kPanel;
    const int num_tiles = (num_rows + Products::kMaxRows - 1) / Products::kMaxRows;
    const int height = (num_rows + num_tiles - 1) / num_tiles;
    const int64_t panels = (linear.outputs + kPanel - 1) / kPanel, wanted = num_threads > 1 ? kPiecesPerThread * num_threads : 1;
    const int64_t pieces = wanted < panels ? wanted : panels;
    share(pieces, num_threads, [&](int64_t piece, int32_t) {
        alignas(64) float sums[Products::kMaxRows * kPanel];
        [[maybe_unused]] const typename Products::Tiles tiles(height);
        for (int64_t i = panels * piece / pieces; i < panels * (piece + 1) / pieces; ++i)
            for (int tile = 0; tile < num_tiles; ++tile) {
                const int first = tile + 1 < num_tiles ? tile * height : num_rows - height, column = static_cast<int>(i) * kPanel;
                const uint32_t* panel = linear.panels + i * panel_words;
                // Each tile's share of the next panel. Behind the last panel this reads nothing of use.
                const auto next = [&](size_t half) {
                    return reinterpret_cast<const char*>(panel + panel_words) + panel_words * 2 * half + panel_words * 2 * tile / num_tiles;
                };
                Products::run(height, rows, first, linear, column, panel, sums, {next(0), next(1), 64 / num_tiles});
                done(first, height, column, sums);
            }
    });
}

}  // namespace
