//! A deterministic device: not a bit of a row changes with its company, the chunks of its prompt, or its place.

use crate::attention::{FAST_HEADS, NO_EXTRAS, Shape, fill, launches, pool, run, sequences, step};
use crate::linear::{load, product, stored};
use crate::support::{ACTIVATIONS, Random, activation, deterministic_gpu};
use pagemill_backend::DType;
use pagemill_backend_cuda::Activations;

#[test]
fn attention_is_the_same_in_any_chunks_and_company() {
    let Some(gpu) = deterministic_gpu(Activations::Bf16) else { return };
    let lens = [300, 1, 129, 64];
    for (nth, (heads, kv_heads, head_dim)) in FAST_HEADS.into_iter().enumerate() {
        let block_size = [16, 64, 128][nth % 3];
        for kv in [DType::F16, DType::BF16] {
            for window in [None, Some(1), Some(37), Some(200)] {
                let shape = Shape { heads, kv_heads, head_dim, window, block_size, extras: NO_EXTRAS };
                let (seqs, blocks) = sequences(shape, &lens, Activations::Bf16, kv);
                let whole = run(&gpu, shape, &mut pool(&gpu, shape, blocks, kv), &seqs, 300);
                for chunk in [1, 7, 64] {
                    let cut = run(&gpu, shape, &mut pool(&gpu, shape, blocks, kv), &seqs, chunk);
                    assert!(cut == whole, "{shape:?} over {kv}, in chunks of {chunk}");
                }
                let mut filled = pool(&gpu, shape, blocks, kv);
                fill(&gpu, shape, &mut filled, &seqs);
                let cols = heads * head_dim;
                for (seq, rows) in whole.iter().enumerate() {
                    for (first, count) in [(0, lens[seq]), (lens[seq] - 1, 1), (lens[seq] / 2, lens[seq].div_ceil(2))] {
                        let mut alone = Vec::new();
                        let launched =
                            launches(&gpu, || alone = step(&gpu, shape, &mut filled, &seqs, &[(seq, first, count)]));
                        assert_eq!(launched.prefill + launched.prefill_any, 1, "{launched:?}");
                        assert!(
                            alone == rows[first * cols..(first + count) * cols],
                            "{shape:?} over {kv}, {seq} alone"
                        );
                    }
                }
            }
        }
    }
}

/// Decode steps of long sequences, alone and among others.
#[test]
fn a_long_sequence_is_the_same_in_any_company() {
    let Some(gpu) = deterministic_gpu(Activations::Bf16) else { return };
    for (heads, kv_heads, head_dim) in [(8, 2, 128), (8, 1, 256)] {
        let shape = Shape { heads, kv_heads, head_dim, window: None, block_size: 32, extras: NO_EXTRAS };
        let lens = [3000, 77, 2049, 1];
        let (seqs, blocks) = sequences(shape, &lens, Activations::Bf16, DType::F16);
        let mut filled = pool(&gpu, shape, blocks, DType::F16);
        fill(&gpu, shape, &mut filled, &seqs);
        let last = |seq: usize| (seq, lens[seq] - 1, 1);
        let together = step(&gpu, shape, &mut filled, &seqs, &[last(1), last(0), last(3), last(2)]);
        let cols = heads * head_dim;
        for (place, seq) in [1, 0, 3, 2].into_iter().enumerate() {
            let alone = step(&gpu, shape, &mut filled, &seqs, &[last(seq)]);
            assert!(alone == together[place * cols..(place + 1) * cols], "{shape:?}, {seq}");
        }
    }
}

#[test]
fn products_are_the_same_for_any_number_of_tokens() {
    for activations in ACTIVATIONS {
        let Some(gpu) = deterministic_gpu(activations) else { return };
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::Q4_0, DType::Q6_K] {
            for (rows, cols) in [(130, 768), (512, 2048), (4096, 1024)] {
                let mut random = Random::new(rows as u64);
                let weight = load(&gpu, dtype, rows, cols, &stored(dtype, rows, cols, &mut random));
                let most = 700;
                let x = random.normal(most * cols);
                let rows_of = |first: usize, tokens: usize| {
                    let x = activation(&gpu, tokens, cols, &x[first * cols..(first + tokens) * cols]);
                    product(&gpu, &x, &weight, None)
                };
                let all = rows_of(0, most);
                for (first, tokens) in [
                    (0, 1),
                    (5, 2),
                    (3, 7),
                    (90, 8),
                    (1, 9),
                    (0, 16),
                    (7, 17),
                    (640, 60),
                    (2, 64),
                    (0, 65),
                    (9, 256),
                    (11, 300),
                ] {
                    let some = rows_of(first, tokens);
                    assert!(
                        some == all[first * rows..(first + tokens) * rows],
                        "{activations:?} {dtype} [{rows}, {cols}], {tokens} tokens from {first}"
                    );
                }
            }
        }
    }
}
