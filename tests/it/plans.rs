//! Plans of Claude Code: a file outside of the session's directories, which the lines of the
//! transcript name.

use std::path::PathBuf;
use std::time::Duration;

use crate::support::TempHome;
use crate::support::backend::{Backend, eventually, transcript};
use crate::support::files::{append, replace, write};
use crate::support::on_each_backend;
use crate::support::world::World;

const SLUG: &str = "misty-foraging-nebula";

/// A line of a session in plan mode.
fn line(session: &str, text: &str) -> String {
    let message = serde_json::json!({ "role": "user", "content": text });
    let line = serde_json::json!({
        "type": "user", "uuid": uuid::Uuid::new_v4().to_string(), "sessionId": session, "slug": SLUG,
        "cwd": "/work/app", "timestamp": "2026-11-18T05:00:00.000Z", "message": message,
    });
    format!("{line}\n")
}

fn plan(home: &TempHome, name: &str) -> PathBuf {
    home.home().join(".claude/plans").join(format!("{name}.md"))
}

fn read(path: PathBuf) -> String {
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

on_each_backend!(a_plan_is_restored_with_its_session);
fn a_plan_is_restored_with_its_session(backend: Backend) {
    let home = TempHome::new();
    append(&transcript(&home, "s1"), line("s1", "plan it"));
    write(&plan(&home, SLUG), "# The plan\n");
    write(&plan(&home, "of-nobody-here"), "not of this session\n");
    backend.run(&home, &["run", "--", "true"]).ok();

    let other = TempHome::new();
    backend.run(&other, &["restore", "s1"]).ok();
    assert_eq!(read(plan(&other, SLUG)), "# The plan\n");
    assert!(!plan(&other, "of-nobody-here").exists());

    // It goes on there: a later version is stored, too, and `verify` accepts it.
    write(&plan(&other, SLUG), "# A better plan\n");
    append(&transcript(&other, "s1"), line("s1", "go on"));
    backend.run(&other, &["run", "--", "true"]).ok();
    let third = TempHome::new();
    backend.run(&third, &["restore", "s1"]).ok();
    assert_eq!(read(plan(&third, SLUG)), "# A better plan\n");
    backend.run(&third, &["verify", "s1"]).ok();
}

on_each_backend!(a_fork_has_a_plan_of_its_own);
fn a_fork_has_a_plan_of_its_own(backend: Backend) {
    let home = TempHome::new();
    append(&transcript(&home, "s1"), line("s1", "plan it"));
    write(&plan(&home, SLUG), "# The plan\n");
    backend.run(&home, &["run", "--", "true"]).ok();
    let fork = "9f8e7d6c-0000-4000-8000-000000000000";
    backend.run(&home, &["fork", "s1", "--id", fork]).ok();
    // The origin goes on with another plan.
    write(&plan(&home, SLUG), "# Another plan\n");
    append(&transcript(&home, "s1"), line("s1", "go on"));
    backend.run(&home, &["run", "--", "true"]).ok();

    backend.run(&home, &["restore", fork]).ok();
    let forked = format!("{SLUG}-9f8e7d6c");
    assert_eq!(read(plan(&home, &forked)), "# The plan\n");
    assert_eq!(read(plan(&home, SLUG)), "# Another plan\n");
    let lines = read(transcript(&home, fork));
    assert!(lines.contains(&format!("\"slug\":\"{forked}\"")), "{lines}");
    backend.run(&home, &["verify", fork]).ok();
}

#[test]
fn a_plan_that_changes_is_uploaded_while_the_session_is_quiet() {
    let mut backend = Backend::file();
    backend.set("SESSIOND_FLUSH_INTERVAL", "100ms");
    let home = TempHome::new();
    append(&transcript(&home, "s1"), line("s1", "plan it"));
    write(&plan(&home, SLUG), "# The plan\n");
    let mut daemon = backend.daemon(&home, &[]);
    backend.run(&home, &["flush", "--wait"]).ok();
    replace(&plan(&home, SLUG), "# Edited by hand\n");
    let other = TempHome::new();
    let to = other.path().join("copy");
    eventually("the edited plan is stored", || {
        let _ = std::fs::remove_dir_all(&to);
        let pulled = backend.run(&other, &["pull", "s1", "--to", &to.to_string_lossy()]);
        let path = to.join("plans").join(format!("{SLUG}.md"));
        pulled.code() == 0
            && std::fs::read_to_string(path).is_ok_and(|text| text.contains("Edited"))
    });
    daemon.kill();
}

#[tokio::test]
async fn a_scan_finds_the_changed_plan_without_an_event() {
    let world = World::new();
    let path = format!("plans/{SLUG}.md");
    world.append("projects/-w/s1.jsonl", line("s1", "plan it"));
    let streamer = world.stream_by_scans();
    world.write(&path, "# The plan\n");
    // The plan exists before the line that reports it.
    world.append("projects/-w/s1.jsonl", line("s1", "written"));
    let wait = Duration::from_secs(20);
    world.wait_for("s1", &path, b"# The plan\n", wait).await;
    world.write(&path, "# A longer plan\n");
    world
        .wait_for("s1", &path, b"# A longer plan\n", wait)
        .await;
    drop(streamer);
}
