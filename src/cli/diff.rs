//! `diff`: the messages and files that differ between two points of a session.

use crate::cli::{exit, print, select};
use crate::config::Settings;
use crate::error::Result;
use crate::history::ConversationReader;
use crate::history::diff::{Difference, diff};
use crate::sessions::{find, point};
use crate::wire::Parts;

/// Maximum length of a shown message, in bytes.
const MAX_TEXT_LEN: usize = 200;

/// Show the messages and files that differ between two points of a session
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  sessiond diff 3f2a turn:2 latest
  sessiond diff 3f2a --branch 9c41")]
pub struct Args {
    /// Session ID or unambiguous prefix
    #[arg(value_name = "ID")]
    pub id: String,

    /// First point: latest, turn, turn:N, seq:N, a time or a checkpoint
    #[arg(value_name = "POINT", required_unless_present = "branch")]
    pub from: Option<String>,

    /// Second point
    #[arg(value_name = "POINT", required_unless_present = "branch")]
    pub to: Option<String>,

    /// Compare with this branch: the second point is on it [default points: latest]
    #[arg(long, value_name = "WRITER")]
    pub branch: Option<String>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Prints the difference.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let (from, to) = (
        select::point("point", args.from.as_deref().unwrap_or("latest"))?,
        select::point("point", args.to.as_deref().unwrap_or("latest"))?,
    );
    let parts = Parts::build(settings, None).await?;
    let id = find::by_id(&parts.logs, &args.id).await?;
    let before = point::resolve(&parts.logs, &id, &from).await?;
    let branch = select::branch(&parts, &id, args.branch.as_deref()).await?;
    let after = point::resolve_on(&parts.logs, &id, branch.as_ref(), &to).await?;
    let reader = ConversationReader::new(&parts.logs, &*parts.profile, &id);
    let difference = diff(reader, &before, &after).await?;
    if args.json {
        print::json(&difference)?;
    } else if difference.is_empty() {
        print::line(format_args!("no difference between {from} and {to}"))?;
    } else {
        print_difference(&difference)?;
    }
    Ok(exit::OK)
}

fn print_difference(difference: &Difference) -> Result<()> {
    for (sign, messages) in [("-", &difference.removed), ("+", &difference.added)] {
        for message in messages {
            let indent = if message.sub_agent.is_some() {
                "    "
            } else {
                ""
            };
            print::line(format_args!(
                "{sign} {indent}{:<9} {}",
                message.role,
                print::clean(&print::one_line(&message.text, MAX_TEXT_LEN))
            ))?;
        }
    }
    for file in &difference.files {
        let (sign, size) = match (file.bytes_before, file.bytes_after) {
            (None, after) => ("+", print::bytes(after.unwrap_or(0))),
            (before, None) => ("-", print::bytes(before.unwrap_or(0))),
            (Some(before), Some(after)) => (
                "~",
                format!("{} → {}", print::bytes(before), print::bytes(after)),
            ),
        };
        print::line(format_args!(
            "{sign} {size}  {}",
            print::clean(file.path.as_str())
        ))?;
    }
    Ok(())
}
