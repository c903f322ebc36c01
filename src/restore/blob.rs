//! A session that came in a variable: one transcript or an exported archive, put in place as if it had been restored.
//!
//! Nothing is claimed: the daemon that starts next finds files that no ledger knows, and asks the bucket.

use serde::de::IgnoredAny;

use super::place;
use super::{Context, Options, RestoreReport};
use crate::agent::Profile;
use crate::codec::archive::{self, InMemory, Member};
use crate::codec::entry::{Entry, MOST_RAW};
use crate::error::{Error, ErrorContext, Result};
use crate::log::assemble::FileAssembler;
use crate::log::read::EntrySink;
use crate::log::writer::LogWriter;
use crate::model::{Digest, EntryKind, FileKind, LogId, LogName, Part, RelPath, SessionId};
use crate::sys::STATE_DIR;

/// What came in a variable.
pub struct Blob {
    /// The session.
    pub session: SessionId,
    files: Vec<(Member, Vec<u8>)>,
}

/// Reads what `name` holds: base64 of gzip of an archive, or of the transcript of session `id` of the project `project`.
pub fn read(
    profile: &dyn Profile,
    name: &str,
    text: &str,
    id: Option<&SessionId>,
    project: &str,
    now_ns: i64,
) -> Result<Blob> {
    let inflated = archive::inflate(name, text.as_bytes(), MOST_RAW)?;
    if !archive::is_archive(&inflated) {
        let id = id.ok_or_else(|| {
            Error::usage(format!(
                "{name} holds a transcript, and no variable says of which session"
            ))
            .hint("AGENT_SESSION_ID=ID says it")
        })?;
        let path = profile.transcript(project, id).ok_or_else(|| {
            Error::usage(format!(
                "{name} holds no archive, and {} does not say where a transcript goes",
                profile.name()
            ))
        })?;
        let first = inflated
            .split(|byte| *byte == b'\n')
            .next()
            .unwrap_or_default();
        serde_json::from_slice::<IgnoredAny>(first).map_err(|cause| {
            Error::corrupt(format!("read {name}: neither an archive nor a transcript"))
                .caused_by(cause)
        })?;
        let (len, sha256) = (inflated.len() as u64, Digest::of(&inflated));
        let member = Member {
            path,
            kind: FileKind::Append,
            len,
            mode: 0o600,
            mtime_ns: now_ns,
            sha256,
        };
        return Ok(Blob {
            session: id.clone(),
            files: vec![(member, inflated)],
        });
    }
    let mut files = InMemory::default();
    let manifest = archive::read_inflated(name, &inflated, &mut files)?;
    if manifest.agent != *profile.name() {
        return Err(Error::usage(format!(
            "{name} holds a session of {}, and this is {}",
            manifest.agent,
            profile.name()
        ))
        .hint(format!("--agent {} takes it", manifest.agent)));
    }
    if let Some(id) = id.filter(|id| **id != manifest.session) {
        return Err(Error::usage(format!(
            "{name} holds session {}, not {id}",
            manifest.session
        )));
    }
    Ok(Blob {
        session: manifest.session,
        files: manifest.files.into_iter().zip(files.0).collect(),
    })
}

/// Puts its files in place; what is here and differs is never overwritten.
pub fn restore(context: &Context, blob: Blob, options: &Options) -> Result<RestoreReport> {
    let id = context.logs.id(LogName::Session(blob.session.clone()));
    let stage: RelPath =
        format!("{STATE_DIR}/tmp/restore-{:016x}", context.logs.rng.next()).parse()?;
    let done = put(context, &id, blob, options, &stage).with_context(|| format!("restore {id}"));
    if let Err(cause) = context.directory.remove(&stage) {
        tracing::warn!(%cause, %stage, "the temporary directory was not removed");
    }
    done
}

fn put(
    context: &Context,
    id: &LogId,
    blob: Blob,
    options: &Options,
    stage: &RelPath,
) -> Result<RestoreReport> {
    let mut assembly = FileAssembler::new(&*context.directory, stage.clone(), 1);
    let kind = |path: &RelPath, kind| match context.profile.place(path) {
        crate::agent::FileClass::Keep(_, kind) | crate::agent::FileClass::Ask(_, kind, _) => kind,
        crate::agent::FileClass::Ignore => kind,
    };
    let parts = blob.files.iter().map(|(member, _)| Part {
        path: member.path.clone(),
        kind: kind(&member.path, member.kind),
        start: 0,
        len: member.len,
        file_sha256: member.sha256,
        mode: member.mode & 0o777,
        mtime_ns: member.mtime_ns,
        seq: None,
    });
    let now = context.logs.clock.now();
    let log_writer = LogWriter::unclaimed("variable".parse()?, 0, None, now);
    let header = log_writer.header(id, EntryKind::Delta, now, Vec::new(), parts.collect());
    let body: Vec<u8> = blob
        .files
        .into_iter()
        .flat_map(|(_, bytes)| bytes)
        .collect();
    assembly.take(&Entry {
        header,
        digest: Digest::of(&[]),
        stored: 0,
        body,
    })?;
    let files = place::decide_all(context, id, &assembly, &[], (None, false), options)?;
    place::check(id, &files, options)?;
    let mut report = RestoreReport::new(id, files, options);
    if !options.dry_run {
        place::place_all(context, &assembly, &mut report, None, options)?;
    }
    Ok(report)
}
