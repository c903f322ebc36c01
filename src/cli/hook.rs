//! `hook`: Claude Code calls it on its hook events, so that a turn ends only when it is durable.
//!
//! Owns the waiting and its time limits. The agent waits for the hook, so nothing here takes longer
//! than the deadline or fails the agent. Exit code 2 would make the agent continue, so a hook always
//! exits with 0. Plain text on standard output may reach the model, and a headless client shows
//! nobody its standard error, so a failure is also printed as JSON with a `systemMessage`, which the
//! client shows to its user or caller and not to the model. The event and the environment contain
//! secrets, and neither is printed. Does not own the agent's settings file (`install`).

mod install;

use std::fs::File;
use std::io::{BufRead, IsTerminal, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::builder::BoolishValueParser;
use tokio::time::Instant;

use crate::agent::claude_code::hooks::{self, HookEvent, HookEventKind};
use crate::cli::{exit, flush, help, print};
use crate::config::{self, Settings};
use crate::daemon::socket::{self, Request, Response};
use crate::error::{Error, ErrorContext, ErrorKind, Result};
use crate::log::writer::branch_hint;
use crate::model::{LogName, ResolvedPoint};
use crate::operations::index::update_checkpoints;
use crate::sessions::point;
use crate::sys::lock::state_dir;
use crate::wire::{Parts, agent_root};

/// A flush takes about ten milliseconds. A store that needs longer than this has failed, and the
/// agent continues.
const DEADLINE: Duration = Duration::from_secs(5);
/// The agent writes its last line up to half a second after it calls the hook.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(2);
/// How often the transcript is checked for that line.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// A running daemon responds within milliseconds.
const DAEMON_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum size of an event. An event can contain a complete tool result.
const MAX_EVENT_LEN: u64 = 256 << 20;
/// Maximum size of what a client appends after its last message.
const MAX_TRAILER_LEN: u64 = 1 << 20;

/// End a turn only when it is durable (called by Claude Code)
///
/// Without --install, --uninstall and --print, it reads an event from standard input and always
/// exits with 0. If something is not durable, it prints a JSON object with a systemMessage, which
/// Claude Code shows to its user or caller.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond hook --install --user")]
pub struct Args {
    /// Maximum time that the agent waits, durable or not [default: 5s]
    #[arg(long, env = "SESSIOND_HOOK_DEADLINE", value_name = "TIME")]
    pub deadline: Option<String>,

    /// Also flush after each tool call; the next flush has its result [default: false]
    #[arg(
        long,
        env = "SESSIOND_HOOK_AFTER_TOOLS",
        num_args = 0,
        default_missing_value = "true",
        value_parser = BoolishValueParser::new()
    )]
    pub after_tools: Option<bool>,

    /// Move this named checkpoint to the end of each turn and session [default: none]
    #[arg(long, env = "SESSIOND_HOOK_CHECKPOINT", value_name = "NAME")]
    pub checkpoint: Option<String>,

    /// Print the result to stderr on success too [default: false]
    #[arg(
        long,
        env = "SESSIOND_HOOK_VERBOSE",
        num_args = 0,
        default_missing_value = "true",
        value_parser = BoolishValueParser::new()
    )]
    pub verbose: Option<bool>,

    /// Add the hooks to the agent's settings; other settings do not change
    #[arg(long, conflicts_with_all = ["uninstall", "print"])]
    pub install: bool,

    /// Remove the hooks from the agent's settings; other settings do not change
    #[arg(long, conflicts_with = "print")]
    pub uninstall: bool,

    /// Print the settings that --install adds
    #[arg(long)]
    pub print: bool,

    /// Change the settings file in the agent's directory (the default)
    #[arg(long, conflicts_with_all = ["project", "settings"])]
    pub user: bool,

    /// Change the settings of the project in this directory
    #[arg(long, value_name = "DIR", conflicts_with = "settings")]
    pub project: Option<PathBuf>,

    /// Change this settings file
    #[arg(long, value_name = "FILE")]
    pub settings: Option<PathBuf>,

    /// With --install and --uninstall: print the change, and change nothing
    #[arg(long)]
    pub dry_run: bool,
}

impl Args {
    /// Whether the agent calls the hook with an event.
    pub fn handles_event(&self) -> bool {
        !(self.install || self.uninstall || self.print)
    }
}

/// Whether the agent called a hook with arguments that cannot be parsed.
pub fn is_called_by_agent() -> bool {
    let arguments: Vec<_> = std::env::args_os().collect();
    let is_manual = arguments
        .iter()
        .any(|word| word == "--install" || word == "--uninstall" || word == "--print");
    let parsed = help::command()
        .ignore_errors(true)
        .try_get_matches_from(arguments);
    !is_manual && parsed.is_ok_and(|matches| matches.subcommand_name() == Some("hook"))
}

/// Handles an event, or changes the agent's settings.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let deadline = config::duration("--deadline", args.deadline.as_deref(), DEADLINE);
    if !args.handles_event() {
        return install::run(settings, &args, deadline?);
    }
    // An invalid deadline must not make the agent lose the flush.
    let deadline = deadline.unwrap_or_else(|error| {
        report_failure(&error.to_string());
        DEADLINE
    });
    let start = Instant::now();
    let event = handle_event(settings, &args, start + deadline);
    match tokio::time::timeout(deadline, event).await {
        Ok(Ok(Some(done))) if args.verbose.unwrap_or(false) => {
            report(&format!("{done}, after {} ms", start.elapsed().as_millis()))
        }
        Ok(Ok(_)) => {}
        Ok(Err(error)) => report_failure(&error.to_string()),
        Err(_) => report_failure(&format!(
            "not durable after {deadline:?}; the daemon retries; run \"sessiond status\" to see why"
        )),
    }
    Ok(exit::OK)
}

/// Prints a line to standard error.
fn report(text: &str) {
    let _ = writeln!(std::io::stderr(), "sessiond: {}", print::clean(text));
}

/// Prints a failure to standard error, and as a message that the client shows.
fn report_failure(text: &str) {
    report(text);
    let message = format!("sessiond: {}", print::clean(text));
    let _ = writeln!(
        std::io::stdout(),
        "{}",
        serde_json::json!({ "systemMessage": message })
    );
}

/// Handles an event. Returns what was done; an error says what is not durable.
async fn handle_event(
    settings: &Settings,
    args: &Args,
    deadline: Instant,
) -> Result<Option<String>> {
    let event = run_blocking(read_event).await??;
    let root = match event.transcript().and_then(streamed_root) {
        Some(root) => root,
        None => agent_root(settings)?,
    };
    match event.kind() {
        HookEventKind::Other => Ok(None),
        HookEventKind::ToolResult if !args.after_tools.unwrap_or(false) => Ok(None),
        HookEventKind::SessionStart => check_daemon(&root).await.map(|()| None),
        HookEventKind::ToolResult | HookEventKind::End => {
            // Reserve half of the remaining time for the store.
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = MESSAGE_TIMEOUT.min(left / 2);
            let is_complete = wait_for_message(&event, timeout).await?;
            let done = flush(&root, &event).await?;
            if let (Some(name), HookEventKind::End) = (&args.checkpoint, event.kind()) {
                move_checkpoint(settings, &root, &event, name)
                    .await
                    .with_context(|| format!("create checkpoint {name} ({done})"))?;
            }
            if is_complete {
                return Ok(Some(done));
            }
            Err(Error::unavailable(format!(
                "{done}, but without the last message: the transcript did not contain it after {timeout:?}"
            )))
        }
    }
}

/// Reads the event from standard input. The agent may keep it open after the line.
fn read_event() -> Result<HookEvent> {
    let no_event = || Error::usage("standard input contains no hook event");
    if std::io::stdin().is_terminal() {
        return Err(Error::usage(
            "the agent calls this command with an event on standard input; run \"sessiond hook --install\" to install the hook",
        ));
    }
    let mut line = Vec::new();
    let mut input = std::io::stdin().lock().take(MAX_EVENT_LEN);
    while line.trim_ascii().is_empty() {
        line.clear();
        let read = input.read_until(b'\n', &mut line);
        if read.map_err(|_| no_event())? == 0 {
            break;
        }
    }
    if let Some(event) = HookEvent::parse(&line) {
        return Ok(event);
    }
    // The event may span several lines.
    input.read_to_end(&mut line).map_err(|_| no_event())?;
    HookEvent::parse(&line).ok_or_else(no_event)
}

/// The directory above a transcript that a daemon streams.
fn streamed_root(transcript: &Path) -> Option<PathBuf> {
    transcript
        .ancestors()
        .skip(1)
        .find(|directory| state_dir(directory).is_dir())
        .map(Path::to_owned)
}

/// Checks that a daemon streams the directory.
async fn check_daemon(root: &Path) -> Result<()> {
    let status = socket::send_request(root, &Request::Status);
    match tokio::time::timeout(DAEMON_TIMEOUT, status).await {
        Ok(Ok(_)) => Ok(()),
        _ => Err(Error::unavailable(format!(
            "no sessiond is running for {}, so this session is not streamed; run \"sessiond daemon\" to start one",
            root.display()
        ))),
    }
}

/// Waits until the transcript contains the last message; false if that takes too long.
async fn wait_for_message(event: &HookEvent, timeout: Duration) -> Result<bool> {
    let Some((path, message)) = event.expected_message() else {
        return Ok(true);
    };
    let deadline = Instant::now() + timeout;
    let mut checked_len = None;
    loop {
        let (path, message) = (path.to_owned(), message.to_owned());
        let state = run_blocking(move || check_transcript(&path, &message, checked_len)).await?;
        match state {
            // Without a transcript there is nothing to wait for.
            TranscriptState::Missing | TranscriptState::Complete => return Ok(true),
            TranscriptState::Incomplete { len } => checked_len = Some(len),
        }
        if Instant::now() >= deadline {
            return Ok(false);
        }
        tokio::time::sleep(CHECK_INTERVAL).await;
    }
}

/// Whether a transcript contains the last message.
enum TranscriptState {
    Missing,
    Complete,
    Incomplete { len: u64 },
}

fn check_transcript(path: &Path, message: &str, checked_len: Option<u64>) -> TranscriptState {
    let check = || -> std::io::Result<TranscriptState> {
        let mut file = File::open(path)?;
        let len = file.metadata()?.len();
        if checked_len == Some(len) {
            return Ok(TranscriptState::Incomplete { len });
        }
        // A byte takes up to six bytes in JSON.
        let window = MAX_TRAILER_LEN + 6 * message.len() as u64;
        file.seek(SeekFrom::Start(len.saturating_sub(window)))?;
        let mut tail = Vec::new();
        file.take(window).read_to_end(&mut tail)?;
        Ok(match hooks::ends_with_message(&tail, message) {
            true => TranscriptState::Complete,
            false => TranscriptState::Incomplete { len },
        })
    };
    check().unwrap_or(TranscriptState::Missing)
}

async fn flush(root: &Path, event: &HookEvent) -> Result<String> {
    let Some(session) = event.session() else {
        return Err(Error::usage("the hook event has no session ID"));
    };
    let request = Request::Flush {
        session: Some(session.clone()),
    };
    let response = socket::send_request(root, &request).await;
    let report = match response {
        Ok(Response::Flushed(report)) => Ok(report),
        Ok(other) => Err(flush::response_error(other)),
        Err(error) => Err(error),
    };
    let report = report.with_context(|| format!("make session {session} durable"))?;
    let Some(log) = report
        .logs
        .iter()
        .find(|log| log.session == session.as_str())
    else {
        // The session has no message yet, so the agent has written nothing.
        if !event.transcript().is_some_and(Path::exists) {
            return Ok(format!("session {session} has no transcript yet"));
        }
        return Err(Error::not_found(format!(
            "session {session} does not exist in {}, the directory that the daemon streams",
            root.display()
        )));
    };
    if log.is_branch() {
        return Err(Error::new(
            ErrorKind::Fenced,
            format!(
                "another writer owns session {session}; the latest bytes are durable on branch {}",
                log.writer
            ),
        )
        .hint(branch_hint(session, &log.writer)));
    }
    Ok(format!(
        "session {session} is durable at entry {}",
        log.head
    ))
}

/// Moves a named checkpoint to the end of the session, in the store that the daemon writes to.
async fn move_checkpoint(
    settings: &Settings,
    root: &Path,
    event: &HookEvent,
    name: &str,
) -> Result<()> {
    let Some(session) = event.session() else {
        return Ok(());
    };
    let parts = Parts::build(settings, None).await?;
    let Response::Status(status) = socket::send_request(root, &Request::Status).await? else {
        return Ok(());
    };
    let configured = [
        parts.store.address(),
        parts.logs.namespace.to_string(),
        parts.logs.agent.to_string(),
    ];
    if configured != [status.store.clone(), status.namespace, status.agent] {
        return Err(Error::usage(format!(
            "the daemon streams to {}, but the hook is configured for {}",
            status.store, configured[0]
        )));
    }
    let id = parts.logs.id(LogName::Session(session));
    let end = ResolvedPoint::default();
    match point::create(&parts.logs, &*parts.profile, &id, name, &end).await {
        Err(error) if error.kind() == ErrorKind::Conflict => {
            point::delete(&parts.logs, &id, name).await?;
            point::create(&parts.logs, &*parts.profile, &id, name, &end).await?
        }
        created => created?,
    };
    // The checkpoint is in the store. If the index is slow, a reindex adds it later.
    let _ = tokio::time::timeout(DAEMON_TIMEOUT, update_checkpoints(&parts, &id)).await;
    Ok(())
}

/// Runs blocking work on another thread, so that the deadline still applies.
async fn run_blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|cause| Error::new(ErrorKind::Internal, "run the hook").caused_by(cause))
}
