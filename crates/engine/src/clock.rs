//! The engine's only wall clock: monotonic, counted from the start of the engine. Everything that
//! decides takes its time as an argument, so that the simulator can bring its own.

use pagemill_scheduler::Time;
use std::time::Instant;

/// Microseconds since it was made.
#[derive(Clone, Copy, Debug)]
pub struct MonotonicClock {
    start: Instant,
}

impl MonotonicClock {
    /// A clock at zero.
    #[must_use]
    pub fn start() -> Self {
        Self { start: Instant::now() }
    }

    /// Microseconds since the start.
    #[must_use]
    pub fn now_us(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// Nanoseconds since the start.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// The same as the scheduler's point in time.
    #[must_use]
    pub fn now(&self) -> Time {
        Time(self.now_us())
    }
}
