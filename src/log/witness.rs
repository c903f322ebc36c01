//! The index as a witness of a log: it knows which entries were durable, so it notices that the
//! newest objects of a log were deleted or replaced.
//!
//! Owns the query and the comparison. Does not own what a rollback means for a command. The store
//! stays authoritative: an index that lacks the log, or knows only older entries, says nothing.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use super::{Logs, segments};
use crate::error::{Error, ErrorContext, Result};
use crate::index::{EntryRow, Index};
use crate::model::{Digest, LogId, Seq};
use crate::sys::mutation::{Mutation, is_active};

/// How long a restore waits for the index, from the start of the restore. A reachable database
/// answers within milliseconds; an unreachable one must not delay the agent.
const MAX_WAIT: Duration = Duration::from_millis(500);

/// Number of entries that the index is asked for. The schedule of compaction keeps far fewer
/// segments, so the last of these entries end segments that a restore reads.
pub const NEWEST_ENTRIES: u32 = 512;

/// Whether a restore asks the index.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WitnessMode {
    /// If it answers in time.
    #[default]
    Auto,
    /// Always: without its answer, nothing is restored.
    Require,
    /// Never.
    Off,
}

impl FromStr for WitnessMode {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(WitnessMode::Auto),
            "require" => Ok(WitnessMode::Require),
            "off" => Ok(WitnessMode::Off),
            _ => Err(Error::usage(format!(
                "invalid --witness value {text:?}: expected auto, require or off"
            ))),
        }
    }
}

/// The index that a restore asks.
#[derive(Clone, Default)]
pub struct Witness {
    index: Option<Arc<dyn Index>>,
    mode: WitnessMode,
    /// Whether the user accepts a rollback.
    accepts_rollback: bool,
}

impl fmt::Debug for Witness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Witness")
            .field("mode", &self.mode)
            .field("accepts_rollback", &self.accepts_rollback)
            .finish_non_exhaustive()
    }
}

impl Witness {
    /// A witness; none if the mode is off.
    pub fn new(index: Option<Arc<dyn Index>>, mode: WitnessMode) -> Witness {
        Witness {
            index: index.filter(|_| mode != WitnessMode::Off),
            mode,
            accepts_rollback: false,
        }
    }

    /// The same witness; `accepts_rollback` says whether the user accepts a rollback.
    #[must_use]
    pub fn accepting_rollback(&self, accepts_rollback: bool) -> Witness {
        Witness {
            accepts_rollback,
            ..self.clone()
        }
    }

    /// Whether there is an index to ask.
    pub fn is_on(&self) -> bool {
        self.index.is_some()
    }

    /// Asks the index for the newest entries of a log. The query runs while the log is read.
    pub fn ask(&self, id: &LogId) -> WitnessQuery {
        let deadline = Instant::now() + MAX_WAIT;
        let task = self.index.clone().map(|index| {
            let id = id.clone();
            tokio::spawn(async move { index.newest_entries(&id, NEWEST_ENTRIES).await })
        });
        WitnessQuery {
            task,
            deadline,
            mode: self.mode,
            accepts_rollback: self.accepts_rollback,
        }
    }
}

/// A running query.
pub struct WitnessQuery {
    task: Option<JoinHandle<Result<Vec<EntryRow>>>>,
    deadline: Instant,
    mode: WitnessMode,
    accepts_rollback: bool,
}

impl WitnessQuery {
    /// Compares a log that was read with what the index knows. An error if the log was rolled back
    /// and the user does not accept that; the rollback if the user does.
    pub async fn check(
        self,
        logs: &Logs,
        id: &LogId,
        log: &ReadLinks<'_>,
    ) -> Result<Option<LogRollback>> {
        let (mode, accepts_rollback) = (self.mode, self.accepts_rollback);
        let Some(known) = self.known().await.transpose() else {
            return Ok(None);
        };
        let known = match known {
            Ok(known) => known,
            Err(error) if mode == WitnessMode::Require => {
                // The hint of the index says that restoring works without it.
                return Err(Error::new(error.kind(), error.to_string())
                    .context(format_args!("compare {id} with the index"))
                    .hint("check --index, or set --witness auto to restore without its answer"));
            }
            Err(error) => {
                tracing::debug!(%error, "restoring without the index as a witness");
                return Ok(None);
            }
        };
        match compare(&known, log) {
            // Another writer may have appended after the log was listed; the claim notices that.
            Some(rollback)
                if rollback.replaced.is_none()
                    && segments::head(&logs.list_newest_segments(id).await?)
                        >= rollback.indexed_head =>
            {
                Ok(None)
            }
            Some(rollback) if accepts_rollback => {
                tracing::warn!(session = %id.name, %rollback, "accepting a rollback of the log");
                Ok(Some(rollback))
            }
            Some(rollback) => Err(rollback.error(id)),
            None => Ok(None),
        }
    }

    /// What the index knows; none if there is no index to ask.
    async fn known(self) -> Result<Option<Vec<EntryRow>>> {
        let Some(mut task) = self.task else {
            return Ok(None);
        };
        let answer = match self.mode {
            WitnessMode::Require => task.await,
            _ => match timeout_at(self.deadline, &mut task).await {
                Ok(answer) => answer,
                Err(_) => {
                    task.abort();
                    let wait = MAX_WAIT.as_millis();
                    return Err(Error::unavailable(format!(
                        "the index did not answer within {wait} ms"
                    )));
                }
            },
        };
        let answer = answer.map_err(|cause| {
            Error::unavailable("ask the index for the newest entries").caused_by(cause)
        })?;
        answer
            .context("ask the index for the newest entries")
            .map(Some)
    }
}

/// What a read shows of a log.
#[derive(Debug, Clone, Copy)]
pub struct ReadLinks<'a> {
    /// The last `seq` in use; 0 if the log does not exist.
    pub head: Seq,
    /// The last entries that were applied, or the last entries of the segments, in order.
    pub links: &'a [(Seq, Digest)],
}

/// How the store contradicts the index.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct LogRollback {
    /// The last entry that the index knows.
    pub indexed_head: Seq,
    /// The last entry in the store.
    pub head: Seq,
    /// The entry that differs; none if entries are missing.
    pub replaced: Option<Seq>,
}

impl LogRollback {
    fn error(&self, id: &LogId) -> Error {
        let name = &id.name;
        let hint = match self.head {
            0 => "restore the objects from a backup or from earlier object versions, or run \"sessiond reindex\" if they were deleted on purpose".to_owned(),
            head => format!(
                "restore the objects from a backup or from earlier object versions; if the store was emptied on purpose and a daemon filled it again, run \"sessiond reindex\"; to continue after entry {head}, run \"sessiond restore {name} --accept-rollback\""
            ),
        };
        Error::corrupt(format!("the log was rolled back: {self}")).hint(hint)
    }
}

impl fmt::Display for LogRollback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (indexed, head) = (self.indexed_head, self.head);
        match (self.replaced, head) {
            (Some(seq), _) => write!(f, "entry {seq} is not the one that the index knows"),
            (None, 0) => write!(
                f,
                "the index knows entry {indexed}, but the store has no entry"
            ),
            (None, _) => write!(
                f,
                "the index knows entry {indexed}, but the store ends with entry {head}"
            ),
        }
    }
}

/// Compares the newest entries that the index knows, newest first, with a log that was read. Pure.
pub fn compare(known: &[EntryRow], log: &ReadLinks<'_>) -> Option<LogRollback> {
    let newest = known.first()?;
    // Garbage collection deletes a removed session, and its rows afterwards.
    let is_removed = matches!(newest.kind.as_str(), "tombstone" | "purge");
    if is_removed || is_active(Mutation::IgnoreWitness) {
        return None;
    }
    let rollback = LogRollback {
        indexed_head: newest.seq,
        head: log.head,
        replaced: None,
    };
    if log.head < newest.seq {
        return Some(rollback);
    }
    // The newest entry that both know. An entry within a merge is not read on its own.
    let mut links = log.links.iter().rev();
    let (row, digest) = links.find_map(|(seq, digest)| {
        let row = known.iter().find(|row| row.seq == *seq)?;
        Some((row, digest))
    })?;
    (row.digest != *digest).then_some(LogRollback {
        replaced: Some(row.seq),
        ..rollback
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(seq: Seq, kind: &str, content: &str) -> EntryRow {
        EntryRow {
            seq,
            branch: None,
            kind: kind.to_owned(),
            writer: "w".to_owned(),
            at: jiff::Timestamp::UNIX_EPOCH,
            raw_bytes: 0,
            stored_bytes: 0,
            digest: Digest::of(content.as_bytes()),
        }
    }

    fn links(entries: &[(Seq, &str)]) -> Vec<(Seq, Digest)> {
        let link = |(seq, content): &(Seq, &str)| (*seq, Digest::of(content.as_bytes()));
        entries.iter().map(link).collect()
    }

    fn rolled_back(known: &[EntryRow], head: Seq, read: &[(Seq, &str)]) -> Option<Option<Seq>> {
        let links = links(read);
        let log = ReadLinks {
            head,
            links: &links,
        };
        compare(known, &log).map(|rollback| rollback.replaced)
    }

    #[test]
    fn missing_and_replaced_entries_are_noticed() {
        let known = [
            row(3, "delta", "c"),
            row(2, "delta", "b"),
            row(1, "claim", "a"),
        ];
        assert_eq!(
            rolled_back(&known, 3, &[(1, "a"), (2, "b"), (3, "c")]),
            None
        );
        assert_eq!(rolled_back(&known, 2, &[(1, "a"), (2, "b")]), Some(None));
        assert_eq!(rolled_back(&known, 0, &[]), Some(None));
        assert_eq!(
            rolled_back(&known, 3, &[(1, "a"), (2, "b"), (3, "x")]),
            Some(Some(3))
        );
        // Also if the forged log is longer.
        assert_eq!(
            rolled_back(&known, 5, &[(2, "b"), (3, "x"), (4, "y"), (5, "z")]),
            Some(Some(3))
        );
    }

    #[test]
    fn an_older_index_a_merge_and_a_skipped_entry_are_no_rollback() {
        let known = [
            row(3, "delta", "c"),
            row(2, "delta", "b"),
            row(1, "claim", "a"),
        ];
        assert_eq!(rolled_back(&[], 3, &[(3, "c")]), None);
        assert_eq!(rolled_back(&known, 6, &[(3, "c"), (6, "f")]), None);
        // A merge of the entries 3 to 6 was read.
        assert_eq!(rolled_back(&known, 6, &[(2, "b"), (6, "f")]), None);
        // A later claim skips entry 3, which is damaged.
        assert_eq!(
            rolled_back(&known, 4, &[(1, "a"), (2, "b"), (4, "d")]),
            None
        );
        // A removed session is being deleted.
        let known = [row(4, "tombstone", "d"), row(3, "delta", "c")];
        assert_eq!(rolled_back(&known, 0, &[]), None);
    }
}
