//! The ledger: a local file per log with its writer and how much of each file is uploaded.
//!
//! It carries ownership from `restore` to the next `daemon`, and across restarts. It is a cache: if it
//! is lost, damaged or stale, the log is read instead.

use std::collections::BTreeMap;
use std::io::{BufReader, BufWriter, Read, Write};

use serde::{Deserialize, Serialize};

use super::writer::LogWriter;
use crate::codec::version;
use crate::error::{Error, ErrorKind, Result};
use crate::model::{
    Digest, FileHash, FileKind, FileStat, LogId, RelPath, RunningHash, TurnTracker,
};
use crate::sys::packed::pack;
use crate::sys::{Directory, OpenFile, STATE_DIR};

/// Number of bytes before the cursor that every scan compares.
pub const TAIL_WINDOW: u64 = 4096;

/// Length of the digest at the start of a ledger file.
const DIGEST_LEN: usize = 64;

/// Maximum size of a ledger file: about 300 bytes for each of a million files. The agent can write to
/// it.
const MAX_BYTES: u64 = 256 << 20;

/// Maximum size of a ledger file that is read into memory.
const MAX_BUFFERED_BYTES: u64 = 1 << 20;

/// Maximum number of files of a ledger that is encoded in memory.
const MAX_BUFFERED_FILES: usize = 2000;

/// Size of the pieces in which a larger ledger is read and written.
const CHUNK_BYTES: usize = 128 << 10;

/// How far one file is uploaded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FileCursor {
    /// How the agent writes it.
    pub kind: FileKind,
    /// Number of uploaded bytes.
    pub len: u64,
    /// The hash of these bytes.
    pub hash: FileHash,
    /// Fingerprint of the last `TAIL_WINDOW` of them.
    pub tail_fingerprint: u64,
    /// The file's metadata at the last scan.
    pub stat: FileStat,
    /// Bytes after the last newline at the last scan.
    #[serde(default)]
    pub partial_line_bytes: u64,
    /// Whether the file changed so shortly before the last scan that another change could have the
    /// same mtime.
    #[serde(default)]
    pub is_recent: bool,
    /// During an upload of several parts: the length of the file when it is complete. `stat` is then
    /// that of the file at the start of the upload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uploading: Option<u64>,
}

impl FileCursor {
    /// A cursor at the start of a file.
    pub fn new(kind: FileKind, stat: FileStat) -> Self {
        FileCursor {
            kind,
            len: 0,
            hash: RunningHash::default().into(),
            tail_fingerprint: tail_fingerprint(&[]),
            stat,
            partial_line_bytes: 0,
            is_recent: false,
            uploading: None,
        }
    }

    /// Number of bytes that every later restore includes. A file is restored once its upload is
    /// complete.
    pub fn durable_len(&self) -> u64 {
        if self.uploading.is_some() {
            0
        } else {
            self.len
        }
    }

    /// Reads the first `len` bytes of a file and returns the cursor after them; none if the file is
    /// shorter. Counts a side file as recent, so that the next scan reads it once more.
    pub fn read(file: &dyn OpenFile, kind: FileKind, len: u64) -> std::io::Result<Option<Self>> {
        let mut cursor = FileCursor {
            is_recent: kind == FileKind::Whole,
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

    /// The cursor after the first `len` bytes of a file, whose hash is known. Reads only the last of
    /// them; none if the file is shorter.
    pub fn with_hash(
        file: &dyn OpenFile,
        kind: FileKind,
        len: u64,
        hash: FileHash,
    ) -> std::io::Result<Option<Self>> {
        let start = len.saturating_sub(TAIL_WINDOW);
        let mut window = vec![0; (len - start) as usize];
        let mut filled = 0;
        while filled < window.len() {
            match file.read_at(&mut window[filled..], start + filled as u64)? {
                0 => return Ok(None),
                count => filled += count,
            }
        }
        Ok(Some(FileCursor {
            len,
            hash,
            tail_fingerprint: tail_fingerprint(&window),
            is_recent: kind == FileKind::Whole,
            ..FileCursor::new(kind, file.stat()?)
        }))
    }

    /// Makes the cursor match no file, so that the next scan uploads the file from the start.
    pub fn invalidate(&mut self) {
        self.hash = RunningHash::default().into();
        self.tail_fingerprint = !self.tail_fingerprint;
        self.stat.mtime_ns = i64::MIN;
    }

    /// Reduces the memory of a side file that is uploaded completely.
    pub fn settle(&mut self) {
        if self.kind == FileKind::Whole && self.uploading.is_none() {
            self.hash.settle();
        }
    }

    /// Advances over `bytes`. `window` holds the bytes before the cursor and is updated. A cursor
    /// whose hash cannot be resumed stays where it is.
    pub fn advance(&mut self, window: &mut Vec<u8>, bytes: &[u8]) {
        let FileHash::Running(hash) = &mut self.hash else {
            return;
        };
        hash.update(bytes);
        // A forged ledger can have any number.
        self.len = self.len.saturating_add(bytes.len() as u64);
        window.extend_from_slice(&bytes[bytes.len().saturating_sub(TAIL_WINDOW as usize)..]);
        let surplus = window.len().saturating_sub(TAIL_WINDOW as usize);
        window.drain(..surplus);
        self.tail_fingerprint = tail_fingerprint(window);
    }
}

/// The fingerprint of the bytes before a cursor.
pub fn tail_fingerprint(window: &[u8]) -> u64 {
    Digest::of(window).fingerprint()
}

/// The ledger of one log.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ledger {
    version: u32,
    /// The address of the store.
    pub store: String,
    /// The log.
    pub id: LogId,
    /// The right to write.
    pub log_writer: LogWriter,
    /// The cursor of each file.
    pub files: BTreeMap<RelPath, FileCursor>,
    /// Fingerprint of the files when everything was uploaded; 0 if something was not.
    #[serde(default)]
    pub clean_fingerprint: u64,
    /// The turns of the conversation so far.
    #[serde(default)]
    pub turns: TurnTracker,
    /// The model of each transcript whose messages do not have it.
    #[serde(default)]
    pub models: BTreeMap<RelPath, String>,
}

impl Ledger {
    /// A ledger without files.
    pub fn new(store: String, id: LogId, log_writer: LogWriter) -> Self {
        Ledger {
            version: version::LEDGER,
            store,
            id,
            log_writer,
            files: BTreeMap::new(),
            clean_fingerprint: 0,
            turns: TurnTracker::default(),
            models: BTreeMap::new(),
        }
    }

    /// The path of a log's ledger below the root.
    pub fn path(id: &LogId) -> Result<RelPath> {
        format!(
            "{STATE_DIR}/ledger/{}/{}/{}.json",
            id.namespace, id.agent, id.name
        )
        .parse()
    }

    /// Reads the ledger of a log; none if there is none, it is damaged, or it belongs to another
    /// store. The caller then reads the log.
    pub fn load(directory: &dyn Directory, store: &str, id: &LogId) -> Option<Ledger> {
        let path = Self::path(id).ok()?;
        let loaded = match directory.open(&path) {
            Ok(None) => return None,
            Ok(Some(file)) => Self::read(path.as_str(), &*file),
            Err(cause) => Err(Error::io(format!("read {path}"), cause)),
        };
        match loaded {
            Ok(ledger) => (ledger.store == store && ledger.id == *id).then_some(ledger),
            Err(error) if error.kind() == ErrorKind::NewerFormat => {
                tracing::warn!(%error, "a newer sessiond wrote the ledger; reading the log instead");
                None
            }
            Err(error) => {
                tracing::warn!(%error, %path, "the ledger is unreadable or damaged; reading the log instead");
                None
            }
        }
    }

    /// Reads a ledger file. One with many files is not read into memory at once.
    fn read(path: &str, file: &dyn OpenFile) -> Result<Ledger> {
        let failed = |cause| Error::io(format!("read {path}"), cause);
        let damaged = |why: &str| Error::corrupt(why).context(format_args!("read {path}"));
        let reader = || BufReader::with_capacity(CHUNK_BYTES, FileReader { file, offset: 0 });
        let size = file.stat().map_err(failed)?.size;
        if size > MAX_BYTES {
            return Err(damaged("it is too large"));
        }
        if size <= MAX_BUFFERED_BYTES {
            let mut bytes = Vec::new();
            reader().read_to_end(&mut bytes).map_err(failed)?;
            return Self::decode(path, &bytes);
        }
        let mut stored = [0; DIGEST_LEN];
        let mut body = reader();
        body.read_exact(&mut stored).map_err(failed)?;
        let mut hash = HashWriter::default();
        std::io::copy(&mut body, &mut hash).map_err(failed)?;
        if hash.0.digest().to_string().as_bytes() != stored {
            return Err(damaged("its digest does not match"));
        }
        let mut body = reader();
        body.read_exact(&mut stored).map_err(failed)?;
        match version::read_from(path, body, version::LEDGER)? {
            1 => {
                let mut body = reader();
                body.read_exact(&mut stored).map_err(failed)?;
                let mut ledger: Ledger =
                    serde_json::from_reader(body).map_err(|cause| damaged(&cause.to_string()))?;
                pack(&mut ledger.files);
                Ok(ledger)
            }
            other => Err(version::unknown(path, other)),
        }
    }

    /// Decodes a ledger file, by its format version.
    fn decode(path: &str, bytes: &[u8]) -> Result<Ledger> {
        let damaged = |why: &str| Error::corrupt(why).context(format_args!("read {path}"));
        let (_, body) = bytes
            .split_at_checked(DIGEST_LEN)
            .filter(|(digest, body)| Digest::of(body).to_string().as_bytes() == *digest)
            .ok_or_else(|| damaged("its digest does not match"))?;
        match version::read(path, body, version::LEDGER)? {
            1 => serde_json::from_slice(body).map_err(|cause| damaged(&cause.to_string())),
            other => Err(version::unknown(path, other)),
        }
    }

    /// Writes the ledger, synced to disk if `durable`: when ownership changes. A cursor that is lost in
    /// a power failure is recovered from the log.
    pub fn save(&self, directory: &dyn Directory, durable: bool) -> Result<()> {
        let path = Self::path(&self.id)?;
        let failed = |cause| Error::io(format!("write {path}"), cause);
        if self.files.len() > MAX_BUFFERED_FILES {
            return self
                .save_in_chunks(directory, &path, durable)
                .map_err(failed);
        }
        let mut body = Vec::new();
        self.write_to(&mut body).map_err(failed)?;
        let mut bytes = Digest::of(&body).to_string().into_bytes();
        bytes.append(&mut body);
        directory.replace(&path, &bytes, durable).map_err(failed)
    }

    /// Writes a large ledger beside the old one, and renames it. It is encoded twice instead of being
    /// kept in memory.
    fn save_in_chunks(
        &self,
        directory: &dyn Directory,
        path: &RelPath,
        durable: bool,
    ) -> std::io::Result<()> {
        let mut hash = HashWriter::default();
        self.write_to(&mut hash)?;
        let written: RelPath = format!("{path}.tmp")
            .parse()
            .map_err(std::io::Error::other)?;
        let file = FileWriter {
            directory,
            path: &written,
            offset: 0,
        };
        let mut file = BufWriter::with_capacity(CHUNK_BYTES, file);
        file.write_all(hash.0.digest().to_string().as_bytes())?;
        self.write_to(&mut file)?;
        file.flush()?;
        if durable {
            directory.sync_files(std::slice::from_ref(&written))?;
        }
        directory.rename(&written, path, None)?;
        if durable {
            directory.sync_names(std::slice::from_ref(path))?;
        }
        Ok(())
    }

    fn write_to(&self, mut writer: impl Write) -> std::io::Result<()> {
        writer.write_all(b"\n")?;
        serde_json::to_writer(writer, self).map_err(Into::into)
    }
}

/// Reads a file from the start to the end.
struct FileReader<'a> {
    file: &'a dyn OpenFile,
    offset: u64,
}

impl Read for FileReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.file.read_at(buffer, self.offset)?;
        self.offset += count as u64;
        Ok(count)
    }
}

/// Writes a file from the start to the end.
struct FileWriter<'a> {
    directory: &'a dyn Directory,
    path: &'a RelPath,
    offset: u64,
}

impl Write for FileWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.directory.write_at(self.path, self.offset, bytes)?;
        self.offset += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Hashes what is written.
#[derive(Default)]
struct HashWriter(RunningHash);

impl Write for HashWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
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
    fn a_damaged_or_foreign_ledger_is_ignored() {
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
    fn a_ledger_of_a_newer_sessiond_is_ignored_but_not_called_damaged() {
        let body = b"\n{\"version\":2,\"log\":{}}";
        let bytes = [Digest::of(body).to_string().as_bytes(), body].concat();
        let error = Ledger::decode("x.json", &bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NewerFormat, "{error}");
        let root = tempfile::tempdir().unwrap();
        let disk = Disk::new(root.path());
        let path = Ledger::path(&ledger().id).unwrap();
        disk.replace(&path, &bytes, true).unwrap();
        assert_eq!(Ledger::load(&disk, "file:///x", &ledger().id), None);
    }

    #[test]
    fn the_cursor_does_not_depend_on_the_chunks() {
        let text: Vec<u8> = (0..20_000u32).map(|at| (at % 251) as u8).collect();
        let root = tempfile::tempdir().unwrap();
        let disk = Disk::new(root.path());
        let path: RelPath = "f".parse().unwrap();
        disk.write_at(&path, 0, &text).unwrap();
        let file = disk.open(&path).unwrap().unwrap();
        let expected = FileCursor::read(&*file, FileKind::Append, 15_000)
            .unwrap()
            .unwrap();
        let mut cursor = FileCursor::new(FileKind::Append, expected.stat);
        let mut window = Vec::new();
        for chunk in text[..15_000].chunks(700) {
            cursor.advance(&mut window, chunk);
        }
        assert_eq!(cursor, expected);
        assert_eq!(
            expected.tail_fingerprint,
            tail_fingerprint(&text[15_000 - 4096..15_000])
        );
        assert!(
            FileCursor::read(&*file, FileKind::Append, 30_000)
                .unwrap()
                .is_none()
        );
    }
}
