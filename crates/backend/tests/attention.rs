//! Paged attention on every instruction set: against an f64 reference, and bit for bit against itself
//! under other batches, chunks, block sizes and threads.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod support;

use half::f16;
use pagemill_backend::cpu::Isa;
use pagemill_backend::{
    AttentionParams, Backend, BatchLayout, BlockCopy, CpuBackend, DType, DeviceBatch, GroupLayout, KvPool, KvPoolSpec,
};
use std::sync::Arc;
use support::{Random, assert_close, backend, backends, bits, host, is_emulated, poisoned, sets, tensor};

/// One sequence's inputs: `q` `[len, H * E]`, `k` and `v` `[len, K * E]`.
struct Sequence {
    len: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

/// Heads and sizes of a test.
#[derive(Clone, Copy, Debug)]
struct Shape {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    window: Option<usize>,
    dtype: DType,
    extras: Extras,
}

/// What some architectures add to their scores.
#[derive(Clone, Copy, Debug)]
struct Extras {
    soft_cap: Option<f32>,
    has_sinks: bool,
}

const NO_EXTRAS: Extras = Extras { soft_cap: None, has_sinks: false };

impl Shape {
    /// One for each head, some above all scores and some below.
    fn sinks(&self) -> Option<Vec<f32>> {
        self.extras.has_sinks.then(|| Random::new(5).normal(self.heads).iter().map(|x| 4.0 * x).collect())
    }

    fn params(&self, backend: &CpuBackend) -> AttentionParams {
        AttentionParams {
            num_heads: self.heads,
            num_kv_heads: self.kv_heads,
            num_kv_heads_max: self.kv_heads,
            head_dim: self.head_dim,
            scale: 1.0 / (self.head_dim as f32).sqrt(),
            window: self.window,
            soft_cap: self.extras.soft_cap,
            sinks: self.sinks().map(|sinks| Arc::new(tensor(backend, 1, self.heads, &sinks))),
            group_idx: 0,
            layer_in_group: 1,
        }
    }

    fn sequence(&self, len: usize, seed: u64) -> Sequence {
        let mut random = Random::new(seed);
        let kv = self.kv_heads * self.head_dim;
        // Scores of a few units, so that the softmax is neither flat nor one-hot.
        let q = random.normal(len * self.heads * self.head_dim).iter().map(|x| 2.0 * x).collect();
        Sequence { len, q, k: random.normal(len * kv), v: random.normal(len * kv) }
    }
}

/// A poisoned pool (NaN everywhere) and the tables of the sequences, in random order.
struct Paged {
    pool: KvPool,
    tables: Vec<Vec<u32>>,
}

impl Paged {
    fn new(backend: &CpuBackend, shape: Shape, block_size: usize, seqs: &[Sequence]) -> Self {
        let blocks_of = |seq: &Sequence| seq.len.div_ceil(block_size);
        let num_blocks = seqs.iter().map(blocks_of).sum::<usize>() + 3;
        let spec = KvPoolSpec {
            num_blocks,
            block_size,
            layers_per_group: 2,
            num_kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            dtype: shape.dtype,
        };
        let mut pool = backend.alloc_kv(&spec).unwrap();
        let slots: Vec<u32> = (0..(num_blocks * block_size) as u32).collect();
        let nan = poisoned(backend, slots.len(), shape.kv_heads * shape.head_dim);
        let group = GroupLayout { slot_mapping: slots, ..Default::default() };
        let everything =
            DeviceBatch { layout: BatchLayout { groups: vec![group], ..Default::default() }, device: None };
        backend.kv_write(&nan, &nan, &shape.params(backend), &everything, &mut pool).unwrap();

        let mut ids: Vec<u32> = (0..num_blocks as u32).collect();
        Random::new(7).shuffle(&mut ids);
        let tables = seqs.iter().map(|seq| ids.split_off(ids.len() - blocks_of(seq))).collect();
        Self { pool, tables }
    }

    /// One step: `chunks` are (sequence, first position, tokens). Returns the output rows of each.
    fn step(
        &mut self,
        backend: &CpuBackend,
        shape: Shape,
        seqs: &[Sequence],
        chunks: &[(usize, usize, usize)],
    ) -> Vec<Vec<f32>> {
        let block_size = self.pool.spec().block_size;
        let mut layout = BatchLayout { query_start: vec![0], ..Default::default() };
        let mut group = GroupLayout { block_table_start: vec![0], ..Default::default() };
        let (mut q, mut k, mut v) = (Vec::new(), Vec::new(), Vec::new());
        let (q_cols, kv_cols) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        for &(seq, first, count) in chunks {
            let table = &self.tables[seq];
            layout.seq_lens.push((first + count) as u32);
            for position in first..first + count {
                layout.positions.push(position as u32);
                group
                    .slot_mapping
                    .push(table[position / block_size] * block_size as u32 + (position % block_size) as u32);
            }
            layout.query_start.push(layout.positions.len() as u32);
            let begin = shape.window.map_or(0, |window| (first + 1).saturating_sub(window));
            // What lies behind the window was given back: its entries must not be read.
            group.block_table.extend(
                table.iter().enumerate().map(
                    |(idx, &block)| {
                        if (idx + 1) * block_size <= begin { u32::MAX } else { block }
                    },
                ),
            );
            group.block_table_start.push(group.block_table.len() as u32);
            q.extend_from_slice(&seqs[seq].q[first * q_cols..(first + count) * q_cols]);
            k.extend_from_slice(&seqs[seq].k[first * kv_cols..(first + count) * kv_cols]);
            v.extend_from_slice(&seqs[seq].v[first * kv_cols..(first + count) * kv_cols]);
        }
        layout.groups = vec![group];
        let tokens = layout.positions.len();
        let batch = backend.upload_batch(layout, self.pool.spec()).unwrap();
        let (k, v) = (tensor(backend, tokens, kv_cols, &k), tensor(backend, tokens, kv_cols, &v));
        backend.kv_write(&k, &v, &shape.params(backend), &batch, &mut self.pool).unwrap();
        let mut out = poisoned(backend, tokens, q_cols);
        backend
            .attention(&tensor(backend, tokens, q_cols, &q), &shape.params(backend), &batch, &self.pool, &mut out)
            .unwrap();
        let out = host(backend, &out);
        let mut rest = out.as_slice();
        chunks
            .iter()
            .map(|&(_, _, count)| {
                let (mine, others) = rest.split_at(count * q_cols);
                rest = others;
                mine.to_vec()
            })
            .collect()
    }
}

/// All output rows of all sequences, computed together in steps of at most `chunk` tokens each.
fn together(backend: &CpuBackend, shape: Shape, block_size: usize, seqs: &[Sequence], chunk: usize) -> Vec<Vec<f32>> {
    let mut paged = Paged::new(backend, shape, block_size, seqs);
    let mut out = vec![Vec::new(); seqs.len()];
    let longest = seqs.iter().map(|seq| seq.len).max().unwrap();
    for first in (0..longest).step_by(chunk) {
        let chunks: Vec<_> = seqs
            .iter()
            .enumerate()
            .filter(|(_, seq)| first < seq.len)
            .map(|(idx, seq)| (idx, first, chunk.min(seq.len - first)))
            .collect();
        for (&(seq, ..), rows) in chunks.iter().zip(paged.step(backend, shape, seqs, &chunks)) {
            out[seq].extend(rows);
        }
    }
    out
}

/// One row in f64 and in plain f32, on the cache's values.
fn reference_row(shape: Shape, seq: &Sequence, position: usize, head: usize) -> (Vec<f64>, Vec<f32>) {
    let e = shape.head_dim;
    let cached = |x: f32| {
        if shape.dtype == DType::F16 { f16::from_f32(x).to_f32() } else { x }
    };
    let kv_head = head / (shape.heads / shape.kv_heads);
    let q = &seq.q[(position * shape.heads + head) * e..][..e];
    let begin = shape.window.map_or(0, |window| (position + 1).saturating_sub(window));
    let rows = |x: &[f32]| -> Vec<Vec<f32>> {
        (begin..=position)
            .map(|p| x[(p * shape.kv_heads + kv_head) * e..][..e].iter().map(|&x| cached(x)).collect())
            .collect()
    };
    let (k, v) = (rows(&seq.k), rows(&seq.v));
    let scale = 1.0 / (e as f32).sqrt();
    let sink = shape.sinks().map_or(f32::NEG_INFINITY, |sinks| sinks[head]);
    let capped = |score: f32| shape.extras.soft_cap.map_or(score, |cap| cap * (score / cap).tanh());
    let capped_wide = |score: f64| shape.extras.soft_cap.map(f64::from).map_or(score, |cap| cap * (score / cap).tanh());

    let wide = |x: &f32| f64::from(*x);
    let dot_wide = |k: &Vec<f32>| q.iter().zip(k).map(|(q, k)| wide(q) * wide(k)).sum::<f64>() * f64::from(scale);
    let scores: Vec<f64> = k.iter().map(|k| capped_wide(dot_wide(k))).collect();
    let max = scores.iter().copied().fold(wide(&sink), f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
    let sum: f64 = weights.iter().sum::<f64>() + (wide(&sink) - max).exp();
    let exact = (0..e).map(|e| weights.iter().zip(&v).map(|(w, v)| w * wide(&v[e])).sum::<f64>() / sum).collect();

    let scores: Vec<f32> = k.iter().map(|k| capped(q.iter().zip(k).map(|(q, k)| q * k).sum::<f32>() * scale)).collect();
    let max = scores.iter().copied().fold(sink, f32::max);
    let weights: Vec<f32> = scores.iter().map(|s| (s - max).exp()).collect();
    let sum: f32 = weights.iter().sum::<f32>() + (sink - max).exp();
    let naive = (0..e).map(|e| weights.iter().zip(&v).map(|(w, v)| w * v[e]).sum::<f32>() / sum).collect();
    (exact, naive)
}

/// Compares the rows of these positions as one: the greatest error of a single row is a matter of luck.
fn check_rows(shape: Shape, seq: &Sequence, out: &[f32], positions: impl Iterator<Item = usize>) {
    let cols = shape.heads * shape.head_dim;
    let (mut got, mut exact, mut naive) = (Vec::new(), Vec::new(), Vec::new());
    for position in positions {
        got.extend_from_slice(&out[position * cols..(position + 1) * cols]);
        for head in 0..shape.heads {
            let (row_exact, row_naive) = reference_row(shape, seq, position, head);
            exact.extend(row_exact);
            naive.extend(row_naive);
        }
    }
    assert_close(&got, &naive, &exact, &format!("{shape:?} over {} tokens", seq.len));
}

#[test]
fn every_shape_is_near_the_f64_reference() {
    let shapes = [
        (9, 3, 64),
        (4, 1, 256),
        (14, 2, 32),
        (2, 2, 80),
        (8, 4, 96),
        (16, 2, 128),
        (1, 1, 64),
        (5, 1, 32),
        (13, 1, 48),
    ];
    for backend in backends() {
        for (nth, (heads, kv_heads, head_dim)) in shapes.into_iter().enumerate() {
            for (i, dtype) in [DType::F16, DType::F32].into_iter().enumerate() {
                for (j, window) in [None, Some(1), Some(37), Some(300)].into_iter().enumerate() {
                    // Under an emulator each shape meets one window and type, each window and type one shape.
                    if is_emulated() && (nth / 4 % 2, nth % 4) != (i, j) {
                        continue;
                    }
                    let shape = Shape { heads, kv_heads, head_dim, window, dtype, extras: NO_EXTRAS };
                    let block_size = [16, 32, 64, 128, 256][nth % 5];
                    let seqs: Vec<_> = [1, 17, 310].iter().map(|&len| shape.sequence(len, len as u64)).collect();
                    for (seq, out) in seqs.iter().zip(together(&backend, shape, block_size, &seqs, 310)) {
                        check_rows(shape, seq, &out, (0..seq.len).step_by(43).chain([seq.len - 1]));
                    }
                }
            }
        }
    }
}

/// Soft caps and sinks, alone and together, under windows, on heads that vector kernels take.
#[test]
fn soft_caps_and_sinks_are_near_the_f64_reference() {
    for backend in backends() {
        for (soft_cap, has_sinks) in [(Some(2.0), false), (None, true), (Some(5.0), true)] {
            for (window, dtype) in [(None, DType::F16), (Some(20), DType::F32)] {
                let extras = Extras { soft_cap, has_sinks };
                let shape = Shape { heads: 6, kv_heads: 2, head_dim: 64, window, dtype, extras };
                let seqs = [shape.sequence(70, 1), shape.sequence(1, 2)];
                for (seq, out) in seqs.iter().zip(together(&backend, shape, 16, &seqs, 33)) {
                    check_rows(shape, seq, &out, 0..seq.len);
                }
            }
        }
    }
}

#[test]
fn what_is_no_soft_cap_or_no_sink_is_refused() {
    let backend = backend(Isa::Scalar, 1);
    let plain = Shape { heads: 2, kv_heads: 1, head_dim: 32, window: None, dtype: DType::F32, extras: NO_EXTRAS };
    let seqs = [plain.sequence(1, 1)];
    let paged = Paged::new(&backend, plain, 16, &seqs);
    let group = GroupLayout { slot_mapping: vec![0], block_table: vec![0], block_table_start: vec![0, 1] };
    let layout = BatchLayout { query_start: vec![0, 1], seq_lens: vec![1], positions: vec![0], groups: vec![group] };
    let batch = backend.upload_batch(layout, paged.pool.spec()).unwrap();
    let q = tensor(&backend, 1, 64, &seqs[0].q);
    let mut out = poisoned(&backend, 1, 64);
    let mut refused = |params: AttentionParams| {
        backend.attention(&q, &params, &batch, &paged.pool, &mut out).unwrap_err().to_string()
    };
    for cap in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let error = refused(AttentionParams { soft_cap: Some(cap), ..plain.params(&backend) });
        assert!(error.contains("soft cap"), "{error}");
    }
    let sinks = Some(Arc::new(tensor(&backend, 1, 3, &[0.0; 3])));
    let error = refused(AttentionParams { sinks, ..plain.params(&backend) });
    assert!(error.contains("sinks [1, 2]"), "{error}");
}

/// A head size that no vector kernel takes runs on the scalar form.
#[test]
fn an_odd_head_size_works() {
    for backend in backends() {
        let shape =
            Shape { heads: 3, kv_heads: 1, head_dim: 20, window: Some(19), dtype: DType::F16, extras: NO_EXTRAS };
        let seqs = [shape.sequence(70, 1)];
        let out = together(&backend, shape, 16, &seqs, 7);
        check_rows(shape, &seqs[0], &out[0], 0..70);
        assert_eq!(bits(&out[0]), bits(&together(&backend, shape, 32, &seqs, 70)[0]));
    }
}

#[test]
fn a_long_sequence_is_near_the_f64_reference() {
    for backend in backends() {
        for window in [None, Some(512)] {
            let shape = Shape { heads: 4, kv_heads: 2, head_dim: 64, window, dtype: DType::F16, extras: NO_EXTRAS };
            // The scalar form is slow: a shorter one for it.
            let len = if backend.isa() == Isa::Scalar || is_emulated() { 600 } else { 4097 };
            let seqs = [shape.sequence(len, 3)];
            let out = together(&backend, shape, 16, &seqs, 2048);
            let positions = [255, 256, 511, 512, 1023, 2047, 2048, 4095, 4096];
            check_rows(shape, &seqs[0], &out[0], positions.into_iter().filter(|&p| p < len));
            // The last token again, as a decode step with its spans split over threads: without a window
            // 2 × 17 spans, so that a thread gets more than one at a time.
            let mut paged = Paged::new(&backend, shape, 16, &seqs);
            paged.step(&backend, shape, &seqs, &[(0, 0, len - 1)]);
            let last = paged.step(&backend, shape, &seqs, &[(0, len - 1, 1)]);
            assert_eq!(bits(&last[0]), bits(&out[0][(len - 1) * 256..]));
        }
    }
}

#[test]
fn bits_do_not_depend_on_batch_chunk_block_size_or_threads() {
    let wide = [(9, 3, 64), (4, 4, 32), (4, 1, 256), (14, 2, 80)];
    for isa in sets() {
        // The scalar form is slow and the same for every shape.
        let (shapes, windows) = if isa == Isa::Scalar || is_emulated() {
            (&wide[1..2], &[Some(300)][..])
        } else {
            (&wide[..], &[None, Some(100), Some(400)][..])
        };
        for &(heads, kv_heads, head_dim) in shapes {
            for &window in windows {
                same_bits_everywhere(
                    isa,
                    Shape { heads, kv_heads, head_dim, window, dtype: DType::F16, extras: NO_EXTRAS },
                );
            }
        }
        // Token by token, the slowest way, for one shape.
        let shape = Shape { heads: 6, kv_heads: 2, head_dim: 32, window: None, dtype: DType::F32, extras: NO_EXTRAS };
        let seqs = [shape.sequence(300, 1), shape.sequence(40, 2)];
        let two = backend(isa, 2);
        let whole = together(&two, shape, 16, &seqs, 300);
        for (whole, single) in whole.iter().zip(together(&two, shape, 32, &seqs, 1)) {
            assert!(bits(whole) == bits(&single), "{isa:?}: decode differs from prefill");
        }
    }
}

fn same_bits_everywhere(isa: Isa, shape: Shape) {
    let lens = [560, 1, 33, 257];
    let seqs: Vec<_> = lens.iter().map(|&len| shape.sequence(len, len as u64)).collect();
    let two = backend(isa, 2);
    let expected: Vec<_> = together(&two, shape, 16, &seqs, 512).iter().map(|x| bits(x)).collect();
    let same = |what: &str, out: Vec<Vec<f32>>| {
        for (seq, (out, expected)) in out.iter().zip(&expected).enumerate() {
            assert!(bits(out) == *expected, "{isa:?} {shape:?} sequence {seq} differs: {what}");
        }
    };
    same("chunks of 7", together(&two, shape, 64, &seqs, 7));
    same("whole prompts", together(&two, shape, 256, &seqs, 700));
    same("seven threads", together(&backend(isa, 7), shape, 128, &seqs, 100));
    same("one thread", together(&backend(isa, 1), shape, 32, &seqs, 64));
    for (idx, len) in lens.into_iter().enumerate() {
        let alone = together(&two, shape, 16, &[shape.sequence(len, len as u64)], 512);
        assert!(bits(&alone[0]) == expected[idx], "{isa:?} {shape:?} sequence {idx} differs alone");
    }
}

#[test]
fn copied_blocks_give_the_same_rows() {
    for backend in backends() {
        let shape = Shape { heads: 2, kv_heads: 2, head_dim: 32, window: None, dtype: DType::F16, extras: NO_EXTRAS };
        let seqs = [shape.sequence(40, 9)];
        let mut paged = Paged::new(&backend, shape, 16, &seqs);
        paged.step(&backend, shape, &seqs, &[(0, 0, 39)]);
        let before = paged.step(&backend, shape, &seqs, &[(0, 39, 1)]);
        let spare = (0..6).find(|id| !paged.tables[0].contains(id)).unwrap();
        let old = std::mem::replace(&mut paged.tables[0][1], spare);
        backend.copy_blocks(&mut paged.pool, &[BlockCopy { src: old, dst: spare }]).unwrap();
        // The old block changes hands.
        let third = paged.tables[0][2];
        backend.copy_blocks(&mut paged.pool, &[BlockCopy { src: third, dst: old }]).unwrap();
        assert_eq!(bits(&paged.step(&backend, shape, &seqs, &[(0, 39, 1)])[0]), bits(&before[0]));
        assert!(backend.copy_blocks(&mut paged.pool, &[BlockCopy { src: 0, dst: 6 }]).is_err());
    }
}

#[test]
fn a_missing_block_in_sight_is_refused() {
    for backend in backends() {
        let shape =
            Shape { heads: 1, kv_heads: 1, head_dim: 32, window: Some(20), dtype: DType::F16, extras: NO_EXTRAS };
        let seqs = [shape.sequence(64, 9)];
        let mut paged = Paged::new(&backend, shape, 16, &seqs);
        paged.step(&backend, shape, &seqs, &[(0, 0, 63)]);
        let layout = BatchLayout {
            query_start: vec![0, 1],
            seq_lens: vec![64],
            positions: vec![63],
            groups: vec![GroupLayout {
                slot_mapping: vec![paged.tables[0][3] * 16 + 15],
                block_table: vec![u32::MAX, u32::MAX, u32::MAX, paged.tables[0][3]],
                block_table_start: vec![0, 4],
            }],
        };
        let batch = backend.upload_batch(layout, paged.pool.spec()).unwrap();
        let q = tensor(&backend, 1, 32, &[1.0; 32]);
        let error = backend
            .attention(&q, &shape.params(&backend), &batch, &paged.pool, &mut poisoned(&backend, 1, 32))
            .unwrap_err();
        assert!(error.to_string().contains("a block for each position in sight"), "{error}");
    }
}

#[test]
fn an_overflowing_f16_value_saturates() {
    for backend in backends() {
        let shape = Shape { heads: 1, kv_heads: 1, head_dim: 32, window: None, dtype: DType::F16, extras: NO_EXTRAS };
        let seq = Sequence { len: 2, q: vec![0.0; 64], k: vec![1e6; 64], v: vec![1e6; 64] };
        let out = together(&backend, shape, 16, &[seq], 2);
        assert!(out[0].iter().all(|&x| x == 65_504.0), "{out:?}");
    }
}
