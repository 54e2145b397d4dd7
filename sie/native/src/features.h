// The features of this build and processor, and the macro that exports a function.
#pragma once
#include <cstdint>

#define SIE_EXPORT extern "C" __attribute__((visibility("default")))

// Mirrored by sie.native.Feature.
enum : int32_t {
    kAvx2 = 1,
    kAvx512 = 2,  // F, BW, DQ and VL
    kAvx512Bf16 = 4,  // and VNNI, which its kernels use, too
    kAvx512Vnni = 8,
    kAmxBf16 = 16,
    kAmxInt8 = 32,
};
