// See lt_product.h.
#include "lt_product.h"
#include <cublasLt.h>
#include <cstdio>
#include <cstdlib>

static constexpr size_t WORKSPACE = 64 << 20;

struct LtProduct::Inside {
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t w, x, y;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t found[8];
    int count = 0;
};

static cublasLtHandle_t library() {
    static cublasLtHandle_t handle = [] {
        cublasLtHandle_t made = nullptr;
        if (cublasLtCreate(&made)) printf("no cuBLASLt\n"), exit(1);
        return made;
    }();
    return handle;
}
static void* workspace() {
    static void* at = [] {
        void* made = nullptr;
        if (cudaMalloc(&made, WORKSPACE)) printf("no workspace\n"), exit(1);
        return made;
    }();
    return at;
}

LtProduct::LtProduct(int m, int n, int c, bool f32_out) : in(new Inside) {
    cublasOperation_t transposed = CUBLAS_OP_T;
    size_t bytes = WORKSPACE;
    workspace();
    cublasLtMatmulDescCreate(&in->op, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatmulDescSetAttribute(in->op, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed);
    cublasLtMatrixLayoutCreate(&in->w, CUDA_R_16BF, c, n, c);
    cublasLtMatrixLayoutCreate(&in->x, CUDA_R_16BF, c, m, c);
    cublasLtMatrixLayoutCreate(&in->y, f32_out ? CUDA_R_32F : CUDA_R_16BF, n, m, n);
    cublasLtMatmulPreferenceCreate(&in->preference);
    cublasLtMatmulPreferenceSetAttribute(in->preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes);
    cublasLtMatmulAlgoGetHeuristic(library(), in->op, in->w, in->x, in->y, in->y, in->preference, 8, in->found, &in->count);
}
LtProduct::~LtProduct() {
    cublasLtMatmulPreferenceDestroy(in->preference);
    cublasLtMatrixLayoutDestroy(in->w), cublasLtMatrixLayoutDestroy(in->x), cublasLtMatrixLayoutDestroy(in->y);
    cublasLtMatmulDescDestroy(in->op);
    delete in;
}
int LtProduct::count() const { return in->count; }
bool LtProduct::run(int algorithm, const void* w, const void* x, void* y, cudaStream_t stream) const {
    float one = 1, zero = 0;
    return !cublasLtMatmul(library(), in->op, &one, w, in->w, x, in->x, &zero, y, in->y, y, in->y, &in->found[algorithm].algo, workspace(), WORKSPACE, stream);
}
