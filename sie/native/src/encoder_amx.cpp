// bfloat16 with products and attention in AMX tiles, of bfloat16 or of bytes; the rest is on AVX-512.
#ifdef __AMX_BF16__
#include "encoder_kernel.h"
#include "levels.h"
#include "products_amx.h"

void attend_bf16_amx(const SieAttention& shape, void* scratch) { attend<AmxAttention>(shape, longest_of(shape), scratch); }
void encode_bf16_amx(const SieEncoder& encoder, const SieStep& step) { encode<AmxProducts>(encoder, step); }
void encode_int8_bf16_amx(const SieEncoder& encoder, const SieStep& step) { encode<AmxInt8Products>(encoder, step); }
#endif
