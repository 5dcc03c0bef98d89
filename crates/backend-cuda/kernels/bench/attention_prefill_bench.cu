// Checks attention_prefill (and attention_prefill_any with -DPREFILL_ANY) against a float64 reference and times
// it at the shapes of docs/gpu-log.md.
// Build: nvcc -std=c++17 -O3 -I.. -gencode=arch=compute_90a,code=sm_90a attention_prefill_bench.cu
#include <cstring>
#include <numeric>
#include <queue>
#include <random>
#include <type_traits>
#include <cudaTypedefs.h>
#ifdef PREFILL_ANY
#include "../attention_prefill_any.cu"
#else
#include "../attention_prefill.cu"
#endif
#include "harness.cuh"
using namespace bench;
using pagemill::PrefillParams;
using pagemill::PrefillTile;

struct Seq { uint32_t q_row, q_len, table_start, kv_len; };

struct Kernel { const char* type; int e; void (*run)(PrefillParams); size_t shared; int threads, rows; };
#ifdef PREFILL_ANY
#define K1(T, E) {#T, E, attention_prefill_any_##T##_e##E, pagemill::any_shared_bytes<E>(), pagemill::ANY_THREADS, pagemill::ANY_ROWS}
static const Kernel KERNELS[] = {K1(bf16, 64), K1(bf16, 80), K1(bf16, 96), K1(bf16, 128), K1(bf16, 256), K1(f16, 64), K1(f16, 80), K1(f16, 96), K1(f16, 128), K1(f16, 256)};
#else
#define K1(T, E) {#T, E, attention_prefill_##T##_e##E, sizeof(pagemill::PrefillShared<E>) + 1024, 384, 128}
static const Kernel KERNELS[] = {K1(bf16, 64), K1(bf16, 128), K1(f16, 64), K1(f16, 128)};
#endif

static CUtensorMap kv_map(void* pool, size_t rows, int E, int B, bool bf16) {
    CUtensorMap map = {};
#ifndef PREFILL_ANY
    static PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
    if (!encode) {
        cudaDriverEntryPointQueryResult result;
        CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void**)&encode, 12000, cudaEnableDefault, &result));
    }
    cuuint64_t dims[2] = {cuuint64_t(E), rows}, strides[1] = {cuuint64_t(E) * 2};
    cuuint32_t box[2] = {64, cuuint32_t(std::min(B, 128))}, step[2] = {1, 1};
    CUresult r = encode(&map, bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, pool, dims, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r != CUDA_SUCCESS) printf("cuTensorMapEncodeTiled: %d\n", r), exit(1);
#endif
    return map;
}

template <class T> __global__ void scatter_kv(T* pool, const uint32_t* table, const Seq* seqs, int E, int K, int B, uint64_t seed) {
    Seq s = seqs[blockIdx.x];
    for (uint32_t t = blockIdx.y; t < s.kv_len; t += gridDim.y)
        for (int i = threadIdx.x; i < 2 * K * E; i += blockDim.x) {
            int kv = i / (K * E), k = i / E % K, e = i % E;
            size_t at = ((size_t(table[s.table_start + t / B]) * 2 + kv) * K + k) * B * E + size_t(t % B) * E + e;
            pool[at] = from_f<T>(hash_normal(at, seed));
        }
}

template <class T> __global__ void reference(PrefillParams p, const T* q, const Seq* seqs, int E, float* out) {
    __shared__ double red[128];
    extern __shared__ double sc[];
    Seq s = seqs[blockIdx.x];
    if (blockIdx.y >= s.q_len) return;
    int token = s.q_row + blockIdx.y, h = blockIdx.z, K = p.num_kv_heads, k = h / (p.num_heads / K), B = 1 << p.block_size_log2;
    uint32_t pos = s.kv_len - s.q_len + blockIdx.y, first = p.window && pos + 1 > p.window ? pos + 1 - p.window : 0;
    const T* pool = static_cast<const T*>(p.kv);
    auto row = [&](uint32_t t, int kv) { return pool + ((size_t(p.block_table[s.table_start + t / B]) * 2 + kv) * K + k) * B * E + size_t(t % B) * E; };
    double m = p.sinks ? p.sinks[h] : -1e300;
    for (uint32_t t = first + threadIdx.x; t <= pos; t += blockDim.x) {
        double dot = 0;
        const T *a = q + size_t(token) * p.q_stride + h * E, *b = row(t, 0);
        for (int e = 0; e < E; ++e) dot += double(to_f(a[e])) * to_f(b[e]);
        dot *= p.scale;
        if (p.soft_cap > 0) dot = p.soft_cap * tanh(dot / p.soft_cap);
        sc[t - first] = dot;
        m = fmax(m, dot);
    }
    red[threadIdx.x] = m;
    __syncthreads();
    for (int i = 0; i < blockDim.x; ++i) m = fmax(m, red[i]);
    __syncthreads();
    double sum = 0;
    for (uint32_t t = first + threadIdx.x; t <= pos; t += blockDim.x) sum += sc[t - first] = exp(sc[t - first] - m);
    red[threadIdx.x] = sum;
    __syncthreads();
    sum = p.sinks ? exp(p.sinks[h] - m) : 0;
    for (int i = 0; i < blockDim.x; ++i) sum += red[i];
    for (int e = threadIdx.x; e < E; e += blockDim.x) {
        double acc = 0;
        for (uint32_t t = first; t <= pos; ++t) acc += sc[t - first] * to_f(row(t, 1)[e]);
        out[size_t(token) * p.num_heads * E + h * E + e] = acc / sum;
    }
}

/// Keys a tile walks over.
static uint32_t cost(const PrefillTile& t, uint32_t G, uint32_t rows, uint32_t window) {
    uint32_t offset = t.kv_len - t.q_len, last = std::min((t.first + rows - 1) / G, t.q_len - 1), seen = offset + t.first / G + 1;
    return offset + last + 1 - (window && seen > window ? seen - window : 0);
}

/// Tiles of all sequences, costliest first; mirrors src/kernels/attention_prefill.rs.
static std::vector<PrefillTile> tiles_of(const std::vector<Seq>& seqs, int G, int rows, uint32_t window) {
    std::vector<PrefillTile> tiles;
    for (auto& s : seqs)
        for (uint32_t first = 0; first < s.q_len * G; first += rows) tiles.push_back({s.q_row, s.q_len, s.kv_len, s.table_start, first});
    std::stable_sort(tiles.begin(), tiles.end(), [&](auto& a, auto& b) { return cost(a, G, rows, window) > cost(b, G, rows, window); });
    return tiles;
}

/// Shares work out over `blocks` thread blocks; mirrors src/kernels/attention_prefill.rs.
struct Work {
    std::vector<uint32_t> work, start;
    Work(const std::vector<PrefillTile>& tiles, int G, int rows, uint32_t window, int K, uint32_t blocks) {
        std::vector<std::vector<uint32_t>> of(blocks);
        std::priority_queue<std::pair<uint64_t, uint32_t>, std::vector<std::pair<uint64_t, uint32_t>>, std::greater<>> loads;
        for (uint32_t i = 0; i < blocks; ++i) loads.push({0, i});
        const bool by_head = tiles.size() >= size_t(4) * blocks;
        const size_t T = tiles.size();
        for (size_t i = 0; i < T * K; ++i) {
                const size_t t = by_head ? i % T : i / K, head = by_head ? i / T : i % K;
                auto [load, block] = loads.top();
                loads.pop();
                of[block].push_back(t * K + head);
                loads.push({load + cost(tiles[t], G, rows, window) / 128 + 3, block});
            }
        for (auto& list : of) {
            start.push_back(work.size());
            work.insert(work.end(), list.begin(), list.end());
        }
        start.push_back(work.size());
    }
};

static uint32_t grid_of(size_t work) {
#ifdef PREFILL_ANY
    return work;
#else
    cudaDeviceProp prop;
    CHECK(cudaGetDeviceProperties(&prop, 0));
    return std::min<size_t>(work, prop.multiProcessorCount);
#endif
}

static uint32_t log2_of(uint32_t x) { uint32_t l = 0; while ((1u << l) < x) ++l; return l; }

template <class T> static void check(const Kernel& k, int K, int G, int B, std::vector<std::pair<uint32_t, uint32_t>> lens, uint32_t window, float cap, bool sink, uint32_t io) {
    std::mt19937 rng(K * 7919 + G * 31 + B + lens.size() + k.e);
    const int H = K * G, E = k.e, S = lens.size();
    std::vector<Seq> seqs;
    uint32_t blocks = 0, tokens = 0, longest = 0;
    for (auto [q_len, kv_len] : lens) {
        seqs.push_back({tokens, q_len, blocks, kv_len});
        blocks += (kv_len + B - 1) / B, tokens += q_len, longest = std::max(longest, q_len);
    }
    std::vector<uint32_t> table(blocks);
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), rng);
    Buffer<uint32_t> d_table(table);
    Buffer<Seq> d_seqs(seqs);
    Buffer<T> pool(size_t(blocks) * 2 * K * B * E), q(size_t(tokens) * H * E), out16(size_t(tokens) * H * E);
    Buffer<float> out32(size_t(tokens) * H * E), ref(size_t(tokens) * H * E), sinks(H);
    scatter_kv<T><<<dim3(S, 64), 256>>>(pool.ptr, d_table.ptr, d_seqs.ptr, E, K, B, 11);
    q.fill(rng(), 2), sinks.fill(rng(), 2);
    PrefillParams p = {};
    const bool bf16 = !std::is_same<T, __half>::value;
    p.kv_map = kv_map(pool.ptr, size_t(blocks) * 2 * K * B, E, B, bf16);
    p.q = q.ptr, p.q_type = bf16 ? 2 : 1, p.out = io == 0 ? (void*)out32.ptr : (void*)out16.ptr, p.out_type = io == 0 ? 0 : p.q_type;
    p.kv = pool.ptr, p.block_table = d_table.ptr, p.sinks = sink ? sinks.ptr : nullptr, p.scale = 1 / sqrtf(E), p.soft_cap = cap, p.window = window;
    p.num_heads = H, p.num_kv_heads = K, p.block_size_log2 = log2_of(B), p.q_stride = p.out_stride = H * E;
    CHECK(cudaFuncSetAttribute(reference<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, 5000 * 8));
    reference<T><<<dim3(S, longest, H), 128, 5000 * 8>>>(p, q.ptr, d_seqs.ptr, E, ref.ptr);
    CHECK(cudaDeviceSynchronize());
    if (window) {
        for (auto& s : seqs)
            for (uint32_t t = 0; s.kv_len - s.q_len + 1 > window && (t + 1) * B <= s.kv_len - s.q_len + 1 - window; ++t) table[s.table_start + t] = ~0u;
        CHECK(cudaMemcpy(d_table.ptr, table.data(), table.size() * 4, cudaMemcpyHostToDevice));
    }
    auto tiles = tiles_of(seqs, G, k.rows, window);
    Buffer<PrefillTile> d_tiles(tiles);
    Work work(tiles, G, k.rows, window, K, grid_of(tiles.size() * K));
    Buffer<uint32_t> d_work(work.work), d_start(work.start);
    p.tiles = d_tiles.ptr, p.work = d_work.ptr, p.work_start = d_start.ptr;
    CHECK(cudaFuncSetAttribute(k.run, cudaFuncAttributeMaxDynamicSharedMemorySize, k.shared));
    launch(k.run, dim3(grid_of(tiles.size() * K)), dim3(k.threads), k.shared, 0, false, p);
    CHECK(cudaDeviceSynchronize());
    char what[200];
    snprintf(what, sizeof what, "prefill %s e%d K %d G %d B %d S %d q0 %u kv0 %u w %u cap %.0f sink %d io %u", k.type, E, K, G, B, S, lens[0].first, lens[0].second, window, cap, sink, io);
    double error = relative_error(io == 0 ? out32.floats() : out16.floats(), ref.floats()), limit = bf16 ? 4e-3 : 6e-4;
    if (!(error <= limit)) expect(what, error, limit);
}

static void check_all() {
    int count = 0;
    using Lens = std::vector<std::pair<uint32_t, uint32_t>>;
    const Lens mixed = {{17, 17}, {1, 1}, {33, 500}, {128, 128}, {5, 4097}, {300, 300}, {64, 129}, {1, 1000}};
    for (auto& k : KERNELS)
        for (int i = 0; i < (brief ? 3 : 10); ++i, ++count) {
            int G = std::vector<int>{4, 1, 7, 8, 3}[i % 5], B = 16 << (i * 2 % 5), K = 1 + i % 3;
            Lens lens = i % 3 == 0 ? mixed : i % 3 == 1 ? Lens{{uint32_t(700 + i), uint32_t(700 + i)}} : Lens{{129, 4097u - i}, {200, 1200}};
            uint32_t window = i % 4 == 2 ? 100 + i * 40 : 0;
            float cap = i % 5 == 3 ? 20 : 0;
            if (strcmp(k.type, "bf16") == 0) check<__nv_bfloat16>(k, K, G, B, lens, window, cap, i % 3 == 2, i % 4 < 2 ? 0 : 2);
            else check<__half>(k, K, G, B, lens, window, cap, i % 3 == 2, i % 4 < 2 ? 0 : 2);
        }
    printf("attention_prefill: %d checks, %d failed\n", count, failures);
}

static void time_shape(const Kernel& k, int S, uint32_t q_len, uint32_t kv_len, int B) {
    const int K = 8, G = 4, H = 32, E = k.e;
    uint32_t per = (kv_len + B - 1) / B, blocks = per * S;
    std::vector<uint32_t> table(blocks);
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(5));
    std::vector<Seq> seqs;
    for (int i = 0; i < S; ++i) seqs.push_back({i * q_len, q_len, i * per, kv_len});
    auto tiles = tiles_of(seqs, G, k.rows, 0);
    Buffer<uint32_t> d_table(table);
    Buffer<PrefillTile> d_tiles(tiles);
    Buffer<__nv_bfloat16> pool(size_t(blocks) * 2 * K * B * E), q(size_t(S) * q_len * H * E), out(size_t(S) * q_len * H * E);
    pool.fill(3, 1), q.fill(4, 1);
    PrefillParams p = {};
    p.kv_map = kv_map(pool.ptr, size_t(blocks) * 2 * K * B, E, B, true);
    p.q = q.ptr, p.out = out.ptr, p.q_type = p.out_type = 2, p.kv = pool.ptr, p.block_table = d_table.ptr, p.scale = 1 / sqrtf(E), p.tiles = d_tiles.ptr;
    Work work(tiles, G, k.rows, 0, K, grid_of(tiles.size() * K));
    Buffer<uint32_t> d_work(work.work), d_start(work.start);
    p.work = d_work.ptr, p.work_start = d_start.ptr;
    p.num_heads = H, p.num_kv_heads = K, p.block_size_log2 = log2_of(B), p.q_stride = p.out_stride = H * E;
    CHECK(cudaFuncSetAttribute(k.run, cudaFuncAttributeMaxDynamicSharedMemorySize, k.shared));
    double us = graph_time_us(4, [&](cudaStream_t st, int) { launch(k.run, dim3(grid_of(tiles.size() * K)), dim3(k.threads), k.shared, st, false, p); });
    double offset = kv_len - q_len, visible = q_len * offset + q_len * (q_len + 1.0) / 2;
    printf("e%-3d %3d x q %5u kv %5u B %3d: %9.2f us %6.1f TFLOP/s\n", E, S, q_len, kv_len, B, us, 4.0 * H * E * visible * S / us / 1e6);
}

int main(int argc, char**) {
    brief = argc > 1;
    check_all();
    if (failures || brief) return failures;
    for (auto& k : KERNELS) {
        if (strcmp(k.type, "bf16")) continue;
        for (uint32_t len : {2048, 8192}) time_shape(k, 1, len, len, 16);
        if (k.e == 128) {
            for (int B : {64, 256}) time_shape(k, 1, 8192, 8192, B);
            time_shape(k, 16, 512, 512, 16);
            time_shape(k, 64, 128, 128, 16);
            time_shape(k, 1, 2048, 32768, 16);
        }
        time_shape(k, 1, 32768, 32768, 16);
    }
    return 0;
}
