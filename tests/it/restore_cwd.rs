//! `restore --cwd`: a session restored for another working directory, also where local files exist
//! already.

use std::path::PathBuf;

use crate::support::TempHome;
use crate::support::backend::{Backend, eventually};
use crate::support::files::{Files, append, files_below};
use crate::support::on_each_backend;

const LINE: &str = "{\"type\":\"user\",\"cwd\":\"/work/app\",\"message\":{\"content\":\"hi\"}}\n";
const MORE: &str = "{\"type\":\"user\",\"cwd\":\"/else\",\"message\":{\"content\":\"more\"}}\n";

/// A home that contains the session.
struct SessionHome(TempHome);

impl SessionHome {
    fn new() -> SessionHome {
        SessionHome(TempHome::new())
    }

    fn transcript(&self, project: &str) -> PathBuf {
        self.0
            .home()
            .join(format!(".claude/projects/{project}/s1.jsonl"))
    }

    /// The files of the session, and the names of files that were moved aside.
    fn files(&self) -> (Files, Vec<String>) {
        let aside = files_below(&self.0.home().join(".claude/.sessiond/aside"));
        (
            files_below(&self.0.home().join(".claude")),
            aside
                .into_keys()
                .map(|path| path.split_once('/').unwrap().1.to_owned())
                .collect(),
        )
    }
}

/// A session with a side file, in the project of `/work/app`.
fn stored(backend: &Backend) -> SessionHome {
    let here = SessionHome::new();
    append(&here.transcript("-work-app"), LINE.repeat(5));
    append(
        &here
            .0
            .home()
            .join(".claude/projects/-work-app/s1/tool-results/big.txt"),
        "large",
    );
    append(&here.0.home().join(".claude/tasks/s1/1.json"), "{}");
    backend.run(&here.0, &["run", "--", "true"]).ok();
    here
}

/// The files of the session in the project of `/else`.
fn moved(lines: &str) -> Files {
    [
        ("projects/-else/s1.jsonl", lines),
        ("projects/-else/s1/tool-results/big.txt", "large"),
        ("tasks/s1/1.json", "{}"),
    ]
    .map(|(path, text)| (path.to_owned(), text.as_bytes().to_vec()))
    .into()
}

on_each_backend!(a_session_restored_with_cwd_stays_in_the_new_project);
fn a_session_restored_with_cwd_stays_in_the_new_project(backend: Backend) {
    stored(&backend);
    let here = SessionHome::new();
    let plan = backend
        .run(
            &here.0,
            &["restore", "s1", "--cwd", "/else", "--dry-run", "--json"],
        )
        .ok()
        .json();
    assert!(
        plan[0]["files"]
            .to_string()
            .contains("projects/-else/s1.jsonl"),
        "{plan}"
    );
    assert!(here.files().0.is_empty());
    backend
        .run(&here.0, &["restore", "s1", "--cwd", "/else"])
        .ok();
    assert_eq!(here.files(), (moved(&LINE.repeat(5)), vec![]));
    // Nothing was appended yet, but the log has the move.
    let other = SessionHome::new();
    backend.run(&other.0, &["pull", "s1", "--to", "copy"]).ok();
    let copy = files_below(&other.0.home().join("copy"));
    assert_eq!(copy, moved(&LINE.repeat(5)), "{}", backend.name);

    append(&here.transcript("-else"), MORE);
    backend
        .run(
            &here.0,
            &["run", "--session", "s1", "--cwd", "/else", "--", "true"],
        )
        .ok();
    let whole = moved(&(LINE.repeat(5) + MORE));
    assert_eq!(here.files(), (whole.clone(), vec![]));
    let other = SessionHome::new();
    backend.run(&other.0, &["restore", "s1"]).ok();
    assert_eq!(other.files(), (whole, vec![]));
    backend.run(&other.0, &["verify", "s1", "--deep"]).ok();
    let row = || backend.run(&other.0, &["ls", "--json"]).ok().json()["sessions"][0].clone();
    eventually("the index knows the project", || {
        row()["project"] == "-else" && row()["messages"] == 6
    });
    // A point before the move is still in its old project, and can be moved too.
    let back = SessionHome::new();
    backend
        .run(
            &back.0,
            &["restore", "s1", "--at", "seq:2", "--cwd", "/else"],
        )
        .ok();
    assert_eq!(back.files(), (moved(&LINE.repeat(5)), vec![]));
    append(&back.transcript("-else"), LINE);
    backend
        .run(&back.0, &["run", "--session", "s1", "--", "true"])
        .ok();
    backend.run(&SessionHome::new().0, &["restore", "s1"]).ok();
    backend.run(&back.0, &["verify", "s1", "--deep"]).ok();
}

#[test]
fn restore_with_cwd_moves_local_files_with_unsaved_bytes() {
    let backend = Backend::file();
    let here = stored(&backend);
    append(&here.transcript("-work-app"), MORE);
    backend
        .run(&here.0, &["restore", "s1", "--cwd", "/else"])
        .ok();
    let whole = moved(&(LINE.repeat(5) + MORE));
    assert_eq!(here.files(), (whole.clone(), vec![]));
    backend.run(&here.0, &["run", "--", "true"]).ok();
    let other = SessionHome::new();
    backend.run(&other.0, &["restore", "s1"]).ok();
    assert_eq!(other.files(), (whole, vec![]));
}

#[test]
fn a_second_copy_is_moved_aside_and_never_lost() {
    let backend = Backend::file();
    let here = stored(&backend);
    // Another home moves it and continues; here it is still in its old project.
    let other = SessionHome::new();
    backend
        .run(&other.0, &["restore", "s1", "--cwd", "/else"])
        .ok();
    append(&other.transcript("-else"), MORE);
    backend.run(&other.0, &["run", "--", "true"]).ok();
    let output = backend.run(&here.0, &["restore", "s1"]).ok().out();
    assert!(output.contains("a second copy of the session"), "{output}");
    let (files, aside) = here.files();
    assert_eq!(aside, ["projects/-work-app/s1.jsonl"]);
    assert!(!here.transcript("-work-app").exists(), "{:?}", files.keys());
    assert_eq!(
        std::fs::read_to_string(here.transcript("-else")).unwrap(),
        LINE.repeat(5) + MORE
    );

    // Also if nothing was written since and nothing has to be read.
    std::fs::create_dir_all(here.transcript("-copy").parent().unwrap()).unwrap();
    std::fs::copy(here.transcript("-else"), here.transcript("-copy")).unwrap();
    backend.run(&here.0, &["restore", "s1"]).ok();
    assert!(!here.transcript("-copy").exists() && here.transcript("-else").exists());
    std::fs::create_dir_all(here.transcript("-copy").parent().unwrap()).unwrap();
    std::fs::copy(here.transcript("-else"), here.transcript("-copy")).unwrap();
    append(&here.transcript("-copy"), "{\"something\":\"else\"}\n");
    backend
        .run(&here.0, &["restore", "s1"])
        .fails(7, "projects/-copy/s1.jsonl", "--force");

    // A copy with other content stays, and is reported.
    let third = SessionHome::new();
    append(&third.transcript("-third"), "{\"something\":\"else\"}\n");
    backend
        .run(&third.0, &["restore", "s1"])
        .fails(7, "projects/-third/s1.jsonl", "--force");
    assert_eq!(third.files().0.len(), 1);
    backend.run(&third.0, &["restore", "s1", "--force"]).ok();
    assert_eq!(
        third.files(),
        (
            moved(&(LINE.repeat(5) + MORE)),
            vec!["projects/-third/s1.jsonl".to_owned()]
        )
    );
}

#[test]
fn a_session_moved_by_the_agent_offline_stays_there() {
    let backend = Backend::file();
    let here = stored(&backend);
    std::fs::create_dir_all(here.transcript("-else").parent().unwrap()).unwrap();
    std::fs::rename(here.transcript("-work-app"), here.transcript("-else")).unwrap();
    append(&here.transcript("-else"), MORE);
    backend
        .run(&here.0, &["run", "--session", "s1", "--", "true"])
        .ok();
    assert_eq!(here.files(), (moved(&(LINE.repeat(5) + MORE)), vec![]));
    let other = SessionHome::new();
    backend.run(&other.0, &["restore", "s1"]).ok();
    assert_eq!(other.files(), (moved(&(LINE.repeat(5) + MORE)), vec![]));
}

#[test]
fn cwd_works_for_other_agents_or_is_rejected() {
    const ID: &str = "ab8e5c29-79c7-46e5-a392-565ddbd51310";
    let backend = Backend::file();
    let begun = SessionHome::new();
    let line = format!("{{\"sessionId\":\"{ID}\"}}\n");
    let gemini = |project: &str| {
        begun.0.home().join(format!(
            ".gemini/tmp/{project}/chats/session-2026-11-16T13-47-ab8e5c29.jsonl"
        ))
    };
    append(&gemini("app"), &line);
    append(
        &begun
            .0
            .home()
            .join(format!(".gemini/tmp/app/tool-outputs/session-{ID}/1.txt")),
        "large",
    );
    backend
        .run(&begun.0, &["run", "--agent", "gemini", "--", "true"])
        .ok();
    // In the same home: nothing stays in the old project.
    backend
        .run(
            &begun.0,
            &[
                "restore",
                ID,
                "--agent",
                "gemini",
                "--cwd",
                "/work/My Other",
            ],
        )
        .ok();
    assert!(!gemini("app").exists());
    assert_eq!(std::fs::read_to_string(gemini("my-other")).unwrap(), line);
    let output = begun.0.home().join(format!(
        ".gemini/tmp/my-other/tool-outputs/session-{ID}/1.txt"
    ));
    assert_eq!(std::fs::read_to_string(output).unwrap(), "large");

    // Codex searches all its directories.
    let rollout = format!("sessions/2026/11/16/rollout-2026-11-16T13-47-53-{ID}.jsonl");
    append(&begun.0.home().join(".codex").join(&rollout), "{}\n");
    backend
        .run(&begun.0, &["run", "--agent", "codex", "--", "true"])
        .ok();
    let other = SessionHome::new();
    backend
        .run(
            &other.0,
            &["restore", ID, "--agent", "codex", "--cwd", "/else"],
        )
        .ok();
    assert_eq!(
        files_below(&other.0.home().join(".codex"))
            .into_keys()
            .collect::<Vec<_>>(),
        [rollout]
    );

    // Where `--cwd` is not supported, it is rejected.
    for agent in ["opencode", "generic"] {
        backend
            .run(
                &other.0,
                &[
                    "restore", ID, "--agent", agent, "--root", "here", "--cwd", "/else",
                ],
            )
            .fails(2, agent, "remove --cwd");
    }
}
