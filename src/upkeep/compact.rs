//! Merges runs of entries, so that a restore reads few objects however many flushes there were.
//!
//! Owns which pieces are made of which. Nothing is deleted here (`collect`), and nothing that others need is touched: a
//! merge only stands beside what it stands for, so it can be made at any time, by anybody, twice, or not at all.

use std::collections::BTreeSet;

use futures_util::stream::{self, StreamExt};

use crate::error::{Error, ErrorContext, ErrorKind, Result};
use crate::log::Logs;
use crate::log::chain::EntryChain;
use crate::log::merge::Merger;
use crate::log::read::EntrySink;
use crate::log::schedule;
use crate::log::segments::{Prefer, Segment, cover};
use crate::model::{EntryKind, LogId, Seq, keys};

/// The most stored bytes that are made one piece: what is as large as that is read in parallel with others, and reading it
/// again and again to save one object would cost more than it saves. About 4 MiB of transcript.
const LARGE: u64 = 1 << 20;

/// The most raw bytes that become one piece, however well they compress: bounds the memory of whoever makes or reads it.
const MOST_MERGED: u64 = 16 << 20;

/// What a session begins with stays by itself while it is so many times larger than what would be merged with it.
const OUTWEIGHS: u64 = 4;

/// Objects read at a time: a flush needs the store more.
const AT_ONCE: usize = 2;

/// Small objects read at a time where more wait to be merged than a restore is to read: reading one takes a store that is
/// far away as long as the agent takes to cause three.
const AT_ONCE_BEHIND: usize = 6;

/// An object that is small: six of them in memory are nothing.
const SMALL: u64 = 64 << 10;

/// What was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Made {
    /// Merges and snapshots.
    pub pieces: u32,
    /// Their bytes as stored.
    pub bytes: u64,
}

/// Makes what the schedule wants of the entries up to `upto`, all of which must be acknowledged, and is not there yet. A run
/// that cannot be merged stays as it is, and does not hold up those behind it.
pub async fn compact(logs: &Logs, id: &LogId, upto: Seq) -> Result<Made> {
    let (mut made, mut conflict) = (Made::default(), None);
    let pieces = logs.newest_pieces(id).await?;
    for (from, to) in schedule::runs(upto)
        .into_iter()
        .filter(|(from, to)| from < to)
    {
        for (from, to) in groups(&pieces, from, to) {
            match run(logs, id, &pieces, from, to)
                .await
                .with_context(|| format!("merge entries {from} to {to} of {id}"))
            {
                Ok(more) => made.add(more),
                // The first entry of a fork stays by itself; what is behind it can be merged.
                Err(error) if error.kind() == ErrorKind::Conflict && from == 1 && to > 2 => {
                    match run(logs, id, &pieces, 2, to).await {
                        Ok(more) => made.add(more),
                        Err(again) if stays(&again) => conflict = Some(error),
                        Err(error) => return Err(error),
                    }
                }
                Err(error) if stays(&error) => conflict = Some(error),
                Err(error) => return Err(error),
            }
        }
    }
    conflict.map_or(Ok(made), Err)
}

/// Whether a run stays as it is: what it is made of cannot be one piece, or somebody else has to make it, who has the key.
fn stays(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Conflict | ErrorKind::Encrypted)
}

/// Pure: of the pieces that a restore reads of a run, those that are made one: each group as large as one piece may be.
fn groups(pieces: &[Segment], from: Seq, to: Seq) -> Vec<(Seq, Seq)> {
    let read = cover(pieces, 0, Seq::MAX, Prefer::Long, &BTreeSet::new());
    let within = read
        .into_iter()
        .filter(|piece| from <= piece.from && piece.to <= to);
    let mut groups: Vec<Vec<Segment>> = Vec::new();
    for piece in within {
        let size = |group: &[Segment]| group.iter().map(|piece| piece.size).sum::<u64>();
        match groups.last_mut() {
            Some(group) if size(group) + piece.size <= LARGE => group.push(piece),
            _ => groups.push(vec![piece]),
        }
    }
    if from == 1 {
        for group in &mut groups {
            let all: u64 = group.iter().map(|piece| piece.size).sum();
            // Before it there may be a claim, which is small.
            if let Some(at) = group
                .iter()
                .position(|piece| piece.size > OUTWEIGHS * (all - piece.size))
            {
                group.drain(..=at);
            }
        }
    }
    let several = groups.iter().filter(|group| group.len() > 1);
    several
        .filter_map(|group| Some((group.first()?.from, group.last()?.to)))
        .collect()
}

/// Makes one piece of the entries `from` to `to`, all of which must be acknowledged.
pub async fn merge(logs: &Logs, id: &LogId, from: Seq, to: Seq) -> Result<Made> {
    let pieces = logs.pieces(id).await?;
    run(logs, id, &pieces, from, to)
        .await
        .with_context(|| format!("merge entries {from} to {to} of {id}"))
}

/// Makes one piece of each run of pieces that are smaller than `small` as stored, up to entry `upto`.
pub async fn squeeze(logs: &Logs, id: &LogId, upto: Seq, small: u64) -> Result<Made> {
    let mut made = Made::default();
    let pieces = logs.newest_pieces(id).await?;
    let picked = cover(&pieces, 0, upto, Prefer::Long, &BTreeSet::new());
    for run_of_small in picked.split(|piece| piece.size >= small) {
        if let [first, .., last] = run_of_small {
            match run(logs, id, &pieces, first.from, last.to)
                .await
                .with_context(|| format!("merge the small pieces of {id}"))
            {
                Ok(more) => made.add(more),
                // They can be read as they are.
                Err(error) if error.kind() == ErrorKind::Conflict => {
                    tracing::debug!(%error, "not merged")
                }
                Err(error) => return Err(error),
            }
        }
    }
    Ok(made)
}

async fn run(logs: &Logs, id: &LogId, pieces: &[Segment], from: Seq, to: Seq) -> Result<Made> {
    // Of what a restore reads: a piece that begins before the run and reaches into it stays as it is, for one that crosses it
    // could not be read behind it.
    let read = cover(pieces, 0, Seq::MAX, Prefer::Long, &BTreeSet::new());
    let behind = read.len() as u64 > 2 * schedule::SLOTS;
    let picked: Vec<Segment> = read
        .into_iter()
        .filter(|piece| from <= piece.from)
        .collect();
    let within = picked.iter().filter(|piece| piece.to <= to).count();
    let Some(from) = picked
        .first()
        .map(|first| first.from)
        .filter(|_| within > 1)
    else {
        return Ok(Made::default());
    };
    let all_small = picked.iter().take(within).all(|piece| piece.size <= SMALL);
    let at_once = if behind && all_small {
        AT_ONCE_BEHIND
    } else {
        AT_ONCE
    };
    let mut maker = Maker {
        logs,
        id,
        from,
        merger: Merger::default(),
        taken: 0,
        to: 0,
        made: Made::default(),
    };
    let mut chain = EntryChain::anywhere(id.to_string());
    let mut reads = stream::iter(picked)
        .map(|piece| async move { (piece, logs.read_to_merge(id, &piece).await) })
        .buffered(at_once);
    while let Some((piece, read)) = reads.next().await {
        let gone =
            || Error::unavailable(format!("read {}: it was listed and is gone", piece.key(id)));
        let read = read.and_then(|entry| entry.ok_or_else(gone));
        // What comes behind the run is read until it is certain which entries the run is made of.
        match chain.push(piece.to, read)? {
            Some(entry) if entry.header.seq > to => return maker.finish().await,
            Some(entry) => maker.take(&entry).await?,
            None => {}
        }
    }
    while let Some(entry) = chain.pop()?.filter(|entry| entry.header.seq <= to) {
        maker.take(&entry).await?;
    }
    maker.finish().await
}

/// Gathers pieces, and writes what they make whenever more would be too much.
struct Maker<'a> {
    logs: &'a Logs,
    id: &'a LogId,
    from: Seq,
    merger: Merger,
    taken: u32,
    to: Seq,
    made: Made,
}

impl Maker<'_> {
    async fn take(&mut self, entry: &crate::codec::entry::Entry) -> Result<()> {
        if self.taken > 0 && self.merger.size() + entry.header.body_len() > MOST_MERGED {
            self.write().await?;
        }
        self.merger.take(entry)?;
        self.taken += 1;
        self.to = entry.header.seq;
        Ok(())
    }

    async fn finish(mut self) -> Result<Made> {
        self.write().await?;
        Ok(self.made)
    }

    async fn write(&mut self) -> Result<()> {
        let (merger, taken, from) = (
            std::mem::take(&mut self.merger),
            std::mem::take(&mut self.taken),
            self.from,
        );
        self.from = self.to + 1;
        // One alone is there already.
        let Some(encoded) = (if taken > 1 {
            merger.finish(from)?
        } else {
            None
        }) else {
            return Ok(());
        };
        let seq = encoded.header.seq;
        let key = if encoded.header.kind == EntryKind::Snapshot {
            keys::snapshot(self.id, seq)
        } else {
            keys::merge(self.id, from, seq)
        };
        self.made.add(Made {
            pieces: 1,
            bytes: encoded.bytes.len() as u64,
        });
        // Somebody else may have made it just now; one is as good as the other.
        self.logs.store.create(&key, encoded.bytes).await?;
        Ok(())
    }
}

impl Made {
    fn add(&mut self, more: Made) {
        self.pieces += more.pieces;
        self.bytes += more.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_large_is_not_written_again_for_the_sake_of_what_is_small() {
        let pieces = |sizes: &[u64]| -> Vec<Segment> {
            (1..)
                .zip(sizes)
                .map(|(seq, size)| Segment {
                    size: *size,
                    ..Segment::entry(seq)
                })
                .collect()
        };
        let all = |sizes: &[u64]| groups(&pieces(sizes), 1, sizes.len() as Seq);
        assert_eq!(all(&[100, 100, 100]), [(1, 3)]);
        // A claim, and a transcript that was there before.
        assert_eq!(all(&[100, 900_000, 2000, 2000, 2000]), [(3, 5)]);
        assert_eq!(all(&[100, 900_000]), []);
        // It has grown enough to be one.
        assert_eq!(all(&[100, 9000, 2000, 2000, 2000]), [(1, 5)]);
        // As large as a piece may be.
        assert_eq!(
            all(&[LARGE, LARGE, LARGE / 2, LARGE / 2, LARGE / 2, LARGE / 2]),
            [(3, 4), (5, 6)]
        );
        // Later runs are bounded by their number, not by what outweighs what.
        assert_eq!(
            groups(&pieces(&[100, 100, 900_000, 2000, 2000]), 3, 5),
            [(3, 5)]
        );
    }
}
