// Matrix products of weights and rows in eight bits, with exact sums in 32 bits: by VNNI, or in AMX tiles.
//
// A weight is scale * w, with one scale for each output and w from -127 to 127. A value of a row is low + step * q, with
// one low and one step for each row and q from 0 to 255. So an output is step * scale * (sum of q w) + low * scale * (sum
// of w). The first sum is the product of bytes, the second is known when weights are packed.
#pragma once
#include "byte_rows.h"
#include "products.h"

namespace {

// Rows of any stored format, converted to bytes; the room has byte_rows_bytes bytes.
template <class T>
struct ByteRows {
    size_t stride;
    float *steps, *lows;
    uint8_t* bytes;

    ByteRows(const SieDense& linear, const typename T::Stored* from, size_t apart, int num_rows, char* room)
        : stride(byte_stride(linear.inputs)),
          steps(reinterpret_cast<float*>(room)),
          lows(steps + num_rows),
          bytes(reinterpret_cast<uint8_t*>(room) + byte_row_numbers(num_rows)) {
        for (int r = 0; r < num_rows; ++r) round(r, from + r * apart, linear.inputs);
    }

    const uint8_t* at(int row) const { return bytes + row * stride; }

  private:
    void round(int row, const typename T::Stored* from, int inputs) {
        Vec least = _mm512_set1_ps(3.4e38f), most = _mm512_set1_ps(-3.4e38f), odd = _mm512_setzero_ps();
        for (int k = 0; k < inputs; k += kLanes) {
            const __mmask16 lanes = first_lanes(inputs - k);
            const Vec x = T::load(from + k, lanes);
            least = _mm512_mask_min_ps(least, lanes, least, x);
            most = _mm512_mask_max_ps(most, lanes, most, x);
            odd = _mm512_fmadd_ps(x, _mm512_setzero_ps(), odd);  // zero, unless a value is not finite
        }
        const float low = _mm512_reduce_min_ps(least), range = _mm512_reduce_max_ps(most) - low;
        const bool is_finite = !_mm512_cmp_ps_mask(odd, odd, _CMP_UNORD_Q);
        // If the range is almost zero, only its low end counts. A row that is not finite gives no finite output.
        steps[row] = is_finite ? range / 255 : __builtin_nanf("");
        lows[row] = is_finite ? low : __builtin_nanf("");
        const Vec factor = _mm512_set1_ps(range > 1e-30f ? 255 / range : 0.0f), origin = _mm512_set1_ps(low);
        uint8_t* to = bytes + row * stride;
        for (int k = 0; k < inputs; k += kLanes) {
            const Vec x = T::load(from + k, first_lanes(inputs - k));
            const __m512i number = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_sub_ps(x, origin), factor));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to + k), _mm512_cvtusepi32_epi8(number));
        }
    }
};

// Converts a tile's sums of bytes, [rows][32] int32, into sums of values, in place.
template <class T>
void scale_tile(const SieDense& linear, int column, const ByteRows<T>& rows, int first, int count, float* tile) {
    for (int c = 0; c < kPanel; c += kLanes) {
        const Vec scales = _mm512_loadu_ps(linear.scales + column + c), sums = _mm512_loadu_ps(linear.sums + column + c);
        for (int r = 0; r < count; ++r) {
            float* at = tile + r * kPanel + c;
            const Vec product = _mm512_cvtepi32_ps(_mm512_load_si512(at));
            const Vec offset = _mm512_mul_ps(_mm512_set1_ps(rows.lows[first + r]), sums);
            const Vec scale = _mm512_mul_ps(_mm512_set1_ps(rows.steps[first + r]), scales);
            _mm512_store_ps(at, _mm512_fmadd_ps(product, scale, offset));
        }
    }
}

// Multiplies bytes of a row with bytes of a weight. The bits of a sum are those of 16 integers.
struct ByteNumbers {
    using Stored = uint8_t;
    static constexpr int kPerWord = 4;

    static Vec dot(Vec sum, __m512i row, __m512i weights) {
        return _mm512_castsi512_ps(_mm512_dpbusd_epi32(_mm512_castps_si512(sum), row, weights));
    }
};

// The rest of the encoder is in the format T.
template <class T>
struct Int8Products {
    using Format = T;
    using Input = ByteRows<T>;
    using Tiles = NoTiles;
    using OfAttention = DotAttention<T>;
    static constexpr int kMaxRows = DotProducts<ByteNumbers>::kMaxRows;

    static int words(const SieDense& linear) { return padded_inputs(linear.inputs) / ByteNumbers::kPerWord; }

    static void run(int count, const Input& rows, int first, const SieDense& linear, int column, const uint32_t* panel, float* to,
                    Ahead) {
        DotProducts<ByteNumbers>::template run_halves<kPanel>(count, rows.at(first), rows.stride, panel, panel + kLanes,
                                                              words(linear), to);
        scale_tile(linear, column, rows, first, count, to);
    }
};

}  // namespace
