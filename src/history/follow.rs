//! Follows a session that another process writes, by reading its log.
//!
//! Owns how far the log was read and which messages are new. Every `seq` is written once, so
//! reading the next `seq` shows whether the log has grown. The log is listed only periodically, or
//! when the next entry does not follow the last one: entries were compacted, or the session started
//! over.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::Duration;

use jiff::Timestamp;
use tokio::time::Instant;

use super::display::DisplayMessage;
use super::reader::tail_starts;
use crate::agent::Profile;
use crate::error::{Error, ErrorKind, Result};
use crate::log::Logs;
use crate::log::read::{ReadOptions, ReadOutcome};
use crate::log::replay::{PerTranscript, TranscriptReplay, TranscriptVisitor};
use crate::log::segments;
use crate::model::{FileMove, LocatedMessage, LogId, LogPoint, RelPath, Seq};

/// How often the log is listed. Polling for the next entry does not show that entries were
/// compacted or that the session started over.
const LIST_INTERVAL: Duration = Duration::from_secs(15);

/// A change of a followed session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FollowEvent {
    /// A new message.
    Message(Box<DisplayMessage>),
    /// The session was removed; it can be undeleted.
    Removed,
    /// The entries after the last one cannot be read.
    Damaged(String),
}

/// A session that is followed.
pub struct Follower<'a> {
    logs: &'a Logs,
    profile: &'a dyn Profile,
    id: LogId,
    seq: Seq,
    replay: TranscriptReplay<'a, NewMessages>,
    /// The damage that was reported last.
    reported: Option<String>,
}

/// A visitor that keeps the messages that were not shown yet.
#[derive(Debug, Clone, Default)]
struct NewMessages {
    verbose: bool,
    /// The keys of the messages that were shown.
    shown: HashSet<u64>,
    /// The time of the newest of them.
    newest: Option<Timestamp>,
    /// The transcripts that were rewritten: their messages may have been shown.
    rewritten: BTreeSet<RelPath>,
    /// Whether all transcripts were rewritten.
    all_rewritten: bool,
    messages: PerTranscript<DisplayMessage>,
}

impl TranscriptVisitor for NewMessages {
    fn visit_message(&mut self, located: LocatedMessage) {
        let (path, end) = (located.path.clone(), located.start + located.len);
        let previous = self.messages.last(&path).map_or(0, |last| last.position);
        let position = located
            .message
            .at
            .map_or(0, Timestamp::as_microsecond)
            .max(previous);
        let Some(message) = DisplayMessage::new(located, position, self.verbose) else {
            return;
        };
        let is_older = self
            .newest
            .is_some_and(|newest| message.at.is_some_and(|at| at < newest));
        let is_rewritten = self.all_rewritten || self.rewritten.contains(&path);
        if !is_rewritten || !is_older && !self.shown.contains(&message.key) {
            self.messages.push(path, end, message);
        }
    }

    fn truncate(&mut self, path: &RelPath, from: u64) {
        self.rewritten.insert(path.clone());
        self.messages.truncate(path, from);
    }

    fn apply_move(&mut self, moved: &FileMove) {
        self.messages.apply_move(moved);
    }

    fn start_fork(&mut self, names: &BTreeMap<RelPath, RelPath>) {
        self.messages.start_fork(names);
    }

    fn clear(&mut self) {
        self.all_rewritten = true;
        self.messages.clear();
    }
}

impl NewMessages {
    /// Returns the new messages, oldest first, and counts them as shown.
    fn drain(&mut self) -> Vec<DisplayMessage> {
        let mut messages: Vec<DisplayMessage> =
            std::mem::take(&mut self.messages).into_all().collect();
        // Transcripts are read one after the other, but were written at the same time.
        messages.sort_by_key(|message| message.position);
        self.shown
            .extend(messages.iter().map(|message| message.key));
        self.newest = self
            .newest
            .max(messages.iter().filter_map(|message| message.at).max());
        self.rewritten.clear();
        self.all_rewritten = false;
        messages
    }
}

impl<'a> Follower<'a> {
    /// Reads as few segments of the end of a session as hold `last` messages, and follows it from
    /// there.
    pub async fn start(
        logs: &'a Logs,
        profile: &'a dyn Profile,
        id: &LogId,
        last: usize,
        verbose: bool,
    ) -> Result<(Follower<'a>, Vec<FollowEvent>)> {
        let visitor = NewMessages {
            verbose,
            ..NewMessages::default()
        };
        let mut follower = Follower {
            logs,
            profile,
            id: id.clone(),
            seq: 0,
            replay: TranscriptReplay::new(profile, visitor),
            reported: None,
        };
        for after in tail_starts(logs, id, LogPoint::Latest).await? {
            let mut read = follower.read_after(after, &follower.replay).await?;
            let is_enough =
                read.damage.is_none() && read.sink.visitor.messages.iter().count() >= last;
            if is_enough || after == 0 {
                let damage = read.damage.take();
                let mut events = follower.advance(read.seq, read.sink);
                events.drain(..events.len().saturating_sub(last));
                events.extend(damage.and_then(|damage| follower.report_damage(&damage)));
                return Ok((follower, events));
            }
        }
        Err(Error::new(
            ErrorKind::Internal,
            "the list of start positions is empty",
        ))
    }

    /// Passes each change to `show`, until it returns false. Waits `interval` between two polls, and
    /// polls again while the store is unavailable.
    pub async fn follow(
        &mut self,
        interval: Duration,
        mut show: impl FnMut(Vec<FollowEvent>) -> Result<bool>,
    ) -> Result<()> {
        let (mut listed, mut is_failing) = (Instant::now(), false);
        loop {
            tokio::time::sleep(interval).await;
            let must_list = listed.elapsed() >= LIST_INTERVAL;
            match self.poll(must_list).await {
                Ok(events) => {
                    if std::mem::take(&mut is_failing) {
                        tracing::info!("the store responds again");
                    }
                    if must_list || !events.is_empty() {
                        listed = Instant::now();
                    }
                    if !show(events)? {
                        return Ok(());
                    }
                }
                Err(error) if error.is_retryable() => {
                    if !std::mem::replace(&mut is_failing, true) {
                        tracing::warn!(%error, "the store does not respond; retrying");
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns the changes since the last call. After an error nothing has changed; call it again
    /// later. With `list`, it also lists the log, and so notices that entries were compacted or
    /// that the session started over.
    pub async fn poll(&mut self, list: bool) -> Result<Vec<FollowEvent>> {
        let (mut seq, mut replay, mut follows) = (self.seq, self.replay.clone(), true);
        while follows {
            match self.logs.read_entry(&self.id, seq + 1).await {
                Ok(None) => break,
                Ok(Some(entry)) if entry.header.predecessor() == seq => {
                    replay.visit_entry(&entry);
                    seq += 1;
                }
                Err(error) if error.kind() != ErrorKind::Corrupt => return Err(error),
                Ok(Some(_)) | Err(_) => follows = false,
            }
        }
        if seq > self.seq {
            return Ok(self.advance(seq, replay));
        }
        if follows && !list {
            return Ok(Vec::new());
        }
        let head = segments::head(&self.logs.list_newest_segments(&self.id).await?);
        // Nothing is new, or all entries were deleted and no writer has started over yet.
        if head == self.seq || head == 0 {
            return Ok(Vec::new());
        }
        let started_over = head < self.seq;
        if !started_over {
            let read = self.read_after(self.seq, &self.replay).await?;
            if read.damage.is_none() {
                return Ok(self.advance(read.seq, read.sink));
            }
        }
        self.read_again(started_over).await
    }

    /// Reads the log from its first entry, and returns the messages that were not shown.
    async fn read_again(&mut self, started_over: bool) -> Result<Vec<FollowEvent>> {
        let visitor = NewMessages {
            all_rewritten: true,
            ..self.replay.visitor.clone()
        };
        let replay = TranscriptReplay::new(self.profile, visitor);
        let mut read = self.read_after(0, &replay).await?;
        let damage = read.damage.take();
        if read.seq <= self.seq && !started_over {
            let damage = damage.unwrap_or_else(|| {
                Error::corrupt(format!("no entry after entry {} can be read", self.seq))
            });
            return Ok(self.report_damage(&damage).into_iter().collect());
        }
        let mut events = self.advance(read.seq, read.sink);
        events.extend(damage.and_then(|damage| self.report_damage(&damage)));
        Ok(events)
    }

    async fn read_after(
        &self,
        after: Seq,
        replay: &TranscriptReplay<'a, NewMessages>,
    ) -> Result<ReadOutcome<TranscriptReplay<'a, NewMessages>>> {
        let options = ReadOptions {
            after,
            ..ReadOptions::default()
        };
        self.logs
            .read_log(&self.id, options, || replay.clone())
            .await
    }

    /// Moves to entry `seq`; returns what is new there.
    fn advance(&mut self, seq: Seq, replay: TranscriptReplay<'a, NewMessages>) -> Vec<FollowEvent> {
        let removed = replay.removed && !self.replay.removed;
        (self.seq, self.replay) = (seq, replay);
        let messages = self.replay.visitor.drain().into_iter();
        messages
            .map(|message| FollowEvent::Message(Box::new(message)))
            .chain(removed.then_some(FollowEvent::Removed))
            .collect()
    }

    /// Reports each damage once.
    fn report_damage(&mut self, damage: &Error) -> Option<FollowEvent> {
        let damage = damage.to_string();
        if self.reported.as_ref() == Some(&damage) {
            return None;
        }
        self.reported = Some(damage.clone());
        Some(FollowEvent::Damaged(damage))
    }
}
