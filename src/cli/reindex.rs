//! `reindex`: rebuilds the index from the store.

use crate::cli::{exit, print, progress};
use crate::config::Settings;
use crate::error::{Error, ErrorKind, Result};
use crate::upkeep::reindex::rebuild;
use crate::wire::Parts;

/// Rebuild the index of an agent from the store
///
/// Daemons can keep running.
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
            Ok(entries) => tracing::debug!(session = %id.name, entries, "indexed"),
            Err(error) => tracing::error!(session = %id.name, %error, "indexing failed"),
        },
    )
    .await?;
    drop(progress);
    let total = print::plural(report.logs, "log", "logs");
    let not_indexed = report.failed + report.unreadable;
    if args.json {
        print::json(&report)?;
    } else {
        print::line(format_args!(
            "indexed {}, {}; deleted {} from the index; {not_indexed} failed",
            print::plural(report.logs - not_indexed, "log", "logs"),
            print::plural(report.entries, "entry", "entries"),
            print::plural(report.deleted, "log", "logs")
        ))?;
    }
    if report.failed > 0 {
        print::error(
            &Error::corrupt("stored objects are damaged")
                .context(format_args!("index {} of {total}", report.failed))
                .hint("run \"sessiond verify --all --deep\" to see the damage"),
        );
        return Ok(exit::CORRUPT);
    }
    if report.newer_format > 0 {
        print::error(
            &Error::new(
                ErrorKind::NewerFormat,
                "a newer sessiond wrote some of the objects",
            )
            .context(format_args!("index {} of {total}", report.newer_format))
            .hint("upgrade sessiond"),
        );
        return Ok(exit::NEWER_FORMAT);
    }
    if report.unreadable > 0 {
        print::error(
            &Error::new(
                ErrorKind::Encrypted,
                "no configured identity can decrypt the objects",
            )
            .context(format_args!("index {} of {total}", report.unreadable))
            .hint("set --identity FILE to the file with the private key"),
        );
        return Ok(exit::ENCRYPTED);
    }
    Ok(exit::OK)
}
