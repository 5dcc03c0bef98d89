// One product by cuBLASLt, as the engine asks for it: y [m, n] = x [m, c] · w [n, c]^T, bf16 inputs, its first algorithms.
#pragma once
#include <cuda_runtime.h>
#include <vector>

struct LtProduct {
    LtProduct(int m, int n, int c, bool f32_out);
    ~LtProduct();
    int count() const;
    /// False where the algorithm cannot.
    bool run(int algorithm, const void* w, const void* x, void* y, cudaStream_t stream) const;

private:
    struct Inside;
    Inside* in;
};
