// Warpgroup products of many columns, both operands in shared memory along k (warpgroup.cuh says how operands lie).
// Decides nothing. Generated bodies: one instruction each.
#pragma once
#include "warpgroup.cuh"

// clang-format off
#define SUMS_8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SUMS_32(d, i) SUMS_8(d, i), SUMS_8(d, i + 8), SUMS_8(d, i + 16), SUMS_8(d, i + 24)
#define NAMES_0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES_16 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_32 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define NAMES_48 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NAMES_64 "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define NAMES_80 "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define NAMES_96 "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"

namespace pagemill {

/// D (64 rows, N columns) += A B; N is one of those below. Of the descriptors the low words: both operands lie as
/// `k_major_descriptor` says.
template <class T, int N> __device__ __forceinline__ void wgmma_wide_add(float (&d)[N / 2], uint32_t a, uint32_t b);

#define WGMMA_WIDE_OF(T, TYPES, N, A, B, NAMES, ...)                                                                   \
    template <> __device__ __forceinline__ void wgmma_wide_add<T, N>(float (&d)[N / 2], uint32_t a, uint32_t b) {      \
        asm volatile("{ .reg .b64 a, b; mov.b64 a, {%" A ", 0x40000040}; mov.b64 b, {%" B ", 0x40000040};"             \
                     " wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES " {" NAMES "}, a, b, 1, 1, 1, 0, 0; }"   \
                     : __VA_ARGS__ : "r"(a), "r"(b));                                                                  \
    }
#define WGMMA_WIDE(...) WGMMA_WIDE_OF(Bf16, "bf16.bf16", __VA_ARGS__) WGMMA_WIDE_OF(F16, "f16.f16", __VA_ARGS__)

WGMMA_WIDE(112, "56", "57", NAMES_0 "," NAMES_16 "," NAMES_32 ",%48,%49,%50,%51,%52,%53,%54,%55", SUMS_32(d, 0), SUMS_8(d, 32), SUMS_8(d, 40), SUMS_8(d, 48))
WGMMA_WIDE(128, "64", "65", NAMES_0 "," NAMES_16 "," NAMES_32 "," NAMES_48, SUMS_32(d, 0), SUMS_32(d, 32))
WGMMA_WIDE(160, "80", "81", NAMES_0 "," NAMES_16 "," NAMES_32 "," NAMES_48 "," NAMES_64, SUMS_32(d, 0), SUMS_32(d, 32), SUMS_8(d, 64), SUMS_8(d, 72))
WGMMA_WIDE(192, "96", "97", NAMES_0 "," NAMES_16 "," NAMES_32 "," NAMES_48 "," NAMES_64 "," NAMES_80, SUMS_32(d, 0), SUMS_32(d, 32), SUMS_32(d, 64))
WGMMA_WIDE(208, "104", "105", NAMES_0 "," NAMES_16 "," NAMES_32 "," NAMES_48 "," NAMES_64 "," NAMES_80 ",%96,%97,%98,%99,%100,%101,%102,%103", SUMS_32(d, 0), SUMS_32(d, 32), SUMS_32(d, 64), SUMS_8(d, 96))
WGMMA_WIDE(224, "112", "113", NAMES_0 "," NAMES_16 "," NAMES_32 "," NAMES_48 "," NAMES_64 "," NAMES_80 "," NAMES_96, SUMS_32(d, 0), SUMS_32(d, 32), SUMS_32(d, 64), SUMS_8(d, 96), SUMS_8(d, 104))

#undef WGMMA_WIDE
#undef WGMMA_WIDE_OF
// clang-format on

} // namespace pagemill
