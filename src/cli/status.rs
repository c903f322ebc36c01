//! `status`: how the running daemon stands.

use crate::cli::{exit, flush, print};
use crate::config::Settings;
use crate::daemon::socket::{self, Answer, Request};
use crate::error::{Error, ErrorKind, Result};
use crate::wire::root_of;

/// Show each session's lag, head, writer and last error
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  sessiond status --json | jq '.sessions[] | select(.lag_bytes > 0)'"
)]
pub struct Args {
    /// Print it as JSON
    #[arg(long, env = "SESSIOND_JSON")]
    pub json: bool,
}

/// Does it.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let root = root_of(settings)?;
    let status = match socket::ask(&root, &Request::Status).await? {
        Answer::Status(status) => status,
        Answer::Failed { error, hint, kind } => return Err(flush::status_error(error, hint, kind)),
        Answer::Flushed(_) => {
            return Err(Error::new(
                ErrorKind::Internal,
                "status: the daemon answered something else",
            ));
        }
    };
    if args.json {
        print::json(&status)?;
        return Ok(exit::OK);
    }
    print::line(format_args!(
        "sessiond {} (process {}) keeps {} of agent {}",
        status.version, status.pid, status.root, status.agent
    ))?;
    print::line(format_args!(
        "store    {} (fencing: {})",
        status.store, status.fencing
    ))?;
    let index = match (status.index_answers, status.index_waiting) {
        (true, 0) => String::new(),
        (true, waiting) => format!(" ({waiting} to catch up)"),
        (false, waiting) => format!(" (does not answer; {waiting} to catch up)"),
    };
    print::line(format_args!("index    {}{index}", status.index))?;
    if let Some(error) = &status.database_error {
        print::line(format_args!(
            "database {}; what is in it waits",
            print::clean(error)
        ))?;
    }
    let rows: Vec<Vec<String>> = status
        .sessions
        .iter()
        .map(|log| {
            let lag = if log.lag_bytes == 0 {
                "-".to_owned()
            } else {
                format!(
                    "{} for {:.1}s",
                    print::bytes(log.lag_bytes),
                    log.lag_seconds
                )
            };
            let error = log.last_error.as_ref().map_or_else(String::new, |error| {
                format!("attempt {}: {error}", log.failed_attempts)
            });
            vec![
                log.session.clone(),
                lag,
                print::bytes(log.durable_bytes),
                log.head.to_string(),
                log.target.clone(),
                log.writer.chars().take(8).collect(),
                error,
            ]
        })
        .collect();
    print::line("")?;
    print::table(
        &[
            "SESSION",
            "LAG",
            "DURABLE",
            "HEAD",
            "WRITES TO",
            "AS",
            "LAST ERROR",
        ],
        &rows,
    )?;
    Ok(exit::OK)
}
