//! Testkit: a simulator of whole serving histories and the fakes that it is made of. A dev-dependency
//! only; knows the engine and the scheduler, no model and no text. The tiny trained models that other
//! rooms test with lie beside it, in `zoo/`.
//!
//! Read in this order: [`fake_model`] (what the right tokens are) → [`fake_executor`] (how they are
//! computed through block tables) → [`workload`] (what clients ask for) → [`simulator`].

#![forbid(unsafe_code)]

pub mod draw;
pub mod fake_clock;
pub mod fake_executor;
pub mod fake_model;
pub mod simulator;
pub mod workload;

pub use draw::Draw;
pub use fake_clock::FakeClock;
pub use fake_executor::{ExecutorLimits, FakeExecutor, StepFault};
pub use fake_model::{Expected, ExpectedChoice, FakeModel};
pub use simulator::{Coverage, Failure, Fault, HistoryReport, Scrutiny, SimulatorOptions, simulate, simulate_with};
pub use workload::{Fate, PlannedRequest};
