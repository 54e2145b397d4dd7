// float32 on AVX2.
#ifdef __AVX2__
#include "levels.h"
#include "norm_kernel.h"

void normalise_f32_avx2(const SieRmsNorm& call) { normalise<F32>(call); }
#endif
