// The encoder of encoder.h, for one number format and one kind of products.
#pragma once
#include "activations.h"
#include "attention_kernel.h"
#include "encoder.h"
#include "encoder_layout.h"
#include "products.h"
#include "row_norm.h"
#include "share.h"

namespace {

template <class Products>
class Encoder {
    using T = typename Products::Format;
    using Stored = typename T::Stored;

    static constexpr int64_t kFewTiles = 16;  // for each thread
    static constexpr int kRowsPerPiece = 16;
    // Rows of a block: so many that weights are read often enough for their use, and so few that the results between products
    // stay in the level 2 cache.
    static constexpr int kBlockRows = Products::kMaxRows < 32 ? 112 : kMostBlockRows;

    // Memory of a thread for results between the products of its rows.
    struct Room {
        Stored *input, *inner;
        float* sums;  // [row][width rounded up to a panel]
        char* bytes;
    };

    // Rows that follow each other, so many values apart.
    struct Lines {
        Stored* first;
        size_t apart;

        Stored* at(size_t row) const { return first + row * apart; }
    };

    // Rows of the step, and the threads that share out the columns of their products.
    struct Block {
        int first, rows;
        const Room& room;
        int32_t num_threads;
    };

    const SieEncoder& encoder_;
    const SieStep& step_;
    const EncoderLayout layout_;
    const int width_, heads_width_, keys_width_;
    float* stream_;    // what layers add to
    Stored* qkv_;      // of all tokens, back to back
    Lines attended_;

  public:
    Encoder(const SieEncoder& encoder, const SieStep& step)
        : encoder_(encoder),
          step_(step),
          layout_(encoder, step.num_tokens, step.longest, step.num_threads),
          width_(encoder.width),
          heads_width_(encoder.num_heads * encoder.head_width),
          keys_width_(encoder.num_key_heads * encoder.head_width),
          stream_(reinterpret_cast<float*>(base() + layout_.stream)),
          qkv_(reinterpret_cast<Stored*>(base() + layout_.qkv)),
          attended_(lines(base() + layout_.attended, heads_width_)) {}

    void run() {
        const SieLayer *layer = encoder_.layers, *end = layer + encoder_.num_layers;
        for_blocks([&](const Block& block) {
            embed(block, layer->before_attention);
            project(*layer, block);
        });
        for (; layer < end; ++layer) {
            attend_all(*layer);
            for_blocks([&](const Block& block) { rest_of_layer(*layer, layer + 1 < end ? layer + 1 : nullptr, block); });
        }
    }

  private:
    char* base() const { return static_cast<char*>(step_.scratch); }
    static Lines lines(void* at, size_t width) {
        return {static_cast<Stored*>(at), row_bytes_apart(width * sizeof(Stored)) / sizeof(Stored)};
    }
    Lines input(const Block& block) const { return lines(block.room.input, width_); }
    size_t qkv_width() const { return heads_width_ + 2 * keys_width_; }
    float* stream(size_t row) const { return stream_ + row * width_; }

    // Calls run(block) for blocks of rows: whole tiles, of nearly equal sizes, and equally many for each thread. A step of few
    // tiles has its blocks one after the other, and threads share each product's columns: they read each weight once
    // together, none is without work, and a thread that is not scheduled holds up a small piece only.
    template <class F>
    void for_blocks(const F& run) const {
        constexpr int64_t kTile = Products::kMaxRows, kBlockTiles = kBlockRows / kTile;
        const int64_t tokens = step_.num_tokens, tiles = (tokens + kTile - 1) / kTile;
        const bool by_columns = step_.num_threads > 1 && tiles < kFewTiles * step_.num_threads;
        const int32_t inside = by_columns ? step_.num_threads : 1, threads = by_columns ? 1 : step_.num_threads;
        int64_t count = ((tiles + kBlockTiles - 1) / kBlockTiles + threads - 1) / threads * threads;
        if (count > tiles) count = tiles;
        share(count, threads, [&](int64_t i, int32_t thread) {
            char* own = base() + layout_.threads + thread * layout_.share;
            const Room room{reinterpret_cast<Stored*>(own + layout_.input), reinterpret_cast<Stored*>(own + layout_.inner),
                            reinterpret_cast<float*>(own + layout_.sums), own + layout_.bytes};
            const int64_t first = tiles * i / count * kTile, next = tiles * (i + 1) / count * kTile;
            run(Block{static_cast<int>(first), static_cast<int>((next < tokens ? next : tokens) - first), room, inside});
        });
    }

    // Calls run(row) for the rows of a block.
    template <class F>
    static void for_rows(const Block& block, const F& run) {
        share((block.rows + kRowsPerPiece - 1) / kRowsPerPiece, block.num_threads, [&](int64_t piece, int32_t) {
            const int first = static_cast<int>(piece) * kRowsPerPiece, end = first + kRowsPerPiece;
            for (int r = first; r < (end < block.rows ? end : block.rows); ++r) run(r);
        });
    }

    void embed(const Block& block, const SieNorm& before) const {
        const Stored* words = static_cast<const Stored*>(encoder_.words);
        const Stored* positions = static_cast<const Stored*>(encoder_.positions);
        const Stored* types = static_cast<const Stored*>(encoder_.types);
        const Vec scale = broadcast(encoder_.embedding_scale);
        for (int r = 0; r < block.rows; ++r) {
            const int64_t i = block.first + r;
            const Stored* word = words + step_.ids[i] * width_;
            const Stored* position = positions ? positions + step_.positions[i] * width_ : nullptr;
            const Stored* type = types ? types + (step_.types ? step_.types[i] : 0) * width_ : nullptr;
            float* to = stream(i);
            for (int c = 0; c < width_; c += kLanes) {
                const Lanes lanes = first_lanes(width_ - c);
                Vec sum = T::load(word + c, lanes) * scale;
                if (type) sum += T::load(type + c, lanes);
                if (position) sum += T::load(position + c, lanes);
                store(to + c, lanes, sum);
            }
            if (encoder_.after_embedding.weight) normalise<F32, F32>(to, encoder_.after_embedding, width_, to);
            write(to, before, input(block).at(r));
        }
    }

    // Makes queries, keys and values of a block's input.
    void project(const SieLayer& layer, const Block& block) const {
        const Lines to{qkv_ + block.first * qkv_width(), qkv_width()};
        linear(layer.qkv, input(block), block, to, [](Vec x) { return x; });
        if (!layer.cosines && !layer.query.weight) return;
        for_rows(block, [&](int r) {
            Stored* queries = to.at(r);
            normalise_heads(queries, encoder_.num_heads, layer.query, layer.is_norm_whole);
            normalise_heads(queries + heads_width_, encoder_.num_key_heads, layer.key, layer.is_norm_whole);
            const int64_t turned = step_.positions[block.first + r] * encoder_.rotary_width;
            for (int h = 0; h < encoder_.num_heads + encoder_.num_key_heads && layer.cosines; ++h)
                rotate<T>(queries + h * encoder_.head_width, layer.cosines + turned, layer.sines + turned, encoder_.rotary_width);
        });
    }

    void normalise_heads(Stored* values, int heads, const SieNorm& norm, bool is_whole) const {
        if (!norm.weight) return;
        const int head = encoder_.head_width, width = is_whole ? heads * head : head;
        for (int h = 0; h < heads * head; h += width) normalise<T, T>(values + h, norm, width, values + h);
    }

    void attend_all(const SieLayer& layer) const {
        const int64_t stride = qkv_width(), head = encoder_.head_width, out = attended_.apart;
        const Stored *keys = qkv_ + heads_width_, *values = keys + keys_width_;
        const SieAttention shape{qkv_,         keys,           values,           attended_.first, stride, head, stride, head,
                                 stride,       head,           out,              head,            step_.bounds, step_.seen,
                                 step_.num_sequences, encoder_.num_heads, encoder_.num_key_heads, encoder_.head_width,
                                 layer.scale,  layer.is_causal, layer.window,    step_.num_threads, encoder_.bias_reach, layer.biases};
        attend<typename Products::OfAttention>(shape, step_.longest, base() + layout_.attention);
    }

    // Computes a layer after its attention, and the next layer's queries, keys and values; without a next one, the result.
    void rest_of_layer(const SieLayer& layer, const SieLayer* next, const Block& block) const {
        const Lines attended{attended_.at(block.first), attended_.apart};
        add(layer.out, attended, block, layer.of_attention, layer.after_attention, layer.before_block, input(block));
        const Lines inner = lines(block.room.inner, layer.down.inputs);
        with_activation<T>(encoder_.activation, [&](auto activate) { go_in(layer, block, inner, activate); });
        const Lines hidden{static_cast<Stored*>(step_.hidden) + static_cast<size_t>(block.first) * width_, static_cast<size_t>(width_)};
        add(layer.down, inner, block, layer.of_block, layer.after_block, next ? next->before_attention : encoder_.last,
            next ? input(block) : hidden);
        if (next) project(*next, block);
    }

    template <class Activation>
    void go_in(const SieLayer& layer, const Block& block, const Lines& to, Activation activate) const {
        if (!encoder_.is_gated) return linear(layer.up, input(block), block, to, activate);
        const SieDense& up = layer.up;
        multiply<Products>(up, input(block), block.rows, block.room.bytes, block.num_threads, [&](int first, int count, int column, const float* tile) {
            const int c = column / 2;
            const Lanes lanes = first_lanes(layer.down.inputs - c);
            const Vec gate_bias = bias(up, column, kAllLanes), bias_of_other = bias(up, column + kLanes, kAllLanes);
            for (int r = 0; r < count; ++r) {
                const Vec gate = load(tile + r * kPanel) + gate_bias;
                const Vec other = load(tile + r * kPanel + kLanes) + bias_of_other;
                T::store(to.at(first + r) + c, lanes, activate(gate) * other);
            }
        });
    }

    template <class Activation>
    static void linear(const SieDense& linear, const Lines& from, const Block& block, const Lines& to, Activation activate) {
        multiply<Products>(linear, from, block.rows, block.room.bytes, block.num_threads, [&](int first, int count, int column, const float* tile) {
            if (column + kPanel <= linear.outputs) {
                const Vec left = bias(linear, column, kAllLanes), right = bias(linear, column + kLanes, kAllLanes);
                for (int r = 0; r < count; ++r) {
                    const float* sums = tile + r * kPanel;
                    T::store_two(to.at(first + r) + column, activate(load(sums) + left), activate(load(sums + kLanes) + right));
                }
                return;
            }
            for (int c = column; c < linear.outputs; c += kLanes) {
                const Lanes lanes = first_lanes(linear.outputs - c);
                const Vec added = bias(linear, c, lanes);
                for (int r = 0; r < count; ++r) {
                    const Vec sum = load(tile + r * kPanel + c - column) + added;
                    T::store(to.at(first + r) + c, lanes, activate(sum));
                }
            }
        });
    }

    static Vec bias(const SieDense& linear, int column, Lanes lanes) {
        return linear.bias ? load(linear.bias + column, lanes) : zero();
    }

    // Adds linear(from), normalised by `of`, to the stream, and normalises that by `after`; writes it, normalised by
    // `before`, to `to`.
    void add(const SieDense& linear, const Lines& from, const Block& block, const SieNorm& of, const SieNorm& after,
             const SieNorm& before, const Lines& to) const {
        const size_t stride = (width_ + kPanel - 1) / kPanel * kPanel;
        multiply<Products>(linear, from, block.rows, block.room.bytes, block.num_threads, [&](int first, int count, int column, const float* tile) {
            for (int r = 0; r < count; ++r)
                for (int c = 0; c < kPanel; c += kLanes)
                    store(block.room.sums + (first + r) * stride + column + c, load(tile + r * kPanel + c));
        });
        const Vec scale = broadcast(encoder_.residual_scale);
        for_rows(block, [&](int r) {
            float *sums = block.room.sums + r * stride, *own = stream(block.first + r);
            const auto get = [&](int c, Lanes lanes) {
                return load(sums + c, lanes) + bias(linear, c, lanes);
            };
            if (of.weight) {
                for (int c = 0; c < width_; c += kLanes) store(sums + c, get(c, first_lanes(width_ - c)));
                normalise<F32, F32>(sums, of, width_, sums);
            }
            for (int c = 0; c < width_; c += kLanes) {
                const Lanes lanes = first_lanes(width_ - c);
                const Vec given = of.weight ? load(sums + c, lanes) : get(c, lanes);
                store(own + c, lanes, fmadd(given, scale, load(own + c, lanes)));
            }
            if (after.weight) normalise<F32, F32>(own, after, width_, own);
            write(own, before, to.at(r));
        });
    }

    // Writes a row of the stream, normalised where there is a norm.
    void write(const float* row, const SieNorm& norm, Stored* to) const {
        if (norm.weight) return normalise<F32, T>(row, norm, width_, to);
        for (int c = 0; c < width_; c += kLanes) {
            const Lanes lanes = first_lanes(width_ - c);
            T::store(to + c, lanes, load(row + c, lanes));
        }
    }

    // The norm of a row; to may be the row.
    template <class From, class To>
    void normalise(const typename From::Stored* row, const SieNorm& norm, int width, typename To::Stored* to) const {
        const Moments moments = moments_of<From>(row, width, encoder_.is_rms, encoder_.epsilon);
        for (int c = 0; c < width; c += kLanes) {
            const Lanes lanes = first_lanes(width - c);
            const Vec added = norm.bias ? load(norm.bias + c, lanes) : zero();
            To::store(to + c, lanes, fmadd(moments.of(From::load(row + c, lanes)), load(norm.weight + c, lanes), added));
        }
    }
};

template <class Products>
void encode(const SieEncoder& encoder, const SieStep& step) {
    Encoder<Products>(encoder, step).run();
}

}  // namespace
