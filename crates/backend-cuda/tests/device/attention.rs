//! Attention over paged KV in blocks of random order, in a pool full of NaN, against the CPU's.

use crate::support::{
    ACTIVATIONS, Random, activation, assert_close, cached, cpu, gpu, host, poisoned, rounded, scalar, tolerance,
};
use pagemill_backend::{
    AttentionParams, Backend, BatchLayout, BlockCopy, DType, GroupLayout, HeadTransform, KvPool, KvPoolSpec, Norm, Qkv,
    RopeStyle, RopeTable,
};
use pagemill_backend_cuda::Activations;

#[derive(Clone, Copy, Debug)]
struct Shape {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    window: Option<usize>,
    block_size: usize,
}

/// Two groups share the pool; this test uses the second, so that offsets into tables matter.
const GROUP: usize = 1;

impl Shape {
    fn params(self) -> AttentionParams {
        AttentionParams {
            num_heads: self.heads,
            num_kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            scale: 1.0 / (self.head_dim as f32).sqrt(),
            window: self.window,
            group_idx: GROUP,
            layer_in_group: 1,
        }
    }
}

struct Sequence {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    len: usize,
    table: Vec<u32>,
}

/// Random sequences with shuffled blocks, and how many blocks there are.
fn sequences(shape: Shape, lens: &[usize], activations: Activations, kv: DType) -> (Vec<Sequence>, usize) {
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
fn pool(backend: &dyn Backend, shape: Shape, num_blocks: usize, dtype: DType) -> KvPool {
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
        backend.kv_write(&nan, &nan, &shape.params(), &batch, &mut pool).unwrap();
    }
    pool
}

/// The layout of a step and its q, k and v.
fn packed(
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
fn step(
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
    backend.kv_write(&k, &v, &shape.params(), &batch, pool).unwrap();
    let mut out = poisoned(backend, tokens, q_cols);
    backend.attention(&activation(backend, tokens, q_cols, &q), &shape.params(), &batch, pool, &mut out).unwrap();
    host(backend, &out)
}

/// All sequences through steps of at most `chunk` tokens each.
fn run(backend: &dyn Backend, shape: Shape, pool: &mut KvPool, seqs: &[Sequence], chunk: usize) -> Vec<Vec<f32>> {
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
                    let shape = Shape { heads, kv_heads, head_dim, window, block_size };
                    let (seqs, blocks) = sequences(shape, &[1, 17, 160], activations, kv);
                    let got = run(&gpu, shape, &mut pool(&gpu, shape, blocks, kv), &seqs, 64);
                    // The CPU keeps no bf16: the numbers were rounded already.
                    let kept = if kv == DType::F16 { DType::F16 } else { DType::F32 };
                    let want = run(&cpu, shape, &mut pool(&cpu, shape, blocks, kept), &seqs, 160);
                    let what = format!("{activations:?} {shape:?} over {kv}");
                    assert_close(&got.concat(), &want.concat(), tolerance(activations), &what);
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
            let shape = Shape { heads: 4, kv_heads: 2, head_dim: 64, window, block_size: 16 };
            let (seqs, blocks) = sequences(shape, &[4097], activations, DType::F16);
            let mut gpu_pool = pool(&gpu, shape, blocks, DType::F16);
            let got = run(&gpu, shape, &mut gpu_pool, &seqs, 2048);
            let want = run(&cpu, shape, &mut pool(&cpu, shape, blocks, DType::F16), &seqs, 4097);
            assert_close(&got[0], &want[0], tolerance(activations), &format!("{activations:?} {window:?}"));
            // A row depends on its own sequence only: not a bit changes in other company and chunks.
            let last = step(&gpu, shape, &mut gpu_pool, &seqs, &[(0, 4096, 1)]);
            assert_eq!(last, got[0][4096 * 256..]);
        }
    }
}

/// The fused way of heads to attention against the CPU's ops one by one, norms and all.
#[test]
fn heads_are_normed_turned_and_written() {
    let shapes = [(9, 3, 64, 32), (4, 1, 256, 128), (14, 2, 32, 8), (5, 1, 20, 10), (2, 1, 512, 256)];
    for activations in ACTIVATIONS {
        let Some(gpu) = gpu(activations) else { return };
        let cpu = scalar();
        for (nth, (heads, kv_heads, head_dim, pairs)) in shapes.into_iter().enumerate() {
            let shape = Shape { heads, kv_heads, head_dim, window: None, block_size: 16 };
            let (seqs, blocks) = sequences(shape, &[17, 70], activations, DType::F32);
            let style = if nth % 2 == 0 { RopeStyle::Half } else { RopeStyle::Interleaved };
            let inv_freq = (0..pairs).map(|i| 0.5_f32.powi(i / 4)).collect();
            let table = RopeTable { inv_freq, magnitude: 1.1, style };
            let weight = Random::new(3).normal(head_dim);
            for normed in [false, true] {
                let run = |backend: &dyn Backend| {
                    let mut pool = pool(backend, shape, blocks, DType::F32);
                    let (layout, q, k, v) = packed(shape, &seqs, &[(1, 0, 70), (0, 0, 17)]);
                    let batch = backend.upload_batch(layout, pool.spec()).unwrap();
                    let weight = backend.load_vector("norm", &weight).unwrap();
                    let norm = normed.then_some(Norm { weight: &weight, eps: 1e-6 });
                    let transform = HeadTransform { q_norm: norm, k_norm: norm, rope: &table };
                    let (q_cols, kv_cols) = (heads * head_dim, kv_heads * head_dim);
                    let qkv = Qkv {
                        q: activation(backend, 87, q_cols, &q),
                        k: activation(backend, 87, kv_cols, &k),
                        v: activation(backend, 87, kv_cols, &v),
                    };
                    let q = backend.rope_kv_write(qkv, &transform, &shape.params(), &batch, &mut pool).unwrap();
                    let mut out = poisoned(backend, 87, q_cols);
                    backend.attention(&q, &shape.params(), &batch, &pool, &mut out).unwrap();
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
    let shape = Shape { heads: 2, kv_heads: 2, head_dim: 32, window: None, block_size: 16 };
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
