// A whole encoder of the BERT kind, as one call runs it. Mirrored by sie.native.encoder.
//
// Words and positions are looked up, summed and normalised; each layer is attention, its projection, and a block of two
// linear layers with an activation, each added to its input and normalised afterwards.
// Source: Devlin et al., BERT, arXiv 1810.04805; transformers 5.23 models/bert/modeling_bert.py for the order.
#pragma once
#include <cstddef>
#include <cstdint>

constexpr int kPanel = 32;  // columns of a packed weight that lie side by side

// y = x w^T + b. panels: [outputs / 32][inputs, in words][32 words], zero behind the last column.
// Of weights in bytes (products_int8.h) the words of a row are filled up with zeros to a multiple of 16.
struct SieDense {
    const uint32_t* panels;
    const float* bias;
    const float *scales, *sums;  // of bytes: each output's scale, and the sum of its weights; filled up to whole panels
    int32_t inputs, outputs;
};

struct SieNorm {
    const float *weight, *bias;
};

struct SieLayer {
    SieDense qkv, out, up, down;
    SieNorm after_attention, after_block;
};

struct SieEncoder {
    const void *words, *positions, *types;  // tables, [row][width]; types may be null
    SieNorm after_embedding;
    const SieLayer* layers;
    int32_t num_layers, width, num_heads, activation;
    float epsilon, scale;
    int32_t widest;  // outputs of the widest linear layer
    int32_t level;   // SieLevel
};

// The last three multiply bytes, and compute the rest in the format of the first two.
enum SieLevel : int32_t { kLevelF32 = 0, kLevelBf16 = 1, kLevelAmx = 2, kLevelInt8F32 = 3, kLevelInt8Bf16 = 4, kLevelInt8Amx = 5 };

enum SieActivation : int32_t { kGelu = 0, kGeluTanh = 1, kRelu = 2, kSilu = 3 };

// A step: tokens of all sequences back to back.
struct SieStep {
    const int64_t *ids, *positions, *types;  // (num_tokens); types may be null, for zeros
    const int32_t *bounds, *seen;            // as in SieAttention
    void* hidden;                            // (num_tokens, width), the result
    void* scratch;                           // of encoder_scratch_bytes
    int32_t num_tokens, num_sequences, longest, num_threads;
};
