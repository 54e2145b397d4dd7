// Where the parts of a step's scratch lie.
#pragma once
#include "attention.h"
#include "encoder.h"

namespace {

// Rows that go through the part of a layer behind attention together, so that what is between its products stays in
// the second cache.
constexpr int kBlockRows = 112;

struct EncoderLayout {
    size_t qkv, attended, block, inner, sums, attention, end;

    EncoderLayout(const SieEncoder& encoder, size_t tokens, size_t longest) {
        size_t at = 0;
        const auto place = [&at](size_t bytes) {
            const size_t found = at;
            at += (bytes + 63) / 64 * 64;
            return found;
        };
        const size_t width = encoder.width, widest = encoder.widest;
        qkv = place(4 * tokens * 3 * width);
        attended = place(4 * tokens * width);
        block = place(4 * kBlockRows * width);
        inner = place(4 * kBlockRows * widest);
        sums = place(4 * kBlockRows * (width + kPanel));
        attention = place(attention_scratch_bytes(longest, width / encoder.num_heads));
        end = at;
    }
};

}  // namespace
