//! Server outages: the agent continues, nothing is lost or duplicated, lag is visible, and catching
//! up needs no operator.

use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use sessiond::index::Index;
use sessiond::index::sql::SqlIndex;
use sessiond::log::fence::FencingPolicy;
use sessiond::upkeep::reindex::rebuild;

use crate::support::files::{Files, files_below};
use crate::support::needs_servers;
use crate::support::proxy::{Mode, TcpProxy};
use crate::support::servers::{Postgres, S3, postgres, s3};
use crate::support::storage::{Rows, Storage, assert_same_rows, profile, rows};
use crate::support::{TempHome, block_on, sessiond};

const SESSION: &str = "s1";
const TRANSCRIPT: &str = "projects/-w/s1.jsonl";
/// What anything here may take; a machine under load is no failure.
const PATIENCE: Duration = Duration::from_secs(40);

/// A home, and where its sessions are kept.
struct Host {
    home: TempHome,
    store: String,
    index: String,
    extra: Vec<(&'static str, String)>,
}

impl Host {
    /// A directory and an SQLite file.
    fn new() -> Host {
        let home = TempHome::new();
        let store = format!("file://{}/store", home.path().display());
        let index = format!("sqlite://{}/index.db", home.path().display());
        std::fs::create_dir(home.home().join(".claude")).unwrap();
        Host {
            home,
            store,
            index,
            extra: Vec::new(),
        }
    }

    fn with_index(index: String) -> Host {
        Host {
            index,
            ..Host::new()
        }
    }

    /// A bucket, reached at `endpoint`.
    fn with_bucket(server: &S3, endpoint: &str) -> Host {
        let store = format!("s3://{}/p?endpoint={endpoint}", server.fresh_bucket());
        let keys = [
            ("AWS_ACCESS_KEY_ID", &server.access_key),
            ("AWS_SECRET_ACCESS_KEY", &server.secret_key),
        ];
        Host {
            store,
            extra: keys.map(|(name, key)| (name, key.clone())).into(),
            ..Host::new()
        }
    }

    /// Another machine with the same store and index.
    fn elsewhere(&self) -> Host {
        Host {
            store: self.store.clone(),
            index: self.index.clone(),
            extra: self.extra.clone(),
            ..Host::new()
        }
    }

    fn root(&self) -> PathBuf {
        self.home.home().join(".claude")
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = self.home.command(&sessiond());
        command
            .args(args)
            .env("SESSIOND_STORE", &self.store)
            .env("SESSIOND_INDEX", &self.index);
        command
            .envs(self.extra.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null());
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// Runs a command that must succeed.
    fn ok(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(
            output.status.success(),
            "{args:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).unwrap()
    }

    fn daemon(&self, args: &[&str]) -> Daemon {
        let ready = self.home.path().join("ready");
        std::fs::remove_file(&ready).ok();
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(self.home.path().join("daemon.log"))
            .unwrap();
        let mut command = self.command(&[
            "daemon",
            "--flush-interval",
            "50ms",
            "--ready-file",
            ready.to_str().unwrap(),
        ]);
        let process = command.args(args).stderr(log).spawn().unwrap();
        let daemon = Daemon { process };
        until("the daemon is ready", || ready.exists());
        daemon
    }

    fn append(&self, text: &str) {
        self.append_to(TRANSCRIPT, text);
    }

    fn append_to(&self, path: &str, text: &str) {
        use std::io::Write as _;
        let path = self.root().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let mut file = std::fs::File::options()
            .create(true)
            .append(true)
            .open(path)
            .unwrap();
        file.write_all(format!("{{\"text\":\"{text}\",\"cwd\":\"/w\"}}\n").as_bytes())
            .unwrap();
    }

    fn status(&self) -> Value {
        serde_json::from_str(&self.ok(&["status", "--json"])).unwrap()
    }

    /// The session's line of the status.
    fn session(&self) -> Value {
        let status = self.status();
        status["sessions"]
            .as_array()
            .unwrap()
            .iter()
            .find(|log| log["session"] == SESSION)
            .cloned()
            .unwrap_or_default()
    }

    fn flush(&self) {
        self.ok(&["flush", "--wait", "--timeout", "40s"]);
    }

    /// What a restore elsewhere gives.
    fn restored(&self) -> Files {
        let other = self.elsewhere();
        other.ok(&[
            "pull",
            SESSION,
            "--to",
            other.home.path().join("copy").to_str().unwrap(),
        ]);
        files_below(&other.home.path().join("copy"))
    }

    /// Everything is stored, byte for byte, and no byte twice.
    fn assert_all_stored_once(&self) {
        let files = files_below(&self.root());
        assert_eq!(self.restored(), files);
        let directory = tempfile::tempdir_in(self.home.path()).unwrap();
        let raw = directory.path().join("raw");
        self.ok(&["pull", SESSION, "--raw", "--to", raw.to_str().unwrap()]);
        let stored: usize = files_below(&raw)
            .iter()
            .filter(|(path, _)| path.starts_with("log/"))
            .map(|(_, bytes)| body_len(bytes))
            .sum();
        assert_eq!(
            stored,
            files.values().map(Vec::len).sum::<usize>(),
            "bytes were shipped twice"
        );
        assert!(!raw.join("branch").exists());
    }

    fn errors(&self) -> Vec<sessiond::index::Failure> {
        let index = SqlIndex::open(&self.index).unwrap();
        block_on(async move {
            index
                .failures(&"default".parse().unwrap(), 1000)
                .await
                .unwrap()
        })
    }
}

/// Bytes behind an entry's header.
fn body_len(entry: &[u8]) -> usize {
    sessiond::codec::entry::decode("entry", entry)
        .unwrap()
        .body
        .len()
}

struct Daemon {
    process: Child,
}

impl Daemon {
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }

    fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Asks it to stop; answers its exit code and how long it took.
    fn stop(mut self) -> (Option<i32>, Duration) {
        let began = Instant::now();
        self.signal(Signal::TERM);
        let status = self.process.wait().unwrap();
        (status.code(), began.elapsed())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(25));
    }
}

/// The index's rows of a host's agent, as they are and as `reindex` makes them.
fn rows_of(host: &Host) -> Vec<Rows> {
    let url = host.index.clone();
    block_on(async move {
        let index = std::sync::Arc::new(SqlIndex::open(&url).unwrap());
        let place = Storage {
            index: index.clone(),
            ..Storage::files()
        };
        let logs = sessiond::log::Logs {
            namespace: "default".parse().unwrap(),
            ..place.logs_with_fencing(FencingPolicy::Off)
        };
        rows(&logs, &*index).await
    })
}

fn assert_reindex_agrees(host: &Host, what: &str) {
    let before = rows_of(host);
    assert!(!before.is_empty(), "{what}: the index is empty");
    host.ok(&["reindex"]);
    assert_same_rows(&before, &rows_of(host), what);
}

/// The index knows what the daemon has written.
fn wait_for_index(host: &Host) {
    until("the index has caught up", || {
        let status = host.status();
        status["index_backlog"] == 0 && status["index_reachable"] == true
    });
}

needs_servers!(the_last_entry_is_indexed_before_the_daemon_exits);
fn the_last_entry_is_indexed_before_the_daemon_exits() {
    let mut urls = vec![None];
    urls.extend(postgres().map(|server| Some(server.fresh_database())));
    for url in urls {
        let host = url.map_or_else(Host::new, Host::with_index);
        for round in 0..6 {
            let daemon = host.daemon(&[]);
            host.append(&format!("round {round}"));
            assert_eq!(daemon.stop().0, Some(0));
            let head = rows_of(&host)[0].3.iter().map(|entry| entry.seq).max();
            // A claim, then one delta a round.
            assert_eq!(head, Some(round + 2), "{}", host.index);
        }
        assert_reindex_agrees(&host, "after an undisturbed run");
    }
}

needs_servers!(a_slow_database_receives_the_last_entry_before_exit);
fn a_slow_database_receives_the_last_entry_before_exit() {
    let Some(server) = postgres() else { return };
    let proxy = TcpProxy::start(server.addr());
    let slow = server
        .fresh_database()
        .replace(&server.addr().to_string(), &proxy.addr().to_string());
    let host = Host::with_index(slow);
    let daemon = host.daemon(&[]);
    host.append("one");
    host.flush();
    wait_for_index(&host);
    proxy.set(Mode::Delay(Duration::from_millis(60)));
    host.append("two");
    assert_eq!(daemon.stop().0, Some(0));
    proxy.set(Mode::Pass);
    let entries = rows_of(&host).remove(0).3;
    assert_eq!(entries.iter().map(|entry| entry.seq).max(), Some(3));
}

needs_servers!(an_index_outage_stops_nothing_and_the_index_catches_up);
fn an_index_outage_stops_nothing_and_the_index_catches_up() {
    let Some(server) = Postgres::start_private() else {
        return;
    };
    let host = Host::with_index(server.fresh_database());
    // Down before the start, through a crash, a restart and a restore elsewhere.
    server.stop();
    let daemon = host.daemon(&[]);
    host.append("with the database down");
    host.append_to("projects/-w/memory/M.md", "of the project");
    host.flush();
    until("the status tells", || {
        host.status()["index_reachable"] == false
    });
    daemon.kill();
    host.append("while nobody was there");
    let daemon = host.daemon(&[]);
    host.flush();
    assert_eq!(
        host.restored(),
        files_below(&host.root())
            .into_iter()
            .filter(|(path, _)| !path.contains("memory"))
            .collect()
    );
    let other = host.elsewhere();
    other.ok(&["restore", SESSION]);
    assert_eq!(files_below(&other.root()), files_below(&host.root()));
    // The old one finds out, and its branch too is written without the database.
    other.append("elsewhere");
    let second = other.daemon(&[]);
    other.flush();
    host.append("too late");
    let fenced = host.run(&["flush", "--wait"]);
    assert_eq!(
        fenced.status.code(),
        Some(4),
        "{}",
        String::from_utf8_lossy(&fenced.stderr)
    );
    // A restart forgets what the feed held; the branch must be found all the same.
    daemon.kill();
    let daemon = host.daemon(&[]);

    server.start();
    wait_for_index(&host);
    wait_for_index(&other);
    let known = || {
        rows_of(&host)
            .into_iter()
            .find(|rows| rows.0.name.to_string() == SESSION)
    };
    until("the branch is listed", || {
        known()
            .and_then(|rows| rows.1)
            .is_some_and(|row| row.branches.len() == 1)
    });
    assert_reindex_agrees(&host, "after an outage of the database");
    // Away in the middle, and back.
    other.append("before");
    other.flush();
    server.stop();
    other.append("meanwhile");
    other.flush();
    server.start();
    other.append("after");
    other.flush();
    wait_for_index(&other);
    assert_eq!(second.stop().0, Some(0));
    assert_reindex_agrees(&other, "after an outage in the middle");
    // A branch grows during an outage, and who wrote it crashes: its numbers are below the log's, and still they are missed.
    server.stop();
    host.append("more of the branch");
    assert_eq!(host.run(&["flush", "--wait"]).status.code(), Some(4));
    daemon.kill();
    server.start();
    let daemon = host.daemon(&[]);
    let head = host.session()["head"].as_u64();
    until("the branch is known to its end", || {
        let entries = known().map(|rows| rows.3).unwrap_or_default();
        entries
            .iter()
            .filter(|entry| entry.branch.is_some())
            .map(|entry| entry.seq)
            .max()
            == head
    });
    assert_eq!(daemon.stop().0, Some(0));
    assert_reindex_agrees(&host, "after a branch grew");
    let listed = host.ok(&["ls", "--json"]);
    assert!(
        listed.contains("\"branches\": [\n") && listed.contains(SESSION),
        "{listed}"
    );
}

needs_servers!(a_store_outage_never_stops_the_agent_and_the_daemon_catches_up);
fn a_store_outage_never_stops_the_agent_and_the_daemon_catches_up() {
    let Some(server) = S3::start_private() else {
        return;
    };
    let host = Host::with_bucket(&server, &server.endpoint);
    let daemon = host.daemon(&["--request-timeout", "2s"]);
    host.append("before");
    host.flush();
    server.stop();
    for round in 0..20 {
        host.append(&format!("meanwhile {round}"));
    }
    until("the lag is visible", || {
        let session = host.session();
        session["lag_bytes"].as_u64() > Some(100)
            && session["failed_attempts"].as_u64() > Some(1)
            && session["last_error"].is_string()
    });
    let late = host.run(&["flush", "--wait", "--timeout", "200ms"]);
    assert_eq!(
        late.status.code(),
        Some(5),
        "{}",
        String::from_utf8_lossy(&late.stderr)
    );
    server.start();
    until("the lag is gone", || host.session()["lag_bytes"] == 0);
    assert!(host.session()["last_error"].is_null());
    host.append("after");
    assert_eq!(daemon.stop().0, Some(0));
    host.assert_all_stored_once();

    // Down from the start: streaming starts all the same, and a restore says so.
    server.stop();
    host.append("down again");
    let daemon = host.daemon(&["--request-timeout", "2s"]);
    until("the lag is visible", || {
        host.session()["lag_bytes"].as_u64() > Some(0)
    });
    assert_eq!(
        host.elsewhere()
            .run(&["restore", SESSION, "--request-timeout", "2s"])
            .status
            .code(),
        Some(5)
    );
    server.start();
    until("the lag is gone", || host.session()["lag_bytes"] == 0);
    assert_eq!(daemon.stop().0, Some(0));
    host.assert_all_stored_once();
    assert_reindex_agrees(&host, "after an outage of the store");
}

needs_servers!(network_faults_lose_and_duplicate_nothing);
fn network_faults_lose_and_duplicate_nothing() {
    let Some(server) = s3() else { return };
    let proxy = TcpProxy::start(server.addr());
    let host = Host::with_bucket(server, &format!("http://{}", proxy.addr()));
    let daemon = host.daemon(&["--request-timeout", "500ms"]);
    let modes = [
        Mode::DropResponses,
        Mode::Refuse,
        Mode::Hang,
        Mode::CutAfter(40),
        Mode::Delay(Duration::from_millis(700)),
        Mode::DropResponses,
    ];
    for (round, mode) in modes.into_iter().enumerate() {
        proxy.set(mode);
        for part in 0..5 {
            host.append(&format!("{round} {mode:?} {part}"));
        }
        until("two attempts have failed", || {
            host.session()["failed_attempts"].as_u64() >= Some(2)
        });
        let session = host.session();
        assert!(
            session["lag_bytes"].as_u64() > Some(0),
            "{mode:?}: {session}"
        );
        if mode == Mode::Hang {
            assert!(
                session["last_error"]
                    .as_str()
                    .unwrap()
                    .contains("within 500ms"),
                "{session}"
            );
        }
        proxy.set(Mode::Pass);
        until("the lag is gone", || host.session()["lag_bytes"] == 0);
    }
    wait_for_index(&host);
    assert_eq!(daemon.stop().0, Some(0));
    host.assert_all_stored_once();
    // Each spell of failures counts from one.
    let mut errors = host.errors();
    errors.sort_by_key(|failure| failure.at);
    let attempts: Vec<u32> = errors.iter().map(|failure| failure.attempt).collect();
    assert!(
        attempts.iter().filter(|attempt| **attempt == 1).count() >= modes.len(),
        "{attempts:?}"
    );
    assert!(
        attempts
            .windows(2)
            .all(|pair| pair[1] == 1 || pair[1] == pair[0] + 1),
        "{attempts:?}"
    );
    assert!(
        errors
            .iter()
            .all(|failure| failure.session.as_deref() == Some(SESSION)
                && !failure.message.is_empty())
    );
    assert_reindex_agrees(&host, "after a bad network");
}

needs_servers!(a_hanging_store_does_not_block_the_agents_start);
fn a_hanging_store_does_not_block_the_agents_start() {
    let Some(server) = s3() else { return };
    let proxy = TcpProxy::start(server.addr());
    let host = Host::with_bucket(server, &format!("http://{}", proxy.addr()));
    proxy.set(Mode::Hang);
    let began = Instant::now();
    let output = host.run(&[
        "run",
        "--flush-deadline",
        "1s",
        "--",
        "sh",
        "-c",
        "echo started; exit 7",
    ]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        began.elapsed() < Duration::from_secs(8),
        "{:?}: {text}",
        began.elapsed()
    );
    assert_eq!(
        (output.status.code(), &output.stdout[..]),
        (Some(7), &b"started\n"[..]),
        "{text}"
    );
}

needs_servers!(the_final_flush_respects_its_deadline);
fn the_final_flush_respects_its_deadline() {
    let Some(server) = s3() else { return };
    let proxy = TcpProxy::start(server.addr());
    let endpoint = format!("http://{}", proxy.addr());
    for mode in [Mode::Refuse, Mode::Hang] {
        proxy.set(Mode::Pass);
        let host = Host::with_bucket(server, &endpoint);
        let daemon = host.daemon(&["--flush-deadline", "1s"]);
        host.append("durable");
        host.flush();
        proxy.set(mode);
        host.append("not durable");
        let files = files_below(&host.root());
        let (code, took) = daemon.stop();
        assert_eq!(code, Some(9), "{mode:?}");
        assert!(took < Duration::from_secs(5), "{mode:?}: {took:?}");
        assert_eq!(files_below(&host.root()), files, "{mode:?}");
        // Twice is enough.
        let daemon = host.daemon(&["--flush-deadline", "60s"]);
        let began = Instant::now();
        daemon.signal(Signal::TERM);
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(daemon.stop().0, Some(9), "{mode:?}");
        assert!(
            began.elapsed() < Duration::from_secs(4),
            "{mode:?}: {:?}",
            began.elapsed()
        );
        // An agent's own exit code stands.
        let script = format!(
            "echo '{{}}' >> {}; exit 42",
            host.root().join(TRANSCRIPT).display()
        );
        let began = Instant::now();
        let output = host.run(&["run", "--flush-deadline", "1s", "--", "sh", "-c", &script]);
        assert_eq!(
            output.status.code(),
            Some(42),
            "{mode:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        assert!(
            String::from_utf8_lossy(&output.stderr).contains("not durable"),
            "{mode:?}"
        );
        assert!(
            began.elapsed() < Duration::from_secs(8),
            "{mode:?}: {:?}",
            began.elapsed()
        );
        // And when the store is back, the next run ships all of it.
        proxy.set(Mode::Pass);
        let daemon = host.daemon(&[]);
        host.flush();
        assert_eq!(daemon.stop().0, Some(0));
        host.assert_all_stored_once();
    }
}

#[test]
fn a_killed_daemon_loses_nothing_and_uploads_nothing_twice() {
    let host = Host::new();
    for round in 0..8u64 {
        let daemon = host.daemon(&[]);
        for part in 0..10 {
            host.append(&format!("{round} {part}"));
            std::thread::sleep(Duration::from_millis(3 + round));
        }
        daemon.kill();
    }
    let daemon = host.daemon(&[]);
    host.flush();
    wait_for_index(&host);
    assert_eq!(host.session()["write_target"], "main");
    assert_eq!(daemon.stop().0, Some(0));
    host.assert_all_stored_once();
    assert_reindex_agrees(&host, "after eight crashes");
}

#[test]
fn a_rebuilt_index_equals_the_live_one() {
    block_on(async {
        let place = Storage::files();
        let fresh = Storage::files();
        let mut writer = crate::support::writer::Writer::new(&place);
        for round in 0..4 {
            writer.append(
                TRANSCRIPT,
                &format!("{{\"round\":{round},\"cwd\":\"/w{round}\",\"version\":\"1.{round}\"}}\n"),
            );
            writer.append("projects/-w/memory/M.md", "memory\n");
            writer.replace("tasks/s1/1.json", &format!("{{\"v\":{round}}}"));
            writer.flush().await.unwrap();
        }
        writer.update_index().await;
        rebuild(&place.logs(), &*fresh.index, &*profile(), |_, _| {})
            .await
            .unwrap();
        assert_same_rows(
            &place.rows().await,
            &rows(&place.logs(), &*fresh.index).await,
            "from nothing",
        );
    });
}
