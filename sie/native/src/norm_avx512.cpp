// float32 on AVX-512.
#ifdef __AVX512F__
#include "levels.h"
#include "norm_kernel.h"

void normalise_f32_avx512(const SieRmsNorm& call) { normalise<F32>(call); }
#endif
