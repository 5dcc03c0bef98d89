// Checks linear_wide, and times it at the 8B Llama's gate and up, alone and in a layer's products and norms, cuBLASLt's
// first choice (and a kernel for the activation) in turns with it. The clock is told too: power bounds both.
// Build: nvcc -std=c++17 -O3 -I.. --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a linear_wide_bench.cu lt_product.cpp -lcublasLt
#include <cstring>
#include <memory>
#include <string>
#include "../linear_wide.cu"
#include "../element.cuh"
#include "harness.cuh"
#include "lt_product.h"
using namespace bench;
using pagemill::LinearWideParams;
using Bf = __nv_bfloat16;

static constexpr size_t SHARED = sizeof(pagemill::WideShared);

static CUtensorMap map_of(const void* base, uint64_t rows, uint64_t cols, uint32_t box_rows) {
    static auto encode = [] {
        void* at = nullptr;
        cudaDriverEntryPointQueryResult found;
        CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &at, 12000, cudaEnableDefault, &found));
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(at);
    }();
    CUtensorMap map;
    uint64_t dims[2] = {cols, rows}, stride = cols * 2;
    uint32_t box[2] = {64, box_rows}, steps[2] = {1, 1};
    CUresult status = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(base), dims, &stride, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) printf("tensor map: %d\n", status), exit(1);
    return map;
}

struct Work {
    int m, n, c;
    const Bf *x, *gate, *up;
    void* y;
    uint32_t y_type, activation;
};

/// As in src/kernels/linear_wide.rs.
static void run(const Work& w, cudaStream_t s, bool overlap) {
    LinearWideParams p = {};
    p.num_token_tiles = (w.m + 255) / 256;
    p.x_rows = ((std::min(w.m, 256) + 1) / 2 + 7) / 8 * 8;
    p.x_map = map_of(w.x, w.m, w.c, p.x_rows), p.w_map[0] = map_of(w.gate, w.n, w.c, 112), p.w_map[1] = map_of(w.up, w.n, w.c, 112);
    p.y = w.y, p.n = w.n, p.num_tokens = w.m, p.num_panels = (w.c + 63) / 64, p.y_type = w.y_type, p.activation = w.activation;
    launch(linear_wide_bf16, dim3((w.n + 223) / 224 * 2 * p.num_token_tiles), dim3(256), SHARED, s, overlap, p);
}

/// Squares of the difference and of the reference into sums[0, 1]; a warp a sample.
__global__ void compare(const Bf* x, const Bf* w, const Bf* up, const void* y, int f32, int m, int n, int c, int activation, int samples, double* sums) {
    const int warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (warp >= samples) return;
    size_t token, row;
    if (size_t(m) * n <= size_t(samples)) {
        if (warp >= m * n) return;
        token = warp / n, row = warp % n;
    } else {
        uint64_t h = (warp + 1) * 0x9E3779B97F4A7C15ull;
        h ^= h >> 31, h *= 0xBF58476D1CE4E5B9ull, h ^= h >> 29;
        token = h % m, row = (h >> 32) % n;
    }
    auto dot = [&](const Bf* w) {
        double sum = 0;
        for (int i = lane; i < c; i += 32) sum += double(to_f(w[row * c + i])) * to_f(x[token * c + i]);
        for (int o = 16; o; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
        return sum;
    };
    double own = dot(w);
    own = (activation == 0 ? own / (1 + exp(-own)) : 0.5 * own * (1 + tanh(0.7978845608028654 * (own + 0.044715 * own * own * own)))) * dot(up);
    const double got = f32 ? static_cast<const float*>(y)[token * n + row] : to_f(static_cast<const Bf*>(y)[token * n + row]);
    if (lane == 0) atomicAdd(sums, (got - own) * (got - own)), atomicAdd(sums + 1, own * own);
}
/// Counts poison (`want` 0: should be none) or its lack.
template <class T> __global__ void count_poison(const T* p, size_t n, int want, double* sum) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x)
        if ((p[i] == T(~T(0))) != bool(want)) atomicAdd(sum, 1.0);
}

static int checks = 0;
static constexpr size_t GUARD = 4096;
static void check(int m, int n, int c, uint32_t y_type, uint32_t activation) {
    static Buffer<Bf> xs(size_t(1100) * 14336), ws(size_t(2) * 14336 * 4096);
    static Buffer<uint32_t> ys(size_t(32) << 20);
    static Buffer<double> sums(3);
    static bool filled = false;
    if (!filled) xs.fill(1, 1), ws.fill(2, 0.05f), filled = true;
    const size_t element = y_type == 0 ? 4 : 2, len = size_t(m) * n;
    char* y = reinterpret_cast<char*>(ys.ptr) + GUARD * element;
    if (size_t(n) * c * 2 > ws.len || size_t(m) * c > xs.len || (len + 2 * GUARD) * element > ys.len * 4) printf("a check too large\n"), exit(1);
    CHECK(cudaMemsetAsync(ys.ptr, 0xff, (len + 2 * GUARD) * element));
    run({m, n, c, xs.ptr, ws.ptr, ws.ptr + size_t(n) * c, y, y_type, activation}, 0, false);
    sums.zero();
    const int samples = 1 << 14;
    compare<<<samples / 8, 256>>>(xs.ptr, ws.ptr, ws.ptr + size_t(n) * c, y, y_type == 0, m, n, c, activation, samples, sums.ptr);
    auto count = [&](auto* at) {
        count_poison<<<512, 256>>>(at, len, 0, sums.ptr + 2);
        count_poison<<<8, 256>>>(at - GUARD, GUARD, 1, sums.ptr + 2);
        count_poison<<<8, 256>>>(at + len, GUARD, 1, sums.ptr + 2);
    };
    if (y_type == 0) count(reinterpret_cast<const uint32_t*>(y));
    else count(reinterpret_cast<const uint16_t*>(y));
    double host[3];
    CHECK(cudaMemcpy(host, sums.ptr, sizeof host, cudaMemcpyDeviceToHost));
    // Tensor cores cut what they add; the more steps, the more.
    const double error = std::sqrt(host[0] / host[1]) + (host[2] > 0 ? 1e9 : 0), limit = y_type == 0 ? std::max(4e-6, 2.4e-9 * c) : 3e-3;
    ++checks;
    char what[200];
    snprintf(what, sizeof what, "linear_wide m %d n %d c %d y %u activation %u, wrongly written or not %.0f", m, n, c, y_type, activation, host[2]);
    if (!(error <= limit) && failures < 20) expect(what, error, limit);
    else if (!(error <= limit)) ++failures;
}
/// Rows among any others: the same bits.
static void check_bits() {
    const int n = 1000, c = 4096;
    Buffer<Bf> x(size_t(600) * c), w(size_t(2) * n * c);
    Buffer<float> y(size_t(600) * n);
    x.fill(5, 1), w.fill(6, 0.05f);
    auto rows = [&](int first, int m) {
        y.poison();
        run({m, n, c, x.ptr + size_t(first) * c, w.ptr, w.ptr + size_t(n) * c, y.ptr, 0, 0}, 0, false);
        std::vector<float> out(size_t(m) * n);
        CHECK(cudaMemcpy(out.data(), y.ptr, out.size() * 4, cudaMemcpyDeviceToHost));
        return out;
    };
    const std::vector<float> all = rows(0, 600);
    int differing = 0, compared = 0;
    for (auto [first, m] : {std::pair{0, 129}, {1, 130}, {77, 136}, {100, 192}, {200, 193}, {344, 256}, {599, 1}}) ++compared, differing += memcmp(rows(first, m).data(), all.data() + size_t(first) * n, size_t(m) * n * 4) != 0;
    printf("bits: %d of %d runs differ\n", differing, compared);
    failures += differing;
}

/// The activation as the engine has it behind cuBLASLt: 8 elements a thread.
__global__ void gate_kernel(const uint4* gate, const uint4* up, uint4* out, size_t count) {
    pagemill::release_next_kernel();
    pagemill::wait_for_previous_kernel();
    const size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (i >= count) return;
    const uint4 g = gate[i], u = up[i];
    uint4 o;
    const uint32_t gs[4] = {g.x, g.y, g.z, g.w}, us[4] = {u.x, u.y, u.z, u.w};
    uint32_t os[4];
    for (int k = 0; k < 4; ++k)
        os[k] = pagemill::Bf16::pack(pagemill::gate_activation(pagemill::Bf16::low(gs[k]), 0) * pagemill::Bf16::low(us[k]),
                                     pagemill::gate_activation(pagemill::Bf16::high(gs[k]), 0) * pagemill::Bf16::high(us[k]));
    o.x = os[0], o.y = os[1], o.z = os[2], o.w = os[3];
    out[i] = o;
}

/// Stands for the norm behind a product that left elements: as rows.cu has it, a thread block a row of 4,096 columns.
struct NormArgs {
    const bf16* x;
    float* residual;
    const float* weight;
    bf16* out;
};
__global__ void __launch_bounds__(512) norm_elements(const NormArgs args) {
    pagemill::release_next_kernel();
    const size_t start = size_t(blockIdx.x) * 4096;
    float weight[2][4], v[2][4], r[2][4], sum = 0;
    for (int i = 0; i < 2; ++i) load_f32<4>(args.weight + (threadIdx.x + i * 512) * 4, weight[i]);
    pagemill::wait_for_previous_kernel();
    for (int i = 0; i < 2; ++i) load_f32<4>(args.x + start + (threadIdx.x + i * 512) * 4, v[i]), load_f32<4>(args.residual + start + (threadIdx.x + i * 512) * 4, r[i]);
    for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < 4; ++j) v[i][j] += r[i][j], sum += v[i][j] * v[i][j];
        store_f32<4>(args.residual + start + (threadIdx.x + i * 512) * 4, v[i]);
    }
    const float inverse = 1.0f / sqrtf(block_sum(sum) / 4096 + 1e-5f);
    for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < 4; ++j) v[i][j] *= inverse * weight[i][j];
        store_f32<4>(args.out + start + (threadIdx.x + i * 512) * 4, v[i]);
    }
}

/// Recorded launches that are replayed: `us` is of one.
struct Graph {
    std::string name;
    int count;
    cudaGraphExec_t exec = nullptr;
    std::vector<float> times;
    Graph(std::string name, int count, cudaStream_t stream, const std::function<void(int)>& enqueue) : name(name), count(count) {
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        for (int i = 0; i < count; ++i) enqueue(i);
        cudaGraph_t graph;
        CHECK(cudaStreamEndCapture(stream, &graph));
        CHECK(cudaGraphInstantiate(&exec, graph, 0));
        CHECK(cudaGraphDestroy(graph));
    }
    Graph(const Graph&) = delete;
    ~Graph() { cudaGraphExecDestroy(exec); }
    double run(cudaStream_t stream, int replays) const {
        static cudaEvent_t begin = nullptr, end = nullptr;
        if (!begin) CHECK(cudaEventCreate(&begin));
        if (!end) CHECK(cudaEventCreate(&end));
        CHECK(cudaEventRecord(begin, stream));
        for (int i = 0; i < replays; ++i) CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaEventRecord(end, stream));
        CHECK(cudaEventSynchronize(end));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        return ms * 1000 / count / replays;
    }
};
/// How fast a multiprocessor's clock runs while others work: cycles and nanoseconds of ten milliseconds.
__global__ void probe(long long* out) {
    auto now = [] { unsigned long long t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; };
    const unsigned long long begin = now();
    const long long first = clock64();
    unsigned long long end = begin;
    while (end < begin + 10000000) end = now();
    out[0] = clock64() - first, out[1] = end - begin;
}
static double clock_mhz(const Graph& g, cudaStream_t stream) {
    static Buffer<long long> out(2);
    static cudaStream_t other = nullptr;
    if (!other) CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    probe<<<1, 1, 0, other>>>(out.ptr);
    const double us = g.run(stream, 1) * g.count;
    g.run(stream, int(10000 / us) + 1);
    CHECK(cudaStreamSynchronize(other));
    long long host[2];
    CHECK(cudaMemcpy(host, out.ptr, sizeof host, cudaMemcpyDeviceToHost));
    return double(host[0]) / host[1] * 1000;
}
static double median(std::vector<float> t) { return std::sort(t.begin(), t.end()), t[t.size() / 2]; }

int main(int argc, char** argv) {
    brief = argc > 1 && !strcmp(argv[1], "brief");
    CHECK(cudaFuncSetAttribute(linear_wide_bf16, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED));
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int m : {1, 64, 65, 129, 136, 192, 193, 255, 256, 257, 700})
        for (int y_type : {0, 2}) {
            if (brief && m != 129 && m != 255) continue;
            check(m, 264, 136, y_type, 0);
            if (brief) continue;
            check(m, 1000, 896, y_type, m % 2), check(m, 8, 64, y_type, 1), check(m, 4096, 72, y_type, 0), check(m, 104, 14336, y_type, 0);
        }
    if (!brief) check(256, 14336, 4096, 2, 0), check(250, 14336, 4096, 2, 1), check(1000, 14336, 4096, 2, 0), check_bits();
    printf("linear_wide: %d checks, %d failed\n", checks, failures);
    fflush(stdout);
    if (brief) return failures;

    constexpr int F = 14336, D = 4096;
    constexpr size_t LAYER = size_t(6144) * D + size_t(D) * D + size_t(3) * F * D; // q, k, v; o; gate, up, down
    Buffer<Bf> pool(8 * LAYER), x(size_t(8192) * D * 2), y(size_t(8192) * F * 2), activated(size_t(8192) * F);
    Buffer<float> residual(size_t(8192) * D), weight(D);
    pool.fill(7, 0.02f), x.fill(8, 1), y.zero(), residual.fill(10, 1), weight.fill(11, 1);
    auto gate = [&](int m) {
        const size_t packs = size_t(m) * F / 8;
        cudaLaunchConfig_t config = {};
        cudaLaunchAttribute attribute = {};
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization, attribute.val.programmaticStreamSerializationAllowed = 1;
        config.gridDim = dim3((packs + 255) / 256), config.blockDim = dim3(256), config.stream = stream, config.attrs = &attribute, config.numAttrs = 1;
        CHECK(cudaLaunchKernelEx(&config, gate_kernel, (const uint4*)y.ptr, (const uint4*)(y.ptr + size_t(m) * F), (uint4*)activated.ptr, packs));
    };
    for (int m : {136, 160, 192, 224, 256, 320, 384, 416, 448, 480, 512, 640, 768, 1024, 4096}) {
        const LtProduct qkv[3] = {{m, 4096, D, false}, {m, 1024, D, false}, {m, 1024, D, false}}, o(m, D, D, false), of_gate(m, F, D, false), down(m, D, F, false);
        // Gate, up and the activation alone, and in a layer of norm, q, k and v, (a norm for attention), o, norm, gate and up, down, norm.
        auto gate_up = [&](bool ours, const Bf* w, const Bf* in) {
            if (ours) return run({m, F, D, in, w, w + size_t(F) * D, activated.ptr, 2, 0}, stream, true);
            of_gate.run(0, w, in, y.ptr, stream), of_gate.run(0, w + size_t(F) * D, in, y.ptr + size_t(m) * F, stream);
            gate(m);
        };
        auto norm = [&](const Bf* in, Bf* out) { launch(norm_elements, dim3(m), dim3(512), 0, stream, true, NormArgs{in, residual.ptr, weight.ptr, out}); };
        std::vector<std::unique_ptr<Graph>> graphs;
        for (bool ours : {false, true}) graphs.emplace_back(new Graph("alone", 8, stream, [&](int i) { gate_up(ours, pool.ptr + i * LAYER, x.ptr); }));
        for (bool ours : {false, true})
            graphs.emplace_back(new Graph("layer", 8, stream, [&](int i) {
                const Bf* w = pool.ptr + i * LAYER;
                Bf *a = x.ptr, *b = x.ptr + size_t(m) * D;
                for (auto& part : qkv) part.run(0, w, a, y.ptr, stream), w += size_t(&part == qkv ? 4096 : 1024) * D;
                norm(y.ptr, b);
                o.run(0, w, b, y.ptr, stream), w += size_t(D) * D;
                norm(y.ptr, a);
                gate_up(ours, w, a), w += size_t(2) * F * D;
                down.run(0, w, activated.ptr, y.ptr, stream);
                norm(y.ptr, a);
            }));
        const int replays = std::max(1, 2048 / m);
        for (auto& g : graphs) g->run(stream, replays);
        for (int round = 0; round < 7; ++round)
            for (auto& g : graphs) g->times.push_back(g->run(stream, replays));
        printf("m %4d:", m);
        for (size_t i = 0; i < 4; i += 2) {
            const double theirs = median(graphs[i]->times), own = median(graphs[i + 1]->times);
            printf(" | %s: library %.1f us (%.0f MHz), ours %.1f (%.0f MHz), %.3f", graphs[i]->name.c_str(), theirs, clock_mhz(*graphs[i], stream), own, clock_mhz(*graphs[i + 1], stream), own / theirs);
        }
        printf("\n");
        fflush(stdout);
    }
    return failures;
}
