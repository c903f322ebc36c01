//! An archive becomes a log: a claim, then deltas, by the same rules as any other writer's.
//!
//! Everything is unpacked and checked before the first object is written. An import that was cut off is known by its writer's
//! name, and the next one of the same archive goes on behind it.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::agent::transcript::Reader;
use crate::agent::{FileClass, Profile};
use crate::codec::archive::{self, Manifest, Member, Taker};
use crate::codec::entry::{self, CUT_AT, Encoded, Entry, MOST_RAW};
use crate::error::{Error, ErrorContext, ErrorKind, Result};
use crate::log::Logs;
use crate::log::fork::SessionRenamer;
use crate::log::read::{EntrySink, ReadOptions};
use crate::log::state::LogState;
use crate::log::writer::{AppendOutcome, LogWriter};
use crate::model::{
    Digest, EntryHeader, EntryKind, FileKind, LogId, LogName, Part, RelPath, RunningHash,
    SessionId, SessionMetadata, TurnTracker, WriterId,
};
use crate::sys::{Backoff, Directory, OpenFile};

/// Somebody may write between our look and our claim; so often we look again.
const MOST_RACES: u32 = 10;

/// So often an entry is written that the store does not answer.
const TRIES: u32 = 6;

/// What a part takes of the room besides its bytes and its path, as for any other writer.
const PART: u64 = 1 << 10;

/// An archive whose files lie in a directory, each checked.
pub struct Unpacked<'a> {
    directory: &'a dyn Directory,
    /// What it holds.
    pub manifest: Manifest,
    staged: Vec<RelPath>,
}

struct Stage<'a> {
    directory: &'a dyn Directory,
    staged: Vec<RelPath>,
}

impl Taker for Stage<'_> {
    fn begin(&mut self, manifest: &Manifest) -> Result<()> {
        self.staged = (0..manifest.files.len())
            .map(|number| format!("import-{number:08}").parse())
            .collect::<Result<_>>()?;
        for path in &self.staged {
            self.directory
                .write_at(path, 0, &[])
                .map_err(|cause| Error::io("unpack", cause))?;
        }
        Ok(())
    }

    fn bytes(&mut self, file: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        self.directory
            .write_at(&self.staged[file], offset, bytes)
            .map_err(|cause| Error::io("unpack", cause))
    }
}

/// Unpacks an archive into a directory that nobody else uses. It is called `name` in errors.
pub fn unpack<'a>(
    name: &str,
    input: impl std::io::Read,
    directory: &'a dyn Directory,
) -> Result<Unpacked<'a>> {
    let mut stage = Stage {
        directory,
        staged: Vec::new(),
    };
    let manifest = archive::read(name, input, &mut stage)?;
    Ok(Unpacked {
        directory,
        manifest,
        staged: stage.staged,
    })
}

impl Unpacked<'_> {
    /// Makes it a session of another id, as a fork would: in the names of its files and in their lines.
    pub fn rename(&mut self, to: &SessionId) -> Result<()> {
        if self.manifest.session == *to {
            return Ok(());
        }
        let name = |id: &SessionId| LogName::Session(id.clone());
        let renaming = SessionRenamer::new(&name(&self.manifest.session), &name(to));
        for (member, staged) in self.manifest.files.iter_mut().zip(&mut self.staged) {
            let renamed: RelPath = format!("{staged}-renamed").parse()?;
            let gone = || Error::corrupt("what was unpacked is gone");
            let file = self
                .directory
                .open(staged)
                .map_err(|cause| Error::io("read what was unpacked", cause))?
                .ok_or_else(gone)?;
            let (len, hash) = renaming.copy(
                self.directory,
                &*file,
                &member.path,
                (member.kind, member.len),
                &renamed,
            )?;
            (member.path, member.len, member.sha256) =
                (renaming.path(&member.path)?, len, hash.digest());
            *staged = renamed;
        }
        self.manifest.session = to.clone();
        Ok(())
    }
}

/// What an import did.
#[derive(Debug, Clone, Serialize)]
pub struct Imported {
    /// The session.
    pub session: String,
    /// Files of it.
    pub files: usize,
    /// Bytes of them.
    pub bytes: u64,
    /// Whether the store had all of it before.
    pub already: bool,
    /// Entries written.
    pub entries: u32,
    /// The end of the log.
    pub head: u64,
    /// Whether nothing was done on purpose.
    pub dry_run: bool,
}

/// Writes an unpacked archive to a store, as a new log.
pub async fn import(
    logs: &Logs,
    profile: &dyn Profile,
    unpacked: &Unpacked<'_>,
    dry_run: bool,
) -> Result<Imported> {
    let manifest = &unpacked.manifest;
    let id = logs.id(LogName::Session(manifest.session.clone()));
    let job = Job {
        logs,
        profile,
        unpacked,
        id: &id,
        kinds: kinds(profile, &id, manifest)?,
    };
    let mut imported = Imported {
        session: manifest.session.to_string(),
        files: manifest.files.len(),
        bytes: manifest.bytes(),
        already: false,
        entries: 0,
        head: 0,
        dry_run,
    };
    for _ in 0..MOST_RACES {
        if job
            .attempt(&mut imported)
            .await
            .with_context(|| format!("import {id}"))?
        {
            if !dry_run {
                let said = manifest.wishes();
                // What was said here counts more.
                logs.say(&id, |before| {
                    Ok(SessionMetadata {
                        status: before.status,
                        ..said.then(before)
                    })
                })
                .await?;
            }
            return Ok(imported);
        }
    }
    Err(Error::unavailable(format!("import {id}: others keep writing to it")).hint("try again"))
}

/// Only what the agent's profile would have kept for that session may come in: what is restored from it later must be so too.
fn kinds(profile: &dyn Profile, id: &LogId, manifest: &Manifest) -> Result<Vec<FileKind>> {
    if manifest.agent != id.agent {
        return Err(Error::usage(format!(
            "import {id}: it is a session of {}, and this is {}",
            manifest.agent, id.agent
        ))
        .hint(format!("--agent {} takes it", manifest.agent)));
    }
    let kind = |member: &Member| match profile.place(&member.path) {
        FileClass::Keep(name, kind) if name == id.name => Ok(kind),
        FileClass::Ask(_, kind, _) => Ok(kind),
        _ => Err(Error::corrupt(format!(
            "import {id}: {} is not a file that {} keeps for it",
            member.path, id.agent
        ))),
    };
    manifest.files.iter().map(kind).collect()
}

struct Job<'a> {
    logs: &'a Logs,
    profile: &'a dyn Profile,
    unpacked: &'a Unpacked<'a>,
    id: &'a LogId,
    kinds: Vec<FileKind>,
}

/// What the store has of the session.
#[derive(Default)]
struct Found {
    state: LogState,
    writers: BTreeSet<WriterId>,
}

impl EntrySink for Found {
    fn take(&mut self, entry: &Entry) -> Result<()> {
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

impl Job<'_> {
    /// False if somebody wrote in between.
    async fn attempt(&self, imported: &mut Imported) -> Result<bool> {
        let read = self
            .logs
            .read_log(self.id, ReadOptions::default(), Found::default)
            .await?;
        let end = read.head;
        imported.head = end;
        let Found { state, writers } = read.sound()?;
        let mut digest = state.digest;
        match state.removed {
            // Nothing of it counts any more.
            Some(EntryKind::Purge) => digest = None,
            Some(_) => {
                return Err(Error::conflict("a session of that id was removed, or has expired")
                    .hint(format!("sessiond undelete {} brings it back; --id NEW imports this one under another id", self.id.name)));
            }
            None if end == 0 => {}
            None if self.is_all_of(&state) => {
                imported.already = imported.entries == 0;
                return Ok(true);
            }
            None if writers
                .iter()
                .all(|writer| writer.as_str().starts_with(&self.mark())) =>
            {
                tracing::info!(id = %self.id, "going on with an import that was cut off");
            }
            None => {
                return Err(Error::conflict("the store has a session of that id with other content")
                    .hint("--id NEW imports this one under another id; sessiond rm removes the other first"));
            }
        }
        if imported.dry_run {
            return Ok(true);
        }
        let writer = format!("{}{:016x}", self.mark(), self.logs.rng.next()).parse()?;
        let mut log_writer = LogWriter::unclaimed(writer, state.seq, digest, self.logs.clock.now());
        if self
            .logs
            .claim(self.id, &mut log_writer, end)
            .await?
            .is_none()
        {
            return Ok(false);
        }
        imported.entries += 1;
        let have = if digest.is_none() {
            LogState::default()
        } else {
            state
        };
        let written = self
            .write_all(&mut log_writer, have, &mut imported.entries)
            .await?;
        imported.head = log_writer.seq;
        Ok(written)
    }

    /// What the names of writers begin with that import this archive.
    fn mark(&self) -> String {
        let mut hash = RunningHash::default();
        for member in &self.unpacked.manifest.files {
            hash.update(format!("{} {} {}\n", member.path, member.len, member.sha256).as_bytes());
        }
        format!("import-{:016x}-", hash.digest().short())
    }

    fn is_all_of(&self, state: &LogState) -> bool {
        let files = &self.unpacked.manifest.files;
        let same = |member: &Member| {
            state
                .files
                .get(&member.path)
                .is_some_and(|file| file.sha256 == member.sha256)
        };
        state.files.len() == files.len() && files.iter().all(same)
    }

    /// False if somebody took the session over.
    async fn write_all(
        &self,
        log_writer: &mut LogWriter,
        have: LogState,
        entries: &mut u32,
    ) -> Result<bool> {
        let lines = have
            .files
            .iter()
            .filter(|(_, file)| file.kind == FileKind::Append);
        let lengths = lines.map(|(path, file)| (path.clone(), file.len)).collect();
        let mut cutter = Cutter {
            job: self,
            reader: Reader::default(),
            turns: have.turns.clone(),
            lengths,
            delta: Delta::new(),
        };
        for number in self.order() {
            let member = &self.unpacked.manifest.files[number];
            let mut file = Progress::begin(
                self.unpacked.directory,
                &self.unpacked.staged[number],
                have.files.get(&member.path),
            )?;
            // Which of several transcripts counts is told by the entry that it is in.
            if cutter
                .delta
                .parts
                .iter()
                .any(|part| self.profile.is_transcript(&part.path))
            {
                cutter.delta.room = 0;
            }
            // Also a file of no bytes has a part.
            while file.at < member.len || file.at == 0 && member.len == 0 && !file.begun {
                if cutter.delta.room == 0
                    && !self
                        .append(log_writer, cutter.take(log_writer)?, entries)
                        .await?
                {
                    return Ok(false);
                }
                cutter.add(member, self.kinds[number], &mut file)?;
            }
        }
        while !cutter.delta.parts.is_empty() {
            if !self
                .append(log_writer, cutter.take(log_writer)?, entries)
                .await?
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Side files first, so that what a transcript names is there before it; of several transcripts the newest last, for
    /// that is the one that counts.
    fn order(&self) -> Vec<usize> {
        let files = &self.unpacked.manifest.files;
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
        encoded: Encoded,
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
                Err(error) if error.is_retryable() && backoff.failed() + 1 < TRIES => {
                    tracing::debug!(%error, "writing again");
                    tokio::time::sleep(backoff.wait_after_failure()).await;
                }
                Err(error) if error.is_retryable() => {
                    return Err(error.hint("the same command goes on where it stopped"));
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// One file on its way into the log.
struct Progress {
    file: Box<dyn OpenFile>,
    at: u64,
    hash: RunningHash,
    begun: bool,
}

impl Progress {
    /// Begins behind what the log has of it.
    fn begin(
        directory: &dyn Directory,
        staged: &RelPath,
        have: Option<&crate::model::FileState>,
    ) -> Result<Progress> {
        let failed = |cause| Error::io("read what was unpacked", cause);
        let file = directory
            .open(staged)
            .map_err(failed)?
            .ok_or_else(|| failed(std::io::ErrorKind::NotFound.into()))?;
        let mut progress = Progress {
            file,
            at: 0,
            hash: RunningHash::default(),
            begun: false,
        };
        if let Some(have) = have {
            let over = crate::log::ledger::FileCursor::over(&*progress.file, have.kind, have.len)
                .map_err(failed)?;
            if let Some(cursor) = over.filter(|cursor| cursor.hash.digest() == have.sha256) {
                (progress.at, progress.hash, progress.begun) = (have.len, cursor.hash, true);
            }
        }
        Ok(progress)
    }

    /// The next bytes: as many as there is room for, up to a line's end if the file has lines.
    fn next(&mut self, len: u64, kind: FileKind, room: u64) -> Result<Vec<u8>> {
        let left = len - self.at;
        let most = left.min(MOST_RAW - (CUT_AT - room));
        let mut want = if kind == FileKind::Whole {
            most
        } else {
            left.min(room)
        };
        loop {
            let mut bytes = vec![0; want as usize];
            let mut got = 0;
            while got < bytes.len() {
                match self.file.read_at(&mut bytes[got..], self.at + got as u64) {
                    Ok(0) => return Err(Error::corrupt("what was unpacked has changed")),
                    Ok(more) => got += more,
                    Err(cause) => return Err(Error::io("read what was unpacked", cause)),
                }
            }
            let line = bytes
                .iter()
                .rposition(|byte| *byte == b'\n')
                .filter(|_| kind == FileKind::Append && want < left);
            match line {
                Some(end) => bytes.truncate(end + 1),
                None if kind == FileKind::Append && want < most => {
                    want = want.saturating_mul(4).min(most);
                    continue;
                }
                None => {}
            }
            self.hash.update(&bytes);
            self.at += bytes.len() as u64;
            self.begun = true;
            return Ok(bytes);
        }
    }
}

/// A delta in the making.
struct Delta {
    parts: Vec<Part>,
    bodies: Vec<Vec<u8>>,
    room: u64,
}

impl Delta {
    fn new() -> Delta {
        Delta {
            parts: Vec::new(),
            bodies: Vec::new(),
            room: CUT_AT,
        }
    }
}

struct Cutter<'a> {
    job: &'a Job<'a>,
    reader: Reader,
    turns: TurnTracker,
    /// How long each file with lines is so far.
    lengths: BTreeMap<RelPath, u64>,
    delta: Delta,
}

impl Cutter<'_> {
    fn add(&mut self, member: &Member, kind: FileKind, file: &mut Progress) -> Result<()> {
        let start = file.at;
        let bytes = file.next(member.len, kind, self.delta.room)?;
        let file_sha256: Digest = file.hash.digest();
        let (path, len) = (member.path.clone(), bytes.len() as u64);
        let taken = len + path.as_str().len() as u64 + PART;
        // One part of a file in an entry.
        self.delta.room = if file.at < member.len {
            0
        } else {
            self.delta.room.saturating_sub(taken)
        };
        if kind == FileKind::Append {
            self.lengths.insert(path.clone(), file.at);
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
        });
        self.delta.bodies.push(bytes);
        Ok(())
    }

    /// The delta as it would be written next, with the points to go back to that are reached in it.
    fn take(&mut self, log_writer: &LogWriter) -> Result<Encoded> {
        let Delta { parts, bodies, .. } = std::mem::replace(&mut self.delta, Delta::new());
        let told = self.reader.read(
            self.job.profile,
            parts.iter().zip(bodies.iter().map(Vec::as_slice)),
        );
        let checkpoints = self.turns.take(&told.marks, &self.lengths);
        let header = log_writer.header(
            self.job.id,
            EntryKind::Delta,
            self.job.logs.clock.now(),
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
        if encoded.header.body_len() > MOST_RAW {
            return Err(Error::new(
                ErrorKind::Internal,
                "import: an entry is too large",
            ));
        }
        Ok(encoded)
    }
}
