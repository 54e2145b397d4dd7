// float32 on AVX-512.
#ifdef __AVX512F__
#include "encoder_kernel.h"
#include "levels.h"
#include "pooling_kernel.h"

void attend_f32_avx512(const SieAttention& shape, void* scratch) { attend<DotAttention<F32>>(shape, longest_of(shape), scratch); }
void encode_f32_avx512(const SieEncoder& encoder, const SieStep& step) { encode<DotProducts<F32>>(encoder, step); }

void pool_mean_f32_avx512(const void* hidden, int64_t width, const int32_t* bounds, int32_t num_sequences, float* to) {
    pool_mean<F32>(hidden, width, bounds, num_sequences, to);
}
#endif
