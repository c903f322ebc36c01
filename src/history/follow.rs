//! Following a session that is being written elsewhere, by the bucket alone.
//!
//! Owns how far it was read and what is new. One listing behind the last entry says whether anything is; the rest is asked for
//! only when that does not fit: when entries were collected, or the session begins anew.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::Duration;

use jiff::Timestamp;

use super::spoken::Spoken;
use crate::agent::Profile;
use crate::agent::transcript::Reader;
use crate::codec::entry::Entry;
use crate::error::{Error, Kind, Result};
use crate::log::Logs;
use crate::log::pieces::{self, Prefer, cover};
use crate::log::walk::{Reading, Sink};
use crate::model::{EntryKind, LogId, RelPath, Seq};

/// The shortest and the longest time between two looks.
const PACE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(15));

/// How long to wait for the next look, when nothing was new for so long: a tenth of that.
pub fn pace(quiet: Duration) -> Duration {
    (quiet / 10).clamp(PACE.0, PACE.1)
}

/// What is new.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum News {
    /// Something was said.
    Said(Box<Spoken>),
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
    full: bool,
    seq: Seq,
    heard: Heard,
    /// Damage that was told.
    told: Option<String>,
}

/// What was read so far.
#[derive(Clone, Default)]
struct Heard {
    reader: Reader,
    /// How long each transcript is.
    lengths: BTreeMap<RelPath, u64>,
    /// The messages that were shown, by what tells them apart.
    names: HashSet<u64>,
    /// The newest of them.
    newest: Option<Timestamp>,
}

/// Takes in entries, and keeps what is new in them.
struct Listener<'a> {
    profile: &'a dyn Profile,
    full: bool,
    heard: Heard,
    /// Begun at the first entry once more.
    from_nothing: bool,
    news: Vec<News>,
}

impl Sink for Listener<'_> {
    fn take(&mut self, entry: &Entry) -> Result<()> {
        let header = &entry.header;
        if header.begins_anew() || header.kind == EntryKind::Snapshot {
            (self.heard.reader, self.heard.lengths) = (Reader::default(), BTreeMap::new());
            self.from_nothing |= self.heard.newest.is_some();
        }
        if header.kind.is_removal() {
            self.news.push(News::Removed);
        }
        self.heard.reader.moved(&header.moves);
        for moved in &header.moves {
            if let Some(len) = self.heard.lengths.remove(&moved.from) {
                self.heard.lengths.insert(moved.to.clone(), len);
            }
        }
        let told = self.heard.reader.read(self.profile, entry.parts());
        let mut again: BTreeSet<&RelPath> = BTreeSet::new();
        for part in header.parts.iter().filter(|part| told.read.contains_key(&part.path)) {
            let before = self.heard.lengths.insert(part.path.clone(), part.end());
            if before.is_some_and(|before| part.start < before) {
                again.insert(&part.path);
            }
        }
        let mut spoken: Vec<Spoken> = Vec::new();
        let mut positions: BTreeMap<RelPath, i64> = BTreeMap::new();
        for said in told.said {
            let position = positions.entry(said.path.clone()).or_default();
            *position = said.message.at.map_or(0, Timestamp::as_microsecond).max(*position);
            spoken.extend(Spoken::of(said, *position, self.full));
        }
        // Files come one behind the other; what was said in them did not.
        spoken.sort_by_key(|spoken| spoken.position);
        for spoken in spoken {
            let (rewritten, at) = (again.contains(&spoken.path), spoken.at);
            let known = !self.heard.names.insert(spoken.name);
            // What is read once more, and is older than what was shown, is no news.
            let again = rewritten || self.from_nothing;
            let older = self.heard.newest.is_some_and(|newest| at.is_some_and(|at| at < newest));
            if again && (known || older) {
                continue;
            }
            self.heard.newest = if self.from_nothing { self.heard.newest } else { self.heard.newest.max(at) };
            self.news.push(News::Said(Box::new(spoken)));
        }
        Ok(())
    }
}

impl<'a> Follow<'a> {
    /// Reads the end of a session, from as few objects as have `last` messages, and follows it from there.
    pub async fn begin(logs: &'a Logs, profile: &'a dyn Profile, id: &LogId, last: usize, full: bool) -> Result<(Follow<'a>, Vec<News>)> {
        let mut follow = Follow { logs, profile, id: id.clone(), full, seq: 0, heard: Heard::default(), told: None };
        let listed = logs.newest_pieces(id).await?;
        let picked = cover(&listed, 0, Seq::MAX, Prefer::Long, &BTreeSet::new());
        for objects in [2, 8, usize::MAX] {
            let after = picked.get(picked.len().saturating_sub(objects)).map_or(0, |piece| piece.from - 1);
            let read = follow.listen(after, &Heard::default(), false).await?;
            let enough = read.news.len() >= last && read.damage.is_none();
            if !enough && after > 0 {
                continue;
            }
            let mut news = read.news;
            (follow.seq, follow.heard) = (read.seq, read.heard);
            news.drain(..news.len().saturating_sub(last));
            if let Some(damage) = read.damage {
                news.push(follow.damaged(&damage).unwrap_or(News::Damaged(damage.to_string())));
            }
            return Ok((follow, news));
        }
        Err(Error::new(Kind::Internal, "read the end of a session"))
    }

    /// What is new since the last look. After an error nothing has changed: look again later.
    pub async fn look(&mut self) -> Result<Vec<News>> {
        // Its own entry is listed too: where it is missing, something else has changed.
        let listed = self.logs.entries(&self.id, self.seq.saturating_sub(1)).await?;
        let there = self.seq == 0 || listed.first().is_some_and(|first| first.seq == self.seq);
        let new: Vec<Seq> = listed.iter().map(|entry| entry.seq).filter(|seq| *seq > self.seq).collect();
        if there && new.is_empty() {
            return Ok(Vec::new());
        }
        if let Some(news) = self.next(&new).await? {
            return Ok(news);
        }
        let head = pieces::head(&self.logs.newest_pieces(&self.id).await?);
        // Collected, and nothing new behind it; or all of it is gone, until somebody writes again.
        if head == self.seq || head == 0 {
            return Ok(Vec::new());
        }
        let anew = head < self.seq;
        if !anew {
            let read = self.listen(self.seq, &self.heard, false).await?;
            if read.damage.is_none() {
                return Ok(self.keep(read));
            }
        }
        let read = self.listen(0, &self.heard, true).await?;
        if read.seq <= self.seq && !anew {
            let damage = read.damage.unwrap_or_else(|| Error::corrupt(format!("nothing behind entry {} can be read", self.seq)));
            return Ok(self.damaged(&damage).into_iter().collect());
        }
        let damage = read.damage.as_ref().and_then(|damage| self.damaged(damage));
        let mut news = self.keep(read);
        news.extend(damage);
        Ok(news)
    }

    /// Reads these entries one by one; none if they do not simply follow.
    async fn next(&mut self, new: &[Seq]) -> Result<Option<Vec<News>>> {
        let (mut seq, mut listener) = (self.seq, self.listener(&self.heard, false));
        for number in new {
            let entry = match self.logs.read(&self.id, *number).await {
                Ok(Some(entry)) => entry,
                Ok(None) => return Ok(None),
                Err(error) if error.kind() == Kind::Corrupt => return Ok(None),
                Err(error) => return Err(error),
            };
            if entry.header.follows() != seq {
                return Ok(None);
            }
            listener.take(&entry)?;
            seq = *number;
        }
        if new.is_empty() {
            return Ok(None);
        }
        self.seq = seq;
        self.heard = listener.heard;
        Ok(Some(listener.news))
    }

    fn listener(&self, heard: &Heard, from_nothing: bool) -> Listener<'a> {
        Listener { profile: self.profile, full: self.full, heard: heard.clone(), from_nothing, news: Vec::new() }
    }

    async fn listen(&self, after: Seq, heard: &Heard, from_nothing: bool) -> Result<Listened> {
        let heard = match from_nothing {
            true => Heard { reader: Reader::default(), lengths: BTreeMap::new(), ..heard.clone() },
            false => heard.clone(),
        };
        let read = self.logs.read_log(&self.id, Reading { after, ..Reading::default() }, || self.listener(&heard, from_nothing)).await?;
        let Listener { mut heard, news, .. } = read.sink;
        for said in &news {
            if let News::Said(spoken) = said {
                heard.newest = heard.newest.max(spoken.at);
            }
        }
        Ok(Listened { seq: read.seq, heard, news, damage: read.damage })
    }

    fn keep(&mut self, read: Listened) -> Vec<News> {
        (self.seq, self.heard) = (read.seq, read.heard);
        read.news
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

struct Listened {
    seq: Seq,
    heard: Heard,
    news: Vec<News>,
    damage: Option<Error>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_waits_longer_than_a_tenth_of_the_silence_before() {
        let seconds = |quiet: u64| pace(Duration::from_secs(quiet)).as_secs();
        assert_eq!([0, 5, 10, 60, 150, 100_000].map(seconds), [1, 1, 1, 6, 15, 15]);
    }
}
