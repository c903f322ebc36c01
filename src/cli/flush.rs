//! `flush`: makes the running daemon upload everything that is on disk.

use std::path::Path;
use std::time::Duration;

use crate::capture::FlushReport;
use crate::cli::{exit, print};
use crate::config::{self, Settings};
use crate::daemon::socket::{self, Request, Response};
use crate::error::{Error, ErrorKind, Result};
use crate::log::writer::branch_hint;
use crate::model::SessionId;
use crate::wire::agent_root;

/// How often a waiting `flush` logs why sessions are not durable yet.
const LOG_INTERVAL: Duration = Duration::from_secs(5);

/// How long `flush` without --wait waits for the daemon to accept the request.
const ACCEPT_TIMEOUT: Duration = Duration::from_millis(100);

/// How long a `flush` that timed out waits for the reason.
const REASON_TIMEOUT: Duration = Duration::from_secs(1);

/// The default of --timeout: a year, in practice no timeout.
const NO_TIMEOUT: Duration = Duration::from_secs(365 * 86400);

/// Without --timeout, `flush --wait` fails if the daemon has not responded for this long: it is
/// stopped (SIGSTOP) or hangs. A daemon that responds is waited for, however long the store is
/// unavailable.
const UNRESPONSIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// Make the running daemon upload everything that is on disk
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond flush --wait && echo durable")]
pub struct Args {
    /// Return only when everything that is on disk now is durable
    #[arg(long)]
    pub wait: bool,

    /// Only this session, by ID or unambiguous prefix [default: all]
    #[arg(long, value_name = "ID")]
    pub session: Option<String>,

    /// With --wait: fail after this time [default: 20s without a response]
    #[arg(long, value_name = "TIME")]
    pub timeout: Option<String>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Flushes, and prints what is durable.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let timeout = config::duration("--timeout", args.timeout.as_deref(), NO_TIMEOUT)?;
    let root = agent_root(settings)?;
    let session = match &args.session {
        None => None,
        Some(prefix) => {
            let find = tokio::time::timeout(timeout, find_session(&root, prefix));
            match find.await {
                Ok(session) => Some(session?),
                Err(_) => return Err(timeout_error(&root).await),
            }
        }
    };
    let response = if args.wait {
        let gives_up = args.timeout.is_none();
        request_and_wait(&root, session.clone(), timeout, gives_up).await?
    } else {
        let request = flush_request(session.clone());
        let request = socket::send_request(&root, &request);
        match tokio::time::timeout(ACCEPT_TIMEOUT, request).await {
            Ok(response) => response?,
            // The daemon flushes without a waiting client.
            Err(_) => return Ok(exit::OK),
        }
    };
    let report = match response {
        Response::Flushed(report) => report,
        other => return Err(response_error(other)),
    };
    if let Some(session) = session.filter(|_| report.logs.is_empty()) {
        return Err(Error::not_found(format!(
            "session {session} does not exist in {}",
            root.display()
        ))
        .hint("run \"sessiond status\" to list the sessions that are streamed"));
    }
    if args.json {
        print::json(&report)?;
    } else {
        print_report(&report)?;
    }
    Ok(print_branches(&report))
}

fn flush_request(session: Option<SessionId>) -> Request {
    Request::Flush { session }
}

async fn request_and_wait(
    root: &Path,
    session: Option<SessionId>,
    timeout: Duration,
    gives_up: bool,
) -> Result<Response> {
    let request = flush_request(session);
    let request = tokio::time::timeout(timeout, socket::send_request(root, &request));
    let result = tokio::select! {
        response = request => response,
        unresponsive = watch_daemon(root, gives_up) => return Err(unresponsive),
    };
    match result {
        Ok(response) => response,
        Err(_) => Err(timeout_error(root).await),
    }
}

fn print_report(report: &FlushReport) -> Result<()> {
    if report.logs.is_empty() {
        return print::line("everything is durable");
    }
    for log in &report.logs {
        let partial_line = match log.partial_line_bytes {
            0 => String::new(),
            bytes => format!(
                ", {} of a partial line not uploaded yet",
                print::bytes(bytes)
            ),
        };
        let position = match log.is_branch() {
            true => format!("on branch {}", print::clean(&log.writer)),
            false => format!("at entry {}", log.head),
        };
        print::line(format_args!(
            "{}: {} durable {position}{partial_line}",
            print::clean(&log.session),
            print::bytes(log.durable_bytes)
        ))?;
    }
    Ok(())
}

/// Prints an error for every session that is durable on a branch only, and returns the exit code.
fn print_branches(report: &FlushReport) -> u8 {
    let mut code = exit::OK;
    for log in report.logs.iter().filter(|log| log.is_branch()) {
        code = exit::FENCED;
        let error = format!(
            "another writer owns session {}; the latest bytes are durable on branch {}",
            log.session, log.writer
        );
        print::error(
            &Error::new(ErrorKind::Fenced, error).hint(branch_hint(&log.session, &log.writer)),
        );
    }
    code
}

/// The error for a flush that timed out, with the daemon's last error if there is one.
async fn timeout_error(root: &Path) -> Error {
    let status = socket::send_request(root, &Request::Status);
    let reason = match tokio::time::timeout(REASON_TIMEOUT, status).await {
        Ok(Ok(Response::Status(status))) => {
            status.sessions.into_iter().find_map(|log| log.last_error)
        }
        Ok(_) => None,
        Err(_) => Some("the daemon does not respond".to_owned()),
    };
    let reason = reason
        .map(|reason| format!(": {reason}"))
        .unwrap_or_default();
    Error::unavailable(format!("not everything is durable yet{reason}"))
        .hint("run \"sessiond status\" to see which sessions are not durable")
}

/// Logs the errors of the daemon periodically. With `gives_up`, returns the error of a daemon that
/// no longer responds.
async fn watch_daemon(root: &Path, gives_up: bool) -> Error {
    let mut responded = tokio::time::Instant::now();
    loop {
        tokio::time::sleep(LOG_INTERVAL).await;
        let status = match socket::send_request(root, &Request::Status).await {
            Ok(Response::Status(status)) => status,
            Ok(_) => continue,
            Err(error) if gives_up && responded.elapsed() >= UNRESPONSIVE_TIMEOUT => {
                return error.context("wait for the flush");
            }
            Err(error) => {
                tracing::warn!(%error, "not durable yet; waiting");
                continue;
            }
        };
        responded = tokio::time::Instant::now();
        for log in &status.sessions {
            if let Some(error) = &log.last_error {
                let (session, attempt) = (&log.session, log.failed_attempts);
                tracing::warn!(session, attempt, error, "not durable yet; waiting");
            }
        }
    }
}

/// The error for a response that is not the expected one.
pub fn response_error(response: Response) -> Error {
    match response {
        Response::Failed { error, hint, kind } => {
            let error = Error::new(kind, error);
            match hint {
                Some(hint) => error.hint(hint),
                None => error,
            }
        }
        Response::Flushed(_) | Response::Status(_) => Error::new(
            ErrorKind::Internal,
            "the daemon sent the response to another request",
        ),
    }
}

/// The session of the running daemon with this ID or prefix.
async fn find_session(root: &Path, prefix: &str) -> Result<SessionId> {
    let Response::Status(status) = socket::send_request(root, &Request::Status).await? else {
        return prefix.parse();
    };
    let ids: Vec<&str> = status
        .sessions
        .iter()
        .map(|log| log.session.as_str())
        .filter(|id| id.starts_with(prefix))
        .collect();
    match ids.as_slice() {
        _ if ids.contains(&prefix) => prefix.parse(),
        [only] => only.parse(),
        // The session may be too new for the status; the daemon scans for it.
        [] => prefix.parse(),
        many => Err(Error::usage(format!(
            "ambiguous session ID {prefix:?}: it is a prefix of {} sessions",
            many.len()
        ))
        .hint("use more characters of the ID")),
    }
}
