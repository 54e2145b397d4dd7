// bfloat16 on AVX-512 with its dot product, or with that of bytes.
#ifdef __AVX512BF16__
#include "encoder_kernel.h"
#include "levels.h"
#include "pooling_kernel.h"
#include "products_int8.h"

void attend_bf16_avx512(const SieAttention& shape, void* scratch) { attend<DotAttention<Bf16>>(shape, longest_of(shape), scratch); }
void encode_bf16_avx512(const SieEncoder& encoder, const SieStep& step) { encode<DotProducts<Bf16>>(encoder, step); }
void encode_int8_bf16_avx512(const SieEncoder& encoder, const SieStep& step) { encode<Int8Products<Bf16>>(encoder, step); }

void pool_mean_bf16_avx512(const void* hidden, int64_t width, const int32_t* bounds, int32_t num_sequences, float* to) {
    pool_mean<Bf16>(hidden, width, bounds, num_sequences, to);
}
#endif
