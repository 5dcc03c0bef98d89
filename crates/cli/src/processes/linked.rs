//! Ranks as processes over MPI: rank 0's part and the others', from joining the world to the last word of the
//! process. Decides how a process ends: in order, all together, or at once when a rank is lost.

#[cfg_attr(feature = "cuda", path = "cuda.rs")]
#[cfg_attr(not(feature = "cuda"), path = "without_cuda.rs")]
mod gpu;

use super::Part;
use crate::config::Config;
use crate::devices::{self, ChosenGpu, Device};
use crate::loading;
use anyhow::{Context, Result, bail};
use gpu::RankGpu;
use pagemill_backend::{Backend, Collective, CpuBackend, CpuConfig};
use pagemill_engine::{BuiltEngine, EngineError, ParallelMode, RankContext};
use pagemill_formats::Checkpoint;
use pagemill_model::LoadProgress;
use pagemill_mpi::leader::{Stop, Watch};
use pagemill_mpi::{
    Follower, Gpu, Invitation, Leader, MpiCollective, ProcessError, RankIdentity, Reception, Session, World,
};
use sha2::{Digest, Sha256};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// After a loss, a process that has not ended by itself for so long ends at once.
const LAST_GRACE: Duration = Duration::from_secs(3);
const POLL: Duration = Duration::from_millis(50);
/// Bytes of each tensor's first row that the fingerprint takes.
const SAMPLE_BYTES: usize = 256;

/// Rank 0 of several processes.
pub struct Leading {
    rank: Rank,
    reception: Mutex<Option<Reception>>,
    stop: Mutex<Option<Stop>>,
    watch: Mutex<Option<Watch>>,
}

/// Another rank.
pub struct Following {
    rank: Rank,
    invitation: Invitation,
}

/// What every process has.
struct Rank {
    /// Taken when MPI ends in order.
    session: Mutex<Option<Session>>,
    way: Way,
    world: World,
    mode: ParallelMode,
    /// Processes that share this one's cores.
    sharing: usize,
}

/// What a rank computes on, and how it reaches the others.
enum Way {
    /// Tensors go by MPI.
    Cpu(Arc<MpiCollective>),
    /// Tensors go by NCCL, which connects when all ranks have come in. Every wait ends when `ended` says why.
    Gpu { gpu: ChosenGpu, ended: Arc<OnceLock<String>> },
}

/// A device that is open.
enum Opened {
    /// Connected by MPI from the start.
    Cpu(RankContext),
    /// Not connected yet. Its waits will end when `ended` says why.
    Gpu { gpu: RankGpu, ended: Arc<OnceLock<String>> },
}

pub(super) fn join(world: World, config: &Config, rank_port: u16) -> Result<Part> {
    let session = Session::start(world)?;
    let (world, mode) = (session.world(), config.engine.parallel);
    let way = match &config.device {
        Device::Cpu => Way::Cpu(Arc::new(session.collective(mode)?)),
        Device::Cuda(ordinals) => {
            let gpu = devices::gpu_of_process(ordinals, world.local_rank, world.local_size)?;
            Way::Gpu { gpu, ended: Arc::default() }
        }
    };
    let sharing = session.sharing();
    let rank = |session| Rank { session: Mutex::new(Some(session)), way, world, mode, sharing };
    if world.rank == 0 {
        let reception = Reception::open(rank_port)?;
        session.invite(reception.invitation())?;
        let (rank, stop, watch) = (rank(session), Mutex::default(), Mutex::default());
        return Ok(Part::Leading(Leading { rank, reception: Mutex::new(Some(reception)), stop, watch }));
    }
    let invitation = session.invitation()?;
    Ok(Part::Following(Following { rank: rank(session), invitation }))
}

impl Rank {
    /// Its device, who it is, and what the device says about itself.
    fn open(&self, checkpoint: &Checkpoint, config: &Config) -> Result<(Opened, RankIdentity, String)> {
        let (opened, gpu, description) = match &self.way {
            Way::Cpu(collective) => {
                let backend = CpuBackend::new(self.device(config.cpu)).context("starting the CPU device")?;
                let description = backend.info().description;
                let collective: Arc<dyn Collective> = Arc::<MpiCollective>::clone(collective);
                (Opened::Cpu(RankContext { backend: Arc::new(backend), collective }), None, description)
            }
            Way::Gpu { gpu: ChosenGpu { ordinal, is_shared }, ended } => {
                let gpu = RankGpu::open(*ordinal, config)?;
                let (identity, description) = (Gpu { uuid: gpu.uuid()?, is_shared: *is_shared }, gpu.description());
                (Opened::Gpu { gpu, ended: Arc::clone(ended) }, Some(identity), description)
            }
        };
        let fingerprint = fingerprint(checkpoint, config)?;
        let identity = RankIdentity { rank: self.world.rank, world_size: self.world.size, fingerprint, gpu };
        Ok((opened, identity, description))
    }

    /// Ends every wait of this rank for others, from now on.
    fn abort(&self) -> Box<dyn Fn(&str) + Send + Sync> {
        match &self.way {
            Way::Cpu(collective) => {
                let collective = Arc::clone(collective);
                Box::new(move |reason| collective.abort(reason))
            }
            Way::Gpu { ended, .. } => {
                let ended = Arc::clone(ended);
                Box::new(move |reason| {
                    ended.get_or_init(|| reason.to_owned());
                })
            }
        }
    }

    /// Connects the device with those of the other ranks, all of which have come in.
    fn connect(&self, opened: Opened) -> Result<RankContext, ProcessError> {
        match opened {
            Opened::Cpu(cx) => Ok(cx),
            Opened::Gpu { gpu, ended } => {
                let ids = self.share_ids(&|| ended.get().cloned())?;
                Ok(gpu.connect(self.world.rank, self.mode, &ids, &ended).map_err(EngineError::from)?)
            }
        }
    }

    /// NCCL's ids, which rank 0 makes for all.
    fn share_ids(&self, called_off: &dyn Fn() -> Option<String>) -> Result<Vec<u8>, ProcessError> {
        let session = lock(&self.session);
        let over = || ProcessError::Mpi { detail: "it has ended before GPUs were connected".into() };
        let session = session.as_ref().ok_or_else(over)?;
        if self.world.rank != 0 {
            return session.ids(gpu::num_id_bytes(self.mode), called_off);
        }
        let ids = gpu::make_ids(self.mode).map_err(EngineError::from)?;
        session.hand_out_ids(&ids, called_off)?;
        Ok(ids)
    }

    /// `threads` counts one process's; without it the processes that share cores share them out.
    fn device(&self, cpu: CpuConfig) -> CpuConfig {
        let shares = if cpu.num_threads.is_some() { vec![cpu] } else { cpu.divided(self.sharing) };
        shares.get(self.world.local_rank % shares.len().max(1)).copied().unwrap_or(cpu)
    }

    /// Ends MPI in order, if all went in order.
    fn finish(&self) {
        let is_orderly = match &self.way {
            Way::Cpu(collective) => collective.is_orderly(),
            Way::Gpu { ended, .. } => ended.get().is_none(),
        };
        if is_orderly && let Some(session) = lock(&self.session).take() {
            session.finish();
        }
    }
}

impl Leading {
    /// Lets the other ranks in, loads rank 0's share beside theirs, and builds the engine.
    ///
    /// # Errors
    /// Whatever keeps any of them from starting.
    pub fn build(
        &self,
        checkpoint: &Checkpoint,
        config: &Config,
        progress: &dyn Fn(LoadProgress),
    ) -> Result<(BuiltEngine, String)> {
        let (opened, identity, description) = self.rank.open(checkpoint, config)?;
        let reception = lock(&self.reception).take().context("the other ranks have been let in before")?;
        let leader = Leader::admit(reception, &identity, self.rank.abort())?;
        let stop = leader.stop();
        end_when({
            let stop = stop.clone();
            move || stop.is_lost()
        })?;
        *lock(&self.stop) = Some(stop);
        let (built, watch) = leader.build(checkpoint, || self.rank.connect(opened), &config.engine, progress)?;
        *lock(&self.watch) = Some(watch);
        Ok((built, format!("{description} × {} processes", self.rank.world.size)))
    }

    /// The model is not wanted any more before it is loaded.
    pub fn stop(&self) {
        if let Some(stop) = lock(&self.stop).take() {
            stop.stop();
        }
    }

    /// After the engine has ended: waits for the others, and ends MPI.
    ///
    /// # Errors
    /// Why the others did not end in order.
    pub fn end(&self) -> Result<()> {
        lock(&self.watch).take().map_or(Ok(()), Watch::wait)?;
        self.rank.finish();
        Ok(())
    }
}

impl Following {
    /// Loads this rank's share and works until rank 0 ends.
    ///
    /// # Errors
    /// Why this rank or another cannot go on.
    pub fn run(self, model: &str, config: &Config) -> Result<()> {
        ignore_signals()?;
        let checkpoint = loading::open(model, config)?;
        let (opened, identity, description) = self.rank.open(&checkpoint, config)?;
        let follower = Follower::join(&self.invitation, identity, self.rank.abort())?;
        let watch = follower.watch();
        end_when(move || watch.is_lost())?;
        eprintln!("rank {} of {} on {description}", self.rank.world.rank, self.rank.world.size);
        follower.run(&checkpoint, || self.rank.connect(opened), &config.engine, &|_| {})?;
        self.rank.finish();
        Ok(())
    }
}

/// A launcher's signals go to all processes; rank 0 drains, and says when the others end.
fn ignore_signals() -> Result<()> {
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false))).context("taking signals")?;
    }
    Ok(())
}

/// Ends the process, not in order, a few seconds after `is_lost`: a thread within MPI cannot be woken.
fn end_when(is_lost: impl Fn() -> bool + Send + 'static) -> Result<()> {
    let body = move || {
        let mut lost_at: Option<Instant> = None;
        loop {
            std::thread::sleep(POLL);
            if is_lost() && lost_at.get_or_insert_with(Instant::now).elapsed() > LAST_GRACE {
                eprintln!("pagemill: a rank is lost, and something of this process still waits for it: ending at once");
                std::process::exit(1);
            }
        }
    };
    std::thread::Builder::new().name("last-grace".into()).spawn(body).map(|_| ()).context("starting a thread")
}

/// Of model and settings: the tensors' table, the first bytes of each, and what the engine is told.
fn fingerprint(checkpoint: &Checkpoint, config: &Config) -> Result<[u8; 32]> {
    let mut hash = Sha256::new();
    hash.update(env!("CARGO_PKG_VERSION"));
    hash.update(format!("{:?} {:?} {}", config.engine, config.cpu.activations, config.deterministic));
    let weights = checkpoint.weights();
    let mut sample = [0; SAMPLE_BYTES];
    for tensor in weights.tensors() {
        hash.update(format!(
            "{} {:?} {:?} {}",
            tensor.name(),
            tensor.shape(),
            tensor.tensor_type(),
            tensor.num_bytes()
        ));
        let len = usize::try_from(tensor.row_bytes()).unwrap_or(SAMPLE_BYTES).min(SAMPLE_BYTES);
        if tensor.tensor_type().is_some() && tensor.num_rows() > 0 {
            weights.read_in_row(tensor.name(), 0, 0, &mut sample[..len])?;
            hash.update(&sample[..len]);
        }
    }
    if weights.tensors().is_empty() {
        bail!("the model has no tensors");
    }
    Ok(hash.finalize().into())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
