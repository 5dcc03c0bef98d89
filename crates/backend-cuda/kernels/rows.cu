// Row-wise ops: norms, additions, activations, conversions, gathering. One block works on one row, or on a
// stretch of elements where rows do not matter. Sums are taken in an order that depends on the row's length
// alone, so a row's bits do not depend on the batch. Their successors begin at once (overlap.cuh): a product has its
// first weights on their way while the op in front of it still waits.
#include "element.cuh"
#include "overlap.cuh"

struct NormArgs {
    const void* x;       // [rows, cols]
    float* residual;     // [rows, cols]; x is added to it first. Null: no residual.
    const float* weight; // [cols]
    void* out;           // [rows, cols]
    uint32_t cols;
    float eps;
};

template <class Tx, class To, int N, bool ADD> __device__ __forceinline__ void norm_row(const NormArgs& args) {
    const size_t start = size_t(blockIdx.x) * args.cols;
    const Tx* x = static_cast<const Tx*>(args.x) + start;
    float* residual = args.residual + (ADD ? start : 0);
    To* out = static_cast<To*>(args.out) + start;
    float sum = 0.0f;
    for (uint32_t c = threadIdx.x * N; c < args.cols; c += blockDim.x * N) {
        float v[N];
        load_f32<N>(x + c, v);
        if (ADD) {
            float r[N];
            load_f32<N>(residual + c, r);
#pragma unroll
            for (int i = 0; i < N; ++i) v[i] += r[i];
            store_f32<N>(residual + c, v);
        }
#pragma unroll
        for (int i = 0; i < N; ++i) sum += v[i] * v[i];
    }
    const float inverse_rms = 1.0f / sqrtf(block_sum(sum) / float(args.cols) + args.eps);
    // Each thread reads again what it has read, or written, itself.
    for (uint32_t c = threadIdx.x * N; c < args.cols; c += blockDim.x * N) {
        float v[N], w[N];
        if (ADD) {
            load_f32<N>(residual + c, v);
        } else {
            load_f32<N>(x + c, v);
        }
        load_f32<N>(args.weight + c, w);
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = v[i] * inverse_rms * w[i];
        store_f32<N>(out + c, v);
    }
}

// A row of at most 4 * ITEMS * blockDim.x columns, a multiple of 4, that stays in registers: everything it needs is
// on its way at once, and the weights before the kernel in front is done. The residual may be that kernel's to write,
// but is as good as never: L2 has it by then.
template <class Tx, class To, int ITEMS, bool ADD> __device__ __forceinline__ void norm_held(const NormArgs& args) {
    const size_t start = size_t(blockIdx.x) * args.cols;
    const Tx* x = static_cast<const Tx*>(args.x) + start;
    float* residual = args.residual + (ADD ? start : 0);
    To* out = static_cast<To*>(args.out) + start;
    float weight[ITEMS][4], v[ITEMS][4] = {}, r[ITEMS][4] = {};
    const auto column = [](int i) { return (threadIdx.x + i * blockDim.x) * 4; };
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (column(i) < args.cols) load_f32<4>(args.weight + column(i), weight[i]);
    if (ADD) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
            if (column(i) < args.cols && threadIdx.x % 8 == 0) prefetch_line(residual + column(i));
    }
    pagemill::wait_for_previous_kernel();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (column(i) >= args.cols) continue;
        load_f32<4>(x + column(i), v[i]);
        if (ADD) load_f32<4>(residual + column(i), r[i]);
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (ADD) v[i][j] += r[i][j];
            sum += v[i][j] * v[i][j];
        }
        if (ADD && column(i) < args.cols) store_f32<4>(residual + column(i), v[i]);
    }
    const float inverse_rms = 1.0f / sqrtf(block_sum(sum) / float(args.cols) + args.eps);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (column(i) >= args.cols) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j) v[i][j] = v[i][j] * inverse_rms * weight[i][j];
        store_f32<4>(out + column(i), v[i]);
    }
}

template <class Tx, class To, bool ADD> __device__ __forceinline__ void norm_any(const NormArgs& args) {
    const uint32_t held = args.cols % 4 == 0 ? (args.cols / 4 + blockDim.x - 1) / blockDim.x : 5;
    if (held == 1) return norm_held<Tx, To, 1, ADD>(args);
    if (held == 2) return norm_held<Tx, To, 2, ADD>(args);
    if (held <= 4) return norm_held<Tx, To, 4, ADD>(args);
    pagemill::wait_for_previous_kernel();
    args.cols % 4 == 0 ? norm_row<Tx, To, 4, ADD>(args) : norm_row<Tx, To, 1, ADD>(args);
}

template <class Tx, class To> __device__ __forceinline__ void norm(const NormArgs& args) {
    pagemill::release_next_kernel();
    args.residual != nullptr ? norm_any<Tx, To, true>(args) : norm_any<Tx, To, false>(args);
}

#define NORM_KERNEL(name, Tx, To)                                                                                   \
    extern "C" __global__ void __launch_bounds__(1024) rms_norm_##name(const __grid_constant__ NormArgs args) {     \
        norm<Tx, To>(args);                                                                                         \
    }
NORM_KERNEL(f32_f32, float, float)
NORM_KERNEL(f32_bf16, float, bf16)
NORM_KERNEL(bf16_f32, bf16, float)
NORM_KERNEL(bf16_bf16, bf16, bf16)

struct ElementArgs {
    const void* x; // [count]
    const void* y; // [count]; the second operand, where there is one
    void* out;     // [count]
    uint64_t count;
    float factor;
    uint32_t cols; // a row's length, where it matters
};

// `op(x, y)` for every element of this thread. The last elements that fill no pack go one by one.
template <int N, class Tx, class Ty, class To, class Op>
__device__ __forceinline__ void each(const ElementArgs& args, Op op) {
    const Tx* x = static_cast<const Tx*>(args.x);
    const Ty* y = static_cast<const Ty*>(args.y);
    To* out = static_cast<To*>(args.out);
    pagemill::release_next_kernel();
    pagemill::wait_for_previous_kernel();
    const uint64_t first = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x, stride = uint64_t(gridDim.x) * blockDim.x;
    const uint64_t packs = args.count / N;
    for (uint64_t i = first; i < packs; i += stride) {
        float a[N], b[N];
        load_f32<N>(x + i * N, a);
        load_f32<N>(y + i * N, b);
#pragma unroll
        for (int j = 0; j < N; ++j) a[j] = op(a[j], b[j]);
        store_f32<N>(out + i * N, a);
    }
    for (uint64_t i = packs * N + first; i < args.count; i += stride) {
        out[i] = from_f32<To>(op(to_f32(x[i]), to_f32(y[i])));
    }
}

// As above for ops of one operand.
template <int N, class Tx, class To, class Op> __device__ __forceinline__ void each(const ElementArgs& args, Op op) {
    const Tx* x = static_cast<const Tx*>(args.x);
    To* out = static_cast<To*>(args.out);
    pagemill::release_next_kernel();
    pagemill::wait_for_previous_kernel();
    const uint64_t first = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x, stride = uint64_t(gridDim.x) * blockDim.x;
    const uint64_t packs = args.count / N;
    for (uint64_t i = first; i < packs; i += stride) {
        float a[N];
        load_f32<N>(x + i * N, a);
#pragma unroll
        for (int j = 0; j < N; ++j) a[j] = op(a[j]);
        store_f32<N>(out + i * N, a);
    }
    for (uint64_t i = packs * N + first; i < args.count; i += stride) out[i] = from_f32<To>(op(to_f32(x[i])));
}

__device__ __forceinline__ float plus(float x, float y) { return x + y; }
__device__ __forceinline__ float same(float x) { return x; }
__device__ __forceinline__ float silu_times(float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }
// The tanh form by (1 + tanh(u)) / 2 = sigmoid(2u), which does not cancel for negative x.
__device__ __forceinline__ float gelu_times(float gate, float up) {
    const float u = 0.7978846f * gate * (1.0f + 0.044715f * gate * gate);
    return gate / (1.0f + expf(-2.0f * u)) * up;
}

extern "C" __global__ void add_f32(ElementArgs args) { each<4, float, float, float>(args, plus); }
extern "C" __global__ void add_bf16(ElementArgs args) { each<4, bf16, float, float>(args, plus); }
extern "C" __global__ void silu_f32(ElementArgs args) { each<4, float, float, float>(args, silu_times); }
extern "C" __global__ void silu_bf16(ElementArgs args) { each<8, bf16, bf16, bf16>(args, silu_times); }
extern "C" __global__ void gelu_f32(ElementArgs args) { each<4, float, float, float>(args, gelu_times); }
extern "C" __global__ void gelu_bf16(ElementArgs args) { each<8, bf16, bf16, bf16>(args, gelu_times); }

extern "C" __global__ void scale_f32(ElementArgs args) {
    each<4, float, float>(args, [=](float x) { return x * args.factor; });
}
extern "C" __global__ void scale_bf16(ElementArgs args) {
    each<8, bf16, bf16>(args, [=](float x) { return x * args.factor; });
}
extern "C" __global__ void soft_cap_f32(ElementArgs args) {
    each<4, float, float>(args, [=](float x) { return args.factor * tanhf(x / args.factor); });
}
extern "C" __global__ void soft_cap_bf16(ElementArgs args) {
    each<8, bf16, bf16>(args, [=](float x) { return args.factor * tanhf(x / args.factor); });
}

extern "C" __global__ void convert_f32_bf16(ElementArgs args) { each<4, float, bf16>(args, same); }
extern "C" __global__ void convert_f32_f16(ElementArgs args) { each<4, float, f16>(args, same); }
extern "C" __global__ void convert_bf16_f32(ElementArgs args) { each<4, bf16, float>(args, same); }
extern "C" __global__ void convert_bf16_f16(ElementArgs args) { each<4, bf16, f16>(args, same); }
extern "C" __global__ void convert_f16_f32(ElementArgs args) { each<4, f16, float>(args, same); }

// out[row, c] += x[c]; one block for each row.
template <class T> __device__ __forceinline__ void add_to_rows(const ElementArgs& args) {
    T* out = static_cast<T*>(args.out) + size_t(blockIdx.x) * args.cols;
    const float* bias = static_cast<const float*>(args.x);
    for (uint32_t c = threadIdx.x; c < args.cols; c += blockDim.x) out[c] = from_f32<T>(to_f32(out[c]) + bias[c]);
}

extern "C" __global__ void add_bias_f32(ElementArgs args) { add_to_rows<float>(args); }
extern "C" __global__ void add_bias_bf16(ElementArgs args) { add_to_rows<bf16>(args); }

struct GatherArgs {
    const void* x;        // [_, row_bytes]
    const uint32_t* rows; // [gridDim.x]
    void* out;            // [gridDim.x, row_bytes]
    uint64_t row_bytes;   // even
};

template <class Unit> __device__ __forceinline__ void copy_row(const char* from, char* to, uint64_t bytes) {
    const Unit* x = reinterpret_cast<const Unit*>(from);
    Unit* out = reinterpret_cast<Unit*>(to);
    for (uint64_t i = threadIdx.x; i < bytes / sizeof(Unit); i += blockDim.x) out[i] = x[i];
}

extern "C" __global__ void gather_rows(GatherArgs args) {
    const char* from = static_cast<const char*>(args.x) + args.rows[blockIdx.x] * args.row_bytes;
    char* to = static_cast<char*>(args.out) + blockIdx.x * args.row_bytes;
    if (args.row_bytes % sizeof(uint4) == 0) {
        copy_row<uint4>(from, to, args.row_bytes);
    } else {
        copy_row<uint16_t>(from, to, args.row_bytes);
    }
}
