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

// Both of the above at once, with the norm of each head before. Heads whose size is a power of two and which turn as a
// whole have a kernel of their own, all others one warp for each head of q, k and v.
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
    uint32_t num_tokens;
    uint32_t token_warps_log2; // of `heads_in_halves`
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

// Units of heads whose elements a warp has on their way together.
#define UNITS_AT_ONCE 3

// Four neighbouring elements of a head's lower half, and those pairs further on.
template <class T> struct HeadPart {
    Pack<T, 4> low, high;
};

template <class To, class T> __device__ __forceinline__ void store_part(To* to, uint32_t pairs, const HeadPart<T>& part) {
    float low[4], high[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) low[i] = to_f32(part.low.at[i]), high[i] = to_f32(part.high.at[i]);
    store_f32<4>(to, low);
    store_f32<4>(to + pairs, high);
}
template <class T> __device__ __forceinline__ void store_part(T* to, uint32_t pairs, const HeadPart<T>& part) {
    store_pack(to, part.low);
    store_pack(to + pairs, part.high);
}

// The norm of a head that `lanes` lanes hold; squares are added and products rounded as the ops one by one would.
template <class T>
__device__ __forceinline__ void norm_part(HeadPart<T>& part, uint32_t lanes, const float* weight, uint32_t pairs, float eps) {
    float low[4], high[4], w_low[4], w_high[4], sum = 0.0f, sum_high = 0.0f;
    if (weight != nullptr) load_f32<4>(weight, w_low), load_f32<4>(weight + pairs, w_high);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        low[i] = to_f32(part.low.at[i]), high[i] = to_f32(part.high.at[i]);
        sum += low[i] * low[i], sum_high += high[i] * high[i];
    }
    sum += sum_high;
    for (uint32_t step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (weight == nullptr) return;
    const float inverse_rms = 1.0f / sqrtf(sum / float(2 * pairs) + eps);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        part.low.at[i] = from_f32<T>(low[i] * inverse_rms * w_low[i]);
        part.high.at[i] = from_f32<T>(high[i] * inverse_rms * w_high[i]);
    }
}

template <class T, bool INTERLEAVED>
__device__ __forceinline__ void turn_part(HeadPart<T>& part, const float (&cosine)[4], const float (&sine)[4]) {
    float low[4], high[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) low[i] = to_f32(part.low.at[i]), high[i] = to_f32(part.high.at[i]);
    if (INTERLEAVED) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const float c = cosine[i / 2], s = sine[i / 2], c_high = cosine[2 + i / 2], s_high = sine[2 + i / 2];
            part.low.at[i] = from_f32<T>(low[i] * c - low[i + 1] * s);
            part.low.at[i + 1] = from_f32<T>(low[i + 1] * c + low[i] * s);
            part.high.at[i] = from_f32<T>(high[i] * c_high - high[i + 1] * s_high);
            part.high.at[i + 1] = from_f32<T>(high[i + 1] * c_high + high[i] * s_high);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            part.low.at[i] = from_f32<T>(low[i] * cosine[i] - high[i] * sine[i]);
            part.high.at[i] = from_f32<T>(high[i] * cosine[i] + low[i] * sine[i]);
        }
    }
}

// Heads of 2 * pairs elements, 8, 16, … or 256. A lane has four elements of a head's lower half and the four that are
// pairs away, so that pairs are at home in either style; a warp has a unit of several heads, and the elements of several
// units on their way before it computes. At many tokens instructions bound such kernels, not bytes on their way:
// `heads_by_lane`, which computes each pair twice, takes 50 us for 4,096 tokens whether a warp has one head on its way,
// three or six; this takes 28.
template <class T, class Kv, bool NORMED, bool INTERLEAVED>
__device__ __forceinline__ void heads_in_halves(const HeadsArgs& args) {
    pagemill::release_next_kernel();
    const uint32_t warp = blockIdx.x * HEAD_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    const size_t token = warp >> args.token_warps_log2;
    if (token >= args.num_tokens) return;
    const uint32_t pairs = args.pairs, e_count = 2 * pairs, lanes = pairs / 4, lanes_log2 = 31 - __clz(lanes), unit_heads = 32 >> lanes_log2;
    const uint32_t token_warps = 1u << args.token_warps_log2, own = warp & (token_warps - 1), e = (lane & (lanes - 1)) * 4;
    const uint32_t h_count = args.num_heads, k_count = args.num_kv_heads, all = h_count + 2 * k_count;
    T* const q = static_cast<T*>(args.q) + token * h_count * e_count + e;
    const T* const k = static_cast<const T*>(args.k) + token * k_count * e_count + e;
    const T* const v = static_cast<const T*>(args.v) + token * k_count * e_count + e;
    pagemill::wait_for_previous_kernel();
    const uint32_t slot = args.slots[token];
    float cosine[4], sine[4];
    const float* angles = args.angles + token * e_count;
    if (INTERLEAVED) {
        float part[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            load_f32<2>(angles + (e + half * pairs) / 2, part);
            cosine[2 * half] = part[0], cosine[2 * half + 1] = part[1];
            load_f32<2>(angles + pairs + (e + half * pairs) / 2, part);
            sine[2 * half] = part[0], sine[2 * half + 1] = part[1];
        }
    } else {
        load_f32<4>(angles + e, cosine);
        load_f32<4>(angles + pairs + e, sine);
    }
    // Elements between two heads of a block of the pool, where V's heads follow K's.
    const uint32_t head_stride = args.block_size * e_count;
    Kv* const place = static_cast<Kv*>(args.pool) + size_t(slot / args.block_size) * (2 * k_count) * head_stride +
                      slot % args.block_size * e_count + e;
    for (uint32_t first = own; first * unit_heads < all; first += UNITS_AT_ONCE * token_warps) {
        HeadPart<T> parts[UNITS_AT_ONCE];
#pragma unroll
        for (int u = 0; u < UNITS_AT_ONCE; ++u) {
            const uint32_t h = (first + u * token_warps) * unit_heads + (lane >> lanes_log2);
            const T* from = h < h_count             ? q + h * e_count
                            : h < h_count + k_count ? k + (h - h_count) * e_count
                                                    : v + (h - h_count - k_count) * e_count;
            if (h >= all) continue;
            parts[u].low = *reinterpret_cast<const Pack<T, 4>*>(from);
            parts[u].high = *reinterpret_cast<const Pack<T, 4>*>(from + pairs);
        }
#pragma unroll
        for (int u = 0; u < UNITS_AT_ONCE; ++u) {
            const uint32_t h = (first + u * token_warps) * unit_heads + (lane >> lanes_log2);
            const bool is_q = h < h_count, is_k = !is_q && h < h_count + k_count;
            if (NORMED) {
                const float* weight = is_q ? args.q_norm : is_k ? args.k_norm : nullptr;
                if (weight != nullptr) weight += e;
                norm_part(parts[u], lanes, weight, pairs, is_q ? args.q_eps : args.k_eps);
            }
            if (h >= all) continue;
            if (is_q || is_k) turn_part<T, INTERLEAVED>(parts[u], cosine, sine);
            if (is_q) {
                store_part(q + h * e_count, pairs, parts[u]);
            } else {
                store_part(place + size_t(h - h_count) * head_stride, pairs, parts[u]);
            }
        }
    }
}

// Their successor begins before the kernel in front is done, an exception to the rule in overlap.cuh: decode attention
// reads plans, tables and keys of earlier steps before its wait, which no kernel of this step writes, and its wait is
// for this kernel, which ends behind the one in front.
template <class T, class Kv> __device__ __forceinline__ void heads_any(const HeadsArgs& args) {
    const auto fits = [&](uint32_t n) {
        return args.head_dim <= 32 * n && args.head_dim % n == 0 && (args.interleaved || args.pairs % n == 0);
    };
    if (fits(4)) return heads_by_lane<T, Kv, 4>(args);
    if (fits(8)) return heads_by_lane<T, Kv, 8>(args);
    heads_by_element<T, Kv>(args);
}

#define HALVES_KERNEL(name, T, Kv, NORMED)                                                                          \
    extern "C" __global__ void __launch_bounds__(HEAD_WARPS * 32, 4)                                    \
        heads_##name(const __grid_constant__ HeadsArgs args) {                                                      \
        args.interleaved ? heads_in_halves<T, Kv, NORMED, true>(args) : heads_in_halves<T, Kv, NORMED, false>(args); \
    }
#define HEADS_KERNELS(types, T, Kv)                                                                                 \
    HALVES_KERNEL(in_halves_##types, T, Kv, false)                                                                  \
    HALVES_KERNEL(normed_in_halves_##types, T, Kv, true)                                                            \
    extern "C" __global__ void __launch_bounds__(HEAD_WARPS * 32) heads_##types(const __grid_constant__ HeadsArgs args) { \
        heads_any<T, Kv>(args);                                                                                     \
    }
HEADS_KERNELS(f32_f32, float, float)
HEADS_KERNELS(f32_f16, float, f16)
HEADS_KERNELS(f32_bf16, float, bf16)
HEADS_KERNELS(bf16_f32, bf16, float)
HEADS_KERNELS(bf16_f16, bf16, f16)
HEADS_KERNELS(bf16_bf16, bf16, bf16)
