//! Just enough of an HTTP/1.1 client to time a streamed answer: one request a connection, a plain or
//! chunked body, server-sent events. Blocking; knows no field of the answer's JSON.

use anyhow::{Context, Result, bail};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// A header or event line longer than this is refused.
const LINE_BYTES_MAX: u64 = 4 << 20;
/// Headers that an answer may have.
const HEADERS_MAX: usize = 256;
/// Bytes of an answer that is read as a whole.
const BODY_BYTES_MAX: u64 = 16 << 20;
/// How long a server may stay silent: a full queue in front of a slow engine is no failure.
const PATIENCE: Duration = Duration::from_secs(600);

/// Where a server is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// `host:port`.
    authority: String,
    /// In front of `/v1`, without a slash at its end.
    base: String,
    api_key: Option<String>,
}

impl Server {
    /// Reads `http://host[:port][/base][/v1]`.
    ///
    /// # Errors
    /// Another scheme, or no host.
    pub fn parse(url: &str, api_key: Option<String>) -> Result<Self> {
        let Some(rest) = url.strip_prefix("http://") else {
            bail!("--url {url}: must begin with http:// (https is not supported here)");
        };
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        if host.is_empty() {
            bail!("--url {url}: there is no host");
        }
        let has_port = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let authority = if has_port { host.to_owned() } else { format!("{host}:80") };
        let path = path.trim_end_matches('/');
        let path = path.strip_suffix("v1").unwrap_or(path).trim_end_matches('/');
        let base = if path.is_empty() { String::new() } else { format!("/{path}") };
        Ok(Self { authority, base, api_key })
    }

    /// Sends a request and reads the answer's head.
    ///
    /// # Errors
    /// No connection, or no HTTP answer.
    pub fn send(&self, method: &str, path: &str, body: &str) -> Result<Answer> {
        let mut stream =
            TcpStream::connect(&self.authority).with_context(|| format!("connecting to {}", self.authority))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let key = self.api_key.as_ref().map(|key| format!("Authorization: Bearer {key}\r\n")).unwrap_or_default();
        let request = format!(
            "{method} {}{path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n{key}Content-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            self.base,
            self.authority,
            body.len()
        );
        stream.write_all(request.as_bytes()).context("sending the request")?;
        Answer::read(BufReader::new(stream)).context("reading the answer")
    }
}

/// An answer whose head has been read.
pub struct Answer {
    /// 200 and so on.
    pub status: u16,
    body: BufReader<Body<BufReader<TcpStream>>>,
}

impl Answer {
    fn read(mut stream: BufReader<TcpStream>) -> Result<Self> {
        let (status, framing) = read_head(&mut stream)?;
        Ok(Self { status, body: BufReader::new(Body { stream, framing }) })
    }

    /// The whole body.
    ///
    /// # Errors
    /// It ends early, is too long, or is no UTF-8.
    pub fn text(self) -> Result<String> {
        let mut text = String::new();
        self.body.take(BODY_BYTES_MAX).read_to_string(&mut text)?;
        Ok(text)
    }

    /// Calls `visit` with the data of each server-sent event as it comes.
    ///
    /// # Errors
    /// `visit`'s own, or the stream broke.
    pub fn events(mut self, mut visit: impl FnMut(&str) -> Result<()>) -> Result<()> {
        let mut line = String::new();
        while read_line(&mut self.body, &mut line)? {
            if let Some(data) = line.strip_prefix("data:") {
                visit(data.trim())?;
            }
        }
        Ok(())
    }
}

/// How the end of a body is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framing {
    /// Bytes left of the chunk being read; `None` before the first and after the last.
    Chunked { left: u64, ended: bool },
    /// Bytes left.
    Length(u64),
    /// The connection's end.
    ToEnd,
}

/// The bytes of a body without its framing.
struct Body<R> {
    stream: R,
    framing: Framing,
}

impl<R: BufRead> Read for Body<R> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        match self.framing {
            Framing::ToEnd => self.stream.read(out),
            Framing::Length(left) => {
                let n = limited(&mut self.stream, left, out)?;
                self.framing = Framing::Length(left - n as u64);
                Ok(n)
            }
            Framing::Chunked { ended: true, .. } => Ok(0),
            Framing::Chunked { left: 0, .. } => {
                let left = read_chunk_size(&mut self.stream)?;
                self.framing = Framing::Chunked { left, ended: left == 0 };
                self.read(out)
            }
            Framing::Chunked { left, .. } => {
                let n = limited(&mut self.stream, left, out)?;
                if left == n as u64 {
                    expect_line_end(&mut self.stream)?;
                }
                self.framing = Framing::Chunked { left: left - n as u64, ended: false };
                Ok(n)
            }
        }
    }
}

/// Reads at most `left` bytes; an early end is an error.
fn limited(stream: &mut impl Read, left: u64, out: &mut [u8]) -> std::io::Result<usize> {
    if left == 0 || out.is_empty() {
        return Ok(0);
    }
    let wanted = usize::try_from(left).map_or(out.len(), |left| left.min(out.len()));
    match stream.read(&mut out[..wanted])? {
        0 => Err(invalid("the answer ended early")),
        n => Ok(n),
    }
}

fn read_chunk_size(stream: &mut impl BufRead) -> std::io::Result<u64> {
    let mut line = String::new();
    if !read_line(stream, &mut line)? {
        return Err(invalid("the answer ended early"));
    }
    let size = line.split(';').next().unwrap_or_default().trim();
    u64::from_str_radix(size, 16).map_err(|_| invalid("a chunk without a size"))
}

fn expect_line_end(stream: &mut impl BufRead) -> std::io::Result<()> {
    let mut line = String::new();
    read_line(stream, &mut line)?;
    if line.is_empty() { Ok(()) } else { Err(invalid("a chunk longer than its size")) }
}

fn invalid(what: &str) -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::InvalidData, what)
}

/// Reads a line without its end into `line`; false at the end of the stream.
fn read_line(stream: &mut impl BufRead, line: &mut String) -> std::io::Result<bool> {
    line.clear();
    let n = stream.by_ref().take(LINE_BYTES_MAX).read_line(line)?;
    if n as u64 == LINE_BYTES_MAX {
        return Err(invalid("a line that is too long"));
    }
    line.truncate(line.trim_end_matches(['\r', '\n']).len());
    Ok(n > 0)
}

/// Status and framing.
fn read_head(stream: &mut impl BufRead) -> Result<(u16, Framing)> {
    let mut line = String::new();
    read_line(stream, &mut line)?;
    let status = line.strip_prefix("HTTP/1.").and_then(|rest| rest.split(' ').nth(1)).and_then(|s| s.parse().ok());
    let Some(status) = status else {
        bail!("no HTTP answer, but {line:?}");
    };
    let mut framing = Framing::ToEnd;
    for _ in 0..HEADERS_MAX {
        if !read_line(stream, &mut line)? || line.is_empty() {
            return Ok((status, framing));
        }
        let Some((name, value)) = line.split_once(':') else {
            bail!("a header without a colon: {line:?}");
        };
        let value = value.trim();
        if name.eq_ignore_ascii_case("transfer-encoding") && value.eq_ignore_ascii_case("chunked") {
            framing = Framing::Chunked { left: 0, ended: false };
        } else if name.eq_ignore_ascii_case("content-length") && framing == Framing::ToEnd {
            framing = Framing::Length(value.parse().with_context(|| format!("Content-Length: {value}"))?);
        }
    }
    bail!("more than {HEADERS_MAX} headers")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn body(answer: &str) -> std::io::Result<(u16, String)> {
        let mut stream = answer.as_bytes();
        let (status, framing) = read_head(&mut stream).unwrap();
        let mut text = String::new();
        Body { stream, framing }.read_to_string(&mut text)?;
        Ok((status, text))
    }

    #[test]
    fn bodies_end_where_their_framing_says() {
        let chunked =
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nA;x=1\r\n, world!!!\r\n0\r\n\r\n";
        assert_eq!(body(chunked).unwrap(), (200, "hello, world!!!".into()));
        let length = "HTTP/1.1 404 Not Found\r\ncontent-length: 3\r\n\r\nabcdef";
        assert_eq!(body(length).unwrap(), (404, "abc".into()));
        assert_eq!(body("HTTP/1.0 200 OK\r\n\r\nto the end").unwrap(), (200, "to the end".into()));
    }

    #[test]
    fn an_early_end_is_an_error() {
        for answer in [
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhello\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhel",
        ] {
            assert!(body(answer).is_err(), "{answer:?}");
        }
        assert!(read_head(&mut "SSH-2.0-OpenSSH\r\n".as_bytes()).is_err());
    }

    #[test]
    fn urls() {
        let parse = |url| Server::parse(url, None).map(|s| (s.authority, s.base));
        assert_eq!(parse("http://127.0.0.1:8000").unwrap(), ("127.0.0.1:8000".into(), String::new()));
        assert_eq!(parse("http://h/v1/").unwrap(), ("h:80".into(), String::new()));
        assert_eq!(parse("http://h:1/a/v1").unwrap(), ("h:1".into(), "/a".into()));
        assert!(parse("https://h").is_err() && parse("http:///v1").is_err());
    }
}
