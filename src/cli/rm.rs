//! `rm`, `undelete` and `ttl`: how long a session lives.

use std::io::{BufRead, IsTerminal, Write};

use crate::cli::{exit, print, select};
use crate::config::{self, Settings};
use crate::error::{Error, Result};
use crate::model::{LogId, SessionMetadata, Ttl};
use crate::restore::find;
use crate::upkeep::remove;
use crate::wire::Parts;

/// Remove a session; the collector deletes it for good after 24 hours
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  sessiond rm 3f2a\n\nA writer that still runs brings the session back with its next change: stop it first."
)]
pub struct RemoveArgs {
    /// The session's id, or the beginning of it
    #[arg(value_name = "ID")]
    pub id: String,

    /// Do not ask
    #[arg(long, short, env = "SESSIOND_YES")]
    pub yes: bool,
}

/// Bring a removed or expired session back, within 24 hours
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond ls --status removed\n  sessiond undelete 3f2a")]
pub struct UndeleteArgs {
    /// The session's id, or the beginning of it
    #[arg(value_name = "ID")]
    pub id: String,
}

/// Say how long to keep a session after its last change
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond ttl 3f2a never")]
pub struct TtlArgs {
    /// The session's id, or the beginning of it
    #[arg(value_name = "ID")]
    pub id: String,

    /// A length of time, never, or default (as sessiond gc is told); without it, show what was said
    #[arg(value_name = "TIME")]
    pub ttl: Option<String>,
}

/// Removes.
pub async fn remove(settings: &Settings, args: RemoveArgs) -> Result<u8> {
    let parts = Parts::make(settings, None).await?;
    let id = find::by_id(&parts.logs, &args.id).await?;
    if !args.yes && !confirmed(&id)? {
        return Ok(exit::FAILED);
    }
    let removed = remove::remove(&parts.logs, &id).await?;
    select::index_learns(&parts, &id).await;
    let name = print::clean(&id.name.to_string());
    if removed {
        print::line(format_args!(
            "removed {name}; sessiond undelete {name} brings it back within 24 hours"
        ))?;
    } else {
        print::line(format_args!("{name} was removed before"))?;
    }
    Ok(exit::OK)
}

/// Asks a person; without one, only `--yes` will do.
fn confirmed(id: &LogId) -> Result<bool> {
    if !std::io::stdin().is_terminal() {
        return Err(Error::usage(format!("remove {id}: nobody is here to ask"))
            .hint("--yes removes it without asking"));
    }
    let failed = |cause| Error::io("ask", cause);
    let mut out = std::io::stderr();
    write!(out, "remove {}? [y/N] ", print::clean(&id.to_string()))
        .and_then(|()| out.flush())
        .map_err(failed)?;
    let mut answer = String::new();
    std::io::stdin()
        .lock()
        .read_line(&mut answer)
        .map_err(failed)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

/// Brings back.
pub async fn undelete(settings: &Settings, args: UndeleteArgs) -> Result<u8> {
    let parts = Parts::make(settings, None).await?;
    let id = find::by_id(&parts.logs, &args.id).await?;
    let back = remove::undelete(&parts.logs, &id).await?;
    select::index_learns(&parts, &id).await;
    let name = print::clean(&id.name.to_string());
    print::line(if back {
        format!("{name} is back")
    } else {
        format!("{name} was not removed")
    })?;
    Ok(exit::OK)
}

/// Says or shows how long.
pub async fn ttl(settings: &Settings, args: TtlArgs) -> Result<u8> {
    let parts = Parts::make(settings, None).await?;
    let id = find::by_id(&parts.logs, &args.id).await?;
    if let Some(text) = &args.ttl {
        let ttl = if text.trim() == "default" {
            None
        } else {
            Some(config::ttl("TIME", text)?)
        };
        parts
            .logs
            .say(&id, |before| {
                Ok(SessionMetadata {
                    ttl,
                    ..before.clone()
                })
            })
            .await?;
        select::index_learns(&parts, &id).await;
    }
    let kept = match parts.logs.said(&id).await?.wishes.ttl {
        None => "as sessiond gc is told".to_owned(),
        Some(Ttl::Never) => "for ever".to_owned(),
        Some(Ttl::Seconds(seconds)) => format!("{} after its last change", print::length(seconds)),
    };
    print::line(format_args!(
        "{} is kept {kept}",
        print::clean(&id.name.to_string())
    ))?;
    Ok(exit::OK)
}
