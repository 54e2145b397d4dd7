// Linear layers over packed weights: output = input x weights^T + bias.
//
// Reading the weights limits few rows, so weights are multiplied in their own format. Arithmetic limits many rows, so
// weights become bf16, once for all rows.
#pragma once
#include "pairs.h"

namespace {

inline void linear(const SieLinear& call) {
    using Stored = Number::Stored;
    const SieMatrix& matrix = call.matrix;
    char* scratch = static_cast<char*>(call.scratch);
    const Rows rows{scratch, matrix.inputs, form_of(matrix.format, call.rows)};
    for (int64_t row = 0; row < call.rows; ++row) {
        const Stored* from = static_cast<const Stored*>(call.input) + row * call.input_stride;
        rows.write(row, [from](int64_t k, Lanes lanes) { return Number::load(from + k, lanes); });
    }
    const int64_t room = (call.rows * row_bytes(matrix.inputs) + 63) / 64 * 64;
    const Product product{matrix, rows, call.rows, false, call.num_threads, scratch + room, unpacked_bytes(matrix.inputs)};
    multiply_pairs(product, [&](int64_t row, int64_t pair, Vec left, Vec right, int32_t) {
        const int64_t first = pair * kPairOutputs;
        Stored* to = static_cast<Stored*>(call.output) + row * call.output_stride + first;
        const int rest = static_cast<int>(matrix.outputs - first);
        Number::store(to, first_lanes(rest), left);
        Number::store(to + kTileOutputs, first_lanes(rest - kTileOutputs), right);
    });
}

}  // namespace
