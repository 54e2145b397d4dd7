// bfloat16 on AVX-512 with its dot product.
#ifdef __AVX512BF16__
#include "attention_kernel.h"
#include "levels.h"

void attend_bf16_avx512(const SieAttention& shape, void* scratch) { attend<Bf16>(shape, scratch); }
#endif
