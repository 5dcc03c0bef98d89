// Attention of one new token a sequence over the paged KV cache, split over KV, combined in the same launch.
// Decides how K and V reach the tensor cores; which thread block does which piece is the host's plan
// (`src/kernels/attention_decode.rs`). Knows nothing of requests.
//
// Letters: E head size, H query heads, K KV heads, G = H / K, B tokens in a block.
// Pool tensor: [num_blocks, 2 (K, V), K, B, E]; for one block and KV head the B × E elements lie in a row, so
// every tile of 16 tokens is one contiguous run (4 KB at E = 128) for any B that is a multiple of 16.
//
// A warp takes 16 tokens at a time, and nothing passes through shared memory on the way:
//   S^T [16 tokens, 8 heads] = K [16, E] · Q^T      K is the A operand, 16 bytes a lane, strips of 32 (fragments.cuh)
//   O^T [E, 8 heads]        += V^T [E, 16] · P^T    V is the A operand; pairs of tokens are made with byte permutes
// All G query heads of a KV head are columns of the same product, so KV is read once. While a warp computes on
// one tile the loads of its next one (K, then V) are in flight, across the ends of pieces too.
// The running maximum moves only when a score exceeds it by more than 2^8 (the sums stay far inside f32), so
// the common tile costs one vote instead of a reduction.
//
// A piece is a run of tiles of one sequence. A sequence in one piece is written at once; otherwise each piece
// leaves (max, sum, O) in its slot, and the thread block that finishes last combines them in slot order, so the
// result does not depend on who came last.
#include "fragments.cuh"

namespace pagemill {

constexpr int TILE_TOKENS = 16;
constexpr float RESCALE_SLACK = 8.0f; // in powers of two

/// A run of tiles of one sequence; made by the host. Tiles count 16 tokens from position 0.
struct DecodePiece {
    uint32_t q_row;       // row of the token in q and out
    uint32_t table_start; // where the sequence's table starts in block_table
    uint32_t kv_len;      // tokens in the cache, this step's included
    uint32_t tile_begin;  // half-open range of tiles; each holds at least one visible token
    uint32_t tile_end;
    uint32_t slot;        // this piece's partial result; unused if num_slots == 1
    uint32_t first_slot;  // slots of the sequence: first_slot .. first_slot + num_slots
    uint32_t num_slots;
};

struct DecodeParams {
    const void* q;                   // [T, q_stride] elements of q_type; head h at h * E
    void* out;                       // [T, out_stride] elements of out_type
    const void* kv;                  // pool tensor
    const uint32_t* block_table;     // all sequences, end to end
    const DecodePiece* pieces;       // grouped by thread block
    const uint32_t* piece_start;     // [gridDim.x + 1]
    float* partial_out;              // [slots, H, E]
    float2* partial_max_sum;         // [slots, H]: maximum in powers of two, sum
    uint32_t* arrivals;              // [slots, gridDim.y], zero between launches
    const float* sinks;              // [H] or null
    float scale;                     // multiplies q·k
    float soft_cap;                  // 0: none
    uint32_t window;                 // 0: none; else positions > kv_len - 1 - window are visible
    uint32_t num_heads;
    uint32_t num_kv_heads;
    uint32_t block_size_log2;
    uint32_t q_stride;
    uint32_t out_stride;
    uint32_t q_type;                 // ActivationType
    uint32_t out_type;               // ActivationType
};
static_assert(sizeof(DecodePiece) == 32 && sizeof(DecodeParams) == 120, "src/kernels/attention_decode.rs has the same structs");

/// Where a warp's next tile lies: runs one tile ahead of the arithmetic, its block id one more.
struct TileCursor {
    uint32_t piece;
    uint32_t tile;
    uint32_t tile_end;
    uint32_t table_start;
    uint32_t block;
    bool valid;
};

template <int E> struct TileRegisters {
    static constexpr int STEPS = E / 16;
    uint32_t k[2][STEPS * 2]; // token rows g and g + 8
    uint32_t v[4][STEPS];     // tokens 2c, 2c + 1, 2c + 8, 2c + 9; pairs of dims
};

/// First of the two neighbouring dims that register `step` of V (and of the output) holds in lane group g.
template <int E> __device__ __forceinline__ int dim_of(int step, int g) {
    constexpr int FULL = E / 64;
    if (step < FULL * 4) return (step / 4) * 64 + g * 8 + (step % 4) * 2;
    constexpr int REST = E % 64; // 0, 16 or 32
    return FULL * 64 + g * (REST / 8) + (step - FULL * 4) * 2;
}

template <int E> __device__ __forceinline__ void load_k_row(uint32_t (&r)[E / 16 * 2], const char* row, int c) {
#pragma unroll
    for (int j = 0; j < E / 32; ++j) {
        uint4 x = stream16(row + j * 64 + c * 16);
        r[j * 4] = x.x, r[j * 4 + 1] = x.y, r[j * 4 + 2] = x.z, r[j * 4 + 3] = x.w;
    }
    if constexpr (E % 32 != 0) {
        uint2 x = stream8(row + (E / 32) * 64 + c * 8);
        r[E / 16 * 2 - 2] = x.x, r[E / 16 * 2 - 1] = x.y;
    }
}

template <int E> __device__ __forceinline__ void load_v_row(uint32_t (&r)[E / 16], const char* row, int g) {
#pragma unroll
    for (int j = 0; j < E / 64; ++j) {
        uint4 x = stream16(row + j * 128 + g * 16);
        r[j * 4] = x.x, r[j * 4 + 1] = x.y, r[j * 4 + 2] = x.z, r[j * 4 + 3] = x.w;
    }
    if constexpr (E % 64 == 32) {
        uint2 x = stream8(row + (E / 64) * 128 + g * 8);
        r[E / 16 - 2] = x.x, r[E / 16 - 1] = x.y;
    }
    if constexpr (E % 64 == 16) r[E / 16 - 1] = stream4(row + (E / 64) * 128 + g * 4);
}

/// Moves to the warp's next tile (`WARPS` further, or into the next piece) and asks for its block id.
template <int WARPS>
__device__ __forceinline__ void advance(TileCursor& cur, uint32_t piece_end, int warp, const DecodeParams& p) {
    cur.tile += WARPS;
    while (cur.tile >= cur.tile_end) {
        if (++cur.piece >= piece_end) {
            cur.valid = false;
            return;
        }
        const DecodePiece& next = p.pieces[cur.piece];
        cur.table_start = next.table_start;
        cur.tile = next.tile_begin + warp;
        cur.tile_end = next.tile_end;
    }
    cur.block = __ldg(p.block_table + cur.table_start + (cur.tile * TILE_TOKENS >> p.block_size_log2));
}

/// A warp's running softmax over its tiles: two heads (columns 2c and 2c + 1) in each of NT column tiles.
template <int E, int NT> struct WarpState {
    float o[NT][E / 16][4];
    float max[NT][2]; // in powers of two
    float sum[NT][2]; // this lane's tokens only
};

template <class T, int E, int NT>
__device__ __forceinline__ void scores(float (&s)[NT][4], const TileRegisters<E>& r, const uint32_t* q, int g, int c) {
    constexpr int Q_WORDS = E / 2 + 16; // padded row: lane groups fall into different banks
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
        const uint32_t* row = q + (n * 8 + g) * Q_WORDS;
#pragma unroll
        for (int j = 0; j < E / 32; ++j) {
            uint4 b = *reinterpret_cast<const uint4*>(row + j * 16 + c * 4);
            const uint32_t a0[4] = {r.k[0][j * 4], r.k[1][j * 4], r.k[0][j * 4 + 1], r.k[1][j * 4 + 1]};
            T::mma(s[n], a0, b.x, b.y);
            const uint32_t a1[4] = {r.k[0][j * 4 + 2], r.k[1][j * 4 + 2], r.k[0][j * 4 + 3], r.k[1][j * 4 + 3]};
            T::mma(s[n], a1, b.z, b.w);
        }
        if constexpr (E % 32 != 0) {
            constexpr int L = E / 16 * 2 - 2;
            uint2 b = *reinterpret_cast<const uint2*>(row + (E / 32) * 16 + c * 2);
            const uint32_t a[4] = {r.k[0][L], r.k[1][L], r.k[0][L + 1], r.k[1][L + 1]};
            T::mma(s[n], a, b.x, b.y);
        }
    }
}

/// Scores to powers of two, with soft cap, and with what lies outside [first, kv_len) hidden.
template <int NT>
__device__ __forceinline__ void scale_and_mask(float (&s)[NT][4], const DecodeParams& p, uint32_t token0, uint32_t first,
                                               uint32_t kv_len, int g) {
    const bool edge = token0 < first || token0 + TILE_TOKENS > kv_len;
    const float to_power = p.scale * LOG2_E;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (p.soft_cap > 0.0f) s[n][i] = p.soft_cap * tanhf(s[n][i] * p.scale / p.soft_cap) * LOG2_E;
            else s[n][i] *= to_power;
            if (edge) {
                uint32_t token = token0 + g + (i / 2) * 8;
                if (token < first || token >= kv_len) s[n][i] = -INFINITY;
            }
        }
    }
}

/// Raises the running maximum where a score exceeds it by more than the slack, and rescales what was summed.
template <int E, int NT> __device__ __forceinline__ void raise_maximum(WarpState<E, NT>& st, const float (&s)[NT][4]) {
    bool over = false;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) over |= s[n][i] > st.max[n][i % 2] + RESCALE_SLACK;
    if (!__any_sync(~0u, over)) return;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float m = fmaxf(s[n][h], s[n][h + 2]);
            m = fmaxf(m, __shfl_xor_sync(~0u, m, 4));
            m = fmaxf(m, __shfl_xor_sync(~0u, m, 8));
            m = fmaxf(m, __shfl_xor_sync(~0u, m, 16));
            m = fmaxf(m, st.max[n][h]);
            float keep = st.max[n][h] == -INFINITY ? 0.0f : exp2_approx(st.max[n][h] - m);
            st.max[n][h] = m;
            st.sum[n][h] *= keep;
#pragma unroll
            for (int d = 0; d < E / 16; ++d) st.o[n][d][h] *= keep, st.o[n][d][h + 2] *= keep;
        }
    }
}

/// Hides V rows outside [first, kv_len): their probability is 0, but the memory may hold anything, NaN too.
template <int E>
__device__ __forceinline__ void clear_hidden_v(TileRegisters<E>& r, uint32_t token0, uint32_t first, uint32_t kv_len, int c) {
    if (token0 >= first && token0 + TILE_TOKENS <= kv_len) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t token = token0 + 2 * c + (i & 1) + (i / 2) * 8;
        if (token >= first && token < kv_len) continue;
#pragma unroll
        for (int d = 0; d < E / 16; ++d) r.v[i][d] = 0;
    }
}

template <class T, int E, int NT>
__device__ __forceinline__ void accumulate(WarpState<E, NT>& st, const TileRegisters<E>& r, const float (&s)[NT][4]) {
    uint32_t b[NT][2];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        float e[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) e[i] = exp2_approx(s[n][i] - st.max[n][i % 2]);
        st.sum[n][0] += e[0] + e[2];
        st.sum[n][1] += e[1] + e[3];
        b[n][0] = transpose8x8(T::pack(e[0], e[1]));
        b[n][1] = transpose8x8(T::pack(e[2], e[3]));
    }
#pragma unroll
    for (int d = 0; d < E / 16; ++d) {
        const uint32_t a[4] = {__byte_perm(r.v[0][d], r.v[1][d], 0x5410), __byte_perm(r.v[0][d], r.v[1][d], 0x7632),
                               __byte_perm(r.v[2][d], r.v[3][d], 0x5410), __byte_perm(r.v[2][d], r.v[3][d], 0x7632)};
#pragma unroll
        for (int n = 0; n < NT; ++n) T::mma(st.o[n][d], a, b[n][0], b[n][1]);
    }
}

/// Shared memory of a thread block; `HEADS` columns, `WARPS` partial results.
template <int E, int NT, int WARPS> struct DecodeShared {
    static constexpr int HEADS = NT * 8;
    static constexpr int O_STRIDE = E + 4;
    alignas(16) uint32_t q[HEADS * (E / 2 + 16)];
    float2 max_sum[WARPS][HEADS];
    alignas(16) float o[WARPS][HEADS * O_STRIDE];
    float2 weight[HEADS];
    bool is_last;
};
static_assert(sizeof(DecodeShared<128, 1, 4>) == 19792, "src/kernels/attention_decode.rs counts the same bytes");

template <class T, int E, int NT, int WARPS>
__device__ __forceinline__ void stage_q(DecodeShared<E, NT, WARPS>& sh, const DecodeParams& p, uint32_t q_row, int head0, int heads) {
    for (int i = threadIdx.x; i < NT * 8 * (E / 2); i += WARPS * 32) {
        int head = i / (E / 2), pair = i % (E / 2);
        uint32_t packed = 0;
        if (head < heads) {
            size_t at = static_cast<size_t>(q_row) * p.q_stride + (head0 + head) * E + pair * 2;
            packed = T::pack(load_activation(p.q, at, p.q_type), load_activation(p.q, at + 1, p.q_type));
        }
        sh.q[head * (E / 2 + 16) + pair] = packed;
    }
}

template <int E, int NT, int WARPS>
__device__ __forceinline__ void publish(DecodeShared<E, NT, WARPS>& sh, WarpState<E, NT>& st, int warp, int g, int c) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float sum = st.sum[n][h];
            sum += __shfl_xor_sync(~0u, sum, 4);
            sum += __shfl_xor_sync(~0u, sum, 8);
            sum += __shfl_xor_sync(~0u, sum, 16);
            int head = n * 8 + 2 * c + h;
            if (g == 0) sh.max_sum[warp][head] = make_float2(st.max[n][h], sum);
#pragma unroll
            for (int d = 0; d < E / 16; ++d) {
                float2 pair = make_float2(st.o[n][d][h], st.o[n][d][h + 2]);
                *reinterpret_cast<float2*>(&sh.o[warp][head * DecodeShared<E, NT, WARPS>::O_STRIDE + dim_of<E>(d, g)]) = pair;
            }
        }
    }
}

/// (max, sum) of several partial results; an empty one has max -inf and sum 0.
template <class Read> __device__ __forceinline__ float2 merge_max_sum(int count, Read read) {
    float m = -INFINITY;
    for (int i = 0; i < count; ++i) m = fmaxf(m, read(i).x);
    float sum = 0.0f;
    for (int i = 0; i < count; ++i) {
        float2 x = read(i);
        if (x.x != -INFINITY) sum += x.y * exp2_approx(x.x - m);
    }
    return make_float2(m, sum);
}

/// What the summed output is multiplied by at the end; the sink takes part in the sum only.
__device__ __forceinline__ float final_weight(float2 max_sum, const float* sinks, int head) {
    float sum = max_sum.y;
    if (sinks != nullptr) sum += exp2f(sinks[head] * LOG2_E - max_sum.x);
    return sum > 0.0f ? 1.0f / sum : 0.0f;
}

/// Four neighbouring elements of the result, times `weight`.
template <int E>
__device__ __forceinline__ void store_output(const DecodeParams& p, uint32_t q_row, int head, int d, float4 x, float weight) {
    const size_t at = static_cast<size_t>(q_row) * p.out_stride + head * E + d;
    if (p.out_type == ACT_BF16) {
        const uint2 packed = make_uint2(Bf16::pack(x.x * weight, x.y * weight), Bf16::pack(x.z * weight, x.w * weight));
        *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.out) + at) = packed;
    } else if (p.out_type == ACT_F16) {
        const uint2 packed = make_uint2(F16::pack(x.x * weight, x.y * weight), F16::pack(x.z * weight, x.w * weight));
        *reinterpret_cast<uint2*>(static_cast<__half*>(p.out) + at) = packed;
    } else {
        *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = make_float4(x.x * weight, x.y * weight, x.z * weight, x.w * weight);
    }
}

/// (max, sum) of two partial results in one.
__device__ __forceinline__ float2 merge_two(float2 a, float2 b) {
    const float m = fmaxf(a.x, b.x);
    const float from_a = a.x == -INFINITY ? 0.0f : a.y * exp2_approx(a.x - m);
    const float from_b = b.x == -INFINITY ? 0.0f : b.y * exp2_approx(b.x - m);
    return make_float2(m, from_a + from_b);
}

/// Combines the slots of a sequence in order: the last thread block to arrive does it.
template <int E, int NT, int WARPS>
__device__ void combine_slots(DecodeShared<E, NT, WARPS>& sh, const DecodeParams& p, const DecodePiece& piece, int head0, int heads) {
    const size_t H = p.num_heads, first = piece.first_slot;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int head = warp; head < heads; head += WARPS) {
        float2 total = make_float2(-INFINITY, 0.0f);
#pragma unroll 4
        for (uint32_t s = lane; s < piece.num_slots; s += 32)
            total = merge_two(total, __ldcg(&p.partial_max_sum[(first + s) * H + head0 + head]));
#pragma unroll
        for (int step = 16; step > 0; step /= 2)
            total = merge_two(total, make_float2(__shfl_xor_sync(~0u, total.x, step), __shfl_xor_sync(~0u, total.y, step)));
        if (lane == 0) sh.weight[head] = make_float2(total.x, final_weight(total, p.sinks, head0 + head));
    }
    __syncthreads();
    for (int i = threadIdx.x; i < heads * (E / 4); i += WARPS * 32) {
        const int head = i / (E / 4), d = (i % (E / 4)) * 4;
        const float2 weight = sh.weight[head];
        const float* from = p.partial_out + (first * H + head0 + head) * E + d;
        const float2* max_sum = p.partial_max_sum + first * H + head0 + head;
        float4 acc = make_float4(0, 0, 0, 0);
#pragma unroll 16
        for (uint32_t s = 0; s < piece.num_slots; ++s) {
            const float4 x = __ldcg(reinterpret_cast<const float4*>(from + s * H * E));
            const float part = exp2_approx(__ldcg(&max_sum[s * H]).x - weight.x);
            acc.x += part * x.x, acc.y += part * x.y, acc.z += part * x.z, acc.w += part * x.w;
        }
        store_output<E>(p, piece.q_row, head0 + head, d, acc, weight.y);
    }
}

/// Adds one, with the stores before it visible to whoever reads the sum.
__device__ __forceinline__ uint32_t count_arrival(uint32_t* counter) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

/// Merges the warps' results of a finished piece, and writes the output or the piece's slot.
template <int E, int NT, int WARPS>
__device__ __forceinline__ void finish_piece(DecodeShared<E, NT, WARPS>& sh, const DecodeParams& p, const DecodePiece& piece,
                                             int head0, int heads) {
    constexpr int STRIDE = DecodeShared<E, NT, WARPS>::O_STRIDE;
    const bool whole = piece.num_slots == 1;
    for (int i = threadIdx.x; i < heads * (E / 4); i += WARPS * 32) {
        const int head = i / (E / 4), d = (i % (E / 4)) * 4;
        const float2 total = merge_max_sum(WARPS, [&](int w) { return sh.max_sum[w][head]; });
        float4 acc = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float m = sh.max_sum[w][head].x;
            const float part = m == -INFINITY ? 0.0f : exp2_approx(m - total.x);
            const float4 x = *reinterpret_cast<const float4*>(&sh.o[w][head * STRIDE + d]);
            acc.x += part * x.x, acc.y += part * x.y, acc.z += part * x.z, acc.w += part * x.w;
        }
        if (whole) {
            store_output<E>(p, piece.q_row, head0 + head, d, acc, final_weight(total, p.sinks, head0 + head));
        } else {
            const size_t row = static_cast<size_t>(piece.slot) * p.num_heads + head0 + head;
            *reinterpret_cast<float4*>(p.partial_out + row * E + d) = acc;
            if (d == 0) p.partial_max_sum[row] = total;
        }
    }
    if (whole) return;
    // The barrier and then one thread's release at the device's scope publish all threads' stores.
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32_t* arrivals = p.arrivals + static_cast<size_t>(piece.first_slot) * gridDim.y + blockIdx.y;
        const bool last = count_arrival(arrivals) == piece.num_slots - 1;
        if (last) *arrivals = 0;
        sh.is_last = last;
    }
    __syncthreads();
    if (sh.is_last) combine_slots(sh, p, piece, head0, heads);
}

template <class T, int E, int NT, int WARPS>
__device__ __forceinline__ void attention_decode(const DecodeParams& p) {
    static_assert(E % 16 == 0 && E % 64 != 48, "a row is cut into strips of 64, 32 and 16 elements");
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    auto& sh = *reinterpret_cast<DecodeShared<E, NT, WARPS>*>(shared_bytes);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int group = p.num_heads / p.num_kv_heads, parts = (group + NT * 8 - 1) / (NT * 8);
    const int kv_head = blockIdx.y / parts, part = blockIdx.y % parts;
    const int head0 = kv_head * group + part * NT * 8, heads = min(NT * 8, group - part * NT * 8);
    const size_t head_bytes = (static_cast<size_t>(E) * 2) << p.block_size_log2;
    const uint32_t offset_mask = (1u << p.block_size_log2) - 1;
    const char* pool = static_cast<const char*>(p.kv) + kv_head * head_bytes;

    const uint32_t piece_begin = p.piece_start[blockIdx.x], piece_end = p.piece_start[blockIdx.x + 1];
    if (piece_begin >= piece_end) {
        wait_for_previous_kernel();
        return;
    }

    TileRegisters<E> r;
    TileCursor cur;
    cur.piece = piece_begin, cur.valid = true;
    cur.tile = p.pieces[piece_begin].tile_begin + warp - WARPS;
    cur.tile_end = p.pieces[piece_begin].tile_end, cur.table_start = p.pieces[piece_begin].table_start;
    // Unsigned wrap: tile_begin + warp - WARPS may pass below 0, and `advance` adds WARPS first.
    advance<WARPS>(cur, piece_end, warp, p);
    const char* k_tile = nullptr;
    auto locate = [&] {
        k_tile = pool + cur.block * (2 * head_bytes * p.num_kv_heads) + ((cur.tile * TILE_TOKENS) & offset_mask) * (E * 2);
    };
    auto load_k = [&] {
        load_k_row<E>(r.k[0], k_tile + g * (E * 2), c);
        load_k_row<E>(r.k[1], k_tile + (g + 8) * (E * 2), c);
    };
    auto load_v = [&] {
        const char* v_tile = k_tile + head_bytes * p.num_kv_heads;
#pragma unroll
        for (int i = 0; i < 4; ++i) load_v_row<E>(r.v[i], v_tile + (2 * c + (i & 1) + (i / 2) * 8) * (E * 2), g);
    };
    // The plan, the tables and the cache of earlier steps were there long before the previous kernel, which
    // makes this step's q, k and v: only a tile that holds the newest token has to wait for it.
    const bool any = cur.valid;
    bool early = false;
    if (any) {
        locate();
        early = (cur.tile + 1) * TILE_TOKENS < p.pieces[cur.piece].kv_len;
        if (early) load_k(), load_v();
    }
    wait_for_previous_kernel();
    release_next_kernel();
    if (any) {
        if (!early) load_k(), load_v();
        advance<WARPS>(cur, piece_end, warp, p);
    }

    for (uint32_t index = piece_begin; index < piece_end; ++index) {
        const DecodePiece piece = p.pieces[index];
        const uint32_t first = p.window != 0 && piece.kv_len > p.window ? piece.kv_len - p.window : 0;
        stage_q<T, E, NT, WARPS>(sh, p, piece.q_row, head0, heads);
        WarpState<E, NT> st;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            st.max[n][0] = st.max[n][1] = -INFINITY;
            st.sum[n][0] = st.sum[n][1] = 0.0f;
#pragma unroll
            for (int d = 0; d < E / 16; ++d) st.o[n][d][0] = st.o[n][d][1] = st.o[n][d][2] = st.o[n][d][3] = 0.0f;
        }
        __syncthreads();
        for (uint32_t tile = piece.tile_begin + warp; tile < piece.tile_end; tile += WARPS) {
            float s[NT][4];
            scores<T, E, NT>(s, r, sh.q, g, c);
            const bool more = cur.valid;
            if (more) {
                locate();
                load_k();
                advance<WARPS>(cur, piece_end, warp, p);
            }
            scale_and_mask<NT>(s, p, tile * TILE_TOKENS, first, piece.kv_len, g);
            raise_maximum<E, NT>(st, s);
            clear_hidden_v<E>(r, tile * TILE_TOKENS, first, piece.kv_len, c);
            accumulate<T, E, NT>(st, r, s);
            if (more) load_v();
        }
        publish<E, NT, WARPS>(sh, st, warp, g, c);
        __syncthreads();
        finish_piece<E, NT, WARPS>(sh, p, piece, head0, heads);
    }
}

} // namespace pagemill

#define DECODE_KERNEL(name, T, E, NT, WARPS, BLOCKS)                                                                \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)                                                \
        attention_decode_##name(const __grid_constant__ pagemill::DecodeParams p) {                                 \
        pagemill::attention_decode<pagemill::T, E, NT, WARPS>(p);                                                   \
    }

// Names: element type of the cache, head size, heads of a KV head one thread block takes.
// Resident thread blocks and warps are those of `src/kernels/attention_decode.rs`.
#ifndef DECODE_WARPS
#define DECODE_WARPS 4
#define DECODE_BLOCKS 3
#endif
#ifndef DECODE_ONLY_128
#define DECODE_KERNELS(name, T)                                                                                     \
    DECODE_KERNEL(name##_e64_h8, T, 64, 1, DECODE_WARPS, 4)                                                         \
    DECODE_KERNEL(name##_e80_h8, T, 80, 1, DECODE_WARPS, 4)                                                         \
    DECODE_KERNEL(name##_e96_h8, T, 96, 1, DECODE_WARPS, 3)                                                         \
    DECODE_KERNEL(name##_e128_h8, T, 128, 1, DECODE_WARPS, DECODE_BLOCKS)                                           \
    DECODE_KERNEL(name##_e256_h8, T, 256, 1, DECODE_WARPS, 2)                                                       \
    DECODE_KERNEL(name##_e64_h16, T, 64, 2, DECODE_WARPS, 3)                                                        \
    DECODE_KERNEL(name##_e80_h16, T, 80, 2, DECODE_WARPS, 3)                                                        \
    DECODE_KERNEL(name##_e96_h16, T, 96, 2, DECODE_WARPS, 3)                                                        \
    DECODE_KERNEL(name##_e128_h16, T, 128, 2, DECODE_WARPS, 2)
DECODE_KERNELS(bf16, Bf16)
DECODE_KERNELS(f16, F16)
#else
DECODE_KERNEL(bf16_e128_h8, Bf16, 128, 1, DECODE_WARPS, DECODE_BLOCKS)
#endif
