// Checks attention_decode against a float64 reference and times it at the shapes of docs/gpu-log.md.
// The plan here mirrors src/kernels/attention_decode.rs (tested there).
// Build: nvcc -std=c++17 -O3 -I.. -gencode=arch=compute_90a,code=sm_90a attention_decode_bench.cu
#include <cstring>
#include <numeric>
#include <random>
#include "../attention_decode.cu"
#include "harness.cuh"
using namespace bench;
using pagemill::DecodeParams;
using pagemill::DecodePiece;

struct Seq { uint32_t q_row, table_start, kv_len; };
struct Plan { std::vector<DecodePiece> pieces; std::vector<uint32_t> start; uint32_t slots = 0; };

static uint32_t first_tile(const Seq& s, uint32_t window) { return window && s.kv_len > window ? (s.kv_len - window) / 16 : 0; }
static uint32_t end_tile(const Seq& s) { return (s.kv_len + 15) / 16; }

static void add_cuts(Plan& plan, const Seq& s, const std::vector<uint32_t>& cuts) {
    uint32_t n = cuts.size() - 1;
    for (uint32_t i = 0; i < n; ++i)
        plan.pieces.push_back({s.q_row, s.table_start, s.kv_len, cuts[i], cuts[i + 1], plan.slots + i, plan.slots, n});
    if (n > 1) plan.slots += n;
}

static Plan equal_shares(const std::vector<Seq>& seqs, uint32_t window, uint32_t blocks, uint32_t min_tiles) {
    Plan plan;
    uint64_t total = 0;
    for (auto& s : seqs) total += end_tile(s) - first_tile(s, window);
    uint64_t used = std::max<uint64_t>(1, std::min<uint64_t>(blocks, total / min_tiles)), at = 0, c = 1;
    plan.start.push_back(0);
    for (auto& s : seqs) {
        uint32_t first = first_tile(s, window), end = end_tile(s);
        std::vector<uint32_t> cuts = {first};
        size_t base = plan.pieces.size();
        while (c < used && c * total / used < at + end - first) {
            uint32_t cut = first + uint32_t(c * total / used - at);
            if (cut > cuts.back()) cuts.push_back(cut);
            plan.start.push_back(base + cuts.size() - 1);
            ++c;
        }
        cuts.push_back(end);
        add_cuts(plan, s, cuts);
        at += end - first;
    }
    while (plan.start.size() <= blocks) plan.start.push_back(plan.pieces.size());
    return plan;
}

/// Every sequence in equal pieces of at most `longest` tiles, one thread block a piece.
static Plan one_piece_a_block(const std::vector<Seq>& seqs, uint32_t window, uint32_t blocks, uint32_t longest) {
    Plan plan;
    for (auto& s : seqs) {
        uint32_t first = first_tile(s, window), end = end_tile(s), n = (end - first + longest - 1) / longest;
        std::vector<uint32_t> cuts;
        for (uint32_t i = 0; i <= n; ++i) cuts.push_back(first + uint64_t(end - first) * i / n);
        add_cuts(plan, s, cuts);
    }
    for (uint32_t i = 0; i <= blocks; ++i) plan.start.push_back(std::min<uint32_t>(i, plan.pieces.size()));
    return plan;
}

static Plan balanced(const std::vector<Seq>& seqs, uint32_t window, uint32_t blocks, uint32_t min_tiles, uint32_t short_tiles, uint32_t least) {
    uint64_t total = 0;
    uint32_t most = 0;
    for (auto& s : seqs) total += end_tile(s) - first_tile(s, window), most = std::max(most, end_tile(s) - first_tile(s, window));
    uint32_t even = std::max<uint32_t>(min_tiles, (total + blocks - 1) / blocks), longest = most <= short_tiles ? least : min_tiles;
    auto pieces = [&](uint32_t l) {
        uint64_t n = 0;
        for (auto& s : seqs) n += (end_tile(s) - first_tile(s, window) + l - 1) / l;
        return n;
    };
    while (longest < most && pieces(longest) > blocks) ++longest;
    if (seqs.size() <= blocks && longest <= even + 8) return one_piece_a_block(seqs, window, blocks, longest);
    return equal_shares(seqs, window, blocks, min_tiles);
}

static Plan fixed(const std::vector<Seq>& seqs, uint32_t window, uint32_t blocks, uint32_t chunk) {
    Plan plan;
    uint64_t total = 0;
    for (auto& s : seqs) {
        uint32_t first = first_tile(s, window), end = end_tile(s);
        std::vector<uint32_t> cuts = {first};
        for (uint32_t t = (first / chunk + 1) * chunk; t < end; t += chunk) cuts.push_back(t);
        cuts.push_back(end);
        add_cuts(plan, s, cuts);
        total += end - first;
    }
    uint64_t at = 0, i = 0;
    for (uint32_t c = 0; c <= blocks; ++c) {
        while (i < plan.pieces.size() && at < c * total / blocks) at += plan.pieces[i].tile_end - plan.pieces[i].tile_begin, ++i;
        plan.start.push_back(c == blocks ? plan.pieces.size() : i);
    }
    return plan;
}

/// `blocks` a multiprocessor, in clusters of `cluster`.
struct Kernel { const char* type; int e, heads; void (*run)(DecodeParams); size_t shared; int warps, blocks, cluster; };
#define K1(T, NAME, E, NT, B) {#T, E, NT * 8, attention_decode_##T##_e##E##_h##NAME, sizeof(pagemill::DecodeShared<E, NT, 4, 1>), 4, B, 1}
#define KW(T, E, NAME, W, B, C) {#T, E, 8, attention_decode_##T##_e##E##_h8_##NAME, sizeof(pagemill::DecodeShared<E, 1, W, C>), W, B, C}
#define KWHOLE(T, E) KW(T, E, whole1, 8, 1, 1), KW(T, E, whole2, 8, 1, 2), KW(T, E, whole4, 8, 1, 4)
#ifdef DECODE_ONLY_128
static const Kernel KERNELS[] = {K1(bf16, 8, 128, 1, 3), KW(bf16, 128, dense, 4, 4, 1), KWHOLE(bf16, 128)};
#else
#define KALL(T) K1(T, 8, 64, 1, 4), K1(T, 8, 80, 1, 4), K1(T, 8, 96, 1, 3), K1(T, 8, 128, 1, 3), K1(T, 8, 256, 1, 2), \
    K1(T, 16, 64, 2, 3), K1(T, 16, 80, 2, 3), K1(T, 16, 96, 2, 3), K1(T, 16, 128, 2, 2), \
    KW(T, 128, dense, 4, 4, 1), KWHOLE(T, 64), KWHOLE(T, 128), KWHOLE(T, 256)
static const Kernel KERNELS[] = {KALL(bf16), KALL(f16)};
#endif

template <class T> __global__ void scatter_kv(T* pool, const uint32_t* table, const Seq* seqs, int E, int K, int B, uint64_t seed) {
    Seq s = seqs[blockIdx.x];
    for (uint32_t t = blockIdx.y; t < s.kv_len; t += gridDim.y)
        for (int i = threadIdx.x; i < 2 * K * E; i += blockDim.x) {
            int kv = i / (K * E), k = i / E % K, e = i % E;
            size_t at = ((size_t(table[s.table_start + t / B]) * 2 + kv) * K + k) * B * E + size_t(t % B) * E + e;
            pool[at] = from_f<T>(hash_normal(at, seed));
        }
}

template <class T> __global__ void reference(DecodeParams p, const T* q, const Seq* seqs, int E, float* out, double* scratch, int max_len) {
    Seq s = seqs[blockIdx.x];
    int h = blockIdx.y, K = p.num_kv_heads, k = h / (p.num_heads / K), B = 1 << p.block_size_log2;
    double* sc = scratch + (size_t(blockIdx.x) * p.num_heads + h) * max_len;
    const T* pool = static_cast<const T*>(p.kv);
    uint32_t first = p.window && s.kv_len > p.window ? s.kv_len - p.window : 0;
    auto row = [&](uint32_t t, int kv) { return pool + ((size_t(p.block_table[s.table_start + t / B]) * 2 + kv) * K + k) * B * E + size_t(t % B) * E; };
    for (uint32_t t = first + threadIdx.x; t < s.kv_len; t += blockDim.x) {
        double dot = 0;
        for (int e = 0; e < E; ++e) dot += double(to_f(q[size_t(s.q_row) * p.q_stride + h * E + e])) * to_f(row(t, 0)[e]);
        dot *= p.scale;
        if (p.soft_cap > 0) dot = p.soft_cap * tanh(dot / p.soft_cap);
        sc[t] = dot;
    }
    __syncthreads();
    double m = p.sinks ? p.sinks[h] : -1e300, sum = 0;
    for (uint32_t t = first; t < s.kv_len; ++t) m = fmax(m, sc[t]);
    for (uint32_t t = first; t < s.kv_len; ++t) sum += exp(sc[t] - m);
    if (p.sinks) sum += exp(p.sinks[h] - m);
    for (int e = threadIdx.x; e < E; e += blockDim.x) {
        double acc = 0;
        for (uint32_t t = first; t < s.kv_len; ++t) acc += exp(sc[t] - m) * to_f(row(t, 1)[e]);
        out[size_t(s.q_row) * p.num_heads * E + h * E + e] = acc / sum;
    }
}

struct Device { // everything a launch needs, kept alive
    Buffer<DecodePiece> pieces;
    Buffer<uint32_t> start, arrivals;
    Buffer<float> partial;
    Buffer<float2> max_sum;
    Device(const Plan& plan, int H, int E, int grid_y)
        : pieces(plan.pieces), start(plan.start), arrivals(size_t(plan.slots + 1) * grid_y), partial(size_t(plan.slots + 1) * H * E), max_sum(size_t(plan.slots + 1) * H) {
        arrivals.zero();
    }
    void set(DecodeParams& p) {
        p.pieces = pieces.ptr, p.piece_start = start.ptr, p.arrivals = arrivals.ptr, p.partial_out = partial.ptr, p.partial_max_sum = max_sum.ptr;
    }
};

static uint32_t log2_of(uint32_t x) { uint32_t l = 0; while ((1u << l) < x) ++l; return l; }

template <class T> static void check(const Kernel& k, int K, int G, int B, std::vector<uint32_t> lens, uint32_t window, float cap, bool sink, bool deterministic, uint32_t io, int sms) {
    std::mt19937 rng(K * 7919 + G * 31 + B + lens.size() + k.e);
    int H = K * G, E = k.e, S = lens.size();
    std::vector<Seq> seqs;
    uint32_t blocks = 0;
    for (int i = 0; i < S; ++i) seqs.push_back({uint32_t((i * 7 + 3) % S), blocks, lens[i]}), blocks += (lens[i] + B - 1) / B;
    if (S % 7 == 0) for (int i = 0; i < S; ++i) seqs[i].q_row = i;
    std::vector<uint32_t> table(blocks);
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), rng);
    Buffer<uint32_t> d_table(table);
    Buffer<Seq> d_seqs(seqs);
    Buffer<T> pool(size_t(blocks) * 2 * K * B * E), q(size_t(S) * H * E), q16(size_t(S) * H * E);
    Buffer<float> out32(size_t(S) * H * E), ref(size_t(S) * H * E), sinks(H);
    Buffer<T> out16(size_t(S) * H * E);
    Buffer<double> scratch(size_t(S) * H * 4352);
    scatter_kv<T><<<dim3(S, 64), 256>>>(pool.ptr, d_table.ptr, d_seqs.ptr, E, K, B, 11);
    q.fill(rng(), 2), sinks.fill(rng(), 2);
    DecodeParams p = {};
    p.q = q.ptr, p.q_type = std::is_same<T, __half>::value ? 1 : 2;
    p.out = io == 0 ? (void*)out32.ptr : (void*)out16.ptr, p.out_type = io == 0 ? 0 : p.q_type;
    p.kv = pool.ptr, p.block_table = d_table.ptr, p.sinks = sink ? sinks.ptr : nullptr, p.scale = 1 / sqrtf(E), p.soft_cap = cap, p.window = window;
    p.num_heads = H, p.num_kv_heads = K, p.block_size_log2 = log2_of(B), p.q_stride = p.out_stride = H * E;
    reference<T><<<dim3(S, H), 128>>>(p, q.ptr, d_seqs.ptr, E, ref.ptr, scratch.ptr, 4352);
    if (window) { // what lies behind the window must not be read
        for (auto& s : seqs) for (uint32_t t = 0; s.kv_len > window && (t + 1) * B <= s.kv_len - window; ++t) table[s.table_start + t] = ~0u;
        CHECK(cudaMemcpy(d_table.ptr, table.data(), table.size() * 4, cudaMemcpyHostToDevice));
    }
    uint32_t grid_y = K * ((G + k.heads - 1) / k.heads), units = std::max<uint32_t>(1, sms * k.blocks / grid_y / k.cluster), grid_x = units * k.cluster;
    Plan plan = deterministic ? fixed(seqs, window, units, 32) : balanced(seqs, window, units, 2 * k.warps, 32, 4);
    Device d(plan, H, E, grid_y);
    d.set(p);
    CHECK(cudaFuncSetAttribute(k.run, cudaFuncAttributeMaxDynamicSharedMemorySize, k.shared));
    for (int round = 0; round < 2; ++round) launch(k.run, dim3(grid_x, grid_y), dim3(k.warps * 32), k.shared, 0, false, p);
    CHECK(cudaDeviceSynchronize());
    char what[200];
    snprintf(what, sizeof what, "decode %s e%d w%d c%d K %d G %d B %d S %d len0 %u w %u cap %.0f sink %d det %d io %u", k.type, E, k.warps, k.cluster, K, G, B, S, lens[0], window, cap, sink, deterministic, io);
    double error = relative_error(io == 0 ? out32.floats() : out16.floats(), ref.floats()), limit = std::is_same<T, __half>::value ? 6e-4 : 4e-3;
    if (!(error <= limit)) expect(what, error, limit);
}

static void check_all(int sms) {
    int count = 0;
    std::vector<uint32_t> ragged = {1, 17, 4097, 16, 15, 300, 2048, 33, 1000, 64, 63, 65, 3, 129};
    for (auto& k : KERNELS)
        for (int i = 0; i < (brief ? 3 : 10); ++i, ++count) {
            int G = k.heads == 16 ? (i % 2 ? 12 : 16) : std::vector<int>{4, 1, 7, 8, 24}[i % 5], B = 16 << (i % 5), K = 1 + i % 3 * 3;
            auto lens = i % 3 == 0 ? ragged : i % 3 == 1 ? std::vector<uint32_t>{4097u - i} : std::vector<uint32_t>{uint32_t(500 + i), 1, 17};
            uint32_t window = i % 4 == 2 ? 100 + i * 40 : 0;
            float cap = i % 5 == 3 ? 20 : 0;
            if (strcmp(k.type, "bf16") == 0) check<__nv_bfloat16>(k, K, G, B, lens, window, cap, i % 3 == 2, i % 2, i % 4 < 2 ? 0 : 2, sms);
            else check<__half>(k, K, G, B, lens, window, cap, i % 3 == 2, i % 2, i % 4 < 2 ? 0 : 2, sms);
        }
    printf("attention_decode: %d checks, %d failed\n", count, failures);
}

static void time_shape(const Kernel& k, int S, uint32_t len, int B, const char* mode, bool overlap, int sms, uint32_t min_tiles, uint32_t short_tiles, uint32_t least) {
    const int K = 8, H = 32, E = 128, sets = std::max<int>(1, std::min<uint64_t>(16, (600u << 20) / (uint64_t(S) * len * 4096)));
    uint32_t per = (len + B - 1) / B, blocks = per * S * sets;
    std::vector<uint32_t> table(blocks);
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(5));
    Buffer<uint32_t> d_table(table);
    Buffer<__nv_bfloat16> pool(size_t(blocks) * 2 * K * B * E), q(size_t(S) * H * E), out(size_t(S) * H * E);
    pool.fill(3, 1), q.fill(4, 1);
    DecodeParams p = {};
    p.q = q.ptr, p.out = out.ptr, p.q_type = p.out_type = 2, p.kv = pool.ptr, p.block_table = d_table.ptr, p.scale = 0.0883883f;
    p.num_heads = H, p.num_kv_heads = K, p.block_size_log2 = log2_of(B), p.q_stride = p.out_stride = H * E;
    CHECK(cudaFuncSetAttribute(k.run, cudaFuncAttributeMaxDynamicSharedMemorySize, k.shared));
    uint32_t units = sms * k.blocks / K / k.cluster, grid_x = units * k.cluster;
    std::vector<Device> devices;
    devices.reserve(sets);
    for (int set = 0; set < sets; ++set) {
        std::vector<Seq> seqs;
        for (int i = 0; i < S; ++i) seqs.push_back({uint32_t(i), uint32_t(set * S + i) * per, len});
        Plan plan = mode[0] == 'f' ? fixed(seqs, 0, units, min_tiles) : mode[0] == 'e' ? equal_shares(seqs, 0, units, min_tiles) : balanced(seqs, 0, units, min_tiles, short_tiles, least);
        devices.emplace_back(plan, H, E, K);
    }
    double us = graph_time_us(std::max(sets, 16), [&](cudaStream_t st, int i) {
        devices[i % sets].set(p);
        launch(k.run, dim3(grid_x, K), dim3(k.warps * 32), k.shared, st, overlap, p);
    });
    double bytes = double(S) * len * K * E * 4;
    printf("%4d x %5u B %3d %s pdl %d tiles %u/%u w%d b%d c%d: %8.2f us %6.2f TB/s\n", S, len, B, mode, overlap, min_tiles, least, k.warps, k.blocks, k.cluster, us, bytes / us / 1e6);
}

int main(int argc, char**) {
    brief = argc > 1;
    cudaDeviceProp prop;
    CHECK(cudaGetDeviceProperties(&prop, 0));
    const int sms = prop.multiProcessorCount;
    for (auto& k : KERNELS) {
        int active = 0;
        CHECK(cudaFuncSetAttribute(k.run, cudaFuncAttributeMaxDynamicSharedMemorySize, k.shared));
        CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&active, k.run, k.warps * 32, k.shared));
        if (active < k.blocks) printf("%s e%d h%d: %d thread blocks fit, %d planned (shared %zu)\n", k.type, k.e, k.heads, active, k.blocks, k.shared), ++failures;
    }
    check_all(sms);
    if (failures || brief) return failures;
    struct { int s; uint32_t len; } shapes[] = {{64, 4096}, {256, 1024}, {1, 32768}, {1, 4096}, {16, 15360}, {1, 128}, {1, 256}, {1, 384}, {1, 1024}, {4, 256}, {8, 256},
                                                {16, 256}, {32, 256}, {64, 256}, {64, 384}, {128, 256}, {256, 256}, {8, 1024}, {32, 1024}, {8, 4096}};
    for (auto& k : KERNELS) {
        if (k.e != 128 || k.heads != 8 || strcmp(k.type, "bf16")) continue;
        const uint32_t units = sms * k.blocks / k.cluster / 8;
        const bool whole = k.warps == 8;
        for (auto& s : shapes) {
            if (whole && (s.len > 1024 || uint32_t(s.s) > units)) continue;
            time_shape(k, s.s, s.len, 16, "balanced", true, sms, 8, 32, whole ? 4096 : 4);
        }
    }
    return 0;
}
