// Rotary positions, and the way of K and V into the pool. A pool tensor is
// `[num_blocks, 2 (K, V), K heads, block_size, E]`.
#include "element.cuh"

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
