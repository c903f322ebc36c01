//! `show`: the conversation of a session, for a person to read.

use std::io::{IsTerminal, Write};
use std::process::{Child, Command, Stdio};

use clap::builder::BoolishValueParser;

use crate::cli::{exit, print, select};
use crate::config::Settings;
use crate::daemon::signals::Signals;
use crate::error::{Error, Result};
use crate::history::conversation::tool_outcomes;
use crate::history::{
    Conversation, ConversationReader, Extent, Origin, Renderer, Style, ThreadedMessage,
};
use crate::log::errors;
use crate::model::{LogId, SessionFacts};
use crate::operations::index::add_missing;
use crate::sessions::{find, point};
use crate::sys::terminal::guard;
use crate::wire::Parts;

/// Show the conversation of a session
///
/// On a terminal, the output goes through $PAGER, or through less.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  sessiond show 3f2a --last 20
  sessiond show 3f2a --markdown > session.md")]
pub struct Args {
    /// Session ID or unambiguous prefix
    #[arg(value_name = "ID")]
    pub id: String,

    /// The point
    #[arg(long, value_name = "POINT", help = select::AT_HELP)]
    pub at: Option<String>,

    /// The branch
    #[arg(long, value_name = "WRITER", help = select::BRANCH_HELP)]
    pub branch: Option<String>,

    /// Maximum number of messages, from the end [default: all]
    #[arg(long, value_name = "N")]
    pub last: Option<usize>,

    /// Print Markdown
    #[arg(long)]
    pub markdown: bool,

    /// Show thinking, complete tool inputs and results, and system messages
    #[arg(long)]
    pub verbose: bool,

    /// Print a JSON array of messages
    #[arg(long, conflicts_with = "markdown")]
    pub json: bool,

    /// Do not use a pager
    #[arg(
        long,
        env = "SESSIOND_NO_PAGER",
        num_args = 0,
        default_missing_value = "true",
        value_parser = BoolishValueParser::new()
    )]
    pub no_pager: Option<bool>,
}

/// Prints the conversation.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let spec = select::at(args.at.as_deref())?;
    let parts = Parts::build(settings, None).await?;
    let id = find::by_id(&parts.logs, &args.id).await?;
    let branch = select::branch(&parts, &id, args.branch.as_deref()).await?;
    let point = point::resolve_on(&parts.logs, &id, branch.as_ref(), &spec).await?;
    let extent = args.last.map_or(Extent::All, Extent::Last);
    let reader = ConversationReader::new(&parts.logs, &*parts.profile, &id);
    let read = reader
        .read(&point, extent, || Conversation::new(args.verbose))
        .await?;
    if read.head == 0 {
        return Err(errors::not_found(&id));
    }
    let messages = read.visitor.threaded(args.last);
    if args.json {
        print::json(&messages)?;
    } else {
        let origin = reader.origin().await;
        print_messages(&id, (&read.facts, origin.as_ref()), &messages, &args)?;
    }
    add_missing(&parts, &id).await;
    if read.is_removed {
        tracing::warn!(
            "the session was removed; run \"sessiond undelete {}\" to bring it back",
            id.name
        );
    }
    match read.damage {
        None => Ok(exit::OK),
        Some(damage) => {
            print::error(&damage.hint(format!(
                "run \"sessiond verify {}\" to see which point can be restored",
                id.name
            )));
            Ok(exit::CORRUPT)
        }
    }
}

fn print_messages(
    id: &LogId,
    about: (&SessionFacts, Option<&Origin>),
    messages: &[ThreadedMessage],
    args: &Args,
) -> Result<()> {
    let style = Style {
        color: print::colors_stdout() && !args.markdown,
        markdown: args.markdown,
        verbose: args.verbose,
    };
    let mut renderer = Renderer::new(
        style,
        tool_outcomes(messages.iter().map(|threaded| &threaded.message)),
    );
    let uses_pager =
        std::io::stdout().is_terminal() && !args.no_pager.unwrap_or(false) && !args.markdown;
    let mut out = Output::open(uses_pager)?;
    let mut is_open = out.write(&heading(id, about, style))?;
    for threaded in messages {
        is_open = is_open && out.write(&renderer.message(&threaded.message, threaded.depth))?;
    }
    out.close()
}

fn heading(id: &LogId, (facts, origin): (&SessionFacts, Option<&Origin>), style: Style) -> String {
    let title = print::clean(facts.shown_title().unwrap_or("Session"));
    let details = [
        Some(id.name.to_string()),
        origin.map(|origin| format!("fork of {}", print::origin(&origin.session, origin.turn))),
        facts.cwd.clone(),
        facts.model.clone(),
        facts.agent_version.clone(),
    ];
    let details: Vec<String> = details
        .into_iter()
        .flatten()
        .map(|text| print::clean(&text))
        .collect();
    let details = details.join(" · ");
    match (style.markdown, style.color) {
        (true, _) => format!("# {title}\n\n{details}\n\n"),
        (false, true) => format!("\x1b[1m{title}\x1b[0m  \x1b[2m{details}\x1b[0m\n\n"),
        (false, false) => format!("{title}  {details}\n\n"),
    }
}

/// The destination of the text: a pager, or standard output.
enum Output {
    Pager(Child, Signals),
    Stdout,
}

impl Output {
    fn open(uses_pager: bool) -> Result<Output> {
        if !uses_pager {
            return Ok(Output::Stdout);
        }
        let pager = std::env::var("PAGER")
            .ok()
            .filter(|pager| !pager.trim().is_empty())
            .unwrap_or_else(|| "less -R".to_owned());
        let mut command = Command::new("sh");
        command.args(["-c", &pager]).stdin(Stdio::piped());
        if std::env::var_os("LESS").is_none() {
            // With F, less exits immediately if the text fits on one screen.
            command.env("LESS", "FRX");
        }
        // The pager handles Ctrl-C. sessiond exits after the pager.
        let signals = Signals::for_termination()?;
        match command.spawn() {
            Ok(child) => Ok(Output::Pager(child, signals)),
            Err(cause) => {
                tracing::debug!(%cause, "cannot start the pager");
                Ok(Output::Stdout)
            }
        }
    }

    /// Writes text; false if the pager has exited or the pipe is closed.
    fn write(&mut self, text: &str) -> Result<bool> {
        match self {
            Output::Stdout => print::text(text),
            Output::Pager(child, _) => match child
                .stdin
                .as_mut()
                .map(|pipe| pipe.write_all(guard(text).as_bytes()))
            {
                Some(Err(cause)) if cause.kind() != std::io::ErrorKind::BrokenPipe => {
                    Err(Error::io("write to the pager", cause))
                }
                written => Ok(matches!(written, Some(Ok(())))),
            },
        }
    }

    fn close(self) -> Result<()> {
        if let Output::Pager(mut child, _signals) = self {
            drop(child.stdin.take());
            child
                .wait()
                .map_err(|cause| Error::io("wait for the pager", cause))?;
        }
        Ok(())
    }
}
