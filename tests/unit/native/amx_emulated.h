// The AMX instructions that the kernels use, in software, so that their logic is tested where the processor has none.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, LDTILECFG, TILELOADD, TDPBF16PS, TDPBUSD.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

// Functions of levels that are left out of the library with these instructions (tests/kernels.py), which calls none of them.
__attribute__((weak)) void attend_f32_avx2(const struct SieAttention& shape, void* scratch);
__attribute__((weak)) void attend_f32_avx512(const struct SieAttention& shape, void* scratch);
__attribute__((weak)) void encode_f32_avx2(const struct SieEncoder& encoder, const struct SieStep& step);
__attribute__((weak)) void encode_f32_avx512(const struct SieEncoder& encoder, const struct SieStep& step);
__attribute__((weak)) void encode_int8_f32_avx512(const struct SieEncoder& encoder, const struct SieStep& step);
__attribute__((weak)) void pool_mean_f32_avx2(const void* hidden, int64_t width, const int32_t* bounds, int32_t num_sequences, float* to);
__attribute__((weak)) void pool_mean_f32_avx512(const void* hidden, int64_t width, const int32_t* bounds, int32_t num_sequences, float* to);
__attribute__((weak)) void decode_f32_avx2(const struct SieDecoder& decoder, const struct SieDecoderStep& step);
__attribute__((weak)) void decode_f32_avx512(const struct SieDecoder& decoder, const struct SieDecoderStep& step);
__attribute__((weak)) void decode_bf16_avx512(const struct SieDecoder& decoder, const struct SieDecoderStep& step);
__attribute__((weak)) void linear_bf16_avx512(const struct SieLinear& call);
__attribute__((weak)) void draw_avx2(struct SieDraw* draws, int64_t count, char* scratch, int32_t num_threads);
__attribute__((weak)) void linear_f32_avx2(const struct SieLinear& call);
__attribute__((weak)) void linear_f32_avx512(const struct SieLinear& call);
__attribute__((weak)) void normalise_f32_avx2(const struct SieRmsNorm& call);
__attribute__((weak)) void normalise_f32_avx512(const struct SieRmsNorm& call);

namespace amx_emulated {

struct Tiles {
    int row_bytes[8], rows[8];
    uint8_t data[8][16][64];
};
inline thread_local Tiles tiles;

inline void load_configuration(const void* from) {
    const uint8_t* bytes = static_cast<const uint8_t*>(from);
    if (bytes[0] != 1) __builtin_trap();
    for (int i = 0; i < 8; ++i) {
        uint16_t width;
        std::memcpy(&width, bytes + 16 + 2 * i, 2);
        tiles.row_bytes[i] = width;
        tiles.rows[i] = bytes[48 + i];
        if (width == 0 || width > 64 || tiles.rows[i] == 0 || tiles.rows[i] > 16) __builtin_trap();
    }
    std::memset(tiles.data, 0, sizeof tiles.data);
}

inline void zero(int tile) { std::memset(tiles.data[tile], 0, sizeof tiles.data[tile]); }

inline void load(int tile, const void* base, int64_t stride) {
    zero(tile);
    for (int row = 0; row < tiles.rows[tile]; ++row)
        std::memcpy(tiles.data[tile][row], static_cast<const uint8_t*>(base) + row * stride, tiles.row_bytes[tile]);
}

inline void store(int tile, void* base, int64_t stride) {
    for (int row = 0; row < tiles.rows[tile]; ++row)
        std::memcpy(static_cast<uint8_t*>(base) + row * stride, tiles.data[tile][row], tiles.row_bytes[tile]);
}

inline float wide(uint16_t half) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline void check(int to, int left, int right) {
    if (tiles.rows[to] != tiles.rows[left] || tiles.row_bytes[to] != tiles.row_bytes[right]) __builtin_trap();
    if (tiles.row_bytes[left] / 4 != tiles.rows[right]) __builtin_trap();
}

inline void dot(int to, int left, int right) {
    check(to, left, right);
    for (int row = 0; row < tiles.rows[to]; ++row)
        for (int word = 0; word < tiles.rows[right]; ++word)
            for (int column = 0; column < tiles.row_bytes[to] / 4; ++column) {
                uint16_t a[2], b[2];
                float sum;
                std::memcpy(a, &tiles.data[left][row][word * 4], 4);
                std::memcpy(b, &tiles.data[right][word][column * 4], 4);
                std::memcpy(&sum, &tiles.data[to][row][column * 4], 4);
                sum += wide(a[0]) * wide(b[0]) + wide(a[1]) * wide(b[1]);
                std::memcpy(&tiles.data[to][row][column * 4], &sum, 4);
            }
}

// Bytes without a sign by bytes with one.
inline void dot_bytes(int to, int left, int right) {
    check(to, left, right);
    for (int row = 0; row < tiles.rows[to]; ++row)
        for (int word = 0; word < tiles.rows[right]; ++word)
            for (int column = 0; column < tiles.row_bytes[to] / 4; ++column) {
                int8_t weights[4];
                int32_t sum;
                std::memcpy(weights, &tiles.data[right][word][column * 4], 4);
                std::memcpy(&sum, &tiles.data[to][row][column * 4], 4);
                for (int i = 0; i < 4; ++i) sum += tiles.data[left][row][word * 4 + i] * weights[i];
                std::memcpy(&tiles.data[to][row][column * 4], &sum, 4);
            }
}

}  // namespace amx_emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbusd
#define _tile_loadconfig amx_emulated::load_configuration
#define _tile_release() static_cast<void>(0)
#define _tile_zero amx_emulated::zero
#define _tile_loadd amx_emulated::load
#define _tile_stored amx_emulated::store
#define _tile_dpbf16ps amx_emulated::dot
#define _tile_dpbusd amx_emulated::dot_bytes
