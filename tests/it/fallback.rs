//! `restore --fallback history`: where a session cannot be restored in a form its agent accepts,
//! the conversation is written as text. Uses real transcripts (`tests/fixtures/claude`) that are
//! stored in several entries and then damaged.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::support::TempHome;
use crate::support::backend::{Backend, Ran};
use crate::support::files::{append, files_below, write};
use crate::support::on_each_backend;

/// A turn with four tools.
const TOOLS: &str = "40cdc2a7-b2f1-451b-8582-b24141aacee2";
/// Number of entries with its lines. A claim precedes them.
const ENTRIES: usize = 6;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// A backend with the session in several entries.
fn stored() -> Backend {
    let backend = stored_in(Backend::file());
    assert!(entry(&backend, ENTRIES + 1).exists() && !entry(&backend, ENTRIES + 2).exists());
    backend
}

fn stored_in(backend: Backend) -> Backend {
    let home = TempHome::new();
    let path = format!("projects/-work-work/{TOOLS}.jsonl");
    let text = std::fs::read_to_string(fixtures().join("claude/tools").join(&path)).unwrap();
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    for piece in lines.chunks(lines.len().div_ceil(ENTRIES)) {
        append(&home.home().join(".claude").join(&path), piece.concat());
        backend.run(&home, &["run", "--", "true"]).ok();
    }
    backend
}

fn entry(backend: &Backend, seq: usize) -> PathBuf {
    backend.path().join(format!(
        "bucket/v1/default/claude-code/{TOOLS}/log/{seq:012}.gz"
    ))
}

fn damage(backend: &Backend, seq: usize) {
    let mut bytes = std::fs::read(entry(backend, seq)).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x55;
    std::fs::write(entry(backend, seq), bytes).unwrap();
}

fn restore(backend: &Backend, home: &TempHome, arguments: &[&str]) -> Ran {
    backend.run(home, &[&["restore", TOOLS], arguments].concat())
}

/// The text of the file that stdout names. Stdout contains nothing else.
#[track_caller]
fn history_file(ran: &Ran) -> String {
    assert_eq!(ran.code(), 10, "{}\n{}", ran.out(), ran.err());
    std::fs::read_to_string(ran.out().trim_end()).unwrap()
}

fn is_unchanged(home: &TempHome) -> bool {
    !home.home().join(".claude/projects").exists()
}

#[test]
fn history_text_of_real_transcripts_matches_the_recording() {
    let (backend, home) = (stored(), TempHome::new());
    let ran = restore(
        &backend,
        &home,
        &["--max-agent-version", "2.1.9", "--fallback", "history"],
    );
    let text = history_file(&ran);
    let recording = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/fallback.md");
    if crate::support::is_update() {
        std::fs::write(&recording, &text).unwrap();
    }
    assert_eq!(text, std::fs::read_to_string(&recording).unwrap());
    let path = home
        .home()
        .join(format!(".claude/.sessiond/history-{TOOLS}.md"));
    assert_eq!(ran.out().trim_end(), path.display().to_string());
    assert_eq!(
        std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
        0o600
    );
    assert!(
        ran.err().contains("was written by agent version 2.1.325"),
        "{}",
        ran.err()
    );
}

#[test]
fn the_fallback_reads_a_damaged_log_as_far_as_possible_and_claims_nothing() {
    let backend = stored();
    // It contains the first tool call and its result.
    damage(&backend, 4);
    let home = TempHome::new();
    restore(&backend, &home, &[]).fails(6, "000000000004.gz", "--salvage");
    let ran = restore(&backend, &home, &["--fallback", "history"]);
    assert!(
        ran.err().contains("error: ") && ran.err().contains("000000000004.gz"),
        "{}",
        ran.err()
    );
    let text = history_file(&ran);
    assert!(
        text.contains("its stored log is damaged. It ran in /work/work."),
        "{text}"
    );
    assert!(
        text.contains("Do it SCRIPT:tools") && text.contains("All done: a.txt has 2 lines."),
        "{text}"
    );
    let parts: Vec<&str> = text
        .split("(Messages are missing here: they could not be read.)")
        .collect();
    assert_eq!(parts.len(), 2, "{text}");
    assert!(
        !parts[0].contains("All done") && parts[1].contains("All done"),
        "{text}"
    );
    assert!(
        is_unchanged(&home) && !entry(&backend, ENTRIES + 2).exists(),
        "something was restored or claimed"
    );

    let other = TempHome::new();
    let ran = restore(
        &backend,
        &other,
        &[
            "--fallback",
            "history",
            "--json",
            "--fallback-messages",
            "2",
            "--fallback-file",
            "prompt.md",
        ],
    );
    assert_eq!(ran.code(), 10, "{}", ran.err());
    let row = ran.json()[0].clone();
    assert_eq!(
        (
            row["session"].as_str(),
            row["fallback"].as_str(),
            row["messages"].as_u64()
        ),
        (Some(TOOLS), Some("history"), Some(2))
    );
    assert_eq!(
        (row["undamaged_to"].as_u64(), row["head"].as_u64()),
        (Some(3), Some(ENTRIES as u64 + 1))
    );
    assert!(
        row["reason"].as_str().unwrap().contains("000000000004.gz")
            && row["agent_version"] == "2.1.325",
        "{row}"
    );
    assert_eq!(
        row["file"],
        other.home().join("prompt.md").display().to_string()
    );
    let text = std::fs::read_to_string(other.home().join("prompt.md")).unwrap();
    assert_eq!(text.matches("\n## ").count(), 2, "{text}");
    assert!(text.contains("the last 2 of "), "{text}");

    // A dry run reports it and writes nothing.
    let dry = TempHome::new();
    let ran = restore(
        &backend,
        &dry,
        &["--fallback", "history", "--dry-run", "--json"],
    );
    assert_eq!(
        (ran.code(), ran.json()[0]["dry_run"].as_bool()),
        (10, Some(true))
    );
    assert!(
        is_unchanged(&dry)
            && !dry
                .home()
                .join(format!(".claude/.sessiond/history-{TOOLS}.md"))
                .exists()
    );

    // Files that `--salvage` can restore are restored as files.
    let ran = restore(&backend, &home, &["--salvage", "--fallback", "history"]).ok();
    assert!(
        ran.out().contains("at entry 3") && !is_unchanged(&home),
        "{}",
        ran.out()
    );
}

#[test]
fn the_fallback_reads_every_entry_by_itself_after_early_damage() {
    let backend = stored();
    std::fs::remove_file(entry(&backend, 1)).unwrap();
    damage(&backend, 2);
    let home = TempHome::new();
    let ran = restore(&backend, &home, &["--salvage", "--fallback", "history"]);
    let text = history_file(&ran);
    assert!(
        !text.contains("Do it SCRIPT:tools") && text.contains("All done: a.txt has 2 lines."),
        "{text}"
    );
    assert!(is_unchanged(&home));
    // The hint would suggest what was done.
    let error = ran.err();
    assert!(
        error.contains("000000000002.gz") && !error.contains("hint:"),
        "{error}"
    );
    // The end is damaged too.
    damage(&backend, ENTRIES + 1);
    let text = history_file(&restore(
        &backend,
        &home,
        &["--salvage", "--fallback", "history"],
    ));
    assert!(
        !text.contains("All done") && text.contains("The messages after this point are missing"),
        "{text}"
    );
    // No message is readable.
    (3..=ENTRIES).for_each(|seq| damage(&backend, seq));
    let other = TempHome::new();
    restore(&backend, &other, &["--salvage", "--fallback", "history"]).fails(
        6,
        "no message is readable",
        "from a backup",
    );
    assert!(
        !other
            .home()
            .join(format!(".claude/.sessiond/history-{TOOLS}.md"))
            .exists()
    );
}

#[test]
fn an_undamaged_part_without_a_transcript_is_not_restored_and_not_claimed() {
    let backend = stored();
    // The claim before it is undamaged, but holds no file.
    damage(&backend, 2);
    let home = TempHome::new();
    restore(&backend, &home, &["--salvage"]).fails(6, "000000000002.gz", "--fallback history");
    let text = history_file(&restore(
        &backend,
        &home,
        &["--salvage", "--fallback", "history"],
    ));
    assert!(text.contains("All done: a.txt has 2 lines."), "{text}");
    assert!(
        is_unchanged(&home) && !entry(&backend, ENTRIES + 2).exists(),
        "something was restored or claimed"
    );
    // The damage is still reported afterwards.
    restore(&backend, &TempHome::new(), &[]).fails(6, "000000000002.gz", "--fallback history");
    let verified = backend.run(&home, &["verify", TOOLS]);
    verified.fails(6, "damaged", "--fallback history");
}

on_each_backend!(a_session_of_a_newer_agent_is_rejected_or_written_as_history);
fn a_session_of_a_newer_agent_is_rejected_or_written_as_history(backend: Backend) {
    let backend = stored_in(backend);
    let home = TempHome::new();
    let limit = |version: &str| restore(&backend, &home, &["--max-agent-version", version]);
    limit("2.1.324").fails(7, "which is newer than 2.1.324", "--fallback history");
    limit("2").fails(7, "2.1.325", "");
    assert!(is_unchanged(&home));
    limit("yesterday").fails(2, "invalid --max-agent-version value", "2.1.325");
    limit("2.1.325").ok();
    limit("2.10").ok();
    assert!(!is_unchanged(&home));

    // The version of the installed agent.
    let bin = home.path().join("bin");
    write(
        &bin.join("claude"),
        b"#!/bin/sh\ntest \"$1\" = --version && echo '2.1.300 (Claude Code)'\n",
    );
    std::fs::set_permissions(bin.join("claude"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let auto = |path: &Path| {
        let other = TempHome::new();
        let mut command = backend.command(
            &other,
            &[
                "restore",
                TOOLS,
                "--max-agent-version",
                "auto",
                "--fallback",
                "history",
            ],
        );
        let ran = Ran(command.env("PATH", path).output().unwrap());
        (ran, other)
    };
    let (ran, other) = auto(&bin);
    assert!(
        history_file(&ran).contains("a newer version of the agent wrote it")
            && is_unchanged(&other)
    );
    write(
        &bin.join("claude"),
        b"#!/bin/sh\necho '3.0.0 (Claude Code)'\n",
    );
    auto(&bin).0.ok();
    write(&bin.join("claude"), b"#!/bin/sh\nexit 3\n");
    assert!(auto(&bin).0.ok().err().contains("printed no version"));
    assert!(
        auto(&home.path().join("no-bin"))
            .0
            .ok()
            .err()
            .contains("--version")
    );
}

#[test]
fn history_text_covers_a_forks_origin_and_stops_at_the_point() {
    let backend = stored();
    let at = |point: &str| {
        history_file(&restore(
            &backend,
            &TempHome::new(),
            &[
                "--max-agent-version",
                "1",
                "--fallback",
                "history",
                "--at",
                point,
            ],
        ))
    };
    let early = at("seq:3");
    assert!(
        early.contains("Do it SCRIPT:tools") && !early.contains("All done"),
        "{early}"
    );
    assert!(at("turn").ends_with("All done: a.txt has 2 lines.\n"));
    let home = TempHome::new();
    let forked = backend.run(&home, &["fork", TOOLS, "--json"]).ok().json();
    let fork = forked["session"]
        .as_str()
        .unwrap_or_else(|| panic!("{forked}"));
    let text = history_file(&backend.run(
        &home,
        &[
            "restore",
            fork,
            "--max-agent-version",
            "1",
            "--fallback",
            "history",
        ],
    ));
    assert!(
        text.contains(fork)
            && text.contains("Do it SCRIPT:tools")
            && text.ends_with("All done: a.txt has 2 lines.\n"),
        "{text}"
    );
    // If the origin of a fork is damaged, the fork's own messages are still written.
    backend.run(&home, &["restore", fork]).ok();
    append(
        &home
            .home()
            .join(format!(".claude/projects/-work-work/{fork}.jsonl")),
        "{\"type\":\"user\",\"message\":{\"content\":\"and now?\"}}\n",
    );
    backend.run(&home, &["run", "--", "true"]).ok();
    damage(&backend, 4);
    let other = TempHome::new();
    let text = history_file(&backend.run(
        &other,
        &["restore", fork, "--salvage", "--fallback", "history"],
    ));
    assert!(
        text.contains("and now?") && !text.contains("All done"),
        "{text}"
    );
}

#[test]
fn other_failures_do_not_trigger_the_fallback() {
    let (backend, home) = (stored(), TempHome::new());
    backend
        .run(&home, &["restore", "unknown", "--fallback", "history"])
        .fails(3, "unknown", "");
    append(
        &home
            .home()
            .join(format!(".claude/projects/-work-work/{TOOLS}.jsonl")),
        "{\"mine\":1}\n",
    );
    restore(&backend, &home, &["--fallback", "history"]).fails(7, "differ", "--force");
    backend
        .run(
            &home,
            &[
                "restore",
                "--all",
                "--fallback",
                "history",
                "--fallback-file",
                "x",
            ],
        )
        .fails(2, "--all", "");
    // Each of the damaged stores: restored, not found, or damaged without a readable message.
    for item in std::fs::read_dir(fixtures().join("damaged")).unwrap() {
        let (directory, backend, home) = (item.unwrap().path(), Backend::file(), TempHome::new());
        for (key, bytes) in files_below(&directory)
            .into_iter()
            .filter(|(key, _)| key != "verdict.txt")
        {
            write(&backend.path().join("bucket").join(key), bytes);
        }
        let plain = backend.run(&TempHome::new(), &["verify", "broken"]).code();
        let ran = backend.run(&home, &["restore", "broken", "--fallback", "history"]);
        assert!(
            matches!(ran.code(), 0 | 3 | 6 | 12),
            "{}: {plain} {} {}",
            directory.display(),
            ran.code(),
            ran.err()
        );
        assert!(!ran.err().contains("panicked"), "{}", ran.err());
    }
}
