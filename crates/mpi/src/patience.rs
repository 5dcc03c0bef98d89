//! How a rank waits for messages: polls with a pause, then gives up time slices, then sleeps a little between
//! polls. Never blocks inside MPI, where no loss of a rank could end the wait.

use std::time::Duration;

/// Between two polls of a long wait.
const NAP: Duration = Duration::from_micros(30);
/// Between two polls of a very long one.
const LONG_NAP: Duration = Duration::from_micros(500);
/// Naps before the naps get long: about ten milliseconds.
const NAPS: u32 = 128;

/// How long to poll at which pace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    spins: u32,
    yields: u32,
}

impl Patience {
    /// For `num_ranks` ranks on a host of which each may use `num_cores` cores: where they share cores, the
    /// one that is waited for needs this one's.
    pub(crate) fn of(num_ranks: usize, num_cores: usize) -> Self {
        if num_ranks <= num_cores { Self { spins: 500, yields: 200 } } else { Self { spins: 0, yields: 8 } }
    }

    /// Waits before poll number `poll` of a wait.
    pub(crate) fn pause(self, poll: u32) {
        match poll {
            poll if poll < self.spins => std::hint::spin_loop(),
            poll if poll < self.spins + self.yields => std::thread::yield_now(),
            poll if poll < self.spins + self.yields + NAPS => std::thread::sleep(NAP),
            _ => std::thread::sleep(LONG_NAP),
        }
    }
}
