//! `fork`: a new session that begins at a point of another.

use crate::cli::{exit, print, select};
use crate::config::Settings;
use crate::error::{Error, Result};
use crate::model::{LogName, SessionId};
use crate::restore::{find, fork, point};
use crate::sys::{Disk, Rng};
use crate::upkeep::reindex::catch_up;
use crate::wire::Parts;

/// Make a new session that begins at a point of another; nothing is copied, and both go on. --quiet prints its id alone
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  NEW=$(sessiond fork 3f2a --at turn:4 --quiet)\n  sessiond run --session $NEW -- claude --resume $NEW"
)]
pub struct Args {
    /// The session's id, or the beginning of it
    #[arg(value_name = "ID")]
    pub id: String,

    /// The point: latest, turn, turn:N, seq:N, a time, or a checkpoint's number or name [default: latest]
    #[arg(long, env = "SESSIOND_AT", value_name = "POINT")]
    pub at: Option<String>,

    /// The new session's id [default: a random one, in the form of the agent's own]
    #[arg(long = "id", value_name = "NEW")]
    pub new: Option<String>,

    /// Print the result as JSON
    #[arg(long, env = "SESSIOND_JSON")]
    pub json: bool,
}

/// Does it.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let parts = Parts::make(settings, None).await?;
    let id = find::by_id(&parts.logs, &args.id).await?;
    let name = args
        .new
        .clone()
        .unwrap_or_else(|| parts.profile.fresh_id(random(&*parts.logs.rng)));
    let session: SessionId = name.parse()?;
    // A file of that name must be that session's.
    if SessionId::escape(&name) != session {
        return Err(Error::usage(format!(
            "fork to {name:?}: an id of letters, digits, - and _ is needed"
        )));
    }
    let new = parts.logs.id(LogName::Session(session));
    let goal = point::find(&parts.logs, &id, &select::point(args.at.as_deref())?).await?;
    let scratch =
        std::env::temp_dir().join(format!("sessiond-fork-{:016x}", parts.logs.rng.next()));
    let done = fork::fork(&parts.logs, &id, &goal, &new, &Disk::new(&scratch)).await;
    let _ = std::fs::remove_dir_all(&scratch);
    let forked = done?;
    if let Err(error) = catch_up(&parts.logs, &*parts.index, &*parts.profile, &new).await {
        tracing::warn!(%error, "the index was not told; it catches up by itself");
    }
    if args.json {
        print::json(&forked)?;
    } else if settings.quiet {
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

fn random(rng: &dyn Rng) -> u128 {
    u128::from(rng.next()) << 64 | u128::from(rng.next())
}
