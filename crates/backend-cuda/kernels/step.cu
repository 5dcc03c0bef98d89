// Between two steps: the draws of one go to the host, and the words of the next come from there. The host's memory is
// read and written in place: a copy by the copy engines takes 5 us between two kernels, whatever its length.
#include "overlap.cuh"
#include "outcome.cuh"

using namespace pagemill;

struct BringArgs {
    const uint4* from; // [num_packs], the host's
    uint4* to;         // [num_packs]
    uint32_t num_packs;
};

// Copies words of the host, which were there before the launch.
extern "C" __global__ void bring_words(BringArgs args) {
    const uint32_t first = blockIdx.x * blockDim.x + threadIdx.x;
    uint4 pack;
    if (first < args.num_packs) pack = args.from[first];
    wait_for_previous_kernel();
    if (first < args.num_packs) args.to[first] = pack;
    for (uint32_t at = first + gridDim.x * blockDim.x; at < args.num_packs; at += gridDim.x * blockDim.x) {
        args.to[at] = args.from[at];
    }
}

struct HandOutArgs {
    const uint32_t* draws; // [num_words]
    uint32_t* to;          // [num_words], the host's
    uint32_t* flag;        // the host's
    uint32_t num_words;
    uint32_t serial; // what the flag is when all words are there
};

// One thread block copies draws to the host and tells it.
extern "C" __global__ void hand_out(HandOutArgs args) {
    release_next_kernel();
    wait_for_previous_kernel();
    for (uint32_t at = threadIdx.x; at < args.num_words; at += blockDim.x) args.to[at] = args.draws[at];
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) *reinterpret_cast<volatile uint32_t*>(args.flag) = args.serial;
}

struct AwaitedToken {
    uint32_t token; // of the step at hand
    uint32_t task;  // of the step before
};

struct BeginStepArgs {
    const uint32_t* from;        // [num_ids], the host's
    const AwaitedToken* awaited; // [num_awaited], the host's
    uint32_t* ids;               // [num_ids] of the step at hand
    const uint32_t* draws;       // of the step before
    uint32_t num_ids;
    uint32_t num_awaited;
    uint32_t draw_words; // of a draw: 2 as `largest_f32` leaves them, those of an `Outcome` as `sample_rows_f32` does
};

// One thread block brings the ids of a step, and puts what the step before drew among them; 0 where nothing could be
// drawn.
extern "C" __global__ void begin_step(BeginStepArgs args) {
    const AwaitedToken* awaited = args.awaited;
    const uint32_t first = threadIdx.x;
    AwaitedToken first_awaited = {0, 0};
    uint32_t first_id = 0;
    if (first < args.num_ids) first_id = args.from[first];
    if (first < args.num_awaited) first_awaited = awaited[first];
    wait_for_previous_kernel();
    if (first < args.num_ids) args.ids[first] = first_id;
    for (uint32_t at = first + blockDim.x; at < args.num_ids; at += blockDim.x) args.ids[at] = args.from[at];
    __syncthreads();
    for (uint32_t at = first; at < args.num_awaited; at += blockDim.x) {
        const AwaitedToken token = at == first ? first_awaited : awaited[at];
        const uint32_t* draw = args.draws + size_t(token.task) * args.draw_words;
        args.ids[token.token] = args.draw_words == 2 ? sampling::drawn_of_largest(draw)
                                                       : sampling::drawn_of_outcome(draw);
    }
}
