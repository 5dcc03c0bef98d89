//! Just enough of an HTTP client: one request a connection, read to its end or piece by piece.

use crate::binary::PATIENCE;
use std::io::{Read, Write};
use std::net::TcpStream;

/// Sends a request and returns the connection.
pub fn send(address: &str, method: &str, path: &str, headers: &[&str], body: &str) -> std::io::Result<TcpStream> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut head = format!("{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n");
    for header in headers {
        head.push_str(&format!("{header}\r\n"));
    }
    head.push_str(&format!("Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}", body.len()));
    stream.write_all(head.as_bytes())?;
    Ok(stream)
}

/// Everything up to the end of the connection.
pub fn rest(mut stream: TcpStream) -> String {
    let mut answer = Vec::new();
    // A reset after the answer is the peer's way to close.
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

/// A whole exchange: the status and the text after it.
pub fn exchange(address: &str, method: &str, path: &str, headers: &[&str], body: &str) -> (u16, String) {
    let answer = rest(send(address, method, path, headers, body).unwrap());
    let status = answer.split(' ').nth(1).and_then(|s| s.parse().ok());
    (status.unwrap_or_else(|| panic!("no HTTP answer: {answer:?}")), answer)
}
