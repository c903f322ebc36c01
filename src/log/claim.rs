//! Claiming a log, and the other entries without parts: tombstones and purges.

use super::append::AppendOutcome;
use super::writer::{LogWriter, WriteTarget};
use super::{Fence, Logs};
use crate::codec::entry::{self, EncodedEntry};
use crate::error::Result;
use crate::index::{FenceRow, FenceTable};
use crate::model::{EntryHeader, EntryKind, LogId, Seq, keys};
use crate::sys::mutation::{Mutation, is_active};

impl Logs {
    /// Takes over a log: appends a claim that continues from the entry that `writer` knows. The
    /// claim gets the `seq` after `end`, the last one in use; damaged entries between the two are
    /// skipped. Returns none if another writer has appended in the meantime: read its entries and
    /// try again.
    pub async fn claim(
        &self,
        id: &LogId,
        writer: &mut LogWriter,
        end: Seq,
    ) -> Result<Option<EncodedEntry>> {
        let mut main = LogWriter {
            target: WriteTarget::Main,
            ..writer.clone()
        };
        let claim = self
            .append_marker(id, &mut main, end, EntryKind::Claim)
            .await?;
        if claim.is_some() {
            *writer = LogWriter {
                moves: Vec::new(),
                ..main
            };
        }
        Ok(claim)
    }

    /// Appends an entry without parts after `end`. The rules are those of `claim`.
    pub async fn append_marker(
        &self,
        id: &LogId,
        writer: &mut LogWriter,
        end: Seq,
        kind: EntryKind,
    ) -> Result<Option<EncodedEntry>> {
        let moves = if kind == EntryKind::Claim {
            writer.moves.clone()
        } else {
            Vec::new()
        };
        let header = writer.next_header(id, kind, self.clock.now(), moves, Vec::new());
        let end = end.max(writer.seq);
        if let Fence::Database(fences) = self.fence.choose(&*self.store, &self.rng).await? {
            return self
                .append_reserved_marker(&*fences, id, writer, end, header)
                .await;
        }
        let encoded = entry::encode::<Vec<u8>>(after(header, writer, end), &[])?;
        match self.append(id, writer, &encoded).await? {
            AppendOutcome::Written => Ok(Some(encoded)),
            AppendOutcome::Conflict(None) => Ok(None),
            AppendOutcome::Conflict(Some(existing)) => {
                // If an earlier attempt of this writer succeeded, the existing entry differs only
                // in its time.
                let earlier = entry::encode::<Vec<u8>>(
                    EntryHeader {
                        at: existing.header.at,
                        ..encoded.header
                    },
                    &[],
                )?;
                if earlier.digest != existing.digest {
                    return Ok(None);
                }
                writer.advance_to(existing.header.seq, existing.digest, self.clock.now());
                Ok(Some(earlier))
            }
        }
    }

    /// Appends an entry without parts, with the database as the fence.
    async fn append_reserved_marker(
        &self,
        fences: &dyn FenceTable,
        id: &LogId,
        writer: &mut LogWriter,
        end: Seq,
        header: EntryHeader,
    ) -> Result<Option<EncodedEntry>> {
        let encryption = self.entry_encryption(id, writer).await?;
        // The row may be ahead of the log by a `seq` whose writer died; skip that `seq`.
        let row = fences.read_fence(id).await?;
        let last = row.as_ref().map_or(0, |row| row.seq).max(end);
        let header = after(header, writer, last);
        let reserved = FenceRow {
            seq: header.seq,
            writer: writer.writer.clone(),
        };
        if !fences
            .compare_and_swap_fence(id, row.as_ref(), &reserved)
            .await?
        {
            return Ok(None);
        }
        let encoded = entry::encode::<Vec<u8>>(header, &[])?;
        let unseen = self.list_entries(id, end).await?;
        if !unseen.is_empty() && !is_active(Mutation::ClaimOverUnseenEntries) {
            return Ok(None);
        }
        self.store
            .put_with(
                &keys::entry(id, encoded.header.seq),
                encoded.bytes.clone(),
                encryption,
            )
            .await?;
        if fences.read_fence(id).await? != Some(reserved) {
            return Ok(None);
        }
        writer.advance_to(encoded.header.seq, encoded.digest, self.clock.now());
        Ok(Some(encoded))
    }
}

/// The header with the `seq` after `last`; it continues from the entry that the writer knows.
fn after(header: EntryHeader, writer: &LogWriter, last: Seq) -> EntryHeader {
    // A purge resets the log: the next entry has no predecessor.
    let is_reset = writer.seq > 0 && writer.digest.is_none();
    let prev_seq = if is_reset {
        Some(0)
    } else {
        (last > writer.seq).then_some(writer.seq)
    };
    EntryHeader {
        seq: last.saturating_add(1),
        prev_seq,
        ..header
    }
}
