// Matrix products in AMX tiles: 32 rows and 32 columns of sums, 16 words of each at a time.
//
// A panel already has the order of a tile: a word is a pair of inputs in bf16, or four bytes, and 16 columns are a row of
// the tile. The number of words in a row must be a multiple of 16.
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

struct AmxTiles {
    static constexpr int kMaxRows = 32;
    static constexpr int kTileWords = 16;

    struct alignas(64) Configuration {
        uint8_t palette = 1, first_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    };
    static_assert(sizeof(Configuration) == 64, "as LDTILECFG reads it");

    static void prepare(int height) {
        const uint8_t upper = height < 16 ? height : 16, lower = height > 16 ? height - 16 : 1;
        Configuration tiles;
        const uint8_t rows[8] = {upper, upper, lower, lower, upper, lower, kTileWords, kTileWords};
        for (int i = 0; i < 8; ++i) {
            tiles.row_bytes[i] = 64;
            tiles.rows[i] = rows[i];
        }
        _tile_loadconfig(&tiles);
    }

    static void finish() { _tile_release(); }

    template <class Numbers, class Stored>
    static void run(int count, const Stored* rows, size_t stride, const uint32_t* panel, int words, float* to) {
        constexpr int kPanelBytes = kPanel * 4, kPerWord = 4 / sizeof(Stored);
        const int row_bytes = static_cast<int>(stride * sizeof(Stored));
        const Stored* below = rows + 16 * stride;
        const bool has_lower = count > 16;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int word = 0; word < words; word += kTileWords, panel += kTileWords * kPanel) {
            _tile_loadd(6, panel, kPanelBytes);
            _tile_loadd(4, rows + word * kPerWord, row_bytes);
            _tile_loadd(7, panel + kLanes, kPanelBytes);
            Numbers::add_upper();
            if (!has_lower) continue;
            _tile_loadd(5, below + word * kPerWord, row_bytes);
            Numbers::add_lower();
        }
        _tile_stored(0, to, kPanelBytes);
        _tile_stored(1, to + kLanes, kPanelBytes);
        if (!has_lower) return;
        _tile_stored(2, to + 16 * kPanel, kPanelBytes);
        _tile_stored(3, to + 16 * kPanel + kLanes, kPanelBytes);
    }
};

struct AmxProducts : AmxTiles {
    using Format = Bf16;
    using Input = StoredRows<Bf16::Stored>;

    static int words(const SieDense& linear) { return linear.inputs / Bf16::kPerWord; }

    static void run(int count, const Input& rows, int first, const SieDense& linear, int, const uint32_t* panel, float* to) {
        AmxTiles::run<AmxBf16>(count, rows.at(first), rows.stride, panel, words(linear), to);
    }
};

struct AmxInt8Products : AmxTiles {
    using Format = Bf16;
    using Input = ByteRows<Bf16>;

    static int words(const SieDense& linear) { return Int8Products<Bf16>::words(linear); }

    static void run(int count, const Input& rows, int first, const SieDense& linear, int column, const uint32_t* panel,
                    float* to) {
        AmxTiles::run<AmxInt8>(count, rows.at(first), rows.stride, panel, words(linear), to);
        scale_tile(linear, column, rows, first, count, to);
    }
};

}  // namespace
