// Keys and values in blocks, and the arguments of attention over them.
#pragma once
#include "decoder.h"
#include "decoder_layout.h"
#include "lanes.h"
#include "rows.h"

namespace {

using Stored = Number::Stored;

// One layer's attention in one step.
struct Attending {
    const SieDecoder& decoder;
    const SieDecoderLayer& layer;
    const SieDecoderStep& step;
    const Stored* query;  // (num_tokens, num_heads, head_width)
    Rows rows;            // the result, of the same shape,
    float* attended;      // or, if rows take no pieces, the memory from which the rows are written

    int group() const { return decoder.num_heads / decoder.num_key_heads; }
    int64_t token_values() const { return static_cast<int64_t>(decoder.num_key_heads) * decoder.head_width; }
    int64_t query_values() const { return static_cast<int64_t>(decoder.num_heads) * decoder.head_width; }
    const Stored* query_of(int64_t token, int head) const { return query + token * query_values() + head * decoder.head_width; }
    void put(int64_t token, int head, int column, Vec values) const {
        const int64_t first = static_cast<int64_t>(head) * decoder.head_width + column;
        const Lanes lanes = first_lanes(decoder.head_width - column);
        if (rows.takes_pieces()) return rows.put(token, first, lanes, values);
        store(attended + token * query_values() + first, lanes, values);
    }

    int64_t row_of(const SieSlot& slot, int64_t position) const {
        const int64_t block = step.blocks[slot.first_block + position / decoder.block_tokens];
        return block * decoder.block_tokens + position % decoder.block_tokens;
    }
    Stored* key_of(const SieSlot& slot, int64_t position, int key_head) const {
        return static_cast<Stored*>(layer.keys) + row_of(slot, position) * token_values() + key_head * decoder.head_width;
    }
    Stored* value_of(const SieSlot& slot, int64_t position, int key_head) const {
        return static_cast<Stored*>(layer.values) + row_of(slot, position) * token_values() + key_head * decoder.head_width;
    }
    // The first position that a token sees; its own is the last.
    int64_t lowest(int64_t position) const { return position + 1 - keys_seen(position, layer.window); }

    static constexpr float kLog2E = 1.44269504f;

    // The factor of scores without a cap, for exponentials of base 2.
    float scale() const { return layer.scale * kLog2E; }

    // Returns the scaled scores, for exponentials of base 2.
    Vec scaled(Vec scores) const {
        scores *= broadcast(layer.scale);
        if (layer.cap > 0) scores = capped(scores, layer.cap);
        return scores * broadcast(kLog2E);
    }
};

}  // namespace
