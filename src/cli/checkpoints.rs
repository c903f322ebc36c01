//! `checkpoints` and `checkpoint`: the points of a session to go back to, and giving one a name.

use serde::Serialize;

use crate::cli::{exit, print, select};
use crate::config::Settings;
use crate::error::Result;
use crate::log::pins::Named;
use crate::model::{Checkpoint, LogId};
use crate::restore::{find, point};
use crate::upkeep::reindex::tell_names;
use crate::wire::Parts;

/// List the points of a session to go back to: the end of every complete turn, and what somebody gave a name
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  sessiond checkpoints 3f2a\n  sessiond restore 3f2a --at turn:4"
)]
pub struct ListArgs {
    /// The session's id, or the beginning of it
    #[arg(value_name = "ID")]
    pub id: String,

    /// Print them as JSON
    #[arg(long, env = "SESSIOND_JSON")]
    pub json: bool,
}

/// Give a point of a session a name; it stays reachable until the name is taken away
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  sessiond checkpoint 3f2a --name before-deploy\n  sessiond restore 3f2a --at before-deploy"
)]
pub struct NameArgs {
    /// The session's id, or the beginning of it
    #[arg(value_name = "ID")]
    pub id: String,

    /// The name
    #[arg(long, value_name = "NAME")]
    pub name: String,

    /// The point: latest, turn, turn:N, seq:N, a time, or a checkpoint's number or name [default: latest]
    #[arg(long, value_name = "POINT", conflicts_with = "delete")]
    pub at: Option<String>,

    /// Take the name away
    #[arg(long)]
    pub delete: bool,

    /// Print it as JSON
    #[arg(long, env = "SESSIOND_JSON")]
    pub json: bool,
}

#[derive(Serialize)]
struct Listed<'a> {
    session: String,
    checkpoints: &'a [Checkpoint],
    named: &'a [Named],
}

/// Lists them.
pub async fn list(settings: &Settings, args: ListArgs) -> Result<u8> {
    let parts = Parts::make(settings, None).await?;
    let id = find::by_id(&parts.logs, &args.id).await?;
    let (points, named, damage) = point::all(&parts.logs, &id).await?;
    let code = damage.map_or(exit::OK, |damage| {
        print::error(&damage);
        exit::CORRUPT
    });
    if args.json {
        print::json(&Listed {
            session: id.name.to_string(),
            checkpoints: &points,
            named: &named,
        })?;
        return Ok(code);
    }
    let mut rows: Vec<(jiff::Timestamp, Vec<String>)> = points
        .iter()
        .map(|point| (point.at, row(point, String::new())))
        .collect();
    rows.extend(
        named
            .iter()
            .map(|named| (named.made, row(&named.point, named.name.clone()))),
    );
    rows.sort_by_key(|(at, _)| *at);
    let rows: Vec<Vec<String>> = rows.into_iter().map(|(_, row)| row).collect();
    print::table(
        &[
            "CHECKPOINT",
            "TURN",
            "FROM",
            "TIME",
            "ENTRY",
            "STOPPED",
            "PENDING",
            "NAME",
        ],
        &rows,
    )?;
    Ok(code)
}

fn row(point: &Checkpoint, name: String) -> Vec<String> {
    let number = |number: Option<u64>| {
        number
            .filter(|number| *number > 0)
            .map_or_else(String::new, |number| number.to_string())
    };
    let pending: Vec<&str> = point
        .pending
        .iter()
        .map(|call| call.name.as_str())
        .collect();
    vec![
        number(Some(point.number)),
        point.turn.to_string(),
        number(point.parent),
        format!("{:.0}", point.at),
        number(point.seq),
        point.stop.clone().unwrap_or_default(),
        pending.join(", "),
        name,
    ]
}

/// Names one.
pub async fn name(settings: &Settings, args: NameArgs) -> Result<u8> {
    let parts = Parts::make(settings, None).await?;
    let id = find::by_id(&parts.logs, &args.id).await?;
    if args.delete {
        point::unname(&parts.logs, &id, &args.name).await?;
        tell(&parts, &id).await;
        if !args.json {
            print::line(format_args!(
                "{} has no name {} any more",
                print::clean(&id.name.to_string()),
                print::clean(&args.name)
            ))?;
        }
        return Ok(exit::OK);
    }
    let goal = point::find(&parts.logs, &id, &select::point(args.at.as_deref())?).await?;
    let named = point::name(&parts.logs, &*parts.profile, &id, &args.name, &goal).await?;
    tell(&parts, &id).await;
    if args.json {
        print::json(&named)?;
    } else {
        let seq = named.point.seq.unwrap_or(0);
        print::line(format_args!(
            "{}: {} is turn {} in entry {seq}",
            print::clean(&id.name.to_string()),
            named.name,
            named.point.turn
        ))?;
    }
    Ok(exit::OK)
}

/// Lets the index learn of it, if it answers.
async fn tell(parts: &Parts, id: &LogId) {
    if let Err(error) = tell_names(&parts.logs, &*parts.index, id).await {
        tracing::warn!(%error, "the index was not told; sessiond reindex tells it");
    }
}
