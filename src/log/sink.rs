//! The consumer side of reading a log.

use super::fork::SessionRenamer;
use super::state::LogState;
use crate::codec::entry::Entry;
use crate::error::Result;
use crate::model::ForkOrigin;

/// A consumer of a log, entry by entry.
pub trait EntrySink {
    /// Applies the next entry, merge or snapshot.
    fn apply_entry(&mut self, entry: &Entry) -> Result<()>;

    /// Whether it needs the bytes of the session that a fork starts from.
    fn needs_fork_origin(&self) -> bool {
        false
    }

    /// Turns the applied origin session into the start of the fork.
    fn start_fork(&mut self, _fork: &ForkOrigin, _renamer: &SessionRenamer) -> Result<()> {
        Ok(())
    }
}

impl EntrySink for LogState {
    fn apply_entry(&mut self, entry: &Entry) -> Result<()> {
        self.apply(&entry.header, entry.digest)
    }

    fn start_fork(&mut self, _fork: &ForkOrigin, _renamer: &SessionRenamer) -> Result<()> {
        *self = LogState::default();
        Ok(())
    }
}

/// Both sinks receive every entry.
impl<A: EntrySink, B: EntrySink> EntrySink for (A, B) {
    fn apply_entry(&mut self, entry: &Entry) -> Result<()> {
        self.0.apply_entry(entry)?;
        self.1.apply_entry(entry)
    }

    fn needs_fork_origin(&self) -> bool {
        self.0.needs_fork_origin() || self.1.needs_fork_origin()
    }

    fn start_fork(&mut self, fork: &ForkOrigin, renamer: &SessionRenamer) -> Result<()> {
        self.0.start_fork(fork, renamer)?;
        self.1.start_fork(fork, renamer)
    }
}
