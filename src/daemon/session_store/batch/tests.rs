//! Appends that are repeated, interrupted or concurrent: no entry is duplicated or lost.

use serde_json::json;

use super::*;
use crate::agent::claude_code::ClaudeCode;
use crate::daemon::session_store::key::RequestKey;
use crate::sys::Disk;

struct TestSession {
    root: tempfile::TempDir,
    transcripts: TranscriptCache,
}

impl TestSession {
    fn new() -> TestSession {
        TestSession {
            root: tempfile::tempdir().unwrap(),
            transcripts: TranscriptCache::default(),
        }
    }

    fn key(&self) -> TranscriptKey {
        let profile = ClaudeCode::new("claude-code".parse().unwrap());
        TranscriptKey::parse(
            &profile,
            &RequestKey {
                project_key: "p".into(),
                session_id: "s".into(),
                subpath: None,
            },
        )
        .unwrap()
    }

    fn append(&mut self, batch: &str, entries: &[&str]) -> BatchOutcome {
        self.append_with_summary(batch, entries, None)
    }

    fn append_with_summary(
        &mut self,
        batch_id: &str,
        entries: &[&str],
        base_version: Option<u64>,
    ) -> BatchOutcome {
        let raw: Vec<Box<RawValue>> = entries
            .iter()
            .map(|entry| RawValue::from_string((*entry).to_owned()).unwrap())
            .collect();
        let entries: Vec<&RawValue> = raw.iter().map(|entry| &**entry).collect();
        let data = RawValue::from_string(json!({ "of": batch_id }).to_string()).unwrap();
        let batch = Batch {
            key: &self.key(),
            id: Some(batch_id).filter(|id| !id.is_empty()),
            entries: &entries,
            summary: base_version.map(|base_version| SummaryUpdate {
                base_version,
                data: &data,
            }),
            now_ms: 1_700_000_000_000,
        };
        self.transcripts
            .append(&Disk::new(self.root.path()), &batch)
            .unwrap()
    }

    fn path(&self) -> std::path::PathBuf {
        self.root.path().join("projects/p/s.jsonl")
    }

    fn text(&self) -> String {
        std::fs::read_to_string(self.path()).unwrap()
    }

    /// Simulates a killed process: the files remain, the memory is lost.
    fn crash_at(&mut self, len: usize) {
        let text = self.text();
        std::fs::write(self.path(), &text[..len]).unwrap();
        self.transcripts = TranscriptCache::default();
    }
}

fn new_entries(outcome: &BatchOutcome) -> usize {
    match outcome {
        BatchOutcome::Complete { new_entries, .. } => *new_entries,
        BatchOutcome::OutdatedSummary => panic!("outdated summary"),
    }
}

#[test]
fn an_entry_with_an_id_is_stored_once() {
    let mut session = TestSession::new();
    assert_eq!(
        new_entries(&session.append(
            "",
            &[r#"{"uuid":"a"}"#, r#"{"uuid":"b"}"#, r#"{"uuid":"a"}"#]
        )),
        2
    );
    assert_eq!(
        new_entries(&session.append("", &[r#"{"uuid":"b"}"#, r#"{"uuid":"c"}"#])),
        1
    );
    session.transcripts = TranscriptCache::default();
    assert_eq!(new_entries(&session.append("", &[r#"{"uuid":"c"}"#])), 0);
    assert_eq!(
        session.text(),
        "{\"uuid\":\"a\"}\n{\"uuid\":\"b\"}\n{\"uuid\":\"c\"}\n"
    );
}

#[test]
fn an_entry_is_stored_as_one_line() {
    let mut session = TestSession::new();
    session.append("", &["{\n  \"a\": \"x\\ny\",\r\n  \"uuid\": \"1\"\n}"]);
    assert_eq!(session.text().lines().count(), 1);
    assert_eq!(
        serde_json::from_str::<serde_json::Value>(&session.text()).unwrap(),
        json!({ "a": "x\ny", "uuid": "1" })
    );
}

#[test]
fn an_entry_without_an_id_is_stored_again_unless_its_append_is_repeated() {
    let mut session = TestSession::new();
    let title = r#"{"type":"title"}"#;
    assert_eq!(new_entries(&session.append("one", &[title])), 1);
    assert_eq!(new_entries(&session.append("two", &[title])), 1);
    assert_eq!(new_entries(&session.append("two", &[title])), 0);
    session.transcripts = TranscriptCache::default();
    assert_eq!(new_entries(&session.append("one", &[title])), 0);
    assert_eq!(session.text().lines().count(), 2);
}

#[test]
fn an_interrupted_append_is_completed_when_it_is_repeated() {
    let entries = [
        r#"{"type":"title"}"#,
        r#"{"uuid":"a"}"#,
        r#"{"type":"mode"}"#,
    ];
    for cut in 0..=entries.iter().map(|entry| entry.len() + 1).sum() {
        let mut session = TestSession::new();
        session.append("zero", &[r#"{"uuid":"z"}"#]);
        let before = session.text();
        session.append("one", &entries);
        let complete = session.text();
        session.crash_at(before.len() + cut);
        session.append("one", &entries);
        assert_eq!(session.text(), complete, "cut after {cut} bytes");
    }
}

#[test]
fn a_torn_line_is_removed_by_the_next_append() {
    let mut session = TestSession::new();
    session.append("one", &[r#"{"uuid":"a"}"#, r#"{"uuid":"b"}"#]);
    session.crash_at(20);
    session.append("two", &[r#"{"uuid":"c"}"#]);
    assert_eq!(session.text(), "{\"uuid\":\"a\"}\n{\"uuid\":\"c\"}\n");
}

#[test]
fn a_summary_based_on_an_outdated_version_is_rejected() {
    let mut session = TestSession::new();
    let summary = |session: &TestSession| {
        AppendRecord::load(
            &Disk::new(session.root.path()),
            &session.key().record_path().unwrap(),
        )
        .unwrap()
        .summary
        .unwrap()
    };
    assert!(matches!(
        session.append_with_summary("one", &[r#"{"uuid":"a"}"#], Some(0)),
        BatchOutcome::Complete {
            summary_version: 1,
            ..
        }
    ));
    assert_eq!(
        session.append_with_summary("two", &[r#"{"uuid":"b"}"#], Some(0)),
        BatchOutcome::OutdatedSummary
    );
    assert_eq!(session.text().lines().count(), 1);
    assert!(matches!(
        session.append_with_summary("two", &[r#"{"uuid":"b"}"#], Some(1)),
        BatchOutcome::Complete {
            summary_version: 2,
            ..
        }
    ));
    // The response was lost, so the client repeats the append.
    assert!(matches!(
        session.append_with_summary("two", &[r#"{"uuid":"b"}"#], Some(1)),
        BatchOutcome::Complete {
            new_entries: 0,
            summary_version: 2,
            ..
        }
    ));
    assert_eq!(
        (summary(&session).version, summary(&session).data.get()),
        (2, r#"{"of":"two"}"#)
    );
    let mtime = std::fs::metadata(session.path())
        .unwrap()
        .modified()
        .unwrap()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap();
    assert_eq!(summary(&session).mtime as u128, mtime.as_millis());
}

#[test]
fn an_append_record_of_a_newer_sessiond_is_never_replaced() {
    let mut session = TestSession::new();
    session.append("one", &[r#"{"uuid":"a"}"#]);
    let path = session.key().record_path().unwrap();
    let file = path.below(session.root.path());
    let record = std::fs::read_to_string(&file).unwrap();
    assert!(record.starts_with(r#"{"version":1,"#), "{record}");
    let load = || AppendRecord::load(&Disk::new(session.root.path()), &path);
    std::fs::write(&file, r#"{"version":2,"batches":"in another form"}"#).unwrap();
    assert_eq!(load().unwrap_err().kind(), ErrorKind::NewerFormat);
    std::fs::write(&file, r#"{"version":1,"batches":7}"#).unwrap();
    assert!(load().unwrap().batches.is_empty());
}
