// The arguments of a root mean square norm. Mirrored by sie.native.norm.
#pragma once
#include <cstdint>

// Rows of `width` values are in `outer` groups of `inner` rows. All strides count values; a row is contiguous.
struct SieRmsNorm {
    const void* input;
    const float* weight;  // (width)
    void* output;
    int64_t input_outer, input_inner, output_outer, output_inner;
    int32_t outer, inner, width;
    int32_t is_bf16;  // of input and output; else float32
    float epsilon;
};
