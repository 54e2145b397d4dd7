// bfloat16 with products in AMX tiles, all else on AVX-512.
#ifdef __AMX_BF16__
#include "encoder_kernel.h"
#include "levels.h"
#include "products_amx.h"

void encode_bf16_amx(const SieEncoder& encoder, const SieStep& step) { encode<AmxProducts>(encoder, step); }
#endif
