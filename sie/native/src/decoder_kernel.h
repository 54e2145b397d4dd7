// The decoder of decoder.h: products, and the steps of each row between them.
#pragma once
#include <algorithm>
#include <cstring>

#include "best_tokens.h"
#include "decoder.h"
#include "decoder_layout.h"
#include "encoder.h"
#include "pairs.h"
#include "prompt_attention.h"
#include "row_steps.h"
#include "screen.h"
#include "token_attention.h"

namespace {

class Decoder {
    static constexpr int kRowsPerPiece = 8;

    const SieDecoder& decoder_;
    const DecoderLayout layout_;
    SieDecoderStep step_;  // from the last layer's attention on, only the kept tokens
    const int width_;
    float *hidden_, *product_, *attended_;
    Stored* query_;

  public:
    Decoder(const SieDecoder& decoder, const SieDecoderStep& step)
        : decoder_(decoder),
          layout_(decoder, step),
          step_(step),
          width_(decoder.width),
          hidden_(at<float>(layout_.hidden)),
          product_(at<float>(layout_.product)),
          attended_(at<float>(layout_.attended)),
          query_(at<Stored>(layout_.query)) {}

    void run() {
        const SieDecoderLayer *layer = decoder_.layers, *last = layer + decoder_.num_layers - 1;
        const Rows first = rows(layout_.input, layer->qkv);
        for_rows(step_.num_tokens, [&](int64_t row) {
            embed(row);
            write(first, row, hidden(row), layer->before_attention);
        });
        for (; layer <= last; ++layer) {
            project(*layer);
            if (layer == last && step_.num_kept < step_.num_tokens) keep();
            if (!step_.num_tokens) return;
            attention(*layer);
            const bool is_last = layer == last;
            block(*layer, is_last ? decoder_.head : layer[1].qkv, is_last ? decoder_.last_norm : layer[1].before_attention);
        }
        logits();
    }

  private:
    template <class P>
    P* at(size_t offset) const {
        return reinterpret_cast<P*>(static_cast<char*>(step_.scratch) + offset);
    }
    float* hidden(int64_t row) const { return hidden_ + row * width_; }
    float* product(int64_t row, int64_t outputs) const { return product_ + row * outputs; }
    char* thread_room(int32_t thread) const { return at<char>(layout_.threads + thread * layout_.thread); }

    // Calls run(row) for all rows. The caller does few rows alone, because another thread would wake too late.
    template <class F>
    void for_rows(int64_t count, const F& run) const {
        const int64_t pieces = (count + kRowsPerPiece - 1) / kRowsPerPiece;
        share(pieces, count > kFewRows ? step_.num_threads : 1, [&](int64_t piece, int32_t) {
            for (int64_t row = piece * kRowsPerPiece; row < std::min(count, (piece + 1) * kRowsPerPiece); ++row) run(row);
        });
    }

    // Returns the input rows of a matrix for the step's tokens.
    Rows rows(size_t offset, const SieMatrix& matrix) const {
        return {at<char>(offset), matrix.inputs, form_of(matrix.format, step_.num_tokens)};
    }

    // Calls done(row, pair, left, right, thread) for the product of the step's tokens with a matrix.
    template <class Done>
    void multiply(const SieMatrix& matrix, const Rows& rows, bool is_gated, const Done& done) const {
        multiply_pairs(product_of(matrix, rows, is_gated), done);
    }

    // Each thread unpacks into its own share of the scratch.
    Product product_of(const SieMatrix& matrix, const Rows& rows, bool is_gated) const {
        char* unpacked = at<char>(layout_.threads + layout_.unpacked);
        return {matrix, rows, step_.num_tokens, is_gated, step_.num_threads, unpacked, static_cast<int64_t>(layout_.thread)};
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
        return {decoder_, layer, step_, query_, rows(layout_.input, layer.out), attended_};
    }

    // Computes queries, and writes keys and values into their blocks.
    void project(const SieDecoderLayer& layer) const {
        const int64_t outputs = layer.qkv.outputs;
        multiply(layer.qkv, rows(layout_.input, layer.qkv), false, [&](int64_t row, int64_t pair, Vec left, Vec right, int32_t) {
            store_pair(product(row, outputs), outputs, pair, left, right);
        });
        const Attending by = attending(layer);
        for_tokens([&](const SieSlot& slot, int64_t token, int64_t position) { turn(by, slot, token, position); });
    }

    // Reduces the step to the kept tokens, each as a slot of its own. In the last layer, the other tokens need only keys
    // and values.
    void keep() {
        SieSlot* slots = at<SieSlot>(layout_.kept);
        const SieSlot* slot = step_.slots;
        const int64_t query_values = static_cast<int64_t>(decoder_.num_heads) * decoder_.head_width;
        for (int i = 0; i < step_.num_kept; ++i) {
            const int64_t token = step_.kept[i];
            while (token >= slot->first_token + slot->length) ++slot;
            slots[i] = {slot->start + token - slot->first_token, 1, i, slot->first_block};
            std::memmove(hidden(i), hidden(token), width_ * sizeof(float));
            std::memmove(query_ + i * query_values, query_ + token * query_values, query_values * sizeof(Stored));
        }
        step_.slots = slots;
        step_.num_slots = step_.num_tokens = step_.num_kept;
    }

    void attention(const SieDecoderLayer& layer) const {
        const Attending by = attending(layer);
        attend(by);
        if (!by.rows.takes_pieces())
            for_rows(step_.num_tokens, [&](int64_t row) { write(by.rows, row, attended_ + row * layer.out.inputs, nullptr); });
        add(layer.out, by.rows, layer.after_attention, layer.up, layer.before_block);
    }

    // Calls run(slot, token, position) for all tokens.
    template <class F>
    void for_tokens(const F& run) const {
        const auto one = [&](const SieSlot& slot, int64_t own) { run(slot, slot.first_token + own, slot.start + own); };
        if (step_.num_slots <= kFewRows) {
            for (const SieSlot* slot = step_.slots; slot < step_.slots + step_.num_slots; ++slot)
                for_rows(slot->length, [&](int64_t own) { one(*slot, own); });
            return;
        }
        for_rows(step_.num_slots, [&](int64_t i) {
            for (int64_t own = 0; own < step_.slots[i].length; ++own) one(step_.slots[i], own);
        });
    }

    // Rotates a token's queries and key by its position, and writes key and value into their block.
    void turn(const Attending& attending, const SieSlot& slot, int64_t token, int64_t position) const {
        const SieDecoderLayer& layer = attending.layer;
        const int head = decoder_.head_width, num_heads = decoder_.num_heads, num_keys = decoder_.num_key_heads;
        float* queries = product(token, layer.qkv.outputs);
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
        for_rows(count, [&](int64_t i) { by_token.merge(pieces[i]); });
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

    void block(const SieDecoderLayer& layer, const SieMatrix& next, const float* before_next) const {
        const int64_t inner = layer.down.inputs;
        const Rows to = rows(layout_.inner, layer.down);
        const bool is_gated = decoder_.is_gated, takes_pieces = to.takes_pieces();
        const auto put = [&](int64_t row, int64_t first, Vec values) {  // whole tiles
            if (takes_pieces) return to.put(row, first, kAllLanes, values);
            store(product(row, inner) + first, values);
        };
        with_activation([&](auto activate) {
            multiply(layer.up, rows(layout_.input, layer.up), is_gated, [&](int64_t row, int64_t pair, Vec left, Vec right, int32_t) {
                if (is_gated) return put(row, pair * kTileOutputs, activate(left) * right);
                put(row, pair * kPairOutputs, activate(left));
                if (pair * kPairOutputs + kTileOutputs < inner) put(row, pair * kPairOutputs + kTileOutputs, activate(right));
            });
        });
        if (!takes_pieces) for_rows(step_.num_tokens, [&](int64_t row) { write(to, row, product(row, inner), nullptr); });
        add(layer.down, to, layer.after_block, next, before_next);
    }

    template <class F>
    void with_activation(const F& run) const {
        switch (decoder_.activation) {
            case kGelu: return run([](Vec x) { return gelu(x); });
            case kGeluTanh: return run([](Vec x) { return gelu_tanh(x); });
            case kRelu: return run([](Vec x) { return max(zero(), x); });
            default: return run([](Vec x) { return times_sigmoid(x, x); });
        }
    }

    // Adds a product to the hidden states, and writes these as the input of the next product. Both are normalised first if
    // they have a weight.
    void add(const SieMatrix& matrix, const Rows& from, const float* weight, const SieMatrix& next, const float* before) const {
        multiply(matrix, from, false, [&](int64_t row, int64_t pair, Vec left, Vec right, int32_t) {
            store_pair(product(row, width_), width_, pair, left, right);
        });
        const Rows to = rows(layout_.input, next);
        for_rows(step_.num_tokens, [&](int64_t row) {
            add_row(hidden(row), product(row, width_), width_, weight, decoder_.epsilon, decoder_.residual_scale);
            write(to, row, hidden(row), before);
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
        const Rows from = rows(layout_.input, head);
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
            multiply_chosen(product_of(head, from, false), screen.find(), done);
            best.finish();
            return;
        }
#endif
        multiply_pairs(product_of(head, from, false), done);
        if (step_.best) best.finish();
    }
};

inline void decode(const SieDecoder& decoder, const SieDecoderStep& step) { Decoder(decoder, step).run(); }

}  // namespace
