//! The machine's own limits, and which of them applies to an op.

use super::measure::{Arithmetic, Row};
use pagemill_backend::cpu::ceilings;
use pagemill_backend::{Backend, CpuBackend};
use std::time::Duration;

/// Bytes a thread that fit its own caches.
const CACHED_BYTES_PER_THREAD: usize = 256 << 10;
/// Far more than the caches of most machines; cut where memory is short.
const MEMORY_BYTES: usize = 2 << 30;

/// Times that each limit is measured.
const ATTEMPTS: usize = 3;

/// What this machine did at most; `None` where no loop was written for its instruction set.
pub struct Ceilings {
    /// Bytes a second from memory, all threads, and the buffer's size.
    pub memory: (f64, usize),
    /// The same over a buffer as large as the weights: large caches hold some models whole.
    pub weights: (f64, usize),
    /// The same over buffers that fit the threads' own caches.
    pub cache: (f64, usize),
    /// f32 operations a second, all threads; a fused multiply-add is two.
    pub f32_ops: Option<f64>,
    /// int8 operations a second, all threads; a multiplication and an addition are two.
    pub int8_ops: Option<f64>,
}

/// The nearer of an op's two limits.
pub struct Share {
    /// Part of the limit that was reached.
    pub share: f64,
    /// Which: `memory`, `weights`, `cache`, `f32` or `int8`.
    pub of: &'static str,
}

impl Ceilings {
    /// Measures, each [`ATTEMPTS`] times for `duration`: the best counts, as others may use the machine too.
    pub fn measure(backend: &CpuBackend, weight_bytes: usize, duration: Duration) -> Self {
        let (isa, threads) = (backend.isa(), backend.info().num_units);
        let available = usize::try_from(backend.info().memory_available_bytes).unwrap_or(usize::MAX);
        let memory_bytes = if available == 0 { MEMORY_BYTES } else { MEMORY_BYTES.min(available / 2) };
        let best = |measure: &dyn Fn() -> f64| (0..ATTEMPTS).map(|_| measure()).fold(0.0, f64::max);
        let read = |bytes: usize| (best(&|| ceilings::read_bytes_per_second(isa, threads, bytes, duration)), bytes);
        let peak = |measure: &dyn Fn() -> Option<f64>| (0..ATTEMPTS).filter_map(|_| measure()).reduce(f64::max);
        Self {
            memory: read(memory_bytes),
            weights: read(weight_bytes.clamp(1, memory_bytes)),
            cache: read(CACHED_BYTES_PER_THREAD * threads),
            f32_ops: peak(&|| ceilings::f32_ops_per_second(isa, threads, duration)),
            int8_ops: peak(&|| ceilings::int8_ops_per_second(isa, threads, duration)),
        }
    }

    /// How near `row` comes to what limits it.
    pub fn share(&self, row: &Row) -> Share {
        let (bytes_per_second, of) = match row.working_set {
            bytes if bytes <= self.cache.1 => (self.cache.0, "cache"),
            bytes if bytes <= self.weights.1 => (self.weights.0, "weights"),
            _ => (self.memory.0, "memory"),
        };
        let read = Share { share: row.bytes_per_second() / bytes_per_second, of };
        let (peak, of) = match row.arithmetic {
            Arithmetic::F32 => (self.f32_ops, "f32"),
            Arithmetic::Int8 => (self.int8_ops, "int8"),
        };
        let computed = peak.map(|peak| Share { share: row.ops_per_second() / peak, of });
        computed.filter(|computed| computed.share > read.share).unwrap_or(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearer_limit_counts() {
        let ceilings = Ceilings {
            memory: (10.0, 1000),
            weights: (20.0, 100),
            cache: (40.0, 10),
            f32_ops: Some(100.0),
            int8_ops: None,
        };
        let row = |working_set, bytes, ops, arithmetic| Row {
            op: "x".into(),
            shape: String::new(),
            seconds: 1.0,
            bytes,
            ops,
            arithmetic,
            working_set,
        };
        let share = |row: Row| (ceilings.share(&row).share, ceilings.share(&row).of);
        assert_eq!(share(row(10, 20.0, 10.0, Arithmetic::F32)), (0.5, "cache"));
        assert_eq!(share(row(11, 15.0, 10.0, Arithmetic::F32)), (0.75, "weights"));
        assert_eq!(share(row(500, 1.0, 60.0, Arithmetic::F32)), (0.6, "f32"));
        assert_eq!(share(row(500, 1.0, 60.0, Arithmetic::Int8)), (0.1, "memory"));
    }
}
