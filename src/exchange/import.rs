//! Import: writes an archive file as a log of a claim and deltas, with the same rules as for any
//! other writer.
//!
//! The archive is unpacked and verified before the first object is written. The writer ID of an
//! import starts with a fingerprint of the archive, so that the next import of the same archive can
//! continue an interrupted one.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::agent::transcript::TranscriptReader;
use crate::agent::{FileClass, Profile};
use crate::codec::archive::{self, ArchiveSink, Manifest, Member};
use crate::codec::entry::{
    self, EncodedEntry, Entry, MAX_DELTA_RAW_BYTES, PART_OVERHEAD, TARGET_RAW_BYTES,
};
use crate::error::{Error, ErrorContext, Result};
use crate::log::Logs;
use crate::log::append::AppendOutcome;
use crate::log::fork::SessionRenamer;
use crate::log::ledger::FileCursor;
use crate::log::race::LostRaces;
use crate::log::read::{EntrySink, ReadOptions};
use crate::log::state::LogState;
use crate::log::writer::LogWriter;
use crate::model::{
    CheckpointInterval, Digest, EntryHeader, EntryKind, FileKind, FileState, LogId, LogName, Part,
    RelPath, RunningHash, SessionId, SessionMetadata, TurnTracker, UploadPart, WriterId,
};
use crate::sys::lines::complete_prefix_len;
use crate::sys::{Backoff, Directory, OpenFile};

/// Maximum number of attempts to write an entry.
const MAX_ATTEMPTS: u32 = 6;

/// An unpacked archive: its manifest, and its verified files in a directory.
pub struct UnpackedArchive<'a> {
    directory: &'a dyn Directory,
    /// The manifest.
    pub manifest: Manifest,
    staged: Vec<RelPath>,
}

struct UnpackSink<'a> {
    directory: &'a dyn Directory,
    staged: Vec<RelPath>,
}

impl ArchiveSink for UnpackSink<'_> {
    fn begin(&mut self, manifest: &Manifest) -> Result<()> {
        self.staged = (0..manifest.files.len())
            .map(|number| format!("import-{number:08}").parse())
            .collect::<Result<_>>()?;
        for path in &self.staged {
            self.directory
                .write_at(path, 0, &[])
                .map_err(unpack_failed)?;
        }
        Ok(())
    }

    fn write(&mut self, file: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        self.directory
            .write_at(&self.staged[file], offset, bytes)
            .map_err(unpack_failed)
    }
}

fn unpack_failed(cause: std::io::Error) -> Error {
    Error::io("unpack the archive", cause)
}

/// Unpacks an archive into an empty directory. `name` is its name in errors.
pub fn unpack<'a>(
    name: &str,
    input: impl std::io::Read,
    directory: &'a dyn Directory,
) -> Result<UnpackedArchive<'a>> {
    let mut sink = UnpackSink {
        directory,
        staged: Vec::new(),
    };
    let manifest = archive::read(name, input, &mut sink)?;
    Ok(UnpackedArchive {
        directory,
        manifest,
        staged: sink.staged,
    })
}

impl UnpackedArchive<'_> {
    /// Changes the session ID, in the names of the files and in their lines, as a fork does.
    pub fn rename(&mut self, to: &SessionId) -> Result<()> {
        if self.manifest.session == *to {
            return Ok(());
        }
        let name = |id: &SessionId| LogName::Session(id.clone());
        let files = self.manifest.files.iter().map(|member| &member.path);
        let renamer = SessionRenamer::new(&name(&self.manifest.session), &name(to), files);
        for (member, staged) in self.manifest.files.iter_mut().zip(&mut self.staged) {
            let renamed: RelPath = format!("{staged}-renamed").parse()?;
            let file = open_staged(self.directory, staged)?;
            let (len, hash) = renamer.copy(
                self.directory,
                &*file,
                &member.path,
                (member.kind, member.len),
                &renamed,
            )?;
            (member.path, member.len, member.sha256) =
                (renamer.path(&member.path)?, len, hash.digest());
            *staged = renamed;
        }
        self.manifest.session = to.clone();
        Ok(())
    }
}

/// Opens a file that was unpacked.
fn open_staged(directory: &dyn Directory, staged: &RelPath) -> Result<Box<dyn OpenFile>> {
    directory
        .open(staged)
        .and_then(|file| file.ok_or_else(|| std::io::ErrorKind::NotFound.into()))
        .map_err(|cause| Error::io("read an unpacked file", cause))
}

/// The result of an import.
#[derive(Debug, Clone, Serialize)]
pub struct ImportReport {
    /// The session.
    pub session: String,
    /// Number of files.
    pub files: usize,
    /// Size of the files.
    pub bytes: u64,
    /// Whether the store already had the session.
    pub already_stored: bool,
    /// Number of entries written.
    pub entries: u32,
    /// The head of the log.
    pub head: u64,
    /// Whether this was a dry run.
    pub dry_run: bool,
}

/// Writes an unpacked archive to the store, as a new log.
pub async fn import(
    logs: &Logs,
    profile: &dyn Profile,
    archive: &UnpackedArchive<'_>,
    dry_run: bool,
) -> Result<ImportReport> {
    let manifest = &archive.manifest;
    let id = logs.id(LogName::Session(manifest.session.clone()));
    let importer = Importer {
        logs,
        profile,
        archive,
        id: &id,
        kinds: file_kinds(profile, &id, manifest)?,
    };
    let mut report = ImportReport {
        session: manifest.session.to_string(),
        files: manifest.files.len(),
        bytes: manifest.bytes(),
        already_stored: false,
        entries: 0,
        head: 0,
        dry_run,
    };
    let mut races = LostRaces::default();
    while !importer
        .attempt(&mut report)
        .await
        .with_context(|| format!("import {id}"))?
    {
        races.count(&id).with_context(|| format!("import {id}"))?;
    }
    if !dry_run {
        let imported = manifest.metadata();
        // Metadata in the store takes precedence.
        logs.update_metadata(&id, |current| {
            Ok(SessionMetadata {
                closed: current.closed,
                ..imported.updated_with(current)
            })
        })
        .await?;
    }
    Ok(report)
}

/// The kind of each file. Rejects files that the profile would not have stored for this session: a
/// later restore writes them into the agent's directory.
fn file_kinds(profile: &dyn Profile, id: &LogId, manifest: &Manifest) -> Result<Vec<FileKind>> {
    if manifest.agent != id.agent {
        return Err(Error::usage(format!(
            "the archive holds a session of {}, not of {}",
            manifest.agent, id.agent
        ))
        .context(format_args!("import {id}"))
        .hint(format!("pass --agent {}", manifest.agent)));
    }
    let kind = |member: &Member| match profile.classify(&member.path) {
        FileClass::Stored(name, kind) if name == id.name => Ok(kind),
        FileClass::SessionInContent(_, kind, _) | FileClass::NamedInTranscript(kind) => Ok(kind),
        _ => Err(Error::corrupt(format!(
            "{} is not a file that {} stores for this session",
            member.path, id.agent
        ))
        .context(format_args!("import {id}"))),
    };
    manifest.files.iter().map(kind).collect()
}

struct Importer<'a> {
    logs: &'a Logs,
    profile: &'a dyn Profile,
    archive: &'a UnpackedArchive<'a>,
    id: &'a LogId,
    kinds: Vec<FileKind>,
}

/// The log of the session in the store.
#[derive(Default)]
struct ExistingLog {
    state: LogState,
    writers: BTreeSet<WriterId>,
}

impl EntrySink for ExistingLog {
    fn apply_entry(&mut self, entry: &Entry) -> Result<()> {
        self.state.apply(&entry.header, entry.digest)?;
        match &entry.header.covers {
            Some(covers) => self.writers.extend(covers.writers.keys().cloned()),
            None => {
                self.writers.insert(entry.header.writer.clone());
            }
        }
        Ok(())
    }
}

impl Importer<'_> {
    /// Returns false if another writer appended first.
    async fn attempt(&self, report: &mut ImportReport) -> Result<bool> {
        let read = self
            .logs
            .read_log(self.id, ReadOptions::default(), ExistingLog::default)
            .await?;
        let head = read.head;
        report.head = head;
        let ExistingLog { state, writers } = read.require_undamaged(self.id)?;
        let mut digest = state.digest;
        match state.removed {
            // The session was purged, so the import has no predecessor.
            Some(EntryKind::Purge) => digest = None,
            Some(_) => {
                return Err(Error::conflict(
                    "a session with this ID was removed or has expired",
                )
                .hint(format!(
                    "run \"sessiond undelete {}\" to bring it back, or pass --id NEW to import under another ID",
                    self.id.name
                )));
            }
            None if head == 0 => {}
            None if self.is_complete(&state) => {
                report.already_stored = report.entries == 0;
                return Ok(true);
            }
            None if writers
                .iter()
                .all(|writer| writer.as_str().starts_with(&self.writer_prefix())) =>
            {
                tracing::info!(session = %self.id.name, "continuing an interrupted import");
            }
            None => {
                return Err(Error::conflict(
                    "the store has a session with this ID and different content",
                )
                .hint("pass --id NEW to import under another ID"));
            }
        }
        if report.dry_run {
            return Ok(true);
        }
        let writer = format!("{}{:016x}", self.writer_prefix(), self.logs.rng.next()).parse()?;
        let mut log_writer = LogWriter::unclaimed(writer, state.seq, digest, self.logs.clock.now());
        if self
            .logs
            .claim(self.id, &mut log_writer, head)
            .await?
            .is_none()
        {
            return Ok(false);
        }
        report.entries += 1;
        let stored = if digest.is_none() {
            LogState::default()
        } else {
            state
        };
        let written = self
            .write_all(&mut log_writer, stored, &mut report.entries)
            .await?;
        report.head = log_writer.seq;
        Ok(written)
    }

    /// The start of the IDs of all writers that import this archive.
    fn writer_prefix(&self) -> String {
        let mut hash = RunningHash::default();
        for member in &self.archive.manifest.files {
            hash.update(format!("{} {} {}\n", member.path, member.len, member.sha256).as_bytes());
        }
        format!("import-{:016x}-", hash.digest().fingerprint())
    }

    /// Whether the log has every file of the archive, and no other.
    fn is_complete(&self, state: &LogState) -> bool {
        let files = &self.archive.manifest.files;
        let is_stored = |member: &Member| {
            state
                .files
                .get(&member.path)
                .is_some_and(|file| file.sha256 == member.sha256)
        };
        state.files.len() == files.len() && files.iter().all(is_stored)
    }

    /// Returns false if another writer took over the session.
    async fn write_all(
        &self,
        log_writer: &mut LogWriter,
        stored: LogState,
        entries: &mut u32,
    ) -> Result<bool> {
        let transcripts = stored
            .files
            .iter()
            .filter(|(_, file)| file.kind == FileKind::Append);
        let lengths = transcripts
            .map(|(path, file)| (path.clone(), file.len))
            .collect();
        let mut builder = DeltaBuilder {
            importer: self,
            reader: TranscriptReader::default(),
            turns: stored.turns.clone(),
            lengths,
            delta: Delta::new(),
        };
        for number in self.order() {
            let member = &self.archive.manifest.files[number];
            let mut file = MemberReader::open(
                self.archive.directory,
                &self.archive.staged[number],
                stored.files.get(&member.path),
            )?;
            // The entry of a transcript determines which of several transcripts is current, so each
            // gets its own entry.
            if builder
                .delta
                .parts
                .iter()
                .any(|part| self.profile.is_transcript(&part.path))
            {
                builder.delta.room = 0;
            }
            // An empty file has a part, too.
            while file.offset < member.len || member.len == 0 && !file.has_part {
                if builder.delta.room == 0
                    && !self
                        .append(log_writer, builder.build(log_writer)?, entries)
                        .await?
                {
                    return Ok(false);
                }
                builder.add(member, self.kinds[number], &mut file)?;
            }
        }
        while !builder.delta.parts.is_empty() {
            if !self
                .append(log_writer, builder.build(log_writer)?, entries)
                .await?
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The order of the files: side files first, because transcripts refer to them; the newest
    /// transcript last, because it is the current one.
    fn order(&self) -> Vec<usize> {
        let files = &self.archive.manifest.files;
        let mut order: Vec<usize> = (0..files.len()).collect();
        order.sort_by_key(|number| {
            let (member, kind) = (&files[*number], self.kinds[*number]);
            (
                self.profile.is_transcript(&member.path),
                kind == FileKind::Append,
                member.mtime_ns,
                &member.path,
            )
        });
        order
    }

    async fn append(
        &self,
        log_writer: &mut LogWriter,
        encoded: EncodedEntry,
        entries: &mut u32,
    ) -> Result<bool> {
        let mut backoff = Backoff::new(self.logs.rng.clone());
        loop {
            match self.logs.append(self.id, log_writer, &encoded).await {
                Ok(AppendOutcome::Written) => {
                    *entries += 1;
                    return Ok(true);
                }
                Ok(AppendOutcome::Conflict(_)) => return Ok(false),
                Err(error) => backoff.wait(error, MAX_ATTEMPTS).await.map_err(|error| {
                    if error.is_retryable() {
                        error.hint("run the same command again; it continues where it stopped")
                    } else {
                        error
                    }
                })?,
            }
        }
    }
}

/// Reads one file of the archive.
struct MemberReader {
    file: Box<dyn OpenFile>,
    /// Offset of the next byte.
    offset: u64,
    hash: RunningHash,
    /// Whether the log has a part of the file.
    has_part: bool,
    /// Whether the last part was one of several.
    is_uploading: bool,
}

impl MemberReader {
    /// Opens a file and skips the bytes that the log has.
    fn open(
        directory: &dyn Directory,
        staged: &RelPath,
        stored: Option<&FileState>,
    ) -> Result<MemberReader> {
        let mut reader = MemberReader {
            file: open_staged(directory, staged)?,
            offset: 0,
            hash: RunningHash::default(),
            has_part: false,
            is_uploading: false,
        };
        if let Some(stored) = stored {
            let cursor = FileCursor::read(&*reader.file, stored.kind, stored.len)
                .map_err(|cause| Error::io("read an unpacked file", cause))?;
            let cursor = cursor.filter(|cursor| cursor.hash.digest() == stored.sha256);
            if let Some(hash) = cursor.and_then(|cursor| cursor.hash.running().cloned()) {
                (reader.offset, reader.hash, reader.has_part) = (stored.len, hash, true);
            }
        }
        Ok(reader)
    }

    /// The next bytes, at most `room` if possible. A transcript is split only between lines.
    fn next(&mut self, len: u64, kind: FileKind, room: u64) -> Result<Vec<u8>> {
        let left = len - self.offset;
        let max = left.min(MAX_DELTA_RAW_BYTES - (TARGET_RAW_BYTES - room));
        let mut wanted = left.min(room);
        loop {
            let mut bytes = vec![0; wanted as usize];
            let mut got = 0;
            while got < bytes.len() {
                match self
                    .file
                    .read_at(&mut bytes[got..], self.offset + got as u64)
                {
                    Ok(0) => return Err(Error::corrupt("an unpacked file has changed")),
                    Ok(more) => got += more,
                    Err(cause) => return Err(Error::io("read an unpacked file", cause)),
                }
            }
            match complete_prefix_len(&bytes) {
                _ if kind == FileKind::Whole || wanted == left => {}
                0 if wanted < max => {
                    wanted = wanted.saturating_mul(4).min(max);
                    continue;
                }
                // A line that is longer than the maximum entry is written in parts.
                0 => {}
                complete_len => bytes.truncate(complete_len),
            }
            self.hash.update(&bytes);
            self.offset += bytes.len() as u64;
            self.has_part = true;
            return Ok(bytes);
        }
    }
}

/// The content of a delta.
struct Delta {
    parts: Vec<Part>,
    bodies: Vec<Vec<u8>>,
    /// Raw bytes that still fit.
    room: u64,
}

impl Delta {
    fn new() -> Delta {
        Delta {
            parts: Vec::new(),
            bodies: Vec::new(),
            room: TARGET_RAW_BYTES,
        }
    }
}

/// Collects parts into deltas.
struct DeltaBuilder<'a> {
    importer: &'a Importer<'a>,
    reader: TranscriptReader,
    turns: TurnTracker,
    /// The length of each transcript so far.
    lengths: BTreeMap<RelPath, u64>,
    delta: Delta,
}

impl DeltaBuilder<'_> {
    fn add(&mut self, member: &Member, kind: FileKind, file: &mut MemberReader) -> Result<()> {
        let (start, was_uploading) = (file.offset, file.is_uploading);
        let bytes = file.next(member.len, kind, self.delta.room)?;
        let file_sha256: Digest = file.hash.digest();
        let (path, len) = (member.path.clone(), bytes.len() as u64);
        file.is_uploading = kind == FileKind::Whole && file.offset < member.len;
        let upload = match (file.is_uploading, was_uploading) {
            (true, _) => Some(UploadPart::More),
            (false, true) => Some(UploadPart::Last),
            (false, false) => None,
        };
        let used = len + path.as_str().len() as u64 + PART_OVERHEAD;
        // An entry has at most one part per file.
        self.delta.room = if file.offset < member.len {
            0
        } else {
            self.delta.room.saturating_sub(used)
        };
        if kind == FileKind::Append {
            self.lengths.insert(path.clone(), file.offset);
        }
        self.delta.parts.push(Part {
            path,
            kind,
            start,
            len,
            file_sha256,
            mode: member.mode & 0o777,
            mtime_ns: member.mtime_ns,
            seq: None,
            upload,
        });
        self.delta.bodies.push(bytes);
        Ok(())
    }

    /// Encodes the delta, with the checkpoints that it reaches.
    fn build(&mut self, log_writer: &LogWriter) -> Result<EncodedEntry> {
        let Delta { parts, bodies, .. } = std::mem::replace(&mut self.delta, Delta::new());
        let parsed = self.reader.read(
            self.importer.profile,
            parts.iter().zip(bodies.iter().map(Vec::as_slice)),
        );
        let checkpoints = self.turns.apply(
            &parsed.turn_events,
            &self.lengths,
            CheckpointInterval::default(),
        );
        let header = log_writer.next_header(
            self.importer.id,
            EntryKind::Delta,
            self.importer.logs.clock.now(),
            Vec::new(),
            parts,
        );
        let encoded = entry::encode(
            EntryHeader {
                checkpoints,
                ..header
            },
            &bodies,
        )?;
        Ok(encoded)
    }
}
