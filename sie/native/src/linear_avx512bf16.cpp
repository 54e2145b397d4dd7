// bfloat16 on AVX-512 with its dot product.
#ifdef __AVX512BF16__
#include "levels.h"
#include "linear_kernel.h"

void linear_bf16_avx512(const SieLinear& call) { linear(call); }
#endif
