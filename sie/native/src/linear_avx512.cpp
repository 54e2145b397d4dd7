// float32 on AVX-512.
#ifdef __AVX512F__
#include "levels.h"
#include "linear_kernel.h"

void linear_f32_avx512(const SieLinear& call) { linear(call); }
#endif
