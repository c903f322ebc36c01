//! `flush`: asks the running daemon to make everything durable.

use std::path::Path;
use std::time::Duration;

use crate::cli::{exit, print};
use crate::config::{self, Settings};
use crate::daemon::socket::{self, Answer, Request};
use crate::error::{Error, ErrorKind, Result};
use crate::wire::root_of;

/// A person who waits this long wants to know why.
const SAY_EVERY: Duration = Duration::from_secs(5);

/// Make durable what is on disk now
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond flush --wait && echo safe")]
pub struct Args {
    /// Return only when all that was on disk when this was called is durable
    #[arg(long, env = "SESSIOND_WAIT")]
    pub wait: bool,

    /// Only this session (its whole id)
    #[arg(long, env = "SESSIOND_FLUSH_SESSION", value_name = "ID")]
    pub session: Option<String>,

    /// With --wait: fail after this long [default: never]
    #[arg(long, env = "SESSIOND_TIMEOUT", value_name = "TIME")]
    pub timeout: Option<String>,

    /// Print the result as JSON
    #[arg(long, env = "SESSIOND_JSON")]
    pub json: bool,
}

/// Does it.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let root = root_of(settings)?;
    let session = match &args.session {
        None => None,
        Some(text) => Some(whole_id(&root, text).await?),
    };
    let request = Request::Flush {
        session: session.clone(),
    };
    let asking = socket::ask(&root, &request);
    let answer = if args.wait {
        let patience = config::duration(
            "--timeout",
            args.timeout.as_deref(),
            Duration::from_secs(365 * 86400),
        )?;
        let in_time = tokio::select! {
            answer = tokio::time::timeout(patience, asking) => answer,
            never = say_what_is_behind(&root) => Ok(Ok(never)),
        };
        match in_time {
            Ok(answer) => answer?,
            Err(_) => return Err(late(&root).await),
        }
    } else {
        // The daemon goes on without us.
        match tokio::time::timeout(Duration::from_millis(100), asking).await {
            Ok(answer) => answer?,
            Err(_) => return Ok(exit::OK),
        }
    };
    let report = match answer {
        Answer::Flushed(report) => report,
        Answer::Failed { error, hint, kind } => return Err(status_error(error, hint, kind)),
        Answer::Status(_) => {
            return Err(Error::new(
                ErrorKind::Internal,
                "flush: the daemon answered something else",
            ));
        }
    };
    if let Some(session) = session.filter(|_| report.logs.is_empty()) {
        return Err(Error::not_found(format!(
            "flush: session {session} is not in {}",
            root.display()
        ))
        .hint("sessiond status lists what is streamed from there"));
    }
    if args.json {
        print::json(&report)?;
    } else {
        for log in &report.logs {
            let unfinished = if log.unfinished_bytes > 0 {
                format!(
                    ", {} of an unfinished line wait for its end",
                    print::bytes(log.unfinished_bytes)
                )
            } else {
                String::new()
            };
            print::line(format_args!(
                "{}: {} durable at entry {}{unfinished}",
                print::clean(&log.session),
                print::bytes(log.durable_bytes),
                log.head
            ))?;
        }
        if report.logs.is_empty() {
            print::line("everything is durable")?;
        }
    }
    let lost: Vec<_> = report.logs.iter().filter(|log| log.is_branch()).collect();
    for log in &lost {
        print::error(
            &Error::new(
                ErrorKind::Fenced,
                format!(
                    "session {} was taken over: it is durable on branch {}",
                    log.session, log.writer
                ),
            )
            .hint(format!(
                "sessiond pull {} --branch {}",
                log.session, log.writer
            )),
        );
    }
    Ok(if lost.is_empty() {
        exit::OK
    } else {
        exit::FENCED
    })
}

/// The error of a flush that takes too long, with the reason, if one is known.
async fn late(root: &Path) -> Error {
    let why = match socket::ask(root, &Request::Status).await {
        Ok(Answer::Status(status)) => status.sessions.into_iter().find_map(|log| log.last_error),
        _ => None,
    };
    let why = why.map(|why| format!(": {why}")).unwrap_or_default();
    Error::unavailable(format!("flush: not everything is durable yet{why}"))
        .hint("sessiond status shows what is behind")
}

/// Tells a person who waits what is waited for, every now and then.
async fn say_what_is_behind(root: &Path) -> Answer {
    loop {
        tokio::time::sleep(SAY_EVERY).await;
        if let Ok(Answer::Status(status)) = socket::ask(root, &Request::Status).await {
            for log in status
                .sessions
                .iter()
                .filter(|log| log.last_error.is_some())
            {
                let error = log.last_error.as_deref().unwrap_or_default();
                tracing::warn!(
                    session = log.session,
                    attempt = log.failed_attempts,
                    error,
                    "still waiting"
                );
            }
        }
    }
}

/// An error that came over the socket.
pub fn status_error(error: String, hint: Option<String>, kind: ErrorKind) -> Error {
    let failed = Error::new(kind, error);
    match hint {
        Some(hint) => failed.hint(hint),
        None => failed,
    }
}

/// The session of the running daemon that is meant, by the beginning of its id.
async fn whole_id(root: &Path, text: &str) -> Result<crate::model::SessionId> {
    let Answer::Status(status) = socket::ask(root, &Request::Status).await? else {
        return text.parse();
    };
    let ids: Vec<&str> = status
        .sessions
        .iter()
        .map(|log| log.session.as_str())
        .filter(|id| id.starts_with(text))
        .collect();
    match ids.as_slice() {
        _ if ids.contains(&text) => text.parse(),
        [only] => only.parse(),
        // It may have been made a moment ago; the daemon looks for it.
        [] => text.parse(),
        many => Err(Error::usage(format!(
            "{text:?} is the beginning of {} sessions",
            many.len()
        ))
        .hint("give more of the id")),
    }
}
