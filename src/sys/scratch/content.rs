//! The bytes of one scratch file: pieces in memory, and ranges of the unlinked file.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{FallocateFlags, fallocate};

/// Counts the bytes in memory, and owns the unlinked file.
pub(super) struct Spill {
    memory_limit: u64,
    memory_used: AtomicU64,
    directories: Vec<PathBuf>,
    /// Makes the name of the file unique, until it is unlinked.
    random: u64,
    file: Mutex<Option<(Arc<File>, u64)>>,
}

impl Spill {
    pub(super) fn new(memory_limit: u64, directories: Vec<PathBuf>, random: u64) -> Spill {
        Spill {
            memory_limit,
            memory_used: AtomicU64::new(0),
            directories,
            random,
            file: Mutex::default(),
        }
    }

    /// Reserves memory; returns false above the limit.
    fn reserve(&self, bytes: u64) -> bool {
        let reserve = |used: u64| {
            used.checked_add(bytes)
                .filter(|used| *used <= self.memory_limit)
        };
        self.memory_used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, reserve)
            .is_ok()
    }

    /// Appends bytes to the unlinked file.
    fn append(&self, bytes: &[u8]) -> io::Result<Range> {
        let mut spilled = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let (file, end) = match &mut *spilled {
            Some(spilled) => spilled,
            empty => empty.insert((Arc::new(self.create()?), 0)),
        };
        file.write_all_at(bytes, *end)?;
        let range = Range {
            file: file.clone(),
            start: *end,
            len: bytes.len() as u64,
        };
        *end += range.len;
        Ok(range)
    }

    /// Appends bytes to a range; returns false if it is not at the end of the unlinked file.
    fn extend(&self, range: &mut Range, bytes: &[u8]) -> io::Result<bool> {
        let mut spilled = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *spilled {
            Some((file, end)) if range.start + range.len == *end => {
                file.write_all_at(bytes, *end)?;
                *end += bytes.len() as u64;
                range.len += bytes.len() as u64;
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    fn create(&self) -> io::Result<File> {
        self.directories
            .iter()
            .find_map(|directory| create_unlinked(directory, self.random).ok())
            .ok_or_else(|| {
                io::Error::new(
                    io::ErrorKind::ReadOnlyFilesystem,
                    "no directory for temporary files is writable; set TMPDIR to a writable one",
                )
            })
    }
}

/// Creates a file without a name. It is empty while it has one, so that a kill leaves no content.
fn create_unlinked(directory: &Path, random: u64) -> io::Result<File> {
    let name = format!(".sessiond-{}-{random:016x}", std::process::id());
    let path = directory.join(name);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

/// A range of the unlinked file. Its space is returned to the file system when nothing uses it.
struct Range {
    file: Arc<File>,
    start: u64,
    len: u64,
}

impl Drop for Range {
    fn drop(&mut self) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // A file system without holes frees the space when the process ends.
        let _ = fallocate(&self.file, flags, self.start, self.len);
    }
}

/// Bytes in memory, counted against the limit.
struct Memory {
    spill: Arc<Spill>,
    bytes: Vec<u8>,
}

impl Drop for Memory {
    fn drop(&mut self) {
        let len = self.bytes.len() as u64;
        self.spill.memory_used.fetch_sub(len, Ordering::Relaxed);
    }
}

#[derive(Clone)]
enum Source {
    Memory(Arc<Memory>),
    Disk(Arc<Range>),
}

#[derive(Clone)]
struct Piece {
    /// Where the piece starts in the scratch file.
    start: u64,
    len: u64,
    source: Source,
}

impl Piece {
    /// Appends to the piece; returns false if its bytes are in use elsewhere or cannot grow. Most
    /// writes append, and the number of pieces must not grow with each of them.
    fn append(&mut self, spill: &Spill, bytes: &[u8]) -> io::Result<bool> {
        let grown = match &mut self.source {
            Source::Memory(memory) => match Arc::get_mut(memory) {
                Some(memory) if memory.bytes.len() as u64 == self.len => {
                    let reserved = spill.reserve(bytes.len() as u64);
                    if reserved {
                        memory.bytes.extend_from_slice(bytes);
                    }
                    reserved
                }
                _ => false,
            },
            Source::Disk(range) => match Arc::get_mut(range) {
                Some(range) if range.len == self.len => spill.extend(range, bytes)?,
                _ => false,
            },
        };
        if grown {
            self.len += bytes.len() as u64;
        }
        Ok(grown)
    }
}

/// The bytes of a scratch file. A clone stays as it is when the original changes.
#[derive(Clone, Default)]
pub(super) struct Content {
    pieces: Vec<Piece>,
}

impl Content {
    pub(super) fn len(&self) -> u64 {
        self.pieces.last().map_or(0, |last| last.start + last.len)
    }

    /// Truncates at `offset` and appends `bytes`.
    pub(super) fn write_at(
        &mut self,
        spill: &Arc<Spill>,
        offset: u64,
        bytes: &[u8],
    ) -> io::Result<()> {
        self.pieces.retain(|piece| piece.start < offset);
        if let Some(last) = self.pieces.last_mut() {
            last.len = last.len.min(offset - last.start);
        }
        if offset > self.len() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the offset is after the end of the file",
            ));
        }
        if bytes.is_empty() {
            return Ok(());
        }
        let len = bytes.len() as u64;
        if let Some(last) = self.pieces.last_mut()
            && last.append(spill, bytes)?
        {
            return Ok(());
        }
        let source = if spill.reserve(len) {
            Source::Memory(Arc::new(Memory {
                spill: spill.clone(),
                bytes: bytes.to_vec(),
            }))
        } else {
            Source::Disk(Arc::new(spill.append(bytes)?))
        };
        self.pieces.push(Piece {
            start: offset,
            len,
            source,
        });
        Ok(())
    }

    pub(super) fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let index = self.pieces.partition_point(|piece| piece.start <= offset);
        let Some(piece) = index
            .checked_sub(1)
            .and_then(|index| self.pieces.get(index))
        else {
            return Ok(0);
        };
        let skipped = offset - piece.start;
        let available = usize::try_from(piece.len.saturating_sub(skipped)).unwrap_or(usize::MAX);
        let count = buffer.len().min(available);
        let Some(buffer) = buffer.get_mut(..count) else {
            return Ok(0);
        };
        match &piece.source {
            Source::Disk(range) => range.file.read_at(buffer, range.start + skipped),
            Source::Memory(memory) => {
                let from = usize::try_from(skipped).unwrap_or(usize::MAX);
                let bytes = memory.bytes.get(from..).unwrap_or_default();
                let count = count.min(bytes.len());
                if let (Some(to), Some(from)) = (buffer.get_mut(..count), bytes.get(..count)) {
                    to.copy_from_slice(from);
                }
                Ok(count)
            }
        }
    }
}
