// Reads the weights of a group (linear.h describes the layout): as unscaled numbers of 16 outputs, and their scales.
#pragma once
#include "lanes.h"
#include "linear.h"

namespace {

struct Bf16Weights {
    static constexpr int32_t kFormat = kWeightBf16;
    static constexpr bool kScaled = false;
    const uint8_t* group;

    Bf16Weights(const uint8_t* group, const int8_t*) : group(group) {}
    Vec scales() const { return _mm512_set1_ps(1.0f); }
    // The weights of inputs 4q to 4q + 3.
    void quad(int q, Vec (&to)[4]) const {
        for (int i = 0; i < 2; ++i) {
            const __m512i words = _mm512_loadu_si512(group + (2 * q + i) * 64);
            to[2 * i] = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
            to[2 * i + 1] = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xFFFF0000))));
        }
    }
};

inline Vec read_scales(const uint8_t* group) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(group)));
}

// Returns the numbers of four inputs; each word has four bytes, each plus 128.
inline void numbers_of(__m512i bytes, Vec (&to)[4]) {
    for (int i = 0; i < 4; ++i) {
        const __m512i byte = _mm512_and_si512(_mm512_srli_epi32(bytes, 8 * i), _mm512_set1_epi32(255));
        to[i] = _mm512_cvtepi32_ps(_mm512_sub_epi32(byte, _mm512_set1_epi32(128)));
    }
}

struct Int8Weights {
    static constexpr int32_t kFormat = kWeightInt8;
    static constexpr bool kScaled = true;
    const uint8_t* group;

    Int8Weights(const uint8_t* group, const int8_t*) : group(group) {}
    Vec scales() const { return read_scales(group); }
    // The weights of inputs 4q to 4q + 3 of each output, plus 128.
    __m512i bytes(int q) const { return _mm512_loadu_si512(group + kScaleBytes + q * 64); }
    void quad(int q, Vec (&to)[4]) const { numbers_of(bytes(q), to); }
};

struct Int4Weights {
    static constexpr int32_t kFormat = kWeightInt4;
    static constexpr bool kScaled = true;
    const uint8_t* group;
    __m512i codes;  // plus 128

    Int4Weights(const uint8_t* group, const int8_t* codebook) : group(group) {
        const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codebook));
        codes = _mm512_broadcast_i32x4(_mm_xor_si128(numbers, _mm_set1_epi8(-128)));
    }
    Vec scales() const { return _mm512_mul_ps(read_scales(group), _mm512_set1_ps(kCodebookUnit)); }
    __m512i bytes(int q) const {
        const __m512i both = _mm512_loadu_si512(group + kScaleBytes + q / 2 * 64);
        const __m512i places = _mm512_and_si512(q % 2 ? _mm512_srli_epi16(both, 4) : both, _mm512_set1_epi8(15));
        return _mm512_shuffle_epi8(codes, places);
    }
    void quad(int q, Vec (&to)[4]) const { numbers_of(bytes(q), to); }
};

}  // namespace
