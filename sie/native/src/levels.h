// The functions that each level of the processor has, for the exported ones to choose from.
#pragma once
#include "attention.h"
#include "linear.h"
#include "norm.h"

void attend_f32_avx512(const SieAttention& shape, void* scratch);
void attend_bf16_avx512(const SieAttention& shape, void* scratch);

void linear_f32_avx512(const SieLinear& call);
void linear_bf16_avx512(const SieLinear& call);

void normalise_f32_avx512(const SieNorm& call);
void normalise_bf16_avx512(const SieNorm& call);
