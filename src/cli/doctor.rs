//! `doctor`: checks the store, the index, the agent and the daemon, and suggests fixes.

mod agents;
mod directory;

use bytes::Bytes;
use serde::Serialize;

use crate::cli::{exit, print};
use crate::config::Settings;
use crate::daemon::socket::{self, DaemonStatus, Request, Response};
use crate::error::{Error, Result};
use crate::log::writer::branch_hint;
use crate::model::keys;
use crate::store::{delete_temporary, list_objects};
use crate::wire::Parts;

/// Lag in seconds above which the check fails. A flush normally follows a change within a second or
/// two.
const MAX_LAG: f64 = 60.0;

/// Clock skew in seconds above which the check warns. S3 rejects requests at 15 minutes.
const MAX_CLOCK_SKEW: i64 = 60;

/// Number of recent failures to show.
const MAX_FAILURES: u32 = 3;

/// Check the store, index, agent directory and daemon, and suggest fixes
///
/// Exits with 1 if a check fails.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  sessiond doctor --store 's3://bucket/agents?endpoint=http://127.0.0.1:8333'"
)]
pub struct Args {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Grade {
    Ok,
    Warn,
    Fail,
}

#[derive(Debug, Serialize)]
struct Finding {
    check: &'static str,
    grade: Grade,
    text: String,
    hint: Option<String>,
}

#[derive(Default)]
struct DoctorReport(Vec<Finding>);

impl DoctorReport {
    fn add(
        &mut self,
        check: &'static str,
        grade: Grade,
        text: impl Into<String>,
        hint: Option<&str>,
    ) {
        self.0.push(Finding {
            check,
            grade,
            text: text.into(),
            hint: hint.map(str::to_owned),
        });
    }

    fn ok(&mut self, check: &'static str, text: impl Into<String>) {
        self.add(check, Grade::Ok, text, None);
    }

    fn fail(&mut self, check: &'static str, error: &Error) {
        self.add(check, Grade::Fail, error.to_string(), error.hint_text());
    }
}

/// Runs the checks.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let mut report = DoctorReport::default();
    let parts = Parts::build(settings, None).await;
    agents::check(parts.as_ref().ok(), &mut report).await;
    match parts {
        Err(error) => report.fail("settings", &error),
        Ok(parts) => {
            check_database(&parts, &mut report).await;
            directory::check(&parts, &mut report);
            check_store(&parts, &mut report).await;
            check_encryption(&parts, &mut report);
            check_signatures(&parts, &mut report);
            check_clock(&parts, &mut report).await;
            check_index(&parts, &mut report).await;
            check_daemon(&parts, &mut report).await;
        }
    }
    if args.json {
        print::json(&report.0)?;
    } else {
        report.0.iter().try_for_each(print_finding)?;
    }
    let has_failed = report.0.iter().any(|it| it.grade == Grade::Fail);
    Ok(if has_failed { exit::FAILED } else { exit::OK })
}

fn print_finding(finding: &Finding) -> Result<()> {
    let (mark, color) = match finding.grade {
        Grade::Ok => ("ok  ", "\x1b[32m"),
        Grade::Warn => ("warn", "\x1b[33m"),
        Grade::Fail => ("FAIL", "\x1b[1;31m"),
    };
    let (color, reset) = match print::colors_stdout() {
        true => (color, "\x1b[0m"),
        false => ("", ""),
    };
    print::line(format_args!(
        "{color}{mark}{reset} {:<10} {}",
        finding.check,
        print::clean(&finding.text)
    ))?;
    match &finding.hint {
        Some(hint) => print::line(format_args!("     hint: {}", print::clean(hint))),
        None => Ok(()),
    }
}

/// The agent's database, if it stores its sessions in one.
async fn check_database(parts: &Parts, report: &mut DoctorReport) {
    let Some(mirror) = &parts.mirror else { return };
    match mirror.count_sessions().await {
        Ok(sessions) => report.ok(
            "files",
            format!(
                "stored: the rows of {} in the agent's database; ignored: all other tables and files",
                print::plural(sessions, "session", "sessions")
            ),
        ),
        Err(error) => report.fail("directory", &error),
    }
}

async fn check_store(parts: &Parts, report: &mut DoctorReport) {
    let names = match parts.logs.log_names("").await {
        Ok(names) => names,
        Err(error) => return report.fail("store", &error),
    };
    let sessions = names.iter().filter(|name| !name.is_project()).count();
    report.ok(
        "store",
        format!(
            "{}: {} of {} in namespace {}",
            parts.store.address(),
            print::plural(sessions, "session", "sessions"),
            parts.logs.agent,
            parts.logs.namespace
        ),
    );
    match parts
        .logs
        .fence
        .choose(&*parts.store, &parts.logs.rng)
        .await
    {
        Ok(fence) if fence.as_str() == "off" => report.add(
            "fencing",
            Grade::Warn,
            "off: two writers can append to one session at the same time",
            Some("use --fencing auto"),
        ),
        Ok(fence) => report.ok("fencing", format!("enforced by the {}", fence.as_str())),
        Err(error) => report.fail("fencing", &error),
    }
}

/// Whether objects are encrypted, and whether a configured identity can decrypt them.
fn check_encryption(parts: &Parts, report: &mut DoctorReport) {
    const CHECK: &str = "encryption";
    let (recipients, identities) = parts.keyring.counts();
    let on = format!(
        "on, to {}",
        print::plural(recipients, "recipient", "recipients")
    );
    match (recipients, identities) {
        (0, _) => report.ok(CHECK, "off: sessiond does not encrypt objects"),
        (_, 0) => report.ok(
            CHECK,
            format!("{on}; no identity: only objects that this machine wrote can be read"),
        ),
        _ if parts.keyring.can_decrypt_new_objects() => {
            report.ok(CHECK, format!("{on}; the identity can decrypt new objects"));
        }
        _ => report.add(
            CHECK,
            Grade::Warn,
            format!("{on}; no identity can decrypt new objects"),
            Some("add the identity's public key to --encrypt-to, or the right file to --identity"),
        ),
    }
}

/// Whether objects are signed, and whose signatures are accepted.
fn check_signatures(parts: &Parts, report: &mut DoctorReport) {
    const CHECK: &str = "signatures";
    let (trusted, signs) = parts.logs.store.signatures().summary();
    let keys = print::plural(trusted, "trusted key", "trusted keys");
    match (trusted, signs) {
        (0, false) => report.ok(CHECK, "off: objects are neither signed nor checked"),
        (0, true) => report.add(
            CHECK,
            Grade::Warn,
            "new objects are signed, but unsigned objects are accepted".to_owned(),
            Some("set --trust-key to the public keys of all writers"),
        ),
        (_, false) => report.ok(
            CHECK,
            format!("{keys}; no signing key: this machine only reads"),
        ),
        (_, true) => report.ok(CHECK, format!("{keys}; new objects are signed")),
    }
}

/// The order of entries does not depend on a clock. Displayed times do, and S3 rejects requests
/// whose time is wrong.
async fn check_clock(parts: &Parts, report: &mut DoctorReport) {
    let key = keys::probe(&format!("clock-{:016x}", parts.logs.rng.next()));
    let measure = async {
        parts
            .store
            .put(&key, Bytes::from_static(b"clock check\n"))
            .await?;
        let now = parts.logs.clock.now();
        let listed = list_objects(&*parts.store, &keys::probe_dir(), None).await;
        delete_temporary(&*parts.store, &key).await?;
        Ok::<_, Error>(
            listed?
                .into_iter()
                .find(|object| object.key == key)
                .map(|object| object.modified.as_second() - now.as_second()),
        )
    };
    match measure.await {
        Err(error) => report.fail("clock", &error),
        Ok(Some(ahead)) if ahead.abs() > MAX_CLOCK_SKEW => {
            let text = format!(
                "the store's clock is {} seconds {} the local clock",
                ahead.abs(),
                if ahead > 0 { "ahead of" } else { "behind" }
            );
            report.add(
                "clock",
                Grade::Warn,
                text,
                Some("synchronize the local clock with NTP; S3 rejects requests that are 15 minutes off"),
            );
        }
        Ok(_) => report.ok("clock", "agrees with the store's clock"),
    }
}

async fn check_index(parts: &Parts, report: &mut DoctorReport) {
    if let Err(error) = parts.index.ping().await {
        return report.fail("index", &error);
    }
    report.ok("index", parts.index.address());
    let failures = parts.index.failures(&parts.logs.namespace, MAX_FAILURES);
    for failure in failures.await.unwrap_or_default() {
        let session = failure.session.unwrap_or_default();
        report.add(
            "errors",
            Grade::Warn,
            format!(
                "{} {session} attempt {}: {}",
                print::time(failure.at),
                failure.attempt,
                failure.message
            ),
            None,
        );
    }
}

async fn check_daemon(parts: &Parts, report: &mut DoctorReport) {
    let Ok(root) = parts.root() else { return };
    let status = match socket::send_request(root, &Request::Status).await {
        Ok(Response::Status(status)) => status,
        Err(error) if !error.to_string().contains(socket::NOT_RUNNING) => {
            return report.add("daemon", Grade::Fail, error.to_string(), error.hint_text());
        }
        _ => {
            return report.add(
                "daemon",
                Grade::Warn,
                format!("{} for {}", socket::NOT_RUNNING, root.display()),
                Some("run \"sessiond daemon\" to start one"),
            );
        }
    };
    check_lag(&status, report);
    report.ok(
        "daemon",
        format!(
            "process {} streams {}",
            status.pid,
            print::plural(status.sessions.len(), "log", "logs")
        ),
    );
    if let Some(error) = &status.database_error {
        let text = format!("the daemon cannot read the agent's database: {error}");
        report.add("lag", Grade::Fail, text, None);
    }
    for log in &status.sessions {
        if let Some(error) = &log.last_error {
            let text = format!("session {} is not durable: {error}", log.session);
            report.add("daemon", Grade::Fail, text, None);
        }
        if log.is_branch() {
            report.add(
                "daemon",
                Grade::Warn,
                format!(
                    "another writer owns session {}; its changes go to branch {}",
                    log.session, log.writer
                ),
                Some(&branch_hint(&log.session, &log.writer)),
            );
        }
    }
}

fn check_lag(status: &DaemonStatus, report: &mut DoctorReport) {
    let lags = status.sessions.iter().map(|log| log.lag_seconds);
    let seconds = lags.fold(0.0, f64::max);
    let bytes: u64 = status.sessions.iter().map(|log| log.lag_bytes).sum();
    let text = format!(
        "{} not durable yet, the oldest for {}",
        print::bytes(bytes),
        print::plural(seconds.round() as u64, "second", "seconds")
    );
    match bytes {
        0 => report.ok("lag", "none: everything is durable"),
        _ if seconds < MAX_LAG => report.ok("lag", text),
        _ => report.add(
            "lag",
            Grade::Fail,
            text,
            Some("run \"sessiond status\" to see the affected sessions and their last errors"),
        ),
    }
}
