//! The machine's own limits, and which of them applies to an op.

use super::measure::{Arithmetic, Measure, Row};
use anyhow::Result;
use pagemill_backend::cpu::ceilings;
use pagemill_backend::{
    Backend, BackendError, CpuBackend, DType, DeviceMeter, Launching, LinearInput, LinearPart, WeightDesc,
};
use std::time::Duration;

/// Bytes a thread that fit its own caches.
const CACHED_BYTES_PER_THREAD: usize = 256 << 10;
/// Far more than the caches of most machines; cut where memory is short.
const MEMORY_BYTES: usize = 2 << 30;
/// The same of a device with memory of its own.
const MEMORY_BYTES_APART: usize = 8 << 30;
/// Tokens, rows and columns of the product that measures a device's arithmetic.
const PRODUCT_SIZE: usize = 8192;
/// Launches of the smallest op, over which its time is taken.
const LAUNCHES: usize = 200;

/// Times that each limit is measured.
const ATTEMPTS: usize = 3;
/// The same of a device with a clock of its own.
const PASSES: usize = 10;

/// A rate of reading, and the bytes that were read over and over.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    /// Bytes a second.
    pub bytes_per_second: f64,
    /// Of the buffer.
    pub buffer_bytes: usize,
}

/// What this machine did at most; `None` where it has no such limit or no loop was written for it.
#[derive(Clone, Debug, Default)]
pub struct Ceilings {
    /// From memory, all threads.
    pub memory: Option<Reading>,
    /// A buffer as large as the weights: large caches of a host hold some models whole.
    pub weights: Option<Reading>,
    /// Buffers that fit the threads' own caches.
    pub cache: Option<Reading>,
    /// f32 operations a second, all threads; a fused multiply-add is two.
    pub f32_ops: Option<f64>,
    /// bf16 operations a second of a large product; a multiplication and an addition are two.
    pub bf16_ops: Option<f64>,
    /// int8 operations a second, all threads; a multiplication and an addition are two.
    pub int8_ops: Option<f64>,
    /// Seconds of a kernel that does nothing, among others.
    pub launch_seconds: Option<f64>,
}

/// The nearest of an op's limits.
pub struct Share {
    /// Part of the limit that was reached.
    pub share: f64,
    /// Which: `memory`, `weights`, `cache`, `f32`, `bf16`, `int8`, or `launch` where the op is too small for the others.
    pub of: &'static str,
}

impl Ceilings {
    /// The host's, each [`ATTEMPTS`] times for `duration`: the best counts, as others may use the machine too.
    pub fn of_host(backend: &CpuBackend, weight_bytes: usize, duration: Duration) -> Self {
        let (isa, threads) = (backend.isa(), backend.info().num_units);
        let available = usize::try_from(backend.info().memory_available_bytes).unwrap_or(usize::MAX);
        let memory_bytes = if available == 0 { MEMORY_BYTES } else { MEMORY_BYTES.min(available / 2) };
        let best = |measure: &dyn Fn() -> f64| (0..ATTEMPTS).map(|_| measure()).fold(0.0, f64::max);
        let read = |buffer_bytes: usize| {
            let once = || ceilings::read_bytes_per_second(isa, threads, buffer_bytes, duration);
            Some(Reading { bytes_per_second: best(&once), buffer_bytes })
        };
        let peak = |measure: &dyn Fn() -> Option<f64>| (0..ATTEMPTS).filter_map(|_| measure()).reduce(f64::max);
        Self {
            memory: read(memory_bytes),
            weights: read(weight_bytes.clamp(1, memory_bytes)),
            cache: read(CACHED_BYTES_PER_THREAD * threads),
            f32_ops: peak(&|| ceilings::f32_ops_per_second(isa, threads, duration)),
            int8_ops: peak(&|| ceilings::int8_ops_per_second(isa, threads, duration)),
            ..Self::default()
        }
    }

    /// A device's, by its own clock.
    ///
    /// # Errors
    /// The device failed.
    pub fn of_device(measure: &Measure<'_>, meter: &dyn DeviceMeter) -> Result<Self> {
        let backend = measure.backend;
        let available = usize::try_from(backend.info().memory_available_bytes).unwrap_or(usize::MAX);
        let buffer_bytes = MEMORY_BYTES_APART.min(available / 2);
        let bytes_per_second = meter.read_bytes_per_second(buffer_bytes)?;
        Ok(Self {
            memory: Some(Reading { bytes_per_second, buffer_bytes }),
            bf16_ops: bf16_ops_per_second(measure, meter)?,
            launch_seconds: Some(launch_seconds(backend, meter)?),
            ..Self::default()
        })
    }

    /// How near `row` comes to what limits it.
    pub fn share(&self, row: &Row) -> Share {
        let reading = [(self.cache, "cache"), (self.weights, "weights")]
            .into_iter()
            .find_map(|(level, of)| Some((level.filter(|level| row.working_set <= level.buffer_bytes)?, of)))
            .or(self.memory.map(|memory| (memory, "memory")));
        let (peak, arithmetic) = match row.arithmetic {
            Arithmetic::F32 => (self.f32_ops, "f32"),
            Arithmetic::Bf16 => (self.bf16_ops, "bf16"),
            Arithmetic::Int8 => (self.int8_ops, "int8"),
        };
        [
            reading.map(|(level, of)| Share { share: row.bytes_per_second() / level.bytes_per_second, of }),
            peak.map(|peak| Share { share: row.ops_per_second() / peak, of: arithmetic }),
            self.launch_seconds.map(|seconds| Share { share: seconds / row.seconds, of: "launch" }),
        ]
        .into_iter()
        .flatten()
        .max_by(|a, b| a.share.total_cmp(&b.share))
        .unwrap_or(Share { share: 0.0, of: "nothing measured" })
    }
}

fn fastest(times: &[Duration]) -> f64 {
    times.iter().min().map_or(f64::INFINITY, Duration::as_secs_f64)
}

/// A large product of bf16 by the op that a forward calls; `None` where the device computes in another type.
#[allow(clippy::cast_precision_loss)] // sizes
fn bf16_ops_per_second(measure: &Measure<'_>, meter: &dyn DeviceMeter) -> Result<Option<f64>> {
    let backend = measure.backend;
    let x = measure.activation(PRODUCT_SIZE, PRODUCT_SIZE)?;
    if x.dtype() != DType::BF16 {
        return Ok(None);
    }
    let numbers = super::weights::made_up(DType::BF16);
    let desc = WeightDesc { name: "ceiling".into(), dtype: DType::BF16, rows: PRODUCT_SIZE, cols: PRODUCT_SIZE };
    let weight = backend.load_repeated(desc, &numbers)?;
    let mut out = backend.activation(PRODUCT_SIZE, PRODUCT_SIZE)?;
    let mut product = || -> Result<(), BackendError> {
        let part = LinearPart { weight: &weight, bias: None, out: &mut out };
        backend.fused_linear(LinearInput::Plain(&x), &mut [part])
    };
    let times = meter.time(Launching::Recorded, PASSES, &mut product)?;
    Ok(Some(2.0 * (PRODUCT_SIZE as f64).powi(3) / fastest(&times)))
}

/// The time of a kernel among many that each work on one element.
#[allow(clippy::cast_precision_loss)] // a count
fn launch_seconds(backend: &dyn Backend, meter: &dyn DeviceMeter) -> Result<f64> {
    let mut x = backend.temp(1, 1)?;
    let times =
        meter.time(Launching::Recorded, PASSES, &mut || (0..LAUNCHES).try_for_each(|_| backend.scale(&mut x, 1.0)))?;
    Ok(fastest(&times) / LAUNCHES as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(working_set: usize, bytes: f64, ops: f64, arithmetic: Arithmetic) -> Row {
        Row { op: "x".into(), shape: String::new(), seconds: 1.0, bytes, ops, arithmetic, working_set }
    }

    fn reading(bytes_per_second: f64, buffer_bytes: usize) -> Option<Reading> {
        Some(Reading { bytes_per_second, buffer_bytes })
    }

    #[test]
    fn the_nearest_limit_counts() {
        let ceilings = Ceilings {
            memory: reading(10.0, 1000),
            weights: reading(20.0, 100),
            cache: reading(40.0, 10),
            f32_ops: Some(100.0),
            ..Ceilings::default()
        };
        let share = |row: Row| (ceilings.share(&row).share, ceilings.share(&row).of);
        assert_eq!(share(row(10, 20.0, 10.0, Arithmetic::F32)), (0.5, "cache"));
        assert_eq!(share(row(11, 15.0, 10.0, Arithmetic::F32)), (0.75, "weights"));
        assert_eq!(share(row(500, 1.0, 60.0, Arithmetic::F32)), (0.6, "f32"));
        assert_eq!(share(row(500, 1.0, 60.0, Arithmetic::Int8)), (0.1, "memory"));
    }

    #[test]
    fn small_ops_are_limited_by_their_launch() {
        let ceilings = Ceilings {
            memory: reading(100.0, 1),
            bf16_ops: Some(100.0),
            launch_seconds: Some(0.25),
            ..Ceilings::default()
        };
        let share = |row: Row| (ceilings.share(&row).share, ceilings.share(&row).of);
        assert_eq!(share(row(5, 5.0, 10.0, Arithmetic::Bf16)), (0.25, "launch"));
        assert_eq!(share(row(5, 5.0, 90.0, Arithmetic::Bf16)), (0.9, "bf16"));
        assert_eq!(share(row(5, 50.0, 10.0, Arithmetic::F32)), (0.5, "memory"));
    }
}
