//! `doctor`: looks at everything once and says what is wrong and what to try.

use std::os::unix::fs::MetadataExt;

use serde::Serialize;

use crate::capture::survey::survey;
use crate::cli::{exit, print};
use crate::config::Settings;
use crate::daemon::socket::{self, Answer, Request};
use crate::error::{Error, Result};
use crate::model::{FileKind, RelPath};
use crate::sys::{Folder, ItemKind};
use crate::wire::Parts;

/// Check store, index, folder and daemon, and explain what is wrong
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
    fn add(&mut self, what: &'static str, grade: Grade, text: impl Into<String>, hint: Option<&str>) {
        self.0.push(Finding { what, grade, text: text.into(), hint: hint.map(str::to_owned) });
    }

    fn wrong(&mut self, what: &'static str, error: &Error) {
        self.add(what, Grade::Wrong, error.to_string(), error.hint_text());
    }
}

/// Does it.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let mut findings = Findings::default();
    match Parts::make(settings, None).await {
        Err(error) => findings.wrong("settings", &error),
        Ok(parts) => {
            folder(&parts, &mut findings);
            store(&parts, &mut findings).await;
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
            print::line(format_args!("{mark} {:<8} {}", finding.what, print::clean(&finding.text)))?;
            if let Some(hint) = &finding.hint {
                print::line(format_args!("               try: {}", print::clean(hint)))?;
            }
        }
    }
    let wrong = findings.0.iter().any(|finding| finding.grade == Grade::Wrong);
    Ok(if wrong { exit::FAILED } else { exit::OK })
}

fn folder(parts: &Parts, findings: &mut Findings) {
    let root = match parts.root() {
        Ok(root) => root,
        Err(error) => return findings.wrong("folder", &error),
    };
    if root.is_symlink() && !root.exists() {
        let text = format!("{} is a link to nowhere", root.display());
        return findings.add("folder", Grade::Wrong, text, Some("make what it points to, or give --root"));
    }
    let Ok(found) = std::fs::metadata(root) else {
        return findings.add(
            "folder",
            Grade::Warn,
            format!("{} does not exist yet", root.display()),
            Some("it is made when the agent, a restore or the daemon starts; --root names another"),
        );
    };
    let me = rustix::process::geteuid();
    if !me.is_root() && found.uid() != me.as_raw() {
        let text = format!("{} belongs to user {} and sessiond runs as {}", root.display(), found.uid(), me.as_raw());
        findings.add("folder", Grade::Wrong, text, Some("run sessiond as the agent's user"));
    }
    if let Err(cause) = rustix::fs::access(root, rustix::fs::Access::WRITE_OK) {
        let text = format!("{} cannot be written: {cause}", root.display());
        findings.add("folder", Grade::Wrong, text, Some("sessiond keeps its ledgers in it; mend its mount or permissions"));
    }
    let Ok(disk) = parts.folder() else { return };
    match survey(&*disk, &*parts.profile, None) {
        Err(error) => findings.wrong("folder", &error),
        Ok(survey) => {
            let sessions = survey.logs.keys().filter(|name| !name.is_project()).count();
            let files: usize = survey.logs.values().map(Vec::len).sum();
            let bytes: u64 = survey.logs.values().flatten().map(|file| file.stat.size).sum();
            let lines = survey.logs.values().flatten().filter(|file| file.kind == FileKind::Append).count();
            let text = format!("{}: {sessions} sessions in {files} files ({lines} transcripts), {}", root.display(), print::bytes(bytes));
            findings.add("folder", Grade::Ok, text, None);
            for oddity in survey.oddities {
                findings.add("folder", Grade::Warn, format!("not kept: {oddity}"), None);
            }
        }
    }
    watches(parts, &*disk, findings);
}

/// Each folder takes a watch; where the limit is too low, sessiond scans instead.
fn watches(parts: &Parts, folder: &dyn Folder, findings: &mut Findings) {
    let limit = std::fs::read_to_string("/proc/sys/fs/inotify/max_user_watches").ok().and_then(|text| text.trim().parse::<usize>().ok());
    let mut open: Vec<Option<RelPath>> = vec![None];
    let mut folders = 0;
    while let Some(at) = open.pop() {
        folders += 1;
        for item in folder.list(at.as_ref()).unwrap_or_default() {
            let path = at.as_ref().map_or_else(|| item.name.parse(), |at| at.join(&item.name));
            if let (ItemKind::Folder, Ok(path)) = (item.kind, path)
                && parts.profile.enter(&path)
            {
                open.push(Some(path));
            }
        }
    }
    match limit {
        Some(limit) if folders * 2 > limit => {
            findings.add(
                "watches",
                Grade::Warn,
                format!("{folders} folders, and the limit of watches is {limit}"),
                Some("sysctl fs.inotify.max_user_watches=524288; until then sessiond scans"),
            );
        }
        _ => findings.add("watches", Grade::Ok, format!("{folders} folders to watch"), None),
    }
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
        format!("{}: {sessions} sessions of {} in namespace {}", parts.store.address(), parts.logs.agent, parts.logs.namespace),
        None,
    );
    match parts.logs.fence.choose(&*parts.store, &parts.logs.chance).await {
        Ok(fence) if fence.word() == "off" => {
            findings.add("fencing", Grade::Warn, "off: two writers of one session may interleave", Some("--fencing auto"))
        }
        Ok(fence) => findings.add("fencing", Grade::Ok, format!("by the {}", fence.word()), None),
        Err(error) => findings.wrong("fencing", &error),
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
                format!("failed at {} (attempt {}) {session}: {}", failure.at, failure.attempt, failure.message),
                None,
            );
        }
    }
}

async fn daemon(parts: &Parts, findings: &mut Findings) {
    let Ok(root) = parts.root() else { return };
    match socket::ask(root, &Request::Status).await {
        Ok(Answer::Status(status)) => {
            let behind: Vec<_> = status.sessions.iter().filter(|log| log.last_error.is_some()).collect();
            findings.add("daemon", Grade::Ok, format!("process {} streams {} logs", status.pid, status.sessions.len()), None);
            for log in behind {
                findings.add(
                    "daemon",
                    Grade::Wrong,
                    format!("{} is behind: {}", log.session, log.last_error.as_deref().unwrap_or_default()),
                    None,
                );
            }
            for log in status.sessions.iter().filter(|log| log.is_branch()) {
                findings.add(
                    "daemon",
                    Grade::Warn,
                    format!("{} was taken over; it goes on as branch {}", log.session, log.writer),
                    Some("sessiond pull ID --branch WRITER"),
                );
            }
        }
        _ => findings.add("daemon", Grade::Warn, format!("none keeps {}", root.display()), Some("sessiond daemon")),
    }
}
