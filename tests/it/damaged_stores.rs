//! Damaged stores and the output of `verify` and `restore` for each.
//!
//! The output is recorded next to the store in `tests/fixtures/broken`, so that every changed word
//! is visible.

mod stores;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use regex_lite::Regex;

use self::stores::{BROKEN, Fixture, HEALTHY};
use crate::support::TempHome;
use crate::support::backend::{Backend, Ran};
use crate::support::files::{Files, files_below, write};
use crate::support::is_update;
use crate::support::slow;

const HOW: &str = "if that is right: SESSIOND_TEST_UPDATE=1 cargo test --test it damaged_stores::, then read the difference";

fn directory(fixture: &Fixture) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/broken")
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
    // While the directories are being written anew, other tests do not look at them.
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

/// What differs from one run to the next is taken out: directories, times and the names of new writers.
fn plain(text: &str, backend: &Backend, home: &TempHome) -> String {
    let text = text
        .replace(&backend.path().display().to_string(), "<store>")
        .replace(&home.path().display().to_string(), "<home>");
    let text = Regex::new(r"(?m)^\d{4}-\d\d-\d\dT[0-9:.]+Z")
        .unwrap()
        .replace_all(&text, "<time>")
        .into_owned();
    Regex::new(r"\b[0-9a-f]{32}\b")
        .unwrap()
        .replace_all(&text, "<writer>")
        .into_owned()
}

/// Runs the program and writes down what it did.
fn note(verdict: &mut String, backend: &Backend, home: &TempHome, arguments: &[&str]) -> Ran {
    let ran = backend.run(home, arguments);
    writeln!(verdict, "$ sessiond {}", arguments.join(" ")).unwrap();
    for text in [ran.out(), ran.err()] {
        verdict.push_str(&plain(&text, backend, home));
    }
    writeln!(verdict, "exit code {}", ran.code()).unwrap();
    ran
}

fn note_files(verdict: &mut String, files: &Files) {
    for (path, bytes) in files {
        writeln!(verdict, "{:>6} bytes  {path}", bytes.len()).unwrap();
    }
    verdict.push('\n');
}

/// Everything that is recorded of a store.
fn verdict(fixture: &Fixture) -> String {
    let backend = bucket(fixture);
    let mut verdict = String::new();
    for arguments in [&["verify", "--all"][..], &["verify", "--all", "--deep"]] {
        note(&mut verdict, &backend, &TempHome::new(), arguments);
        verdict.push('\n');
    }
    for arguments in [&["restore", BROKEN][..], &["restore", BROKEN, "--salvage"]] {
        // Each on a store of its own: a restore claims.
        let (backend, home) = (bucket(fixture), TempHome::new());
        note(&mut verdict, &backend, &home, arguments);
        note_files(&mut verdict, &restored(&home));
    }
    verdict
}

/// The first lines that differ.
fn difference(recorded: &str, now: &str) -> String {
    let (recorded, now): (Vec<&str>, Vec<&str>) =
        (recorded.lines().collect(), now.lines().collect());
    let mut told = String::new();
    for at in 0..recorded.len().max(now.len()) {
        let (old, new) = (recorded.get(at), now.get(at));
        if old != new {
            old.into_iter()
                .for_each(|line| writeln!(told, "  {:>3} - {line}", at + 1).unwrap());
            new.into_iter()
                .for_each(|line| writeln!(told, "  {:>3} + {line}", at + 1).unwrap());
        }
    }
    told
}

slow!(each_damaged_store_gets_its_recorded_verify_report);
/// One test: regenerating a store and then its verdict has an order.
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
        let now = verdict(&fixture);
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
    assert!(wrong.is_empty(), "{wrong}{HOW}");
}

#[test]
fn every_committed_store_has_a_generator() {
    if is_update() {
        return crate::support::skip("the stores are being made");
    }
    let directories = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/broken");
    let committed = std::fs::read_dir(directories)
        .unwrap()
        .map(|item| item.unwrap().file_name().into_string().unwrap());
    let mut committed: Vec<String> = committed.collect();
    let mut made: Vec<&str> = stores::all().iter().map(|fixture| fixture.name).collect();
    committed.sort();
    made.sort_unstable();
    assert_eq!(committed, made);
}

slow!(salvage_restores_the_longest_undamaged_prefix_and_the_session_continues);
fn salvage_restores_the_longest_undamaged_prefix_and_the_session_continues() {
    for fixture in stores::all() {
        let (backend, home) = (bucket(&fixture), TempHome::new());
        let salvaged = backend.run(&home, &["restore", BROKEN, "--salvage"]);
        if let Some((_, sound)) = &fixture.sound {
            salvaged.ok();
            assert_eq!(&restored(&home), sound, "{}", fixture.name);
            assert_goes_on(&fixture, &backend, &home);
        } else {
            assert_ne!(salvaged.code(), 0, "{}", fixture.name);
            assert_eq!(restored(&home), Files::new(), "{}", fixture.name);
        }
    }
}

slow!(restoring_at_the_last_undamaged_seq_does_the_same);
fn restoring_at_the_last_undamaged_seq_does_the_same() {
    for fixture in stores::all() {
        let Some((seq, sound)) = &fixture.sound else {
            continue;
        };
        let (backend, home) = (bucket(&fixture), TempHome::new());
        backend
            .run(&home, &["restore", BROKEN, "--at", &format!("seq:{seq}")])
            .ok();
        assert_eq!(&restored(&home), sound, "{}", fixture.name);
        assert_goes_on(&fixture, &backend, &home);
    }
}

/// The agent writes on in that home, and what it wrote comes back elsewhere, again and again.
fn assert_goes_on(fixture: &Fixture, backend: &Backend, home: &TempHome) {
    let what = fixture.name;
    let transcript = format!("projects/-work-app/{BROKEN}.jsonl");
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
        .run(home, &["run", "--session", BROKEN, "--", "sh", "-c", &line])
        .ok();
    assert_eq!(restored(home), further, "{what}");
    let elsewhere = TempHome::new();
    backend.run(&elsewhere, &["restore", BROKEN]).ok();
    assert_eq!(restored(&elsewhere), further, "{what}");
    // What is left out of it is no damage any more, unless an object is in the way that nobody has deleted.
    let composites = fixture.objects.keys().any(|key| !key.contains("/log/"));
    assert!(
        composites
            || backend
                .run(&elsewhere, &["verify", BROKEN, "--deep"])
                .code()
                == 0,
        "{what}"
    );
    assert_eq!(
        backend.run(&elsewhere, &["reindex"]).ok().err(),
        "",
        "{what}"
    );
    // And once more, in the new place, whose ledger is lost.
    std::fs::remove_dir_all(elsewhere.home().join(".claude/.sessiond")).unwrap();
    backend
        .run(&elsewhere, &["run", "--", "sh", "-c", &line])
        .ok();
    let last = TempHome::new();
    backend.run(&last, &["restore", BROKEN]).ok();
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
