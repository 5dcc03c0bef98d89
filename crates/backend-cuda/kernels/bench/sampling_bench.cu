// Times of the sampling kernel over [R, V] logits: like a model's, and flat. Rotates over as many buffers as exceed L2.
// nvcc -std=c++17 -O3 --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a sampling_bench.cu
#include "harness.cuh"
#include "../sampling.cu"
#include <string>

struct Kind {
    const char* name;
    uint32_t how, top_k;
    float top_p, min_p;
    uint32_t num_prompt, num_top;
};

// One token in 8,192, as a model that has an opinion.
__global__ void lift(float* x, size_t len) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < len / 8192; i += size_t(gridDim.x) * blockDim.x)
        x[i * 8192 + i * 37 % 8192] += 15.0f;
}

int main() {
    const uint32_t vocab = 128256;
    CHECK(cudaFuncSetAttribute(sample_rows_f32, cudaFuncAttributeMaxDynamicSharedMemorySize, MAX_GROUPS * GROUP * 4));
    CHECK(cudaFuncSetAttribute(sample_rows_f32, cudaFuncAttributePreferredSharedMemoryCarveout, 100));
    const Kind kinds[] = {
        {"greedy among others", LARGEST, 0, 1.0f, 0.0f, 0, NO_REPORT},
        {"temperature", DRAW, 0, 1.0f, 0.0f, 0, NO_REPORT},
        {"min-p 0.05", DRAW, 0, 1.0f, 0.05f, 0, NO_REPORT},
        {"top-p 0.9", DRAW, 0, 0.9f, 0.0f, 0, NO_REPORT},
        {"top-k 50", DRAW, 50, 1.0f, 0.0f, 0, NO_REPORT},
        {"top-k 50, top-p 0.9", DRAW, 50, 0.9f, 0.0f, 0, NO_REPORT},
        {"penalties (1,000 ids), top-p", DRAW, 0, 0.9f, 0.0f, 1000, NO_REPORT},
        {"temperature, 20 logprobs", DRAW, 0, 1.0f, 0.0f, 0, 20},
    };
    printf("microseconds, V = %u; largest alone: largest_f32\n", vocab);
    for (int shape = 0; shape < 3; ++shape) {
        const float scale = shape == 2 ? 0.02f : 2.5f;
        const char* shapes[] = {"deviation 2.5, some tokens 15 higher", "deviation 2.5", "deviation 0.02"};
        printf("%s\n%-32s %10s %10s %10s\n", shapes[shape], "", "R = 1", "R = 64", "R = 256");
        for (int nth = -1; nth < int(sizeof(kinds) / sizeof(kinds[0])); ++nth) {
            printf("%-32s", nth < 0 ? "largest alone" : kinds[nth].name);
            for (uint32_t rows : {1u, 64u, 256u}) {
                const size_t count = size_t(rows) * vocab;
                const int buffers = int(std::min<size_t>(std::max<size_t>(2, (200u << 20) / (count * 4)), 64));
                bench::Buffer<float> logits(count * buffers);
                bench::fill_kernel<<<1024, 256>>>(logits.ptr, logits.len, 7, scale);
                if (shape == 0) lift<<<1024, 256>>>(logits.ptr, logits.len);
                bench::Buffer<unsigned long long> best(rows);
                std::vector<uint32_t> ids(1000);
                for (uint32_t i = 0; i < ids.size(); ++i) ids[i] = i * 128;
                std::vector<Task> tasks(rows);
                for (uint32_t row = 0; row < rows && nth >= 0; ++row) {
                    const Kind& kind = kinds[nth];
                    Task& task = tasks[row] = Task{};
                    task.row = row, task.how = kind.how, task.top_k = kind.top_k, task.inv_t = 1.0f / 0.8f;
                    task.top_p = kind.top_p, task.min_p = kind.min_p, task.repetition_penalty = 1.1f;
                    task.num_top = kind.num_top, task.top_at = row * 20, task.num_prompt = kind.num_prompt;
                    const double uniform = (row + 0.5) / rows;
                    uint64_t bits;
                    memcpy(&bits, &uniform, 8);
                    task.uniform_low = uint32_t(bits), task.uniform_high = uint32_t(bits >> 32);
                }
                bench::Buffer<Task> on_device(rows);
                bench::Buffer<uint32_t> lists(ids.size());
                bench::Buffer<Outcome> outcomes(rows);
                bench::Buffer<Top> tops(rows * 20);
                CHECK(cudaMemcpy(on_device.ptr, tasks.data(), rows * sizeof(Task), cudaMemcpyHostToDevice));
                CHECK(cudaMemcpy(lists.ptr, ids.data(), ids.size() * 4, cudaMemcpyHostToDevice));
                cudaStream_t stream;
                CHECK(cudaStreamCreate(&stream));
                const auto launch = [&](int nth_buffer) {
                    const float* x = logits.ptr + count * (nth_buffer % buffers);
                    if (nth < 0) {
                        const uint32_t across = (vocab + LARGEST_COLUMNS - 1) / LARGEST_COLUMNS;
                        largest_f32<<<dim3(rows, across), 256, 0, stream>>>(LargestArgs{x, best.ptr, vocab});
                        return;
                    }
                    const uint32_t groups = (vocab + GROUP * TEAM - 1) / (GROUP * TEAM);
                    cudaLaunchAttribute attribute;
                    attribute.id = cudaLaunchAttributeClusterDimension;
                    attribute.val.clusterDim.x = TEAM, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
                    cudaLaunchConfig_t config{};
                    config.gridDim = dim3(TEAM, rows), config.blockDim = dim3(THREADS);
                    config.dynamicSmemBytes = groups * GROUP * 4, config.stream = stream;
                    config.attrs = &attribute, config.numAttrs = 1;
                    const SamplingArgs args{x, on_device.ptr, lists.ptr, outcomes.ptr, tops.ptr, vocab, groups};
                    CHECK(cudaLaunchKernelEx(&config, sample_rows_f32, args));
                };
                const int launches = 20;
                cudaGraph_t graph;
                cudaGraphExec_t exec;
                CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
                for (int i = 0; i < launches; ++i) launch(i);
                CHECK(cudaStreamEndCapture(stream, &graph));
                CHECK(cudaGraphInstantiate(&exec, graph, 0));
                std::vector<float> times;
                cudaEvent_t start, end;
                CHECK(cudaEventCreate(&start));
                CHECK(cudaEventCreate(&end));
                for (int round = 0; round < 12; ++round) {
                    CHECK(cudaEventRecord(start, stream));
                    CHECK(cudaGraphLaunch(exec, stream));
                    CHECK(cudaEventRecord(end, stream));
                    CHECK(cudaStreamSynchronize(stream));
                    float ms;
                    CHECK(cudaEventElapsedTime(&ms, start, end));
                    if (round > 1) times.push_back(ms * 1000 / launches);
                }
                std::sort(times.begin(), times.end());
                printf(" %10.1f", times[times.size() / 2]);
                fflush(stdout);
                CHECK(cudaGraphExecDestroy(exec));
                CHECK(cudaGraphDestroy(graph));
                CHECK(cudaStreamDestroy(stream));
            }
            printf("\n");
        }
    }
}
