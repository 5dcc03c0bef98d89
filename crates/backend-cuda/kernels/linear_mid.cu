// y [M, N] = x [M, C] · W [N, C]^T for M up to 128 on Hopper: reads every weight once, near memory bandwidth, and
// multiplies on the tensor cores by whole warpgroups. Decides how a thread block brings weights and x and in which order
// sums are added; the host (`src/kernels/linear_mid.rs`) picks the form and the cut. Knows no layer.
//
// Letters: M tokens, N output features, C input features. The product is taken as y^T = W x^T: W is the A operand,
// so that its many rows fill the tensor cores whatever M is, and x the B operand, one column a token. A panel is 64
// elements of C (one swizzled row of shared memory), a tile 64 rows of W (one product's height).
//
// A thread block has a share: a run of rows of one part, as many as share the rows out evenly, whatever multiple of a
// tile that is. Boxes of the copy engine begin at any row; tiles of a share overlap where it ends, and a row is stored
// by the first that has it. A share with more rows than a form has tiles for is taken in passes.
//
// C is one range, or cut into several (planes), whose sums are stored apart: whoever reads y adds them in order. A row's
// bits depend on its token, the weight and the cut of C only: not on M, the form, the shares, nor on what else is in
// the launch.
//
// Two warps feed, through rings of their own: weights, which wait for nothing but room, since they do not depend on the
// previous kernel; and x. Two warpgroups multiply: each has tiles of its own, or they have one together, each for half
// of the tokens. The gated form has the gate's tile and up's in one warpgroup, so that both sums of an output are in one
// thread's registers. Up to three products of one x (q, k, v) share a launch.
//
// Tried (NOTES.md): x brought once for a cluster of two or four (no gain, and clusters find room late); a stage given
// back when the next is under way; rings that leave room for the next kernel's.
#include "warpgroup_narrow.cuh"

namespace pagemill {

constexpr int MID_PARTS = 3;
constexpr int FEEDERS = 64; // threads: a warp for weights, a warp for x

/// `quotient` units to each of several runs, and one more to each of the first `remainder`.
struct EvenCut {
    uint32_t quotient, remainder;
    __device__ __forceinline__ uint32_t begin(uint32_t run) const { return run * quotient + min(run, remainder); }
};

/// One product of x.
struct LinearMidPart {
    const float* bias; // [N] or null
    void* y;           // [planes, M, y_stride] elements of y_type
    uint32_t n;
    uint32_t y_stride;
    uint32_t num_shares; // of its rows; behind the last part 0
    uint32_t box_rows;   // of its map: the rows of the largest pass
    EvenCut pairs;       // of rows, by passes of all shares
};

struct LinearMidParams {
    CUtensorMap x_map;              // [M, C], boxes of 64 columns and the form's columns of tokens
    CUtensorMap w_map[MID_PARTS];   // [N, C], boxes of 64 columns and the part's box_rows; gated: gate, up
    LinearMidPart parts[MID_PARTS]; // gated: the first only, without bias
    uint64_t plane_stride;          // bytes of y from plane to plane
    EvenCut cuts;                   // of CUT_PANELS of C, by planes (the grid's y)
    uint32_t m;                     // 1 ..= the form's columns
    uint32_t num_passes;            // of a share
    uint32_t num_panels;            // of C
    uint32_t tile_rows;             // rows that a panel of weights has room for: a multiple of 8; gated: of each of both
    uint32_t w_slots;               // 2 ..= MAX_SLOTS
    uint32_t x_slots;
    uint32_t y_type;                // ActivationType: F32 or BF16
    uint32_t activation;            // GateActivation
};
static_assert(sizeof(LinearMidPart) == 40 && sizeof(LinearMidParams) == 768, "src/kernels/linear_mid.rs has the same");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

constexpr int PANEL_BYTES = 128; // of a row
constexpr int CUT_PANELS = 4;    // C is cut at multiples of so many
constexpr int MAX_SLOTS = 16;    // of a ring
constexpr uint32_t PACE = 2;     // stages of weights on their way while the ring fills

/// How a kernel is compiled. Warpgroups have TILES tiles each (gated: of the gate and up), or with 0 one together (gated:
/// one of both), and tokens apart.
template <class ELEMENT, int COLUMNS_, int WARPGROUPS_, int TILES_, int PANELS_, bool GATED_> struct MidForm {
    using T = ELEMENT;
    static constexpr int COLUMNS = COLUMNS_, WARPGROUPS = WARPGROUPS_, PANELS = PANELS_; // panels of a stage
    static constexpr bool BY_TOKENS = TILES_ == 0, GATED = GATED_;
    static constexpr int TILES = BY_TOKENS ? 1 + GATED : TILES_, OWN_COLUMNS = BY_TOKENS ? COLUMNS / WARPGROUPS : COLUMNS; // of a warpgroup
    static constexpr int X_BYTES = COLUMNS * PANEL_BYTES; // of a panel
    static constexpr int BOXES = GATED ? 2 : 1;           // of weights, a panel
    static_assert(CUT_PANELS % PANELS == 0, "no stage lies across a cut");
    static_assert(!GATED || TILES == 2, "a tile of the gate and one of up");
    static_assert(OWN_COLUMNS % 8 == 0, "columns begin where the swizzle does");
};

struct MidBarriers {
    uint64_t w_full[MAX_SLOTS], w_empty[MAX_SLOTS], x_full[MAX_SLOTS], x_empty[MAX_SLOTS];
};

/// A ring's place: which slot, and the parity of its turn.
struct RingPlace {
    uint32_t slot = 0, parity = 0;
    __device__ __forceinline__ void advance(uint32_t slots) {
        if (++slot == slots) slot = 0, parity ^= 1;
    }
};

/// What a thread block works on: a share of a part's rows, panels [panel, panel_end) of C.
struct MidWork {
    uint32_t part, share, panel, panel_end;
    /// C is cut where every form's stages end. Panels behind C are zeros.
    template <class F> __device__ __forceinline__ static MidWork of(const LinearMidParams& p) {
        const uint32_t whole = (p.num_panels + F::PANELS - 1) / F::PANELS * F::PANELS;
        MidWork work = {0, blockIdx.x, min(p.cuts.begin(blockIdx.y) * CUT_PANELS, whole), min(p.cuts.begin(blockIdx.y + 1) * CUT_PANELS, whole)};
#pragma unroll
        for (uint32_t i = 0; i + 1 < MID_PARTS; ++i)
            if (work.part == i && work.share >= p.parts[i].num_shares) work.share -= p.parts[i].num_shares, ++work.part;
        return work;
    }
    /// The first row of a pass: even, and N behind the last pass of the last share.
    __device__ __forceinline__ uint32_t first_row(const LinearMidParams& p, uint32_t pass) const {
        return min(p.parts[part].n, 2 * p.parts[part].pairs.begin(share * p.num_passes + pass));
    }
};

/// Makes a ring's barriers, and the copy engine know them. One thread, which may use them at once.
__device__ __forceinline__ void init_ring(uint64_t* full, uint64_t* empty, uint32_t slots, uint32_t readers) {
    for (uint32_t i = 0; i < slots; ++i) barrier_init(&full[i], 1), barrier_init(&empty[i], readers);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// As `copy_box`, of what is read once.
__device__ __forceinline__ void copy_box_once(uint32_t to, const CUtensorMap* map, int column, int row, uint32_t bar, uint64_t once) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(bar), "l"(once) : "memory");
}
/// The cache policy of what is read once: the first to leave L2.
__device__ __forceinline__ uint64_t read_once_policy() {
    uint64_t once;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    return once;
}
/// As `copy_box`, told addresses.
__device__ __forceinline__ void copy_box_at(uint32_t to, const CUtensorMap* map, int column, int row, uint32_t bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(bar) : "memory");
}
/// Brings a share's weights, pass by pass. One thread.
///
/// The ring fills while the kernel before this one still runs, a norm mostly: memory is kept busy by a few stages of each
/// multiprocessor, and with all of them asked for at once that kernel's few reads queued behind 22 MB.
template <class F> __device__ __forceinline__ void feed_weights(const LinearMidParams& p, const MidWork& work, MidBarriers& bars, uint32_t ring) {
    const uint32_t panel_bytes = F::BOXES * p.tile_rows * PANEL_BYTES, box_bytes = F::BOXES * p.parts[work.part].box_rows * PANEL_BYTES;
    const uint64_t once = read_once_policy();
    const CUtensorMap* map = &p.w_map[work.part];
    RingPlace at;
    uint32_t num_filled = 0;
    for (uint32_t pass = 0; pass < p.num_passes; ++pass) {
        const uint32_t row = work.first_row(p, pass);
#pragma unroll 1
        for (uint32_t panel = work.panel; panel < work.panel_end; panel += F::PANELS, at.advance(p.w_slots)) {
            const uint32_t full = shared_address(&bars.w_full[at.slot]);
            uint32_t to = ring + at.slot * F::PANELS * panel_bytes;
            if (num_filled < p.w_slots) {
                if (num_filled >= PACE) barrier_wait(&bars.w_full[num_filled - PACE], 0);
                ++num_filled;
            } else {
                barrier_wait(&bars.w_empty[at.slot], at.parity ^ 1);
            }
            barrier_expect(&bars.w_full[at.slot], F::PANELS * box_bytes);
#pragma unroll
            for (uint32_t i = panel; i < panel + F::PANELS; ++i, to += panel_bytes) {
                copy_box_once(to, map, i * 64, row, full, once);
                if constexpr (F::GATED) copy_box_once(to + p.tile_rows * PANEL_BYTES, map + 1, i * 64, row, full, once);
            }
        }
    }
}

/// Brings x, once a pass. One thread.
template <class F> __device__ __forceinline__ void feed_x(const LinearMidParams& p, const MidWork& work, MidBarriers& bars, uint32_t ring) {
    RingPlace at;
    for (uint32_t pass = 0; pass < p.num_passes; ++pass) {
#pragma unroll 1
        for (uint32_t panel = work.panel; panel < work.panel_end; panel += F::PANELS, at.advance(p.x_slots)) {
            const uint32_t full = shared_address(&bars.x_full[at.slot]), to = ring + at.slot * F::PANELS * F::X_BYTES;
            barrier_wait(&bars.x_empty[at.slot], at.parity ^ 1);
            barrier_expect(&bars.x_full[at.slot], F::PANELS * F::X_BYTES);
#pragma unroll
            for (uint32_t i = 0; i < F::PANELS; ++i) copy_box_at(to + i * F::X_BYTES, &p.x_map, (panel + i) * 64, 0, full);
        }
    }
}

/// Features of a tile: the one that its first row is, and those stored from it, [low, high).
struct MidRows {
    uint32_t first, low, high;
};

/// `gate_activation(x) * up` without branches, so that a thread's many outputs are under way at once: both activations are
/// x times a sigmoid (the tanh form of GELU: 0.5 (1 + tanh u) = sigmoid(2 u)).
__device__ __forceinline__ float gated(float x, float up, uint32_t activation) {
    const float z = activation == GATE_SILU ? x : 1.5957691216057308f * (x + 0.044715f * x * x * x);
    return __fdividef(x, 1.0f + __expf(-z)) * up;
}

/// How sums are stored: as f32; as pairs of bf16, rows of y being even and aligned; as single bf16.
enum MidStore { STORE_F32, STORE_PAIRS, STORE_SINGLES };

/// A warpgroup's sums of a tile, for tokens from `token0` on; `more` are those of up in the gated form. C fragments of 16
/// features by 8 tokens.
template <class F, MidStore STORE>
__device__ __forceinline__ void store_tile_as(const LinearMidParams& p, const MidWork& work, const MidRows& rows, uint32_t token0, const float (&d)[F::OWN_COLUMNS / 2],
                                              const float (&more)[F::OWN_COLUMNS / 2]) {
    const LinearMidPart& part = p.parts[work.part];
    char* y = static_cast<char*>(part.y) + blockIdx.y * p.plane_stride;
    const float* bias = blockIdx.y == 0 ? part.bias : nullptr;
    const uint32_t g = threadIdx.x % 32 / 4, c = threadIdx.x % 4, row0 = rows.first + threadIdx.x / 32 % 4 * 16, stride = part.y_stride;
    auto is_stored = [&](uint32_t row) { return row >= rows.low && row < rows.high; };
    auto bias_of = [&](uint32_t row) { return bias != nullptr && is_stored(row) ? bias[row] : 0.0f; };
    const float bias_low = bias_of(row0 + g), bias_high = bias_of(row0 + 8 + g);
    // Where this thread's first element goes: as sums lie, or with tokens and features exchanged in their 8 x 8 blocks.
    const uint32_t token = token0 + (STORE == STORE_F32 ? 2 * c : g), row = row0 + (STORE == STORE_F32 ? g : 2 * c);
    const bool stores_low = is_stored(row), stores_high = is_stored(row + 8);
    const size_t first = static_cast<size_t>(token) * stride + row;
    float* y32 = reinterpret_cast<float*>(y) + first;
    uint16_t* y16 = reinterpret_cast<uint16_t*>(y) + first;
#pragma unroll
    for (int f = 0; f < F::OWN_COLUMNS / 8; ++f) {
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = F::GATED ? gated(d[f * 4 + i], more[f * 4 + i], p.activation) : d[f * 4 + i] + (i < 2 ? bias_low : bias_high);
        if constexpr (STORE == STORE_F32) {
            if (token + f * 8 < p.m) {
                if (stores_low) y32[0] = v[0];
                if (stores_high) y32[8] = v[2];
            }
            if (token + f * 8 + 1 < p.m) {
                if (stores_low) y32[stride] = v[1];
                if (stores_high) y32[stride + 8] = v[3];
            }
            y32 += 8 * stride;
        } else {
            const uint32_t low = transpose8x8(Bf16::pack(v[0], v[1])), high = transpose8x8(Bf16::pack(v[2], v[3]));
            const bool is_token = token + f * 8 < p.m;
            if constexpr (STORE == STORE_PAIRS) {
                if (is_token && stores_low) *reinterpret_cast<uint32_t*>(y16) = low;
                if (is_token && stores_high) *reinterpret_cast<uint32_t*>(y16 + 8) = high;
            } else {
                if (is_token && stores_low) y16[0] = static_cast<uint16_t>(low);
                if (is_token && is_stored(row + 1)) y16[1] = static_cast<uint16_t>(low >> 16);
                if (is_token && stores_high) y16[8] = static_cast<uint16_t>(high);
                if (is_token && is_stored(row + 9)) y16[9] = static_cast<uint16_t>(high >> 16);
            }
            y16 += 8 * stride;
        }
    }
}

template <class F>
__device__ __forceinline__ void store_tile(const LinearMidParams& p, const MidWork& work, const MidRows& rows, uint32_t token0, const float (&d)[F::OWN_COLUMNS / 2],
                                           const float (&more)[F::OWN_COLUMNS / 2]) {
    const LinearMidPart& part = p.parts[work.part];
    // Rows begin even.
    const bool in_pairs = ((part.y_stride | rows.high) & 1) == 0 && (reinterpret_cast<uintptr_t>(part.y) & 3) == 0;
    if (p.y_type == ACT_F32) store_tile_as<F, STORE_F32>(p, work, rows, token0, d, more);
    else if (in_pairs) store_tile_as<F, STORE_PAIRS>(p, work, rows, token0, d, more);
    else store_tile_as<F, STORE_SINGLES>(p, work, rows, token0, d, more);
}

/// A multiplying warpgroup.
template <class F> __device__ __forceinline__ void multiply(const LinearMidParams& p, const MidWork& work, MidBarriers& bars, uint32_t w_ring, uint32_t x_ring) {
    const uint32_t warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
    const uint32_t panel_bytes = F::BOXES * p.tile_rows * PANEL_BYTES, token0 = F::BY_TOKENS ? warpgroup * F::OWN_COLUMNS : 0;
    // Tiles lie at multiples of 64 rows as long as they fit; the last ends where the room for rows does.
    const uint32_t last_tile = p.tile_rows < 64 ? 0 : p.tile_rows - 64;
    auto tile = [&](int t) -> uint32_t { return F::BY_TOKENS ? 0 : F::GATED ? warpgroup : warpgroup * F::TILES + t; };
    auto tile_row = [&](int t) { return min(tile(t) * 64, last_tile); };
    uint64_t w_first[F::TILES];
#pragma unroll
    for (int t = 0; t < F::TILES; ++t) w_first[t] = k_major_descriptor(w_ring + (tile_row(t) + (F::GATED ? t * p.tile_rows : 0)) * PANEL_BYTES);
    const uint64_t x_first = k_major_descriptor(x_ring + token0 * PANEL_BYTES);
    RingPlace w, x;
    for (uint32_t pass = 0; pass < p.num_passes; ++pass) {
        float d[F::TILES][F::OWN_COLUMNS / 2] = {};
#pragma unroll 1
        for (uint32_t panel = work.panel; panel < work.panel_end; panel += F::PANELS) {
            const uint32_t w_offset = w.slot * F::PANELS * panel_bytes >> 4, x_offset = x.slot * F::PANELS * F::X_BYTES >> 4;
            barrier_wait(&bars.w_full[w.slot], w.parity);
            barrier_wait(&bars.x_full[x.slot], x.parity);
            wgmma_fence();
#pragma unroll
            for (uint32_t i = 0; i < F::PANELS; ++i) {
                const uint32_t w_at = w_offset + i * (panel_bytes >> 4), x_at = x_offset + i * (F::X_BYTES >> 4);
#pragma unroll
                for (int k = 0; k < 4; ++k)
#pragma unroll
                    for (int t = 0; t < F::TILES; ++t) wgmma_ss<typename F::T, F::OWN_COLUMNS>(d[t], w_first[t] + (w_at + k * 2), x_first + (x_at + k * 2), 1);
            }
            wgmma_commit();
            // At once, and not when the next stage has come: it is memory that the stage is wanted for.
            wgmma_wait<0>();
            if (lane == 0) barrier_arrive(&bars.w_empty[w.slot]), barrier_arrive(&bars.x_empty[x.slot]);
            w.advance(p.w_slots), x.advance(p.x_slots);
        }
        const uint32_t row = work.first_row(p, pass), row_end = work.first_row(p, pass + 1);
#pragma unroll
        for (int t = 0; t < F::TILES; ++t) wgmma_pin(d[t]);
#pragma unroll
        for (int t = 0; t < (F::GATED ? 1 : F::TILES); ++t) {
            const MidRows rows = {row + tile_row(t), min(row + tile(t) * 64, row_end), min(row + tile(t) * 64 + 64, row_end)};
            if (rows.low < rows.high) store_tile<F>(p, work, rows, token0, d[t], d[F::TILES - 1]);
        }
    }
}

/// The named barrier of those who bring and those who multiply: both rings' barriers are there.
constexpr int RINGS = 1;

/// Who brings weights has them on their way before anybody is waited for: behind a barrier of all threads the first was
/// asked for 2.6 us after the thread block's begin, now after 0.5.
template <class F> __device__ __forceinline__ void linear_mid(const LinearMidParams& p) {
    extern __shared__ unsigned char shared_bytes[];
    __shared__ MidBarriers bars;
    constexpr uint32_t MULTIPLIERS = F::WARPGROUPS * 128;
    const uint32_t w_ring = (shared_address(shared_bytes) + 1023) & ~1023u;
    const uint32_t x_ring = w_ring + p.w_slots * F::PANELS * F::BOXES * p.tile_rows * PANEL_BYTES;
    const MidWork work = MidWork::of<F>(p);
    if (threadIdx.x < MULTIPLIERS) {
        named_sync(RINGS, MULTIPLIERS + FEEDERS);
        wait_for_previous_kernel();
        release_next_kernel();
        multiply<F>(p, work, bars, w_ring, x_ring);
    } else if (threadIdx.x < MULTIPLIERS + 32) {
        if (threadIdx.x % 32 == 0) init_ring(bars.w_full, bars.w_empty, p.w_slots, MULTIPLIERS / 32);
        __syncwarp();
        named_arrive(RINGS, MULTIPLIERS + FEEDERS);
        if (threadIdx.x % 32 == 0) feed_weights<F>(p, work, bars, w_ring);
    } else {
        if (threadIdx.x % 32 == 0) init_ring(bars.x_full, bars.x_empty, p.x_slots, MULTIPLIERS / 32);
        __syncwarp();
        named_arrive(RINGS, MULTIPLIERS + FEEDERS);
        if (threadIdx.x % 32 == 0) {
            wait_for_previous_kernel();
            feed_x<F>(p, work, bars, x_ring);
        }
    }
}

#else

template <class ELEMENT, int COLUMNS, int WARPGROUPS, int TILES, int PANELS, bool GATED> struct MidForm {};
template <class F> __device__ __forceinline__ void linear_mid(const LinearMidParams&) {}

#endif

} // namespace pagemill

// Up to 64 columns no more than 128 registers, as if there were more threads: a norm's thread block (planes.cu) finds room
// beside one of these, and these come in while it waits.
#define LINEAR_MID_KERNEL(name, T, COLUMNS, WARPGROUPS, TILES, PANELS, GATED)                                            \
    extern "C" __global__ void __launch_bounds__(COLUMNS <= 64 ? 512 : WARPGROUPS * 128 + pagemill::FEEDERS, 1)          \
        linear_mid_##name(const __grid_constant__ pagemill::LinearMidParams p) {                                         \
        pagemill::linear_mid<pagemill::MidForm<pagemill::T, COLUMNS, WARPGROUPS, TILES, PANELS, GATED>>(p);              \
    }

#ifdef LINEAR_TUNE
#define V(COLUMNS, WARPGROUPS, TILES, PANELS, GATED)                                                                     \
    LINEAR_MID_KERNEL(m##COLUMNS##_w##WARPGROUPS##_t##TILES##_p##PANELS##_g##GATED, Bf16, COLUMNS, WARPGROUPS, TILES, PANELS, GATED)
#include "bench/linear_mid_variants.inc"
#else
// `FORMS` in src/kernels/linear_mid.rs (measured best, NOTES.md): for shares of up to a tile's rows, and for larger ones; gated.
#define LINEAR_MID_FORMS(name, T, COLUMNS)                                                                               \
    LINEAR_MID_KERNEL(name##_m##COLUMNS##_w2_t0, T, COLUMNS, 2, 0, 4, false)                                             \
    LINEAR_MID_KERNEL(name##_m##COLUMNS##_w2_t2, T, COLUMNS, 2, 2, 1, false)                                             \
    LINEAR_MID_KERNEL(gated_##name##_m##COLUMNS##_w2_t0, T, COLUMNS, 2, 0, 2, true)                                      \
    LINEAR_MID_KERNEL(gated_##name##_m##COLUMNS##_w2_t2, T, COLUMNS, 2, 2, 1, true)
#define LINEAR_MID_KERNELS(name, T) LINEAR_MID_FORMS(name, T, 16) LINEAR_MID_FORMS(name, T, 32) LINEAR_MID_FORMS(name, T, 64) LINEAR_MID_FORMS(name, T, 128)
LINEAR_MID_KERNELS(bf16, Bf16)
LINEAR_MID_KERNELS(f16, F16)
#endif
