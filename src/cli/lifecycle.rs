//! `close`, `archive` and `reopen`: the status of a session.

use crate::cli::{exit, print};
use crate::config::Settings;
use crate::error::Result;
use crate::operations::index;
use crate::sessions::find;
use crate::upkeep::status::{self, StatusChange};
use crate::wire::Parts;

/// Mark a session as completed
///
/// Nothing is deleted. The session becomes active again when an agent writes to it.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond close 3f2a && sessiond ls --status completed")]
pub struct CloseArgs {
    /// Session ID or unambiguous prefix
    #[arg(value_name = "ID")]
    pub id: String,
}

/// Mark a completed session as archived
///
/// Nothing is deleted. The session becomes active again when an agent writes to it.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond archive 3f2a")]
pub struct ArchiveArgs {
    /// Session ID or unambiguous prefix
    #[arg(value_name = "ID")]
    pub id: String,
}

/// Mark a completed or archived session as active
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond reopen 3f2a")]
pub struct ReopenArgs {
    /// Session ID or unambiguous prefix
    #[arg(value_name = "ID")]
    pub id: String,
}

/// Changes the status of a session.
pub async fn run(settings: &Settings, id: &str, change: StatusChange) -> Result<u8> {
    let parts = Parts::build(settings, None).await?;
    let id = find::by_id(&parts.logs, id).await?;
    let status = status::change_status(&parts.logs, &id, change).await?;
    index::update(&parts, &id).await;
    print::line(format_args!(
        "{} is {status}",
        print::clean(&id.name.to_string())
    ))?;
    Ok(exit::OK)
}
