//! `close`, `archive` and `reopen`: where a session is in its life. Nothing is deleted.

use crate::cli::{exit, print, select};
use crate::config::Settings;
use crate::error::Result;
use crate::restore::find;
use crate::upkeep::status::{self, StatusChange};
use crate::wire::Parts;

/// Say that a session is done: active → completed. It is active again when somebody writes to it
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond close 3f2a && sessiond ls --status completed")]
pub struct CloseArgs {
    /// The session's id, or the beginning of it
    #[arg(value_name = "ID")]
    pub id: String,
}

/// Put a session away: completed → archived
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond archive 3f2a")]
pub struct ArchiveArgs {
    /// The session's id, or the beginning of it
    #[arg(value_name = "ID")]
    pub id: String,
}

/// Go on with a session: completed or archived → active
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond reopen 3f2a")]
pub struct ReopenArgs {
    /// The session's id, or the beginning of it
    #[arg(value_name = "ID")]
    pub id: String,
}

/// Makes the move.
pub async fn run(settings: &Settings, id: &str, make: StatusChange) -> Result<u8> {
    let parts = Parts::make(settings, None).await?;
    let id = find::by_id(&parts.logs, id).await?;
    let status = status::make(&parts.logs, &id, make).await?;
    select::index_learns(&parts, &id).await;
    print::line(format_args!(
        "{} is {status}",
        print::clean(&id.name.to_string())
    ))?;
    Ok(exit::OK)
}
