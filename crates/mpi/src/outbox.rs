//! Hidden states on their way to the next stage. A thread of its own sends them: MPI moves long messages only
//! while somebody calls it, and the rank that sent them is at its next micro-batch by then. Knows no tensor.

use crate::collective::Ending;
use crate::error::ProcessError;
use crate::patience::Patience;
use crate::transfer::{Channel, Progress};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Hidden states that may wait for the next stage.
const DEPTH: usize = 4;
/// How often somebody who waits looks whether the world has ended.
const LOOK: Duration = Duration::from_millis(20);

/// The queue to the next stage, and its thread.
pub(crate) struct Outbox {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    channel: Channel,
    /// Rank of the next stage that takes this one's hidden states.
    to: usize,
    tag: i32,
    patience: Patience,
    ending: Arc<Ending>,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    full: VecDeque<Vec<f32>>,
    free: Vec<Vec<f32>>,
    is_closed: bool,
}

impl Outbox {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system gave none.
    pub(crate) fn open(
        channel: Channel,
        to: usize,
        tag: i32,
        patience: Patience,
        ending: Arc<Ending>,
    ) -> Result<Self, ProcessError> {
        let queue = Queue { free: vec![Vec::new(); DEPTH], ..Queue::default() };
        let shared =
            Arc::new(Shared { channel, to, tag, patience, ending, queue: Mutex::new(queue), changed: Condvar::new() });
        let mover = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("pagemill-outbox".into())
            .spawn(move || mover.run())
            .map_err(|source| ProcessError::System { what: "starting a thread for hidden states", source })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Queues a copy of `x`; waits while the queue is full. False: the world has ended. Allocates only
    /// while messages still become longer.
    pub(crate) fn push(&self, x: &[f32]) -> bool {
        let mut queue = self.shared.lock();
        let mut buffer = loop {
            if self.shared.ending.is_set() {
                return false;
            }
            if let Some(buffer) = queue.free.pop() {
                break buffer;
            }
            queue = self.shared.wait(queue);
        };
        if buffer.capacity() < x.len() {
            // Once, and for all that are here: a later message of the length finds its place.
            for free in queue.free.iter_mut().chain([&mut buffer]) {
                free.clear();
                free.reserve_exact(x.len());
            }
        }
        buffer.clear();
        buffer.extend_from_slice(x);
        queue.full.push_back(buffer);
        drop(queue);
        self.shared.changed.notify_all();
        true
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // It ends with its queue, or at once when the world has ended.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
        self.changed.wait_timeout(queue, LOOK).unwrap_or_else(PoisonError::into_inner).0
    }

    fn run(&self) {
        while let Some(buffer) = self.next() {
            match self.deliver(buffer) {
                Ok(Some(buffer)) => {
                    self.lock().free.push(buffer);
                    self.changed.notify_all();
                }
                Ok(None) => return,
                Err(error) => return self.ending.set(&format!("sending hidden states to rank {}: {error}", self.to)),
            }
        }
    }

    /// The next message; `None` at the end.
    fn next(&self) -> Option<Vec<f32>> {
        let mut queue = self.lock();
        loop {
            if self.ending.is_set() {
                return None;
            }
            if let Some(buffer) = queue.full.pop_front() {
                return Some(buffer);
            }
            if queue.is_closed {
                return None;
            }
            queue = self.wait(queue);
        }
    }

    /// Sends a message; its buffer back, or `None` when the world ended before it was through.
    fn deliver(&self, buffer: Vec<f32>) -> Result<Option<Vec<f32>>, ProcessError> {
        let mut transfer = self.channel.send(buffer, self.to, self.tag)?;
        for poll in 0u32.. {
            match transfer.poll()? {
                Progress::Done(buffer) => return Ok(Some(buffer)),
                Progress::Pending(pending) => transfer = pending,
            }
            if self.ending.is_set() {
                break;
            }
            self.patience.pause(poll);
        }
        Ok(None)
    }
}
