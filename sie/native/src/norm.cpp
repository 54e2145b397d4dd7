// Exports root mean square norms, and chooses the level by the number format.
#include "norm.h"

#include "features.h"
#include "levels.h"

#ifdef __x86_64__
SIE_EXPORT void sie_normalise(const SieRmsNorm* call) {
    (call->is_bf16 ? normalise_bf16_avx512 : has_avx512() ? normalise_f32_avx512 : normalise_f32_avx2)(*call);
}
#endif
