// float32 on AVX2.
#ifdef __AVX2__
#include "levels.h"
#include "linear_kernel.h"

void linear_f32_avx2(const SieLinear& call) { linear(call); }
#endif
