//! Sessions with large files and with many files: bounded memory, no delay for other sessions, and
//! side files that are complete or absent.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sessiond::capture::EntryLimits;
use sessiond::capture::flush::LogFlusher;
use sessiond::log::ledger::Ledger;

use crate::encryption::bucket;
use crate::support::TempHome;
use crate::support::backend::{Backend, Ran, Running, eventually, transcript};
use crate::support::files::{append, files_below};
use crate::support::rng::TestRng;
use crate::support::slow;
use crate::support::world::World;

/// Memory that a daemon or a restore may use in addition to an idle daemon, in KiB.
const MAX_KIB_ABOVE_IDLE: u64 = 64 << 10;

const TRANSCRIPT: &str = "projects/-w/s.jsonl";
const RESULT: &str = "projects/-w/s/tool-results/a.bin";

/// Bytes that do not compress.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut rng = TestRng::new(seed);
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend(rng.below(u64::MAX).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// A session with small limits, flushed turn by turn.
struct Uploading {
    world: World,
    context: sessiond::capture::CaptureContext,
    flusher: LogFlusher,
}

impl Uploading {
    fn new() -> Uploading {
        let world = World::new();
        world.write(TRANSCRIPT, "{\"n\":1}\n");
        let context = sessiond::capture::CaptureContext {
            limits: EntryLimits {
                small: 4 << 10,
                target: 16 << 10,
                part: 16 << 10,
                max: 32 << 10,
            },
            ..world.context()
        };
        let flusher = LogFlusher::new(world.id("s"));
        let mut uploading = Uploading {
            world,
            context,
            flusher,
        };
        uploading.restart();
        uploading
    }

    /// The process was killed: only the files and the ledger remain.
    fn restart(&mut self) {
        self.flusher = LogFlusher::new(self.world.id("s"));
        self.flusher.paths.insert(TRANSCRIPT.parse().unwrap());
    }

    /// Runs one turn. Returns whether there is more.
    async fn turn(&mut self) -> bool {
        let outcome = self.flusher.flush_turn(&self.context, false).await.unwrap();
        outcome.is_unfinished
    }

    async fn finish(&mut self) {
        while self.turn().await {}
    }

    async fn stored(&self, path: &str) -> Option<Vec<u8>> {
        self.world.stored_file("s", path).await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_side_file_is_restored_once_its_upload_is_complete() {
    let mut session = Uploading::new();
    let bytes = noise(1, 100_000);
    session.world.write(RESULT, &bytes);
    let mut turns = 0;
    while session.turn().await {
        turns += 1;
        assert_eq!(session.stored(RESULT).await, None, "after turn {turns}");
        assert_eq!(
            session.stored(TRANSCRIPT).await,
            None,
            "it may refer to the file"
        );
    }
    assert!(turns >= 6, "{turns} turns");
    assert_eq!(session.stored(RESULT).await.unwrap(), bytes);
    assert_eq!(session.stored(TRANSCRIPT).await.unwrap(), b"{\"n\":1}\n");
    assert_eq!(session.world.uploaded("s").await, 100_008, "each byte once");
    for entry in session.world.storage.entries("s").await {
        assert!(entry.header.body_len() <= 32 << 10);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_previous_version_of_a_side_file_stays_until_the_next_one_is_complete() {
    let mut session = Uploading::new();
    session.world.write(RESULT, "first");
    session.finish().await;
    let second = noise(2, 50_000);
    session.world.write(RESULT, &second);
    while session.turn().await {
        assert_eq!(session.stored(RESULT).await.unwrap(), b"first");
    }
    assert_eq!(session.stored(RESULT).await.unwrap(), second);
    // An appended file is uploaded from its end, and shown when it is complete.
    let longer = [second.clone(), noise(3, 50_000)].concat();
    session.world.write(RESULT, &longer);
    let before = session.world.uploaded("s").await;
    while session.turn().await {
        assert_eq!(session.stored(RESULT).await.unwrap(), second);
    }
    assert_eq!(session.stored(RESULT).await.unwrap(), longer);
    assert_eq!(session.world.uploaded("s").await - before, 50_000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upload_continues_after_a_kill() {
    let mut session = Uploading::new();
    let bytes = noise(4, 100_000);
    session.world.write(RESULT, &bytes);
    for _ in 0..3 {
        assert!(session.turn().await);
        session.restart();
    }
    session.finish().await;
    assert_eq!(session.stored(RESULT).await.unwrap(), bytes);
    assert_eq!(session.world.uploaded("s").await, 100_008, "each byte once");
    assert!(session.world.branches("s").await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upload_starts_again_if_the_ledger_is_lost() {
    let mut session = Uploading::new();
    let bytes = noise(5, 60_000);
    session.world.write(RESULT, &bytes);
    for _ in 0..3 {
        assert!(session.turn().await);
    }
    let ledger = Ledger::path(&session.world.id("s")).unwrap();
    std::fs::remove_file(ledger.below(&session.world.root())).unwrap();
    session.restart();
    session.finish().await;
    assert_eq!(session.stored(RESULT).await.unwrap(), bytes);
    assert_eq!(session.stored(TRANSCRIPT).await.unwrap(), b"{\"n\":1}\n");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_changes_during_its_upload_is_uploaded_again() {
    for replaces in [false, true] {
        for len in [60_000, 90_000, 20_000] {
            let mut session = Uploading::new();
            session.world.write(RESULT, noise(6, 60_000));
            for _ in 0..3 {
                assert!(session.turn().await);
            }
            let other = noise(7, len);
            let path = session.world.root().join(RESULT);
            if replaces {
                crate::support::files::replace(&path, &other);
            } else {
                let file = File::options().write(true).open(&path).unwrap();
                file.write_all_at(&other, 0).unwrap();
                file.set_len(len as u64).unwrap();
            }
            while session.turn().await {
                assert_eq!(session.stored(RESULT).await, None);
            }
            assert_eq!(session.stored(RESULT).await.unwrap(), other);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_grows_during_its_upload_is_restored_as_a_prefix() {
    let mut session = Uploading::new();
    let bytes = noise(8, 100_000);
    session.world.write(RESULT, &bytes[..60_000]);
    for _ in 0..3 {
        assert!(session.turn().await);
    }
    session.world.append(RESULT, &bytes[60_000..]);
    while session.turn().await {
        let stored = session.stored(RESULT).await;
        assert!(stored.is_none_or(|stored| stored == bytes[..60_000]));
    }
    assert_eq!(session.stored(RESULT).await.unwrap(), bytes);
    assert_eq!(session.world.uploaded("s").await, 100_008, "each byte once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_merge_in_the_middle_of_an_upload_changes_no_restore() {
    let mut session = Uploading::new();
    let bytes = noise(9, 100_000);
    session.world.write(RESULT, "first");
    session.finish().await;
    session.world.write(RESULT, &bytes);
    while session.turn().await {}
    session.world.append(TRANSCRIPT, "{\"n\":2}\n");
    session.finish().await;
    let (logs, id) = (session.world.logs(), session.world.id("s"));
    let head = session.world.entry_count("s").await as u64;
    for (from, to) in [(4, 6), (3, 5), (6, head), (1, 5), (1, head), (2, head)] {
        sessiond::upkeep::compact::merge_range(&logs, &id, from, to)
            .await
            .unwrap();
        for seq in 2..=head {
            let files = session.world.stored_at("s", seq).await;
            let expected: &[u8] = if seq < head - 1 { b"first" } else { &bytes };
            if let Some(stored) = files.get(RESULT) {
                assert_eq!(stored, expected, "at {seq} after merging {from} to {to}");
            }
        }
    }
}

/// A figure of a process in KiB, such as `VmHWM`.
fn process_kib(pid: u32, name: &str) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find(|line| line.starts_with(name))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

/// The memory of a daemon that has nothing to do.
fn idle_kib() -> u64 {
    let (backend, home) = (Backend::file(), TempHome::new());
    append(&transcript(&home, "s1"), "{\"n\":1}\n");
    let daemon = backend.daemon(&home, &[]);
    backend.run(&home, &["flush", "--wait"]).ok();
    process_kib(daemon.0.id(), "VmRSS").unwrap()
}

/// Uploads and restores what `write` writes below a root. Neither may use more memory than the
/// limit.
#[track_caller]
fn assert_bounded_memory(sessions: &[&str], write: impl FnOnce(&Path)) {
    let idle = idle_kib();
    let (backend, home, other) = (Backend::file(), TempHome::new(), TempHome::new());
    let daemon = backend.daemon(&home, &[]);
    for session in sessions {
        append(&transcript(&home, session), "{\"n\":1}\n");
    }
    write(&home.home().join(".claude/projects/-work-app"));
    let flush = backend.run(&home, &["flush", "--wait", "--timeout", "900s"]);
    let uploading = process_kib(daemon.0.id(), "VmHWM").unwrap();
    flush.ok();
    assert_eq!(daemon.stop().0, Some(0));
    let mut restoring = 0;
    for session in sessions {
        let mut command = backend.command(&other, &["restore", session]);
        let mut restore = Running(command.stdout(Stdio::null()).spawn().unwrap());
        while restore.0.try_wait().unwrap().is_none() {
            restoring = restoring.max(process_kib(restore.0.id(), "VmHWM").unwrap_or(0));
            std::thread::sleep(Duration::from_millis(2));
        }
        assert_eq!(restore.code(), Some(0));
    }
    println!("idle {idle} KiB, uploading {uploading} KiB, restoring {restoring} KiB");
    let projects = |home: &TempHome| files_below(&home.home().join(".claude/projects"));
    assert!(
        projects(&home) == projects(&other),
        "the restored files differ"
    );
    for (what, high) in [("uploading", uploading), ("restoring", restoring)] {
        assert!(
            high <= idle + MAX_KIB_ABOVE_IDLE,
            "{what}: {high} KiB, idle: {idle} KiB"
        );
    }
}

fn write_noise(path: &Path, seed: u64, megabytes: usize) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let mut file = File::create(path).unwrap();
    for at in 0..megabytes {
        file.write_all(&noise(seed * 1000 + at as u64, 1 << 20))
            .unwrap();
    }
}

slow!(a_file_of_100_mb_stays_within_the_memory_limit);
fn a_file_of_100_mb_stays_within_the_memory_limit() {
    assert_bounded_memory(&["s1"], |projects| {
        write_noise(&projects.join("s1/tool-results/a.bin"), 1, 100);
    });
}

slow!(large_files_of_eight_sessions_stay_within_the_memory_limit);
fn large_files_of_eight_sessions_stay_within_the_memory_limit() {
    let sessions = ["s1", "s2", "s3", "s4", "s5", "s6", "s7", "s8"];
    assert_bounded_memory(&sessions, |projects| {
        for (seed, session) in (10..).zip(sessions) {
            let path = projects.join(format!("{session}/tool-results/a.bin"));
            write_noise(&path, seed, 24);
        }
    });
}

slow!(a_long_transcript_stays_within_the_memory_limit);
fn a_long_transcript_stays_within_the_memory_limit() {
    assert_bounded_memory(&["s1"], |projects| {
        let mut file = File::options()
            .append(true)
            .open(projects.join("s1.jsonl"))
            .unwrap();
        let text = "seven words of an ordinary conversation, again ".repeat(20);
        for at in 0..60_000 {
            writeln!(
                file,
                "{{\"type\":\"user\",\"uuid\":\"u{at}\",\"sessionId\":\"s1\",\"timestamp\":\"2026-05-01T12:00:00Z\",\
                 \"message\":{{\"role\":\"user\",\"content\":\"{at} {text}\"}}}}"
            )
            .unwrap();
        }
    });
}

slow!(sixty_thousand_files_stay_within_the_memory_limit);
fn sixty_thousand_files_stay_within_the_memory_limit() {
    assert_bounded_memory(&["s1"], |projects| {
        let directory = projects.join("s1/tool-results");
        std::fs::create_dir_all(&directory).unwrap();
        for at in 0..60_000 {
            std::fs::write(
                directory.join(format!("result-{at:06}.txt")),
                at.to_string(),
            )
            .unwrap();
        }
    });
}

/// Changes a side file of several parts until `flush --wait` returns. `change` gets the file and the
/// number of stored entries.
fn flush_while(mut change: impl FnMut(&File, usize) + Send + 'static) -> Ran {
    let (backend, home) = (Backend::file(), TempHome::new());
    append(&transcript(&home, "s1"), "{\"n\":1}\n");
    let result = home
        .home()
        .join(".claude/projects/-work-app/s1/tool-results/a.bin");
    write_noise(&result, 1, 3);
    let log = bucket(&backend).join("v1/default/claude-code/s1/log");
    let is_done = Arc::new(AtomicBool::new(false));
    let writer = std::thread::spawn({
        let is_done = is_done.clone();
        move || {
            let file = File::options().write(true).open(result).unwrap();
            while !is_done.load(Ordering::Relaxed) {
                change(&file, std::fs::read_dir(&log).map_or(0, Iterator::count));
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    });
    let _daemon = backend.daemon(&home, &[]);
    let flush = backend.run(&home, &["flush", "--wait", "--timeout", "60s"]);
    is_done.store(true, Ordering::Relaxed);
    writer.join().unwrap();
    flush
}

slow!(a_flush_ends_although_a_large_side_file_grows);
fn a_flush_ends_although_a_large_side_file_grows() {
    // It grows faster than it is uploaded: by more than one part for each entry.
    let (mut len, mut grown) = (3 << 20, 0);
    flush_while(move |file, entries| {
        for entry in grown..entries {
            let more = noise(entry as u64, 1_200_000);
            file.write_all_at(&more, len).unwrap();
            len += more.len() as u64;
        }
        grown = grown.max(entries);
    })
    .ok();
}

slow!(a_flush_reports_a_large_side_file_that_is_rewritten_all_the_time);
fn a_flush_reports_a_large_side_file_that_is_rewritten_all_the_time() {
    let mut round = 0_u64;
    let rewrite = move |file: &File, _| {
        round += 1;
        file.write_all_at(&round.to_le_bytes(), 0).unwrap();
    };
    flush_while(rewrite).fails(
        5,
        "not everything is durable: projects/-work-app/s1/tool-results/a.bin changes during every upload",
        "run \"sessiond flush --wait\" again",
    );
}

slow!(sessions_with_gigabytes_do_not_delay_another_session);
fn sessions_with_gigabytes_do_not_delay_another_session() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let heavy = ["h1", "h2", "h3", "h4"];
    for session in heavy {
        append(&transcript(&home, session), "{\"n\":1}\n");
        let results = home
            .home()
            .join(format!(".claude/projects/-work-app/{session}/tool-results"));
        std::fs::create_dir_all(&results).unwrap();
        // Sparse: it takes no space, but has to be read and compressed.
        let file = File::create(results.join("a.bin")).unwrap();
        file.set_len(3 << 30).unwrap();
    }
    let daemon = backend.daemon(&home, &["--http", "127.0.0.1:0"]);
    let log = || std::fs::read_to_string(home.path().join("daemon.log")).unwrap();
    let address = log();
    let address = address.split("address=").nth(1).unwrap();
    let address = address.split_whitespace().next().unwrap().to_owned();
    let lag_of_heavy = || {
        let status = backend.run(&home, &["status", "--json"]).ok().json();
        let text = status.to_string();
        heavy.iter().filter(|name| text.contains(**name)).count()
    };
    eventually("the heavy sessions are known", || lag_of_heavy() == 4);
    for round in 0..5 {
        append(&transcript(&home, "light"), format!("{{\"n\":{round}}}\n"));
        let flush = ["flush", "--wait", "--session", "light", "--timeout", "30s"];
        backend.run(&home, &flush).ok();
        let request = "GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
        let response = crate::support::http::send(&*address, request).unwrap();
        assert_eq!(response.status, 200, "{}", response.body);
    }
    // The heavy sessions are not done, so the light one did not wait for them.
    let status = backend.run(&home, &["status", "--json"]).ok().json();
    let heavy_lag: u64 = status["sessions"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|session| session["session"].as_str().unwrap().starts_with('h'))
        .map(|session| session["lag_bytes"].as_u64().unwrap())
        .sum();
    assert!(heavy_lag > 0, "{status}");
    let pid = daemon.0.id();
    let high = process_kib(pid, "VmHWM").unwrap();
    assert!(high <= idle_kib() + MAX_KIB_ABOVE_IDLE, "{high} KiB");
}
