//! `rm`, `undelete` and `ttl`: how long a session is kept.

use std::io::{BufRead, IsTerminal, Write};

use crate::cli::{exit, print};
use crate::config::{self, Settings};
use crate::error::{Error, Result};
use crate::model::{LogId, SessionMetadata, Ttl};
use crate::operations::index;
use crate::sessions::find;
use crate::upkeep::remove;
use crate::wire::Parts;

/// Remove a session; undelete can bring it back for 24 hours
///
/// "sessiond gc" deletes the session permanently after 24 hours. Stop the writer first: its next
/// change brings the session back.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond rm 3f2a")]
pub struct RemoveArgs {
    /// Session ID or unambiguous prefix
    #[arg(value_name = "ID")]
    pub id: String,

    /// Do not ask for confirmation
    #[arg(long, short)]
    pub yes: bool,
}

/// Bring back a session that was removed or has expired
///
/// This works for 24 hours, and after that until "sessiond gc" runs.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond ls --status removed\n  sessiond undelete 3f2a")]
pub struct UndeleteArgs {
    /// Session ID or unambiguous prefix
    #[arg(value_name = "ID")]
    pub id: String,
}

/// Show or set the TTL of a session
///
/// The TTL starts with the last change of the session. "sessiond gc" removes expired sessions.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  sessiond ttl 3f2a
  sessiond ttl 3f2a 30d
  sessiond ttl 3f2a never")]
pub struct TtlArgs {
    /// Session ID or unambiguous prefix
    #[arg(value_name = "ID")]
    pub id: String,

    /// Duration, never, or default for the TTL of gc [default: show the TTL]
    #[arg(value_name = "TIME")]
    pub ttl: Option<String>,
}

/// Removes a session.
pub async fn remove(settings: &Settings, args: RemoveArgs) -> Result<u8> {
    let parts = Parts::build(settings, None).await?;
    let id = find::by_id(&parts.logs, &args.id).await?;
    if !args.yes && !is_confirmed(&id)? {
        return Ok(exit::FAILED);
    }
    let is_new = remove::remove(&parts.logs, &id).await?;
    index::update(&parts, &id).await;
    let name = print::clean(&id.name.to_string());
    print::line(if is_new {
        format!("removed {name}; run \"sessiond undelete {name}\" within 24 hours to bring it back")
    } else {
        format!("{name} was already removed")
    })?;
    Ok(exit::OK)
}

/// Asks for confirmation; without a terminal, only `--yes` confirms.
fn is_confirmed(id: &LogId) -> Result<bool> {
    if !std::io::stdin().is_terminal() {
        return Err(Error::usage(format!(
            "cannot remove {id}: confirmation is required, but standard input is not a terminal"
        ))
        .hint(format!(
            "run \"sessiond rm {} --yes\" to remove it without confirmation",
            id.name
        )));
    }
    let failed = |cause| Error::io("ask for confirmation", cause);
    let mut out = std::io::stderr();
    write!(out, "remove {}? [y/N] ", print::clean(&id.to_string()))
        .and_then(|()| out.flush())
        .map_err(failed)?;
    let mut reply = String::new();
    std::io::stdin()
        .lock()
        .read_line(&mut reply)
        .map_err(failed)?;
    Ok(matches!(reply.trim(), "y" | "Y" | "yes"))
}

/// Undeletes a session.
pub async fn undelete(settings: &Settings, args: UndeleteArgs) -> Result<u8> {
    let parts = Parts::build(settings, None).await?;
    let id = find::by_id(&parts.logs, &args.id).await?;
    let was_removed = remove::undelete(&parts.logs, &id).await?;
    index::update(&parts, &id).await;
    let name = print::clean(&id.name.to_string());
    print::line(if was_removed {
        format!("undeleted {name}")
    } else {
        format!("{name} was not removed")
    })?;
    Ok(exit::OK)
}

/// Sets or shows a TTL.
pub async fn ttl(settings: &Settings, args: TtlArgs) -> Result<u8> {
    let ttl = match args.ttl.as_deref().map(str::trim) {
        None | Some("default") => None,
        Some(text) => Some(config::ttl("TIME", text)?),
    };
    let parts = Parts::build(settings, None).await?;
    let id = find::by_id(&parts.logs, &args.id).await?;
    let current = if args.ttl.is_some() {
        let update = |before: &SessionMetadata| {
            Ok(SessionMetadata {
                ttl,
                ..before.clone()
            })
        };
        let updated = parts.logs.update_metadata(&id, update).await?;
        index::update(&parts, &id).await;
        updated
    } else {
        parts.logs.metadata(&id).await?
    };
    let text = match current.metadata.ttl {
        None => "default (the --ttl of \"sessiond gc\")".to_owned(),
        Some(Ttl::Never) => "never".to_owned(),
        Some(Ttl::Seconds(seconds)) => {
            format!("{} after the last change", print::length(seconds))
        }
    };
    print::line(format_args!(
        "TTL of {}: {text}",
        print::clean(&id.name.to_string())
    ))?;
    Ok(exit::OK)
}
