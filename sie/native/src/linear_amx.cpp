// bfloat16 with products in AMX tiles; the rest is on AVX-512.
#ifdef __AMX_BF16__
#include "levels.h"
#include "linear_kernel.h"

void linear_bf16_amx(const SieLinear& call) { linear(call); }
#endif
