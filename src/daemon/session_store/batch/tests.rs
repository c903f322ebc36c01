//! Appends that are repeated, cut short, or race: nothing is doubled, nothing is lost.

use serde_json::json;

use super::*;
use crate::agent::claude_code::ClaudeCode;
use crate::daemon::session_store::key::Sent;
use crate::sys::Disk;

struct Bench {
    root: tempfile::TempDir,
    ids: Ids,
}

impl Bench {
    fn new() -> Bench {
        Bench {
            root: tempfile::tempdir().unwrap(),
            ids: Ids::default(),
        }
    }

    fn key(&self) -> Key {
        let profile = ClaudeCode::new("claude-code".parse().unwrap());
        Key::read(
            &profile,
            &Sent {
                project_key: "p".into(),
                session_id: "s".into(),
                subpath: None,
            },
        )
        .unwrap()
    }

    fn append(&mut self, batch: &str, entries: &[&str]) -> Written {
        self.summarise(batch, entries, None)
    }

    fn summarise(&mut self, batch: &str, entries: &[&str], summary: Option<u64>) -> Written {
        let raw: Vec<Box<RawValue>> = entries
            .iter()
            .map(|entry| RawValue::from_string((*entry).to_owned()).unwrap())
            .collect();
        let entries: Vec<&RawValue> = raw.iter().map(|entry| &**entry).collect();
        let data = RawValue::from_string(json!({ "of": batch }).to_string()).unwrap();
        let batch = Some(batch).filter(|batch| !batch.is_empty());
        let append = Append {
            key: &self.key(),
            batch,
            entries: &entries,
            summary: summary.map(|after| (after, &*data)),
            now: 1_700_000_000_000,
        };
        self.ids
            .append(&Disk::new(self.root.path()), &append)
            .unwrap()
    }

    fn path(&self) -> std::path::PathBuf {
        self.root.path().join("projects/p/s.jsonl")
    }

    fn text(&self) -> String {
        std::fs::read_to_string(self.path()).unwrap()
    }

    /// What a process that was killed leaves: the files, and nothing in memory.
    fn crash_at(&mut self, len: usize) {
        let text = self.text();
        std::fs::write(self.path(), &text[..len]).unwrap();
        self.ids = Ids::default();
    }
}

fn new(written: &Written) -> usize {
    match written {
        Written::All { new, .. } => *new,
        Written::Outdated => panic!("outdated"),
    }
}

#[test]
fn an_entry_with_an_id_is_stored_once() {
    let mut bench = Bench::new();
    assert_eq!(
        new(&bench.append(
            "",
            &[r#"{"uuid":"a"}"#, r#"{"uuid":"b"}"#, r#"{"uuid":"a"}"#]
        )),
        2
    );
    assert_eq!(
        new(&bench.append("", &[r#"{"uuid":"b"}"#, r#"{"uuid":"c"}"#])),
        1
    );
    bench.ids = Ids::default();
    assert_eq!(new(&bench.append("", &[r#"{"uuid":"c"}"#])), 0);
    assert_eq!(
        bench.text(),
        "{\"uuid\":\"a\"}\n{\"uuid\":\"b\"}\n{\"uuid\":\"c\"}\n"
    );
}

#[test]
fn an_entry_is_one_line_whatever_is_between_its_tokens() {
    let mut bench = Bench::new();
    bench.append("", &["{\n  \"a\": \"x\\ny\",\r\n  \"uuid\": \"1\"\n}"]);
    assert_eq!(bench.text().lines().count(), 1);
    assert_eq!(
        serde_json::from_str::<serde_json::Value>(&bench.text()).unwrap(),
        json!({ "a": "x\ny", "uuid": "1" })
    );
}

#[test]
fn entries_without_an_id_are_stored_each_time_unless_the_append_is_repeated() {
    let mut bench = Bench::new();
    let title = r#"{"type":"title"}"#;
    assert_eq!(new(&bench.append("one", &[title])), 1);
    assert_eq!(new(&bench.append("two", &[title])), 1);
    assert_eq!(new(&bench.append("two", &[title])), 0);
    bench.ids = Ids::default();
    assert_eq!(new(&bench.append("one", &[title])), 0);
    assert_eq!(bench.text().lines().count(), 2);
}

#[test]
fn an_append_that_a_crash_cut_short_is_written_whole_when_repeated() {
    let entries = [
        r#"{"type":"title"}"#,
        r#"{"uuid":"a"}"#,
        r#"{"type":"mode"}"#,
    ];
    for cut in 0..=entries.iter().map(|entry| entry.len() + 1).sum() {
        let mut bench = Bench::new();
        bench.append("zero", &[r#"{"uuid":"z"}"#]);
        let before = bench.text();
        bench.append("one", &entries);
        let whole = bench.text();
        bench.crash_at(before.len() + cut);
        bench.append("one", &entries);
        assert_eq!(bench.text(), whole, "cut after {cut} bytes");
    }
}

#[test]
fn a_torn_line_that_nobody_repeats_is_in_nobodys_way() {
    let mut bench = Bench::new();
    bench.append("one", &[r#"{"uuid":"a"}"#, r#"{"uuid":"b"}"#]);
    bench.crash_at(20);
    bench.append("two", &[r#"{"uuid":"c"}"#]);
    assert_eq!(bench.text(), "{\"uuid\":\"a\"}\n{\"uuid\":\"c\"}\n");
}

#[test]
fn a_summary_is_only_replaced_by_one_that_was_made_from_it() {
    let mut bench = Bench::new();
    let summary = |bench: &Bench| {
        Record::load(
            &Disk::new(bench.root.path()),
            &bench.key().record().unwrap(),
        )
        .unwrap()
        .summary
        .unwrap()
    };
    assert!(matches!(
        bench.summarise("one", &[r#"{"uuid":"a"}"#], Some(0)),
        Written::All { summary: 1, .. }
    ));
    assert_eq!(
        bench.summarise("two", &[r#"{"uuid":"b"}"#], Some(0)),
        Written::Outdated
    );
    assert_eq!(bench.text().lines().count(), 1);
    assert!(matches!(
        bench.summarise("two", &[r#"{"uuid":"b"}"#], Some(1)),
        Written::All { summary: 2, .. }
    ));
    // Its answer was lost.
    assert!(matches!(
        bench.summarise("two", &[r#"{"uuid":"b"}"#], Some(1)),
        Written::All {
            new: 0,
            summary: 2,
            ..
        }
    ));
    assert_eq!(
        (summary(&bench).version, summary(&bench).data.get()),
        (2, r#"{"of":"two"}"#)
    );
    let mtime = std::fs::metadata(bench.path())
        .unwrap()
        .modified()
        .unwrap()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap();
    assert_eq!(summary(&bench).mtime as u128, mtime.as_millis());
}
