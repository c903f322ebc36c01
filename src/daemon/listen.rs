//! Where a server of ours is asked: a socket of this user's, or a port that only this machine reaches.

use std::fmt;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::str::FromStr;

use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

use crate::error::{Error, Result};

/// An address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listen {
    /// A unix socket.
    Unix(PathBuf),
    /// A port of a loopback address.
    Tcp(SocketAddr),
}

impl FromStr for Listen {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        let wrong = |why: &str| {
            Error::usage(format!("listen on {text:?}: {why}"))
                .hint("use unix:///run/sessiond-store.sock or http://127.0.0.1:7474")
        };
        if let Some(path) = text.strip_prefix("unix://") {
            let path = PathBuf::from(path);
            return if path.is_absolute() {
                Ok(Listen::Unix(path))
            } else {
                Err(wrong("the path must be absolute"))
            };
        }
        let Some(address) = text.strip_prefix("http://") else {
            return Err(wrong("neither unix:// nor http://"));
        };
        let address = address
            .trim_end_matches('/')
            .replacen("localhost:", "127.0.0.1:", 1);
        let address: SocketAddr = address
            .parse()
            .map_err(|_| wrong("an address and a port are wanted"))?;
        if !address.ip().is_loopback() {
            return Err(wrong(
                "other machines could reach that, and nobody would be asked for a password",
            ));
        }
        Ok(Listen::Tcp(address))
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Listen::Unix(path) => write!(f, "unix://{}", path.display()),
            Listen::Tcp(address) => write!(f, "http://{address}"),
        }
    }
}

/// What listens.
pub enum Listener {
    /// On a unix socket.
    Unix(UnixListener, PathBuf),
    /// On a port.
    Tcp(TcpListener),
}

/// Who asks.
pub enum Caller {
    /// Through a unix socket.
    Unix(UnixStream),
    /// Through a port.
    Tcp(TcpStream),
}

impl Listen {
    /// Begins to listen; answers where, for a port that was left open.
    pub async fn bind(&self) -> Result<(Listener, Listen)> {
        let taken = || {
            Error::conflict(format!("listen on {self}: somebody does already"))
                .hint("give --listen another address")
        };
        let failed = |cause: std::io::Error| match cause.kind() {
            std::io::ErrorKind::AddrInUse => taken(),
            _ => Error::named(format!("listen on {self}"), cause),
        };
        match self {
            Listen::Unix(path) => {
                // Only a dead one's: what a living one has answers.
                if UnixStream::connect(path).await.is_ok() {
                    return Err(taken());
                }
                let _ = std::fs::remove_file(path);
                let listener = UnixListener::bind(path).map_err(failed)?;
                std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
                    .map_err(failed)?;
                Ok((Listener::Unix(listener, path.clone()), self.clone()))
            }
            Listen::Tcp(address) => {
                let listener = TcpListener::bind(address).await.map_err(failed)?;
                let bound = listener.local_addr().map_err(failed)?;
                Ok((Listener::Tcp(listener), Listen::Tcp(bound)))
            }
        }
    }
}

impl Listener {
    /// The next one who asks.
    pub async fn accept(&self) -> std::io::Result<Caller> {
        match self {
            Listener::Unix(listener, _) => Ok(Caller::Unix(listener.accept().await?.0)),
            Listener::Tcp(listener) => Ok(Caller::Tcp(listener.accept().await?.0)),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Listener::Unix(_, path) = self {
            let _ = std::fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_is_listened_to() {
        let read = |text: &str| {
            text.parse::<Listen>()
                .map(|listen| listen.to_string())
                .map_err(|error| error.to_string())
        };
        assert_eq!(
            read("http://127.0.0.1:0").as_deref(),
            Ok("http://127.0.0.1:0")
        );
        assert_eq!(
            read("http://localhost:7474/").as_deref(),
            Ok("http://127.0.0.1:7474")
        );
        assert_eq!(
            read("http://[::1]:7474").as_deref(),
            Ok("http://[::1]:7474")
        );
        assert_eq!(
            read("unix:///run/x.sock").as_deref(),
            Ok("unix:///run/x.sock")
        );
        for bad in [
            "http://0.0.0.0:80",
            "http://[::]:80",
            "http://10.0.0.1:80",
            "http://example.org:80",
            "unix://x",
            "127.0.0.1:80",
            "",
        ] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
