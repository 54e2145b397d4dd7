// The arguments of a linear layer over packed weights. Mirrored by sie.native.linear.
#pragma once
#include <cstddef>
#include <cstdint>

// A weight matrix (outputs, inputs) is stored in tiles of 16 outputs. A tile is contiguous, with its inputs in groups of
// 32. A group of a tile is, in this order:
//   bf16   16 pairs of inputs of 16 words: an output's two weights, the first in the low half
//   int8   16 scales (float16), then 8 quads of inputs of 16 times 4 bytes: an output's four numbers, each plus 128; a
//          weight is the number times its output's scale
//   int4   16 scales (float16), then 4 double quads of inputs of 16 times 4 bytes: an output's four places in the codebook
//          for the first quad in the low bits of each byte, for the second in the high; a weight is
//          codebook[place] / 127 times its output's scale
// Outputs after the last have scales or weights of zero; inputs after the last are multiplied with zeros.
constexpr int kTileOutputs = 16, kGroupInputs = 32;
constexpr int kScaleBytes = 2 * kTileOutputs;
constexpr float kCodebookUnit = 1.0f / 127.0f;

enum : int32_t { kWeightBf16 = 0, kWeightInt8 = 1, kWeightInt4 = 2 };

// A packed matrix and its bias.
struct SieMatrix {
    const void* weights;     // as above
    const int8_t* codebook;  // (16), int4 only
    const float* bias;       // (outputs), or null
    int32_t inputs, outputs;
    int32_t format;
};

struct SieLinear {
    SieMatrix matrix;
    const void* input;  // (rows, inputs), rows of input_stride values
    void* output;       // (rows, outputs), rows of output_stride values
    void* scratch;      // linear_scratch_bytes, 64-byte aligned
    int64_t input_stride, output_stride;
    int32_t rows;
    int32_t is_bf16;  // of input and output; else float32
    int32_t num_threads;
};

// Pairs of tiles of so many outputs; the last may have one tile only.
inline int64_t pairs_of(int64_t outputs) { return (outputs + 2 * kTileOutputs - 1) / (2 * kTileOutputs); }

inline int64_t groups_of(int64_t inputs) { return (inputs + kGroupInputs - 1) / kGroupInputs; }

inline int64_t group_bytes(int32_t format) {
    const int64_t scales = 2 * kTileOutputs, numbers = kGroupInputs * kTileOutputs;
    return format == kWeightBf16 ? 2 * numbers : format == kWeightInt8 ? scales + numbers : scales + numbers / 2;
}

// Bytes of a row of input, in the widest form of rows.h.
inline int64_t row_bytes(int64_t inputs) { return groups_of(inputs) * kGroupInputs * 4; }

// Bytes that a thread needs to unpack a pair of tiles, to float32 at most.
inline int64_t unpacked_bytes(int64_t inputs) { return groups_of(inputs) * kGroupInputs * 2 * kTileOutputs * 4; }

// Bytes for the input of a layer, and for one unpacked pair of tiles for each thread.
inline int64_t linear_scratch_bytes(int64_t rows, int64_t inputs, int64_t num_threads) {
    return rows * row_bytes(inputs) + num_threads * unpacked_bytes(inputs) + 128;
}
