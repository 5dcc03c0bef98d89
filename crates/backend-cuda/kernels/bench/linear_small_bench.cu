// Checks and times every variant of linear_small beside cuBLAS, at the 8B Llama shapes.
// Build: nvcc -std=c++17 -O3 -I.. -DLINEAR_TUNE -gencode=arch=compute_90a,code=sm_90a linear_small_bench.cu -lcublas
#include <string>
#include <cublas_v2.h>
#include "../linear_small.cu"
#include "harness.cuh"
using namespace bench;
using pagemill::LinearParams;
using Bf = __nv_bfloat16;

struct Variant {
    const char* name;
    int mt, out_rows, warps, blocks;
    bool gated;
    void (*kernel)(LinearParams);
};
#undef V
#define V(MT, RT, S, W, B)                                                                                             \
    {"t" #MT " r" #RT " s" #S " w" #W " b" #B, MT, RT * 16, W, B, false, linear_small_bf16_t##MT##_r##RT##_s##S##_w##W##_b##B}, \
    {"t" #MT " r" #RT " s" #S " w" #W " b" #B, MT, RT * 8, W, B, true, linear_small_gated_bf16_t##MT##_r##RT##_s##S##_w##W##_b##B},
static const Variant VARIANTS[] = {
#include "linear_variants.inc"
};

__global__ void reference(LinearParams p, float* y, bool gated) {
    int row = blockIdx.x, token = blockIdx.y;
    auto dot = [&](const void* w) {
        double sum = 0;
        for (uint32_t i = threadIdx.x; i < p.c; i += 32)
            sum += double(to_f(static_cast<const Bf*>(w)[size_t(row) * p.c + i])) * to_f(static_cast<const Bf*>(p.x)[size_t(token) * p.x_stride + i]);
        for (int o = 16; o; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
        return sum;
    };
    double own = dot(p.w);
    if (p.bias) own += p.bias[row];
    if (gated) {
        double up = dot(p.w_up);
        double x = own;
        own = (p.activation == 0 ? x / (1 + exp(-x)) : 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))) * up;
    }
    size_t at = size_t(token) * p.y_stride + row;
    if (p.residual) own += pagemill::load_activation(p.residual, at, p.y_type);
    if (threadIdx.x == 0) y[size_t(token) * p.n + row] = own;
}

static void run(const Variant& v, const LinearParams& p, cudaStream_t s, bool overlap, int sms) {
    int tiles = (p.n + v.out_rows - 1) / v.out_rows;
    launch(v.kernel, dim3(std::min(tiles, sms * v.blocks)), dim3(v.warps * 32), 0, s, overlap, p);
}

static void check(const Variant& v, int m, int n, int c, uint32_t y_type, bool residual, uint32_t act, int sms) {
    Buffer<Bf> x(size_t(m) * (c + 64)), w(size_t(n) * c), up(size_t(n) * c);
    Buffer<float> bias(n), ref(size_t(m) * n), y32(size_t(m) * n);
    Buffer<Bf> y16(size_t(m) * n);
    uint64_t seed = m * 1000003 + n * 101 + c;
    x.fill(seed, 1), w.fill(seed + 1, 0.05f), up.fill(seed + 2, 0.05f), bias.fill(seed + 3, 1);
    LinearParams p = {};
    p.x = x.ptr, p.w = w.ptr, p.w_up = v.gated ? up.ptr : nullptr, p.bias = v.gated ? nullptr : bias.ptr;
    p.m = m, p.n = n, p.c = c, p.x_stride = c + 64, p.y_stride = n, p.y_type = y_type, p.activation = act;
    p.y = y_type == 0 ? (void*)y32.ptr : (void*)y16.ptr;
    if (residual) {
        y32.fill(seed + 4, 1), y16.fill(seed + 4, 1);
        p.residual = p.y;
    }
    reference<<<dim3(n, m), 32>>>(p, ref.ptr, v.gated);
    run(v, p, 0, false, sms);
    CHECK(cudaDeviceSynchronize());
    char what[160];
    double error = relative_error(y_type == 0 ? y32.floats() : y16.floats(), ref.floats()), limit = y_type == 0 ? 2e-6 : 3e-3;
    snprintf(what, sizeof what, "linear%s %s m %d n %d c %d y %u residual %d", v.gated ? " gated" : "", v.name, m, n, c, y_type, residual);
    if (!(error <= limit)) expect(what, error, limit);
}

int main(int argc, char**) {
    brief = argc > 1;
    cudaDeviceProp prop;
    CHECK(cudaGetDeviceProperties(&prop, 0));
    const int sms = prop.multiProcessorCount;
    int checks = 0;
    for (const Variant& v : VARIANTS)
        for (int m : {1, 2, 3, 5, 8, 9, 16}) {
            if (brief && m != 3 && m != 16) continue;
            if (m > v.mt * 8 || (v.mt == 2 && m < 8)) continue;
            check(v, m, 4096, 4096, 2, true, 0, sms), check(v, m, 1000, 896, 0, false, 0, sms);
            check(v, m, 17, 32, 0, true, 1, sms), check(v, m, 6001, 14336, 2, false, 1, sms);
            checks += 4;
        }
    printf("linear_small: %d checks, %d failed\n", checks, failures);
    if (failures || brief) return failures;

    cublasHandle_t blas;
    cublasCreate(&blas);
    void* workspace;
    CHECK(cudaMalloc(&workspace, 64 << 20));
    const size_t POOL = size_t(6) << 30;
    Buffer<Bf> pool(POOL / 2), x(64 * 16384), y(16 * size_t(131072));
    pool.fill(7, 0.02f), x.fill(8, 1);
    struct Shape { const char* name; int n, c; bool gated; } shapes[] = {
        {"qkv", 6144, 4096, false}, {"o", 4096, 4096, false}, {"gate_up", 14336, 4096, true}, {"down", 4096, 14336, false}, {"head", 128256, 4096, false}};
    for (int m : {1, 2, 4, 8, 16}) {
        printf("-- m %d: TB/s of weight bytes; plain | overlapped (programmatic dependent launch)\n", m);
        printf("%-20s", "");
        for (auto& s : shapes) printf(" %16s", s.name);
        printf("\n%-20s", "cuBLAS");
        for (auto& s : shapes) {
            int n = s.gated ? 2 * s.n : s.n;
            size_t elements = size_t(n) * s.c, copies = POOL / 2 / elements;
            cublasSetWorkspace(blas, workspace, 64 << 20);
            double us = graph_time_us(std::min<size_t>(copies, 24), [&](cudaStream_t st, int i) {
                float one = 1, zero = 0;
                cublasSetStream(blas, st);
                cublasSetWorkspace(blas, workspace, 64 << 20);
                cublasGemmEx(blas, CUBLAS_OP_T, CUBLAS_OP_N, n, m, s.c, &one, pool.ptr + elements * i, CUDA_R_16BF, s.c, x.ptr, CUDA_R_16BF, s.c, &zero, y.ptr,
                             CUDA_R_16BF, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
            });
            printf(" %16.2f", elements * 2 / us / 1e6);
        }
        printf("\n");
        for (const Variant& v : VARIANTS) {
            if (v.gated || (m <= 8) != (v.mt == 1)) continue;
            printf("%-20s", v.name);
            const Variant& gated = (&v)[1];
            for (auto& s : shapes) {
                const Variant& use = s.gated ? gated : v;
                size_t elements = size_t(s.n) * s.c * (s.gated ? 2 : 1), copies = POOL / 2 / elements;
                LinearParams p = {};
                p.x = x.ptr, p.y = y.ptr, p.m = m, p.n = s.n, p.c = s.c, p.x_stride = s.c, p.y_stride = s.n, p.y_type = 2;
                for (int overlap = 0; overlap < 2; ++overlap) {
                    double us = graph_time_us(std::min<size_t>(copies, 24), [&](cudaStream_t st, int i) {
                        p.w = pool.ptr + elements * i, p.w_up = s.gated ? pool.ptr + elements * i + elements / 2 : nullptr;
                        run(use, p, st, overlap, sms);
                    });
                    if (overlap) printf(" |%6.2f", elements * 2 / us / 1e6);
                    else printf(" %8.2f", elements * 2 / us / 1e6);
                }
            }
            printf("\n");
        }
    }
    return 0;
}
