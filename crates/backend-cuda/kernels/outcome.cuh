// What the sampling kernels leave of each row, for the host and for the step that comes next.
#pragma once

#include <math_constants.h>
#include <stdint.h>

namespace pagemill::sampling {

// Order as unsigned integers: smaller for larger logits. Zeros of both signs are equal; NaN does not come here.
__device__ __forceinline__ uint32_t place_of(float logit) {
    const uint32_t bits = logit == 0.0f ? 0u : __float_as_uint(logit);
    return bits & 0x80000000u ? bits : ~(bits | 0x80000000u);
}

struct Outcome {
    uint32_t is_good; // 0: the row has no distribution, and nothing else is written
    uint32_t token;
    uint32_t rank;
    float logit;      // the token's, as the model gave it
    float max;        // the row's largest, likewise
    uint32_t sum_low, sum_high; // of exp(logit - max) over the row, in units of 2^-44
    uint32_t unused;
};

// The token that `largest_f32` found for a row, from its two words; 0 where there was none.
__device__ __forceinline__ uint32_t drawn_of_largest(const uint32_t* words) {
    const uint32_t place = words[1];
    return place > place_of(CUDART_INF_F) && place < place_of(-CUDART_INF_F) ? words[0] : 0;
}

// The token of an outcome; 0 where there was none.
__device__ __forceinline__ uint32_t drawn_of_outcome(const uint32_t* words) {
    const Outcome& outcome = *reinterpret_cast<const Outcome*>(words);
    return outcome.is_good ? outcome.token : 0;
}

} // namespace pagemill::sampling
