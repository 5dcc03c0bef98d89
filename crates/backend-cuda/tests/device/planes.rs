//! Tensors that hold planes instead of their elements: every op reads their sum. Outputs poisoned, odd sizes.

use crate::support::{
    ACTIVATIONS, Random, activation, assert_close, gpu, host, poisoned, rounded, scalar, tensor, tolerance,
};
use pagemill_backend::{Addend, Backend, DType, LinearInput, LinearPart, Norm, Tensor, WeightDesc, repeating};
use pagemill_backend_cuda::{Activations, CudaBackend};

/// Planes, rows, columns: one plane, more than are read at once, columns that fill no pack, a model's, rows that the
/// norm does not take as planes.
const SHAPES: [(usize, usize, usize); 8] =
    [(1, 1, 8), (2, 17, 33), (3, 9, 896), (8, 64, 4096), (8, 128, 4096), (11, 65, 8192), (4, 3, 8200), (5, 2, 14_336)];

/// Planes of different magnitude, and their sum in their order in f32.
fn planes_and_sum(random: &mut Random, count: usize, elements: usize) -> (Vec<f32>, Vec<f32>) {
    let planes: Vec<Vec<f32>> =
        (0..count).map(|p| random.normal(elements).iter().map(|x| x * (1.0 + p as f32 * 0.37)).collect()).collect();
    let mut sum = planes[0].clone();
    for plane in &planes[1..] {
        sum.iter_mut().zip(plane).for_each(|(sum, x)| *sum += x);
    }
    (planes.concat(), sum)
}

/// A poisoned activation that holds these planes.
fn held(gpu: &CudaBackend, count: usize, rows: usize, cols: usize, planes: &[f32]) -> Tensor {
    let mut x = poisoned(gpu, rows, cols);
    gpu.hold_planes(&mut x, tensor(gpu, count * rows, cols, planes)).unwrap();
    x
}

#[test]
fn a_residual_takes_the_sum_unrounded() {
    for activations in ACTIVATIONS {
        let Some(gpu) = gpu(activations) else { return };
        let cpu = scalar();
        for (count, rows, cols) in SHAPES {
            let mut random = Random::new((rows * cols + count) as u64);
            let (planes, sum) = planes_and_sum(&mut random, count, rows * cols);
            let (residual, weight) = (random.normal(rows * cols), random.normal(cols));
            let what = format!("{activations:?} {count} planes of [{rows}, {cols}]");
            // Where the norm does not add planes up the sum is an activation first.
            let is_added_by_norm = cols % 8 == 0 && cols <= 8192;
            let added = if is_added_by_norm { sum.clone() } else { rounded(activations, &sum) };
            let want: Vec<f32> = residual.iter().zip(&added).map(|(r, x)| r + x).collect();
            let norm_of = |backend: &dyn Backend, stream: &Tensor| {
                let weight = backend.load_vector("w", &weight).unwrap();
                let mut out = poisoned(backend, rows, cols);
                backend.rms_norm(stream, &weight, 1e-5, &mut out).unwrap();
                host(backend, &out)
            };
            let want_norm = norm_of(&cpu, &tensor(&cpu, rows, cols, &want));

            let x = held(&gpu, count, rows, cols, &planes);
            let mut stream = tensor(&gpu, rows, cols, &residual);
            let mut out = poisoned(&gpu, rows, cols);
            let vector = gpu.load_vector("w", &weight).unwrap();
            gpu.add_rms_norm(&mut stream, &x, &vector, 1e-5, &mut out).unwrap();
            assert_eq!(host(&gpu, &stream), want, "residual, {what}");
            assert_close(&host(&gpu, &out), &want_norm, tolerance(activations), &format!("norm, {what}"));
            // Read once more, by one who wants elements.
            assert_eq!(host(&gpu, &x), rounded(activations, &sum), "elements, {what}");

            let x = held(&gpu, count, rows, cols, &planes);
            let mut stream = tensor(&gpu, rows, cols, &residual);
            gpu.add(&mut stream, &x).unwrap();
            let want: Vec<f32> = residual.iter().zip(&sum).map(|(r, x)| r + x).collect();
            assert_eq!(host(&gpu, &stream), want, "add, {what}");
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_company() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let (count, rows, cols) = (7, 128, 4096);
    let mut random = Random::new(5);
    let (planes, _) = planes_and_sum(&mut random, count, rows * cols);
    let (residual, weight) = (random.normal(rows * cols), random.normal(cols));
    let vector = gpu.load_vector("w", &weight).unwrap();
    let run = |rows: usize, planes: &[f32]| {
        let x = held(&gpu, count, rows, cols, planes);
        let mut stream = tensor(&gpu, rows, cols, &residual[..rows * cols]);
        let mut out = poisoned(&gpu, rows, cols);
        gpu.add_rms_norm(&mut stream, &x, &vector, 1e-5, &mut out).unwrap();
        host(&gpu, &out)
    };
    let all = run(rows, &planes);
    for few in [1, 9, 67] {
        let of_few: Vec<f32> = planes.chunks(rows * cols).flat_map(|plane| &plane[..few * cols]).copied().collect();
        assert_eq!(run(few, &of_few), all[..few * cols], "{few} rows");
    }
}

#[test]
fn every_other_reader_finds_elements() {
    for activations in ACTIVATIONS {
        let Some(gpu) = gpu(activations) else { return };
        for (count, rows, cols) in SHAPES {
            let mut random = Random::new((rows * cols + count) as u64);
            let (planes, sum) = planes_and_sum(&mut random, count, rows * cols);
            let sum = rounded(activations, &sum);
            let other = rounded(activations, &random.normal(rows * cols));
            let weight = random.normal(cols);
            let what = format!("{activations:?} {count} planes of [{rows}, {cols}]");
            let picked: Vec<u32> = (0..5).map(|_| random.below(rows) as u32).collect();
            // The same of a tensor of elements: equal bits.
            let read = |x: &dyn Fn() -> Tensor| {
                let vector = gpu.load_vector("w", &weight).unwrap();
                let mut normed = poisoned(&gpu, rows, cols);
                gpu.rms_norm(&x(), &vector, 1e-5, &mut normed).unwrap();
                let mut gathered = poisoned(&gpu, picked.len(), cols);
                gpu.gather_rows(&x(), &picked, &mut gathered).unwrap();
                let mut gated = poisoned(&gpu, rows, cols);
                let other = activation(&gpu, rows, cols, &other);
                gpu.gated_activation(&other, &x(), pagemill_backend::Activation::Silu, &mut gated).unwrap();
                let mut scaled = x();
                gpu.scale(&mut scaled, 0.5).unwrap();
                let mut outs = vec![normed, gathered, gated, scaled, x(), x().reshaped(1, rows * cols)];
                if cols % 32 == 0 {
                    outs.extend([product(&gpu, &x()), added_normed(&gpu, &x(), &vector)]);
                }
                outs.iter().map(|out| host(&gpu, out)).collect::<Vec<_>>()
            };
            let of_planes = read(&|| held(&gpu, count, rows, cols, &planes));
            let of_elements = read(&|| activation(&gpu, rows, cols, &sum));
            assert_eq!(of_planes[4], sum, "{what}");
            for (nth, (got, want)) in of_planes.iter().zip(&of_elements).enumerate() {
                assert_eq!(got, want, "reader {nth}, {what}");
            }
        }
    }
}

/// A product of `x` with a weight of 40 rows.
fn product(gpu: &CudaBackend, x: &Tensor) -> Tensor {
    let weight = weight(gpu, x.cols());
    let mut out = poisoned(gpu, x.rows(), 40);
    gpu.linear(x, &mut [LinearPart { weight: &weight, bias: None, out: &mut out }]).unwrap();
    out
}

/// The same of a residual to which the norm of `x` was added.
fn added_normed(gpu: &CudaBackend, x: &Tensor, vector: &Tensor) -> Tensor {
    let weight = weight(gpu, x.cols());
    let mut residual = tensor(gpu, x.rows(), x.cols(), &Random::new(9).normal(x.rows() * x.cols()));
    let norm = Norm { weight: vector, eps: 1e-5 };
    let mut out = poisoned(gpu, x.rows(), 40);
    let input = LinearInput::AddNormed { residual: &mut residual, addend: Addend { x, norm: Some(norm) }, norm };
    gpu.fused_linear(input, &mut [LinearPart { weight: &weight, bias: None, out: &mut out }]).unwrap();
    out
}

fn weight(gpu: &CudaBackend, cols: usize) -> pagemill_backend::Weight {
    let numbers = Random::new(cols as u64).normal(40 * cols);
    let bytes: Vec<u8> = numbers.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect();
    let desc = WeightDesc { name: "w".into(), dtype: DType::BF16, rows: 40, cols };
    gpu.load_weight(desc, &mut repeating(&bytes)).unwrap()
}

#[test]
fn what_is_written_over_planes_stays() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let (planes, _) = planes_and_sum(&mut Random::new(1), 3, 9 * 64);
    let mut x = held(&gpu, 3, 9, 64, &planes);
    let written = rounded(Activations::Bf16, &Random::new(2).normal(9 * 64));
    gpu.copy_from_host(&written, &mut x).unwrap();
    assert_eq!(host(&gpu, &x), written);
    // Planes that come later take their place.
    let (planes, sum) = planes_and_sum(&mut Random::new(3), 4, 9 * 64);
    gpu.hold_planes(&mut x, tensor(&gpu, 4 * 9, 64, &planes)).unwrap();
    assert_eq!(host(&gpu, &x), rounded(Activations::Bf16, &sum));
}

#[test]
fn planes_must_fit_and_their_memory_goes_back() {
    let Some(gpu) = gpu(Activations::Bf16) else { return };
    let mut x = poisoned(&gpu, 4, 64);
    for (rows, cols) in [(6, 64), (8, 32), (0, 64)] {
        assert!(gpu.hold_planes(&mut x, gpu.temp(rows, cols).unwrap()).is_err(), "[{rows}, {cols}]");
    }
    let (planes, sum) = planes_and_sum(&mut Random::new(1), 8, 4 * 64);
    let step = || {
        let x = held(&gpu, 8, 4, 64, &planes);
        assert_eq!(host(&gpu, &x), rounded(Activations::Bf16, &sum));
    };
    step();
    let before = gpu.workspace();
    (0..3).for_each(|_| step());
    assert_eq!(gpu.workspace(), before, "nothing is allocated once a step was there");
    // A rehearsal keeps what it is given.
    gpu.rehearse(true);
    gpu.hold_planes(&mut x, gpu.temp(7, 3).unwrap()).unwrap();
    gpu.rehearse(false);
}
