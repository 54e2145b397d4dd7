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
        const Lanes lanes = first_lanes(width - i);
        const Vec scaled = load(values + i, lanes) * scale;
        store(values + i, lanes, scaled * load(weight + i, lanes));
    }
}

// Writes an input row of products: the values, normalised if there is a weight.
inline void write_row(const Rows& to, int64_t row, const float* values, const float* weight, float epsilon) {
    if (!weight) {
        to.write(row, [=](int64_t k, Lanes lanes) { return load(values + k, lanes); });
        return;
    }
    const Vec scale = inverse_root(values, static_cast<int>(to.inputs), epsilon);
    to.write(row, [=](int64_t k, Lanes lanes) {
        const Vec scaled = load(values + k, lanes) * scale;
        return scaled * load(weight + k, lanes);
    });
}

inline void narrow(Number::Stored* to, const float* from, int count) {
    for (int i = 0; i < count; i += kLanes) {
        const Lanes lanes = first_lanes(count - i);
        Number::store(to + i, lanes, load(from + i, lanes));
    }
}

// Adds scale times values to `to`; the values are normalised if there is a weight.
inline void add_row(float* to, const float* values, int width, const float* weight, float epsilon, float scale) {
    const Vec factor = broadcast(scale), root = weight ? inverse_root(values, width, epsilon) : factor;
    for (int i = 0; i < width; i += kLanes) {
        const Lanes lanes = first_lanes(width - i);
        Vec some = load(values + i, lanes);
        if (weight) some = some * root * load(weight + i, lanes);
        store(to + i, lanes, fmadd(some, factor, load(to + i, lanes)));
    }
}

// Stores a pair of sums in a row; `outputs` is the length of the row.
inline void store_pair(float* to, int64_t outputs, int64_t pair, Vec left, Vec right) {
    const int rest = static_cast<int>(outputs - pair * kPairOutputs);
    to += pair * kPairOutputs;
    store(to, first_lanes(rest), left);
    store(to + kTileOutputs, first_lanes(rest - kTileOutputs), right);
}

}  // namespace
