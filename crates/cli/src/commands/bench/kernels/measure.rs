//! Times one op and keeps what it did: by the device's own clock where it has one, else by the host's. Knows no op.

use super::super::workload::{Random, quantile};
use anyhow::{Result, bail};
use pagemill_backend::{Backend, BackendError, DType, Launching, Tensor};
use std::time::{Duration, Instant};

/// Passes at least, whatever the time.
const PASSES_MIN: usize = 3;
/// Passes at most, by a device's clock.
const PASSES_MAX: usize = 100;
/// On a device with memory of its own: bytes that calls touch before they come back to the first, well above
/// the caches of such devices.
const WORKING_SET: usize = 512 << 20;
/// Tokens from which a product's time is its arithmetic, wherever its weights lie: few calls are enough.
const MANY_TOKENS: usize = 512;
/// And so many.
const FEW_CALLS: usize = 4;

/// What an op multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// f32.
    F32,
    /// bf16 with f32 sums.
    Bf16,
    /// int8 codes.
    Int8,
}

/// How a call reaches the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calls {
    /// As [`Launching`] says, where the device has a clock.
    On(Launching),
    /// Each call gives its result to the host: its wait is counted.
    Waiting,
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

/// An op that this device or its memory does not take.
#[derive(Clone, Debug)]
pub struct LeftOut {
    /// As [`Row::op`].
    pub op: String,
    /// As [`Row::shape`].
    pub shape: String,
    /// Why.
    pub why: String,
}

/// What a call costs by its shape.
#[derive(Clone, Debug)]
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
    pub backend: &'a dyn Backend,
    /// Rows so far.
    pub rows: Vec<Row>,
    /// What could not be measured so far.
    pub left_out: Vec<LeftOut>,
    /// Bytes of an element of what flows between ops.
    pub activation_bytes: usize,
    duration: Duration,
    /// What products with a quantised weight multiply.
    quantized: Arithmetic,
    random: Random,
    numbers: Vec<f32>,
}

impl<'a> Measure<'a> {
    /// Spends `duration` on each figure at least. `quantized`: what products with a quantised weight multiply.
    pub fn new(backend: &'a dyn Backend, duration: Duration, quantized: Arithmetic) -> Result<Self> {
        let activation_bytes = backend.activation(1, 1)?.dtype().block_bytes();
        let (rows, left_out) = (Vec::new(), Vec::new());
        let (random, numbers) = (Random::new(7), super::weights::normal_numbers(7));
        Ok(Self { backend, rows, left_out, activation_bytes, duration, quantized, random, numbers })
    }

    /// Whether the device has memory and a clock of its own.
    pub fn is_apart(&self) -> bool {
        self.backend.meter().is_some()
    }

    /// What attention, and products with float weights, multiply.
    pub fn float_arithmetic(&self) -> Arithmetic {
        if self.activation_bytes == DType::BF16.block_bytes() { Arithmetic::Bf16 } else { Arithmetic::F32 }
    }

    /// What products with a weight of `dtype` multiply.
    pub fn arithmetic(&self, dtype: DType) -> Arithmetic {
        if dtype.is_quantized() { self.quantized } else { self.float_arithmetic() }
    }

    /// On how many data sets of `bytes` each the calls of an op have to take turns, when a forward has `in_forward`
    /// of them, so that they come from where they come from in a forward.
    pub fn data_sets(&self, bytes: usize, in_forward: usize) -> usize {
        if self.is_apart() { WORKING_SET.div_ceil(bytes.max(1)).max(2) } else { in_forward }
    }

    /// Calls of a pass of products of so many tokens, over `data_sets` weights.
    pub fn product_calls(&self, tokens: usize, data_sets: usize) -> usize {
        if self.is_apart() && tokens >= MANY_TOKENS { FEW_CALLS.min(data_sets) } else { data_sets }
    }

    /// Random activations `[rows, cols]`, normal: what bits a chip moves decides how fast it may run.
    pub fn activation(&self, rows: usize, cols: usize) -> Result<Tensor> {
        let tensor = self.backend.activation(rows, cols)?;
        self.filled(tensor)
    }

    /// The same in f32, as the residual stream is.
    pub fn residual(&self, rows: usize, cols: usize) -> Result<Tensor> {
        let tensor = self.backend.temp(rows, cols)?;
        self.filled(tensor)
    }

    fn filled(&self, mut tensor: Tensor) -> Result<Tensor> {
        let count = tensor.rows() * tensor.cols();
        let mut data = Vec::with_capacity(count);
        while data.len() < count {
            data.extend_from_slice(&self.numbers[..self.numbers.len().min(count - data.len())]);
        }
        self.backend.copy_from_host(&data, &mut tensor)?;
        Ok(tensor)
    }

    /// Random numbers in `0..bound`.
    #[allow(clippy::cast_possible_truncation)] // below a vocabulary
    pub fn random_ids(&mut self, count: usize, bound: usize) -> Vec<u32> {
        (0..count).map(|_| self.random.below(bound as u64) as u32).collect()
    }

    /// Says why an op is not measured.
    pub fn leave_out(&mut self, op: impl Into<String>, shape: impl Into<String>, why: impl Into<String>) {
        self.left_out.push(LeftOut { op: op.into(), shape: shape.into(), why: why.into() });
    }

    /// Adds what the row before the last took beyond the last, which is a part of it.
    pub fn add_difference(&mut self, op: &str) {
        let [.., whole, part] = self.rows.as_slice() else { return };
        let seconds = (whole.seconds - part.seconds).max(f64::MIN_POSITIVE);
        self.rows.push(Row { op: op.to_owned(), seconds, ..whole.clone() });
    }

    /// Times passes of `cost.calls` calls `call(0..calls)` as a forward would make them, after one pass to warm up,
    /// and adds the median as a row. What the device refuses is left out by name.
    #[allow(clippy::cast_precision_loss)] // sizes
    pub fn add(
        &mut self,
        cost: Cost,
        how: Calls,
        mut call: impl FnMut(usize) -> Result<(), BackendError>,
    ) -> Result<()> {
        let mut pass = || {
            self.backend.begin_forward();
            let outcome = (0..cost.calls).try_for_each(&mut call);
            self.backend.end_forward();
            outcome
        };
        let times = match (self.backend.meter(), how) {
            (Some(meter), Calls::On(launching)) => {
                let duration = self.duration;
                let mut time = |passes| meter.time(launching, passes, &mut pass);
                time(PASSES_MIN).and_then(|first| {
                    let longest = first.iter().max().copied().unwrap_or_default().max(Duration::from_micros(1));
                    let wanted = duration.as_nanos() / longest.as_nanos();
                    let wanted = usize::try_from(wanted).unwrap_or(PASSES_MAX).min(PASSES_MAX);
                    if wanted <= PASSES_MIN { Ok(first) } else { time(wanted) }
                })
            }
            _ => by_the_host(self.duration, &mut pass),
        };
        let times = match times {
            Ok(times) => times,
            Err(refusal @ (BackendError::Unsupported { .. } | BackendError::OutOfMemory { .. })) => {
                self.leave_out(cost.op, cost.shape, refusal.to_string());
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        };
        let mut seconds: Vec<f64> = times.iter().map(Duration::as_secs_f64).collect();
        seconds.sort_by(f64::total_cmp);
        let seconds = quantile(&seconds, 0.5) / cost.calls as f64;
        if seconds <= 0.0 {
            bail!("{} ({}) took no time", cost.op, cost.shape);
        }
        self.rows.push(Row {
            op: cost.op,
            shape: cost.shape,
            seconds,
            bytes: cost.bytes as f64,
            ops: cost.ops as f64,
            arithmetic: cost.arithmetic,
            working_set: cost.bytes * cost.data_sets,
        });
        Ok(())
    }
}

/// Times of passes by the host's clock, after one that is not counted.
fn by_the_host(
    duration: Duration,
    pass: &mut dyn FnMut() -> Result<(), BackendError>,
) -> Result<Vec<Duration>, BackendError> {
    pass()?;
    let mut times = Vec::new();
    let start = Instant::now();
    while times.len() < PASSES_MIN || start.elapsed() < duration {
        let begun = Instant::now();
        pass()?;
        times.push(begun.elapsed());
    }
    Ok(times)
}
