// The features of this build and processor, and the macro that exports a function.
#pragma once
#include <cstdint>

#define SIE_EXPORT extern "C" __attribute__((visibility("default")))

// Features that the processor has, the system allows, and sie_native_limit leaves.
SIE_EXPORT int32_t sie_native_features();

// Mirrored by sie.native.Feature.
enum : int32_t {
    kAvx2 = 1,  // and FMA and F16C
    kAvx512 = 2,  // F, BW, DQ and VL
    kAvx512Bf16 = 4,  // and VNNI, which its kernels use, too
    kAvx512Vnni = 8,
    kAmxBf16 = 16,
    kAmxInt8 = 32,
};

inline bool has_avx512() { return sie_native_features() & kAvx512; }
inline bool has_amx() { return (sie_native_features() & (kAmxBf16 | kAmxInt8)) == (kAmxBf16 | kAmxInt8); }
