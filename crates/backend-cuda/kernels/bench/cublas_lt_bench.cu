// cuBLASLt at the 8B Llama shapes: its own first choice beside the best of the first eight, by measurement.
// Build: nvcc -std=c++17 -O3 cublas_lt_bench.cu -lcublasLt
#include <cublasLt.h>
#include "harness.cuh"
using namespace bench;
using Bf = __nv_bfloat16;

int main() {
    const size_t POOL = size_t(6) << 30, WORKSPACE = 64 << 20;
    Buffer<Bf> pool(POOL / 2), x(size_t(8192) * 14336), y(size_t(8192) * 14336);
    Buffer<char> workspace(WORKSPACE);
    pool.fill(7, 0.02f), x.fill(8, 1);
    cublasLtHandle_t lt;
    cublasLtCreate(&lt);
    printf("cuBLASLt %zu\n", cublasLtGetVersion());
    struct Shape { const char* name; int n, c; } shapes[] = {
        {"q k v", 6144, 4096}, {"q or o", 4096, 4096}, {"k or v", 1024, 4096}, {"gate or up", 14336, 4096}, {"down", 4096, 14336}, {"head", 128256, 4096}};
    for (int m : {8, 16, 32, 64, 128, 192, 256, 2048, 4096, 8192})
        for (auto& s : shapes) {
            if (m > 256 && s.n > 14336) continue;
            cublasLtMatmulDesc_t op;
            cublasLtMatrixLayout_t a, b, d;
            cublasLtMatmulPreference_t preference;
            cublasOperation_t transposed = CUBLAS_OP_T;
            cublasLtMatmulDescCreate(&op, CUBLAS_COMPUTE_32F, CUDA_R_32F);
            cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed);
            cublasLtMatrixLayoutCreate(&a, CUDA_R_16BF, s.c, s.n, s.c);
            cublasLtMatrixLayoutCreate(&b, CUDA_R_16BF, s.c, m, s.c);
            cublasLtMatrixLayoutCreate(&d, CUDA_R_16BF, s.n, m, s.n);
            cublasLtMatmulPreferenceCreate(&preference);
            size_t bytes = WORKSPACE;
            cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes);
            cublasLtMatmulHeuristicResult_t found[8];
            int count = 0;
            cublasLtMatmulAlgoGetHeuristic(lt, op, a, b, d, d, preference, 8, found, &count);
            const size_t elements = size_t(s.n) * s.c, copies = POOL / 2 / elements;
            printf("m %4d %-10s", m, s.name);
            for (int i = 0; i < count; ++i) {
                cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
                double us = graph_time_us(m > 256 ? 4 : std::min<size_t>(copies, 24), [&](cudaStream_t st, int nth) {
                    float one = 1, zero = 0;
                    cublasStatus_t now = cublasLtMatmul(lt, op, &one, pool.ptr + elements * nth, a, x.ptr, b, &zero, y.ptr, d, y.ptr, d, &found[i].algo, workspace.ptr, WORKSPACE, st);
                    if (now) status = now;
                }, m > 256 ? 5 : 7);
                if (status) printf(" failed(%d)", status);
                else if (m > 256) printf(" %.0fus(%.0fT)", us, 2e-6 * m * elements / us);
                else printf(" %.1f", us);
            }
            printf("\n");
        }
    return 0;
}
