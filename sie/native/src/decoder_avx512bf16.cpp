// bfloat16 on AVX-512 with its dot products.
#ifdef __AVX512BF16__
#include "decoder_kernel.h"
#include "levels.h"

void decode_bf16_avx512(const SieDecoder& decoder, const SieDecoderStep& step) { decode(decoder, step); }
#endif
