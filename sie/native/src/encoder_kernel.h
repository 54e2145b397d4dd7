// The encoder of encoder.h, for a number format and a way to multiply.
#pragma once
#include "attention_kernel.h"
#include "encoder.h"
#include "encoder_layout.h"
#include "products.h"
#include "share.h"

namespace {

template <class Products>
class Encoder {
    using T = typename Products::Format;
    using Stored = typename T::Stored;

    // What a thread writes to between the products of its rows.
    struct Room {
        Stored *block, *inner;
        float* sums;  // [row][width rounded up to a panel]
        char* bytes;
    };

    const SieEncoder& encoder_;
    const SieStep& step_;
    const EncoderLayout layout_;
    const int width_;
    int block_rows_;
    Stored *hidden_, *qkv_, *attended_;

  public:
    Encoder(const SieEncoder& encoder, const SieStep& step)
        : encoder_(encoder),
          step_(step),
          layout_(encoder, step.num_tokens, step.longest, step.num_threads),
          width_(encoder.width),
          hidden_(static_cast<Stored*>(step.hidden)) {
        qkv_ = reinterpret_cast<Stored*>(base() + layout_.qkv);
        attended_ = reinterpret_cast<Stored*>(base() + layout_.attended);
        // A short step is shared out, too, in whole tiles.
        const int rows = (step.num_tokens + step.num_threads - 1) / step.num_threads;
        block_rows_ = (rows + Products::kMaxRows - 1) / Products::kMaxRows * Products::kMaxRows;
        if (block_rows_ > kBlockRows) block_rows_ = kBlockRows;
    }

    void run() {
        for_blocks([&](int first, int rows, const Room& room) { embed(first, rows, room); });
        for (int i = 0; i < encoder_.num_layers; ++i) {
            const SieLayer& layer = encoder_.layers[i];
            for_blocks([&](int first, int rows, const Room& room) {
                linear(layer.qkv, hidden_ + at(first, width_), rows, qkv_ + at(first, 3 * width_), room, [](Vec x) { return x; });
            });
            attend_all();
            for_blocks([&](int first, int rows, const Room& room) { rest_of_layer(layer, first, rows, room); });
        }
    }

  private:
    static size_t at(int row, int width) { return static_cast<size_t>(row) * width; }
    char* base() const { return static_cast<char*>(step_.scratch); }
    size_t sums_stride() const { return (width_ + kPanel - 1) / kPanel * kPanel; }

    // Calls run(first, rows, room) for every block of rows.
    template <class F>
    void for_blocks(const F& run) const {
        const int64_t count = (step_.num_tokens + block_rows_ - 1) / block_rows_;
        share(count, step_.num_threads, [&](int64_t block, int32_t thread) {
            char* own = base() + layout_.threads + thread * layout_.share;
            const Room room{reinterpret_cast<Stored*>(own + layout_.block), reinterpret_cast<Stored*>(own + layout_.inner),
                            reinterpret_cast<float*>(own + layout_.sums), own + layout_.bytes};
            const int first = block * block_rows_, rest = step_.num_tokens - first;
            run(first, rest < block_rows_ ? rest : block_rows_, room);
        });
    }

    void embed(int first, int rows, const Room& room) const {
        const Stored* words = static_cast<const Stored*>(encoder_.words);
        const Stored* positions = static_cast<const Stored*>(encoder_.positions);
        const Stored* types = static_cast<const Stored*>(encoder_.types);
        for (int i = first; i < first + rows; ++i) {
            const Stored* word = words + step_.ids[i] * width_;
            const Stored* position = positions + step_.positions[i] * width_;
            const Stored* type = types ? types + (step_.types ? step_.types[i] : 0) * width_ : nullptr;
            for (int c = 0; c < width_; c += kLanes) {
                const __mmask16 lanes = first_lanes(width_ - c);
                Vec sum = T::load(word + c, lanes);
                if (type) sum = _mm512_add_ps(sum, T::load(type + c, lanes));
                _mm512_storeu_ps(room.sums + c, _mm512_add_ps(sum, T::load(position + c, lanes)));
            }
            normalise(room.sums, encoder_.after_embedding, hidden_ + at(i, width_));
        }
    }

    void attend_all() const {
        const int32_t stride = 3 * width_, head = width_ / encoder_.num_heads;
        const SieAttention shape{qkv_,   qkv_ + width_, qkv_ + 2 * width_, attended_,     stride,
                                 head,   stride,        head,              stride,        head,
                                 width_, head,          step_.bounds,      step_.seen,    step_.num_sequences,
                                 encoder_.num_heads,    encoder_.num_heads, head,         encoder_.scale,
                                 0,      0,             step_.num_threads};
        attend<T>(shape, step_.longest, base() + layout_.attention);
    }

    void rest_of_layer(const SieLayer& layer, int first, int rows, const Room& room) const {
        Stored* hidden = hidden_ + at(first, width_);
        add_and_normalise(layer.out, attended_ + at(first, width_), rows, hidden, layer.after_attention, room.block, room);
        switch (encoder_.activation) {
            case kGelu: linear(layer.up, room.block, rows, room.inner, room, [](Vec x) { return gelu(x); }); break;
            case kGeluTanh: linear(layer.up, room.block, rows, room.inner, room, [](Vec x) { return gelu_tanh(x); }); break;
            case kRelu: linear(layer.up, room.block, rows, room.inner, room, [](Vec x) { return _mm512_max_ps(_mm512_setzero_ps(), x); }); break;
            default: linear(layer.up, room.block, rows, room.inner, room, [](Vec x) { return times_sigmoid(x, x); });
        }
        add_and_normalise(layer.down, room.inner, rows, room.block, layer.after_block, hidden, room);
    }

    template <class Activation>
    static void linear(const SieDense& linear, const Stored* from, int rows, Stored* to, const Room& room,
                       Activation activate) {
        multiply<Products>(linear, from, rows, room.bytes, [&](int first, int count, int column, const float* tile) {
            for (int c = column; c < column + kPanel && c < linear.outputs; c += kLanes) {
                const __mmask16 lanes = first_lanes(linear.outputs - c);
                const Vec bias = _mm512_maskz_loadu_ps(lanes, linear.bias + c);
                for (int r = 0; r < count; ++r) {
                    const Vec sum = _mm512_add_ps(_mm512_load_ps(tile + r * kPanel + c - column), bias);
                    T::store(to + at(first + r, linear.outputs) + c, lanes, activate(sum));
                }
            }
        });
    }

    // to = norm(linear(from) + residual); to may be residual.
    void add_and_normalise(const SieDense& linear, const Stored* from, int rows, const Stored* residual,
                           const SieNorm& norm, Stored* to, const Room& room) const {
        const size_t stride = sums_stride();
        multiply<Products>(linear, from, rows, room.bytes, [&](int first, int count, int column, const float* tile) {
            for (int r = 0; r < count; ++r)
                for (int c = 0; c < kPanel; c += kLanes)
                    _mm512_storeu_ps(room.sums + (first + r) * stride + column + c, _mm512_load_ps(tile + r * kPanel + c));
        });
        for (int r = 0; r < rows; ++r) {
            float* sums = room.sums + r * stride;
            for (int c = 0; c < width_; c += kLanes) {
                const __mmask16 lanes = first_lanes(width_ - c);
                const Vec added = _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, linear.bias + c),
                                                T::load(residual + at(r, width_) + c, lanes));
                _mm512_storeu_ps(sums + c, _mm512_add_ps(_mm512_loadu_ps(sums + c), added));
            }
            normalise(sums, norm, to + at(r, width_));
        }
    }

    // Layer norm of one row: its mean and variance over the width, in two passes.
    void normalise(const float* row, const SieNorm& norm, Stored* to) const {
        Vec sum = _mm512_setzero_ps();
        for (int c = 0; c < width_; c += kLanes)
            sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(first_lanes(width_ - c), row + c));
        const Vec mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / width_);
        Vec squares = _mm512_setzero_ps();
        for (int c = 0; c < width_; c += kLanes) {
            const __mmask16 lanes = first_lanes(width_ - c);
            const Vec off = _mm512_maskz_sub_ps(lanes, _mm512_loadu_ps(row + c), mean);
            squares = _mm512_fmadd_ps(off, off, squares);
        }
        const float variance = _mm512_reduce_add_ps(squares) / width_;
        const Vec scale = _mm512_set1_ps(1.0f / __builtin_sqrtf(variance + encoder_.epsilon));
        for (int c = 0; c < width_; c += kLanes) {
            const __mmask16 lanes = first_lanes(width_ - c);
            const Vec off = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(row + c), mean), scale);
            T::store(to + c, lanes,
                     _mm512_fmadd_ps(off, _mm512_maskz_loadu_ps(lanes, norm.weight + c),
                                     _mm512_maskz_loadu_ps(lanes, norm.bias + c)));
        }
    }
};

template <class Products>
void encode(const SieEncoder& encoder, const SieStep& step) {
    Encoder<Products>(encoder, step).run();
    Products::finish();
}

}  // namespace
