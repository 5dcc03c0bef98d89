//! Connections: accepting, header limits, stalled peers, and going down without losing an answer.
//! Knows no endpoint.

use crate::listener::BoundListener;
use crate::routes;
use crate::state::ServerState;
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::future::Future;
use std::io::{self, ErrorKind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, Sleep, sleep, timeout};

/// After the last answer, connections get this long to take what is still in their buffers.
const CLOSE_GRACE: Duration = Duration::from_secs(2);
/// When the system has no file descriptor left, accepting pauses for this long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How a server went down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drained {
    /// Requests that were still running when the drain timeout was over, and were aborted.
    pub aborted: usize,
}

/// Why serving ended badly.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The listening socket could not be handed to the runtime.
    #[error("cannot serve on {address}: {source}")]
    Listener {
        /// Where it listens.
        address: String,
        /// What the system says.
        source: io::Error,
    },
}

/// Serves until `shutdown` is ready, then drains: the port is closed, new requests on live connections get
/// 503, running ones finish within the drain timeout and are aborted after it. Does not stop the engine.
///
/// # Errors
/// [`ServeError`] before anything is served.
pub async fn serve(
    listener: BoundListener,
    state: Arc<ServerState>,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<Drained, ServeError> {
    let address = listener.to_string();
    let listener = TcpListener::from_std(listener.socket)
        .map_err(|source| ServeError::Listener { address: address.clone(), source })?;
    let router = routes::router(Arc::clone(&state));
    let (close, _) = watch::channel(false);
    let mut connections = JoinSet::new();
    tokio::pin!(shutdown);
    loop {
        tokio::select! {
            biased;
            () = &mut shutdown => break,
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(connection(stream, router.clone(), Arc::clone(&state), close.subscribe()));
                }
                Err(error) if is_peers_fault(&error) => {}
                Err(error) => {
                    tracing::warn!("accepting a connection failed: {error}");
                    sleep(ACCEPT_PAUSE).await;
                }
            },
        }
    }
    drop(listener);
    Ok(drain(&state, connections, &close).await)
}

async fn drain(state: &ServerState, mut connections: JoinSet<()>, close: &watch::Sender<bool>) -> Drained {
    state.begin_drain();
    let finished = timeout(state.config.drain_timeout, state.idle()).await.is_ok();
    let aborted = if finished { 0 } else { state.num_in_flight() };
    close.send_replace(true);
    if finished {
        let all_closed = async { while connections.join_next().await.is_some() {} };
        if timeout(CLOSE_GRACE, all_closed).await.is_err() {
            tracing::debug!("closing connections that do not take their answers");
        }
    }
    // Dropping a connection drops its generation, which aborts it.
    connections.shutdown().await;
    Drained { aborted }
}

/// Errors of one connection that died before it was accepted.
fn is_peers_fault(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset)
}

async fn connection(stream: TcpStream, router: Router, state: Arc<ServerState>, mut close: watch::Receiver<bool>) {
    // Tokens are small and must not wait for each other. A socket that refuses still works.
    let _ = stream.set_nodelay(true);
    let io = TokioIo::new(StallGuard::new(stream, state.config.io_timeout));
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(state.config.io_timeout)
        // The exact limit is checked by the routes, which answer with an error object; this one bounds memory.
        .max_buf_size((state.limits().header_bytes * 2).max(16 << 10));
    let serving = builder.serve_connection(io, TowerToHyperService::new(router));
    tokio::pin!(serving);
    let closing = async {
        // An error means that the sender is gone: closing, too.
        let _ = close.wait_for(|closing| *closing).await;
    };
    let result = tokio::select! {
        result = serving.as_mut() => result,
        () = closing => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(error) = result {
        tracing::debug!("connection ended: {error}");
    }
}

/// A socket whose peer must take bytes now and then: a write that waits longer than `limit` fails, so that
/// a client which stopped reading does not hold its connection and buffers for ever.
struct StallGuard {
    stream: TcpStream,
    limit: Duration,
    deadline: Pin<Box<Sleep>>,
    waiting: bool,
}

impl StallGuard {
    fn new(stream: TcpStream, limit: Duration) -> Self {
        Self { stream, limit, deadline: Box::pin(sleep(limit)), waiting: false }
    }

    fn watch<T>(&mut self, cx: &mut Context<'_>, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if result.is_ready() {
            self.waiting = false;
            return result;
        }
        if !self.waiting {
            self.waiting = true;
            self.deadline.as_mut().reset(Instant::now() + self.limit);
        }
        ready!(self.deadline.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(ErrorKind::TimedOut, "the peer takes no bytes")))
    }
}

impl AsyncRead for StallGuard {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for StallGuard {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.watch(cx, result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.watch(cx, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
