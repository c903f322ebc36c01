//! The contract of `Index`, run over every database that implements it.

use std::collections::BTreeSet;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use sessiond::error::ErrorKind;
use sessiond::index::sql::SqlIndex;
use sessiond::index::{
    EntryRecord, EntryRow, Failure, FenceRow, FenceTable, Index, RecordOutcome, SessionFilter,
    SessionRow,
};
use sessiond::model::{
    Closed, ClosedStatus, Digest, EntryHeader, EntryKind, FileKind, FileMove, LogId,
    ParsedTranscripts, Part, PathState, Seq, SessionFacts, SessionMetadata, Ttl,
};

use crate::support::needs_servers;
use crate::support::servers::postgres;

/// A database for one test, and its directory if it is a file.
pub struct TestDatabase {
    pub url: String,
    _directory: Option<tempfile::TempDir>,
}

impl TestDatabase {
    pub fn open(&self) -> SqlIndex {
        SqlIndex::open(&self.url).unwrap()
    }
}

pub fn sqlite_database() -> TestDatabase {
    let directory = tempfile::tempdir().unwrap();
    let url = format!("sqlite://{}/state/index.db", directory.path().display());
    TestDatabase {
        url,
        _directory: Some(directory),
    }
}

pub fn postgres_database() -> Option<TestDatabase> {
    Some(TestDatabase {
        url: postgres()?.fresh_database(),
        _directory: None,
    })
}

/// Defines one test per case and database.
macro_rules! contract {
    (slow: $($case:ident),* $(,)?) => {
        $crate::index_contract::contract!(@ slow_sqlite slow_needs_servers $($case)*);
    };
    ($($case:ident),* $(,)?) => {
        $crate::index_contract::contract!(@ sqlite needs_servers $($case)*);
    };
    (@ $sqlite:ident $needs_servers:ident $($case:ident)*) => {
        mod $sqlite { $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() { super::$case(super::sqlite_database()).await }
        )* }
        mod $needs_servers { $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                if let Some(database) = super::postgres_database() { super::$case(database).await }
            }
        )* }
    };
}

pub(crate) use contract;

contract!(
    a_record_counts_once,
    a_record_out_of_order_is_a_gap,
    out_of_range_numbers_are_rejected,
    a_skipped_seq_is_not_a_gap,
    racing_records_give_the_rows_of_one,
    a_batch_gives_the_rows_of_single_records,
    a_gap_in_a_batch_concerns_only_its_log,
    racing_batches_give_the_rows_of_one,
    concurrent_logs_are_all_recorded,
    moves_rename_and_replace,
    a_session_of_branches_alone_is_listed,
    only_known_facts_replace_older_ones,
    any_unicode_text_round_trips,
    pages_show_each_session_once,
    a_page_has_at_most_a_thousand_sessions,
    prefixes_are_literal,
    filters_select_sessions,
    an_invalid_cursor_is_a_usage_error,
    metadata_is_found_by_filters,
    the_status_does_not_depend_on_the_order_of_metadata_and_entries,
    an_older_metadata_version_is_ignored,
    deleting_and_recording_again_gives_the_same_rows,
    one_of_racing_fences_wins,
    old_failures_are_deleted,
    concurrent_first_opens_succeed,
);

pub fn log(id: &str) -> LogId {
    LogId {
        namespace: "team".parse().unwrap(),
        agent: "claude-code".parse().unwrap(),
        name: id.parse().unwrap(),
    }
}

fn at(second: i64) -> Timestamp {
    "2026-05-01T12:00:00.123456Z".parse::<Timestamp>().unwrap() + SignedDuration::from_secs(second)
}

fn part(path: &str, start: u64, len: u64) -> Part {
    let file_sha256 = Digest::of(format!("{path} {start} {len}").as_bytes());
    Part {
        path: path.parse().unwrap(),
        kind: FileKind::Append,
        start,
        len,
        file_sha256,
        mode: 0o600,
        mtime_ns: 1_700_000_000_123_456_789,
        seq: None,
        upload: None,
    }
}

pub fn entry(log: &LogId, seq: Seq, parts: Vec<Part>) -> EntryRecord {
    let header = EntryHeader {
        version: 1,
        kind: if parts.is_empty() {
            EntryKind::Claim
        } else {
            EntryKind::Delta
        },
        namespace: log.namespace.clone(),
        agent: log.agent.clone(),
        session: log.name.clone(),
        seq,
        writer: "w1".parse().unwrap(),
        at: at(seq as i64),
        prev_digest: None,
        prev_seq: None,
        covers: None,
        moves: Vec::new(),
        parts,
        checkpoints: Vec::new(),
        keep_checkpoints: None,
        fork: None,
        rollback_to: None,
        rollback_checkpoint: None,
        adopted: Vec::new(),
    };
    EntryRecord {
        log: log.clone(),
        branch: None,
        header,
        stored_bytes: 50,
        digest: Digest::of(&seq.to_be_bytes()),
        transcripts: ParsedTranscripts::default(),
    }
}

fn on_branch(mut record: EntryRecord, writer: &str) -> EntryRecord {
    record.branch = Some(writer.parse().unwrap());
    record.header.writer = writer.parse().unwrap();
    record
}

fn filter() -> SessionFilter {
    SessionFilter {
        namespace: "team".parse().unwrap(),
        agent: None,
        id_prefix: None,
        project: None,
        status: None,
        request: None,
        labels: Vec::new(),
        model: None,
        since: None,
        until: None,
        title: None,
        limit: 100,
        cursor: None,
    }
}

async fn ids(index: &SqlIndex, filter: &SessionFilter) -> Vec<String> {
    index
        .sessions(filter)
        .await
        .unwrap()
        .sessions
        .into_iter()
        .map(|row| row.id)
        .collect()
}

type Rows = (Option<SessionRow>, Vec<PathState>, Vec<EntryRow>);

async fn rows(index: &SqlIndex, log: &LogId) -> Rows {
    (
        index.session(log).await.unwrap(),
        index.files(log).await.unwrap(),
        index.entries(log).await.unwrap(),
    )
}

async fn a_record_counts_once(database: TestDatabase) {
    let (index, log) = (database.open(), log("s1"));
    index.ping().await.unwrap();
    assert_eq!(rows(&index, &log).await, (None, vec![], vec![]));
    assert_eq!(
        index.record(&entry(&log, 1, vec![])).await.unwrap(),
        RecordOutcome::Recorded
    );
    assert_eq!(
        index.session(&log).await.unwrap().unwrap().status,
        "created"
    );
    let second = entry(&log, 2, vec![part("a.jsonl", 0, 10)]);
    assert_eq!(
        index.record(&second).await.unwrap(),
        RecordOutcome::Recorded
    );
    let before = rows(&index, &log).await;
    assert_eq!(
        index.record(&second).await.unwrap(),
        RecordOutcome::AlreadyRecorded
    );
    assert_eq!(
        index.record(&entry(&log, 1, vec![])).await.unwrap(),
        RecordOutcome::AlreadyRecorded
    );
    assert_eq!(rows(&index, &log).await, before);
    let session = before.0.unwrap();
    assert_eq!(
        (
            session.head,
            session.raw_bytes,
            session.stored_bytes,
            session.status.as_str()
        ),
        (2, 10, 100, "active")
    );
    assert_eq!((session.created, session.updated), (at(1), at(2)));
    assert_eq!(
        (
            before.1[0].state.len,
            before.1[0].state.seq,
            before.1[0].state.mode,
            before.1[0].state.mtime_ns
        ),
        (10, 2, 0o600, 1_700_000_000_123_456_789)
    );
    assert_eq!(
        before
            .2
            .iter()
            .map(|row| row.kind.as_str())
            .collect::<Vec<_>>(),
        ["claim", "delta"]
    );
    // An entry with a wrong clock does not move the session back in time.
    let mut third = entry(&log, 3, vec![part("a.jsonl", 10, 5)]);
    third.header.at = at(-1000);
    index.record(&third).await.unwrap();
    let session = index.session(&log).await.unwrap().unwrap();
    assert_eq!(
        (session.created, session.updated, session.raw_bytes),
        (at(1), at(2), 15)
    );
}

/// Entries of three logs: plain ones, a move, a rewritten file, a tombstone, and a branch.
fn mixed_entries() -> Vec<EntryRecord> {
    let (one, two, three) = (log("s1"), log("s2"), log("s3"));
    let mut moved = entry(&one, 4, vec![part("c.jsonl", 0, 7)]);
    moved.header.moves = vec![FileMove {
        from: "a.jsonl".parse().unwrap(),
        to: "b.jsonl".parse().unwrap(),
    }];
    let mut removed = entry(&two, 3, vec![]);
    removed.header.kind = EntryKind::Tombstone;
    let mut known = entry(&one, 5, vec![part("b.jsonl", 10, 5)]);
    known.transcripts.facts = SessionFacts {
        title: Some("A title".to_owned()),
        project: Some("-work".to_owned()),
        ..SessionFacts::default()
    };
    vec![
        entry(&one, 1, vec![]),
        entry(&two, 1, vec![]),
        on_branch(entry(&three, 1, vec![part("d.jsonl", 0, 3)]), "w9"),
        entry(&one, 2, vec![part("a.jsonl", 0, 4)]),
        entry(&one, 3, vec![part("a.jsonl", 4, 6)]),
        entry(&two, 2, vec![part("a.jsonl", 0, 4), part("x", 0, 9)]),
        moved,
        on_branch(entry(&two, 3, vec![part("a.jsonl", 4, 2)]), "w9"),
        removed,
        known,
        entry(&three, 1, vec![]),
        entry(&one, 6, vec![part("b.jsonl", 0, 2)]),
        entry(&one, 7, vec![]),
    ]
}

async fn a_batch_gives_the_rows_of_single_records(database: TestDatabase) {
    let (index, records) = (database.open(), mixed_entries());
    let logs: BTreeSet<LogId> = records.iter().map(|record| record.log.clone()).collect();
    for record in &records {
        let outcome = index.record(record).await.unwrap();
        assert_eq!(outcome, RecordOutcome::Recorded, "{}", record.header.seq);
    }
    let mut expected = Vec::new();
    for log in &logs {
        expected.push(rows(&index, log).await);
    }
    // One batch, and batches of each size.
    for size in (1..=records.len()).rev() {
        for log in &logs {
            index.delete_log(log).await.unwrap();
        }
        for batch in records.chunks(size) {
            let outcomes = index.record_all(batch).await.unwrap();
            assert_eq!(outcomes, vec![RecordOutcome::Recorded; batch.len()]);
        }
        for (log, expected) in logs.iter().zip(&expected) {
            assert_eq!(rows(&index, log).await, *expected, "batches of {size}");
        }
        let outcomes = index.record_all(&records).await.unwrap();
        assert_eq!(
            outcomes,
            vec![RecordOutcome::AlreadyRecorded; records.len()]
        );
    }
    assert_eq!(index.record_all(&[]).await.unwrap(), vec![]);
}

async fn a_gap_in_a_batch_concerns_only_its_log(database: TestDatabase) {
    let (index, one, two) = (database.open(), log("s1"), log("s2"));
    let batch = [
        entry(&one, 1, vec![]),
        entry(&two, 1, vec![]),
        entry(&one, 3, vec![part("a.jsonl", 0, 4)]),
        entry(&two, 2, vec![part("a.jsonl", 0, 4)]),
    ];
    assert_eq!(
        index.record_all(&batch).await.unwrap(),
        [
            RecordOutcome::Recorded,
            RecordOutcome::Recorded,
            RecordOutcome::Gap { head: 1 },
            RecordOutcome::Recorded,
        ]
    );
    assert_eq!(index.session(&one).await.unwrap().unwrap().head, 1);
    assert_eq!(index.session(&two).await.unwrap().unwrap().head, 2);
    // A gap at the start creates no session.
    let three = log("s3");
    let late = [entry(&three, 5, vec![]), entry(&two, 3, vec![])];
    index.record_all(&late).await.unwrap();
    assert_eq!(rows(&index, &three).await, (None, vec![], vec![]));
    assert_eq!(index.session(&two).await.unwrap().unwrap().head, 3);
}

/// Several processes record the same new logs, in different orders.
async fn racing_batches_give_the_rows_of_one(database: TestDatabase) {
    let logs: Vec<LogId> = (0..6).map(|number| log(&format!("s{number}"))).collect();
    let batch = |log: &LogId| {
        let deltas = (2..=4).map(|seq| entry(log, seq, vec![part("a.jsonl", (seq - 2) * 5, 5)]));
        std::iter::once(entry(log, 1, vec![]))
            .chain(deltas)
            .collect::<Vec<_>>()
    };
    let racers = (0..4).map(|racer| {
        let index = database.open();
        let mut order = logs.clone();
        order.rotate_left(racer);
        if racer % 2 == 1 {
            order.reverse();
        }
        let records: Vec<EntryRecord> = order.iter().flat_map(batch).collect();
        tokio::spawn(async move { index.record_all(&records).await })
    });
    let mut recorded = 0;
    for racer in racers.collect::<Vec<_>>() {
        let outcomes = racer.await.unwrap().unwrap();
        let is_new = |outcome: &&RecordOutcome| **outcome == RecordOutcome::Recorded;
        recorded += outcomes.iter().filter(is_new).count();
    }
    assert_eq!(recorded, 6 * 4);
    let index = database.open();
    for log in &logs {
        let (session, files, entries) = rows(&index, log).await;
        let session = session.unwrap();
        assert_eq!((session.head, session.raw_bytes), (4, 15), "{log}");
        assert_eq!((files.len(), entries.len()), (1, 4), "{log}");
    }
}

async fn a_record_out_of_order_is_a_gap(database: TestDatabase) {
    let (index, log) = (database.open(), log("s1"));
    assert_eq!(
        index.record(&entry(&log, 2, vec![])).await.unwrap(),
        RecordOutcome::Gap { head: 0 }
    );
    assert_eq!(rows(&index, &log).await, (None, vec![], vec![]));
    index.record(&entry(&log, 1, vec![])).await.unwrap();
    let before = rows(&index, &log).await;
    assert_eq!(
        index
            .record(&entry(&log, 3, vec![part("a", 0, 1)]))
            .await
            .unwrap(),
        RecordOutcome::Gap { head: 1 }
    );
    assert_eq!(rows(&index, &log).await, before);
}

async fn out_of_range_numbers_are_rejected(database: TestDatabase) {
    let (index, log) = (database.open(), log("s1"));
    let mut backwards = entry(&log, 5, vec![]);
    backwards.header.prev_seq = Some(5);
    let mut long = entry(&log, 1, vec![part("a", u64::MAX, u64::MAX)]);
    long.stored_bytes = u64::MAX;
    for bad in [
        entry(&log, 0, vec![]),
        backwards,
        long,
        entry(&log, 1, vec![part("a", 1 << 63, 0)]),
    ] {
        assert_eq!(
            index.record(&bad).await.unwrap_err().kind(),
            ErrorKind::Corrupt
        );
    }
    assert_eq!(rows(&index, &log).await, (None, vec![], vec![]));
    // Sums have the same limit.
    index
        .record(&entry(&log, 1, vec![part("a", 0, i64::MAX as u64)]))
        .await
        .unwrap();
    assert_eq!(
        index
            .record(&entry(&log, 2, vec![part("b", 0, 1)]))
            .await
            .unwrap_err()
            .kind(),
        ErrorKind::Corrupt
    );
    assert_eq!(index.session(&log).await.unwrap().unwrap().head, 1);
}

async fn a_skipped_seq_is_not_a_gap(database: TestDatabase) {
    let (index, log) = (database.open(), log("s1"));
    index.record(&entry(&log, 1, vec![])).await.unwrap();
    let mut third = entry(&log, 3, vec![]);
    third.header.prev_seq = Some(1);
    assert_eq!(index.record(&third).await.unwrap(), RecordOutcome::Recorded);
    assert_eq!(
        index.record(&entry(&log, 2, vec![])).await.unwrap(),
        RecordOutcome::Gap { head: 3 }
    );
}

async fn racing_records_give_the_rows_of_one(database: TestDatabase) {
    let (one, two, log) = (
        Arc::new(database.open()),
        Arc::new(database.open()),
        log("s1"),
    );
    for seq in 1..=12 {
        let record = entry(&log, seq, vec![part("a.jsonl", (seq - 1) * 10, 10)]);
        let tasks: Vec<_> = (0..8)
            .map(|task| {
                let (index, record) = (
                    if task % 2 == 0 {
                        one.clone()
                    } else {
                        two.clone()
                    },
                    record.clone(),
                );
                tokio::spawn(async move { index.record(&record).await.unwrap() })
            })
            .collect();
        let mut new = 0;
        for task in tasks {
            match task.await.unwrap() {
                RecordOutcome::Recorded => new += 1,
                RecordOutcome::AlreadyRecorded => {}
                RecordOutcome::Gap { head } => panic!("gap after {head}"),
            }
        }
        assert_eq!(new, 1);
    }
    let (session, files, entries) = rows(&one, &log).await;
    let session = session.unwrap();
    assert_eq!(
        (session.head, session.raw_bytes, session.stored_bytes),
        (12, 120, 600)
    );
    assert_eq!(
        (files.len(), files[0].state.len, entries.len()),
        (1, 120, 12)
    );
}

async fn concurrent_logs_are_all_recorded(database: TestDatabase) {
    let index = Arc::new(database.open());
    let tasks: Vec<_> = (0..16)
        .map(|number| {
            let index = index.clone();
            tokio::spawn(async move {
                for seq in 1..=5 {
                    let record = entry(
                        &log(&format!("s{number}")),
                        seq,
                        vec![part("a", seq - 1, 1)],
                    );
                    assert_eq!(
                        index.record(&record).await.unwrap(),
                        RecordOutcome::Recorded
                    );
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert!(
        index
            .sessions(&filter())
            .await
            .unwrap()
            .sessions
            .iter()
            .all(|row| row.head == 5 && row.raw_bytes == 5)
    );
    assert_eq!(
        index
            .logs(&"team".parse().unwrap(), &"claude-code".parse().unwrap())
            .await
            .unwrap()
            .len(),
        16
    );
}

async fn moves_rename_and_replace(database: TestDatabase) {
    let (index, log) = (database.open(), log("s1"));
    let moved = |from: &str, to: &str| FileMove {
        from: from.parse().unwrap(),
        to: to.parse().unwrap(),
    };
    index
        .record(&entry(
            &log,
            1,
            vec![part("a", 0, 1), part("b", 0, 2), part("c", 0, 3)],
        ))
        .await
        .unwrap();
    let mut second = entry(&log, 2, vec![part("a", 0, 9)]);
    second.header.moves = vec![
        moved("a", "b"),
        moved("missing", "c"),
        moved("c", "c"),
        moved("b", "B/x"),
    ];
    index.record(&second).await.unwrap();
    let files: Vec<_> = index
        .files(&log)
        .await
        .unwrap()
        .into_iter()
        .map(|row| (row.path.to_string(), row.state.len, row.state.seq))
        .collect();
    // Ordered by the bytes of the path on both databases.
    assert_eq!(
        files,
        [
            ("B/x".to_owned(), 1, 1),
            ("a".to_owned(), 9, 2),
            ("c".to_owned(), 3, 1)
        ]
    );
}

async fn a_session_of_branches_alone_is_listed(database: TestDatabase) {
    let (index, log) = (database.open(), log("s1"));
    for (seq, writer) in [(8, "w9"), (7, "w9"), (7, "w2")] {
        let record = on_branch(entry(&log, seq, vec![part("a", 0, 5)]), writer);
        assert_eq!(
            index.record(&record).await.unwrap(),
            RecordOutcome::Recorded
        );
        assert_eq!(
            index.record(&record).await.unwrap(),
            RecordOutcome::AlreadyRecorded
        );
    }
    let session = index.session(&log).await.unwrap().unwrap();
    assert_eq!(
        (session.head, session.raw_bytes, session.status.as_str()),
        (0, 0, "created")
    );
    assert_eq!(
        (session.created, session.updated, session.writer.as_str()),
        (at(7), at(8), "w9")
    );
    assert_eq!(session.branches, ["w2", "w9"]);
    assert_eq!(ids(&index, &filter()).await, ["s1"]);
    assert!(index.files(&log).await.unwrap().is_empty());
    // The main log arrives later and sets the times of creation and change.
    assert_eq!(
        index
            .record(&entry(&log, 1, vec![part("a", 0, 5)]))
            .await
            .unwrap(),
        RecordOutcome::Recorded
    );
    let session = index.session(&log).await.unwrap().unwrap();
    assert_eq!(
        (
            session.created,
            session.updated,
            session.head,
            session.writer.as_str()
        ),
        (at(1), at(1), 1, "w1")
    );
    assert_eq!(
        index.sessions(&filter()).await.unwrap().sessions,
        std::slice::from_ref(&session)
    );
    // A branch does not change a session that has a main log.
    index
        .record(&on_branch(entry(&log, 99, vec![]), "w2"))
        .await
        .unwrap();
    assert_eq!(index.session(&log).await.unwrap().unwrap(), session);
    let entries: Vec<_> = index
        .entries(&log)
        .await
        .unwrap()
        .into_iter()
        .map(|row| (row.branch, row.seq))
        .collect();
    let [w2, w9] = ["w2", "w9"].map(|name| Some(name.to_owned()));
    assert_eq!(
        entries,
        [
            (None, 1),
            (w2.clone(), 7),
            (w2, 99),
            (w9.clone(), 7),
            (w9, 8)
        ]
    );
}

async fn only_known_facts_replace_older_ones(database: TestDatabase) {
    let (index, log) = (database.open(), log("s1"));
    let mut first = entry(&log, 1, vec![]);
    first.transcripts.facts = SessionFacts {
        project: Some("-work-app".into()),
        title: Some("one".into()),
        ..SessionFacts::default()
    };
    let mut second = entry(&log, 2, vec![]);
    second.transcripts.facts = SessionFacts {
        title: Some("two".into()),
        model: Some("m".into()),
        ..SessionFacts::default()
    };
    for record in [first, second, entry(&log, 3, vec![])] {
        index.record(&record).await.unwrap();
    }
    let row = index.session(&log).await.unwrap().unwrap();
    assert_eq!(
        (
            row.project.as_deref(),
            row.title.as_deref(),
            row.model.as_deref(),
            row.cwd
        ),
        (Some("-work-app"), Some("two"), Some("m"), None)
    );
}

async fn any_unicode_text_round_trips(database: TestDatabase) {
    let (index, log) = (database.open(), log("s1"));
    let long = (0..100_000)
        .map(|number: u32| Digest::of(&number.to_be_bytes()).to_string())
        .take(200)
        .collect::<String>();
    let path = (0..46)
        .map(|number: u32| Digest::of(&number.to_be_bytes()).to_string())
        .collect::<Vec<_>>()
        .join("/");
    let mut first = entry(
        &log,
        1,
        vec![part(&path, 0, 1), part("it's \"ä\" 𝄞 %_$1", 0, 1)],
    );
    first.transcripts.facts = SessionFacts {
        project: Some(long.clone()),
        title: Some("a\0b '; DROP TABLE sessions; -- 𝄞".into()),
        cwd: Some(long.clone()),
        ..SessionFacts::default()
    };
    assert_eq!(index.record(&first).await.unwrap(), RecordOutcome::Recorded);
    let row = index.session(&log).await.unwrap().unwrap();
    assert_eq!(
        row.title.as_deref(),
        Some("ab '; DROP TABLE sessions; -- 𝄞")
    );
    assert_eq!(index.files(&log).await.unwrap().len(), 2);
    assert_eq!(
        ids(
            &index,
            &SessionFilter {
                project: Some(long),
                ..filter()
            }
        )
        .await,
        ["s1"]
    );
}

async fn pages_show_each_session_once(database: TestDatabase) {
    let index = database.open();
    // Several sessions have the same time, so that pages end inside a tie. Upper and lower case,
    // because a locale would sort them differently.
    let mut made = Vec::new();
    for number in 0..57_i64 {
        let id = format!(
            "{}{:02}",
            ["a", "B", "_", "c-"][number as usize % 4],
            (number * 31) % 57
        );
        let mut record = entry(&log(&id), 1, vec![part("a", 0, 1)]);
        record.header.at = at(number / 7);
        if number % 3 == 0 {
            record.log.agent = "codex".parse().unwrap();
        }
        index.record(&record).await.unwrap();
        made.push((
            std::cmp::Reverse(number / 7),
            record.log.agent.to_string(),
            id,
        ));
    }
    made.sort();
    let want: Vec<String> = made.into_iter().map(|(_, _, id)| id).collect();
    index
        .record(&entry(&log("@project"), 1, vec![]))
        .await
        .unwrap();
    for disturb in [false, true] {
        let (mut seen, mut cursor, mut pages) = (Vec::new(), None, 0);
        loop {
            let page = index
                .sessions(&SessionFilter {
                    limit: 10,
                    cursor,
                    ..filter()
                })
                .await
                .unwrap();
            seen.extend(page.sessions.into_iter().map(|row| (row.agent, row.id)));
            pages += 1;
            if disturb && pages == 2 {
                for (agent, id) in [
                    seen[3].clone(),
                    seen[15].clone(),
                    ("claude-code".to_owned(), "new".to_owned()),
                ] {
                    let mut log = log(&id);
                    log.agent = agent.parse().unwrap();
                    let mut record = entry(&log, 2, vec![part("a", 1, 1)]);
                    record.header.prev_seq = (id == "new").then_some(0);
                    record.header.at = at(5000);
                    assert_eq!(
                        index.record(&record).await.unwrap(),
                        RecordOutcome::Recorded
                    );
                }
            }
            match page.next {
                Some(next) => cursor = Some(next),
                None => break,
            }
        }
        assert_eq!(pages, 6);
        assert_eq!(seen.iter().collect::<BTreeSet<_>>().len(), 57, "each once");
        assert_eq!(seen.into_iter().map(|(_, id)| id).collect::<Vec<_>>(), want);
    }
}

async fn a_page_has_at_most_a_thousand_sessions(database: TestDatabase) {
    let index = database.open();
    for number in 0..1003 {
        index
            .record(&entry(&log(&format!("s{number:04}")), 1, vec![]))
            .await
            .unwrap();
    }
    index
        .record(&on_branch(entry(&log("s0500"), 2, vec![]), "w2"))
        .await
        .unwrap();
    let page = index
        .sessions(&SessionFilter {
            limit: u32::MAX,
            ..filter()
        })
        .await
        .unwrap();
    assert_eq!(
        (page.sessions.len(), page.sessions[500].branches.len()),
        (1000, 1)
    );
    let rest = index
        .sessions(&SessionFilter {
            limit: 0,
            cursor: page.next,
            ..filter()
        })
        .await
        .unwrap();
    assert_eq!(
        (rest.sessions.len(), rest.sessions[0].id.as_str()),
        (1, "s1000")
    );
}

async fn prefixes_are_literal(database: TestDatabase) {
    let index = database.open();
    for id in ["a_b", "a-b", "axb", "aXb", "a=25b", "a", "z"] {
        index.record(&entry(&log(id), 1, vec![])).await.unwrap();
    }
    let with = |prefix: &str| SessionFilter {
        id_prefix: Some(prefix.to_owned()),
        ..filter()
    };
    assert_eq!(ids(&index, &with("a_")).await, ["a_b"]);
    assert_eq!(ids(&index, &with("aX")).await, ["aXb"]);
    assert_eq!(ids(&index, &with("a=2")).await, ["a=25b"]);
    assert_eq!(ids(&index, &with("z")).await, ["z"]);
    assert_eq!(ids(&index, &with("a")).await.len(), 6);
    assert_eq!(ids(&index, &with("")).await.len(), 7);
    // Also after a cursor.
    let first = index
        .sessions(&SessionFilter {
            limit: 4,
            ..with("a")
        })
        .await
        .unwrap();
    let second = index
        .sessions(&SessionFilter {
            cursor: first.next,
            ..with("a")
        })
        .await
        .unwrap();
    let paged: Vec<String> = first
        .sessions
        .into_iter()
        .chain(second.sessions)
        .map(|row| row.id)
        .collect();
    assert_eq!(paged, ids(&index, &with("a")).await);
    for none in [
        "%",
        "_",
        "a%",
        "A",
        "a\0",
        "ä",
        "a~",
        "@",
        "'",
        "a\u{10ffff}",
        "zz",
    ] {
        assert!(ids(&index, &with(none)).await.is_empty(), "{none:?}");
    }
}

async fn filters_select_sessions(database: TestDatabase) {
    let index = database.open();
    for (id, agent, project) in [
        ("s1", "codex", Some("p")),
        ("s2", "claude-code", Some("p")),
        ("s3", "codex", None),
        ("s4", "codex", Some("q")),
    ] {
        let mut log = log(id);
        log.agent = agent.parse().unwrap();
        let mut record = entry(
            &log,
            1,
            if id == "s4" {
                vec![part("a", 0, 1)]
            } else {
                vec![]
            },
        );
        record.transcripts.facts.project = project.map(str::to_owned);
        index.record(&record).await.unwrap();
        record.log.namespace = "others".parse().unwrap();
        index.record(&record).await.unwrap();
    }
    let codex = Some("codex".parse().unwrap());
    assert_eq!(
        ids(
            &index,
            &SessionFilter {
                project: Some("p".into()),
                ..filter()
            }
        )
        .await,
        ["s2", "s1"]
    );
    assert_eq!(
        ids(
            &index,
            &SessionFilter {
                agent: codex.clone(),
                ..filter()
            }
        )
        .await,
        ["s1", "s3", "s4"]
    );
    assert_eq!(
        ids(
            &index,
            &SessionFilter {
                agent: codex,
                project: Some("p".into()),
                ..filter()
            }
        )
        .await,
        ["s1"]
    );
    assert_eq!(
        ids(
            &index,
            &SessionFilter {
                status: Some("active".into()),
                ..filter()
            }
        )
        .await,
        ["s4"]
    );
    assert!(
        ids(
            &index,
            &SessionFilter {
                namespace: "nobody".parse().unwrap(),
                ..filter()
            }
        )
        .await
        .is_empty()
    );
}

fn metadata(labels: &[(&str, &str)], request: Option<&str>) -> SessionMetadata {
    let labels = labels
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect();
    SessionMetadata {
        labels,
        request_id: request.map(str::to_owned),
        ttl: Some(Ttl::Seconds(60)),
        closed: None,
    }
}

async fn metadata_is_found_by_filters(database: TestDatabase) {
    let index = database.open();
    for id in ["s1", "s2", "s3"] {
        index.record(&entry(&log(id), 1, Vec::new())).await.unwrap();
    }
    index
        .set_metadata(
            &log("s1"),
            1,
            &metadata(&[("team", "infra"), ("odd", "a'b\"c=ü")], Some("r1")),
        )
        .await
        .unwrap();
    index
        .set_metadata(&log("s2"), 1, &metadata(&[("team", "infra")], Some("r2")))
        .await
        .unwrap();
    index
        .set_metadata(
            &log("s3"),
            1,
            &SessionMetadata {
                ttl: Some(Ttl::Never),
                ..metadata(&[("team", "web")], None)
            },
        )
        .await
        .unwrap();
    let row = index.session(&log("s1")).await.unwrap().unwrap();
    assert_eq!(
        (row.labels["odd"].as_str(), row.labels.len()),
        ("a'b\"c=ü", 2)
    );
    assert_eq!(
        (row.request_id.as_deref(), row.ttl),
        (Some("r1"), Some(Ttl::Seconds(60)))
    );
    assert_eq!(
        index.session(&log("s3")).await.unwrap().unwrap().ttl,
        Some(Ttl::Never)
    );
    let with = |labels: &[&str]| SessionFilter {
        labels: labels.iter().map(|label| label.parse().unwrap()).collect(),
        ..filter()
    };
    assert_eq!(ids(&index, &with(&["team=infra"])).await, ["s1", "s2"]);
    assert_eq!(
        ids(&index, &with(&["team=infra", "odd=a'b\"c=ü"])).await,
        ["s1"]
    );
    assert!(ids(&index, &with(&["team=infr"])).await.is_empty());
    assert_eq!(
        ids(
            &index,
            &SessionFilter {
                request: Some("r2".into()),
                ..filter()
            }
        )
        .await,
        ["s2"]
    );
    // New metadata replaces the old metadata completely. Metadata of an unknown session is ignored.
    index
        .set_metadata(&log("s1"), 2, &metadata(&[("team", "web")], None))
        .await
        .unwrap();
    let page = index.sessions(&with(&["team=web"])).await.unwrap();
    assert_eq!(
        page.sessions
            .iter()
            .map(|row| row.labels.len())
            .collect::<Vec<_>>(),
        [1, 1]
    );
    assert!(
        ids(
            &index,
            &SessionFilter {
                request: Some("r1".into()),
                ..filter()
            }
        )
        .await
        .is_empty()
    );
    index
        .set_metadata(&log("nobody"), 1, &metadata(&[], None))
        .await
        .unwrap();
    assert_eq!(index.session(&log("nobody")).await.unwrap(), None);
}

async fn the_status_does_not_depend_on_the_order_of_metadata_and_entries(database: TestDatabase) {
    let index = database.open();
    let at_rest = |is, raw| SessionMetadata {
        closed: Some(Closed {
            status: is,
            raw_bytes: raw,
        }),
        ..SessionMetadata::default()
    };
    let records = |id: &str| {
        [
            entry(&log(id), 1, Vec::new()),
            entry(&log(id), 2, vec![part("a", 0, 5)]),
            entry(&log(id), 3, Vec::new()),
        ]
    };
    // Metadata arrives before, between and after the entries.
    for (id, metadata_after) in [("s1", 1), ("s2", 2), ("s3", 3)] {
        for (number, record) in (1..).zip(records(id)) {
            index.record(&record).await.unwrap();
            if number == metadata_after {
                index
                    .set_metadata(&log(id), 1, &at_rest(ClosedStatus::Completed, 5))
                    .await
                    .unwrap();
            }
        }
        let status = || async { index.session(&log(id)).await.unwrap().unwrap().status };
        assert_eq!(status().await, "completed", "{id}");
        index
            .set_metadata(&log(id), 2, &at_rest(ClosedStatus::Archived, 5))
            .await
            .unwrap();
        assert_eq!(status().await, "archived");
        index
            .record(&entry(&log(id), 4, vec![part("a", 5, 1)]))
            .await
            .unwrap();
        assert_eq!(status().await, "active");
        let mut gone = entry(&log(id), 5, Vec::new());
        gone.header.kind = EntryKind::Tombstone;
        index.record(&gone).await.unwrap();
        index
            .set_metadata(&log(id), 3, &at_rest(ClosedStatus::Completed, 6))
            .await
            .unwrap();
        assert_eq!(status().await, "removed");
        index.record(&entry(&log(id), 6, Vec::new())).await.unwrap();
        assert_eq!(status().await, "completed", "brought back as it was");
    }
}

async fn an_older_metadata_version_is_ignored(database: TestDatabase) {
    let index = database.open();
    index
        .record(&entry(&log("s1"), 1, Vec::new()))
        .await
        .unwrap();
    index
        .set_metadata(&log("s1"), 3, &metadata(&[("a", "new")], Some("r")))
        .await
        .unwrap();
    let row = index.session(&log("s1")).await.unwrap();
    index
        .set_metadata(&log("s1"), 2, &metadata(&[("a", "old")], None))
        .await
        .unwrap();
    assert_eq!(index.session(&log("s1")).await.unwrap(), row);
    // A deleted session starts without metadata.
    let mut purge = entry(&log("s1"), 2, Vec::new());
    purge.header.kind = EntryKind::Purge;
    index.record(&purge).await.unwrap();
    let row = index.session(&log("s1")).await.unwrap().unwrap();
    assert_eq!((row.labels.len(), row.request_id, row.ttl), (0, None, None));
    index
        .set_metadata(&log("s1"), 1, &metadata(&[("a", "again")], None))
        .await
        .unwrap();
    assert_eq!(
        index.session(&log("s1")).await.unwrap().unwrap().labels["a"],
        "again"
    );
}

async fn an_invalid_cursor_is_a_usage_error(database: TestDatabase) {
    let index = database.open();
    for bad in [
        "",
        "x",
        "||",
        "2026-05-01T12:00:00Z|a",
        "2026-05-01T12:00:00Z|a|../b",
        "yesterday|a|b",
        "2026-05-01T12:00:00Z|a|b|c",
    ] {
        let error = index
            .sessions(&SessionFilter {
                cursor: Some(bad.to_owned()),
                ..filter()
            })
            .await
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{bad:?}");
    }
}

/// A log with every kind of entry.
fn sample_log(log: &LogId) -> Vec<EntryRecord> {
    let mut records = vec![
        entry(log, 1, vec![]),
        entry(
            log,
            2,
            vec![part("a.jsonl", 0, 10), part("Sub/ä.json", 0, 4)],
        ),
    ];
    records[1].transcripts.facts = SessionFacts {
        title: Some("story".into()),
        project: Some("p".into()),
        cwd: Some("/w".into()),
        ..SessionFacts::default()
    };
    records.push(on_branch(entry(log, 3, vec![part("a.jsonl", 10, 1)]), "w2"));
    let mut third = entry(log, 3, vec![part("a.jsonl", 10, 5)]);
    third.header.moves = vec![FileMove {
        from: "Sub/ä.json".parse().unwrap(),
        to: "b".parse().unwrap(),
    }];
    third.header.at = "2026-05-01T12:00:03.987654321Z".parse().unwrap();
    records.push(third);
    records.push(on_branch(entry(log, 4, vec![]), "W3"));
    records
}

async fn deleting_and_recording_again_gives_the_same_rows(database: TestDatabase) {
    let (index, log, fence) = (
        database.open(),
        log("s1"),
        FenceRow {
            seq: 4,
            writer: "w1".parse().unwrap(),
        },
    );
    let records = sample_log(&log);
    for record in &records {
        index.record(record).await.unwrap();
    }
    index
        .compare_and_swap_fence(&log, None, &fence)
        .await
        .unwrap();
    let before = rows(&index, &log).await;
    index.delete_log(&log).await.unwrap();
    index.delete_log(&log).await.unwrap();
    assert_eq!(rows(&index, &log).await, (None, vec![], vec![]));
    assert_eq!(index.read_fence(&log).await.unwrap(), Some(fence));
    // Branches first this time: the order does not change the rows.
    for record in records
        .iter()
        .filter(|record| record.branch.is_some())
        .chain(&records)
    {
        index.record(record).await.unwrap();
    }
    assert_eq!(rows(&index, &log).await, before);
}

async fn one_of_racing_fences_wins(database: TestDatabase) {
    let (one, two, log) = (
        Arc::new(database.open()),
        Arc::new(database.open()),
        log("s1"),
    );
    let mut from: Option<FenceRow> = None;
    assert_eq!(one.read_fence(&log).await.unwrap(), None);
    for round in 1..=5 {
        let tasks: Vec<_> = (0..16)
            .map(|task| {
                let (index, log, from) = (
                    if task % 2 == 0 {
                        one.clone()
                    } else {
                        two.clone()
                    },
                    log.clone(),
                    from.clone(),
                );
                let to = FenceRow {
                    seq: round,
                    writer: format!("w{task}").parse().unwrap(),
                };
                tokio::spawn(async move {
                    index
                        .compare_and_swap_fence(&log, from.as_ref(), &to)
                        .await
                        .unwrap()
                        .then_some(to)
                })
            })
            .collect();
        let mut won = Vec::new();
        for task in tasks {
            won.extend(task.await.unwrap());
        }
        assert_eq!(won.len(), 1);
        assert_eq!(one.read_fence(&log).await.unwrap(), won.pop());
        from = one.read_fence(&log).await.unwrap();
    }
    let stale = FenceRow {
        seq: 5,
        writer: "nobody".parse().unwrap(),
    };
    assert!(
        !one.compare_and_swap_fence(&log, Some(&stale), &stale)
            .await
            .unwrap()
    );
}

async fn old_failures_are_deleted(database: TestDatabase) {
    let index = database.open();
    let failure = |namespace: &str, number: u32| Failure {
        namespace: namespace.parse().unwrap(),
        agent: "codex".parse().unwrap(),
        session: number.is_multiple_of(2).then(|| "s1".to_owned()),
        at: at(i64::from(number / 10)),
        attempt: number,
        message: format!("put log/{number}: connection refused"),
    };
    index.record_failure(&failure("others", 1)).await.unwrap();
    for number in 1..=1010 {
        index
            .record_failure(&failure("team", number))
            .await
            .unwrap();
    }
    let all = index
        .failures(&"team".parse().unwrap(), u32::MAX)
        .await
        .unwrap();
    assert_eq!(
        all.iter()
            .map(|failure| failure.attempt)
            .collect::<Vec<_>>(),
        (11..=1010).rev().collect::<Vec<_>>()
    );
    assert_eq!(all[0], failure("team", 1010));
    assert_eq!(
        index
            .failures(&"team".parse().unwrap(), 3)
            .await
            .unwrap()
            .len(),
        3
    );
    assert_eq!(
        index
            .failures(&"others".parse().unwrap(), 3)
            .await
            .unwrap()
            .len(),
        1
    );
}

async fn concurrent_first_opens_succeed(database: TestDatabase) {
    let tasks: Vec<_> = (0..4)
        .map(|number| {
            let index = database.open();
            tokio::spawn(async move {
                index.ping().await.unwrap();
                index
                    .record(&entry(&log(&format!("s{number}")), 1, vec![]))
                    .await
                    .unwrap()
            })
        })
        .collect();
    for task in tasks {
        assert_eq!(task.await.unwrap(), RecordOutcome::Recorded);
    }
    assert_eq!(ids(&database.open(), &filter()).await.len(), 4);
}

needs_servers!(async both_databases_give_the_same_rows);
async fn both_databases_give_the_same_rows() {
    let Some(postgres) = postgres_database() else {
        return;
    };
    let sqlite = sqlite_database();
    let (one, two) = (sqlite.open(), postgres.open());
    for id in ["s1", "S2", "_s3"] {
        for record in sample_log(&log(id)) {
            assert_eq!(
                one.record(&record).await.unwrap(),
                two.record(&record).await.unwrap()
            );
        }
        assert_eq!(rows(&one, &log(id)).await, rows(&two, &log(id)).await);
    }
    let (left, right) = (
        one.sessions(&filter()).await.unwrap(),
        two.sessions(&filter()).await.unwrap(),
    );
    assert_eq!((left.sessions, left.next), (right.sessions, right.next));
    let (namespace, agent) = ("team".parse().unwrap(), "claude-code".parse().unwrap());
    assert_eq!(
        one.logs(&namespace, &agent).await.unwrap(),
        two.logs(&namespace, &agent).await.unwrap()
    );
}
