// The encoder of encoder.h, for a number format and a way to multiply.
#pragma once
#include "attention_kernel.h"
#include "encoder.h"
#include "encoder_layout.h"
#include "products.h"

namespace {

template <class Products>
class Encoder {
    using T = typename Products::Format;
    using Stored = typename T::Stored;

    const SieEncoder& encoder_;
    const SieStep& step_;
    const int width_;
    Stored *hidden_, *qkv_, *attended_, *block_, *inner_;
    float* sums_;  // [row][width rounded up to a panel]
    void* attention_;

  public:
    Encoder(const SieEncoder& encoder, const SieStep& step)
        : encoder_(encoder), step_(step), width_(encoder.width), hidden_(static_cast<Stored*>(step.hidden)) {
        char* base = static_cast<char*>(step.scratch);
        const EncoderLayout layout(encoder, step.num_tokens, step.longest);
        qkv_ = reinterpret_cast<Stored*>(base + layout.qkv);
        attended_ = reinterpret_cast<Stored*>(base + layout.attended);
        block_ = reinterpret_cast<Stored*>(base + layout.block);
        inner_ = reinterpret_cast<Stored*>(base + layout.inner);
        sums_ = reinterpret_cast<float*>(base + layout.sums);
        attention_ = base + layout.attention;
    }

    void run() {
        embed();
        for (int i = 0; i < encoder_.num_layers; ++i) {
            const SieLayer& layer = encoder_.layers[i];
            for (int first = 0; first < step_.num_tokens; first += kBlockRows)
                linear(layer.qkv, hidden_ + at(first, width_), rows_from(first), qkv_ + at(first, 3 * width_),
                       [](Vec x) { return x; });
            attend_all();
            for (int first = 0; first < step_.num_tokens; first += kBlockRows) rest_of_layer(layer, first);
        }
    }

  private:
    static size_t at(int row, int width) { return static_cast<size_t>(row) * width; }
    int rows_from(int first) const {
        const int rest = step_.num_tokens - first;
        return rest < kBlockRows ? rest : kBlockRows;
    }
    size_t sums_stride() const { return (width_ + kPanel - 1) / kPanel * kPanel; }

    void embed() {
        const Stored* words = static_cast<const Stored*>(encoder_.words);
        const Stored* positions = static_cast<const Stored*>(encoder_.positions);
        const Stored* types = static_cast<const Stored*>(encoder_.types);
        for (int i = 0; i < step_.num_tokens; ++i) {
            const Stored* word = words + step_.ids[i] * width_;
            const Stored* position = positions + step_.positions[i] * width_;
            const Stored* type = types ? types + (step_.types ? step_.types[i] : 0) * width_ : nullptr;
            for (int c = 0; c < width_; c += kLanes) {
                const __mmask16 lanes = first_lanes(width_ - c);
                Vec sum = T::load(word + c, lanes);
                if (type) sum = _mm512_add_ps(sum, T::load(type + c, lanes));
                _mm512_storeu_ps(sums_ + c, _mm512_add_ps(sum, T::load(position + c, lanes)));
            }
            normalise(sums_, encoder_.after_embedding, hidden_ + at(i, width_));
        }
    }

    void attend_all() {
        const int32_t stride = 3 * width_, head = width_ / encoder_.num_heads;
        const SieAttention shape{qkv_,   qkv_ + width_, qkv_ + 2 * width_, attended_,     stride,
                                 head,   stride,        head,              stride,        head,
                                 width_, head,          step_.bounds,      step_.seen,    step_.num_sequences,
                                 encoder_.num_heads,    encoder_.num_heads, head,         encoder_.scale,
                                 0,      0};
        Attention<T>(shape, step_.longest, attention_).run();
    }

    void rest_of_layer(const SieLayer& layer, int first) {
        const int rows = rows_from(first);
        Stored* hidden = hidden_ + at(first, width_);
        add_and_normalise(layer.out, attended_ + at(first, width_), rows, hidden, layer.after_attention, block_);
        switch (encoder_.activation) {
            case kGelu: linear(layer.up, block_, rows, inner_, [](Vec x) { return gelu(x); }); break;
            case kGeluTanh: linear(layer.up, block_, rows, inner_, [](Vec x) { return gelu_tanh(x); }); break;
            case kRelu: linear(layer.up, block_, rows, inner_, [](Vec x) { return _mm512_max_ps(_mm512_setzero_ps(), x); }); break;
            default: linear(layer.up, block_, rows, inner_, [](Vec x) { return times_sigmoid(x, x); });
        }
        add_and_normalise(layer.down, inner_, rows, block_, layer.after_block, hidden);
    }

    template <class Activation>
    static void linear(const SieDense& linear, const Stored* from, int rows, Stored* to, Activation activate) {
        multiply<Products>(linear, from, rows, [&](int first, int count, int column, const float* tile) {
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
                           const SieNorm& norm, Stored* to) {
        const size_t stride = sums_stride();
        multiply<Products>(linear, from, rows, [&](int first, int count, int column, const float* tile) {
            for (int r = 0; r < count; ++r)
                for (int c = 0; c < kPanel; c += kLanes)
                    _mm512_storeu_ps(sums_ + (first + r) * stride + column + c, _mm512_load_ps(tile + r * kPanel + c));
        });
        for (int r = 0; r < rows; ++r) {
            float* sums = sums_ + r * stride;
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
