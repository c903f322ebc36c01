//! `checkpoints` and `checkpoint`: listing and naming the points that a session can be restored to.

use crate::cli::table::Table;
use crate::cli::{exit, print, select};
use crate::config::Settings;
use crate::error::Result;
use crate::model::Checkpoint;
use crate::operations::index::{add_missing, update_checkpoints};
use crate::sessions::{find, point};
use crate::wire::Parts;

/// List the checkpoints of a session: turns, steps and named points
///
/// A step is one tool round within a turn. Without --steps, only the last step of a running turn is
/// listed.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  sessiond checkpoints 3f2a
  sessiond checkpoints 3f2a --steps
  sessiond restore 3f2a --at turn:4
  sessiond restore 3f2a --at turn:5.step:12")]
pub struct ListArgs {
    /// Session ID or unambiguous prefix
    #[arg(value_name = "ID")]
    pub id: String,

    /// The branch
    #[arg(long, value_name = "WRITER", help = select::BRANCH_HELP)]
    pub branch: Option<String>,

    /// Also list the steps of each turn; JSON always includes them
    #[arg(long)]
    pub steps: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Name a point of a session, or delete the name
///
/// Garbage collection keeps a named point until its name is deleted.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  sessiond checkpoint 3f2a --name before-deploy
  sessiond restore 3f2a --at before-deploy
  sessiond checkpoint 3f2a --name before-deploy --delete")]
pub struct NameArgs {
    /// Session ID or unambiguous prefix
    #[arg(value_name = "ID")]
    pub id: String,

    /// Name of the checkpoint
    #[arg(long, value_name = "NAME")]
    pub name: String,

    /// The point
    #[arg(long, value_name = "POINT", conflicts_with = "delete", help = select::AT_HELP)]
    pub at: Option<String>,

    /// Delete the name
    #[arg(long)]
    pub delete: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Lists the checkpoints.
pub async fn list(settings: &Settings, args: ListArgs) -> Result<u8> {
    let parts = Parts::build(settings, None).await?;
    let id = find::by_id(&parts.logs, &args.id).await?;
    let branch = select::branch(&parts, &id, args.branch.as_deref()).await?;
    let mut found = point::list(&parts.logs, &id, branch.as_ref()).await?;
    add_missing(&parts, &id).await;
    let code = found.damage.take().map_or(exit::OK, |damage| {
        print::error(&damage);
        exit::CORRUPT
    });
    let list = found.into_list(&id);
    if args.json {
        print::json(&list)?;
        return Ok(code);
    }
    let last = list.checkpoints.len().saturating_sub(1);
    let unnamed = list.checkpoints.iter().enumerate();
    let unnamed = unnamed
        .map(|(index, listed)| (index == last, &listed.checkpoint))
        .filter(|(is_last, point)| args.steps || *is_last || point.step.is_none())
        .map(|(_, point)| (point.at, point, ""));
    let named = list.named.iter();
    let named = named.map(|named| (named.created_at, &named.checkpoint, named.name.as_str()));
    let mut points: Vec<_> = unnamed.chain(named).collect();
    points.sort_by_key(|(at, _, _)| *at);
    if points.is_empty() {
        if code != exit::OK {
            return Ok(code);
        }
        let session = print::clean(&id.name.to_string());
        print::line(format_args!("no checkpoints in session {session}"))?;
        return Ok(code);
    }
    let rows: Vec<Vec<String>> = points
        .into_iter()
        .map(|(_, point, name)| row(point, name))
        .collect();
    Table::new(&[
        "CHECKPOINT",
        "TURN",
        "STEP",
        "STATUS",
        "PARENT",
        "TIME",
        "SEQ",
        "SIZE",
        "STOP REASON",
        "PENDING CALLS",
        "NAME",
    ])
    .flexible(&[9, 10])
    .print(&rows)?;
    Ok(code)
}

fn row(point: &Checkpoint, name: &str) -> Vec<String> {
    let number = |number: Option<u64>| {
        number
            .filter(|number| *number > 0)
            .map_or_else(String::new, |number| number.to_string())
    };
    let pending: Vec<&str> = point
        .pending_calls
        .iter()
        .map(|call| call.name.as_str())
        .collect();
    vec![
        number(Some(point.number)),
        point.turn.to_string(),
        number(point.step),
        point.status.as_str().to_owned(),
        number(point.parent),
        print::time(point.at),
        number(point.seq),
        print::bytes(point.size()),
        point.stop_reason.clone().unwrap_or_default(),
        pending.join(", "),
        name.to_owned(),
    ]
}

/// Names a point, or deletes a name.
pub async fn name(settings: &Settings, args: NameArgs) -> Result<u8> {
    let spec = select::at(args.at.as_deref())?;
    let parts = Parts::build(settings, None).await?;
    let id = find::by_id(&parts.logs, &args.id).await?;
    let session = print::clean(&id.name.to_string());
    if args.delete {
        point::delete(&parts.logs, &id, &args.name).await?;
        update_checkpoints(&parts, &id).await;
        if !args.json {
            let name = print::clean(&args.name);
            print::line(format_args!("deleted checkpoint {name} of {session}"))?;
        }
        return Ok(exit::OK);
    }
    let point = point::resolve(&parts.logs, &id, &spec).await?;
    let named = point::create(&parts.logs, &*parts.profile, &id, &args.name, &point).await?;
    update_checkpoints(&parts, &id).await;
    if args.json {
        print::json(&named)?;
    } else {
        let position = match (named.checkpoint.turn, named.checkpoint.step) {
            (turn, Some(step)) => format!("after step {step} of turn {turn}"),
            (0, None) => "before the first complete turn".to_owned(),
            (turn, None) => format!("after turn {turn}"),
        };
        print::line(format_args!(
            "created checkpoint {} of {session} at entry {}, {position}",
            named.name,
            named.checkpoint.seq.unwrap_or(0)
        ))?;
    }
    Ok(exit::OK)
}
