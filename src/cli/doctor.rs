//! `doctor`: checks the store, the index, the agent and the daemon, and suggests fixes.

mod agents;
mod directory;

use bytes::Bytes;
use serde::Serialize;

use crate::cli::{exit, print};
use crate::config::Settings;
use crate::daemon::socket::{self, Request, Response, Status};
use crate::error::{Error, Result};
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
struct Findings(Vec<Finding>);

impl Findings {
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
    let mut findings = Findings::default();
    let parts = Parts::build(settings, None).await;
    agents::check(parts.as_ref().ok(), &mut findings).await;
    match parts {
        Err(error) => findings.fail("settings", &error),
        Ok(parts) => {
            check_database(&parts, &mut findings).await;
            directory::check(&parts, &mut findings);
            check_store(&parts, &mut findings).await;
            check_encryption(&parts, &mut findings);
            check_clock(&parts, &mut findings).await;
            check_index(&parts, &mut findings).await;
            check_daemon(&parts, &mut findings).await;
        }
    }
    if args.json {
        print::json(&findings.0)?;
    } else {
        findings.0.iter().try_for_each(print_finding)?;
    }
    let has_failed = findings.0.iter().any(|it| it.grade == Grade::Fail);
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
async fn check_database(parts: &Parts, findings: &mut Findings) {
    let Some(mirror) = &parts.mirror else { return };
    match mirror.count_sessions().await {
        Ok(sessions) => findings.ok(
            "files",
            format!(
                "stored: the rows of {} in the agent's database; ignored: all other tables and files",
                print::plural(sessions, "session", "sessions")
            ),
        ),
        Err(error) => findings.fail("directory", &error),
    }
}

async fn check_store(parts: &Parts, findings: &mut Findings) {
    let names = match parts.logs.log_names("").await {
        Ok(names) => names,
        Err(error) => return findings.fail("store", &error),
    };
    let sessions = names.iter().filter(|name| !name.is_project()).count();
    findings.ok(
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
        Ok(fence) if fence.as_str() == "off" => findings.add(
            "fencing",
            Grade::Warn,
            "off: two writers can append to one session at the same time",
            Some("use --fencing auto"),
        ),
        Ok(fence) => findings.ok("fencing", format!("enforced by the {}", fence.as_str())),
        Err(error) => findings.fail("fencing", &error),
    }
}

/// Whether objects are encrypted, and whether a configured identity can decrypt them.
fn check_encryption(parts: &Parts, findings: &mut Findings) {
    const CHECK: &str = "encryption";
    let (recipients, identities) = parts.keyring.counts();
    let on = format!(
        "on, to {}",
        print::plural(recipients, "recipient", "recipients")
    );
    match (recipients, identities) {
        (0, _) => findings.ok(CHECK, "off: sessiond does not encrypt objects"),
        (_, 0) => findings.ok(
            CHECK,
            format!("{on}; no identity: only objects that this machine wrote can be read"),
        ),
        _ if parts.keyring.can_decrypt_new_objects() => {
            findings.ok(CHECK, format!("{on}; the identity can decrypt new objects"));
        }
        _ => findings.add(
            CHECK,
            Grade::Warn,
            format!("{on}; no identity can decrypt new objects"),
            Some("add the identity's public key to --encrypt-to, or the right file to --identity"),
        ),
    }
}

/// The order of entries does not depend on a clock. Displayed times do, and S3 rejects requests
/// whose time is wrong.
async fn check_clock(parts: &Parts, findings: &mut Findings) {
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
        Err(error) => findings.fail("clock", &error),
        Ok(Some(ahead)) if ahead.abs() > MAX_CLOCK_SKEW => {
            let text = format!(
                "the store's clock is {} seconds {} the local clock",
                ahead.abs(),
                if ahead > 0 { "ahead of" } else { "behind" }
            );
            findings.add(
                "clock",
                Grade::Warn,
                text,
                Some("synchronize the local clock with NTP; S3 rejects requests that are 15 minutes off"),
            );
        }
        Ok(_) => findings.ok("clock", "agrees with the store's clock"),
    }
}

async fn check_index(parts: &Parts, findings: &mut Findings) {
    if let Err(error) = parts.index.ping().await {
        return findings.fail("index", &error);
    }
    findings.ok("index", parts.index.address());
    let failures = parts.index.failures(&parts.logs.namespace, MAX_FAILURES);
    for failure in failures.await.unwrap_or_default() {
        let session = failure.session.unwrap_or_default();
        findings.add(
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

async fn check_daemon(parts: &Parts, findings: &mut Findings) {
    let Ok(root) = parts.root() else { return };
    let Ok(Response::Status(status)) = socket::send_request(root, &Request::Status).await else {
        return findings.add(
            "daemon",
            Grade::Warn,
            format!("no sessiond is running for {}", root.display()),
            Some("run \"sessiond daemon\" to start one"),
        );
    };
    check_lag(&status, findings);
    findings.ok(
        "daemon",
        format!(
            "process {} streams {}",
            status.pid,
            print::plural(status.sessions.len(), "log", "logs")
        ),
    );
    if let Some(error) = &status.database_error {
        let text = format!("the daemon cannot read the agent's database: {error}");
        findings.add("lag", Grade::Fail, text, None);
    }
    for log in &status.sessions {
        if let Some(error) = &log.last_error {
            let text = format!("session {} is not durable: {error}", log.session);
            findings.add("daemon", Grade::Fail, text, None);
        }
        if log.is_branch() {
            findings.add(
                "daemon",
                Grade::Warn,
                format!(
                    "another writer owns session {}; its changes go to branch {}",
                    log.session, log.writer
                ),
                Some(&format!(
                    "run \"sessiond pull {} --branch {}\" to fetch the branch",
                    log.session, log.writer
                )),
            );
        }
    }
}

fn check_lag(status: &Status, findings: &mut Findings) {
    let lags = status.sessions.iter().map(|log| log.lag_seconds);
    let seconds = lags.fold(0.0, f64::max);
    let bytes: u64 = status.sessions.iter().map(|log| log.lag_bytes).sum();
    let text = format!(
        "{} not durable yet, the oldest for {}",
        print::bytes(bytes),
        print::plural(seconds.round() as u64, "second", "seconds")
    );
    match bytes {
        0 => findings.ok("lag", "none: everything is durable"),
        _ if seconds < MAX_LAG => findings.ok("lag", text),
        _ => findings.add(
            "lag",
            Grade::Fail,
            text,
            Some("run \"sessiond status\" to see the affected sessions and their last errors"),
        ),
    }
}
