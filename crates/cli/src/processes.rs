//! What this process is when a launcher such as mpirun has started several: rank 0, which serves, or one of
//! the others. The rest of the program sees no MPI: the feature `mpi` chooses the file that does.

use crate::config::Config;
use anyhow::{Result, bail};
use pagemill_mpi::World;

#[cfg(feature = "mpi")]
#[path = "processes/linked.rs"]
mod parts;
#[cfg(not(feature = "mpi"))]
#[path = "processes/unlinked.rs"]
mod parts;

pub use parts::{Following, Leading};

/// This process's part.
#[cfg_attr(not(feature = "mpi"), allow(dead_code))] // one process is always alone
pub enum Part {
    /// No launcher: all ranks are threads of this process.
    Alone,
    /// Rank 0 of several processes.
    Leading(Leading),
    /// Another rank.
    Following(Following),
}

/// Processes that belong together with this one, itself included.
///
/// # Errors
/// An environment that no launcher makes.
pub fn count() -> Result<usize> {
    Ok(pagemill_mpi::num_processes(&variable)?)
}

/// For commands that cannot join other processes: `what` would run once in each, as if it were alone.
///
/// # Errors
/// It is not.
pub fn ensure_alone(what: &str) -> Result<()> {
    match count()? {
        1 => Ok(()),
        several => bail!(
            "pagemill {what} keeps its ranks in one process, but a launcher started {several}: start it without one \
             (serve, run and bench latency can be a rank in each process)"
        ),
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Finds out from the environment, and joins the other processes if there are any. Rank 0 lets them in on
/// `rank_port`; 0: any free port.
///
/// # Errors
/// An environment that does not fit the configuration; processes that do not find each other.
pub fn join(config: &Config, rank_port: u16) -> Result<Part> {
    let world = World::from_environment(&variable, config.engine.parallel)?;
    let Some(world) = world else { return Ok(Part::Alone) };
    parts::join(world, config, rank_port)
}
