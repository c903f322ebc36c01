//! Damaged transcripts: the bucket keeps them as they are, and `--repair` removes the damage from
//! what the agent gets.

use std::path::PathBuf;

use crate::support::TempHome;
use crate::support::backend::{Backend, transcript};
use crate::support::files::{append, files_below};
use crate::support::on_each_backend;

const PATH: &str = "projects/-work-app/s1.jsonl";

fn record(n: u32) -> String {
    format!(
        "{{\"type\":\"user\",\"uuid\":\"u{n}\",\"timestamp\":\"2026-05-01T10:00:0{n}.000Z\",\"cwd\":\"/work/app\",\"message\":{{\"content\":\"prompt {n}\"}}}}"
    )
}

/// A torn line glued to the next, zeros, two records on one line, and a partial last line.
fn damaged() -> String {
    format!(
        "{}\n{}{}\n\0\0\0\0{}\n{}{}\n{}",
        record(1),
        &record(2)[..30],
        record(2),
        record(3),
        record(4),
        record(5),
        record(6)
    )
}

fn undamaged_lines(to: u32) -> String {
    (1..=to).map(|n| format!("{}\n", record(n))).collect()
}

fn text(path: PathBuf) -> String {
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The files that were moved aside in the agent's directory.
fn files_moved_aside(root: PathBuf) -> Vec<String> {
    let kept = root.join(".sessiond/aside");
    if !kept.exists() {
        return Vec::new();
    }
    files_below(&kept)
        .into_values()
        .map(|bytes| String::from_utf8(bytes).unwrap())
        .collect()
}

on_each_backend!(a_repaired_transcript_continues_and_the_log_keeps_the_original);
fn a_repaired_transcript_continues_and_the_log_keeps_the_original(backend: Backend) {
    let home = TempHome::new();
    append(&transcript(&home, "s1"), damaged());
    backend.run(&home, &["run", "--", "true"]).ok();
    let stored = backend.run(&home, &["ls", "--json"]).ok().json()["sessions"][0]["head"]
        .as_u64()
        .unwrap();

    // Without `--repair`, everything is restored up to the last complete line.
    let plain = TempHome::new();
    backend.run(&plain, &["restore", "s1", "--dry-run"]).ok();
    let copy = |home: &TempHome, arguments: &[&str]| {
        let to = home.home().join(format!("copy{}", arguments.len()));
        backend
            .run(
                home,
                &[&["pull", "s1", "--to", to.to_str().unwrap()], arguments].concat(),
            )
            .ok();
        to
    };
    assert_eq!(text(copy(&plain, &[]).join(PATH)), damaged());
    let view = copy(&plain, &["--repair"]);
    assert_eq!(
        (text(view.join(PATH)), files_moved_aside(view)),
        (undamaged_lines(6), vec![damaged()])
    );

    let other = TempHome::new();
    let output = backend
        .run(&other, &["restore", "s1", "--repair", "--dry-run"])
        .ok()
        .out();
    assert!(
        output.contains("line 2, byte ") && !transcript(&other, "s1").exists(),
        "{output}"
    );
    let output = backend
        .run(&other, &["restore", "s1", "--repair"])
        .ok()
        .out();
    for change in [
        "30 bytes of a torn record",
        "line 3, ",
        "4 zero bytes",
        "split 2 records",
        "line 5, ",
        "added the newline at the end",
        ".damaged",
    ] {
        assert!(output.contains(change), "{change} is not in\n{output}");
    }
    assert_eq!(text(transcript(&other, "s1")), undamaged_lines(6));
    assert_eq!(files_moved_aside(other.home().join(".claude")), [damaged()]);

    // The agent continues from the repaired transcript, and so does the log. The original is still
    // restorable at its seq.
    append(&transcript(&other, "s1"), format!("{}\n", record(7)));
    backend.run(&other, &["run", "--", "true"]).ok();
    let third = TempHome::new();
    backend.run(&third, &["restore", "s1"]).ok();
    assert_eq!(
        text(transcript(&third, "s1")),
        undamaged_lines(7),
        "on {}",
        backend.name
    );
    assert_eq!(
        text(copy(&third, &["--at", &format!("seq:{stored}")]).join(PATH)),
        damaged()
    );
    backend.run(&third, &["verify", "s1"]).ok();
    let messages = backend
        .run(&third, &["messages", "s1", "--json"])
        .ok()
        .out();
    assert_eq!(
        (1..=7)
            .map(|n| messages.matches(&format!("\"u{n}\"")).count())
            .collect::<Vec<_>>(),
        [1; 7],
        "{messages}"
    );
}

#[test]
fn repair_fixes_local_files_in_place() {
    let backend = Backend::file();
    let home = TempHome::new();
    append(
        &transcript(&home, "s1"),
        format!("{}\n{}\n", record(1), record(2)),
    );
    backend.run(&home, &["run", "--", "true"]).ok();
    // Nothing to repair: nothing is moved aside.
    backend.run(&home, &["restore", "s1", "--repair"]).ok();
    assert_eq!(
        (
            text(transcript(&home, "s1")),
            files_moved_aside(home.home().join(".claude"))
        ),
        (undamaged_lines(2), vec![])
    );
    // More was written, and the agent was killed during a write.
    append(
        &transcript(&home, "s1"),
        format!("\0\0{}\n{}", record(3), &record(4)[..20]),
    );
    let was = text(transcript(&home, "s1"));
    backend
        .run(
            &home,
            &[
                "run",
                "--session",
                "s1",
                "--repair",
                "--",
                "sh",
                "-c",
                "wc -l < ~/.claude/projects/-work-app/s1.jsonl > ~/lines",
            ],
        )
        .ok();
    assert_eq!(
        (
            text(transcript(&home, "s1")),
            text(home.home().join("lines"))
        ),
        (undamaged_lines(3), "3\n".to_owned())
    );
    assert_eq!(files_moved_aside(home.home().join(".claude")), [was]);
    let other = TempHome::new();
    backend.run(&other, &["restore", "s1"]).ok();
    assert_eq!(text(transcript(&other, "s1")), undamaged_lines(3));
}
