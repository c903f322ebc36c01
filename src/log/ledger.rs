//! The ledger: a small file beside the agent's, one per log, that says who may write on and how far each file is shipped.
//!
//! It carries the right to write from `restore` to the `daemon` that starts next, and over a restart. It is no source
//! of truth: lost, damaged or stale, the bucket is read instead.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::writer::LogWriter;
use crate::error::{Error, Result};
use crate::model::{Digest, FileKind, FileStat, LogId, RelPath, RunningHash, TurnTracker};
use crate::sys::{Directory, OpenFile, STATE_DIR};

/// The version of the file.
const VERSION: u32 = 1;

/// So many bytes before the cursor are compared at every look.
pub const WINDOW: u64 = 4096;

/// How far one file is shipped.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FileCursor {
    /// How the agent writes it.
    pub kind: FileKind,
    /// Bytes shipped.
    pub len: u64,
    /// The hash over them, ready to go on.
    pub hash: RunningHash,
    /// Fingerprint of the last `WINDOW` of them.
    pub tail: u64,
    /// What the file system said at the last look.
    pub stat: FileStat,
    /// Bytes behind the last whole line at the last look: an unfinished one.
    #[serde(default)]
    pub torn: u64,
    /// It had changed so shortly before the last look that one more change could hide in the same tick of the clock.
    #[serde(default)]
    pub fresh: bool,
}

impl FileCursor {
    /// A file of which nothing is shipped.
    pub fn new(kind: FileKind, stat: FileStat) -> Self {
        FileCursor {
            kind,
            len: 0,
            hash: RunningHash::default(),
            tail: tail_of(&[]),
            stat,
            torn: 0,
            fresh: false,
        }
    }

    /// Reads the first `len` bytes of a file and puts the cursor behind them; none if it has fewer. How long ago it changed
    /// is not asked: one that is replaced as one is looked at once more.
    pub fn over(file: &dyn OpenFile, kind: FileKind, len: u64) -> std::io::Result<Option<Self>> {
        let mut cursor = FileCursor {
            fresh: kind == FileKind::Whole,
            ..FileCursor::new(kind, file.stat()?)
        };
        let mut buffer = vec![0; 128 << 10];
        let mut window = Vec::new();
        while cursor.len < len {
            let want = buffer.len().min((len - cursor.len) as usize);
            let got = file.read_at(&mut buffer[..want], cursor.len)?;
            if got == 0 {
                return Ok(None);
            }
            cursor.advance(&mut window, &buffer[..got]);
        }
        Ok(Some(cursor))
    }

    /// Makes it fit no file, so that the next look ships all of it anew.
    pub fn distrust(&mut self) {
        self.hash = RunningHash::default();
        self.tail = !self.tail;
        self.stat.mtime_ns = i64::MIN;
    }

    /// Takes in the bytes that follow; `window` holds the bytes before them and is kept up to date.
    pub fn advance(&mut self, window: &mut Vec<u8>, bytes: &[u8]) {
        self.hash.update(bytes);
        self.len += bytes.len() as u64;
        window.extend_from_slice(&bytes[bytes.len().saturating_sub(WINDOW as usize)..]);
        let surplus = window.len().saturating_sub(WINDOW as usize);
        window.drain(..surplus);
        self.tail = tail_of(window);
    }
}

/// The fingerprint of a window.
pub fn tail_of(window: &[u8]) -> u64 {
    Digest::of(window).short()
}

/// What one log's ledger says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ledger {
    v: u32,
    /// The store that this is about.
    pub store: String,
    /// The log.
    pub id: LogId,
    /// The right to write.
    pub log_writer: LogWriter,
    /// How far each file is shipped.
    pub files: BTreeMap<RelPath, FileCursor>,
    /// Fingerprint of the files as they were when all of them was shipped; 0 if that was not so.
    #[serde(default)]
    pub seen: u64,
    /// How far the turns of the conversation have come.
    #[serde(default)]
    pub turns: TurnTracker,
}

impl Ledger {
    /// A ledger for a log of a store.
    pub fn new(store: String, id: LogId, log_writer: LogWriter) -> Self {
        Ledger {
            v: VERSION,
            store,
            id,
            log_writer,
            files: BTreeMap::new(),
            seen: 0,
            turns: TurnTracker::default(),
        }
    }

    /// Where the ledger of a log is.
    pub fn path(id: &LogId) -> Result<RelPath> {
        format!(
            "{STATE_DIR}/ledger/{}/{}/{}.json",
            id.namespace, id.agent, id.name
        )
        .parse()
    }

    /// Reads the ledger of a log. None if there is none, or it is damaged, or about another store: the bucket is asked
    /// then.
    pub fn load(directory: &dyn Directory, store: &str, id: &LogId) -> Option<Ledger> {
        let path = Self::path(id).ok()?;
        let bytes = match directory.read(&path) {
            Ok(bytes) => bytes?,
            Err(error) => {
                tracing::warn!(%error, %path, "cannot read the ledger; asking the bucket");
                return None;
            }
        };
        let checked = bytes
            .split_at_checked(64)
            .filter(|(digest, body)| Digest::of(body).to_string().as_bytes() == *digest);
        let Some(ledger) = checked
            .and_then(|(_, body)| serde_json::from_slice::<Ledger>(body).ok())
            .filter(|ledger| ledger.v == VERSION)
        else {
            tracing::warn!(%path, "the ledger is damaged; asking the bucket");
            return None;
        };
        (ledger.store == store && ledger.id == *id).then_some(ledger)
    }

    /// Writes the ledger. `durable` when the right to write changes hands; a cursor that a power cut loses is found
    /// again in the bucket.
    pub fn save(&self, directory: &dyn Directory, durable: bool) -> Result<()> {
        let path = Self::path(&self.id)?;
        let mut body = vec![b'\n'];
        serde_json::to_writer(&mut body, self).map_err(|cause| {
            Error::new(crate::error::ErrorKind::Internal, "write the ledger").caused_by(cause)
        })?;
        let mut bytes = Digest::of(&body).to_string().into_bytes();
        bytes.append(&mut body);
        directory
            .replace(&path, &bytes, durable)
            .map_err(|cause| Error::io(format!("write {path}"), cause))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::Disk;

    fn ledger() -> Ledger {
        let id = LogId {
            namespace: "n".parse().unwrap(),
            agent: "a".parse().unwrap(),
            name: "s".parse().unwrap(),
        };
        let log_writer = LogWriter::unclaimed(
            "w".parse().unwrap(),
            3,
            None,
            "2026-05-01T12:00:00Z".parse().unwrap(),
        );
        let mut ledger = Ledger::new("file:///x".into(), id, log_writer);
        let stat = FileStat {
            dev: 1,
            ino: 2,
            size: 3,
            mtime_ns: 4,
            mode: 0o600,
        };
        let mut cursor = FileCursor::new(FileKind::Append, stat);
        cursor.advance(&mut Vec::new(), b"hello\n");
        ledger.files.insert("a.jsonl".parse().unwrap(), cursor);
        ledger
    }

    #[test]
    fn a_ledger_comes_back_and_a_damaged_or_foreign_one_does_not() {
        let root = tempfile::tempdir().unwrap();
        let disk = Disk::new(root.path());
        let ledger = ledger();
        assert_eq!(Ledger::load(&disk, "file:///x", &ledger.id), None);
        ledger.save(&disk, true).unwrap();
        assert_eq!(
            Ledger::load(&disk, "file:///x", &ledger.id),
            Some(ledger.clone())
        );
        assert_eq!(Ledger::load(&disk, "file:///other", &ledger.id), None);
        let path = Ledger::path(&ledger.id).unwrap().below(root.path());
        let mut bytes = std::fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(Ledger::load(&disk, "file:///x", &ledger.id), None);
        std::fs::write(&path, b"").unwrap();
        assert_eq!(Ledger::load(&disk, "file:///x", &ledger.id), None);
    }

    #[test]
    fn the_window_follows_the_cursor_whatever_the_pieces() {
        let text: Vec<u8> = (0..20_000u32).map(|at| (at % 251) as u8).collect();
        let root = tempfile::tempdir().unwrap();
        let disk = Disk::new(root.path());
        let path: RelPath = "f".parse().unwrap();
        disk.write_at(&path, 0, &text).unwrap();
        let file = disk.open(&path).unwrap().unwrap();
        let whole = FileCursor::over(&*file, FileKind::Append, 15_000)
            .unwrap()
            .unwrap();
        let mut pieces = FileCursor::new(FileKind::Append, whole.stat);
        let mut window = Vec::new();
        for piece in text[..15_000].chunks(700) {
            pieces.advance(&mut window, piece);
        }
        assert_eq!(pieces, whole);
        assert_eq!(whole.tail, tail_of(&text[15_000 - 4096..15_000]));
        assert!(
            FileCursor::over(&*file, FileKind::Append, 30_000)
                .unwrap()
                .is_none()
        );
    }
}
