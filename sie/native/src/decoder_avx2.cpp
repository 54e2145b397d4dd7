// float32 on AVX2.
#ifdef __AVX2__
#include "decoder_kernel.h"
#include "levels.h"

void decode_f32_avx2(const SieDecoder& decoder, const SieDecoderStep& step) { decode(decoder, step); }
#endif
