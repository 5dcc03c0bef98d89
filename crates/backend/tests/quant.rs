//! Quantised weights: what stored bytes mean, and every kernel against an f64 reference, against the
//! other instruction sets, and against itself under other tilings.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

#[path = "support/emulation.rs"]
mod emulation;
#[path = "quant/stored_types.rs"]
mod stored_types;

use emulation::is_emulated;

use pagemill_backend::cpu::bench_access::{Isa, Matrix, Rows};
use pagemill_backend::{ActivationMode, DType};
use std::ops::Range;
use stored_types::{QUANTIZED, Random, elements, quantize, random_weight, set_halves};

const MODES: [ActivationMode; 2] = [ActivationMode::Int8, ActivationMode::F32];

fn available() -> Vec<Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available()).collect()
}

/// `f16` bits, little endian.
fn half(value: f32) -> [u8; 2] {
    half::f16::from_f32(value).to_le_bytes()
}

fn row_values(dtype: DType, cols: usize, stored: &[u8]) -> Vec<f32> {
    let matrix = Matrix::new(dtype, 1, cols, stored, Isa::Scalar, ActivationMode::F32).unwrap();
    let mut out = vec![f32::NAN; cols];
    matrix.dequantize_row(0, &mut out);
    out
}

#[test]
fn legacy_blocks_computed_by_hand() {
    // Nibbles: element 0 is 0x1, element 16 is 0xf, element 1 is 0x0, element 17 is 0x8.
    let mut nibbles = [0x88u8; 16];
    nibbles[0] = 0xf1;
    nibbles[1] = 0x80;
    let block = |head: &[u8]| [head, &nibbles].concat();

    let q4_0 = row_values(DType::Q4_0, 32, &block(&half(0.5)));
    assert_eq!((q4_0[0], q4_0[16], q4_0[1], q4_0[17], q4_0[31]), (-3.5, 3.5, -4.0, 0.0, 0.0));

    let q4_1 = row_values(DType::Q4_1, 32, &block(&[half(0.5), half(-2.0)].concat()));
    assert_eq!((q4_1[0], q4_1[16], q4_1[1], q4_1[17], q4_1[31]), (-1.5, 5.5, -2.0, 2.0, 2.0));

    // Fifth bits of elements 0, 17 and 31.
    let fifth = ((1u32 << 31) | (1 << 17) | 1).to_le_bytes();
    let q5_0 = row_values(DType::Q5_0, 32, &block(&[&half(0.5)[..], &fifth].concat()));
    assert_eq!((q5_0[0], q5_0[16], q5_0[1], q5_0[17], q5_0[31]), (0.5, -0.5, -8.0, 4.0, 4.0));

    let q5_1 = row_values(DType::Q5_1, 32, &block(&[&half(0.5)[..], &half(1.0), &fifth].concat()));
    assert_eq!((q5_1[0], q5_1[16], q5_1[1], q5_1[17], q5_1[31]), (9.5, 8.5, 1.0, 13.0, 13.0));

    let mut q8 = half(0.25).to_vec();
    q8.extend((0..32u8).map(|i| i.wrapping_mul(8).wrapping_add(0x80))); // -128, -120, ..., 120
    let q8_0 = row_values(DType::Q8_0, 32, &q8);
    assert_eq!((q8_0[0], q8_0[1], q8_0[16], q8_0[31]), (-32.0, -30.0, 0.0, 30.0));
}

#[test]
fn k_quant_blocks_computed_by_hand() {
    // Q2_K: sub-block 9 (elements 144..160) has scale 3 and minimum 5; element 144 + 1 has code 2. It is
    // in half 1, run 0, so bits 0..2 of byte 32 + 16 + 1.
    let mut block = vec![0u8; 84];
    block[9] = 0x53;
    block[16 + 32 + 17] = 0b10;
    block[80..82].copy_from_slice(&half(0.5));
    block[82..84].copy_from_slice(&half(0.25));
    let values = row_values(DType::Q2_K, 256, &block);
    assert_eq!((values[145], values[144], values[143], values[0]), (1.75, -1.25, 0.0, 0.0));

    // Q3_K: scale 12 is 0b10_0101 - 32 = 5: low nibble 5 on top of byte 4, high bits 2 at bits 6..8 of
    // byte 8. Element 192 + 3 is in half 1, run 2: code low 3 at bits 4..6, third bit is bit 6 of hmask[3].
    let mut block = vec![0u8; 110];
    block[3] = 1 << 6;
    block[32 + 32 + 3] = 3 << 4;
    block[96 + 4] = 0x50;
    block[96 + 8] = 0b1000_0000;
    block[108..110].copy_from_slice(&half(0.5));
    let values = row_values(DType::Q3_K, 256, &block);
    assert_eq!((values[195], values[194], values[0]), (7.5, -10.0, 64.0)); // scale 0 is -32, code 0 is -4

    // Q4_K: sub-block 5 has scale 0b11_0110 = 54 and minimum 0b01_0011 = 19: low nibbles in byte 9 of the
    // scales, high bits on bytes 1 and 5. Elements 160..192 are high nibbles of bytes 64..96.
    let mut block = vec![0u8; 144];
    block[0..2].copy_from_slice(&half(0.5));
    block[2..4].copy_from_slice(&half(2.0));
    block[4 + 1] = 0b1100_0000;
    block[4 + 5] = 0b0100_0000;
    block[4 + 9] = 0x36;
    block[16 + 64 + 7] = 0xb0;
    let values = row_values(DType::Q4_K, 256, &block);
    assert_eq!((values[167], values[166], values[135], values[0]), (27.0 * 11.0 - 38.0, -38.0, 0.0, 0.0));

    // Q5_K: the same scales; the fifth bit of element 167 is bit 5 of qh[7].
    let mut wide = block[..16].to_vec();
    wide.resize(176, 0);
    wide[16 + 7] = 1 << 5;
    wide[48 + 64 + 7] = 0xb0;
    let values = row_values(DType::Q5_K, 256, &wide);
    assert_eq!((values[167], values[166]), (27.0 * 27.0 - 38.0, -38.0));

    // Q6_K: element 128 + 96 + 20 has scale 8 + 7, its low bits are the high nibble of ql[64 + 32 + 20],
    // its high bits are bits 6..8 of qh[32 + 20].
    let mut block = vec![0u8; 210];
    block[64 + 52] = 0x90;
    block[128 + 52] = 0b1000_0000;
    block[192 + 15] = 0xfd; // -3
    block[208..210].copy_from_slice(&half(0.5));
    let values = row_values(DType::Q6_K, 256, &block);
    assert_eq!((values[244], values[243], values[0]), (-1.5 * 9.0, 48.0, 0.0));
}

#[test]
fn every_row_of_every_type_dequantises_exactly() {
    let mut random = Random::new(1);
    for dtype in QUANTIZED {
        for rows in [1, 15, 16, 33] {
            let cols = 3 * dtype.block_elems();
            let stored = random_weight(dtype, rows, cols, &mut random);
            let expected = elements(dtype, cols, &stored);
            for isa in available() {
                let matrix = Matrix::new(dtype, rows, cols, &stored, isa, ActivationMode::Int8).unwrap();
                let mut out = vec![0.0; cols];
                for row in 0..rows {
                    matrix.dequantize_row(row, &mut out);
                    for (col, (&got, expected)) in out.iter().zip(&expected[row * cols..]).enumerate() {
                        // One rounding at most: the f64 value rounds to the same f32.
                        assert_eq!(got, *expected as f32, "{dtype} row {row} column {col}");
                    }
                }
            }
        }
    }
}

#[test]
fn quantised_values_come_back_within_half_a_step() {
    let mut random = Random::new(2);
    let x: Vec<f32> = (0..32 * 50).map(|_| random.heavy_tailed()).collect();
    for (dtype, steps) in
        [(DType::Q4_0, 14.0), (DType::Q4_1, 15.0), (DType::Q5_0, 30.0), (DType::Q5_1, 31.0), (DType::Q8_0, 254.0)]
    {
        let got = row_values(dtype, x.len(), &quantize(dtype, &x));
        for (x, got) in x.chunks_exact(32).zip(got.chunks_exact(32)) {
            let amax = x.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            let bound = 2.0 * amax / steps * 0.51 + 2e-3 * amax;
            assert!(x.iter().zip(got).all(|(x, got)| (x - got).abs() <= bound), "{dtype}: {x:?} {got:?}");
        }
    }
}

#[test]
fn memory_stays_near_what_is_stored() {
    let mut random = Random::new(3);
    for dtype in QUANTIZED {
        let stored = random_weight(dtype, 64, 1536, &mut random);
        let matrix = Matrix::new(dtype, 64, 1536, &stored, Isa::Scalar, ActivationMode::Int8).unwrap();
        let ratio = matrix.len_bytes() as f64 / stored.len() as f64;
        assert!((1.0..1.04).contains(&ratio), "{dtype}: {ratio}");
    }
}

#[test]
fn what_cannot_be_packed_is_refused_by_name() {
    let new = |dtype, rows, cols, bytes: usize| {
        Matrix::new(dtype, rows, cols, &vec![0; bytes], Isa::Scalar, ActivationMode::Int8).err().map(|e| e.to_string())
    };
    assert!(new(DType::F16, 1, 32, 64).unwrap().contains("F16"));
    assert!(new(DType::Q4_0, 1, 33, 18).unwrap().contains("33 columns"));
    assert!(new(DType::Q6_K, 1, 128, 105).unwrap().contains("Q6_K"));
    assert!(new(DType::Q4_0, 2, 32, 35).unwrap().contains("35 bytes"));
    assert_eq!(new(DType::Q4_0, 2, 32, 36), None);
}

/// Shapes of one comparison.
#[derive(Clone, Copy)]
struct Shape {
    dtype: DType,
    num_t: usize,
    num_n: usize,
    cols: usize,
}

/// A weight, activations, and the exact product with what each mode may be off by.
struct Case {
    shape: Shape,
    stored: Vec<u8>,
    x: Vec<f32>,
    exact: Vec<f64>,
    bound_int8: Vec<f64>,
    bound_f32: Vec<f64>,
}

impl Case {
    fn new(shape: Shape, stored: Vec<u8>, x: Vec<f32>) -> Self {
        let weights = elements(shape.dtype, shape.cols, &stored);
        let mut case = Self { shape, stored, x, exact: vec![], bound_int8: vec![], bound_f32: vec![] };
        for x in case.x.chunks_exact(shape.cols) {
            for w in weights.chunks_exact(shape.cols) {
                let (exact, bound_int8, bound_f32) = exact_product(x, w);
                case.exact.push(exact);
                case.bound_int8.push(bound_int8);
                case.bound_f32.push(bound_f32);
            }
        }
        case
    }

    fn random(shape: Shape, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let stored = random_weight(shape.dtype, shape.num_n, shape.cols, &mut random);
        let x = (0..shape.num_t * shape.cols).map(|_| random.heavy_tailed()).collect();
        Self::new(shape, stored, x)
    }

    /// The product of the first `num_t` rows with the first `num_n` weight rows, in one tile.
    fn multiply(&self, isa: Isa, mode: ActivationMode, num_t: usize, num_n: usize) -> Vec<f32> {
        let Shape { dtype, cols, .. } = self.shape;
        let stored = &self.stored[..num_n * dtype.row_bytes(cols).unwrap()];
        let matrix = Matrix::new(dtype, num_n, cols, stored, isa, mode).unwrap();
        let rows = Rows::new(&self.x[..num_t * cols], num_t, cols).unwrap();
        let mut out = vec![f32::NAN; num_t * num_n];
        matrix.multiply(&rows, 0..num_t, 0..num_n, &mut out, num_n);
        out
    }

    fn check(&self, isa: Isa, mode: ActivationMode, num_t: usize, num_n: usize) {
        let out = self.multiply(isa, mode, num_t, num_n);
        let bounds = if mode == ActivationMode::Int8 { &self.bound_int8 } else { &self.bound_f32 };
        for t in 0..num_t {
            for n in 0..num_n {
                let at = t * self.shape.num_n + n;
                let (got, exact, bound) = (f64::from(out[t * num_n + n]), self.exact[at], bounds[at]);
                assert!(
                    (got - exact).abs() <= bound,
                    "{} {isa:?} {mode:?} T {num_t} N {num_n}: [{t}, {n}] is {got}, wanted {exact} within {bound}",
                    self.shape.dtype
                );
            }
        }
    }
}

/// The dot product in f64; the most that int8 activations may change it by (each code is off by half a
/// step at most); and 2e-6 of the magnitudes, for f32 arithmetic.
fn exact_product(x: &[f32], w: &[f64]) -> (f64, f64, f64) {
    let (mut exact, mut int8, mut magnitude) = (0.0, 0.0, 0.0);
    for (x, w) in x.chunks_exact(32).zip(w.chunks_exact(32)) {
        let amax = f64::from(x.iter().fold(0.0f32, |m, v| m.max(v.abs())));
        let half_step = amax / 1019.0 / 2.0;
        for (&x, w) in x.iter().zip(w) {
            exact += f64::from(x) * w;
            magnitude += (f64::from(x) * w).abs();
            int8 += w.abs() * half_step;
        }
    }
    // Integer products and minima cancel each other in part: f32 rounding is relative to the parts.
    (exact, int8 * 1.001 + magnitude * 1e-5, magnitude * 2e-6)
}

const TOKENS: [usize; 8] = [1, 2, 3, 5, 8, 17, 64, 513];
const FEATURES: [usize; 5] = [1, 7, 16, 49, 192];

#[test]
fn every_kernel_is_near_the_exact_product() {
    for (seed, dtype) in QUANTIZED.into_iter().enumerate() {
        // More columns than are widened together, and no whole multiple of that.
        let cols = if dtype.block_elems() == 32 { 576 } else { 768 };
        let (most_t, most_n) = if is_emulated() { (17, 49) } else { (513, 192) };
        let case = Case::random(Shape { dtype, num_t: most_t, num_n: most_n, cols }, 10 + seed as u64);
        for isa in available() {
            for mode in MODES {
                // The plain code is slow, and the same for every number of rows.
                for num_t in TOKENS.into_iter().filter(|&t| t <= most_t && (isa != Isa::Scalar || t < 64)) {
                    for num_n in FEATURES.into_iter().filter(|&n| n <= most_n) {
                        case.check(isa, mode, num_t, num_n);
                    }
                }
            }
        }
    }
}

#[test]
fn every_number_of_columns_works() {
    for (seed, dtype) in QUANTIZED.into_iter().enumerate() {
        for blocks in [1usize, 2, 3, 7, 16, 17, 33, 50].into_iter().filter(|&blocks| !is_emulated() || blocks <= 33) {
            let cols = dtype.block_elems() * if dtype.block_elems() == 32 { blocks } else { blocks.div_ceil(8) };
            let case = Case::random(Shape { dtype, num_t: 37, num_n: 21, cols }, 30 + seed as u64);
            for isa in available() {
                for mode in MODES {
                    case.check(isa, mode, 37, 21);
                    case.check(isa, mode, 1, 21);
                }
            }
        }
    }
}

#[test]
fn int8_results_are_the_same_bits_on_every_instruction_set() {
    for (seed, dtype) in QUANTIZED.into_iter().enumerate() {
        let case = Case::random(Shape { dtype, num_t: 67, num_n: 50, cols: 1024 }, 50 + seed as u64);
        let scalar = case.multiply(Isa::Scalar, ActivationMode::Int8, 67, 50);
        for isa in available() {
            for num_t in [1, 4, 67] {
                let got = case.multiply(isa, ActivationMode::Int8, num_t, 50);
                assert_same_bits(&got, &scalar[..num_t * 50], &format!("{dtype} {isa:?} T {num_t}"));
            }
        }
    }
}

fn assert_same_bits(got: &[f32], expected: &[f32], what: &str) {
    assert_eq!(got.len(), expected.len());
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert_eq!(got.to_bits(), expected.to_bits(), "{what}: element {i} is {got}, was {expected}");
    }
}

/// Cuts `0..end` at the multiples of `size`.
fn cuts(end: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..end).step_by(size).map(move |at| at..(at + size).min(end))
}

#[test]
fn a_row_does_not_depend_on_its_tile() {
    // Under an emulator each type meets one cut into tiles.
    let (num_t, num_n) = if is_emulated() { (43, 49) } else { (300, 113) };
    let sizes = [(1, 113), (2, 16), (3, 32), (4, 112), (5, 113), (16, 48), (37, 64), (129, 16)];
    for (seed, dtype) in QUANTIZED.into_iter().enumerate() {
        let cols = if dtype.block_elems() == 32 { 1120 } else { 1280 };
        let case = Case::random(Shape { dtype, num_t, num_n, cols }, 70 + seed as u64);
        let rows = Rows::new(&case.x, num_t, cols).unwrap();
        for isa in available() {
            for mode in MODES {
                let matrix = Matrix::new(dtype, num_n, cols, &case.stored, isa, mode).unwrap();
                let mut whole = vec![0.0; num_t * num_n];
                matrix.multiply(&rows, 0..num_t, 0..num_n, &mut whole, num_n);
                let is_taken = |i: &usize| !is_emulated() || i % sizes.len() == seed % sizes.len();
                for (t_size, n_size) in (0..sizes.len()).filter(is_taken).map(|i| sizes[i]) {
                    let mut tiled = vec![f32::NAN; num_t * num_n];
                    for t in cuts(num_t, t_size) {
                        for n in cuts(num_n, n_size) {
                            matrix.multiply(&rows, t.clone(), n, &mut tiled, num_n);
                        }
                    }
                    assert_same_bits(&tiled, &whole, &format!("{dtype} {isa:?} {mode:?} tiles {t_size} x {n_size}"));
                }
            }
        }
    }
}

#[test]
fn nothing_outside_the_tile_is_written() {
    let (num_t, num_n, out_cols) = (40, 50, 61);
    for dtype in [DType::Q4_1, DType::Q8_0, DType::Q6_K] {
        let case = Case::random(Shape { dtype, num_t, num_n, cols: 768 }, 90);
        let rows = Rows::new(&case.x, num_t, 768).unwrap();
        for isa in available() {
            for mode in MODES {
                let matrix = Matrix::new(dtype, num_n, 768, &case.stored, isa, mode).unwrap();
                for t in [3..4, 3..6, 2..19, 1..39] {
                    for n in [0..16, 16..48, 32..50] {
                        let mut out = vec![-7.5f32; num_t * out_cols];
                        matrix.multiply(&rows, t.clone(), n.clone(), &mut out, out_cols);
                        for (i, &v) in out.iter().enumerate() {
                            let inside = t.contains(&(i / out_cols)) && n.contains(&(i % out_cols));
                            assert_eq!(v != -7.5, inside, "{dtype} {isa:?} {mode:?} {t:?} {n:?} element {i}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn extreme_codes_do_not_saturate() {
    let cols = 512;
    for dtype in QUANTIZED {
        for fill in [0x00u8, 0x7f, 0x80, 0xff, 0x0f, 0xf0] {
            let mut stored = vec![fill; 16 * dtype.row_bytes(cols).unwrap()];
            set_halves(dtype, &mut stored, || (0.5, -0.25));
            // All largest, all smallest, alternating, and pairs: every code is 127 or -127.
            let signs: [fn(usize) -> bool; 4] = [|_| false, |_| true, |i| i % 2 == 0, |i| i % 4 < 2];
            let x: Vec<f32> =
                signs.iter().flat_map(|sign| (0..cols).map(|i| if sign(i) { -1.0 } else { 1.0 })).collect();
            let x = x.repeat(9); // enough rows for the kernels of many rows
            let case = Case::new(Shape { dtype, num_t: 36, num_n: 16, cols }, stored, x);
            for isa in available() {
                for mode in MODES {
                    case.check(isa, mode, 36, 16);
                    case.check(isa, mode, 4, 16);
                    case.check(isa, mode, 1, 16);
                }
            }
        }
    }
}

#[test]
fn non_finite_numbers_stay_in_their_row_and_do_not_vanish() {
    let cols = 512;
    for dtype in QUANTIZED {
        let mut case = Case::random(Shape { dtype, num_t: 40, num_n: 48, cols }, 110);
        for (t, bad) in [(5, f32::NAN), (6, f32::INFINITY), (39, f32::NEG_INFINITY)] {
            case.x[t * cols + 300] = bad;
        }
        let row_bytes = dtype.row_bytes(cols).unwrap();
        for (n, bad) in [(3, f32::NAN), (20, f32::INFINITY)] {
            set_halves(dtype, &mut case.stored[n * row_bytes..][..dtype.block_bytes()], || (bad, bad));
        }
        for isa in available() {
            for mode in MODES {
                for num_t in [1, 7, 40] {
                    let out = case.multiply(isa, mode, num_t, 48);
                    for (i, v) in out.iter().enumerate() {
                        let bad_row = matches!(i / 48, 5 | 6 | 39);
                        let bad_weight = matches!(i % 48, 3 | 20);
                        assert_eq!(
                            v.is_finite(),
                            !(bad_row || bad_weight),
                            "{dtype} {isa:?} {mode:?} element {i}: {v}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn zero_and_tiny_activations_give_zero() {
    for dtype in QUANTIZED {
        let mut case = Case::random(Shape { dtype, num_t: 17, num_n: 16, cols: 256 }, 120);
        case.x.iter_mut().enumerate().for_each(|(i, x)| *x = if i % 2 == 0 { 0.0 } else { 1e-41 });
        for isa in available() {
            let out = case.multiply(isa, ActivationMode::Int8, 17, 16);
            assert!(out.iter().all(|v| v.abs() < 1e-30), "{dtype} {isa:?}: {out:?}");
        }
    }
}

/// Else the tests under it would say nothing about the sets it lacks.
#[test]
fn an_emulator_offers_every_set_of_its_machine() {
    if is_emulated() && cfg!(target_arch = "aarch64") {
        assert_eq!(available(), [Isa::Scalar, Isa::Neon, Isa::NeonDot]);
    }
}
