//! `import`: an exported session into this store.

use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use crate::cli::export::Scratch;
use crate::cli::{exit, print, progress, select};
use crate::config::Settings;
use crate::error::{Error, Result};
use crate::exchange::import::{self, Imported};
use crate::model::{LogName, SessionId};
use crate::wire::Parts;

/// Store a session that sessiond export wrote; the agent's directory is not touched
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond import 3f2a.tar.gz && sessiond restore 3f2a")]
pub struct Args {
    /// What sessiond export wrote, as it is or as base64; - is the standard input
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    /// Store it under this id instead of its own, in the names of its files and in their lines
    #[arg(long, env = "SESSIOND_NEW_ID", value_name = "NEW")]
    pub id: Option<String>,

    /// Check it and say what would be done
    #[arg(long, env = "SESSIOND_DRY_RUN")]
    pub dry_run: bool,

    /// Print the result as JSON
    #[arg(long, env = "SESSIOND_JSON")]
    pub json: bool,
}

/// Does it.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let new: Option<SessionId> = args.id.as_deref().map(str::parse).transpose()?;
    let parts = Parts::make(settings, None).await?;
    let scratch = Scratch::new(&parts, "import");
    let (name, input): (String, Box<dyn Read>) = if args.file == Path::new("-") {
        (
            "the standard input".to_owned(),
            Box::new(std::io::stdin().lock()),
        )
    } else {
        let name = args.file.display().to_string();
        let opened = match args.file.is_dir() {
            true => Err(ErrorKind::IsADirectory.into()),
            false => std::fs::File::open(&args.file),
        };
        let file = opened.map_err(|cause| match cause.kind() {
            ErrorKind::NotFound => {
                Error::not_found(format!("import {name}: there is no such file"))
            }
            _ => Error::named(format!("import {name}"), cause),
        })?;
        (name, Box::new(file))
    };
    let mut unpacked = import::unpack(&name, input, &*scratch.disk)?;
    if let Some(new) = &new {
        unpacked.rename(new)?;
    }
    let shown = progress::show(settings, &parts, "importing");
    let imported = import::import(&parts.logs, &*parts.profile, &unpacked, args.dry_run).await?;
    drop(shown);
    if !args.dry_run {
        let id = parts
            .logs
            .id(LogName::Session(unpacked.manifest.session.clone()));
        select::index_learns(&parts, &id).await;
    }
    if args.json {
        print::json(&imported)?;
    } else {
        say(&imported)?;
    }
    Ok(exit::OK)
}

fn say(imported: &Imported) -> Result<()> {
    let Imported {
        files,
        bytes,
        entries,
        ..
    } = imported;
    let (session, bytes) = (print::clean(&imported.session), print::bytes(*bytes));
    match imported {
        Imported { already: true, .. } => print::line(format_args!(
            "{session} is there already: {files} files, {bytes}"
        )),
        Imported { dry_run: true, .. } => print::line(format_args!(
            "would import {session}: {files} files, {bytes}"
        )),
        _ => print::line(format_args!(
            "imported {session}: {files} files, {bytes}, in {entries} entries; sessiond restore {session} puts them in place"
        )),
    }
}
