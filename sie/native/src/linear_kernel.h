// Linear layers over packed weights: output = input x weights^T + bias.
//
// Few rows are bound by reading the weights: they are unpacked into registers and multiplied in float32. Many rows are
// bound by arithmetic: a pair of tiles is unpacked to bf16 once, in the second cache, and all rows run over it.
#pragma once
#include "lanes.h"
#include "linear.h"
#include "team.h"

namespace {

// How a group of a tile is read: `scales` of the 16 outputs and the weights of input k, not scaled.
struct Bf16Weights {
    static constexpr int32_t kFormat = kWeightBf16;
    static constexpr bool kScaled = false;
    const uint16_t* numbers;

    Bf16Weights(const uint8_t* group, const float*) : numbers(reinterpret_cast<const uint16_t*>(group)) {}
    Vec scales() const { return _mm512_set1_ps(1.0f); }
    void pair(int k, Vec& first, Vec& second) const { first = at(k), second = at(k + 1); }
    Vec at(int k) const {
        const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers + k * kTileOutputs));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
};

inline Vec read_scales(const uint8_t* group) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(group)));
}

struct Int8Weights {
    static constexpr int32_t kFormat = kWeightInt8;
    static constexpr bool kScaled = true;
    const uint8_t* group;

    Int8Weights(const uint8_t* group, const float*) : group(group) {}
    Vec scales() const { return read_scales(group); }
    void pair(int k, Vec& first, Vec& second) const { first = at(k), second = at(k + 1); }
    Vec at(int k) const {
        const uint8_t* numbers = group + 2 * kTileOutputs + k * kTileOutputs;
        return _mm512_cvtepi32_ps(
            _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers))));
    }
};

struct Int4Weights {
    static constexpr int32_t kFormat = kWeightInt4;
    static constexpr bool kScaled = true;
    const uint8_t* group;
    Vec codebook;

    Int4Weights(const uint8_t* group, const float* codebook) : group(group), codebook(_mm512_loadu_ps(codebook)) {}
    Vec scales() const { return read_scales(group); }
    void pair(int k, Vec& first, Vec& second) const {
        const uint8_t* numbers = group + 2 * kTileOutputs + k / 2 * kTileOutputs;
        const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers)));
        first = _mm512_permutexvar_ps(both, codebook);  // looks at the low four bits only
        second = _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), codebook);
    }
};

// The layer, and what its pieces share.
struct Layer {
    const SieLinear& call;
    int64_t groups, tile_bytes, width;  // width: inputs in whole groups
    float* few;                         // (rows, width) float32, for few rows
    uint16_t* many;                     // (rows, width) bf16, for many
    uint32_t* unpacked;                 // for each thread (width / 2, 32) words

    explicit Layer(const SieLinear& call)
        : call(call),
          groups(groups_of(call.inputs)),
          tile_bytes(groups * group_bytes(call.format)),
          width(groups * kGroupInputs),
          few(reinterpret_cast<float*>(call.scratch)),
          many(reinterpret_cast<uint16_t*>(call.scratch)),
          unpacked(reinterpret_cast<uint32_t*>(many + (call.rows * width + 31) / 32 * 32)) {}

    int64_t tiles() const { return (call.outputs + kTileOutputs - 1) / kTileOutputs; }
    const uint8_t* tile(int64_t number) const {
        return static_cast<const uint8_t*>(call.weights) + number * tile_bytes;
    }

    void store(int64_t row, int64_t tile, Vec sum) const {
        const int64_t first = tile * kTileOutputs;
        const __mmask16 lanes = first_lanes(static_cast<int>(call.outputs - first));
        if (call.bias) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(lanes, call.bias + first));
        const int64_t at = row * call.output_stride + first;
#ifdef __AVX512BF16__
        if (call.is_bf16) return Bf16::store(static_cast<uint16_t*>(call.output) + at, lanes, sum);
#endif
        F32::store(static_cast<float*>(call.output) + at, lanes, sum);
    }

    // Copies the input into whole groups of float32.
    void widen() const {
        for (int64_t row = 0; row < call.rows; ++row) {
            const int64_t from = row * call.input_stride;
            for (int64_t k = 0; k < width; k += kLanes) {
                const __mmask16 lanes = first_lanes(static_cast<int>(call.inputs - k));
                Vec values;
#ifdef __AVX512BF16__
                if (call.is_bf16)
                    values = Bf16::load(static_cast<const uint16_t*>(call.input) + from + k, lanes);
                else
#endif
                    values = F32::load(static_cast<const float*>(call.input) + from + k, lanes);
                _mm512_storeu_ps(few + row * width + k, values);
            }
        }
    }
};

// kRows rows of input from `row` on, times kTiles tiles from `tile` on.
template <class W, int kRows, int kTiles>
void multiply_few(const Layer& layer, int64_t row, int64_t tile) {
    Vec sums[kRows][kTiles];
    for (auto& each : sums)
        for (Vec& sum : each) sum = _mm512_setzero_ps();
    const float* input = layer.few + row * layer.width;
    for (int64_t group = 0; group < layer.groups; ++group, input += kGroupInputs) {
        Vec part[kRows][kTiles];
        if (W::kScaled)
            for (auto& each : part)
                for (Vec& sum : each) sum = _mm512_setzero_ps();
        auto& into = W::kScaled ? part : sums;
        const uint8_t* at[kTiles];
        for (int t = 0; t < kTiles; ++t) {
            at[t] = layer.tile(tile + t) + group * group_bytes(W::kFormat);
            // The next groups of a tile come from memory: some lines ahead of what the processor foresees.
            for (int64_t line = 0; line < group_bytes(W::kFormat); line += 64)
                _mm_prefetch(reinterpret_cast<const char*>(at[t]) + 2 * group_bytes(W::kFormat) + line, _MM_HINT_T0);
        }
        for (int k = 0; k < kGroupInputs; k += 2) {
            for (int t = 0; t < kTiles; ++t) {
                Vec first, second;
                W(at[t], layer.call.codebook).pair(k, first, second);
                for (int r = 0; r < kRows; ++r) {
                    const float* x = input + r * layer.width + k;
                    into[r][t] = _mm512_fmadd_ps(first, _mm512_set1_ps(x[0]), into[r][t]);
                    into[r][t] = _mm512_fmadd_ps(second, _mm512_set1_ps(x[1]), into[r][t]);
                }
            }
        }
        if (W::kScaled)
            for (int t = 0; t < kTiles; ++t) {
                const Vec scales = W(at[t], layer.call.codebook).scales();
                for (int r = 0; r < kRows; ++r) sums[r][t] = _mm512_fmadd_ps(part[r][t], scales, sums[r][t]);
            }
    }
    for (int r = 0; r < kRows; ++r)
        for (int t = 0; t < kTiles; ++t) layer.store(row + r, tile + t, sums[r][t]);
}

constexpr int64_t kPieceTiles = 8;

template <class W, int kTiles>
void few_rows(const Layer& layer, int64_t tile) {
    int64_t row = 0;
    const int64_t rows = layer.call.rows;
    for (; row + 4 <= rows; row += 4) multiply_few<W, 4, kTiles>(layer, row, tile);
    if (rows - row >= 2) multiply_few<W, 2, kTiles>(layer, row, tile), row += 2;
    if (rows - row >= 1) multiply_few<W, 1, kTiles>(layer, row, tile);
}

template <class W>
void few_piece(const void* task, int64_t piece, int32_t) {
    const Layer& layer = *static_cast<const Layer*>(task);
    int64_t tile = piece * kPieceTiles;
    const int64_t end = tile + kPieceTiles < layer.tiles() ? tile + kPieceTiles : layer.tiles();
    for (; tile + 4 <= end; tile += 4) few_rows<W, 4>(layer, tile);
    for (; tile < end; ++tile) few_rows<W, 1>(layer, tile);
}

#ifdef __AVX512BF16__
constexpr int kBlockRows = 12;

// Words of inputs k and k + 1 for 16 outputs, both scaled.
inline __m512i word_of(Vec first, Vec second) {
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(first));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(second));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

template <class W>
void unpack(const Layer& layer, int64_t tile, int half, uint32_t* to) {
    if (tile >= layer.tiles()) {
        for (int64_t word = 0; word < layer.width / 2; ++word)
            _mm512_storeu_si512(to + (word * 2 + half) * kTileOutputs, _mm512_setzero_si512());
        return;
    }
    for (int64_t group = 0; group < layer.groups; ++group) {
        const W weights(layer.tile(tile) + group * group_bytes(W::kFormat), layer.call.codebook);
        const Vec scales = weights.scales();
        for (int k = 0; k < kGroupInputs; k += 2) {
            Vec first, second;
            weights.pair(k, first, second);
            if (W::kScaled) first = _mm512_mul_ps(first, scales), second = _mm512_mul_ps(second, scales);
            const int64_t word = (group * kGroupInputs + k) / 2;
            _mm512_storeu_si512(to + (word * 2 + half) * kTileOutputs, word_of(first, second));
        }
    }
}

inline void multiply_block(const Layer& layer, const uint32_t* weights, int64_t row, int64_t tile) {
    const int64_t left = layer.call.rows - row;
    const int count = left < kBlockRows ? static_cast<int>(left) : kBlockRows;
    const uint16_t* input[kBlockRows];  // rows behind the last are the last again
    for (int r = 0; r < kBlockRows; ++r) input[r] = layer.many + (row + (r < count ? r : count - 1)) * layer.width;
    Vec sums[kBlockRows][2];
    for (auto& each : sums) each[0] = each[1] = _mm512_setzero_ps();
    for (int64_t word = 0; word < layer.width / 2; ++word) {
        const __m512i left_tile = _mm512_loadu_si512(weights + word * 2 * kTileOutputs);
        const __m512i right_tile = _mm512_loadu_si512(weights + (word * 2 + 1) * kTileOutputs);
#pragma GCC unroll 12
        for (int r = 0; r < kBlockRows; ++r) {
            const __m512i x = broadcast_word(input[r] + 2 * word);
            sums[r][0] = Bf16::dot(sums[r][0], x, left_tile);
            sums[r][1] = Bf16::dot(sums[r][1], x, right_tile);
        }
    }
    for (int r = 0; r < count; ++r)
        for (int t = 0; t < 2 && tile + t < layer.tiles(); ++t) layer.store(row + r, tile + t, sums[r][t]);
}

template <class W>
void many_piece(const void* task, int64_t piece, int32_t thread) {
    const Layer& layer = *static_cast<const Layer*>(task);
    uint32_t* weights = layer.unpacked + thread * layer.width * kTileOutputs;
    unpack<W>(layer, 2 * piece, 0, weights);
    unpack<W>(layer, 2 * piece + 1, 1, weights);
    for (int64_t row = 0; row < layer.call.rows; row += kBlockRows) multiply_block(layer, weights, row, 2 * piece);
}

// Copies the input into whole groups of bf16.
inline void narrow(const Layer& layer) {
    for (int64_t row = 0; row < layer.call.rows; ++row) {
        const uint16_t* from = static_cast<const uint16_t*>(layer.call.input) + row * layer.call.input_stride;
        for (int64_t k = 0; k < layer.width; k += kLanes) {
            const __mmask16 lanes = first_lanes(static_cast<int>(layer.call.inputs - k));
            const __m256i values = _mm256_maskz_loadu_epi16(lanes, from + k);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(layer.many + row * layer.width + k), values);
        }
    }
}
#endif

template <class W>
void multiply(const Layer& layer) {
#ifdef __AVX512BF16__
    if (layer.call.rows > kFewRows && layer.call.is_bf16) {
        narrow(layer);
        share_out((layer.tiles() + 1) / 2, layer.call.num_threads, many_piece<W>, &layer);
        return;
    }
#endif
    layer.widen();
    share_out((layer.tiles() + kPieceTiles - 1) / kPieceTiles, layer.call.num_threads, few_piece<W>, &layer);
}

inline void linear(const SieLinear& call) {
    const Layer layer(call);
    switch (call.format) {
        case kWeightBf16: return multiply<Bf16Weights>(layer);
        case kWeightInt8: return multiply<Int8Weights>(layer);
        case kWeightInt4: return multiply<Int4Weights>(layer);
    }
}

}  // namespace
