//! `pull`: a copy for debugging. Never claims, never touches the agent's directory.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;

use crate::cli::select::Latest;
use crate::cli::{exit, print, restore as restore_verb, select};
use crate::config::Settings;
use crate::error::{Error, Result};
use crate::model::{LogId, RelPath, ToolCall, WriterId, keys};
use crate::restore::point::{self, ResolvedPoint};
use crate::restore::repair::Repaired;
use crate::restore::{self, Context, Options, find};
use crate::store::{Store, list_dirs, list_objects};
use crate::sys::{Disk, STATE_DIR};
use crate::wire::Parts;

/// Fetch a copy of a session for debugging; it may be written elsewhere meanwhile
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond pull 3f2a --to /tmp/look")]
pub struct Args {
    /// The session's id, or the beginning of it
    #[arg(
        value_name = "ID",
        required_unless_present = "request",
        conflicts_with = "request"
    )]
    pub id: Option<String>,

    /// The session of this request that was written last
    #[arg(long, env = "SESSIOND_REQUEST", value_name = "ID")]
    pub request: Option<String>,

    /// Where to put it; must not hold other files of the same names [default: ./ID]
    #[arg(long, env = "SESSIOND_TO", value_name = "DIR")]
    pub to: Option<PathBuf>,

    /// The point to go back to: latest, turn, turn:N, seq:N, a time, or a checkpoint's number or name [default: latest]
    #[arg(
        long,
        env = "SESSIOND_AT",
        value_name = "POINT",
        conflicts_with = "raw"
    )]
    pub at: Option<String>,

    /// What a writer that lost the session still had (sessiond ls shows them)
    #[arg(
        long,
        env = "SESSIOND_BRANCH",
        value_name = "WRITER",
        conflicts_with = "raw"
    )]
    pub branch: Option<String>,

    /// The objects of the log as they are stored, instead of the files they make
    #[arg(long, env = "SESSIOND_RAW")]
    pub raw: bool,

    /// Leave torn, glued and empty lines out of transcripts; as they were, they are kept in .sessiond/aside
    #[arg(long, env = "SESSIOND_REPAIR", conflicts_with = "raw")]
    pub repair: bool,

    /// Print the result as JSON
    #[arg(long, env = "SESSIOND_JSON")]
    pub json: bool,
}

/// What was fetched.
#[derive(Debug, Serialize)]
struct Pulled {
    session: String,
    to: PathBuf,
    files: usize,
    bytes: u64,
    seq: Option<u64>,
    cut_off: BTreeMap<RelPath, u64>,
    dropped: Vec<ToolCall>,
    repaired: Vec<Repaired>,
}

/// Does it.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let parts = Parts::make(settings, None).await?;
    let latest = Latest {
        request: args.request.as_deref(),
        ..Latest::default()
    };
    let id = match &args.id {
        Some(id) => find::by_id(&parts.logs, id).await?,
        None => select::session(&parts, None, latest)
            .await?
            .ok_or_else(|| select::nothing(&parts, None, args.request.as_deref()))?,
    };
    let to = args
        .to
        .clone()
        .unwrap_or_else(|| PathBuf::from(id.name.to_string()));
    let to = std::path::absolute(&to)
        .map_err(|cause| Error::io(format!("find {}", to.display()), cause))?;
    if parts.root().is_ok_and(|root| overlaps(&to, root)) {
        return Err(Error::usage(format!(
            "pull to {}: that is the agent's directory",
            to.display()
        ))
        .hint("sessiond restore puts a session there; give --to another directory"));
    }
    match std::fs::metadata(&to) {
        Ok(found) if !found.is_dir() => {
            return Err(Error::named(
                format!("pull to {}", to.display()),
                ErrorKind::NotADirectory.into(),
            ));
        }
        Err(cause) if cause.kind() != ErrorKind::NotFound => {
            return Err(Error::named(format!("pull to {}", to.display()), cause));
        }
        _ => {}
    }
    let pulled = if args.raw {
        raw(&parts, &id, to).await?
    } else {
        files(&parts, &id, to, &args).await?
    };
    if args.json {
        print::json(&pulled)?;
    } else {
        print::line(format_args!(
            "{}: {} files, {}, in {}",
            print::clean(&pulled.session),
            pulled.files,
            print::bytes(pulled.bytes),
            pulled.to.display()
        ))?;
        restore_verb::say_left(&pulled.cut_off, &pulled.dropped)?;
        restore_verb::say_repaired(&pulled.repaired)?;
    }
    Ok(exit::OK)
}

fn overlaps(to: &Path, root: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let (to, root) = (real(to), real(root));
    to.starts_with(&root) || root.starts_with(&to) && root == to
}

async fn files(parts: &Parts, id: &LogId, to: PathBuf, args: &Args) -> Result<Pulled> {
    let branch: Option<WriterId> = args.branch.as_deref().map(str::parse).transpose()?;
    let branch = match branch {
        Some(branch) => Some(whole_name(parts, id, branch).await?),
        None => None,
    };
    let ResolvedPoint { at, cut } =
        point::find(&parts.logs, id, &select::point(args.at.as_deref())?).await?;
    let context = Context {
        directory: Arc::new(Disk::new(&to)),
        profile: parts.profile.clone(),
        logs: parts.logs.clone(),
    };
    let was_there = to.exists();
    Disk::new(&to)
        .make(None)
        .map_err(|cause| Error::named(format!("pull to {}", to.display()), cause))?;
    let restored = restore::restore(
        &context,
        id,
        &Options {
            at,
            cut,
            branch,
            repair: args.repair,
            ..Options::default()
        },
    )
    .await;
    // Only the temporary directory was in it.
    let _ = std::fs::remove_dir(to.join(STATE_DIR).join("tmp"));
    let _ = std::fs::remove_dir(to.join(STATE_DIR));
    if restored.is_err() && !was_there {
        // One that holds something stays.
        let _ = std::fs::remove_dir(&to);
    }
    let report = restored?;
    Ok(Pulled {
        session: report.session.clone(),
        to,
        files: report.files.len(),
        bytes: report.bytes,
        seq: Some(report.seq),
        cut_off: report.cut_off,
        dropped: report.dropped,
        repaired: report.repaired,
    })
}

/// The writer that is meant, by the beginning of its name.
async fn whole_name(parts: &Parts, id: &LogId, branch: WriterId) -> Result<WriterId> {
    let branches = parts.logs.branches(id).await?;
    let mut found = branches
        .iter()
        .filter(|writer| writer.as_str().starts_with(branch.as_str()));
    match (found.next(), found.next()) {
        (Some(only), None) => Ok(only.clone()),
        (Some(_), Some(_)) => Err(Error::usage(format!(
            "{:?} is the beginning of several branches",
            branch.as_str()
        ))
        .hint("give more of it")),
        // The plan says what there is.
        (None, _) => Ok(branch),
    }
}

async fn raw(parts: &Parts, id: &LogId, to: PathBuf) -> Result<Pulled> {
    let root = keys::log_root(id);
    let mut directories = vec![root.clone()];
    let (mut files, mut bytes) = (0, 0);
    while let Some(directory) = directories.pop() {
        directories.extend(list_dirs(&*parts.store, &directory).await?);
        for object in list_objects(&*parts.store, &directory, None).await? {
            let Some(name) = object.key.strip_prefix(&root) else {
                continue;
            };
            // A key that is not ours could name anything; only a plain path is written.
            let Ok(path) = name.parse::<RelPath>() else {
                continue;
            };
            bytes += copy(&*parts.store, &object.key, &path.below(&to)).await?;
            files += 1;
        }
    }
    if files == 0 {
        return Err(find::unknown(id));
    }
    let (cut_off, dropped, repaired) = Default::default();
    Ok(Pulled {
        session: id.name.to_string(),
        to,
        files,
        bytes,
        seq: None,
        cut_off,
        dropped,
        repaired,
    })
}

async fn copy(store: &dyn Store, key: &str, to: &Path) -> Result<u64> {
    let failed = |cause| Error::named(format!("write {}", to.display()), cause);
    let Some(body) = store.get(key).await? else {
        return Ok(0);
    };
    if let Some(directory) = to.parent() {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .map_err(failed)?;
    }
    let made = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(to);
    made.and_then(|mut file| file.write_all(&body))
        .map_err(|cause| match cause.kind() {
            ErrorKind::AlreadyExists => {
                Error::conflict(format!("write {}: it exists", to.display()))
                    .hint("give --to an empty directory")
            }
            _ => failed(cause),
        })?;
    Ok(body.len() as u64)
}
