//! Keeps the control socket and the lock of the root in place if the agent's directory, or the state
//! directory in it, is removed and created again under a running daemon.
//!
//! Owns the socket of the daemon. The first lock belongs to the restore, which comes before.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use tokio::task::JoinHandle;

use super::socket::{self, RequestHandler};
use crate::capture::StreamCounters;
use crate::error::Result;
use crate::sys::Disk;
use crate::sys::lock::{RootLock, lock_root, state_file};

/// Device and inode of a file; none if it does not exist.
type Identity = Option<(u64, u64)>;

/// Serves the control socket of a root.
pub struct StateGuard {
    disk: Arc<Disk>,
    handler: Arc<dyn RequestHandler>,
    counters: Arc<StreamCounters>,
    server: JoinHandle<()>,
    /// The lock that replaces the one whose file was removed.
    lock: Option<RootLock>,
    socket: Identity,
    lock_file: Identity,
}

impl StateGuard {
    /// Starts to serve requests. The caller holds the lock of the root. The files are checked after
    /// every scan of the streamer.
    pub fn start(
        disk: Arc<Disk>,
        handler: Arc<dyn RequestHandler>,
        counters: Arc<StreamCounters>,
    ) -> Result<StateGuard> {
        let server = socket::listen(&disk, handler.clone())?;
        Ok(StateGuard {
            socket: identity(&disk, "socket"),
            lock_file: identity(&disk, "lock"),
            disk,
            handler,
            counters,
            server,
            lock: None,
        })
    }

    /// Checks the files, forever; abort the task to stop.
    pub async fn run(mut self) {
        let mut failed = false;
        loop {
            // No timer of its own: an idle daemon sleeps as long as the streamer does.
            self.counters.wait_for_scan().await;
            // The agent creates its directory again. A directory of ours would be in its way.
            if self.is_in_place() || !self.disk.exists() {
                continue;
            }
            match self.replace() {
                Ok(()) => {
                    failed = false;
                    tracing::warn!(
                        root = %self.disk.root().display(),
                        "the directory was replaced; the control socket and the lock were created again"
                    );
                }
                Err(error) if !failed => {
                    failed = true;
                    tracing::error!(%error, "the directory was replaced, and clients cannot reach this daemon");
                }
                Err(_) => {}
            }
        }
    }

    fn is_in_place(&self) -> bool {
        self.socket.is_some()
            && self.socket == identity(&self.disk, "socket")
            && self.lock_file == identity(&self.disk, "lock")
    }

    fn replace(&mut self) -> Result<()> {
        if self.lock_file.is_none() || self.lock_file != identity(&self.disk, "lock") {
            self.lock = Some(lock_root(&self.disk)?);
            self.lock_file = identity(&self.disk, "lock");
        }
        let server = socket::listen(&self.disk, self.handler.clone())?;
        std::mem::replace(&mut self.server, server).abort();
        self.socket = identity(&self.disk, "socket");
        Ok(())
    }
}

impl Drop for StateGuard {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// The identity of a file in the state directory.
fn identity(disk: &Disk, name: &str) -> Identity {
    let path = state_file(name).ok()?;
    let found = disk.open_path(Some(&path)).ok()?.metadata().ok()?;
    Some((found.dev(), found.ino()))
}
