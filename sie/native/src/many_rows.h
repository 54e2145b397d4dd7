// Multiplies rows with packed weights in the rows' own format, a pair of tiles at a time, which stays in the level 2 cache.
#pragma once
#include "products.h"
#include "rows.h"
#include "weights.h"
#ifdef __AMX_BF16__
#include "products_amx.h"
#endif

namespace {

#ifdef __AMX_BF16__
using RowProducts = AmxProductsOf<AmxBf16>;
#else
using RowProducts = DotProducts<Number>;
#endif
constexpr int kMostAtOnce = RowProducts::kMaxRows;
constexpr int kBlockRows = 8 * kMostAtOnce;  // rows that go through a layer of a decoder together

// Stores the weights of four inputs of 16 outputs each as products read them, and returns where the next ones belong.
inline uint32_t* store_quad(uint32_t* to, const Vec (&quad)[4]) {
#ifdef __AVX512BF16__
    store_words(to, Bf16::pairs(quad[0], quad[1]));
    store_words(to + kLanes, Bf16::pairs(quad[2], quad[3]));
#else
    for (int i = 0; i < 4; ++i) store_words(to + i * kLanes, as_words(quad[i]));
#endif
    return to + 4 / Number::kPerWord * kLanes;
}

template <class W>
void unpack_tile(const SieMatrix& matrix, const uint8_t* tile, uint32_t* to) {
    for (int64_t group = 0; group < groups_of(matrix.inputs); ++group, tile += group_bytes(W::kFormat)) {
        const W weights(tile, matrix.codebook);
        const Vec scales = weights.scales();
        for (int q = 0; q < kGroupInputs / 4; ++q) {
            Vec quad[4];
            weights.scaled_quad(q, scales, quad);
            to = store_quad(to, quad);
        }
    }
}

// Returns a tile in the format of rows: the stored one, or one that is unpacked at `room`.
inline const uint32_t* number_tile(const SieMatrix& matrix, const uint8_t* tile, uint32_t* room) {
    if (matrix.format == kWeightBf16 && Number::kPerWord == 2) return reinterpret_cast<const uint32_t*>(tile);
    static constexpr decltype(&unpack_tile<Bf16Weights>) kUnpack[] = {unpack_tile<Bf16Weights>, unpack_tile<Int8Weights>,
                                                                     unpack_tile<Int4Weights>};
    kUnpack[matrix.format](matrix, tile, room);
    return room;
}

}  // namespace
