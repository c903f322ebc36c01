//! `status`: the state of the running daemon.

use crate::cli::table::Table;
use crate::cli::{exit, flush, print};
use crate::config::Settings;
use crate::daemon::socket::{self, DaemonStatus, Request, Response};
use crate::error::Result;
use crate::wire::agent_root;

/// Show the lag, head, writer and last error of each session
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  sessiond status
  sessiond status --json | jq '.sessions[] | select(.lag_bytes > 0)'")]
pub struct Args {
    /// Print complete session IDs on a terminal
    #[arg(long)]
    pub full: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Prints the status.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let root = agent_root(settings)?;
    let status = match socket::send_request(&root, &Request::Status).await? {
        Response::Status(status) => status,
        other => return Err(flush::response_error(other)),
    };
    if args.json {
        print::json(&status)?;
    } else {
        print_status(&status, args.full)?;
    }
    Ok(exit::OK)
}

fn print_status(status: &DaemonStatus, full: bool) -> Result<()> {
    print::line(format_args!(
        "sessiond {} (process {}) streams {} of agent {}",
        status.version, status.pid, status.root, status.agent
    ))?;
    print::line(format_args!(
        "store    {} (fencing: {})",
        status.store, status.fencing
    ))?;
    let updates = print::plural(status.index_backlog, "update", "updates");
    let index = match (status.index_reachable, status.index_backlog) {
        (true, 0) => String::new(),
        (true, _) => format!(" ({updates} pending)"),
        (false, _) => format!(" (unreachable, {updates} pending)"),
    };
    let losses = match status.index_losses {
        0 => String::new(),
        count => format!(
            " (lost its entries {}; the daemon sends them again)",
            print::plural(count, "time", "times")
        ),
    };
    print::line(format_args!("index    {}{index}{losses}", status.index))?;
    if let Some(error) = &status.database_error {
        print::line(format_args!(
            "database unreadable, its changes are not uploaded: {}",
            print::clean(error)
        ))?;
    }
    print::line("")?;
    if status.sessions.is_empty() {
        return print::line(format_args!("no sessions in {}", status.root));
    }
    let ids: Vec<&str> = status
        .sessions
        .iter()
        .map(|log| log.session.as_str())
        .collect();
    let rows: Vec<Vec<String>> = status
        .sessions
        .iter()
        .map(|log| {
            let id = match print::shortens_ids(full) {
                true => print::short_id(&log.session, ids.iter().copied()),
                false => log.session.clone(),
            };
            let lag = match log.lag_bytes {
                0 => "-".to_owned(),
                bytes => format!("{} for {:.1}s", print::bytes(bytes), log.lag_seconds),
            };
            let error = log.last_error.as_ref().map_or_else(String::new, |error| {
                format!("attempt {}: {error}", log.failed_attempts)
            });
            vec![
                id,
                lag,
                print::bytes(log.durable_bytes),
                log.head.to_string(),
                log.write_target.clone(),
                log.writer.chars().take(8).collect(),
                error,
            ]
        })
        .collect();
    Table::new(&[
        "SESSION",
        "LAG",
        "DURABLE",
        "HEAD",
        "TARGET",
        "WRITER",
        "LAST ERROR",
    ])
    .flexible(&[6])
    .optional(&[5])
    .print(&rows)
}
