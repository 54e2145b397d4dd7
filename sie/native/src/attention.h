// What an attention over packed sequences is asked for. Mirrored by sie.native.attention.
#pragma once
#include <cstddef>
#include <cstdint>

// All strides count values. Rows (one token of one head) are contiguous.
struct SieAttention {
    const void *query, *key, *value;
    void* out;
    int64_t query_token, query_head, key_token, key_head, value_token, value_head, out_token, out_head;
    const int32_t* bounds;  // (num_sequences + 1): where each begins
    const int32_t* seen;    // (num_sequences): how many tokens of each, from the first, are attended to; null: all
    int32_t num_sequences, num_heads, num_key_heads, width;
    float scale;  // above zero
    int32_t is_causal;
    int32_t window;  // a token attends to those less than so many positions away; 0: to all
    int32_t num_threads;
};

// Bytes that each thread of an attention needs beside its tensors, for sequences of at most so many tokens.
static inline size_t attention_scratch_bytes(int64_t longest, int64_t width) {
    const size_t padded = (longest + 15) / 16 * 16, columns = (width + 15) / 16 * 16;
    constexpr size_t kRows = 12;
    return (4 * (padded * columns * 2 + kRows * padded * 2) + 127) / 64 * 64;
}
