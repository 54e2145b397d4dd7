// The decoder of decoder.h: products, and between them what happens to each row.
#pragma once
#include <algorithm>

#include "decoder.h"
#include "decoder_layout.h"
#include "encoder.h"
#include "pairs.h"
#include "prompt_attention.h"
#include "row_steps.h"
#include "token_attention.h"

namespace {

class Decoder {
    static constexpr int kRowsPerPiece = 8;

    const SieDecoder& decoder_;
    const SieDecoderStep& step_;
    const DecoderLayout layout_;
    const int width_;
    float *hidden_, *product_, *attended_;
    Stored* query_;

  public:
    Decoder(const SieDecoder& decoder, const SieDecoderStep& step)
        : decoder_(decoder),
          step_(step),
          layout_(decoder, step),
          width_(decoder.width),
          hidden_(at<float>(layout_.hidden)),
          product_(at<float>(layout_.product)),
          attended_(at<float>(layout_.attended)),
          query_(at<Stored>(layout_.query)) {}

    void run() {
        for_rows(step_.num_tokens, [&](int64_t row) { embed(row); });
        for (int i = 0; i < decoder_.num_layers; ++i) {
            const SieDecoderLayer& layer = decoder_.layers[i];
            attention(layer);
            block(layer);
        }
        if (step_.num_kept) logits();
    }

  private:
    template <class P>
    P* at(size_t offset) const {
        return reinterpret_cast<P*>(static_cast<char*>(step_.scratch) + offset);
    }
    float* hidden(int64_t row) const { return hidden_ + row * width_; }
    float* product(int64_t row, int64_t outputs) const { return product_ + row * outputs; }
    char* thread_room(int32_t thread) const { return at<char>(layout_.threads + thread * layout_.thread); }

    // Calls run(row) for all rows; few of them are done before another thread would have heard of it.
    template <class F>
    void for_rows(int64_t count, const F& run) const {
        const int64_t pieces = (count + kRowsPerPiece - 1) / kRowsPerPiece;
        share(pieces, count > kFewRows ? step_.num_threads : 1, [&](int64_t piece, int32_t) {
            for (int64_t row = piece * kRowsPerPiece; row < std::min(count, (piece + 1) * kRowsPerPiece); ++row) run(row);
        });
    }

    Rows rows(size_t offset, const SieMatrix& matrix, int64_t num_rows) const {
        return {at<char>(offset), matrix.inputs, form_of(matrix.format, num_rows)};
    }

    // Calls done(row, pair, left, right) for the product of rows with a matrix.
    template <class Done>
    void multiply(const SieMatrix& matrix, const Rows& rows, int64_t num_rows, bool is_gated, const Done& done) const {
        // Threads unpack where each one's share of the scratch has the room for it.
        char* unpacked = at<char>(layout_.threads + layout_.unpacked);
        multiply_pairs(Product{matrix, rows, num_rows, is_gated, step_.num_threads, unpacked, layout_.thread}, done);
    }

    void write(const Rows& to, int64_t row, const float* values, const float* weight) const {
        write_row(to, row, values, weight, decoder_.epsilon);
    }

    void embed(int64_t row) const {
        const Vec scale = _mm512_set1_ps(decoder_.embedding_scale);
        const Stored* from = static_cast<const Stored*>(decoder_.embeddings) + static_cast<int64_t>(step_.ids[row]) * width_;
        for (int c = 0; c < width_; c += kLanes) {
            const __mmask16 lanes = first_lanes(width_ - c);
            _mm512_mask_storeu_ps(hidden(row) + c, lanes, _mm512_mul_ps(Number::load(from + c, lanes), scale));
        }
    }

    void attention(const SieDecoderLayer& layer) const {
        const int64_t num_rows = step_.num_tokens, outputs = layer.qkv.outputs;
        const Rows input = rows(layout_.input, layer.qkv, num_rows);
        for_rows(num_rows, [&](int64_t row) { write(input, row, hidden(row), layer.before_attention); });
        multiply(layer.qkv, input, num_rows, false, [&](int64_t row, int64_t pair, Vec left, Vec right) {
            store_pair(product(row, outputs), outputs, pair, left, right);
        });
        const Attending attending{decoder_, layer, step_, query_, attended_};
        for_tokens([&](const SieSlot& slot, int64_t token, int64_t position) { turn(attending, slot, token, position); });
        attend(attending);
        const Rows attended = rows(layout_.input, layer.out, num_rows);
        for_rows(num_rows, [&](int64_t row) { write(attended, row, attended_ + row * layer.out.inputs, nullptr); });
        add(layer.out, attended, layer.after_attention);
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

    // Turns a token's queries and key by its position, and puts key and value into their block.
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
            rotate(queries + h * head, layer.cosines + turned, layer.sines + turned, decoder_.rotary_width);
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

    // The last tokens see most, so their pieces come first.
    void attend_prompt(const Attending& attending, const SieSlot& slot) const {
        const int64_t tokens = PromptAttention::tokens_of_piece(attending.group()), heads = decoder_.num_key_heads;
        const int64_t pieces = (slot.length + tokens - 1) / tokens;
        share(pieces * heads, step_.num_threads, [&](int64_t piece, int32_t thread) {
            const int64_t first = (pieces - 1 - piece / heads) * tokens;
            const int count = static_cast<int>(std::min(tokens, slot.length - first));
            PromptAttention(attending, slot, first, count, static_cast<int>(piece % heads), thread_room(thread)).run();
        });
    }

    void block(const SieDecoderLayer& layer) const {
        const int64_t num_rows = step_.num_tokens, inner = layer.down.inputs;
        const Rows input = rows(layout_.input, layer.up, num_rows), to = rows(layout_.inner, layer.down, num_rows);
        for_rows(num_rows, [&](int64_t row) { write(input, row, hidden(row), layer.before_block); });
        with_activation([&](auto activate) {
            const bool is_gated = decoder_.is_gated;
            multiply(layer.up, input, num_rows, is_gated, [&](int64_t row, int64_t pair, Vec left, Vec right) {
                float* values = product(row, inner);
                if (!is_gated) return store_pair(values, inner, pair, activate(left), activate(right));
                const int64_t first = pair * kTileOutputs;
                _mm512_storeu_ps(values + first, _mm512_mul_ps(activate(left), right));  // whole tiles
            });
        });
        for_rows(num_rows, [&](int64_t row) { write(to, row, product(row, inner), nullptr); });
        add(layer.down, to, layer.after_block);
    }

    template <class F>
    void with_activation(const F& run) const {
        switch (decoder_.activation) {
            case kGelu: return run([](Vec x) { return gelu(x); });
            case kGeluTanh: return run([](Vec x) { return gelu_tanh(x); });
            case kRelu: return run([](Vec x) { return _mm512_max_ps(_mm512_setzero_ps(), x); });
            default: return run([](Vec x) { return times_sigmoid(x, x); });
        }
    }

    // Adds a product to the hidden states, normalised before where there is a weight.
    void add(const SieMatrix& matrix, const Rows& from, const float* weight) const {
        const Vec scale = _mm512_set1_ps(decoder_.residual_scale);
        multiply(matrix, from, step_.num_tokens, false, [&](int64_t row, int64_t pair, Vec left, Vec right) {
            if (weight) return store_pair(product(row, width_), width_, pair, left, right);
            float* to = hidden(row) + pair * kPairOutputs;
            const int rest = static_cast<int>(width_ - pair * kPairOutputs);
            add_to(to, first_lanes(rest), left, scale);
            add_to(to + kTileOutputs, first_lanes(rest - kTileOutputs), right, scale);
        });
        if (!weight) return;
        for_rows(step_.num_tokens, [&](int64_t row) {
            normalise(product(row, width_), width_, weight, decoder_.epsilon);
            for (int c = 0; c < width_; c += kLanes) {
                const __mmask16 lanes = first_lanes(width_ - c);
                add_to(hidden(row) + c, lanes, _mm512_maskz_loadu_ps(lanes, product(row, width_) + c), scale);
            }
        });
    }

    void logits() const {
        const SieMatrix& head = decoder_.head;
        const Rows input = rows(layout_.input, head, step_.num_kept);
        for_rows(step_.num_kept, [&](int64_t row) { write(input, row, hidden(step_.kept[row]), decoder_.last_norm); });
        const Vec scale = _mm512_set1_ps(decoder_.logit_scale);
        const auto finish = [&](Vec sum) {
            const Vec scaled = _mm512_mul_ps(sum, scale);
            return decoder_.logit_cap > 0 ? capped(scaled, decoder_.logit_cap) : scaled;
        };
        multiply(head, input, step_.num_kept, false, [&](int64_t row, int64_t pair, Vec left, Vec right) {
            float* to = step_.logits + row * static_cast<int64_t>(head.outputs);
            store_pair(to, head.outputs, pair, finish(left), finish(right));
        });
    }
};

inline void decode(const SieDecoder& decoder, const SieDecoderStep& step) { Decoder(decoder, step).run(); }

}  // namespace
