//! Soft caps and sinks in every attention kernel, against the CPU's.

use crate::attention::{
    Extras, FAST_HEADS, ONE_DECODE, ONE_PLAIN, Shape, check_step, closeness, fill, launches, one_prefill, pool, run,
    sequences, step,
};
use crate::support::{ACTIVATIONS, assert_close, gpu, scalar};
use pagemill_backend::DType;
use pagemill_backend_cuda::{Activations, AttentionLaunches};

const EXTRAS: [Extras; 3] = [
    Extras { soft_cap: Some(1.5), has_sinks: false },
    Extras { soft_cap: None, has_sinks: true },
    Extras { soft_cap: Some(3.0), has_sinks: true },
];

#[test]
fn decodes_and_prompts_have_soft_caps_and_sinks() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let lens = [1, 17, 1000, 300, 77];
    let decodes: Vec<_> = lens.iter().enumerate().map(|(seq, len)| (seq, len - 1, 1)).collect();
    // A decode between prompts, with history and without.
    let mixed = [(2, 900, 100), (3, 299, 1), (4, 0, 77)];
    for (nth, (heads, kv_heads, head_dim)) in FAST_HEADS.into_iter().enumerate() {
        for (kv, window) in [(DType::F16, None), (DType::BF16, Some(100))] {
            for extras in EXTRAS {
                let block_size = [16, 64, 256][nth % 3];
                let shape = Shape { heads, kv_heads, head_dim, window, block_size, extras };
                check_step(&gpu, shape, &lens, kv, &decodes, ONE_DECODE);
                let both = AttentionLaunches { decode: 1, ..one_prefill(&gpu, head_dim) };
                check_step(&gpu, shape, &lens, kv, &mixed, both);
            }
        }
    }
}

/// One long sequence, cut over the whole chip: a sink counts once.
#[test]
fn a_cut_sequence_has_its_sink_once() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let extras = Extras { soft_cap: None, has_sinks: true };
    let shape = Shape { heads: 8, kv_heads: 2, head_dim: 128, window: None, block_size: 16, extras };
    check_step(&gpu, shape, &[8191], DType::BF16, &[(0, 8190, 1)], ONE_DECODE);
}

#[test]
fn the_plain_kernel_has_them_too() {
    for activations in ACTIVATIONS {
        let Some(gpu) = gpu(activations) else { return };
        let cpu = scalar();
        for (heads, kv_heads, head_dim) in [(9, 3, 64), (14, 2, 32), (5, 1, 20), (2, 1, 512)] {
            for extras in EXTRAS {
                for window in [None, Some(37)] {
                    let shape = Shape { heads, kv_heads, head_dim, window, block_size: 16, extras };
                    let (seqs, blocks) = sequences(shape, &[1, 17, 160], activations, DType::F32);
                    let got = run(&gpu, shape, &mut pool(&gpu, shape, blocks, DType::F32), &seqs, 64);
                    let want = run(&cpu, shape, &mut pool(&cpu, shape, blocks, DType::F32), &seqs, 160);
                    let what = format!("{activations:?} {shape:?}");
                    assert_close(&got.concat(), &want.concat(), closeness(activations, DType::F32), &what);
                    let mut filled = pool(&gpu, shape, blocks, DType::F32);
                    fill(&gpu, shape, &mut filled, &seqs);
                    let once = launches(&gpu, || drop(step(&gpu, shape, &mut filled, &seqs, &[(2, 0, 160)])));
                    assert_eq!(once, ONE_PLAIN, "{what}");
                }
            }
        }
    }
}
