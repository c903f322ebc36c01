//! `diff`: what was said, and which files changed, between two points of a session.

use std::collections::BTreeSet;

use serde::Serialize;

use crate::cli::{exit, inspect::short, print, select};
use crate::config::Settings;
use crate::error::Result;
use crate::model::{LogId, Message, PointSpec, RelPath};
use crate::restore::conversation_state::{self, Contents};
use crate::restore::find;
use crate::restore::point::{self, ResolvedPoint};
use crate::wire::Parts;

/// Show what was said and which files changed between two points of a session
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond diff 3f2a turn:2 latest")]
pub struct Args {
    /// The session's id, or the beginning of it
    #[arg(value_name = "ID")]
    pub id: String,

    /// The one point: latest, turn, turn:N, seq:N, a time, or a checkpoint's number or name
    #[arg(value_name = "A")]
    pub from: String,

    /// The other
    #[arg(value_name = "B")]
    pub to: String,

    /// Print it as JSON
    #[arg(long, env = "SESSIOND_JSON")]
    pub json: bool,
}

#[derive(Serialize)]
struct Difference {
    session: String,
    from: String,
    to: String,
    /// Only at the first.
    gone: Vec<Line>,
    /// Only at the second.
    new: Vec<Line>,
    files: Vec<Changed>,
}

#[derive(Serialize)]
struct Line {
    role: &'static str,
    kind: String,
    uuid: Option<String>,
    sub_agent: Option<String>,
    text: String,
}

#[derive(Serialize)]
struct Changed {
    path: RelPath,
    /// Bytes at the first; none if it was not there.
    before: Option<u64>,
    after: Option<u64>,
}

/// Does it.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let parts = Parts::make(settings, None).await?;
    let id = find::by_id(&parts.logs, &args.id).await?;
    let (a, b) = (
        select::point(Some(&args.from))?,
        select::point(Some(&args.to))?,
    );
    let (before, after) = (at(&parts, &id, &a).await?, at(&parts, &id, &b).await?);
    let differs = |here: &Contents, there: &Contents| -> Vec<Line> {
        let known: BTreeSet<&str> = there.said.iter().map(|(key, _)| key.as_str()).collect();
        here.said
            .iter()
            .filter(|(key, _)| !known.contains(key.as_str()))
            .map(|(_, message)| line(message))
            .collect()
    };
    let paths: BTreeSet<&RelPath> = before.files.keys().chain(after.files.keys()).collect();
    let changed = paths
        .into_iter()
        .filter(|path| before.files.get(*path) != after.files.get(*path));
    let length = |side: &Contents, path: &RelPath| side.files.get(path).map(|(len, _)| *len);
    let difference = Difference {
        session: id.name.to_string(),
        from: a.to_string(),
        to: b.to_string(),
        gone: differs(&before, &after),
        new: differs(&after, &before),
        files: changed
            .map(|path| Changed {
                path: path.clone(),
                before: length(&before, path),
                after: length(&after, path),
            })
            .collect(),
    };
    if args.json {
        print::json(&difference)?;
    } else {
        say(&difference)?;
    }
    Ok(exit::OK)
}

async fn at(parts: &Parts, id: &LogId, point: &PointSpec) -> Result<Contents> {
    let ResolvedPoint { at, cut } = point::find(&parts.logs, id, point).await?;
    conversation_state::contents(&parts.logs, &*parts.profile, id, at, cut.as_ref()).await
}

fn line(message: &Message) -> Line {
    Line {
        role: message.role.word(),
        kind: message.kind.clone(),
        uuid: message.uuid.clone(),
        sub_agent: message.sub_agent.clone(),
        text: short(&message.summary()),
    }
}

fn say(difference: &Difference) -> Result<()> {
    for (sign, lines) in [("-", &difference.gone), ("+", &difference.new)] {
        for line in lines {
            let indent = if line.sub_agent.is_some() { "    " } else { "" };
            print::line(format_args!(
                "{sign} {indent}{:<9} {}",
                line.role,
                print::clean(&line.text)
            ))?;
        }
    }
    for file in &difference.files {
        let (sign, size) = match (file.before, file.after) {
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
    if difference.gone.is_empty() && difference.new.is_empty() && difference.files.is_empty() {
        print::line(format_args!(
            "{} and {} are the same",
            difference.from, difference.to
        ))?;
    }
    Ok(())
}
