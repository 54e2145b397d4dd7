// The decoder of decoder.h: products, and the steps of each row between them.
#pragma once
#include <algorithm>
#include <cstring>

#include "activations.h"
#include "best_tokens.h"
#include "decoder.h"
#include "decoder_layout.h"
#include "pairs.h"
#include "prompt_attention.h"
#include "row_steps.h"
#include "screen.h"
#include "token_attention.h"

namespace {

class Decoder {
    static constexpr int kRowsPerPiece = 8;
    static constexpr int64_t kRowsPerThread = 4 * kMostAtOnce;  // with fewer, threads share the columns of products

    // Rows of the step that go through a layer together, so that the results between products stay in the level 2 cache, and
    // the threads that share out the columns of these products.
    struct Block {
        int64_t first, rows;
        char* room;  // of the thread, at DecoderLayout.threads
        int32_t num_threads;
    };

    const SieDecoder& decoder_;
    const DecoderLayout layout_;
    SieDecoderStep step_;  // from the last layer's attention on, only the kept tokens
    const int width_;
    float *hidden_, *attended_;
    Stored* query_;

  public:
    Decoder(const SieDecoder& decoder, const SieDecoderStep& step)
        : decoder_(decoder),
          layout_(decoder, step),
          step_(step),
          width_(decoder.width),
          hidden_(at<float>(layout_.hidden)),
          attended_(at<float>(layout_.attended_floats)),
          query_(at<Stored>(layout_.query)) {}

    void run() {
        const SieDecoderLayer *layer = decoder_.layers, *last = layer + decoder_.num_layers - 1;
        for_blocks([&](const Block& block) {
            const Rows to = input(block, layer->qkv);
            for_rows(block.rows, block.num_threads, [&](int64_t row) {
                embed(block.first + row);
                write(to, row, hidden(block.first + row), layer->before_attention);
            });
            project(*layer, block);
        });
        for (; layer <= last; ++layer) {
            if (layer == last && step_.num_kept < step_.num_tokens) keep();
            if (!step_.num_tokens) return;
            attention(*layer);
            for_blocks([&](const Block& block) { rest_of_layer(*layer, layer < last ? layer + 1 : nullptr, block); });
        }
        logits();
    }

  private:
    template <class P>
    P* at(size_t offset) const {
        return reinterpret_cast<P*>(static_cast<char*>(step_.scratch) + offset);
    }
    float* hidden(int64_t row) const { return hidden_ + row * width_; }
    char* thread_room(int32_t thread) const { return at<char>(layout_.threads + thread * layout_.thread); }
    float* product(const Block& block, int64_t row, int64_t outputs) const {
        return reinterpret_cast<float*>(block.room + layout_.product) + row * outputs;
    }

    // Calls run(block) for blocks of nearly the same number of rows. Threads take blocks if there are enough rows, and else
    // share the columns of products, so that each weight is read once.
    template <class F>
    void for_blocks(const F& run) const {
        const int64_t tokens = step_.num_tokens;
        const bool by_columns = tokens < kRowsPerThread * step_.num_threads;
        const int32_t inside = by_columns ? step_.num_threads : 1, threads = by_columns ? 1 : step_.num_threads;
        const int64_t least = (tokens + kBlockRows - 1) / kBlockRows, count = (least + threads - 1) / threads * threads;
        share(count, threads, [&](int64_t i, int32_t thread) {
            const int64_t first = tokens * i / count, next = tokens * (i + 1) / count;
            run(Block{first, next - first, thread_room(thread), inside});
        });
    }

    // Calls run(row) for all rows. The caller does few rows alone, because another thread would wake too late.
    template <class F>
    static void for_rows(int64_t count, int32_t num_threads, const F& run) {
        const int64_t pieces = (count + kRowsPerPiece - 1) / kRowsPerPiece;
        share(pieces, count > kFewRows ? num_threads : 1, [&](int64_t piece, int32_t) {
            for (int64_t row = piece * kRowsPerPiece; row < std::min(count, (piece + 1) * kRowsPerPiece); ++row) run(row);
        });
    }

    // Returns rows in the form that a product with this matrix reads in this step.
    Rows rows(char* at, const SieMatrix& matrix) const { return {at, matrix.inputs, form_of(matrix.format, step_.num_tokens)}; }
    Rows input(const Block& block, const SieMatrix& matrix) const { return rows(block.room + layout_.input, matrix); }
    Rows attended(const SieDecoderLayer& layer) const { return rows(at<char>(layout_.attended), layer.out); }
    Rows head_input() const { return rows(at<char>(layout_.head_input), decoder_.head); }

    // Calls done(row, pair, left, right, thread) for the product of a block's rows with a matrix.
    template <class Done>
    void multiply(const SieMatrix& matrix, const Rows& rows, const Block& block, bool is_gated, const Done& done) const {
        multiply_pairs(Product{matrix, rows, block.rows, is_gated, block.num_threads, block.room + layout_.unpacked,
                               static_cast<int64_t>(layout_.thread)},
                       done);
    }

    void write(const Rows& to, int64_t row, const float* values, const float* weight) const {
        write_row(to, row, values, weight, decoder_.epsilon);
    }

    void embed(int64_t row) const {
        const Vec scale = broadcast(decoder_.embedding_scale);
        const Stored* from = static_cast<const Stored*>(decoder_.embeddings) + static_cast<int64_t>(step_.ids[row]) * width_;
        for (int c = 0; c < width_; c += kLanes) {
            const Lanes lanes = first_lanes(width_ - c);
            store(hidden(row) + c, lanes, Number::load(from + c, lanes) * scale);
        }
    }

    Attending attending(const SieDecoderLayer& layer) const {
        return {decoder_, layer, step_, query_, attended(layer), attended_};
    }

    // Computes a block's queries, and writes its keys and values into their blocks.
    void project(const SieDecoderLayer& layer, const Block& block) const {
        const int64_t outputs = layer.qkv.outputs;
        multiply(layer.qkv, input(block, layer.qkv), block, false, [&](int64_t row, int64_t pair, Vec left, Vec right, int32_t) {
            store_pair(product(block, row, outputs), outputs, pair, left, right);
        });
        const Attending by = attending(layer);
        for_rows(block.rows, block.num_threads, [&](int64_t row) {
            const int64_t token = block.first + row;
            turn(by, slot_of(token), token, product(block, row, outputs));
        });
    }

    // Returns the slot that a token belongs to.
    const SieSlot& slot_of(int64_t token) const {
        const auto begins_behind = [](int64_t token, const SieSlot& slot) { return token < slot.first_token; };
        return *(std::upper_bound(step_.slots, step_.slots + step_.num_slots, token, begins_behind) - 1);
    }

    // Reduces the step to the kept tokens, each as a slot of its own. In the last layer, the other tokens need only keys
    // and values.
    void keep() {
        SieSlot* slots = at<SieSlot>(layout_.kept);
        const int64_t query_values = static_cast<int64_t>(decoder_.num_heads) * decoder_.head_width;
        for (int i = 0; i < step_.num_kept; ++i) {
            const int64_t token = step_.kept[i];
            const SieSlot& slot = slot_of(token);
            slots[i] = {slot.start + token - slot.first_token, 1, i, slot.first_block};
            std::memmove(hidden(i), hidden(token), width_ * sizeof(float));
            std::memmove(query_ + i * query_values, query_ + token * query_values, query_values * sizeof(Stored));
        }
        step_.slots = slots;
        step_.num_slots = step_.num_tokens = step_.num_kept;
    }

    void attention(const SieDecoderLayer& layer) const {
        const Attending by = attending(layer);
        attend(by);
        if (by.rows.takes_pieces()) return;
        for_rows(step_.num_tokens, step_.num_threads,
                 [&](int64_t row) { write(by.rows, row, attended_ + row * layer.out.inputs, nullptr); });
    }

    // Rotates a token's queries and key by its position, and writes key and value into their block.
    void turn(const Attending& attending, const SieSlot& slot, int64_t token, float* queries) const {
        const SieDecoderLayer& layer = attending.layer;
        const int head = decoder_.head_width, num_heads = decoder_.num_heads, num_keys = decoder_.num_key_heads;
        const int64_t position = slot.start + token - slot.first_token;
        float* keys = queries + num_heads * head;
        const float* values = keys + num_keys * head;
        normalise_heads(queries, num_heads, layer.query_norm, layer.is_norm_whole);
        normalise_heads(keys, num_keys, layer.key_norm, layer.is_norm_whole);
        const int64_t turned = position * decoder_.rotary_width;
        for (int h = 0; h < num_heads + num_keys && layer.cosines; ++h)
            rotate<F32>(queries + h * head, layer.cosines + turned, layer.sines + turned, decoder_.rotary_width);
        Stored* to = query_ + token * num_heads * head;
        narrow(to, queries, num_heads * head);
        narrow(attending.key_of(slot, position, 0), keys, num_keys * head);
        narrow(attending.value_of(slot, position, 0), values, num_keys * head);
    }

    void normalise_heads(float* values, int heads, const float* weight, bool is_whole) const {
        if (!weight) return;
        const int head = decoder_.head_width;
        if (is_whole) return normalise(values, heads * head, weight, decoder_.epsilon);
        for (int h = 0; h < heads; ++h) normalise(values + h * head, head, weight, decoder_.epsilon);
    }

    void attend(const Attending& attending) const {
        constexpr int kLot = 64;
        TokenPiece pieces[kLot];
        int count = 0;
        for (int i = 0; i < step_.num_slots; ++i) {
            const SieSlot& slot = step_.slots[i];
            if (slot.length > kShortSlot) {
                attend_prompt(attending, slot);
                continue;
            }
            for (int64_t own = 0; own < slot.length; ++own) {
                if (count == kLot) attend_tokens(attending, pieces, count), count = 0;
                const int64_t first = count ? pieces[count - 1].first + pieces[count - 1].count : 0;
                pieces[count++] = {&slot, slot.first_token + own, slot.start + own, first,
                                   TokenAttention::num_segments(attending.layer, slot.start + own)};
            }
        }
        if (count) attend_tokens(attending, pieces, count);
    }

    void attend_tokens(const Attending& attending, const TokenPiece* pieces, int count) const {
        const TokenAttention by_token(attending, at<float>(layout_.partials));
        const int64_t heads = decoder_.num_key_heads, segments = pieces[count - 1].first + pieces[count - 1].count;
        share(segments * heads, step_.num_threads, [&](int64_t piece, int32_t thread) {
            const int64_t segment = piece / heads;
            const TokenPiece* own = pieces;
            while (own->first + own->count <= segment) ++own;
            float* room = reinterpret_cast<float*>(thread_room(thread));
            by_token.run(*own, segment - own->first, static_cast<int>(piece % heads), room);
        });
        for_rows(count, step_.num_threads, [&](int64_t i) { by_token.merge(pieces[i]); });
    }

    // The last tokens see the most keys, so their pieces come first.
    void attend_prompt(const Attending& attending, const SieSlot& slot) const {
        const int64_t tokens = PromptAttention::tokens_of_piece(attending.group()), heads = decoder_.num_key_heads;
        const int64_t pieces = (slot.length + tokens - 1) / tokens;
        share(pieces * heads, step_.num_threads, [&](int64_t piece, int32_t thread) {
            const int64_t first = (pieces - 1 - piece / heads) * tokens;
            const int count = static_cast<int>(std::min(tokens, slot.length - first));
            PromptAttention(attending, slot, first, count, static_cast<int>(piece % heads), thread_room(thread)).run();
        });
    }

    // Computes a layer after its attention, and the next layer's queries, keys and values; without a next one, the head's input.
    void rest_of_layer(const SieDecoderLayer& layer, const SieDecoderLayer* next, const Block& block) const {
        const Rows between = input(block, layer.up), inner = rows(block.room + layout_.inner, layer.down);
        add(layer.out, attended(layer).from(block.first), block, layer.after_attention, layer.before_block, between);
        go_in(layer, block, between, inner);
        if (!next) return add(layer.down, inner, block, layer.after_block, decoder_.last_norm, head_input().from(block.first));
        add(layer.down, inner, block, layer.after_block, next->before_attention, input(block, next->qkv));
        project(*next, block);
    }

    // Computes the input of a layer's last product.
    void go_in(const SieDecoderLayer& layer, const Block& block, const Rows& from, const Rows& to) const {
        const int64_t width = layer.down.inputs;
        const bool is_gated = decoder_.is_gated, takes_pieces = to.takes_pieces();
        const auto put = [&](int64_t row, int64_t first, Vec values) {  // whole tiles
            if (takes_pieces) return to.put(row, first, kAllLanes, values);
            store(product(block, row, width) + first, values);
        };
        with_activation<Number>(decoder_.activation, [&](auto activate) {
            multiply(layer.up, from, block, is_gated, [&](int64_t row, int64_t pair, Vec left, Vec right, int32_t) {
                if (is_gated) return put(row, pair * kTileOutputs, activate(left) * right);
                put(row, pair * kPairOutputs, activate(left));
                if (pair * kPairOutputs + kTileOutputs < width) put(row, pair * kPairOutputs + kTileOutputs, activate(right));
            });
        });
        if (takes_pieces) return;
        for_rows(block.rows, block.num_threads, [&](int64_t row) { write(to, row, product(block, row, width), nullptr); });
    }

    // Adds a product to a block's hidden states, and writes these as the input of the next product. Both are normalised
    // first if they have a weight.
    void add(const SieMatrix& matrix, const Rows& from, const Block& block, const float* weight, const float* before,
             const Rows& to) const {
        multiply(matrix, from, block, false, [&](int64_t row, int64_t pair, Vec left, Vec right, int32_t) {
            store_pair(product(block, row, width_), width_, pair, left, right);
        });
        for_rows(block.rows, block.num_threads, [&](int64_t row) {
            float* own = hidden(block.first + row);
            add_row(own, product(block, row, width_), width_, weight, decoder_.epsilon, decoder_.residual_scale);
            write(to, row, own, before);
        });
    }

    void logits() const {
        const SieMatrix& head = decoder_.head;
        const Vec scale = broadcast(decoder_.logit_scale);
        const auto finish = [&](Vec sum) {
            const Vec scaled = sum * scale;
            return decoder_.logit_cap > 0 ? capped(scaled, decoder_.logit_cap) : scaled;
        };
        const BestTokens best(step_, step_.best ? thread_room(0) + layout_.best : nullptr, layout_.thread);
        const Rows from = head_input();
        const Product product{head, from, step_.num_tokens, false, step_.num_threads, thread_room(0) + layout_.unpacked,
                              static_cast<int64_t>(layout_.thread)};
        const auto done = [&](int64_t row, int64_t pair, Vec left, Vec right, int32_t thread) {
            left = finish(left), right = finish(right);
            if (step_.logits) store_pair(step_.logits + row * static_cast<int64_t>(head.outputs), head.outputs, pair, left, right);
            if (!step_.best) return;
            const int64_t first = pair * kPairOutputs, rest = head.outputs - first;
            best.see(thread, row, first, first_lanes(static_cast<int>(rest)), left);
            best.see(thread, row, first + kTileOutputs, first_lanes(static_cast<int>(rest - kTileOutputs)), right);
        };
#ifdef __AVX512BF16__
        if (is_screened(decoder_, step_)) {
            const Screen screen(decoder_, step_, from, at<char>(layout_.screen), thread_room(0) + layout_.least, layout_.thread);
            multiply_chosen(product, screen.find(), done);
            best.finish();
            return;
        }
#endif
        multiply_pairs(product, done);
        if (step_.best) best.finish();
    }
};

inline void decode(const SieDecoder& decoder, const SieDecoderStep& step) { Decoder(decoder, step).run(); }

}  // namespace
