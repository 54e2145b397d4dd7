// bfloat16 on AVX-512, whose conversions round to it.
#ifdef __AVX512BF16__
#include "levels.h"
#include "norm_kernel.h"

void normalise_bf16_avx512(const SieRmsNorm& call) { normalise<Bf16>(call); }
#endif
