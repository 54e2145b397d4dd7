// Multiplies rows with packed weights in bf16, a pair of tiles at a time, which stays in the level 2 cache.
#pragma once
#include "products.h"
#include "rows.h"
#include "weights.h"

namespace {

#ifdef __AVX512BF16__
constexpr int kMostAtOnce = DotProducts<Bf16>::kMaxRows;

// Returns words with two weights of each of 16 outputs.
inline __m512i word_of(Vec first, Vec second) {
    alignas(64) static constexpr uint16_t kTurns[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(kTurns), (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

// Converts a tile of integer weights to bf16.
template <class W>
void unpack_tile(const SieMatrix& matrix, const uint8_t* tile, uint32_t* to) {
    for (int64_t group = 0; group < groups_of(matrix.inputs); ++group, tile += group_bytes(W::kFormat)) {
        const W weights(tile, matrix.codebook);
        const Vec scales = weights.scales();
        for (int q = 0; q < kGroupInputs / 4; ++q, to += 2 * kLanes) {
            Vec quad[4];
            weights.quad(q, quad);
            for (Vec& weight : quad) weight = _mm512_mul_ps(weight, scales);
            _mm512_storeu_si512(to, word_of(quad[0], quad[1]));
            _mm512_storeu_si512(to + kLanes, word_of(quad[2], quad[3]));
        }
    }
}

// Returns a tile of bf16: the stored one, or one that is unpacked at `room`.
inline const uint32_t* bf16_tile(const SieMatrix& matrix, const uint8_t* tile, uint32_t* room) {
    if (matrix.format == kWeightBf16) return reinterpret_cast<const uint32_t*>(tile);
    (matrix.format == kWeightInt8 ? unpack_tile<Int8Weights> : unpack_tile<Int4Weights>)(matrix, tile, room);
    return room;
}
#endif

}  // namespace
