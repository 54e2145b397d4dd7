// Exports the functions for encoders; each uses the level in its arguments.
#include "encoder.h"

#include "encoder_layout.h"
#include "features.h"
#include "levels.h"

// Bytes of memory that each thread of sie_attend needs beside its output.
SIE_EXPORT int64_t sie_attention_scratch(int64_t longest, int64_t width) {
    return static_cast<int64_t>(attention_scratch_bytes(longest, width));
}

#ifdef __x86_64__
SIE_EXPORT void sie_attend(const SieAttention* shape, int32_t is_bf16, void* scratch) {
    const auto in_bf16 = has_amx() ? attend_bf16_amx : attend_bf16_avx512;
    (is_bf16 ? in_bf16 : has_avx512() ? attend_f32_avx512 : attend_f32_avx2)(*shape, scratch);
}

// Bytes of memory that sie_encode needs beside its result, for a step of num_tokens tokens.
SIE_EXPORT int64_t sie_encoder_scratch(const SieEncoder* encoder, int64_t num_tokens, int64_t longest,
                                       int64_t num_threads) {
    return static_cast<int64_t>(EncoderLayout(*encoder, num_tokens, longest, num_threads).end);
}

SIE_EXPORT void sie_encode(const SieEncoder* encoder, const SieStep* step) {
    constexpr decltype(&encode_f32_avx512) kLevels[] = {
        encode_f32_avx2, encode_f32_avx512, encode_bf16_avx512, encode_bf16_amx,
        encode_int8_f32_avx512, encode_int8_bf16_avx512, encode_int8_bf16_amx};
    kLevels[encoder->level](*encoder, *step);
}

// Writes the mean (num_sequences, width) of the tokens (num_tokens, width) of each sequence, in float32.
SIE_EXPORT void sie_pool_mean(const void* hidden, int32_t is_bf16, int64_t width, const int32_t* bounds,
                              int32_t num_sequences, float* to) {
    const auto pool = is_bf16 ? pool_mean_bf16_avx512 : has_avx512() ? pool_mean_f32_avx512 : pool_mean_f32_avx2;
    pool(hidden, width, bounds, num_sequences, to);
}
#endif

// Writes the panels of a weight (outputs, words), as products.h reads them: (outputs rounded up to 32) x words.
SIE_EXPORT void sie_pack_panels(const uint32_t* weight, int32_t outputs, int32_t words, uint32_t* panels) {
    for (int first = 0; first < outputs; first += kPanel, panels += static_cast<size_t>(words) * kPanel)
        for (int word = 0; word < words; ++word)
            for (int column = 0; column < kPanel; ++column) {
                const bool is_inside = first + column < outputs;
                panels[word * kPanel + column] = is_inside ? weight[static_cast<size_t>(first + column) * words + word] : 0;
            }
}
