//! `doctor` on homes with known problems.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::support::backend::{Backend, Ran, transcript};
use crate::support::files::append;
use crate::support::on_each_backend;
use crate::support::{TempHome, skip};

const LINE: &str = "{\"type\":\"user\",\"cwd\":\"/work/app\"}\n";

/// Runs it with the programs of the home first on the path.
fn doctor(backend: &Backend, home: &TempHome, arguments: &[&str]) -> Ran {
    let path = format!("{}:/usr/bin:/bin", home.home().join("bin").display());
    Ran(backend
        .command(home, &[&["doctor"], arguments].concat())
        .env("PATH", path)
        .output()
        .unwrap())
}

fn program(home: &TempHome, name: &str, script: &str) {
    let path = home.home().join("bin").join(name);
    append(&path, format!("#!/bin/sh\n{script}\n"));
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

fn has_line(ran: &Ran, line: &str) -> bool {
    ran.out().lines().any(|said| said.contains(line))
}

on_each_backend!(doctor_lists_agents_with_path_version_and_stored_files);
fn doctor_lists_agents_with_path_version_and_stored_files(backend: Backend) {
    let home = TempHome::new();
    program(&home, "claude", "echo '2.1.325 (Claude Code)'");
    // Like the real program, creates a directory in its home.
    program(&home, "gemini", "mkdir -p $HOME/.gemini; echo 0.61.0");
    append(&transcript(&home, "s1"), LINE);
    append(&home.home().join(".claude/.credentials.json"), "{}");
    append(&home.home().join(".codex/auth.json"), "{}");
    let ran = doctor(&backend, &home, &[]);
    assert_eq!(ran.code(), 0, "{}{}", ran.out(), ran.err());
    let here = |directory: &str| home.home().join(directory).display().to_string();
    for line in [
        format!(
            "claude-code: version 2.1.325, in {} (selected)",
            here(".claude")
        ),
        format!("codex: not on the PATH, in {}", here(".codex")),
        "run \"sessiond daemon --agent codex\" to stream it".to_owned(),
        format!(
            "gemini: version 0.61.0, {} does not exist yet",
            here(".gemini")
        ),
        "1 session in 1 file (1 transcript)".to_owned(),
        "stored: projects; ignored: .credentials.json".to_owned(),
        "enforced by the store".to_owned(),
        "agrees with the store's clock".to_owned(),
    ] {
        assert!(has_line(&ran, &line), "{line} is not in\n{}", ran.out());
    }
    assert!(!has_line(&ran, "opencode"), "{}", ran.out());
    assert!(
        !home.home().join(".gemini").exists(),
        "it must leave nothing behind"
    );
    let json = doctor(&backend, &home, &["--json"]).json();
    assert!(
        json.as_array()
            .unwrap()
            .iter()
            .any(|finding| finding["check"] == "agent" && finding["grade"] == "ok"),
        "{json}"
    );
    let _daemon = backend.daemon(&home, &[]);
    backend.run(&home, &["flush", "--wait"]).ok();
    assert!(has_line(
        &doctor(&backend, &home, &[]),
        "none: everything is durable"
    ));
}

#[test]
fn doctor_reports_a_session_in_two_directories() {
    let backend = Backend::file();
    let home = TempHome::new();
    append(&transcript(&home, "s1"), LINE);
    append(&home.home().join(".claude/projects/-other/s1.jsonl"), LINE);
    let ran = doctor(&backend, &home, &[]);
    assert_eq!(ran.code(), 1);
    assert!(
        has_line(
            &ran,
            "session s1 is in 2 directories: projects/-other/s1.jsonl and projects/-work-app/s1.jsonl"
        ),
        "{}",
        ran.out()
    );
}

#[test]
fn doctor_reports_files_the_agent_is_about_to_delete() {
    let backend = Backend::file();
    let home = TempHome::new();
    append(&transcript(&home, "s1"), LINE);
    append(&transcript(&home, "s2"), LINE);
    let aged = |session: &str, days: u64| {
        let time = SystemTime::now() - Duration::from_secs(days * 86_400);
        std::fs::OpenOptions::new()
            .append(true)
            .open(transcript(&home, session))
            .unwrap()
            .set_modified(time)
            .unwrap();
    };
    aged("s1", 20);
    aged("s2", 28);
    let ran = doctor(&backend, &home, &[]);
    assert!(
        has_line(
            &ran,
            "the agent deletes 1 local session within 3 days: it keeps sessions for 30 days"
        ),
        "{}",
        ran.out()
    );
    append(
        &home.home().join(".claude/settings.json"),
        "{\"cleanupPeriodDays\": 22}",
    );
    assert!(has_line(
        &doctor(&backend, &home, &[]),
        "the agent deletes 2 local sessions within 3 days: it keeps sessions for 22 days"
    ));
    std::fs::write(
        home.home().join(".claude/settings.json"),
        "{\"cleanupPeriodDays\": 365}",
    )
    .unwrap();
    assert!(!has_line(&doctor(&backend, &home, &[]), "deletes"));
}

#[test]
fn doctor_reports_files_of_another_user() {
    if !is_root() {
        return skip("only root can give files to somebody else");
    }
    let backend = Backend::file();
    let home = TempHome::new();
    append(&transcript(&home, "s1"), LINE);
    std::os::unix::fs::chown(transcript(&home, "s1"), Some(12345), Some(12345)).unwrap();
    let ran = doctor(&backend, &home, &[]);
    assert_eq!(ran.code(), 1);
    assert!(
        has_line(
            &ran,
            "1 file is not owned by user 0, the owner of the directory, such as projects/-work-app/s1.jsonl"
        ),
        "{}",
        ran.out()
    );
}

fn is_root() -> bool {
    std::os::unix::fs::MetadataExt::uid(&std::fs::metadata(Path::new("/proc/self")).unwrap()) == 0
}

#[test]
fn doctor_reports_an_unreadable_agent_database() {
    let mut backend = Backend::file();
    backend.set("SESSIOND_AGENT", "opencode");
    let home = TempHome::new();
    append(
        &home.home().join(".local/share/opencode/opencode.db"),
        "this is no database, and it is long enough to be looked at by one\n",
    );
    let ran = doctor(&backend, &home, &[]);
    assert_eq!(ran.code(), 1);
    assert!(has_line(&ran, "opencode.db"), "{}", ran.out());
}
