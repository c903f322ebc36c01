//! `hook`: what Claude Code calls at its own events, so that a turn ends only when it is durable; and putting it into the
//! agent's settings.
//!
//! Owns the waiting and its bounds. The agent waits for us, so nothing here takes longer than the deadline, fails the agent
//! or says anything that it would read: exit code 2 would make it go on, and what is printed may go to the model. What a hook
//! is told and its environment hold secrets: neither is ever shown.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, IsTerminal, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::CommandFactory;
use tokio::time::Instant;

use crate::agent::claude_code::hooks::{self, Event, Moment};
use crate::agent::claude_code::settings::{self, Hook};
use crate::cli::{Cli, exit, print};
use crate::config::{self, Settings};
use crate::daemon::lock::state_dir;
use crate::daemon::socket::{self, Answer, Request};
use crate::error::{Error, ErrorContext, ErrorKind, Result};
use crate::model::LogName;
use crate::restore::point::{self, ResolvedPoint};
use crate::upkeep::reindex::tell_names;
use crate::wire::{Parts, root_of};

/// A flush takes some ten milliseconds; a store that needs longer than this is in trouble, and the agent goes on.
const DEADLINE: Duration = Duration::from_secs(5);
/// The agent's last line comes up to half a second after its hooks are called.
const LINE_PATIENCE: Duration = Duration::from_secs(2);
/// How often it is looked for.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// A daemon that runs answers at once.
const DAEMON_PATIENCE: Duration = Duration::from_secs(1);
/// Longer than an event with the whole answer of a tool in it.
const LONGEST_EVENT: u64 = 256 << 20;
/// What a client notes behind its last message is shorter.
const TAIL: u64 = 1 << 20;

/// Make a turn end only when it is durable: called by Claude Code at its own events
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  sessiond hook --install --user\n\nWithout --install, --uninstall or --print it reads an event on stdin, prints nothing on stdout and always exits with 0."
)]
pub struct Args {
    /// The agent waits no longer than this, durable or not [default: 5s]
    #[arg(long, env = "SESSIOND_HOOK_DEADLINE", value_name = "TIME")]
    pub deadline: Option<String>,

    /// Also after each tool: what is written by then, which is all but its answer
    #[arg(long, env = "SESSIOND_HOOK_AT_TOOLS")]
    pub at_tools: bool,

    /// At the end of a turn or a session, let this name point to it; a name that is there moves
    #[arg(long, env = "SESSIOND_HOOK_CHECKPOINT", value_name = "NAME")]
    pub checkpoint: Option<String>,

    /// Say on stderr what was done, also when all went well
    #[arg(long, env = "SESSIOND_HOOK_VERBOSE")]
    pub verbose: bool,

    /// Put the hooks into the agent's settings; what is there stays
    #[arg(long, conflicts_with_all = ["uninstall", "print"])]
    pub install: bool,

    /// Take them out again, and nothing else
    #[arg(long, conflicts_with = "print")]
    pub uninstall: bool,

    /// Print what would be put in
    #[arg(long)]
    pub print: bool,

    /// The settings of the user: settings.json in the agent's directory; what happens without a place
    #[arg(long, conflicts_with_all = ["project", "settings"])]
    pub user: bool,

    /// The settings of the project in this directory: .claude/settings.json
    #[arg(long, value_name = "DIR", conflicts_with = "settings")]
    pub project: Option<PathBuf>,

    /// This settings file
    #[arg(long, value_name = "FILE")]
    pub settings: Option<PathBuf>,

    /// With --install and --uninstall: only say what would be done
    #[arg(long)]
    pub dry_run: bool,
}

impl Args {
    /// Whether it is called by the agent.
    pub fn hears(&self) -> bool {
        !(self.install || self.uninstall || self.print)
    }
}

/// Whether arguments that could not be read are those of a hook that the agent calls.
pub fn is_called() -> bool {
    let arguments: Vec<_> = std::env::args_os().collect();
    let person = arguments
        .iter()
        .any(|word| word == "--install" || word == "--uninstall" || word == "--print");
    let read = Cli::command()
        .ignore_errors(true)
        .try_get_matches_from(arguments);
    !person && read.is_ok_and(|read| read.subcommand_name() == Some("hook"))
}

/// Does it.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let deadline = config::duration("--deadline", args.deadline.as_deref(), DEADLINE);
    if !args.hears() {
        return change(settings, &args, deadline?);
    }
    // One that cannot be read must not cost the turn.
    let deadline = deadline.unwrap_or_else(|error| {
        tell(&error.to_string());
        DEADLINE
    });
    let began = Instant::now();
    match tokio::time::timeout(deadline, hear(settings, &args, began + deadline)).await {
        Ok(Ok(Some(done))) if args.verbose => {
            tell(&format!("{done}, after {} ms", began.elapsed().as_millis()))
        }
        Ok(Ok(_)) => {}
        Ok(Err(error)) => tell(&error.to_string()),
        Err(_) => tell(&format!(
            "not durable after {deadline:?}; the daemon goes on trying, sessiond status shows why"
        )),
    }
    Ok(exit::OK)
}

fn tell(text: &str) {
    let _ = writeln!(std::io::stderr(), "sessiond: {}", print::clean(text));
}

/// Does what an event asks for. Answers what a person may want to know; an error says what is not durable.
async fn hear(settings: &Settings, args: &Args, until: Instant) -> Result<Option<String>> {
    let event = aside(read_event).await??;
    let root = match event.transcript().and_then(root_above) {
        Some(root) => root,
        None => root_of(settings)?,
    };
    match event.moment() {
        Moment::Other => Ok(None),
        Moment::Tool if !args.at_tools => Ok(None),
        Moment::Start => is_kept(&root).await.map(|()| None),
        Moment::Tool | Moment::End => {
            // Half of the time is the store's.
            let patience = LINE_PATIENCE.min(until.saturating_duration_since(Instant::now()) / 2);
            let whole = said(&event, patience).await?;
            let done = flush(&root, &event).await?;
            if let (Some(name), Moment::End) = (&args.checkpoint, event.moment()) {
                mark(settings, &root, &event, name)
                    .await
                    .with_context(|| format!("{done}, but has no checkpoint {name}"))?;
            }
            if whole {
                return Ok(Some(done));
            }
            Err(Error::unavailable(format!(
                "{done}, without the last message: it was not in the transcript after {patience:?}"
            )))
        }
    }
}

/// Reads the event from stdin; the agent need not close it behind the line.
fn read_event() -> Result<Event> {
    let odd = || Error::usage("there is no hook event on stdin");
    if std::io::stdin().is_terminal() {
        return Err(Error::usage(
            "hook reads an event of the agent on stdin; sessiond hook --install makes the agent call it",
        ));
    }
    let mut line = Vec::new();
    let mut input = std::io::stdin().lock().take(LONGEST_EVENT);
    while line.trim_ascii().is_empty() {
        line.clear();
        if input.read_until(b'\n', &mut line).map_err(|_| odd())? == 0 {
            break;
        }
    }
    if let Some(event) = Event::read(&line) {
        return Ok(event);
    }
    // Written over several lines, perhaps.
    input.read_to_end(&mut line).map_err(|_| odd())?;
    Event::read(&line).ok_or_else(odd)
}

/// The directory around a transcript that a sessiond keeps.
fn root_above(transcript: &Path) -> Option<PathBuf> {
    transcript
        .ancestors()
        .skip(1)
        .find(|directory| state_dir(directory).is_dir())
        .map(Path::to_owned)
}

async fn is_kept(root: &Path) -> Result<()> {
    let nobody = || {
        Error::unavailable(format!(
            "no daemon keeps {}: this session is not streamed; sessiond daemon starts one",
            root.display()
        ))
    };
    match tokio::time::timeout(DAEMON_PATIENCE, socket::ask(root, &Request::Status)).await {
        Ok(Ok(_)) => Ok(()),
        _ => Err(nobody()),
    }
}

/// Waits until the transcript holds what the agent said last; false if that takes too long.
async fn said(event: &Event, patience: Duration) -> Result<bool> {
    let Some((path, message)) = event.awaited() else {
        return Ok(true);
    };
    let until = Instant::now() + patience;
    let mut seen = None;
    loop {
        let (path, message) = (path.to_owned(), message.to_owned());
        let look = aside(move || look(&path, &message, seen)).await?;
        match look {
            // Without a transcript there is nothing to wait for.
            HookInput::Absent | HookInput::Holds => return Ok(true),
            HookInput::NotYet(now) => seen = Some(now),
        }
        if Instant::now() >= until {
            return Ok(false);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

enum HookInput {
    Absent,
    Holds,
    /// How long it was.
    NotYet(u64),
}

fn look(path: &Path, message: &str, seen: Option<u64>) -> HookInput {
    let read = || -> std::io::Result<HookInput> {
        let mut file = File::open(path)?;
        let len = file.metadata()?.len();
        if seen == Some(len) {
            return Ok(HookInput::NotYet(len));
        }
        // JSON makes it longer, six bytes for one at most.
        let window = TAIL + 6 * message.len() as u64;
        file.seek(SeekFrom::Start(len.saturating_sub(window)))?;
        let mut tail = Vec::new();
        file.take(window).read_to_end(&mut tail)?;
        Ok(if hooks::holds(&tail, message) {
            HookInput::Holds
        } else {
            HookInput::NotYet(len)
        })
    };
    read().unwrap_or(HookInput::Absent)
}

async fn flush(root: &Path, event: &Event) -> Result<String> {
    let Some(session) = event.session() else {
        return Err(Error::usage("the event names no session"));
    };
    let report = match socket::ask(
        root,
        &Request::Flush {
            session: Some(session.clone()),
        },
    )
    .await
    {
        Ok(Answer::Flushed(report)) => report,
        Ok(Answer::Failed { error, kind, .. }) => {
            return Err(Error::new(
                kind,
                format!("session {session} is not durable: {error}"),
            ));
        }
        Ok(Answer::Status(_)) => {
            return Err(Error::new(
                ErrorKind::Internal,
                "flush: the daemon answered something else",
            ));
        }
        Err(error) => return Err(error.context(format_args!("session {session} is not durable"))),
    };
    let Some(log) = report
        .logs
        .iter()
        .find(|log| log.session == session.as_str())
    else {
        // Nothing was said, so nothing was written.
        if !event.transcript().is_some_and(Path::exists) {
            return Ok(format!("session {session} has no transcript yet"));
        }
        return Err(Error::not_found(format!(
            "session {session} is not in {}, which the daemon keeps",
            root.display()
        )));
    };
    if log.is_branch() {
        return Err(Error::new(
            ErrorKind::Fenced,
            format!(
                "session {session} was taken over: it is durable on branch {}",
                log.writer
            ),
        ));
    }
    Ok(format!(
        "session {session} is durable at entry {}",
        log.head
    ))
}

/// Lets a name point to the end of the session, in the store that the daemon writes to.
async fn mark(settings: &Settings, root: &Path, event: &Event, name: &str) -> Result<()> {
    let Some(session) = event.session() else {
        return Ok(());
    };
    let parts = Parts::make(settings, None).await?;
    let Answer::Status(status) = socket::ask(root, &Request::Status).await? else {
        return Ok(());
    };
    let ours = [
        parts.store.address(),
        parts.logs.namespace.to_string(),
        parts.logs.agent.to_string(),
    ];
    if ours
        != [
            status.store.as_str(),
            status.namespace.as_str(),
            status.agent.as_str(),
        ]
    {
        return Err(Error::usage(format!(
            "the daemon keeps it in {}, and the hook was told {}",
            status.store, ours[0]
        )));
    }
    let id = parts.logs.id(LogName::Session(session));
    let end = ResolvedPoint::default();
    match point::name(&parts.logs, &*parts.profile, &id, name, &end).await {
        Err(error) if error.kind() == ErrorKind::Conflict => {
            point::unname(&parts.logs, &id, name).await?;
            point::name(&parts.logs, &*parts.profile, &id, name, &end).await?
        }
        named => named?,
    };
    // The name is in the bucket; an index that does not answer learns of it by a reindex.
    let _ =
        tokio::time::timeout(DAEMON_PATIENCE, tell_names(&parts.logs, &*parts.index, &id)).await;
    Ok(())
}

/// Does what may block on a thread of its own, so that the deadline holds.
async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|cause| Error::new(ErrorKind::Internal, "hook").caused_by(cause))
}

/// Changes the agent's settings, or prints what would be put in.
fn change(where_: &Settings, args: &Args, deadline: Duration) -> Result<u8> {
    let hook = ours(args, deadline)?;
    if args.print {
        print::line(hook.alone()?.trim_end())?;
        return Ok(exit::OK);
    }
    let path = match (&args.settings, &args.project) {
        (Some(file), _) => file.clone(),
        (None, Some(directory)) => directory.join(".claude/settings.json"),
        (None, None) => root_of(where_)?.join("settings.json"),
    };
    // A link to the file stays one.
    let path = path.canonicalize().unwrap_or(path);
    let failed = |cause| Error::named(format!("read {}", path.display()), cause);
    let old = match std::fs::read_to_string(&path) {
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => None,
        read => Some(read.map_err(failed)?),
    };
    let text = old.as_deref().unwrap_or_default();
    let new = if args.install {
        settings::install(text, &hook)
    } else {
        settings::uninstall(text, &hook.program)
    };
    let new = new.with_context(|| format!("change {}", path.display()))?;
    let shown = path.display();
    let Some(new) = new else {
        let so = if args.install {
            "already has the hooks"
        } else {
            "has none of our hooks"
        };
        print::line(format_args!("{shown} {so}: nothing to do"))?;
        return Ok(exit::OK);
    };
    let (put_in, took_out) = if args.dry_run {
        ("would put", "would take")
    } else {
        ("put", "took")
    };
    if !args.dry_run {
        replace(&path, old.as_deref(), &new)
            .map_err(|cause| Error::named(format!("write {shown}"), cause))?;
    }
    if args.install {
        print::line(format_args!(
            "{put_in} hooks into {shown}: {}",
            hook.events().join(", ")
        ))?;
    } else {
        print::line(format_args!("{took_out} our hooks out of {shown}"))?;
    }
    if old.is_some() && !args.dry_run {
        print::line(format_args!(
            "what was there is in {}",
            backup(&path).display()
        ))?;
    }
    Ok(exit::OK)
}

/// Our hook as the agent is to call it.
fn ours(args: &Args, deadline: Duration) -> Result<Hook> {
    let program = std::env::current_exe().map_err(|cause| Error::io("find this program", cause))?;
    let Some(program) = program.to_str() else {
        return Err(Error::usage(format!(
            "{}: settings hold no path that is not UTF-8",
            program.display()
        ))
        .hint("move sessiond elsewhere"));
    };
    let mut flags = Vec::new();
    if let Some(deadline) = &args.deadline {
        flags.extend(["--deadline".to_owned(), deadline.trim().to_owned()]);
    }
    flags.extend(args.at_tools.then(|| "--at-tools".to_owned()));
    if let Some(name) = &args.checkpoint {
        flags.extend([
            "--checkpoint".to_owned(),
            crate::model::point::point_name(name)?,
        ]);
    }
    flags.extend(args.verbose.then(|| "--verbose".to_owned()));
    // The agent kills a hook at its own limit, after 1.5 seconds where a session ends: ours comes first.
    let timeout = deadline.as_secs() + u64::from(deadline.subsec_nanos() > 0) + 1;
    Ok(Hook {
        program: program.to_owned(),
        flags,
        timeout,
        at_tools: args.at_tools,
    })
}

fn backup(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!("{name}.before-sessiond"))
}

/// Puts the new text in place as one, with the owner and mode of the old one, which stays beside it.
fn replace(path: &Path, old: Option<&str>, new: &str) -> std::io::Result<()> {
    let directory = path
        .parent()
        .filter(|directory| !directory.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    std::fs::create_dir_all(directory)?;
    let found = std::fs::metadata(path).ok();
    if let Some(old) = old {
        put(&backup(path), old, found.as_ref())?;
    }
    put(path, new, found.as_ref())?;
    File::open(directory)?.sync_all()
}

fn put(path: &Path, text: &str, like: Option<&std::fs::Metadata>) -> std::io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let beside = path.with_file_name(format!(".{name}.{}", std::process::id()));
    let mode = like.map_or(0o600, |like| like.mode() & 0o777);
    let write = || -> std::io::Result<()> {
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&beside)?;
        file.write_all(text.as_bytes())?;
        if let Some(like) = like
            && file
                .metadata()
                .is_ok_and(|made| (made.uid(), made.gid()) != (like.uid(), like.gid()))
        {
            // Whoever may not give it away keeps it.
            let _ = std::os::unix::fs::fchown(&file, Some(like.uid()), Some(like.gid()));
        }
        file.set_permissions(std::fs::Permissions::from_mode(mode))?;
        file.sync_all()?;
        std::fs::rename(&beside, path)
    };
    write().inspect_err(|_| {
        let _ = std::fs::remove_file(&beside);
    })
}
