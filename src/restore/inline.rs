//! Restores a session from an environment variable: a transcript or an exported archive.
//!
//! Does not claim the session. The next daemon finds files without a ledger and compares them with
//! the store.

use serde::de::IgnoredAny;

use super::options::{Options, Purpose, RestoreContext};
use super::ownership;
use super::plan::{self, LedgerState};
use super::report::RestoreReport;
use super::write;
use crate::agent::Profile;
use crate::codec::archive::{self, InMemoryFiles, Member};
use crate::codec::entry::Entry;
use crate::error::{Error, ErrorContext, Result};
use crate::log::assemble::FileAssembler;
use crate::log::read::EntrySink;
use crate::log::writer::LogWriter;
use crate::model::{Digest, EntryKind, FileKind, LogId, LogName, Part, RelPath, SessionId};
use crate::sys::STATE_DIR;

/// A session from an environment variable.
pub struct InlineSession {
    /// Its ID.
    pub session: SessionId,
    files: Vec<(Member, Vec<u8>)>,
}

/// Maximum size of the session in a variable, which has at most 128 KiB on Linux.
const MAX_INFLATED_BYTES: u64 = 64 << 20;

/// How to decode a variable.
pub struct Variable<'a> {
    /// Its name, for errors.
    pub name: &'a str,
    /// Its value: base64 of an archive file, or of a gzipped transcript.
    pub value: &'a str,
    /// The session ID, if it is known. A transcript needs it.
    pub id: Option<&'a SessionId>,
    /// The project that a transcript is put into.
    pub project: &'a str,
    /// The modification time of a transcript.
    pub now_ns: i64,
}

/// Decodes a session from a variable.
pub fn decode(profile: &dyn Profile, variable: &Variable<'_>) -> Result<InlineSession> {
    let Variable { name, id, .. } = *variable;
    let inflated = archive::inflate(name, variable.value.as_bytes(), MAX_INFLATED_BYTES)?;
    if !archive::is_archive(&inflated) {
        return decode_transcript(profile, variable, inflated);
    }
    let mut files = InMemoryFiles::default();
    let manifest = archive::read_inflated(name, &inflated, &mut files)?;
    if manifest.agent != *profile.name() {
        return Err(Error::usage(format!(
            "invalid {name}: it contains a session of agent {}, not of {}",
            manifest.agent,
            profile.name()
        ))
        .hint(format!("use --agent {}", manifest.agent)));
    }
    if let Some(id) = id.filter(|id| **id != manifest.session) {
        return Err(Error::usage(format!(
            "invalid {name}: it contains session {}, not {id}",
            manifest.session
        )));
    }
    Ok(InlineSession {
        session: manifest.session,
        files: manifest.files.into_iter().zip(files.0).collect(),
    })
}

fn decode_transcript(
    profile: &dyn Profile,
    variable: &Variable<'_>,
    transcript: Vec<u8>,
) -> Result<InlineSession> {
    let name = variable.name;
    let id = variable.id.ok_or_else(|| {
        Error::usage(format!(
            "invalid {name}: it contains a transcript, but the session ID is unknown"
        ))
        .hint("set AGENT_SESSION_ID to the session ID")
    })?;
    let path = profile.transcript_path(variable.project, id).ok_or_else(|| {
        Error::usage(format!(
            "invalid {name}: it contains no archive, and the path of a transcript of agent {} is unknown",
            profile.name()
        ))
    })?;
    let mut lines = transcript.split(|byte| *byte == b'\n');
    let first = lines.next().unwrap_or_default();
    if let Err(cause) = serde_json::from_slice::<IgnoredAny>(first) {
        return Err(Error::corrupt(format!(
            "invalid {name}: it contains neither an archive nor a transcript: {cause}"
        )));
    }
    let member = Member {
        path,
        kind: FileKind::Append,
        len: transcript.len() as u64,
        mode: 0o600,
        mtime_ns: variable.now_ns,
        sha256: Digest::of(&transcript),
    };
    Ok(InlineSession {
        session: id.clone(),
        files: vec![(member, transcript)],
    })
}

/// Writes the files of the session. Local files that differ are never overwritten.
pub fn restore(
    context: &RestoreContext,
    session: InlineSession,
    options: &Options,
) -> Result<RestoreReport> {
    let id = context.logs.id(LogName::Session(session.session.clone()));
    let stage: RelPath =
        format!("{STATE_DIR}/tmp/restore-{:016x}", context.logs.rng.next()).parse()?;
    let report = write_files(context, &id, session, options, &stage);
    if let Err(cause) = context.directory.remove(&stage) {
        tracing::warn!(%cause, %stage, "cannot remove the staging directory");
    }
    report.with_context(|| format!("restore {id}"))
}

fn write_files(
    context: &RestoreContext,
    id: &LogId,
    session: InlineSession,
    options: &Options,
    stage: &RelPath,
) -> Result<RestoreReport> {
    let mut assembler = FileAssembler::new(&*context.directory, stage.clone(), 1);
    let kind = |path: &RelPath, kind| context.profile.classify(path).kind().unwrap_or(kind);
    let parts = session.files.iter().map(|(member, _)| Part {
        path: member.path.clone(),
        kind: kind(&member.path, member.kind),
        start: 0,
        len: member.len,
        file_sha256: member.sha256,
        mode: member.mode & 0o777,
        mtime_ns: member.mtime_ns,
        seq: None,
        upload: None,
    });
    let now = context.logs.clock.now();
    let log_writer = LogWriter::unclaimed("variable".parse()?, 0, None, now);
    let header = log_writer.next_header(id, EntryKind::Delta, now, Vec::new(), parts.collect());
    let body: Vec<u8> = session
        .files
        .into_iter()
        .flat_map(|(_, bytes)| bytes)
        .collect();
    assembler.apply_entry(&Entry {
        header,
        digest: Digest::of(&[]),
        stored_bytes: 0,
        body,
    })?;
    ownership::check_files(context, id, &mut assembler, Purpose::Restore)?;
    let known = LedgerState::default();
    let files = plan::plan_files(context, id, &assembler, &[], known, options)?;
    plan::check_conflicts(id, &files, options)?;
    let mut report = RestoreReport::new(id, files, options);
    if !options.dry_run {
        write::write_files(context, &assembler, &mut report, None, options)?;
    }
    Ok(report)
}
