//! Makes the index follow the bucket: from where it stopped, or from nothing.

use crate::agent::Profile;
use crate::agent::transcript::Reader;
use crate::codec::entry::Entry;
use crate::error::{Error, ErrorContext, ErrorKind, Result};
use crate::index::{EntryRecord, Index, RecordOutcome};
use crate::log::Logs;
use crate::log::fork::{SessionRenamer, cut_lengths};
use crate::log::metadata::VersionedMetadata;
use crate::log::read::{EntrySink, ReadOptions};
use crate::log::segments::Prefer;
use crate::log::state::LogState;
use crate::model::{FileKind, ForkOrigin, LogId, LogPoint, ParsedTranscripts, RelPath, WriterId};

/// Records what the index does not know of a log yet; answers how many entries that were.
pub async fn catch_up(
    logs: &Logs,
    index: &dyn Index,
    profile: &dyn Profile,
    id: &LogId,
) -> Result<u64> {
    let have = index.session(id).await?.map_or(0, |row| row.head);
    match follow(logs, index, profile, id, Some(have)).await {
        // The index holds something else than the bucket (or what it holds was passed over): begin anew.
        Err(error)
            if error.kind() == ErrorKind::Conflict
                || error.kind() == ErrorKind::Corrupt && have > 0 =>
        {
            follow(logs, index, profile, id, None).await
        }
        done => done,
    }
    .with_context(|| format!("index {id}"))
}

/// From where the index stopped, or anew: it forgets a log when that has been read, not before.
async fn follow(
    logs: &Logs,
    index: &dyn Index,
    profile: &dyn Profile,
    id: &LogId,
    have: Option<u64>,
) -> Result<u64> {
    let mut recorded = 0;
    // What the index knows is not read again; the first link is then not checked, all others are.
    let reading = ReadOptions {
        prefer: Prefer::Short,
        after: have.unwrap_or(0),
        ..ReadOptions::default()
    };
    let read = logs
        .read_log(id, reading, || Records {
            id,
            profile,
            reader: Reader::default(),
            records: Vec::new(),
        })
        .await?;
    let damage = read.damage;
    if have.is_none() {
        index.forget(id).await?;
    }
    for mut record in read.sink.records {
        if let Some(fork) = record.header.fork.clone() {
            record.told = begins_with(logs, profile, id, &fork).await?;
            record.header.parts = fork.files;
        }
        recorded += tell(index, &record).await?;
    }
    if let Some(error) = damage {
        return Err(error);
    }
    for writer in logs.branches(id).await? {
        for piece in logs.branch_pieces(id, &writer).await? {
            if let Some(entry) = logs.read_piece(id, &piece, Some(&writer)).await? {
                recorded += tell(
                    index,
                    &record(
                        &mut Reader::default(),
                        profile,
                        id,
                        Some(writer.clone()),
                        &entry,
                    ),
                )
                .await?;
            }
        }
    }
    tell_wishes(logs, index, id).await?;
    Ok(recorded)
}

/// What the files say that a fork begins with.
async fn begins_with(
    logs: &Logs,
    profile: &dyn Profile,
    id: &LogId,
    fork: &ForkOrigin,
) -> Result<ParsedTranscripts> {
    let origin = logs.id(fork.from.clone());
    let reading = ReadOptions {
        at: LogPoint::Seq(fork.seq),
        ..ReadOptions::default()
    };
    let files = logs
        .read_log(&origin, reading, Contents::default)
        .await?
        .sound()?;
    let renaming = SessionRenamer::new(&fork.from, &id.name);
    let lengths = cut_lengths(&files.state.files, fork.cut.as_ref());
    let mut bytes = std::collections::BTreeMap::new();
    for (path, len) in lengths {
        let (Some(file), Some(held)) = (files.state.files.get(&path), files.bytes.get(&path))
        else {
            continue;
        };
        let held = &held[..usize::try_from(len).unwrap_or(usize::MAX).min(held.len())];
        bytes.insert(
            renaming.path(&path)?,
            renaming.bytes(&path, file.kind, held),
        );
    }
    let parts = fork
        .files
        .iter()
        .filter_map(|part| Some((part, bytes.get(&part.path)?.as_slice())));
    Ok(Reader::default().read(profile, parts))
}

/// The bytes of every file that is read for what it says.
#[derive(Default)]
struct Contents {
    state: LogState,
    bytes: std::collections::BTreeMap<RelPath, Vec<u8>>,
}

impl EntrySink for Contents {
    fn take(&mut self, entry: &Entry) -> Result<()> {
        self.state.apply(&entry.header, entry.digest)?;
        for moved in &entry.header.moves {
            if let Some(bytes) = self.bytes.remove(&moved.from) {
                self.bytes.insert(moved.to.clone(), bytes);
            }
        }
        for (part, bytes) in entry
            .parts()
            .filter(|(part, _)| part.kind == FileKind::Append)
        {
            let file = self.bytes.entry(part.path.clone()).or_default();
            file.truncate(usize::try_from(part.start).unwrap_or(usize::MAX));
            file.extend_from_slice(bytes);
        }
        Ok(())
    }

    fn wants_origin(&self) -> bool {
        true
    }

    fn begin(&mut self, fork: &ForkOrigin, renaming: &SessionRenamer) -> Result<()> {
        let lengths = cut_lengths(&self.state.files, fork.cut.as_ref());
        let held = std::mem::take(&mut self.bytes);
        self.state = LogState::default();
        for (path, mut bytes) in held {
            bytes.truncate(
                lengths
                    .get(&path)
                    .map_or(0, |len| usize::try_from(*len).unwrap_or(usize::MAX)),
            );
            self.bytes.insert(
                renaming.path(&path)?,
                renaming.bytes(&path, FileKind::Append, &bytes),
            );
        }
        Ok(())
    }
}

/// Lets the index know the checkpoints that have a name.
pub async fn tell_names(logs: &Logs, index: &dyn Index, id: &LogId) -> Result<()> {
    let named = logs
        .named_points(id)
        .await?
        .into_iter()
        .map(|named| (named.name, named.point))
        .collect::<Vec<_>>();
    index.name_points(id, &named).await
}

/// Tells the index what people said of a session.
async fn tell_wishes(logs: &Logs, index: &dyn Index, id: &LogId) -> Result<()> {
    if id.name.is_project() {
        return Ok(());
    }
    match logs.said(id).await {
        Ok(VersionedMetadata { number: 0, .. }) => Ok(()),
        Ok(said) => index.say(id, said.number, &said.wishes).await,
        // The rest of the rows is right without them.
        Err(error) if error.kind() == ErrorKind::Corrupt => {
            tracing::warn!(%error, %id, "what was said of it is not in the index");
            Ok(())
        }
        Err(error) => Err(error),
    }
}

/// Gathers what the index takes in; the bytes of the files are not kept.
struct Records<'a> {
    id: &'a LogId,
    profile: &'a dyn Profile,
    reader: Reader,
    records: Vec<EntryRecord>,
}

impl EntrySink for Records<'_> {
    fn take(&mut self, entry: &Entry) -> Result<()> {
        self.records
            .push(record(&mut self.reader, self.profile, self.id, None, entry));
        Ok(())
    }
}

fn record(
    reader: &mut Reader,
    profile: &dyn Profile,
    id: &LogId,
    branch: Option<WriterId>,
    entry: &Entry,
) -> EntryRecord {
    reader.moved(&entry.header.moves);
    let told = reader.read(profile, entry.parts());
    EntryRecord {
        log: id.clone(),
        branch,
        header: entry.header.clone(),
        stored: entry.stored,
        digest: entry.digest,
        told,
    }
}

async fn tell(index: &dyn Index, record: &EntryRecord) -> Result<u64> {
    match index.record(record).await? {
        RecordOutcome::New => Ok(1),
        RecordOutcome::Already => Ok(0),
        RecordOutcome::Gap { have } => Err(Error::conflict(format!(
            "the index knows entry {have} and the bucket gives {}",
            record.header.seq
        ))),
    }
}

/// What a rebuild did.
#[derive(Debug, Default, Clone, Copy, serde::Serialize)]
pub struct Rebuilt {
    /// Logs in the bucket.
    pub logs: usize,
    /// Entries recorded.
    pub entries: u64,
    /// Logs that the index knew and the bucket does not have.
    pub forgotten: usize,
    /// Logs that could not be read.
    pub failed: usize,
    /// Logs that are encrypted, and not to any identity at hand.
    pub sealed: usize,
}

/// Rebuilds the index of an agent from the bucket alone. A log that cannot be read is told and passed over.
pub async fn rebuild(
    logs: &Logs,
    index: &dyn Index,
    profile: &dyn Profile,
    mut tell: impl FnMut(&LogId, &Result<u64>),
) -> Result<Rebuilt> {
    let mut rebuilt = Rebuilt::default();
    let names = logs.names("").await?;
    for known in index.logs(&logs.namespace, &logs.agent).await? {
        if !names.contains(&known.name) {
            index.forget(&known).await?;
            rebuilt.forgotten += 1;
        }
    }
    logs.progress.logs(names.len());
    for name in names {
        let id = logs.id(name);
        logs.progress.next_log();
        let mut done = follow(logs, index, profile, &id, None).await;
        if done.is_ok()
            && let Err(error) = tell_names(logs, index, &id).await
        {
            done = Err(error);
        }
        match &done {
            Ok(entries) => rebuilt.entries += entries,
            // Without the database there is no point in going on.
            Err(error) if error.is_retryable() => {
                return done.map(|_| rebuilt).with_context(|| format!("index {id}"));
            }
            Err(error) if error.kind() == ErrorKind::Encrypted => rebuilt.sealed += 1,
            Err(_) => rebuilt.failed += 1,
        }
        tell(&id, &done);
        rebuilt.logs += 1;
    }
    Ok(rebuilt)
}
