//! A home full of sessions that grow while things break: owns what was acknowledged of each file, and the checks of every
//! copy that is fetched meanwhile and afterwards. Who writes, and what breaks, is the test's.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::PathBuf;

use serde_json::Value;

use super::TempHome;
use super::backend::{Backend, eventually};
use super::writers::{Files, files_in};

/// Says how to play a failed run again.
pub struct Replay {
    pub seed: u64,
    pub test: &'static str,
}

impl Drop for Replay {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "replay with SESSIOND_TEST_SEED={} cargo test --test it {}",
                self.seed, self.test
            );
        }
    }
}

/// Sessions in one home. Every file only grows, so that a length says which bytes are meant.
pub struct Load {
    pub home: TempHome,
    /// Of each file, by its path below the agent's directory.
    acknowledged: BTreeMap<String, u64>,
    /// Copies that were fetched and held what they must.
    pub copies: u32,
    /// Flushes that were answered, and those that were given up.
    pub flushes: (u32, u32),
    /// kill -9 of daemon or agent.
    pub kills: u32,
}

impl Load {
    pub fn new(home: TempHome) -> Load {
        Load {
            home,
            acknowledged: BTreeMap::new(),
            copies: 0,
            flushes: (0, 0),
            kills: 0,
        }
    }

    fn root(&self) -> PathBuf {
        self.home.home().join(".claude")
    }

    fn files(&self) -> Files {
        files_in(&self.root())
    }

    /// Asks for all that is on disk; what was there is acknowledged if the answer is yes. Answers what it said if not.
    pub fn flush(&mut self, backend: &Backend, timeout: &str) -> Result<(), String> {
        self.flush_with(backend, &["--timeout", timeout], |_| true)
    }

    /// The same for one session, which need not wait for the others.
    pub fn flush_session(
        &mut self,
        backend: &Backend,
        session: &str,
        timeout: &str,
    ) -> Result<(), String> {
        self.flush_with(
            backend,
            &["--timeout", timeout, "--session", session],
            |path| session_of(path) == session,
        )
    }

    fn flush_with(
        &mut self,
        backend: &Backend,
        options: &[&str],
        meant: impl Fn(&str) -> bool,
    ) -> Result<(), String> {
        let on_disk = self.files().into_iter().filter(|(path, _)| meant(path));
        let on_disk: Vec<_> = on_disk
            .map(|(path, bytes)| (whole(&path, &bytes).len() as u64, path))
            .collect();
        let ran = backend.run(&self.home, &[&["flush", "--wait"], options].concat());
        if ran.code() == 5 {
            self.flushes.1 += 1;
            return Err(ran.err());
        }
        ran.ok();
        self.flushes.0 += 1;
        self.acknowledged
            .extend(on_disk.into_iter().map(|(length, path)| (path, length)));
        Ok(())
    }

    /// Bytes acknowledged so far.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged.values().sum()
    }

    /// Fetches a session and sees that it is a prefix that holds all that was acknowledged, by a flush or by the status.
    /// Answers false if the store did not answer, which is the caller's to judge.
    pub fn check_copy(&mut self, backend: &Backend, session: &str) -> bool {
        let status = backend.run(&self.home, &["status", "--json"]);
        // Where nobody is running, nobody promises anything.
        let durable = if status.code() == 0 {
            durable(&status.json(), session)
        } else {
            0
        };
        let checked = self.check_copy_of(backend, session, durable);
        self.copies += u32::from(checked);
        checked
    }

    fn check_copy_of(&self, backend: &Backend, session: &str, durable: u64) -> bool {
        let elsewhere = TempHome::new();
        let copy = elsewhere.path().join("copy");
        let ran = backend.run(
            &elsewhere,
            &["pull", session, "--to", copy.to_str().unwrap()],
        );
        match ran.code() {
            5 => return false,
            // Nothing of it may be there yet.
            3 => {}
            _ => drop(ran.ok()),
        }
        let copied = files_in(&copy);
        let stored: usize = copied.values().map(Vec::len).sum();
        assert!(
            stored as u64 >= durable,
            "{session}: {stored} restored of {durable} that the status called durable"
        );
        for (path, bytes) in &copied {
            let written = std::fs::read(self.root().join(path))
                .unwrap_or_else(|error| panic!("{path} was never written: {error}"));
            assert!(
                written.starts_with(bytes),
                "{path}: {} bytes that are no prefix of {}",
                bytes.len(),
                written.len()
            );
            assert_eq!(whole(path, bytes).len(), bytes.len(), "{path}: a torn line");
        }
        for (path, promised) in self
            .acknowledged
            .iter()
            .filter(|(path, _)| session_of(path) == session)
        {
            let bytes = copied.get(path).map_or(0, |bytes| bytes.len() as u64);
            assert!(
                bytes >= *promised,
                "{path}: {bytes} restored of {promised} acknowledged"
            );
        }
        true
    }

    /// The sessions that there are on disk.
    pub fn sessions(&self) -> BTreeSet<String> {
        self.files()
            .keys()
            .map(|path| session_of(path).to_owned())
            .collect()
    }

    /// Nothing is broken and nobody writes any more: all is stored byte for byte, nobody lost a session, and the index says
    /// what the bucket says. A daemon is running.
    pub fn check_all(&mut self, backend: &Backend) {
        self.flush(backend, "40s").unwrap();
        eventually("daemon and index have caught up", || {
            let status = backend.run(&self.home, &["status", "--json"]).ok().json();
            // An event that comes late counts as lag until it has been looked at.
            let behind = status["sessions"]
                .as_array()
                .unwrap()
                .iter()
                .any(|log| log["lag_bytes"] != 0);
            status["index_waiting"] == 0 && status["index_answers"] == true && !behind
        });
        let status = backend.run(&self.home, &["status", "--json"]).ok().json();
        let elsewhere = TempHome::new();
        let rows = listed(backend, &elsewhere);
        let sessions = self.sessions();
        assert_eq!(rows.len(), sessions.len(), "sessions in the index");
        for log in status["sessions"].as_array().unwrap() {
            assert_eq!(log["ground"], "main", "{log}");
            let row = rows
                .iter()
                .find(|row| row["id"] == log["session"])
                .unwrap_or_else(|| panic!("not in the index: {log}"));
            assert_eq!(row["head"], log["head"], "{row}\n{log}");
            assert!(
                row["branches"].as_array().unwrap().is_empty(),
                "nobody lost a session, yet there is a branch: {row}"
            );
        }
        backend.run(&elsewhere, &["verify", "--all"]).ok();
        let fetch = |session: &String| {
            assert!(
                self.check_copy_of(backend, session, durable(&status, session)),
                "{session}"
            )
        };
        let names: Vec<&String> = sessions.iter().collect();
        std::thread::scope(|scope| {
            for half in names.chunks(names.len().div_ceil(2)) {
                scope.spawn(move || half.iter().copied().for_each(fetch));
            }
        });
        self.copies += u32::try_from(sessions.len()).unwrap();
        // The flush above acknowledged every whole line of everything, and each copy held that.
        let on_disk: u64 = self
            .files()
            .iter()
            .map(|(path, bytes)| whole(path, bytes).len() as u64)
            .sum();
        assert_eq!(self.acknowledged(), on_disk);
    }

    /// An index made from nothing says the same as the one that followed through all of it.
    pub fn check_reindex(&self, backend: &Backend) {
        let elsewhere = TempHome::new();
        let followed = listed(backend, &elsewhere);
        backend.run(&elsewhere, &["reindex"]).ok();
        assert_eq!(followed, listed(backend, &elsewhere));
    }

    /// What the run amounted to, for whoever asks with --nocapture; a run that hardly did anything proves nothing.
    pub fn sum_up(&self, what: &str) {
        let (answered, late) = self.flushes;
        let (bytes, copies, kills) = (self.acknowledged(), self.copies, self.kills);
        let sum = format!(
            "{what}: {bytes} bytes acknowledged, flushes {answered} answered {late} late, {copies} copies, {kills} kills"
        );
        writeln!(std::io::stderr(), "{sum}").ok();
        assert!(
            self.acknowledged() > 10_000 && answered > 2,
            "hardly anything happened: {sum}"
        );
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log =
                std::fs::read_to_string(self.home.path().join("daemon.log")).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            eprintln!(
                "the daemon said last:\n{}",
                lines[lines.len().saturating_sub(80)..].join("\n")
            );
        }
    }
}

/// The index's rows.
fn listed(backend: &Backend, home: &TempHome) -> Vec<Value> {
    backend
        .run(home, &["ls", "--json", "--limit", "1000"])
        .ok()
        .json()["sessions"]
        .as_array()
        .unwrap()
        .clone()
}

/// What the status calls durable of a session.
fn durable(status: &Value, session: &str) -> u64 {
    let row = status["sessions"]
        .as_array()
        .unwrap()
        .iter()
        .find(|row| row["session"] == session);
    row.and_then(|row| row["durable_bytes"].as_u64())
        .unwrap_or(0)
}

/// What a flush may acknowledge of a file: a transcript up to the end of its last line.
fn whole<'a>(path: &str, bytes: &'a [u8]) -> &'a [u8] {
    if !path.ends_with(".jsonl") {
        return bytes;
    }
    &bytes[..bytes
        .iter()
        .rposition(|byte| *byte == b'\n')
        .map_or(0, |at| at + 1)]
}

/// `projects/-work-app/ID.jsonl` and `projects/-work-app/ID/…` are of session ID.
fn session_of(path: &str) -> &str {
    path.split('/')
        .nth(2)
        .map(|name| name.trim_end_matches(".jsonl"))
        .unwrap_or_default()
}
