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
    Vec scales() const { return broadcast(1.0f); }
    // The weights of inputs 4q to 4q + 3.
    void quad(int q, Vec (&to)[4]) const {
        for (int i = 0; i < 2; ++i) {
            const Words words = load_words(group + (2 * q + i) * 64);
            to[2 * i] = lower_halves(words);
            to[2 * i + 1] = upper_halves(words);
        }
    }
};

// Returns the numbers of four inputs; each word has four bytes, each plus 128.
inline void numbers_of(Words bytes, Vec (&to)[4]) {
    for (int i = 0; i < 4; ++i) to[i] = numbers_of_byte(bytes, i);
}

struct Int8Weights {
    static constexpr int32_t kFormat = kWeightInt8;
    static constexpr bool kScaled = true;
    const uint8_t* group;

    Int8Weights(const uint8_t* group, const int8_t*) : group(group) {}
    Vec scales() const { return from_float16(group); }
    // The weights of inputs 4q to 4q + 3 of each output, plus 128.
    Words bytes(int q) const { return load_words(group + kScaleBytes + q * 64); }
    void quad(int q, Vec (&to)[4]) const { numbers_of(bytes(q), to); }
};

struct Int4Weights {
    static constexpr int32_t kFormat = kWeightInt4;
    static constexpr bool kScaled = true;
    const uint8_t* group;
    Words codes;  // plus 128

    Int4Weights(const uint8_t* group, const int8_t* codebook) : group(group), codes(load_codes(codebook)) {}
    Vec scales() const { return from_float16(group) * broadcast(kCodebookUnit); }
    Words bytes(int q) const {
        return codes_at(codes, load_words(group + kScaleBytes + q / 2 * 64), q % 2 != 0);
    }
    void quad(int q, Vec (&to)[4]) const { numbers_of(bytes(q), to); }
};

}  // namespace
