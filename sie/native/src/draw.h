// The arguments of drawing a token from logits. Mirrored by sie.native.draw.
#pragma once
#include <cstdint>

// One draw: the tokens' weights are exp((logit - largest) / temperature), and `number` picks a place in their sum.
struct SieDraw {
    const float* logits;    // (vocabulary)
    const int32_t* hidden;  // (num_hidden): tokens that must not be chosen
    double number;          // in [0, 1)
    float temperature;      // above zero
    float top_p;            // the likeliest tokens with this share of the sum are kept; 1 or above: all
    float min_p;            // tokens below this share of the likeliest one's weight are dropped; 0: none
    int32_t top_k;          // number of likeliest tokens kept; 0: all
    int32_t num_hidden;
    int32_t vocabulary;
    int32_t token;  // the result; -1: the logits are not finite
};

// Bytes of scratch for each thread.
inline int64_t draw_scratch_bytes(int64_t vocabulary) { return (vocabulary + 16) * 8; }
