//! One message on its way by MPI: the only file of this room with `unsafe`.
//!
//! The `mpi` crate's own requests borrow their buffers for the life of a scope, and a scope that ends with a
//! request under way ends the process. A lost rank leaves requests under way for ever, and its survivors have
//! clients to tell. So a [`Transfer`] owns its buffer: it gives it back when it is complete, and leaves it
//! to MPI, never to be freed, when it is given up.

#![allow(unsafe_code)]

use crate::error::ProcessError;
use mpi::ffi;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{AsRaw, Communicator, Equivalence};
use std::mem::ManuallyDrop;

/// A communicator that threads may share, whose errors come back to the caller.
#[derive(Clone, Copy)]
pub(crate) struct Channel {
    raw: ffi::MPI_Comm,
}

// SAFETY: a handle of MPI's, whose library was initialised for calls from several threads at once:
// `Session::start` refuses any other.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

/// A message under way. `T` is one of MPI's own element types.
pub(crate) struct Transfer<T: Equivalence> {
    request: ffi::MPI_Request,
    /// Not to be touched, moved or freed while the request is under way.
    buffer: ManuallyDrop<Vec<T>>,
    direction: Direction,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Out,
    In,
}

impl Direction {
    fn name(self) -> &'static str {
        match self {
            Self::Out => "sending",
            Self::In => "receiving",
        }
    }
}

// SAFETY: the request is a handle as above, and the buffer is owned.
unsafe impl<T: Equivalence + Send> Send for Transfer<T> {}

/// What became of a transfer.
pub(crate) enum Progress<T: Equivalence> {
    /// It is complete. Of a receive the buffer holds exactly what came.
    Done(Vec<T>),
    /// It is still under way.
    Pending(Transfer<T>),
}

impl Channel {
    /// A communicator of its own beside `world`. All processes of the world call this at the same time. It
    /// is never freed: it lives as long as the process.
    pub(crate) fn beside(world: &SimpleCommunicator) -> Result<Self, ProcessError> {
        let own = ManuallyDrop::new(world.duplicate());
        let raw = own.as_raw();
        // SAFETY: `raw` is a live communicator, and the handler one of MPI's own.
        check("setting the error handler", unsafe { ffi::MPI_Comm_set_errhandler(raw, ffi::RSMPI_ERRORS_RETURN) })?;
        Ok(Self { raw })
    }

    /// Begins to send all of `buffer` to `rank`.
    pub(crate) fn send<T: Equivalence>(
        self,
        buffer: Vec<T>,
        rank: usize,
        tag: i32,
    ) -> Result<Transfer<T>, ProcessError> {
        let direction = Direction::Out;
        let (count, rank) = (number(direction, buffer.len())?, number(direction, rank)?);
        // SAFETY: a constant of the library; MPI fills the request.
        let request = unsafe { ffi::RSMPI_REQUEST_NULL };
        let mut transfer = Transfer { request, buffer: ManuallyDrop::new(buffer), direction };
        // SAFETY: the buffer holds `count` elements of the type, and stays where it is until the request is
        // complete: nothing touches `transfer.buffer` before, and dropping the transfer leaks it.
        let code = unsafe {
            let kind = T::equivalent_datatype().as_raw();
            let data = transfer.buffer.as_ptr().cast();
            ffi::MPI_Isend(data, count, kind, rank, tag, self.raw, &raw mut transfer.request)
        };
        check(direction.name(), code).map(|()| transfer)
    }

    /// Begins to receive at most `len` elements from `rank`, into the memory of `buffer`, which grows when
    /// it is too small.
    pub(crate) fn receive<T: Equivalence + Clone + Default>(
        self,
        mut buffer: Vec<T>,
        len: usize,
        rank: usize,
        tag: i32,
    ) -> Result<Transfer<T>, ProcessError> {
        let direction = Direction::In;
        let (count, rank) = (number(direction, len)?, number(direction, rank)?);
        buffer.resize(len, T::default());
        // SAFETY: as in `send`.
        let request = unsafe { ffi::RSMPI_REQUEST_NULL };
        let mut transfer = Transfer { request, buffer: ManuallyDrop::new(buffer), direction };
        // SAFETY: as in `send`; the memory is initialised, exclusively owned, and `count` elements long.
        let code = unsafe {
            let kind = T::equivalent_datatype().as_raw();
            let data = transfer.buffer.as_mut_ptr().cast();
            ffi::MPI_Irecv(data, count, kind, rank, tag, self.raw, &raw mut transfer.request)
        };
        check(direction.name(), code).map(|()| transfer)
    }
}

impl<T: Equivalence> Transfer<T> {
    /// Moves all transfers of the process along, and looks whether this one is complete. Never blocks.
    ///
    /// # Errors
    /// MPI's: a lost rank, or a message longer than the buffer.
    pub(crate) fn poll(mut self) -> Result<Progress<T>, ProcessError> {
        let mut is_done = 0;
        // SAFETY: a status is plain numbers, filled by MPI.
        let mut status: ffi::MPI_Status = unsafe { std::mem::zeroed() };
        // SAFETY: the request was made by `send` or `receive` and is still under way.
        check(self.direction.name(), unsafe {
            ffi::MPI_Test(&raw mut self.request, &raw mut is_done, &raw mut status)
        })?;
        if is_done == 0 {
            return Ok(Progress::Pending(self));
        }
        // SAFETY: MPI has completed the request, so it no longer uses the buffer; `self` is not used again.
        let mut buffer = unsafe { ManuallyDrop::take(&mut self.buffer) };
        if self.direction == Direction::In {
            let mut count = 0;
            // SAFETY: the status is that of a completed receive.
            check(self.direction.name(), unsafe {
                ffi::MPI_Get_count(&raw const status, T::equivalent_datatype().as_raw(), &raw mut count)
            })?;
            buffer.truncate(usize::try_from(count).unwrap_or(0));
        }
        Ok(Progress::Done(buffer))
    }
}

fn number(direction: Direction, value: usize) -> Result<i32, ProcessError> {
    let too_large = || ProcessError::Mpi { detail: format!("{}: {value} is too large a number", direction.name()) };
    i32::try_from(value).map_err(|_| too_large())
}

fn check(what: &str, code: i32) -> Result<(), ProcessError> {
    const SUCCESS: i32 = ffi::MPI_SUCCESS as i32;
    if code == SUCCESS { Ok(()) } else { Err(ProcessError::Mpi { detail: format!("{what} failed with code {code}") }) }
}
