//! Products of some ten to some hundred tokens, and those whose bits must not depend on company.

use crate::linear::{HALVES, StoredMlp, bits, chain, levelled, load, place, product, square_weights, stored};
use crate::support::{
    Random, activation, assert_close, deterministic_gpu, gpu, host, poisoned, rounded, scalar, tensor,
};
use pagemill_backend::{Activation, Backend, DType, LinearInput, LinearPart, Tensor, Weight};
use pagemill_backend_cuda::{Activations, CudaBackend};

/// One row, part of a tile, a tile for each multiprocessor and several passes, a part of a panel and of a stage at the end.
const SHAPES: [(usize, usize); 7] =
    [(1, 8), (33, 896), (5001, 896), (896, 904), (16_500, 256), (1001, 4096), (130, 14_336)];

/// The product, and how often the kernel was launched for it.
fn counted(gpu: &CudaBackend, x: &Tensor, weight: &Weight, bias: Option<&Tensor>, is_f32: bool) -> (Vec<f32>, u64) {
    let mut out = place(gpu, x.rows(), weight.rows(), is_f32);
    let before = gpu.mid_product_launches();
    gpu.linear(x, &mut [LinearPart { weight, bias, out: &mut out }]).unwrap();
    (host(gpu, &out), gpu.mid_product_launches() - before)
}

/// Every number of columns that is compiled, full and not, and more tokens than a launch takes.
#[test]
fn products_of_every_number_of_tokens() {
    let Some(gpu) = deterministic_gpu(Activations::Bf16) else { return };
    let cpu = scalar();
    for dtype in HALVES {
        for (rows, cols) in SHAPES {
            let mut random = Random::new((rows + cols) as u64);
            let bytes = levelled(dtype, rows, cols, &mut random);
            let weights = (load(&gpu, dtype, rows, cols, &bytes), load(&cpu, dtype, rows, cols, &bytes));
            let bias = random.normal(rows);
            let biases = (gpu.load_vector("bias", &bias).unwrap(), cpu.load_vector("bias", &bias).unwrap());
            for tokens in [1, 16, 17, 33, 64, 65, 128, 129] {
                let x = rounded(Activations::Bf16, &random.normal(tokens * cols));
                let places = (activation(&gpu, tokens, cols, &x), activation(&cpu, tokens, cols, &x));
                let has_bias = tokens % 2 == 0;
                let want = product(&cpu, &places.1, &weights.1, has_bias.then_some(&biases.1));
                for is_f32 in [false, true] {
                    let what = format!("{dtype} [{tokens}, {cols}] by [{rows}, {cols}], bias {has_bias}");
                    let (got, launches) = counted(&gpu, &places.0, &weights.0, has_bias.then_some(&biases.0), is_f32);
                    let tolerance = if is_f32 { 5e-5 } else { 1.0 / 128.0 };
                    assert_close(&got, &want, tolerance, &format!("{what}, to f32 {is_f32}"));
                    assert_eq!(launches, tokens.div_ceil(128) as u64, "{what}");
                }
            }
        }
    }
}

/// A row of a hundred rows, of a prompt of more than a launch takes, and alone.
#[test]
fn a_rows_bits_do_not_depend_on_its_company() {
    let Some(gpu) = deterministic_gpu(Activations::Bf16) else { return };
    for dtype in HALVES {
        for (rows, cols) in SHAPES {
            let mut random = Random::new((rows * cols) as u64);
            let weight = load(&gpu, dtype, rows, cols, &levelled(dtype, rows, cols, &mut random));
            let bias = gpu.load_vector("bias", &random.normal(rows)).unwrap();
            let x = random.normal(300 * cols);
            let run = |first: usize, count: usize| {
                let x = activation(&gpu, count, cols, &x[first * cols..(first + count) * cols]);
                bits(&counted(&gpu, &x, &weight, Some(&bias), true).0)
            };
            let all = run(0, 300);
            for (first, count) in [(0, 1), (299, 1), (3, 7), (290, 10), (100, 30), (200, 64), (17, 100), (50, 200)] {
                let want = &all[first * rows..(first + count) * rows];
                assert!(run(first, count) == want, "{dtype} {rows} x {cols}: {count} tokens from {first}");
            }
        }
    }
}

/// q, k and v of one input: as many bits as one by one, in one launch.
#[test]
fn products_of_one_input_share_a_launch_of_some_tokens() {
    let Some(gpu) = deterministic_gpu(Activations::Bf16) else { return };
    let (cols, sizes) = (896, [2500, 33, 130]);
    for dtype in HALVES {
        let mut random = Random::new(7);
        let weights = sizes.map(|rows| load(&gpu, dtype, rows, cols, &levelled(dtype, rows, cols, &mut random)));
        let biases = sizes.map(|rows| gpu.load_vector("bias", &random.normal(rows)).unwrap());
        for tokens in [1, 20, 64, 128] {
            let x = activation(&gpu, tokens, cols, &random.normal(tokens * cols));
            let mut outs = sizes.map(|rows| poisoned(&gpu, tokens, rows));
            let mut parts: Vec<LinearPart<'_>> = (weights.iter().zip(&biases).zip(&mut outs))
                .map(|((weight, bias), out)| LinearPart { weight, bias: Some(bias), out })
                .collect();
            let before = gpu.mid_product_launches();
            gpu.linear(&x, &mut parts).unwrap();
            assert_eq!(gpu.mid_product_launches() - before, 1);
            for ((out, weight), bias) in outs.iter().zip(&weights).zip(&biases) {
                let alone = counted(&gpu, &x, weight, Some(bias), false).0;
                assert!(bits(&host(&gpu, out)) == bits(&alone), "{dtype} {tokens} tokens, {} rows", weight.rows());
            }
        }
    }
}

#[test]
fn gated_layers_of_every_number_of_tokens() {
    let Some(gpu) = deterministic_gpu(Activations::Bf16) else { return };
    let cpu = scalar();
    for dtype in HALVES {
        for (inner, cols) in [(864, 896), (1000, 904), (40, 4096)] {
            let mut random = Random::new((inner + cols) as u64);
            let mlp = StoredMlp::new(dtype, inner, cols, false, &mut random);
            let x = rounded(Activations::Bf16, &random.normal(150 * cols));
            for act in [Activation::Silu, Activation::GeluTanh] {
                let run = |backend: &dyn Backend, first: usize, tokens: usize| {
                    let x = activation(backend, tokens, cols, &x[first * cols..(first + tokens) * cols]);
                    let out = mlp.run(backend, act, |mlp| backend.gated_mlp(LinearInput::Plain(&x), mlp).unwrap());
                    host(backend, &out)
                };
                let want = run(&cpu, 0, 150);
                let all = run(&gpu, 0, 150);
                assert_close(&all, &want, 1.0 / 64.0, &format!("{dtype} {act:?}, {cols} to {inner}"));
                for (first, tokens) in [(0, 1), (9, 16), (100, 50), (5, 128)] {
                    let before = gpu.mid_product_launches();
                    let got = run(&gpu, first, tokens);
                    assert_eq!(gpu.mid_product_launches() - before, 2, "gate and up in one, and down");
                    let same = &all[first * inner..(first + tokens) * inner];
                    assert!(bits(&got) == bits(same), "{dtype} {act:?}, {cols} to {inner}: {tokens} from {first}");
                }
            }
        }
    }
}

/// Columns that the copy engine cannot read, and weights that the kernel does not know, go the other ways.
#[test]
fn what_the_kernel_for_some_tokens_does_not_take() {
    let Some(gpu) = deterministic_gpu(Activations::Bf16) else { return };
    let mut random = Random::new(3);
    for (dtype, cols) in [(DType::BF16, 100), (DType::F32, 64)] {
        let bytes = stored(dtype, 48, cols, &mut random);
        let weight = load(&gpu, dtype, 48, cols, &bytes);
        let x = activation(&gpu, 20, cols, &random.normal(20 * cols));
        assert_eq!(counted(&gpu, &x, &weight, None, false).1, 0, "{dtype}, {cols} columns");
    }
}

/// Where company may matter the kernel is taken where it is the fastest.
#[test]
fn some_tokens_take_the_fastest_kernel() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let mut random = Random::new(4);
    let (rows, cols) = (1024, 896);
    let bytes = levelled(DType::BF16, rows, cols, &mut random);
    let weights = [0; 3].map(|_| load(&gpu, DType::BF16, rows, cols, &bytes));
    for (tokens, ours) in [(8, false), (9, true), (128, true), (129, false)] {
        let x = activation(&gpu, tokens, cols, &random.normal(tokens * cols));
        let mut outs = [0; 3].map(|_| poisoned(&gpu, tokens, rows));
        let mut parts: Vec<LinearPart<'_>> =
            weights.iter().zip(&mut outs).map(|(weight, out)| LinearPart { weight, bias: None, out }).collect();
        let before = gpu.mid_product_launches();
        gpu.linear(&x, &mut parts).unwrap();
        assert_eq!(gpu.mid_product_launches() - before, u64::from(ours), "{tokens} tokens");
    }
}

/// Rows and columns of products that leave planes: two of them to eight, the last of them a part of a panel.
const SHAPES_IN_PLANES: [(usize, usize); 6] =
    [(33, 896), (896, 904), (1001, 4096), (4096, 512), (130, 14_336), (1, 1032)];

/// The product as an addition reads it.
fn added(gpu: &CudaBackend, x: &Tensor, weight: &Weight, bias: Option<&Tensor>) -> Vec<f32> {
    let mut out = poisoned(gpu, x.rows(), weight.rows());
    gpu.linear(x, &mut [LinearPart { weight, bias, out: &mut out }]).unwrap();
    let mut residual = tensor(gpu, x.rows(), weight.rows(), &vec![0.0; x.rows() * weight.rows()]);
    gpu.add(&mut residual, &out).unwrap();
    host(gpu, &residual)
}

/// Where company may matter a product of few rows leaves its sums to whoever reads them.
#[test]
fn products_of_few_rows_leave_planes() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let cpu = scalar();
    for dtype in HALVES {
        for (rows, cols) in SHAPES_IN_PLANES {
            let mut random = Random::new((rows + cols) as u64);
            let bytes = levelled(dtype, rows, cols, &mut random);
            let weights = (load(&gpu, dtype, rows, cols, &bytes), load(&cpu, dtype, rows, cols, &bytes));
            let bias = random.normal(rows);
            let biases = (gpu.load_vector("bias", &bias).unwrap(), cpu.load_vector("bias", &bias).unwrap());
            for tokens in [8, 17, 33, 64, 65, 128, 129] {
                let x = rounded(Activations::Bf16, &random.normal(tokens * cols));
                let places = (activation(&gpu, tokens, cols, &x), activation(&cpu, tokens, cols, &x));
                let has_bias = tokens % 2 == 0;
                let want = product(&cpu, &places.1, &weights.1, has_bias.then_some(&biases.1));
                let bias = has_bias.then_some(&biases.0);
                let in_planes = (17..=128).contains(&tokens);
                let what = format!("{dtype} [{tokens}, {cols}] by [{rows}, {cols}], bias {has_bias}");
                let (got, launches) = counted(&gpu, &places.0, &weights.0, bias, false);
                assert_close(&got, &want, 1.0 / 128.0, &what);
                assert_eq!(launches, u64::from(in_planes), "{what}");
                let tolerance = if in_planes { 5e-5 } else { 1.0 / 128.0 };
                assert_close(&added(&gpu, &places.0, &weights.0, bias), &want, tolerance, &format!("{what}, added"));
            }
        }
    }
}

#[test]
fn a_rows_planes_do_not_depend_on_its_company() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    for (rows, cols) in SHAPES_IN_PLANES {
        let mut random = Random::new((rows * cols) as u64);
        let weight = load(&gpu, DType::BF16, rows, cols, &levelled(DType::BF16, rows, cols, &mut random));
        let x = random.normal(128 * cols);
        let run = |first: usize, count: usize| {
            let x = activation(&gpu, count, cols, &x[first * cols..(first + count) * cols]);
            bits(&added(&gpu, &x, &weight, None))
        };
        let all = run(0, 128);
        for (first, count) in [(0, 17), (111, 17), (3, 32), (90, 33), (40, 64), (17, 100)] {
            let want = &all[first * rows..(first + count) * rows];
            assert!(run(first, count) == want, "{rows} x {cols}: {count} tokens from {first}");
        }
    }
}

/// Each kernel begins while the one before it still runs: it must not read, nor overwrite, too early.
#[test]
fn overlapped_launches_of_some_tokens_wait_for_one_another() {
    for gpu in [deterministic_gpu(Activations::Bf16), gpu(Activations::Bf16)].into_iter().flatten() {
        overlapped_launches_wait(&gpu);
    }
}

fn overlapped_launches_wait(gpu: &CudaBackend) {
    // Fewer shares than multiprocessors, and more tiles.
    for side in [256, 2112, 8192] {
        let mut random = Random::new(side as u64);
        let weights = square_weights(gpu, side, &mut random);
        for tokens in [1, 20, 64, 128] {
            let start = random.normal(tokens * side);
            let run = |between: &dyn Fn(&Tensor)| {
                let mut places = [activation(gpu, tokens, side, &start), poisoned(gpu, tokens, side)];
                let mut end = gpu.temp(tokens, side).unwrap();
                chain(gpu, &weights, &mut places, &mut end, between);
                bits(&host(gpu, &end))
            };
            let want = run(&|x| drop(host(gpu, x)));
            assert!(want.iter().all(|&x| f32::from_bits(x).is_finite()));
            for round in 0..10 {
                assert!(run(&|_| ()) == want, "side {side}, {tokens} tokens, round {round}");
            }
        }
    }
}
