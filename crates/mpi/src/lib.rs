//! Ranks as processes, over several hosts: which process is which rank, what they tell each other, and how
//! the loss of one ends all.
//!
//! Two ways between processes, and a reason for two (`docs/decisions/0011-ranks-as-processes.md`): plans,
//! outputs and heartbeats are [`frame`]s over TCP, where a lost process shows at once; tensors travel by MPI
//! (`collective`, under the feature `link`). Rank 0 is the [`leader`]: it owns the scheduler; all others are
//! [`follower`]s.
//!
//! This room never sees text or HTTP, and decides nothing about what runs.

#![deny(unsafe_code)]

mod addresses;
#[cfg(feature = "link")]
pub mod collective;
pub mod environment;
pub mod error;
pub mod follower;
pub mod frame;
pub mod leader;
mod link;
#[cfg(feature = "link")]
mod outbox;
#[cfg(feature = "link")]
mod patience;
pub mod rendezvous;
#[cfg(feature = "link")]
pub mod session;
#[cfg(feature = "link")]
mod transfer;

pub use environment::{EnvironmentError, Launcher, World, num_processes};
pub use error::ProcessError;
pub use follower::Follower;
pub use frame::Gpu;
pub use leader::Leader;
pub use rendezvous::{Invitation, RankIdentity, Reception};
#[cfg(feature = "link")]
pub use {collective::MpiCollective, session::Session};
