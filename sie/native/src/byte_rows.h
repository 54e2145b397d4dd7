// Sizes of rows in eight bits, as products_int8.h keeps them.
#pragma once
#include <cstddef>

constexpr int kByteInputs = 64;  // a row is padded to a multiple of this: a word of four for each of the 16 rows of a tile

constexpr int padded_inputs(int inputs) { return (inputs + kByteInputs - 1) / kByteInputs * kByteInputs; }

// Bytes from one row to the next, one cache line more than needed: of rows that are 4096 bytes apart, the level 1 cache
// keeps only as many as a set has ways.
constexpr size_t byte_stride(int inputs) { return padded_inputs(inputs) + 64; }

// Bytes of the two numbers of each row, in whole cache lines: the rows themselves lie behind them.
constexpr size_t byte_row_numbers(size_t num_rows) { return (2 * sizeof(float) * num_rows + 63) / 64 * 64; }

constexpr size_t byte_rows_bytes(size_t num_rows, int inputs) { return byte_row_numbers(num_rows) + num_rows * byte_stride(inputs); }
