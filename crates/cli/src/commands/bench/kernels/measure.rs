//! Times one op and keeps what it did. Knows no op.

use super::super::workload::{Random, quantile};
use anyhow::Result;
use pagemill_backend::{ActivationMode, Backend, CpuBackend, DType, Tensor};
use std::time::{Duration, Instant};

/// Passes at least, whatever the time.
const PASSES_MIN: usize = 3;

/// What an op multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// f32.
    F32,
    /// int8 codes.
    Int8,
}

/// One op at one shape.
#[derive(Clone, Debug)]
pub struct Row {
    /// Its name.
    pub op: String,
    /// Its shape, in the letters of the backend.
    pub shape: String,
    /// Median seconds of one call.
    pub seconds: f64,
    /// Bytes that one call has to move.
    pub bytes: f64,
    /// Arithmetic operations of one call; 0 where they are not worth counting.
    pub ops: f64,
    /// Of which kind.
    pub arithmetic: Arithmetic,
    /// Bytes touched before the first is touched again.
    pub working_set: usize,
}

impl Row {
    /// Bytes a second.
    pub fn bytes_per_second(&self) -> f64 {
        self.bytes / self.seconds
    }

    /// Operations a second.
    pub fn ops_per_second(&self) -> f64 {
        self.ops / self.seconds
    }
}

/// What a call costs by its shape.
pub struct Cost {
    /// As [`Row::op`].
    pub op: String,
    /// As [`Row::shape`].
    pub shape: String,
    /// Bytes that a call has to move.
    pub bytes: usize,
    /// As [`Row::ops`].
    pub ops: usize,
    /// As [`Row::arithmetic`].
    pub arithmetic: Arithmetic,
    /// Calls of a pass.
    pub calls: usize,
    /// On how many weights or layers the calls take turns; 1: all on the same data.
    pub data_sets: usize,
}

/// The device, and what was measured so far.
pub struct Measure<'a> {
    /// The device.
    pub backend: &'a CpuBackend,
    /// Rows so far.
    pub rows: Vec<Row>,
    duration: Duration,
    activations: ActivationMode,
    random: Random,
}

impl<'a> Measure<'a> {
    /// Spends `duration` on each figure at least.
    pub fn new(backend: &'a CpuBackend, duration: Duration, activations: ActivationMode) -> Self {
        Self { backend, rows: Vec::new(), duration, activations, random: Random::new(7) }
    }

    /// What products with a weight of `dtype` multiply.
    pub fn arithmetic(&self, dtype: DType) -> Arithmetic {
        match self.activations {
            ActivationMode::Int8 if dtype.is_quantized() => Arithmetic::Int8,
            _ => Arithmetic::F32,
        }
    }

    /// Random activations `[rows, cols]` in -1..1.
    pub fn random(&mut self, rows: usize, cols: usize) -> Result<Tensor> {
        #[allow(clippy::cast_possible_truncation)] // a sample
        let data: Vec<f32> = (0..rows * cols).map(|_| (self.random.unit() * 2.0 - 1.0) as f32).collect();
        let mut tensor = self.backend.temp(rows, cols)?;
        self.backend.copy_from_host(&data, &mut tensor)?;
        Ok(tensor)
    }

    /// Random numbers in `0..bound`.
    #[allow(clippy::cast_possible_truncation)] // below a vocabulary
    pub fn random_ids(&mut self, count: usize, bound: usize) -> Vec<u32> {
        (0..count).map(|_| self.random.below(bound as u64) as u32).collect()
    }

    /// Times passes of `cost.calls` calls `call(0..calls)` as a forward would make them, after one pass to
    /// warm up, and adds the median as a row.
    #[allow(clippy::cast_precision_loss)] // sizes
    pub fn add(&mut self, cost: Cost, mut call: impl FnMut(usize) -> Result<()>) -> Result<()> {
        let mut passes = Vec::new();
        let mut pass = |times: Option<&mut Vec<f64>>| -> Result<()> {
            self.backend.begin_forward();
            let start = Instant::now();
            let outcome = (0..cost.calls).try_for_each(&mut call);
            let elapsed = start.elapsed().as_secs_f64();
            self.backend.end_forward();
            if let Some(times) = times {
                times.push(elapsed);
            }
            outcome
        };
        pass(None)?;
        let start = Instant::now();
        while passes.len() < PASSES_MIN || start.elapsed() < self.duration {
            pass(Some(&mut passes))?;
        }
        passes.sort_by(f64::total_cmp);
        self.rows.push(Row {
            op: cost.op,
            shape: cost.shape,
            seconds: quantile(&passes, 0.5) / cost.calls as f64,
            bytes: cost.bytes as f64,
            ops: cost.ops as f64,
            arithmetic: cost.arithmetic,
            working_set: cost.bytes * cost.data_sets,
        });
        Ok(())
    }
}
