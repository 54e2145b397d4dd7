// Norms and rotations of one row, for encoders and decoders.
#pragma once
#include <cmath>

#include "lanes.h"

namespace {

// What a row becomes: each value off the mean, times the scale.
struct Moments {
    Vec mean, scale;

    Vec of(Vec values) const { return (values - mean) * scale; }
};

// Of a root mean square norm (Zhang and Sennrich, arXiv 1910.07467), or of a layer norm, whose variance takes a second pass.
template <class T>
Moments moments_of(const typename T::Stored* row, int width, bool is_rms, float epsilon) {
    Vec mean = zero();
    if (!is_rms) {
        Vec sum = zero();
        for (int c = 0; c < width; c += kLanes) sum += T::load(row + c, first_lanes(width - c));
        mean = broadcast(sum_of(sum) / width);
    }
    Vec squares = zero();
    for (int c = 0; c < width; c += kLanes) {
        const Lanes lanes = first_lanes(width - c);
        const Vec off = only(lanes, T::load(row + c, lanes) - mean);
        squares = fmadd(off, off, squares);
    }
    return {mean, broadcast(1.0f / std::sqrt(sum_of(squares) / width + epsilon))};
}

// Turns the two halves of a head's first `width` values into each other. Su et al., RoFormer, arXiv 2104.09864.
template <class T>
void rotate(typename T::Stored* values, const float* cosines, const float* sines, int width) {
    const int half = width / 2;
    for (int i = 0; i < half; i += kLanes) {
        const Lanes lanes = first_lanes(half - i);
        const auto get = [=](const float* from) { return load(from + i, lanes); };
        const Vec first = T::load(values + i, lanes), second = T::load(values + half + i, lanes);
        const Vec left = fnmadd(second, get(sines), first * get(cosines));
        const Vec right = fmadd(first, get(sines + half), second * get(cosines + half));
        T::store(values + i, lanes, left);
        T::store(values + half + i, lanes, right);
    }
}

}  // namespace
