//! The command line. A command's file parses its arguments, calls the library once and prints the
//! result.

pub mod adopt;
pub mod branches;
pub mod checkpoints;
pub mod complete;
pub mod config;
pub mod daemon;
pub mod demo;
pub mod diff;
pub mod doctor;
pub mod environment;
pub mod exit;
pub mod export;
pub mod fallback;
pub mod flush;
pub mod fork;
pub mod from_env;
pub mod gc;
pub mod help;
pub mod hook;
pub mod import;
pub mod inspect;
pub mod keygen;
pub mod label;
pub mod lifecycle;
pub mod logging;
pub mod ls;
pub mod manual;
pub mod messages;
pub mod print;
pub mod progress;
pub mod pull;
pub mod reference;
pub mod reindex;
pub mod restore;
pub mod restore_report;
pub mod rm;
pub mod run;
pub mod search;
pub mod select;
pub mod serve;
pub mod serve_store;
pub mod show;
pub mod start;
pub mod stats;
pub mod status;
pub mod table;
pub mod tail;
pub mod time;
pub mod token;
pub mod verify;
pub mod version;

use std::process::ExitCode;

use clap::{ArgMatches, FromArgMatches, Parser, Subcommand};
use clap_complete::CompleteEnv;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};

use crate::config::{LoadedFile, Settings, StreamConfig, load};
use crate::daemon::traces::{self, Exporter, TraceExport, Traces};
use crate::error::{Error, ErrorKind, Result};
use crate::upkeep::status::StatusChange;

/// Keep a coding agent's sessions when its container or machine is lost
///
/// sessiond runs next to a coding agent, streams the agent's session files to object storage, keeps
/// an index of the sessions in a database, and restores the files on the next machine.
#[derive(Debug, Parser)]
#[command(name = "sessiond", version, max_term_width = 100)]
#[command(
    after_help = "Run 'sessiond --help' for the global options, 'sessiond COMMAND --help' for those of a command.

Examples:
  sessiond demo                                              try it: no server, no agent
  sessiond run --request \"$JOB\" -- claude {session-args}     container entrypoint"
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
    Restore(restore::Args),
    Flush(flush::Args),
    Status(status::Args),
    Hook(hook::Args),
    ServeStore(serve_store::Args),
    Serve(serve::Args),
    Ls(ls::Args),
    Show(show::Args),
    Tail(tail::Args),
    Messages(messages::Args),
    Search(search::Args),
    Stats(stats::Args),
    Inspect(inspect::Args),
    Pull(pull::Args),
    Checkpoints(checkpoints::ListArgs),
    Checkpoint(checkpoints::NameArgs),
    Diff(diff::Args),
    Fork(fork::Args),
    Branches(branches::Args),
    Adopt(adopt::Args),
    Label(label::Args),
    Close(lifecycle::CloseArgs),
    Archive(lifecycle::ArchiveArgs),
    Reopen(lifecycle::ReopenArgs),
    Ttl(rm::TtlArgs),
    Rm(rm::RemoveArgs),
    Undelete(rm::UndeleteArgs),
    Export(export::Args),
    Import(import::Args),
    Doctor(doctor::Args),
    Verify(verify::Args),
    Gc(gc::Args),
    Reindex(reindex::Args),
    #[command(subcommand)]
    Config(config::Command),
    Keygen(keygen::Args),
    Token(token::Args),
    Demo(demo::Args),
    Version(version::Args),
    Completions(manual::CompletionsArgs),
    Man(manual::ManArgs),
}

/// Runs the command of the command line and returns its exit code.
pub fn main() -> ExitCode {
    // Other processes of this user, such as the agent, must not read the credentials in the memory
    // and the environment of this one through /proc. This also prevents core dumps.
    let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
    CompleteEnv::with_factory(help::command)
        .var(environment::COMPLETE)
        .complete();
    let color = print::color_choice_of_arguments();
    // Building the definition takes as long as some commands, so it is built once.
    let mut definition = help::command().color(color);
    let parsed = definition
        .try_get_matches_from_mut(std::env::args_os())
        .and_then(|matches| Cli::from_arg_matches(&matches).map(|cli| (cli, matches)));
    let (cli, matches) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => {
            let _ = error.print();
            let code = u8::try_from(error.exit_code()).unwrap_or(exit::USAGE);
            return ExitCode::from(if hook::is_called_by_agent() {
                exit::OK
            } else {
                code
            });
        }
    };
    let is_hook_event = cli.command.is_hook_event();
    match run(cli, &matches, &definition) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            print::error(&error);
            ExitCode::from(if is_hook_event {
                exit::OK
            } else {
                exit::of(error.kind())
            })
        }
    }
}

fn run(cli: Cli, matches: &ArgMatches, definition: &clap::Command) -> Result<u8> {
    let Cli {
        mut settings,
        mut command,
    } = cli;
    let file = if matches!(&command, Command::Config(command) if command.checks_file_only()) {
        None
    } else {
        let default_path = crate::wire::default_config_file();
        load(&mut settings, command.stream(), default_path)?
    };
    print::set_color(settings.output.color.unwrap_or_default());
    let trace_settings = traces::TraceSettings {
        endpoint: settings.telemetry.otlp_endpoint.clone(),
        environment: traces::Environment::read(|name| std::env::var(name).ok()),
    };
    let traces = (command.is_traced() && trace_settings.is_enabled()).then(Traces::new);
    let shares_terminal = matches!(command, Command::Run(_));
    logging::start(&settings.output, shares_terminal, traces.as_ref())?;
    if !command.is_hook_event() {
        environment::warn_about_unknown(definition);
    }
    if let Some(file) = file.as_ref().filter(|file| file.is_exposed) {
        tracing::warn!(
            "other users can read {}, which has a password; run \"chmod 600\" on it",
            file.path.display()
        );
    }
    // Two threads: one decompresses or hashes while the other waits for the store. More threads
    // would only use more memory.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    let runtime = runtime
        .map_err(|cause| Error::new(ErrorKind::Internal, "start the runtime").caused_by(cause))?;
    let code = runtime.block_on(async {
        let exporter = match &traces {
            Some(traces) => {
                let ca_file = settings.network.ca_file.as_deref();
                Exporter::new(&trace_settings, traces, ca_file).await?
            }
            None => None,
        };
        let export = TraceExport::start(exporter);
        // Boxed, because the futures of the commands would not fit into the stack of a small thread.
        let code = Box::pin(dispatch(settings, command, matches, file.as_ref())).await;
        export.finish().await;
        code
    });
    // A request that hangs must not keep the process from exiting.
    runtime.shutdown_background();
    code
}

impl Command {
    /// Whether the command flushes or restores.
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

    /// Whether the agent calls the command as a hook: then nothing may fail the agent.
    fn is_hook_event(&self) -> bool {
        matches!(self, Command::Hook(args) if args.handles_event())
    }

    fn stream(&mut self) -> Option<&mut StreamConfig> {
        match self {
            Command::Run(args) => Some(&mut args.stream),
            Command::Daemon(args) => Some(&mut args.stream),
            Command::ServeStore(args) => Some(&mut args.stream),
            Command::Config(config::Command::Show(args)) => Some(&mut args.stream),
            Command::Config(config::Command::Validate(args)) => Some(&mut args.stream),
            _ => None,
        }
    }
}

async fn dispatch(
    settings: Settings,
    command: Command,
    matches: &ArgMatches,
    file: Option<&LoadedFile>,
) -> Result<u8> {
    match command {
        Command::Run(args) => run::run(&settings, args).await,
        Command::Daemon(args) => daemon::run(&settings, args).await,
        Command::Restore(args) => restore::run(&settings, args).await,
        Command::Flush(args) => flush::run(&settings, args).await,
        Command::Status(args) => status::run(&settings, args).await,
        Command::Hook(args) => hook::run(&settings, args).await,
        Command::ServeStore(args) => serve_store::run(&settings, args).await,
        Command::Serve(args) => serve::run(&settings, args).await,
        Command::Ls(args) => ls::run(&settings, args).await,
        Command::Show(args) => show::run(&settings, args).await,
        Command::Tail(args) => tail::run(&settings, args).await,
        Command::Messages(args) => messages::run(&settings, args).await,
        Command::Search(args) => search::run(&settings, args).await,
        Command::Stats(args) => stats::run(&settings, args).await,
        Command::Inspect(args) => inspect::run(&settings, args).await,
        Command::Pull(args) => pull::run(&settings, args).await,
        Command::Checkpoints(args) => checkpoints::list(&settings, args).await,
        Command::Checkpoint(args) => checkpoints::name(&settings, args).await,
        Command::Diff(args) => diff::run(&settings, args).await,
        Command::Fork(args) => fork::run(&settings, args).await,
        Command::Branches(args) => branches::run(&settings, args).await,
        Command::Adopt(args) => adopt::run(&settings, args).await,
        Command::Label(args) => label::run(&settings, args).await,
        Command::Close(args) => lifecycle::run(&settings, &args.id, StatusChange::Close).await,
        Command::Archive(args) => lifecycle::run(&settings, &args.id, StatusChange::Archive).await,
        Command::Reopen(args) => lifecycle::run(&settings, &args.id, StatusChange::Reopen).await,
        Command::Ttl(args) => rm::ttl(&settings, args).await,
        Command::Rm(args) => rm::remove(&settings, args).await,
        Command::Undelete(args) => rm::undelete(&settings, args).await,
        Command::Export(args) => export::run(&settings, args).await,
        Command::Import(args) => import::run(&settings, args).await,
        Command::Doctor(args) => doctor::run(&settings, args).await,
        Command::Verify(args) => verify::run(&settings, args).await,
        Command::Gc(args) => gc::run(&settings, args).await,
        Command::Reindex(args) => reindex::run(&settings, args).await,
        Command::Config(command) => config::run(&settings, command, matches, file).await,
        Command::Keygen(args) => keygen::run(&args),
        Command::Token(args) => token::run(&args),
        Command::Demo(args) => demo::run(args),
        Command::Version(args) => version::run(&args),
        Command::Completions(args) => manual::completions(&args),
        Command::Man(args) => manual::man(&args),
    }
}
