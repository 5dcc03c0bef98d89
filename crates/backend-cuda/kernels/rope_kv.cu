// Rotary positions, and the way of K and V into the pool. A pool tensor is
// `[num_blocks, 2 (K, V), K heads, block_size, E]`.
#include "element.cuh"
#include "overlap.cuh"

// Pairs of a head that are rotated at most: they travel in the kernel's arguments.
#define MAX_PAIRS 256

struct RopeArgs {
    void* x;                   // [T, heads * E], in place
    const uint32_t* positions; // [T]
    uint32_t num_heads;
    uint32_t head_dim;
    uint32_t pairs;
    uint32_t interleaved; // 0: elements i and i + pairs; 1: elements 2i and 2i + 1
    float magnitude;
    float inv_freq[MAX_PAIRS];
};

template <class T> __device__ __forceinline__ void rotate(const RopeArgs& args) {
    T* row = static_cast<T*>(args.x) + size_t(blockIdx.x) * args.num_heads * args.head_dim;
    const float position = float(args.positions[blockIdx.x]);
    for (uint32_t i = threadIdx.x; i < args.num_heads * args.pairs; i += blockDim.x) {
        const uint32_t head = i / args.pairs, pair = i % args.pairs;
        float sin, cos;
        // The angle is rounded to f32, as the reference does.
        sincosf(position * args.inv_freq[pair], &sin, &cos);
        sin *= args.magnitude;
        cos *= args.magnitude;
        T* at = row + head * args.head_dim + (args.interleaved ? 2 * pair : pair);
        const uint32_t step = args.interleaved ? 1 : args.pairs;
        const float low = to_f32(at[0]), high = to_f32(at[step]);
        at[0] = from_f32<T>(low * cos - high * sin);
        at[step] = from_f32<T>(high * cos + low * sin);
    }
}

extern "C" __global__ void rope_f32(const __grid_constant__ RopeArgs args) { rotate<float>(args); }
extern "C" __global__ void rope_bf16(const __grid_constant__ RopeArgs args) { rotate<bf16>(args); }

struct AnglesArgs {
    float* angles;             // [T, 2, pairs]: cosines, then sines
    const uint32_t* positions; // [T]
    uint32_t pairs;
    float magnitude;
    float inv_freq[MAX_PAIRS];
};

// The step's angles, for all its layers.
extern "C" __global__ void rope_angles(const __grid_constant__ AnglesArgs args) {
    const float position = float(args.positions[blockIdx.x]);
    float* row = args.angles + size_t(blockIdx.x) * 2 * args.pairs;
    for (uint32_t pair = threadIdx.x; pair < args.pairs; pair += blockDim.x) {
        float sin, cos;
        sincosf(position * args.inv_freq[pair], &sin, &cos);
        row[pair] = cos * args.magnitude;
        row[args.pairs + pair] = sin * args.magnitude;
    }
}

struct KvWriteArgs {
    const void* k;         // [T, K * E]
    const void* v;         // [T, K * E]
    const uint32_t* slots; // [T]
    void* pool;
    uint32_t num_kv_heads;
    uint32_t head_dim;
    uint32_t block_size;
};

// One block for each token.
template <class T, class Kv> __device__ __forceinline__ void write_token(const KvWriteArgs& args) {
    const uint32_t cols = args.num_kv_heads * args.head_dim;
    const T* k = static_cast<const T*>(args.k) + size_t(blockIdx.x) * cols;
    const T* v = static_cast<const T*>(args.v) + size_t(blockIdx.x) * cols;
    const uint32_t slot = args.slots[blockIdx.x];
    const size_t block = slot / args.block_size, offset = slot % args.block_size;
    const size_t half = size_t(cols) * args.block_size; // elements of K (or V) in a block
    Kv* base = static_cast<Kv*>(args.pool) + block * 2 * half + offset * args.head_dim;
    for (uint32_t c = threadIdx.x; c < cols; c += blockDim.x) {
        const size_t at = size_t(c / args.head_dim) * args.block_size * args.head_dim + c % args.head_dim;
        base[at] = from_f32<Kv>(to_f32(k[c]));
        base[half + at] = from_f32<Kv>(to_f32(v[c]));
    }
}

extern "C" __global__ void kv_write_f32_f32(KvWriteArgs args) { write_token<float, float>(args); }
extern "C" __global__ void kv_write_f32_f16(KvWriteArgs args) { write_token<float, f16>(args); }
extern "C" __global__ void kv_write_f32_bf16(KvWriteArgs args) { write_token<float, bf16>(args); }
extern "C" __global__ void kv_write_bf16_f32(KvWriteArgs args) { write_token<bf16, float>(args); }
extern "C" __global__ void kv_write_bf16_f16(KvWriteArgs args) { write_token<bf16, f16>(args); }
extern "C" __global__ void kv_write_bf16_bf16(KvWriteArgs args) { write_token<bf16, bf16>(args); }

// Both of the above at once, with the norm of each head before: one warp for each head of q, k and v.
#define HEAD_WARPS 8
#define MAX_HEAD 512

struct HeadsArgs {
    void* q;                   // [T, H * E], in place
    const void* k;             // [T, K * E]
    const void* v;             // [T, K * E]
    const float* q_norm;       // [E] or null
    const float* k_norm;       // [E] or null
    const float* angles;       // [T, 2, pairs], of `rope_angles`
    const uint32_t* slots;     // [T]
    void* pool;
    uint32_t num_heads;
    uint32_t num_kv_heads;
    uint32_t head_dim;
    uint32_t block_size;
    uint32_t pairs;
    uint32_t interleaved;
    float q_eps;
    float k_eps;
};

// Element `e` of a head after the rotation.
__device__ __forceinline__ float rotated(const HeadsArgs& args, const float* head, const float* cosines,
                                         const float* sines, uint32_t e) {
    if (e >= 2 * args.pairs) return head[e];
    const uint32_t pair = args.interleaved ? e / 2 : e % args.pairs;
    const bool low = args.interleaved ? e % 2 == 0 : e < args.pairs;
    const uint32_t step = args.interleaved ? 1 : args.pairs;
    return low ? head[e] * cosines[pair] - head[e + step] * sines[pair]
               : head[e] * cosines[pair] + head[e - step] * sines[pair];
}

// Heads of any size.
template <class T, class Kv> __device__ __forceinline__ void heads_by_element(const HeadsArgs& args) {
    __shared__ float angles[2 * MAX_PAIRS], heads[HEAD_WARPS][MAX_HEAD];
    const size_t token = blockIdx.x;
    const uint32_t e_count = args.head_dim;
    pagemill::release_next_kernel();
    pagemill::wait_for_previous_kernel();
    for (uint32_t i = threadIdx.x; i < 2 * args.pairs; i += blockDim.x) angles[i] = args.angles[token * 2 * args.pairs + i];
    __syncthreads();
    const float *cosines = angles, *sines = angles + args.pairs;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, slot = args.slots[token];
    const uint32_t h_count = args.num_heads, k_count = args.num_kv_heads;
    const size_t half = size_t(k_count) * args.block_size * e_count;
    Kv* place = static_cast<Kv*>(args.pool) + size_t(slot / args.block_size) * 2 * half +
                size_t(slot % args.block_size) * e_count;
    float* head = heads[warp];
    for (uint32_t h = blockIdx.y * HEAD_WARPS + warp; h < h_count + 2 * k_count; h += gridDim.y * HEAD_WARPS) {
        const bool is_q = h < h_count, is_v = h >= h_count + k_count;
        const uint32_t kv_head = is_v ? h - h_count - k_count : h - h_count;
        T* q = static_cast<T*>(args.q) + (token * h_count + h) * e_count;
        const T* kv = static_cast<const T*>(is_v ? args.v : args.k) + (token * k_count + kv_head) * e_count;
        const T* from = is_q ? q : kv;
        Kv* to = place + size_t(kv_head) * args.block_size * e_count + (is_v ? half : 0);
        if (is_v) {
            for (uint32_t e = lane; e < e_count; e += 32) to[e] = from_f32<Kv>(to_f32(from[e]));
            continue;
        }
        float sum = 0.0f;
        for (uint32_t e = lane; e < e_count; e += 32) {
            head[e] = to_f32(from[e]);
            sum += head[e] * head[e];
        }
        const float* norm = is_q ? args.q_norm : args.k_norm;
        if (norm != nullptr) {
            const float eps = is_q ? args.q_eps : args.k_eps;
            const float inverse_rms = 1.0f / sqrtf(warp_sum(sum) / float(e_count) + eps);
            // Rounded where the ops one by one would round.
            for (uint32_t e = lane; e < e_count; e += 32) {
                head[e] = to_f32(from_f32<T>(head[e] * inverse_rms * norm[e]));
            }
        }
        __syncwarp();
        for (uint32_t e = lane; e < e_count; e += 32) {
            const T value = from_f32<T>(rotated(args, head, cosines, sines, e));
            if (is_q) {
                q[e] = value;
            } else {
                to[e] = from_f32<Kv>(to_f32(value));
            }
        }
        __syncwarp();
    }
}

// Heads whose every lane has N neighbouring elements, in registers: at most 32 * N elements, a multiple of N, as is
// the number of pairs. The other element of a pair is the same lane's, or that of the lane pairs / N away.
template <class T, class Kv, int N> __device__ __forceinline__ void heads_by_lane(const HeadsArgs& args) {
    const size_t token = blockIdx.x;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, e = lane * N, e_count = args.head_dim;
    const uint32_t h_count = args.num_heads, k_count = args.num_kv_heads, pairs = args.pairs;
    const bool mine = e < e_count, turns = e < 2 * pairs, low = e < pairs;
    const int lanes_apart = args.interleaved ? 0 : int(pairs / N) * (low ? 1 : -1);
    float q_norm[N], k_norm[N];
    if (mine && args.q_norm != nullptr) load_f32<N>(args.q_norm + e, q_norm);
    if (mine && args.k_norm != nullptr) load_f32<N>(args.k_norm + e, k_norm);
    pagemill::release_next_kernel();
    pagemill::wait_for_previous_kernel();
    float cosine[N], sine[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const uint32_t pair = args.interleaved ? (e + i) / 2 : low ? e + i : e + i - pairs;
        cosine[i] = turns ? args.angles[token * 2 * pairs + pair] : 1.0f;
        sine[i] = turns ? args.angles[token * 2 * pairs + pairs + pair] : 0.0f;
    }
    const uint32_t slot = args.slots[token];
    const size_t half = size_t(k_count) * args.block_size * e_count;
    Kv* place = static_cast<Kv*>(args.pool) + size_t(slot / args.block_size) * 2 * half +
                size_t(slot % args.block_size) * e_count + e;
    for (uint32_t h = blockIdx.y * HEAD_WARPS + warp; h < h_count + 2 * k_count; h += gridDim.y * HEAD_WARPS) {
        const bool is_q = h < h_count, is_v = h >= h_count + k_count;
        const uint32_t kv_head = is_v ? h - h_count - k_count : h - h_count;
        T* q = static_cast<T*>(args.q) + (token * h_count + h) * e_count + e;
        const T* kv = static_cast<const T*>(is_v ? args.v : args.k) + (token * k_count + kv_head) * e_count + e;
        Kv* to = place + size_t(kv_head) * args.block_size * e_count + (is_v ? half : 0);
        float x[N] = {};
        if (mine) load_f32<N>(is_q ? q : kv, x);
        if (is_v) {
            if (mine) store_f32<N>(to, x);
            continue;
        }
        if ((is_q ? args.q_norm : args.k_norm) != nullptr) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < N; ++i) sum += x[i] * x[i];
            const float inverse_rms = 1.0f / sqrtf(warp_sum(sum) / float(e_count) + (is_q ? args.q_eps : args.k_eps));
            // Rounded where the ops one by one would round.
#pragma unroll
            for (int i = 0; i < N; ++i) x[i] = to_f32(from_f32<T>(x[i] * inverse_rms * (is_q ? q_norm[i] : k_norm[i])));
        }
        float turned[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float other = args.interleaved ? x[i ^ 1] : __shfl_sync(~0u, x[i], int(lane) + lanes_apart);
            const bool first = args.interleaved ? i % 2 == 0 : low;
            const float value = first ? x[i] * cosine[i] - other * sine[i] : x[i] * cosine[i] + other * sine[i];
            turned[i] = to_f32(from_f32<T>(turns ? value : x[i]));
        }
        if (!mine) continue;
        if (is_q) {
            store_f32<N>(q, turned);
        } else {
            store_f32<N>(to, turned);
        }
    }
}

// Its successor begins before the kernel in front is done, an exception to the rule in overlap.cuh: decode attention
// reads plans, tables and keys of earlier steps before its wait, which no kernel of this step writes, and its wait is
// for this kernel, which ends behind the one in front.
template <class T, class Kv> __device__ __forceinline__ void heads_to_pool(const HeadsArgs& args) {
    const auto fits = [&](uint32_t n) {
        return args.head_dim <= 32 * n && args.head_dim % n == 0 && (args.interleaved || args.pairs % n == 0);
    };
    if (fits(4)) return heads_by_lane<T, Kv, 4>(args);
    if (fits(8)) return heads_by_lane<T, Kv, 8>(args);
    heads_by_element<T, Kv>(args);
}

#define HEADS_KERNEL(name, T, Kv)                                                                                   \
    extern "C" __global__ void __launch_bounds__(HEAD_WARPS * 32) heads_##name(const __grid_constant__ HeadsArgs args) { \
        heads_to_pool<T, Kv>(args);                                                                                 \
    }
HEADS_KERNEL(f32_f32, float, float)
HEADS_KERNEL(f32_f16, float, f16)
HEADS_KERNEL(f32_bf16, float, bf16)
HEADS_KERNEL(bf16_f32, bf16, float)
HEADS_KERNEL(bf16_f16, bf16, f16)
HEADS_KERNEL(bf16_bf16, bf16, bf16)
