// An encoder; one call runs the whole model. Mirrored by sie.native.encoder.
//
// Embeddings of words, positions and types are summed. Each layer is attention, then a block of two or three linear layers.
// The result of each is added to its input. There may be norms before each, of its result, and of the sum: BERT has the last
// ones, ModernBERT, Llama and Qwen the first, Gemma the first two. A missing norm has no weight.
// Sources: Devlin et al., BERT, arXiv 1810.04805; Warner et al., ModernBERT, arXiv 2412.13663; Touvron et al., LLaMA, arXiv
// 2302.13971; Gemma 2, arXiv 2408.00118; transformers 5.23 for the order of each family.
#pragma once
#include <cstddef>
#include <cstdint>

constexpr int kPanel = 32;  // neighbouring columns in a packed weight

// y = x w^T + b. panels: [outputs / 32][inputs, in words][32 words], zero after the last column.
// For weights in bytes (products_int8.h), the words of a row are padded with zeros to a multiple of 16.
struct SieDense {
    const uint32_t* panels;
    const float* bias;           // null: none
    const float *scales, *sums;  // for bytes: each output's scale, and the sum of its weights; padded to whole panels
    int32_t inputs, outputs;
};

struct SieNorm {
    const float *weight, *bias;  // weight null: no norm; bias null: none
};

struct SieLayer {
    SieDense qkv;  // queries of all heads, then keys, then values
    SieDense out;
    SieDense up;  // gated: each panel has 16 outputs of the gate, then the 16 that they are multiplied with
    SieDense down;
    SieNorm before_attention, of_attention, after_attention;  // of its input, of what it gives, of the sum
    SieNorm before_block, of_block, after_block;
    SieNorm query, key;            // of each head, or of all heads of a token together
    const float* biases;           // as in SieAttention
    const float *cosines, *sines;  // (position, rotary_width): how a head turns at a position; null: it does not
    float scale;                   // of scores
    int32_t window;                // a token attends to those less than so many positions away; 0: to all
    int32_t is_causal;
    int32_t is_norm_whole;  // query and key take all heads of a token together
};

struct SieEncoder {
    const void *words, *positions, *types;  // tables, [row][width]; positions and types may be null
    SieNorm after_embedding, last;
    const SieLayer* layers;
    int32_t num_layers, width, num_heads, num_key_heads, head_width, rotary_width;
    int32_t inner;       // inputs of the widest last linear layer of a block
    int32_t activation;  // SieActivation
    int32_t is_gated;
    int32_t is_rms;  // norms divide by the root of the mean square; else they are layer norms
    int32_t level;   // SieLevel
    int32_t bias_reach;
    float epsilon, embedding_scale, residual_scale;
};

// The last three multiply bytes, and compute the rest in float32 or bfloat16. All but the first need AVX-512.
enum SieLevel : int32_t {
    kLevelF32Avx2 = 0,
    kLevelF32 = 1,
    kLevelBf16 = 2,
    kLevelAmx = 3,
    kLevelInt8F32 = 4,
    kLevelInt8Bf16 = 5,
    kLevelInt8Amx = 6,
};

enum SieActivation : int32_t { kGelu = 0, kGeluTanh = 1, kRelu = 2, kSilu = 3 };

// A step: the tokens of all sequences, back to back.
struct SieStep {
    const int64_t *ids, *positions, *types;  // (num_tokens); types may be null, for zeros
    const int32_t *bounds, *seen;            // as in SieAttention
    void* hidden;                            // (num_tokens, width), the result
    void* scratch;                           // of encoder_scratch_bytes
    int32_t num_tokens, num_sequences, longest, num_threads;
};
