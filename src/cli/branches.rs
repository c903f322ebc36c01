//! `branches`: the branches of a session.

use serde::Serialize;

use crate::cli::table::Table;
use crate::cli::{exit, print};
use crate::config::Settings;
use crate::error::Result;
use crate::operations::branches::{ListedBranch, branches};
use crate::sessions::find;
use crate::wire::Parts;

/// List the branches of a session: the entries of writers that lost it
///
/// When two machines write the same session, the newest claim wins. The other writer continues on a
/// branch.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  sessiond branches 3f2a
  sessiond show 3f2a --branch 9c41
  sessiond adopt 3f2a --branch 9c41")]
pub struct Args {
    /// Session ID or unambiguous prefix
    #[arg(value_name = "ID")]
    pub id: String,

    /// Print complete writer IDs on a terminal
    #[arg(long)]
    pub full: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Serialize)]
struct BranchList {
    session: String,
    branches: Vec<ListedBranch>,
}

/// Lists the branches.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let parts = Parts::build(settings, None).await?;
    let id = find::by_id(&parts.logs, &args.id).await?;
    let list = BranchList {
        session: id.name.to_string(),
        branches: branches(&parts, &id).await?,
    };
    if args.json {
        print::json(&list)?;
        return Ok(exit::OK);
    }
    if list.branches.is_empty() {
        let session = print::clean(&list.session);
        print::line(format_args!("no branches in session {session}"))?;
        return Ok(exit::OK);
    }
    let writers: Vec<&str> = list
        .branches
        .iter()
        .map(|listed| listed.branch.writer.as_str())
        .collect();
    let rows: Vec<Vec<String>> = list
        .branches
        .iter()
        .map(|listed| row(listed, &writers, args.full))
        .collect();
    Table::new(&[
        "BRANCH", "BASE", "ENTRIES", "SIZE", "FIRST", "LAST", "ADOPTED",
    ])
    .print(&rows)?;
    Ok(exit::OK)
}

fn row(listed: &ListedBranch, writers: &[&str], full: bool) -> Vec<String> {
    let branch = &listed.branch;
    let writer = match print::shortens_ids(full) {
        true => print::short_id(branch.writer.as_str(), writers.iter().copied()),
        false => branch.writer.to_string(),
    };
    let adopted = listed.adopted_at.map(|seq| format!("entry {seq}"));
    vec![
        writer,
        branch.base.to_string(),
        branch.entries.to_string(),
        print::bytes(branch.stored_bytes),
        branch.first_at.map(print::time).unwrap_or_default(),
        branch.last_at.map(print::time).unwrap_or_default(),
        adopted.unwrap_or_default(),
    ]
}
