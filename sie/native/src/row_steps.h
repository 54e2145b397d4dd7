// The steps of one row of a decoder between two products.
#pragma once
#include "row_norm.h"
#include "rows.h"

namespace {

// One over the root of the mean square of a row.
inline Vec inverse_root(const float* values, int width, float epsilon) {
    return moments_of<F32>(values, width, true, epsilon).scale;
}

inline void normalise(float* values, int width, const float* weight, float epsilon) {
    const Vec scale = inverse_root(values, width, epsilon);
    for (int i = 0; i < width; i += kLanes) {
        const __mmask16 lanes = first_lanes(width - i);
        const Vec scaled = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, values + i), scale);
        _mm512_mask_storeu_ps(values + i, lanes, _mm512_mul_ps(scaled, _mm512_maskz_loadu_ps(lanes, weight + i)));
    }
}

// Writes an input row of products: the values, normalised if there is a weight.
inline void write_row(const Rows& to, int64_t row, const float* values, const float* weight, float epsilon) {
    if (!weight) {
        to.write(row, [=](int64_t k, __mmask16 lanes) { return _mm512_maskz_loadu_ps(lanes, values + k); });
        return;
    }
    const Vec scale = inverse_root(values, static_cast<int>(to.inputs), epsilon);
    to.write(row, [=](int64_t k, __mmask16 lanes) {
        const Vec scaled = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, values + k), scale);
        return _mm512_mul_ps(scaled, _mm512_maskz_loadu_ps(lanes, weight + k));
    });
}

inline void narrow(Number::Stored* to, const float* from, int count) {
    for (int i = 0; i < count; i += kLanes) {
        const __mmask16 lanes = first_lanes(count - i);
        Number::store(to + i, lanes, _mm512_maskz_loadu_ps(lanes, from + i));
    }
}

// Adds scale times values to `to`; the values are normalised if there is a weight.
inline void add_row(float* to, const float* values, int width, const float* weight, float epsilon, float scale) {
    const Vec factor = _mm512_set1_ps(scale), root = weight ? inverse_root(values, width, epsilon) : factor;
    for (int i = 0; i < width; i += kLanes) {
        const __mmask16 lanes = first_lanes(width - i);
        Vec some = _mm512_maskz_loadu_ps(lanes, values + i);
        if (weight) some = _mm512_mul_ps(_mm512_mul_ps(some, root), _mm512_maskz_loadu_ps(lanes, weight + i));
        _mm512_mask_storeu_ps(to + i, lanes, _mm512_fmadd_ps(some, factor, _mm512_maskz_loadu_ps(lanes, to + i)));
    }
}

// Stores a pair of sums in a row; `outputs` is the length of the row.
inline void store_pair(float* to, int64_t outputs, int64_t pair, Vec left, Vec right) {
    const int rest = static_cast<int>(outputs - pair * kPairOutputs);
    to += pair * kPairOutputs;
    _mm512_mask_storeu_ps(to, first_lanes(rest), left);
    _mm512_mask_storeu_ps(to + kTileOutputs, first_lanes(rest - kTileOutputs), right);
}

}  // namespace
