//! `inspect`: the state of a session at its end or at a point.

use crate::cli::{exit, print, select};
use crate::config::Settings;
use crate::error::Result;
use crate::history::ConversationReader;
use crate::history::inspect::{InspectOptions, Inspection, inspect};
use crate::operations::index::add_missing;
use crate::sessions::point;
use crate::wire::Parts;

/// Maximum length of a shown text, in bytes.
const MAX_TEXT_LEN: usize = 200;

/// Show the state of a session at a point: turns, tool calls, tokens, sub-agents
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  sessiond inspect 3f2a\n  sessiond inspect 3f2a@turn:4")]
pub struct Args {
    /// Session ID or unambiguous prefix, with an optional point [default: latest]
    ///
    /// A point is latest, turn, turn:N, turn:N.step:N, seq:N, a time, or the number or name of a checkpoint.
    #[arg(value_name = "ID[@POINT]")]
    pub id: String,

    /// The branch
    #[arg(long, value_name = "WRITER", help = select::BRANCH_HELP)]
    pub branch: Option<String>,

    /// Also show the completed tool calls, with whole inputs
    #[arg(long)]
    pub full: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Prints the state.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let parts = Parts::build(settings, None).await?;
    let (id, spec) = select::session_at(&parts, &args.id).await?;
    let branch = select::branch(&parts, &id, args.branch.as_deref()).await?;
    let point = point::resolve_on(&parts.logs, &id, branch.as_ref(), &spec).await?;
    let reader = ConversationReader::new(&parts.logs, &*parts.profile, &id);
    let options = InspectOptions {
        full: args.full,
        prices: settings.prices.clone().with_list(),
    };
    let inspection = inspect(reader, &point, &options).await?;
    if args.json {
        print::json(&inspection)?;
    } else {
        print_inspection(&inspection)?;
    }
    add_missing(&parts, &id).await;
    Ok(match inspection.damage {
        Some(_) => exit::CORRUPT,
        None => exit::OK,
    })
}

fn line(name: &str, text: String) -> Result<()> {
    print::line(format_args!("{name:<13} {}", print::clean(&text)))
}

fn print_inspection(inspection: &Inspection) -> Result<()> {
    let shorten = |text: &str| print::one_line(text, MAX_TEXT_LEN);
    line("session", inspection.session.clone())?;
    line(
        "entry",
        format!("{} of {}", inspection.seq, inspection.head),
    )?;
    if let Some(origin) = &inspection.origin {
        line("fork of", print::origin(&origin.session, origin.turn))?;
    }
    if let Some(checkpoint) = &inspection.checkpoint {
        let parent = checkpoint
            .parent
            .map_or_else(String::new, |parent| format!(", parent {parent}"));
        line(
            "checkpoint",
            format!(
                "{} at {}{parent}",
                checkpoint.number,
                print::time(checkpoint.at)
            ),
        )?;
        let stop_reason = checkpoint.stop_reason.clone();
        line(
            "stop reason",
            stop_reason.unwrap_or_else(|| "none: the turn is not complete".to_owned()),
        )?;
    }
    if let Some(status) = inspection.status {
        line("status", status.as_str().to_owned())?;
    }
    let turns = print::plural(inspection.turn, "complete turn", "complete turns");
    let steps = match inspection.step {
        0 => String::new(),
        steps => format!(" after {}", print::plural(steps, "step", "steps")),
    };
    line(
        "turns",
        if inspection.is_turn_open {
            format!("{turns}, 1 incomplete turn{steps}")
        } else {
            turns
        },
    )?;
    print_usage(inspection)?;
    let messages: Vec<String> = inspection
        .messages
        .iter()
        .map(|(role, count)| format!("{count} {role}"))
        .collect();
    line("messages", messages.join(", "))?;
    print_calls(inspection)?;
    if let Some(result) = &inspection.last_tool_result {
        line("last result", shorten(result))?;
    }
    if let Some((role, text)) = &inspection.last_text {
        line("last text", format!("{role}: {}", shorten(text)))?;
    }
    for agent in &inspection.sub_agents {
        let state = if agent.is_active {
            "active"
        } else {
            "finished"
        };
        let messages = print::plural(agent.messages, "message", "messages");
        line("sub-agent", format!("{} {state}, {messages}", agent.id))?;
    }
    for (path, len) in &inspection.files {
        line("file", format!("{} {}", print::bytes(*len), path.as_str()))?;
    }
    inspection
        .damage
        .iter()
        .try_for_each(|damage| line("DAMAGED", damage.clone()))
}

/// Prints the model, its usage and its errors.
fn print_usage(inspection: &Inspection) -> Result<()> {
    if let Some(model) = &inspection.model {
        line("model", model.clone())?;
    }
    let tokens = inspection.tokens;
    let input = tokens.input + tokens.cache_read + tokens.cache_write;
    if input + tokens.output > 0 {
        let cost = inspection.cost_usd.map(|cost| (cost * 1e6).round() as u64);
        line(
            "tokens",
            format!(
                "{} in, {} out, {}",
                print::number(input),
                print::number(tokens.output),
                print::cost(cost)
            ),
        )?;
    }
    if inspection.api_errors + inspection.api_retries > 0 {
        line(
            "API errors",
            format!(
                "{}, {}",
                inspection.api_errors,
                print::plural(inspection.api_retries, "retry", "retries")
            ),
        )?;
    }
    Ok(())
}

/// Prints the tools and their calls.
fn print_calls(inspection: &Inspection) -> Result<()> {
    let is_full = inspection.completed_calls.is_some();
    for (name, tool) in &inspection.tools {
        let mut text = format!("{name}: {}", print::plural(tool.calls, "call", "calls"));
        for (count, what) in [
            (tool.errors, "failed"),
            (tool.denials, "denied"),
            (tool.pending, "pending"),
        ] {
            if count > 0 {
                text.push_str(&format!(", {count} {what}"));
            }
        }
        line("tool", text)?;
    }
    for completed in inspection.completed_calls.iter().flatten() {
        let result = if completed.is_error {
            "failed"
        } else {
            "completed"
        };
        let ended = completed.ended.map(print::time).unwrap_or_default();
        let call = &completed.call;
        line(
            "call",
            format!("{} {result} {ended}: {}", call.name, call.input),
        )?;
    }
    for call in &inspection.pending_calls {
        let since = call
            .started
            .map_or_else(String::new, |at| format!(" since {}", print::time(at)));
        let input = match is_full {
            true => call.input.clone(),
            false => print::one_line(&call.input, MAX_TEXT_LEN),
        };
        line("pending call", format!("{}{since}: {}", call.name, input))?;
    }
    Ok(())
}
