// Multiplies up to eight rows with one tile of packed weights, which is read once, from front to back.
#pragma once
#include "rows.h"
#include "weights.h"

namespace {

constexpr int kFewAtOnce = 8;
// More rows are as fast in tiles of two (many_rows.h). In bf16 those also read further ahead; in float32 they unpack weights.
#ifdef __AMX_BF16__
constexpr int kMostDirect = 0;
#else
constexpr int kMostDirect = Number::kPerWord == 2 ? 2 : kFewAtOnce;
#endif

// Writes the sums of a tile for the rows from `row` on; sums has rows of kPairOutputs.
using FewKernel = void (*)(const SieMatrix& matrix, const uint8_t* tile, const Rows& rows, int64_t row, float* sums);

// The weights come from memory, and the processor prefetches only the next lines.
template <class W>
inline void prefetch_behind(const uint8_t* group) {
    constexpr int64_t kAhead = 2048;
    for (int64_t line = 0; line < group_bytes(W::kFormat); line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(group) + kAhead + line, _MM_HINT_T0);
}

template <class W, int kRows>
__attribute__((noinline)) void multiply_floats(const SieMatrix& matrix, const uint8_t* tile, const Rows& rows, int64_t row,
                                               float* sums) {
    Vec total[kRows];
    for (Vec& sum : total) sum = zero();
    for (int64_t group = 0; group < rows.groups(); ++group, tile += group_bytes(W::kFormat)) {
        const W weights(tile, matrix.codebook);
        prefetch_behind<W>(tile);
        Vec part[kRows];
        for (Vec& sum : part) sum = zero();
        for (int q = 0; q < kGroupInputs / 4; ++q) {
            Vec quad[4];
            weights.quad(q, quad);
            for (int r = 0; r < kRows; ++r) {
                const float* x = rows.floats(row + r) + group * kGroupInputs + 4 * q;
                for (int i = 0; i < 4; ++i) part[r] = fmadd(quad[i], broadcast(x[i]), part[r]);
            }
        }
        const Vec scales = weights.scales();
        for (int r = 0; r < kRows; ++r) total[r] = fmadd(part[r], scales, total[r]);
    }
    for (int r = 0; r < kRows; ++r) store(sums + r * kPairOutputs, total[r]);
}

#ifdef __AVX512BF16__
template <int kRows>
__attribute__((noinline)) void multiply_halves(const SieMatrix&, const uint8_t* tile, const Rows& rows, int64_t row,
                                               float* sums) {
    constexpr int kChains = 4;  // independent sums of one row
    Vec total[kRows][kChains];
    for (auto& each : total)
        for (Vec& sum : each) sum = zero();
    const uint16_t* x[kRows];
    for (int r = 0; r < kRows; ++r) x[r] = rows.halves(row + r);
    for (int64_t group = 0; group < rows.groups(); ++group, tile += group_bytes(kWeightBf16)) {
        prefetch_behind<Bf16Weights>(tile);
#pragma GCC unroll 16
        for (int pair = 0; pair < kGroupInputs / 2; ++pair) {
            const Words weights = load_words(tile + pair * 64);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                Vec& sum = total[r][pair % kChains];
                sum = Bf16::dot(sum, broadcast_word(x[r] + group * kGroupInputs + 2 * pair), weights);
            }
        }
    }
    for (int r = 0; r < kRows; ++r) {
        Vec sum = total[r][0];
        for (int i = 1; i < kChains; ++i) sum += total[r][i];
        store(sums + r * kPairOutputs, sum);
    }
}

// Integer weights without conversion: a group's products are exact, in 32 bits.
template <class W, int kRows>
__attribute__((noinline)) void multiply_fixed(const SieMatrix& matrix, const uint8_t* tile, const Rows& rows, int64_t row,
                                              float* sums) {
    Vec total[kRows];
    for (Vec& sum : total) sum = zero();
    const FixedGroup* x[kRows];
    for (int r = 0; r < kRows; ++r) x[r] = rows.fixed(row + r);
    for (int64_t group = 0; group < rows.groups(); ++group, tile += group_bytes(W::kFormat)) {
        const W weights(tile, matrix.codebook);
        prefetch_behind<W>(tile);
        Words high[kRows], low[kRows];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) high[r] = zero_words(), low[r] = broadcast_number(x[r][group].offset);
#pragma GCC unroll 8
        for (int q = 0; q < kGroupInputs / 4; ++q) {
            const Words bytes = weights.bytes(q);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                high[r] = _mm512_dpbusd_epi32(high[r], bytes, broadcast_word(x[r][group].high + 4 * q));
                low[r] = _mm512_dpbusd_epi32(low[r], bytes, broadcast_word(x[r][group].low + 4 * q));
            }
        }
        const Vec scales = weights.scales();
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const Vec sum = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high[r], 7), low[r]));
            total[r] = fmadd(sum, scales * broadcast(x[r][group].scale), total[r]);
        }
    }
    for (int r = 0; r < kRows; ++r) store(sums + r * kPairOutputs, total[r]);
}
#endif

#define SIE_FEW(kernel, W) \
    { kernel<W, 1>, kernel<W, 2>, kernel<W, 3>, kernel<W, 4>, kernel<W, 5>, kernel<W, 6>, kernel<W, 7>, kernel<W, 8> }

// Returns the kernel for a number of rows, at most kFewAtOnce (two in bf16), of an input in the form of the format.
inline FewKernel few_kernel(int32_t format, int num_rows) {
#ifdef __AVX512BF16__
    static constexpr FewKernel kHalves[] = {multiply_halves<1>, multiply_halves<2>};
    static constexpr FewKernel kFixed[2][kFewAtOnce] = {SIE_FEW(multiply_fixed, Int8Weights),
                                                        SIE_FEW(multiply_fixed, Int4Weights)};
    return format == kWeightBf16 ? kHalves[num_rows - 1] : kFixed[format == kWeightInt4][num_rows - 1];
#else
    static constexpr FewKernel kKernels[3][kFewAtOnce] = {
        SIE_FEW(multiply_floats, Bf16Weights), SIE_FEW(multiply_floats, Int8Weights), SIE_FEW(multiply_floats, Int4Weights)};
    return kKernels[format][num_rows - 1];
#endif
}
#undef SIE_FEW

}  // namespace
