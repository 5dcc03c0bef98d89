// What the sampling kernel is built from: a team of thread blocks over one row, sums and searches over all of it, the
// order of tokens, and their weights as integers.
//
// A row lies in the shared memory of a team's thread blocks (a cluster), a slice each. All that is added up is an
// integer, so that no result depends on the order of additions: not on the team, the warp or the run.
#pragma once

#include "outcome.cuh"
#include <stdint.h>

namespace pagemill::sampling {

constexpr int TEAM = 8;       // thread blocks of a cluster; more than 8 are not portable
constexpr int THREADS = 512;  // of a thread block
constexpr int WARPS = THREADS / 32;
constexpr int GROUP = 128;    // neighbouring tokens that a warp reads at once, four a lane
constexpr int MAX_GROUPS = 368; // of a slice: what fits into shared memory
constexpr int BINS = 256;     // a digit of a token's place in the order
constexpr int COPIES = 8;     // of each bin, so that at most four lanes of a warp meet in one
constexpr int COPY_WORDS = BINS + 4; // so that the copies of a bin lie in different banks
constexpr int MAX_TOP = 32;   // likeliest tokens that are reported: a warp sorts them
constexpr uint32_t ALL = 0xffffffffu;

static_assert(GROUP == 32 * 4, "a lane reads four tokens of a group");
static_assert(THREADS >= BINS, "each bin has a thread");
static_assert(MAX_TOP <= 32, "a lane for each reported token");
static_assert(MAX_GROUPS * GROUP / COPIES <= 1 << 13, "sums of 19 bits fit 32");
static_assert(COPIES * COPY_WORDS % 4 == 0, "bins are cleared four at a time");

// Shared memory of a thread block beside its slice. What peers read has two places, used in turn: a place is written
// again only after the next meeting of the team, before which everybody has read it.
struct Shared {
    // A mass in parts of 19, 19 and 7 bits, so that nothing is carried while bins are filled.
    alignas(16) uint32_t count[COPIES * COPY_WORDS];
    uint32_t mass_low[COPIES * COPY_WORDS], mass_middle[COPIES * COPY_WORDS], mass_high[COPIES * COPY_WORDS];
    unsigned long long bin_mass[2][BINS]; // read by peers
    uint32_t bin_count[2][BINS];          // read by peers
    unsigned long long word[2];           // read by peers
    unsigned long long list[MAX_TOP];     // read by the leader
    uint32_t list_len;                    // read by the leader
    unsigned long long group_mass[MAX_GROUPS];
    unsigned long long of_warp[WARPS];
    unsigned long long of_peer[TEAM];
    unsigned long long found_before;
    uint32_t found_bin, found_count;
};

__device__ __forceinline__ void meet_team() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ uint32_t peer_address(const void* local, int peer) {
    uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(local));
#if __CUDA_ARCH__ >= 900
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(address), "r"(peer));
#endif
    return address;
}

__device__ __forceinline__ uint32_t read_peer(const uint32_t* local, int peer) {
    uint32_t value = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(peer_address(local, peer)) : "memory");
#endif
    return value;
}

__device__ __forceinline__ unsigned long long read_peer(const unsigned long long* local, int peer) {
    unsigned long long value = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(value) : "r"(peer_address(local, peer)) : "memory");
#endif
    return value;
}

__device__ __forceinline__ float logit_at(uint32_t place) {
    return __uint_as_float(place & 0x80000000u ? place : ~place & 0x7fffffffu);
}

// The last token that remains in the order "larger logit first, lower id first on ties".
struct Cut {
    uint32_t place, id;

    __device__ __forceinline__ bool keeps(uint32_t other_place, uint32_t other_id) const {
        return other_place < place || (other_place == place && other_id <= id);
    }

    __device__ __forceinline__ bool keeps(const Cut& other) const { return keeps(other.place, other.id); }
};

// `e^x` for x <= 0, the bits of `pagemill_backend::sampling::exp_neg`: no operation may be contracted.
__device__ __forceinline__ float exp_neg(float x) {
    const float round = 12582912.0f; // 1.5 * 2^23
    const float clamped = fmaxf(x, -87.0f);
    const float shifted = __fadd_rn(__fmul_rn(clamped, 1.44269504088896340736f), round);
    const float n = __fsub_rn(shifted, round);
    const float r = __fsub_rn(__fsub_rn(clamped, __fmul_rn(n, 0.6933594f)), __fmul_rn(n, -2.1219444e-4f));
    float p = 1.9875691e-4f;
    p = __fadd_rn(__fmul_rn(p, r), 1.3981999e-3f);
    p = __fadd_rn(__fmul_rn(p, r), 8.333452e-3f);
    p = __fadd_rn(__fmul_rn(p, r), 4.1665796e-2f);
    p = __fadd_rn(__fmul_rn(p, r), 1.6666665e-1f);
    p = __fadd_rn(__fmul_rn(p, r), 0.5f);
    const float y = __fadd_rn(__fadd_rn(__fmul_rn(__fmul_rn(p, r), r), r), 1.0f);
    const float scale = __uint_as_float((__float_as_uint(shifted) << 23) + (127u << 23));
    return x < -87.0f ? 0.0f : __fmul_rn(y, scale);
}

// The temperature's softmax.
struct Softmax {
    float max, inv_t;

    __device__ __forceinline__ float weight(float logit) const {
        return exp_neg(__fmul_rn(__fsub_rn(logit, max), inv_t));
    }
};

// A weight in [0, 1] in units of 2^-44, rounded down: sums of 2^19 of them fit 64 bits.
__device__ __forceinline__ unsigned long long units_of(float weight) {
    const uint32_t bits = __float_as_uint(weight);
    const unsigned long long mantissa = (bits & 0x7fffffu) | 0x800000u;
    return (mantissa << 21) >> min(127u - (bits >> 23), 63u);
}

// What a pass over all logits finds.
struct Extent {
    uint32_t first;          // place of the row's first token; 0: it holds what no row may hold
    uint32_t last_of_firsts; // of the first tokens of all warps, the last's place: TEAM * WARPS tokens lie there or before

    __device__ __forceinline__ float largest() const { return logit_at(first); }
};

// One thread block's view of the row.
struct Row {
    Shared& shared;
    float* slice;         // [num_groups * GROUP], padded with -inf
    uint32_t first_id;    // the slice's first token
    uint32_t num_groups;
    int rank;             // in the team
    uint32_t turn;        // which of the two places is written next
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    // Calls `visit(logit, id)` for all tokens of the slice.
    template <class Visit> __device__ __forceinline__ void each(Visit visit) const {
        for (uint32_t group = warp; group < num_groups; group += WARPS) {
            const uint32_t at = group * GROUP + lane * 4;
            const float4 x = *reinterpret_cast<const float4*>(slice + at);
            const uint32_t id = first_id + at;
            visit(x.x, id), visit(x.y, id + 1), visit(x.z, id + 2), visit(x.w, id + 3);
        }
    }

    // Brings a word of every thread together with `join`, in every thread. `shared.of_peer` has each peer's.
    template <class Join> __device__ unsigned long long team(unsigned long long x, Join join) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) x = join(x, __shfl_xor_sync(ALL, x, step));
        if (lane == 0) shared.of_warp[warp] = x;
        __syncthreads();
        if (warp == 0) {
            x = shared.of_warp[lane % WARPS];
#pragma unroll
            for (int step = WARPS / 2; step > 0; step /= 2) x = join(x, __shfl_xor_sync(ALL, x, step));
            if (lane == 0) shared.word[turn] = x;
        }
        meet_team();
        if (threadIdx.x < TEAM) shared.of_peer[threadIdx.x] = read_peer(&shared.word[turn], threadIdx.x);
        turn ^= 1;
        __syncthreads();
        x = shared.of_peer[0];
#pragma unroll
        for (int peer = 1; peer < TEAM; ++peer) x = join(x, shared.of_peer[peer]);
        return x;
    }

    // The extent of the row, given the place of each thread's first token.
    __device__ Extent extent(uint32_t first) {
        first = __reduce_min_sync(ALL, first);
        const unsigned long long both = static_cast<unsigned long long>(first) << 32 | first;
        const unsigned long long found = team(both, [](unsigned long long a, unsigned long long b) {
            const uint32_t low = max(static_cast<uint32_t>(a), static_cast<uint32_t>(b));
            return (min(a, b) & 0xffffffff00000000ull) | low;
        });
        const uint32_t last = min(static_cast<uint32_t>(found), place_of(-INFINITY));
        return Extent{static_cast<uint32_t>(found >> 32), last};
    }

    __device__ unsigned long long team_sum(unsigned long long x) {
        return team(x, [](unsigned long long a, unsigned long long b) { return a + b; });
    }

    __device__ unsigned long long team_min(unsigned long long x) {
        return team(x, [](unsigned long long a, unsigned long long b) { return min(a, b); });
    }

    template <bool MASS> __device__ __forceinline__ void clear_bins() {
        // Masses lie behind the counts.
        uint4* words = reinterpret_cast<uint4*>(shared.count);
        for (int at = threadIdx.x; at < COPIES * COPY_WORDS / 4 * (MASS ? 4 : 1); at += THREADS) {
            words[at] = make_uint4(0, 0, 0, 0);
        }
        __syncthreads();
    }

    __device__ __forceinline__ int copy_of(uint32_t bin) const { return lane % COPIES * COPY_WORDS + bin; }

    __device__ __forceinline__ void add_count(uint32_t bin) { atomicAdd(&shared.count[copy_of(bin)], 1u); }

    __device__ __forceinline__ void add_mass(uint32_t bin, unsigned long long units) {
        const int at = copy_of(bin);
        const uint32_t low = units & 0x7ffffu, middle = (units >> 19) & 0x7ffffu, high = units >> 38;
        atomicAdd(&shared.mass_low[at], low);
        if (middle != 0) atomicAdd(&shared.mass_middle[at], middle);
        if (high != 0) atomicAdd(&shared.mass_high[at], high);
    }

    // Where the running sum over the team's bins reaches a target.
    struct Found {
        unsigned long long before; // the sum of all earlier bins
        uint32_t bin, count;
    };

    // The first bin at which the sum of masses (or of counts) reaches `target`, which is at least 1 and at most the
    // sum of all.
    template <bool MASS> __device__ Found find_bin(unsigned long long target) {
        const int bin = threadIdx.x;
        __syncthreads();
        if (bin < BINS) {
            unsigned long long mass = 0;
            uint32_t count = 0;
#pragma unroll
            for (int copy = 0; copy < COPIES; ++copy) {
                const int at = copy * COPY_WORDS + bin;
                if (MASS) {
                    mass += shared.mass_low[at];
                    mass += static_cast<unsigned long long>(shared.mass_middle[at]) << 19;
                    mass += static_cast<unsigned long long>(shared.mass_high[at]) << 38;
                }
                count += shared.count[at];
            }
            if (MASS) shared.bin_mass[turn][bin] = mass;
            shared.bin_count[turn][bin] = count;
        }
        meet_team();
        unsigned long long own = 0, through = 0;
        uint32_t count = 0;
        if (bin < BINS) {
#pragma unroll
            for (int peer = 0; peer < TEAM; ++peer) {
                if (MASS) own += read_peer(&shared.bin_mass[turn][bin], peer);
                count += read_peer(&shared.bin_count[turn][bin], peer);
            }
            if (!MASS) own = count;
            through = own;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const unsigned long long left = __shfl_up_sync(ALL, through, step);
                if (lane >= step) through += left;
            }
            if (lane == 31) shared.of_warp[warp] = through;
        }
        turn ^= 1;
        __syncthreads();
        if (bin < BINS) {
            for (int other = 0; other < warp; ++other) through += shared.of_warp[other];
            if (through - own < target && through >= target) {
                shared.found_before = through - own, shared.found_bin = bin, shared.found_count = count;
            }
        }
        __syncthreads();
        return Found{shared.found_before, shared.found_bin, shared.found_count};
    }

    // Among the tokens with places in [first, last] that `units(logit, place, id)` does not give 0: the cut at which
    // their sum (their number if !MASS) reaches `target`. Digit by digit of a place's distance from `first`, then of
    // the id, until a bin is kept whole. Tokens that are given 0 may lie before the cut.
    template <bool MASS, class Units>
    __device__ Cut search(uint32_t first, uint32_t last, unsigned long long target, Units units) {
        const int place_levels = max(1, (32 - __clz(last - first) + 7) / 8);
        uint32_t prefix = 0, id_prefix = 0;
        for (int level = 0; level < place_levels + 3; ++level) {
            const bool by_place = level < place_levels;
            const bool is_first = level == 0 || level == place_levels; // of the place's digits, or of the id's
            const int shift = by_place ? 8 * (place_levels - 1 - level) : 8 * (place_levels + 2 - level);
            const uint32_t known = by_place ? prefix : id_prefix;
            clear_bins<MASS>();
            each([&](float logit, uint32_t id) {
                const uint32_t place = place_of(logit), distance = place - first;
                if (by_place ? distance > last - first : distance != prefix) return;
                const uint32_t digits = (by_place ? distance : id) >> shift;
                if (!is_first && digits >> 8 != known) return;
                const unsigned long long mass = units(logit, place, id);
                if (mass == 0) return;
                if (MASS) add_mass(digits & 255, mass);
                // The first bins are full, and hardly ever kept whole.
                if (!MASS || level > 0) add_count(digits & 255);
            });
            const Found found = find_bin<MASS>(target);
            target -= found.before;
            (by_place ? prefix : id_prefix) = known << 8 | found.bin;
            const bool whole = MASS ? found.count == 1 : target == found.count;
            if (whole) {
                const uint32_t rest = (1u << shift) - 1;
                if (!by_place) return Cut{first + prefix, id_prefix << shift | rest};
                return Cut{first + min(prefix << shift | rest, last - first), ALL};
            }
        }
        return Cut{first + prefix, id_prefix}; // one token is always a whole bin
    }

    // The cut of the first `count` tokens in order; there are as many.
    __device__ Cut first_tokens(const Extent& extent, uint32_t count) {
        const auto one = [](float, uint32_t, uint32_t) { return 1ull; };
        const uint32_t last = count <= TEAM * WARPS ? extent.last_of_firsts : place_of(-INFINITY);
        return search<false>(extent.first, last, count, one);
    }
};

} // namespace pagemill::sampling
