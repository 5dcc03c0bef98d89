//! Attention over paged KV in blocks of random order, in a pool full of NaN, against the CPU's.

use crate::support::{
    ACTIVATIONS, Random, activation, assert_close, cached, cpu, gpu, host, poisoned, rounded, scalar, tolerance,
};
use pagemill_backend::{
    AttentionParams, Backend, BatchLayout, BlockCopy, DType, GroupLayout, HeadTransform, KvPool, KvPoolSpec, Norm, Qkv,
    RopeStyle, RopeTable, WeightDesc,
};
use pagemill_backend_cuda::{Activations, AttentionLaunches, CudaBackend};
use std::sync::Arc;

#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub window: Option<usize>,
    pub block_size: usize,
    pub extras: Extras,
}

/// What some architectures add to their scores.
#[derive(Clone, Copy, Debug)]
pub struct Extras {
    pub soft_cap: Option<f32>,
    pub has_sinks: bool,
}

pub const NO_EXTRAS: Extras = Extras { soft_cap: None, has_sinks: false };

/// Two groups share the pool; this test uses the second, so that offsets into tables matter.
const GROUP: usize = 1;

impl Shape {
    pub fn params(self, backend: &dyn Backend) -> AttentionParams {
        // Some above all scores and some below.
        let sinks = || Random::new(5).normal(self.heads).iter().map(|x| 4.0 * x).collect::<Vec<_>>();
        let sinks = self.extras.has_sinks.then(|| Arc::new(backend.load_vector("sinks", &sinks()).unwrap()));
        AttentionParams {
            num_heads: self.heads,
            num_kv_heads: self.kv_heads,
            num_kv_heads_max: self.kv_heads,
            head_dim: self.head_dim,
            scale: 1.0 / (self.head_dim as f32).sqrt(),
            window: self.window,
            soft_cap: self.extras.soft_cap,
            sinks,
            group_idx: GROUP,
            layer_in_group: 1,
        }
    }
}

pub struct Sequence {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    len: usize,
    table: Vec<u32>,
}

/// Random sequences with shuffled blocks, and how many blocks there are.
pub fn sequences(shape: Shape, lens: &[usize], activations: Activations, kv: DType) -> (Vec<Sequence>, usize) {
    let mut random = Random::new(lens.iter().sum::<usize>() as u64);
    let count: usize = lens.iter().map(|len| len.div_ceil(shape.block_size)).sum::<usize>() + 3;
    let mut ids: Vec<u32> = (0..count as u32).collect();
    random.shuffle(&mut ids);
    let kv_cols = shape.kv_heads * shape.head_dim;
    let sequences = lens
        .iter()
        .map(|&len| Sequence {
            q: rounded(activations, &random.normal(len * shape.heads * shape.head_dim)),
            k: cached(kv, &rounded(activations, &random.normal(len * kv_cols))),
            v: cached(kv, &rounded(activations, &random.normal(len * kv_cols))),
            len,
            table: ids.split_off(ids.len() - len.div_ceil(shape.block_size)),
        })
        .collect();
    (sequences, count)
}

/// A pool whose every slot holds NaN.
pub fn pool(backend: &dyn Backend, shape: Shape, num_blocks: usize, dtype: DType) -> KvPool {
    let spec = KvPoolSpec {
        num_blocks,
        block_size: shape.block_size,
        layers_per_group: 2,
        num_kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        dtype,
    };
    let mut pool = backend.alloc_kv(&spec).unwrap();
    for block in 0..num_blocks as u32 {
        let size = shape.block_size as u32;
        let group = GroupLayout {
            slot_mapping: (block * size..(block + 1) * size).collect(),
            block_table: vec![block],
            block_table_start: vec![0, 1],
        };
        let layout = BatchLayout {
            query_start: vec![0, size],
            seq_lens: vec![size],
            positions: (0..size).collect(),
            groups: vec![group; 2],
        };
        let batch = backend.upload_batch(layout, pool.spec()).unwrap();
        let nan = poisoned(backend, shape.block_size, shape.kv_heads * shape.head_dim);
        backend.kv_write(&nan, &nan, &shape.params(backend), &batch, &mut pool).unwrap();
    }
    pool
}

/// The layout of a step and its q, k and v.
pub fn packed(
    shape: Shape,
    seqs: &[Sequence],
    chunks: &[(usize, usize, usize)],
) -> (BatchLayout, Vec<f32>, Vec<f32>, Vec<f32>) {
    let block_size = shape.block_size;
    let mut layout = BatchLayout { query_start: vec![0], ..Default::default() };
    let mut group = GroupLayout { block_table_start: vec![0], ..Default::default() };
    let (mut q, mut k, mut v) = (Vec::new(), Vec::new(), Vec::new());
    let (q_cols, kv_cols) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    for &(seq, first, count) in chunks {
        let seq = &seqs[seq];
        layout.seq_lens.push((first + count) as u32);
        for position in first..first + count {
            layout.positions.push(position as u32);
            let slot = seq.table[position / block_size] * block_size as u32 + (position % block_size) as u32;
            group.slot_mapping.push(slot);
        }
        layout.query_start.push(layout.positions.len() as u32);
        let begin = shape.window.map_or(0, |window| (first + 1).saturating_sub(window));
        // What lies behind the window was given back: its entries must not be read.
        let behind = |idx: usize| (idx + 1) * block_size <= begin;
        group
            .block_table
            .extend(seq.table.iter().enumerate().map(|(idx, &block)| if behind(idx) { u32::MAX } else { block }));
        group.block_table_start.push(group.block_table.len() as u32);
        q.extend_from_slice(&seq.q[first * q_cols..(first + count) * q_cols]);
        k.extend_from_slice(&seq.k[first * kv_cols..(first + count) * kv_cols]);
        v.extend_from_slice(&seq.v[first * kv_cols..(first + count) * kv_cols]);
    }
    let mut other = group.clone();
    other.block_table.iter_mut().for_each(|block| *block = 0);
    layout.groups = vec![other, group];
    (layout, q, k, v)
}

/// One step: `chunks` are (sequence, first position, tokens). Returns the output rows.
pub fn step(
    backend: &dyn Backend,
    shape: Shape,
    pool: &mut KvPool,
    seqs: &[Sequence],
    chunks: &[(usize, usize, usize)],
) -> Vec<f32> {
    let (layout, q, k, v) = packed(shape, seqs, chunks);
    let (q_cols, kv_cols) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let tokens = layout.positions.len();
    let batch = backend.upload_batch(layout, pool.spec()).unwrap();
    let (k, v) = (activation(backend, tokens, kv_cols, &k), activation(backend, tokens, kv_cols, &v));
    backend.kv_write(&k, &v, &shape.params(backend), &batch, pool).unwrap();
    let mut out = poisoned(backend, tokens, q_cols);
    backend
        .attention(&activation(backend, tokens, q_cols, &q), &shape.params(backend), &batch, pool, &mut out)
        .unwrap();
    host(backend, &out)
}

/// All sequences through steps of at most `chunk` tokens each.
pub fn run(backend: &dyn Backend, shape: Shape, pool: &mut KvPool, seqs: &[Sequence], chunk: usize) -> Vec<Vec<f32>> {
    let mut out = vec![Vec::new(); seqs.len()];
    let cols = shape.heads * shape.head_dim;
    let longest = seqs.iter().map(|seq| seq.len).max().unwrap();
    for first in (0..longest).step_by(chunk) {
        let chunks: Vec<_> = seqs
            .iter()
            .enumerate()
            .filter(|(_, seq)| first < seq.len)
            .map(|(idx, seq)| (idx, first, chunk.min(seq.len - first)))
            .collect();
        let rows = step(backend, shape, pool, seqs, &chunks);
        let mut rest = rows.as_slice();
        for &(seq, _, count) in &chunks {
            let (mine, others) = rest.split_at(count * cols);
            out[seq].extend_from_slice(mine);
            rest = others;
        }
    }
    out
}

/// Writes every key and value of the sequences, and computes nothing.
pub fn fill(backend: &dyn Backend, shape: Shape, pool: &mut KvPool, seqs: &[Sequence]) {
    let kv_cols = shape.kv_heads * shape.head_dim;
    for idx in 0..seqs.len() {
        let (layout, _, k, v) = packed(shape, seqs, &[(idx, 0, seqs[idx].len)]);
        let batch = backend.upload_batch(layout, pool.spec()).unwrap();
        let tensor = |x: &[f32]| activation(backend, seqs[idx].len, kv_cols, x);
        backend.kv_write(&tensor(&k), &tensor(&v), &shape.params(backend), &batch, pool).unwrap();
    }
}

/// What `run` launched of the attention kernels.
pub fn launches(gpu: &CudaBackend, run: impl FnOnce()) -> AttentionLaunches {
    let before = gpu.attention_launches();
    run();
    let after = gpu.attention_launches();
    AttentionLaunches {
        plain: after.plain - before.plain,
        decode: after.decode - before.decode,
        prefill: after.prefill - before.prefill,
        prefill_any: after.prefill_any - before.prefill_any,
    }
}

/// One launch of the kernel that takes prompts with heads of that size.
pub fn one_prefill(gpu: &CudaBackend, head_dim: usize) -> AttentionLaunches {
    if gpu.info().isa == "sm_90a" && matches!(head_dim, 64 | 128) {
        AttentionLaunches { prefill: 1, ..Default::default() }
    } else {
        AttentionLaunches { prefill_any: 1, ..Default::default() }
    }
}

pub const ONE_DECODE: AttentionLaunches = AttentionLaunches { plain: 0, decode: 1, prefill: 0, prefill_any: 0 };
pub const ONE_PLAIN: AttentionLaunches = AttentionLaunches { plain: 1, decode: 0, prefill: 0, prefill_any: 0 };

/// How close attention is; tensor cores round probabilities to the cache's type too.
pub fn closeness(activations: Activations, kv: DType) -> f32 {
    match (activations, kv) {
        (Activations::Bf16, DType::F16 | DType::BF16) => 1.0 / 128.0,
        _ => tolerance(activations),
    }
}

/// The CPU's rows of one step over caches that hold every sequence to its end.
pub fn reference(
    shape: Shape,
    seqs: &[Sequence],
    blocks: usize,
    kv: DType,
    chunks: &[(usize, usize, usize)],
) -> Vec<f32> {
    let cpu = cpu(None);
    let kept = if kv == DType::F16 { DType::F16 } else { DType::F32 };
    let mut pool = pool(&cpu, shape, blocks, kept);
    fill(&cpu, shape, &mut pool, seqs);
    step(&cpu, shape, &mut pool, seqs, chunks)
}

/// One step on the device against the CPU's, twice: the plan of the first comes after the upload, that of the
/// second with it. Each launches the same kernels.
pub fn check_step(
    gpu: &CudaBackend,
    shape: Shape,
    lens: &[usize],
    kv: DType,
    chunks: &[(usize, usize, usize)],
    expected: AttentionLaunches,
) {
    let what = format!("{shape:?} over {kv}, {chunks:?}");
    let (seqs, blocks) = sequences(shape, lens, Activations::Bf16, kv);
    let want = reference(shape, &seqs, blocks, kv, chunks);
    let mut pool = pool(gpu, shape, blocks, kv);
    fill(gpu, shape, &mut pool, &seqs);
    for turn in ["first", "second"] {
        let mut got = Vec::new();
        let launched = launches(gpu, || got = step(gpu, shape, &mut pool, &seqs, chunks));
        assert_close(&got, &want, closeness(Activations::Bf16, kv), &format!("{turn} time, {what}"));
        assert_eq!(launched, expected, "{turn} time, {what}");
    }
}

/// Head sizes and groupings that the fast kernels take: groups of 1, 4, 8, 12 and 16.
pub const FAST_HEADS: [(usize, usize, usize); 8] =
    [(4, 4, 64), (8, 2, 128), (8, 1, 256), (16, 2, 80), (12, 1, 96), (16, 1, 128), (32, 2, 64), (4, 1, 128)];

#[test]
fn decodes_run_their_own_kernel() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let lens = [1, 17, 33, 16, 1000, 2047, 300];
    let chunks: Vec<_> = lens.iter().enumerate().map(|(seq, len)| (seq, len - 1, 1)).collect();
    for (nth, (heads, kv_heads, head_dim)) in FAST_HEADS.into_iter().enumerate() {
        let block_size = [16, 32, 64, 128, 256][nth % 5];
        for kv in [DType::F16, DType::BF16] {
            for window in [None, Some(1), Some(37), Some(300)] {
                let shape = Shape { heads, kv_heads, head_dim, window, block_size, extras: NO_EXTRAS };
                check_step(&gpu, shape, &lens, kv, &chunks, ONE_DECODE);
            }
        }
    }
}

/// One long sequence fills the chip and is put together again; then more sequences than thread blocks of a head.
#[test]
fn decodes_are_cut_and_combined() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let shape = Shape { heads: 8, kv_heads: 2, head_dim: 128, window: None, block_size: 16, extras: NO_EXTRAS };
    check_step(&gpu, shape, &[8191], DType::BF16, &[(0, 8190, 1)], ONE_DECODE);
    let shape = Shape { heads: 16, kv_heads: 8, head_dim: 128, window: None, block_size: 32, extras: NO_EXTRAS };
    let lens: Vec<usize> = (0..120).map(|i| 1 + i * 37 % 400).collect();
    let chunks: Vec<_> = lens.iter().enumerate().map(|(seq, len)| (seq, len - 1, 1)).collect();
    check_step(&gpu, shape, &lens, DType::BF16, &chunks, ONE_DECODE);
    check_step(&gpu, Shape { window: Some(90), ..shape }, &lens, DType::F16, &chunks, ONE_DECODE);
}

/// Two warps a sequence, one, and more sequences than there are warps for a head; of about one length, and one that is long.
#[test]
fn many_decodes_have_a_warp_or_two_each() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    for head_dim in [64, 128] {
        let shape = Shape { heads: 16, kv_heads: 8, head_dim, window: None, block_size: 16, extras: NO_EXTRAS };
        for (count, longest, kv) in
            [(100, 90, DType::F16), (150, 60, DType::BF16), (300, 40, DType::F16), (150, 2000, DType::F16)]
        {
            let mut lens: Vec<usize> = (0..count).map(|i| 1 + i * 37 % 90).collect();
            lens[count / 3] = longest;
            let chunks: Vec<_> = lens.iter().enumerate().map(|(seq, len)| (seq, len - 1, 1)).collect();
            check_step(&gpu, shape, &lens, kv, &chunks, ONE_DECODE);
            check_step(&gpu, Shape { window: Some(33), ..shape }, &lens, kv, &chunks, ONE_DECODE);
        }
    }
}

#[test]
fn prompts_with_history_run_their_own_kernel() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let lens = [300, 130, 77, 700];
    let chunks = [(0, 172, 128), (1, 127, 3), (2, 0, 77), (3, 401, 299)];
    for (nth, (heads, kv_heads, head_dim)) in FAST_HEADS.into_iter().enumerate() {
        let block_size = [256, 16, 128, 32, 64][nth % 5];
        for kv in [DType::F16, DType::BF16] {
            for window in [None, Some(1), Some(100)] {
                let shape = Shape { heads, kv_heads, head_dim, window, block_size, extras: NO_EXTRAS };
                check_step(&gpu, shape, &lens, kv, &chunks, one_prefill(&gpu, head_dim));
            }
        }
    }
}

#[test]
fn mixed_batches_run_both_kernels() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let lens = [300, 129, 77, 1040, 520, 1];
    // Decodes between prompts: with history, without, and the first token of a sequence alone.
    let chunks = [(0, 172, 128), (1, 128, 1), (2, 0, 77), (3, 1039, 1), (4, 17, 503), (5, 0, 1)];
    for (heads, kv_heads, head_dim) in FAST_HEADS {
        for (kv, window) in [(DType::F16, None), (DType::BF16, None), (DType::BF16, Some(100))] {
            let shape = Shape { heads, kv_heads, head_dim, window, block_size: 16, extras: NO_EXTRAS };
            let expected = AttentionLaunches { decode: 1, ..one_prefill(&gpu, head_dim) };
            check_step(&gpu, shape, &lens, kv, &chunks, expected);
        }
    }
}

#[test]
fn what_the_fast_kernels_lack_stays_with_the_plain_one() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let shape = Shape { heads: 4, kv_heads: 2, head_dim: 64, window: None, block_size: 16, extras: NO_EXTRAS };
    let (lens, chunks) = ([40, 70], [(0, 39, 1), (1, 0, 70)]);
    check_step(&gpu, shape, &lens, DType::F32, &chunks, ONE_PLAIN);
    for head_dim in [32, 112, 512] {
        check_step(&gpu, Shape { head_dim, ..shape }, &lens, DType::F16, &chunks, ONE_PLAIN);
    }
    let Some(exact) = self::gpu(Activations::F32) else { return };
    let (seqs, blocks) = sequences(shape, &lens, Activations::F32, DType::F16);
    let mut pool = pool(&exact, shape, blocks, DType::F16);
    fill(&exact, shape, &mut pool, &seqs);
    let launched = launches(&exact, || drop(step(&exact, shape, &mut pool, &seqs, &chunks)));
    assert_eq!(launched, ONE_PLAIN);
}

/// A forward of embedding, K and V, and attention is recorded, and run again over other lengths; what is long
/// for whole sequences has a record of its own.
#[test]
fn a_recorded_step_follows_other_lengths() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    for (window, kv) in [(None, DType::BF16), (None, DType::F16), (Some(100), DType::BF16)] {
        let shape = Shape { heads: 8, kv_heads: 2, head_dim: 128, window, block_size: 32, extras: NO_EXTRAS };
        let (seqs, blocks) = sequences(shape, &[3000, 900, 70], Activations::Bf16, kv);
        let (q_cols, kv_cols) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        // Times zero: an addend in f32 to leave the result in.
        let desc = WeightDesc { name: "embedding".into(), dtype: DType::F32, rows: 1, cols: q_cols };
        let table = gpu
            .load_weight(desc, &mut |_, _, bytes| {
                bytes.fill(0);
                Ok(())
            })
            .unwrap();
        let mut pool = pool(&gpu, shape, blocks, kv);
        fill(&gpu, shape, &mut pool, &seqs);
        // At the same addresses in every step.
        let (mut q, mut out) = (poisoned(&gpu, 3, q_cols), poisoned(&gpu, 3, q_cols));
        let (mut k, mut v) = (poisoned(&gpu, 3, kv_cols), poisoned(&gpu, 3, kv_cols));
        // Positions, and whether a sequence is long. One whose plan comes late; of each kind one that is seen and one
        // that is recorded; the others are repetitions.
        let steps = [
            ([5, 6, 7], false, false),
            ([2900, 3, 69], true, false),
            ([2901, 800, 0], true, false),
            ([17, 899, 40], false, window.is_some()),
            ([2999, 0, 1], true, true),
            ([0, 0, 0], false, window.is_some()),
            ([2998, 899, 68], true, true),
            ([2047, 12, 68], false, true),
            ([400, 899, 3], false, true),
        ];
        for (nth, ([a, b, c], is_long, is_replayed)) in steps.into_iter().enumerate() {
            let chunks = [(0, a, 1), (1, b, 1), (2, c, 1)];
            let (layout, q_rows, k_rows, v_rows) = packed(shape, &seqs, &chunks);
            for (tensor, rows) in [(&mut q, &q_rows), (&mut k, &k_rows), (&mut v, &v_rows)] {
                gpu.copy_from_host(rows, tensor).unwrap();
            }
            gpu.copy_from_host(&vec![f32::NAN; 3 * q_cols], &mut out).unwrap();
            let batch = gpu.upload_batch(layout, pool.spec()).unwrap();
            let mut got = Vec::new();
            let mut replayed = false;
            let launched = launches(&gpu, || {
                let ids = [0; 3];
                let hidden = gpu.replay(&ids, &batch).unwrap();
                replayed = hidden.is_some();
                let hidden = hidden.unwrap_or_else(|| {
                    let mut hidden = gpu.temp(3, q_cols).unwrap();
                    gpu.embed(&table, &ids, 0.0, &mut hidden).unwrap();
                    gpu.kv_write(&k, &v, &shape.params(&gpu), &batch, &mut pool).unwrap();
                    gpu.attention(&q, &shape.params(&gpu), &batch, &pool, &mut out).unwrap();
                    gpu.add(&mut hidden, &out).unwrap();
                    gpu.end_recording(hidden).unwrap()
                });
                got = host(&gpu, &hidden);
            });
            let what = format!("step {nth} (long: {is_long}), {shape:?} over {kv}");
            assert_eq!(replayed, is_replayed, "{what}");
            assert_eq!(launched, if replayed { AttentionLaunches::default() } else { ONE_DECODE }, "{what}");
            let want = reference(shape, &seqs, blocks, kv, &chunks);
            assert_close(&got, &want, closeness(Activations::Bf16, kv), &what);
        }
    }
}

#[test]
fn every_shape_is_near_the_reference() {
    let shapes = [(9, 3, 64), (4, 1, 256), (14, 2, 32), (2, 2, 80), (8, 4, 96), (16, 2, 128), (5, 1, 20), (2, 1, 512)];
    for activations in ACTIVATIONS {
        let Some(gpu) = gpu(activations) else { return };
        let cpu = scalar();
        for (nth, (heads, kv_heads, head_dim)) in shapes.into_iter().enumerate() {
            let block_size = [16, 32, 64, 128, 256][nth % 5];
            for kv in [DType::F32, DType::F16, DType::BF16] {
                for window in [None, Some(1), Some(37), Some(300)] {
                    let shape = Shape { heads, kv_heads, head_dim, window, block_size, extras: NO_EXTRAS };
                    let (seqs, blocks) = sequences(shape, &[1, 17, 160], activations, kv);
                    let got = run(&gpu, shape, &mut pool(&gpu, shape, blocks, kv), &seqs, 64);
                    // The CPU keeps no bf16: the numbers were rounded already.
                    let kept = if kv == DType::F16 { DType::F16 } else { DType::F32 };
                    let want = run(&cpu, shape, &mut pool(&cpu, shape, blocks, kept), &seqs, 160);
                    let what = format!("{activations:?} {shape:?} over {kv}");
                    assert_close(&got.concat(), &want.concat(), closeness(activations, kv), &what);
                }
            }
        }
    }
}

#[test]
fn a_long_sequence_in_chunks_and_its_last_token_alone() {
    for activations in ACTIVATIONS {
        let Some(gpu) = gpu(activations) else { return };
        let cpu = cpu(None);
        for window in [None, Some(512)] {
            let shape = Shape { heads: 4, kv_heads: 2, head_dim: 64, window, block_size: 16, extras: NO_EXTRAS };
            let (seqs, blocks) = sequences(shape, &[4097], activations, DType::F16);
            let mut gpu_pool = pool(&gpu, shape, blocks, DType::F16);
            let got = run(&gpu, shape, &mut gpu_pool, &seqs, 2048);
            let want = run(&cpu, shape, &mut pool(&cpu, shape, blocks, DType::F16), &seqs, 4097);
            let what = format!("{activations:?} {window:?}");
            assert_close(&got[0], &want[0], closeness(activations, DType::F16), &what);
            let last = step(&gpu, shape, &mut gpu_pool, &seqs, &[(0, 4096, 1)]);
            if activations == Activations::F32 {
                // A row depends on its own sequence only: not a bit changes in other company and chunks.
                assert_eq!(last, got[0][4096 * 256..], "{what}");
            } else {
                assert_close(&last, &want[0][4096 * 256..], closeness(activations, DType::F16), &what);
            }
        }
    }
}

/// The fused way of heads to attention against the CPU's ops one by one, norms and all.
#[test]
fn heads_are_normed_turned_and_written() {
    // The last has more heads a token than warps, once it has many tokens.
    let shapes = [
        (9, 3, 64, 32),
        (4, 1, 256, 128),
        (14, 2, 32, 8),
        (5, 1, 20, 10),
        (2, 1, 512, 256),
        (1, 1, 128, 64),
        (37, 1, 128, 64),
    ];
    for activations in ACTIVATIONS {
        let Some(gpu) = gpu(activations) else { return };
        let cpu = scalar();
        for (nth, (heads, kv_heads, head_dim, pairs)) in shapes.into_iter().enumerate() {
            let shape = Shape { heads, kv_heads, head_dim, window: None, block_size: 16, extras: NO_EXTRAS };
            let long = if heads > 30 { 283 } else { 70 };
            let num_tokens = 17 + long;
            let (seqs, blocks) = sequences(shape, &[17, long], activations, DType::F32);
            let style = if nth % 2 == 0 { RopeStyle::Half } else { RopeStyle::Interleaved };
            let inv_freq = (0..pairs).map(|i| 0.5_f32.powi(i / 4)).collect();
            let table = RopeTable { inv_freq, magnitude: 1.1, style };
            let weight = Random::new(3).normal(head_dim);
            for normed in [false, true] {
                let run = |backend: &dyn Backend| {
                    let mut pool = pool(backend, shape, blocks, DType::F32);
                    let (layout, q, k, v) = packed(shape, &seqs, &[(1, 0, long), (0, 0, 17)]);
                    let batch = backend.upload_batch(layout, pool.spec()).unwrap();
                    let weight = backend.load_vector("norm", &weight).unwrap();
                    let norm = normed.then_some(Norm { weight: &weight, eps: 1e-6 });
                    let transform = HeadTransform { q_norm: norm, k_norm: norm, rope: &table };
                    let (q_cols, kv_cols) = (heads * head_dim, kv_heads * head_dim);
                    let qkv = Qkv {
                        q: activation(backend, num_tokens, q_cols, &q),
                        k: activation(backend, num_tokens, kv_cols, &k),
                        v: activation(backend, num_tokens, kv_cols, &v),
                    };
                    let q = backend.rope_kv_write(qkv, &transform, &shape.params(backend), &batch, &mut pool).unwrap();
                    let mut out = poisoned(backend, num_tokens, q_cols);
                    backend.attention(&q, &shape.params(backend), &batch, &pool, &mut out).unwrap();
                    (host(backend, &q), host(backend, &out))
                };
                let ((got_q, got), (want_q, want)) = (run(&gpu), run(&cpu));
                let what = format!("{activations:?} {shape:?}, normed {normed}");
                // Rounded twice: after the norm and after the rotation. Scores of heads this large move weights.
                let (turned, attended) = match activations {
                    Activations::F32 => (1e-5, 2e-3),
                    Activations::Bf16 => (1.0 / 128.0, 0.15),
                };
                assert_close(&got_q, &want_q, turned, &format!("q, {what}"));
                assert_close(&got, &want, attended, &what);
            }
        }
    }
}

#[test]
fn copied_blocks_give_the_same_rows() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let shape = Shape { heads: 2, kv_heads: 2, head_dim: 32, window: None, block_size: 16, extras: NO_EXTRAS };
    let (mut seqs, blocks) = sequences(shape, &[40], Activations::Bf16, DType::F16);
    let mut pool = pool(&gpu, shape, blocks, DType::F16);
    run(&gpu, shape, &mut pool, &seqs, 39);
    let before = step(&gpu, shape, &mut pool, &seqs, &[(0, 39, 1)]);
    let spare = (0..blocks as u32).find(|id| !seqs[0].table.contains(id)).unwrap();
    let old = std::mem::replace(&mut seqs[0].table[1], spare);
    let third = seqs[0].table[2];
    // In order: the second copy must not be seen by the first.
    gpu.copy_blocks(&mut pool, &[BlockCopy { src: old, dst: spare }, BlockCopy { src: third, dst: old }]).unwrap();
    assert_eq!(step(&gpu, shape, &mut pool, &seqs, &[(0, 39, 1)]), before);
    assert!(gpu.copy_blocks(&mut pool, &[BlockCopy { src: 0, dst: blocks as u32 }]).is_err());
}

#[test]
fn what_the_device_lacks_is_refused_by_name() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let spec = |head_dim: usize, dtype: DType| KvPoolSpec {
        num_blocks: 1,
        block_size: 16,
        layers_per_group: 1,
        num_kv_heads: 1,
        head_dim,
        dtype,
    };
    for (spec, part) in [(spec(576, DType::F16), "heads of 576"), (spec(64, DType::Q8_0), "F16, BF16 or F32")] {
        let Err(error) = gpu.alloc_kv(&spec) else { panic!("{spec:?} was allocated") };
        let error = error.to_string();
        assert!(error.contains("attention") && error.contains(part), "{error}");
    }
}
