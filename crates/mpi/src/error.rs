//! Errors of ranks as processes: what keeps a world from coming together, and what ends it.

use crate::frame::FrameError;
use pagemill_engine::EngineError;
use std::io;

/// Why a world of processes cannot begin or go on.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the fields are what the variant names
pub enum ProcessError {
    /// This rank's own share of the work failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// MPI refused something.
    #[error("MPI: {detail}")]
    Mpi { detail: String },
    /// A socket or a thread could not be had.
    #[error("{what}: {source}")]
    System { what: &'static str, source: io::Error },
    /// The other ranks did not come in time.
    #[error("{what} within {seconds} s")]
    Late { what: String, seconds: u64 },
    /// Two ranks that do not belong together.
    #[error("rank {rank} on {host} {detail}")]
    Mismatch { rank: u32, host: String, detail: String },
    /// A rank said something that it may not say now.
    #[error("rank {rank} sent a frame out of turn: {got} instead of {expected}")]
    OutOfTurn { rank: usize, expected: &'static str, got: String },
    /// A rank is gone, or has said why it cannot go on.
    #[error("{reason}")]
    Lost { reason: String },
}

/// Why a connection is of no further use.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    /// Its process is gone, or closed it.
    #[error("its connection is closed")]
    Closed,
    /// Nothing came, not even a heartbeat.
    #[error("it has been silent for {0} s")]
    Silent(u64),
    /// Bytes that are no frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The system refused.
    #[error("its connection failed: {0}")]
    Io(io::Error),
}
