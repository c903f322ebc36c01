//! `tail`: the end of a conversation, and new messages as they arrive.

use std::collections::HashMap;

use crate::cli::start::FLUSH_INTERVAL;
use crate::cli::{exit, print};
use crate::config::{self, Settings};
use crate::daemon::signals::Signals;
use crate::error::{Error, ErrorKind, Result};
use crate::history::{FollowEvent, Follower, Renderer, Style};
use crate::model::LogId;
use crate::sessions::find;
use crate::wire::Parts;

/// Show the last messages of a session, and new ones with --follow
///
/// Reads from the store, so it works on any machine. With --follow, it polls for the next entry and
/// lists the log every 15 seconds. Ctrl-C ends it.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond tail -f 3f2a")]
pub struct Args {
    /// Session ID or unambiguous prefix
    #[arg(value_name = "ID")]
    pub id: String,

    /// Print new messages as they arrive
    #[arg(short, long)]
    pub follow: bool,

    /// Number of messages to start with
    #[arg(short = 'n', long, value_name = "N", default_value_t = 10)]
    pub last: usize,

    /// Show thinking, complete tool inputs and results, and system messages
    #[arg(long)]
    pub verbose: bool,

    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,

    /// Poll interval; match the writer's --flush-interval [default: 1s]
    #[arg(long, value_name = "TIME")]
    pub poll_interval: Option<String>,
}

/// Prints the messages.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let mut signals = Signals::for_termination()?;
    tokio::select! {
        done = tail(settings, &args) => done,
        _ = signals.termination() => Ok(exit::OK),
    }
}

async fn tail(settings: &Settings, args: &Args) -> Result<u8> {
    let interval = config::duration(
        "--poll-interval",
        args.poll_interval.as_deref(),
        FLUSH_INTERVAL,
    )?;
    let parts = Parts::build(settings, None).await?;
    let id = find::by_id(&parts.logs, &args.id).await?;
    let style = Style {
        color: print::colors_stdout(),
        verbose: args.verbose,
        markdown: false,
    };
    let mut renderer = Renderer::new(style, HashMap::new());
    let mut print_all = |events: Vec<FollowEvent>| {
        events.into_iter().try_fold(true, |is_open, event| {
            Ok(is_open && print_event(&mut renderer, &id, event, args.json)?)
        })
    };
    let (mut follower, events) =
        Follower::start(&parts.logs, &*parts.profile, &id, args.last, args.verbose).await?;
    let is_damaged = events
        .iter()
        .any(|event| matches!(event, FollowEvent::Damaged(_)));
    let is_open = print_all(events)?;
    if args.follow && is_open {
        follower.follow(interval, print_all).await?;
    }
    Ok(if is_damaged { exit::CORRUPT } else { exit::OK })
}

/// Prints an event; false if the pipe is closed.
fn print_event(
    renderer: &mut Renderer,
    id: &LogId,
    event: FollowEvent,
    json: bool,
) -> Result<bool> {
    match event {
        FollowEvent::Message(message) if json => {
            let line = serde_json::to_string(&message)
                .map_err(|cause| Error::new(ErrorKind::Internal, "print JSON").caused_by(cause))?;
            print::json_line(&line)
        }
        FollowEvent::Message(message) => {
            print::text(&renderer.message(&message, usize::from(message.sub_agent.is_some())))
        }
        FollowEvent::Removed => {
            tracing::warn!(
                "the session was removed; waiting for new messages in case it is undeleted"
            );
            Ok(true)
        }
        FollowEvent::Damaged(damage) => {
            print::error(&Error::corrupt(damage).hint(format!(
                "run \"sessiond verify {}\" to see which point can be restored",
                id.name
            )));
            Ok(true)
        }
    }
}
