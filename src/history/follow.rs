//! Following a session that is being written elsewhere, by the bucket alone.
//!
//! Owns how far it was read and what is new. A number is written once, so asking for the next one says whether anything is new;
//! the log is listed only now and then, or when the next one does not fit: when entries were collected, or the session begins
//! anew.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use jiff::Timestamp;

use super::conversation::ends;
use super::display::DisplayMessage;
use crate::agent::Profile;
use crate::error::{Error, ErrorKind, Result};
use crate::log::Logs;
use crate::log::read::{ReadOptions, ReadOutcome};
use crate::log::replay::{PerTranscript, TranscriptReplay, TranscriptVisitor};
use crate::log::segments;
use crate::model::{LocatedMessage, LogId, LogPoint, RelPath, Seq};

/// What is new.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum News {
    /// Something was said.
    LocatedMessage(Box<DisplayMessage>),
    /// The session was removed; it may come back.
    Removed,
    /// What comes behind this entry cannot be read.
    Damaged(String),
}

/// A session that is followed.
pub struct Follow<'a> {
    logs: &'a Logs,
    profile: &'a dyn Profile,
    id: LogId,
    seq: Seq,
    heard: TranscriptReplay<'a, Fresh>,
    /// Damage that was told.
    told: Option<String>,
}

/// Keeps what is new.
#[derive(Debug, Clone, Default)]
struct Fresh {
    full: bool,
    /// The messages that were shown, by what tells them apart.
    names: HashSet<u64>,
    /// The newest of them.
    newest: Option<Timestamp>,
    /// The transcripts that are written anew: what they say once more is no news.
    again: BTreeSet<RelPath>,
    /// All of them are.
    all_again: bool,
    news: PerTranscript<DisplayMessage>,
}

impl TranscriptVisitor for Fresh {
    fn said(&mut self, said: LocatedMessage) {
        let (path, end) = (said.path.clone(), said.start + said.len);
        let before = self.news.last(&path).map_or(0, |last| last.position);
        let position = said
            .message
            .at
            .map_or(0, Timestamp::as_microsecond)
            .max(before);
        let Some(spoken) = DisplayMessage::of(said, position, self.full) else {
            return;
        };
        let older = self
            .newest
            .is_some_and(|newest| spoken.at.is_some_and(|at| at < newest));
        let again = self.all_again || self.again.contains(&path);
        if !again || !older && !self.names.contains(&spoken.name) {
            self.news.push(path, end, spoken);
        }
    }

    fn cut(&mut self, path: &RelPath, from: u64) {
        self.again.insert(path.clone());
        self.news.cut(path, from);
    }

    fn moved(&mut self, from: &RelPath, to: &RelPath) {
        self.news.moved(from, to);
    }

    fn forked(&mut self, names: &BTreeMap<RelPath, RelPath>) {
        self.news.forked(names);
    }

    fn clear(&mut self) {
        self.all_again = true;
        self.news.clear();
    }
}

impl Fresh {
    /// What is new, oldest first. From here on it was shown.
    fn take(&mut self) -> Vec<DisplayMessage> {
        let mut news: Vec<DisplayMessage> = std::mem::take(&mut self.news).into_all().collect();
        // Files come one behind the other; what was said in them did not.
        news.sort_by_key(|spoken| spoken.position);
        self.names.extend(news.iter().map(|spoken| spoken.name));
        self.newest = self
            .newest
            .max(news.iter().filter_map(|spoken| spoken.at).max());
        self.again.clear();
        self.all_again = false;
        news
    }
}

impl<'a> Follow<'a> {
    /// Reads the end of a session, from as few objects as have `last` messages, and follows it from there.
    pub async fn begin(
        logs: &'a Logs,
        profile: &'a dyn Profile,
        id: &LogId,
        last: usize,
        full: bool,
    ) -> Result<(Follow<'a>, Vec<News>)> {
        let heard = TranscriptReplay::new(
            profile,
            Fresh {
                full,
                ..Fresh::default()
            },
        );
        let mut follow = Follow {
            logs,
            profile,
            id: id.clone(),
            seq: 0,
            heard,
            told: None,
        };
        for after in ends(logs, id, LogPoint::Latest, true).await? {
            let mut read = follow.listen(after, &follow.heard).await?;
            let enough = read.damage.is_none() && read.sink.ear.news.iter().count() >= last;
            if enough || after == 0 {
                let damage = read.damage.take();
                let mut news = follow.keep(read.seq, read.sink);
                news.drain(..news.len().saturating_sub(last));
                news.extend(damage.and_then(|damage| follow.damaged(&damage)));
                return Ok((follow, news));
            }
        }
        Err(Error::new(ErrorKind::Internal, "read the end of a session"))
    }

    /// What is new since the last look. After an error nothing has changed: look again later. A `thorough` look also notices
    /// what the next number does not tell: that entries were collected, or that the session begins anew.
    pub async fn look(&mut self, thorough: bool) -> Result<Vec<News>> {
        let (mut seq, mut heard, mut fits) = (self.seq, self.heard.clone(), true);
        while fits {
            match self.logs.read(&self.id, seq + 1).await {
                Ok(None) => break,
                Ok(Some(entry)) if entry.header.follows() == seq => {
                    heard.hear(&entry);
                    seq += 1;
                }
                Err(error) if error.kind() != ErrorKind::Corrupt => return Err(error),
                Ok(Some(_)) | Err(_) => fits = false,
            }
        }
        if seq > self.seq {
            return Ok(self.keep(seq, heard));
        }
        if fits && !thorough {
            return Ok(Vec::new());
        }
        let head = segments::head(&self.logs.newest_pieces(&self.id).await?);
        // Nothing new; or all of it is gone, until somebody writes again.
        if head == self.seq || head == 0 {
            return Ok(Vec::new());
        }
        let anew = head < self.seq;
        if !anew {
            let read = self.listen(self.seq, &self.heard).await?;
            if read.damage.is_none() {
                return Ok(self.keep(read.seq, read.sink));
            }
        }
        let ear = Fresh {
            all_again: true,
            ..self.heard.ear.clone()
        };
        let mut read = self
            .listen(0, &TranscriptReplay::new(self.profile, ear))
            .await?;
        let damage = read.damage.take();
        if read.seq <= self.seq && !anew {
            let damage = damage.unwrap_or_else(|| {
                Error::corrupt(format!("nothing behind entry {} can be read", self.seq))
            });
            return Ok(self.damaged(&damage).into_iter().collect());
        }
        let mut news = self.keep(read.seq, read.sink);
        news.extend(damage.and_then(|damage| self.damaged(&damage)));
        Ok(news)
    }

    async fn listen(
        &self,
        after: Seq,
        heard: &TranscriptReplay<'a, Fresh>,
    ) -> Result<ReadOutcome<TranscriptReplay<'a, Fresh>>> {
        self.logs
            .read_log(
                &self.id,
                ReadOptions {
                    after,
                    ..ReadOptions::default()
                },
                || heard.clone(),
            )
            .await
    }

    fn keep(&mut self, seq: Seq, heard: TranscriptReplay<'a, Fresh>) -> Vec<News> {
        let removed = heard.removed && !self.heard.removed;
        (self.seq, self.heard) = (seq, heard);
        let mut news: Vec<News> = self
            .heard
            .ear
            .take()
            .into_iter()
            .map(|spoken| News::LocatedMessage(Box::new(spoken)))
            .collect();
        news.extend(removed.then_some(News::Removed));
        news
    }

    /// Damage is told once.
    fn damaged(&mut self, damage: &Error) -> Option<News> {
        let damage = damage.to_string();
        if self.told.as_ref() == Some(&damage) {
            return None;
        }
        self.told = Some(damage.clone());
        Some(News::Damaged(damage))
    }
}
