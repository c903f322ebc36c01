//! Server outages: the agent continues, nothing is lost or duplicated, lag is visible, and catching
//! up needs no operator.

use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use serde_json::Value;
use sessiond::index::Index;
use sessiond::index::sql::SqlIndex;
use sessiond::log::fence::FencingPolicy;
use sessiond::upkeep::reindex::rebuild;

use crate::support::backend::{Backend, Ran, Running, Signal, eventually};
use crate::support::files::{Files, files_below};
use crate::support::needs_servers;
use crate::support::proxy::{Mode, TcpProxy};
use crate::support::servers::{Postgres, S3, postgres, s3};
use crate::support::storage::{
    Rows, SESSION, Storage, TRANSCRIPT, assert_same_rows, profile, rows,
};
use crate::support::{TempHome, block_on};

/// A home directory on a backend that other machines may share.
struct Machine {
    home: TempHome,
    backend: Rc<Backend>,
}

impl Machine {
    /// A directory and an SQLite file.
    fn new() -> Machine {
        Machine::on(Rc::new(Backend::file()))
    }

    fn on(backend: Rc<Backend>) -> Machine {
        let home = TempHome::new();
        std::fs::create_dir(home.home().join(".claude")).unwrap();
        Machine { home, backend }
    }

    fn with_index(index: String) -> Machine {
        let mut backend = Backend::file();
        backend.set("SESSIOND_INDEX", index);
        Machine::on(Rc::new(backend))
    }

    /// A bucket at `endpoint`, and an SQLite file.
    fn with_bucket(server: &S3, endpoint: &str) -> Machine {
        let mut backend = Backend::on_server(server, endpoint, &server.fresh_bucket(), "");
        let index = format!("sqlite://{}/index.db", backend.path().display());
        backend.set("SESSIOND_INDEX", index);
        Machine::on(Rc::new(backend))
    }

    /// Another machine with the same store and index.
    fn other(&self) -> Machine {
        Machine::on(self.backend.clone())
    }

    fn root(&self) -> PathBuf {
        self.home.home().join(".claude")
    }

    fn run(&self, args: &[&str]) -> Ran {
        self.backend.run(&self.home, args)
    }

    /// Runs a command that must succeed.
    fn ok(&self, args: &[&str]) -> String {
        self.run(args).ok().out()
    }

    fn daemon(&self, args: &[&str]) -> Running {
        let args = [&["--flush-interval", "50ms"], args].concat();
        self.backend.daemon(&self.home, &args)
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

    /// The session in the output of `status`.
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

    /// The files that another machine pulls.
    fn restored(&self) -> Files {
        let other = self.other();
        other.ok(&[
            "pull",
            SESSION,
            "--to",
            other.home.path().join("copy").to_str().unwrap(),
        ]);
        files_below(&other.home.path().join("copy"))
    }

    /// Checks that everything is stored byte for byte, and no byte twice.
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
            "bytes were uploaded twice"
        );
        assert!(!raw.join("branch").exists());
    }

    fn errors(&self) -> Vec<sessiond::index::Failure> {
        let index = SqlIndex::open(self.backend.index_url()).unwrap();
        block_on(async move {
            index
                .failures(&"default".parse().unwrap(), 1000)
                .await
                .unwrap()
        })
    }
}

/// The length of an entry without its header.
fn body_len(entry: &[u8]) -> usize {
    sessiond::codec::entry::decode("entry", entry)
        .unwrap()
        .body
        .len()
}

/// The rows of the agent in the index of a machine.
fn rows_of(machine: &Machine) -> Vec<Rows> {
    let url = machine.backend.index_url().to_owned();
    block_on(async move {
        let index = std::sync::Arc::new(SqlIndex::open(&url).unwrap());
        let storage = Storage {
            index: index.clone(),
            ..Storage::files()
        };
        let logs = sessiond::log::Logs {
            namespace: "default".parse().unwrap(),
            ..storage.logs_with_fencing(FencingPolicy::Off)
        };
        rows(&logs, &*index).await
    })
}

fn assert_reindex_agrees(machine: &Machine, what: &str) {
    let before = rows_of(machine);
    assert!(!before.is_empty(), "{what}: the index is empty");
    machine.ok(&["reindex"]);
    assert_same_rows(&before, &rows_of(machine), what);
}

/// Waits until the index has everything that the daemon has written.
fn wait_for_index(machine: &Machine) {
    eventually("the index has caught up", || {
        let status = machine.status();
        status["index_backlog"] == 0 && status["index_reachable"] == true
    });
}

needs_servers!(the_last_entry_is_indexed_before_the_daemon_exits);
fn the_last_entry_is_indexed_before_the_daemon_exits() {
    let mut urls = vec![None];
    urls.extend(postgres().map(|server| Some(server.fresh_database())));
    for url in urls {
        let machine = url.map_or_else(Machine::new, Machine::with_index);
        for round in 0..6 {
            let daemon = machine.daemon(&[]);
            machine.append(&format!("round {round}"));
            assert_eq!(daemon.stop().0, Some(0));
            let head = rows_of(&machine)[0].3.iter().map(|entry| entry.seq).max();
            // A claim, then one delta per round.
            assert_eq!(head, Some(round + 2), "{}", machine.backend.index_url());
        }
        assert_reindex_agrees(&machine, "after an undisturbed run");
    }
}

needs_servers!(a_slow_database_receives_the_last_entry_before_exit);
fn a_slow_database_receives_the_last_entry_before_exit() {
    let Some(server) = postgres() else { return };
    let proxy = TcpProxy::start(server.addr());
    let slow = server
        .fresh_database()
        .replace(&server.addr().to_string(), &proxy.addr().to_string());
    let machine = Machine::with_index(slow);
    let daemon = machine.daemon(&[]);
    machine.append("one");
    machine.flush();
    wait_for_index(&machine);
    proxy.set(Mode::Delay(Duration::from_millis(60)));
    machine.append("two");
    assert_eq!(daemon.stop().0, Some(0));
    proxy.set(Mode::Pass);
    let entries = rows_of(&machine).remove(0).3;
    assert_eq!(entries.iter().map(|entry| entry.seq).max(), Some(3));
}

needs_servers!(an_index_outage_stops_nothing_and_the_index_catches_up);
fn an_index_outage_stops_nothing_and_the_index_catches_up() {
    let Some(server) = Postgres::start_private() else {
        return;
    };
    let machine = Machine::with_index(server.fresh_database());
    // Down before the start, and during a crash, a restart and a restore on another machine.
    server.stop();
    let mut daemon = machine.daemon(&[]);
    machine.append("with the database down");
    machine.append_to("projects/-w/memory/M.md", "of the project");
    machine.flush();
    eventually("the status reports it", || {
        machine.status()["index_reachable"] == false
    });
    daemon.kill();
    machine.append("while nobody was there");
    let mut daemon = machine.daemon(&[]);
    machine.flush();
    assert_eq!(
        machine.restored(),
        files_below(&machine.root())
            .into_iter()
            .filter(|(path, _)| !path.contains("memory"))
            .collect()
    );
    let other = machine.other();
    other.ok(&["restore", SESSION]);
    assert_eq!(files_below(&other.root()), files_below(&machine.root()));
    // The old daemon is fenced, and writes its branch without the database too.
    other.append("elsewhere");
    let second = other.daemon(&[]);
    other.flush();
    machine.append("too late");
    let fenced = machine.run(&["flush", "--wait"]);
    assert_eq!(fenced.code(), 4, "{}", fenced.err());
    // A restart loses the index queue; the branch must be found anyway.
    daemon.kill();
    let mut daemon = machine.daemon(&[]);

    server.start();
    wait_for_index(&machine);
    wait_for_index(&other);
    let known = || {
        rows_of(&machine)
            .into_iter()
            .find(|rows| rows.0.name.to_string() == SESSION)
    };
    eventually("the branch is listed", || {
        known()
            .and_then(|rows| rows.1)
            .is_some_and(|row| row.branches.len() == 1)
    });
    eventually("the log of the project is listed", || {
        rows_of(&machine).len() == 2
    });
    assert_reindex_agrees(&machine, "after an outage of the database");
    // An outage during the run.
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
    // A branch grows during an outage, and its writer crashes. Its seqs are lower than the head of
    // the log, and must still be found.
    server.stop();
    machine.append("more of the branch");
    assert_eq!(machine.run(&["flush", "--wait"]).code(), 4);
    daemon.kill();
    server.start();
    let daemon = machine.daemon(&[]);
    let head = machine.session()["head"].as_u64();
    eventually("the index has the whole branch", || {
        let entries = known().map(|rows| rows.3).unwrap_or_default();
        entries
            .iter()
            .filter(|entry| entry.branch.is_some())
            .map(|entry| entry.seq)
            .max()
            == head
    });
    assert_eq!(daemon.stop().0, Some(0));
    assert_reindex_agrees(&machine, "after a branch grew");
    let listed = machine.ok(&["ls", "--json"]);
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
    let machine = Machine::with_bucket(&server, &server.endpoint);
    let daemon = machine.daemon(&["--request-timeout", "2s"]);
    machine.append("before");
    machine.flush();
    server.stop();
    for round in 0..20 {
        machine.append(&format!("meanwhile {round}"));
    }
    eventually("the lag is visible", || {
        let session = machine.session();
        session["lag_bytes"].as_u64() > Some(100)
            && session["failed_attempts"].as_u64() > Some(1)
            && session["last_error"].is_string()
    });
    let late = machine.run(&["flush", "--wait", "--timeout", "200ms"]);
    assert_eq!(late.code(), 5, "{}", late.err());
    server.start();
    eventually("the lag is gone", || machine.session()["lag_bytes"] == 0);
    assert!(machine.session()["last_error"].is_null());
    machine.append("after");
    assert_eq!(daemon.stop().0, Some(0));
    machine.assert_all_stored_once();

    // Down from the start: streaming starts anyway, and a restore fails.
    server.stop();
    machine.append("down again");
    let daemon = machine.daemon(&["--request-timeout", "2s"]);
    eventually("the lag is visible", || {
        machine.session()["lag_bytes"].as_u64() > Some(0)
    });
    assert_eq!(
        machine
            .other()
            .run(&["restore", SESSION, "--request-timeout", "2s"])
            .code(),
        5
    );
    server.start();
    eventually("the lag is gone", || machine.session()["lag_bytes"] == 0);
    assert_eq!(daemon.stop().0, Some(0));
    machine.assert_all_stored_once();
    assert_reindex_agrees(&machine, "after an outage of the store");
}

needs_servers!(network_faults_lose_and_duplicate_nothing);
fn network_faults_lose_and_duplicate_nothing() {
    let Some(server) = s3() else { return };
    let proxy = TcpProxy::start(server.addr());
    let machine = Machine::with_bucket(server, &format!("http://{}", proxy.addr()));
    let daemon = machine.daemon(&["--request-timeout", "500ms"]);
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
            machine.append(&format!("{round} {mode:?} {part}"));
        }
        eventually("two attempts have failed", || {
            machine.session()["failed_attempts"].as_u64() >= Some(2)
        });
        let session = machine.session();
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
        eventually("the lag is gone", || machine.session()["lag_bytes"] == 0);
    }
    wait_for_index(&machine);
    assert_eq!(daemon.stop().0, Some(0));
    machine.assert_all_stored_once();
    // The attempts of each outage count from one.
    let mut errors = machine.errors();
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
    assert_reindex_agrees(&machine, "after a bad network");
}

needs_servers!(a_hanging_store_does_not_block_the_agents_start);
fn a_hanging_store_does_not_block_the_agents_start() {
    let Some(server) = s3() else { return };
    let proxy = TcpProxy::start(server.addr());
    let machine = Machine::with_bucket(server, &format!("http://{}", proxy.addr()));
    proxy.set(Mode::Hang);
    let began = Instant::now();
    let output = machine.run(&[
        "run",
        "--flush-deadline",
        "1s",
        "--",
        "sh",
        "-c",
        "echo started; exit 7",
    ]);
    let text = output.err();
    assert!(
        began.elapsed() < Duration::from_secs(8),
        "{:?}: {text}",
        began.elapsed()
    );
    assert_eq!(
        (output.code(), output.out().as_str()),
        (7, "started\n"),
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
        let machine = Machine::with_bucket(server, &endpoint);
        let daemon = machine.daemon(&["--flush-deadline", "1s"]);
        machine.append("durable");
        machine.flush();
        proxy.set(mode);
        machine.append("not durable");
        let files = files_below(&machine.root());
        let (code, took) = daemon.stop();
        assert_eq!(code, Some(9), "{mode:?}");
        assert!(took < Duration::from_secs(5), "{mode:?}: {took:?}");
        assert_eq!(files_below(&machine.root()), files, "{mode:?}");
        // A second signal stops it.
        let daemon = machine.daemon(&["--flush-deadline", "60s"]);
        let began = Instant::now();
        daemon.signal(Signal::TERM);
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(daemon.stop().0, Some(9), "{mode:?}");
        assert!(
            began.elapsed() < Duration::from_secs(4),
            "{mode:?}: {:?}",
            began.elapsed()
        );
        // The agent's exit code is kept.
        let script = format!(
            "echo '{{}}' >> {}; exit 42",
            machine.root().join(TRANSCRIPT).display()
        );
        let began = Instant::now();
        let output = machine.run(&["run", "--flush-deadline", "1s", "--", "sh", "-c", &script]);
        assert_eq!(output.code(), 42, "{mode:?}: {}", output.err());
        assert!(output.err().contains("not durable"), "{mode:?}");
        assert!(
            began.elapsed() < Duration::from_secs(8),
            "{mode:?}: {:?}",
            began.elapsed()
        );
        // After the outage, the next daemon uploads everything.
        proxy.set(Mode::Pass);
        let daemon = machine.daemon(&[]);
        machine.flush();
        assert_eq!(daemon.stop().0, Some(0));
        machine.assert_all_stored_once();
    }
}

#[test]
fn a_killed_daemon_loses_nothing_and_uploads_nothing_twice() {
    let machine = Machine::new();
    for round in 0..8u64 {
        let mut daemon = machine.daemon(&[]);
        for part in 0..10 {
            machine.append(&format!("{round} {part}"));
            std::thread::sleep(Duration::from_millis(3 + round));
        }
        daemon.kill();
    }
    let daemon = machine.daemon(&[]);
    machine.flush();
    wait_for_index(&machine);
    assert_eq!(machine.session()["write_target"], "main");
    assert_eq!(daemon.stop().0, Some(0));
    machine.assert_all_stored_once();
    assert_reindex_agrees(&machine, "after eight crashes");
}

#[test]
fn a_rebuilt_index_equals_the_live_one() {
    block_on(async {
        let storage = Storage::files();
        let fresh = Storage::files();
        let mut writer = crate::support::writer::Writer::new(&storage);
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
        rebuild(&storage.logs(), &*fresh.index, &*profile(), |_, _| {})
            .await
            .unwrap();
        assert_same_rows(
            &storage.rows().await,
            &rows(&storage.logs(), &*fresh.index).await,
            "rebuilt from the store",
        );
    });
}
