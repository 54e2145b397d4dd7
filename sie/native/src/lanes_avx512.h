// The lanes of lanes.h in one register of AVX-512.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace {

using Vec = __m512;
using Words = __m512i;
using Lanes = __mmask16;
constexpr int kLanes = 16;

constexpr int kRegisters = 32;
// Sums of a product that stay in registers: so many rows of so many columns.
constexpr int kSumRows = 14, kSumColumns = 2 * kLanes;

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec broadcast(float value) { return _mm512_set1_ps(value); }
inline Vec load(const float* from) { return _mm512_loadu_ps(from); }
inline Vec load(const float* from, Lanes lanes) { return _mm512_maskz_loadu_ps(lanes, from); }
inline void store(float* to, Vec values) { _mm512_storeu_ps(to, values); }
inline void store(float* to, Lanes lanes, Vec values) { _mm512_mask_storeu_ps(to, lanes, values); }

inline Vec fmadd(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec fmsub(Vec a, Vec b, Vec c) { return _mm512_fmsub_ps(a, b, c); }
inline Vec fnmadd(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec magnitude(Vec x) { return _mm512_abs_ps(x); }
inline Vec negative(Vec x) { return _mm512_sub_ps(_mm512_setzero_ps(), x); }
inline Vec rounded(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// x times 2 to the power of a whole number.
inline Vec times_power(Vec x, Vec whole) { return _mm512_scalef_ps(x, whole); }
inline Vec rough_reciprocal(Vec x) { return _mm512_rcp14_ps(x); }

inline float first_of(Vec x) { return _mm512_cvtss_f32(x); }
inline float sum_of(Vec x) { return _mm512_reduce_add_ps(x); }
inline float largest_of(Vec x) { return _mm512_reduce_max_ps(x); }

inline Vec only(Lanes lanes, Vec x) { return _mm512_maskz_mov_ps(lanes, x); }
// In these lanes the larger of both, in the others a.
inline Vec max_where(Lanes lanes, Vec a, Vec b) { return _mm512_mask_max_ps(a, lanes, a, b); }
inline Lanes not_numbers(Vec x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
inline Lanes at_least(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline Lanes above(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }

inline Vec as_floats(Words x) { return _mm512_castsi512_ps(x); }
inline Words as_words(Vec x) { return _mm512_castps_si512(x); }
inline Words zero_words() { return _mm512_setzero_si512(); }
inline Words broadcast_number(int32_t number) { return _mm512_set1_epi32(number); }
inline Words load_words(const void* from) { return _mm512_loadu_si512(from); }
inline Words load_words(const void* from, Lanes lanes) { return _mm512_maskz_loadu_epi32(lanes, from); }
inline void store_words(void* to, Words words) { _mm512_storeu_si512(to, words); }
inline void store_words(void* to, Lanes lanes, Words words) { _mm512_mask_storeu_epi32(to, lanes, words); }
// first, first + 1, ...
inline Words numbers_from(int32_t first) {
    const Words places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_add_epi32(places, _mm512_set1_epi32(first));
}

// The first and the second value of words of two bf16 values.
inline Vec lower_halves(Words x) { return as_floats(_mm512_slli_epi32(x, 16)); }
inline Vec upper_halves(Words x) { return as_floats(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xFFFF0000)))); }
// Of 16 float16 values.
inline Vec from_float16(const void* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
}
// Byte number i of each word, plus 256: the byte lies in the upper bits of a mantissa.
template <int i>
inline Vec byte_plus_256(Words bytes) {
    constexpr int kUp = 15 - 8 * i;
    const Words moved = kUp > 0 ? _mm512_slli_epi32(bytes, kUp > 0 ? kUp : 0) : _mm512_srli_epi32(bytes, kUp > 0 ? 0 : -kUp);
    constexpr int kAndOr = 0xEA;  // (a & b) | c
    return as_floats(_mm512_ternarylogic_epi32(moved, _mm512_set1_epi32(0xFF << 15), _mm512_set1_epi32(0x43800000), kAndOr));
}
// The 16 bytes at an address plus 128, in each quarter of a result.
inline Words load_codes(const int8_t* from) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm512_broadcast_i32x4(_mm_xor_si128(codes, _mm_set1_epi8(-128)));
}
// The codes that the lower four bits of each byte name; is_upper: the upper four.
inline Words codes_at(Words codes, Words bytes, bool is_upper) {
    const Words places = _mm512_and_si512(is_upper ? _mm512_srli_epi16(bytes, 4) : bytes, _mm512_set1_epi8(15));
    return _mm512_shuffle_epi8(codes, places);
}

#ifdef __AVX512BF16__
struct Bf16 {
    using Stored = uint16_t;
    static constexpr int kPerWord = 2;

    static Vec dot(Vec sum, Words a, Words b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
    static Words half(const Stored* from, Lanes lanes) {
        return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from));
    }
    static Vec load(const Stored* from, Lanes lanes) { return lower_halves(half(from, lanes)); }
    static void store(Stored* to, Lanes lanes, Vec values) {
        _mm256_mask_storeu_epi16(to, lanes, (__m256i)_mm512_cvtneps_pbh(values));
    }
    static void store_two(Stored* to, Vec first, Vec second) {
        store_words(to, (Words)_mm512_cvtne2ps_pbh(second, first));
    }
    // Words of two values that are rounded to the nearest; halves go up. VCVTNE2PS2BF16 and a permutation take longer.
    static Words pairs(Vec first, Vec second) {
        const auto risen = [](Vec x) { return _mm512_add_epi32(as_words(x), _mm512_set1_epi32(0x8000)); };
        constexpr int kAndOr = 0xEA;  // (a & b) | c
        return _mm512_ternarylogic_epi32(risen(second), _mm512_set1_epi32(static_cast<int>(0xFFFF0000)),
                                         _mm512_srli_epi32(risen(first), 16), kAndOr);
    }
    // The words of 16 columns of two rows; without a second row its half is zero.
    static Words words(const Stored* row, const Stored* next, Lanes lanes) {
        const Words low = half(row, lanes);
        return next ? _mm512_or_si512(low, _mm512_slli_epi32(half(next, lanes), 16)) : low;
    }
};
#endif

// The sum of each of 16 vectors.
inline Vec sum_each(const Vec (&rows)[16]) {
    Vec pairs[8], quads[4];
    for (int i = 0; i < 8; ++i) {
        const Vec a = rows[2 * i], b = rows[2 * i + 1];
        pairs[i] = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
    }
    for (int i = 0; i < 4; ++i) {
        const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
        quads[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)) + _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
    // Each quarter of quads[i] holds partial sums of rows 4 i to 4 i + 3. Even and odd quarters are added, twice.
    const auto fold = [](Vec a, Vec b) {
        return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xDD);
    };
    return fold(fold(quads[0], quads[1]), fold(quads[2], quads[3]));
}

// Transposes 16 rows of 16 words in place.
inline void transpose(Words (&rows)[kLanes]) {
    Words pairs[kLanes], quads[kLanes];
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
        const Words low = _mm512_shuffle_i32x4(quads[i], quads[i + 4], 0x88);
        const Words low_odd = _mm512_shuffle_i32x4(quads[i], quads[i + 4], 0xDD);
        const Words high = _mm512_shuffle_i32x4(quads[i + 8], quads[i + 12], 0x88);
        const Words high_odd = _mm512_shuffle_i32x4(quads[i + 8], quads[i + 12], 0xDD);
        rows[i] = _mm512_shuffle_i32x4(low, high, 0x88);
        rows[i + 4] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(low, high, 0xDD);
        rows[i + 12] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xDD);
    }
}

}  // namespace
