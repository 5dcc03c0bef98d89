// Checks and times every variant of linear_big at the 8B Llama shapes, cuBLASLt beside it in the same process: its first
// choice, and the best of its first eight. Ours and theirs take turns under load, since the chip's power limits both.
// Build: nvcc -std=c++17 -O3 -I.. -DLINEAR_TUNE -gencode=arch=compute_90a,code=sm_90a linear_big_bench.cu lt_product.cpp -lcublasLt
#include <cstring>
#include <memory>
#include <string>
#include "../linear_big.cu"
#include "harness.cuh"
#include "lt_product.h"
using namespace bench;
using pagemill::LinearBigParams;
using Bf = __nv_bfloat16;

struct Variant {
    const char* name;
    int columns, stages, token_ranks, feature_ranks;
    bool gated;
    void (*kernel)(LinearBigParams);
    int max_clusters;
    int ranks() const { return token_ranks * feature_ranks; }
    size_t shared() const { return size_t(stages) * (16384 + columns * 128) + 32768 + stages * 16 + 1024; }
};
#undef V
#define V(N, S, TR, FR, G) {"n" #N " s" #S " c" #TR "x" #FR, N, S, TR, FR, G, linear_big_n##N##_s##S##_##TR##FR##_##G, 0},
static Variant VARIANTS[] = {
#include "linear_big_variants.inc"
};

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
    int m, c;
    const Bf *x, *w[3];
    int n[3];
    const float* bias;
    void* y[3];
    uint32_t y_type, activation, strip;
};

/// The launch's params; `grid` gets its thread blocks. As in src/kernels/linear_big.rs.
static LinearBigParams params_of(const Variant& v, const Work& w, int& grid) {
    LinearBigParams p = {};
    p.x_map = map_of(w.x, w.m, w.c, 128 / v.feature_ranks);
    const int features = v.gated ? v.columns / 2 : v.columns;
    int tiles = 0;
    for (int i = 0; i < 3; ++i) {
        if (!w.n[i]) continue;
        p.w_map[i] = map_of(w.w[i], w.n[i], w.c, v.columns / 2);
        if (v.gated && i) continue;
        if (w.y_type == 2) p.y_map[i] = map_of(w.y[i], w.m, w.n[i], 64);
        p.parts[i] = {w.bias, w.y[i], uint32_t(w.n[i]), uint32_t((w.n[i] + features - 1) / features)};
        tiles += p.parts[i].num_tiles;
    }
    p.num_tokens = w.m, p.num_panels = (w.c + 63) / 64, p.strip = w.strip, p.y_type = w.y_type, p.activation = w.activation;
    p.num_feature_groups = (tiles + v.feature_ranks - 1) / v.feature_ranks;
    const int token_groups = (w.m + 128 * v.token_ranks - 1) / (128 * v.token_ranks);
    grid = v.ranks() * std::min<int>(p.num_feature_groups * token_groups, v.max_clusters);
    return p;
}
static void run(const Variant& v, const LinearBigParams& p, int grid, cudaStream_t s, bool overlap) { launch(v.kernel, dim3(grid), dim3(384), v.shared(), s, overlap, p); }

__device__ float gate_of(float x, int activation) { return activation == 0 ? x / (1 + expf(-x)) : 0.5f * x * (1 + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x))); }

/// Squares of the difference and of the reference into sums[0, 1], elements that were not written into sums[2]; a warp a sample.
__global__ void compare(const Bf* x, const Bf* w, const Bf* up, const float* bias, const void* y, int f32, int m, int n, int c, int activation, int samples, double* sums) {
    const int warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (warp >= samples) return;
    size_t token, row;
    if (size_t(m) * n <= size_t(samples)) {
        if (warp >= m * n) return;
        token = warp / n, row = warp % n;
    } else if (warp < 256) {
        token = warp % 16 < 8 ? m - 1 - warp % 8 : warp % 8, row = warp / 16 < 8 ? n - 1 - warp / 16 : warp / 16 - 8;
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
    if (bias) own += bias[row];
    if (up) own = (activation == 0 ? own / (1 + exp(-own)) : 0.5 * own * (1 + tanh(0.7978845608028654 * (own + 0.044715 * own * own * own)))) * dot(up);
    const double got = f32 ? static_cast<const float*>(y)[token * n + row] : to_f(static_cast<const Bf*>(y)[token * n + row]);
    if (lane == 0) atomicAdd(sums, (got - own) * (got - own)), atomicAdd(sums + 1, own * own);
}
/// Counts poison (`want` 0: should be none) or its lack.
template <class T> __global__ void count_poison(const T* p, size_t n, int want, double* sum) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x)
        if ((p[i] == T(~T(0))) != bool(want)) atomicAdd(sum, 1.0);
}

/// How far cuBLASLt's f32 sums are off, on the same samples.
static double library_error(const Buffer<Bf>& x, const Bf* w, int m, int n, int c) {
    Buffer<float> y(size_t(m) * n);
    Buffer<double> sums(3);
    sums.zero();
    LtProduct(m, n, c, true).run(0, w, x.ptr, y.ptr, 0);
    compare<<<(1 << 14) / 8, 256>>>(x.ptr, w, nullptr, nullptr, y.ptr, 1, m, n, c, 0, 1 << 14, sums.ptr);
    double host[2];
    CHECK(cudaMemcpy(host, sums.ptr, sizeof host, cudaMemcpyDeviceToHost));
    return std::sqrt(host[0] / host[1]);
}

static int checks = 0;
static constexpr size_t GUARD = 4096;
/// Three parts where `parts`: n, n / 24 * 8 + 8 and 40 rows; with a bias where `bias`.
static void check(const Variant& v, int m, int n, int c, uint32_t y_type, bool parts, bool bias, uint32_t activation, uint32_t strip) {
    static Buffer<Bf> xs(size_t(8192) * 14336 / 2), ws(size_t(3) * 14336 * 4096);
    static Buffer<float> biases(65536);
    static Buffer<uint32_t> ys(size_t(64) << 20);
    static Buffer<double> sums(3);
    static bool filled = false;
    if (!filled) xs.fill(1, 1), ws.fill(2, 0.05f), biases.fill(3, 1), filled = true;
    const int sizes[3] = {n, v.gated ? n : parts ? n / 24 * 8 + 8 : 0, !v.gated && parts ? 40 : 0};
    Work w = {m, c, xs.ptr};
    w.y_type = y_type, w.activation = activation, w.strip = strip, w.bias = bias && !v.gated ? biases.ptr : nullptr;
    size_t w_at = 0, y_at = GUARD;
    const size_t element = y_type == 0 ? 4 : 2;
    for (int i = 0; i < 3; ++i) {
        w.n[i] = sizes[i], w.w[i] = ws.ptr + w_at, w_at += size_t(sizes[i]) * c;
        w.y[i] = reinterpret_cast<char*>(ys.ptr) + y_at * element, y_at += size_t(m) * sizes[i] + GUARD;
    }
    if (w_at > ws.len || size_t(m) * c > xs.len || y_at * element > ys.len * 4) printf("a check too large\n"), exit(1);
    for (int twice = 0; twice < 2; ++twice) {
        CHECK(cudaMemsetAsync(ys.ptr, 0xff, y_at * element));
        int grid;
        Variant use = v;
        if (twice) use.max_clusters = std::min(use.max_clusters, 7);
        LinearBigParams p = params_of(use, w, grid);
        run(use, p, grid, 0, false);
        double host[3], diff = 0, norm = 0, wrong = 0;
        for (int i = 0; i < 3; ++i) {
            sums.zero();
            const char* at = reinterpret_cast<char*>(w.y[i]);
            if (sizes[i] && !(v.gated && i)) {
                const int samples = 1 << 14;
                compare<<<samples / 8, 256>>>(xs.ptr, w.w[i], v.gated ? w.w[1] : nullptr, w.bias, at, y_type == 0, m, sizes[i], c, activation, samples, sums.ptr);
            }
            const size_t len = size_t(m) * sizes[i], written = v.gated && i ? 1 : 0;
            if (y_type == 0) {
                count_poison<<<512, 256>>>(reinterpret_cast<const uint32_t*>(at), len, written, sums.ptr + 2);
                count_poison<<<8, 256>>>(reinterpret_cast<const uint32_t*>(at) - GUARD, GUARD, 1, sums.ptr + 2);
                count_poison<<<8, 256>>>(reinterpret_cast<const uint32_t*>(at) + len, GUARD * (i == 2 ? 0 : 1), 1, sums.ptr + 2);
            } else {
                count_poison<<<512, 256>>>(reinterpret_cast<const uint16_t*>(at), len, written, sums.ptr + 2);
                count_poison<<<8, 256>>>(reinterpret_cast<const uint16_t*>(at) - GUARD, GUARD, 1, sums.ptr + 2);
                count_poison<<<8, 256>>>(reinterpret_cast<const uint16_t*>(at) + len, GUARD * (i == 2 ? 0 : 1), 1, sums.ptr + 2);
            }
            CHECK(cudaMemcpy(host, sums.ptr, sizeof host, cudaMemcpyDeviceToHost));
            diff += host[0], norm += host[1], wrong += host[2];
        }
        // Tensor cores cut what they add; the more steps, the more. So f32 is held to what the library's sums are off.
        const double error = wrong > 0 ? NAN : std::sqrt(diff / norm), limit = y_type == 0 ? std::max(3e-6, (v.gated ? 2.4 : 1.2) * library_error(xs, w.w[0], m, n, c)) : 3e-3;
        ++checks;
        if (error <= limit) continue;
        char what[200];
        snprintf(what, sizeof what, "linear_big%s %s m %d n %d c %d y %u parts %d bias %d run %d, wrongly written or not %.0f", v.gated ? " gated" : "", v.name, m, n, c, y_type, parts, bias, twice, wrong);
        if (failures < 20) expect(what, std::sqrt(diff / norm) + (wrong > 0 ? 1e9 : 0), limit);
        else ++failures;
    }
}

/// The activation as the engine has it behind cuBLASLt: 8 elements a thread.
__global__ void gate_kernel(const uint4* gate, const uint4* up, uint4* out, size_t count) {
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

int main(int argc, char** argv) {
    const bool few = argc > 1 && !strcmp(argv[1], "few"); // q, k and v of a decode step
    brief = argc > 1 && !few;
    cudaDeviceProp prop;
    CHECK(cudaGetDeviceProperties(&prop, 0));
    for (Variant& v : VARIANTS) {
        CHECK(cudaFuncSetAttribute(v.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, v.shared()));
        cudaLaunchConfig_t config = {};
        cudaLaunchAttribute attribute = {};
        attribute.id = cudaLaunchAttributeClusterDimension, attribute.val.clusterDim.x = v.ranks(), attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
        config.gridDim = dim3(prop.multiProcessorCount / v.ranks() * v.ranks()), config.blockDim = dim3(384), config.dynamicSmemBytes = v.shared();
        config.attrs = &attribute, config.numAttrs = 1;
        CHECK(cudaOccupancyMaxActiveClusters(&v.max_clusters, v.kernel, &config));
        printf("%s%s: %d clusters\n", v.name, v.gated ? " gated" : "", v.max_clusters);
        if (v.max_clusters < 1) return 1;
    }
    for (const Variant& v : VARIANTS) {
        if (brief) {
            check(v, 129, 264, 136, 2, true, true, 0, 2);
            continue;
        }
        for (int m : {1, 129, 255, 256, 300, 1000, 4097}) {
            check(v, m, 1000, 896, 2, true, true, m % 2, 4), check(v, m, 520, 136, 0, true, true, 0, 3);
            check(v, m, 4096, 64, 2, false, false, 0, 8);
        }
        check(v, 700, 4096, 4096, 2, true, false, 0, 2), check(v, 2500, 2056, 4096, 0, false, true, 0, 8), check(v, 300, 1024, 14336, 2, true, true, 0, 1);
    }
    printf("linear_big: %d checks, %d failed\n", checks, failures);
    fflush(stdout);
    if (brief) return failures;

    const size_t POOL = size_t(3) << 30;
    Buffer<Bf> pool(POOL / 2), x(size_t(8192) * 14336), y(size_t(8192) * 14336 * 2), activated(size_t(8192) * 14336);
    pool.fill(7, 0.02f), x.fill(8, 1), y.zero();
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    struct Shape { const char* name; int n[3], c; bool gated; } shapes[] = {
        {"qkv", {4096, 1024, 1024}, 4096, false}, {"o", {4096, 0, 0}, 4096, false}, {"gate_up", {14336, 14336, 0}, 4096, true}, {"down", {4096, 0, 0}, 14336, false}, {"head", {128256, 0, 0}, 4096, false}};
    for (auto& s : shapes)
        for (int m : {136, 160, 192, 224, 256, 384, 512, 1024, 2048, 4096, 8192}) {
            if (few && (m > 256 || s.n[1] != 1024)) continue;
            const bool is_head = s.n[0] > 100000;
            if (is_head && m > 512) continue;
            const size_t elements = size_t(s.n[0] + s.n[1] + s.n[2]) * s.c;
            const double flops = 2.0 * m * elements;
            const int count = std::max<int>(1, std::min<double>({16.0, double(POOL / 2 / elements), 2e12 / flops}));
            std::vector<std::unique_ptr<Graph>> graphs;
            auto weight = [&](int nth, int part) { return pool.ptr + elements * nth + size_t(part > 0 ? s.n[0] : 0) * s.c + size_t(part > 1 ? s.n[1] : 0) * s.c; };
            auto output = [&](int part) { return y.ptr + size_t(m) * ((part > 0 ? s.n[0] : 0) + (part > 1 ? s.n[1] : 0)) * (is_head ? 2 : 1); };
            // cuBLASLt: the first and the best of each product.
            std::vector<std::unique_ptr<LtProduct>> products;
            std::vector<int> best;
            for (int part = 0; part < 3 && s.n[part]; ++part) {
                products.emplace_back(new LtProduct(m, s.n[part], s.c, is_head));
                int choice = 0;
                double least = 1e30;
                for (int a = 0; a < products[part]->count(); ++a) {
                    bool fine = true;
                    Graph g("", count, stream, [&](int nth) { fine = fine && products[part]->run(a, weight(nth, part), x.ptr, output(part), stream); });
                    if (!fine) continue;
                    const int replays = std::max(1, int(4e12 / (2.0 * m * s.n[part] * s.c) / count));
                    g.run(stream, 1);
                    const double us = g.run(stream, std::min(replays, 60));
                    if (us < least) least = us, choice = a;
                }
                best.push_back(choice);
            }
            auto theirs = [&](bool of_best) {
                graphs.emplace_back(new Graph(of_best ? "lt best" : "lt first", count, stream, [&](int nth) {
                    for (size_t part = 0; part < products.size(); ++part) products[part]->run(of_best ? best[part] : 0, weight(nth, part), x.ptr, output(part), stream);
                    const size_t packs = size_t(m) * s.n[0] / 8;
                    if (s.gated) gate_kernel<<<(packs + 255) / 256, 256, 0, stream>>>((uint4*)output(0), (uint4*)output(1), (uint4*)activated.ptr, packs);
                }));
            };
            theirs(false), theirs(true);
            for (const Variant& v : VARIANTS) {
                if (v.gated != s.gated) continue;
                for (int strip : {2, 4, 8, 16}) {
                    const int groups = (m + 128 * v.token_ranks - 1) / (128 * v.token_ranks);
                    if (strip > 2 && strip / 2 >= groups) continue;
                    if (m > 512 && (strip == 2 || (v.columns != 256 && strip != 8))) continue;
                    graphs.emplace_back(new Graph(std::string(v.name) + " strip " + std::to_string(strip), count, stream, [&](int nth) {
                        Work w = {m, s.c, x.ptr};
                        for (int part = 0; part < 3; ++part) w.w[part] = weight(nth, part), w.n[part] = s.n[part], w.y[part] = output(part);
                        w.bias = nullptr, w.y_type = is_head ? 0 : 2, w.activation = 0, w.strip = strip;
                        int grid;
                        LinearBigParams p = params_of(v, w, grid);
                        run(v, p, grid, stream, true);
                    }));
                }
            }
            // Under load before the first figure; then in turns.
            const int replays = std::max(1, std::min(40, int(3e12 / flops / count)));
            double warm = 0;
            for (int i = 0; warm < 60000 && i < 400; ++i) warm += graphs[i % graphs.size()]->run(stream, replays) * count * replays;
            for (int round = 0; round < 5; ++round)
                for (auto& g : graphs) g->times.push_back(g->run(stream, replays));
            printf("%-7s m %4d:", s.name, m);
            auto median = [](std::vector<float>& t) { return std::sort(t.begin(), t.end()), t[t.size() / 2]; };
            for (auto& g : graphs) g->times[0] = median(g->times);
            Graph* ours = nullptr;
            for (size_t i = 2; i < graphs.size(); ++i)
                if (!ours || graphs[i]->times[0] < ours->times[0]) ours = graphs[i].get();
            printf(" OURS/FIRST %.3f", ours->times[0] / graphs[0]->times[0]);
            std::sort(graphs.begin() + 2, graphs.end(), [](auto& a, auto& b) { return a->times[0] < b->times[0]; });
            for (auto& g : graphs) printf(" | %s %.1f us %.0f T", g->name.c_str(), g->times[0], flops / g->times[0] / 1e6);
            printf("\n");
            fflush(stdout);
        }
    return failures;
}
