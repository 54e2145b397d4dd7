// The input of a product: rows of values in the form that a kernel reads, padded with zeros to whole groups.
//
// There are three forms: float32; bf16; and fixed point, for few rows with integer weights. A fixed-point value is
// (128 high + low) times its group's scale: 15 bits, relative to the largest value of the group.
#pragma once
#include "lanes.h"
#include "linear.h"

namespace {

constexpr int kPairOutputs = 2 * kTileOutputs;  // outputs of a pair of tiles

enum class Form { kFloats, kHalves, kFixed };

#ifdef __AVX512BF16__
using Number = Bf16;
#else
using Number = F32;
#endif

// Up to this number of rows, integer weights are multiplied without conversion. Unpacking them to bf16 takes as long as 15
// rows of dot products, and saves an eighth of each row. In tiles of AMX all rows of a tile take the time of one.
#ifdef __AMX_BF16__
constexpr int kFixedRows = 8;
#else
constexpr int kFixedRows = 96;
#endif

// Returns the input form for a matrix and a number of rows at this level.
inline Form form_of(int32_t format, int64_t num_rows) {
    if (sizeof(Number::Stored) == 4) return Form::kFloats;
    return format == kWeightBf16 || num_rows > kFixedRows ? Form::kHalves : Form::kFixed;
}

struct FixedGroup {
    int8_t high[kGroupInputs], low[kGroupInputs];
    float scale;
    int32_t offset;  // -128 times the sum of all values, because the bytes of weights are 128 too large
};

struct Rows {
    char* base;
    int64_t inputs;
    Form form;

    int64_t groups() const { return groups_of(inputs); }
    // Bytes from one row to the next, at most row_bytes. In 16 bits this is an odd number of cache lines: if rows of a tile
    // were a power of two apart, each would evict the others from the level 1 cache.
    int64_t bytes_apart() const { return form == Form::kHalves ? (groups() | 1) * kGroupInputs * 2 : row_bytes(inputs); }
    char* at(int64_t row) const { return base + row * bytes_apart(); }
    Rows from(int64_t row) const { return {at(row), inputs, form}; }
    float* floats(int64_t row) const { return reinterpret_cast<float*>(at(row)); }
    uint16_t* halves(int64_t row) const { return reinterpret_cast<uint16_t*>(at(row)); }
    const Number::Stored* numbers(int64_t row) const { return reinterpret_cast<const Number::Stored*>(at(row)); }
    FixedGroup* fixed(int64_t row) const { return reinterpret_cast<FixedGroup*>(at(row)); }
    // Values from one row to the next, unless they are in fixed point.
    int64_t stride() const { return bytes_apart() / sizeof(Number::Stored); }
    // Whether a row can be stored piece by piece. Groups of fixed point cannot, because all their values must be known.
    bool takes_pieces() const { return form != Form::kFixed && inputs % kGroupInputs == 0; }

    // Writes a row: read(k, lanes) gives values k to k + 15, zero outside of the lanes.
    template <class Read>
    void write(int64_t row, const Read& read) const {
        const auto get = [&](int64_t k) {
            const Lanes lanes = first_lanes(static_cast<int>(inputs - k));
            return lanes ? read(k, lanes) : zero();
        };
        for (int64_t group = 0; group < groups(); ++group) {
            const int64_t k = group * kGroupInputs;
            put_group(row, group, get(k), get(k + kLanes));
        }
    }

    // Stores values k to k + 15 of a row; only for forms that can be stored piece by piece.
    void put(int64_t row, int64_t k, Lanes lanes, Vec values) const {
        Number::store(reinterpret_cast<Number::Stored*>(at(row)) + k, lanes, values);
    }

  private:
    void put_group(int64_t row, int64_t group, Vec first, Vec second) const {
        const int64_t k = group * kGroupInputs;
        switch (form) {
            case Form::kFloats:
                store(floats(row) + k, first);
                store(floats(row) + k + kLanes, second);
                break;
#ifdef __AVX512BF16__
            case Form::kHalves: store_words(halves(row) + k, (Words)_mm512_cvtne2ps_pbh(second, first)); break;
            case Form::kFixed: fix(fixed(row)[group], first, second); break;
#endif
            default: break;
        }
    }

#ifdef __AVX512BF16__
    static void fix(FixedGroup& to, Vec first, Vec second) {
        constexpr float kLargest = 127 * 128;
        const float most = largest_of(max(magnitude(first), magnitude(second)));
        const bool is_number = !not_numbers(first) && !not_numbers(second);
        // A group of almost zero becomes zero. A group that is not finite gives no finite output.
        const Vec factor = broadcast(most > 1e-30f ? kLargest / most : 0.0f);
        to.scale = is_number ? most / kLargest : __builtin_nanf("");
        const Words a = _mm512_cvtps_epi32(first * factor);
        const Words b = _mm512_cvtps_epi32(second * factor);
        to.offset = -128 * _mm512_reduce_add_epi32(_mm512_add_epi32(a, b));
        split(a, to.high, to.low);
        split(b, to.high + kLanes, to.low + kLanes);
    }

    static void split(Words values, int8_t* high, int8_t* low) {
        const Words upper = _mm512_srai_epi32(_mm512_add_epi32(values, _mm512_set1_epi32(64)), 7);
        const Words lower = _mm512_sub_epi32(values, _mm512_slli_epi32(upper, 7));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(high), _mm512_cvtepi32_epi8(upper));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(low), _mm512_cvtepi32_epi8(lower));
    }
#endif
};

}  // namespace
