//! `export`: a session as one file to hand around.

use std::io::{BufWriter, IsTerminal, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::agent::FileClass;
use crate::cli::print::Target;
use crate::cli::{exit, print, select};
use crate::codec::archive::Manifest;
use crate::config::Settings;
use crate::error::{Error, Result};
use crate::exchange;
use crate::model::{FileKind, LogId, LogName, PointSpec, RelPath};
use crate::restore::place::Action;
use crate::restore::point::{self, ResolvedPoint};
use crate::restore::{self, Context, Options, find};
use crate::sys::Disk;
use crate::wire::Parts;

/// Write a session to one tar.gz file, to import it into another store or to look at with plain tar
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  sessiond export 3f2a -o 3f2a.tar.gz\n  sessiond export 3f2a | ssh other sessiond import -\n  AGENT_SESSION_BLOB=$(sessiond export 3f2a --base64)"
)]
pub struct Args {
    /// The session's id, or the beginning of it
    #[arg(value_name = "ID")]
    pub id: String,

    /// The point: latest, turn, turn:N, seq:N, a time, or a checkpoint's number or name [default: latest]
    #[arg(long, env = "SESSIOND_AT", value_name = "POINT")]
    pub at: Option<String>,

    /// Where to write it; - is the standard output
    #[arg(
        long,
        short,
        env = "SESSIOND_OUTPUT",
        value_name = "FILE",
        default_value = "-"
    )]
    pub output: PathBuf,

    /// As base64 text, for a request body or a variable
    #[arg(long, env = "SESSIOND_BASE64")]
    pub base64: bool,
}

/// Does it.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let to_stdout = args.output == Path::new("-");
    if to_stdout && !args.base64 && std::io::stdout().is_terminal() {
        return Err(Error::usage("export: not to a terminal")
            .hint("-o FILE writes a file, --base64 writes text"));
    }
    let point = select::point(args.at.as_deref())?;
    let parts = Parts::make(settings, None).await?;
    let id = find::by_id(&parts.logs, &args.id).await?;
    let scratch = Scratch::new(&parts, "export");
    let (manifest, files) = fetch(&parts, &id, &point, &scratch.disk).await?;
    let disk = &*scratch.disk;
    if to_stdout {
        let mut out = std::io::stdout().lock();
        exchange::pack(disk, &files, manifest, args.base64, &mut out)?;
        if args.base64 {
            writeln!(out).map_err(|cause| Error::io("print", cause))?;
        }
        return Ok(exit::OK);
    }
    let manifest = to_file(&args.output, |out| {
        exchange::pack(disk, &files, manifest, args.base64, out)
    })?;
    print::line(format_args!(
        "{} at entry {}: {} files, {}, in {}",
        print::clean(&id.name.to_string()),
        manifest.seq,
        manifest.files.len(),
        print::bytes(manifest.bytes()),
        args.output.display()
    ))?;
    Ok(exit::OK)
}

/// A directory of our own that goes when it goes out of sight.
pub struct Scratch {
    /// The directory.
    pub disk: Arc<Disk>,
}

impl Scratch {
    /// One below the system's directory for such things.
    pub fn new(parts: &Parts, what: &str) -> Scratch {
        let name = format!("sessiond-{what}-{:016x}", parts.logs.rng.next());
        Scratch {
            disk: Arc::new(Disk::new(std::env::temp_dir().join(name))),
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let root = self.disk.root();
        if let Err(cause) = std::fs::remove_dir_all(root)
            && cause.kind() != std::io::ErrorKind::NotFound
        {
            tracing::warn!(%cause, "the scratch directory {} was not removed", root.display());
        }
    }
}

/// Puts the session's files into the scratch directory, checked; answers which they are.
async fn fetch(
    parts: &Parts,
    id: &LogId,
    point: &PointSpec,
    scratch: &Arc<Disk>,
) -> Result<(Manifest, Vec<(RelPath, FileKind)>)> {
    let LogName::Session(session) = &id.name else {
        return Err(Error::usage(format!("export {id}: it is no session")));
    };
    let context = Context {
        directory: scratch.clone(),
        profile: parts.profile.clone(),
        logs: parts.logs.clone(),
    };
    let ResolvedPoint { at, cut } = point::find(&parts.logs, id, point).await?;
    let report = restore::restore(
        &context,
        id,
        &Options {
            at,
            cut,
            ..Options::default()
        },
    )
    .await?;
    let kind = |path: &RelPath| match parts.profile.place(path) {
        FileClass::Keep(_, kind) | FileClass::Ask(_, kind, _) => kind,
        FileClass::Ignore => FileKind::Whole,
    };
    let written = report
        .files
        .into_iter()
        .filter(|file| file.action == Action::Write);
    let files = written
        .map(|file| (file.path.clone(), kind(&file.path)))
        .collect();
    let said = parts.logs.said(id).await?.wishes;
    Ok((
        Manifest::new(
            id.agent.clone(),
            session.clone(),
            report.seq,
            parts.logs.clock.now(),
            &said,
        ),
        files,
    ))
}

/// Writes a file as one, readable by its owner alone: a conversation is in it.
fn to_file<T>(path: &Path, write: impl FnOnce(&mut dyn Write) -> Result<T>) -> Result<T> {
    let failed = |cause| Error::named(format!("write {}", path.display()), cause);
    let path = &*match print::target(path).map_err(failed)? {
        Target::File(path) => path,
        Target::Other(file) => {
            let mut out = BufWriter::new(file);
            let value = write(&mut out)?;
            out.flush().map_err(failed)?;
            return Ok(value);
        }
    };
    let name = path
        .file_name()
        .ok_or_else(|| failed(std::io::ErrorKind::IsADirectory.into()))?;
    let temporary = path.with_file_name(format!(".{}.new", name.to_string_lossy()));
    let mut options = std::fs::OpenOptions::new();
    let file = options
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&temporary)
        .map_err(failed)?;
    let mut out = BufWriter::new(file);
    let written = write(&mut out).and_then(|value| {
        out.into_inner()
            .map_err(|cause| failed(cause.into_error()))?
            .sync_all()
            .map_err(failed)?;
        std::fs::rename(&temporary, path).map_err(failed)?;
        Ok(value)
    });
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    written
}
