// Sampling where the logits are: a token, its rank and the likeliest tokens of each task's row. Semantics are those of
// `pagemill_backend::sampling`, whose reference gives the same bits; how tokens are searched is in sampling_team.cuh.
//
// A team of eight thread blocks reads a row once into shared memory, where everything else happens.
#include "sampling_team.cuh"

using namespace pagemill::sampling;

// How a task's token is chosen.
enum How : uint32_t { LARGEST = 0, DRAW = 1, GIVEN = 2 };

constexpr uint32_t NO_REPORT = 0xffffffffu;

// One task; offsets in words of `lists`.
struct Task {
    uint32_t row;
    uint32_t how;
    uint32_t token;                 // GIVEN
    uint32_t top_k;                 // 0: all
    float inv_t, top_p, min_p;
    float repetition_penalty, presence_penalty, frequency_penalty;
    uint32_t num_top;               // at most MAX_TOP, or NO_REPORT
    uint32_t top_at;                // the task's first of `tops`
    uint32_t bias_at, num_bias;     // (id, bits of a float)
    uint32_t prompt_at, num_prompt; // ids, ascending
    uint32_t counts_at, num_counts; // (id, count)
    uint32_t masked_at, num_masked; // ids
    uint32_t uniform_low, uniform_high; // bits of a double in [0, 1)
};

// A likely token and its logit.
struct Top {
    uint32_t id;
    float logit;
};

struct SamplingArgs {
    const float* logits;  // [R, cols]
    const Task* tasks;    // [gridDim.y]
    const uint32_t* lists;
    Outcome* outcomes;    // [gridDim.y]
    Top* tops;
    uint32_t cols;
    uint32_t slice_groups; // groups of a slice
};

// Copies the slice from memory; gives the place of the first of this thread's tokens, 0 if there is one that no row may
// hold.
__device__ uint32_t load_slice(Row& row, const float* logits, uint32_t len, bool wide) {
    const uint32_t padded = row.num_groups * GROUP;
    for (uint32_t at = threadIdx.x * 4; at < padded; at += THREADS * 4) {
        if (wide && at + 4 <= len) {
            const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(row.slice + at));
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(logits + at) : "memory");
        } else {
            for (uint32_t i = at; i < at + 4; ++i) row.slice[i] = i < len ? logits[i] : -INFINITY;
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    uint32_t best = ALL;
    bool is_bad = false;
    // Each thread reads what it has copied itself.
    for (uint32_t at = threadIdx.x * 4; at < padded; at += THREADS * 4) {
        const float4 x = *reinterpret_cast<const float4*>(row.slice + at);
        const auto look = [&](float logit) {
            is_bad |= isnan(logit) || logit == INFINITY;
            best = min(best, place_of(logit));
        };
        look(x.x), look(x.y), look(x.z), look(x.w);
    }
    return is_bad ? 0 : best;
}

// Edits of single logits, each in the order of `LogitEdits`. A list's ids are distinct, so that a logit has one thread
// for each list; ids of other slices, and beyond the row, are passed over.
struct Edits {
    const Task& task;
    const uint32_t* lists;
    uint32_t len; // of the slice

    __device__ bool any() const {
        return task.num_bias + task.num_prompt + task.num_counts + task.num_masked != 0;
    }

    template <class Change>
    __device__ void list(Row& row, uint32_t at, uint32_t num, uint32_t words, Change change) const {
        for (uint32_t i = threadIdx.x; i < num; i += THREADS) {
            const uint32_t* entry = lists + at + i * words;
            const uint32_t local = entry[0] - row.first_id;
            if (local < len) row.slice[local] = change(row.slice[local], entry);
        }
        __syncthreads();
    }

    static __device__ float finite(float x) { return fminf(fmaxf(x, -3.402823466e38f), 3.402823466e38f); }

    __device__ float penalised(float x) const {
        const float penalty = task.repetition_penalty;
        return finite(x < 0.0f ? __fmul_rn(x, penalty) : __fdiv_rn(x, penalty));
    }

    __device__ bool is_in_prompt(uint32_t id) const {
        uint32_t low = 0, high = task.num_prompt;
        while (low < high) {
            const uint32_t middle = (low + high) / 2;
            if (lists[task.prompt_at + middle] < id) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        return low < task.num_prompt && lists[task.prompt_at + low] == id;
    }

    __device__ void apply(Row& row) const {
        list(row, task.bias_at, task.num_bias, 2,
             [&](float x, const uint32_t* entry) { return finite(__fadd_rn(x, __uint_as_float(entry[1]))); });
        list(row, task.prompt_at, task.num_prompt, 1, [&](float x, const uint32_t*) { return penalised(x); });
        list(row, task.counts_at, task.num_counts, 2, [&](float x, const uint32_t* entry) {
            if (task.repetition_penalty != 1.0f && !is_in_prompt(entry[0])) x = penalised(x);
            if (task.presence_penalty == 0.0f && task.frequency_penalty == 0.0f) return x;
            const float by_count = __fmul_rn(task.frequency_penalty, static_cast<float>(entry[1]));
            return finite(__fsub_rn(x, __fadd_rn(task.presence_penalty, by_count)));
        });
        list(row, task.masked_at, task.num_masked, 1, [&](float, const uint32_t*) { return -3.402823466e38f; });
    }

    // Puts the logits back; `logits` is the slice in memory.
    __device__ void undo(Row& row, const float* logits) const {
        const auto raw = [&](float, const uint32_t* entry) { return logits[entry[0] - row.first_id]; };
        list(row, task.bias_at, task.num_bias, 2, raw);
        list(row, task.prompt_at, task.num_prompt, 1, raw);
        list(row, task.counts_at, task.num_counts, 2, raw);
        list(row, task.masked_at, task.num_masked, 1, raw);
    }
};

// The token at share `uniform` of the kept mass, laid out in the order of ids.
template <class Units> __device__ uint32_t draw_token(Row& row, Units units, double uniform) {
    Shared& shared = row.shared;
    unsigned long long own = 0;
    for (uint32_t group = row.warp; group < row.num_groups; group += WARPS) {
        const uint32_t at = group * GROUP + row.lane * 4;
        const float4 x = *reinterpret_cast<const float4*>(row.slice + at);
        const uint32_t id = row.first_id + at;
        unsigned long long mass = units(x.x, id) + units(x.y, id + 1) + units(x.z, id + 2) + units(x.w, id + 3);
        own += mass;
#pragma unroll
        for (int step = 16; step > 0; step /= 2) mass += __shfl_xor_sync(ALL, mass, step);
        if (row.lane == 0) shared.group_mass[group] = mass;
    }
    const unsigned long long total = row.team_sum(own);
    // The largest logit weighs 2^44 units: there is always a token.
    const unsigned long long target = min(static_cast<unsigned long long>(uniform * __ull2double_rn(total)), total - 1);
    unsigned long long before = 0;
    for (int peer = 0; peer < row.rank; ++peer) before += shared.of_peer[peer];
    uint32_t token = ALL;
    // One slice has the token, and its first warp looks for it.
    if (before <= target && target - before < shared.of_peer[row.rank] && row.warp == 0) {
        uint32_t group = 0;
        for (uint32_t first = 0; first < row.num_groups; first += 32) {
            const bool is_there = first + row.lane < row.num_groups;
            unsigned long long through = is_there ? shared.group_mass[first + row.lane] : 0;
            const unsigned long long mass = through;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const unsigned long long left = __shfl_up_sync(ALL, through, step);
                if (row.lane >= step) through += left;
            }
            const uint32_t behind = __ballot_sync(ALL, before + through > target);
            if (behind != 0) {
                const int at = __ffs(behind) - 1;
                group = first + at;
                before += __shfl_sync(ALL, through - mass, at);
                break;
            }
            before += __shfl_sync(ALL, through, 31);
        }
        const uint32_t at = group * GROUP + row.lane * 4, id = row.first_id + at;
        unsigned long long mass[4], through = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) through += mass[i] = units(row.slice[at + i], id + i);
        unsigned long long lane_before = through;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const unsigned long long left = __shfl_up_sync(ALL, through, step);
            if (row.lane >= step) through += left;
        }
        lane_before = before + through - lane_before;
        if (lane_before <= target && before + through > target) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (token == ALL && lane_before + mass[i] > target) token = id + i;
                lane_before += mass[i];
            }
        }
    }
    return static_cast<uint32_t>(row.team_min(token));
}

// The cut of top-p: the fewest first in order whose share of what `outer` keeps reaches `p`.
__device__ Cut top_p_cut(Row& row, const Softmax& softmax, const Cut& outer, float p, uint32_t cols) {
    unsigned long long total = 0;
    const auto units = [&](float logit, uint32_t place, uint32_t id) {
        return outer.keeps(place, id) ? units_of(softmax.weight(logit)) : 0ull;
    };
    row.each([&](float logit, uint32_t id) { total += units(logit, place_of(logit), id); });
    total = row.team_sum(total);
    const double share = ceil(static_cast<double>(p) * __ull2double_rn(total));
    const unsigned long long target = max(min(static_cast<unsigned long long>(share), total), 1ull);
    // Tokens of at most so many units make up no more than what may be left out, all together: the cut lies before
    // them, and most tokens of most rows need not be looked at. A little lower, for the rounding of weights.
    const unsigned long long light = (total - target) / cols;
    float limit = -INFINITY;
    if (light != 0) {
        const double exponent = log(__ull2double_rn(light)) - 44.0 * 0.69314718055994531 - 1e-3;
        limit = __double2float_rd(softmax.max + exponent / softmax.inv_t);
    }
    const uint32_t last = min(outer.place, place_of(limit));
    const Cut cut = row.search<true>(place_of(softmax.max), last, target, units);
    return outer.keeps(cut) ? cut : outer;
}

// Chooses from a row whose edits are made.
__device__ uint32_t choose(Row& row, const Task& task, const Extent& extent, uint32_t cols) {
    const float largest = extent.largest();
    if (task.how == LARGEST) {
        uint32_t first = ALL;
        row.each([&](float logit, uint32_t id) { first = logit == largest ? min(first, id) : first; });
        return static_cast<uint32_t>(row.team_min(first));
    }
    const Softmax softmax{largest, task.inv_t};
    const Cut no_cut{place_of(-INFINITY), ALL};
    Cut cut = no_cut;
    if (task.top_k != 0) cut = row.first_tokens(extent, task.top_k);
    if (task.top_p < 1.0f) cut = top_p_cut(row, softmax, cut, task.top_p, cols);
    const double uniform = __hiloint2double(task.uniform_high, task.uniform_low);
    if (no_cut.place == cut.place && cut.id == ALL) {
        const auto units = [&](float logit, uint32_t) {
            const float weight = softmax.weight(logit);
            return weight >= task.min_p ? units_of(weight) : 0ull;
        };
        return draw_token(row, units, uniform);
    }
    const auto units = [&](float logit, uint32_t id) {
        if (!cut.keeps(place_of(logit), id)) return 0ull;
        const float weight = softmax.weight(logit);
        return weight >= task.min_p ? units_of(weight) : 0ull;
    };
    return draw_token(row, units, uniform);
}

// Writes the `num_top` likeliest tokens of the row, best first.
__device__ void report_top(Row& row, const Extent& extent, uint32_t num_top, Top* tops) {
    Shared& shared = row.shared;
    const Cut cut = row.first_tokens(extent, num_top);
    if (threadIdx.x == 0) shared.list_len = 0;
    __syncthreads();
    row.each([&](float logit, uint32_t id) {
        const uint32_t place = place_of(logit);
        if (!cut.keeps(place, id)) return;
        const uint32_t at = atomicAdd(&shared.list_len, 1u);
        if (at < MAX_TOP) shared.list[at] = static_cast<unsigned long long>(place) << 32 | id;
    });
    meet_team();
    if (row.rank != 0 || row.warp != 0) return;
    unsigned long long mine = ~0ull;
    uint32_t before = 0;
    for (int peer = 0; peer < TEAM; ++peer) {
        const uint32_t len = read_peer(&shared.list_len, peer);
        const uint32_t at = row.lane - before;
        if (at < len) mine = read_peer(&shared.list[at], peer);
        before += len;
    }
    uint32_t position = 0;
#pragma unroll
    for (int other = 0; other < 32; ++other) position += __shfl_sync(ALL, mine, other) < mine ? 1 : 0;
    if (position < num_top && mine != ~0ull) {
        tops[position] = Top{static_cast<uint32_t>(mine), logit_at(static_cast<uint32_t>(mine >> 32))};
    }
}

__device__ void run_task(Row& row, const SamplingArgs& args, const Task& task, Outcome& outcome) {
    const float* whole = args.logits + size_t(task.row) * args.cols;
    const float* logits = whole + row.first_id;
    const uint32_t len = row.first_id < args.cols ? min(args.cols - row.first_id, row.num_groups * GROUP) : 0;
    const bool is_leader = row.rank == 0 && threadIdx.x == 0;
    Extent extent = row.extent(load_slice(row, logits, len, args.cols % 4 == 0));
    if (extent.first == 0 || extent.first == place_of(-INFINITY)) {
        if (is_leader) outcome.is_good = 0;
        return;
    }
    if (is_leader) outcome.is_good = 1, outcome.max = extent.largest();
    const bool reports = task.num_top != NO_REPORT;
    if (reports) {
        const Softmax softmax{extent.largest(), 1.0f};
        unsigned long long sum = 0;
        row.each([&](float logit, uint32_t) { sum += units_of(softmax.weight(logit)); });
        sum = row.team_sum(sum);
        if (is_leader) outcome.sum_low = static_cast<uint32_t>(sum), outcome.sum_high = static_cast<uint32_t>(sum >> 32);
        if (task.num_top != 0) report_top(row, extent, task.num_top, args.tops + task.top_at);
    }
    uint32_t token = task.token;
    if (task.how != GIVEN) {
        const Edits edits{task, args.lists, len};
        const bool edited = edits.any();
        if (edited) {
            __syncthreads();
            edits.apply(row);
            uint32_t first = ALL;
            row.each([&](float logit, uint32_t) { first = min(first, place_of(logit)); });
            extent = row.extent(first);
        }
        token = choose(row, task, extent, args.cols);
        if (edited && reports) edits.undo(row, logits);
    }
    if (is_leader) outcome.token = token;
    if (!reports) return;
    const float logit = token < args.cols ? whole[token] : -INFINITY;
    const Cut at{place_of(logit), token};
    unsigned long long better = 0;
    row.each([&](float x, uint32_t id) { better += at.keeps(place_of(x), id) && id != token ? 1 : 0; });
    better = row.team_sum(better);
    if (is_leader) outcome.rank = static_cast<uint32_t>(better) + 1, outcome.logit = logit;
}

struct LargestArgs {
    const float* x;           // [gridDim.x, cols]
    unsigned long long* best; // [gridDim.x], all ones
    uint32_t cols;
};

constexpr int LARGEST_THREADS = 256;
constexpr int LARGEST_COLUMNS = 8192; // of a row that one thread block reads

// The first token in order of each row: its place in the upper half, 0 for a row with a NaN, and its column. Thread
// blocks in y share a row.
extern "C" __global__ void __launch_bounds__(LARGEST_THREADS) largest_f32(LargestArgs args) {
    const float* x = args.x + size_t(blockIdx.x) * args.cols;
    const uint32_t begin = blockIdx.y * LARGEST_COLUMNS, end = min(begin + LARGEST_COLUMNS, args.cols);
    uint32_t best = ALL, column = ALL;
    // Ascending columns: the lowest of equals stays.
    const auto look = [&](float logit, uint32_t at) {
        const uint32_t place = isnan(logit) ? 0 : place_of(logit);
        if (place < best) best = place, column = at;
    };
    if (args.cols % 4 == 0) {
        constexpr int LOADS = LARGEST_COLUMNS / LARGEST_THREADS / 4;
        float4 pack[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const uint32_t at = begin + (i * LARGEST_THREADS + threadIdx.x) * 4;
            const float none = -INFINITY;
            pack[i] = at < end ? *reinterpret_cast<const float4*>(x + at) : make_float4(none, none, none, none);
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const uint32_t at = begin + (i * LARGEST_THREADS + threadIdx.x) * 4;
            look(pack[i].x, at), look(pack[i].y, at + 1), look(pack[i].z, at + 2), look(pack[i].w, at + 3);
        }
    } else {
        for (uint32_t at = begin + threadIdx.x; at < end; at += LARGEST_THREADS) look(x[at], at);
    }
    unsigned long long first = static_cast<unsigned long long>(best) << 32 | column;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) first = min(first, __shfl_xor_sync(ALL, first, step));
    if (threadIdx.x % 32 == 0) atomicMin(args.best + blockIdx.x, first);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) sample_rows_f32(const __grid_constant__ SamplingArgs args) {
#if __CUDA_ARCH__ >= 900
    __shared__ Shared shared;
    extern __shared__ __align__(16) float slice[];
    const Task& task = args.tasks[blockIdx.y];
    const uint32_t first_id = blockIdx.x * args.slice_groups * GROUP;
    const uint32_t left = first_id < args.cols ? args.cols - first_id : 0;
    const uint32_t num_groups = min((left + GROUP - 1) / GROUP, args.slice_groups);
    Row row{shared, slice, first_id, num_groups, static_cast<int>(blockIdx.x), 0};
    run_task(row, args, task, args.outcomes[blockIdx.y]);
    // Nobody leaves while a peer may still read its shared memory.
    meet_team();
#endif
}
