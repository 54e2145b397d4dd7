// Exports linear layers over packed weights, and chooses the level by the number format of input and output.
#include "linear.h"

#include "features.h"
#include "levels.h"

SIE_EXPORT int64_t sie_linear_scratch(int64_t rows, int64_t inputs, int64_t num_threads) {
    return linear_scratch_bytes(rows, inputs, num_threads);
}

#ifdef __x86_64__
SIE_EXPORT void sie_linear(const SieLinear* call) {
    const auto in_bf16 = has_amx() ? linear_bf16_amx : linear_bf16_avx512;
    (call->is_bf16 ? in_bf16 : has_avx512() ? linear_f32_avx512 : linear_f32_avx2)(*call);
}
#endif
