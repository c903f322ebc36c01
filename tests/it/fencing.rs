//! Single writer: two writers of one session never interleave, the loser loses nothing, and neither
//! a lost reply nor a crash is mistaken for a second writer. Runs on a directory, on a bucket, and
//! on a bucket that ignores conditional creates.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use futures_util::StreamExt as _;
use sessiond::error::ErrorKind;
use sessiond::index::Index;
use sessiond::log::fence::FencingPolicy;
use sessiond::model::{EntryKind, LogPoint, ResolvedPoint, keys};
use sessiond::restore::Options;
use sessiond::store::s3::S3Store;

use crate::support::TempHome;
use crate::support::faulty_store::{FaultyStore, WriteFault};
use crate::support::files::copy_dir;
use crate::support::needs_servers;
use crate::support::on_each_storage;
use crate::support::proxy::CountingProxy;
use crate::support::rng::TestRng;
use crate::support::servers::s3;
use crate::support::storage::{SESSION, Storage, TRANSCRIPT, assert_same_rows, s3_settings};
use crate::support::writer::{Writer, assert_not_interleaved};

const TASK: &str = "tasks/s1/1.json";

fn line(text: &str) -> String {
    format!("{{\"type\":\"user\",\"text\":\"{text}\"}}\n")
}

/// A writer that has written `lines`.
async fn writer_with_lines(storage: &Storage, lines: &[&str]) -> Writer {
    let mut writer = Writer::new(storage);
    for text in lines {
        writer.append(TRANSCRIPT, &line(text));
        writer.flush().await.unwrap();
    }
    writer
}

/// Raw bytes of all entries of the log.
async fn raw_bytes(storage: &Storage) -> u64 {
    storage
        .entries(SESSION)
        .await
        .iter()
        .map(|entry| entry.header.body_len())
        .sum()
}

needs_servers!(async the_store_is_probed_once_and_the_result_is_correct);
async fn the_store_is_probed_once_and_the_result_is_correct() {
    let Some(server) = s3() else { return };
    for lax in [false, true] {
        let proxy = CountingProxy::start(server.addr(), lax);
        let store = Arc::new(
            S3Store::connect(s3_settings(server, proxy.endpoint()))
                .await
                .unwrap(),
        );
        let storage = Storage {
            store,
            index_is_shared: true,
            ..Storage::files()
        };
        let races = || {
            proxy
                .lines()
                .iter()
                .filter(|line| line.starts_with("PUT") && line.contains(".probe"))
                .count()
        };
        for _start in 0..2 {
            let logs = storage.logs();
            let fence = logs.fence.choose(&*logs.store, &logs.rng).await.unwrap();
            assert_eq!(fence.as_str(), if lax { "database" } else { "store" });
        }
        assert_eq!(races(), 9, "eight racers and a late one, once");
        // Neither the store nor a database can fence.
        let alone = Storage {
            index_is_shared: false,
            ..storage
        };
        let logs = alone.logs();
        let chosen = logs.fence.choose(&*logs.store, &logs.rng).await;
        if lax {
            let error = chosen.err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Usage);
            assert!(
                error.to_string().contains("ignores conditional creates"),
                "{error}"
            );
            assert!(error.hint_text().unwrap().contains("--fencing off"));
        } else {
            assert_eq!(chosen.unwrap().as_str(), "store");
        }
        let mut writer = Writer::with_logs(&alone, alone.logs_with_fencing(FencingPolicy::Off));
        writer.append(TRANSCRIPT, &line("one"));
        writer.flush().await.unwrap();
        assert_eq!(
            alone.logs_with_fencing(FencingPolicy::Off).fence.as_str(),
            "not chosen yet"
        );
        assert_eq!(writer.logs().fence.as_str(), "off");
        assert_eq!(alone.files_of(SESSION).await, writer.files());
    }
    let files = Storage::files();
    let logs = files.logs();
    assert_eq!(
        logs.fence
            .choose(&*logs.store, &logs.rng)
            .await
            .unwrap()
            .as_str(),
        "store"
    );
}

needs_servers!(a_store_that_cannot_fence_is_rejected_before_streaming);
fn a_store_that_cannot_fence_is_rejected_before_streaming() {
    let Some(server) = s3() else { return };
    let proxy = CountingProxy::start(server.addr(), true);
    let home = TempHome::new();
    std::fs::create_dir(home.home().join(".claude")).unwrap();
    let mut command = home.command(&crate::support::sessiond());
    command.args([
        "daemon",
        "--store",
        &format!(
            "s3://{}?endpoint={}",
            server.fresh_bucket(),
            proxy.endpoint()
        ),
    ]);
    command
        .env("AWS_ACCESS_KEY_ID", &server.access_key)
        .env("AWS_SECRET_ACCESS_KEY", &server.secret_key);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(
        text.contains("ignores conditional creates") && text.contains("--fencing off"),
        "{text}"
    );
}

/// Runs two writers in a random order of appends, flushes, restarts and takeovers.
async fn run_random_operations(storage: &Storage, seed: u64) {
    let what = format!("{}, seed {seed}", storage.name);
    let session = format!("r{seed}");
    let transcript = format!("projects/-w/{session}.jsonl");
    let task = format!("tasks/{session}/1.json");
    let mut dice = TestRng::new(seed);
    let mut writers = [Writer::new(storage), Writer::new(storage)];
    writers[0].append(&transcript, &line("begin"));
    writers[0].flush().await.unwrap();
    if dice.below(2) == 0 {
        writers[1].take_over(&session).await.unwrap();
    }
    for step in 0..12 {
        let who = dice.below(2) as usize;
        let text = line(&format!("{who} at {step}"));
        let writer = &mut writers[who];
        match dice.below(9) {
            0..=2 => writer.append(&transcript, &text),
            3 => writer.replace(&task, &text),
            4..=6 => {
                writer.flush().await.unwrap();
            }
            7 => writer.restart(),
            _ => match writer.take_over(&session).await {
                Ok(_) => {}
                // Bytes that exist only locally are never overwritten.
                Err(error) => assert_eq!(error.kind(), ErrorKind::Conflict, "{what}: {error}"),
            },
        }
    }
    for writer in &mut writers {
        writer.flush().await.unwrap();
    }
    for writer in &writers {
        writer.update_index().await;
    }
    let entries = storage.entries(&session).await;
    let linked: BTreeSet<u64> = entries
        .iter()
        .map(|entry| entry.header.predecessor())
        .collect();
    // With a database fence, a seq without a successor does not count.
    let last = entries.last().unwrap().header.seq;
    let log: Vec<_> = entries
        .into_iter()
        .filter(|entry| entry.header.seq == last || linked.contains(&entry.header.seq))
        .collect();
    assert_not_interleaved(&log, &what);
    let main = storage.files_of(&session).await;
    let mut grounds = Vec::new();
    for writer in &writers {
        let Some(ledger) = writer.ledger(&session) else {
            assert!(
                writer.files().is_empty(),
                "{what}: nothing is uploaded without a ledger"
            );
            continue;
        };
        let target = writer.write_target(&session);
        match target.as_str() {
            "branch" => {
                let branch = storage
                    .files_of_branch(&session, &ledger.log_writer.writer)
                    .await;
                for (path, bytes) in writer.files() {
                    assert_eq!(
                        branch.get(&path),
                        Some(&bytes),
                        "{what}: {path} of the loser"
                    );
                }
                let row = storage
                    .index
                    .session(&storage.id(&session))
                    .await
                    .unwrap()
                    .unwrap();
                assert!(
                    row.branches.contains(&ledger.log_writer.writer.to_string()),
                    "{what}: {row:?}"
                );
            }
            "main" if ledger.log_writer.seq == last => {
                for (path, bytes) in writer.files() {
                    assert_eq!(
                        main.get(&path),
                        Some(&bytes),
                        "{what}: {path} of the winner"
                    );
                }
            }
            // It was fenced but has nothing new to write, so it has not detected that. All its
            // bytes are in the log.
            _ => {
                let seen = storage
                    .files_at(&session, LogPoint::Seq(ledger.log_writer.seq.max(1)), None)
                    .await
                    .unwrap();
                for (path, bytes) in writer.files() {
                    assert_eq!(
                        seen.get(&path),
                        Some(&bytes),
                        "{what}: {path} of one that does not know"
                    );
                }
            }
        }
        grounds.push((target, ledger.log_writer.seq));
    }
    assert!(
        grounds
            .iter()
            .filter(|(target, seq)| target == "main" && *seq == last)
            .count()
            <= 1,
        "{what}: {grounds:?}"
    );
}

on_each_storage!(slow: two_writers_never_interleave_and_lose_nothing);
async fn two_writers_never_interleave_and_lose_nothing(storage: Storage) {
    futures_util::stream::iter(0..30)
        .for_each_concurrent(6, |seed| run_random_operations(&storage, seed))
        .await;
    let before = storage.rows().await;
    storage.reindex().await;
    assert_same_rows(
        &before,
        &storage.rows().await,
        &format!("{}: reindex gives other rows", storage.name),
    );
}

on_each_storage!(a_writer_idle_through_a_takeover_continues_on_a_branch);
async fn a_writer_idle_through_a_takeover_continues_on_a_branch(storage: Storage) {
    let mut old = writer_with_lines(&storage, &["one", "two"]).await;
    old.append(TRANSCRIPT, &line("not flushed yet"));
    let mut new = Writer::new(&storage);
    new.take_over(SESSION).await.unwrap();
    new.append(TRANSCRIPT, &line("of the new one"));
    new.flush().await.unwrap();
    assert_eq!(new.logs().fence.as_str(), storage.fence);

    old.flush().await.unwrap();
    assert_eq!(old.write_target(SESSION), "branch", "{}", storage.name);
    old.append(TRANSCRIPT, &line("still going"));
    old.restart();
    old.flush().await.unwrap();
    let writer = old.ledger(SESSION).unwrap().log_writer.writer;
    assert_eq!(
        storage.files_of_branch(SESSION, &writer).await,
        old.files(),
        "{}",
        storage.name
    );
    assert_eq!(
        storage.files_of(SESSION).await,
        new.files(),
        "{}",
        storage.name
    );
    new.append(TRANSCRIPT, &line("undisturbed"));
    new.flush().await.unwrap();
    assert_eq!(new.write_target(SESSION), "main");
    assert_not_interleaved(&storage.entries(SESSION).await, storage.name);

    old.update_index().await;
    new.update_index().await;
    let row = storage
        .index
        .session(&storage.id(SESSION))
        .await
        .unwrap()
        .unwrap();
    // Where a late write can replace an entry, a restarted process begins another branch with all
    // files.
    let branches = if storage.fence == "store" { 1 } else { 2 };
    assert!(
        row.branches.contains(&writer.to_string()) && row.branches.len() == branches,
        "{}: {:?}",
        storage.name,
        row.branches
    );
    // The fenced writer's bytes are on its branch, so its volume can take the session back.
    old.take_over(SESSION).await.unwrap();
    assert_eq!(old.files(), new.files(), "{}", storage.name);
}

on_each_storage!(a_lost_reply_is_retried_without_a_duplicate_or_a_gap);
async fn a_lost_reply_is_retried_without_a_duplicate_or_a_gap(storage: Storage) {
    let (storage, store) = storage.decorate(FaultyStore::new);
    let mut writer = writer_with_lines(&storage, &["one"]).await;
    for round in 0..4 {
        store.inject(|key| {
            if key.contains("/log/") {
                WriteFault::LoseResponse
            } else {
                WriteFault::None
            }
        });
        writer.append(TRANSCRIPT, &line(&format!("round {round}")));
        let error = writer.flush().await.unwrap_err();
        assert!(error.is_retryable(), "{error}");
        // Lines written in the meantime belong to the next entry. The retry writes the same bytes
        // to the same seq first.
        writer.append(TRANSCRIPT, &line("meanwhile"));
        store.recover();
        writer.flush().await.unwrap();
        writer.flush().await.unwrap();
    }
    assert_eq!(writer.write_target(SESSION), "main", "{}", storage.name);
    assert_eq!(storage.files_of(SESSION).await, writer.files());
    assert_eq!(
        raw_bytes(&storage).await,
        writer.files()[TRANSCRIPT].len() as u64,
        "{}: bytes uploaded twice",
        storage.name
    );
    let numbers: Vec<u64> = storage
        .entries(SESSION)
        .await
        .iter()
        .map(|entry| entry.header.seq)
        .collect();
    assert_eq!(numbers, (1..=numbers.len() as u64).collect::<Vec<_>>());
    assert!(storage.branches(SESSION).await.is_empty());
}

on_each_storage!(a_claim_with_a_lost_reply_keeps_the_session);
async fn a_claim_with_a_lost_reply_keeps_the_session(storage: Storage) {
    let (storage, store) = storage.decorate(FaultyStore::new);
    store.inject(|key| {
        if key.contains("/log/") {
            WriteFault::LoseResponse
        } else {
            WriteFault::None
        }
    });
    let mut writer = Writer::new(&storage);
    writer.append(TRANSCRIPT, &line("one"));
    for _ in 0..2 {
        assert!(writer.flush().await.unwrap_err().is_retryable());
    }
    store.recover();
    writer.flush().await.unwrap();
    assert_eq!(writer.write_target(SESSION), "main", "{}", storage.name);
    assert_eq!(storage.files_of(SESSION).await, writer.files());
    assert_eq!(
        raw_bytes(&storage).await,
        writer.files()[TRANSCRIPT].len() as u64
    );
}

on_each_storage!(a_crash_between_entry_and_ledger_uploads_nothing_twice);
async fn a_crash_between_entry_and_ledger_uploads_nothing_twice(storage: Storage) {
    let mut writer = writer_with_lines(&storage, &["one", "two"]).await;
    let keep = tempfile::tempdir().unwrap();
    let state = writer.root.join(".sessiond");
    copy_dir(&state, &keep.path().join("before"));
    // One entry with a transcript and a side file, one with a side file only.
    writer.append(TRANSCRIPT, &line("three"));
    writer.replace(TASK, "{\"v\":1}");
    writer.flush().await.unwrap();
    writer.replace(TASK, "{\"v\":2}");
    writer.flush().await.unwrap();
    let entries = storage.entries(SESSION).await.len();
    let durable = raw_bytes(&storage).await;
    std::fs::remove_dir_all(&state).unwrap();
    copy_dir(&keep.path().join("before"), &state);
    writer.restart();

    writer.flush().await.unwrap();
    assert_eq!(writer.write_target(SESSION), "main", "{}", storage.name);
    assert_eq!(
        storage.entries(SESSION).await.len(),
        entries,
        "{}: written again",
        storage.name
    );
    assert_eq!(raw_bytes(&storage).await, durable);
    writer.append(TRANSCRIPT, &line("four"));
    writer.flush().await.unwrap();
    assert_eq!(writer.write_target(SESSION), "main");
    assert_eq!(storage.entries(SESSION).await.len(), entries + 1);
    assert_eq!(storage.files_of(SESSION).await, writer.files());
}

on_each_storage!(a_copied_volume_never_interleaves_with_its_original);
async fn a_copied_volume_never_interleaves_with_its_original(storage: Storage) {
    futures_util::stream::iter(0..12)
        .for_each_concurrent(6, |seed| run_random_operations_on_a_copy(&storage, seed))
        .await;
}

/// Runs a volume and its copy in a random order of appends, flushes and restarts.
async fn run_random_operations_on_a_copy(storage: &Storage, seed: u64) {
    let session = format!("c{seed}");
    let (transcript, task) = (
        format!("projects/-w/{session}.jsonl"),
        format!("tasks/{session}/1.json"),
    );
    let what = format!("{}, seed {seed}", storage.name);
    let mut dice = TestRng::new(seed);
    let mut first = Writer::new(storage);
    first.append(&transcript, &line("one"));
    first.replace(&task, "{}");
    first.flush().await.unwrap();
    let mut pair = [first.copy(storage), first];
    for step in 0..10 {
        let who = dice.below(2) as usize;
        let text = line(&format!("{who} at {step}"));
        match dice.below(5) {
            0 => pair[who].append(&transcript, &text),
            1 => pair[who].replace(&task, &text),
            2 => pair[who].restart(),
            _ => {
                pair[who].flush().await.unwrap();
            }
        }
    }
    for writer in &mut pair {
        writer.flush().await.unwrap();
    }
    let main = storage.files_of(&session).await;
    let mut on_main = 0;
    for writer in &pair {
        let ledger = writer.ledger(&session).unwrap();
        let stored = match writer.write_target(&session).as_str() {
            "branch" => {
                storage
                    .files_of_branch(&session, &ledger.log_writer.writer)
                    .await
            }
            _ => {
                on_main += 1;
                main.clone()
            }
        };
        let unchanged = ledger.log_writer.seq < storage.entries(&session).await.len() as u64;
        assert!(
            writer.files() == stored || unchanged,
            "{what}: {}",
            writer.write_target(&session)
        );
    }
    assert!(on_main >= 1, "{what}: both lost");
}

on_each_storage!(a_copied_volume_that_only_replaces_files_does_not_interleave_either);
async fn a_copied_volume_that_only_replaces_files_does_not_interleave_either(storage: Storage) {
    let mut first = writer_with_lines(&storage, &["one"]).await;
    first.replace(TASK, "{}");
    first.flush().await.unwrap();
    let mut second = first.copy(&storage);
    for round in 0..3 {
        first.replace(TASK, &format!("{{\"first\":{round}}}"));
        first.flush().await.unwrap();
        second.replace(TASK, &format!("{{\"second\":{round}}}"));
        second.flush().await.unwrap();
    }
    let grounds = [first.write_target(SESSION), second.write_target(SESSION)];
    assert_eq!(grounds, ["main", "branch"], "{}", storage.name);
    assert_eq!(storage.files_of(SESSION).await, first.files());
    let writer = second.ledger(SESSION).unwrap().log_writer.writer;
    assert_eq!(
        storage.files_of_branch(SESSION, &writer).await,
        second.files()
    );
}

on_each_storage!(a_copied_volume_whose_original_moved_a_file_does_not_interleave_either);
async fn a_copied_volume_whose_original_moved_a_file_does_not_interleave_either(storage: Storage) {
    let mut first = writer_with_lines(&storage, &["one"]).await;
    let mut second = first.copy(&storage);
    std::fs::create_dir_all(first.root.join("projects/-elsewhere")).unwrap();
    std::fs::rename(
        first.root.join(TRANSCRIPT),
        first.root.join("projects/-elsewhere/s1.jsonl"),
    )
    .unwrap();
    first.flush().await.unwrap();
    second.append(TRANSCRIPT, &line("of the copy"));
    second.flush().await.unwrap();
    first.append("projects/-elsewhere/s1.jsonl", &line("of the original"));
    first.flush().await.unwrap();
    assert_eq!(
        [first.write_target(SESSION), second.write_target(SESSION)],
        ["main", "branch"],
        "{}",
        storage.name
    );
    let writer = second.ledger(SESSION).unwrap().log_writer.writer;
    assert_eq!(
        storage.files_of_branch(SESSION, &writer).await,
        second.files()
    );
}

on_each_storage!(a_copied_volume_that_is_on_a_branch_does_not_overwrite_the_branch);
async fn a_copied_volume_that_is_on_a_branch_does_not_overwrite_the_branch(storage: Storage) {
    let mut loser = writer_with_lines(&storage, &["one"]).await;
    Writer::new(&storage).take_over(SESSION).await.unwrap();
    loser.append(TRANSCRIPT, &line("lost"));
    loser.flush().await.unwrap();
    assert_eq!(loser.write_target(SESSION), "branch");
    let mut copy = loser.copy(&storage);
    loser.append(TRANSCRIPT, &line("of the loser"));
    loser.flush().await.unwrap();
    copy.append(TRANSCRIPT, &line("of its copy"));
    copy.flush().await.unwrap();
    for writer in [&loser, &copy] {
        let name = writer.ledger(SESSION).unwrap().log_writer.writer;
        assert_eq!(
            storage.files_of_branch(SESSION, &name).await,
            writer.files(),
            "{}",
            storage.name
        );
    }
    assert_eq!(storage.branches(SESSION).await.len(), 2);
}

on_each_storage!(without_a_ledger_only_files_that_extend_the_log_continue_it);
async fn without_a_ledger_only_files_that_extend_the_log_continue_it(storage: Storage) {
    let mut writer = writer_with_lines(&storage, &["one", "two"]).await;
    let entries = storage.entries(SESSION).await.len();
    let forget = |writer: &mut Writer| {
        std::fs::remove_dir_all(writer.root.join(".sessiond")).unwrap();
        writer.restart();
    };
    // Equal files: nothing is written.
    forget(&mut writer);
    assert_eq!(writer.flush().await.unwrap(), (0, 0));
    assert_eq!(storage.entries(SESSION).await.len(), entries);
    // Longer files: the writer claims the log and continues it.
    forget(&mut writer);
    writer.append(TRANSCRIPT, &line("three"));
    assert_eq!(
        writer.flush().await.unwrap(),
        (line("three").len() as u64, 1),
        "{}",
        storage.name
    );
    let log = storage.entries(SESSION).await;
    assert_eq!(log.len(), entries + 2);
    assert_eq!(log[entries].header.kind, EntryKind::Claim);
    assert_eq!(storage.files_of(SESSION).await, writer.files());
    // Shorter and different files: both go to a branch, and the log is unchanged.
    let stored = writer.files();
    for (what, text) in [
        ("behind", line("one")),
        ("different", line("one") + &line("other")),
        ("longer and different", line("x").repeat(9)),
    ] {
        let mut other = Writer::new(&storage);
        other.append(TRANSCRIPT, &text);
        other.flush().await.unwrap();
        assert_eq!(
            other.write_target(SESSION),
            "branch",
            "{}: {what}",
            storage.name
        );
        let name = other.ledger(SESSION).unwrap().log_writer.writer;
        assert_eq!(
            storage.files_of_branch(SESSION, &name).await,
            other.files(),
            "{}: {what}",
            storage.name
        );
        assert_eq!(storage.files_of(SESSION).await, stored);
    }
    assert_eq!(storage.branches(SESSION).await.len(), 3);
    // The owner continues.
    writer.append(TRANSCRIPT, &line("four"));
    writer.flush().await.unwrap();
    assert_eq!(writer.write_target(SESSION), "main");
}

on_each_storage!(a_restored_session_continues_and_a_restart_downloads_nothing);
async fn a_restored_session_continues_and_a_restart_downloads_nothing(storage: Storage) {
    let (storage, store) = storage.decorate(FaultyStore::new);
    let mut old = writer_with_lines(&storage, &["one", "two"]).await;
    old.replace(TASK, "{\"v\":1}");
    old.flush().await.unwrap();
    drop(old);
    let mut new = Writer::new(&storage);
    let report = new.take_over(SESSION).await.unwrap();
    assert_eq!(report.written(), 2);
    let before = raw_bytes(&storage).await;
    // The next daemon is the same writer: it writes one entry with the new bytes and no second
    // claim.
    assert_eq!(new.flush().await.unwrap(), (0, 0), "{}", storage.name);
    new.append(TRANSCRIPT, &line("three"));
    assert_eq!(new.flush().await.unwrap().1, 1);
    let log = storage.entries(SESSION).await;
    let last = log.last().unwrap();
    assert_eq!(last.header.writer.to_string(), report.writer.unwrap());
    assert_eq!(last.header.seq, report.head + 1);
    assert_eq!(
        raw_bytes(&storage).await,
        before + line("three").len() as u64,
        "{}: uploaded again",
        storage.name
    );

    // The same volume again: nothing was written, so only the head is read.
    let reads = store.reads();
    let report = new.take_over(SESSION).await.unwrap();
    assert_eq!((report.objects, report.written()), (0, 0));
    new.restart();
    new.append(TRANSCRIPT, &line("four"));
    assert_eq!(new.flush().await.unwrap().1, 1);
    // It reads the last entry, to check that the store matches the ledger.
    assert_eq!(
        store.reads() - reads,
        1 + u64::from(storage.fence == "database"),
        "{}: it read the log",
        storage.name
    );
    assert_eq!(storage.files_of(SESSION).await, new.files());
}

on_each_storage!(a_rollback_keeps_every_later_entry_reachable);
async fn a_rollback_keeps_every_later_entry_reachable(storage: Storage) {
    let mut old = Writer::new(&storage);
    let mut points = Vec::new();
    for round in 0..5 {
        old.append(TRANSCRIPT, &line(&format!("round {round}")));
        old.append(
            "projects/-w/s1/subagents/agent-a.jsonl",
            &line(&format!("helper {round}")),
        );
        old.replace(TASK, &format!("{{\"v\":{round}}}"));
        old.flush().await.unwrap();
        points.push((old.ledger(SESSION).unwrap().log_writer.seq, old.files()));
    }
    let (rollback_to, then) = points[1].clone();
    let mut new = Writer::new(&storage);
    let options = Options {
        point: ResolvedPoint {
            at: LogPoint::Seq(rollback_to),
            ..ResolvedPoint::default()
        },
        claim: true,
        ..Options::default()
    };
    let report = new.restore(SESSION, options).await.unwrap();
    assert_eq!(
        (report.seq, new.files()),
        (rollback_to, then),
        "{}",
        storage.name
    );
    new.append(TRANSCRIPT, &line("another way"));
    new.flush().await.unwrap();
    // Side files are rolled back too: a later restore gives the files that the agent has.
    assert_eq!(
        storage.files_of(SESSION).await,
        new.files(),
        "{}",
        storage.name
    );
    for (seq, files) in &points {
        assert_eq!(
            &storage
                .files_at(SESSION, LogPoint::Seq(*seq), None)
                .await
                .unwrap(),
            files,
            "{}: entry {seq}",
            storage.name
        );
    }
    // The fenced writer has no bytes of its own and cannot write.
    old.append(TRANSCRIPT, &line("too late"));
    old.flush().await.unwrap();
    assert_eq!(old.write_target(SESSION), "branch");
}

on_each_storage!(a_restore_that_loses_the_race_reads_on_and_claims_after_it);
async fn a_restore_that_loses_the_race_reads_on_and_claims_after_it(storage: Storage) {
    let (outer, store) = storage.decorate(FaultyStore::new);
    let mut old = writer_with_lines(&outer, &["one"]).await;
    old.replace(TASK, "{\"v\":1}");
    old.flush().await.unwrap();
    let mut new = Writer::new(&outer);
    // The old writer replaces a file and appends between the restore's read and its claim.
    let overtaken = Arc::new(AtomicBool::new(false));
    let (once, runtime) = (overtaken.clone(), tokio::runtime::Handle::current());
    let old = Arc::new(tokio::sync::Mutex::new(old));
    let racer = old.clone();
    store.inject(move |key| {
        if key.contains("/log/") && !once.swap(true, SeqCst) {
            let racer = racer.clone();
            tokio::task::block_in_place(|| {
                runtime.block_on(async move {
                    let mut racer = racer.lock().await;
                    racer.append(TRANSCRIPT, &line("overtaking"));
                    racer.replace(TASK, "{\"v\":2}");
                    let _ = racer.flush().await;
                });
            });
        }
        WriteFault::None
    });
    new.take_over(SESSION)
        .await
        .unwrap_or_else(|error| panic!("{}: {error}", outer.name));
    store.recover();
    assert!(overtaken.load(SeqCst));
    let mut old = old.lock().await;
    old.flush().await.unwrap();
    new.append(TRANSCRIPT, &line("new"));
    new.flush().await.unwrap();
    assert_eq!(new.write_target(SESSION), "main", "{}", outer.name);
    assert_eq!(outer.files_of(SESSION).await, new.files(), "{}", outer.name);
    // Its entry is before the claim, or all its bytes are on its branch.
    let (target, writer) = (
        old.write_target(SESSION),
        old.ledger(SESSION).unwrap().log_writer.writer,
    );
    if target == "branch" {
        assert_eq!(outer.files_of_branch(SESSION, &writer).await, old.files());
    } else {
        assert!(
            new.files()[TRANSCRIPT].starts_with(&old.files()[TRANSCRIPT]),
            "{}",
            outer.name
        );
    }
}

on_each_storage!(
    a_damaged_entry_is_left_alone_and_nothing_is_lost,
    an_entry_of_a_newer_format_is_left_alone_and_nothing_is_lost,
);

async fn a_damaged_entry_is_left_alone_and_nothing_is_lost(storage: Storage) {
    an_unreadable_entry_is_left_alone(storage, b"not an entry".to_vec()).await;
}

async fn an_entry_of_a_newer_format_is_left_alone_and_nothing_is_lost(storage: Storage) {
    an_unreadable_entry_is_left_alone(storage, gzip(b"{\"version\":9}\n")).await;
}

async fn an_unreadable_entry_is_left_alone(storage: Storage, bytes: Vec<u8>) {
    let mut writer = writer_with_lines(&storage, &["one"]).await;
    let next = writer.ledger(SESSION).unwrap().log_writer.seq + 1;
    storage
        .store
        .put(
            &keys::entry(&storage.id(SESSION), next),
            bytes.clone().into(),
        )
        .await
        .unwrap();
    writer.append(TRANSCRIPT, &line("two"));
    writer
        .flush()
        .await
        .unwrap_or_else(|error| panic!("{}: {error}", storage.name));
    assert_eq!(writer.write_target(SESSION), "branch", "{}", storage.name);
    let name = writer.ledger(SESSION).unwrap().log_writer.writer;
    assert_eq!(
        storage.files_of_branch(SESSION, &name).await,
        writer.files()
    );
    let stored = storage
        .store
        .get(&keys::entry(&storage.id(SESSION), next))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(stored, bytes, "{}: it was overwritten", storage.name);
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    use std::io::Write as _;
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(bytes).unwrap();
    gzip.finish().unwrap()
}
