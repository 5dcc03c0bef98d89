// Paged attention of any head size up to 512 and any grouping: the meaning that faster kernels are tested
// against, and what runs where they do not. One block for each query token and head, its warps striding over
// the keys, an online softmax in each warp, one merge at the end. The order of every sum depends on the token's
// own position alone.
#include "element.cuh"

struct PlainAttentionArgs {
    const void* q;                // [T, H * E]
    const void* pool;             // one pool tensor, [num_blocks, 2, K, block_size, E]
    void* out;                    // [T, H * E]
    const uint32_t* positions;    // [T]
    const uint32_t* token_seq;    // [T] the token's sequence
    const uint32_t* table_start;  // [S + 1] where a sequence's table starts in `tables`
    const uint32_t* tables;       // block ids
    uint32_t num_heads;
    uint32_t num_kv_heads;
    uint32_t head_dim;
    uint32_t block_size;
    uint32_t window; // 0: none
    float scale;
    float soft_cap; // 0: none
    const float* sinks; // [H] or null
};

#define WARPS 4
#define KEYS 4 // keys that a warp has in flight

// `R` elements of a head in each lane: E <= 32 * R.
template <class T, class Kv, int R> __device__ __forceinline__ void attend(const PlainAttentionArgs& args, float* shared) {
    const uint32_t head = blockIdx.x % args.num_heads;
    const size_t token = blockIdx.x / args.num_heads;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, e_count = args.head_dim;
    const uint32_t end = args.positions[token] + 1;
    const uint32_t begin = args.window != 0 && end > args.window ? end - args.window : 0;
    const uint32_t* table = args.tables + args.table_start[args.token_seq[token]];
    const size_t head_elems = size_t(args.block_size) * e_count;
    const size_t half = head_elems * args.num_kv_heads;
    const Kv* pool = static_cast<const Kv*>(args.pool) + (head / (args.num_heads / args.num_kv_heads)) * head_elems;

    float q[R], acc[R], max = -INFINITY, sum = 0.0f;
    const T* q_row = static_cast<const T*>(args.q) + (token * args.num_heads + head) * e_count;
#pragma unroll
    for (int i = 0; i < R; ++i) {
        const uint32_t e = lane + 32 * i;
        q[i] = e < e_count ? to_f32(q_row[e]) * args.scale : 0.0f;
        acc[i] = 0.0f;
    }
    for (uint32_t first = begin + warp * KEYS; first < end; first += WARPS * KEYS) {
        const Kv* key[KEYS];
        float score[KEYS];
#pragma unroll
        for (int j = 0; j < KEYS; ++j) {
            const uint32_t position = min(first + j, end - 1);
            const size_t block = table[position / args.block_size];
            key[j] = pool + block * 2 * half + size_t(position % args.block_size) * e_count;
            score[j] = 0.0f;
#pragma unroll
            for (int i = 0; i < R; ++i) {
                const uint32_t e = lane + 32 * i;
                if (e < e_count) score[j] += q[i] * to_f32(key[j][e]);
            }
        }
        float next = max;
#pragma unroll
        for (int j = 0; j < KEYS; ++j) {
            score[j] = warp_sum(score[j]);
            if (args.soft_cap > 0.0f) score[j] = args.soft_cap * tanhf(score[j] / args.soft_cap);
            if (first + j >= end) score[j] = -INFINITY;
            next = fmaxf(next, score[j]);
        }
        const float kept = expf(max - next);
        sum *= kept;
#pragma unroll
        for (int i = 0; i < R; ++i) acc[i] *= kept;
#pragma unroll
        for (int j = 0; j < KEYS; ++j) {
            const float weight = expf(score[j] - next);
            sum += weight;
#pragma unroll
            for (int i = 0; i < R; ++i) {
                const uint32_t e = lane + 32 * i;
                if (e < e_count) acc[i] += weight * to_f32(key[j][half + e]);
            }
        }
        max = next;
    }

    // Merge: shared is [WARPS][E] sums, then WARPS maxima, then WARPS weights.
    float* maxima = shared + WARPS * e_count;
    float* weights = maxima + WARPS;
#pragma unroll
    for (int i = 0; i < R; ++i) {
        const uint32_t e = lane + 32 * i;
        if (e < e_count) shared[warp * e_count + e] = acc[i];
    }
    if (lane == 0) {
        maxima[warp] = max;
        weights[warp] = sum;
    }
    __syncthreads();
    float most = maxima[0];
    for (int w = 1; w < WARPS; ++w) most = fmaxf(most, maxima[w]);
    float total = 0.0f;
    for (int w = 0; w < WARPS; ++w) total += weights[w] * expf(maxima[w] - most);
    if (args.sinks != nullptr) total += expf(args.sinks[head] - most);
    T* out = static_cast<T*>(args.out) + (token * args.num_heads + head) * e_count;
    for (uint32_t e = threadIdx.x; e < e_count; e += blockDim.x) {
        float value = 0.0f;
        for (int w = 0; w < WARPS; ++w) value += shared[w * e_count + e] * expf(maxima[w] - most);
        out[e] = from_f32<T>(value / total);
    }
}

template <class T, class Kv> __device__ __forceinline__ void attend_any(const PlainAttentionArgs& args) {
    extern __shared__ float shared[];
    if (args.head_dim <= 64) {
        attend<T, Kv, 2>(args, shared);
    } else if (args.head_dim <= 128) {
        attend<T, Kv, 4>(args, shared);
    } else if (args.head_dim <= 256) {
        attend<T, Kv, 8>(args, shared);
    } else {
        attend<T, Kv, 16>(args, shared);
    }
}

extern "C" __global__ void attention_plain_f32_f32(PlainAttentionArgs args) { attend_any<float, float>(args); }
extern "C" __global__ void attention_plain_f32_f16(PlainAttentionArgs args) { attend_any<float, f16>(args); }
extern "C" __global__ void attention_plain_f32_bf16(PlainAttentionArgs args) { attend_any<float, bf16>(args); }
extern "C" __global__ void attention_plain_bf16_f32(PlainAttentionArgs args) { attend_any<bf16, float>(args); }
extern "C" __global__ void attention_plain_bf16_f16(PlainAttentionArgs args) { attend_any<bf16, f16>(args); }
extern "C" __global__ void attention_plain_bf16_bf16(PlainAttentionArgs args) { attend_any<bf16, bf16>(args); }
