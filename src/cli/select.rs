//! Which session is meant, at which point, and whose the files shall be: the same words for every verb.

use std::path::{Path, PathBuf};

use crate::agent::is_uuid;
use crate::cli::when;
use crate::error::{Error, ErrorKind, Result};
use crate::index::EntryRecord;
use crate::model::{LogId, LogPoint, ParsedTranscripts, PointSpec, metadata};
use crate::restore::find::LatestFilter;
use crate::restore::{RestoreReport, find};
use crate::sys::{Clock, Disk, Owner, SystemClock};
use crate::upkeep::reindex::catch_up;
use crate::wire::Parts;

/// Which part of a listing, and in which form.
#[derive(Debug, Clone, clap::Args)]
#[group(skip)]
pub struct Page {
    /// At most so many
    #[arg(long, env = "SESSIOND_LIMIT", value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub limit: u32,

    /// Go on behind a page: the cursor it gave
    #[arg(long, env = "SESSIOND_CURSOR", value_name = "CURSOR")]
    pub cursor: Option<String>,

    /// Print them as JSON
    #[arg(long, env = "SESSIOND_JSON")]
    pub json: bool,
}

/// How long a command waits for the index to learn of a claim; it can learn later.
const INDEX_PATIENCE: std::time::Duration = std::time::Duration::from_secs(3);

/// The latest session, as asked for.
#[derive(Debug, Clone, Copy, Default)]
pub struct Latest<'a> {
    /// The latest is meant, of whatever.
    pub latest: bool,
    /// Of the project in this directory.
    pub project: Option<&'a Path>,
    /// Of this request.
    pub request: Option<&'a str>,
}

/// The session named by id, or the latest (of a project, of a request).
pub async fn session(parts: &Parts, id: Option<&str>, latest: Latest<'_>) -> Result<Option<LogId>> {
    if let Some(request) = latest.request {
        metadata::check_request(request)?;
    }
    match id {
        // No longer id can be meant; who reads it sees whether it is there.
        Some(id) if is_uuid(id) => Ok(Some(parts.logs.id(id.parse()?))),
        Some(id) => match find::by_id(&parts.logs, id).await {
            Ok(found) => Ok(Some(found)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        },
        None if latest.latest || latest.request.is_some() => {
            let project = latest.project.map(|project| project_of(parts, project));
            find::latest(
                &parts.logs,
                &*parts.index,
                LatestFilter {
                    project: project.as_deref(),
                    request: latest.request,
                },
            )
            .await
        }
        None => Ok(None),
    }
}

/// Whether `error` came because there is no session of that id, which `session` did not look for.
pub async fn is_missing(parts: &Parts, id: Option<&str>, error: &Error) -> Result<bool> {
    let Some(id) = id.filter(|id| error.kind() == ErrorKind::NotFound && is_uuid(id)) else {
        return Ok(false);
    };
    Ok(parts
        .logs
        .pieces(&parts.logs.id(id.parse()?))
        .await?
        .is_empty())
}

/// The point that is meant; none is the end.
pub fn point(text: Option<&str>) -> Result<PointSpec> {
    let Some(text) = text else {
        return Ok(PointSpec::default());
    };
    match text.parse()? {
        // So long ago; a checkpoint of such a name is ckpt:2h.
        PointSpec::Name(name)
            if name == text.trim() && name.starts_with(|letter: char| letter.is_ascii_digit()) =>
        {
            Ok(
                when::read("--at", &name, SystemClock.now())
                    .map_or(PointSpec::Name(name), |time| {
                        PointSpec::Log(LogPoint::Time(time))
                    }),
            )
        }
        point => Ok(point),
    }
}

/// A session and a point of it, as in `ID@POINT`.
pub async fn session_at(parts: &Parts, text: &str) -> Result<(LogId, PointSpec)> {
    let (id, at) = match text.split_once('@') {
        Some((id, at)) if !id.is_empty() => (id, Some(at)),
        _ => (text, None),
    };
    Ok((find::by_id(&parts.logs, id).await?, point(at)?))
}

/// The agent's name for the project in a directory.
pub fn project_of(parts: &Parts, directory: &Path) -> String {
    // The agent resolves links before it names the project.
    let real = directory
        .canonicalize()
        .or_else(|_| std::path::absolute(directory))
        .unwrap_or_else(|_| PathBuf::from(directory));
    parts.profile.project_of(&real)
}

/// The agent's name for the project in a directory that it will run in.
pub fn next_project(parts: &Parts, directory: &Path) -> Result<String> {
    if parts.profile.follows() {
        return Ok(project_of(parts, directory));
    }
    let agent = parts.profile.name();
    Err(Error::usage(format!(
        "put the session where {agent} looks for it in {}: it is not known to go on elsewhere",
        directory.display()
    ))
    .hint("without --cwd it goes on in the directory where it began"))
}

/// The answer where nothing was found.
pub fn nothing(parts: &Parts, id: Option<&str>, request: Option<&str>) -> Error {
    let logs = &parts.logs;
    let what = match (id, request) {
        (Some(id), _) => format!("there is no session {id}"),
        (None, Some(request)) => format!("there is no session of request {request:?}"),
        (None, None) => "there is no session".to_owned(),
    };
    Error::not_found(format!(
        "{what} in namespace {} of agent {}",
        logs.namespace, logs.agent
    ))
    .hint("sessiond ls shows the sessions; --store, --namespace and --agent say where to look")
}

/// Whose restored files shall be: as said, or, for root, whoever owns the directory.
pub fn owner(said: Option<&str>, disk: &Disk) -> Result<Option<Owner>> {
    if let Some(said) = said {
        return parse_owner(said).map(Some);
    }
    if !rustix::process::geteuid().is_root() {
        return Ok(None);
    }
    disk.owner().map(Some).map_err(|cause| {
        Error::io(
            format!("find the owner of {}", disk.root().display()),
            cause,
        )
    })
}

fn parse_owner(text: &str) -> Result<Owner> {
    let (user, group) = text.split_once(':').unwrap_or((text, ""));
    let wrong = || {
        Error::usage(format!("read --owner {text:?}"))
            .hint("USER:GROUP, by name or number, as for chown")
    };
    let (uid, own_group) = match user.parse() {
        Ok(uid) => (uid, None),
        Err(_) => {
            let found = account("/etc/passwd", user).ok_or_else(wrong)?;
            (found.0, found.1)
        }
    };
    let gid = match (group, group.parse()) {
        ("", _) => own_group.unwrap_or(uid),
        (_, Ok(gid)) => gid,
        (name, Err(_)) => account("/etc/group", name).ok_or_else(wrong)?.0,
    };
    Ok(Owner { uid, gid })
}

/// The third and fourth field of an account's line.
fn account(file: &str, name: &str) -> Option<(u32, Option<u32>)> {
    let text = std::fs::read_to_string(file).ok()?;
    let fields: Vec<&str> = text
        .lines()
        .map(|line| line.split(':').collect::<Vec<_>>())
        .find(|fields| fields.first() == Some(&name))?;
    Some((
        fields.get(2)?.parse().ok()?,
        fields.get(3).and_then(|gid| gid.parse().ok()),
    ))
}

/// Lets the index learn of a claim, if it answers soon.
pub async fn tell_index(parts: &Parts, reports: &[RestoreReport]) {
    for report in reports {
        let (Some(claim), Ok(name)) = (&report.claim, report.session.parse()) else {
            continue;
        };
        let record = EntryRecord {
            log: parts.logs.id(name),
            branch: None,
            header: claim.header.clone(),
            stored: claim.bytes.len() as u64,
            digest: claim.digest,
            told: ParsedTranscripts::default(),
        };
        match tokio::time::timeout(INDEX_PATIENCE, parts.index.record(&record)).await {
            // What came before, if it does not know that either, it learns from whoever streams next, or by a reindex: the agent
            // that is to be launched does not wait until all that was ever said has been read again.
            Ok(Ok(_)) => {}
            Ok(Err(error)) => {
                return tracing::warn!(%error, "the index was not told; it catches up by itself");
            }
            Err(_) => return tracing::warn!("the index does not answer; it catches up by itself"),
        }
    }
}

/// Lets the index learn what was written of a log just now; the bucket has it in any case.
pub async fn index_learns(parts: &Parts, id: &LogId) {
    if let Err(error) = catch_up(&parts.logs, &*parts.index, &*parts.profile, id).await {
        tracing::warn!(%error, "the index was not told; sessiond reindex does it");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_is_read_as_chown_reads_it() {
        assert_eq!(parse_owner("12:34").ok(), Some(Owner { uid: 12, gid: 34 }));
        assert_eq!(
            parse_owner("root:root").ok(),
            Some(Owner { uid: 0, gid: 0 })
        );
        assert_eq!(parse_owner("root").ok(), Some(Owner { uid: 0, gid: 0 }));
        assert!(parse_owner("nobody-of-that-name:1").is_err());
    }
}
