//! `reindex`: rebuilds the index from the store.

use crate::cli::{exit, print, progress};
use crate::config::Settings;
use crate::error::{Error, ErrorKind, Result};
use crate::upkeep::reindex::rebuild;
use crate::wire::Parts;

/// Rebuild the index of an agent from the store
///
/// Safe while daemons run.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond reindex --index postgres://sessiond@db/sessiond")]
pub struct Args {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Rebuilds the index.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let parts = Parts::build(settings, None).await?;
    let progress = progress::show(settings, &parts, "indexing");
    let report = rebuild(
        &parts.logs,
        &*parts.index,
        &*parts.profile,
        |id, result| match result {
            Ok(entries) => tracing::debug!(%id, entries, "indexed"),
            Err(error) => tracing::error!(%id, %error, "not indexed"),
        },
    )
    .await?;
    drop(progress);
    let total = print::plural(report.logs, "log", "logs");
    if args.json {
        print::json(&report)?;
    } else {
        print::line(format_args!(
            "indexed {total}, {}; deleted {} from the index; {} unreadable",
            print::plural(report.entries, "entry", "entries"),
            print::plural(report.deleted, "log", "logs"),
            report.failed + report.unreadable
        ))?;
    }
    if report.failed > 0 {
        print::error(
            &Error::corrupt(format!(
                "{} of {total} not indexed, because of damage",
                report.failed
            ))
            .hint("run \"sessiond verify --all --deep\" to see the damage"),
        );
        return Ok(exit::CORRUPT);
    }
    if report.newer_format > 0 {
        print::error(
            &Error::new(
                ErrorKind::NewerFormat,
                format!(
                    "{} of {total} not indexed: written by a newer sessiond",
                    report.newer_format
                ),
            )
            .hint("upgrade sessiond"),
        );
        return Ok(exit::NEWER_FORMAT);
    }
    if report.unreadable > 0 {
        print::error(
            &Error::new(
                ErrorKind::Encrypted,
                format!(
                    "{} of {total} not indexed: encrypted for other identities",
                    report.unreadable
                ),
            )
            .hint("pass the key with --identity FILE"),
        );
        return Ok(exit::ENCRYPTED);
    }
    Ok(exit::OK)
}
