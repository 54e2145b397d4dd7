// What the library does for encoders: each function chooses the level by its number format.
#include "features.h"
#include "levels.h"

// Bytes that sie_attend writes to beside its output.
SIE_EXPORT int64_t sie_attention_scratch(int64_t longest, int64_t width) {
    return static_cast<int64_t>(attention_scratch_bytes(longest, width));
}

#ifdef __x86_64__
SIE_EXPORT void sie_attend(const SieAttention* shape, int32_t is_bf16, void* scratch) {
    (is_bf16 ? attend_bf16_avx512 : attend_f32_avx512)(*shape, scratch);
}
#endif
