// Root mean square norm: each row divided by the root of its mean square, times a weight.
// Source: Zhang and Sennrich, arXiv 1910.07467.
#pragma once
#include "norm.h"
#include "row_norm.h"

namespace {

template <class T>
void normalise_row(const typename T::Stored* from, const float* weight, typename T::Stored* to, int width, float epsilon) {
    const Vec scale = moments_of<T>(from, width, true, epsilon).scale;
    for (int i = 0; i < width; i += kLanes) {
        const Lanes lanes = first_lanes(width - i);
        const Vec scaled = T::load(from + i, lanes) * scale;
        T::store(to + i, lanes, scaled * load(weight + i, lanes));
    }
}

template <class T>
void normalise(const SieRmsNorm& call) {
    using Stored = typename T::Stored;
    for (int64_t i = 0; i < call.outer; ++i) {
        const Stored* from = static_cast<const Stored*>(call.input) + i * call.input_outer;
        Stored* to = static_cast<Stored*>(call.output) + i * call.output_outer;
        for (int64_t j = 0; j < call.inner; ++j, from += call.input_inner, to += call.output_inner)
            normalise_row<T>(from, call.weight, to, call.width, call.epsilon);
    }
}

}  // namespace
