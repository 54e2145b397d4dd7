// A Llama-like decoder; one call runs a whole step. Mirrored by sie.native.decoder.
//
// A step looks up the tokens. Each layer is attention over keys and values in blocks, then a block of linear layers. Each
// of the two has a root mean square norm before it, after it, or both, and is added to its input. A norm and a head then
// give the logits.
// Sources: Touvron et al., arXiv 2302.13971; Gemma 2, arXiv 2408.00118; transformers 5.23 for the order of each family.
#pragma once
#include <cstdint>

#include "linear.h"

// All norms have a weight for each value; a null pointer means that the norm does not exist.
struct SieDecoderLayer {
    SieMatrix qkv;   // queries of all heads, then keys, then values
    SieMatrix out;
    SieMatrix up;    // gated: the gate, then the values that it multiplies, both in whole tiles; else only the values
    SieMatrix down;
    const float *before_attention, *after_attention, *before_block, *after_block;  // (width)
    const float *query_norm, *key_norm;                                            // (head_width), or of all heads
    const float *cosines, *sines;  // (position, rotary_width): the rotation of a head at a position; null: no rotation
    void *keys, *values;           // (blocks, block_tokens, num_key_heads, head_width)
    float scale;                   // of scores
    float cap;                     // scores become cap tanh(score / cap); 0: unchanged
    int32_t window;                // number of positions that a token sees, up to its own; 0: all
    int32_t is_norm_whole;         // query_norm and key_norm take all heads of a token together
};

// A head in eight bits, to find where the likeliest token may be (screen.h). An output is its scale times numbers, which stand for
// the head's weights divided by input_scales. A few pairs of inputs are kept as they are: these have scales of zero.
struct SieScreen {
    // [tile of 16 outputs, whole pairs][numbers: quad of inputs, 16 for each 64; then kept pairs of inputs][output]; null: none
    const uint32_t* tiles;
    const int32_t* kept;        // (kScreenKept): the kept pairs of inputs
    const float* input_scales;  // (inputs)
    const float *scales, *sums;  // (outputs, whole pairs): scales, and scales times the sums of numbers
    // (pairs): the greatest length of what rounding changes, of a rounded output, and of an output of the head
    const float *errors, *lengths, *head_lengths;
};

constexpr int kScreenKept = 16;

struct SieDecoder {
    const void* embeddings;  // (vocabulary, width)
    const SieDecoderLayer* layers;
    const float* last_norm;  // (width)
    SieMatrix head;
    SieScreen screen;
    int32_t num_layers, width, num_heads, num_key_heads, head_width, rotary_width;
    int32_t activation;  // SieActivation, of encoder.h
    int32_t is_gated;
    int32_t block_tokens;
    int32_t is_bf16;  // embeddings, keys and values, and inputs of products; else float32
    float embedding_scale, residual_scale, logit_scale;
    float logit_cap;  // 0: none
    float epsilon;
};

// Consecutive tokens of one sequence.
struct SieSlot {
    int64_t start;        // position of the first
    int64_t length;       // above zero
    int64_t first_token;  // index of the first in the step
    int64_t first_block;  // index of the sequence's first block in SieDecoderStep.blocks
};

// The tokens of all slots, back to back.
struct SieDecoderStep {
    const int32_t* ids;     // token ids
    const int32_t* blocks;  // position p of a sequence is in its block p / block_tokens
    const SieSlot* slots;
    const int32_t* kept;  // indexes of the tokens whose logits are wanted, ascending, without repeats
    float* logits;        // (num_kept, vocabulary), or null
    int32_t* best;        // (num_kept): the likeliest token, the first of equals, -1 if logits are not finite; or null
    const int32_t* hidden;       // with best: tokens that it must not be, those of all kept tokens back to back
    const int32_t* hidden_ends;  // (num_kept): the end of each kept token's own in `hidden`
    void* scratch;        // of decoder_scratch_bytes, 64-byte aligned
    int32_t num_tokens, num_slots, num_kept, num_threads;
};
