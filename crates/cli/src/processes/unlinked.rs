//! Without the feature `mpi` there is only one process; a launcher that started several is told so.

use super::Part;
use crate::config::Config;
use anyhow::{Result, bail};
use pagemill_engine::BuiltEngine;
use pagemill_formats::Checkpoint;
use pagemill_model::LoadProgress;
use pagemill_mpi::World;

/// Rank 0 of several processes: there is none.
pub enum Leading {}

/// Another rank: there is none.
pub enum Following {}

pub(super) fn join(world: World, _config: &Config, _rank_port: u16) -> Result<Part> {
    bail!(
        "one of {} processes that belong together, but this pagemill was built without MPI: build it with --features mpi",
        world.size
    );
}

impl Leading {
    /// Never called.
    pub fn build(
        &self,
        _checkpoint: &Checkpoint,
        _config: &Config,
        _progress: &dyn Fn(LoadProgress),
    ) -> Result<(BuiltEngine, String)> {
        match *self {}
    }

    /// Never called.
    pub fn stop(&self) {
        match *self {}
    }

    /// Never called.
    pub fn end(&self) -> Result<()> {
        match *self {}
    }
}

impl Following {
    /// Never called.
    pub fn run(self, _model: &str, _config: &Config) -> Result<()> {
        match self {}
    }
}
