// Sums over the ranks of a stage, in one launch on each of them: every rank writes its part into the inboxes of all
// others over peer memory, and sums what lies in its own. For small messages, where the way there is what costs;
// NCCL takes the large ones. One form also adds the sum to the residual stream and norms it.
//
// Nothing here waits for a fence: four bytes of data and the call's number travel as one word of eight bytes, which
// is written and read whole (64-bit relaxed accesses at system scope), so that a word that shows the number holds
// the data. A block counts its own calls in device memory, so that a recorded launch needs no new argument.
//
//   inbox  [2 parities][ranks: from whom][blocks][PACKS x words of a pack]   16 bytes: two words
//
// Two parities suffice: a block that writes call e has seen all others' call e - 1, and they began that only when
// all of their call e - 2 had been read. Every block waits for the blocks of its own index only, and writes before
// it waits: it does not matter which blocks of a launch run at the same time.
//
// Sums run in rank order in f32 and are rounded to the activations' type, on all ranks alike; what follows is, to
// the bit, what `rms_norm` in rows.cu does with the sum.
#include "element.cuh"
#include "overlap.cuh"

constexpr int MAX_RANKS = 8;
constexpr uint32_t MAX_BLOCKS = 128;
constexpr uint32_t MAX_PACKS = 2048;       // of a block
constexpr int PACK = 4;                    // elements that a thread moves at a time
constexpr int PACKS_PER_THREAD = 4;        // at most, with MAX_THREADS
constexpr uint32_t MAX_THREADS = 512;
constexpr uint32_t POLLS_BETWEEN_LOOKS = 1024;
// From so many elements on, those that wait look less often: reads of lines that a peer is writing hold the writes up.
constexpr uint32_t CROWD = 32768;
constexpr uint32_t CROWD_PAUSE_NS = 200;
static_assert(PACKS_PER_THREAD * MAX_THREADS == MAX_PACKS, "a block's threads hold all of its packs");

// Two words: data in the lower halves, the call's number in the upper ones.
struct alignas(16) Line {
    unsigned long long a, b;
};

struct ReduceArgs {
    Line* inboxes[MAX_RANKS];  // by rank; the own one is read, the others are written
    uint32_t* calls;           // [MAX_BLOCKS], this rank's
    const uint32_t* halt;      // in the host's memory: not 0 when nobody may wait any more
    uint32_t* report;          // in the host's memory: 1 + the rank that was waited for in vain
    void* x;                   // [count]: this rank's part; the sum, where there is no residual
    float* residual;           // [count]; the sum is added to it. Null: none, and no norm.
    const float* weight;       // [per_block]
    void* out;                 // [count], of x's type: the norm
    uint64_t patience_ns;      // how long one wait may take
    uint32_t count;            // elements; a multiple of PACK
    uint32_t per_block;        // elements of a block; a row's where there is a norm
    uint32_t rank, num_ranks;
    float eps;
};

__device__ __forceinline__ void write_line(Line* to, uint32_t x, uint32_t y, uint32_t call) {
    const unsigned long long number = static_cast<unsigned long long>(call) << 32;
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(number | x), "l"(number | y) : "memory");
}

__device__ __forceinline__ Line read_line(const Line* from) {
    Line line;
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(line.a), "=l"(line.b) : "l"(from) : "memory");
    return line;
}

__device__ __forceinline__ uint64_t now_ns() {
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// A line of this call. Gives up, with whatever is there, when the host says so or patience ends.
__device__ __forceinline__ Line await_line(const Line* from, uint32_t call, const ReduceArgs& args, uint32_t sender) {
    uint64_t began = 0;
    for (uint32_t polls = 1;; ++polls) {
        const Line line = read_line(from);
        if (uint32_t(line.a >> 32) == call && uint32_t(line.b >> 32) == call) return line;
        if (args.count >= CROWD) __nanosleep(CROWD_PAUSE_NS);
        if (polls % POLLS_BETWEEN_LOOKS != 0) continue;
        if (*static_cast<const volatile uint32_t*>(args.halt) != 0) return line;
        const uint64_t now = now_ns();
        if (began == 0) began = now;
        if (now - began > args.patience_ns) {
            *static_cast<volatile uint32_t*>(args.report) = 1 + sender;
            return line;
        }
    }
}

// Sends and sums the pack at `p` of this block; the sum is as the activations' type holds it.
template <class T> struct Exchange {
    static constexpr int LINES = sizeof(T) * PACK / 8;
    const ReduceArgs& args;
    uint32_t call;

    // Lines of neighbouring threads are neighbours.
    __device__ __forceinline__ size_t place(uint32_t sender, uint32_t p, int line) const {
        const size_t box = (size_t(call & 1) * args.num_ranks + sender) * MAX_BLOCKS + blockIdx.x;
        return (box * 2 + line) * MAX_PACKS + p;
    }

    __device__ __forceinline__ void send(const Pack<T, PACK>& pack, uint32_t p) const {
        const uint32_t* words = reinterpret_cast<const uint32_t*>(&pack);
        for (uint32_t step = 1; step < args.num_ranks; ++step) {
            // Each rank begins with another peer.
            uint32_t peer = args.rank + step;
            if (peer >= args.num_ranks) peer -= args.num_ranks;
#pragma unroll
            for (int line = 0; line < LINES; ++line) {
                write_line(args.inboxes[peer] + place(args.rank, p, line), words[2 * line], words[2 * line + 1], call);
            }
        }
    }

    __device__ __forceinline__ void sum(const Pack<T, PACK>& own, uint32_t p, float (&sums)[PACK]) const {
        for (uint32_t sender = 0; sender < args.num_ranks; ++sender) {
            Pack<T, PACK> pack = own;
            if (sender != args.rank) {
                uint32_t* words = reinterpret_cast<uint32_t*>(&pack);
#pragma unroll
                for (int i = 0; i < LINES; ++i) {
                    const Line line =
                        await_line(args.inboxes[args.rank] + place(sender, p, i), call, args, sender);
                    words[2 * i] = uint32_t(line.a);
                    words[2 * i + 1] = uint32_t(line.b);
                }
            }
#pragma unroll
            for (int i = 0; i < PACK; ++i) sums[i] = sender == 0 ? to_f32(pack.at[i]) : sums[i] + to_f32(pack.at[i]);
        }
#pragma unroll
        for (int i = 0; i < PACK; ++i) sums[i] = to_f32(from_f32<T>(sums[i]));
    }
};

// The block's part of x: [first, first + PACK * packs).
struct Share {
    size_t first;
    uint32_t packs;
};

__device__ __forceinline__ Share share_of(const ReduceArgs& args) {
    const size_t first = size_t(blockIdx.x) * args.per_block;
    return {first, uint32_t(min(size_t(args.per_block), args.count - first)) / PACK};
}

// Every thread has read the number of the call; the next launch of this block has the next one.
__device__ __forceinline__ void count_call(const ReduceArgs& args, uint32_t call) {
    __syncthreads();
    if (threadIdx.x == 0) args.calls[blockIdx.x] = call;
}

template <class T> __device__ __forceinline__ void all_reduce(const ReduceArgs& args) {
    pagemill::wait_for_previous_kernel();
    pagemill::release_next_kernel();
    const Share share = share_of(args);
    const Exchange<T> exchange{args, args.calls[blockIdx.x] + 1};
    T* x = static_cast<T*>(args.x) + share.first;
    Pack<T, PACK> own[PACKS_PER_THREAD];
#pragma unroll
    for (int k = 0; k < PACKS_PER_THREAD; ++k) {
        const uint32_t p = threadIdx.x + k * blockDim.x;
        if (p >= share.packs) break;
        own[k] = *reinterpret_cast<const Pack<T, PACK>*>(x + p * PACK);
        exchange.send(own[k], p);
    }
#pragma unroll
    for (int k = 0; k < PACKS_PER_THREAD; ++k) {
        const uint32_t p = threadIdx.x + k * blockDim.x;
        if (p >= share.packs) break;
        float sums[PACK];
        exchange.sum(own[k], p, sums);
        store_f32<PACK>(x + p * PACK, sums);
    }
    count_call(args, exchange.call);
}

// residual += sum, out = norm of residual; a block has one row.
template <class T> __device__ __forceinline__ void all_reduce_add_norm(const ReduceArgs& args) {
    pagemill::wait_for_previous_kernel();
    pagemill::release_next_kernel();
    const Share share = share_of(args);
    const Exchange<T> exchange{args, args.calls[blockIdx.x] + 1};
    const T* x = static_cast<const T*>(args.x) + share.first;
    T* out = static_cast<T*>(args.out) + share.first;
    float* residual = args.residual + share.first;
    Pack<T, PACK> own[PACKS_PER_THREAD];
    float v[PACKS_PER_THREAD][PACK];
#pragma unroll
    for (int k = 0; k < PACKS_PER_THREAD; ++k) {
        const uint32_t p = threadIdx.x + k * blockDim.x;
        if (p >= share.packs) break;
        own[k] = *reinterpret_cast<const Pack<T, PACK>*>(x + p * PACK);
        exchange.send(own[k], p);
    }
    // Under the words' way: what is there already.
    float r[PACKS_PER_THREAD][PACK], w[PACKS_PER_THREAD][PACK];
#pragma unroll
    for (int k = 0; k < PACKS_PER_THREAD; ++k) {
        const uint32_t p = threadIdx.x + k * blockDim.x;
        if (p >= share.packs) break;
        load_f32<PACK>(residual + p * PACK, r[k]);
        load_f32<PACK>(args.weight + p * PACK, w[k]);
    }
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < PACKS_PER_THREAD; ++k) {
        const uint32_t p = threadIdx.x + k * blockDim.x;
        if (p >= share.packs) break;
        exchange.sum(own[k], p, v[k]);
#pragma unroll
        for (int i = 0; i < PACK; ++i) v[k][i] += r[k][i];
        store_f32<PACK>(residual + p * PACK, v[k]);
#pragma unroll
        for (int i = 0; i < PACK; ++i) sum += v[k][i] * v[k][i];
    }
    const float inverse_rms = 1.0f / sqrtf(block_sum(sum) / float(args.per_block) + args.eps);
#pragma unroll
    for (int k = 0; k < PACKS_PER_THREAD; ++k) {
        const uint32_t p = threadIdx.x + k * blockDim.x;
        if (p >= share.packs) break;
#pragma unroll
        for (int i = 0; i < PACK; ++i) v[k][i] = v[k][i] * inverse_rms * w[k][i];
        store_f32<PACK>(out + p * PACK, v[k]);
    }
    count_call(args, exchange.call);
}

extern "C" __global__ void __launch_bounds__(512) all_reduce_f32(const __grid_constant__ ReduceArgs args) {
    all_reduce<float>(args);
}
extern "C" __global__ void __launch_bounds__(512) all_reduce_bf16(const __grid_constant__ ReduceArgs args) {
    all_reduce<bf16>(args);
}
extern "C" __global__ void __launch_bounds__(512) all_reduce_add_norm_f32(const __grid_constant__ ReduceArgs args) {
    all_reduce_add_norm<float>(args);
}
extern "C" __global__ void __launch_bounds__(512) all_reduce_add_norm_bf16(const __grid_constant__ ReduceArgs args) {
    all_reduce_add_norm<bf16>(args);
}

struct MarkArgs {
    uint32_t* word; // in the host's memory
};

// Counts on: odd while the stream is inside a collective of NCCL.
extern "C" __global__ void mark_collective(MarkArgs args) {
    volatile uint32_t* word = args.word;
    *word = *word + 1;
}
