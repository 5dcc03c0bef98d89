//! MPI from its start to its end: initialises the library, checks that it sees the world that the launcher
//! told of, and hands rank 0's invitation to the others, later also the ids by which their GPUs connect. Knows no
//! model.

use crate::collective::MpiCollective;
use crate::environment::World;
use crate::error::ProcessError;
use crate::frame::{Invitation, MAX_INVITATION_BYTES};
use crate::patience::Patience;
use crate::transfer::{Channel, Progress, Transfer};
use mpi::Threading;
use mpi::environment::Universe;
use mpi::traits::Communicator;
use pagemill_engine::ParallelMode;
use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

const TAG_INVITATION: i32 = 5;
const TAG_IDS: i32 = 6;
/// How long an invitation, or the ids, may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// This process's part in MPI. It belongs to the thread that started it.
pub struct Session {
    /// Finalised only by [`Session::finish`]: after a loss the library would wait for the dead.
    universe: ManuallyDrop<Universe>,
    world: World,
    channel: Channel,
}

impl Session {
    /// Initialises MPI. All processes of the world do this at the same time.
    ///
    /// # Errors
    /// The library was initialised before, allows no calls from several threads, or sees another world.
    pub fn start(world: World) -> Result<Self, ProcessError> {
        let refuse = |detail: String| ProcessError::Mpi { detail };
        let (universe, threading) = mpi::environment::initialize_with_threading(Threading::Multiple)
            .ok_or_else(|| refuse("it was initialised before".into()))?;
        let universe = ManuallyDrop::new(universe);
        if threading != Threading::Multiple {
            return Err(refuse(format!("this library allows {threading:?} calls only: one with Multiple is needed")));
        }
        let communicator = universe.world();
        let number = |value: i32| usize::try_from(value).unwrap_or(usize::MAX);
        let seen = (number(communicator.rank()), number(communicator.size()));
        if seen != (world.rank, world.size) {
            return Err(refuse(format!(
                "the launcher says rank {} of {}, the library rank {} of {}: is this the launcher of the library that \
                 pagemill was built with?",
                world.rank, world.size, seen.0, seen.1
            )));
        }
        // Launchers do not all tell who shares a host; the library knows.
        let host = communicator.split_shared(communicator.rank());
        let world = World { local_rank: number(host.rank()), local_size: number(host.size()), ..world };
        let channel = Channel::beside(&communicator)?;
        Ok(Self { universe, world, channel })
    }

    /// This process's place; that on its host as the library sees it.
    #[must_use]
    pub fn world(&self) -> World {
        self.world
    }

    /// The collective of this process's rank.
    ///
    /// # Errors
    /// The system gave no thread.
    pub fn collective(&self, mode: ParallelMode) -> Result<MpiCollective, ProcessError> {
        let patience = Patience::of(self.sharing(), usable_cores());
        MpiCollective::new(self.channel, mode, self.world.rank, patience)
    }

    /// Processes that share this one's cores, itself included.
    #[must_use]
    pub fn sharing(&self) -> usize {
        let usable = usable_cores();
        self.world.sharing(usable, online_cores().unwrap_or(usable))
    }

    /// On rank 0: sends the invitation to all others.
    ///
    /// # Errors
    /// It was not taken within a minute.
    pub fn invite(&self, invitation: &Invitation) -> Result<(), ProcessError> {
        let bytes =
            invitation.encode().map_err(|error| ProcessError::Mpi { detail: format!("the invitation: {error}") })?;
        self.tell_all(&bytes, TAG_INVITATION, "the invitation", &|| None)
    }

    /// On the others: waits for rank 0's invitation.
    ///
    /// # Errors
    /// None came within a minute, or it is none.
    pub fn invitation(&self) -> Result<Invitation, ProcessError> {
        let bytes = self.hear(MAX_INVITATION_BYTES, TAG_INVITATION, "invitation", &|| None)?;
        Invitation::decode(&bytes).map_err(|error| ProcessError::Mpi { detail: format!("the invitation: {error}") })
    }

    /// On rank 0: sends the ids by which GPUs connect to all others, unless `called_off` says why not.
    ///
    /// # Errors
    /// They were not taken within a minute; what `called_off` says.
    pub fn hand_out_ids(&self, ids: &[u8], called_off: &dyn Fn() -> Option<String>) -> Result<(), ProcessError> {
        self.tell_all(ids, TAG_IDS, "the ids of GPUs", called_off)
    }

    /// On the others: waits for those ids, `num_bytes` at most.
    ///
    /// # Errors
    /// None came within a minute; what `called_off` says.
    pub fn ids(&self, num_bytes: usize, called_off: &dyn Fn() -> Option<String>) -> Result<Vec<u8>, ProcessError> {
        self.hear(num_bytes, TAG_IDS, "ids of GPUs", called_off)
    }

    fn tell_all(
        &self,
        bytes: &[u8],
        tag: i32,
        what: &str,
        called_off: &dyn Fn() -> Option<String>,
    ) -> Result<(), ProcessError> {
        for rank in 1..self.world.size {
            let transfer = self.channel.send(bytes.to_vec(), rank, tag)?;
            complete(transfer, || format!("rank {rank} did not take {what}"), called_off)?;
        }
        Ok(())
    }

    fn hear(
        &self,
        max_bytes: usize,
        tag: i32,
        what: &str,
        called_off: &dyn Fn() -> Option<String>,
    ) -> Result<Vec<u8>, ProcessError> {
        let transfer = self.channel.receive(Vec::new(), max_bytes, 0, tag)?;
        complete(transfer, || format!("no {what} came from rank 0"), called_off)
    }

    /// Ends MPI in order: when all ranks have ended in order, and all messages are through. Waits for the
    /// others.
    pub fn finish(self) {
        drop(ManuallyDrop::into_inner(self.universe));
    }
}

fn usable_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The host's cores, whoever may use them.
fn online_cores() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    Some(text.lines().filter(|line| line.starts_with("processor")).count()).filter(|count| *count > 0)
}

fn complete(
    mut transfer: Transfer<u8>,
    what: impl Fn() -> String,
    called_off: &dyn Fn() -> Option<String>,
) -> Result<Vec<u8>, ProcessError> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match transfer.poll()? {
            Progress::Done(bytes) => return Ok(bytes),
            Progress::Pending(pending) => transfer = pending,
        }
        if let Some(reason) = called_off() {
            return Err(ProcessError::Lost { reason });
        }
        if Instant::now() >= deadline {
            return Err(ProcessError::Late { what: what(), seconds: PATIENCE.as_secs() });
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
