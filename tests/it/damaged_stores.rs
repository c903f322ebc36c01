//! Damaged stores and the output of `verify` and `restore` for each.
//!
//! The output is recorded next to the store in `tests/fixtures/damaged`, so that every changed word
//! is visible.

mod stores;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use regex_lite::Regex;

use self::stores::{DAMAGED, Fixture, HEALTHY};
use crate::support::TempHome;
use crate::support::backend::{Backend, Ran};
use crate::support::files::{Files, files_below, write};
use crate::support::is_update;
use crate::support::slow;

const UPDATE_HINT: &str = "if the change is intended: SESSIOND_TEST_UPDATE=1 cargo test --test it damaged_stores::, then read the difference";

fn directory(fixture: &Fixture) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/damaged")
        .join(fixture.name)
}

/// The committed objects of a fixture, by key.
fn committed(fixture: &Fixture) -> BTreeMap<String, Vec<u8>> {
    let directory = directory(fixture);
    let mut objects = if directory.is_dir() {
        files_below(&directory)
    } else {
        BTreeMap::new()
    };
    objects.remove("verdict.txt");
    objects
}

/// A bucket with a copy of the committed store.
fn bucket(fixture: &Fixture) -> Backend {
    let backend = Backend::file();
    // Other tests do not read the directories while they are regenerated.
    for (key, bytes) in if is_update() {
        fixture.objects.clone()
    } else {
        committed(fixture)
    } {
        write(&backend.path().join("bucket").join(key), bytes);
    }
    backend
}

fn restored(home: &TempHome) -> Files {
    let root = home.home().join(".claude");
    if root.is_dir() {
        files_below(&root)
    } else {
        Files::new()
    }
}

/// Replaces what differs between runs: directories, times and the IDs of new writers.
fn normalize(text: &str, backend: &Backend, home: &TempHome) -> String {
    let text = text
        .replace(&backend.path().display().to_string(), "<store>")
        .replace(&home.path().display().to_string(), "<home>");
    let text = Regex::new(r"(?m)^\d{4}-\d\d-\d\dT[0-9:.]+Z")
        .unwrap()
        .replace_all(&text, "<time>")
        .into_owned();
    Regex::new(r"\b[0-9a-f]{16}\b")
        .unwrap()
        .replace_all(&text, "<writer>")
        .into_owned()
}

/// Runs the program and records its output and exit code.
fn record_run(
    verify_report: &mut String,
    backend: &Backend,
    home: &TempHome,
    arguments: &[&str],
) -> Ran {
    let ran = backend.run(home, arguments);
    writeln!(verify_report, "$ sessiond {}", arguments.join(" ")).unwrap();
    for text in [ran.out(), ran.err()] {
        verify_report.push_str(&normalize(&text, backend, home));
    }
    writeln!(verify_report, "exit code {}", ran.code()).unwrap();
    ran
}

fn record_files(verify_report: &mut String, files: &Files) {
    for (path, bytes) in files {
        writeln!(verify_report, "{:>6} bytes  {path}", bytes.len()).unwrap();
    }
    verify_report.push('\n');
}

/// The complete record of a store.
fn verify_report(fixture: &Fixture) -> String {
    let backend = bucket(fixture);
    let mut verify_report = String::new();
    for arguments in [&["verify", "--all"][..], &["verify", "--all", "--deep"]] {
        record_run(&mut verify_report, &backend, &TempHome::new(), arguments);
        verify_report.push('\n');
    }
    for arguments in [
        &["restore", DAMAGED][..],
        &["restore", DAMAGED, "--salvage"],
    ] {
        // Each restore gets its own copy of the store, because it claims the session.
        let (backend, home) = (bucket(fixture), TempHome::new());
        record_run(&mut verify_report, &backend, &home, arguments);
        record_files(&mut verify_report, &restored(&home));
    }
    verify_report
}

/// Returns the first lines that differ.
fn difference(recorded: &str, now: &str) -> String {
    let (recorded, now): (Vec<&str>, Vec<&str>) =
        (recorded.lines().collect(), now.lines().collect());
    let mut report = String::new();
    for at in 0..recorded.len().max(now.len()) {
        let (old, new) = (recorded.get(at), now.get(at));
        if old != new {
            old.into_iter()
                .for_each(|line| writeln!(report, "  {:>3} - {line}", at + 1).unwrap());
            new.into_iter()
                .for_each(|line| writeln!(report, "  {:>3} + {line}", at + 1).unwrap());
        }
    }
    report
}

slow!(each_damaged_store_gets_its_recorded_verify_report);
/// One test, because a store is regenerated before its report.
fn each_damaged_store_gets_its_recorded_verify_report() {
    let mut wrong = String::new();
    for fixture in stores::all() {
        let directory = directory(&fixture);
        if is_update() {
            let _ = std::fs::remove_dir_all(&directory);
            fixture
                .objects
                .iter()
                .for_each(|(key, bytes)| write(&directory.join(key), bytes));
        }
        let objects = committed(&fixture);
        for key in objects
            .keys()
            .chain(fixture.objects.keys())
            .filter(|key| objects.get(*key) != fixture.objects.get(*key))
        {
            writeln!(wrong, "{}: {key} is not what the maker makes", fixture.name).unwrap();
        }
        let now = verify_report(&fixture);
        let path = directory.join("verdict.txt");
        if is_update() {
            std::fs::write(&path, &now).unwrap();
        }
        let recorded = std::fs::read_to_string(&path).unwrap_or_default();
        if recorded != now {
            writeln!(
                wrong,
                "{}: another verdict:\n{}",
                fixture.name,
                difference(&recorded, &now)
            )
            .unwrap();
        }
    }
    assert!(wrong.is_empty(), "{wrong}{UPDATE_HINT}");
}

#[test]
fn every_committed_store_has_a_generator() {
    if is_update() {
        return crate::support::skip("the stores are being made");
    }
    let directories = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/damaged");
    let committed = std::fs::read_dir(directories)
        .unwrap()
        .map(|item| item.unwrap().file_name().into_string().unwrap());
    let mut committed: Vec<String> = committed.collect();
    let mut encoded: Vec<&str> = stores::all().iter().map(|fixture| fixture.name).collect();
    committed.sort();
    encoded.sort_unstable();
    assert_eq!(committed, encoded);
}

slow!(salvage_restores_the_longest_undamaged_prefix_and_the_session_continues);
fn salvage_restores_the_longest_undamaged_prefix_and_the_session_continues() {
    for fixture in stores::all() {
        let (backend, home) = (bucket(&fixture), TempHome::new());
        let salvaged = backend.run(&home, &["restore", DAMAGED, "--salvage"]);
        if let Some((_, undamaged)) = &fixture.undamaged {
            salvaged.ok();
            assert_eq!(&restored(&home), undamaged, "{}", fixture.name);
            assert_continues(&fixture, &backend, &home);
        } else {
            assert_ne!(salvaged.code(), 0, "{}", fixture.name);
            assert_eq!(restored(&home), Files::new(), "{}", fixture.name);
        }
    }
}

slow!(restoring_at_the_last_undamaged_seq_does_the_same);
fn restoring_at_the_last_undamaged_seq_does_the_same() {
    for fixture in stores::all() {
        let Some((seq, undamaged)) = &fixture.undamaged else {
            continue;
        };
        let (backend, home) = (bucket(&fixture), TempHome::new());
        backend
            .run(&home, &["restore", DAMAGED, "--at", &format!("seq:{seq}")])
            .ok();
        assert_eq!(&restored(&home), undamaged, "{}", fixture.name);
        assert_continues(&fixture, &backend, &home);
    }
}

/// Checks that the agent can continue in that home, and that later homes restore what it wrote.
fn assert_continues(fixture: &Fixture, backend: &Backend, home: &TempHome) {
    let what = fixture.name;
    let transcript = format!("projects/-work-app/{DAMAGED}.jsonl");
    let line = format!("echo '{{\"type\":\"user\",\"text\":\"further\"}}' >> .claude/{transcript}");
    let add = |files: &mut Files| {
        files
            .get_mut(&transcript)
            .unwrap()
            .extend_from_slice(b"{\"type\":\"user\",\"text\":\"further\"}\n");
    };
    let mut further = restored(home);
    add(&mut further);
    backend
        .run(
            home,
            &["run", "--session", DAMAGED, "--", "sh", "-c", &line],
        )
        .ok();
    assert_eq!(restored(home), further, "{what}");
    let elsewhere = TempHome::new();
    backend.run(&elsewhere, &["restore", DAMAGED]).ok();
    assert_eq!(restored(&elsewhere), further, "{what}");
    // Skipped entries are no damage any more, unless a damaged compacted segment still exists.
    let compacted_segments = fixture.objects.keys().any(|key| !key.contains("/log/"));
    assert!(
        compacted_segments
            || backend
                .run(&elsewhere, &["verify", DAMAGED, "--deep"])
                .code()
                == 0,
        "{what}"
    );
    assert_eq!(
        backend.run(&elsewhere, &["reindex"]).ok().err(),
        "",
        "{what}"
    );
    // The same in the new home, without its ledger.
    std::fs::remove_dir_all(elsewhere.home().join(".claude/.sessiond")).unwrap();
    backend
        .run(&elsewhere, &["run", "--", "sh", "-c", &line])
        .ok();
    let last = TempHome::new();
    backend.run(&last, &["restore", DAMAGED]).ok();
    add(&mut further);
    assert_eq!(restored(&last), further, "{what}");
}

#[test]
fn a_session_next_to_a_damaged_one_restores_completely() {
    for fixture in stores::all() {
        let (backend, home) = (bucket(&fixture), TempHome::new());
        backend.run(&home, &["restore", HEALTHY]).ok();
        assert_eq!(restored(&home), fixture.healthy, "{}", fixture.name);
        backend.run(&home, &["verify", HEALTHY, "--deep"]).ok();
    }
}
