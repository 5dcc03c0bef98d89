// Causal attention of many new tokens over the paged KV cache with mma.sync: every head size, every chip from
// Ampere on. Same tiles, arguments and results as `attention_prefill.cu`, which is faster where it exists.
// Decides how a thread block stages pages; the list of tiles is the host's.
//
// Letters: E head size, G query heads of a KV head, B tokens in a block.
// Four warps, 16 rows each (FlashAttention-2, Dao 2023); K and V come through shared memory by 16-byte
// asynchronous copies, two stages deep, rows padded by 16 bytes so that matrix loads meet no bank twice. Rows no
// query may see are filled with zeros by the copy itself.
#include "prefill.cuh"

namespace pagemill {

constexpr int ANY_ROWS = 64;
constexpr int ANY_THREADS = 128;

/// Keys of a step: 64, or 32 where 64 rows of K and V twice would not fit beside Q.
template <int E> __host__ __device__ constexpr int any_keys() { return E > 128 ? 32 : 64; }
/// Bytes of a row in shared memory.
template <int E> __host__ __device__ constexpr int any_row_bytes() { return E * 2 + 16; }
/// Dynamic shared memory of a thread block.
template <int E> constexpr size_t any_shared_bytes() { return size_t(ANY_ROWS + 4 * any_keys<E>()) * any_row_bytes<E>(); }

/// `each(place, at, wanted)` for this thread's parts of the query rows, 8 elements each.
template <int E, class Each>
__device__ __forceinline__ void each_q_part(unsigned char* to, const PrefillParams& p, const PrefillWork<ANY_ROWS, any_keys<E>()>& w, Each each) {
#pragma unroll 4
    for (int i = threadIdx.x; i < ANY_ROWS * (E / 8); i += ANY_THREADS) {
        const int row = i / (E / 8), chunk = i % (E / 8);
        const uint32_t packed_row = w.tile.first + row, token = packed_row / w.group, head = packed_row % w.group;
        const bool wanted = token < w.tile.q_len;
        const size_t at = static_cast<size_t>(w.tile.q_row + (wanted ? token : 0)) * p.q_stride + (w.kv_head * w.group + head) * E + chunk * 8;
        each(to + row * any_row_bytes<E>() + chunk * 16, at, wanted);
    }
}

/// Asks for K and V of a step: `k_to` and `v_to` are the stage's rows in shared memory.
template <int E>
__device__ __forceinline__ void request_step(uint32_t k_to, uint32_t v_to, const PrefillParams& p, const PrefillWork<ANY_ROWS, any_keys<E>()>& w, int step) {
    constexpr int KEYS = any_keys<E>(), CHUNKS = E / 8;
    const int log2 = p.block_size_log2, offset_mask = (1 << log2) - 1;
    const size_t head_bytes = (static_cast<size_t>(E) * 2) << log2;
#pragma unroll 4
    for (int i = threadIdx.x; i < KEYS * CHUNKS; i += ANY_THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS, key = step * KEYS + row;
        const bool wanted = key >= w.first_visible && key < int(w.tile.kv_len);
        const size_t block = wanted ? __ldg(p.block_table + w.tile.table_start + (key >> log2)) : 0;
        const char* from = static_cast<const char*>(p.kv) + (block * 2 * p.num_kv_heads + w.kv_head) * head_bytes + (key & offset_mask) * (E * 2) + chunk * 16;
        const uint32_t at = row * any_row_bytes<E>() + chunk * 16;
        copy16_async(k_to + at, from, wanted);
        copy16_async(v_to + at, from + head_bytes * p.num_kv_heads, wanted);
    }
    commit_copies();
}

/// S [16 rows of the warp, KEYS] = Q K^T.
template <class T, int E>
__device__ __forceinline__ void scores_any(float (&s)[any_keys<E>() / 2], uint32_t q, uint32_t k, int lane) {
    constexpr int KEYS = any_keys<E>(), ROW = any_row_bytes<E>();
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) s[i] = 0.0f;
    const uint32_t q_at = q + (lane % 16) * ROW + (lane / 16) * 16;
    const uint32_t k_at = k + (lane % 8 + lane / 16 * 8) * ROW + (lane / 8 % 2) * 16;
#pragma unroll
    for (int e = 0; e < E / 16; ++e) {
        uint32_t a[4];
        load_matrices(a, q_at + e * 32);
#pragma unroll
        for (int n = 0; n < KEYS / 16; ++n) {
            uint32_t b[4];
            load_matrices(b, k_at + n * 16 * ROW + e * 32);
            T::mma(*reinterpret_cast<float(*)[4]>(&s[n * 8]), a, b[0], b[1]);
            T::mma(*reinterpret_cast<float(*)[4]>(&s[n * 8 + 4]), a, b[2], b[3]);
        }
    }
}

/// O [16 rows, E] += P V.
template <class T, int E>
__device__ __forceinline__ void output_any(float (&o)[E / 2], const float (&s)[any_keys<E>() / 2], uint32_t v, int lane) {
    constexpr int KEYS = any_keys<E>(), ROW = any_row_bytes<E>();
    const uint32_t v_at = v + (lane % 16) * ROW + (lane / 16) * 16;
#pragma unroll
    for (int t = 0; t < KEYS / 16; ++t) {
        const uint32_t a[4] = {T::pack(s[t * 8], s[t * 8 + 1]), T::pack(s[t * 8 + 2], s[t * 8 + 3]), T::pack(s[t * 8 + 4], s[t * 8 + 5]),
                               T::pack(s[t * 8 + 6], s[t * 8 + 7])};
#pragma unroll
        for (int n = 0; n < E / 16; ++n) {
            uint32_t b[4];
            load_matrices_transposed(b, v_at + t * 16 * ROW + n * 32);
            T::mma(*reinterpret_cast<float(*)[4]>(&o[n * 8]), a, b[0], b[1]);
            T::mma(*reinterpret_cast<float(*)[4]>(&o[n * 8 + 4]), a, b[2], b[3]);
        }
    }
}

template <int E>
__device__ __forceinline__ void write_output_any(const PrefillParams& p, const PrefillWork<ANY_ROWS, any_keys<E>()>& w, const float (&o)[E / 2], const RowState& rows,
                                                 int row0, int c) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const uint32_t packed_row = w.tile.first + row0 + h * 8, token = packed_row / w.group, head = w.kv_head * w.group + packed_row % w.group;
        float sum = rows.sum[h];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (token >= w.tile.q_len) continue;
        if (p.sinks != nullptr) sum += exp2f(p.sinks[head] * LOG2_E - rows.max[h]);
        const float weight = sum > 0.0f ? 1.0f / sum : 0.0f;
        const size_t at = static_cast<size_t>(w.tile.q_row + token) * p.out_stride + head * E + 2 * c;
#pragma unroll
        for (int i = 0; i < E / 8; ++i) {
            const float x = o[i * 4 + h * 2] * weight, y = o[i * 4 + h * 2 + 1] * weight;
            if (p.out_type == ACT_F32) *reinterpret_cast<float2*>(static_cast<float*>(p.out) + at + i * 8) = make_float2(x, y);
            else *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + at + i * 8) = p.out_type == ACT_BF16 ? Bf16::pack(x, y) : F16::pack(x, y);
        }
    }
}

template <class T, int E> __device__ __forceinline__ void attention_prefill_any(const PrefillParams& p) {
    constexpr int KEYS = any_keys<E>(), ROW = any_row_bytes<E>();
    static_assert(E % 16 == 0 && ROW / 16 % 2 == 1, "rows of an odd number of 16-byte units keep matrix loads off each other's banks");
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const uint32_t q = shared_address(shared_bytes), stages = q + ANY_ROWS * ROW;
    auto k_stage = [&](int i) { return stages + i * 2 * KEYS * ROW; };

    wait_for_previous_kernel();
    release_next_kernel();
    const PrefillWork<ANY_ROWS, KEYS> w(p, blockIdx.x);
    int step = w.step_end - 1, stage = 0;
    each_q_part<E>(shared_bytes, p, w, [&](unsigned char* place, size_t at, bool wanted) { ask_for_q<T>(place, p, at, wanted); });
    commit_copies();
    request_step<E>(k_stage(0), k_stage(0) + KEYS * ROW, p, w, step);
    await_copies<1>();
    each_q_part<E>(shared_bytes, p, w, [&](unsigned char* place, size_t, bool) { turn_q<T>(place, p.q_type); });

    const int row0 = warp * 16 + g, pos[2] = {w.position(row0), w.position(row0 + 8)};
    const int pos_first = w.position(warp * 16), pos_last = w.position(warp * 16 + 15);
    RowState rows;
    float o[E / 2];
#pragma unroll
    for (int i = 0; i < E / 2; ++i) o[i] = 0.0f;
    for (; step >= w.step_begin; --step, stage ^= 1) {
        if (step > w.step_begin) {
            request_step<E>(k_stage(stage ^ 1), k_stage(stage ^ 1) + KEYS * ROW, p, w, step - 1);
            await_copies<1>();
        } else {
            await_copies<0>();
        }
        __syncthreads();
        float s[KEYS / 2], keep[2];
        scores_any<T, E>(s, q + warp * 16 * ROW, k_stage(stage), lane);
        if (softmax<KEYS>(s, rows, keep, cap_and_mask<KEYS>(s, p, step * KEYS, pos, pos_first, pos_last, c))) {
#pragma unroll
            for (int i = 0; i < E / 2; ++i) o[i] *= keep[i / 2 % 2];
        }
        output_any<T, E>(o, s, k_stage(stage) + KEYS * ROW, lane);
        __syncthreads();
    }
    write_output_any<E>(p, w, o, rows, row0, c);
}

} // namespace pagemill

#define PREFILL_ANY_KERNEL(name, T, E)                                                                              \
    extern "C" __global__ void __launch_bounds__(pagemill::ANY_THREADS)                                             \
        attention_prefill_any_##name(const __grid_constant__ pagemill::PrefillParams p) {                           \
        pagemill::attention_prefill_any<pagemill::T, E>(p);                                                         \
    }

#define PREFILL_ANY_KERNELS(name, T)                                                                                \
    PREFILL_ANY_KERNEL(name##_e64, T, 64)                                                                           \
    PREFILL_ANY_KERNEL(name##_e80, T, 80)                                                                           \
    PREFILL_ANY_KERNEL(name##_e96, T, 96)                                                                           \
    PREFILL_ANY_KERNEL(name##_e128, T, 128)                                                                         \
    PREFILL_ANY_KERNEL(name##_e256, T, 256)
PREFILL_ANY_KERNELS(bf16, Bf16)
PREFILL_ANY_KERNELS(f16, F16)
