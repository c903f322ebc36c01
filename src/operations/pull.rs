//! Fetches a copy of a session. Does not claim the session or change the agent's directory.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;

use crate::error::{Error, Result};
use crate::log::errors;
use crate::model::{LogId, PointSpec, RelPath, ResolvedPoint, ToolCall, WriterId, keys};
use crate::restore::repair::RepairedFile;
use crate::restore::{self, Options, Purpose, RestoreContext, RestoreReport};
use crate::sessions::point;
use crate::store::{Store, list_dirs, list_objects};
use crate::sys::{Directory, Disk, STATE_DIR};
use crate::wire::Parts;

/// What to fetch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PullSource {
    /// The files at a point.
    Files {
        /// The point.
        point: PointSpec,
        /// The branch to fetch instead: its writer.
        branch: Option<WriterId>,
        /// Write transcripts without damaged lines.
        repair: bool,
    },
    /// The objects of the log, as they are stored.
    Objects,
}

/// A copy that was fetched.
#[derive(Debug, Serialize)]
pub struct PullReport {
    /// The session.
    pub session: String,
    /// The directory of the copy.
    pub to: PathBuf,
    /// Number of files.
    pub files: usize,
    /// Size of these files.
    pub bytes: u64,
    /// The entry that was fetched; none for objects.
    pub seq: Option<u64>,
    /// Number of bytes after the point that stay in the log, by transcript.
    pub rewound_bytes: BTreeMap<RelPath, u64>,
    /// The tool calls that were pending at the end of the log.
    pub rewound_calls: Vec<ToolCall>,
    /// The transcripts that were repaired.
    pub repaired: Vec<RepairedFile>,
}

/// Fetches a session into directory `to`, by default one named after it.
pub async fn pull(
    parts: &Parts,
    id: &LogId,
    to: Option<&Path>,
    source: PullSource,
) -> Result<PullReport> {
    let to = match to {
        Some(to) => to.to_owned(),
        None => PathBuf::from(id.name.to_string()),
    };
    let to = std::path::absolute(&to)
        .map_err(|cause| Error::io(format!("resolve {}", to.display()), cause))?;
    check_target(parts, &to)?;
    match source {
        PullSource::Objects => pull_objects(parts, id, to).await,
        PullSource::Files {
            point,
            branch,
            repair,
        } => {
            let point = point::resolve_on(&parts.logs, id, branch.as_ref(), &point).await?;
            let options = Options {
                purpose: Purpose::Pull,
                point,
                repair,
                ..Options::default()
            };
            pull_files(parts, id, to, &options).await
        }
    }
}

/// Copies the files of a session at a point into an empty directory.
pub async fn copy(
    parts: &Parts,
    id: &LogId,
    point: ResolvedPoint,
    directory: Arc<dyn Directory>,
) -> Result<RestoreReport> {
    copy_for(Purpose::Pull, parts, id, point, directory).await
}

/// Copies the files for a command, which errors name.
pub(super) async fn copy_for(
    purpose: Purpose,
    parts: &Parts,
    id: &LogId,
    point: ResolvedPoint,
    directory: Arc<dyn Directory>,
) -> Result<RestoreReport> {
    let options = Options {
        purpose,
        point,
        ..Options::default()
    };
    let context = context(parts, directory);
    // Boxed, because the future of a restore is large.
    let restored = Box::pin(restore::restore(&context, id, &options)).await?;
    Ok(restored.report)
}

fn context(parts: &Parts, directory: Arc<dyn Directory>) -> RestoreContext {
    RestoreContext {
        directory,
        profile: parts.profile.clone(),
        logs: parts.logs.clone(),
    }
}

/// Checks that the target is a directory, or can become one, and is not the agent's.
fn check_target(parts: &Parts, to: &Path) -> Result<()> {
    let relation = parts.root().ok().and_then(|root| relation(to, root));
    if let Some(relation) = relation {
        return Err(Error::usage(format!(
            "invalid --to value {:?}: it {relation} the agent's directory",
            to.display()
        ))
        .hint("choose another directory, or run \"sessiond restore\" to restore the session"));
    }
    let failed = |cause| Error::user_path(format!("pull to {}", to.display()), cause);
    match std::fs::metadata(to) {
        Ok(found) if !found.is_dir() => Err(failed(ErrorKind::NotADirectory.into())),
        Err(cause) if cause.kind() != ErrorKind::NotFound => Err(failed(cause)),
        _ => Ok(()),
    }
}

/// How a path relates to the agent's directory; none if neither contains the other. A file of a
/// session could otherwise get a path in the agent's directory: `projects` in `~/.claude` is also
/// `.claude/projects` in `~`.
fn relation(path: &Path, root: &Path) -> Option<&'static str> {
    let (path, root) = (resolve(path), resolve(root));
    if path.starts_with(&root) {
        Some("is in")
    } else {
        root.starts_with(&path).then_some("contains")
    }
}

/// The path without symbolic links, as far as it exists.
fn resolve(path: &Path) -> PathBuf {
    let mut missing = Vec::new();
    let mut existing = path;
    loop {
        if let Ok(found) = existing.canonicalize() {
            return missing
                .iter()
                .rev()
                .fold(found, |path, name| path.join(name));
        }
        let (Some(parent), Some(name)) = (existing.parent(), existing.file_name()) else {
            return path.to_owned();
        };
        missing.push(name);
        existing = parent;
    }
}

async fn pull_files(
    parts: &Parts,
    id: &LogId,
    to: PathBuf,
    options: &Options,
) -> Result<PullReport> {
    let existed = to.exists();
    let disk = Arc::new(Disk::new(&to));
    disk.create(None)
        .map_err(|cause| Error::user_path(format!("pull to {}", to.display()), cause))?;
    let restored = restore::restore(&context(parts, disk.clone()), id, options).await;
    // The state directory holds nothing but the staging directory. A directory with files stays.
    for directory in [format!("{STATE_DIR}/tmp"), STATE_DIR.to_owned()] {
        let _ = disk.remove_empty_directory(&directory.parse()?);
    }
    if restored.is_err() && !existed {
        let _ = std::fs::remove_dir(&to);
    }
    let report = restored?.report;
    Ok(PullReport {
        session: report.session,
        to,
        files: report.files.len(),
        bytes: report.bytes,
        seq: Some(report.seq),
        rewound_bytes: report.rewound_bytes,
        rewound_calls: report.rewound_calls,
        repaired: report.repaired,
    })
}

async fn pull_objects(parts: &Parts, id: &LogId, to: PathBuf) -> Result<PullReport> {
    let root = keys::log_root(id);
    let disk = Disk::new(&to);
    let mut directories = vec![root.clone()];
    let (mut files, mut bytes) = (0, 0);
    while let Some(directory) = directories.pop() {
        directories.extend(list_dirs(&*parts.store, &directory).await?);
        for object in list_objects(&*parts.store, &directory, None).await? {
            // A key that sessiond did not write can contain any path. Write only valid relative
            // paths.
            let path = object.key.strip_prefix(&root).map(str::parse::<RelPath>);
            if let Some(Ok(path)) = path {
                bytes += copy_object(&*parts.store, &object.key, &disk, &path).await?;
                files += 1;
            }
        }
    }
    if files == 0 {
        return Err(errors::not_found(id));
    }
    Ok(PullReport {
        session: id.name.to_string(),
        to,
        files,
        bytes,
        seq: None,
        rewound_bytes: BTreeMap::new(),
        rewound_calls: Vec::new(),
        repaired: Vec::new(),
    })
}

/// Writes an object to a new file; returns its size.
async fn copy_object(store: &dyn Store, key: &str, disk: &Disk, path: &RelPath) -> Result<u64> {
    let to = path.below(disk.root());
    let failed = |cause: std::io::Error| match cause.kind() {
        ErrorKind::AlreadyExists => Error::conflict(format!("{} already exists", to.display()))
            .hint("choose an empty directory with --to"),
        _ => Error::user_path(format!("write {}", to.display()), cause),
    };
    let Some(body) = store.get(key).await? else {
        return Ok(0);
    };
    disk.create_new(path, &body).map_err(failed)?;
    Ok(body.len() as u64)
}
