//! Listen addresses of the session store: a Unix socket of this user, or a port. A port of other
//! machines needs a token, which the caller checks.

use std::fmt;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

use crate::error::{Error, Result};

/// A listen address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListenAddress {
    /// A Unix socket.
    Unix(PathBuf),
    /// A port.
    Tcp(SocketAddr),
}

impl FromStr for ListenAddress {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        let invalid = |reason: &str| {
            Error::usage(format!("invalid --listen value {text:?}: {reason}")).hint(
                "use --listen unix:///run/sessiond-store.sock or --listen http://127.0.0.1:7474",
            )
        };
        if let Some(path) = text.strip_prefix("unix://") {
            let path = PathBuf::from(path);
            return if path.is_absolute() {
                Ok(ListenAddress::Unix(path))
            } else {
                Err(invalid("the path must be absolute"))
            };
        }
        let Some(address) = text.strip_prefix("http://") else {
            return Err(invalid("expected unix:// or http://"));
        };
        let address = address
            .trim_end_matches('/')
            .replacen("localhost:", "127.0.0.1:", 1);
        let address: SocketAddr = address
            .parse()
            .map_err(|_| invalid("expected ADDRESS:PORT"))?;
        Ok(ListenAddress::Tcp(address))
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListenAddress::Unix(path) => write!(f, "unix://{}", path.display()),
            ListenAddress::Tcp(address) => write!(f, "http://{address}"),
        }
    }
}

/// A bound socket.
pub enum Listener {
    /// A Unix socket. Its file is removed when the listener is dropped.
    Unix(UnixListener, PathBuf),
    /// A TCP port.
    Tcp(TcpListener),
}

/// An accepted connection.
pub enum Connection {
    /// A connection to the Unix socket.
    Unix(UnixStream),
    /// A connection to the TCP port.
    Tcp(TcpStream),
}

impl ListenAddress {
    /// Whether other machines can reach the address.
    pub fn is_remote(&self) -> bool {
        match self {
            ListenAddress::Unix(_) => false,
            ListenAddress::Tcp(address) => !address.ip().is_loopback(),
        }
    }

    /// Binds the address. Also returns the bound address, which contains the port chosen for port
    /// 0.
    pub async fn bind(&self) -> Result<(Listener, ListenAddress)> {
        let in_use = || {
            Error::conflict(format!("another process is listening on {self}"))
                .hint("pass another address to --listen")
        };
        let failed = |cause: std::io::Error| match cause.kind() {
            std::io::ErrorKind::AddrInUse => in_use(),
            _ => Error::user_path(format!("listen on {self}"), cause),
        };
        match self {
            ListenAddress::Unix(path) => {
                // A socket that accepts connections is in use; any other is stale.
                if UnixStream::connect(path).await.is_ok() {
                    return Err(in_use());
                }
                remove_stale_socket(path).map_err(failed)?;
                let listener = UnixListener::bind(path).map_err(failed)?;
                std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
                    .map_err(failed)?;
                Ok((Listener::Unix(listener, path.clone()), self.clone()))
            }
            ListenAddress::Tcp(address) => {
                let listener = TcpListener::bind(address).await.map_err(failed)?;
                let bound = listener.local_addr().map_err(failed)?;
                Ok((Listener::Tcp(listener), ListenAddress::Tcp(bound)))
            }
        }
    }
}

/// Removes the socket of a dead process. Any other file at the path belongs to somebody else.
fn remove_stale_socket(path: &Path) -> std::io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => std::fs::remove_file(path),
        Ok(_) => Err(std::io::Error::new(
            std::io::ErrorKind::AlreadyExists,
            "the path exists and is not a socket",
        )),
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(cause) => Err(cause),
    }
}

impl Listener {
    /// Waits for the next connection.
    pub async fn accept(&self) -> std::io::Result<Connection> {
        match self {
            Listener::Unix(listener, _) => Ok(Connection::Unix(listener.accept().await?.0)),
            Listener::Tcp(listener) => Ok(Connection::Tcp(listener.accept().await?.0)),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Listener::Unix(_, path) = self {
            let _ = remove_stale_socket(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed_and_know_whether_other_machines_reach_them() {
        let parse = |text: &str| {
            text.parse::<ListenAddress>()
                .map(|address| address.to_string())
                .map_err(|error| error.to_string())
        };
        assert_eq!(
            parse("http://127.0.0.1:0").as_deref(),
            Ok("http://127.0.0.1:0")
        );
        assert_eq!(
            parse("http://localhost:7474/").as_deref(),
            Ok("http://127.0.0.1:7474")
        );
        assert_eq!(
            parse("http://[::1]:7474").as_deref(),
            Ok("http://[::1]:7474")
        );
        assert_eq!(
            parse("unix:///run/x.sock").as_deref(),
            Ok("unix:///run/x.sock")
        );
        for remote in ["http://0.0.0.0:80", "http://[::]:80", "http://10.0.0.1:80"] {
            assert!(remote.parse::<ListenAddress>().unwrap().is_remote());
        }
        for local in ["http://127.0.0.1:80", "http://[::1]:80", "unix:///x"] {
            assert!(!local.parse::<ListenAddress>().unwrap().is_remote());
        }
        for bad in ["http://example.org:80", "unix://x", "127.0.0.1:80", ""] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
