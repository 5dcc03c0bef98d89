// Checks and times every variant of linear_wide at the 8B Llama shapes, cuBLASLt's first choice beside it in the same
// process and in turns, and layers as the engine runs them.
// Build: nvcc -std=c++17 -O3 -I.. -DLINEAR_TUNE -gencode=arch=compute_90a,code=sm_90a linear_wide_bench.cu lt_product.cpp -lcublasLt
#include <cstring>
#include <memory>
#include <string>
#include "../linear_wide.cu"
#include "../planes.cu"
#include "harness.cuh"
#include "lt_product.h"
using namespace bench;
using pagemill::LinearWideParams;
using Bf = __nv_bfloat16;

struct Variant {
    const char* name;
    int columns, slots, ranks;
    bool gated, once;
    void (*kernel)(LinearWideParams);
    size_t shared;
    int features() const { return gated ? columns / 2 : columns; }
};
#undef V
#define V(N, S, R, G, O) {"n" #N " s" #S " c" #R " o" #O, N, S, R, G, O, linear_wide_n##N##_##S##_c##R##_##G##_##O, sizeof(pagemill::WideShared<pagemill::WideForm<pagemill::Bf16, N, S, R, G, O>>)},
static Variant VARIANTS[] = {
#include "linear_wide_variants.inc"
};
static int max_blocks;

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
    uint32_t y_type, activation;
    int planes = 1;
};

/// The launch's params; `grid` gets its thread blocks. As in src/kernels/linear_wide.rs.
static LinearWideParams params_of(const Variant& v, const Work& w, int& grid) {
    LinearWideParams p = {};
    p.x_rows = ((w.m + v.ranks - 1) / v.ranks + 7) / 8 * 8;
    p.x_map = map_of(w.x, w.m, w.c, p.x_rows);
    int tiles = 0;
    for (int i = 0; i < 3; ++i) {
        if (!w.n[i]) continue;
        p.w_map[i] = map_of(w.w[i], w.n[i], w.c, v.features());
        if (v.gated && i) continue;
        p.parts[i] = {w.bias, w.y[i], uint32_t(w.n[i]), uint32_t((w.n[i] + v.features() - 1) / v.features())};
        tiles += p.parts[i].num_tiles;
    }
    p.num_tokens = w.m, p.num_panels = (w.c + 63) / 64, p.y_type = w.y_type, p.activation = w.activation, p.num_cuts = w.planes;
    p.plane_stride = size_t(w.m) * w.n[0] * 4;
    p.num_groups = (tiles + v.ranks - 1) / v.ranks;
    grid = (v.once ? p.num_groups * p.num_cuts : std::min<int>(p.num_groups * p.num_cuts, max_blocks / v.ranks)) * v.ranks;
    return p;
}
static void run(const Variant& v, const LinearWideParams& p, int grid, cudaStream_t s, bool overlap) { launch(v.kernel, dim3(grid), dim3(v.once ? 256 : 384), v.shared, s, overlap, p); }

/// Squares of the difference and of the reference into sums[0, 1]; a warp a sample.
__global__ void compare(const Bf* x, const Bf* w, const Bf* up, const float* bias, const void* y, int f32, int m, int n, int c, int activation, int planes, int samples, double* sums) {
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
    if (bias) own += bias[row];
    if (up) own = (activation == 0 ? own / (1 + exp(-own)) : 0.5 * own * (1 + tanh(0.7978845608028654 * (own + 0.044715 * own * own * own)))) * dot(up);
    double got = 0;
    if (f32) for (int i = 0; i < planes; ++i) got += static_cast<const float*>(y)[(size_t(i) * m + token) * n + row];
    else got = to_f(static_cast<const Bf*>(y)[token * n + row]);
    if (lane == 0) atomicAdd(sums, (got - own) * (got - own)), atomicAdd(sums + 1, own * own);
}
/// Counts poison (`want` 0: should be none) or its lack.
template <class T> __global__ void count_poison(const T* p, size_t n, int want, double* sum) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x)
        if ((p[i] == T(~T(0))) != bool(want)) atomicAdd(sum, 1.0);
}

static int checks = 0;
static constexpr size_t GUARD = 4096;
/// Three parts where `parts`: n, n / 24 * 8 + 8 and 40 rows; with a bias where `bias`.
static void check(const Variant& v, int m, int n, int c, uint32_t y_type, bool parts, bool bias, uint32_t activation, int planes) {
    static Buffer<Bf> xs(size_t(256) * 14336), ws(size_t(3) * 14336 * 4096);
    static Buffer<float> biases(65536);
    static Buffer<uint32_t> ys(size_t(64) << 20);
    static Buffer<double> sums(3);
    static bool filled = false;
    if (!filled) xs.fill(1, 1), ws.fill(2, 0.05f), biases.fill(3, 1), filled = true;
    if (v.once) parts = false;
    const int sizes[3] = {n, v.gated ? n : parts ? n / 24 * 8 + 8 : 0, !v.gated && parts ? 40 : 0};
    Work w = {m, c, xs.ptr};
    w.y_type = y_type, w.activation = activation, w.bias = bias && !v.gated ? biases.ptr : nullptr, w.planes = planes;
    size_t w_at = 0, y_at = GUARD;
    const size_t element = y_type == 0 ? 4 : 2;
    for (int i = 0; i < 3; ++i) {
        w.n[i] = sizes[i], w.w[i] = ws.ptr + w_at, w_at += size_t(sizes[i]) * c;
        w.y[i] = reinterpret_cast<char*>(ys.ptr) + y_at * element, y_at += size_t(m) * sizes[i] * planes + GUARD;
    }
    if (w_at > ws.len || size_t(m) * c > xs.len || y_at * element > ys.len * 4) printf("a check too large\n"), exit(1);
    for (int twice = 0; twice < 2; ++twice) {
        CHECK(cudaMemsetAsync(ys.ptr, 0xff, y_at * element));
        int grid;
        const int all_blocks = max_blocks;
        if (twice) max_blocks = 14;
        LinearWideParams p = params_of(v, w, grid);
        max_blocks = all_blocks;
        run(v, p, grid, 0, false);
        double host[3], diff = 0, norm = 0, wrong = 0;
        for (int i = 0; i < 3; ++i) {
            sums.zero();
            const char* at = reinterpret_cast<char*>(w.y[i]);
            if (sizes[i] && !(v.gated && i)) {
                const int samples = 1 << 14;
                compare<<<samples / 8, 256>>>(xs.ptr, w.w[i], v.gated ? w.w[1] : nullptr, w.bias, at, y_type == 0, m, sizes[i], c, activation, planes, samples, sums.ptr);
            }
            const size_t len = size_t(m) * sizes[i] * planes, written = v.gated && i ? 1 : 0;
            auto count = [&](auto* at) {
                count_poison<<<512, 256>>>(at, len, written, sums.ptr + 2);
                count_poison<<<8, 256>>>(at - GUARD, GUARD, 1, sums.ptr + 2);
                count_poison<<<8, 256>>>(at + len, GUARD * (i == 2 ? 0 : 1), 1, sums.ptr + 2);
            };
            if (y_type == 0) count(reinterpret_cast<const uint32_t*>(at));
            else count(reinterpret_cast<const uint16_t*>(at));
            CHECK(cudaMemcpy(host, sums.ptr, sizeof host, cudaMemcpyDeviceToHost));
            diff += host[0], norm += host[1], wrong += host[2];
        }
        // Tensor cores cut what they add; the more steps, the more.
        const double error = wrong > 0 ? NAN : std::sqrt(diff / norm), limit = y_type == 0 ? (v.gated ? 2.4 : 1.2) * std::max(3e-6, 4e-9 * c / planes) : 3e-3;
        ++checks;
        if (error <= limit) continue;
        char what[200];
        snprintf(what, sizeof what, "linear_wide%s %s m %d n %d c %d y %u parts %d bias %d planes %d run %d, wrongly written or not %.0f", v.gated ? " gated" : "", v.name, m, n, c, y_type, parts, bias, planes, twice, wrong);
        if (failures < 20) expect(what, std::sqrt(diff / norm) + (wrong > 0 ? 1e9 : 0), limit);
        else ++failures;
    }
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

struct Shape { const char* name; int n[3], c; bool gated; std::vector<int> planes; };
static const Shape SHAPES[] = {{"qkv", {4096, 1024, 1024}, 4096, false, {1}}, {"o", {4096, 0, 0}, 4096, false, {1, 2, 4, 5, 6, 7}}, {"gate_up", {14336, 14336, 0}, 4096, true, {1}},
                               {"down", {4096, 0, 0}, 14336, false, {2, 4, 5, 6, 7}}, {"head", {128256, 0, 0}, 4096, false, {1}}};

int main(int argc, char** argv) {
    brief = argc > 1 && !strcmp(argv[1], "brief");
    const bool one = argc > 1 && !strcmp(argv[1], "one"); // for ncu: a launch of each
    const bool timed = argc > 1 && !strcmp(argv[1], "time");
    cudaDeviceProp prop;
    CHECK(cudaGetDeviceProperties(&prop, 0));
    max_blocks = prop.multiProcessorCount;
    for (const Variant& v : VARIANTS) CHECK(cudaFuncSetAttribute(v.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, v.shared));
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    if (!one && !timed) {
        for (const Variant& v : VARIANTS) {
            if (brief) {
                check(v, 129, 264, 136, 2, true, true, 0, 1);
                continue;
            }
            for (int m : {1, 64, 65, 129, 192, 193, 255, 256}) {
                check(v, m, 1000, 896, 2, true, true, m % 2, 1), check(v, m, 520, 136, 0, true, true, 0, 1);
                check(v, m, 4096, 64, 2, false, false, 0, 1);
                if (!v.gated) check(v, m, 1000, 904, 0, false, true, 0, 3);
            }
            check(v, 200, 4096, 4096, 2, true, false, 0, 1), check(v, 256, 14336, 4096, 2, false, false, 0, 1);
            if (!v.gated) check(v, 250, 4096, 14336, 0, false, true, 0, 6), check(v, 250, 4096, 4096, 0, false, true, 0, 4);
        }
        printf("linear_wide: %d checks, %d failed\n", checks, failures);
        fflush(stdout);
        if (brief) return failures;
    }
    const size_t POOL = size_t(4) << 30;
    Buffer<Bf> pool(POOL / 2), x(size_t(256) * 14336), y(size_t(256) * 128256 * 2), activated(size_t(256) * 14336);
    Buffer<float> planes(size_t(8) * 256 * 4096), residual(256 * 4096), weight(4096);
    pool.fill(7, 0.02f), x.fill(8, 1), y.zero(), planes.fill(9, 1), residual.fill(10, 1), weight.fill(11, 1);
    auto elements_of = [](const Shape& s) { return size_t(s.n[0] + s.n[1] + s.n[2]) * s.c; };
    auto ours = [&](const Variant& v, const Shape& s, int m, const Bf* at, const void* input, void* out, int count, bool f32) {
        Work w = {m, s.c, static_cast<const Bf*>(input)};
        for (int i = 0; i < 3; ++i) w.w[i] = at, at += size_t(s.n[i]) * s.c, w.n[i] = s.n[i], w.y[i] = static_cast<Bf*>(out) + size_t(i) * 4096 * 256;
        w.bias = nullptr, w.y_type = f32 ? 0 : 2, w.activation = 0, w.planes = count;
        int grid;
        LinearWideParams p = params_of(v, w, grid);
        run(v, p, grid, stream, true);
    };
    auto gate = [&](int m, const void* g, const void* u, void* out) {
        const size_t packs = size_t(m) * 14336 / 8;
        cudaLaunchConfig_t config = {};
        cudaLaunchAttribute attribute = {};
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization, attribute.val.programmaticStreamSerializationAllowed = 1;
        config.gridDim = dim3((packs + 255) / 256), config.blockDim = dim3(256), config.stream = stream, config.attrs = &attribute, config.numAttrs = 1;
        CHECK(cudaLaunchKernelEx(&config, gate_kernel, (const uint4*)g, (const uint4*)u, (uint4*)out, packs));
    };
    if (one) {
        for (const Variant& v : VARIANTS) {
            ours(v, SHAPES[v.gated ? 2 : 3], 256, pool.ptr, x.ptr, v.gated ? (void*)y.ptr : (void*)planes.ptr, v.gated ? 1 : 4, !v.gated);
            CHECK(cudaDeviceSynchronize());
        }
        LtProduct(256, 14336, 4096, false).run(0, pool.ptr, x.ptr, y.ptr, stream);
        CHECK(cudaDeviceSynchronize());
        return 0;
    }
    struct Choice { const Variant* v = nullptr; int planes = 1; double us = 1e30; };
    for (int m : {256, 192, 136}) {
        if (timed && m != 256) continue;
        Choice best[5];
        std::vector<Choice> all_gated, all_o, all_down;
        std::vector<std::unique_ptr<LtProduct>> products[5];
        for (int nth = 0; nth < 5; ++nth) {
            const Shape& s = SHAPES[nth];
            const bool is_head = nth == 4;
            for (int part = 0; part < 3 && s.n[part]; ++part) products[nth].emplace_back(new LtProduct(m, s.n[part], s.c, is_head));
            if (is_head && m != 256) continue;
            const size_t elements = elements_of(s);
            const int count = std::max<int>(1, std::min<double>(16.0, double(POOL / 2 / elements)));
            std::vector<std::unique_ptr<Graph>> graphs;
            std::vector<Choice> choices(1);
            graphs.emplace_back(new Graph("lt", count, stream, [&](int i) {
                const Bf* at = pool.ptr + elements * i;
                for (size_t part = 0; part < products[nth].size(); ++part) products[nth][part]->run(0, at, x.ptr, y.ptr + part * 256 * 14336, stream), at += size_t(s.n[part]) * s.c;
                if (s.gated) gate(m, y.ptr, y.ptr + 256 * 14336, activated.ptr);
            }));
            for (const Variant& v : VARIANTS)
                for (int cut : s.planes) {
                    if (v.gated != s.gated || (v.once && s.n[1] && !s.gated)) continue;
                    graphs.emplace_back(new Graph(std::string(v.name) + " p" + std::to_string(cut), count, stream, [&](int i) {
                        ours(v, s, m, pool.ptr + elements * i, x.ptr, cut > 1 ? (void*)planes.ptr : (void*)y.ptr, cut, cut > 1 || is_head);
                    }));
                    choices.push_back({&v, cut});
                }
            const double flops = 2.0 * m * elements;
            const int replays = std::max(1, std::min(20, int(1.5e12 / flops / count)));
            for (auto& g : graphs) g->run(stream, replays);
            for (int round = 0; round < 5; ++round)
                for (auto& g : graphs) g->times.push_back(g->run(stream, replays));
            printf("%-7s m %4d:", s.name, m);
            for (size_t i = 0; i < graphs.size(); ++i) {
                const double us = median(graphs[i]->times);
                printf(" | %s %.1f", graphs[i]->name.c_str(), us);
                if (nth == 2 || nth == 0) printf(" (%.0f MHz)", clock_mhz(*graphs[i], stream));
                if (i) choices[i].us = us;
                if (i && us < best[nth].us) best[nth] = choices[i];
            }
            printf("\n");
            fflush(stdout);
            std::sort(choices.begin() + 1, choices.end(), [](auto& a, auto& b) { return a.us < b.us; });
            for (size_t i = 1; i < choices.size() && i < 5; ++i) if (nth > 0 && nth < 4) (nth == 2 ? all_gated : nth == 1 ? all_o : all_down).push_back(choices[i]);
        }
        // Layers: norm, q k v, (a small kernel for attention), o, norm, gate and up, down, norm; by the library where there is no choice.
        auto layer = [&](std::string name, Choice qkv, Choice o, Choice gate_up, Choice down) {
            return std::unique_ptr<Graph>(new Graph(name, 8, stream, [&, qkv, o, gate_up, down](int i) {
                const Bf* at = pool.ptr + size_t(i) * 218103808;
                auto product = [&](int nth, const Choice& of, const void* input, void* out) {
                    const Shape& s = SHAPES[nth];
                    if (of.v) ours(*of.v, s, m, at, input, of.planes > 1 ? (void*)planes.ptr : out, of.planes, of.planes > 1);
                    const Bf* w = at;
                    for (size_t part = 0; part < products[nth].size(); ++part) {
                        if (!of.v) products[nth][part]->run(0, w, input, static_cast<Bf*>(out) + part * 256 * 14336, stream);
                        w += size_t(s.n[part]) * s.c;
                    }
                    at = w;
                };
                auto norm = [&](const Choice& of, const void* in, void* out) {
                    if (of.v && of.planes > 1) launch(norm_planes_bf16, dim3(m * PLANES_CLUSTER), dim3(512), 0, stream, true, NormPlanesArgs{planes.ptr, residual.ptr, weight.ptr, out, uint64_t(m) * 4096, uint32_t(of.planes), 4096, 1e-5f});
                    else launch(norm_elements, dim3(m), dim3(512), 0, stream, true, NormArgs{(const bf16*)in, residual.ptr, weight.ptr, (bf16*)out});
                };
                Bf *a = x.ptr, *b = x.ptr + size_t(256) * 4096, *c = y.ptr;
                product(0, qkv, a, c);
                launch(norm_elements, dim3(m), dim3(512), 0, stream, true, NormArgs{(const bf16*)c, residual.ptr, weight.ptr, (bf16*)b});
                product(1, o, b, c);
                norm(o, c, a);
                product(2, gate_up, a, c);
                if (!gate_up.v) gate(m, c, c + 256 * 14336, activated.ptr);
                product(3, down, gate_up.v ? c : activated.ptr, y.ptr + size_t(256) * 40000);
                norm(down, y.ptr + size_t(256) * 40000, a);
            }));
        };
        std::vector<std::unique_ptr<Graph>> layers;
        const Choice none;
        layers.push_back(layer("lt", none, none, none, none));
        layers.push_back(layer("ours", best[0], best[1], best[2], best[3]));
        layers.push_back(layer("gate_up, down", none, none, best[2], best[3]));
        layers.push_back(layer("o, gate_up, down", none, best[1], best[2], best[3]));
        for (auto& c : all_gated) layers.push_back(layer(std::string("gate_up ") + c.v->name, none, none, c, none));
        for (auto& c : all_o) layers.push_back(layer(std::string("o ") + c.v->name + " p" + std::to_string(c.planes), none, c, none, none));
        for (auto& c : all_down) layers.push_back(layer(std::string("down ") + c.v->name + " p" + std::to_string(c.planes), none, none, none, c));
        for (auto& g : layers) g->run(stream, 4);
        for (int round = 0; round < 7; ++round)
            for (auto& g : layers) g->times.push_back(g->run(stream, 6));
        for (auto& g : layers) printf("layer m %d, %s: %.1f us (%.0f MHz)\n", m, g->name.c_str(), median(g->times), clock_mhz(*g, stream));
        fflush(stdout);
    }
    return failures;
}
