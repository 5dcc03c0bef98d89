//! Products of many tokens, against the kernel that takes any number of them on a deterministic device (which
//! `linear_mid` checks against the CPU).

use crate::linear::{HALVES, bits, levelled, load, place};
use crate::support::{Random, activation, assert_close, deterministic_gpu, gpu, host, rounded};
use pagemill_backend::{Backend, DType, LinearPart, Tensor, Weight};
use pagemill_backend_cuda::{Activations, CudaBackend};

/// Numbers of tokens: a tile's and one more, a cluster's and one less.
const TOKENS: [usize; 4] = [129, 200, 255, 256];

/// Products of one x into places full of NaN, and how often the kernel was launched for them.
fn together(gpu: &CudaBackend, x: &Tensor, weights: &[(Weight, Option<Tensor>)], is_f32: bool) -> (Vec<Vec<f32>>, u64) {
    let mut outs: Vec<Tensor> = weights.iter().map(|(of, _)| place(gpu, x.rows(), of.rows(), is_f32)).collect();
    let mut parts: Vec<LinearPart<'_>> = (weights.iter().zip(&mut outs))
        .map(|((weight, bias), out)| LinearPart { weight, bias: bias.as_ref(), out })
        .collect();
    let before = gpu.big_product_launches();
    gpu.linear(x, &mut parts).unwrap();
    let launches = gpu.big_product_launches() - before;
    (outs.iter().map(|out| host(gpu, out)).collect(), launches)
}

/// Ends inside of a box and of a tile, parts of a panel, one panel, many tiles.
#[test]
fn products_of_many_tokens() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let Some(other) = deterministic_gpu(Activations::Bf16) else { return };
    for dtype in HALVES {
        for (sizes, cols) in [([1000, 8, 264], 904), ([7000, 8, 520], 64), ([4096, 1024, 1024], 2048)] {
            let mut random = Random::new(cols as u64);
            let stored = sizes.map(|rows| (levelled(dtype, rows, cols, &mut random), random.normal(rows)));
            for tokens in TOKENS {
                let x = rounded(Activations::Bf16, &random.normal(tokens * cols));
                let run = |backend: &CudaBackend, is_f32: bool| {
                    let weights: Vec<_> = (stored.iter().zip(sizes).enumerate())
                        .map(|(nth, ((bytes, bias), rows))| {
                            let bias = (nth != 1).then(|| backend.load_vector("bias", bias).unwrap());
                            (load(backend, dtype, rows, cols, bytes), bias)
                        })
                        .collect();
                    together(backend, &activation(backend, tokens, cols, &x), &weights, is_f32)
                };
                let (want, none) = run(&other, true);
                assert_eq!(none, 0, "deterministic products are not this kernel's");
                for is_f32 in [false, true] {
                    let (got, launches) = run(&gpu, is_f32);
                    assert_eq!(launches, 1, "{dtype}, {tokens} tokens of {cols}");
                    let tolerance = if is_f32 { 5e-5 } else { 1.0 / 128.0 };
                    for ((got, want), rows) in got.iter().zip(&want).zip(sizes) {
                        let what = format!("{dtype} [{tokens}, {cols}] by [{rows}, {cols}], to f32 {is_f32}");
                        assert_close(got, want, tolerance, &what);
                    }
                }
            }
        }
    }
}

/// Columns and outputs that the copy engine cannot reach, other weights, fewer tokens: all go the other ways.
#[test]
fn what_the_kernel_for_many_tokens_does_not_take() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let mut random = Random::new(3);
    for (dtype, rows, cols, tokens) in [
        (DType::BF16, 48, 100, 4096),
        (DType::BF16, 44, 64, 4096),
        (DType::F32, 48, 64, 4096),
        (DType::BF16, 48, 64, 1),
    ] {
        let weights = [0; 3].map(|_| {
            let elements: Vec<f32> = random.normal(rows * cols);
            let bytes = match dtype {
                DType::F32 => elements.iter().flat_map(|x| x.to_le_bytes()).collect(),
                _ => crate::linear::halves(dtype, &elements),
            };
            (load(&gpu, dtype, rows, cols, &bytes), None)
        });
        let x = activation(&gpu, tokens, cols, &random.normal(tokens * cols));
        assert_eq!(together(&gpu, &x, &weights, false).1, 0, "{dtype}, {tokens} tokens, {cols} to {rows}");
    }
}

/// Each kernel begins while the one before it still runs: it must not read, nor overwrite, too early.
#[test]
fn overlapped_launches_of_many_tokens_wait_for_one_another() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    for side in [256, 2048] {
        let mut random = Random::new(side as u64);
        let levels = [0; 2].map(|_| levelled(DType::BF16, side, side, &mut random));
        let [first, second] = levels.map(|bytes| load(&gpu, DType::BF16, side, side, &bytes));
        for tokens in [150, 256] {
            let start = random.normal(tokens * side);
            // Ten pairs of products, each of the first of those before.
            let run = |between: &dyn Fn(&Tensor)| {
                let mut x = activation(&gpu, tokens, side, &start);
                let mut outs = [0; 4].map(|_| gpu.activation(tokens, side).unwrap());
                for nth in 0..10 {
                    let [a, b, c, d] = &mut outs;
                    let (out, rest) = if nth % 2 == 0 { (a, b) } else { (c, d) };
                    let mut parts = [
                        LinearPart { weight: &first, bias: None, out },
                        LinearPart { weight: &second, bias: None, out: rest },
                    ];
                    gpu.linear(&x, &mut parts).unwrap();
                    between(&outs[nth % 2 * 2]);
                    std::mem::swap(&mut x, &mut outs[nth % 2 * 2]);
                }
                bits(&host(&gpu, &x))
            };
            let want = run(&|x| drop(host(&gpu, x)));
            assert!(want.iter().all(|&x| f32::from_bits(x).is_finite()));
            for round in 0..10 {
                assert!(run(&|_| ()) == want, "side {side}, {tokens} tokens, round {round}");
            }
        }
    }
}
