//! The change of one file: the bytes to upload, and the cursor after them.
//!
//! Owns how a file is read and compared with its cursor. Does not own the decision what to upload
//! (`changes`).

use crate::log::ledger::{FileCursor, TAIL_WINDOW, tail_fingerprint};
use crate::model::{FileKind, FileStat, Part, RelPath, UploadPart};
use crate::sys::OpenFile;

/// The cursor to continue from, if a file still starts with the bytes that were uploaded.
pub(super) fn matching_cursor(
    file: &dyn OpenFile,
    stat: &FileStat,
    cursor: &FileCursor,
) -> std::io::Result<Option<FileCursor>> {
    if stat.size < cursor.len {
        return Ok(None);
    }
    // A transcript that only grew has the same prefix if the window before the cursor is equal. Any
    // other change of size, time or identity requires a comparison of all uploaded bytes.
    let grew = cursor.kind == FileKind::Append
        && stat.is_same_file(&cursor.stat)
        && stat.size > cursor.stat.size;
    let is_unchanged = !cursor.is_recent
        && stat.is_same_file(&cursor.stat)
        && (stat.size, stat.mtime_ns) == (cursor.stat.size, cursor.stat.mtime_ns);
    let can_continue = cursor.len == stat.size || cursor.hash.running().is_some();
    if (!grew && !is_unchanged) || !can_continue {
        let current = FileCursor::read(file, cursor.kind, cursor.len)?;
        let current = current.filter(|current| current.hash == cursor.hash);
        return Ok(current.map(|current| FileCursor {
            hash: current.hash,
            ..cursor.clone()
        }));
    }
    let window = cursor.len.min(TAIL_WINDOW);
    let mut bytes = vec![0; window as usize];
    let read = read_full(file, &mut bytes, cursor.len - window)?;
    let is_equal = read == bytes.len() && tail_fingerprint(&bytes) == cursor.tail_fingerprint;
    Ok(is_equal.then(|| cursor.clone()))
}

/// Whether a file starts with the bytes that were uploaded. Reads all of them.
pub(super) fn has_uploaded_bytes(
    file: &dyn OpenFile,
    cursor: &FileCursor,
) -> std::io::Result<bool> {
    let current = FileCursor::read(file, cursor.kind, cursor.len)?;
    Ok(current.is_some_and(|current| current.hash == cursor.hash))
}

/// Reads until the buffer is full or the file ends; returns the number of bytes.
fn read_full(file: &dyn OpenFile, buffer: &mut [u8], offset: u64) -> std::io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read_at(&mut buffer[filled..], offset + filled as u64)? {
            0 => break,
            count => filled += count,
        }
    }
    Ok(filled)
}

/// The change of one file.
pub(super) struct FileChange {
    /// The offset of the first byte to upload.
    pub(super) start: u64,
    /// The bytes to upload.
    pub(super) bytes: Vec<u8>,
    /// The cursor after the change.
    pub(super) cursor: FileCursor,
    /// Whether the change is uploaded. Otherwise it only updates the cursor.
    pub(super) is_part: bool,
    /// Whether the file has more bytes than fit into the entry.
    pub(super) has_more: bool,
    /// Whether the file changed while it was read or uploaded.
    pub(super) has_changed: bool,
    /// The place in an upload of several parts.
    pub(super) upload: Option<UploadPart>,
}

impl FileChange {
    pub(super) fn new(start: u64, cursor: FileCursor) -> FileChange {
        FileChange {
            start,
            bytes: Vec::new(),
            cursor,
            is_part: false,
            has_more: false,
            has_changed: false,
            upload: None,
        }
    }

    pub(super) fn part(&self, path: &RelPath) -> Part {
        Part {
            path: path.clone(),
            kind: self.cursor.kind,
            start: self.start,
            len: self.bytes.len() as u64,
            file_sha256: self.cursor.hash.digest(),
            mode: self.cursor.stat.mode,
            mtime_ns: self.cursor.stat.mtime_ns,
            seq: None,
            upload: self.upload,
        }
    }

    /// Reads up to `len` bytes from `start`.
    pub(super) fn read_up_to(&mut self, file: &dyn OpenFile, len: u64) -> std::io::Result<()> {
        self.bytes.resize(len as usize, 0);
        let read = read_full(file, &mut self.bytes, self.start)?;
        self.bytes.truncate(read);
        Ok(())
    }

    /// Reads `len` bytes from `start` and advances the cursor. Returns false if the file is shorter.
    pub(super) fn read_exact(&mut self, file: &dyn OpenFile, len: u64) -> std::io::Result<bool> {
        self.read_up_to(file, len)?;
        self.advance(file)?;
        Ok(self.bytes.len() as u64 == len)
    }

    /// Advances the cursor over the bytes.
    pub(super) fn advance(&mut self, file: &dyn OpenFile) -> std::io::Result<()> {
        if self.bytes.is_empty() {
            self.cursor.partial_line_bytes = 0;
            return Ok(());
        }
        let mut window = self.window(file)?;
        self.cursor.advance(&mut window, &self.bytes);
        self.cursor.partial_line_bytes = 0;
        Ok(())
    }

    /// The bytes before `start`, for the cursor's fingerprint.
    fn window(&self, file: &dyn OpenFile) -> std::io::Result<Vec<u8>> {
        let len = self.start.min(TAIL_WINDOW);
        let mut bytes = vec![0; len as usize];
        let read = read_full(file, &mut bytes, self.start - len)?;
        bytes.truncate(read);
        Ok(bytes)
    }
}

/// Whether a file contains a newline between two offsets.
pub(super) fn contains_newline(file: &dyn OpenFile, start: u64, end: u64) -> std::io::Result<bool> {
    let mut offset = start;
    let mut buffer = vec![0; 64 << 10];
    while offset < end {
        let len = buffer.len().min((end - offset) as usize);
        let read = file.read_at(&mut buffer[..len], offset)?;
        if read == 0 {
            return Ok(false);
        }
        if buffer[..read].contains(&b'\n') {
            return Ok(true);
        }
        offset += read as u64;
    }
    Ok(false)
}
