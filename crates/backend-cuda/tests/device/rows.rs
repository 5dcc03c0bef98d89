//! Row-wise ops at odd sizes, outputs poisoned.

use crate::support::{
    ACTIVATIONS, Random, activation, assert_close, gpu, host, poisoned, rounded, scalar, tensor, tolerance,
};
use pagemill_backend::{Activation, Backend, BatchLayout, DType, DeviceBatch, KvPoolSpec, RopeStyle, RopeTable};
use std::sync::Mutex;

/// Rows and columns: one, odd, more than a block, a model's.
const SHAPES: [(usize, usize); 6] = [(1, 1), (1, 4096), (17, 33), (17, 896), (4097, 64), (3, 14336)];

#[test]
fn norms_and_additions() {
    for activations in ACTIVATIONS {
        let Some(gpu) = gpu(activations) else { return };
        let cpu = scalar();
        for (rows, cols) in SHAPES {
            let mut random = Random::new((rows * cols) as u64);
            let x = rounded(activations, &random.normal(rows * cols));
            let residual = random.normal(rows * cols);
            let weight = random.normal(cols);
            let what = format!("{activations:?} [{rows}, {cols}]");
            let run = |backend: &dyn Backend| {
                let weight = backend.load_vector("w", &weight).unwrap();
                let x = activation(backend, rows, cols, &x);
                let mut plain = poisoned(backend, rows, cols);
                backend.rms_norm(&x, &weight, 1e-5, &mut plain).unwrap();
                let mut of_f32 = poisoned(backend, rows, cols);
                backend.rms_norm(&tensor(backend, rows, cols, &residual), &weight, 1e-5, &mut of_f32).unwrap();
                let mut stream = tensor(backend, rows, cols, &residual);
                let mut added = poisoned(backend, rows, cols);
                backend.add_rms_norm(&mut stream, &x, &weight, 1e-5, &mut added).unwrap();
                let mut sum = tensor(backend, rows, cols, &residual);
                backend.add(&mut sum, &x).unwrap();
                [plain, of_f32, added, stream, sum].map(|x| host(backend, &x))
            };
            let (got, want) = (run(&gpu), run(&cpu));
            for (nth, name) in ["rms_norm", "rms_norm of f32", "add_rms_norm"].into_iter().enumerate() {
                assert_close(&got[nth], &want[nth], tolerance(activations), &format!("{name} {what}"));
            }
            assert_eq!(got[3], want[3], "residual {what}");
            assert_eq!(got[4], want[4], "add {what}");
        }
    }
}

#[test]
fn activations_scales_and_caps() {
    for activations in ACTIVATIONS {
        let Some(gpu) = gpu(activations) else { return };
        let cpu = scalar();
        for (rows, cols) in SHAPES {
            let mut random = Random::new(rows as u64);
            let scaled = |x: Vec<f32>| rounded(activations, &x.iter().map(|x| x * 4.0).collect::<Vec<_>>());
            let (gate, up) = (scaled(random.normal(rows * cols)), scaled(random.normal(rows * cols)));
            let run = |backend: &dyn Backend| {
                let (gate, up) = (activation(backend, rows, cols, &gate), activation(backend, rows, cols, &up));
                let mut out = Vec::new();
                for act in [Activation::Silu, Activation::GeluTanh] {
                    let mut gated = poisoned(backend, rows, cols);
                    backend.gated_activation(&gate, &up, act, &mut gated).unwrap();
                    out.push(host(backend, &gated));
                }
                let (mut scaled, mut capped) = (gate, up);
                backend.scale(&mut scaled, 0.37).unwrap();
                backend.soft_cap(&mut capped, 3.0).unwrap();
                out.extend([host(backend, &scaled), host(backend, &capped)]);
                out
            };
            for (nth, (got, want)) in run(&gpu).iter().zip(&run(&cpu)).enumerate() {
                assert_close(got, want, tolerance(activations), &format!("{activations:?} op {nth} [{rows}, {cols}]"));
            }
        }
    }
}

#[test]
fn rows_are_gathered_and_embedded() {
    for activations in ACTIVATIONS {
        let Some(gpu) = gpu(activations) else { return };
        for (rows, cols) in [(1, 1), (17, 33), (4097, 64), (40, 896)] {
            let mut random = Random::new(cols as u64);
            let data = rounded(activations, &random.normal(rows * cols));
            let wanted: Vec<u32> = (0..rows + 3).map(|_| random.below(rows) as u32).collect();
            let x = activation(&gpu, rows, cols, &data);
            let mut out = poisoned(&gpu, wanted.len(), cols);
            gpu.gather_rows(&x, &wanted, &mut out).unwrap();
            let want: Vec<f32> =
                wanted.iter().flat_map(|&row| &data[row as usize * cols..(row as usize + 1) * cols]).copied().collect();
            assert_eq!(host(&gpu, &out), want, "[{rows}, {cols}]");
            assert!(gpu.gather_rows(&x, &[rows as u32], &mut poisoned(&gpu, 1, cols)).is_err());
        }
    }
}

#[test]
fn rows_come_back_once_each() {
    let Some(gpu) = gpu(ACTIVATIONS[1]) else { return };
    let data = Random::new(3).normal(77 * 130);
    let seen = Mutex::new(vec![Vec::new(); 77]);
    gpu.for_each_row(&mut tensor(&gpu, 77, 130, &data), &|idx, row| {
        seen.lock().unwrap()[idx].extend_from_slice(row);
    })
    .unwrap();
    assert_eq!(seen.into_inner().unwrap().concat(), data);
}

#[test]
fn rotations() {
    for activations in ACTIVATIONS {
        let Some(gpu) = gpu(activations) else { return };
        let cpu = scalar();
        for (tokens, heads, head_dim, pairs) in [(1, 1, 64, 32), (17, 3, 80, 16), (4097, 2, 128, 64), (5, 2, 512, 256)]
        {
            let mut random = Random::new(tokens as u64);
            let x = rounded(activations, &random.normal(tokens * heads * head_dim));
            let inv_freq: Vec<f32> = (0..pairs).map(|i| 10_000.0_f32.powf(-(i as f32) / pairs as f32)).collect();
            for style in [RopeStyle::Half, RopeStyle::Interleaved] {
                let table = RopeTable { inv_freq: inv_freq.clone(), magnitude: 1.2, style };
                let run = |backend: &dyn Backend| {
                    let mut x = activation(backend, tokens, heads * head_dim, &x);
                    backend.rope(&mut x, head_dim, &table, &batch(backend, tokens)).unwrap();
                    host(backend, &x)
                };
                let what = format!("{activations:?} {tokens} tokens, {pairs} pairs of {head_dim}, {style:?}");
                assert_close(&run(&gpu), &run(&cpu), tolerance(activations), &what);
            }
        }
    }
}

/// `tokens` tokens of one sequence that ends at a high position.
fn batch(backend: &dyn Backend, tokens: usize) -> DeviceBatch {
    let first = 100_000;
    let layout = BatchLayout {
        query_start: vec![0, tokens as u32],
        seq_lens: vec![first + tokens as u32],
        positions: (first..first + tokens as u32).collect(),
        groups: Vec::new(),
    };
    let spec = KvPoolSpec {
        num_blocks: 1,
        block_size: 16,
        layers_per_group: 1,
        num_kv_heads: 1,
        head_dim: 64,
        dtype: DType::F16,
    };
    backend.upload_batch(layout, &spec).unwrap()
}
