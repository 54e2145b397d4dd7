// Matrix products in AMX tiles: 32 rows and 32 columns of sums, 16 words of each at a time.
//
// Packed weights already have the order of a tile: a word is a pair of inputs in bf16, or four bytes, and 16 columns are a row
// of the tile. The number of words in a row must be a multiple of 16.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, LDTILECFG, TDPBF16PS and TDPBUSD.
#pragma once
#include "products_int8.h"

namespace {

// Tiles 0 to 3 are sums (two by two), 4 and 5 rows, 6 and 7 columns.
struct AmxBf16 {
    static void add_upper() {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
    }
    static void add_lower() {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
};

struct AmxInt8 {
    static void add_upper() {
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 4, 7);
    }
    static void add_lower() {
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
    }
};

// Makes the compiler write all stores before this to memory: it does not know what the instructions for tiles read.
inline void write_out(const void* at) { __asm__ volatile("" : : "r"(at) : "memory"); }

// The tiles of this thread, for products of up to `height` rows, until the object ends.
class AmxTiles {
    struct alignas(64) Configuration {
        uint8_t palette = 1, first_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    };
    static_assert(sizeof(Configuration) == 64, "as LDTILECFG reads it");

  public:
    static constexpr int kWords = 16;

    explicit AmxTiles(int64_t height) { fit(height); }
    ~AmxTiles() { _tile_release(); }
    AmxTiles(const AmxTiles&) = delete;
    AmxTiles& operator=(const AmxTiles&) = delete;

    static void fit(int64_t height) {
        const uint8_t upper = height < 16 ? height : 16, lower = height < 17 ? 1 : height < 32 ? height - 16 : 16;
        Configuration tiles;
        const uint8_t rows[8] = {upper, upper, lower, lower, upper, lower, kWords, kWords};
        for (int i = 0; i < 8; ++i) {
            tiles.row_bytes[i] = 64;
            tiles.rows[i] = rows[i];
        }
        write_out(&tiles);
        _tile_loadconfig(&tiles);
    }
};

// Twice 16 columns of weights: the words of a tile's row are contiguous, and rows `apart` bytes from each other.
struct AmxColumns {
    const void *first, *second;
    int64_t apart;
};

// Computes one tile of sums. If the tiles are for more rows, it reads and writes those, too.
template <class Numbers>
struct AmxProductsOf {
    using Tiles = AmxTiles;
    static constexpr int kMaxRows = 32;

    // row_bytes and to_bytes: from one row to the next.
    static void multiply(int count, const void* rows, int64_t row_bytes, const AmxColumns& columns, int words, float* to,
                         int64_t to_bytes, Ahead ahead = {}) {
        const char *upper = static_cast<const char*>(rows), *lower = upper + 16 * row_bytes;
        const char *first = static_cast<const char*>(columns.first), *second = static_cast<const char*>(columns.second);
        const int64_t apart = columns.apart, bytes_ahead = ahead.step * Tiles::kWords;
        const bool has_lower = count > 16;
        write_out(rows);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int word = 0; word < words; word += Tiles::kWords, upper += 64, lower += 64) {
            _tile_loadd(6, first, apart);
            _tile_loadd(4, upper, row_bytes);
            _tile_loadd(7, second, apart);
            Numbers::add_upper();
            first += Tiles::kWords * apart, second += Tiles::kWords * apart;
            for (int64_t line = 0; line < bytes_ahead; line += 64) {
                _mm_prefetch(ahead.first + line, _MM_HINT_T1);
                _mm_prefetch(ahead.second + line, _MM_HINT_T1);
            }
            ahead.first += bytes_ahead, ahead.second += bytes_ahead;
            if (!has_lower) continue;
            _tile_loadd(5, lower, row_bytes);
            Numbers::add_lower();
        }
        char* below = reinterpret_cast<char*>(to) + 16 * to_bytes;
        _tile_stored(0, to, to_bytes);
        _tile_stored(1, to + kLanes, to_bytes);
        if (!has_lower) return;
        _tile_stored(2, below, to_bytes);
        _tile_stored(3, below + 64, to_bytes);
    }

    // As DotProducts has it.
    template <int kStep, class Stored>
    static void run_halves(int count, const Stored* rows, size_t stride, const uint32_t* first, const uint32_t* second,
                           int words, float* to, Ahead ahead = {}) {
        multiply(count, rows, stride * sizeof(Stored), {first, second, kStep * 4}, words, to, kPanel * 4, ahead);
    }
};

// The two products of attention in tiles, for heads that fill them.
struct AmxAttention {
    using Format = Bf16;
    using Products = AmxProductsOf<AmxBf16>;
    using Stored = Bf16::Stored;
    static constexpr int kRows = Products::kMaxRows;
    static constexpr int kKeys = AmxTiles::kWords * Bf16::kPerWord;

    static bool takes(int width) { return width % kKeys == 0; }

    ~AmxAttention() { _tile_release(); }

    void fit(int rows) {
        if (rows != rows_) AmxTiles::fit(rows_ = rows);
    }

    static void score(const Stored* queries, size_t apart, int count, const uint32_t* keys, int words, int num_keys, float* to,
                      size_t to_apart) {
        for (int key = 0; key < num_keys; key += 2 * kLanes) {
            const uint32_t* tile = keys + static_cast<size_t>(key) * words;
            Products::multiply(count, queries, apart * sizeof(Stored), {tile, tile + words * kLanes, 64}, words, to + key, to_apart * 4);
        }
    }

    template <class Done>
    static void sum(const Stored* weights, size_t apart, int count, const uint32_t* values, int columns, int num_keys,
                    const SumsBefore* before, const Done& done) {
        alignas(64) float found[kRows * kPanel];
        for (int column = 0; column < columns; column += kPanel) {
            const uint32_t* from = values + column;
            Products::multiply(count, weights, apart * sizeof(Stored), {from, from + kLanes, columns * 4}, num_keys / Bf16::kPerWord,
                               found, kPanel * 4);
            for (int r = 0; r < count; ++r)
                for (int c = 0; c < kPanel; c += kLanes) {
                    const Vec sum = load(found + r * kPanel + c);
                    done(r, column + c, before ? before->at(r, column + c) + sum : sum);
                }
        }
    }

  private:
    int rows_ = 0;
};

struct AmxProducts : AmxProductsOf<AmxBf16> {
    using Format = Bf16;
    using Input = StoredRows<Bf16::Stored>;
    using OfAttention = AmxAttention;

    static int words(const SieDense& linear) { return linear.inputs / Bf16::kPerWord; }

    static void run(int count, const Input& rows, int first, const SieDense& linear, int, const uint32_t* panel, float* to,
                    Ahead ahead) {
        run_halves<kPanel>(count, rows.at(first), rows.stride, panel, panel + kLanes, words(linear), to, ahead);
    }
};

struct AmxInt8Products : AmxProductsOf<AmxInt8> {
    using Format = Bf16;
    using Input = ByteRows<Bf16>;
    using OfAttention = AmxAttention;

    static int words(const SieDense& linear) { return Int8Products<Bf16>::words(linear); }

    static void run(int count, const Input& rows, int first, const SieDense& linear, int column, const uint32_t* panel, float* to,
                    Ahead ahead) {
        run_halves<kPanel>(count, rows.at(first), rows.stride, panel, panel + kLanes, words(linear), to, ahead);
        scale_tile(linear, column, rows, first, count, to);
    }
};

}  // namespace
