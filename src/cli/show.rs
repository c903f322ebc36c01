//! `show`: a conversation, for a person to read.

use std::io::{IsTerminal, Write};
use std::process::{Child, Command, Stdio};

use crate::cli::{exit, print, select};
use crate::config::Settings;
use crate::daemon::signals::Signals;
use crate::error::{Error, Result};
use crate::history::conversation::answers;
use crate::history::{Conversation, Renderer, Shown, Style};
use crate::model::{LogId, SessionFacts};
use crate::restore::find;
use crate::restore::point::{self, ResolvedPoint};
use crate::wire::Parts;

/// Show the conversation of a session, through $PAGER on a terminal
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  sessiond show 3f2a --last 20\n  sessiond show 3f2a --markdown > session.md"
)]
pub struct Args {
    /// The session's id, or the beginning of it
    #[arg(value_name = "ID")]
    pub id: String,

    /// The point: latest, turn, turn:N, seq:N, a time, or a checkpoint's number or name [default: latest]
    #[arg(long, env = "SESSIOND_AT", value_name = "POINT")]
    pub at: Option<String>,

    /// Only the last so many messages
    #[arg(long, env = "SESSIOND_LAST", value_name = "N")]
    pub last: Option<usize>,

    /// As Markdown
    #[arg(long, env = "SESSIOND_MARKDOWN")]
    pub markdown: bool,

    /// All of it: thoughts, what tools were given and answered, what the agent added
    #[arg(long, env = "SESSIOND_FULL")]
    pub full: bool,

    /// Print a JSON array of messages
    #[arg(long, env = "SESSIOND_JSON", conflicts_with = "markdown")]
    pub json: bool,

    /// Print it, also on a terminal
    #[arg(long, env = "SESSIOND_NO_PAGER")]
    pub no_pager: bool,
}

/// Does it.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let parts = Parts::make(settings, None).await?;
    let id = find::by_id(&parts.logs, &args.id).await?;
    let ResolvedPoint { at, cut } =
        point::find(&parts.logs, &id, &select::point(args.at.as_deref())?).await?;
    let read = Conversation::read(
        &parts.logs,
        &*parts.profile,
        &id,
        (at, cut.as_ref()),
        args.last,
        args.full,
    )
    .await?;
    if read.head == 0 {
        return Err(find::unknown(&id));
    }
    let (facts, removed, damage) = (read.sink.facts.clone(), read.sink.removed, read.damage);
    let shown = read.sink.ear.shown(args.last);
    if args.json {
        print::json(&shown)?;
    } else {
        read_out(&id, &facts, &shown, &args)?;
    }
    if removed {
        tracing::warn!(
            "the session was removed; sessiond undelete {} brings it back while it can",
            id.name
        );
    }
    match damage {
        None => Ok(exit::OK),
        Some(damage) => {
            print::error(&damage.hint(format!(
                "this is what is sound; sessiond verify {} tells more",
                id.name
            )));
            Ok(exit::CORRUPT)
        }
    }
}

/// For a person.
fn read_out(id: &LogId, facts: &SessionFacts, shown: &[Shown], args: &Args) -> Result<()> {
    let style = Style {
        colour: print::colour() && !args.markdown,
        markdown: args.markdown,
        full: args.full,
    };
    let mut look = Renderer::new(style, answers(shown.iter().map(|shown| &shown.spoken)));
    let mut out = Out::open(std::io::stdout().is_terminal() && !args.no_pager && !args.markdown)?;
    let mut goes_on = out.write(&heading(id, facts, style))?;
    for message in shown {
        goes_on = goes_on && out.write(&look.message(&message.spoken, message.depth))?;
    }
    out.close()
}

fn heading(id: &LogId, facts: &SessionFacts, style: Style) -> String {
    let title = print::clean(facts.title.as_deref().unwrap_or("Session"));
    let about = [
        facts.cwd.as_deref(),
        facts.model.as_deref(),
        facts.agent_version.as_deref(),
    ];
    let about: Vec<String> = about.into_iter().flatten().map(print::clean).collect();
    match (style.markdown, style.colour) {
        (true, _) => format!("# {title}\n\n{} · {}\n\n", id.name, about.join(" · ")),
        (false, true) => format!(
            "\x1b[1m{title}\x1b[0m  \x1b[2m{} · {}\x1b[0m\n\n",
            id.name,
            about.join(" · ")
        ),
        (false, false) => format!("{title}  {} · {}\n\n", id.name, about.join(" · ")),
    }
}

/// Where it goes: to a pager, or to wherever we print.
enum Out {
    Pager(Child, Signals),
    Plain,
}

impl Out {
    fn open(page: bool) -> Result<Out> {
        if !page {
            return Ok(Out::Plain);
        }
        let pager = std::env::var("PAGER")
            .ok()
            .filter(|pager| !pager.trim().is_empty())
            .unwrap_or_else(|| "less -R".to_owned());
        let mut command = Command::new("sh");
        command.args(["-c", &pager]).stdin(Stdio::piped());
        if std::env::var_os("LESS").is_none() {
            // Leaves what fits on the screen there.
            command.env("LESS", "FRX");
        }
        // Ctrl-C is the pager's; it ends, and then so do we.
        let signals = Signals::to_stop()?;
        match command.spawn() {
            Ok(child) => Ok(Out::Pager(child, signals)),
            Err(cause) => {
                tracing::debug!(%cause, "no pager");
                Ok(Out::Plain)
            }
        }
    }

    /// False if nobody reads any more.
    fn write(&mut self, text: &str) -> Result<bool> {
        match self {
            Out::Plain => print::text(text),
            Out::Pager(child, _) => match child
                .stdin
                .as_mut()
                .map(|pipe| pipe.write_all(text.as_bytes()))
            {
                Some(Err(cause)) if cause.kind() != std::io::ErrorKind::BrokenPipe => {
                    Err(Error::io("write to the pager", cause))
                }
                wrote => Ok(matches!(wrote, Some(Ok(())))),
            },
        }
    }

    fn close(self) -> Result<()> {
        if let Out::Pager(mut child, _signals) = self {
            drop(child.stdin.take());
            child
                .wait()
                .map_err(|cause| Error::io("wait for the pager", cause))?;
        }
        Ok(())
    }
}
