// The arguments of attention over packed sequences. Mirrored by sie.native.attention.
#pragma once
#include <cstddef>
#include <cstdint>

// All strides count values. Rows (one token of one head) are contiguous.
struct SieAttention {
    const void *query, *key, *value;
    void* out;
    int64_t query_token, query_head, key_token, key_head, value_token, value_head, out_token, out_head;
    const int32_t* bounds;  // (num_sequences + 1): where each sequence begins
    const int32_t* seen;    // (num_sequences): number of first tokens of each sequence that can be attended to; null: all
    int32_t num_sequences, num_heads, num_key_heads, width;
    float scale;  // above zero
    int32_t is_causal;
    int32_t window;  // a token attends to tokens less than this number of positions away; 0: to all
    int32_t num_threads;
    int32_t bias_reach;   // at least the longest sequence's tokens and 16
    const float* biases;  // (num_heads, 2 bias_reach): what scores get before they are scaled, of a key at a query's position
                          // plus i - bias_reach; null: nothing
};

constexpr int kMostQueryRows = 32;  // queries of a block, at most
constexpr int kChunkKeys = 512;    // keys whose scores are kept; more keys take several turns
constexpr int kMostChunkRows = 96;  // queries that go through a chunk of keys together, at most
constexpr int kChunkPadding = 32;  // keys between rows of scores, so that these do not evict each other from the level 1 cache

// Keys and columns in whole tiles of any level.
constexpr int64_t attention_keys(int64_t count) { return (count + 31) / 32 * 32; }
constexpr int64_t attention_columns(int64_t width) { return (width + 15) / 16 * 16; }

// Bytes that each thread of an attention needs beside its tensors, for sequences of at most `longest` tokens.
static inline size_t attention_scratch_bytes(int64_t longest, int64_t width) {
    const size_t padded = attention_keys(longest), columns = attention_columns(width);
    const size_t chunk = (padded < kChunkKeys ? padded : kChunkKeys) + kChunkPadding;
    const size_t running = padded > kChunkKeys ? kMostChunkRows * (columns + 2) : 0;
    return (4 * (padded * columns * 2 + kMostQueryRows * chunk * 2 + running) + 127) / 64 * 64;
}
