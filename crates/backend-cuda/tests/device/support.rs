//! What the device's tests share: both backends, tensors to and from them, seeded random numbers, and the measure
//! of closeness. Decides no expectation of its own.

use pagemill_backend::{Backend, CpuBackend, CpuConfig, DType, Isa, Tensor};
use pagemill_backend_cuda::{Activations, CudaBackend, CudaConfig};
use std::io::Write;

/// Both ways of the device's activations.
pub const ACTIVATIONS: [Activations; 2] = [Activations::F32, Activations::Bf16];

/// Whether there is a GPU; says so when there is none (past the test harness, which would hold it back).
pub fn has_gpu() -> bool {
    let found = CudaBackend::count_devices().unwrap() > 0;
    if !found {
        writeln!(std::io::stderr(), "no GPU on this machine: not tested here").unwrap();
    }
    found
}

/// The device, or `None` where there is none.
pub fn gpu(activations: Activations) -> Option<CudaBackend> {
    has_gpu().then(|| CudaBackend::new(CudaConfig { ordinal: 0, activations, deterministic: false }).unwrap())
}

/// The device as it is where results must not depend on company.
pub fn deterministic_gpu(activations: Activations) -> Option<CudaBackend> {
    has_gpu().then(|| CudaBackend::new(CudaConfig { ordinal: 0, activations, deterministic: true }).unwrap())
}

/// The CPU's scalar reference, float products exact.
pub fn scalar() -> CpuBackend {
    cpu(Some(Isa::Scalar))
}

/// A CPU backend.
pub fn cpu(isa: Option<Isa>) -> CpuBackend {
    let activations = pagemill_backend::ActivationMode::F32;
    CpuBackend::new(CpuConfig { num_threads: None, isa, activations }).unwrap()
}

/// A workspace tensor in f32 with these elements.
pub fn tensor(backend: &dyn Backend, rows: usize, cols: usize, data: &[f32]) -> Tensor {
    let mut x = backend.temp(rows, cols).unwrap();
    backend.copy_from_host(data, &mut x).unwrap();
    x
}

/// An activation with these elements, in the device's type for them.
pub fn activation(backend: &dyn Backend, rows: usize, cols: usize, data: &[f32]) -> Tensor {
    let mut x = backend.activation(rows, cols).unwrap();
    backend.copy_from_host(data, &mut x).unwrap();
    x
}

/// An activation full of NaN, to be overwritten.
pub fn poisoned(backend: &dyn Backend, rows: usize, cols: usize) -> Tensor {
    activation(backend, rows, cols, &vec![f32::NAN; rows * cols])
}

/// The elements.
pub fn host(backend: &dyn Backend, x: &Tensor) -> Vec<f32> {
    let mut out = vec![0.0; x.rows() * x.cols()];
    backend.to_host(x, &mut out).unwrap();
    out
}

/// What the device's activations hold of these numbers.
pub fn rounded(activations: Activations, data: &[f32]) -> Vec<f32> {
    match activations {
        Activations::F32 => data.to_vec(),
        Activations::Bf16 => data.iter().map(|&x| half::bf16::from_f32(x).to_f32()).collect(),
    }
}

/// Numbers of a cache of type `dtype`.
pub fn cached(dtype: DType, data: &[f32]) -> Vec<f32> {
    match dtype {
        DType::BF16 => data.iter().map(|&x| half::bf16::from_f32(x).to_f32()).collect(),
        DType::F16 => data.iter().map(|&x| half::f16::from_f32(x).to_f32()).collect(),
        _ => data.to_vec(),
    }
}

/// Every element of `got` is within `relative` of `want`'s largest.
#[track_caller]
pub fn assert_close(got: &[f32], want: &[f32], relative: f32, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let scale = want.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(
            (got - want).abs() <= relative * scale + 1e-30,
            "{what}: element {at} is {got}, not {want} (of {scale})"
        );
    }
}

/// How close results are that the device computes in f32 and gives in its activations' type.
pub fn tolerance(activations: Activations) -> f32 {
    match activations {
        Activations::F32 => 1e-5,
        Activations::Bf16 => 1.0 / 256.0,
    }
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
