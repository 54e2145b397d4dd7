// Where the parts of a step's scratch lie.
#pragma once
#include "attention.h"
#include "encoder.h"

namespace {

// Rows that go through the part of a layer behind attention together, so that what is between its products stays in
// the second cache.
constexpr int kBlockRows = 112;

struct EncoderLayout {
    size_t qkv, attended;              // of all tokens
    size_t block, inner, sums, bytes, share;  // of a thread, from the beginning of its share
    size_t threads, attention, end;

    EncoderLayout(const SieEncoder& encoder, size_t tokens, size_t longest, size_t num_threads) {
        size_t at = 0;
        const auto place = [&at](size_t bytes) {
            const size_t found = at;
            at += (bytes + 63) / 64 * 64;
            return found;
        };
        const size_t width = encoder.width, widest = encoder.widest;
        block = place(4 * kBlockRows * width);
        inner = place(4 * kBlockRows * widest);
        sums = place(4 * kBlockRows * (width + kPanel));
        // Rows in bytes (products_int8.h): as many as the widest has, rounded up, with 64 to part them and two numbers.
        bytes = place(encoder.level < kLevelInt8F32 ? 0 : kBlockRows * ((width > widest ? width : widest) + 64 + 64 + 8) + 64);
        share = at;
        at = 0;
        qkv = place(4 * tokens * 3 * width);
        attended = place(4 * tokens * width);
        threads = place(num_threads * share);
        attention = place(num_threads * attention_scratch_bytes(longest, width / encoder.num_heads));
        end = at;
    }
};

}  // namespace
