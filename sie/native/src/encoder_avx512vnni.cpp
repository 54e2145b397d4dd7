// float32 on AVX-512, with products of bytes.
#ifdef __AVX512VNNI__
#include "encoder_kernel.h"
#include "levels.h"
#include "products_int8.h"

void encode_int8_f32_avx512(const SieEncoder& encoder, const SieStep& step) { encode<Int8Products<F32>>(encoder, step); }
#endif
