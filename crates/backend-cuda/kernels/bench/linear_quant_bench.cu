// Checks linear_quant and packed_weights against a float64 product of the GGUF blocks themselves, and times them.
// Build: nvcc -std=c++17 -O3 -I.. -gencode=arch=compute_90a,code=sm_90a linear_quant_bench.cu
#include <cstring>
#include <random>
#include <string>
#include "../linear_quant.cu"
#include "../linear_quant_one.cu"
#include "../packed_weights.cu"
#include "harness.cuh"
using namespace bench;
using pagemill::QuantParams;
using Bf = __nv_bfloat16;

enum Type { Q4_0, Q4_1, Q8_0, Q4_K, Q6_K };
struct Format {
    const char* name;
    Type type;
    int block, block_bytes, tile_bytes;
    void (*m1)(QuantParams), (*g1)(QuantParams), (*m8)(QuantParams), (*m16)(QuantParams), (*m32)(QuantParams), (*n32)(QuantParams), (*m64)(QuantParams), (*n64)(QuantParams), (*g8)(QuantParams), (*g16)(QuantParams), (*g32)(QuantParams), (*g64)(QuantParams);
    void (*repack)(pagemill::RepackArgs), (*widen)(pagemill::WidenPackedArgs);
    int ring, pairs;
};
#define F(T, n, B, BB, RING, PAIRS) {#n, T, B, BB, 2 * pagemill::T::HALF_BYTES, linear_quant_##n##_m1, linear_quant_gated_##n##_m1, linear_quant_##n##_m8, linear_quant_##n##_m16, linear_quant_##n##_m32, linear_quant_##n##_m32_narrow, linear_quant_##n##_m64, linear_quant_##n##_m64_narrow, \
    linear_quant_gated_##n##_m8, linear_quant_gated_##n##_m16, linear_quant_gated_##n##_m32, linear_quant_gated_##n##_m64, repack_##n, widen_packed_##n, RING, PAIRS}
static const Format FORMATS[] = {F(Q4_0, q4_0, 32, 18, 8, 5), F(Q4_1, q4_1, 32, 20, 8, 5), F(Q8_0, q8_0, 32, 34, 5, 3), F(Q4_K, q4_k, 256, 144, 8, 5), F(Q6_K, q6_k, 256, 210, 5, 4)};

static float f16_at(const uint8_t* p) { __half h; memcpy(&h, p, 2); return __half2float(h); }
static void min_k4(int j, const uint8_t* q, int& sc, int& m) {
    if (j < 4) sc = q[j] & 63, m = q[j + 4] & 63;
    else sc = (q[j + 4] & 15) | (q[j - 4] >> 6) << 4, m = (q[j + 4] >> 4) | (q[j] >> 6) << 4;
}

/// One block's values.
static void decode(Type t, const uint8_t* b, double* values) {
    if (t == Q4_0 || t == Q4_1) {
        const uint8_t* q = b + (t == Q4_0 ? 2 : 4);
        for (int i = 0; i < 32; ++i) {
            int n = i < 16 ? q[i] & 15 : q[i - 16] >> 4;
            values[i] = t == Q4_0 ? double(f16_at(b)) * (n - 8) : double(f16_at(b)) * n + f16_at(b + 2);
        }
    } else if (t == Q8_0) {
        for (int i = 0; i < 32; ++i) values[i] = double(f16_at(b)) * int8_t(b[2 + i]);
    } else if (t == Q4_K) {
        for (int i = 0; i < 256; ++i) {
            int sc, m, sub = i / 32, n = b[16 + i / 64 * 32 + i % 32] >> (sub % 2 * 4) & 15;
            min_k4(sub, b + 4, sc, m);
            values[i] = double(f16_at(b)) * sc * n - double(f16_at(b + 2)) * m;
        }
    } else {
        for (int i = 0; i < 256; ++i) {
            int half = i / 128, r = i % 128, quarter = r / 32, l = r % 32;
            int low = b[half * 64 + (quarter % 2) * 32 + l] >> (quarter / 2 * 4) & 15, high = b[128 + half * 32 + l] >> (quarter * 2) & 3;
            values[i] = double(f16_at(b + 208)) * int8_t(b[192 + half * 8 + quarter * 2 + l / 16]) * ((low | high << 4) - 32);
        }
    }
}

static std::vector<uint8_t> random_rows(const Format& f, int rows, int c, std::mt19937& rng) {
    std::vector<uint8_t> out(size_t(rows) * c / f.block * f.block_bytes);
    for (auto& x : out) x = rng();
    for (size_t b = 0; b < out.size(); b += f.block_bytes) {
        __half d = __float2half(0.001f + (rng() % 1000) * 1e-5f), m = __float2half((int(rng() % 1000) - 500) * 1e-4f);
        memcpy(&out[b + (f.type == Q6_K ? 208 : 0)], &d, 2);
        if (f.type == Q4_1 || f.type == Q4_K) memcpy(&out[b + 2], &m, 2);
    }
    return out;
}

/// Bytes of the tiles of such a matrix.
static size_t tile_bytes(const Format& f, int rows, int c) { return size_t((rows + 15) / 16) * ((c + 127) / 128) * f.tile_bytes; }

static int tile_blocks(const Format& f, int rows, int c) { return (tile_bytes(f, rows, c) / f.tile_bytes + 7) / 8; }

static void run(const Format& f, const QuantParams& p, bool gated, cudaStream_t s, bool overlap, int sms, int force = 0) {
    int cols = force ? force : p.m == 1 && p.c % 256 == 0 ? 1 : p.m <= 8 ? 8 : p.m <= 16 ? 16 : p.m <= 32 ? 32 : 64;
    if (cols >= 32) {
        const bool narrow = !gated && 2 * ((p.n + 63) / 64) * ((p.m + cols - 1) / cols) <= uint32_t(sms);
        auto kernel = gated ? (cols == 32 ? f.g32 : f.g64) : narrow ? (cols == 32 ? f.n32 : f.n64) : cols == 32 ? f.m32 : f.m64;
        const int row_tiles = narrow ? 2 : 4, stages = cols == 32 ? 3 : !narrow ? 4 : f.ring == 5 ? 2 : 3;
        size_t shared = size_t(8 / row_tiles) * stages * (cols * 256 + row_tiles * f.tile_bytes);
        CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
        const int rows = row_tiles * (gated ? 8 : 16);
        launch(kernel, dim3((p.n + rows - 1) / rows, (p.m + cols - 1) / cols), dim3(256), shared, s, overlap, p);
        return;
    }
    int tiles = (p.n + (gated ? 7 : 15)) / (gated ? 8 : 16);
    auto kernel = gated ? (cols == 1 ? f.g1 : cols == 8 ? f.g8 : f.g16) : (cols == 1 ? f.m1 : cols == 8 ? f.m8 : f.m16);
    size_t shared = cols == 1 ? 8 * (f.pairs * 2 * f.tile_bytes + 128) : 8 * (f.ring * f.tile_bytes + cols / 8 * 1024);
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    launch(kernel, dim3(std::min(tiles, 2 * sms)), dim3(256), shared, s, overlap, p);
}

static void check(const Format& f, int m, int n, int c, bool gated, uint32_t y_type, bool residual, int sms, int force) {
    std::mt19937 rng(m * 131 + n * 7 + c + f.type);
    const int matrices = gated ? 2 : 1;
    const size_t row_bytes = size_t(c) / f.block * f.block_bytes, bytes = tile_bytes(f, n, c);
    auto gguf = random_rows(f, matrices * n, c, rng);
    Buffer<uint8_t> stored(gguf), w(matrices * bytes);
    Buffer<Bf> x(size_t(m) * (c + 8)), y16(size_t(m) * n), dense(size_t(matrices) * n * c);
    for (int i = 0; i < matrices; ++i) {
        f.repack<<<tile_blocks(f, n, c), 256>>>({stored.ptr + i * n * row_bytes, (char*)w.ptr + i * bytes, row_bytes, uint32_t(n), uint32_t(c)});
        f.widen<<<tile_blocks(f, n, c), 256>>>({(char*)w.ptr + i * bytes, dense.ptr + size_t(i) * n * c, uint32_t(n), uint32_t(c)});
    }
    Buffer<float> y32(size_t(m) * n), bias(n);
    x.fill(rng(), 1), bias.fill(rng(), 1);
    QuantParams p = {};
    p.x = x.ptr, p.w = w.ptr, p.w_up = gated ? w.ptr + bytes : nullptr, p.bias = gated ? nullptr : bias.ptr, p.m = m, p.n = n, p.c = c, p.x_stride = c + 8, p.y_stride = n, p.y_type = y_type;
    p.y = y_type == 0 ? (void*)y32.ptr : (void*)y16.ptr;
    if (residual) y32.fill(9, 1), y16.fill(9, 1), p.residual = p.y;
    auto before = y_type == 0 ? y32.floats() : y16.floats(), hx = x.floats(), hb = bias.floats();
    run(f, p, gated, 0, false, sms, force);
    CHECK(cudaDeviceSynchronize());
    std::vector<double> values(size_t(matrices) * n * c);
    for (size_t b = 0; b < values.size() / f.block; ++b) decode(f.type, &gguf[b * f.block_bytes], &values[b * f.block]);
    std::vector<float> ref(size_t(m) * n), dense_ref(values.begin(), values.end());
    for (int t = 0; t < m; ++t)
        for (int r = 0; r < n; ++r) {
            auto dot = [&](int row) {
                double sum = 0;
                for (int k = 0; k < c; ++k) sum += values[size_t(row) * c + k] * hx[size_t(t) * (c + 8) + k];
                return sum;
            };
            double own = dot(r);
            if (gated) own = own / (1 + exp(-own)) * dot(r + n);
            else own += hb[r];
            ref[size_t(t) * n + r] = own + (residual ? before[size_t(t) * n + r] : 0);
        }
    char what[160];
    snprintf(what, sizeof what, "quant %s m %d n %d c %d gated %d y %u residual %d kernel %d", f.name, m, n, c, gated, y_type, residual, force);
    double error = relative_error(y_type == 0 ? y32.floats() : y16.floats(), ref), limit = y_type != 0 || force >= 32 ? 4e-3 : 2e-5;
    if (!(error <= limit)) expect(what, error, limit);
    error = relative_error(dense.floats(), dense_ref);
    if (!(error <= 3e-3)) expect((std::string(what) + " widened").c_str(), error, 3e-3);
}

__global__ void fill_tiles(uint32_t* p, size_t n) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) p[i] = uint32_t(i * 2654435761u ^ i >> 7) & 0x3b3f3b3f;
}

int main(int argc, char**) {
    brief = argc > 1;
    cudaDeviceProp prop;
    CHECK(cudaGetDeviceProperties(&prop, 0));
    const int sms = prop.multiProcessorCount;
    int checks = 0;
    for (auto& f : FORMATS) {
        const int odd = brief ? 1024 : f.block == 256 ? 768 : 576, small = brief ? 512 : f.block == 256 ? 256 : 32; // brief: k tiles that the k groups share evenly
        const int whole = brief ? 512 : 768; // columns of the form for one token
        check(f, 1, 100, whole, false, 0, true, sms, 1), check(f, 1, 5000, 256, false, 2, false, sms, 1), check(f, 1, 41, 4096, true, 0, false, sms, 1), check(f, 1, 2200, 512, true, 2, false, sms, 1), checks += 4;
        for (int m : brief ? std::vector<int>{3} : std::vector<int>{1, 3, 8}) check(f, m, 100, odd, false, 0, false, sms, 8), check(f, m, 3000, small, false, 2, true, sms, 8), check(f, m, 40, 4096, true, 0, false, sms, 8), checks += 3;
        for (int m : brief ? std::vector<int>{9} : std::vector<int>{9, 16}) check(f, m, 100, odd, false, 0, true, sms, 16), check(f, m, 64, 4096, true, 2, false, sms, 16), checks += 2;
        for (int m : brief ? std::vector<int>{70} : std::vector<int>{17, 64, 70})
            for (int columns : {32, 64}) {
                check(f, m, 100, odd, false, 0, true, sms, columns), check(f, m, 72, 2560, true, 2, false, sms, columns), check(f, m, 64, small, false, 0, false, sms, columns), checks += 3;
                if (!brief) check(f, m, 8500, small, false, 2, false, sms, columns), ++checks;
            }
    }
    printf("linear_quant: %d checks, %d failed\n", checks, failures);
    if (failures || brief) return failures;
    const size_t POOL = size_t(2) << 30;
    Buffer<uint32_t> pool(POOL / 4);
    fill_tiles<<<1024, 256>>>(pool.ptr, POOL / 4);
    Buffer<Bf> x(size_t(512) * 16384), y(size_t(512) * 131072);
    x.fill(8, 1);
    struct Shape { const char* name; int n, c; bool gated; } shapes[] = {{"qkv", 6144, 4096, false}, {"o", 4096, 4096, false}, {"gate_up", 14336, 4096, true}, {"down", 4096, 14336, false}};
    printf("microseconds (TB/s of repacked bytes), overlapped launches\n%-12s", "");
    for (auto& s : shapes) printf(" %20s", s.name);
    printf("\n");
    for (auto& f : FORMATS)
        for (int m : {1, 2, 8, 16, 32, 64, 128, 256}) {
            printf("%-5s m %-4d", f.name, m);
            for (auto& s : shapes) {
                size_t bytes = (s.gated ? 2 : 1) * tile_bytes(f, s.n, s.c), copies = std::min<size_t>(POOL / bytes, 16);
                QuantParams p = {};
                p.x = x.ptr, p.y = y.ptr, p.m = m, p.n = s.n, p.c = s.c, p.x_stride = s.c, p.y_stride = s.n, p.y_type = 2;
                double us = graph_time_us(copies, [&](cudaStream_t st, int i) { p.w = (const char*)pool.ptr + bytes * i, p.w_up = (const char*)p.w + bytes / 2; run(f, p, s.gated, st, true, sms); }, 5);
                printf(" %10.1f (%7.2f)", us, bytes / us / 1e6);
            }
            printf("\n");
        }
    printf("\nGB/s of stored bytes repacked, of bf16 bytes widened (28672 x 4096)\n");
    for (auto& f : FORMATS) {
        const int n = 28672, c = 4096;
        const size_t row_bytes = size_t(c) / f.block * f.block_bytes, half = POOL / 2;
        double in = graph_time_us(4, [&](cudaStream_t st, int) {
            f.repack<<<tile_blocks(f, n, c), 256, 0, st>>>({(const uint8_t*)pool.ptr, (char*)pool.ptr + half, row_bytes, uint32_t(n), uint32_t(c)});
        }, 5);
        double out = graph_time_us(4, [&](cudaStream_t st, int) {
            f.widen<<<tile_blocks(f, n, c), 256, 0, st>>>({(const char*)pool.ptr, (Bf*)((char*)pool.ptr + half), uint32_t(n), uint32_t(c)});
        }, 5);
        printf("%-5s %8.0f %8.0f\n", f.name, n * row_bytes / in / 1e3, size_t(n) * c * 2 / out / 1e3);
    }
    return 0;
}
