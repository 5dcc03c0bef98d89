// Checks every variant of linear_mid, then times each at the 8B Llama shapes, alone and as a layer. cuBLASLt beside it:
// cublas_lt_bench.cu.
// Build: nvcc -std=c++17 -O3 -I.. -DLINEAR_TUNE -gencode=arch=compute_90a,code=sm_90a linear_mid_bench.cu
#include <cstring>
#include <string>
#include "../linear_mid.cu"
#include "harness.cuh"
using namespace bench;
using pagemill::LinearMidParams;
using Bf = __nv_bfloat16;

struct Variant {
    const char* name;
    int columns, warpgroups, tiles, panels;
    bool gated;
    void (*kernel)(LinearMidParams);
    int rows() const { return 64 * std::max(warpgroups * tiles / (gated ? 2 : 1), 1); }
    int threads() const { return warpgroups * 128 + pagemill::FEEDERS; }
};
#undef V
#define V(M, W, T, P, G) {"m" #M " " #W "x" #T " p" #P, M, W, T, P, G, linear_mid_m##M##_w##W##_t##T##_p##P##_g##G},
static const Variant VARIANTS[] = {
#include "linear_mid_variants.inc"
};
constexpr int MAX_SHARED = 232448, STATIC_SHARED = 512;
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
    uint32_t y_type, activation, planes;
};

struct Launch {
    LinearMidParams p;
    dim3 grid;
    int shared;
};

/// As in src/kernels/linear_mid.rs: shares of the rows, at most as many as thread blocks are there at once, none of fewer
/// than `least` rows.
static Launch plan(const Variant& v, const Work& w, int least = 16) {
    Launch l = {};
    LinearMidParams& p = l.p;
    const int parts = v.gated ? 1 : 3;
    long all = 0;
    int rooms = 0, used = 0;
    for (int i = 0; i < parts; ++i) all += w.n[i], used += w.n[i] > 0;
    const int most = std::max(max_blocks / int(w.planes), 1);
    rooms = std::max<long>(std::min<long>(most, (all + least - 1) / least), used);
    long left = all;
    int shares_left = rooms, shares = 0;
    for (int i = 0; i < parts; ++i) {
        if (!w.n[i]) continue;
        --used;
        int own = std::min<long>(std::max<long>((long(w.n[i]) * shares_left + left / 2) / left, 1), shares_left - used);
        p.parts[i] = {w.bias, w.y[i], uint32_t(w.n[i]), uint32_t(w.n[i]), uint32_t(own), 0, {}};
        left -= w.n[i], shares_left -= own, shares += own;
        p.num_passes = std::max<uint32_t>(p.num_passes, ((w.n[i] + 1) / 2 * 2 / own + v.rows() - 1) / v.rows());
    }
    // Cut at even rows, the largest pass may have two more than the even share.
    auto largest = [&](int i) { return 2 * (((w.n[i] + 1) / 2 + p.parts[i].num_shares * p.num_passes - 1) / (p.parts[i].num_shares * p.num_passes)); };
    for (int i = 0; i < parts; ++i) while (w.n[i] && int(largest(i)) > v.rows()) ++p.num_passes;
    uint32_t rows = 8;
    for (int i = 0; i < parts; ++i) if (w.n[i]) {
        const uint32_t runs = p.parts[i].num_shares * p.num_passes, pairs = (w.n[i] + 1) / 2;
        p.parts[i].pairs = {pairs / runs, pairs % runs};
        p.parts[i].box_rows = largest(i), rows = std::max(rows, p.parts[i].box_rows);
    }
    p.x_map = map_of(w.x, w.m, w.c, v.columns);
    for (int i = 0; i < 3; ++i) {
        const int of = w.n[i] ? i : 0;
        p.w_map[i] = map_of(w.w[of], w.n[of], w.c, p.parts[v.gated ? 0 : of].box_rows);
    }
    p.m = w.m;
    const uint32_t cuts = (w.c + 255) / 256;
    p.cuts = {cuts / w.planes, cuts % w.planes};
    p.num_panels = (w.c + 63) / 64, p.tile_rows = (rows + 7) / 8 * 8, p.y_type = w.y_type, p.activation = w.activation;
    p.plane_stride = uint64_t(w.m) * w.n[0] * 4;
    const int x_bytes = v.panels * v.columns * 128, w_bytes = v.panels * (v.gated ? 2 : 1) * p.tile_rows * 128;
    // x comes from L2, sooner than weights: six of ten as many stages.
    // Room to align, and for a norm's thread block.
    constexpr int RING = MAX_SHARED - STATIC_SHARED - 1024 - 1280;
    p.w_slots = std::min<uint32_t>(10 * RING / (10 * w_bytes + 6 * x_bytes), pagemill::MAX_SLOTS);
    p.x_slots = std::min<uint32_t>((RING - p.w_slots * w_bytes) / x_bytes, p.w_slots);
    l.grid = dim3(shares, w.planes), l.shared = 1024 + p.x_slots * x_bytes + p.w_slots * w_bytes;
    if (p.x_slots < 2 || p.w_slots < 2) l.grid.x = 0;
    return l;
}
static void run(const Variant& v, const Launch& l, cudaStream_t s, bool overlap) { launch(v.kernel, l.grid, dim3(v.threads()), l.shared, s, overlap, l.p); }

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
/// Three parts where `parts`: n, n / 3 + 1 and 40 rows. Planes are added up here.
static void check(const Variant& v, int m, int n, int c, uint32_t y_type, bool parts, uint32_t activation, int planes) {
    Work w = {m, c};
    int sizes[3] = {n, v.gated ? n : parts ? n / 3 + 1 : 0, !v.gated && parts ? 40 : 0};
    Buffer<Bf> x(size_t(m) * c), w0(size_t(n) * c), w1(size_t(n) * c), w2(size_t(n + 40) * c);
    Buffer<float> bias(n + 40);
    uint64_t seed = m * 1000003 + n * 101 + c;
    x.fill(seed, 1), w0.fill(seed + 1, 0.05f), w1.fill(seed + 2, 0.05f), w2.fill(seed + 4, 0.05f), bias.fill(seed + 3, 1);
    w.x = x.ptr, w.w[0] = w0.ptr, w.w[1] = w1.ptr, w.w[2] = w2.ptr, w.y_type = y_type, w.activation = activation, w.planes = planes;
    w.bias = v.gated ? nullptr : bias.ptr;
    std::vector<Buffer<float>> y32, ref;
    std::vector<Buffer<Bf>> y16;
    for (int i = 0; i < 3; ++i) {
        w.n[i] = sizes[i];
        y32.emplace_back(size_t(m) * sizes[i] * planes), ref.emplace_back(size_t(m) * sizes[i]), y16.emplace_back(size_t(m) * sizes[i]);
        w.y[i] = y_type == 0 ? (void*)y32[i].ptr : (void*)y16[i].ptr;
    }
    const Launch l = plan(v, w);
    for (int twice = 0; twice < 2; ++twice) {
        run(v, l, 0, false);
        CHECK(cudaDeviceSynchronize());
        for (int i = 0; i < (v.gated ? 1 : 3); ++i) {
            if (!sizes[i]) continue;
            reference<<<dim3(sizes[i], m), 32>>>(x.ptr, w.w[i], v.gated ? w1.ptr : nullptr, w.bias, ref[i].ptr, sizes[i], c, activation);
            std::vector<float> got = y_type == 0 ? y32[i].floats() : y16[i].floats();
            const size_t plane = size_t(m) * sizes[i];
            for (size_t j = plane; j < got.size(); ++j) got[j % plane] += got[j];
            got.resize(plane);
            double error = relative_error(got, ref[i].floats()), limit = y_type == 0 ? (v.gated ? 4e-6 : 2e-6) : 3e-3; // gated: of two sums
            char what[160];
            snprintf(what, sizeof what, "linear_mid%s %s m %d n %d c %d y %u part %d planes %d run %d", v.gated ? " gated" : "", v.name, m, n, c, y_type, i, planes, twice);
            ++checks;
            if (!(error <= limit) && failures < 20) expect(what, error, limit);
            else if (!(error <= limit)) ++failures;
            y32[i].poison(), y16[i].poison();
        }
    }
}

/// Rows of all variants, shares and numbers of tokens: the same bits at one cut of C.
static void check_bits(bool gated, int n, int c, int planes) {
    Buffer<Bf> x(size_t(128) * c), w0(size_t(n) * c), w1(size_t(n) * c);
    Buffer<float> y(size_t(128) * n * planes);
    x.fill(5, 1), w0.fill(6, 0.05f), w1.fill(7, 0.05f);
    std::vector<float> want; // [planes, 128, n]
    int differing = 0, compared = 0;
    for (int largest : {128, 64, 32, 16})
        for (const Variant& v : VARIANTS)
            for (int m : {v.columns, v.columns - 3, v.columns / 2 + 1, 1}) {
                if (v.columns != largest || v.gated != gated) continue;
                const int all_blocks = max_blocks;
                if (m == 1) max_blocks = 7 * planes;
                Work w = {m, c, x.ptr, {w0.ptr, gated ? w1.ptr : nullptr, nullptr}, {n, gated ? n : 0, 0}, nullptr, {y.ptr, nullptr, nullptr}, 0, 0, uint32_t(planes)};
                const Launch l = plan(v, w);
                max_blocks = all_blocks;
                y.poison();
                run(v, l, 0, false);
                CHECK(cudaDeviceSynchronize());
                const size_t plane = size_t(m) * n, full = size_t(128) * n;
                std::vector<float> got(plane * planes);
                CHECK(cudaMemcpy(got.data(), y.ptr, got.size() * 4, cudaMemcpyDeviceToHost));
                if (want.empty()) want = got;
                for (int i = 0; i < planes; ++i) differing += memcmp(want.data() + i * full, got.data() + i * plane, plane * 4) != 0;
                ++compared;
            }
    printf("bits, gated %d, n %d, c %d, planes %d: %d of %d runs differ\n", gated, n, c, planes, differing, compared);
    failures += differing;
}

struct Norm {
    const float4* planes;
    uint4* y;
    uint32_t count, rows; // of planes, of x
    bool release_first;
};
/// Stands for the norm between two products: a thread block a row of 4,096 columns, and planes added up.
__global__ void __launch_bounds__(512, 4) norm(const Norm p) {
    if (p.release_first) pagemill::release_next_kernel();
    pagemill::wait_for_previous_kernel();
    if (!p.release_first) pagemill::release_next_kernel();
    __shared__ float partial[16];
    float4 sum[2] = {};
    const size_t at = (size_t(blockIdx.x) * 512 + threadIdx.x) * 2;
    for (uint32_t i = 0; i < p.count; ++i)
        for (int j = 0; j < 2; ++j) {
            const float4 more = p.planes[size_t(i) * p.rows * 1024 + at + j];
            sum[j].x += more.x, sum[j].y += more.y, sum[j].z += more.z, sum[j].w += more.w;
        }
    float square = sum[0].x * sum[0].x + sum[0].y * sum[0].y + sum[1].x * sum[1].x + sum[1].w * sum[1].w;
    for (int o = 16; o; o /= 2) square += __shfl_xor_sync(~0u, square, o);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = square;
    __syncthreads();
    float scale = 1;
    for (int i = 0; i < 16; ++i) scale += partial[i];
    scale = rsqrtf(scale);
    using pagemill::Bf16;
    p.y[at / 2] = make_uint4(Bf16::pack(sum[0].x * scale, sum[0].y * scale), Bf16::pack(sum[0].z * scale, sum[0].w * scale),
                             Bf16::pack(sum[1].x * scale, sum[1].y * scale), Bf16::pack(sum[1].z * scale, sum[1].w * scale));
}

struct Shape { const char* name; int n[3], c; bool gated, planes; };
static const Shape SHAPES[] = {{"qkv", {4096, 1024, 1024}, 4096, false, false}, {"o", {4096, 0, 0}, 4096, false, true}, {"gate_up", {14336, 14336, 0}, 4096, true, false},
                               {"down", {4096, 0, 0}, 14336, false, true}, {"head", {128256, 0, 0}, 4096, false, false},
                               // Of a Qwen2.5-0.5B.
                               {"qkv .5", {896, 128, 128}, 896, false, false}, {"o .5", {896, 0, 0}, 896, false, true}, {"gate_up .5", {4864, 4864, 0}, 896, true, false},
                               {"down .5", {896, 0, 0}, 4864, false, true}};
static size_t elements_of(const Shape& s) { return size_t(s.n[0] + s.n[1] + s.n[2]) * s.c; }

struct Choice { const Variant* v; int planes; double us; std::string name; };

int main(int argc, char** argv) {
    brief = argc > 1 && !strcmp(argv[1], "brief");
    const bool time_only = argc > 1 && !strcmp(argv[1], "time");
    cudaDeviceProp prop;
    CHECK(cudaGetDeviceProperties(&prop, 0));
    max_blocks = prop.multiProcessorCount;
    for (const Variant& v : VARIANTS) CHECK(cudaFuncSetAttribute(v.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, MAX_SHARED - STATIC_SHARED));
    if (!time_only) {
        for (const Variant& v : VARIANTS)
            for (int m : {v.columns, v.columns / 2 + 1, 1}) {
                check(v, m, 1001, 896, 0, true, 1, 1), check(v, m, 500, 1000, 0, false, 1, v.gated ? 1 : 3), check(v, m, 501, 1000, 2, false, 0, 1);
                if (brief) continue;
                check(v, m, 4096, 4096, 2, false, 0, 1), check(v, m, 17, 64, 2, true, 1, 1), check(v, m, 1502, 8000, 2, true, 0, 1), check(v, m, 40000, 104, 0, false, 0, 1);
                if (!v.gated) check(v, m, 4096, 1024, 0, false, 0, 2), check(v, m, 4096, 1024, 0, false, 0, 8), check(v, m, 33, 264, 0, false, 0, 2);
            }
        if (!brief) {
            for (auto [n, c] : {std::pair{6144, 4096}, {1000, 896}, {30001, 64}}) check_bits(false, n, c, 1), check_bits(true, n, c, 1);
            check_bits(false, 4096, 14336, 2), check_bits(false, 1002, 904, 4);
        }
        printf("linear_mid: %d checks, %d failed\n", checks, failures);
        if (brief) return failures;
    }

    const size_t POOL = size_t(6) << 30;
    Buffer<Bf> pool(POOL / 2), x(256 * 16384), y(256 * size_t(131072));
    Buffer<float> planes(size_t(8) * 128 * 4096);
    pool.fill(7, 0.02f), x.fill(8, 1), planes.fill(9, 1);
    auto work_of = [&](const Shape& s, int m, const Bf* at, int count) {
        Work w = {m, s.c, x.ptr, {}, {s.n[0], s.n[1], s.n[2]}, nullptr, {}, s.planes ? 0u : 2u, 0, uint32_t(count)};
        for (int i = 0; i < 3; ++i) w.w[i] = at, at += size_t(s.n[i]) * s.c, w.y[i] = s.planes ? (void*)planes.ptr : (void*)(y.ptr + i * size_t(4096) * 128);
        return w;
    };
    for (int m : {16, 32, 64, 128}) {
        printf("-- m %d: us overlapped by form and planes\n", m);
        std::vector<std::vector<Choice>> best;
        for (auto& s : SHAPES) {
            std::vector<Choice> all;
            for (const Variant& v : VARIANTS) {
                if (v.columns != m || v.gated != s.gated) continue;
                for (int count : {1, 2, 4, 8}) {
                    if (count > (s.planes ? s.c == 896 || s.c == 4864 ? 8 : 4 : 1)) continue;
                    const size_t elements = elements_of(s), copies = POOL / 2 / elements;
                    const Launch l = plan(v, work_of(s, m, pool.ptr, count));
                    // Not a form of more rows than shares have, nor one with passes where there are larger ones.
                    if (s.n[0] < 100000 ? l.p.num_passes > 1 || (v.rows() > 64 && int(l.p.tile_rows) * 2 < v.rows() && !v.gated) : v.rows() < 128) continue;
                    const double us = graph_time_us(std::min<size_t>(copies, 24), [&](cudaStream_t st, int i) { run(v, plan(v, work_of(s, m, pool.ptr + elements * i, count)), st, true); }, 7);
                    char name[96];
                    snprintf(name, sizeof name, "%s planes %d grid %d rows %u slots %u+%u", v.name, count, l.grid.x * l.grid.y, l.p.tile_rows, l.p.w_slots, l.p.x_slots);
                    all.push_back({&v, count, us, name});
                }
            }
            std::sort(all.begin(), all.end(), [](auto& a, auto& b) { return a.us < b.us; });
            for (auto& c : all) printf("%-10s %7.2f us %.2f TB/s  %s\n", s.name, c.us, elements_of(s) * 2 / c.us / 1e6, c.name.c_str());
            best.push_back(all);
        }
        // Layers as the engine runs them: a norm before qkv, and gate and up; something small before o.
        auto layer = [&](const Choice (&of)[4], bool release_first, const char* what) {
            const double us = graph_time_us(12, [&](cudaStream_t st, int nth) {
                const Bf* at = pool.ptr + size_t(nth) * 218103808;
                for (int i = 0; i < 4; ++i) {
                    auto& s = SHAPES[i];
                    const Launch l = plan(*of[i].v, work_of(s, m, at, of[i].planes));
                    at += elements_of(s);
                    if (i < 3) launch(norm, dim3(m), dim3(512), 0, st, true, Norm{(const float4*)planes.ptr, (uint4*)x.ptr, uint32_t(i == 2 ? of[1].planes : i == 0 ? of[3].planes : 1), uint32_t(m), release_first});
                    run(*of[i].v, l, st, true);
                }
            }, 9);
            printf("layer, %s, norms release %s: %.2f us;", what, release_first ? "first" : "behind their wait", us);
            for (auto& c : of) printf(" %s planes %d |", c.v->name, c.planes);
            printf("\n");
        };
        Choice chosen[4];
        for (int i = 0; i < 4; ++i) chosen[i] = best[i][0];
        for (int release_first = 0; release_first < 2; ++release_first) layer(chosen, release_first, "the best of each");
        for (int i = 0; i < 4; ++i)
            for (int nth = 1; nth < 4 && nth < int(best[i].size()); ++nth) {
                Choice other[4] = {chosen[0], chosen[1], chosen[2], chosen[3]};
                other[i] = best[i][nth];
                layer(other, true, SHAPES[i].name);
            }
        layer(chosen, true, "the best again");
    }
    return failures;
}
