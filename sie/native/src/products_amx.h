// Matrix products in the tiles of AMX: 32 rows and 32 columns of sums, 16 words of each at a time.
//
// A panel has the order of a tile already: a word of a bf16 product is a pair of inputs, 16 columns make a tile's row.
// The inputs must be a multiple of 32.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, LDTILECFG and TDPBF16PS.
#pragma once
#include "products.h"

namespace {

struct AmxProducts {
    using Format = Bf16;
    using Stored = Bf16::Stored;
    static constexpr int kMaxRows = 32;
    static constexpr int kTileWords = 16;

    struct alignas(64) Configuration {
        uint8_t palette = 1, first_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    };
    static_assert(sizeof(Configuration) == 64, "as LDTILECFG reads it");

    // Tiles 0 to 3 are sums (two by two), 4 and 5 rows, 6 and 7 columns.
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

    static void run(int count, const Stored* rows, size_t stride, const uint32_t* panel, int words, float* to) {
        constexpr int kPanelBytes = kPanel * 4;
        const int row_bytes = static_cast<int>(stride * sizeof(Stored));
        const Stored* below = rows + 16 * stride;
        const bool has_lower = count > 16;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int word = 0; word < words; word += kTileWords, panel += kTileWords * kPanel) {
            _tile_loadd(6, panel, kPanelBytes);
            _tile_loadd(4, rows + word * Format::kPerWord, row_bytes);
            _tile_loadd(7, panel + kLanes, kPanelBytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (!has_lower) continue;
            _tile_loadd(5, below + word * Format::kPerWord, row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, to, kPanelBytes);
        _tile_stored(1, to + kLanes, kPanelBytes);
        if (!has_lower) return;
        _tile_stored(2, to + 16 * kPanel, kPanelBytes);
        _tile_stored(3, to + 16 * kPanel + kLanes, kPanelBytes);
    }
};

}  // namespace
