//! Capture: uploads the changes of the agent's directory as entries.
//!
//! Owns scanning, watching, change detection and flushing. Does not own the entry format (`codec`),
//! the fence (`log`) or the index, which takes its work from `IndexQueue`.

pub mod changes;
pub mod compaction_queue;
mod file_change;
pub mod flush;
pub mod flush_state;
pub mod handle;
pub mod index_queue;
pub mod limits;
pub mod metadata_queue;
mod outage;
pub mod recover;
pub mod scan;
pub mod stream_counters;
pub mod streamer;
pub mod tracked_log;
mod waiters;
pub mod watch;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use self::scan::{DirectoryScan, LogCache, scan_cached};
use crate::agent::Profile;
use crate::error::Result;
use crate::index::EntryRecord;
use crate::log::Logs;
use crate::model::{CheckpointInterval, CheckpointRetention, LogName};
use crate::sys::Directory;

pub use compaction_queue::CompactionQueue;
pub use handle::{FinishReport, FlushReport, StreamerHandle};
pub use index_queue::{IndexQueue, IndexTask, StaleCheck};
pub use limits::EntryLimits;
pub use metadata_queue::MetadataQueue;
pub use stream_counters::StreamCounters;
pub use streamer::Streamer;
pub use tracked_log::StreamSummary;

/// The dependencies of the streamer.
#[derive(Clone)]
pub struct CaptureContext {
    /// The agent's directory.
    pub directory: Arc<dyn Directory>,
    /// The agent's profile.
    pub profile: Arc<dyn Profile>,
    /// The logs to append to.
    pub logs: Logs,
    /// The entries and failures to record in the index.
    pub index_queue: Arc<IndexQueue>,
    /// The logs to compact.
    pub compaction_queue: Arc<CompactionQueue>,
    /// The sessions whose metadata to write; none if this process sets no metadata.
    pub metadata_queue: Option<Arc<MetadataQueue>>,
    /// The counters of the streamer.
    pub counters: Arc<StreamCounters>,
    /// Maximum time from the first unsaved byte to the start of a flush.
    pub flush_interval: Duration,
    /// The checkpoints to make and to keep.
    pub checkpoints: CheckpointPolicy,
    /// Maximum number of concurrent flushes.
    pub max_concurrent_flushes: usize,
    /// The sizes of entries.
    pub limits: EntryLimits,
    /// The existing sessions that may be continued.
    pub session_limit: SessionLimit,
}

/// The checkpoints that a writer makes and keeps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CheckpointPolicy {
    /// How often a step gets a checkpoint.
    pub interval: CheckpointInterval,
    /// Which checkpoints are kept; none for the default.
    pub keep: Option<CheckpointRetention>,
}

/// The sessions of the store that this process may continue without having written to them before.
/// It may always create a session.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SessionLimit(Option<BTreeSet<LogName>>);

impl SessionLimit {
    /// Only these sessions.
    pub fn only(sessions: impl IntoIterator<Item = LogName>) -> SessionLimit {
        SessionLimit(Some(sessions.into_iter().collect()))
    }

    /// Adds sessions, if there is a limit.
    pub fn add(&mut self, sessions: impl IntoIterator<Item = LogName>) {
        if let SessionLimit(Some(allowed)) = self {
            allowed.extend(sessions);
        }
    }

    /// Whether a log may be continued. The limit does not apply to the logs of projects, which any
    /// writer continues.
    pub fn contains(&self, name: &LogName) -> bool {
        let SessionLimit(allowed) = self;
        name.is_project()
            || allowed
                .as_ref()
                .is_none_or(|allowed| allowed.contains(name))
    }
}

impl CaptureContext {
    /// Scans the agent's directory.
    fn scan(&self, cache: &mut LogCache) -> Result<DirectoryScan> {
        scan_cached(&*self.directory, &*self.profile, None, cache)
    }

    /// Passes an appended entry to the queues and counters.
    fn entry_appended(&self, record: EntryRecord) {
        self.counters.entry_appended(&record);
        // A branch is not compacted, and metadata belongs to the main log.
        if record.branch.is_none() {
            self.compaction_queue
                .push(&record.log.name, record.header.seq);
            if let Some(queue) = &self.metadata_queue {
                queue.push(&record.log.name);
            }
        }
        self.index_queue.push(record);
    }
}
