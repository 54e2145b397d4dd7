// The lanes of lanes.h in two registers of AVX2.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace {

using Lanes = uint16_t;
constexpr int kLanes = 16;

constexpr int kRegisters = 8;  // pairs of them
// Sums of a product that stay in registers: so many rows of so many columns.
constexpr int kSumRows = 6, kSumColumns = kLanes;

struct Vec {
    __m256 low, high;

    Vec& operator+=(Vec other) { return *this = {low + other.low, high + other.high}; }
    Vec& operator*=(Vec other) { return *this = {low * other.low, high * other.high}; }
};

struct Words {
    __m256i low, high;
};

inline Vec operator+(Vec a, Vec b) { return {a.low + b.low, a.high + b.high}; }
inline Vec operator-(Vec a, Vec b) { return {a.low - b.low, a.high - b.high}; }
inline Vec operator*(Vec a, Vec b) { return {a.low * b.low, a.high * b.high}; }
inline Vec operator/(Vec a, Vec b) { return {a.low / b.low, a.high / b.high}; }

// All bits of each lane that is set.
inline Words masks(Lanes lanes) {
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), upper = _mm256_slli_epi32(bits, 8);
    const __m256i all = _mm256_set1_epi32(lanes);
    return {_mm256_cmpeq_epi32(_mm256_and_si256(all, bits), bits), _mm256_cmpeq_epi32(_mm256_and_si256(all, upper), upper)};
}

inline Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec broadcast(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline Vec load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline Vec load(const float* from, Lanes lanes) {
    if (lanes == 0xFFFF) return load(from);
    const Words wanted = masks(lanes);
    return {_mm256_maskload_ps(from, wanted.low), _mm256_maskload_ps(from + 8, wanted.high)};
}
inline void store(float* to, Vec values) {
    _mm256_storeu_ps(to, values.low);
    _mm256_storeu_ps(to + 8, values.high);
}
inline void store(float* to, Lanes lanes, Vec values) {
    if (lanes == 0xFFFF) return store(to, values);
    const Words wanted = masks(lanes);
    _mm256_maskstore_ps(to, wanted.low, values.low);
    _mm256_maskstore_ps(to + 8, wanted.high, values.high);
}

inline Vec fmadd(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)}; }
inline Vec fmsub(Vec a, Vec b, Vec c) { return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)}; }
inline Vec fnmadd(Vec a, Vec b, Vec c) { return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline Vec negative(Vec x) { return zero() - x; }
inline Vec magnitude(Vec x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}
inline Vec rounded(Vec x) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.low, kNearest), _mm256_round_ps(x.high, kNearest)};
}
// x times 2 to the power of a whole number from -127 to 127: the number becomes an exponent. -127 gives zero; what is not a
// number stays one.
inline Vec times_power(Vec x, Vec whole) {
    const auto half = [](__m256 value, __m256 power) {
        const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127));
        return value * _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
    };
    return {half(x.low, whole.low), half(x.high, whole.high)};
}
inline Vec rough_reciprocal(Vec x) { return {_mm256_rcp_ps(x.low), _mm256_rcp_ps(x.high)}; }

inline float first_of(Vec x) { return _mm256_cvtss_f32(x.low); }

inline float sum_of(Vec x) {
    const __m256 eight = x.low + x.high;
    const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
    const __m128 two = four + _mm_movehl_ps(four, four);
    return _mm_cvtss_f32(two + _mm_movehdup_ps(two));
}
inline float largest_of(Vec x) {
    const __m256 eight = _mm256_max_ps(x.low, x.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ps(two, _mm_movehdup_ps(two)));
}

inline Vec as_floats(Words x) { return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)}; }
inline Words as_words(Vec x) { return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)}; }

inline Vec only(Lanes lanes, Vec x) {
    if (lanes == 0xFFFF) return x;
    const Vec wanted = as_floats(masks(lanes));
    return {_mm256_and_ps(wanted.low, x.low), _mm256_and_ps(wanted.high, x.high)};
}
// In these lanes the larger of both, in the others a.
inline Vec max_where(Lanes lanes, Vec a, Vec b) {
    const Vec larger = max(a, b);
    if (lanes == 0xFFFF) return larger;
    const Vec wanted = as_floats(masks(lanes));
    return {_mm256_blendv_ps(a.low, larger.low, wanted.low), _mm256_blendv_ps(a.high, larger.high, wanted.high)};
}
inline Lanes lanes_of(__m256 low, __m256 high) {
    return static_cast<Lanes>(_mm256_movemask_ps(low) | _mm256_movemask_ps(high) << 8);
}
inline Lanes not_numbers(Vec x) {
    return lanes_of(_mm256_cmp_ps(x.low, x.low, _CMP_UNORD_Q), _mm256_cmp_ps(x.high, x.high, _CMP_UNORD_Q));
}
inline Lanes at_least(Vec a, Vec b) {
    return lanes_of(_mm256_cmp_ps(a.low, b.low, _CMP_GE_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_GE_OQ));
}
inline Lanes above(Vec a, Vec b) {
    return lanes_of(_mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ));
}

inline Words zero_words() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Words broadcast_number(int32_t number) { return {_mm256_set1_epi32(number), _mm256_set1_epi32(number)}; }
inline Words load_words(const void* from) {
    const __m256i* halves = static_cast<const __m256i*>(from);
    return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
inline Words load_words(const void* from, Lanes lanes) { return as_words(load(static_cast<const float*>(from), lanes)); }
inline void store_words(void* to, Words words) { store(static_cast<float*>(to), as_floats(words)); }
inline void store_words(void* to, Lanes lanes, Words words) { store(static_cast<float*>(to), lanes, as_floats(words)); }
// first, first + 1, ...
inline Words numbers_from(int32_t first) {
    const __m256i low = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(first));
    return {low, _mm256_add_epi32(low, _mm256_set1_epi32(8))};
}

// The first and the second value of words of two bf16 values.
inline Vec lower_halves(Words x) { return as_floats({_mm256_slli_epi32(x.low, 16), _mm256_slli_epi32(x.high, 16)}); }
inline Vec upper_halves(Words x) {
    const __m256i wanted = _mm256_set1_epi32(static_cast<int>(0xFFFF0000));
    return as_floats({_mm256_and_si256(x.low, wanted), _mm256_and_si256(x.high, wanted)});
}
// Of 16 float16 values.
inline Vec from_float16(const void* from) {
    const __m128i* halves = static_cast<const __m128i*>(from);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
// Byte number i of each word, plus 256: the byte lies in the upper bits of a mantissa.
template <int i>
inline Vec byte_plus_256(Words bytes) {
    constexpr int kUp = 15 - 8 * i;
    const auto half = [](__m256i words) {
        const __m256i moved = kUp > 0 ? _mm256_slli_epi32(words, kUp > 0 ? kUp : 0) : _mm256_srli_epi32(words, kUp > 0 ? 0 : -kUp);
        const __m256i byte = _mm256_and_si256(moved, _mm256_set1_epi32(0xFF << 15));
        return _mm256_castsi256_ps(_mm256_or_si256(byte, _mm256_set1_epi32(0x43800000)));
    };
    return {half(bytes.low), half(bytes.high)};
}
// The 16 bytes at an address plus 128, in each quarter of a result.
inline Words load_codes(const int8_t* from) {
    const __m128i codes = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)), _mm_set1_epi8(-128));
    return {_mm256_broadcastsi128_si256(codes), _mm256_broadcastsi128_si256(codes)};
}
// The codes that the lower four bits of each byte name; is_upper: the upper four.
inline Words codes_at(Words codes, Words bytes, bool is_upper) {
    const auto half = [is_upper](__m256i table, __m256i places) {
        if (is_upper) places = _mm256_srli_epi16(places, 4);
        return _mm256_shuffle_epi8(table, _mm256_and_si256(places, _mm256_set1_epi8(15)));
    };
    return {half(codes.low, bytes.low), half(codes.high, bytes.high)};
}

// The sum of each of 16 vectors.
inline Vec sum_each(const Vec (&rows)[16]) {
    const auto eight = [](const Vec* own) {
        __m256 pairs[4];
        for (int i = 0; i < 4; ++i)
            pairs[i] = _mm256_hadd_ps(own[2 * i].low + own[2 * i].high, own[2 * i + 1].low + own[2 * i + 1].high);
        // Each half of a register has partial sums of rows 0 to 3, or of rows 4 to 7.
        const __m256 first = _mm256_hadd_ps(pairs[0], pairs[1]), second = _mm256_hadd_ps(pairs[2], pairs[3]);
        return _mm256_permute2f128_ps(first, second, 0x20) + _mm256_permute2f128_ps(first, second, 0x31);
    };
    return {eight(rows), eight(rows + 8)};
}

// Transposes 8 rows of 8 words.
inline void transpose_square(__m256i (&rows)[8]) {
    __m256i pairs[8], quads[8];
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; ++j) {
            quads[i + 2 * j] = _mm256_unpacklo_epi64(pairs[i + j], pairs[i + j + 2]);
            quads[i + 2 * j + 1] = _mm256_unpackhi_epi64(pairs[i + j], pairs[i + j + 2]);
        }
    for (int i = 0; i < 4; ++i) {
        rows[i] = _mm256_permute2x128_si256(quads[i], quads[i + 4], 0x20);
        rows[i + 4] = _mm256_permute2x128_si256(quads[i], quads[i + 4], 0x31);
    }
}

// Transposes 16 rows of 16 words in place: four squares, of which two change places.
inline void transpose(Words (&rows)[kLanes]) {
    __m256i squares[4][8];
    for (int i = 0; i < 8; ++i) {
        squares[0][i] = rows[i].low, squares[1][i] = rows[i].high;
        squares[2][i] = rows[i + 8].low, squares[3][i] = rows[i + 8].high;
    }
    for (auto& square : squares) transpose_square(square);
    for (int i = 0; i < 8; ++i) {
        rows[i] = {squares[0][i], squares[2][i]};
        rows[i + 8] = {squares[1][i], squares[3][i]};
    }
}

}  // namespace
