//! Measures the quantised products on this machine: bytes per second of weights with one row of
//! activations (decode), integer operations per second with 512 (prefill), for every instruction set,
//! with one and with all threads. Prints a table; best of several repetitions.
//!
//! `cargo run --release -p pagemill-backend --example quant_speed [-- TYPE...]`

use pagemill_backend::cpu::bench_access::{Isa, Matrix, Rows};
use pagemill_backend::{ActivationMode, BackendError, DType};
use std::time::Instant;

/// (name, N, C) of SmolLM2-135M's products; the head with a part of its rows is enough for prefill.
const SHAPES: [(&str, usize, usize); 5] =
    [("q", 576, 576), ("kv", 192, 576), ("gate", 1536, 576), ("down", 576, 1536), ("head", 49_152, 576)];
const PREFILL_ROWS: usize = 512;
const DEFAULT_TYPES: [DType; 4] = [DType::Q4_1, DType::Q4_0, DType::Q8_0, DType::Q6_K];

/// Weights enough to leave the caches: `copies` matrices of one shape.
struct Bench {
    matrices: Vec<Matrix>,
    num_n: usize,
    cols: usize,
    mode: ActivationMode,
}

impl Bench {
    fn new(dtype: DType, num_n: usize, cols: usize, isa: Isa, mode: ActivationMode) -> Result<Self, BackendError> {
        let row_bytes = dtype.row_bytes(cols).unwrap_or(0);
        // Zero codes run as fast as others; the scales' bytes must not be NaN.
        let stored = vec![0x11u8; num_n * row_bytes];
        let copies = (64 << 20) / stored.len().max(1) + 1;
        let matrices = (0..copies).map(|_| Matrix::new(dtype, num_n, cols, &stored, isa, mode));
        Ok(Self { matrices: matrices.collect::<Result<_, _>>()?, num_n, cols, mode })
    }

    /// Seconds for one product with `num_t` rows by `threads` threads, each taking its share of the weight
    /// rows. Weights come from beyond the second-level cache when `num_t` is small. Every matrix is timed
    /// by itself and its best time counts: other work on the machine spoils few of such short pieces.
    fn seconds(&self, threads: usize, num_t: usize) -> Result<f64, BackendError> {
        let x: Vec<f32> = (0u16..).map(|i| f32::from(i % 89) - 44.0).take(num_t * self.cols).collect();
        let rows = (0..threads).map(|_| Rows::new(&x, num_t, self.cols)).collect::<Result<Vec<_>, _>>()?;
        let slowest = std::thread::scope(|scope| {
            let spawn = |(idx, rows)| scope.spawn(move || self.share_seconds(idx, threads, rows, num_t));
            let threads: Vec<_> = rows.into_iter().enumerate().map(spawn).collect();
            threads.into_iter().filter_map(|thread| thread.join().ok()).fold(0.0f64, f64::max)
        });
        Ok(slowest)
    }

    fn share_seconds(&self, idx: usize, threads: usize, rows: Rows<'_>, num_t: usize) -> f64 {
        let panels = self.num_n / 16;
        let first = panels * idx / threads;
        let end = panels * (idx + 1) / threads;
        // No more weight rows than make a piece of about a millisecond.
        let most = ((100 << 20) / (16 * self.cols * num_t)).max(1);
        let measured = (end - first).min(most);
        let count = self.matrices.len().min(if num_t < 64 { usize::MAX } else { 8 });
        let mut out = vec![0.0f32; num_t * self.num_n];
        let mut best = vec![f64::MAX; count];
        let started = Instant::now();
        while started.elapsed().as_secs_f64() < 0.3 {
            for (matrix, best) in self.matrices.iter().zip(&mut best) {
                let start = Instant::now();
                matrix.multiply(&rows, 0..num_t, first * 16..(first + measured) * 16, &mut out, self.num_n);
                *best = best.min(start.elapsed().as_secs_f64());
            }
        }
        std::hint::black_box(&out);
        best.iter().sum::<f64>() / count as f64 * (end - first) as f64 / measured as f64
    }

    fn print(&self, name: &str, dtype: DType, isa: Isa) -> Result<(), BackendError> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let bytes = self.matrices[0].len_bytes() as f64;
        let operations = 2.0 * (self.num_n * self.cols * PREFILL_ROWS) as f64;
        print!("{:12} {:5} {:6} {name:5}", isa.name(), dtype.name(), format!("{:?}", self.mode));
        for threads in [1, threads] {
            print!("  {:6.1}", bytes / self.seconds(threads, 1)? / 1e9);
        }
        for num_t in [4, 16] {
            let operations = operations / PREFILL_ROWS as f64 * f64::from(u32::try_from(num_t).unwrap_or(0));
            print!("  {:6.0}", operations / self.seconds(1, num_t)? / 1e9);
        }
        for threads in [1, threads] {
            print!("  {:6.0}", operations / self.seconds(threads, PREFILL_ROWS)? / 1e9);
        }
        println!();
        Ok(())
    }
}

fn main() -> Result<(), BackendError> {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let types: Vec<DType> = if wanted.is_empty() {
        DEFAULT_TYPES.to_vec()
    } else {
        DType::ALL.into_iter().filter(|t| t.is_quantized() && wanted.iter().any(|w| w == t.name())).collect()
    };
    println!("isa          type  acts   shape  T=1 GB/s (1, all threads)  T=4, T=16 Gop/s (1)  T=512 Gop/s (1, all)");
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available() && *isa != Isa::Scalar) {
        for &dtype in &types {
            for (name, num_n, cols) in SHAPES {
                if cols.is_multiple_of(dtype.block_elems()) {
                    Bench::new(dtype, num_n, cols, isa, ActivationMode::Int8)?.print(name, dtype, isa)?;
                }
            }
        }
        Bench::new(DType::Q4_1, 1536, 576, isa, ActivationMode::F32)?.print("gate", DType::Q4_1, isa)?;
    }
    Ok(())
}
