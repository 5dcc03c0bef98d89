//! Telling the requests' sinks what happened: on the spot, or on a thread of their own, a step's news at a time, while
//! the engine goes on. A sink wakes its reader, which costs far more than the token it hands over. Knows no request
//! beyond its sink, and no step.

use crate::pipeline::panic_message;
use crate::requests::ByRequest;
use crate::{EngineError, EngineEvent, EventSink};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use pagemill_scheduler::RequestId;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{JoinHandle, ThreadId};
use std::time::Duration;

/// Steps' news that may wait for the thread; then the engine waits.
const MAX_WAITING: usize = 4;

/// How often the thread looks for closed sinks while nothing is told.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// News.
pub(crate) enum Notice {
    /// A request has come; all that follows goes to its sink.
    Opened(Box<dyn EventSink>),
    /// As [`EventSink::prompt_computed`].
    PromptComputed { cached_tokens: usize },
    /// As [`EventSink::send`].
    Event(EngineEvent),
    /// Nothing more comes: its sink goes.
    Closed,
}

/// A request, or all of them.
enum Letter {
    To(RequestId, Notice),
    /// The last that anybody hears.
    FailedAll(String),
}

/// The way to the sinks.
pub(crate) enum Delivery {
    /// On the caller's thread, as it is told.
    Here { sinks: Sinks, lost: Vec<RequestId> },
    /// On the sinks' thread, when it is flushed.
    Thread(DeliveryThread),
}

/// Sinks of live requests whose listeners are there.
#[derive(Default)]
pub(crate) struct Sinks(ByRequest<Box<dyn EventSink>>);

/// The engine's end of the way to the sinks' thread.
pub(crate) struct DeliveryThread {
    /// Told and not flushed.
    letters: Vec<Letter>,
    /// `None` while dropping.
    sender: Option<Sender<Vec<Letter>>>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What comes back from the thread.
#[derive(Default)]
struct Shared {
    returned: Mutex<Returned>,
    /// A sink panicked: what it said.
    failure: OnceLock<String>,
}

#[derive(Default)]
struct Returned {
    /// Requests whose listeners are gone or too slow.
    lost: Vec<RequestId>,
    /// Empty, for their memory.
    spare: Vec<Letter>,
}

impl Shared {
    fn returned(&self) -> MutexGuard<'_, Returned> {
        self.returned.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sinks {
    /// False: the listener was found gone or too slow, and its sink is dropped.
    fn tell(&mut self, id: RequestId, notice: Notice) -> bool {
        let is_heard = match notice {
            Notice::Opened(sink) => {
                self.0.push(id, sink);
                true
            }
            Notice::PromptComputed { cached_tokens } => {
                if let Some(sink) = self.0.get_mut(id) {
                    sink.prompt_computed(cached_tokens);
                }
                true
            }
            // One that was lost before hears nothing more.
            Notice::Event(event) => self.0.get_mut(id).is_none_or(|sink| sink.send(event).is_ok()),
            Notice::Closed => {
                self.0.remove(id);
                true
            }
        };
        if !is_heard {
            self.0.remove(id);
        }
        is_heard
    }

    fn fail_all(&mut self, message: &str) {
        for mut sink in std::mem::take(&mut self.0).into_values() {
            // A listener that is gone needs no message.
            let _ = sink.send(EngineEvent::Failed { message: message.to_owned() });
        }
    }

    /// Adds those whose listeners are gone to `lost`.
    fn look(&mut self, lost: &mut Vec<RequestId>) {
        let before = lost.len();
        lost.extend(self.0.iter().filter(|(_, sink)| sink.is_closed()).map(|(id, _)| id));
        for id in &lost[before..] {
            self.0.remove(*id);
        }
    }
}

impl Delivery {
    /// One that tells on the spot.
    pub(crate) fn here() -> Self {
        Self::Here { sinks: Sinks::default(), lost: Vec::new() }
    }

    /// From here on, on a thread of its own; where the system gives none, on the spot as before.
    pub(crate) fn onto_thread(self) -> Self {
        let Self::Here { sinks, lost } = self else { return self };
        match DeliveryThread::start(sinks, lost) {
            Ok(thread) => Self::Thread(thread),
            Err((sinks, lost)) => Self::Here { sinks, lost },
        }
    }

    /// Tells a request's sink, now or with the next [`Self::flush`].
    pub(crate) fn tell(&mut self, id: RequestId, notice: Notice) {
        match self {
            Self::Here { sinks, lost } => {
                if !sinks.tell(id, notice) {
                    lost.push(id);
                }
            }
            Self::Thread(thread) => thread.letters.push(Letter::To(id, notice)),
        }
    }

    /// Sends on what was told.
    pub(crate) fn flush(&mut self) {
        if let Self::Thread(thread) = self {
            thread.flush();
        }
    }

    /// Tells everybody that this is the end, and that it is ours.
    pub(crate) fn fail_all(&mut self, message: &str) {
        match self {
            Self::Here { sinks, .. } => sinks.fail_all(message),
            Self::Thread(thread) => thread.letters.push(Letter::FailedAll(message.to_owned())),
        }
        self.flush();
    }

    /// Looks for listeners that are gone although nothing was sent; the thread does so by itself.
    pub(crate) fn look(&mut self) {
        if let Self::Here { sinks, lost } = self {
            sinks.look(lost);
        }
    }

    /// Requests whose listeners were found gone or too slow since this was asked last.
    pub(crate) fn take_lost(&mut self) -> Vec<RequestId> {
        match self {
            Self::Here { lost, .. } => std::mem::take(lost),
            Self::Thread(thread) => std::mem::take(&mut thread.shared.returned().lost),
        }
    }

    /// Whether sinks do what they should.
    ///
    /// # Errors
    /// One panicked: the engine must stop.
    pub(crate) fn check(&self) -> Result<(), EngineError> {
        match self {
            Self::Thread(thread) => {
                thread.shared.failure.get().map_or(Ok(()), |why| Err(EngineError::Internal(why.clone())))
            }
            Self::Here { .. } => Ok(()),
        }
    }

    /// The sinks' own thread.
    pub(crate) fn thread_id(&self) -> Option<ThreadId> {
        match self {
            Self::Thread(thread) => thread.thread.as_ref().map(|thread| thread.thread().id()),
            Self::Here { .. } => None,
        }
    }
}

impl DeliveryThread {
    fn start(sinks: Sinks, lost: Vec<RequestId>) -> Result<Self, (Sinks, Vec<RequestId>)> {
        let (sender, receiver) = bounded(MAX_WAITING);
        let shared = Arc::new(Shared::default());
        // Handed over afterwards, so that they are not lost with a thread that did not start.
        let (first, handed) = bounded::<Sinks>(1);
        let told = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("pagemill-sinks".into()).spawn(move || {
            if let Ok(sinks) = handed.recv() {
                run(sinks, &receiver, &told);
            }
        });
        match thread {
            Ok(thread) => {
                shared.returned().lost = lost;
                // It is there and takes one.
                let _ = first.send(sinks);
                Ok(Self { letters: Vec::new(), sender: Some(sender), shared, thread: Some(thread) })
            }
            Err(_) => Err((sinks, lost)),
        }
    }

    fn flush(&mut self) {
        if self.letters.is_empty() {
            return;
        }
        let spare = std::mem::take(&mut self.shared.returned().spare);
        let letters = std::mem::replace(&mut self.letters, spare);
        if let Some(sender) = &self.sender {
            // It listens until this end is dropped.
            let _ = sender.send(letters);
        }
    }
}

impl Drop for DeliveryThread {
    fn drop(&mut self) {
        self.flush();
        self.sender = None;
        if let Some(thread) = self.thread.take().filter(|thread| thread.thread().id() != std::thread::current().id()) {
            // Its panics are caught.
            let _ = thread.join();
        }
    }
}

/// The sinks' thread: tells what comes until nothing more can.
fn run(mut sinks: Sinks, letters: &Receiver<Vec<Letter>>, shared: &Shared) {
    let mut lost = Vec::new();
    loop {
        let received = if sinks.0.is_empty() {
            letters.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            letters.recv_timeout(LOOK_EVERY)
        };
        let mut letters = match received {
            Ok(letters) => letters,
            Err(RecvTimeoutError::Timeout) => Vec::new(),
            Err(RecvTimeoutError::Disconnected) => return,
        };
        // A sink is foreign code. After its panic the engine stops and everybody hears so.
        let told = catch_unwind(AssertUnwindSafe(|| tell_all(&mut sinks, &mut letters, &mut lost)));
        if let Err(panic) = told {
            shared.failure.get_or_init(|| format!("a sink panicked: {}", panic_message(&*panic)));
        }
        letters.clear();
        let mut returned = shared.returned();
        returned.lost.append(&mut lost);
        if letters.capacity() > 0 {
            returned.spare = letters;
        }
    }
}

fn tell_all(sinks: &mut Sinks, letters: &mut Vec<Letter>, lost: &mut Vec<RequestId>) {
    for letter in letters.drain(..) {
        match letter {
            Letter::To(id, notice) => {
                if !sinks.tell(id, notice) {
                    lost.push(id);
                }
            }
            Letter::FailedAll(message) => sinks.fail_all(&message),
        }
    }
    sinks.look(lost);
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{ChannelSink, EventReceiver, SinkClosed};
    use std::time::Instant;

    fn open(delivery: &mut Delivery, id: u64, room: usize) -> EventReceiver {
        let (sink, events) = ChannelSink::new(room);
        delivery.tell(RequestId(id), Notice::Opened(Box::new(sink)));
        events
    }

    fn token(token: u32) -> EngineEvent {
        EngineEvent::Token { choice: 0, token, logprobs: None }
    }

    fn say(delivery: &mut Delivery, id: u64, said: u32) {
        delivery.tell(RequestId(id), Notice::Event(token(said)));
    }

    fn lost_within_seconds(delivery: &mut Delivery) -> Vec<RequestId> {
        let start = Instant::now();
        loop {
            delivery.look();
            let lost = delivery.take_lost();
            if !lost.is_empty() || start.elapsed() > Duration::from_secs(20) {
                return lost;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn both_ways_tell_the_same() {
        for mut delivery in [Delivery::here(), Delivery::here().onto_thread()] {
            let (first, second, slow) =
                (open(&mut delivery, 1, 9), open(&mut delivery, 2, 9), open(&mut delivery, 3, 1));
            for said in 0..3 {
                say(&mut delivery, 2, 20 + said);
                say(&mut delivery, 1, 10 + said);
                say(&mut delivery, 3, 30 + said);
                delivery.flush();
            }
            assert_eq!(lost_within_seconds(&mut delivery), [RequestId(3)], "once");
            delivery.tell(RequestId(1), Notice::Closed);
            delivery.flush();
            assert_eq!(std::iter::from_fn(|| first.recv()).collect::<Vec<_>>(), [10, 11, 12].map(token));
            assert_eq!(std::iter::from_fn(|| slow.recv()).collect::<Vec<_>>(), [token(30)]);
            delivery.fail_all("over");
            drop(delivery);
            let heard: Vec<EngineEvent> = std::iter::from_fn(|| second.recv()).collect();
            assert_eq!(heard[..3], [20, 21, 22].map(token));
            assert_eq!(heard[3..], [EngineEvent::Failed { message: "over".into() }]);
        }
    }

    #[test]
    fn a_listener_that_goes_away_is_found_though_nothing_is_told() {
        for mut delivery in [Delivery::here(), Delivery::here().onto_thread()] {
            let _stays = open(&mut delivery, 1, 9);
            drop(open(&mut delivery, 2, 9));
            delivery.flush();
            assert_eq!(lost_within_seconds(&mut delivery), [RequestId(2)]);
        }
    }

    struct PanickingSink;

    impl EventSink for PanickingSink {
        fn send(&mut self, event: EngineEvent) -> Result<(), SinkClosed> {
            assert!(matches!(event, EngineEvent::Failed { .. }), "planted panic");
            Ok(())
        }

        fn is_closed(&self) -> bool {
            false
        }
    }

    #[test]
    fn a_panic_is_an_error_and_the_others_hear_the_end() {
        let mut delivery = Delivery::here().onto_thread();
        delivery.tell(RequestId(1), Notice::Opened(Box::new(PanickingSink)));
        let events = open(&mut delivery, 2, 9);
        delivery.check().unwrap();
        say(&mut delivery, 1, 5);
        delivery.flush();
        let start = Instant::now();
        while delivery.check().is_ok() && start.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let error = delivery.check().unwrap_err().to_string();
        assert!(error.contains("a sink panicked: planted panic"), "{error}");
        delivery.fail_all(&error);
        assert!(matches!(events.recv(), Some(EngineEvent::Failed { message }) if message == error));
    }
}
