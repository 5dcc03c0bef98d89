//! What the host does for a step beside the device's work, part by part, and how much of it the device waits for.

use std::fmt;

/// Sums since start, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostTime {
    /// Steps that came home.
    pub steps: u64,
    /// Of these, steps that were planned while the one before ran.
    pub steps_ahead: u64,
    /// Of these, steps that the device was given before the draws of the one before were known to the host.
    pub steps_queued: u64,
    /// Choosing tokens and blocks.
    pub schedule_ns: u64,
    /// Packing the batch and bringing it to the device; on the first rank.
    pub layout_ns: u64,
    /// Taking tokens in: blocks registered, sequences ended.
    pub apply_ns: u64,
    /// Telling the requests' sinks, or handing what they are told to their thread.
    pub deliver_ns: u64,
    /// From a step's draws in the host's hands to the launch of the next one, where there was a next one to run:
    /// the device had nothing to do. On the first rank of a single stage; nothing is counted on a pipeline.
    pub exposed_ns: u64,
}

/// The part that a rank measures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankHostTime {
    /// As [`HostTime::layout_ns`].
    pub layout_ns: u64,
    /// As [`HostTime::exposed_ns`].
    pub exposed_ns: u64,
    /// As [`HostTime::steps_queued`].
    pub steps_queued: u64,
}

impl HostTime {
    /// What came after `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            steps: self.steps - earlier.steps,
            steps_ahead: self.steps_ahead - earlier.steps_ahead,
            steps_queued: self.steps_queued - earlier.steps_queued,
            schedule_ns: self.schedule_ns - earlier.schedule_ns,
            layout_ns: self.layout_ns - earlier.layout_ns,
            apply_ns: self.apply_ns - earlier.apply_ns,
            deliver_ns: self.deliver_ns - earlier.deliver_ns,
            exposed_ns: self.exposed_ns - earlier.exposed_ns,
        }
    }

    /// Both sums together.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        Self {
            steps: self.steps + other.steps,
            steps_ahead: self.steps_ahead + other.steps_ahead,
            steps_queued: self.steps_queued + other.steps_queued,
            schedule_ns: self.schedule_ns + other.schedule_ns,
            layout_ns: self.layout_ns + other.layout_ns,
            apply_ns: self.apply_ns + other.apply_ns,
            deliver_ns: self.deliver_ns + other.deliver_ns,
            exposed_ns: self.exposed_ns + other.exposed_ns,
        }
    }

    /// All parts together.
    #[must_use]
    pub fn total_ns(&self) -> u64 {
        self.schedule_ns + self.layout_ns + self.apply_ns + self.deliver_ns
    }

    /// A sum as microseconds a step.
    #[must_use]
    #[allow(clippy::cast_precision_loss)] // times of a process
    pub fn us_a_step(&self, sum_ns: u64) -> f64 {
        sum_ns as f64 / 1e3 / self.steps.max(1) as f64
    }
}

impl fmt::Display for HostTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = |sum_ns| self.us_a_step(sum_ns);
        write!(
            f,
            "host {:.0} us a step (schedule {:.0}, layout {:.0}, apply {:.0}, deliver {:.0}), not hidden {:.0}; \
             {} of {} steps planned ahead, {} queued behind the one before",
            us(self.total_ns()),
            us(self.schedule_ns),
            us(self.layout_ns),
            us(self.apply_ns),
            us(self.deliver_ns),
            us(self.exposed_ns),
            self.steps_ahead,
            self.steps,
            self.steps_queued
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_become_microseconds_a_step() {
        let earlier = HostTime { steps: 2, schedule_ns: 9, exposed_ns: 1_000_000, ..HostTime::default() };
        let later = HostTime {
            steps: 6,
            steps_ahead: 3,
            steps_queued: 2,
            schedule_ns: 36_009,
            layout_ns: 32_000,
            apply_ns: 24_000,
            deliver_ns: 32_000,
            exposed_ns: 1_048_000,
        };
        let expected = "host 31 us a step (schedule 9, layout 8, apply 6, deliver 8), not hidden 12; 3 of 4 steps planned ahead, \
             2 queued behind the one before";
        assert_eq!(later.since(&earlier).to_string(), expected);
        assert_eq!(later.since(&earlier).plus(&earlier), later);
        assert_eq!(HostTime::default().us_a_step(0).to_bits(), 0.0f64.to_bits());
    }
}
