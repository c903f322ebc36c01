//! `inspect`: what a session stood at, at its end or at a point: for a crash, what was running and what came last.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::cli::{exit, print, select};
use crate::config::Settings;
use crate::error::Result;
use crate::model::{Checkpoint, RelPath, ToolCall};
use crate::restore::conversation_state::{self, SubAgent};
use crate::restore::point::{self, ResolvedPoint};
use crate::wire::Parts;

/// Show one point of a session in full: what was running, the last result, which sub-agents were at work
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond inspect 3f2a\n  sessiond inspect 3f2a@turn:4")]
pub struct Args {
    /// The session's id, or the beginning of it; with @ and a point: latest, turn, turn:N, seq:N, a time, or a checkpoint's number
    /// or name
    #[arg(value_name = "ID[@POINT]")]
    pub id: String,

    /// Print it as JSON
    #[arg(long, env = "SESSIOND_JSON")]
    pub json: bool,
}

#[derive(Serialize)]
struct Inspected {
    session: String,
    entry: u64,
    head: u64,
    checkpoint: Option<Checkpoint>,
    /// The last turn that is complete.
    turn: u64,
    turn_is_open: bool,
    messages: BTreeMap<String, u64>,
    pending: Vec<ToolCall>,
    last_answer: Option<String>,
    last_text: Option<(String, String)>,
    sub_agents: Vec<SubAgent>,
    files: BTreeMap<RelPath, u64>,
    damage: Option<String>,
}

/// Does it.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let parts = Parts::make(settings, None).await?;
    let (id, point) = select::session_at(&parts, &args.id).await?;
    let ResolvedPoint { at, cut } = point::find(&parts.logs, &id, &point).await?;
    let read =
        conversation_state::read(&parts.logs, &*parts.profile, &id, at, cut.as_ref()).await?;
    let (state, talk) = (&read.sink.0, &read.sink.1.ear);
    let (turns, cut_at) = (talk.turns(), cut.as_ref().map(|point| &point.files));
    let length = |path: &RelPath, len: u64| {
        cut_at
            .and_then(|files| files.get(path))
            .copied()
            .unwrap_or(len)
            .min(len)
    };
    let seen = Inspected {
        session: id.name.to_string(),
        entry: read.seq,
        head: read.head,
        turn: cut.as_ref().map_or(turns.turn, |point| point.turn),
        turn_is_open: turns.is_open(),
        messages: talk
            .roles()
            .into_iter()
            .map(|(role, count)| (role.word().to_owned(), count))
            .collect(),
        pending: turns.pending.clone(),
        last_answer: turns.last_answer.clone(),
        last_text: talk
            .last_text()
            .map(|(role, text)| (role.word().to_owned(), text)),
        sub_agents: talk.sub_agents(),
        files: state
            .files
            .iter()
            .map(|(path, file)| (path.clone(), length(path, file.len)))
            .collect(),
        damage: read.damage.as_ref().map(ToString::to_string),
        checkpoint: cut,
    };
    if args.json {
        print::json(&seen)?;
    } else {
        say(&seen)?;
    }
    Ok(if seen.damage.is_some() {
        exit::of(crate::error::ErrorKind::Corrupt)
    } else {
        exit::OK
    })
}

fn say(seen: &Inspected) -> Result<()> {
    let line =
        |name: &str, text: String| print::line(format_args!("{name:<13} {}", print::clean(&text)));
    line("session", seen.session.clone())?;
    line("entry", format!("{} of {}", seen.entry, seen.head))?;
    if let Some(point) = &seen.checkpoint {
        let from = point
            .parent
            .map_or_else(String::new, |parent| format!(", from {parent}"));
        line(
            "checkpoint",
            format!("{} of {:.0}{from}", point.number, point.at),
        )?;
        line(
            "stopped",
            point
                .stop
                .clone()
                .unwrap_or_else(|| "in the middle".to_owned()),
        )?;
    }
    let turns = if seen.turn == 1 {
        "1 complete turn".to_owned()
    } else {
        format!("{} complete turns", seen.turn)
    };
    line(
        "turns",
        if seen.turn_is_open {
            format!("{turns}, and one that is not")
        } else {
            turns
        },
    )?;
    let messages: Vec<String> = seen
        .messages
        .iter()
        .map(|(role, count)| format!("{count} {role}"))
        .collect();
    line("messages", messages.join(", "))?;
    for call in &seen.pending {
        let since = call
            .started
            .map_or_else(String::new, |at| format!(" since {at:.0}"));
        line(
            "running",
            format!("{}{since}: {}", call.name, short(&call.input)),
        )?;
    }
    if let Some(answer) = &seen.last_answer {
        line("last result", short(answer))?;
    }
    if let Some((role, text)) = &seen.last_text {
        line("last text", format!("{role}: {}", short(text)))?;
    }
    for agent in &seen.sub_agents {
        let context = if agent.active { "at work" } else { "finished" };
        line(
            "sub-agent",
            format!("{} {context}, {} messages", agent.id, agent.messages),
        )?;
    }
    for (path, len) in &seen.files {
        line("file", format!("{} {}", print::bytes(*len), path.as_str()))?;
    }
    seen.damage
        .iter()
        .try_for_each(|damage| line("DAMAGED", damage.clone()))
}

/// A line of a text.
pub(super) fn short(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let end = line.floor_char_boundary(200);
    if end < line.len() {
        format!("{}…", &line[..end])
    } else {
        line
    }
}
