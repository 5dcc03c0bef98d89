//! Products with weights of every stored type, and embeddings of them.

use crate::support::{ACTIVATIONS, Random, activation, assert_close, gpu, host, poisoned, rounded, scalar, tensor};
use half::{bf16, f16};
use pagemill_backend::{Backend, DType, LinearPart, Tensor, Weight, WeightDesc};
use pagemill_backend_cuda::Activations;

/// Where a block of the type holds f16 scales.
fn scales(dtype: DType) -> &'static [usize] {
    match dtype {
        DType::Q4_0 | DType::Q5_0 | DType::Q8_0 => &[0],
        DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
        DType::Q2_K => &[80, 82],
        DType::Q3_K => &[108],
        DType::Q6_K => &[208],
        _ => &[],
    }
}

/// Random bytes of a weight whose elements are about a hundredth to ten.
fn stored(dtype: DType, rows: usize, cols: usize, random: &mut Random) -> Vec<u8> {
    let values = |random: &mut Random| random.normal(rows * cols);
    match dtype {
        DType::F32 => values(random).iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::F16 => values(random).iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        DType::BF16 => values(random).iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
        _ => {
            let mut bytes: Vec<u8> = (0..dtype.row_bytes(cols).unwrap() * rows).map(|_| random.next() as u8).collect();
            for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
                for &at in scales(dtype) {
                    let scale = f16::from_f32(0.01 + random.below(100) as f32 * 1e-3);
                    block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
                }
            }
            bytes
        }
    }
}

fn load(backend: &dyn Backend, dtype: DType, rows: usize, cols: usize, bytes: &[u8]) -> Weight {
    let row_bytes = dtype.row_bytes(cols).unwrap();
    let desc = WeightDesc { name: format!("{dtype}"), dtype, rows, cols };
    backend
        .load_weight(desc, &mut |first, count, out| {
            out.copy_from_slice(&bytes[first * row_bytes..(first + count) * row_bytes]);
            Ok(())
        })
        .unwrap()
}

/// How far a product may be from the reference's on the same inputs, as a share of the largest.
fn product_tolerance(activations: Activations, dtype: DType) -> f32 {
    match (activations, dtype) {
        (Activations::F32, _) => 2e-5,
        // The output's rounding; for quantised weights that of the widened weight too.
        (Activations::Bf16, _) => 1.0 / 128.0,
    }
}

fn product(backend: &dyn Backend, x: &Tensor, weight: &Weight, bias: Option<&Tensor>) -> Vec<f32> {
    let mut out = poisoned(backend, x.rows(), weight.rows());
    backend.linear(x, &mut [LinearPart { weight, bias, out: &mut out }]).unwrap();
    host(backend, &out)
}

#[test]
fn every_stored_type_at_every_number_of_tokens() {
    for activations in ACTIVATIONS {
        let Some(gpu) = gpu(activations) else { return };
        let cpu = scalar();
        for dtype in DType::ALL {
            let (rows, cols) = (130, 768);
            let mut random = Random::new(dtype.block_bytes() as u64);
            let bytes = stored(dtype, rows, cols, &mut random);
            let weights = (load(&gpu, dtype, rows, cols, &bytes), load(&cpu, dtype, rows, cols, &bytes));
            let bias = random.normal(rows);
            for tokens in [1, 2, 8, 9, 17, 300] {
                let x = rounded(activations, &random.normal(tokens * cols));
                let run = |backend: &dyn Backend, weight: &Weight| {
                    let bias = backend.load_vector("bias", &bias).unwrap();
                    product(backend, &activation(backend, tokens, cols, &x), weight, Some(&bias))
                };
                let what = format!("{activations:?} {dtype}, {tokens} tokens");
                let (got, want) = (run(&gpu, &weights.0), run(&cpu, &weights.1));
                assert_close(&got, &want, product_tolerance(activations, dtype), &what);
            }
        }
    }
}

#[test]
fn odd_shapes_and_many_tokens() {
    for activations in ACTIVATIONS {
        let Some(gpu) = gpu(activations) else { return };
        let cpu = scalar();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (tokens, rows, cols) in [(1, 1, 1), (17, 33, 7), (4097, 48, 128), (4097, 17, 33)] {
                let mut random = Random::new((tokens + cols) as u64);
                let bytes = stored(dtype, rows, cols, &mut random);
                let x = rounded(activations, &random.normal(tokens * cols));
                let run = |backend: &dyn Backend| {
                    let weight = load(backend, dtype, rows, cols, &bytes);
                    product(backend, &activation(backend, tokens, cols, &x), &weight, None)
                };
                let what = format!("{activations:?} {dtype} [{tokens}, {cols}] by [{rows}, {cols}]");
                assert_close(&run(&gpu), &run(&cpu), product_tolerance(activations, dtype), &what);
            }
        }
    }
}

/// Logits are f32 whatever flows between ops, and three products of one input come out each in its place.
#[test]
fn several_products_of_one_input_and_f32_outputs() {
    for activations in ACTIVATIONS {
        let Some(gpu) = gpu(activations) else { return };
        let cpu = scalar();
        for dtype in [DType::BF16, DType::F16, DType::Q4_K] {
            for tokens in [3, 40] {
                let mut random = Random::new(tokens as u64);
                let shapes = [(64, 256), (32, 256), (96, 256)];
                let bytes = shapes.map(|(rows, cols)| stored(dtype, rows, cols, &mut random));
                let x = rounded(activations, &random.normal(tokens * 256));
                let run = |backend: &dyn Backend| -> Vec<f32> {
                    let load = |nth: usize| load(backend, dtype, shapes[nth].0, 256, &bytes[nth]);
                    let weights = [load(0), load(1), load(2)];
                    let nan = vec![f32::NAN; tokens * 96];
                    let mut outs = shapes.map(|(rows, _)| tensor(backend, tokens, rows, &nan[..tokens * rows]));
                    let mut parts: Vec<LinearPart<'_>> = weights
                        .iter()
                        .zip(&mut outs)
                        .map(|(weight, out)| LinearPart { weight, bias: None, out })
                        .collect();
                    backend.linear(&activation(backend, tokens, 256, &x), &mut parts).unwrap();
                    outs.iter().flat_map(|out| host(backend, out)).collect()
                };
                let tolerance = if dtype == DType::BF16 { 2e-5 } else { product_tolerance(activations, dtype) };
                assert_close(&run(&gpu), &run(&cpu), tolerance, &format!("{activations:?} {dtype}, {tokens} tokens"));
            }
        }
    }
}

#[test]
fn embeddings_of_every_stored_type() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let cpu = scalar();
    for dtype in DType::ALL {
        let (rows, cols) = (40, 512);
        let mut random = Random::new(9);
        let bytes = stored(dtype, rows, cols, &mut random);
        let ids: Vec<u32> = (0..4097).map(|_| random.below(rows) as u32).collect();
        let run = |backend: &dyn Backend| {
            let table = load(backend, dtype, rows, cols, &bytes);
            let mut out = tensor(backend, ids.len(), cols, &vec![f32::NAN; ids.len() * cols]);
            backend.embed(&table, &ids, 1.7, &mut out).unwrap();
            assert!(backend.embed(&table, &[rows as u32], 1.0, &mut backend.temp(1, cols).unwrap()).is_err());
            host(backend, &out)
        };
        assert_close(&run(&gpu), &run(&cpu), 1e-6, &format!("{dtype}"));
    }
}

/// Larger than a piece of staging, so that several pieces are on their way at once.
#[test]
fn a_large_weight_arrives_whole() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let (rows, cols) = (50_001, 1024); // 102 MB of bf16
    let mut random = Random::new(5);
    let bytes: Vec<u8> =
        (0..rows * cols).flat_map(|_| bf16::from_f32((random.next() >> 56) as f32).to_le_bytes()).collect();
    let weight = load(&gpu, DType::BF16, rows, cols, &bytes);
    let ids: Vec<u32> = (0..rows as u32).collect();
    for ids in ids.chunks(10_000) {
        let mut out = gpu.temp(ids.len(), cols).unwrap();
        gpu.embed(&weight, ids, 1.0, &mut out).unwrap();
        let first = ids[0] as usize * cols;
        for (at, got) in host(&gpu, &out).into_iter().enumerate() {
            let want = bf16::from_le_bytes([bytes[(first + at) * 2], bytes[(first + at) * 2 + 1]]).to_f32();
            assert!(got == want, "element {}: {got}, not {want}", first + at);
        }
    }
}
