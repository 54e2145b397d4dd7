// Offsets of the parts of a decoder's scratch memory.
#pragma once
#include <cstddef>

#include "byte_rows.h"
#include "decoder.h"

namespace {

constexpr int kFewRows = 16;        // rows that one thread steps through alone: another would wake too late
constexpr int kPromptRows = 96;     // rows of one piece of prompt attention, heads times tokens
constexpr int kPromptKeys = 256;    // keys that such a piece reads at a time
constexpr int kMostPromptBlock = 32;  // rows of it that any level multiplies together
constexpr int kPromptPadding = 32;  // values between its rows, so that they do not evict each other from the level 1 cache
constexpr size_t kMostBlockRows = 256;  // rows that any level takes through a layer together
constexpr int kSegmentKeys = 512;   // keys of a piece of one token's attention
constexpr int kShortSlot = 2;       // slots with up to this number of tokens compute attention token by token

constexpr int kScreenRows = 32;     // rows up to which a rounded head is asked first

// Whether the likeliest tokens are looked for with the rounded head first (screen.h).
inline bool is_screened(const SieDecoder& decoder, const SieDecoderStep& step) {
    return decoder.screen.tiles && step.best && !step.logits && step.num_kept > 0 && step.num_kept <= kScreenRows;
}

// Rows in float32 and in bytes; a bound for each row and pair of tiles; numbers of pairs.
inline int64_t screen_bytes(const SieDecoder& decoder, const SieDecoderStep& step) {
    const int64_t rows = step.num_kept, inputs = decoder.head.inputs;
    const int64_t in_floats = 4 * rows * padded_inputs(inputs), in_bytes = byte_rows_bytes(rows, inputs);
    return in_floats + in_bytes + 4 * (rows + 1) * pairs_of(decoder.head.outputs);
}

// The values of a head in whole words of a tile: a product may read up to there.
constexpr int prompt_columns(int head_width) { return (head_width + 31) / 32 * 32; }

// Packed keys and values, queries, weights, scores, sums, and two numbers of each row, in their widest forms.
inline size_t prompt_bytes(size_t group, int head_width) {
    const size_t rows = group > kPromptRows ? group : kPromptRows, columns = prompt_columns(head_width);
    const size_t apart = columns + kPromptPadding, weights = kMostPromptBlock * (kPromptKeys + kPromptPadding);
    return 4 * (2 * kPromptKeys * columns + (rows + kMostPromptBlock) * apart + weights + kMostPromptBlock * kPromptKeys +
                rows * (columns + 2));
}

inline int64_t keys_seen(int64_t position, int64_t window) { return window && position >= window ? window : position + 1; }

// The likeliest tokens of a row that one thread has seen, one for each of 16 lanes.
struct alignas(64) BestLanes {
    float values[16];
    int32_t tokens[16];
    int32_t has_nan;
};

struct DecoderLayout {
    size_t hidden, query, attended, attended_floats, head_input, partials, kept, screen, threads;
    // Bytes of a thread; offsets of its memory for unpacking, the likeliest tokens, the least that they must reach, and for
    // the rows of a block between products.
    size_t thread, unpacked, best, least, input, inner, product;
    size_t end;

    DecoderLayout(const SieDecoder& decoder, const SieDecoderStep& step) {
        const size_t tokens = step.num_tokens, block_rows = tokens < kMostBlockRows ? tokens : kMostBlockRows;
        const size_t heads = decoder.num_heads, head = (decoder.head_width + 15) / 16 * 16;
        size_t input_row = 0, attended_row = 0, outputs = 0, inner_row = 0, widest = unpacked_bytes(decoder.head.inputs);
        const auto most = [](size_t& value, size_t other) { value = other > value ? other : value; };
        for (int i = 0; i < decoder.num_layers; ++i) {
            const SieDecoderLayer& layer = decoder.layers[i];
            most(input_row, row_bytes(layer.qkv.inputs));
            most(input_row, row_bytes(layer.up.inputs));
            most(attended_row, row_bytes(layer.out.inputs));
            most(inner_row, row_bytes(layer.down.inputs));
            most(outputs, layer.qkv.outputs);
            most(outputs, layer.down.inputs);
            most(outputs, decoder.width);
            most(widest, unpacked_bytes(layer.qkv.inputs));
            most(widest, unpacked_bytes(layer.out.inputs));
            most(widest, unpacked_bytes(layer.down.inputs));
        }
        size_t at = 0;
        const auto place = [&at](size_t bytes) {
            const size_t found = at;
            at += (bytes + 63) / 64 * 64;
            return found;
        };
        const size_t group = heads / decoder.num_key_heads;
        const size_t of_prompt = prompt_bytes(group, decoder.head_width), of_token = 4 * group * kSegmentKeys;
        place(of_prompt > of_token ? of_prompt : of_token);
        unpacked = place(widest);
        best = place(step.best ? step.num_kept * sizeof(BestLanes) : 0);
        least = place(is_screened(decoder, step) ? step.num_kept * sizeof(float) : 0);
        input = place(block_rows * input_row);
        inner = place(block_rows * inner_row);
        product = place(4 * block_rows * outputs);
        thread = at;
        at = 0;
        hidden = place(4 * tokens * decoder.width);
        query = place(4 * tokens * heads * decoder.head_width);
        attended = place(tokens * attended_row);
        attended_floats = place(4 * tokens * heads * decoder.head_width);
        head_input = place(tokens * row_bytes(decoder.head.inputs));
        partials = place(4 * num_segments(step) * heads * (head + 2));
        kept = place(step.num_kept * sizeof(SieSlot));
        screen = place(is_screened(decoder, step) ? screen_bytes(decoder, step) : 0);
        threads = place(step.num_threads * thread);
        end = at;
    }

  private:
    // Segments of the tokens that run one by one: those of short slots; in the last layer the kept tokens.
    static size_t num_segments(const SieDecoderStep& step) {
        const auto of_last = [](const SieSlot& slot) { return (slot.start + slot.length + kSegmentKeys - 1) / kSegmentKeys; };
        size_t count = 0, of_kept = 0;
        for (int i = 0, kept = 0; i < step.num_slots; ++i) {
            const SieSlot& slot = step.slots[i];
            if (slot.length <= kShortSlot) count += slot.length * of_last(slot);
            for (; kept < step.num_kept && step.kept[kept] < slot.first_token + slot.length; ++kept) of_kept += of_last(slot);
        }
        return count > of_kept ? count : of_kept;
    }
};

}  // namespace
