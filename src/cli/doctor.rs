//! `doctor`: looks at everything once and says what is wrong and what to try.

mod agents;
mod directory;

use bytes::Bytes;
use serde::Serialize;

use crate::cli::{exit, print};
use crate::config::Settings;
use crate::daemon::socket::{self, Answer, Request};
use crate::error::{Error, Result};
use crate::model::keys;
use crate::store::list_objects;
use crate::wire::Parts;

/// Lag that a person should look at; a flush follows a change by a second or so.
const LONG_LAG: f64 = 60.0;

/// Seconds by which clocks may differ: S3 refuses requests at a quarter of an hour.
const CLOCKS_DIFFER: i64 = 60;

/// Check store, index, directory and daemon, and explain what is wrong
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  sessiond doctor --store 's3://bucket/agents?endpoint=http://127.0.0.1:8333'\n\nExits with 1 if anything is wrong."
)]
pub struct Args {
    /// Print the findings as JSON
    #[arg(long, env = "SESSIOND_JSON")]
    pub json: bool,
}

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Grade {
    Ok,
    Warn,
    Wrong,
}

#[derive(Debug, Serialize)]
struct Finding {
    what: &'static str,
    grade: Grade,
    text: String,
    hint: Option<String>,
}

#[derive(Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn add(
        &mut self,
        what: &'static str,
        grade: Grade,
        text: impl Into<String>,
        hint: Option<&str>,
    ) {
        self.0.push(Finding {
            what,
            grade,
            text: text.into(),
            hint: hint.map(str::to_owned),
        });
    }

    fn wrong(&mut self, what: &'static str, error: &Error) {
        self.add(what, Grade::Wrong, error.to_string(), error.hint_text());
    }
}

/// Does it.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let mut findings = Findings::default();
    let parts = Parts::make(settings, None).await;
    agents::look(parts.as_ref().ok(), &mut findings).await;
    match parts {
        Err(error) => findings.wrong("settings", &error),
        Ok(parts) => {
            if let Some(mirror) = &parts.mirror {
                let text = |sessions| {
                    format!(
                        "the rows of {sessions} sessions in the agent's database; left alone: every other table and file"
                    )
                };
                match mirror.check().await {
                    Ok(sessions) => findings.add("kept", Grade::Ok, text(sessions), None),
                    Err(error) => findings.wrong("directory", &error),
                }
            }
            directory::look(&parts, &mut findings);
            store(&parts, &mut findings).await;
            sealing(&parts, &mut findings);
            clock(&parts, &mut findings).await;
            index(&parts, &mut findings).await;
            daemon(&parts, &mut findings).await;
        }
    }
    if args.json {
        print::json(&findings.0)?;
    } else {
        for finding in &findings.0 {
            let mark = match finding.grade {
                Grade::Ok => "ok   ",
                Grade::Warn => "warn ",
                Grade::Wrong => "WRONG",
            };
            print::line(format_args!(
                "{mark} {:<8} {}",
                finding.what,
                print::clean(&finding.text)
            ))?;
            if let Some(hint) = &finding.hint {
                print::line(format_args!("               try: {}", print::clean(hint)))?;
            }
        }
    }
    let wrong = findings
        .0
        .iter()
        .any(|finding| finding.grade == Grade::Wrong);
    Ok(if wrong { exit::FAILED } else { exit::OK })
}

async fn store(parts: &Parts, findings: &mut Findings) {
    let names = match parts.logs.names("").await {
        Ok(names) => names,
        Err(error) => return findings.wrong("store", &error),
    };
    let sessions = names.iter().filter(|name| !name.is_project()).count();
    findings.add(
        "store",
        Grade::Ok,
        format!(
            "{}: {sessions} sessions of {} in namespace {}",
            parts.store.address(),
            parts.logs.agent,
            parts.logs.namespace
        ),
        None,
    );
    match parts
        .logs
        .fence
        .choose(&*parts.store, &parts.logs.rng)
        .await
    {
        Ok(fence) if fence.word() == "off" => findings.add(
            "fencing",
            Grade::Warn,
            "off: two writers of one session may interleave",
            Some("--fencing auto"),
        ),
        Ok(fence) => findings.add(
            "fencing",
            Grade::Ok,
            format!("by the {}", fence.word()),
            None,
        ),
        Err(error) => findings.wrong("fencing", &error),
    }
}

/// Whether what is stored is encrypted, and who of us can read it.
fn sealing(parts: &Parts, findings: &mut Findings) {
    const WHAT: &str = "sealing";
    let (recipients, identities) = parts.keyring.counts();
    let to = format!(
        "what is stored is encrypted to {recipients} {}",
        if recipients == 1 {
            "recipient"
        } else {
            "recipients"
        }
    );
    match (recipients, identities) {
        (0, _) => findings.add(WHAT, Grade::Ok, "off: what is stored is not encrypted by sessiond", None),
        (_, 0) => findings.add(
            WHAT,
            Grade::Ok,
            format!("{to}; no identity is given: only what this directory's own writer wrote can be read here"),
            None,
        ),
        _ if parts.keyring.opens_its_own() => findings.add(WHAT, Grade::Ok, format!("{to}, and the identity that is given opens it"), None),
        _ => findings.add(
            WHAT,
            Grade::Warn,
            format!("{to}, and no identity that is given opens it"),
            Some("add the public key of the identity to --encrypt-to, or the right file to --identity"),
        ),
    }
}

/// Order never rests on a clock; what people see does, and S3 refuses a request whose time is far off.
async fn clock(parts: &Parts, findings: &mut Findings) {
    let key = keys::probe(&format!("clock-{:016x}", parts.logs.rng.next()));
    let asked = async {
        parts
            .store
            .put(&key, Bytes::from_static(b"what time is it?\n"))
            .await?;
        let now = parts.logs.clock.now();
        let listed = list_objects(&*parts.store, &keys::probe_dir(), None).await;
        parts.store.delete(&key).await?;
        Ok::<_, Error>(
            listed?
                .into_iter()
                .find(|object| object.key == key)
                .map(|object| object.modified.as_second() - now.as_second()),
        )
    };
    match asked.await {
        Err(error) => findings.wrong("clock", &error),
        Ok(Some(ahead)) if ahead.abs() > CLOCKS_DIFFER => {
            let text = format!(
                "the store's clock is {} seconds {} ours",
                ahead.abs(),
                if ahead > 0 { "ahead of" } else { "behind" }
            );
            findings.add(
                "clock",
                Grade::Warn,
                text,
                Some("let the machine set its clock (NTP); S3 refuses requests that are 15 minutes off"),
            );
        }
        Ok(_) => findings.add("clock", Grade::Ok, "as the store's", None),
    }
}

async fn index(parts: &Parts, findings: &mut Findings) {
    if let Err(error) = parts.index.ping().await {
        return findings.wrong("index", &error);
    }
    findings.add("index", Grade::Ok, parts.index.address(), None);
    if let Ok(failures) = parts.index.failures(&parts.logs.namespace, 3).await {
        for failure in failures {
            let session = failure.session.unwrap_or_default();
            findings.add(
                "errors",
                Grade::Warn,
                format!(
                    "failed at {} (attempt {}) {session}: {}",
                    failure.at, failure.attempt, failure.message
                ),
                None,
            );
        }
    }
}

async fn daemon(parts: &Parts, findings: &mut Findings) {
    let Ok(root) = parts.root() else { return };
    match socket::ask(root, &Request::Status).await {
        Ok(Answer::Status(status)) => {
            let behind: Vec<_> = status
                .sessions
                .iter()
                .filter(|log| log.last_error.is_some())
                .collect();
            let lag = status
                .sessions
                .iter()
                .map(|log| log.lag_seconds)
                .fold(0.0, f64::max);
            let bytes: u64 = status.sessions.iter().map(|log| log.lag_bytes).sum();
            let text = format!(
                "{} are not durable yet, the oldest since {lag:.0} seconds",
                print::bytes(bytes)
            );
            match bytes {
                0 => findings.add("lag", Grade::Ok, "none: everything is durable", None),
                _ if lag < LONG_LAG => findings.add("lag", Grade::Ok, text, None),
                _ => findings.add(
                    "lag",
                    Grade::Wrong,
                    text,
                    Some("sessiond status says which session; store and index above say why"),
                ),
            }
            findings.add(
                "daemon",
                Grade::Ok,
                format!(
                    "process {} streams {} logs",
                    status.pid,
                    status.sessions.len()
                ),
                None,
            );
            if let Some(error) = &status.database_error {
                findings.add(
                    "lag",
                    Grade::Wrong,
                    format!("the daemon cannot read the agent's database: {error}"),
                    None,
                );
            }
            for log in behind {
                findings.add(
                    "daemon",
                    Grade::Wrong,
                    format!(
                        "{} is behind: {}",
                        log.session,
                        log.last_error.as_deref().unwrap_or_default()
                    ),
                    None,
                );
            }
            for log in status.sessions.iter().filter(|log| log.is_branch()) {
                findings.add(
                    "daemon",
                    Grade::Warn,
                    format!(
                        "{} was taken over; it goes on as branch {}",
                        log.session, log.writer
                    ),
                    Some("sessiond pull ID --branch WRITER"),
                );
            }
        }
        _ => findings.add(
            "daemon",
            Grade::Warn,
            format!("none keeps {}", root.display()),
            Some("sessiond daemon"),
        ),
    }
}
