//! Tells a service manager that we are ready or stopping, by the `sd_notify` protocol: one datagram, no library.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Sends `state` (such as `READY=1`) to `$NOTIFY_SOCKET`, if there is one. A manager that does not listen is not our
/// trouble: an error is told, nothing fails.
pub fn tell(state: &str) {
    let Some(address) = std::env::var_os("NOTIFY_SOCKET") else {
        return;
    };
    let address = address.to_string_lossy().into_owned();
    let send = || -> std::io::Result<()> {
        let socket = UnixDatagram::unbound()?;
        match address.strip_prefix('@') {
            Some(name) => {
                socket.send_to_addr(state.as_bytes(), &SocketAddr::from_abstract_name(name)?)?
            }
            None => socket.send_to(state.as_bytes(), &address)?,
        };
        Ok(())
    };
    if let Err(error) = send() {
        tracing::warn!(%error, state, "could not tell the service manager");
    }
}
