//! How a log is read.

use std::collections::BTreeSet;

use super::fetch::MAX_CONCURRENCY;
use super::segments::{Granularity, SegmentId};
use crate::model::{Digest, LogPoint, ResolvedPoint, Seq, WriterId};

/// What to read of a log.
#[derive(Debug, Clone, Copy)]
pub struct ReadOptions<'a> {
    /// The point to read up to.
    pub at: LogPoint,
    /// The writer whose branch to read: the log up to the entry that the branch continues from, and
    /// then the entries of the branch.
    pub branch: Option<&'a WriterId>,
    /// Skip the entries up to this one. The link of the first entry is verified if the digest is
    /// given.
    pub after: Seq,
    /// The digest of that entry.
    pub after_digest: Option<Digest>,
    /// Stop after the entry with which the raw bytes reach this number, as if it were the last one.
    pub max_raw_bytes: u64,
    /// Few large segments, or every entry that exists.
    pub granularity: Granularity,
    /// Maximum number of objects in flight.
    pub concurrency: usize,
    /// Segments to ignore.
    pub excluding: Option<&'a BTreeSet<SegmentId>>,
}

impl Default for ReadOptions<'_> {
    fn default() -> Self {
        ReadOptions {
            at: LogPoint::Latest,
            branch: None,
            after: 0,
            after_digest: None,
            max_raw_bytes: u64::MAX,
            granularity: Granularity::Coarse,
            concurrency: MAX_CONCURRENCY,
            excluding: None,
        }
    }
}

impl<'a> ReadOptions<'a> {
    /// Reads up to a point of the log, or of a branch.
    pub fn up_to(point: &'a ResolvedPoint) -> ReadOptions<'a> {
        ReadOptions {
            at: point.at,
            branch: point.branch.as_ref(),
            ..ReadOptions::default()
        }
    }

    /// Whether the newest segments are enough to read.
    pub(super) fn is_newest_only(&self) -> bool {
        self.at == LogPoint::Latest
            && self.granularity == Granularity::Coarse
            && self.branch.is_none()
            && self.after == 0
            && self.excluding.is_none()
    }
}

/// Creates a sink for the next attempt.
pub(super) type NewSink<'a, S> = &'a mut (dyn FnMut() -> S + Send);
