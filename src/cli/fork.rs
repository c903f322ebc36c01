//! `fork`: a new session that begins at a point of another.

use crate::cli::{exit, print, select};
use crate::config::Settings;
use crate::error::{Error, Result};
use crate::model::{LogName, SessionId};
use crate::restore::{find, fork, point};
use crate::sys::Disk;
use crate::upkeep::reindex::catch_up;
use crate::wire::Parts;

/// Make a new session that begins at a point of another; nothing is copied, and both go on
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  NEW=$(sessiond fork 3f2a --at turn:4 --quiet)\n  sessiond run --session $NEW -- claude --resume $NEW")]
pub struct Args {
    /// The session's id, or the beginning of it
    #[arg(value_name = "ID")]
    pub id: String,

    /// The point: latest, turn, turn:N, seq:N, a time, or a checkpoint's number or name [default: latest]
    #[arg(long, env = "SESSIOND_AT", value_name = "POINT")]
    pub at: Option<String>,

    /// The new session's id [default: a random UUID]
    #[arg(long = "id", value_name = "NEW")]
    pub new: Option<String>,

    /// Print the new id and nothing else
    #[arg(long)]
    pub quiet: bool,

    /// Print the result as JSON
    #[arg(long, env = "SESSIOND_JSON", conflicts_with = "quiet")]
    pub json: bool,
}

/// Does it.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let parts = Parts::make(settings, None).await?;
    let id = find::by_id(&parts.logs, &args.id).await?;
    let name = args.new.clone().unwrap_or_else(|| uuid(parts.logs.chance.next(), parts.logs.chance.next()));
    let session: SessionId = name.parse()?;
    // A file of that name must be that session's.
    if SessionId::escape(&name) != session {
        return Err(Error::usage(format!("fork to {name:?}: an id of letters, digits, - and _ is needed")));
    }
    let new = parts.logs.id(LogName::Session(session));
    let goal = point::find(&parts.logs, &id, &select::point(args.at.as_deref())?).await?;
    let scratch = std::env::temp_dir().join(format!("sessiond-fork-{:016x}", parts.logs.chance.next()));
    let done = fork::fork(&parts.logs, &id, &goal, &new, &Disk::new(&scratch)).await;
    let _ = std::fs::remove_dir_all(&scratch);
    let forked = done?;
    if let Err(error) = catch_up(&parts.logs, &*parts.index, &*parts.profile, &new).await {
        tracing::warn!(%error, "the index was not told; it catches up by itself");
    }
    if args.json {
        print::json(&forked)?;
    } else if args.quiet {
        print::line(&forked.session)?;
    } else {
        print::line(format_args!(
            "{} begins with {} complete turns of {}: {} files, {}, none of it stored again",
            forked.session,
            forked.turn,
            forked.from,
            forked.files,
            print::bytes(forked.bytes)
        ))?;
    }
    Ok(exit::OK)
}

/// A random UUID (version 4).
fn uuid(high: u64, low: u64) -> String {
    let high = (high & !0xf000) | 0x4000;
    let low = (low & !(0xc << 60)) | (0x8 << 60);
    let text = format!("{high:016x}{low:016x}");
    format!("{}-{}-{}-{}-{}", &text[..8], &text[8..12], &text[12..16], &text[16..20], &text[20..])
}
