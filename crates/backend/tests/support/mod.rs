//! What the op tests share: backends of every instruction set, tensors to and from the host, seeded
//! random numbers, and the measure of closeness. Decides no expectation of its own.

#![allow(dead_code)] // each test file uses a part

mod emulation;

pub use emulation::is_emulated;

use pagemill_backend::cpu::Isa;
use pagemill_backend::{Backend, CpuBackend, CpuConfig, Tensor};

/// The instruction sets of this machine; under an emulator the best alone (what these tests are about is the same
/// code for all sets with the same vectors).
pub fn sets() -> Vec<Isa> {
    let wanted = |isa: &Isa| isa.is_available() && (!is_emulated() || *isa == Isa::detect());
    Isa::ALL.into_iter().filter(wanted).collect()
}

/// A backend for each of [`sets`], with two threads.
pub fn backends() -> Vec<CpuBackend> {
    sets().into_iter().map(|isa| backend(isa, 2)).collect()
}

/// A backend.
pub fn backend(isa: Isa, num_threads: usize) -> CpuBackend {
    CpuBackend::new(CpuConfig { num_threads: Some(num_threads), isa: Some(isa), ..Default::default() }).unwrap()
}

/// A tensor with these elements.
pub fn tensor(backend: &CpuBackend, rows: usize, cols: usize, data: &[f32]) -> Tensor {
    let mut x = backend.temp(rows, cols).unwrap();
    backend.copy_from_host(data, &mut x).unwrap();
    x
}

/// A tensor full of NaN, to be overwritten.
pub fn poisoned(backend: &CpuBackend, rows: usize, cols: usize) -> Tensor {
    tensor(backend, rows, cols, &vec![f32::NAN; rows * cols])
}

/// The elements.
pub fn host(backend: &CpuBackend, x: &Tensor) -> Vec<f32> {
    let mut out = vec![0.0; x.rows() * x.cols()];
    backend.to_host(x, &mut out).unwrap();
    out
}

/// For comparisons of every bit.
pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// The greatest error of `got` against `exact` is at most twice that of `naive` (or a rounding of the
/// largest element, where the naive form happens to be exact).
pub fn assert_close(got: &[f32], naive: &[f32], exact: &[f64], what: &str) {
    assert_eq!(got.len(), exact.len());
    let error = |x: &[f32]| {
        x.iter()
            .zip(exact)
            .map(|(&x, &exact)| (f64::from(x) - exact).abs())
            .fold(0.0, |worst: f64, error| if error.is_nan() { f64::INFINITY } else { worst.max(error) })
    };
    let scale = exact.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    let allowed = 2.0 * error(naive) + 2.0 * f64::from(f32::EPSILON) * scale + 1e-30;
    assert!(error(got) <= allowed, "{what}: error {:e}, allowed {allowed:e}", error(got));
}

/// A small seeded generator (xorshift64*).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.next() >> 33) as usize % end
    }

    /// About normal with deviation 1: the sum of three uniform numbers.
    pub fn normal(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| (0..3).map(|_| (self.next() >> 40) as f32 / (1_u64 << 23) as f32 - 1.0).sum()).collect()
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}
