//! Runs the server on threads of its own, so that the program around it needs no async runtime: started by
//! [`spawn`], stopped by SIGTERM, Ctrl-C or [`RunningServer::stop`]. Knows no endpoint.

use crate::serve::{Drained, ServeError, serve};
use crate::{BoundListener, ServerState};
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Notify;

/// Connections are cheap; the cores belong to the model.
const MAX_WORKERS: usize = 4;

/// Why a server ended badly.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// Threads or signal handlers could not be had.
    #[error("cannot start the HTTP server: {0}")]
    Start(#[from] io::Error),
    /// The listening socket.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// A second signal came while running requests were finishing.
    #[error("stopped at once by a second signal")]
    Forced,
    /// A fault in the server itself.
    #[error("the HTTP server's thread panicked")]
    Panicked,
}

/// A server that accepts connections.
pub struct RunningServer {
    thread: JoinHandle<Result<Drained, RuntimeError>>,
    stop: Arc<Notify>,
}

impl RunningServer {
    /// Drains, as SIGTERM does. Does not wait.
    pub fn stop(&self) {
        self.stop.notify_one();
    }

    /// Whether it has drained.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits until it has drained.
    ///
    /// # Errors
    /// [`RuntimeError`].
    pub fn join(self) -> Result<Drained, RuntimeError> {
        self.thread.join().unwrap_or(Err(RuntimeError::Panicked))
    }
}

/// Starts serving. SIGTERM and SIGINT drain from now on; a second one ends at once.
///
/// # Errors
/// No threads, or no signal handlers.
pub fn spawn(listener: BoundListener, state: Arc<ServerState>) -> Result<RunningServer, RuntimeError> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(cores.clamp(1, MAX_WORKERS))
        .thread_name("http")
        .enable_all()
        .build()?;
    let stop = Arc::new(Notify::new());
    let asked = Arc::clone(&stop);
    let mut signals = {
        let _inside = runtime.enter();
        Signals { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? }
    };
    let thread = std::thread::Builder::new().name("server".into()).spawn(move || {
        let outcome = runtime.block_on(async {
            let (first, mut second) = (Notify::new(), false);
            let serving = serve(listener, state, first.notified());
            tokio::pin!(serving);
            loop {
                tokio::select! {
                    drained = &mut serving => return Ok(drained?),
                    () = asked.notified(), if !second => { second = true; first.notify_one(); }
                    () = signals.next() => {
                        if second {
                            return Err(RuntimeError::Forced);
                        }
                        second = true;
                        first.notify_one();
                    }
                }
            }
        });
        // A tokeniser at work on a blocking thread is not worth waiting for.
        runtime.shutdown_background();
        outcome
    })?;
    Ok(RunningServer { thread, stop })
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
