//! Takes the port, before a model is loaded, so that a taken one is a sentence at once and not after
//! minutes. Knows no HTTP.

use crate::ServerConfig;
use std::fmt;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};

/// Why the server cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Another program has the port.
    #[error(
        "cannot listen on {address}: another program already uses port {port} (EADDRINUSE); \
         stop it, choose another port, or port 0 for any free one"
    )]
    AddressInUse {
        /// As it was asked for.
        address: String,
        /// The port.
        port: u16,
    },
    /// The port is reserved.
    #[error("cannot listen on {address}: ports below 1024 need more rights than this user has (EACCES)")]
    NotPermitted {
        /// As it was asked for.
        address: String,
    },
    /// The host is not a name or an address of this machine.
    #[error("cannot listen on {address}: {host:?} is not an address of this machine: {source}")]
    UnknownHost {
        /// As it was asked for.
        address: String,
        /// The host.
        host: String,
        /// What the system says.
        source: io::Error,
    },
    /// Anything else.
    #[error("cannot listen on {address}: {source}")]
    Io {
        /// As it was asked for.
        address: String,
        /// What the system says.
        source: io::Error,
    },
}

/// A taken port. Prints as `127.0.0.1:8000` or `[::1]:8000`. Connections wait in the system's backlog until
/// [`crate::serve`] accepts them.
#[derive(Debug)]
pub struct BoundListener {
    pub(crate) socket: TcpListener,
    address: SocketAddr,
}

impl BoundListener {
    /// Where it listens; the port is real even when 0 was asked for.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }
}

impl fmt::Display for BoundListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(f)
    }
}

/// Listens on the configured host and port. Needs no async runtime.
///
/// # Errors
/// [`BindError`]: one sentence that says what to do.
pub fn bind(config: &ServerConfig) -> Result<BoundListener, BindError> {
    let host = config.host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(&config.host);
    let port = config.port;
    let address = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    let candidates: Vec<SocketAddr> = (host, port)
        .to_socket_addrs()
        .map_err(|source| BindError::UnknownHost { address: address.clone(), host: host.to_owned(), source })?
        .collect();
    let io_error = |source| BindError::Io { address: address.clone(), source };
    let socket = TcpListener::bind(candidates.as_slice()).map_err(|source| match source.kind() {
        ErrorKind::AddrInUse => BindError::AddressInUse { address: address.clone(), port },
        ErrorKind::PermissionDenied => BindError::NotPermitted { address: address.clone() },
        ErrorKind::AddrNotAvailable => {
            BindError::UnknownHost { address: address.clone(), host: host.to_owned(), source }
        }
        _ => io_error(source),
    })?;
    socket.set_nonblocking(true).map_err(io_error)?;
    let address = socket.local_addr().map_err(io_error)?;
    Ok(BoundListener { socket, address })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn config(host: &str, port: u16) -> ServerConfig {
        ServerConfig { host: host.to_owned(), port, ..ServerConfig::default() }
    }

    #[test]
    fn d72_a_taken_port_is_a_sentence() {
        let first = bind(&config("127.0.0.1", 0)).unwrap();
        let port = first.local_addr().port();
        assert_ne!(port, 0);
        let error = bind(&config("127.0.0.1", port)).unwrap_err();
        assert!(matches!(error, BindError::AddressInUse { .. }));
        let text = error.to_string();
        assert!(text.contains("EADDRINUSE") && text.contains(&port.to_string()) && !text.contains('\n'), "{text}");
    }

    #[test]
    fn d73_ipv6_is_bound_and_printed_in_brackets() {
        for host in ["::1", "[::1]"] {
            match bind(&config(host, 0)) {
                Ok(listener) => {
                    let port = listener.local_addr().port();
                    assert_eq!(listener.to_string(), format!("[::1]:{port}"));
                }
                Err(error) => println!("skipped: this machine has no IPv6 loopback ({error})"),
            }
        }
    }

    #[test]
    fn an_unknown_host_is_a_sentence() {
        let error = bind(&config("203.0.113.7", 0)).unwrap_err();
        assert!(matches!(error, BindError::UnknownHost { .. }), "{error}");
    }
}
