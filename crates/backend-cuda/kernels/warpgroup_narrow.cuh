// Warpgroup products of few columns, both operands in shared memory along k (warpgroup.cuh has the wide ones, and says
// how operands lie). Decides nothing. Generated bodies: one instruction each.
#pragma once
#include "warpgroup.cuh"

namespace pagemill {

/// D (64 rows, N columns) = A B, or += where `accumulate`; N is 8, 16, 32, 64 or 128.
template <class T, int N> __device__ __forceinline__ void wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {
    static_assert(N == 8 || N == 16 || N == 32 || N == 64 || N == 128, "there is a body for each");
    if constexpr (N == 128) {
        wgmma_n128_ss<T, 0>(d, a, b, accumulate);
    } else if constexpr (N == 8 && T::IS_BF16) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %6, 0;"
            " wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {"
            "%0,%1,%2,%3"
            "}, %4, %5, p, 1, 1, 0, 0; }"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "l"(a), "l"(b), "r"(accumulate));
    } else if constexpr (N == 8) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %6, 0;"
            " wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {"
            "%0,%1,%2,%3"
            "}, %4, %5, p, 1, 1, 0, 0; }"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "l"(a), "l"(b), "r"(accumulate));
    } else if constexpr (N == 16 && T::IS_BF16) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %10, 0;"
            " wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
            "%0,%1,%2,%3,%4,%5,%6,%7"
            "}, %8, %9, p, 1, 1, 0, 0; }"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
            : "l"(a), "l"(b), "r"(accumulate));
    } else if constexpr (N == 16) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %10, 0;"
            " wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"
            "%0,%1,%2,%3,%4,%5,%6,%7"
            "}, %8, %9, p, 1, 1, 0, 0; }"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
            : "l"(a), "l"(b), "r"(accumulate));
    } else if constexpr (N == 32 && T::IS_BF16) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %18, 0;"
            " wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
            "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
            "}, %16, %17, p, 1, 1, 0, 0; }"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
            : "l"(a), "l"(b), "r"(accumulate));
    } else if constexpr (N == 32) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %18, 0;"
            " wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
            "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
            "}, %16, %17, p, 1, 1, 0, 0; }"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
            : "l"(a), "l"(b), "r"(accumulate));
    } else if constexpr (N == 64 && T::IS_BF16) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;"
            " wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
            "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
            "}, %32, %33, p, 1, 1, 0, 0; }"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
              "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
            : "l"(a), "l"(b), "r"(accumulate));
    } else if constexpr (N == 64) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;"
            " wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
            "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
            "}, %32, %33, p, 1, 1, 0, 0; }"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
              "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
            : "l"(a), "l"(b), "r"(accumulate));
    }
}

} // namespace pagemill
