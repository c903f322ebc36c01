//! The command line: arguments → one call into the library → print. One verb per file.

pub mod checkpoints;
pub mod daemon;
pub mod demo;
pub mod diff;
pub mod doctor;
pub mod exit;
pub mod export;
pub mod fallback;
pub mod flush;
pub mod fork;
pub mod from_env;
pub mod gc;
pub mod hook;
pub mod import;
pub mod inspect;
pub mod installed;
pub mod keygen;
pub mod label;
pub mod life;
pub mod ls;
pub mod manual;
pub mod messages;
pub mod print;
pub mod progress;
pub mod pull;
pub mod reindex;
pub mod restore;
pub mod rm;
pub mod run;
pub mod search;
pub mod select;
pub mod serve_store;
pub mod show;
pub mod start;
pub mod stats;
pub mod status;
pub mod tail;
pub mod verify;
pub mod when;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Parser, Subcommand};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{ParseError, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::config::{self, LogFormat, Settings, Stream};
use crate::daemon::traces::{self, Exporter, Telling, Traces};
use crate::error::{Error, ErrorKind, Result};
use crate::upkeep::status::StatusChange;

/// Makes a coding agent's conversation outlive the machine it ran on.
///
/// sessiond runs beside the agent, streams what it writes to object storage with an index in a database, and puts the
/// files back before the agent launches elsewhere.
#[derive(Debug, Parser)]
#[command(
    name = "sessiond",
    version,
    propagate_version = true,
    max_term_width = 100
)]
#[command(
    after_help = "Try it, with no server and no agent:\n  sessiond demo\n\nIn a container's entrypoint:\n  sessiond run --session \"$ID\" -- claude --resume \"$ID\""
)]
pub struct Cli {
    #[command(flatten)]
    settings: Settings,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(run::Args),
    Daemon(daemon::Args),
    ServeStore(serve_store::Args),
    Restore(restore::Args),
    Pull(pull::Args),
    Flush(flush::Args),
    Status(status::Args),
    Hook(hook::Args),
    Ls(ls::Args),
    Checkpoints(checkpoints::ListArgs),
    Checkpoint(checkpoints::NameArgs),
    Inspect(inspect::Args),
    Diff(diff::Args),
    ForkOrigin(fork::Args),
    Show(show::Args),
    Tail(tail::Args),
    Messages(messages::Args),
    Search(search::Args),
    Stats(stats::Args),
    Rm(rm::RemoveArgs),
    Undelete(rm::UndeleteArgs),
    Ttl(rm::TtlArgs),
    Label(label::Args),
    Close(life::CloseArgs),
    Archive(life::ArchiveArgs),
    Reopen(life::ReopenArgs),
    Gc(gc::Args),
    Export(export::Args),
    Import(import::Args),
    Verify(verify::Args),
    Reindex(reindex::Args),
    Doctor(doctor::Args),
    Keygen(keygen::Args),
    Demo(demo::Args),
    Completions(manual::CompletionsArgs),
    Man(manual::ManArgs),
}

/// Reads the command line, does what it says, and answers the exit code.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            let code = u8::try_from(error.exit_code()).unwrap_or(exit::USAGE);
            return ExitCode::from(if hook::is_called() { exit::OK } else { code });
        }
    };
    let heard = matches!(&cli.command, Command::Hook(args) if args.hears());
    match run(cli) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            print::error(&error);
            ExitCode::from(if heard {
                exit::OK
            } else {
                exit::of(error.kind())
            })
        }
    }
}

fn run(cli: Cli) -> Result<u8> {
    let Cli {
        mut settings,
        mut command,
    } = cli;
    config::fill_from_file(
        &mut settings,
        command.stream(),
        crate::wire::default_config_file(),
    )?;
    let asked = traces::Asked {
        endpoint: settings
            .otlp_endpoint
            .clone()
            .filter(|url| !url.trim().is_empty()),
        environment: traces::Environment::read(|name| std::env::var(name).ok()),
    };
    let traces = (command.is_traced() && asked.wanted()).then(Traces::new);
    start_logging(
        &settings,
        matches!(command, Command::Run(_)),
        traces.as_ref(),
    )?;
    // Two threads: one can inflate or hash while the other speaks to the store. More would only cost memory.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    let runtime = runtime
        .map_err(|cause| Error::new(ErrorKind::Internal, "start the runtime").caused_by(cause))?;
    let code = runtime.block_on(async {
        let exporter = match &traces {
            Some(traces) => Exporter::of(&asked, traces, settings.ca_file.as_deref()).await?,
            None => None,
        };
        let telling = Telling::start(exporter);
        let code = dispatch(settings, command).await;
        telling.finish().await;
        code
    });
    // A request that hangs must not keep us from leaving.
    runtime.shutdown_background();
    code
}

impl Command {
    /// Whether it flushes or restores.
    fn is_traced(&self) -> bool {
        matches!(
            self,
            Command::Run(_)
                | Command::Daemon(_)
                | Command::ServeStore(_)
                | Command::Restore(_)
                | Command::Pull(_)
        )
    }

    fn stream(&mut self) -> Option<&mut Stream> {
        match self {
            Command::Run(args) => Some(&mut args.stream),
            Command::Daemon(args) => Some(&mut args.stream),
            Command::ServeStore(args) => Some(&mut args.stream),
            _ => None,
        }
    }
}

async fn dispatch(settings: Settings, command: Command) -> Result<u8> {
    match command {
        Command::Run(args) => run::run(&settings, args).await,
        Command::Daemon(args) => daemon::run(&settings, args).await,
        Command::ServeStore(args) => serve_store::run(&settings, args).await,
        Command::Restore(args) => restore::run(&settings, args).await,
        Command::Pull(args) => pull::run(&settings, args).await,
        Command::Flush(args) => flush::run(&settings, args).await,
        Command::Status(args) => status::run(&settings, args).await,
        Command::Hook(args) => hook::run(&settings, args).await,
        Command::Ls(args) => ls::run(&settings, args).await,
        Command::Checkpoints(args) => checkpoints::list(&settings, args).await,
        Command::Checkpoint(args) => checkpoints::name(&settings, args).await,
        Command::Inspect(args) => inspect::run(&settings, args).await,
        Command::Diff(args) => diff::run(&settings, args).await,
        Command::ForkOrigin(args) => fork::run(&settings, args).await,
        Command::Show(args) => show::run(&settings, args).await,
        Command::Tail(args) => tail::run(&settings, args).await,
        Command::Messages(args) => messages::run(&settings, args).await,
        Command::Search(args) => search::run(&settings, args).await,
        Command::Stats(args) => stats::run(&settings, args).await,
        Command::Rm(args) => rm::remove(&settings, args).await,
        Command::Undelete(args) => rm::undelete(&settings, args).await,
        Command::Ttl(args) => rm::ttl(&settings, args).await,
        Command::Label(args) => label::run(&settings, args).await,
        Command::Close(args) => life::run(&settings, &args.id, StatusChange::Close).await,
        Command::Archive(args) => life::run(&settings, &args.id, StatusChange::Archive).await,
        Command::Reopen(args) => life::run(&settings, &args.id, StatusChange::Reopen).await,
        Command::Gc(args) => gc::run(&settings, args).await,
        Command::Export(args) => export::run(&settings, args).await,
        Command::Import(args) => import::run(&settings, args).await,
        Command::Verify(args) => verify::run(&settings, args).await,
        Command::Reindex(args) => reindex::run(&settings, args).await,
        Command::Doctor(args) => doctor::run(&settings, args).await,
        Command::Keygen(args) => keygen::run(&args),
        Command::Demo(args) => demo::run(args),
        Command::Completions(args) => manual::completions(&args),
        Command::Man(args) => manual::man(&args),
    }
}

fn start_logging(
    settings: &Settings,
    beside_an_agent: bool,
    traces: Option<&Arc<Traces>>,
) -> Result<()> {
    // An agent that draws on the terminal shares it with us: only trouble is told there.
    let quiet = beside_an_agent && std::io::stderr().is_terminal();
    let level = settings
        .log
        .as_deref()
        .unwrap_or(if quiet || settings.quiet {
            "warn"
        } else {
            "info"
        });
    // The libraries below us are only heard when they are in trouble; what keeps AWS's from credentials or a region is in our error.
    let level = if level.trim().is_empty() {
        "info"
    } else {
        level
    };
    let directives = if level.contains(['=', ',']) {
        level.to_owned()
    } else {
        format!("warn,aws_config=error,sessiond={level}")
    };
    let filter: Targets = directives.parse().map_err(|cause: ParseError| {
        Error::usage(format!("read --log {level:?}"))
            .caused_by(cause)
            .hint("use error, warn, info, debug, or sessiond=debug")
    })?;
    let colour = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_target(false);
    let lines = match settings.log_format.unwrap_or_default() {
        LogFormat::Text => lines.with_ansi(colour).with_filter(filter).boxed(),
        LogFormat::Json => lines
            .json()
            .flatten_event(true)
            .with_ansi(false)
            .with_filter(filter)
            .boxed(),
    };
    let layers: Vec<_> = traces
        .map(Traces::layer)
        .into_iter()
        .chain([lines])
        .collect();
    tracing_subscriber::registry().with(layers).init();
    Ok(())
}
