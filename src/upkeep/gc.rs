//! Garbage collection of one log.
//!
//! Garbage collection may run at the same time as writers, restores and other collectors, and may
//! be killed at any step. Covered segments can be deleted at any time. A session is deleted only
//! after a purge entry in its own log, which fences its writers. `collect.rs` decides what to
//! delete.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use jiff::Timestamp;
use serde::Serialize;

use super::collect::{GcStep, LogListing, RetentionPolicy, plan_steps};
use super::compact::merge_small_segments;
use super::remove::remove_if_head;
use super::status;
use crate::codec;
use crate::codec::pin::Pin;
use crate::error::{Error, ErrorContext, ErrorKind, Result};
use crate::log::Logs;
use crate::log::assemble::FileAssembler;
use crate::log::pins::StoredPin;
use crate::log::read::ReadOptions;
use crate::log::segments::{Segment, SegmentKind, head};
use crate::log::writer::LogWriter;
use crate::model::{
    ClosedStatus, EntryKind, LogId, RelPath, Seq, SessionMetadata, SessionStatus, Ttl, keys,
};
use crate::store::{Store, list_objects};
use crate::sys::Directory;
use crate::sys::clock::new_writer_id;
use crate::sys::mutation::{Mutation, is_active};

/// Size below which the segments of an idle session are merged.
const SMALL_SEGMENT: u64 = 16 << 10;

/// The steps that were carried out for one log, or that a dry run would carry out.
#[derive(Debug, Clone, Default, Serialize, PartialEq, Eq)]
pub struct CollectReport {
    /// The session, or `@` and the project.
    pub session: String,
    /// The steps, by name.
    pub steps: Vec<&'static str>,
    /// Number of objects deleted.
    pub objects: usize,
    /// Size of these objects.
    pub bytes: u64,
    /// Why the session is kept although its TTL has passed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exempt: Option<Exemption>,
}

impl CollectReport {
    /// Whether the session expires.
    pub fn expires(&self) -> bool {
        self.steps.contains(&GcStep::Expire.as_str())
    }
}

/// Why a session is kept although its TTL has passed.
#[derive(Debug, Clone, Copy, Serialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Exemption {
    /// It is archived.
    Archived,
    /// It has a named checkpoint.
    NamedCheckpoint,
}

/// The current time of the store's clock: the modification time of an object that is written for
/// this purpose.
pub async fn store_time(logs: &Logs) -> Result<Timestamp> {
    let key = keys::gc_clock(&format!("{:016x}", logs.rng.next()));
    read_store_time(logs, &key)
        .await
        .context("read the clock of the store")
}

async fn read_store_time(logs: &Logs, key: &str) -> Result<Timestamp> {
    logs.store.put(key, Bytes::from_static(b"clock\n")).await?;
    let objects = list_objects(&*logs.store, &keys::gc_dir(), None).await?;
    logs.store.delete(key).await?;
    match objects.iter().find(|object| object.key == key) {
        None => Err(Error::unavailable(
            "the listing does not include an object that was just written",
        )),
        Some(object) if object.modified == Timestamp::MAX => {
            Err(Error::usage("the store does not report modification times"))
        }
        Some(object) => Ok(object.modified),
    }
}

/// Deletes temporary objects that killed processes left; returns their number.
pub async fn delete_temporary_objects(
    logs: &Logs,
    policy: &RetentionPolicy,
    now: Timestamp,
    dry_run: bool,
) -> Result<usize> {
    let mut deleted = 0;
    for directory in [keys::gc_dir(), keys::probe_dir()] {
        for object in list_objects(&*logs.store, &directory, None).await? {
            let age = Duration::try_from(now.duration_since(object.modified));
            if age.is_ok_and(|age| age >= policy.grace) {
                deleted += 1;
                if !dry_run {
                    logs.store.delete(&object.key).await?;
                }
            }
        }
    }
    Ok(deleted)
}

/// Carries out the steps that are due for one log. `scratch` is a directory in which the remaining
/// segments are assembled before others are deleted.
pub async fn collect(
    logs: &Logs,
    id: &LogId,
    policy: &RetentionPolicy,
    now: Timestamp,
    scratch: &dyn Directory,
    dry_run: bool,
) -> Result<CollectReport> {
    let collector = LogCollector {
        logs,
        id,
        policy,
        scratch,
    };
    collector
        .run(now, dry_run)
        .await
        .with_context(|| format!("clean up {id}"))
}

struct LogCollector<'a> {
    logs: &'a Logs,
    id: &'a LogId,
    policy: &'a RetentionPolicy,
    scratch: &'a dyn Directory,
}

impl LogCollector<'_> {
    async fn run(&self, now: Timestamp, dry_run: bool) -> Result<CollectReport> {
        let mut report = CollectReport {
            session: self.id.name.to_string(),
            ..CollectReport::default()
        };
        let (listing, metadata_versions) = self.list().await?;
        let metadata = if metadata_versions.is_empty() {
            SessionMetadata::default()
        } else {
            self.logs.metadata(self.id).await?.metadata
        };
        // Projects do not expire.
        let ttl = if self.id.name.is_project() {
            None
        } else {
            metadata.ttl.map_or(self.policy.ttl, Ttl::duration)
        };
        let policy = RetentionPolicy {
            ttl,
            ..*self.policy
        };
        if !listing.may_be_due(&policy, now) {
            return Ok(report);
        }
        let last = self.last_kind(&listing).await?;
        let mut steps = plan_steps(&listing, last, ttl, self.policy, now);
        if steps.contains(&GcStep::Expire) {
            report.exempt = self.exemption(&listing, &metadata).await?;
            if report.exempt.is_some() {
                steps = plan_steps(&listing, last, None, self.policy, now);
            }
        }
        for step in steps {
            report.steps.push(step.as_str());
            let deleted = match &step {
                GcStep::DeleteCovered(segments) if dry_run => sizes(segments),
                _ if dry_run => Deleted::default(),
                _ => self.step(&listing, &metadata_versions, step).await?,
            };
            report.objects += deleted.objects;
            report.bytes += deleted.bytes;
        }
        Ok(report)
    }

    /// Why the session does not expire. A session that grew after it was archived is active.
    async fn exemption(
        &self,
        listing: &LogListing,
        metadata: &SessionMetadata,
    ) -> Result<Option<Exemption>> {
        if listing.has_named_checkpoint && !self.policy.include_checkpoints {
            return Ok(Some(Exemption::NamedCheckpoint));
        }
        let is_marked = metadata
            .closed
            .is_some_and(|closed| closed.status == ClosedStatus::Archived);
        if !is_marked || self.policy.include_archived {
            return Ok(None);
        }
        let raw_bytes = status::raw_bytes(self.logs, self.id).await?;
        Ok((metadata.status(raw_bytes) == SessionStatus::Archived).then_some(Exemption::Archived))
    }

    async fn list(&self) -> Result<(LogListing, Vec<u64>)> {
        let mut listing = LogListing {
            segments: self.logs.list_segments(self.id).await?,
            ..LogListing::default()
        };
        for writer in self.logs.list_branches(self.id).await? {
            let segments = self.logs.list_branch_segments(self.id, &writer).await?;
            listing.branches.push((writer, segments));
        }
        for pin in self.pins().await? {
            listing.has_forks |= pin.outlives_session();
            listing.pinned.extend(pin.seq());
            // An unreadable pin may be a named checkpoint.
            listing.has_named_checkpoint |= !matches!(pin, StoredPin::Readable(Pin::Fork { .. }));
            // An unreadable pin may refer to any entry.
            if matches!(pin, StoredPin::Unreadable(_)) {
                let all = listing.segments.iter().map(|segment| segment.last_seq);
                listing.pinned.extend(all);
            }
        }
        let metadata_versions = self.logs.list_metadata_versions(self.id).await?;
        Ok((listing, metadata_versions))
    }

    /// The pins of the log. Pins of purged forks are left out.
    async fn pins(&self) -> Result<Vec<StoredPin>> {
        if is_active(Mutation::IgnorePins) {
            return Ok(Vec::new());
        }
        let mut pins = Vec::new();
        for pin in self.logs.pins(self.id).await? {
            let is_purged = match &pin {
                StoredPin::Readable(Pin::Fork { fork, .. }) => {
                    self.is_purged(&self.logs.id(fork.clone())).await?
                }
                _ => false,
            };
            if !is_purged {
                pins.push(pin);
            }
        }
        Ok(pins)
    }

    /// Whether a session was purged.
    async fn is_purged(&self, id: &LogId) -> Result<bool> {
        let segments = self.logs.list_segments(id).await?;
        let Some(newest) = newest_segment(&segments) else {
            // The fork may be in progress, because its pin is written first.
            return Ok(false);
        };
        let entry = self.logs.read_segment(id, newest, None).await?;
        Ok(entry.is_some_and(|entry| entry.header.kind == EntryKind::Purge))
    }

    /// The kind of the last entry.
    async fn last_kind(&self, listing: &LogListing) -> Result<EntryKind> {
        let Some(newest) = newest_segment(&listing.segments) else {
            return Ok(EntryKind::Delta);
        };
        match self.logs.read_segment(self.id, newest, None).await {
            Ok(entry) => Ok(entry.map_or(EntryKind::Delta, |entry| entry.header.kind)),
            // A damaged log counts as not removed.
            Err(error) if error.kind() == ErrorKind::Corrupt => Ok(EntryKind::Delta),
            Err(error) => Err(error),
        }
    }

    async fn step(
        &self,
        listing: &LogListing,
        metadata_versions: &[u64],
        step: GcStep,
    ) -> Result<Deleted> {
        let head = head(&listing.segments);
        match step {
            GcStep::MergeSmall => {
                merge_small_segments(self.logs, self.id, head, SMALL_SEGMENT).await?;
                Ok(Deleted::default())
            }
            GcStep::DeleteCovered(segments) => self.delete_covered(listing, &segments).await,
            GcStep::Expire => {
                remove_if_head(self.logs, self.id, head).await?;
                Ok(Deleted::default())
            }
            GcStep::Purge => self.purge(listing, metadata_versions).await,
            GcStep::DeletePurged => {
                self.delete_purged(listing, metadata_versions, Some(head))
                    .await
            }
            // Metadata is deleted first: after the purge entry is deleted, no collector would find
            // it.
            GcStep::DeletePurgeEntry => {
                let entry = listing
                    .segments
                    .iter()
                    .map(|segment| (segment.key(self.id), segment.size));
                let metadata = self.metadata_keys(metadata_versions).await?;
                self.delete(metadata.into_iter().chain(entry)).await
            }
        }
    }

    async fn delete_covered(&self, listing: &LogListing, covered: &[Segment]) -> Result<Deleted> {
        self.check_remaining(listing, covered).await?;
        // A checkpoint may have been named, or a fork created, since the listing.
        let pins = self.pins().await?;
        let mut pinned = pins.iter().filter_map(StoredPin::seq);
        if pinned.any(|seq| !listing.pinned.contains(&seq)) {
            return Ok(Deleted::default());
        }
        let keys = covered
            .iter()
            .map(|segment| (segment.key(self.id), segment.size));
        self.delete(keys).await
    }

    /// Assembles the log without the covered segments, and fails if anything is missing.
    async fn check_remaining(&self, listing: &LogListing, covered: &[Segment]) -> Result<()> {
        let excluded: BTreeSet<_> = covered.iter().map(Segment::id).collect();
        let stage: RelPath = format!("gc-{:016x}", self.logs.rng.next()).parse()?;
        let mut attempt = 0;
        let assembler = || {
            attempt += 1;
            FileAssembler::new(self.scratch, stage.clone(), attempt)
        };
        let options = ReadOptions {
            excluding: Some(&excluded),
            ..ReadOptions::default()
        };
        let read = self.logs.read_log(self.id, options, assembler).await;
        self.scratch
            .remove(&stage)
            .map_err(|cause| Error::io(format!("remove {stage}"), cause))?;
        let read = read?;
        let damage = match &read.damage {
            Some(damage) => Some(damage.to_string()),
            None => read.redundant_damage.first().cloned(),
        };
        if let Some(damage) = damage {
            return Err(Error::corrupt(damage)
                .context("verify the remaining segments")
                .hint(format!(
                    "run \"sessiond verify {} --deep\" to see the damage; nothing was deleted",
                    self.id.name
                )));
        }
        if read.seq < head(&listing.segments) {
            return Err(Error::corrupt(format!(
                "the remaining segments end with entry {}, so nothing was deleted",
                read.seq
            )));
        }
        Ok(())
    }

    async fn purge(&self, listing: &LogListing, metadata_versions: &[u64]) -> Result<Deleted> {
        let seq = head(&listing.segments);
        let Some(entry) = self.logs.read_entry(self.id, seq).await? else {
            return Ok(Deleted::default());
        };
        let mut log_writer = LogWriter::unclaimed(
            new_writer_id(&self.logs.rng),
            seq,
            Some(entry.digest),
            self.logs.clock.now(),
        );
        // If the session was undeleted in the meantime, appending the purge entry fails.
        let purged = self
            .logs
            .append_marker(self.id, &mut log_writer, seq, EntryKind::Purge)
            .await?;
        match purged {
            Some(_) => self.delete_purged(listing, metadata_versions, None).await,
            None => Ok(Deleted::default()),
        }
    }

    /// Deletes all listed objects except the purge entry, oldest first.
    async fn delete_purged(
        &self,
        listing: &LogListing,
        metadata_versions: &[u64],
        purge_entry: Option<Seq>,
    ) -> Result<Deleted> {
        let mut segments: Vec<&Segment> = listing
            .segments
            .iter()
            .filter(|segment| Some(segment.last_seq) != purge_entry)
            .collect();
        segments.sort_by_key(|segment| (segment.last_seq, segment.first_seq));
        let segments = segments
            .into_iter()
            .map(|segment| (segment.key(self.id), segment.size));
        let branches = listing.branches.iter().flat_map(|(writer, segments)| {
            segments.iter().map(|segment| {
                let key = keys::branch_entry(self.id, writer, segment.last_seq);
                (key, segment.size)
            })
        });
        let pins = self.logs.pins(self.id).await?;
        let pins = pins.iter().map(|pin| (pin.key(self.id), 0));
        let metadata = self.metadata_keys(metadata_versions).await?;
        self.delete(segments.chain(branches).chain(pins).chain(metadata))
            .await
    }

    /// The metadata, and before it the references of its request IDs: without the metadata, no
    /// collector would find them.
    async fn metadata_keys(&self, versions: &[u64]) -> Result<Vec<(String, u64)>> {
        let (mut references, mut metadata) = (Vec::new(), Vec::new());
        for version in versions {
            let key = keys::metadata(self.id, *version);
            let stored = self.logs.store.get(&key).await?;
            let decoded = stored.map(|bytes| codec::metadata::decode(self.id, &key, &bytes));
            // Damaged metadata is deleted, too.
            if let Some(Ok(decoded)) = decoded
                && let Some(request_id) = decoded.request_id
            {
                references.push((keys::request_reference(self.id, &request_id), 0));
            }
            metadata.push((key, 0));
        }
        references.extend(metadata);
        Ok(references)
    }

    async fn delete(&self, keys: impl Iterator<Item = (String, u64)>) -> Result<Deleted> {
        let mut deleted = Deleted::default();
        for (key, size) in keys {
            self.logs.store.delete(&key).await?;
            deleted.objects += 1;
            deleted.bytes += size;
        }
        Ok(deleted)
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Deleted {
    objects: usize,
    bytes: u64,
}

fn sizes(segments: &[Segment]) -> Deleted {
    Deleted {
        objects: segments.len(),
        bytes: segments.iter().map(|segment| segment.size).sum(),
    }
}

fn newest_segment(segments: &[Segment]) -> Option<&Segment> {
    segments
        .iter()
        .max_by_key(|segment| (segment.last_seq, segment.kind == SegmentKind::Entry))
}
