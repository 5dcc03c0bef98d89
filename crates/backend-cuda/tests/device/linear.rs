//! Products with weights of every stored type, and embeddings of them.

use crate::support::{ACTIVATIONS, Random, activation, assert_close, gpu, host, poisoned, rounded, scalar, tensor};
use half::{bf16, f16};
use pagemill_backend::{
    Activation, Addend, Backend, BatchLayout, DType, GroupLayout, KvPoolSpec, LinearInput, LinearPart, LinearWeights,
    MlpWeights, Norm, Tensor, Weight, WeightDesc,
};
use pagemill_backend_cuda::{Activations, CudaBackend};

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
pub fn stored(dtype: DType, rows: usize, cols: usize, random: &mut Random) -> Vec<u8> {
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

pub fn load(backend: &dyn Backend, dtype: DType, rows: usize, cols: usize, bytes: &[u8]) -> Weight {
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

pub fn product(backend: &dyn Backend, x: &Tensor, weight: &Weight, bias: Option<&Tensor>) -> Vec<f32> {
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

pub const HALVES: [DType; 2] = [DType::BF16, DType::F16];

/// The stored bytes of these elements.
pub fn halves(dtype: DType, elements: &[f32]) -> Vec<u8> {
    match dtype {
        DType::F16 => elements.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        _ => elements.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
    }
}

/// Normal elements of deviation `1 / sqrt(cols)`: a product with rows of deviation 1 has deviation 1.
pub fn levelled(dtype: DType, rows: usize, cols: usize, random: &mut Random) -> Vec<u8> {
    let scale = 1.0 / (cols as f32).sqrt();
    halves(dtype, &random.normal(rows * cols).iter().map(|x| x * scale).collect::<Vec<_>>())
}

pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// A place full of NaN for a product: f32, or the device's type.
pub fn place(backend: &dyn Backend, rows: usize, cols: usize, is_f32: bool) -> Tensor {
    match is_f32 {
        true => tensor(backend, rows, cols, &vec![f32::NAN; rows * cols]),
        false => poisoned(backend, rows, cols),
    }
}

/// The product, and how often the kernel for few tokens was launched for it.
fn counted(gpu: &CudaBackend, x: &Tensor, weight: &Weight, bias: Option<&Tensor>, is_f32: bool) -> (Vec<f32>, u64) {
    let mut out = place(gpu, x.rows(), weight.rows(), is_f32);
    let before = gpu.small_product_launches();
    gpu.linear(x, &mut [LinearPart { weight, bias, out: &mut out }]).unwrap();
    (host(gpu, &out), gpu.small_product_launches() - before)
}

/// Shapes with a part of a tile at the end, fewer tiles than thread blocks and more, and chunks of `C` that the warps
/// share evenly and unevenly.
const FEW_TOKEN_SHAPES: [(usize, usize); 6] =
    [(1, 32), (33, 896), (5001, 896), (896, 896), (1001, 4096), (130, 14_336)];

#[test]
fn few_tokens_take_our_kernel() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let cpu = scalar();
    for dtype in HALVES {
        for (rows, cols) in FEW_TOKEN_SHAPES {
            let mut random = Random::new((rows + cols) as u64);
            let bytes = levelled(dtype, rows, cols, &mut random);
            let weights = (load(&gpu, dtype, rows, cols, &bytes), load(&cpu, dtype, rows, cols, &bytes));
            let bias = random.normal(rows);
            let biases = (gpu.load_vector("bias", &bias).unwrap(), cpu.load_vector("bias", &bias).unwrap());
            for tokens in [1, 2, 7, 8, 9, 16, 17] {
                let x = rounded(Activations::Bf16, &random.normal(tokens * cols));
                let places = (activation(&gpu, tokens, cols, &x), activation(&cpu, tokens, cols, &x));
                for has_bias in [false, true] {
                    let want = product(&cpu, &places.1, &weights.1, has_bias.then_some(&biases.1));
                    for is_f32 in [false, true] {
                        let what = format!("{dtype} [{tokens}, {cols}] by [{rows}, {cols}], bias {has_bias}");
                        let (got, launches) =
                            counted(&gpu, &places.0, &weights.0, has_bias.then_some(&biases.0), is_f32);
                        let tolerance = if is_f32 { 5e-5 } else { 1.0 / 128.0 };
                        assert_close(&got, &want, tolerance, &format!("{what}, to f32 {is_f32}"));
                        let ours = tokens <= 8 || tokens <= 16 && rows <= cols;
                        assert_eq!(launches, u64::from(ours), "{what}");
                    }
                }
            }
        }
    }
}

/// Columns that the kernel cannot read, and weights that it does not know, go the other ways.
#[test]
fn what_our_kernel_does_not_take() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let mut random = Random::new(3);
    for (dtype, cols) in [(DType::BF16, 100), (DType::F16, 8), (DType::F32, 64), (DType::Q8_0, 64)] {
        let weight = load(&gpu, dtype, 48, cols, &stored(dtype, 48, cols, &mut random));
        let x = activation(&gpu, 2, cols, &random.normal(2 * cols));
        assert_eq!(counted(&gpu, &x, &weight, None, false).1, 0, "{dtype}, {cols} columns");
    }
}

#[test]
fn a_rows_bits_do_not_depend_on_how_few_tokens_there_are() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    for dtype in HALVES {
        for (rows, cols) in FEW_TOKEN_SHAPES {
            let mut random = Random::new((rows * cols) as u64);
            let weight = load(&gpu, dtype, rows, cols, &levelled(dtype, rows, cols, &mut random));
            let bias = gpu.load_vector("bias", &random.normal(rows)).unwrap();
            let x = random.normal(8 * cols);
            for is_f32 in [false, true] {
                let run = |first: usize, count: usize| {
                    let x = activation(&gpu, count, cols, &x[first * cols..(first + count) * cols]);
                    let (got, launches) = counted(&gpu, &x, &weight, Some(&bias), is_f32);
                    assert_eq!(launches, 1);
                    bits(&got)
                };
                let all = run(0, 8);
                for count in 1..8 {
                    for first in [0, 8 - count] {
                        let want = &all[first * rows..(first + count) * rows];
                        assert!(run(first, count) == want, "{dtype} {rows} x {cols}: {count} tokens from {first}");
                    }
                }
            }
        }
    }
}

/// q, k and v of one input: as many bits as one by one, in fewer launches.
#[test]
fn products_of_one_input_share_launches() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let cols = 896;
    for dtype in HALVES {
        for sizes in [&[2500, 33, 130][..], &[16, 16], &[1, 5001, 17, 896, 48]] {
            let mut random = Random::new(sizes.len() as u64);
            let weights: Vec<Weight> = sizes
                .iter()
                .map(|&rows| load(&gpu, dtype, rows, cols, &levelled(dtype, rows, cols, &mut random)))
                .collect();
            // Every other one has a bias.
            let biases: Vec<Option<Tensor>> = sizes
                .iter()
                .enumerate()
                .map(|(nth, &rows)| (nth % 2 == 0).then(|| gpu.load_vector("bias", &random.normal(rows)).unwrap()))
                .collect();
            for tokens in [1, 3, 8] {
                let x = activation(&gpu, tokens, cols, &random.normal(tokens * cols));
                let mut outs: Vec<Tensor> = sizes.iter().map(|&rows| poisoned(&gpu, tokens, rows)).collect();
                let mut parts: Vec<LinearPart<'_>> = weights
                    .iter()
                    .zip(&biases)
                    .zip(&mut outs)
                    .map(|((weight, bias), out)| LinearPart { weight, bias: bias.as_ref(), out })
                    .collect();
                let before = gpu.small_product_launches();
                gpu.linear(&x, &mut parts).unwrap();
                let launches = gpu.small_product_launches() - before;
                assert_eq!(launches, sizes.len().div_ceil(3) as u64);
                for ((out, weight), bias) in outs.iter().zip(&weights).zip(&biases) {
                    let (alone, _) = counted(&gpu, &x, weight, bias.as_ref(), false);
                    let together = host(&gpu, out);
                    assert!(bits(&together) == bits(&alone), "{dtype} {tokens} tokens, {} of {sizes:?}", weight.rows());
                }
            }
        }
    }
}

/// Outputs of two types, and weights of two types, are launches of their own.
#[test]
fn unlike_products_do_not_share_a_launch() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let (tokens, cols) = (2, 64);
    let mut random = Random::new(8);
    let mut weight = |dtype| load(&gpu, dtype, 40, cols, &levelled(dtype, 40, cols, &mut random));
    let weights = [weight(DType::BF16), weight(DType::BF16), weight(DType::F16), weight(DType::F16)];
    let x = activation(&gpu, tokens, cols, &Random::new(9).normal(tokens * cols));
    let mut outs = [false, true, true, true].map(|is_f32| place(&gpu, tokens, 40, is_f32));
    let mut parts: Vec<LinearPart<'_>> =
        weights.iter().zip(&mut outs).map(|(weight, out)| LinearPart { weight, bias: None, out }).collect();
    let before = gpu.small_product_launches();
    gpu.linear(&x, &mut parts).unwrap();
    assert_eq!(gpu.small_product_launches() - before, 3);
    for (nth, (weight, out)) in weights.iter().zip(&outs).enumerate() {
        assert!(bits(&host(&gpu, out)) == bits(&counted(&gpu, &x, weight, None, nth > 0).0), "product {nth}");
    }
}

/// Weights of an MLP as stored, `[F, C]` twice and `[D, F]`.
pub struct StoredMlp {
    dtype: DType,
    inner: usize,
    cols: usize,
    bytes: [Vec<u8>; 3],
    bias: Option<Vec<f32>>,
}

impl StoredMlp {
    /// Down is the identity: what comes out is what the gate lets through.
    pub fn new(dtype: DType, inner: usize, cols: usize, has_bias: bool, random: &mut Random) -> Self {
        let mut down = vec![0.0; inner * inner];
        down.iter_mut().step_by(inner + 1).for_each(|x| *x = 1.0);
        let mut projection = || levelled(dtype, inner, cols, random);
        let bytes = [projection(), projection(), halves(dtype, &down)];
        Self { dtype, inner, cols, bytes, bias: has_bias.then(|| random.normal(inner)) }
    }

    pub fn run<T>(&self, backend: &dyn Backend, act: Activation, run: impl FnOnce(&MlpWeights<'_>) -> T) -> T {
        let (dtype, inner) = (self.dtype, self.inner);
        let gate = load(backend, dtype, inner, self.cols, &self.bytes[0]);
        let up = load(backend, dtype, inner, self.cols, &self.bytes[1]);
        let down = load(backend, dtype, inner, inner, &self.bytes[2]);
        let bias = self.bias.as_ref().map(|bias| backend.load_vector("bias", bias).unwrap());
        run(&MlpWeights {
            gate: LinearWeights { weight: &gate, bias: bias.as_ref() },
            up: LinearWeights { weight: &up, bias: None },
            down: LinearWeights { weight: &down, bias: None },
            act,
        })
    }
}

#[test]
fn gated_layers_of_few_tokens() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let cpu = scalar();
    for dtype in HALVES {
        for (inner, cols, has_bias) in [(864, 896, false), (1001, 896, false), (40, 4096, false), (864, 896, true)] {
            let mut random = Random::new((inner + cols) as u64);
            let mlp = StoredMlp::new(dtype, inner, cols, has_bias, &mut random);
            for act in [Activation::Silu, Activation::GeluTanh] {
                for tokens in [1, 2, 7, 8, 9, 16, 17] {
                    let x = rounded(Activations::Bf16, &random.normal(tokens * cols));
                    let run = |backend: &dyn Backend| {
                        let x = activation(backend, tokens, cols, &x);
                        let out = mlp.run(backend, act, |mlp| backend.gated_mlp(LinearInput::Plain(&x), mlp).unwrap());
                        host(backend, &out)
                    };
                    let before = gpu.small_product_launches();
                    let got = run(&gpu);
                    let launches = gpu.small_product_launches() - before;
                    let what = format!("{dtype} {act:?}, {tokens} tokens, {cols} to {inner}, bias {has_bias}");
                    assert_close(&got, &run(&cpu), 1.0 / 64.0, &what);
                    if tokens <= 8 {
                        // One for gate and up, in either form; 1001 features are not for ours to read.
                        assert_eq!(launches, 1 + u64::from(inner.is_multiple_of(32)), "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_gated_rows_bits_do_not_depend_on_how_few_tokens_there_are() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    for dtype in HALVES {
        let (inner, cols) = (2208, 896);
        let mut random = Random::new(21);
        let mlp = StoredMlp::new(dtype, inner, cols, false, &mut random);
        let x = random.normal(8 * cols);
        mlp.run(&gpu, Activation::Silu, |mlp| {
            let run = |first: usize, count: usize| {
                let x = activation(&gpu, count, cols, &x[first * cols..(first + count) * cols]);
                bits(&host(&gpu, &gpu.gated_mlp(LinearInput::Plain(&x), mlp).unwrap()))
            };
            let all = run(0, 8);
            for count in 1..8 {
                let first = 8 - count;
                assert!(run(0, count) == all[..count * inner], "{dtype}: the first {count}");
                assert!(run(first, count) == all[first * inner..], "{dtype}: the last {count}");
            }
        });
    }
}

/// The sum into the residual is made, and read by the norm, before the gated kernel reads the rows.
#[test]
fn a_gated_layer_behind_a_sum_and_a_norm() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let cpu = scalar();
    let (inner, cols, tokens) = (864, 896, 5);
    let mut random = Random::new(22);
    let mlp = StoredMlp::new(DType::BF16, inner, cols, false, &mut random);
    let (residual, x) = (random.normal(tokens * cols), rounded(Activations::Bf16, &random.normal(tokens * cols)));
    let weight = random.normal(cols);
    let run = |backend: &dyn Backend| {
        let mut residual = tensor(backend, tokens, cols, &residual);
        let x = activation(backend, tokens, cols, &x);
        let weight = backend.load_vector("norm", &weight).unwrap();
        let out = mlp.run(backend, Activation::Silu, |mlp| {
            let input = LinearInput::AddNormed {
                residual: &mut residual,
                addend: Addend { x: &x, norm: None },
                norm: Norm { weight: &weight, eps: 1e-5 },
            };
            backend.gated_mlp(input, mlp).unwrap()
        });
        (host(backend, &out), host(backend, &residual))
    };
    let (got, want) = (run(&gpu), run(&cpu));
    assert_close(&got.0, &want.0, 1.0 / 64.0, "the layer");
    assert_close(&got.1, &want.1, 1e-6, "the residual");
}

/// Ten products, each of the one before, through two places in turn, and one more of the last into `end`; `between`
/// runs after each.
pub fn chain(
    gpu: &CudaBackend,
    weights: &[Weight],
    places: &mut [Tensor; 2],
    end: &mut Tensor,
    between: impl Fn(&Tensor),
) {
    for (nth, weight) in weights.iter().cycle().take(10).enumerate() {
        let [even, odd] = &mut *places;
        let (x, out) = if nth % 2 == 0 { (&*even, odd) } else { (&*odd, even) };
        gpu.linear(x, &mut [LinearPart { weight, bias: None, out }]).unwrap();
        between(&*out);
    }
    gpu.linear(&places[0], &mut [LinearPart { weight: &weights[0], bias: None, out: end }]).unwrap();
}

pub fn square_weights(gpu: &CudaBackend, side: usize, random: &mut Random) -> Vec<Weight> {
    (0..4).map(|_| load(gpu, DType::BF16, side, side, &levelled(DType::BF16, side, side, random))).collect()
}

/// Each kernel begins while the one before it still runs: it must not read, nor overwrite, too early.
#[test]
fn overlapped_launches_wait_for_one_another() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    // Fewer tiles than thread blocks, as many, and more.
    for side in [256, 2112, 4096] {
        let mut random = Random::new(side as u64);
        let weights = square_weights(&gpu, side, &mut random);
        for tokens in [1, 8, 16] {
            let start = random.normal(tokens * side);
            let run = |between: &dyn Fn(&Tensor)| {
                let mut places = [activation(&gpu, tokens, side, &start), poisoned(&gpu, tokens, side)];
                let mut end = gpu.temp(tokens, side).unwrap();
                chain(&gpu, &weights, &mut places, &mut end, between);
                bits(&host(&gpu, &end))
            };
            let want = run(&|x| drop(host(&gpu, x)));
            assert!(want.iter().all(|&x| f32::from_bits(x).is_finite()));
            for round in 0..50 {
                assert!(run(&|_| ()) == want, "side {side}, {tokens} tokens, round {round}");
            }
        }
    }
}

/// A recorded step keeps the overlap and the order.
#[test]
fn recorded_products_give_the_same_bits() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let side = 2112;
    let mut random = Random::new(12);
    let weights = square_weights(&gpu, side, &mut random);
    let spec = KvPoolSpec {
        num_blocks: 1,
        block_size: 16,
        layers_per_group: 1,
        num_kv_heads: 1,
        head_dim: 64,
        dtype: DType::BF16,
    };
    let group = GroupLayout { slot_mapping: vec![0], block_table: vec![0], block_table_start: vec![0, 1] };
    let layout = BatchLayout { query_start: vec![0, 1], seq_lens: vec![1], positions: vec![0], groups: vec![group] };
    // Nothing may be copied from the host while a step is recorded.
    let x = activation(&gpu, 1, side, &random.normal(side));
    let mut places = [poisoned(&gpu, 1, side), poisoned(&gpu, 1, side)];
    let mut run = || {
        // The first product leaves `x` as it is: every run begins with it.
        gpu.linear(&x, &mut [LinearPart { weight: &weights[0], bias: None, out: &mut places[0] }]).unwrap();
        let mut end = gpu.temp(1, side).unwrap();
        chain(&gpu, &weights, &mut places, &mut end, |_| ());
        end
    };
    let want = bits(&host(&gpu, &run()));
    assert!(want.iter().all(|&x| f32::from_bits(x).is_finite()));
    let mut replayed = 0;
    for round in 0..20 {
        let batch = gpu.upload_batch(layout.clone(), &spec).unwrap();
        let hidden = match gpu.replay(&[0], &batch).unwrap() {
            Some(hidden) => {
                replayed += 1;
                hidden
            }
            None => gpu.end_recording(run()).unwrap(),
        };
        assert!(bits(&host(&gpu, &hidden)) == want, "round {round}");
    }
    assert_eq!(replayed, 18, "the first runs as it is, the second is recorded");
}
