//! One rank in a process of its own: its place in the world, the ids by which NCCL connects the processes, and a way in
//! that ends when a peer does not come. Knows neither how ids travel nor who watches over the other processes.
//!
//! Between processes everything goes by NCCL: memory of other processes' GPUs is not written into.

use super::link::{self, Place};
use super::nccl::{Communicator, ID_BYTES, UniqueId};
use super::verdict::{PATIENCE, Verdict, Watchdog};
use super::{CudaCollective, Unwatched};
use crate::CudaBackend;
use pagemill_backend::{BackendError, Collective};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// How long the other ranks of a communicator may take to come.
const CONNECTING: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);

/// A rank's place in a world of processes: ranks count stage by stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat {
    /// The rank.
    pub rank: usize,
    /// Ranks of a stage.
    pub ranks_per_stage: usize,
    /// Stages.
    pub num_stages: usize,
}

impl Seat {
    fn stage(self) -> usize {
        self.rank / self.ranks_per_stage
    }

    /// Communicators of stages: where a stage has one rank there are none.
    fn num_stage_ids(self) -> usize {
        if self.ranks_per_stage > 1 { self.num_stages } else { 0 }
    }

    /// Communicators of links: from each rank, but those of the last stage, to the same one of the next stage.
    fn num_link_ids(self) -> usize {
        self.num_stages.saturating_sub(1) * self.ranks_per_stage
    }
}

/// NCCL's ids for all communicators of a world. As bytes: one block of 128 bytes each, of the stages in order, then of
/// the links by the rank that sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorldIds(Vec<UniqueId>);

impl WorldIds {
    /// Bytes of the ids of `seat`'s world.
    #[must_use]
    pub fn num_bytes(seat: Seat) -> usize {
        (seat.num_stage_ids() + seat.num_link_ids()) * ID_BYTES
    }

    /// New ids for `seat`'s world. This process has to live until all ranks are connected.
    ///
    /// # Errors
    /// There is no NCCL, or it finds no network.
    pub fn make(seat: Seat) -> Result<Self, BackendError> {
        (0..seat.num_stage_ids() + seat.num_link_ids()).map(|_| UniqueId::make()).collect::<Result<_, _>>().map(Self)
    }

    /// The ids as bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        self.0.iter().flat_map(|id| id.0).collect()
    }

    /// The ids of `seat`'s world from bytes.
    ///
    /// # Errors
    /// Another number of bytes.
    pub fn from_bytes(seat: Seat, bytes: &[u8]) -> Result<Self, BackendError> {
        if bytes.len() != Self::num_bytes(seat) {
            let detail = format!("{} bytes of ids came, {} were expected", bytes.len(), Self::num_bytes(seat));
            return Err(BackendError::Collective { op: "ranks", detail });
        }
        Ok(Self(bytes.as_chunks().0.iter().copied().map(UniqueId).collect()))
    }

    fn of_stage(&self, seat: Seat) -> Option<UniqueId> {
        (seat.num_stage_ids() > 0).then(|| self.0[seat.stage()])
    }

    /// Of the link to the next stage.
    fn next(&self, seat: Seat) -> Option<UniqueId> {
        (seat.stage() + 1 < seat.num_stages).then(|| self.0[seat.num_stage_ids() + seat.rank])
    }

    /// Of the link from the stage before.
    fn previous(&self, seat: Seat) -> Option<UniqueId> {
        let from = seat.rank.checked_sub(seat.ranks_per_stage)?;
        Some(self.0[seat.num_stage_ids() + from])
    }
}

impl CudaCollective {
    /// The rank at `seat` in this process, on `backend`, connected to the other processes by `ids` and tried. All ranks
    /// do this at the same time. Every wait, this one too, ends when somebody sets `ended`.
    ///
    /// # Errors
    /// No NCCL; GPUs that cannot be connected, or not within a minute; `ended`.
    pub fn join(
        backend: &Arc<CudaBackend>,
        seat: Seat,
        ids: &WorldIds,
        ended: &Arc<OnceLock<String>>,
    ) -> Result<Self, BackendError> {
        let device = backend.device();
        let verdict = Arc::new(Verdict::new(std::slice::from_ref(device), seat.rank, Arc::clone(ended))?);
        let connect = |what: &str, id: Option<UniqueId>, rank: usize, num_ranks: usize| {
            let Some(id) = id else { return Ok(None) };
            let device = Arc::clone(device);
            let join = move || Communicator::join(&device, id, rank, num_ranks);
            within(CONNECTING, what, || verdict.reason().map(str::to_owned), join).map(Arc::new).map(Some)
        };
        let (stage, rank) = (seat.stage(), seat.rank % seat.ranks_per_stage);
        // In this order on every rank: what comes later waits for nobody who is earlier.
        let communicator = connect("the other ranks of the stage", ids.of_stage(seat), rank, seat.ranks_per_stage)?;
        let from = connect("the stage before", ids.previous(seat), 1, 2)?;
        let to = connect("the next stage", ids.next(seat), 0, 2)?;
        let place = Place { device, workspace: backend.temporaries() };
        // Hidden states come when all stages before have made them, one after the other.
        let patience = PATIENCE * u32::try_from(stage).unwrap_or(u32::MAX);
        let incoming = from.as_ref().map(|from| link::from_process(&place, from, &verdict, patience)).transpose()?;
        let outgoing = to.as_ref().map(|to| link::to_process(&place, to, &verdict)).transpose()?;
        let communicators = [&communicator, &from, &to].into_iter().flatten().cloned().collect();
        let watchdog = Arc::new(Watchdog::start(&verdict, 1, communicators)?);
        let backend = Arc::clone(backend);
        let unwatched = Unwatched { one_shot: None, communicator, outgoing, incoming, backend, stage, rank };
        let joined = unwatched.watched(0, seat.ranks_per_stage, &verdict, &watchdog)?;
        joined.try_ways().inspect_err(|error| joined.abort(&error.to_string()))?;
        Ok(joined)
    }
}

/// What `work` gives, on a thread of its own. It is left to itself when `called_off` says why, or when it has not ended
/// within `limit`: a call of NCCL that waits for a peer cannot be ended.
///
/// # Errors
/// As `work`; the reason of its end, which names `whom` it waited for.
fn within<T: Send + 'static>(
    limit: Duration,
    whom: &str,
    called_off: impl Fn() -> Option<String>,
    work: impl FnOnce() -> Result<T, BackendError> + Send + 'static,
) -> Result<T, BackendError> {
    let fault = |detail: String| BackendError::Collective { op: "ranks", detail };
    let (sender, outcome) = sync_channel(1);
    let body = move || {
        // Nobody may be waiting any more.
        let _ = sender.send(work());
    };
    std::thread::Builder::new()
        .name("pagemill-connect".into())
        .spawn(body)
        .map_err(|error| fault(format!("no thread to connect GPUs: {error}")))?;
    let deadline = Instant::now() + limit;
    loop {
        match outcome.recv_timeout(POLL) {
            Ok(outcome) => return outcome,
            Err(RecvTimeoutError::Disconnected) => return Err(fault(format!("connecting {whom} panicked"))),
            Err(RecvTimeoutError::Timeout) => {}
        }
        if let Some(reason) = called_off() {
            return Err(fault(reason));
        }
        if Instant::now() >= deadline {
            let seconds = limit.as_secs();
            return Err(fault(format!(
                "NCCL did not connect this GPU and {whom} within {seconds} s (can the hosts reach one another? NCCL_DEBUG=INFO shows what \
                 it tries, NCCL_SOCKET_IFNAME names the network to use)"
            )));
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn ids(seat: Seat) -> WorldIds {
        let bytes: Vec<u8> = (0..WorldIds::num_bytes(seat)).map(|at| u8::try_from(at / ID_BYTES).unwrap()).collect();
        WorldIds::from_bytes(seat, &bytes).unwrap()
    }

    /// Which ids a rank takes: its stage's, the one from the stage before, the one to the next.
    fn taken(rank: usize, ranks_per_stage: usize, num_stages: usize) -> [Option<u8>; 3] {
        let seat = Seat { rank, ranks_per_stage, num_stages };
        let ids = ids(seat);
        [ids.of_stage(seat), ids.previous(seat), ids.next(seat)].map(|id| id.map(|id| id.0[ID_BYTES - 1]))
    }

    #[test]
    fn both_ends_take_the_same_id_and_nobody_else() {
        for (ranks_per_stage, num_stages) in [(1, 2), (2, 1), (1, 4), (2, 2), (3, 3)] {
            let num_ranks = ranks_per_stage * num_stages;
            let all: Vec<_> = (0..num_ranks).map(|rank| taken(rank, ranks_per_stage, num_stages)).collect();
            for (rank, [stage, from, to]) in all.iter().enumerate() {
                let ahead = all.get(rank + ranks_per_stage);
                assert_eq!(*to, ahead.and_then(|ahead| ahead[1]), "rank {rank}");
                assert_eq!(from.is_some(), rank >= ranks_per_stage);
                assert_eq!(stage.is_some(), ranks_per_stage > 1);
                let sharing = all.iter().filter(|other| stage.is_some() && other[0] == *stage).count();
                assert_eq!(sharing, if ranks_per_stage > 1 { ranks_per_stage } else { 0 });
                let used_elsewhere = |id| all.iter().flatten().filter(|other| **other == id).count();
                assert!(to.is_none() || used_elsewhere(*to) == 2, "an id connects two ranks");
            }
        }
        assert_eq!(taken(2, 2, 2), [Some(1), Some(2), None]);
        assert_eq!(taken(1, 2, 2), [Some(0), None, Some(3)]);
        assert_eq!(taken(1, 1, 3), [None, Some(0), Some(1)]);
    }

    #[test]
    fn ids_travel_whole() {
        let seat = Seat { rank: 1, ranks_per_stage: 2, num_stages: 3 };
        assert_eq!(WorldIds::num_bytes(seat), (3 + 4) * 128);
        let ids = ids(seat);
        assert_eq!(WorldIds::from_bytes(seat, &ids.to_bytes()).unwrap(), ids);
        for wrong in [0, 127, 3 * 128, 8 * 128] {
            let error = WorldIds::from_bytes(seat, &vec![0; wrong]).unwrap_err().to_string();
            assert!(error.contains(&format!("{wrong} bytes of ids came, 896 were expected")), "{error}");
        }
        assert_eq!(WorldIds::num_bytes(Seat { rank: 0, ranks_per_stage: 1, num_stages: 2 }), 128);
    }

    #[test]
    fn a_peer_that_does_not_come_is_told() {
        let stuck = || {
            std::thread::sleep(Duration::from_secs(20));
            Ok(())
        };
        let started = Instant::now();
        let error = within(Duration::from_millis(60), "the next stage", || None, stuck).unwrap_err().to_string();
        assert!(error.contains("did not connect this GPU and the next stage within 0 s"), "{error}");
        let lost = || (started.elapsed() > Duration::from_millis(100)).then(|| "rank 1 is lost".to_owned());
        let error = within(CONNECTING, "the next stage", lost, stuck).unwrap_err().to_string();
        assert!(error.contains("rank 1 is lost"), "{error}");
        assert!(started.elapsed() < Duration::from_secs(10));
        assert_eq!(within(CONNECTING, "nobody", || None, || Ok(7)).unwrap(), 7);
        let refused = || Err::<(), _>(BackendError::Collective { op: "nccl", detail: "no".into() });
        assert!(within(CONNECTING, "nobody", || None, refused).unwrap_err().to_string().contains("no"));
    }
}
