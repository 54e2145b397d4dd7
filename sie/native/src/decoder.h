// A whole decoder of the Llama kind, as one call runs a step of it. Mirrored by sie.native.decoder.
//
// Tokens are looked up; each layer is attention over keys and values in blocks and a block of linear layers, each behind
// a root mean square norm, before another or between two, and added to its input; a norm and a head give the logits.
// Sources: Touvron et al., arXiv 2302.13971; Gemma 2, arXiv 2408.00118; transformers 5.23 for the order of each family.
#pragma once
#include <cstdint>

#include "linear.h"

// All norms have a weight for each value, or are null: not there.
struct SieDecoderLayer {
    SieMatrix qkv;   // queries of all heads, then keys, then values
    SieMatrix out;
    SieMatrix up;    // gated: the gate, then what it is multiplied with, both of whole tiles; else what goes in alone
    SieMatrix down;
    const float *before_attention, *after_attention, *before_block, *after_block;  // (width)
    const float *query_norm, *key_norm;                                            // (head_width), or of all heads
    const float *cosines, *sines;  // (position, rotary_width): how a head turns at a position; null: it does not
    void *keys, *values;           // (blocks, block_tokens, num_key_heads, head_width)
    float scale;                   // of scores
    float cap;                     // scores become cap tanh(score / cap); 0: they stay
    int32_t window;                // positions that a token sees, its own the last; 0: all
    int32_t is_norm_whole;         // query_norm and key_norm take all heads of a token together
};

struct SieDecoder {
    const void* embeddings;  // (vocabulary, width)
    const SieDecoderLayer* layers;
    const float* last_norm;  // (width)
    SieMatrix head;
    int32_t num_layers, width, num_heads, num_key_heads, head_width, rotary_width;
    int32_t activation;  // SieActivation, of encoder.h
    int32_t is_gated;
    int32_t block_tokens;
    int32_t is_bf16;  // embeddings, keys and values, and what goes into products; else float32
    float embedding_scale, residual_scale, logit_scale;
    float logit_cap;  // 0: none
    float epsilon;
};

// Tokens that follow each other in one sequence.
struct SieSlot {
    int64_t start;        // position of the first
    int64_t length;       // above zero
    int64_t first_token;  // where the first is in the step
    int64_t first_block;  // where the sequence's blocks begin in SieDecoderStep.blocks
};

// Tokens of all slots back to back.
struct SieDecoderStep {
    const int32_t* ids;     // in the vocabulary
    const int32_t* blocks;  // position p of a sequence is in its block p / block_tokens
    const SieSlot* slots;
    const int32_t* kept;  // tokens whose logits are wanted, ascending, each once
    float* logits;        // (num_kept, vocabulary)
    void* scratch;        // of decoder_scratch_bytes, 64-byte aligned
    int32_t num_tokens, num_slots, num_kept, num_threads;
};
