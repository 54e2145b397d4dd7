// bfloat16 with products in AMX tiles, of bfloat16 or of bytes; the rest is on AVX-512.
#ifdef __AMX_BF16__
#include "encoder_kernel.h"
#include "levels.h"
#include "products_amx.h"

void encode_bf16_amx(const SieEncoder& encoder, const SieStep& step) { encode<AmxProducts>(encoder, step); }
void encode_int8_bf16_amx(const SieEncoder& encoder, const SieStep& step) { encode<AmxInt8Products>(encoder, step); }
#endif
