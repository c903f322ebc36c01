//! `reindex`: rebuild the index from the bucket alone.

use crate::cli::{exit, print, progress};
use crate::config::Settings;
use crate::error::{Error, ErrorKind, Result};
use crate::upkeep::reindex::rebuild;
use crate::wire::Parts;

/// Rebuild the index of an agent from the bucket
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond reindex --index postgres://sessiond@db/sessiond")]
pub struct Args {
    /// Print the result as JSON
    #[arg(long, env = "SESSIOND_JSON")]
    pub json: bool,
}

/// Does it.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let parts = Parts::make(settings, None).await?;
    let shown = progress::show(settings, &parts, "reading");
    let rebuilt = rebuild(
        &parts.logs,
        &*parts.index,
        &*parts.profile,
        |id, done| match done {
            Ok(entries) => tracing::debug!(%id, entries, "indexed"),
            Err(error) => tracing::error!(%id, %error, "cannot be indexed"),
        },
    )
    .await?;
    drop(shown);
    if args.json {
        print::json(&rebuilt)?;
    } else {
        print::line(format_args!(
            "{} logs, {} entries indexed; {} forgotten, {} could not be read",
            rebuilt.logs,
            rebuilt.entries,
            rebuilt.forgotten,
            rebuilt.failed + rebuilt.sealed
        ))?;
    }
    if rebuilt.failed > 0 {
        print::error(
            &Error::corrupt(format!(
                "{} of {} logs are not in the index",
                rebuilt.failed, rebuilt.logs
            ))
            .hint("sessiond verify --all --deep says what is wrong with them"),
        );
        return Ok(exit::CORRUPT);
    }
    if rebuilt.sealed > 0 {
        let error = format!(
            "{} of {} logs were not indexed anew: they are encrypted, and not to any identity at hand",
            rebuilt.sealed, rebuilt.logs
        );
        print::error(
            &Error::new(ErrorKind::Encrypted, error)
                .hint("--identity FILE names the file with the key"),
        );
        return Ok(exit::SEALED);
    }
    Ok(exit::OK)
}
