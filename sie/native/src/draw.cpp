// Exports the draws of tokens.
#include "draw.h"

#include "features.h"
#include "levels.h"

// Bytes of scratch that one thread of sie_draw needs.
SIE_EXPORT int64_t sie_draw_scratch(int64_t vocabulary) { return draw_scratch_bytes(vocabulary); }

#ifdef __x86_64__
// Draws one token for each of `count` draws over one vocabulary.
SIE_EXPORT void sie_draw(SieDraw* draws, int64_t count, char* scratch, int32_t num_threads) {
    (has_avx512() ? draw_avx512 : draw_avx2)(draws, count, scratch, num_threads);
}
#endif
