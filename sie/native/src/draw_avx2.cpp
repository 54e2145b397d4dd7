// Draws on AVX2.
#ifdef __AVX2__
#include "draw_kernel.h"
#include "levels.h"

void draw_avx2(SieDraw* draws, int64_t count, char* scratch, int32_t num_threads) {
    draw_tokens(draws, count, scratch, num_threads);
}
#endif
