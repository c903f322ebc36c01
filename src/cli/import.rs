//! `import`: an exported session into this store.

use std::path::PathBuf;

use crate::cli::{exit, print, progress};
use crate::config::Settings;
use crate::error::Result;
use crate::exchange::import::ImportReport;
use crate::model::SessionId;
use crate::operations::import::import;
use crate::wire::Parts;

/// Import a session from a file that "sessiond export" wrote
///
/// Adds the session to the store. The agent's directory does not change.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond import 3f2a.tar.gz && sessiond restore 3f2a")]
pub struct Args {
    /// Archive file, binary or base64, or - for standard input
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    /// Import under this session ID [default: the original one]
    #[arg(long, id = "new-id", value_name = "NEW")]
    pub id: Option<String>,

    /// Check the file, and import nothing
    #[arg(long)]
    pub dry_run: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Imports the session.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let new_id: Option<SessionId> = args.id.as_deref().map(str::parse).transpose()?;
    let parts = Parts::build(settings, None).await?;
    let progress = progress::show(settings, &parts, "importing");
    let report = import(&parts, &args.file, new_id.as_ref(), args.dry_run).await?;
    drop(progress);
    if args.json {
        print::json(&report)?;
    } else {
        print_report(&report)?;
    }
    Ok(exit::OK)
}

fn print_report(report: &ImportReport) -> Result<()> {
    let session = print::clean(&report.session);
    let files = print::plural(report.files, "file", "files");
    let content = format!("{files}, {}", print::bytes(report.bytes));
    if report.already_stored {
        print::line(format_args!("{session} is already stored: {content}"))
    } else if report.dry_run {
        print::line(format_args!("would import {session}: {content}"))
    } else {
        let entries = print::plural(report.entries, "entry", "entries");
        print::line(format_args!("imported {session}: {content}, {entries}"))?;
        print::line(format_args!(
            "run \"sessiond restore {session}\" to restore it"
        ))
    }
}
