//! Many growing sessions in one home directory.
//!
//! Owns the acknowledged length of each file, and the checks of every restored copy. The test
//! writes the files and injects the faults.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::PathBuf;

use serde_json::Value;

use super::TempHome;
use super::backend::{Backend, eventually};
use super::files::{Files, files_below};

/// Prints how to replay a failed run.
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

/// Sessions in one home directory. Files only grow, so that a length identifies their bytes.
pub struct Load {
    pub home: TempHome,
    /// The acknowledged length of each file, by its path below the root.
    acknowledged: BTreeMap<String, u64>,
    /// Number of copies that were checked.
    pub copies: u32,
    /// Number of flushes that succeeded and that timed out.
    pub flushes: (u32, u32),
    /// Number of times the daemon or an agent was killed.
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
        files_below(&self.root())
    }

    /// Flushes everything on disk and, if that succeeds, counts it as acknowledged. Returns the
    /// error message of a timeout.
    pub fn flush(&mut self, backend: &Backend, timeout: &str) -> Result<(), String> {
        self.flush_with(backend, &["--timeout", timeout], |_| true)
    }

    /// Flushes one session, without waiting for the others.
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
        is_included: impl Fn(&str) -> bool,
    ) -> Result<(), String> {
        let on_disk = self
            .files()
            .into_iter()
            .filter(|(path, _)| is_included(path));
        let on_disk: Vec<_> = on_disk
            .map(|(path, bytes)| (complete_part(&path, &bytes).len() as u64, path))
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

    /// Pulls a session and checks that each file is a prefix that contains all acknowledged bytes.
    /// Returns false if the store was unavailable.
    pub fn check_copy(&mut self, backend: &Backend, session: &str) -> bool {
        let status = backend.run(&self.home, &["status", "--json"]);
        // Without a daemon there is no status.
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
            // The store may not have the session yet.
            3 => {}
            _ => drop(ran.ok()),
        }
        let copied = files_below(&copy);
        let stored: usize = copied.values().map(Vec::len).sum();
        assert!(
            stored as u64 >= durable,
            "{session}: {stored} bytes restored of {durable} durable bytes"
        );
        for (path, bytes) in &copied {
            let written = std::fs::read(self.root().join(path))
                .unwrap_or_else(|error| panic!("{path} was never written: {error}"));
            assert!(
                written.starts_with(bytes),
                "{path}: the {} restored bytes are not a prefix of the {} written bytes",
                bytes.len(),
                written.len()
            );
            assert_eq!(
                complete_part(path, bytes).len(),
                bytes.len(),
                "{path}: a partial line"
            );
        }
        for (path, acknowledged) in self
            .acknowledged
            .iter()
            .filter(|(path, _)| session_of(path) == session)
        {
            let bytes = copied.get(path).map_or(0, |bytes| bytes.len() as u64);
            assert!(
                bytes >= *acknowledged,
                "{path}: {bytes} bytes restored of {acknowledged} acknowledged bytes"
            );
        }
        true
    }

    /// Returns the sessions on disk.
    pub fn sessions(&self) -> BTreeSet<String> {
        self.files()
            .keys()
            .map(|path| session_of(path).to_owned())
            .collect()
    }

    /// Checks the end of a run, without faults and writes and with a running daemon: every byte is
    /// stored, no session was fenced, and the index agrees with the store.
    pub fn check_all(&mut self, backend: &Backend) {
        self.flush(backend, "40s").unwrap();
        eventually("daemon and index have caught up", || {
            let status = backend.run(&self.home, &["status", "--json"]).ok().json();
            // A late file event counts as lag until the daemon has checked the file.
            let has_lag = status["sessions"]
                .as_array()
                .unwrap()
                .iter()
                .any(|log| log["lag_bytes"] != 0);
            status["index_backlog"] == 0 && status["index_reachable"] == true && !has_lag
        });
        let status = backend.run(&self.home, &["status", "--json"]).ok().json();
        let elsewhere = TempHome::new();
        let rows = list_sessions(backend, &elsewhere);
        let sessions = self.sessions();
        assert_eq!(rows.len(), sessions.len(), "sessions in the index");
        for log in status["sessions"].as_array().unwrap() {
            assert_eq!(log["write_target"], "main", "{log}");
            let row = rows
                .iter()
                .find(|row| row["id"] == log["session"])
                .unwrap_or_else(|| panic!("not in the index: {log}"));
            assert_eq!(row["head"], log["head"], "{row}\n{log}");
            assert!(
                row["branches"].as_array().unwrap().is_empty(),
                "there is a branch, although no session was fenced: {row}"
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
        // The flush above acknowledged every complete line, and each copy contains them.
        let on_disk: u64 = self
            .files()
            .iter()
            .map(|(path, bytes)| complete_part(path, bytes).len() as u64)
            .sum();
        assert_eq!(self.acknowledged(), on_disk);
    }

    /// Checks that a rebuilt index equals the one that was updated during the run.
    pub fn check_reindex(&self, backend: &Backend) {
        let elsewhere = TempHome::new();
        let updated = list_sessions(backend, &elsewhere);
        backend.run(&elsewhere, &["reindex"]).ok();
        assert_eq!(updated, list_sessions(backend, &elsewhere));
    }

    /// Prints a summary, and fails if hardly anything happened.
    pub fn summarize(&self, what: &str) {
        let (succeeded, timed_out) = self.flushes;
        let (bytes, copies, kills) = (self.acknowledged(), self.copies, self.kills);
        let summary = format!(
            "{what}: {bytes} bytes acknowledged, {succeeded} flushes succeeded and {timed_out} timed out, {copies} copies, {kills} kills"
        );
        writeln!(std::io::stderr(), "{summary}").ok();
        assert!(
            self.acknowledged() > 10_000 && succeeded > 2,
            "hardly anything happened: {summary}"
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
                "the end of the daemon's log:\n{}",
                lines[lines.len().saturating_sub(80)..].join("\n")
            );
        }
    }
}

/// Returns the sessions of the index.
fn list_sessions(backend: &Backend, home: &TempHome) -> Vec<Value> {
    backend
        .run(home, &["ls", "--json", "--limit", "1000"])
        .ok()
        .json()["sessions"]
        .as_array()
        .unwrap()
        .clone()
}

/// Returns the durable bytes of a session in the status.
fn durable(status: &Value, session: &str) -> u64 {
    let row = status["sessions"]
        .as_array()
        .unwrap()
        .iter()
        .find(|row| row["session"] == session);
    row.and_then(|row| row["durable_bytes"].as_u64())
        .unwrap_or(0)
}

/// Returns the part of a file that a flush acknowledges: a transcript up to its last newline.
fn complete_part<'a>(path: &str, bytes: &'a [u8]) -> &'a [u8] {
    if !path.ends_with(".jsonl") {
        return bytes;
    }
    &bytes[..bytes
        .iter()
        .rposition(|byte| *byte == b'\n')
        .map_or(0, |at| at + 1)]
}

/// Returns ID for `projects/-work-app/ID.jsonl` and `projects/-work-app/ID/…`.
fn session_of(path: &str) -> &str {
    path.split('/')
        .nth(2)
        .map(|name| name.trim_end_matches(".jsonl"))
        .unwrap_or_default()
}
