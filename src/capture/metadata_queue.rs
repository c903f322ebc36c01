//! The queue of sessions whose metadata this process still has to write.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::model::LogName;

#[derive(Default)]
struct Pending {
    /// The sessions that were added once.
    known: BTreeSet<LogName>,
    sessions: BTreeSet<LogName>,
    /// Whether the metadata writer is working on a session.
    in_progress: bool,
}

/// A queue of sessions for the metadata writer. Each session enters it once per process.
#[derive(Default)]
pub struct MetadataQueue {
    pending: Mutex<Pending>,
    pushed: Notify,
}

impl MetadataQueue {
    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that an entry was appended to a log. The first entry adds the session to the queue.
    pub fn push(&self, name: &LogName) {
        if name.is_project() {
            return;
        }
        let mut pending = self.lock();
        if pending.known.insert(name.clone()) {
            pending.sessions.insert(name.clone());
            self.pushed.notify_one();
        }
    }

    /// Waits for the next session. The previous session counts as finished.
    pub async fn next(&self) -> LogName {
        loop {
            let pushed = self.pushed.notified();
            if let Some(name) = self.start_next() {
                return name;
            }
            pushed.await;
        }
    }

    fn start_next(&self) -> Option<LogName> {
        let mut pending = self.lock();
        let name = pending.sessions.pop_first();
        pending.in_progress = name.is_some();
        name
    }

    /// Puts back a session whose metadata could not be written.
    pub fn retry(&self, name: LogName) {
        self.lock().sessions.insert(name);
        self.pushed.notify_one();
    }

    /// Whether the metadata of every session is written.
    pub fn is_idle(&self) -> bool {
        let pending = self.lock();
        pending.sessions.is_empty() && !pending.in_progress
    }
}
