//! How much bubble filling the others bear. A filling step delays them where it stays in a stage longer than
//! they stay away from it, and where the ranks share memory or cores; nobody knows either before it is
//! measured. So their steps are timed with and without fillers beside them, in turn, and fillers get no more
//! tokens than leave the others within [`SLOWDOWN_PERCENT`] of their time alone; none for a while where a
//! single token is too much. Pure arithmetic over times.

/// By how much the others' median step may be slower beside fillers.
const SLOWDOWN_PERCENT: u64 = 5;
/// Tokens of the first filling steps: a few rows cost what one does.
pub(super) const FIRST_TOKENS: usize = 4;
/// Steps that are compared, at least.
const WINDOW: usize = 8;
/// Steps beside fillers between two looks at the time alone, at most.
const LONGEST_WINDOW: usize = 64;
/// Steps that are left alone once one token was too much: eight slow ones in so many stay out of their P99.
const FIRST_PAUSE: u32 = 1024;
const LONGEST_PAUSE: u32 = 16 * 1024;

/// One step of the others that is over: decodes only.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimedStep {
    pub(super) us: u64,
    pub(super) num_tokens: usize,
    /// A filling step was in flight at the same time.
    pub(super) is_beside_filler: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Fillers may run; the others are timed beside them.
    Filling,
    /// Fillers wait; the others are timed alone.
    Comparing,
    /// Fillers wait for so many steps of the others.
    Paused(u32),
}

/// Decides how many tokens a filling step may have.
#[derive(Debug)]
pub(super) struct FillerGovernor {
    phase: Phase,
    /// Tokens of a filling step at most, while there are any.
    tokens: usize,
    /// Samples beside fillers wanted before the next comparison.
    window: usize,
    next_pause: u32,
    /// Tokens of the steps compared, as a power of two: others cost something else.
    size: usize,
    beside: Vec<u64>,
    alone: Vec<u64>,
}

impl FillerGovernor {
    /// Begins with a few tokens.
    pub(super) fn new() -> Self {
        Self {
            phase: Phase::Filling,
            tokens: FIRST_TOKENS,
            window: WINDOW,
            next_pause: FIRST_PAUSE,
            size: 0,
            beside: Vec::with_capacity(LONGEST_WINDOW),
            alone: Vec::with_capacity(WINDOW),
        }
    }

    /// Tokens that the next filling step may have; 0: none is to run now.
    pub(super) fn num_tokens(&self) -> usize {
        if self.phase == Phase::Filling { self.tokens } else { 0 }
    }

    /// Takes a step of the others into account.
    pub(super) fn record(&mut self, step: TimedStep) {
        if let Phase::Paused(left) = self.phase {
            self.phase = if left > 1 { Phase::Paused(left - 1) } else { Phase::Filling };
            return;
        }
        let size = step.num_tokens.next_power_of_two();
        if size != self.size {
            self.size = size;
            self.restart();
        }
        // A filling step may outlive the phase that let it run; and none may be there to fill with.
        match (self.phase, step.is_beside_filler) {
            (Phase::Filling, true) => {
                self.beside.push(step.us);
                if self.beside.len() >= self.window {
                    self.phase = Phase::Comparing;
                }
            }
            (Phase::Comparing, false) => {
                self.alone.push(step.us);
                if self.alone.len() >= WINDOW {
                    self.judge();
                    self.restart();
                }
            }
            _ => {}
        }
    }

    fn restart(&mut self) {
        self.beside.clear();
        self.alone.clear();
        if self.phase == Phase::Comparing {
            self.phase = Phase::Filling;
        }
    }

    fn judge(&mut self) {
        let (beside, alone) = (median(&mut self.beside), median(&mut self.alone));
        self.phase = Phase::Filling;
        if beside.saturating_mul(100) <= alone.saturating_mul(100 + SLOWDOWN_PERCENT) {
            // More is tried after a long look only: what was too much once may be so again.
            self.tokens = if self.window == LONGEST_WINDOW { self.tokens.saturating_mul(2) } else { self.tokens };
            self.window = (self.window * 2).min(LONGEST_WINDOW);
            self.next_pause = FIRST_PAUSE;
        } else if self.tokens > 1 {
            self.tokens = (self.tokens / 4).max(1);
            self.window = WINDOW;
        } else {
            self.phase = Phase::Paused(self.next_pause);
            self.next_pause = (self.next_pause * 2).min(LONGEST_PAUSE);
            self.window = WINDOW;
        }
    }
}

fn median(samples: &mut [u64]) -> u64 {
    let middle = samples.len() / 2;
    if samples.is_empty() { 0 } else { *samples.select_nth_unstable(middle).1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps of the others over a pipeline where so many filler tokens cost so much; the share of them that
    /// had fillers beside them, and the most tokens that a filling step had at the end.
    fn drive(governor: &mut FillerGovernor, steps: u32, us_beside: impl Fn(usize) -> u64) -> (f64, usize) {
        let (mut num_beside, mut most) = (0u32, 0);
        for step in 0..steps {
            let tokens = governor.num_tokens();
            num_beside += u32::from(tokens > 0);
            most = tokens.max(if step + 1000 > steps { most } else { 0 });
            let us = if tokens > 0 { us_beside(tokens) } else { 1000 } + u64::from(step % 7);
            governor.record(TimedStep { us, num_tokens: 1, is_beside_filler: tokens > 0 });
        }
        (f64::from(num_beside) / f64::from(steps), most)
    }

    #[test]
    fn what_costs_nothing_grows() {
        let (share, tokens) = drive(&mut FillerGovernor::new(), 4_000, |_| 1000);
        assert!(share > 0.85 && tokens >= 1024, "{share} {tokens}");
    }

    #[test]
    fn what_costs_by_the_token_stays_within_the_limit() {
        // 40 µs are 4 % of a step: 20 tokens.
        let (share, tokens) = drive(&mut FillerGovernor::new(), 8_000, |tokens| 1000 + 2 * tokens as u64);
        assert!(share > 0.8 && (4..=32).contains(&tokens), "{share} {tokens}");
    }

    #[test]
    fn what_is_always_too_much_stays_out_of_the_p99() {
        let mut governor = FillerGovernor::new();
        drive(&mut governor, 100, |_| 1100);
        let (share, _) = drive(&mut governor, 50_000, |_| 1100);
        assert!(share > 0.0 && share < 0.005, "{share}");
        // Once it costs nothing any more, it comes back.
        drive(&mut governor, 20_000, |_| 1000);
        let (share, _) = drive(&mut governor, 4_000, |_| 1000);
        assert!(share > 0.8, "{share}");
    }

    #[test]
    fn steps_of_different_sizes_are_not_compared() {
        let mut governor = FillerGovernor::new();
        for step in 0..4_000u64 {
            // Bursts of long steps, always beside fillers, say nothing of what fillers cost.
            let is_long = step % 11 < 4;
            let beside = governor.num_tokens() > 0;
            let (us, num_tokens) = if is_long { (9000, 64) } else { (1000, 1) };
            governor.record(TimedStep { us, num_tokens, is_beside_filler: beside });
            assert!(governor.tokens >= FIRST_TOKENS && !matches!(governor.phase, Phase::Paused(_)), "step {step}");
        }
    }
}
