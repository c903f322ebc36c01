//! `pull`: a copy of a session, for debugging. Does not claim the session.

use std::path::PathBuf;

use crate::cli::{exit, print, restore_report, select};
use crate::config::Settings;
use crate::error::Result;
use crate::operations::pull::{PullSource, pull};
use crate::sessions::find::{self, LatestFilter, SessionSelector};
use crate::wire::Parts;

/// Fetch a copy of a session without claiming it
///
/// The writer of the session is not affected. The agent's directory does not change.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  sessiond pull 3f2a --to /tmp/copy
  sessiond pull 3f2a --at turn:4")]
pub struct Args {
    /// Session ID or unambiguous prefix
    #[arg(
        value_name = "ID",
        required_unless_present = "request",
        conflicts_with = "request"
    )]
    pub id: Option<String>,

    /// Fetch the most recently changed session with this request ID
    #[arg(long, value_name = "ID")]
    pub request: Option<String>,

    /// Directory for the copy; existing files are not overwritten [default: ./ID]
    #[arg(long, value_name = "DIR")]
    pub to: Option<PathBuf>,

    /// The point
    #[arg(long, value_name = "POINT", conflicts_with = "raw", help = select::AT_HELP)]
    pub at: Option<String>,

    /// The branch
    #[arg(long, value_name = "WRITER", conflicts_with = "raw", help = select::BRANCH_HELP)]
    pub branch: Option<String>,

    /// Fetch the stored objects instead of the files
    #[arg(long)]
    pub raw: bool,

    /// Repair damaged transcripts; keep the originals in .sessiond/aside
    #[arg(long, conflicts_with = "raw")]
    pub repair: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Fetches the copy.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let point = select::at(args.at.as_deref())?;
    let parts = Parts::build(settings, None).await?;
    let id = match args.id {
        Some(id) => find::by_id(&parts.logs, &id).await?,
        None => {
            let selector = SessionSelector::Latest(LatestFilter {
                request_id: args.request,
                ..LatestFilter::default()
            });
            find::select(&parts.logs, &*parts.index, &selector)
                .await?
                .ok_or_else(|| find::no_match(&parts.logs, &selector))?
        }
    };
    let source = match args.raw {
        true => PullSource::Objects,
        false => PullSource::Files {
            point,
            branch: select::branch(&parts, &id, args.branch.as_deref()).await?,
            repair: args.repair,
        },
    };
    let report = pull(&parts, &id, args.to.as_deref(), source).await?;
    if args.json {
        print::json(&report)?;
        return Ok(exit::OK);
    }
    print::line(format_args!(
        "pulled {}: {}, {}, in {}",
        print::clean(&report.session),
        print::plural(report.files, "file", "files"),
        print::bytes(report.bytes),
        report.to.display()
    ))?;
    restore_report::print_rewound(&report.rewound_bytes, &report.rewound_calls)?;
    restore_report::print_repaired(&report.repaired)?;
    Ok(exit::OK)
}
