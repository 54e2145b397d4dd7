// What a linear layer over packed weights is asked for. Mirrored by sie.native.linear.
#pragma once
#include <cstddef>
#include <cstdint>

// A weight matrix (outputs, inputs) lies in tiles of 16 outputs, each contiguous, its inputs in groups of 32. A group of
// a tile is, one behind the other:
//   bf16   32 inputs of 16 bf16
//   int8   16 scales (float16), then 32 inputs of 16 int8; a weight is the number times its output's scale
//   int4   16 scales (float16), then 16 pairs of inputs of 16 bytes: the first of the pair in the low four bits, the
//          second in the high; a weight is codebook[number] times its output's scale
// Outputs behind the last and inputs behind the last are zero.
constexpr int kTileOutputs = 16, kGroupInputs = 32;

enum : int32_t { kWeightBf16 = 0, kWeightInt8 = 1, kWeightInt4 = 2 };

struct SieLinear {
    const void* input;      // (rows, inputs), rows of input_stride values
    const void* weights;    // as above
    const float* codebook;  // (16), int4 only
    const float* bias;      // (outputs), or null
    void* output;           // (rows, outputs), rows of output_stride values
    void* scratch;          // linear_scratch_bytes, 64-byte aligned
    int64_t input_stride, output_stride;
    int32_t rows, inputs, outputs;
    int32_t format;
    int32_t is_bf16;  // of input and output; else float32
    int32_t num_threads;
};

// Rows up to which a layer is bound by reading its weights, and computes in float32.
constexpr int kFewRows = 16;

inline int64_t groups_of(int64_t inputs) { return (inputs + kGroupInputs - 1) / kGroupInputs; }

inline int64_t group_bytes(int32_t format) {
    const int64_t scales = 2 * kTileOutputs, numbers = kGroupInputs * kTileOutputs;
    return format == kWeightBf16 ? 2 * numbers : format == kWeightInt8 ? scales + numbers : scales + numbers / 2;
}

// Bytes for a float32 or bf16 copy of the input, filled up to whole groups, and for one unpacked pair of tiles a thread.
inline int64_t linear_scratch_bytes(int64_t rows, int64_t inputs, int64_t num_threads) {
    const int64_t width = groups_of(inputs) * kGroupInputs;
    const bool is_few = rows <= kFewRows;
    return rows * width * 4 + (is_few ? 0 : num_threads * width * 2 * kTileOutputs * 2) + 128;
}
