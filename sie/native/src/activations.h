// The functions between the linear layers of a block.
#pragma once
#include "encoder.h"
#include "lanes.h"

namespace {

// Calls run(f) with an activation's function of 16 values, for results that are stored in the format T.
template <class T, class F>
void with_activation(int32_t activation, const F& run) {
    constexpr bool kIsRough = sizeof(typename T::Stored) == 2;
    switch (activation) {
        case kGelu: return run([](Vec x) { return kIsRough ? rough_gelu(x) : gelu(x); });
        case kGeluTanh: return run([](Vec x) { return kIsRough ? rough_gelu_tanh(x) : gelu_tanh(x); });
        case kRelu: return run([](Vec x) { return max(zero(), x); });
        default: return run([](Vec x) { return kIsRough ? rough_times_sigmoid(x, x) : times_sigmoid(x, x); });
    }
}

}  // namespace
