//! The running streamer on a real directory: missed events, unusual file operations and failing
//! stores.
//!
//! Each test compares the restored bytes.

use std::sync::Arc;
use std::time::Duration;

use crate::support::PATIENCE;
use crate::support::counting_directory::CountingDirectory;
use crate::support::files;
use crate::support::slow;
use crate::support::world::World;
use crate::support::writer::FlushAll;
use crate::support::writer::stream;
use sessiond::capture::flush::LogFlusher;
use sessiond::capture::watch::EventBuffer;
use sessiond::capture::{IndexTask, StreamerHandle, tracked_log::LogStatus};
use sessiond::model::RelPath;
use tokio::time::{Instant, sleep, timeout};

/// Shorter than the interval of scans: whatever is stored within it was found by an event.
const BY_EVENT: Duration = Duration::from_secs(8);

fn transcript(session: &str) -> String {
    format!("projects/-w/{session}.jsonl")
}

fn lines(name: &str, from: usize, to: usize) -> String {
    (from..to)
        .map(|at| format!("{{\"of\":\"{name}\",\"n\":{at}}}\n"))
        .collect()
}

async fn flush(handle: &StreamerHandle) {
    timeout(PATIENCE, handle.flush(None))
        .await
        .expect("the flush ends")
        .expect("the flush succeeds");
}

async fn status(handle: &StreamerHandle, session: &str) -> LogStatus {
    let all = handle.status().await.unwrap();
    all.into_iter()
        .find(|status| status.session == session)
        .unwrap_or_else(|| panic!("{session} is known"))
}

async fn wait_until(what: &str, mut done: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done().await {
        assert!(Instant::now() < deadline, "{what}: not after {PATIENCE:?}");
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missed_event_is_found_by_the_scan() {
    let world = World::new();
    world.write(&transcript("before"), lines("before", 0, 3));
    let handle = world.stream_by_scans();
    world.write(&transcript("after"), lines("after", 0, 3));
    world
        .wait_for(
            "before",
            &transcript("before"),
            lines("before", 0, 3).as_bytes(),
            PATIENCE,
        )
        .await;
    world
        .wait_for(
            "after",
            &transcript("after"),
            lines("after", 0, 3).as_bytes(),
            PATIENCE,
        )
        .await;
    world.append(&transcript("after"), lines("after", 3, 5));
    world
        .wait_for(
            "after",
            &transcript("after"),
            lines("after", 0, 5).as_bytes(),
            PATIENCE,
        )
        .await;
    drop(handle);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_append_is_stored_without_a_flush_request() {
    let world = World::new();
    let handle = world.stream();
    world.write(&transcript("s"), lines("s", 0, 1));
    world
        .wait_for("s", &transcript("s"), lines("s", 0, 1).as_bytes(), BY_EVENT)
        .await;
    world.append(&transcript("s"), lines("s", 1, 2));
    world
        .wait_for("s", &transcript("s"), lines("s", 0, 2).as_bytes(), BY_EVENT)
        .await;
    drop(handle);
}

slow!(async directory_trees_that_outgrow_their_watch_are_stored);
async fn directory_trees_that_outgrow_their_watch_are_stored() {
    let world = World::new();
    let handle = world.stream();
    world.write(&transcript("s"), lines("s", 0, 1));
    for at in 0..500 {
        world.write(
            &format!("projects/-w/s/tool-results/{at}/deep/t.txt"),
            format!("result {at}"),
        );
    }
    flush(&handle).await;
    let stored = world.stored("s").await.unwrap();
    assert_eq!(stored, files::files_below(&world.root()));
    assert_eq!(stored.len(), 501);
}

#[tokio::test]
async fn files_created_before_the_watch_are_found() {
    let world = World::new();
    let hints = Arc::new(EventBuffer::default());
    std::fs::create_dir_all(world.root()).unwrap();
    let _handle = world.stream_with_events(hints.clone());
    std::fs::create_dir_all(world.root().join("projects/-w")).unwrap();
    hints.push(world.root().join("projects"));
    // The directory was scanned before, and no event reports the file.
    sleep(Duration::from_millis(300)).await;
    let text = lines("s1", 0, 3);
    world.write(&transcript("s1"), &text);
    world
        .wait_for("s1", &transcript("s1"), text.as_bytes(), BY_EVENT)
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_replaced_or_truncated_between_scans_is_stored_correctly() {
    let world = World::new();
    for session in ["renamed", "shrunk", "regrown"] {
        world.write(&transcript(session), lines(session, 0, 100));
    }
    let handle = world.stream();
    flush(&handle).await;
    let new = lines("renamed", 500, 700);
    world.write("projects/-w/renamed.tmp", &new);
    std::fs::rename(
        world.root().join("projects/-w/renamed.tmp"),
        world.root().join(transcript("renamed")),
    )
    .unwrap();
    world.write(&transcript("shrunk"), lines("shrunk", 0, 7));
    world.write(&transcript("regrown"), "");
    world.append(&transcript("regrown"), lines("regrown", 1000, 1200));
    flush(&handle).await;
    assert_eq!(
        world
            .stored_file("renamed", &transcript("renamed"))
            .await
            .unwrap(),
        new.as_bytes()
    );
    assert_eq!(
        world
            .stored_file("shrunk", &transcript("shrunk"))
            .await
            .unwrap(),
        lines("shrunk", 0, 7).as_bytes()
    );
    assert_eq!(
        world
            .stored_file("regrown", &transcript("regrown"))
            .await
            .unwrap(),
        lines("regrown", 1000, 1200).as_bytes()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_moves_to_another_project_is_not_uploaded_again() {
    let world = World::new();
    world.write(&transcript("s"), lines("s", 0, 200));
    world.write("projects/-w/s/tool-results/t.txt", "result");
    let handle = world.stream();
    flush(&handle).await;
    let before = world.uploaded("s").await;
    std::fs::create_dir_all(world.root().join("projects/-v")).unwrap();
    for name in ["s.jsonl", "s"] {
        std::fs::rename(
            world.root().join("projects/-w").join(name),
            world.root().join("projects/-v").join(name),
        )
        .unwrap();
    }
    world.append("projects/-v/s.jsonl", lines("s", 200, 201));
    flush(&handle).await;
    assert_eq!(
        world.stored("s").await.unwrap(),
        files::files_below(&world.root())
    );
    assert_eq!(
        world.uploaded("s").await - before,
        lines("s", 200, 201).len() as u64
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_file_with_the_bytes_of_a_deleted_one_does_not_take_its_place() {
    let world = World::new();
    world.write(&transcript("s"), lines("s", 0, 1));
    world.write("tasks/s/1.json", "{}");
    let handle = world.stream();
    flush(&handle).await;
    // Most file systems reuse the inode number.
    std::fs::remove_file(world.root().join("tasks/s/1.json")).unwrap();
    world.write("tasks/s/2.json", "{}");
    flush(&handle).await;
    let stored = world.stored("s").await.unwrap();
    assert_eq!(
        stored.keys().collect::<Vec<_>>(),
        ["projects/-w/s.jsonl", "tasks/s/1.json", "tasks/s/2.json"]
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flush_requested_during_another_covers_new_files() {
    let world = World::new();
    world.write(&transcript("s"), lines("s", 0, 10));
    let handle = world.stream();
    flush(&handle).await;
    world.store.hold();
    let writes = world.store.writes();
    world.append(&transcript("s"), lines("s", 10, 11));
    wait_until("the flush is under way", async || {
        world.store.writes() > writes
    })
    .await;
    // Neither is among the files of the session that a flush checks.
    std::fs::create_dir_all(world.root().join("projects/-v")).unwrap();
    std::fs::rename(
        world.root().join(transcript("s")),
        world.root().join("projects/-v/s.jsonl"),
    )
    .unwrap();
    world.write("projects/-v/agent-77.jsonl", "{\"sessionId\":\"s\"}\n");
    let asked = tokio::spawn({
        let handle = handle.clone();
        async move { flush(&handle).await }
    });
    sleep(Duration::from_millis(300)).await;
    world.store.release();
    asked.await.unwrap();
    let stored = world.stored("s").await.unwrap();
    assert_eq!(stored, files::files_below(&world.root()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_and_recreated_root_is_streamed_again() {
    let world = World::new();
    world.write(&transcript("old"), lines("old", 0, 10));
    let handle = world.stream();
    flush(&handle).await;
    std::fs::remove_dir_all(world.root()).unwrap();
    flush(&handle).await;
    world.write(&transcript("new"), lines("new", 0, 10));
    flush(&handle).await;
    assert_eq!(
        world.stored_file("new", &transcript("new")).await.unwrap(),
        lines("new", 0, 10).as_bytes()
    );
    // Files that the agent's cleanup deletes stay in the log.
    assert_eq!(
        world.stored_file("old", &transcript("old")).await.unwrap(),
        lines("old", 0, 10).as_bytes()
    );
    world.append(&transcript("new"), lines("new", 10, 12));
    world
        .wait_for(
            "new",
            &transcript("new"),
            lines("new", 0, 12).as_bytes(),
            BY_EVENT,
        )
        .await;
    // Immediately, so that the new file gets the old inode number, and with the name of a known
    // file.
    std::fs::remove_dir_all(world.root()).unwrap();
    world.write(&transcript("new"), lines("new", 50, 80));
    world
        .wait_for(
            "new",
            &transcript("new"),
            lines("new", 50, 80).as_bytes(),
            BY_EVENT,
        )
        .await;
    world.append(&transcript("new"), lines("new", 80, 81));
    world
        .wait_for(
            "new",
            &transcript("new"),
            lines("new", 50, 81).as_bytes(),
            BY_EVENT,
        )
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_and_recreated_directory_is_watched_again() {
    let world = World::new();
    world.write(&transcript("old"), lines("old", 0, 10));
    let handle = world.stream();
    flush(&handle).await;
    std::fs::remove_dir_all(world.root().join("projects")).unwrap();
    world.write(&transcript("new"), lines("new", 0, 10));
    world
        .wait_for(
            "new",
            &transcript("new"),
            lines("new", 0, 10).as_bytes(),
            BY_EVENT,
        )
        .await;
    world.append(&transcript("new"), lines("new", 10, 12));
    world
        .wait_for(
            "new",
            &transcript("new"),
            lines("new", 0, 12).as_bytes(),
            BY_EVENT,
        )
        .await;
    drop(handle);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn symlinks_pipes_and_directories_are_skipped() {
    let world = World::new();
    world.write(&transcript("s"), lines("s", 0, 2));
    let secret = world.path("secret.jsonl");
    std::fs::write(&secret, "secret\n").unwrap();
    std::os::unix::fs::symlink(&secret, world.root().join(transcript("link"))).unwrap();
    world.write("projects/-w/s/tool-results/t.txt", "t");
    std::os::unix::fs::symlink(
        &secret,
        world.root().join("projects/-w/s/tool-results/link.txt"),
    )
    .unwrap();
    let pipe = world.root().join("projects/-w/s/tool-results/pipe.txt");
    assert!(
        std::process::Command::new("mkfifo")
            .arg(&pipe)
            .status()
            .unwrap()
            .success()
    );
    let pipe = world.root().join(transcript("pipe"));
    assert!(
        std::process::Command::new("mkfifo")
            .arg(&pipe)
            .status()
            .unwrap()
            .success()
    );
    std::fs::create_dir_all(world.root().join(transcript("directory"))).unwrap();
    let handle = world.stream();
    flush(&handle).await;
    let stored = world.stored("s").await.unwrap();
    let names: Vec<&String> = stored.keys().collect();
    assert_eq!(
        names,
        ["projects/-w/s.jsonl", "projects/-w/s/tool-results/t.txt"]
    );
    assert_eq!(world.logs().log_names("").await.unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreadable_file_delays_no_other_file() {
    let world = World::new();
    let directory = Arc::new(CountingDirectory::new(world.root()));
    directory.deny_open(Some("closed"));
    world.write(&transcript("s"), lines("s", 0, 2));
    world.write("projects/-w/s/tool-results/closed.txt", "closed");
    world.write(&transcript("other"), lines("other", 0, 2));
    let handle = stream(world.root(), world.context_of(directory.clone()));
    world
        .wait_for(
            "other",
            &transcript("other"),
            lines("other", 0, 2).as_bytes(),
            PATIENCE,
        )
        .await;
    world
        .wait_for("s", &transcript("s"), lines("s", 0, 2).as_bytes(), PATIENCE)
        .await;
    wait_until("the failure is reported", async || {
        status(&handle, "s").await.last_error.is_some()
    })
    .await;
    let log_status = status(&handle, "s").await;
    assert!(log_status.last_error.unwrap().contains("closed.txt"));
    assert!(log_status.lag_bytes > 0, "what is not durable is lag");
    directory.deny_open(None);
    flush(&handle).await;
    assert_eq!(world.stored("s").await.unwrap().len(), 2);
    assert_eq!(status(&handle, "s").await.last_error, None);
}

slow!(async three_hundred_sessions_at_once_are_all_stored);
async fn three_hundred_sessions_at_once_are_all_stored() {
    let world = World::new();
    let handle = world.stream();
    for at in 0..300 {
        world.write(&transcript(&format!("s{at}")), lines("many", 0, at % 7 + 1));
    }
    flush(&handle).await;
    for at in 0..300 {
        let session = format!("s{at}");
        assert_eq!(
            world
                .stored_file(&session, &transcript(&session))
                .await
                .unwrap(),
            lines("many", 0, at % 7 + 1).as_bytes()
        );
        assert_eq!(world.entry_count(&session).await, 2, "a claim and a delta");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_old_style_sub_agent_belongs_to_its_session() {
    let world = World::new();
    world.write(&transcript("s"), lines("s", 0, 2));
    let handle = world.stream();
    flush(&handle).await;
    // A partial line does not show the session.
    world.write("projects/-w/agent-9c.jsonl", "{\"type\":\"user\",\"sess");
    flush(&handle).await;
    world.append("projects/-w/agent-9c.jsonl", "ionId\":\"s\"}\n");
    world
        .wait_for(
            "s",
            "projects/-w/agent-9c.jsonl",
            b"{\"type\":\"user\",\"sessionId\":\"s\"}\n",
            BY_EVENT,
        )
        .await;
    flush(&handle).await;
    assert_eq!(
        world.stored("s").await.unwrap(),
        files::files_below(&world.root())
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_machines_share_the_memory_of_a_project_and_the_last_one_wins_per_file() {
    let world = World::new();
    let (a, b) = (world.path("a"), world.path("b"));
    let disk = |root: &std::path::Path| Arc::new(sessiond::sys::Disk::new(root));
    let first = stream(a.clone(), world.context_of(disk(&a)));
    let second = stream(b.clone(), world.context_of(disk(&b)));
    let memory = |name: &str| format!("projects/-w/memory/{name}");
    files::write(&a.join(memory("shared.md")), "by a, 1");
    flush(&first).await;
    files::write(&b.join(memory("shared.md")), "by b, longer");
    flush(&second).await;
    assert_eq!(
        world
            .stored_file("@-w", &memory("shared.md"))
            .await
            .unwrap(),
        b"by b, longer"
    );
    // An unrelated change on a: its old copy of the shared file must not be uploaded.
    files::write(&a.join(memory("only-a.md")), "a");
    flush(&first).await;
    let stored = world.stored("@-w").await.unwrap();
    assert_eq!(stored[&memory("only-a.md")], b"a");
    assert_eq!(
        String::from_utf8_lossy(&stored[&memory("shared.md")]),
        "by b, longer"
    );
    // Changed on a again, by an append to its own copy: now a is the last writer.
    files::append(&a.join(memory("shared.md")), ", 2");
    flush(&first).await;
    assert_eq!(
        world
            .stored_file("@-w", &memory("shared.md"))
            .await
            .unwrap(),
        b"by a, 1, 2"
    );
    files::append(&b.join(memory("shared.md")), ", 3");
    flush(&second).await;
    assert_eq!(
        world
            .stored_file("@-w", &memory("shared.md"))
            .await
            .unwrap(),
        b"by b, longer, 3"
    );
    world.entry_count("@-w").await;
    assert!(world.branches("@-w").await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_appended_bytes_are_read_and_uploaded() {
    let world = World::new();
    let directory = Arc::new(CountingDirectory::new(world.root()));
    world.write(&transcript("s"), lines("s", 0, 250_000));
    world.append(&transcript("s"), "\n");
    world.write("projects/-w/s/tool-results/t.txt", vec![b'x'; 1 << 20]);
    let handle = stream(world.root(), world.context_of(directory.clone()));
    flush(&handle).await;
    let (read, uploaded) = (directory.bytes_read(), world.uploaded("s").await);
    world.append(&transcript("s"), [b'y'; 99]);
    world.append(&transcript("s"), "\n");
    flush(&handle).await;
    let read = directory.bytes_read() - read;
    assert!(read < 100 << 10, "{read} bytes read for 100");
    assert_eq!(world.uploaded("s").await - uploaded, 100);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flush_is_one_put_and_an_idle_daemon_sends_nothing() {
    let world = World::new();
    for at in 0..50 {
        world.write(&transcript(&format!("s{at}")), lines("idle", 0, 3));
    }
    let handle = world.stream();
    flush(&handle).await;
    let requests = world.store.requests();
    sleep(Duration::from_secs(3)).await;
    flush(&handle).await;
    assert_eq!(world.store.requests(), requests, "nothing changed");
    world.append(&transcript("s7"), lines("idle", 3, 4));
    flush(&handle).await;
    assert_eq!(
        world.store.requests(),
        requests + 1,
        "one append, one request"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failing_session_delays_no_other() {
    let world = World::new();
    world.store.fail_requests("/bad/");
    for session in ["bad", "good1", "good2"] {
        world.write(&transcript(session), lines(session, 0, 3));
    }
    let handle = world.stream();
    for session in ["good1", "good2"] {
        world
            .wait_for(
                session,
                &transcript(session),
                lines(session, 0, 3).as_bytes(),
                PATIENCE,
            )
            .await;
        timeout(PATIENCE, handle.flush(Some(session.parse().unwrap())))
            .await
            .unwrap()
            .unwrap();
    }
    wait_until("it failed three times", async || {
        status(&handle, "bad").await.failed_attempts >= 3
    })
    .await;
    let log_status = status(&handle, "bad").await;
    assert!(log_status.last_error.unwrap().contains("the test fails"));
    assert!(log_status.lag_bytes > 0);
    let mut attempts = Vec::new();
    while let Some(task) = world.writer.context.index_queue.try_next() {
        if let IndexTask::Failure(failure) = task {
            assert_eq!(failure.session.as_deref(), Some("bad"));
            attempts.push(failure.attempt);
        }
    }
    assert!(attempts.len() >= 3);
    assert_eq!(attempts, (1..=attempts.len() as u32).collect::<Vec<_>>());
    world.store.recover();
    flush(&handle).await;
    assert_eq!(
        world.stored_file("bad", &transcript("bad")).await.unwrap(),
        lines("bad", 0, 3).as_bytes()
    );
    assert_eq!(
        (
            status(&handle, "bad").await.failed_attempts,
            status(&handle, "bad").await.lag_bytes
        ),
        (0, 0)
    );
}

/// Appends lines for two seconds. Returns the number of lines.
async fn append_for_two_seconds(world: &World, mut written: usize) -> usize {
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(2) {
        world.append(&transcript("s"), lines("s", written, written + 1));
        written += 1;
        sleep(Duration::from_millis(50)).await;
    }
    written
}

async fn assert_stored_exactly_once(world: &World, written: usize) {
    let whole = lines("s", 0, written);
    assert_eq!(
        world.stored_file("s", &transcript("s")).await.unwrap(),
        whole.as_bytes()
    );
    assert_eq!(world.uploaded("s").await, whole.len() as u64);
    world.entry_count("s").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failing_store_loses_and_duplicates_nothing() {
    let world = World::new();
    world.write(&transcript("s"), lines("s", 0, 3));
    let handle = world.stream();
    flush(&handle).await;
    world.store.fail_requests("/s/");
    let written = append_for_two_seconds(&world, 3).await;
    assert!(status(&handle, "s").await.failed_attempts > 0);
    // Requested while nothing can be written: the reply covers everything on disk now, not only the
    // first failed flush.
    let asked = tokio::spawn({
        let handle = handle.clone();
        async move { flush(&handle).await }
    });
    sleep(Duration::from_millis(50)).await;
    world.store.recover();
    asked.await.unwrap();
    assert_stored_exactly_once(&world, written).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hanging_store_loses_and_duplicates_nothing() {
    let world = World::new();
    world.write(&transcript("s"), lines("s", 0, 3));
    let handle = world.stream();
    flush(&handle).await;
    world.store.hold();
    let written = append_for_two_seconds(&world, 3).await;
    world.store.release();
    flush(&handle).await;
    assert_stored_exactly_once(&world, written).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_final_flush_includes_bytes_written_during_an_outage() {
    let world = World::new();
    world.write(&transcript("s"), lines("s", 0, 3));
    let handle = world.stream();
    flush(&handle).await;
    world.store.fail_requests("/s/");
    world.append(&transcript("s"), lines("s", 3, 4));
    wait_until("a flush failed", async || {
        status(&handle, "s").await.failed_attempts > 0
    })
    .await;
    world.append(&transcript("s"), lines("s", 4, 9));
    world.append(&transcript("s"), "{\"torn");
    let finish = tokio::spawn({
        let handle = handle.clone();
        async move {
            handle
                .finish(Instant::now() + Duration::from_secs(20))
                .await
        }
    });
    sleep(Duration::from_millis(400)).await;
    world.store.recover();
    let report = finish.await.unwrap().unwrap();
    assert!(report.not_durable.is_empty(), "{report:?}");
    let whole = lines("s", 0, 9) + "{\"torn";
    assert_eq!(
        String::from_utf8(world.stored_file("s", &transcript("s")).await.unwrap()).unwrap(),
        whole
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_final_flush_reports_what_is_not_durable() {
    let world = World::new();
    world.store.fail_requests("/s/");
    world.write(&transcript("s"), lines("s", 0, 3));
    let handle = world.stream();
    let report = handle
        .finish(Instant::now() + Duration::from_millis(700))
        .await
        .unwrap();
    assert_eq!(report.not_durable.len(), 1);
    assert_eq!(report.not_durable[0].session, "s");
    assert!(report.not_durable[0].lag_bytes > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_crash_nothing_is_uploaded_again_with_and_without_a_ledger() {
    let world = World::new();
    for session in ["s", "t"] {
        world.write(&transcript(session), lines(session, 0, 50));
        world.write(
            &format!("projects/-w/{session}/tool-results/r.txt"),
            "result",
        );
    }
    world.append(&transcript("t"), "{\"torn");
    let handle = world.stream();
    flush(&handle).await;
    drop(handle);
    let requests = world.store.requests();
    let handle = world.stream();
    flush(&handle).await;
    assert_eq!(
        world.store.requests(),
        requests,
        "the ledger knows that nothing changed"
    );
    drop(handle);

    world.append(&transcript("s"), lines("s", 50, 51));
    let (s, t) = (world.uploaded("s").await, world.uploaded("t").await);
    let writes = world.store.writes();
    let handle = world.stream();
    flush(&handle).await;
    assert_eq!(
        world.uploaded("s").await - s,
        lines("s", 50, 51).len() as u64
    );
    assert_eq!(world.store.writes(), writes + 1);
    drop(handle);

    world.writer.delete_ledgers();
    world.append(&transcript("s"), lines("s", 51, 52));
    let (s, writes) = (world.uploaded("s").await, world.store.writes());
    let handle = world.stream();
    flush(&handle).await;
    assert_eq!(
        world.uploaded("s").await - s,
        lines("s", 51, 52).len() as u64
    );
    assert_eq!(world.uploaded("t").await, t);
    assert_eq!(
        world.store.writes(),
        writes + 2,
        "a claim and a delta for s, nothing for t"
    );
    for session in ["s", "t"] {
        assert!(world.branches(session).await.is_empty());
    }
    assert_eq!(
        world.stored_file("s", &transcript("s")).await.unwrap(),
        lines("s", 0, 52).as_bytes()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_between_the_entry_and_the_ledger_uploads_nothing_twice() {
    let world = World::new();
    world.write(&transcript("s"), lines("s", 0, 50));
    let context = world.context();
    let path: RelPath = transcript("s").parse().unwrap();
    let mut shipment = LogFlusher::new(world.id("s"));
    shipment.paths.insert(path.clone());
    shipment.flush(&context, false).await.unwrap();
    let ledger = world
        .root()
        .join(".sessiond/ledger/team/claude-code/s.json");
    let older = std::fs::read(&ledger).unwrap();
    world.append(&transcript("s"), lines("s", 50, 60));
    shipment.flush(&context, false).await.unwrap();
    std::fs::write(&ledger, older).unwrap();
    world.append(&transcript("s"), lines("s", 60, 61));
    let mut shipment = LogFlusher::new(world.id("s"));
    shipment.paths.insert(path);
    shipment.flush(&context, false).await.unwrap();
    let whole = lines("s", 0, 61);
    assert_eq!(
        world.stored_file("s", &transcript("s")).await.unwrap(),
        whole.as_bytes()
    );
    assert_eq!(world.uploaded("s").await, whole.len() as u64);
    assert_eq!(world.entry_count("s").await, 4, "a claim and three deltas");
    assert!(world.branches("s").await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn side_files_of_any_size_make_entries_that_can_be_read_back() {
    let world = World::new();
    world.write(&transcript("s"), lines("s", 0, 2));
    world.write("projects/-w/s/tool-results/a.txt", "small");
    // Sparse, so that only its length matters.
    let large = world.root().join("projects/-w/s/tool-results/b.bin");
    std::fs::File::create(&large)
        .unwrap()
        .set_len(64 << 20)
        .unwrap();
    let mut shipment = LogFlusher::new(world.id("s"));
    shipment.paths.insert(transcript("s").parse().unwrap());
    shipment.flush(&world.context(), false).await.unwrap();
    let stored = world.stored("s").await.unwrap();
    assert_eq!(
        stored["projects/-w/s/tool-results/b.bin"].len() as u64,
        64 << 20
    );
    assert_eq!(stored["projects/-w/s/tool-results/a.txt"], b"small");
    assert_eq!(stored[&transcript("s")], lines("s", 0, 2).as_bytes());
}

slow!(async thousands_of_side_files_are_uploaded_in_entries_with_bounded_headers);
async fn thousands_of_side_files_are_uploaded_in_entries_with_bounded_headers() {
    let world = World::new();
    world.write(&transcript("s"), lines("s", 0, 2));
    for at in 0..6000 {
        world.write(&format!("file-history/s/{at}@v1"), "");
    }
    let mut shipment = LogFlusher::new(world.id("s"));
    shipment.paths.insert(transcript("s").parse().unwrap());
    shipment.flush(&world.context(), false).await.unwrap();
    let (logs, id) = (world.logs(), world.id("s"));
    for entry in logs.list_entries(&id, 0).await.unwrap() {
        let parts = logs
            .read_entry(&id, entry.seq)
            .await
            .unwrap()
            .unwrap()
            .header
            .parts
            .len();
        assert!(parts <= 4096, "{parts} parts in one entry");
    }
    let state = logs.read_state(&id).await.unwrap();
    assert_eq!(state.files.len(), 6001);
}
