//! How long steps take, by how many tokens they compute: says when a step in flight is about to end. Knows no plan
//! and no clock.

use std::time::Duration;

/// Smoothed times, one for each power of two of tokens.
#[derive(Debug)]
pub(crate) struct StepTimes {
    /// Zero: none was measured.
    smoothed: [Duration; usize::BITS as usize + 1],
}

impl StepTimes {
    pub(crate) fn new() -> Self {
        Self { smoothed: [Duration::ZERO; usize::BITS as usize + 1] }
    }

    /// What a step of so many tokens is likely to take; `None` before one of about that size was measured.
    pub(crate) fn expected(&self, num_tokens: usize) -> Option<Duration> {
        Some(self.smoothed[size_class(num_tokens)]).filter(|time| !time.is_zero())
    }

    /// Takes a step into account: shorter ones quickly, since who expects too much comes too late.
    pub(crate) fn record(&mut self, num_tokens: usize, took: Duration) {
        let smoothed = &mut self.smoothed[size_class(num_tokens)];
        *smoothed = match *smoothed {
            Duration::ZERO => took,
            before if took < before => (before + took) / 2,
            before => (before * 7 + took) / 8,
        };
    }
}

fn size_class(num_tokens: usize) -> usize {
    (usize::BITS - num_tokens.leading_zeros()) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_kept_apart_and_shorter_steps_count_for_more() {
        let (mut times, ms) = (StepTimes::new(), Duration::from_millis);
        assert_eq!(times.expected(8), None);
        times.record(8, ms(16));
        times.record(usize::MAX, ms(1));
        assert_eq!(times.expected(15), Some(ms(16)));
        assert_eq!((times.expected(16), times.expected(7)), (None, None));
        times.record(9, ms(24));
        assert_eq!(times.expected(8), Some(ms(17)));
        times.record(9, ms(7));
        assert_eq!(times.expected(8), Some(ms(12)));
    }
}
