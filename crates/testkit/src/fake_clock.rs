//! Time that passes only when a test says so.

use pagemill_scheduler::Time;

/// Microseconds since the start of a history.
#[derive(Clone, Copy, Debug, Default)]
pub struct FakeClock {
    now_us: u64,
}

impl FakeClock {
    /// The time now.
    #[must_use]
    pub fn now(&self) -> Time {
        Time(self.now_us)
    }

    /// Lets time pass.
    pub fn advance_us(&mut self, us: u64) {
        self.now_us += us;
    }

    /// Lets time pass until `time`; a time that has passed changes nothing.
    pub fn advance_to(&mut self, time: Time) {
        self.now_us = self.now_us.max(time.0);
    }
}
