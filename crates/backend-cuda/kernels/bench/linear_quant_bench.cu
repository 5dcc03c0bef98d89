// Checks linear_quant against a float64 product of the GGUF blocks themselves, and times it. The repacking here
// mirrors src/kernels/linear_quant.rs (tested there).
// Build: nvcc -std=c++17 -O3 -I.. -gencode=arch=compute_90a,code=sm_90a linear_quant_bench.cu
#include <cstring>
#include <random>
#include <string>
#include "../linear_quant.cu"
#include "harness.cuh"
using namespace bench;
using pagemill::QuantParams;
using Bf = __nv_bfloat16;

enum Type { Q4_0, Q4_1, Q8_0, Q4_K, Q6_K };
struct Format {
    const char* name;
    Type type;
    int block, block_bytes, tile_bytes;
    void (*m8)(QuantParams), (*m16)(QuantParams), (*m64)(QuantParams), (*g8)(QuantParams), (*g16)(QuantParams), (*g64)(QuantParams);
    void (*dequantise)(const char*, Bf*, uint32_t, uint32_t);
    int ring;
};
#define F(T, n, B, BB) {#n, T, B, BB, pagemill::T::TILE_BYTES, linear_quant_##n##_m8, linear_quant_##n##_m16, linear_quant_##n##_m64, \
    linear_quant_gated_##n##_m8, linear_quant_gated_##n##_m16, linear_quant_gated_##n##_m64, dequantise_##n, pagemill::T::TILE_BYTES > 1300 ? 5 : 8}
static const Format FORMATS[] = {F(Q4_0, q4_0, 32, 18), F(Q4_1, q4_1, 32, 20), F(Q8_0, q8_0, 32, 34), F(Q4_K, q4_k, 256, 144), F(Q6_K, q6_k, 256, 210)};

static float f16_at(const uint8_t* p) { __half h; memcpy(&h, p, 2); return __half2float(h); }
static void min_k4(int j, const uint8_t* q, int& sc, int& m) {
    if (j < 4) sc = q[j] & 63, m = q[j + 4] & 63;
    else sc = (q[j + 4] & 15) | (q[j - 4] >> 6) << 4, m = (q[j + 4] >> 4) | (q[j] >> 6) << 4;
}

/// One block's quants (unsigned, as the kernel stores them) and values.
static void decode(Type t, const uint8_t* b, int* quants, double* values) {
    if (t == Q4_0 || t == Q4_1) {
        const uint8_t* q = b + (t == Q4_0 ? 2 : 4);
        for (int i = 0; i < 32; ++i) {
            int n = i < 16 ? q[i] & 15 : q[i - 16] >> 4;
            quants[i] = n;
            values[i] = t == Q4_0 ? double(f16_at(b)) * (n - 8) : double(f16_at(b)) * n + f16_at(b + 2);
        }
    } else if (t == Q8_0) {
        for (int i = 0; i < 32; ++i) quants[i] = int8_t(b[2 + i]) + 128, values[i] = double(f16_at(b)) * int8_t(b[2 + i]);
    } else if (t == Q4_K) {
        for (int i = 0; i < 256; ++i) {
            int sc, m, sub = i / 32, n = b[16 + i / 64 * 32 + i % 32] >> (sub % 2 * 4) & 15;
            min_k4(sub, b + 4, sc, m);
            quants[i] = n, values[i] = double(f16_at(b)) * sc * n - double(f16_at(b + 2)) * m;
        }
    } else {
        for (int i = 0; i < 256; ++i) {
            int half = i / 128, r = i % 128, quarter = r / 32, l = r % 32;
            int low = b[half * 64 + (quarter % 2) * 32 + l] >> (quarter / 2 * 4) & 15, high = b[128 + half * 32 + l] >> (quarter * 2) & 3;
            quants[i] = low | high << 4;
            values[i] = double(f16_at(b + 208)) * int8_t(b[192 + half * 8 + quarter * 2 + l / 16]) * (quants[i] - 32);
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

/// Tiles of rows in the given order (row index into `gguf`, or -1).
static std::vector<uint8_t> repack(const Format& f, const std::vector<uint8_t>& gguf, const std::vector<int>& order, int c) {
    int row_tiles = (order.size() + 15) / 16, k_tiles = (c + 127) / 128;
    size_t row_bytes = size_t(c) / f.block * f.block_bytes;
    std::vector<uint8_t> out(size_t(row_tiles) * k_tiles * f.tile_bytes);
    std::vector<int> q(c);
    std::vector<double> v(c);
    for (size_t r = 0; r < order.size(); ++r) {
        if (order[r] < 0) continue;
        const uint8_t* src = &gguf[order[r] * row_bytes];
        for (int b = 0; b < c / f.block; ++b) decode(f.type, src + b * f.block_bytes, &q[b * f.block], &v[b * f.block]);
        int half = r % 16 / 8, g = r % 8, row = r % 16;
        for (int kt = 0; kt < k_tiles; ++kt) {
            uint8_t* tile = &out[(r / 16 * k_tiles + kt) * f.tile_bytes];
            for (int strip = 0; strip < 4; ++strip) {
                int k0 = kt * 128 + strip * 32;
                if (k0 >= c) continue;
                for (int lane_c = 0; lane_c < 4; ++lane_c)
                    for (int e = 0; e < 8; ++e) {
                        int n = q[k0 + (f.type == Q6_K ? e / 4 * 16 + lane_c * 4 + e % 4 : lane_c * 8 + e)];
                        int at = half * 512 + (g * 4 + lane_c) * 16 + strip * 4, shift = e / 2 * 4 + e % 2 * 16;
                        tile[at + shift / 8] |= (n & 15) << shift % 8;
                        if (f.type == Q8_0) tile[1024 + at + shift / 8] |= (n >> 4) << shift % 8;
                        if (f.type == Q6_K) {
                            int top = 1024 + half * 256 + (g * 4 + lane_c) * 8 + strip / 2 * 4, bit = strip % 2 * 8 + e / 2 * 2 + e % 2 * 16;
                            tile[top + bit / 8] |= (n >> 4) << bit % 8;
                        }
                    }
                const uint8_t* block = src + k0 / f.block * f.block_bytes;
                if (f.type == Q4_0) memcpy(tile + 1024 + row * 8 + strip * 2, block, 2);
                if (f.type == Q8_0) memcpy(tile + 2048 + row * 8 + strip * 2, block, 2);
                if (f.type == Q4_1) memcpy(tile + 1024 + row * 16 + strip * 4, block, 4);
                if (f.type == Q4_K) {
                    int sc, m;
                    min_k4(k0 % 256 / 32, block + 4, sc, m);
                    memcpy(tile + 1024 + row * 4, block, 4);
                    tile[1024 + 64 + row * 4 + strip] = sc, tile[1024 + 128 + row * 4 + strip] = m;
                }
                if (f.type == Q6_K) {
                    memcpy(tile + 1536 + row * 8 + strip * 2, block + 192 + k0 % 256 / 16, 2);
                    memcpy(tile + 1664 + row * 2, block + 208, 2);
                }
            }
        }
    }
    return out;
}

static void run(const Format& f, const QuantParams& p, bool gated, cudaStream_t s, bool overlap, int sms, int force = 0) {
    int cols = force ? force : p.m <= 8 ? 8 : p.m <= 16 ? 16 : 64;
    if (cols == 64) {
        auto kernel = gated ? f.g64 : f.m64;
        size_t shared = size_t(pagemill::K_GROUPS) * pagemill::X_STAGES * (pagemill::X_STAGE_BYTES + pagemill::ROW_WARPS * f.tile_bytes);
        CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
        launch(kernel, dim3((((gated ? (p.n + 7) / 8 * 16 : p.n)) + 63) / 64, (p.m + 63) / 64), dim3(pagemill::MEDIUM_THREADS), shared, s, overlap, p);
        return;
    }
    int tiles = (p.n + (gated ? 7 : 15)) / (gated ? 8 : 16);
    auto kernel = gated ? (cols == 8 ? f.g8 : f.g16) : (cols == 8 ? f.m8 : f.m16);
    size_t shared = 8 * (f.ring * f.tile_bytes + cols / 8 * 1024);
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    launch(kernel, dim3(std::min(tiles, SMALL_BLOCKS * sms)), dim3(256), shared, s, overlap, p);
}

static void check(const Format& f, int m, int n, int c, bool gated, uint32_t y_type, bool residual, int sms, int force) {
    std::mt19937 rng(m * 131 + n * 7 + c + f.type);
    const int rows = gated ? 2 * n : n;
    auto gguf = random_rows(f, rows, c, rng);
    std::vector<int> order;
    for (int i = 0; i < rows; ++i) order.push_back(gated ? i / 16 * 8 + i % 8 + (i % 16 >= 8 ? n : 0) : i);
    auto tiles = repack(f, gguf, order, c);
    Buffer<uint8_t> w(tiles);
    Buffer<Bf> x(size_t(m) * (c + 8)), y16(size_t(m) * n), dense(size_t(rows) * c);
    Buffer<float> y32(size_t(m) * n), bias(n);
    x.fill(rng(), 1), bias.fill(rng(), 1);
    QuantParams p = {};
    p.x = x.ptr, p.w = w.ptr, p.bias = gated ? nullptr : bias.ptr, p.m = m, p.n = n, p.c = c, p.x_stride = c + 8, p.y_stride = n, p.y_type = y_type;
    p.y = y_type == 0 ? (void*)y32.ptr : (void*)y16.ptr;
    if (residual) y32.fill(9, 1), y16.fill(9, 1), p.residual = p.y;
    auto before = y_type == 0 ? y32.floats() : y16.floats(), hx = x.floats(), hb = bias.floats();
    run(f, p, gated, 0, false, sms, force);
    f.dequantise<<<(tiles.size() / f.tile_bytes + 7) / 8, 256>>>((const char*)w.ptr, dense.ptr, rows, c);
    CHECK(cudaDeviceSynchronize());
    std::vector<double> values(size_t(rows) * c);
    std::vector<int> q(256);
    for (size_t b = 0; b < values.size() / f.block; ++b) decode(f.type, &gguf[b * f.block_bytes], q.data(), &values[b * f.block]);
    std::vector<float> ref(size_t(m) * n), dense_ref(values.size());
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
    for (int r = 0; r < rows; ++r)
        for (int k = 0; k < c; ++k) dense_ref[size_t(r) * c + k] = values[size_t(order[r]) * c + k];
    char what[160];
    snprintf(what, sizeof what, "quant %s m %d n %d c %d gated %d y %u residual %d kernel %d", f.name, m, n, c, gated, y_type, residual, force);
    double error = relative_error(y_type == 0 ? y32.floats() : y16.floats(), ref), limit = y_type != 0 || force == 64 ? 4e-3 : 2e-5;
    if (!(error <= limit)) expect(what, error, limit);
    error = relative_error(dense.floats(), dense_ref);
    if (!(error <= 3e-3)) expect((std::string(what) + " dequantise").c_str(), error, 3e-3);
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
        for (int m : brief ? std::vector<int>{3} : std::vector<int>{1, 3, 8}) check(f, m, 100, odd, false, 0, false, sms, 8), check(f, m, 3000, small, false, 2, true, sms, 8), check(f, m, 40, 4096, true, 0, false, sms, 8), checks += 3;
        for (int m : brief ? std::vector<int>{9} : std::vector<int>{9, 16}) check(f, m, 100, odd, false, 0, true, sms, 16), check(f, m, 64, 4096, true, 2, false, sms, 16), checks += 2;
        for (int m : brief ? std::vector<int>{70} : std::vector<int>{17, 64, 70}) check(f, m, 100, odd, false, 0, true, sms, 64), check(f, m, 72, 2560, true, 2, false, sms, 64), check(f, m, 64, small, false, 0, false, sms, 64), checks += 3;
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
        for (int m : {1, 4, 8, 16, 17, 64, 128, 256}) {
            printf("%-5s m %-4d", f.name, m);
            for (auto& s : shapes) {
                size_t bytes = size_t(s.n) * (s.gated ? 2 : 1) / 16 * (s.c / 128) * f.tile_bytes, copies = std::min<size_t>(POOL / bytes, 16);
                QuantParams p = {};
                p.x = x.ptr, p.y = y.ptr, p.m = m, p.n = s.n, p.c = s.c, p.x_stride = s.c, p.y_stride = s.n, p.y_type = 2;
                double us = graph_time_us(copies, [&](cudaStream_t st, int i) { p.w = (const char*)pool.ptr + bytes * i; run(f, p, s.gated, st, true, sms); }, 5);
                printf(" %10.1f (%7.2f)", us, bytes / us / 1e6);
            }
            printf("\n");
        }
    return 0;
}
