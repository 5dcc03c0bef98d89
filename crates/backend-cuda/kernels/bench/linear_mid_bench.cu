// Checks and times every variant of linear_mid at the 8B Llama shapes. cuBLASLt beside it: cublas_lt_bench.cu.
// Build: nvcc -std=c++17 -O3 -I.. -DLINEAR_TUNE -gencode=arch=compute_90a,code=sm_90a linear_mid_bench.cu
#include <cstring>
#include "../linear_mid.cu"
#include "harness.cuh"
using namespace bench;
using pagemill::LinearMidParams;
using Bf = __nv_bfloat16;

struct Variant {
    const char* name;
    int columns, stages, x_slots, ranks;
    bool gated;
    void (*kernel)(LinearMidParams);
};
#undef V
#define V(M, S, X, R)                                                                         \
    {"m" #M " s" #S " x" #X " r" #R, M, S, X, R, false, linear_mid_m##M##_s##S##_x##X##_r##R}, \
    {"m" #M " s" #S " x" #X " r" #R, M, S, X, R, true, linear_mid_gated_m##M##_s##S##_x##X##_r##R},
static const Variant VARIANTS[] = {
#include "linear_mid_variants.inc"
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
    uint32_t y_type, activation;
};
static int max_clusters[5]; // by ranks

/// The launch's params; `grid` gets its thread blocks. As in src/kernels/linear_mid.rs.
static LinearMidParams params_of(const Variant& v, const Work& w, int& grid) {
    LinearMidParams p = {};
    p.x_map = map_of(w.x, w.m, w.c, v.columns);
    for (int i = 0; i < 3; ++i) {
        p.w_map[i] = map_of(w.w[i] ? w.w[i] : w.w[0], w.n[i] ? w.n[i] : w.n[0], w.c, 64);
        if (!w.n[i] || (v.gated && i)) continue;
        p.parts[i] = {w.bias, w.y[i], uint32_t(w.n[i]), uint32_t(w.n[i])};
        p.num_slabs += (w.n[i] + 63) / 64;
    }
    p.m = w.m, p.num_panels = (w.c + 63) / 64, p.y_type = w.y_type, p.activation = w.activation;
    grid = v.ranks * std::min<int>(p.num_slabs, max_clusters[v.ranks]);
    return p;
}
static size_t shared_of(const Variant& v) {
    return size_t(v.stages) * 16384 + v.x_slots * v.columns * 128 + v.columns * 512 + (2 * v.stages + v.x_slots + 2) * 8 + 1024;
}
static void run(const Variant& v, const LinearMidParams& p, int grid, cudaStream_t s, bool overlap) { launch(v.kernel, dim3(grid), dim3(288), shared_of(v), s, overlap, p); }

__global__ void reference(const Bf* x, const Bf* w, const Bf* up, const float* bias, float* y, int n, int c, int activation) {
    int row = blockIdx.x, token = blockIdx.y;
    auto dot = [&](const Bf* w) {
        double sum = 0;
        for (int i = threadIdx.x; i < c; i += 32) sum += double(to_f(w[size_t(row) * c + i])) * to_f(x[size_t(token) * c + i]);
        for (int o = 16; o; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
        return sum;
    };
    double own = dot(w);
    if (bias) own += bias[row];
    if (up) own = (activation == 0 ? own / (1 + exp(-own)) : 0.5 * own * (1 + tanh(0.7978845608028654 * (own + 0.044715 * own * own * own)))) * dot(up);
    if (threadIdx.x == 0) y[size_t(token) * n + row] = own;
}

static int checks = 0;
/// Three parts where `parts`: n, n / 3 + 1 and 40 rows.
static void check(const Variant& v, int m, int n, int c, uint32_t y_type, bool parts, uint32_t activation) {
    Work w = {m, c};
    int sizes[3] = {n, v.gated ? n : parts ? n / 3 + 1 : 0, !v.gated && parts ? 40 : 0};
    Buffer<Bf> x(size_t(m) * c), w0(size_t(n) * c), w1(size_t(n) * c), w2(size_t(n + 40) * c);
    Buffer<float> bias(n + 40);
    uint64_t seed = m * 1000003 + n * 101 + c;
    x.fill(seed, 1), w0.fill(seed + 1, 0.05f), w1.fill(seed + 2, 0.05f), w2.fill(seed + 4, 0.05f), bias.fill(seed + 3, 1);
    w.x = x.ptr, w.w[0] = w0.ptr, w.w[1] = w1.ptr, w.w[2] = w2.ptr, w.y_type = y_type, w.activation = activation;
    w.bias = v.gated ? nullptr : bias.ptr;
    std::vector<Buffer<float>> y32, ref;
    std::vector<Buffer<Bf>> y16;
    for (int i = 0; i < 3; ++i) {
        w.n[i] = sizes[i];
        y32.emplace_back(size_t(m) * sizes[i]), ref.emplace_back(size_t(m) * sizes[i]), y16.emplace_back(size_t(m) * sizes[i]);
        w.y[i] = y_type == 0 ? (void*)y32[i].ptr : (void*)y16[i].ptr;
    }
    int grid;
    LinearMidParams p = params_of(v, w, grid);
    for (int twice = 0; twice < 2; ++twice) {
        run(v, p, grid, 0, false);
        CHECK(cudaDeviceSynchronize());
        for (int i = 0; i < (v.gated ? 1 : 3); ++i) {
            if (!sizes[i]) continue;
            reference<<<dim3(sizes[i], m), 32>>>(x.ptr, w.w[i], v.gated ? w1.ptr : nullptr, w.bias, ref[i].ptr, sizes[i], c, activation);
            double error = relative_error(y_type == 0 ? y32[i].floats() : y16[i].floats(), ref[i].floats()), limit = y_type == 0 ? 2e-6 : 3e-3;
            char what[160];
            snprintf(what, sizeof what, "linear_mid%s %s m %d n %d c %d y %u part %d run %d", v.gated ? " gated" : "", v.name, m, n, c, y_type, i, twice);
            ++checks;
            if (!(error <= limit) && failures < 20) expect(what, error, limit);
            else if (!(error <= limit)) ++failures;
            y32[i].poison(), y16[i].poison();
        }
    }
}

/// Rows of all variants and numbers of tokens: the same bits.
static void check_bits(bool gated, int ranks, int n, int c) {
    Buffer<Bf> x(size_t(256) * c), w0(size_t(n) * c), w1(size_t(n) * c);
    Buffer<float> y(size_t(256) * n);
    x.fill(5, 1), w0.fill(6, 0.05f), w1.fill(7, 0.05f);
    std::vector<float> want;
    int differing = 0, compared = 0;
    for (const Variant& v : VARIANTS)
        for (int m : {128, 100, 64, 33, 16, 7, 1}) {
            if (v.gated != gated || v.ranks != ranks || m > v.columns) continue;
            const int all_clusters = max_clusters[v.ranks];
            if (m == 33 || m == 1) max_clusters[v.ranks] = 7;
            Work w = {m, c, x.ptr, {w0.ptr, gated ? w1.ptr : nullptr, nullptr}, {n, gated ? n : 0, 0}, nullptr, {y.ptr, nullptr, nullptr}, 0, 0};
            int grid;
            LinearMidParams p = params_of(v, w, grid);
            max_clusters[v.ranks] = all_clusters;
            y.poison();
            run(v, p, grid, 0, false);
            CHECK(cudaDeviceSynchronize());
            std::vector<float> got(size_t(m) * n);
            CHECK(cudaMemcpy(got.data(), y.ptr, got.size() * 4, cudaMemcpyDeviceToHost));
            if (want.size() < got.size()) {
                if (!want.empty() && memcmp(want.data(), got.data(), want.size() * 4)) ++differing;
                want = got;
            } else if (memcmp(want.data(), got.data(), got.size() * 4)) ++differing;
            ++compared;
        }
    printf("bits, gated %d, ranks %d, n %d, c %d: %d of %d runs differ\n", gated, ranks, n, c, differing, compared);
    failures += differing;
}

/// Stands for the norm between two products.
__global__ void between(uint4* to, const uint4* from, int count) {
    pagemill::wait_for_previous_kernel();
    pagemill::release_next_kernel();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = from[i];
}

int main(int argc, char**) {
    brief = argc > 1;
    cudaDeviceProp prop;
    CHECK(cudaGetDeviceProperties(&prop, 0));
    for (const Variant& v : VARIANTS) CHECK(cudaFuncSetAttribute(v.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_of(v)));
    for (int i : {0, 2}) {
        const Variant& v = VARIANTS[i];
        cudaLaunchConfig_t config = {};
        cudaLaunchAttribute attribute = {};
        attribute.id = cudaLaunchAttributeClusterDimension, attribute.val.clusterDim.x = v.ranks, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
        config.gridDim = dim3(prop.multiProcessorCount / v.ranks * v.ranks), config.blockDim = dim3(288), config.dynamicSmemBytes = shared_of(v);
        config.attrs = &attribute, config.numAttrs = 1;
        CHECK(cudaOccupancyMaxActiveClusters(&max_clusters[v.ranks], v.kernel, &config));
        printf("%d clusters of %d at once\n", max_clusters[v.ranks], v.ranks);
        if (max_clusters[v.ranks] < 1) return 1;
    }
    for (const Variant& v : VARIANTS)
        for (int m : {v.columns, v.columns / 2 + 1, 1}) {
            check(v, m, 4096, 4096, 2, false, 0), check(v, m, 1001, 896, 0, true, 1);
            if (brief) continue;
            check(v, m, 17, 64, 2, true, 1), check(v, m, 1502, 8000, 2, true, 0), check(v, m, 40000, 104, 0, false, 0);
        }
    if (!brief) for (auto [n, c] : {std::pair{6144, 4096}, {4096, 14336}, {1000, 896}, {30000, 64}}) for (int ranks : {2, 4}) check_bits(false, ranks, n, c), check_bits(true, ranks, n, c);
    printf("linear_mid: %d checks, %d failed\n", checks, failures);
    if (brief) return failures;

    const size_t POOL = size_t(6) << 30;
    Buffer<Bf> pool(POOL / 2), x(256 * 16384), y(256 * size_t(131072));
    Buffer<uint4> copied(1 << 20);
    copied.zero();
    pool.fill(7, 0.02f), x.fill(8, 1);
    struct Shape { const char* name; int n, c; bool gated; } shapes[] = {
        {"qkv", 6144, 4096, false}, {"o", 4096, 4096, false}, {"gate_up", 14336, 4096, true}, {"down", 4096, 14336, false}, {"head", 128256, 4096, false}};
    for (int m : {1, 8, 16, 24, 32, 48, 64, 96, 128}) {
        printf("-- m %d: us plain | us overlapped | TB/s overlapped; and 32 layers and head, ms\n", m);
        for (const Variant& v : VARIANTS) {
            if (v.gated || m > v.columns || (m * 2 <= v.columns && v.columns > 16)) continue;
            const Variant& gated = (&v)[1];
            printf("%-13s", v.name);
            double head_us = 0;
            for (auto& s : shapes) {
                const Variant& use = s.gated ? gated : v;
                size_t elements = size_t(s.n) * s.c * (s.gated ? 2 : 1), copies = POOL / 2 / elements;
                double us[2];
                for (int overlap = 0; overlap < 2; ++overlap)
                    us[overlap] = graph_time_us(std::min<size_t>(copies, 24), [&](cudaStream_t st, int i) {
                        const Bf* at = pool.ptr + elements * i;
                        Work w = {m, s.c, x.ptr, {at, s.gated ? at + elements / 2 : nullptr, nullptr}, {s.n, s.gated ? s.n : 0, 0}, nullptr, {y.ptr, nullptr, nullptr}, 2, 0};
                        int grid;
                        LinearMidParams p = params_of(use, w, grid);
                        run(use, p, grid, st, overlap);
                    }, 7);
                printf(" %s %.1f|%.1f|%.2f", s.name, us[0], us[1], elements * 2 / us[1] / 1e6);
                if (s.n > 100000) head_us = us[1];
            }
            // Layers as the engine runs them: something small before qkv, o, and gate and up.
            double us = graph_time_us(12, [&](cudaStream_t st, int layer) {
                const Bf* at = pool.ptr + size_t(layer) * 218103808;
                for (int i = 0; i < 4; ++i) {
                    auto& s = shapes[i];
                    const Variant& use = s.gated ? gated : v;
                    Work w = {m, s.c, x.ptr, {at, s.gated ? at + size_t(s.n) * s.c : nullptr, nullptr}, {s.n, s.gated ? s.n : 0, 0}, nullptr, {y.ptr, nullptr, nullptr}, 2, 0};
                    at += size_t(s.n) * s.c * (s.gated ? 2 : 1);
                    int grid;
                    LinearMidParams p = params_of(use, w, grid);
                    if (i < 3) {
                        cudaLaunchConfig_t config = {};
                        cudaLaunchAttribute attribute = {};
                        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization, attribute.val.programmaticStreamSerializationAllowed = 1;
                        config.gridDim = dim3(m), config.blockDim = dim3(512), config.stream = st, config.attrs = &attribute, config.numAttrs = 1;
                        CHECK(cudaLaunchKernelEx(&config, between, copied.ptr, (const uint4*)copied.ptr + (1 << 19), m * 512));
                    }
                    run(use, p, grid, st, true);
                }
            }, 7);
            printf(" | layer %.1f, all %.3f\n", us, (32 * us + head_us) / 1e3);
        }
    }
    return failures;
}
