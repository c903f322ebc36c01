//! `adopt`: makes a branch the main line of its session.

use crate::adopt::{AdoptOptions, AdoptReport};
use crate::cli::{exit, print, select};
use crate::config::Settings;
use crate::error::Result;
use crate::operations::adopt::adopt;
use crate::sessions::find;
use crate::wire::Parts;

/// Make a branch the main line of its session
///
/// The former main line stays reachable: it gets a named checkpoint. The branch stays, too. A
/// writer that still runs is fenced and continues on a branch of its own. If the command is
/// interrupted, run it again.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  sessiond branches 3f2a
  sessiond adopt 3f2a --branch 9c41 --dry-run
  sessiond adopt 3f2a --branch 9c41")]
pub struct Args {
    /// Session ID or unambiguous prefix
    #[arg(value_name = "ID")]
    pub id: String,

    /// The branch
    #[arg(long, value_name = "WRITER", help = select::BRANCH_HELP)]
    pub branch: String,

    /// Adopt although a writer may be active or the branch was adopted before
    #[arg(long)]
    pub force: bool,

    /// Print what would be done, and change nothing
    #[arg(long)]
    pub dry_run: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Adopts the branch.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let parts = Parts::build(settings, None).await?;
    let id = find::by_id(&parts.logs, &args.id).await?;
    let writer = parts.logs.find_branch(&id, args.branch.trim()).await?;
    let options = AdoptOptions {
        dry_run: args.dry_run,
        force: args.force,
    };
    let report = adopt(&parts, &id, &writer, options).await?;
    if args.json {
        print::json(&report)?;
    } else {
        print_report(&report)?;
    }
    Ok(exit::OK)
}

fn print_report(report: &AdoptReport) -> Result<()> {
    let session = print::clean(&report.session);
    let branch = print::clean(&report.branch);
    if report.already_adopted {
        return print::line(format_args!(
            "nothing to do: the main line of {session} has the content of branch {branch}"
        ));
    }
    let verb = if report.dry_run {
        "would adopt"
    } else {
        "adopted"
    };
    print::line(format_args!(
        "{verb} branch {branch} as the main line of {session}: {} changed, {}, {}",
        print::plural(report.files, "file", "files"),
        print::bytes(report.bytes),
        print::plural(report.turn, "complete turn", "complete turns"),
    ))?;
    match &report.former_checkpoint {
        Some(name) => print::line(format_args!(
            "the former main line is checkpoint {name}; run \"sessiond restore {session} --at {name}\" to return to it"
        )),
        None if report.dry_run => print::line(format_args!(
            "entry {} of the former main line would get a named checkpoint",
            report.former_head
        )),
        None => Ok(()),
    }
}
