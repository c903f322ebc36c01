//! The way out: the agent's directory → scan, watch, cut → entry → log → ledger.
//!
//! Owns what is read, when, and where it is cut. Does not own the format (`codec`), the fence (`log`) or the index,
//! which is fed through `Feed`.

pub mod changes;
pub mod feed;
pub mod flush;
pub mod handle;
pub mod recover;
pub mod scan;
pub mod streamer;
pub mod tracked_log;
pub mod watch;

use std::sync::Arc;
use std::time::Duration;

use crate::agent::Profile;
use crate::log::Logs;
use crate::sys::Directory;

pub use feed::Feed;
pub use handle::StreamerHandle;
pub use streamer::Streamer;
pub use tracked_log::StreamSummary;

/// Everything the way out needs.
#[derive(Clone)]
pub struct Context {
    /// The agent's directory.
    pub directory: Arc<dyn Directory>,
    /// What we know of the agent.
    pub profile: Arc<dyn Profile>,
    /// Where the entries go.
    pub logs: Logs,
    /// Where the index learns of them.
    pub feed: Arc<Feed>,
    /// At most this long after the first unsaved byte a flush begins.
    pub flush_interval: Duration,
    /// So many sessions are flushed at a time.
    pub parallel: usize,
}
