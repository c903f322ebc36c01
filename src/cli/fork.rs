//! `fork`: a new session that starts from a point of another.

use crate::cli::{exit, print, select};
use crate::config::Settings;
use crate::error::Result;
use crate::operations::fork::fork;
use crate::sessions::find;
use crate::wire::Parts;

/// Start a new session from a point of another
///
/// The new session shares the entries of the other: nothing is copied, and both can continue.
/// With --quiet, only the ID of the new session is printed.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:
  NEW=$(sessiond fork 3f2a --at turn:4 --quiet)
  sessiond run --session $NEW -- claude {session-args}")]
pub struct Args {
    /// Session ID or unambiguous prefix
    #[arg(value_name = "ID")]
    pub id: String,

    /// The point
    #[arg(long, value_name = "POINT", help = select::AT_HELP)]
    pub at: Option<String>,

    /// The branch
    #[arg(long, value_name = "WRITER", help = select::BRANCH_HELP)]
    pub branch: Option<String>,

    /// ID of the new session [default: random, in the agent's format]
    #[arg(long = "id", id = "new-id", value_name = "NEW")]
    pub new: Option<String>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Forks the session.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let point = select::at(args.at.as_deref())?;
    let parts = Parts::build(settings, None).await?;
    let id = find::by_id(&parts.logs, &args.id).await?;
    let branch = select::branch(&parts, &id, args.branch.as_deref()).await?;
    let new = args.new.as_deref();
    let forked = fork(&parts, &id, branch.as_ref(), &point, new).await?;
    if args.json {
        print::json(&forked)?;
    } else if settings.output.is_quiet() {
        print::line(&forked.session)?;
    } else {
        let position = match forked.turn {
            0 => "before its first complete turn".to_owned(),
            turn => format!("after turn {turn}"),
        };
        print::line(format_args!(
            "forked {} {position} to {} ({}, {})",
            forked.origin,
            forked.session,
            print::plural(forked.files, "file", "files"),
            print::bytes(forked.bytes)
        ))?;
    }
    Ok(exit::OK)
}
