// bfloat16 with products in AMX tiles; the rest is on AVX-512.
#ifdef __AMX_BF16__
#include "decoder_kernel.h"
#include "levels.h"

void decode_bf16_amx(const SieDecoder& decoder, const SieDecoderStep& step) { decode(decoder, step); }
#endif
