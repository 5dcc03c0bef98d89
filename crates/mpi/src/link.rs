//! A TCP connection that carries frames. Decides when the other side counts as lost; knows no frame's
//! meaning.

use crate::error::LinkError;
use crate::frame::{Frame, HEADER_BYTES, Header, MAX_BODY_BYTES};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// How often everybody says something.
pub(crate) const HEARTBEAT_EVERY: Duration = Duration::from_millis(500);
/// A side that has said nothing for so long is lost; so is one that takes no bytes for so long.
pub(crate) const LOST_AFTER: Duration = Duration::from_secs(3);
/// Bytes that a frame's buffer keeps between frames.
const KEPT_BYTES: usize = 4 << 20;

/// The sending half; threads may share it. A frame goes out whole or the link is of no further use.
pub(crate) struct FrameSender(Mutex<SenderState>);

struct SenderState {
    stream: TcpStream,
    bytes: Vec<u8>,
    /// After a failure the stream may end in the middle of a frame.
    is_broken: bool,
}

/// The receiving half.
pub(crate) struct FrameReceiver {
    stream: TcpStream,
    body: Vec<u8>,
}

/// Both halves of a connection.
pub(crate) fn split(stream: TcpStream) -> io::Result<(FrameSender, FrameReceiver)> {
    // Plans are small and must not wait for each other.
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(LOST_AFTER))?;
    stream.set_write_timeout(Some(LOST_AFTER))?;
    let receiver = FrameReceiver { stream: stream.try_clone()?, body: Vec::new() };
    let state = SenderState { stream, bytes: Vec::new(), is_broken: false };
    Ok((FrameSender(Mutex::new(state)), receiver))
}

impl FrameSender {
    /// Sends a frame; waits as long as the other side takes bytes now and then.
    pub(crate) fn send(&self, frame: &Frame) -> Result<(), LinkError> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut bytes = std::mem::take(&mut state.bytes);
        let sent = frame.encode(&mut bytes).map_err(LinkError::from).and_then(|()| state.write(&bytes));
        if bytes.capacity() <= KEPT_BYTES {
            state.bytes = bytes;
        }
        sent
    }

    /// Sends a frame that [`Frame::encode`] made, as `send` does.
    pub(crate) fn send_encoded(&self, bytes: &[u8]) -> Result<(), LinkError> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).write(bytes)
    }

    /// Ends the connection: the other side's and this side's receivers find it closed.
    pub(crate) fn close(&self) {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // It may be closed already.
        let _ = state.stream.shutdown(Shutdown::Both);
    }
}

impl SenderState {
    fn write(&mut self, bytes: &[u8]) -> Result<(), LinkError> {
        if self.is_broken {
            return Err(LinkError::Closed);
        }
        let sent = self.stream.write_all(bytes).map_err(explain);
        self.is_broken = sent.is_err();
        sent
    }
}

impl FrameReceiver {
    /// Waits for a frame.
    pub(crate) fn receive(&mut self) -> Result<Frame, LinkError> {
        self.receive_limited(MAX_BODY_BYTES)
    }

    /// Waits for a frame with a body of `max_body_bytes` at most.
    pub(crate) fn receive_limited(&mut self, max_body_bytes: usize) -> Result<Frame, LinkError> {
        let mut header = [0; HEADER_BYTES];
        self.stream.read_exact(&mut header).map_err(explain)?;
        let header = Header::decode(&header, max_body_bytes)?;
        if self.body.capacity() > KEPT_BYTES && header.body_bytes <= KEPT_BYTES {
            self.body = Vec::new();
        }
        self.body.resize(header.body_bytes, 0);
        self.stream.read_exact(&mut self.body).map_err(explain)?;
        Ok(Frame::decode(header, &self.body)?)
    }

    /// Waits so long for the next frames.
    pub(crate) fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        self.stream.set_read_timeout(Some(timeout))
    }
}

fn explain(error: io::Error) -> LinkError {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => LinkError::Silent(LOST_AFTER.as_secs()),
        ErrorKind::UnexpectedEof
        | ErrorKind::ConnectionReset
        | ErrorKind::ConnectionAborted
        | ErrorKind::BrokenPipe
        | ErrorKind::NotConnected => LinkError::Closed,
        _ => LinkError::Io(error),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::frame::{Counters, FrameError};
    use std::net::TcpListener;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    #[test]
    fn frames_arrive_in_order_and_the_end_is_noticed() {
        let (near, far) = pair();
        let (sender, _near_receiver) = split(near).unwrap();
        let (_far_sender, mut receiver) = split(far).unwrap();
        for busy_us in 0..100 {
            sender.send(&Frame::Heartbeat(Counters { busy_us, workspace_grown: 7 })).unwrap();
        }
        sender.send(&Frame::Error { reason: "x".repeat(5000) }).unwrap();
        for busy_us in 0..100 {
            let want = Frame::Heartbeat(Counters { busy_us, workspace_grown: 7 });
            assert_eq!(receiver.receive().unwrap(), want);
        }
        assert_eq!(receiver.receive().unwrap(), Frame::Error { reason: "x".repeat(4096) });
        sender.close();
        assert!(matches!(receiver.receive(), Err(LinkError::Closed)));
        assert!(sender.send(&Frame::Ready).is_err());
    }

    #[test]
    fn strangers_get_no_memory() {
        let (mut near, far) = pair();
        let (_sender, mut receiver) = split(far).unwrap();
        let mut bytes = Vec::new();
        Frame::Error { reason: "y".repeat(600) }.encode(&mut bytes).unwrap();
        near.write_all(&bytes).unwrap();
        let error = receiver.receive_limited(512).unwrap_err();
        assert!(matches!(error, LinkError::Frame(FrameError::TooLong { max: 512, .. })), "{error}");
        let (mut near, far) = pair();
        let (_sender, mut receiver) = split(far).unwrap();
        near.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        assert!(matches!(receiver.receive(), Err(LinkError::Frame(FrameError::Magic { .. }))));
    }

    #[test]
    fn silence_is_loss() {
        let (_near, far) = pair();
        let (_sender, mut receiver) = split(far).unwrap();
        receiver.set_timeout(Duration::from_millis(30)).unwrap();
        assert!(matches!(receiver.receive(), Err(LinkError::Silent(_))));
    }
}
