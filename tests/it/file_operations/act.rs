//! Generated actions of an agent, a volume and a network between two flushes.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;
use sessiond::capture::flush::LogFlusher;

use super::{Case, LedgerState, copy_all};

pub const SESSION: &str = "3f2a";
const PROJECTS: [&str; 2] = ["-work-a", "-work-b"];

/// The files of the actions: transcripts first, then side files.
pub const FILES: [&str; 7] = [
    "projects/{p}/3f2a.jsonl",
    "projects/{p}/3f2a/subagents/agent-1.jsonl",
    "projects/{p}/agent-9c.jsonl",
    "projects/{p}/3f2a/subagents/agent-1.meta.json",
    "projects/{p}/3f2a/tool-results/t1.txt",
    "projects/{p}/3f2a/tool-results/t2.txt",
    "tasks/3f2a/1.json",
];

const SIDE_FILES: std::ops::Range<usize> = 3..FILES.len();

/// A time in the future, at which the clock of the files stands still: every scan treats the file
/// as just changed.
const FROZEN_TIME: Duration = Duration::from_secs(4_000_000_000);

#[derive(Debug, Clone)]
pub enum Act {
    Lines(usize, usize),
    HalfLine(usize),
    FinishLine(usize),
    Huge(usize),
    Truncate(usize, u8),
    TruncateAndGrow(usize, u8),
    /// The last bytes are rewritten, to the given number more or fewer.
    RewriteTail(usize, u16, i8),
    ReplaceWithSame(usize),
    ReplaceWithOther(usize),
    ReplaceWithLonger(usize),
    RewriteInPlace(usize),
    /// The same length at the same time, in place or as a new file.
    RewriteInTheSameTick(usize, bool),
    Delete(usize),
    Touch(usize),
    Chmod(usize, bool),
    MoveToTheOtherProject,
    MoveOne(usize),
    RenameSideFile(usize, usize),
    SwapSideFiles(usize, usize),
    Flush,
    LastFlush,
    FlushWithoutStore,
    FlushWithLostReply,
    Restart,
    RestartWithoutLedger,
    RestartWithOlderLedger,
}

pub fn act() -> impl Strategy<Value = Act> {
    // Most actions use the transcript.
    let file = || prop_oneof![3 => Just(0usize), 2 => 1..FILES.len()];
    let at_files = prop_oneof![
        8 => (file(), 1usize..4).prop_map(|(file, lines)| Act::Lines(file, lines)),
        4 => file().prop_map(Act::HalfLine),
        3 => file().prop_map(Act::FinishLine),
        1 => file().prop_map(Act::Huge),
        2 => (file(), any::<u8>()).prop_map(|(file, to)| Act::Truncate(file, to)),
        2 => (file(), any::<u8>()).prop_map(|(file, to)| Act::TruncateAndGrow(file, to)),
        2 => (file(), any::<u16>(), -60i8..60).prop_map(|(file, back, more)| Act::RewriteTail(file, back, more)),
        1 => (file(), 1u16..200).prop_map(|(file, back)| Act::RewriteTail(file, back, 0)),
        1 => file().prop_map(Act::ReplaceWithSame),
        2 => file().prop_map(Act::ReplaceWithOther),
        1 => file().prop_map(Act::ReplaceWithLonger),
        2 => file().prop_map(Act::RewriteInPlace),
        3 => (SIDE_FILES, any::<bool>()).prop_map(|(file, another)| Act::RewriteInTheSameTick(file, another)),
        2 => file().prop_map(Act::Delete),
        1 => file().prop_map(Act::Touch),
        1 => (file(), any::<bool>()).prop_map(|(file, wide)| Act::Chmod(file, wide)),
        2 => Just(Act::MoveToTheOtherProject),
        1 => file().prop_map(Act::MoveOne),
        1 => (SIDE_FILES, SIDE_FILES).prop_map(|(from, to)| Act::RenameSideFile(from, to)),
        1 => (SIDE_FILES, SIDE_FILES).prop_map(|(one, other)| Act::SwapSideFiles(one, other)),
    ];
    prop_oneof![
        40 => at_files,
        10 => Just(Act::Flush),
        1 => Just(Act::LastFlush),
        1 => Just(Act::FlushWithoutStore),
        1 => Just(Act::FlushWithLostReply),
        2 => Just(Act::Restart),
        1 => Just(Act::RestartWithoutLedger),
        1 => Just(Act::RestartWithOlderLedger),
    ]
}

/// Whether a file belongs to the session. For a sub-agent's transcript next to the session's, the
/// first line with a session ID decides.
pub fn is_session_file(path: &str, bytes: &[u8]) -> bool {
    let mut lines = bytes[..bytes.len().min(16 << 10)]
        .split(|byte| *byte == b'\n')
        .map(String::from_utf8_lossy);
    // A truncated and continued line may contain the ID more than once.
    let named = lines.find_map(|line| {
        Some(
            line.split_once("\"sessionId\":\"")?
                .1
                .split_once('"')?
                .0
                .to_owned(),
        )
    });
    !path.ends_with("/agent-9c.jsonl") || named.is_some_and(|id| id == SESSION)
}

impl Case {
    fn path(&self, file: usize) -> PathBuf {
        self.world
            .root()
            .join(FILES[file].replace("{p}", PROJECTS[self.projects[file]]))
    }

    fn number(&mut self) -> u64 {
        self.count += 1;
        self.count
    }

    fn line(&mut self) -> String {
        format!(
            "{{\"sessionId\":\"{SESSION}\",\"n\":{:06},\"type\":\"user\"}}\n",
            self.number()
        )
    }

    /// The bytes of the file; none if it does not exist.
    fn bytes(&self, file: usize) -> Option<Vec<u8>> {
        std::fs::read(self.path(file)).ok()
    }

    /// Writes a file in place, with a unique time.
    fn put(&mut self, file: usize, bytes: &[u8]) {
        let path = self.path(file);
        crate::support::files::write(&path, bytes);
        self.stamp(&path);
    }

    fn stamp(&mut self, path: &Path) {
        set_time(path, Duration::from_secs(1_700_000_000 + self.number()));
    }

    fn add(&mut self, file: usize, bytes: &[u8]) {
        let path = self.path(file);
        crate::support::files::append(&path, bytes);
        self.stamp(&path);
    }

    /// Replaces a file atomically with a new one.
    fn replace(&mut self, file: usize, bytes: &[u8]) {
        let path = self.path(file);
        let new = path.with_extension("tmp");
        crate::support::files::write(&new, bytes);
        self.stamp(&new);
        std::fs::rename(new, path).unwrap();
    }

    fn move_to(&mut self, file: usize, project: usize) {
        let from = self.path(file);
        self.projects[file] = project;
        rename(&from, &self.path(file));
    }

    fn restart(&mut self) {
        self.flusher = LogFlusher::new(self.world.id(SESSION));
        self.unacknowledged = None;
    }

    pub fn act(&mut self, act: &Act) -> Result<(), TestCaseError> {
        match *act {
            Act::Lines(file, lines) => {
                let text: String = (0..lines).map(|_| self.line()).collect();
                self.add(file, text.as_bytes());
            }
            Act::HalfLine(file) => {
                let line = self.line();
                self.add(file, line[..line.len() - 4].trim_end().as_bytes());
            }
            Act::FinishLine(file) => {
                let rest = format!("\",\"m\":{}}}\n", self.number());
                self.add(file, rest.as_bytes());
            }
            Act::Huge(file) => {
                // Longer than every buffer and window in the code.
                let line = self.line();
                self.add(file, line.trim_end().repeat(3500).as_bytes());
                self.add(file, b"\n");
            }
            Act::Truncate(file, to) => {
                if let Some(bytes) = self.bytes(file) {
                    let to = bytes.len() * usize::from(to) / 256;
                    self.put(file, &bytes[..to]);
                }
            }
            Act::TruncateAndGrow(file, to) => {
                if let Some(mut bytes) = self.bytes(file) {
                    let before = bytes.len();
                    bytes.truncate(before * usize::from(to) / 256);
                    while bytes.len() <= before {
                        bytes.extend_from_slice(self.line().as_bytes());
                    }
                    self.put(file, &bytes);
                }
            }
            Act::RewriteTail(file, back, more) => {
                if let Some(mut bytes) = self.bytes(file) {
                    let length = bytes.len().saturating_add_signed(isize::from(more));
                    bytes.truncate(bytes.len().saturating_sub(usize::from(back)));
                    while bytes.len() < length {
                        bytes.extend_from_slice(self.line().as_bytes());
                    }
                    bytes.truncate(length);
                    self.put(file, &bytes);
                }
            }
            Act::ReplaceWithSame(file) => {
                if let Some(bytes) = self.bytes(file) {
                    self.replace(file, &bytes);
                }
            }
            Act::ReplaceWithOther(file) => {
                let line = self.line();
                self.replace(file, line.as_bytes());
            }
            Act::ReplaceWithLonger(file) => {
                let line = self.line();
                let bytes = [self.bytes(file).unwrap_or_default(), line.into_bytes()].concat();
                self.replace(file, &bytes);
            }
            Act::RewriteInPlace(file) => {
                if let Some(bytes) = self.bytes(file) {
                    let number = self.number();
                    self.put(file, &renumbered(bytes, number));
                }
            }
            Act::RewriteInTheSameTick(file, another) => {
                let line = self.line();
                if another {
                    self.replace(file, line.as_bytes())
                } else {
                    self.put(file, line.as_bytes())
                }
                set_time(&self.path(file), FROZEN_TIME);
            }
            Act::Delete(file) => {
                let _ = std::fs::remove_file(self.path(file));
            }
            Act::Touch(file) => {
                let path = self.path(file);
                if path.exists() {
                    self.stamp(&path);
                }
            }
            Act::Chmod(file, wide) => {
                let mode = std::fs::Permissions::from_mode(if wide { 0o644 } else { 0o600 });
                let _ = std::fs::set_permissions(self.path(file), mode);
            }
            Act::MoveToTheOtherProject => {
                let project = 1 - self.projects[0];
                (0..FILES.len()).for_each(|file| self.move_to(file, project));
            }
            Act::MoveOne(file) => self.move_to(file, 1 - self.projects[file]),
            Act::RenameSideFile(from, to) => rename(&self.path(from), &self.path(to)),
            Act::SwapSideFiles(one, other) => {
                let (one, other) = (self.path(one), self.path(other));
                let between = one.with_extension("tmp");
                rename(&one, &between);
                rename(&other, &one);
                rename(&between, &other);
            }
            Act::Flush => self.flush(false)?,
            Act::LastFlush => self.flush(true)?,
            Act::FlushWithoutStore => self.flush_with_failing_store(false)?,
            Act::FlushWithLostReply => self.flush_with_failing_store(true)?,
            Act::Restart => {
                self.restart();
                // An entry whose reply was lost is not in the ledger.
                if !self.observations.is_empty() && self.ledger_state == LedgerState::Current {
                    self.ledger_state = LedgerState::Outdated;
                    self.has_attributes = false;
                }
                // A writer that has written nothing may not be saved yet.
                if !self.world.root().join(".sessiond").exists() {
                    self.ledger_state = LedgerState::Missing;
                }
            }
            Act::RestartWithoutLedger => {
                self.restart();
                self.world.writer.delete_ledgers();
                self.ledger_state = LedgerState::Missing;
                self.has_attributes = false;
            }
            Act::RestartWithOlderLedger => {
                if let Some(older) = &self.older_ledger {
                    let ledgers = self.world.root().join(".sessiond");
                    let _ = std::fs::remove_dir_all(&ledgers);
                    copy_all(older, &ledgers);
                    self.restart();
                    self.ledger_state = LedgerState::Outdated;
                    self.has_attributes = false;
                }
            }
        }
        Ok(())
    }
}

fn set_time(path: &Path, time: Duration) {
    std::fs::File::options()
        .write(true)
        .open(path)
        .unwrap()
        .set_modified(UNIX_EPOCH + time)
        .unwrap();
}

fn rename(from: &Path, to: &Path) {
    if from.exists() && from != to {
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::rename(from, to).unwrap();
    }
}

/// Gives every line another number: the same size, other bytes everywhere.
fn renumbered(bytes: Vec<u8>, number: u64) -> Vec<u8> {
    let number = format!("\"n\":{number:06}");
    let text = String::from_utf8(bytes).unwrap();
    let mut pieces = text.split("\"n\":");
    let mut new = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        new.push_str(if piece.len() >= 6 { &number } else { "\"n\":" });
        new.push_str(if piece.len() >= 6 { &piece[6..] } else { piece });
    }
    assert_eq!(new.len(), text.len());
    new.into_bytes()
}
