// Norms and rotations of one row, for encoders and decoders.
#pragma once
#include <cmath>

#include "lanes.h"

namespace {

// What a row becomes: each value off the mean, times the scale.
struct Moments {
    Vec mean, scale;

    Vec of(Vec values) const { return _mm512_mul_ps(_mm512_sub_ps(values, mean), scale); }
};

// Of a root mean square norm (Zhang and Sennrich, arXiv 1910.07467), or of a layer norm, whose variance takes a second pass.
template <class T>
Moments moments_of(const typename T::Stored* row, int width, bool is_rms, float epsilon) {
    Vec mean = _mm512_setzero_ps();
    if (!is_rms) {
        Vec sum = _mm512_setzero_ps();
        for (int c = 0; c < width; c += kLanes) sum = _mm512_add_ps(sum, T::load(row + c, first_lanes(width - c)));
        mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / width);
    }
    Vec squares = _mm512_setzero_ps();
    for (int c = 0; c < width; c += kLanes) {
        const __mmask16 lanes = first_lanes(width - c);
        const Vec off = _mm512_maskz_sub_ps(lanes, T::load(row + c, lanes), mean);
        squares = _mm512_fmadd_ps(off, off, squares);
    }
    return {mean, _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / width + epsilon))};
}

// Turns the two halves of a head's first `width` values into each other. Su et al., RoFormer, arXiv 2104.09864.
template <class T>
void rotate(typename T::Stored* values, const float* cosines, const float* sines, int width) {
    const int half = width / 2;
    for (int i = 0; i < half; i += kLanes) {
        const __mmask16 lanes = first_lanes(half - i);
        const auto get = [=](const float* from) { return _mm512_maskz_loadu_ps(lanes, from + i); };
        const Vec first = T::load(values + i, lanes), second = T::load(values + half + i, lanes);
        const Vec left = _mm512_fnmadd_ps(second, get(sines), _mm512_mul_ps(first, get(cosines)));
        const Vec right = _mm512_fmadd_ps(first, get(sines + half), _mm512_mul_ps(second, get(cosines + half)));
        T::store(values + i, lanes, left);
        T::store(values + half + i, lanes, right);
    }
}

}  // namespace
