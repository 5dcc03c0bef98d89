// What every bench needs: checked calls, random inputs, poisoned outputs, relative error, and the time of a
// launch inside a replayed graph (median over replays).
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define CHECK(call)                                                                                         \
    do {                                                                                                    \
        cudaError_t status_ = (call);                                                                       \
        if (status_ != cudaSuccess) {                                                                       \
            printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status_));               \
            exit(1);                                                                                        \
        }                                                                                                   \
    } while (0)

namespace bench {

__device__ inline float hash_normal(uint64_t i, uint64_t seed) {
    uint64_t x = (i + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull;
    x ^= x >> 32, x *= 0xBF58476D1CE4E5B9ull, x ^= x >> 29, x *= 0x94D049BB133111EBull, x ^= x >> 32;
    float u = ((x & 0xffffff) + 1) / 16777217.0f, v = ((x >> 32) & 0xffffff) / 16777216.0f;
    return sqrtf(-2.0f * logf(u)) * cospif(2.0f * v);
}
template <class T> __device__ inline T from_f(float x);
template <> __device__ inline float from_f<float>(float x) { return x; }
template <> __device__ inline __half from_f<__half>(float x) { return __float2half(x); }
template <> __device__ inline __nv_bfloat16 from_f<__nv_bfloat16>(float x) { return __float2bfloat16(x); }
__device__ inline float to_f(float x) { return x; }
__device__ inline float to_f(__half x) { return __half2float(x); }
__device__ inline float to_f(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T> __global__ void fill_kernel(T* p, size_t n, uint64_t seed, float scale) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x)
        p[i] = from_f<T>(hash_normal(i, seed) * scale);
}
template <class T> __global__ void widen_kernel(const T* p, float* out, size_t n) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x)
        out[i] = to_f(p[i]);
}

template <class T> struct Buffer {
    T* ptr = nullptr;
    size_t len = 0;
    Buffer() = default;
    explicit Buffer(size_t n) : len(n) { CHECK(cudaMalloc(&ptr, std::max<size_t>(n, 1) * sizeof(T))); poison(); }
    Buffer(const std::vector<T>& host) : Buffer(host.size()) { CHECK(cudaMemcpy(ptr, host.data(), len * sizeof(T), cudaMemcpyHostToDevice)); }
    Buffer(const Buffer&) = delete;
    Buffer(Buffer&& o) noexcept : ptr(o.ptr), len(o.len) { o.ptr = nullptr; }
    ~Buffer() { cudaFree(ptr); }
    void poison() { CHECK(cudaMemset(ptr, 0xff, len * sizeof(T))); }
    void zero() { CHECK(cudaMemset(ptr, 0, len * sizeof(T))); }
    void fill(uint64_t seed, float scale) {
        fill_kernel<<<1024, 256>>>(ptr, len, seed, scale);
        CHECK(cudaGetLastError());
    }
    std::vector<float> floats() const {
        Buffer<float> wide(len);
        widen_kernel<<<1024, 256>>>(ptr, wide.ptr, len);
        std::vector<float> out(len);
        CHECK(cudaMemcpy(out.data(), wide.ptr, len * 4, cudaMemcpyDeviceToHost));
        return out;
    }
};

/// ‖out − ref‖ / ‖ref‖; NaN anywhere gives NaN.
inline double relative_error(const std::vector<float>& out, const std::vector<float>& ref) {
    double diff = 0, norm = 0;
    for (size_t i = 0; i < ref.size(); ++i) diff += std::pow(double(out[i]) - ref[i], 2), norm += double(ref[i]) * ref[i];
    return std::sqrt(diff / norm);
}

inline int failures = 0;
/// With any argument a bench only checks, fewer cases: for compute-sanitizer.
inline bool brief = false;
inline void expect(const char* what, double error, double limit) {
    bool ok = error <= limit;
    if (!ok) ++failures;
    printf("%-70s error %.2e (limit %.0e) %s\n", what, error, limit, ok ? "ok" : "FAILED");
}

/// Launches with or without programmatic dependent launch.
template <class P>
void launch(void (*kernel)(P), dim3 grid, dim3 block, size_t shared, cudaStream_t stream, bool overlap, const P& params) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared, config.stream = stream;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute, config.numAttrs = overlap ? 1 : 0;
    CHECK(cudaLaunchKernelEx(&config, kernel, params));
}

/// Microseconds a launch: `count` launches captured in one graph, median of `replays`.
inline double graph_time_us(int count, const std::function<void(cudaStream_t, int)>& enqueue, int replays = 9) {
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < count; ++i) enqueue(stream, i);
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    std::vector<float> times;
    for (int i = 0; i < replays + 2; ++i) {
        CHECK(cudaEventRecord(begin, stream));
        CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaEventRecord(end, stream));
        CHECK(cudaEventSynchronize(end));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 2) times.push_back(ms * 1000 / count);
    }
    std::sort(times.begin(), times.end());
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaStreamDestroy(stream));
    return times[times.size() / 2];
}

} // namespace bench
