// Offsets of the parts of a decoder's scratch memory.
#pragma once
#include <cstddef>

#include "byte_rows.h"
#include "decoder.h"

namespace {

constexpr int kFewRows = 16;        // rows that one thread steps through alone: another would wake too late
constexpr int kPromptBlock = 12;    // prompt queries of a block
constexpr int kPromptRows = 8 * kPromptBlock;  // rows of one piece of prompt attention, heads times tokens
constexpr int kPromptKeys = 256;    // keys that such a piece reads at a time
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

inline int64_t keys_seen(int64_t position, int64_t window) { return window && position >= window ? window : position + 1; }

// The likeliest tokens of a row that one thread has seen, one for each of 16 lanes.
struct alignas(64) BestLanes {
    float values[16];
    int32_t tokens[16];
    int32_t has_nan;
};

struct DecoderLayout {
    size_t hidden, inner, input, product, query, attended, partials, kept, screen, threads;
    // Bytes of a thread; offsets of its memory for unpacking, the likeliest tokens, and the least that they must reach.
    size_t thread, unpacked, best, least;
    size_t end;

    DecoderLayout(const SieDecoder& decoder, const SieDecoderStep& step) {
        const size_t tokens = step.num_tokens, rows = tokens > static_cast<size_t>(step.num_kept) ? tokens : step.num_kept;
        const size_t heads = decoder.num_heads, head = (decoder.head_width + 15) / 16 * 16;
        size_t inputs = 0, outputs = 0, inner_width = 0, widest = 0;
        const auto most = [](size_t& value, size_t other) { value = other > value ? other : value; };
        for (int i = 0; i < decoder.num_layers; ++i) {
            const SieDecoderLayer& layer = decoder.layers[i];
            most(inputs, row_bytes(layer.qkv.inputs));
            most(inputs, row_bytes(layer.out.inputs));
            most(inputs, row_bytes(layer.up.inputs));
            most(inner_width, row_bytes(layer.down.inputs));
            most(outputs, layer.qkv.outputs);
            most(outputs, layer.down.inputs);
            most(outputs, decoder.width);
            most(widest, unpacked_bytes(layer.qkv.inputs));
            most(widest, unpacked_bytes(layer.out.inputs));
            most(widest, unpacked_bytes(layer.down.inputs));
        }
        most(inputs, row_bytes(decoder.head.inputs));
        most(widest, unpacked_bytes(decoder.head.inputs));
        size_t at = 0;
        const auto place = [&at](size_t bytes) {
            const size_t found = at;
            at += (bytes + 63) / 64 * 64;
            return found;
        };
        // A prompt's packed keys and values, scores, weights and sums; or a token's scores.
        const size_t group = heads / decoder.num_key_heads, prompt_rows = group > kPromptRows ? group : kPromptRows;
        const size_t of_prompt = 4 * kPromptKeys * head * 2 + kPromptBlock * kPromptKeys * 8 + prompt_rows * (head * 4 + 8) + 64;
        const size_t of_token = 4 * group * kSegmentKeys;
        place(of_prompt > of_token ? of_prompt : of_token);
        unpacked = place(widest);
        best = place(step.best ? step.num_kept * sizeof(BestLanes) : 0);
        least = place(is_screened(decoder, step) ? step.num_kept * sizeof(float) : 0);
        thread = at;
        at = 0;
        hidden = place(4 * tokens * decoder.width);
        input = place(rows * inputs);
        inner = place(tokens * inner_width);
        product = place(4 * tokens * outputs);
        query = place(4 * tokens * heads * decoder.head_width);
        attended = place(4 * tokens * heads * decoder.head_width);
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
