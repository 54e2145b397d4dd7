// Declares the functions of each processor level; the exported functions choose one.
#pragma once
#include "attention.h"
#include "decoder.h"
#include "draw.h"
#include "encoder.h"
#include "linear.h"
#include "norm.h"

void attend_f32_avx2(const SieAttention& shape, void* scratch);
void attend_f32_avx512(const SieAttention& shape, void* scratch);
void attend_bf16_avx512(const SieAttention& shape, void* scratch);
void attend_bf16_amx(const SieAttention& shape, void* scratch);
void encode_f32_avx2(const SieEncoder& encoder, const SieStep& step);
void encode_f32_avx512(const SieEncoder& encoder, const SieStep& step);
void encode_bf16_avx512(const SieEncoder& encoder, const SieStep& step);
void encode_bf16_amx(const SieEncoder& encoder, const SieStep& step);
void encode_int8_f32_avx512(const SieEncoder& encoder, const SieStep& step);
void encode_int8_bf16_avx512(const SieEncoder& encoder, const SieStep& step);
void encode_int8_bf16_amx(const SieEncoder& encoder, const SieStep& step);
void pool_mean_f32_avx2(const void* hidden, int64_t width, const int32_t* bounds, int32_t num_sequences, float* to);
void pool_mean_f32_avx512(const void* hidden, int64_t width, const int32_t* bounds, int32_t num_sequences, float* to);
void pool_mean_bf16_avx512(const void* hidden, int64_t width, const int32_t* bounds, int32_t num_sequences, float* to);
void decode_f32_avx2(const SieDecoder& decoder, const SieDecoderStep& step);
void decode_f32_avx512(const SieDecoder& decoder, const SieDecoderStep& step);
void decode_bf16_avx512(const SieDecoder& decoder, const SieDecoderStep& step);
void decode_bf16_amx(const SieDecoder& decoder, const SieDecoderStep& step);
void draw_avx2(SieDraw* draws, int64_t count, char* scratch, int32_t num_threads);
void draw_avx512(SieDraw* draws, int64_t count, char* scratch, int32_t num_threads);
void linear_f32_avx2(const SieLinear& call);
void linear_f32_avx512(const SieLinear& call);
void linear_bf16_avx512(const SieLinear& call);
void linear_bf16_amx(const SieLinear& call);
void normalise_f32_avx2(const SieRmsNorm& call);
void normalise_f32_avx512(const SieRmsNorm& call);
void normalise_bf16_avx512(const SieRmsNorm& call);
