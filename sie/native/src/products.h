// Matrix products of packed weights with rows, a tile of rows and 32 columns at a time.
#pragma once
#include "encoder.h"
#include "lanes.h"
#include "share.h"

namespace {

// Writes a weight [outputs][inputs] as panels; `to` is (outputs rounded up to 32) x (words of inputs).
template <class T>
void pack_panels(const typename T::Stored* weight, int outputs, int inputs, uint32_t* to) {
    const int words = inputs / T::kPerWord;
    for (int first = 0; first < outputs; first += kPanel, to += static_cast<size_t>(words) * kPanel)
        for (int word = 0; word < words; ++word)
            for (int column = 0; column < kPanel; ++column) {
                uint32_t value = 0;
                if (first + column < outputs)
                    std::memcpy(&value, weight + static_cast<size_t>(first + column) * inputs + word * T::kPerWord, 4);
                to[word * kPanel + column] = value;
            }
}

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

// Computes one tile by dot products. The sums of kRows rows and one panel stay in registers; 14 rows at most.
template <class T>
struct DotProducts {
    using Format = T;
    using Stored = typename T::Stored;
    using Input = StoredRows<Stored>;
    static constexpr int kMaxRows = 14;

    // In each half of a panel, every column has a word every kStep words.
    template <int kRows, int kStep>
    static __attribute__((noinline)) void tile(const Stored* rows, size_t stride, const uint32_t* first,
                                               const uint32_t* second, int words, float* to,
                                               [[maybe_unused]] Ahead ahead) {
        Vec sums[kRows][2];
#pragma GCC unroll 14
        for (int r = 0; r < kRows; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
        const Stored* half = rows + kRows / 2 * stride;
        for (int word = 0; word < words; ++word, first += kStep, second += kStep, rows += T::kPerWord, half += T::kPerWord) {
            const __m512i left = _mm512_loadu_si512(first), right = _mm512_loadu_si512(second);
            _mm_prefetch(reinterpret_cast<const char*>(first + 16 * kStep), _MM_HINT_T0);
            _mm_prefetch(reinterpret_cast<const char*>(second + 16 * kStep), _MM_HINT_T0);
            if constexpr (kStep != kPanel) {  // panels stay in the cache for many tiles; other weights come from memory
                _mm_prefetch(ahead.first, _MM_HINT_T1);
                _mm_prefetch(ahead.second, _MM_HINT_T1);
                ahead.first += ahead.step, ahead.second += ahead.step;
            }
#pragma GCC unroll 14
            for (int r = 0; r < kRows; ++r) {
                const Stored* at = r < kRows / 2 ? rows + r * stride : half + (r - kRows / 2) * stride;
                const __m512i one = broadcast_word(at);
                sums[r][0] = T::dot(sums[r][0], one, left);
                sums[r][1] = T::dot(sums[r][1], one, right);
            }
        }
#pragma GCC unroll 14
        for (int r = 0; r < kRows; ++r) {
            _mm512_store_ps(to + r * kPanel, sums[r][0]);
            _mm512_store_ps(to + r * kPanel + kLanes, sums[r][1]);
        }
    }

    static int words(const SieDense& linear) { return linear.inputs / T::kPerWord; }
    static void prepare(int) {}
    static void finish() {}

    static void run(int count, const Input& rows, int first, const SieDense& linear, int, const uint32_t* panel, float* to) {
        run_halves<kPanel>(count, rows.at(first), rows.stride, panel, panel + kLanes, words(linear), to);
    }

    template <int kStep>
    static void run_halves(int count, const Stored* rows, size_t stride, const uint32_t* first, const uint32_t* second,
                           int words, float* to, const Ahead& ahead = {}) {
        using Tile = void (*)(const Stored*, size_t, const uint32_t*, const uint32_t*, int, float*, Ahead);
        static constexpr Tile kTiles[kMaxRows] = {
            tile<1, kStep>, tile<2, kStep>, tile<3, kStep>,  tile<4, kStep>,  tile<5, kStep>,  tile<6, kStep>,  tile<7, kStep>,
            tile<8, kStep>, tile<9, kStep>, tile<10, kStep>, tile<11, kStep>, tile<12, kStep>, tile<13, kStep>, tile<14, kStep>};
        kTiles[count - 1](rows, stride, first, second, words, to, ahead);
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
        Products::prepare(height);
        for (int64_t i = panels * piece / pieces; i < panels * (piece + 1) / pieces; ++i)
            for (int tile = 0; tile < num_tiles; ++tile) {
                const int first = tile + 1 < num_tiles ? tile * height : num_rows - height, column = static_cast<int>(i) * kPanel;
                Products::run(height, rows, first, linear, column, linear.panels + i * panel_words, sums);
                done(first, height, column, sums);
            }
    });
}

}  // namespace
