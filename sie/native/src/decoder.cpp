// Exports whole decoders, and chooses the level by the number format.
#include "decoder.h"

#include "decoder_layout.h"
#include "features.h"
#include "levels.h"

// Bytes of memory that sie_decode needs beside its result and the blocks.
SIE_EXPORT int64_t sie_decoder_scratch(const SieDecoder* decoder, const SieDecoderStep* step) {
    return static_cast<int64_t>(DecoderLayout(*decoder, *step).end);
}

#ifdef __x86_64__
SIE_EXPORT void sie_decode(const SieDecoder* decoder, const SieDecoderStep* step) {
    const auto in_bf16 = has_amx() ? decode_bf16_amx : decode_bf16_avx512;
    (decoder->is_bf16 ? in_bf16 : has_avx512() ? decode_f32_avx512 : decode_f32_avx2)(*decoder, *step);
}
#endif
