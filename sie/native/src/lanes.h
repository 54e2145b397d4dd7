// Sixteen lanes of AVX-512: number formats, and the functions of softmax and activations.
//
// Everything is in an unnamed namespace: sources of several levels include this file, and the linker must not give one
// level's code to another. A format T says how values are stored. A word is 32 bits, one float or two bf16 values that
// are neighbours in the dimension that a product sums over.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

using Vec = __m512;
constexpr int kLanes = 16;

struct F32 {
    using Stored = float;
    static constexpr int kPerWord = 1;

    static Vec dot(Vec sum, __m512i a, __m512i b) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
    }
    static Vec load(const Stored* from, __mmask16 lanes) { return _mm512_maskz_loadu_ps(lanes, from); }
    static void store(Stored* to, __mmask16 lanes, Vec values) { _mm512_mask_storeu_ps(to, lanes, values); }
    // The words of 16 columns of one row.
    static __m512i words(const Stored* row, const Stored*, __mmask16 lanes) {
        return _mm512_castps_si512(load(row, lanes));
    }
};

#ifdef __AVX512BF16__
struct Bf16 {
    using Stored = uint16_t;
    static constexpr int kPerWord = 2;

    static Vec dot(Vec sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
    static __m512i half(const Stored* from, __mmask16 lanes) {
        return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from));
    }
    static Vec load(const Stored* from, __mmask16 lanes) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(half(from, lanes), 16));
    }
    static void store(Stored* to, __mmask16 lanes, Vec values) {
        _mm256_mask_storeu_epi16(to, lanes, (__m256i)_mm512_cvtneps_pbh(values));
    }
    // The words of 16 columns of two rows; without a second row its half is zero.
    static __m512i words(const Stored* row, const Stored* next, __mmask16 lanes) {
        const __m512i low = half(row, lanes);
        return next ? _mm512_or_si512(low, _mm512_slli_epi32(half(next, lanes), 16)) : low;
    }
};
#endif

inline __mmask16 first_lanes(int count) {
    return count >= kLanes ? 0xFFFF : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
}

// Returns the lanes of 16 tokens, from `first` on, without those that must not be chosen.
inline __mmask16 allowed_lanes(__mmask16 lanes, int64_t first, const int32_t* hidden, int num_hidden) {
    for (int i = 0; i < num_hidden; ++i) {
        const int64_t lane = hidden[i] - first;
        if (lane >= 0 && lane < kLanes) lanes &= static_cast<__mmask16>(~(1u << lane));
    }
    return lanes;
}

inline __m512i broadcast_word(const void* from) {
    int32_t word;
    std::memcpy(&word, from, sizeof word);
    return _mm512_set1_epi32(word);
}

// Minimum and maximum return their second argument if either is not a number, so values are the second argument.

// 2 to the power of x, for x up to about 0; relative error 2e-7. Below -126 the result is small, but not accurate.
inline Vec exp2(Vec x) {
    x = _mm512_max_ps(_mm512_set1_ps(-127.0f), x);
    const Vec whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Vec rest = _mm512_sub_ps(x, whole);
    // ln(2)^k / k!, the Taylor series of 2^rest on [-0.5, 0.5].
    Vec sum = _mm512_set1_ps(1.5403530e-4f);
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.3333558e-3f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(9.6181291e-3f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(5.5504109e-2f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(2.4022651e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(6.9314718e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(sum, whole);
}

// The same for weights that are later rounded to bf16: relative error 1e-4, half the work.
inline Vec rough_exp2(Vec x) {
    x = _mm512_max_ps(_mm512_set1_ps(-127.0f), x);
    const Vec whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Vec rest = _mm512_sub_ps(x, whole);
    // The polynomial of degree 3 with the smallest error for 2^rest on [-0.5, 0.5].
    Vec sum = _mm512_fmadd_ps(_mm512_set1_ps(5.5171773e-2f), rest, _mm512_set1_ps(2.4261112e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(6.9326099e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(9.9992807e-1f));
    return _mm512_scalef_ps(sum, whole);
}

inline Vec exp(Vec x) { return exp2(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f))); }

inline Vec reciprocal(Vec x) {
    const Vec guess = _mm512_rcp14_ps(x);
    return _mm512_mul_ps(guess, _mm512_fnmadd_ps(x, guess, _mm512_set1_ps(2.0f)));
}

// x times the logistic function of z.
inline Vec times_sigmoid(Vec x, Vec z) {
    const Vec decay = exp(_mm512_min_ps(_mm512_set1_ps(80.0f), _mm512_sub_ps(_mm512_setzero_ps(), z)));
    return _mm512_mul_ps(x, reciprocal(_mm512_add_ps(_mm512_set1_ps(1.0f), decay)));
}

// x times the cumulative function of the normal distribution, by the complement of erf (absolute error 1.5e-7).
// Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
inline Vec gelu(Vec x) {
    const Vec size = _mm512_abs_ps(x);
    const Vec z = _mm512_mul_ps(size, _mm512_set1_ps(0.70710678f));
    const Vec t = reciprocal(_mm512_fmadd_ps(z, _mm512_set1_ps(0.3275911f), _mm512_set1_ps(1.0f)));
    Vec sum = _mm512_set1_ps(1.061405429f);
    sum = _mm512_fmadd_ps(sum, t, _mm512_set1_ps(-1.453152027f));
    sum = _mm512_fmadd_ps(sum, t, _mm512_set1_ps(1.421413741f));
    sum = _mm512_fmadd_ps(sum, t, _mm512_set1_ps(-0.284496736f));
    sum = _mm512_fmadd_ps(sum, t, _mm512_set1_ps(0.254829592f));
    const Vec tail = _mm512_mul_ps(_mm512_mul_ps(sum, t), exp(_mm512_mul_ps(z, _mm512_sub_ps(_mm512_setzero_ps(), z))));
    const Vec half = _mm512_mul_ps(size, _mm512_set1_ps(0.5f));
    return _mm512_fnmadd_ps(half, tail, _mm512_max_ps(_mm512_setzero_ps(), x));
}

// x times the logistic function of 2 sqrt(2/pi) (x + 0.044715 x^3): gelu with tanh instead of erf.
inline Vec gelu_tanh(Vec x) {
    const Vec inner = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.071354816f), _mm512_set1_ps(1.5957691f));
    return times_sigmoid(x, _mm512_mul_ps(x, inner));
}

// cap times the hyperbolic tangent of x / cap, computed with the logistic function.
inline Vec capped(Vec x, float cap) {
    const Vec doubled = times_sigmoid(_mm512_set1_ps(2.0f), _mm512_mul_ps(x, _mm512_set1_ps(2.0f / cap)));
    return _mm512_mul_ps(_mm512_set1_ps(cap), _mm512_sub_ps(doubled, _mm512_set1_ps(1.0f)));
}

// The sum of each of 16 vectors.
inline Vec sum_each(const Vec (&rows)[16]) {
    Vec pairs[8], quads[4];
    for (int i = 0; i < 8; ++i) {
        const Vec a = rows[2 * i], b = rows[2 * i + 1];
        pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
    for (int i = 0; i < 4; ++i) {
        const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
        quads[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    // Each quarter of quads[i] holds partial sums of rows 4 i to 4 i + 3. Even and odd quarters are added, twice.
    const auto fold = [](Vec a, Vec b) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
    };
    return fold(fold(quads[0], quads[1]), fold(quads[2], quads[3]));
}

// Transposes 16 rows of 16 words in place.
inline void transpose(__m512i (&rows)[kLanes]) {
    __m512i pairs[kLanes], quads[kLanes];
    for (int i = 0; i < kLanes; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < kLanes; i += 4) {
        quads[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        quads[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        quads[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        quads[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        const __m512i low = _mm512_shuffle_i32x4(quads[i], quads[i + 4], 0x88);
        const __m512i low_odd = _mm512_shuffle_i32x4(quads[i], quads[i + 4], 0xDD);
        const __m512i high = _mm512_shuffle_i32x4(quads[i + 8], quads[i + 12], 0x88);
        const __m512i high_odd = _mm512_shuffle_i32x4(quads[i + 8], quads[i + 12], 0xDD);
        rows[i] = _mm512_shuffle_i32x4(low, high, 0x88);
        rows[i + 4] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(low, high, 0xDD);
        rows[i + 12] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xDD);
    }
}

}  // namespace
