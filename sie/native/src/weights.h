// Reads the weights of a group (linear.h describes the layout): as unscaled numbers of 16 outputs, and their scales.
#pragma once
#include "lanes.h"
#include "linear.h"

namespace {

struct Bf16Weights {
    static constexpr int32_t kFormat = kWeightBf16;
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
    void scaled_quad(int q, Vec, Vec (&to)[4]) const { quad(q, to); }
};

// Calls put(i, byte plus 256) for the four bytes of each word.
template <class F>
inline void for_bytes(Words bytes, const F& put) {
    put(0, byte_plus_256<0>(bytes));
    put(1, byte_plus_256<1>(bytes));
    put(2, byte_plus_256<2>(bytes));
    put(3, byte_plus_256<3>(bytes));
}

constexpr float kByteOffset = 256 + 128;  // of byte_plus_256, as the bytes of weights are 128 too large

// Returns the numbers of four inputs.
inline void numbers_of(Words bytes, Vec (&to)[4]) {
    for_bytes(bytes, [&](int i, Vec byte) { to[i] = byte - broadcast(kByteOffset); });
}

// The same times the scales, in one operation. A scale of int8 has 11 bits, so its product with the offset is exact.
inline void scaled_numbers_of(Words bytes, Vec scales, Vec (&to)[4]) {
    const Vec offset = scales * broadcast(-kByteOffset);
    for_bytes(bytes, [&](int i, Vec byte) { to[i] = fmadd(byte, scales, offset); });
}

struct Int8Weights {
    static constexpr int32_t kFormat = kWeightInt8;
    const uint8_t* group;

    Int8Weights(const uint8_t* group, const int8_t*) : group(group) {}
    Vec scales() const { return from_float16(group); }
    // The weights of inputs 4q to 4q + 3 of each output, plus 128.
    Words bytes(int q) const { return load_words(group + kScaleBytes + q * 64); }
    void quad(int q, Vec (&to)[4]) const { numbers_of(bytes(q), to); }
    void scaled_quad(int q, Vec scales, Vec (&to)[4]) const { scaled_numbers_of(bytes(q), scales, to); }
};

struct Int4Weights {
    static constexpr int32_t kFormat = kWeightInt4;
    const uint8_t* group;
    Words codes;  // plus 128

    Int4Weights(const uint8_t* group, const int8_t* codebook) : group(group), codes(load_codes(codebook)) {}
    Vec scales() const { return from_float16(group) * broadcast(kCodebookUnit); }
    Words bytes(int q) const {
        return codes_at(codes, load_words(group + kScaleBytes + q / 2 * 64), q % 2 != 0);
    }
    void quad(int q, Vec (&to)[4]) const { numbers_of(bytes(q), to); }
    void scaled_quad(int q, Vec scales, Vec (&to)[4]) const { scaled_numbers_of(bytes(q), scales, to); }
};

}  // namespace
