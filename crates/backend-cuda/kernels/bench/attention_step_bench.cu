// Times of a decode step's small kernels as the engine launches them: norms (of elements and of planes), heads to the
// pool, decode attention, and the chain of them, in a replayed graph with programmatic dependent launch. 8B Llama shape.
// Build: nvcc -std=c++17 -O3 --expt-relaxed-constexpr -I.. -gencode=arch=compute_90a,code=sm_90a attention_step_bench.cu
#include "rows.cu"
#include "planes.cu"
#include "rope_kv.cu"
#define DECODE_ONLY_128
#include "attention_decode.cu"
#include "harness.cuh"
using namespace bench;

__global__ void nothing(int) {
    pagemill::wait_for_previous_kernel();
    pagemill::release_next_kernel();
}

constexpr int H = 32, K = 8, E = 128, COLS = 4096, LAYERS = 32, B = 16;

/// A form of decode attention as `src/kernels/decode_forms.rs` launches it; 0 thread blocks: split.
struct Form { const char* name; void (*run)(pagemill::DecodeParams); int warps, blocks; size_t shared; };
static const Form FORMS[] = {
    {"split", attention_decode_bf16_e128_h8, 4, 0, sizeof(pagemill::DecodeShared<128, 1, 4, 1>)},
    {"whole1", attention_decode_bf16_e128_h8_whole1, 8, 1, sizeof(pagemill::DecodeShared<128, 1, 8, 1>)},
    {"whole2", attention_decode_bf16_e128_h8_whole2, 8, 2, sizeof(pagemill::DecodeShared<128, 1, 8, 2>)},
    {"whole4", attention_decode_bf16_e128_h8_whole4, 8, 4, sizeof(pagemill::DecodeShared<128, 1, 8, 4>)},
};

struct Step {
    int rows, grid_x;
    const Form& form;
    Buffer<__nv_bfloat16> x, out, q, kv, attended, pool;
    Buffer<float> residual, weight, angles;
    Buffer<uint32_t> slots, table, piece_start;
    Buffer<pagemill::DecodePiece> pieces;
    Step(int rows, uint32_t len, int sms, const Form& form)
        : rows(rows), grid_x(form.blocks ? rows * form.blocks : sms * 3 / K), form(form), x(size_t(rows) * COLS), out(size_t(rows) * COLS), q(size_t(rows) * H * E),
          kv(size_t(rows) * K * E), attended(size_t(rows) * H * E), pool(size_t(rows) * ((len + B - 1) / B) * 2 * K * B * E), residual(size_t(rows) * COLS),
          weight(COLS * LAYERS), angles(size_t(rows) * E), slots(rows), table(size_t(rows) * ((len + B - 1) / B)), piece_start(4096), pieces(4096) {
        x.fill(1, 1), q.fill(2, 1), kv.fill(3, 1), pool.fill(4, 1), residual.fill(5, 1), weight.fill(6, 1), angles.fill(7, 1);
        const uint32_t per = (len + B - 1) / B, tiles = (len + 15) / 16;
        std::vector<uint32_t> s, t, start;
        std::vector<pagemill::DecodePiece> p;
        for (int i = 0; i < rows; ++i) s.push_back((i * per + (len - 1) / B) * B + (len - 1) % B);
        for (uint32_t i = 0; i < rows * per; ++i) t.push_back(i);
        // As the host cuts short sequences: 4 tiles a piece, one piece a thread block.
        const uint32_t cuts = form.blocks ? 1 : std::min<uint32_t>((tiles + 3) / 4, std::max<uint32_t>(1, grid_x / rows)), units = form.blocks ? rows : grid_x;
        for (uint32_t i = 0; i < std::min<uint32_t>(rows, units); ++i)
            for (uint32_t c = 0; c < cuts; ++c) p.push_back({i, i * per, len, tiles * c / cuts, tiles * (c + 1) / cuts, i * cuts + c, i * cuts, cuts});
        for (uint32_t i = 0; i <= units; ++i) start.push_back(std::min<uint32_t>(i, p.size()));
        CHECK(cudaMemcpy(slots.ptr, s.data(), s.size() * 4, cudaMemcpyHostToDevice));
        CHECK(cudaMemcpy(table.ptr, t.data(), t.size() * 4, cudaMemcpyHostToDevice));
        CHECK(cudaMemcpy(piece_start.ptr, start.data(), start.size() * 4, cudaMemcpyHostToDevice));
        CHECK(cudaMemcpy(pieces.ptr, p.data(), p.size() * sizeof p[0], cudaMemcpyHostToDevice));
    }
    void norm(cudaStream_t st, int layer, int threads) const {
        launch(rms_norm_bf16_bf16, dim3(rows), dim3(threads), 0, st, true, NormArgs{x.ptr, residual.ptr, weight.ptr + layer % LAYERS * COLS, out.ptr, COLS, 1e-5f});
    }
    /// With 2^`warps_log2` warps a token; as the host has it where that is negative.
    void heads(cudaStream_t st, int warps_log2 = -1) const {
        if (warps_log2 < 0) warps_log2 = rows <= 128 ? 5 : rows <= 256 ? 4 : rows <= 1024 ? 3 : 2;
        launch(heads_in_halves_bf16_bf16, dim3(((rows << warps_log2) + HEAD_WARPS - 1) / HEAD_WARPS), dim3(HEAD_WARPS * 32), 0, st, true,
               HeadsArgs{q.ptr, kv.ptr, kv.ptr, nullptr, nullptr, angles.ptr, slots.ptr, pool.ptr, H, K, E, B, E / 2, 0, 0, 0, uint32_t(rows), uint32_t(warps_log2)});
    }
    void norm_of_planes(cudaStream_t st, const float* planes, uint32_t count) const {
        launch(norm_planes_bf16, dim3(rows * PLANES_CLUSTER), dim3(512), 0, st, true,
               NormPlanesArgs{planes, residual.ptr, weight.ptr, out.ptr, uint64_t(rows) * COLS, count, COLS, 1e-5f});
    }
};

/// Partial results, for all.
struct Scratch {
    Buffer<float> out{size_t(400) * H * E};
    Buffer<float2> max_sum{size_t(400) * H};
    Buffer<uint32_t> arrivals{size_t(400) * K};
    Scratch() { arrivals.zero(); }
};

static void attention(const Step& s, const Scratch& scratch, cudaStream_t st) {
    pagemill::DecodeParams p = {};
    p.q = s.q.ptr, p.out = s.attended.ptr, p.kv = s.pool.ptr, p.block_table = s.table.ptr, p.pieces = s.pieces.ptr, p.piece_start = s.piece_start.ptr;
    p.partial_out = scratch.out.ptr, p.partial_max_sum = scratch.max_sum.ptr, p.arrivals = scratch.arrivals.ptr;
    p.scale = 0.088f, p.num_heads = H, p.num_kv_heads = K, p.block_size_log2 = 4, p.q_stride = p.out_stride = H * E, p.q_type = p.out_type = 2;
    launch(s.form.run, dim3(s.grid_x, K), dim3(s.form.warps * 32), s.form.shared, st, true, p);
}

int main() {
    cudaDeviceProp prop;
    CHECK(cudaGetDeviceProperties(&prop, 0));
    const int sms = prop.multiProcessorCount;
    Scratch scratch;
    for (auto& form : FORMS) CHECK(cudaFuncSetAttribute(form.run, cudaFuncAttributeMaxDynamicSharedMemorySize, form.shared));
    printf("nothing: %.2f us\n", graph_time_us(256, [&](cudaStream_t st, int) { launch(nothing, dim3(1), dim3(128), 0, st, true, 0); }));
    for (int rows : {1, 4, 8, 16, 32, 64, 256}) {
        Step s(rows, 200, sms, FORMS[0]);
        printf("norm %d rows: %.2f us\n", rows, graph_time_us(256, [&](cudaStream_t st, int i) { s.norm(st, i, 512); }));
        printf("heads %d rows: %.2f us\n", rows, graph_time_us(256, [&](cudaStream_t st, int) { s.heads(st); }));
        Buffer<float> planes(size_t(8) * rows * COLS);
        planes.fill(9, 1);
        for (int count : {2, 4, 8})
            printf("norm of %d planes, %d rows: %.2f us\n", count, rows, graph_time_us(256, [&](cudaStream_t st, int) { s.norm_of_planes(st, planes.ptr, count); }));
    }
    printf("microseconds: attention; heads and attention; norm, heads, attention, norm\n");
    for (int rows : {1, 2, 3, 4, 8, 9, 16})
        for (uint32_t len : {128, 250, 384, 512, 768, 1024, 1536})
            for (auto& form : FORMS) {
                if (rows * form.blocks * K > sms) continue;
                Step s(rows, len, sms, form);
                const double alone = graph_time_us(128, [&](cudaStream_t st, int) { attention(s, scratch, st); });
                const double pair = graph_time_us(128, [&](cudaStream_t st, int) { s.heads(st), attention(s, scratch, st); });
                const double chain =
                    graph_time_us(64, [&](cudaStream_t st, int i) { s.norm(st, i, 512), s.heads(st), attention(s, scratch, st), s.norm(st, i, 512); });
                printf("%3d x %4u %-6s %6.2f %6.2f %6.2f\n", rows, len, form.name, alone, pair, chain);
            }
    for (int rows : {512, 2048, 8192}) {
        Step s(rows, 16, sms, FORMS[0]);
        for (int log2 : {2, 3, 5}) printf("heads %d rows, %d warps a token: %.2f us\n", rows, 1 << log2, graph_time_us(64, [&](cudaStream_t st, int) { s.heads(st, log2); }));
        for (int threads : {256, 512}) printf("norm %d rows, %d threads: %.2f us\n", rows, threads, graph_time_us(64, [&](cudaStream_t st, int i) { s.norm(st, i, threads); }));
    }
    return 0;
}
