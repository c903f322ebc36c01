//! Branches: the entries of writers that lost their session.
//!
//! A branch continues from an entry of the main log, its *base*, and is never compacted. Owns how
//! branches are found and described. Does not own writing to a branch (`append`) or making a branch
//! the main line (`adopt`).

use jiff::Timestamp;
use serde::Serialize;

use super::Logs;
use super::segments::Segment;
use crate::error::{Error, Result};
use crate::model::{LogId, Seq, WriterId};

/// A branch of a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Branch {
    /// The writer that wrote it.
    pub writer: WriterId,
    /// The entry of the main log that it continues from; 0 if it contains all files from the start.
    pub base: Seq,
    /// Its last entry.
    pub head: Seq,
    /// Number of its entries.
    pub entries: u64,
    /// Size of its entries as stored.
    pub stored_bytes: u64,
    /// Time of its first entry.
    pub first_at: Option<Timestamp>,
    /// Time of its last entry.
    pub last_at: Option<Timestamp>,
}

impl Logs {
    /// The branches of a log, oldest first.
    pub async fn branches(&self, id: &LogId) -> Result<Vec<Branch>> {
        let mut branches = Vec::new();
        for writer in self.list_branches(id).await? {
            branches.extend(self.branch(id, &writer).await?);
        }
        branches.sort_by(|one, other| {
            (one.first_at, &one.writer).cmp(&(other.first_at, &other.writer))
        });
        Ok(branches)
    }

    /// The branch of a writer; none if it has no entries.
    pub async fn branch(&self, id: &LogId, writer: &WriterId) -> Result<Option<Branch>> {
        let segments = self.list_branch_segments(id, writer).await?;
        let (Some(first), Some(last)) = (segments.first(), segments.last()) else {
            return Ok(None);
        };
        let first = self.read_branch_entry(id, writer, first.last_seq).await?;
        let newest = self.read_branch_entry(id, writer, last.last_seq).await?;
        Ok(Some(Branch {
            writer: writer.clone(),
            base: first.as_ref().map_or(0, |entry| entry.header.predecessor()),
            head: last.last_seq,
            entries: segments.len() as u64,
            stored_bytes: segments.iter().map(|segment| segment.size).sum(),
            first_at: first.map(|entry| entry.header.at),
            last_at: newest.map(|entry| entry.header.at),
        }))
    }

    /// The entry of the main log that a branch continues from.
    pub(super) async fn branch_base(
        &self,
        id: &LogId,
        writer: &WriterId,
        segments: &[Segment],
    ) -> Result<Seq> {
        let Some(first) = segments.first() else {
            return Ok(0);
        };
        let entry = self.read_branch_entry(id, writer, first.last_seq).await?;
        Ok(entry.map_or(0, |entry| entry.header.predecessor()))
    }

    /// The writer of a branch, from the start of its ID.
    pub async fn find_branch(&self, id: &LogId, prefix: &str) -> Result<WriterId> {
        let branches = self.list_branches(id).await?;
        let mut matching = branches
            .iter()
            .filter(|writer| writer.as_str().starts_with(prefix));
        match (matching.next(), matching.next()) {
            (Some(only), None) if !prefix.is_empty() => Ok(only.clone()),
            (Some(_), Some(_)) if branches.iter().any(|writer| writer.as_str() == prefix) => {
                prefix.parse()
            }
            (Some(_), _) => Err(Error::usage(format!(
                "ambiguous --branch value {prefix:?}: it is a prefix of several branches"
            ))
            .hint("use more characters of the writer ID")),
            (None, _) => Err(no_branch(id, prefix)),
        }
    }

    /// Checks that the branch of a writer exists.
    pub async fn check_branch(&self, id: &LogId, writer: &WriterId) -> Result<()> {
        if self.list_branch_segments(id, writer).await?.is_empty() {
            return Err(no_branch(id, writer.as_str()));
        }
        Ok(())
    }
}

fn no_branch(id: &LogId, writer: &str) -> Error {
    Error::not_found(format!("{id} has no branch {writer:?}")).hint(format!(
        "run \"sessiond branches {}\" to list its branches",
        id.name
    ))
}
