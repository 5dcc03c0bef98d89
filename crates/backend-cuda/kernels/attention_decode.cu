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
//
// For few short sequences there are forms that do not cut them: a sequence is a thread block's or a cluster's, whose
// thread blocks take tiles in turn and hand their sums to the first of them through its shared memory.
#include "decode.cuh"

namespace pagemill {

/// Partial results of a piece's thread blocks; a cluster's next piece goes into the other of two such.
template <int E, int HEADS, int CLUSTER> struct Gathered {
    float2 max_sum[2][CLUSTER][HEADS];
    alignas(16) float o[2][CLUSTER][HEADS * E];
};
template <int E, int HEADS> struct Gathered<E, HEADS, 1> {};

/// Results of a thread block's warps; a single one writes its own from registers.
template <int E, int HEADS, int WARPS> struct Published {
    static constexpr int O_STRIDE = E + 4;
    float2 max_sum[WARPS][HEADS];
    alignas(16) float o[WARPS][HEADS * O_STRIDE];
};
template <int E, int HEADS> struct Published<E, HEADS, 1> {};

/// Shared memory of a thread block; `HEADS` columns, `WARPS` partial results.
template <int E, int NT, int WARPS, int CLUSTER> struct DecodeShared {
    static constexpr int HEADS = NT * 8;
    alignas(16) uint32_t q[HEADS * (E / 2 + 16)];
    uint4 q_asked[NT * E];
    Published<E, HEADS, WARPS> published;
    float2 weight[HEADS];
    Gathered<E, HEADS, CLUSTER> gathered;
    bool is_last;
};
static_assert(sizeof(DecodeShared<128, 1, 4, 1>) == 21840 && sizeof(DecodeShared<128, 1, 8, 4>) == 72272,
              "src/kernels/attention_decode.rs counts the same bytes");

/// `each(part, head, at)` for the parts (8 elements) of a piece's query heads that are this thread's: part `part` of
/// the thread block's, of its head `head`, at `at` in q.
template <int E, int NT, int WARPS, class Each>
__device__ __forceinline__ void each_q_part(const DecodeParams& p, uint32_t q_row, int head0, Each each) {
#pragma unroll
    for (int part = threadIdx.x; part < NT * E; part += WARPS * 32) {
        const int head = part / (E / 8);
        each(part, head, static_cast<size_t>(q_row) * p.q_stride + (head0 + head) * E + part % (E / 8) * 8);
    }
}

/// Asks for a piece's query heads: they are on their way, without a register, until `stage_q`. Those of f32 are fetched
/// there.
template <int E, int NT, int WARPS, int CLUSTER>
__device__ __forceinline__ void ask_for_q(DecodeShared<E, NT, WARPS, CLUSTER>& sh, const DecodeParams& p, uint32_t q_row, int head0, int heads) {
    if (p.q_type == ACT_F32) return;
    each_q_part<E, NT, WARPS>(p, q_row, head0, [&](int part, int head, size_t at) {
        copy16_async(shared_address(&sh.q_asked[part]), static_cast<const uint16_t*>(p.q) + (head < heads ? at : 0), head < heads);
    });
    commit_copies();
}

/// The query heads that were asked for, to where `scores` reads them. A thread converts what it asked for itself.
template <class T, int E, int NT, int WARPS, int CLUSTER>
__device__ __forceinline__ void stage_q(DecodeShared<E, NT, WARPS, CLUSTER>& sh, const DecodeParams& p, uint32_t q_row, int head0, int heads) {
    await_copies<0>();
    each_q_part<E, NT, WARPS>(p, q_row, head0, [&](int part, int head, size_t at) {
        uint4 x = make_uint4(0, 0, 0, 0);
        if (p.q_type != ACT_F32) x = eight_as<T>(sh.q_asked[part], p.q_type);
        else if (head < heads) x = eight_f32_as<T>(static_cast<const float*>(p.q) + at);
        *reinterpret_cast<uint4*>(&sh.q[head * (E / 2 + 16) + part % (E / 8) * 4]) = x;
    });
}

/// Of what each lane has summed over its own tokens.
__device__ __forceinline__ float sum_over_groups(float sum) {
    sum += __shfl_xor_sync(~0u, sum, 4);
    sum += __shfl_xor_sync(~0u, sum, 8);
    sum += __shfl_xor_sync(~0u, sum, 16);
    return sum;
}

template <int E, int NT, int WARPS, int CLUSTER>
__device__ __forceinline__ void publish(DecodeShared<E, NT, WARPS, CLUSTER>& sh, WarpState<E, NT>& st, int heads, int warp, int g, int c) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float sum = sum_over_groups(st.sum[n][h]);
            int head = n * 8 + 2 * c + h;
            if (head >= heads) continue;
            if (g == 0) sh.published.max_sum[warp][head] = make_float2(st.max[n][h], sum);
#pragma unroll
            for (int d = 0; d < E / 16; ++d) {
                float2 pair = make_float2(st.o[n][d][h], st.o[n][d][h + 2]);
                *reinterpret_cast<float2*>(&sh.published.o[warp][head * Published<E, NT * 8, WARPS>::O_STRIDE + dim_of<E>(d, g)]) = pair;
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
template <int E, int NT, int WARPS, int CLUSTER>
__device__ void combine_slots(DecodeShared<E, NT, WARPS, CLUSTER>& sh, const DecodeParams& p, const DecodePiece& piece, int head0, int heads) {
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

/// Four elements of several partial results: `o(i)` times what `max_sum(i)` is to their merged (max, sum), `total`.
template <int COUNT, class ReadMaxSum, class ReadOutput>
__device__ __forceinline__ float4 merge_outputs(float2& total, ReadMaxSum max_sum, ReadOutput o) {
    total = merge_max_sum(COUNT, max_sum);
    float4 acc = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const float m = max_sum(i).x;
        const float part = m == -INFINITY ? 0.0f : exp2_approx(m - total.x);
        const float4 x = o(i);
        acc.x += part * x.x, acc.y += part * x.y, acc.z += part * x.z, acc.w += part * x.w;
    }
    return acc;
}

/// Four elements of a piece's result: the output, if the piece is all of its sequence, else into the piece's slot.
template <int E>
__device__ __forceinline__ void store_piece(const DecodeParams& p, const DecodePiece& piece, int head, int d, float4 acc, float2 total) {
    if (piece.num_slots == 1) {
        store_output<E>(p, piece.q_row, head, d, acc, final_weight(total, p.sinks, head));
    } else {
        const size_t row = static_cast<size_t>(piece.slot) * p.num_heads + head;
        *reinterpret_cast<float4*>(p.partial_out + row * E + d) = acc;
        if (d == 0) p.partial_max_sum[row] = total;
    }
}

/// The result of a finished piece that one warp has had to itself, straight from its registers.
template <int E, int NT>
__device__ __forceinline__ void finish_alone(const WarpState<E, NT>& st, const DecodeParams& p, const DecodePiece& piece, int head0, int heads, int g, int c) {
    static_assert(E % 64 == 0, "8 neighbouring dims a lane: see `dim_of`");
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float2 total = make_float2(st.max[n][h], sum_over_groups(st.sum[n][h]));
            const int head = n * 8 + 2 * c + h;
            if (head >= heads) continue;
#pragma unroll
            for (int d = 0; d < E / 16; d += 2) {
                const float4 part = make_float4(st.o[n][d][h], st.o[n][d][h + 2], st.o[n][d + 1][h], st.o[n][d + 1][h + 2]);
                store_piece<E>(p, piece, head0 + head, dim_of<E>(d, g), part, total);
            }
        }
    }
}

/// Merges the warps' results of a finished piece, of all thread blocks that had part in it (`rank` in their cluster),
/// and writes the output or the piece's slot.
template <int E, int NT, int WARPS, int CLUSTER>
__device__ __forceinline__ void finish_piece(DecodeShared<E, NT, WARPS, CLUSTER>& sh, const DecodeParams& p, const DecodePiece& piece,
                                             int head0, int heads, uint32_t rank, uint32_t turn) {
    for (int i = threadIdx.x; i < heads * (E / 4); i += WARPS * 32) {
        const int head = i / (E / 4), d = (i % (E / 4)) * 4;
        float2 total;
        const float4 acc = merge_outputs<WARPS>(total, [&](int w) { return sh.published.max_sum[w][head]; }, [&](int w) {
            return *reinterpret_cast<const float4*>(&sh.published.o[w][head * Published<E, NT * 8, WARPS>::O_STRIDE + d]);
        });
        if constexpr (CLUSTER > 1) {
            store_to_rank(&sh.gathered.o[turn % 2][rank][head * E + d], 0, acc);
            if (d == 0) store_to_rank(&sh.gathered.max_sum[turn % 2][rank][head], 0, total);
        } else {
            store_piece<E>(p, piece, head0 + head, d, acc, total);
        }
    }
    if constexpr (CLUSTER > 1) {
        cluster_arrive();
        cluster_wait();
        if (rank != 0) return;
        for (int i = threadIdx.x; i < heads * (E / 4); i += WARPS * 32) {
            const int head = i / (E / 4), d = (i % (E / 4)) * 4;
            float2 total;
            const float4 acc = merge_outputs<CLUSTER>(total, [&](int r) { return sh.gathered.max_sum[turn % 2][r][head]; }, [&](int r) {
                return *reinterpret_cast<const float4*>(&sh.gathered.o[turn % 2][r][head * E + d]);
            });
            store_piece<E>(p, piece, head0 + head, d, acc, total);
        }
    }
}

/// Counts a piece that left its result in a slot: the last of a sequence combines them.
template <int E, int NT, int WARPS, int CLUSTER>
__device__ __forceinline__ void arrive(DecodeShared<E, NT, WARPS, CLUSTER>& sh, const DecodeParams& p, const DecodePiece& piece, int head0, int heads) {
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

template <class T, int E, int NT, int WARPS, int CLUSTER>
__device__ __forceinline__ void attention_decode(const DecodeParams& p) {
    static_assert(E % 16 == 0 && E % 64 != 48, "a row is cut into strips of 64, 32 and 16 elements");
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    auto& sh = *reinterpret_cast<DecodeShared<E, NT, WARPS, CLUSTER>*>(shared_bytes);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int group = p.num_heads / p.num_kv_heads, parts = (group + NT * 8 - 1) / (NT * 8);
    const int kv_head = blockIdx.y / parts, part = blockIdx.y % parts;
    const int head0 = kv_head * group + part * NT * 8, heads = min(NT * 8, group - part * NT * 8);
    const size_t head_bytes = (static_cast<size_t>(E) * 2) << p.block_size_log2;
    const uint32_t offset_mask = (1u << p.block_size_log2) - 1;
    const char* pool = static_cast<const char*>(p.kv) + kv_head * head_bytes;
    // Warps that share a piece, and which of them this one is.
    constexpr int STRIDE = WARPS * CLUSTER;
    const uint32_t rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int turn_of_warp = rank * WARPS + warp;

    const uint32_t unit = blockIdx.x / CLUSTER, piece_begin = p.piece_start[unit], piece_end = p.piece_start[unit + 1];
    // Others wait for the kernel before this one: somebody has work.
    if (piece_begin >= piece_end) return;

    TileRegisters<E> r;
    TileCursor cur;
    DecodePiece piece = p.pieces[piece_begin];
    cur.piece = piece_begin, cur.valid = true;
    cur.tile = piece.tile_begin + turn_of_warp - STRIDE;
    cur.tile_end = piece.tile_end, cur.table_start = piece.table_start;
    // Unsigned wrap: tile_begin + turn_of_warp - STRIDE may pass below 0, and `advance` adds STRIDE first.
    advance<STRIDE>(cur, piece_end, turn_of_warp, p);
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
    if constexpr (CLUSTER > 1) cluster_arrive();
    wait_for_previous_kernel();
    release_next_kernel();
    ask_for_q(sh, p, piece.q_row, head0, heads);
    if (any) {
        if (!early) load_k(), load_v();
        advance<STRIDE>(cur, piece_end, turn_of_warp, p);
    }
    // Shared memory of a thread block that has not begun must not be written.
    if constexpr (CLUSTER > 1) cluster_wait();

    for (uint32_t index = piece_begin;;) {
        const uint32_t first = p.window != 0 && piece.kv_len > p.window ? piece.kv_len - p.window : 0;
        stage_q<T>(sh, p, piece.q_row, head0, heads);
        WarpState<E, NT> st;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            st.max[n][0] = st.max[n][1] = -INFINITY;
            st.sum[n][0] = st.sum[n][1] = 0.0f;
#pragma unroll
            for (int d = 0; d < E / 16; ++d) st.o[n][d][0] = st.o[n][d][1] = st.o[n][d][2] = st.o[n][d][3] = 0.0f;
        }
        __syncthreads();
        const bool goes_on = index + 1 < piece_end;
        if (goes_on) ask_for_q(sh, p, p.pieces[index + 1].q_row, head0, heads);
        for (uint32_t tile = piece.tile_begin + turn_of_warp; tile < piece.tile_end; tile += STRIDE) {
            float s[NT][4];
            scores<T, E, NT>(s, r, sh.q, g, c);
            const bool more = cur.valid;
            if (more) {
                locate();
                load_k();
                advance<STRIDE>(cur, piece_end, turn_of_warp, p);
            }
            scale_and_mask<NT>(s, p, tile * TILE_TOKENS, first, piece.kv_len, g);
            raise_maximum<E, NT>(st, s);
            clear_hidden_v<E>(r, tile * TILE_TOKENS, first, piece.kv_len, c);
            accumulate<T, E, NT>(st, r, s);
            if (more) load_v();
        }
        if constexpr (WARPS * CLUSTER == 1) {
            finish_alone(st, p, piece, head0, heads, g, c);
        } else {
            publish(sh, st, heads, warp, g, c);
            __syncthreads();
            finish_piece(sh, p, piece, head0, heads, rank, index);
        }
        if (piece.num_slots > 1 && rank == 0) arrive(sh, p, piece, head0, heads);
        if (!goes_on) break;
        piece = p.pieces[++index];
    }
}

} // namespace pagemill

#define DECODE_KERNEL(name, T, E, NT, WARPS, BLOCKS)                                                                \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)                                                \
        attention_decode_##name(const __grid_constant__ pagemill::DecodeParams p) {                                 \
        pagemill::attention_decode<pagemill::T, E, NT, WARPS, 1>(p);                                                \
    }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define DECODE_CLUSTER_KERNEL(name, T, E, NT, WARPS, CLUSTER)                                                       \
    extern "C" __global__ void attention_decode_##name(const __grid_constant__ pagemill::DecodeParams) {}
#else
#define DECODE_CLUSTER_KERNEL(name, T, E, NT, WARPS, CLUSTER)                                                       \
    extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(WARPS * 32, 1)                     \
        attention_decode_##name(const __grid_constant__ pagemill::DecodeParams p) {                                 \
        pagemill::attention_decode<pagemill::T, E, NT, WARPS, CLUSTER>(p);                                          \
    }
#endif

// Names: element type of the cache, head size, heads of a KV head one thread block takes; then the form: split
// sequences, split with 16 warps a multiprocessor in thread blocks of so many, or whole ones by so many thread blocks.
// Resident thread blocks and warps are those of `src/kernels/attention_decode.rs`.
constexpr int SPLIT_WARPS = 4, WHOLE_WARPS = 8;
#define WHOLE_KERNELS(name, T, E)                                                                                   \
    DECODE_KERNEL(name##_whole1, T, E, 1, WHOLE_WARPS, 1)                                                           \
    DECODE_CLUSTER_KERNEL(name##_whole2, T, E, 1, WHOLE_WARPS, 2)                                                   \
    DECODE_CLUSTER_KERNEL(name##_whole4, T, E, 1, WHOLE_WARPS, 4)
#ifndef DECODE_ONLY_128
#define DECODE_KERNELS(name, T)                                                                                     \
    DECODE_KERNEL(name##_e64_h8, T, 64, 1, SPLIT_WARPS, 4)                                                          \
    DECODE_KERNEL(name##_e80_h8, T, 80, 1, SPLIT_WARPS, 4)                                                          \
    DECODE_KERNEL(name##_e96_h8, T, 96, 1, SPLIT_WARPS, 3)                                                          \
    DECODE_KERNEL(name##_e128_h8, T, 128, 1, SPLIT_WARPS, 3)                                                        \
    DECODE_KERNEL(name##_e256_h8, T, 256, 1, SPLIT_WARPS, 2)                                                        \
    DECODE_KERNEL(name##_e64_h16, T, 64, 2, SPLIT_WARPS, 3)                                                         \
    DECODE_KERNEL(name##_e80_h16, T, 80, 2, SPLIT_WARPS, 3)                                                         \
    DECODE_KERNEL(name##_e96_h16, T, 96, 2, SPLIT_WARPS, 3)                                                         \
    DECODE_KERNEL(name##_e128_h16, T, 128, 2, SPLIT_WARPS, 2)                                                       \
    DECODE_KERNEL(name##_e64_h8_dense2, T, 64, 1, 2, 8)                                                             \
    DECODE_KERNEL(name##_e64_h8_dense1, T, 64, 1, 1, 16)                                                            \
    DECODE_KERNEL(name##_e128_h8_dense4, T, 128, 1, 4, 4)                                                           \
    DECODE_KERNEL(name##_e128_h8_dense2, T, 128, 1, 2, 8)                                                           \
    DECODE_KERNEL(name##_e128_h8_dense1, T, 128, 1, 1, 16)                                                          \
    WHOLE_KERNELS(name##_e64_h8, T, 64)                                                                             \
    WHOLE_KERNELS(name##_e128_h8, T, 128)                                                                           \
    WHOLE_KERNELS(name##_e256_h8, T, 256)
DECODE_KERNELS(bf16, Bf16)
DECODE_KERNELS(f16, F16)
#else
DECODE_KERNEL(bf16_e128_h8, Bf16, 128, 1, SPLIT_WARPS, 3)
DECODE_KERNEL(bf16_e128_h8_dense4, Bf16, 128, 1, 4, 4)
DECODE_KERNEL(bf16_e128_h8_dense2, Bf16, 128, 1, 2, 8)
DECODE_KERNEL(bf16_e128_h8_dense1, Bf16, 128, 1, 1, 16)
WHOLE_KERNELS(bf16_e128_h8, Bf16, 128)
#endif
