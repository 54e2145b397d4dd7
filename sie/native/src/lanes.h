// Sixteen lanes of floats: number formats, and the functions of softmax and activations.
//
// Everything is in an unnamed namespace: sources of several levels include this file, and the linker must not give one
// level's code to another. `lanes_avx512.h` and `lanes_avx2.h` define the same types and functions for their registers:
//   Vec    16 floats, with + - * /; Words: 16 words of 32 bits; Lanes: a bit for each of the 16
//   load and store take the lanes that they read (the others are zero) or write; without lanes all 16
//   max and min return their second argument if either is not a number, so values are the second argument
// A format T says how values are stored. A word is 32 bits: one float, two bf16 values that are neighbours in the dimension
// that a product sums over, or four bytes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include "lanes_avx512.h"
#else
#include "lanes_avx2.h"
#endif

namespace {

constexpr Lanes kAllLanes = 0xFFFF;
constexpr float kLeast = -3e38f;  // below every score

struct F32 {
    using Stored = float;
    static constexpr int kPerWord = 1;

    static Vec dot(Vec sum, Words a, Words b) { return fmadd(as_floats(a), as_floats(b), sum); }
    static Vec load(const Stored* from, Lanes lanes) { return ::load(from, lanes); }
    static void store(Stored* to, Lanes lanes, Vec values) { ::store(to, lanes, values); }
    static void store_two(Stored* to, Vec first, Vec second) { ::store(to, first), ::store(to + kLanes, second); }
    // The words of 16 columns of one row.
    static Words words(const Stored* row, const Stored*, Lanes lanes) { return as_words(load(row, lanes)); }
};

inline Lanes first_lanes(int count) {
    return count >= kLanes ? kAllLanes : count <= 0 ? 0 : static_cast<Lanes>((1u << count) - 1);
}

// Returns the lanes of 16 tokens, from `first` on, without those that must not be chosen.
inline Lanes allowed_lanes(Lanes lanes, int64_t first, const int32_t* hidden, int num_hidden) {
    for (int i = 0; i < num_hidden; ++i) {
        const int64_t lane = hidden[i] - first;
        if (lane >= 0 && lane < kLanes) lanes &= static_cast<Lanes>(~(1u << lane));
    }
    return lanes;
}

// The word at an address, in all lanes.
inline Words broadcast_word(const void* from) {
    int32_t word;
    std::memcpy(&word, from, sizeof word);
    return broadcast_number(word);
}

// 2 to the power of x, for x up to about 0; relative error 2e-7. Below -126 the result is small, but not accurate.
inline Vec exp2(Vec x) {
    x = max(broadcast(-127.0f), x);
    const Vec whole = rounded(x);
    const Vec rest = x - whole;
    // ln(2)^k / k!, the Taylor series of 2^rest on [-0.5, 0.5].
    Vec sum = broadcast(1.5403530e-4f);
    sum = fmadd(sum, rest, broadcast(1.3333558e-3f));
    sum = fmadd(sum, rest, broadcast(9.6181291e-3f));
    sum = fmadd(sum, rest, broadcast(5.5504109e-2f));
    sum = fmadd(sum, rest, broadcast(2.4022651e-1f));
    sum = fmadd(sum, rest, broadcast(6.9314718e-1f));
    sum = fmadd(sum, rest, broadcast(1.0f));
    return times_power(sum, whole);
}

// The same for weights that are later rounded to bf16: relative error 1e-4, half the work.
inline Vec rough_exp2(Vec x) {
    x = max(broadcast(-127.0f), x);
    const Vec whole = rounded(x);
    const Vec rest = x - whole;
    // The polynomial of degree 3 with the smallest error for 2^rest on [-0.5, 0.5].
    Vec sum = fmadd(broadcast(5.5171773e-2f), rest, broadcast(2.4261112e-1f));
    sum = fmadd(sum, rest, broadcast(6.9326099e-1f));
    sum = fmadd(sum, rest, broadcast(9.9992807e-1f));
    return times_power(sum, whole);
}

inline Vec exp(Vec x) { return exp2(x * broadcast(1.44269504f)); }

inline Vec reciprocal(Vec x) {
    const Vec guess = rough_reciprocal(x);
    return guess * fnmadd(x, guess, broadcast(2.0f));
}

// x times the logistic function of z.
inline Vec times_sigmoid(Vec x, Vec z) {
    const Vec decay = exp(min(broadcast(80.0f), negative(z)));
    return x * reciprocal(broadcast(1.0f) + decay);
}

// x times the cumulative function of the normal distribution, by the complement of erf (absolute error 1.5e-7).
// Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
inline Vec gelu(Vec x) {
    const Vec size = magnitude(x);
    const Vec z = size * broadcast(0.70710678f);
    const Vec t = reciprocal(fmadd(z, broadcast(0.3275911f), broadcast(1.0f)));
    Vec sum = broadcast(1.061405429f);
    sum = fmadd(sum, t, broadcast(-1.453152027f));
    sum = fmadd(sum, t, broadcast(1.421413741f));
    sum = fmadd(sum, t, broadcast(-0.284496736f));
    sum = fmadd(sum, t, broadcast(0.254829592f));
    const Vec tail = sum * t * exp(z * negative(z));
    const Vec half = size * broadcast(0.5f);
    return fnmadd(half, tail, max(zero(), x));
}

// x times the logistic function of 2 sqrt(2/pi) (x + 0.044715 x^3): gelu with tanh instead of erf.
inline Vec gelu_tanh(Vec x) {
    const Vec inner = fmadd(x * x, broadcast(0.071354816f), broadcast(1.5957691f));
    return times_sigmoid(x, x * inner);
}

// Approximations for results that are rounded to bf16, with a third of the work.
inline Vec rough_times_sigmoid(Vec x, Vec z) {
    const Vec decay = rough_exp2(min(broadcast(80.0f), z * broadcast(-1.44269504f)));
    return x * rough_reciprocal(broadcast(1.0f) + decay);
}

// x (1/2 + x P(x^2)), where P has the smallest error of the product that eight terms allow (8e-5). At the end of its range
// it is x or zero.
inline Vec rough_gelu(Vec x) {
    const Vec size = magnitude(x), z = min(broadcast(4.2f), size), square = z * z;
    Vec sum = broadcast(-9.0179147e-10f);
    sum = fmadd(sum, square, broadcast(7.9416099e-8f));
    sum = fmadd(sum, square, broadcast(-3.0380084e-6f));
    sum = fmadd(sum, square, broadcast(6.6891815e-5f));
    sum = fmadd(sum, square, broadcast(-9.5066633e-4f));
    sum = fmadd(sum, square, broadcast(9.2982659e-3f));
    sum = fmadd(sum, square, broadcast(-6.5528273e-2f));
    sum = fmadd(sum, square, broadcast(3.9846592e-1f));
    return fmadd(size * z, sum, x * broadcast(0.5f));
}

inline Vec rough_gelu_tanh(Vec x) {
    const Vec inner = fmadd(x * x, broadcast(0.071354816f), broadcast(1.5957691f));
    return rough_times_sigmoid(x, x * inner);
}

// cap times the hyperbolic tangent of x / cap, computed with the logistic function.
inline Vec capped(Vec x, float cap) {
    const Vec doubled = times_sigmoid(broadcast(2.0f), x * broadcast(2.0f / cap));
    return broadcast(cap) * (doubled - broadcast(1.0f));
}

}  // namespace
