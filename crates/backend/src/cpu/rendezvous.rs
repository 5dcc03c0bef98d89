//! How ranks that are threads wait for one another: a bell, a meeting point of all ranks of a stage, and
//! the flag that ends every wait. Decides how long a thread spins before it sleeps; moves no data.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};

/// How long a thread polls before it sleeps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// Polls with a pause instruction.
    spins: u32,
    /// Polls after these, each giving up the rest of the time slice.
    yields: u32,
}

impl Patience {
    /// For `num_ranks` threads on `num_cores` cores: about 50 microseconds of polling where each has a
    /// core of its own; where they share cores, the one that is waited for needs this one's.
    pub(crate) fn of(num_ranks: usize, num_cores: usize) -> Self {
        if num_ranks <= num_cores { Self { spins: 1_500, yields: 50 } } else { Self { spins: 0, yields: 2 } }
    }
}

/// What one thread rings and others wait for.
#[derive(Default)]
pub(crate) struct Bell {
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    rung: Condvar,
}

impl Bell {
    /// Wakes whoever sleeps; what was changed before is seen by their conditions.
    pub(crate) fn ring(&self) {
        // Sleepers announce themselves first and look second; here it is the other way round. One of
        // the two sees the other.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.rung.notify_all();
        }
    }

    /// Waits until `ready`, which only what happens before a `ring` changes.
    pub(crate) fn wait_until(&self, patience: Patience, ready: impl Fn() -> bool) {
        for wait in 0..patience.spins + patience.yields {
            if ready() {
                return;
            }
            if wait < patience.spins {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        while !ready() {
            guard = self.rung.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The end of a world, and why. Set once.
#[derive(Default)]
pub(crate) struct Abort {
    is_set: AtomicBool,
    reason: OnceLock<String>,
}

impl Abort {
    /// Sets it; the first reason stays.
    pub(crate) fn set(&self, reason: &str) {
        self.reason.get_or_init(|| reason.to_owned());
        self.is_set.store(true, Ordering::Release);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.is_set.load(Ordering::Acquire)
    }

    /// Why; empty while it is not set.
    pub(crate) fn reason(&self) -> &str {
        self.reason.get().map_or("", String::as_str)
    }
}

/// Low half of the state: those who have arrived. High half: the generation.
const ARRIVED_MASK: u64 = 0xffff_ffff;

/// Where all `num_ranks` threads of a stage meet, again and again. What each did before is seen by all
/// afterwards.
pub(crate) struct MeetingPoint {
    num_ranks: u64,
    state: AtomicU64,
    bell: Bell,
}

/// A meeting did not come about: the world has ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct CalledOff;

impl MeetingPoint {
    pub(crate) fn new(num_ranks: u32) -> Self {
        Self { num_ranks: u64::from(num_ranks), state: AtomicU64::new(0), bell: Bell::default() }
    }

    /// Waits for all. Either the meeting comes about for every rank, or for none of them: who leaves
    /// early takes its arrival back, and then the others cannot be complete.
    pub(crate) fn meet(&self, patience: Patience, abort: &Abort) -> Result<(), CalledOff> {
        if abort.is_set() {
            return Err(CalledOff);
        }
        let Some(generation) = self.arrive() else { return Ok(()) };
        let is_over = || self.generation() != generation;
        self.bell.wait_until(patience, || is_over() || abort.is_set());
        if is_over() || !self.withdraw(generation) {
            // Complete, or about to be told so.
            self.bell.wait_until(patience, is_over);
            return Ok(());
        }
        Err(CalledOff)
    }

    /// Waits for all, whatever happens: for the second half of an exchange, when every rank is known to
    /// be on its way here with nothing left that could hold it up.
    pub(crate) fn meet_again(&self, patience: Patience) {
        if let Some(generation) = self.arrive() {
            self.bell.wait_until(patience, || self.generation() != generation);
        }
    }

    /// Wakes those who wait, so that they look at the abort flag.
    pub(crate) fn wake(&self) {
        self.bell.ring();
    }

    fn generation(&self) -> u64 {
        self.state.load(Ordering::Acquire) >> 32
    }

    /// Counts this rank in; the generation to wait for the end of, or `None` if it was the last.
    fn arrive(&self) -> Option<u64> {
        let before = self.state.fetch_add(1, Ordering::AcqRel);
        let generation = before >> 32;
        if (before & ARRIVED_MASK) + 1 < self.num_ranks {
            return Some(generation);
        }
        // Nobody else changes the state now: all have arrived, and none withdraws from a full meeting.
        self.state.store(generation.wrapping_add(1) << 32, Ordering::Release);
        self.bell.ring();
        None
    }

    /// Takes an arrival back; false if the meeting was complete before.
    fn withdraw(&self, generation: u64) -> bool {
        self.state
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |state| {
                let is_open = state >> 32 == generation && state & ARRIVED_MASK < self.num_ranks;
                is_open.then(|| state - 1)
            })
            .is_ok()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn everybody_sees_what_was_done_before() {
        for patience in [Patience::of(3, 8), Patience::of(3, 1)] {
            let (point, abort) = (MeetingPoint::new(3), Abort::default());
            let counts: Vec<AtomicUsize> = (0..3).map(|_| AtomicUsize::new(0)).collect();
            std::thread::scope(|scope| {
                for own in 0..3 {
                    let (point, abort, counts) = (&point, &abort, &counts);
                    scope.spawn(move || {
                        for round in 1..=2_000 {
                            counts[own].store(round, Ordering::Relaxed);
                            point.meet(patience, abort).unwrap();
                            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == round));
                            point.meet_again(patience);
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn a_meeting_is_called_off_for_all_or_none() {
        for round in 0..300 {
            let (point, abort) = (MeetingPoint::new(3), Abort::default());
            let patience = Patience::of(3, 8 * (round % 2));
            let outcomes: Vec<_> = std::thread::scope(|scope| {
                let ranks: Vec<_> = (0..3).map(|_| scope.spawn(|| point.meet(patience, &abort))).collect();
                abort.set("the test says so");
                point.wake();
                ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
            });
            assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]), "{outcomes:?}");
        }
        assert_eq!(Abort::default().reason(), "");
    }
}
