//! Quantised weights that are repacked at load: every bit of them, and products against an f64 reference.

use crate::linear::{load, place, product, stored};
use crate::support::{Random, activation, assert_close, gpu, host, poisoned, rounded, scalar, tensor};
use half::{bf16, f16};
use pagemill_backend::{
    Activation, Backend, DType, LinearInput, LinearPart, LinearWeights, MlpWeights, Tensor, Weight,
};
use pagemill_backend_cuda::{Activations, CudaBackend};

/// The types with a layout for the tensor cores.
const PACKED: [DType; 5] = [DType::Q4_0, DType::Q4_1, DType::Q8_0, DType::Q4_K, DType::Q6_K];
/// The most tokens that are multiplied without widening.
const MOST_TOKENS: usize = 128;
/// Every form, and what is widened; each at its ends.
const TOKENS: [usize; 14] = [1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 300];

/// Columns: the fewest, a part of a tile at the end, and several tiles for each warp.
fn cols_of(dtype: DType) -> [usize; 3] {
    if dtype.block_elems() == 32 { [32, 416, 2080] } else { [256, 768, 2304] }
}

/// Random bytes whose scales and minima are of both signs, some of them zero.
fn signed(dtype: DType, rows: usize, cols: usize, random: &mut Random) -> Vec<u8> {
    let places: &[usize] = match dtype {
        DType::Q4_1 | DType::Q4_K => &[0, 2],
        DType::Q6_K => &[208],
        _ => &[0],
    };
    let mut bytes = stored(dtype, rows, cols, random);
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        for &at in places {
            let scale = f16::from_f32((random.below(2001) as f32 - 1000.0) * 1e-4);
            block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
        }
    }
    bytes
}

/// All elements, as the CPU's reference decodes them.
fn elements(dtype: DType, rows: usize, cols: usize, bytes: &[u8]) -> Vec<f32> {
    embedded(&scalar(), &load(&scalar(), dtype, rows, cols, bytes))
}

/// All rows of a table, one after the other.
fn embedded(backend: &dyn Backend, table: &Weight) -> Vec<f32> {
    let ids: Vec<u32> = (0..table.rows() as u32).collect();
    let mut out = tensor(backend, ids.len(), table.cols(), &vec![f32::NAN; ids.len() * table.cols()]);
    backend.embed(table, &ids, 1.0, &mut out).unwrap();
    host(backend, &out)
}

fn counted(gpu: &CudaBackend, run: impl FnOnce()) -> u64 {
    let before = gpu.packed_product_launches();
    run();
    gpu.packed_product_launches() - before
}

#[track_caller]
fn assert_same(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let wrong = got.iter().zip(want).enumerate().find(|(_, (got, want))| got != want);
    assert!(wrong.is_none(), "{what}: element, got and want {wrong:?}");
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// What is packed is what was stored, number for number (zeros of either sign), in every row and column.
#[test]
fn packed_rows_are_the_stored_ones() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    for dtype in PACKED {
        for cols in cols_of(dtype) {
            for rows in [1, 8, 15, 16, 33, 1001] {
                let bytes = signed(dtype, rows, cols, &mut Random::new((rows + cols) as u64));
                let got = embedded(&gpu, &load(&gpu, dtype, rows, cols, &bytes));
                let want = elements(dtype, rows, cols, &bytes);
                assert_same(&got, &want, &format!("{dtype} {rows} x {cols}"));
            }
        }
    }
}

/// Unit vectors, more than are multiplied directly, bring the widened columns out.
#[test]
fn widened_rows_are_the_stored_ones_rounded() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    for dtype in PACKED {
        let (rows, cols) = (143, 768);
        let bytes = signed(dtype, rows, cols, &mut Random::new(31));
        let weight = load(&gpu, dtype, rows, cols, &bytes);
        let mut unit = vec![0.0; cols * cols];
        unit.iter_mut().step_by(cols + 1).for_each(|x| *x = 1.0);
        let x = activation(&gpu, cols, cols, &unit);
        let mut out = place(&gpu, cols, rows, true);
        let launches = counted(&gpu, || {
            gpu.linear(&x, &mut [LinearPart { weight: &weight, bias: None, out: &mut out }]).unwrap();
        });
        assert_eq!(launches, 0, "{dtype}");
        let (got, want) = (host(&gpu, &out), elements(dtype, rows, cols, &bytes));
        for row in 0..rows {
            for col in 0..cols {
                let (got, want) = (got[col * rows + row], bf16::from_f32(want[row * cols + col]).to_f32());
                assert!(got == want, "{dtype}: element {row}, {col} is {got}, not {want}");
            }
        }
    }
}

/// Larger than a few pieces of staging, the last one short.
#[test]
fn a_large_packed_weight_arrives_whole() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let (rows, cols) = (50_001, 1024); // 54 MB
    let bytes = signed(DType::Q8_0, rows, cols, &mut Random::new(5));
    let weight = load(&gpu, DType::Q8_0, rows, cols, &bytes);
    let (got, want) = (embedded(&gpu, &weight), elements(DType::Q8_0, rows, cols, &bytes));
    assert_same(&got, &want, "the large weight");
}

/// Largest distance from the reference.
fn error(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    assert!(got.iter().all(|x| x.is_finite()), "not every place was written");
    got.iter().zip(want).fold(0.0, |most, (got, want)| most.max((f64::from(*got) - want).abs()))
}

/// A product by hand: `x` `[T, C]`, `w` `[N, C]`, bias `[N]`.
struct ByHand<'a> {
    x: &'a [f32],
    w: &'a [f32],
    bias: &'a [f32],
    cols: usize,
}

impl ByHand<'_> {
    fn each<T>(&self, one: impl Fn(&[f32], &[f32], f32) -> T) -> Vec<T> {
        let rows = || self.w.chunks_exact(self.cols).zip(self.bias);
        self.x
            .chunks_exact(self.cols)
            .flat_map(|x| rows().map(|(w, bias)| one(x, w, *bias)).collect::<Vec<T>>())
            .collect()
    }

    fn exact(&self) -> Vec<f64> {
        self.each(|x, w, bias| {
            x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum::<f64>() + f64::from(bias)
        })
    }

    /// bf16 weights, f32 sums in order.
    fn naive(&self) -> Vec<f32> {
        let w: Vec<f32> = self.w.iter().map(|&w| bf16::from_f32(w).to_f32()).collect();
        let rounded = ByHand { w: &w, ..*self };
        rounded.each(|x, w, bias| x.iter().zip(w).fold(0.0, |sum, (x, w)| sum + w * x) + bias)
    }
}

#[test]
fn every_packed_type_at_every_number_of_tokens() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    for dtype in PACKED {
        let [few, some, many] = cols_of(dtype);
        // Fewer row tiles than thread blocks and more, parts of a tile at the end, one row alone.
        for (rows, cols, tokens) in
            [(5003, few, &[1, 8, 16, 32, 65][..]), (130, some, &TOKENS), (39, many, &TOKENS), (1, some, &TOKENS)]
        {
            let mut random = Random::new((rows * 7 + cols) as u64);
            let bytes = signed(dtype, rows, cols, &mut random);
            let (weight, w) = (load(&gpu, dtype, rows, cols, &bytes), elements(dtype, rows, cols, &bytes));
            let bias = random.normal(rows);
            let device_bias = gpu.load_vector("bias", &bias).unwrap();
            for &tokens in tokens {
                let x = rounded(Activations::Bf16, &random.normal(tokens * cols));
                let by_hand = ByHand { x: &x, w: &w, bias: &bias, cols };
                let (exact, naive) = (by_hand.exact(), by_hand.naive());
                let largest = exact.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
                for is_f32 in [false, true] {
                    let what = format!("{dtype} [{tokens}, {cols}] by [{rows}, {cols}], to f32 {is_f32}");
                    let x = activation(&gpu, tokens, cols, &x);
                    let mut out = place(&gpu, tokens, rows, is_f32);
                    let launches = counted(&gpu, || {
                        let part = LinearPart { weight: &weight, bias: Some(&device_bias), out: &mut out };
                        gpu.linear(&x, &mut [part]).unwrap();
                    });
                    assert_eq!(launches, u64::from(tokens <= MOST_TOKENS), "{what}");
                    let got = error(&host(&gpu, &out), &exact);
                    let allowed = match is_f32 {
                        true => 2.0 * error(&naive, &exact),
                        false => 2.0 * error(&rounded(Activations::Bf16, &naive), &exact),
                    };
                    assert!(got <= allowed, "{what}: {got} from the reference; naively it were half of {allowed}");
                    // Weights are not rounded there.
                    if is_f32 && tokens <= 16 {
                        assert!(got <= 5e-5 * largest, "{what}: {got} from the reference, of {largest}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_packed_rows_bits_do_not_depend_on_how_few_tokens_there_are() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    for dtype in PACKED {
        let (rows, cols) = (1001, 2304);
        let mut random = Random::new(17);
        let weight = load(&gpu, dtype, rows, cols, &signed(dtype, rows, cols, &mut random));
        let bias = gpu.load_vector("bias", &random.normal(rows)).unwrap();
        let x = random.normal(128 * cols);
        for (least, most) in [(2, 8), (9, 16), (17, 32), (33, 128)] {
            let run = |first: usize, count: usize| {
                let x = activation(&gpu, count, cols, &x[first * cols..(first + count) * cols]);
                bits(&product(&gpu, &x, &weight, Some(&bias)))
            };
            let all = run(0, most);
            for count in [least, most - 1] {
                let first = most - count;
                assert!(run(0, count) == all[..count * rows], "{dtype}: the first {count} of {most}");
                assert!(run(first, count) == all[first * rows..], "{dtype}: the last {count} of {most}");
            }
        }
    }
}

/// q, k and v of one input: as many bits as one by one, in fewer launches.
#[test]
fn packed_products_of_one_input_share_launches() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let cols = 768;
    for dtype in PACKED {
        for sizes in [&[2500, 33, 130][..], &[16, 16], &[1, 5001, 17, 768, 48]] {
            let mut random = Random::new(sizes.len() as u64);
            let weights: Vec<Weight> = sizes
                .iter()
                .map(|&rows| load(&gpu, dtype, rows, cols, &signed(dtype, rows, cols, &mut random)))
                .collect();
            // Every other one has a bias.
            let biases: Vec<Option<Tensor>> = sizes
                .iter()
                .enumerate()
                .map(|(nth, &rows)| (nth % 2 == 0).then(|| gpu.load_vector("bias", &random.normal(rows)).unwrap()))
                .collect();
            for tokens in [1, 8, 11, 20, 50] {
                let x = activation(&gpu, tokens, cols, &random.normal(tokens * cols));
                let mut outs: Vec<Tensor> = sizes.iter().map(|&rows| poisoned(&gpu, tokens, rows)).collect();
                let mut parts: Vec<LinearPart<'_>> = weights
                    .iter()
                    .zip(&biases)
                    .zip(&mut outs)
                    .map(|((weight, bias), out)| LinearPart { weight, bias: bias.as_ref(), out })
                    .collect();
                let launches = counted(&gpu, || gpu.linear(&x, &mut parts).unwrap());
                let (fewest, each) = (sizes.len().div_ceil(3) as u64, sizes.len() as u64);
                if tokens <= 16 {
                    assert_eq!(launches, fewest, "{dtype} {tokens} tokens of {sizes:?}");
                } else {
                    // A matrix of few rows may have a form of its own, where the chip has the multiprocessors.
                    assert!((fewest..each).contains(&launches), "{dtype} {tokens} tokens of {sizes:?}: {launches}");
                }
                for ((out, weight), bias) in outs.iter().zip(&weights).zip(&biases) {
                    let (together, alone) = (host(&gpu, out), product(&gpu, &x, weight, bias.as_ref()));
                    assert!(bits(&together) == bits(&alone), "{dtype} {tokens} tokens, {} of {sizes:?}", weight.rows());
                }
            }
        }
    }
}

/// Types as files mix them: each goes its own way.
#[test]
fn mixed_types_of_one_input() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let types = [DType::Q4_K, DType::Q4_K, DType::Q6_K, DType::Q5_0, DType::BF16, DType::Q6_K];
    let (rows, cols) = (72, 512);
    let mut random = Random::new(41);
    let weights = types.map(|dtype| load(&gpu, dtype, rows, cols, &stored(dtype, rows, cols, &mut random)));
    for (tokens, expected) in [(1, 3), (12, 3), (40, 3), (90, 3), (150, 0)] {
        let x = activation(&gpu, tokens, cols, &random.normal(tokens * cols));
        let mut outs = types.map(|_| poisoned(&gpu, tokens, rows));
        let mut parts: Vec<LinearPart<'_>> =
            weights.iter().zip(&mut outs).map(|(weight, out)| LinearPart { weight, bias: None, out }).collect();
        let launches = counted(&gpu, || gpu.linear(&x, &mut parts).unwrap());
        assert_eq!(launches, expected, "{tokens} tokens");
        for (weight, out) in weights.iter().zip(&outs) {
            let (together, alone) = (host(&gpu, out), product(&gpu, &x, weight, None));
            let what = format!("{} of {tokens} tokens", weight.dtype());
            if weight.dtype() == DType::BF16 {
                // By itself it may leave its sums in planes: they are added up in another order.
                assert_close(&together, &alone, 1.0 / 128.0, &what);
            } else {
                assert!(bits(&together) == bits(&alone), "{what}");
            }
        }
    }
}

/// A tile's rows that do not come in one piece: the weight stays as it is stored.
#[test]
fn rows_too_wide_to_repack_are_read_as_stored() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let cpu = scalar();
    let (rows, cols) = (3, 1_900_032);
    let mut random = Random::new(2);
    let bytes = stored(DType::Q4_0, rows, cols, &mut random);
    let weights = (load(&gpu, DType::Q4_0, rows, cols, &bytes), load(&cpu, DType::Q4_0, rows, cols, &bytes));
    assert_eq!(weights.0.len_bytes(), bytes.len());
    let x = rounded(Activations::Bf16, &random.normal(2 * cols));
    let mut got = Vec::new();
    let launches = counted(&gpu, || got = product(&gpu, &activation(&gpu, 2, cols, &x), &weights.0, None));
    assert_eq!(launches, 0);
    assert_close(&got, &product(&cpu, &activation(&cpu, 2, cols, &x), &weights.1, None), 1.0 / 128.0, "wide rows");
}

/// Exact comparisons with the CPU read weights as they are stored.
#[test]
fn f32_activations_leave_weights_as_stored() {
    let Some(gpu) = gpu(Activations::F32) else { return };
    let bytes = stored(DType::Q4_0, 5, 64, &mut Random::new(3));
    let weight = load(&gpu, DType::Q4_0, 5, 64, &bytes);
    assert_eq!(weight.len_bytes(), bytes.len());
    let x = activation(&gpu, 2, 64, &[1.0; 128]);
    assert_eq!(counted(&gpu, || drop(product(&gpu, &x, &weight, None))), 0);
}

/// Gate and up of an MLP, and a down projection that lets through what the gate lets through.
struct StoredMlp {
    dtype: DType,
    inner: usize,
    cols: usize,
    gate: Vec<u8>,
    up: Vec<u8>,
    down: Vec<u8>,
}

impl StoredMlp {
    fn new(dtype: DType, inner: usize, cols: usize, random: &mut Random) -> Self {
        let (gate, up) = (signed(dtype, inner, cols, random), signed(dtype, inner, cols, random));
        let unit = |i: usize| if i.is_multiple_of(inner + 1) { 1.0 } else { 0.0 };
        let down = (0..inner * inner).flat_map(|i| bf16::from_f32(unit(i)).to_le_bytes()).collect();
        Self { dtype, inner, cols, gate, up, down }
    }

    fn run(&self, backend: &dyn Backend, act: Activation, x: &[f32]) -> Vec<f32> {
        let gate = load(backend, self.dtype, self.inner, self.cols, &self.gate);
        let up = load(backend, self.dtype, self.inner, self.cols, &self.up);
        let down = load(backend, DType::BF16, self.inner, self.inner, &self.down);
        let weights = |weight| LinearWeights { weight, bias: None };
        let mlp = MlpWeights { gate: weights(&gate), up: weights(&up), down: weights(&down), act };
        let x = activation(backend, x.len() / self.cols, self.cols, x);
        host(backend, &backend.gated_mlp(LinearInput::Plain(&x), &mlp).unwrap())
    }
}

#[test]
fn gated_layers_of_packed_weights() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let cpu = scalar();
    for dtype in PACKED {
        // More row tiles than thread blocks; an odd number of rows, whose last half tile has no partner.
        for (inner, cols) in [(2120, 256), (41, 768), (1001, 512)] {
            let mut random = Random::new((inner + cols) as u64);
            let mlp = StoredMlp::new(dtype, inner, cols, &mut random);
            for (act, tokens) in [
                (Activation::Silu, 1),
                (Activation::GeluTanh, 8),
                (Activation::Silu, 9),
                (Activation::GeluTanh, 16),
                (Activation::Silu, 17),
                (Activation::GeluTanh, 64),
                (Activation::Silu, 65),
                (Activation::GeluTanh, 129),
            ] {
                // Small enough that the gate is neither all open nor shut.
                let x: Vec<f32> = random.normal(tokens * cols).iter().map(|x| x * 0.1).collect();
                let x = rounded(Activations::Bf16, &x);
                let mut got = Vec::new();
                let launches = counted(&gpu, || got = mlp.run(&gpu, act, &x));
                let what = format!("{dtype} {act:?}, {tokens} tokens, {cols} to {inner}");
                assert_eq!(launches, u64::from(tokens <= MOST_TOKENS), "{what}");
                assert_close(&got, &mlp.run(&cpu, act, &x), 1.0 / 64.0, &what);
            }
        }
    }
}

/// Each kernel begins while the one before it still runs: it must not read, nor overwrite, too early.
#[test]
fn overlapped_packed_products_wait_for_one_another() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let side = 2048;
    for dtype in [DType::Q8_0, DType::Q4_K, DType::Q6_K] {
        let mut random = Random::new(side as u64);
        let weights: Vec<Weight> =
            (0..4).map(|_| load(&gpu, dtype, side, side, &signed(dtype, side, side, &mut random))).collect();
        for tokens in [1, 16, 64] {
            // Ten products later still finite.
            let start: Vec<f32> = random.normal(tokens * side).iter().map(|x| x * 1e-6).collect();
            let run = |between: &dyn Fn(&mut Tensor)| {
                let mut places = [activation(&gpu, tokens, side, &start), poisoned(&gpu, tokens, side)];
                for (nth, weight) in weights.iter().cycle().take(10).enumerate() {
                    let [even, odd] = &mut places;
                    let (x, out) = if nth % 2 == 0 { (even, odd) } else { (odd, even) };
                    gpu.linear(x, &mut [LinearPart { weight, bias: None, out }]).unwrap();
                    between(out);
                }
                bits(&host(&gpu, &places[0]))
            };
            let want = run(&|x| drop(host(&gpu, x)));
            assert!(want.iter().all(|&x| f32::from_bits(x).is_finite()));
            for round in 0..20 {
                assert!(run(&|_| ()) == want, "{dtype}, {tokens} tokens, round {round}");
            }
        }
    }
}
