//! Ten thousand histories without a fault, and the proof that a fault would be seen.
//!
//! `PAGEMILL_SIM_SEED=N` starts from another seed: a failing seed, given so, is replayed first.
#![allow(clippy::unwrap_used)]

use pagemill_scheduler::PagedKvCache;
use pagemill_testkit::{Coverage, Failure, Fault, HistoryReport, Scrutiny, SimulatorOptions, simulate, simulate_with};
use std::panic::catch_unwind;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

const NUM_HISTORIES: u64 = 10_000;

fn base_seed() -> u64 {
    match std::env::var("PAGEMILL_SIM_SEED") {
        Ok(seed) => seed.parse().expect("PAGEMILL_SIM_SEED is a number"),
        Err(_) => 20_260_101,
    }
}

/// A history whose panic, if it comes to one, names its seed.
fn replay(seed: u64) -> Result<HistoryReport, String> {
    match catch_unwind(|| simulate(seed)) {
        Ok(outcome) => outcome.map_err(|failure| failure.to_string()),
        Err(_) => Err(format!("seed {seed}: the scheduler or the engine panicked")),
    }
}

#[test]
fn ten_thousand_histories_without_a_fault() {
    let base = base_seed();
    let next = AtomicU64::new(0);
    let totals = Mutex::new((Coverage::default(), 0));
    let failures = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                let (mut coverage, mut bound_used) = (Coverage::default(), 0);
                while failures.lock().unwrap().len() < 5 {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    if at >= NUM_HISTORIES {
                        break;
                    }
                    match replay(base.wrapping_add(at)) {
                        Ok(report) => {
                            coverage.add(&report.coverage);
                            bound_used = bound_used.max(report.bound_used_permille);
                        }
                        Err(failure) => failures.lock().unwrap().push(failure),
                    }
                }
                let mut totals = totals.lock().unwrap();
                totals.0.add(&coverage);
                totals.1 = totals.1.max(bound_used);
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "replay with PAGEMILL_SIM_SEED=<seed>:\n{}", failures.join("\n"));
    let (coverage, bound_used) = totals.into_inner().unwrap();
    for (what, count) in coverage.counts() {
        println!("{count:>10} {what}");
        assert!(count > 0, "no history has {what}");
    }
    println!("{bound_used:>10} thousandths of its step bound: the most that a request took");
    assert_eq!(coverage.histories, NUM_HISTORIES);
}

#[test]
fn a_seed_replays_its_history() {
    for seed in 0..20 {
        let (first, second) = (simulate(seed).unwrap(), simulate(seed).unwrap());
        assert_eq!(first.coverage, second.coverage, "seed {seed}");
    }
}

/// The first history of `NUM_PLANTED` in which the planted fault shows as `is_sought`.
fn first_planted(scrutiny: Scrutiny, is_sought: impl Fn(&Fault) -> bool) -> Option<Failure> {
    const NUM_PLANTED: u64 = 200;
    let options = SimulatorOptions { scrutiny, prepare_cache: Some(PagedKvCache::plant_early_block_reuse) };
    (0..NUM_PLANTED).find_map(|seed| simulate_with(seed, options).err().filter(|failure| is_sought(&failure.fault)))
}

#[test]
fn early_block_reuse_changes_what_clients_hear() {
    let failure = first_planted(Scrutiny::HeardOnly, |fault| matches!(fault, Fault::WrongToken { .. }));
    let failure = failure.expect("no history shows the planted fault in its tokens");
    println!("{failure}");
    assert!(simulate(failure.seed).is_ok(), "without the fault the history is clean");
}

#[test]
fn early_block_reuse_is_seen_by_the_integrity_check() {
    let failure = first_planted(Scrutiny::Everything, |fault| matches!(fault, Fault::Integrity(_)));
    let failure = failure.expect("no history shows the planted fault to the integrity check");
    println!("{failure}");
    assert!(simulate(failure.seed).is_ok(), "without the fault the history is clean");
}
