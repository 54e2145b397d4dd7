// Computes the mean of the tokens of each packed sequence.
#pragma once
#include "lanes.h"

namespace {

// `to` is (num_sequences, width) float; sums are in float.
template <class T>
void pool_mean(const void* hidden, int64_t width, const int32_t* bounds, int32_t num_sequences, float* to) {
    const typename T::Stored* rows = static_cast<const typename T::Stored*>(hidden);
    for (int i = 0; i < num_sequences; ++i, to += width) {
        const Vec share = broadcast(1.0f / static_cast<float>(bounds[i + 1] - bounds[i]));
        for (int64_t c = 0; c < width; c += kLanes) {
            const Lanes lanes = first_lanes(static_cast<int>(width - c));
            Vec sum = zero();
            for (int64_t row = bounds[i]; row < bounds[i + 1]; ++row)
                sum += T::load(rows + row * width + c, lanes);
            store(to + c, lanes, sum * share);
        }
    }
}

}  // namespace
