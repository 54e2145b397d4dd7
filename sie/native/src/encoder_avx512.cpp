// float32 on AVX-512.
#ifdef __AVX512F__
#include "attention_kernel.h"
#include "levels.h"

void attend_f32_avx512(const SieAttention& shape, void* scratch) { attend<F32>(shape, scratch); }
#endif
