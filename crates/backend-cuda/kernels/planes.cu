// Sums that products left in planes: f32 [P, T, N], to be added up in their order by who reads the result. Decides how
// the planes become elements, or part of a residual; a row's bits depend on its length alone.
#include "cluster.cuh"
#include "cluster_barriers.cuh"
#include "element.cuh"
#include "overlap.cuh"

// Adds to `sum` the elements of all planes, which lie `stride` elements apart: the first planes' sum, then one after the
// other. Those of AT_ONCE planes are on their way at once.
template <int AT_ONCE, int ITEMS, class Place>
__device__ __forceinline__ void add_planes(const float* planes, uint64_t stride, uint32_t count, Place place,
                                           float (&sum)[ITEMS][4]) {
    for (uint32_t first = 0; first < count; first += AT_ONCE) {
        float4 part[AT_ONCE][ITEMS];
#pragma unroll
        for (int p = 0; p < AT_ONCE; ++p)
#pragma unroll
            for (int i = 0; i < ITEMS; ++i)
                if (first + p < count && place.has(i))
                    part[p][i] = __ldcg(reinterpret_cast<const float4*>(planes + (first + p) * stride + place.at(i)));
#pragma unroll
        for (int p = 0; p < AT_ONCE; ++p)
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                if (first + p >= count || !place.has(i)) continue;
                sum[i][0] += part[p][i].x, sum[i][1] += part[p][i].y, sum[i][2] += part[p][i].z, sum[i][3] += part[p][i].w;
            }
    }
}

#define SUM_THREADS 256

struct SumPlanesArgs {
    const float* planes;   // [P, count]
    const float* residual; // [count], added to the sum, or null; may be out
    void* out;             // [count]
    uint64_t count;
    uint32_t num_planes;
};

// One place of four elements a thread.
struct FourPlace {
    uint64_t start, count;
    __device__ __forceinline__ bool has(int) const { return start < count; }
    __device__ __forceinline__ uint64_t at(int) const { return start; }
};

template <class T> __device__ __forceinline__ void sum_planes(const SumPlanesArgs& args) {
    T* out = static_cast<T*>(args.out);
    pagemill::release_next_kernel(); // an exception that overlap.cuh names
    pagemill::wait_for_previous_kernel();
    const uint64_t start = (uint64_t(blockIdx.x) * SUM_THREADS + threadIdx.x) * 4;
    if (args.count % 4 == 0) {
        float sum[1][4] = {}, residual[4] = {};
        if (start >= args.count) return;
        if (args.residual != nullptr) load_f32<4>(args.residual + start, residual);
        add_planes<8>(args.planes, args.count, args.num_planes, FourPlace{start, args.count}, sum);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[0][i] += residual[i];
        store_f32<4>(out + start, sum[0]);
        return;
    }
    for (uint64_t at = start; at < args.count && at < start + 4; ++at) {
        float sum = args.planes[at];
        for (uint32_t p = 1; p < args.num_planes; ++p) sum += args.planes[p * args.count + at];
        out[at] = from_f32<T>(sum + (args.residual != nullptr ? args.residual[at] : 0.0f));
    }
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS) sum_planes_f32(const __grid_constant__ SumPlanesArgs args) {
    sum_planes<float>(args);
}
extern "C" __global__ void __launch_bounds__(SUM_THREADS) sum_planes_bf16(const __grid_constant__ SumPlanesArgs args) {
    sum_planes<bf16>(args);
}

struct NormPlanesArgs {
    const float* planes;   // [P, rows, cols]
    float* residual;       // [rows, cols]; the planes' sum is added to it
    const float* weight;   // [cols]
    void* out;             // [rows, cols], the norm of the residual
    uint64_t plane_stride; // rows * cols
    uint32_t num_planes;
    uint32_t cols;         // a multiple of 4 * PLANES_CLUSTER, at most 4 * ITEMS * blockDim.x * PLANES_CLUSTER
    float eps;
};

// Thread blocks that share a row: a decode step's rows are fewer than multiprocessors, and planes are many bytes a row.
#ifndef PLANES_CLUSTER
#define PLANES_CLUSTER 2
#endif
// Four columns each, of a thread at most.
#define PLANES_ITEMS 2

// This thread block's columns of its cluster's row.
struct RowPlace {
    uint64_t row;
    uint32_t first, count;
    __device__ __forceinline__ uint32_t in_part(int i) const { return (threadIdx.x + i * blockDim.x) * 4; }
    __device__ __forceinline__ bool has(int i) const { return in_part(i) < count; }
    __device__ __forceinline__ uint32_t column(int i) const { return first + in_part(i); }
    __device__ __forceinline__ uint64_t at(int i) const { return row + column(i); }
};

#if __CUDA_ARCH__ >= 900

// The sum of `x` over the cluster, in the order of its thread blocks.
__device__ __forceinline__ float cluster_sum(float x, float4* sums, uint64_t* barrier) {
    const float own = block_sum(x);
    pagemill::await_cluster();
    if (threadIdx.x < PLANES_CLUSTER) {
        const uint32_t there = pagemill::address_at(sums + pagemill::cluster_rank(), threadIdx.x);
        pagemill::send16(there, make_float4(own, 0.0f, 0.0f, 0.0f), pagemill::address_at(barrier, threadIdx.x));
    }
    pagemill::barrier_wait_for_cluster(barrier, 0);
    float sum = sums[0].x;
#pragma unroll
    for (int rank = 1; rank < PLANES_CLUSTER; ++rank) sum += sums[rank].x;
    return sum;
}

// A row a cluster, held in registers.
template <class To, int ITEMS> __device__ __forceinline__ void norm_planes(const NormPlanesArgs& args) {
    __shared__ float4 sums[PLANES_CLUSTER];
    __shared__ uint64_t barrier;
    if (threadIdx.x == 0) {
        pagemill::barrier_init(&barrier, 1);
        pagemill::barrier_expect(&barrier, sizeof sums);
    }
    pagemill::announce_to_cluster();
    pagemill::release_next_kernel(); // an exception that overlap.cuh names
    const uint32_t part = args.cols / PLANES_CLUSTER;
    const RowPlace place = {uint64_t(blockIdx.x / PLANES_CLUSTER) * args.cols, pagemill::cluster_rank() * part, part};
    float weight[ITEMS][4], v[ITEMS][4] = {}, residual[ITEMS][4];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (place.has(i)) load_f32<4>(args.weight + place.column(i), weight[i]);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (place.has(i) && threadIdx.x % 8 == 0) prefetch_line(args.residual + place.at(i));
    pagemill::wait_for_previous_kernel();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (place.has(i)) load_f32<4>(args.residual + place.at(i), residual[i]);
    add_planes<ITEMS == 1 ? 8 : 2>(args.planes, args.plane_stride, args.num_planes, place, v);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (!place.has(i)) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            v[i][j] += residual[i][j];
            squares += v[i][j] * v[i][j];
        }
        store_f32<4>(args.residual + place.at(i), v[i]);
    }
    const float inverse_rms = 1.0f / sqrtf(cluster_sum(squares, sums, &barrier) / float(args.cols) + args.eps);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (!place.has(i)) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j) v[i][j] = v[i][j] * inverse_rms * weight[i][j];
        store_f32<4>(static_cast<To*>(args.out) + place.at(i), v[i]);
    }
}

#else

template <class To, int ITEMS> __device__ __forceinline__ void norm_planes(const NormPlanesArgs&) {}

#endif

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define ROW_CLUSTER __cluster_dims__(PLANES_CLUSTER, 1, 1)
#else
#define ROW_CLUSTER
#endif
#define NORM_PLANES_KERNEL(name, To)                                                                                \
    extern "C" __global__ void __launch_bounds__(512, 2) ROW_CLUSTER norm_planes_##name(const __grid_constant__ NormPlanesArgs args) { \
        args.cols <= 4 * PLANES_CLUSTER * blockDim.x ? norm_planes<To, 1>(args) : norm_planes<To, PLANES_ITEMS>(args); \
    }
NORM_PLANES_KERNEL(f32, float)
NORM_PLANES_KERNEL(bf16, bf16)
