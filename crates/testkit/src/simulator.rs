//! The simulator: one seed draws a whole history (limits, pool, requests, clients, faults, time), the
//! real engine serves it with the fake executor, and everything that is heard is compared with the
//! oracle. Decides what a fault is; the same seed gives the same history.

mod coverage;
mod history;
mod listener;
mod setup;

pub use coverage::Coverage;
use history::History;
use pagemill_scheduler::PagedKvCache;
use setup::Setup;

/// How closely a history is watched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scrutiny {
    /// Everything: plans and `check_integrity` after every step too.
    #[default]
    Everything,
    /// What clients hear, and nothing inside: shows that the token streams alone would tell.
    HeardOnly,
}

/// Beside the seed.
#[derive(Clone, Copy, Debug, Default)]
pub struct SimulatorOptions {
    /// How closely it is watched.
    pub scrutiny: Scrutiny,
    /// Done to the cache before the engine gets it: where a fault is planted.
    pub prepare_cache: Option<fn(&mut PagedKvCache)>,
}

/// A history without a fault.
#[derive(Clone, Copy, Debug, Default)]
pub struct HistoryReport {
    /// What happened in it.
    pub coverage: Coverage,
    /// The largest share that a request took of its step bound, in thousandths.
    pub bound_used_permille: u64,
}

/// A history with a fault.
#[derive(Clone, Debug, thiserror::Error)]
#[error("seed {seed}, after {steps} steps: {fault}")]
pub struct Failure {
    /// Replays it.
    pub seed: u64,
    /// Steps that ran before.
    pub steps: u64,
    /// What was wrong.
    pub fault: Fault,
}

/// What can be wrong.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs)] // the fields are what the variant names
pub enum Fault {
    /// A token was lost, duplicated, foreign or drawn from a wrong block.
    #[error("request {request} choice {choice}: token {index} is {got}; the oracle says {expected:?}")]
    WrongToken { request: u64, choice: u32, index: usize, got: u32, expected: Option<u32> },
    /// Anything else that a client heard and should not have, or should have and did not.
    #[error("request {request}: {what}")]
    WrongAnswer { request: u64, what: String },
    /// A request took longer than the work before it allows.
    #[error("request {request} has waited {steps} steps; its bound is {bound}")]
    Unbounded { request: u64, steps: u64, bound: u64 },
    /// Work is left, nothing runs and nothing will.
    #[error("nothing runs although there is work")]
    Stuck,
    /// A request was refused without cause, or taken although it could not run.
    #[error("wrong admission: {0}")]
    Admission(String),
    /// The executor was given a plan that contradicts itself or the limits.
    #[error("plan: {0}")]
    Plan(String),
    /// The KV cache's own proof failed.
    #[error("{0}")]
    Integrity(String),
    /// Something stayed behind when all was over.
    #[error("leak: {0}")]
    Leak(String),
    /// The engine stopped by itself.
    #[error("the engine stopped: {0}")]
    Engine(String),
}

/// Runs the history of a seed and checks everything.
///
/// # Errors
/// The first fault.
pub fn simulate(seed: u64) -> Result<HistoryReport, Failure> {
    simulate_with(seed, SimulatorOptions::default())
}

/// As [`simulate`], with options.
///
/// # Errors
/// The first fault.
pub fn simulate_with(seed: u64, options: SimulatorOptions) -> Result<HistoryReport, Failure> {
    let mut history = History::new(Setup::draw(seed), options);
    match history.run() {
        Ok(()) => Ok(history.report()),
        Err(fault) => Err(Failure { seed, steps: history.steps(), fault }),
    }
}
