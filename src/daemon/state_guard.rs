//! Keeps the control socket and the lock of the root in place if the agent's directory, or the state
//! directory in it, is removed and created again under a running daemon.
//!
//! Owns the socket of the daemon. The first lock belongs to the restore, which comes before.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use notify::event::ModifyKind;
use notify::{Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::socket::{self, RequestHandler};
use crate::error::Result;
use crate::sys::lock::{RootLock, lock_root, state_dir};

/// How often the files are checked if no file event hints at a change.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// The same if file events are not available.
const POLL_INTERVAL: Duration = Duration::from_secs(5);

/// Device and inode of a file; none if it does not exist.
type Identity = Option<(u64, u64)>;

/// Serves the control socket of a root.
pub struct StateGuard {
    root: PathBuf,
    handler: Arc<dyn RequestHandler>,
    server: JoinHandle<()>,
    /// The lock that replaces the one whose file was removed.
    lock: Option<RootLock>,
    socket: Identity,
    lock_file: Identity,
}

impl StateGuard {
    /// Starts to serve requests. The caller holds the lock of the root.
    pub fn start(root: &Path, handler: Arc<dyn RequestHandler>) -> Result<StateGuard> {
        let server = socket::listen(root, handler.clone())?;
        Ok(StateGuard {
            root: root.to_owned(),
            handler,
            server,
            lock: None,
            socket: identity(&socket::path(root)),
            lock_file: identity(&lock_path(root)),
        })
    }

    /// Checks the files, forever; abort the task to stop.
    pub async fn run(mut self) {
        let mut failed = false;
        let changed = Arc::new(Notify::new());
        let mut watcher = self.watcher(&changed);
        let interval = match watcher {
            Some(_) => CHECK_INTERVAL,
            None => POLL_INTERVAL,
        };
        loop {
            // A directory that was created again needs a new watch. It comes before the check, so
            // that no change is missed between the two.
            if let Some(watcher) = &mut watcher {
                self.watch(watcher);
            }
            if self.is_in_place() {
                let _ = tokio::time::timeout(interval, changed.notified()).await;
            }
            // The agent creates its directory again. A directory of ours would be in its way.
            if self.is_in_place() {
                continue;
            }
            if !self.root.is_dir() {
                let _ = tokio::time::timeout(POLL_INTERVAL, changed.notified()).await;
                continue;
            }
            match self.replace() {
                Ok(()) => {
                    failed = false;
                    tracing::warn!(
                        root = %self.root.display(),
                        "the directory was replaced; the control socket and the lock were created again"
                    );
                }
                Err(error) => {
                    if !failed {
                        tracing::error!(%error, "the directory was replaced, and clients cannot reach this daemon");
                    }
                    failed = true;
                    tokio::time::sleep(POLL_INTERVAL).await;
                }
            }
        }
    }

    /// A watcher that reports when the root, its state directory or a file of this guard is created,
    /// removed or renamed.
    fn watcher(&self, changed: &Arc<Notify>) -> Option<RecommendedWatcher> {
        let (root, state) = (self.root.clone(), state_dir(&self.root));
        let paths = [socket::path(&root), lock_path(&root), state, root];
        let changed = changed.clone();
        let on_event = move |event: notify::Result<Event>| {
            let is_relevant = event.is_ok_and(|event| {
                let kind = event.kind;
                let is_change = kind.is_create()
                    || kind.is_remove()
                    || matches!(kind, EventKind::Modify(ModifyKind::Name(_)));
                is_change && event.paths.iter().any(|path| paths.contains(path))
            });
            if is_relevant {
                changed.notify_one();
            }
        };
        let created = notify::recommended_watcher(on_event);
        created
            .inspect_err(|error| tracing::debug!(%error, "no file events for the control socket"))
            .ok()
    }

    fn watch(&self, watcher: &mut RecommendedWatcher) {
        let state = state_dir(&self.root);
        let directories = [self.root.parent(), Some(&self.root), Some(&state)];
        for directory in directories.into_iter().flatten() {
            // A missing directory gets its watch when it exists.
            let _ = watcher.watch(directory, RecursiveMode::NonRecursive);
        }
    }

    fn is_in_place(&self) -> bool {
        self.socket.is_some()
            && self.socket == identity(&socket::path(&self.root))
            && self.lock_file == identity(&lock_path(&self.root))
    }

    fn replace(&mut self) -> Result<()> {
        if self.lock_file.is_none() || self.lock_file != identity(&lock_path(&self.root)) {
            self.lock = Some(lock_root(&self.root, None)?);
            self.lock_file = identity(&lock_path(&self.root));
        }
        let server = socket::listen(&self.root, self.handler.clone())?;
        std::mem::replace(&mut self.server, server).abort();
        self.socket = identity(&socket::path(&self.root));
        Ok(())
    }
}

impl Drop for StateGuard {
    fn drop(&mut self) {
        self.server.abort();
    }
}

fn lock_path(root: &Path) -> PathBuf {
    state_dir(root).join("lock")
}

fn identity(path: &Path) -> Identity {
    let found = std::fs::symlink_metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}
