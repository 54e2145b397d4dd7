// float32 on AVX-512.
#ifdef __AVX512F__
#include "decoder_kernel.h"
#include "levels.h"

void decode_f32_avx512(const SieDecoder& decoder, const SieDecoderStep& step) { decode(decoder, step); }
#endif
