//! A writer that was idle for so long that the entries after its own were written, compacted and
//! deleted.

use std::sync::{Arc, Mutex};

use jiff::{SignedDuration, Timestamp};
use sessiond::codec::entry;
use sessiond::index::sql::SqlIndex;
use sessiond::log::append::AppendOutcome;
use sessiond::log::fence::{Fencing, FencingPolicy};
use sessiond::log::writer::{GRACE, LogWriter};
use sessiond::log::{Fence, Logs};
use sessiond::model::{EntryKind, LogId, keys};
use sessiond::store::Store;
use sessiond::store::encrypted::EncryptedStore;
use sessiond::store::file::FileStore;
use sessiond::sys::{Clock, SystemRng};
use sessiond::upkeep::compact::merge_small_segments;

use crate::support::TempHome;

struct ManualClock(Mutex<Timestamp>);

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        *self.0.lock().unwrap()
    }
}

fn next(logs: &Logs, id: &LogId, log_writer: &LogWriter) -> entry::EncodedEntry {
    entry::encode(
        log_writer.next_header(id, EntryKind::Delta, logs.clock.now(), vec![], vec![]),
        &[] as &[Vec<u8>],
    )
    .unwrap()
}

#[tokio::test]
async fn a_writer_idle_across_a_gc_is_fenced_even_if_its_seq_is_free() {
    let home = TempHome::new();
    let store: Arc<dyn Store> = Arc::new(FileStore::open(home.path().join("bucket")).unwrap());
    let index = Arc::new(
        SqlIndex::open(&format!("sqlite://{}", home.path().join("i.db").display())).unwrap(),
    );
    let watch = Arc::new(ManualClock(Mutex::new(
        "2026-05-01T12:00:00Z".parse().unwrap(),
    )));
    let logs = Logs {
        store: Arc::new(EncryptedStore::without_keys(store.clone())),
        fence: Arc::new(Fencing::new(FencingPolicy::Auto, index, false)),
        namespace: "n".parse().unwrap(),
        agent: "a".parse().unwrap(),
        clock: watch.clone(),
        rng: Arc::new(SystemRng),
        recent: Arc::default(),
        progress: Arc::default(),
    };
    assert!(matches!(
        logs.fence.choose(&*store, &logs.rng).await,
        Ok(Fence::Store)
    ));
    let id = logs.id("s".parse().unwrap());
    let mut sleeper = LogWriter::unclaimed("sleeper".parse().unwrap(), 0, None, watch.now());
    logs.claim(&id, &mut sleeper, 0).await.unwrap().unwrap();
    let mut other = LogWriter::unclaimed(
        "other".parse().unwrap(),
        sleeper.seq,
        sleeper.digest,
        watch.now(),
    );
    logs.claim(&id, &mut other, 0).await.unwrap().unwrap();

    let pass = |time: SignedDuration| *watch.0.lock().unwrap() += time;
    pass(SignedDuration::try_from(GRACE).unwrap() + SignedDuration::from_hours(1));
    for _ in 0..3 {
        let entry = next(&logs, &id, &other);
        assert!(matches!(
            logs.append(&id, &mut other, &entry).await.unwrap(),
            AppendOutcome::Written
        ));
    }
    merge_small_segments(&logs, &id, other.seq, u64::MAX)
        .await
        .unwrap();
    assert!(
        store
            .get(&keys::snapshot(&id, other.seq))
            .await
            .unwrap()
            .is_some()
    );
    for seq in 1..=other.seq {
        store.delete(&keys::entry(&id, seq)).await.unwrap();
    }

    // Its seq is free, and the store accepts the write; the writer must not report it as durable.
    let late = next(&logs, &id, &sleeper);
    for _ in 0..2 {
        assert!(matches!(
            logs.append(&id, &mut sleeper, &late).await.unwrap(),
            AppendOutcome::Conflict(None)
        ));
    }
    assert_eq!(sleeper.seq, 1);
    // The owner of the session continues.
    let entry = next(&logs, &id, &other);
    assert!(matches!(
        logs.append(&id, &mut other, &entry).await.unwrap(),
        AppendOutcome::Written
    ));
}
