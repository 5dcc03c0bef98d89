//! A client that speaks bytes over a plain socket, so that tests see what is really sent.

use serde_json::Value;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// A connection; it stays open between requests unless the server closes it.
pub struct Client {
    pub socket: TcpStream,
    buffer: Vec<u8>,
}

/// An answer.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    /// Decoded if it came in chunks.
    pub body: Vec<u8>,
}

impl Reply {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|e| panic!("{e} in {:?}", String::from_utf8_lossy(&self.body)))
    }
}

impl Client {
    pub fn new(address: SocketAddr) -> Self {
        Self::on(TcpStream::connect(address).unwrap())
    }

    /// On a connection that is already there.
    pub fn on(socket: TcpStream) -> Self {
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Self { socket, buffer: Vec::new() }
    }

    /// Posts JSON and reads the answer.
    pub fn post(&mut self, path: &str, body: &Value) -> Reply {
        self.send("POST", path, &[("content-type", "application/json")], body.to_string().as_bytes());
        self.reply()
    }

    /// Gets a path and reads the answer.
    pub fn get(&mut self, path: &str) -> Reply {
        self.send("GET", path, &[], b"");
        self.reply()
    }

    /// Sends one request.
    pub fn send(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) {
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: test\r\n");
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if !body.is_empty() || method == "POST" {
            head.push_str(&format!("content-length: {}\r\n", body.len()));
        }
        head.push_str("\r\n");
        self.socket.write_all(&[head.as_bytes(), body].concat()).unwrap();
    }

    /// Reads one answer.
    pub fn reply(&mut self) -> Reply {
        let (status, headers) = self.head();
        let find = |name: &str| headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone());
        let body = if let Some(length) = find("content-length") {
            self.take(length.parse().unwrap())
        } else if find("transfer-encoding").as_deref() == Some("chunked") {
            let mut body = Vec::new();
            while let Some(chunk) = self.chunk() {
                body.extend(chunk);
            }
            body
        } else {
            Vec::new()
        };
        Reply { status, headers, body }
    }

    /// Reads one answer to a request that wants no body (HEAD).
    pub fn reply_without_body(&mut self) -> Reply {
        let (status, headers) = self.head();
        Reply { status, headers, body: Vec::new() }
    }

    /// Reads status line and headers.
    pub fn head(&mut self) -> (u16, Vec<(String, String)>) {
        let head = String::from_utf8(self.take_until(b"\r\n\r\n")).unwrap();
        let mut lines = head.trim_end().split("\r\n");
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let headers = lines
            .map(|line| {
                let (name, value) = line.split_once(':').unwrap();
                (name.to_ascii_lowercase(), value.trim().to_owned())
            })
            .collect();
        (status, headers)
    }

    /// Reads one chunk of a chunked body; `None` is the end.
    pub fn chunk(&mut self) -> Option<Vec<u8>> {
        let line = String::from_utf8(self.take_until(b"\r\n")).unwrap();
        let size = usize::from_str_radix(line.trim(), 16).unwrap();
        let data = self.take(size);
        assert_eq!(self.take(2), b"\r\n");
        (size > 0).then_some(data)
    }

    /// Whether the server closes the connection without sending more.
    pub fn is_closed(&mut self) -> bool {
        self.buffer.is_empty() && matches!(self.socket.read(&mut [0; 1]), Ok(0) | Err(_))
    }

    fn take(&mut self, count: usize) -> Vec<u8> {
        while self.buffer.len() < count {
            self.fill();
        }
        self.buffer.drain(..count).collect()
    }

    fn take_until(&mut self, end: &[u8]) -> Vec<u8> {
        loop {
            if let Some(at) = self.buffer.windows(end.len()).position(|w| w == end) {
                return self.buffer.drain(..at + end.len()).collect();
            }
            self.fill();
        }
    }

    fn fill(&mut self) {
        let mut bytes = [0; 16 << 10];
        let count = self.socket.read(&mut bytes).unwrap();
        assert!(count > 0, "the server closed the connection after {:?}", String::from_utf8_lossy(&self.buffer));
        self.buffer.extend_from_slice(&bytes[..count]);
    }
}

/// The events of a stream, by the letter of the format: each is one `data:` line and an empty line. The last
/// is `[DONE]`, which is checked and left out.
pub fn sse_events(body: &str) -> Vec<Value> {
    let mut events: Vec<&str> = body.split("\n\n").collect();
    assert_eq!(events.pop(), Some(""), "the stream ends with an empty line: {body:?}");
    let mut data: Vec<&str> = events
        .into_iter()
        .filter(|event| !event.starts_with(':'))
        .map(|event| {
            assert!(!event.contains('\n'), "{event:?}");
            event.strip_prefix("data: ").unwrap_or_else(|| panic!("{event:?}"))
        })
        .collect();
    assert_eq!(data.pop(), Some("[DONE]"));
    data.into_iter().map(|json| serde_json::from_str(json).unwrap()).collect()
}
