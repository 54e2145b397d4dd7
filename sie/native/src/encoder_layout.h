// Offsets of the parts of a step's scratch memory.
#pragma once
#include "attention.h"
#include "byte_rows.h"
#include "encoder.h"

namespace {

// Rows that go together through a layer at any level, from after its attention to the next layer's attention.
constexpr int kMostBlockRows = 192;

// Bytes from one row of products' input to the next: an odd number of lines. In a tile of rows that are a power of two
// apart, each would evict the others from the level 1 cache.
constexpr size_t row_bytes_apart(size_t bytes) { return ((bytes + 63) / 64 | 1) * 64; }

struct EncoderLayout {
    size_t stream, qkv, attended;              // of all tokens
    size_t input, inner, sums, bytes, share;  // of a thread, relative to the beginning of its share
    size_t threads, attention, end;

    EncoderLayout(const SieEncoder& encoder, size_t tokens, size_t longest, size_t num_threads) {
        size_t at = 0;
        const auto place = [&at](size_t bytes) {
            const size_t found = at;
            at += (bytes + 63) / 64 * 64;
            return found;
        };
        const size_t width = encoder.width, heads = encoder.num_heads, head = encoder.head_width;
        const size_t inner_width = encoder.inner, most = width > inner_width ? width : inner_width;
        const size_t widest = most > heads * head ? most : heads * head;
        input = place(kMostBlockRows * row_bytes_apart(4 * width));
        inner = place(kMostBlockRows * row_bytes_apart(4 * inner_width));
        sums = place(4 * kMostBlockRows * (width + kPanel));
        bytes = place(encoder.level < kLevelInt8F32 ? 0 : byte_rows_bytes(kMostBlockRows, static_cast<int>(widest)));
        share = at;
        at = 0;
        stream = place(4 * tokens * width);
        qkv = place(4 * tokens * (heads + 2 * encoder.num_key_heads) * head);
        attended = place(tokens * row_bytes_apart(4 * heads * head));
        threads = place(num_threads * share);
        attention = place(num_threads * attention_scratch_bytes(longest, head));
        end = at;
    }
};

}  // namespace
