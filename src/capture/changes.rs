//! Change detection: compares the files of one log with their cursors.
//!
//! Owns the decision whether a file was appended to, rewritten, moved or only touched, and where an
//! entry ends. Reads only the bytes to upload, and the bytes to compare if a file may have been
//! rewritten.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;

use super::scan::{fingerprint, log_of};
use crate::agent::{FileClass, Profile};
use crate::codec::entry::{MAX_RAW_BYTES, TARGET_RAW_BYTES};
use crate::error::Error;
use crate::log::ledger::{FileCursor, TAIL_WINDOW, tail_fingerprint};
use crate::model::{
    FileKind, FileMove, FileStat, LogName, ParsedTranscripts, Part, RelPath, TurnTracker,
};
use crate::sys::lines::complete_prefix_len;
use crate::sys::mutation::{Mutation, is_active};
use crate::sys::{Directory, ItemKind, OpenFile};

/// A side file that changed more recently than this may change again with the same mtime and
/// length, because the kernel updates its file clock every few milliseconds.
const MTIME_GRANULARITY_NS: i64 = 50_000_000;

/// Bytes that each part uses of an entry's size budget, in addition to its content and path. This
/// bounds the header of an entry with many small files.
const PART_OVERHEAD: u64 = 1 << 10;

/// The changes in the files of one log since their cursors.
#[derive(Debug, Default)]
pub struct ChangeSet {
    /// Files that were renamed.
    pub moves: Vec<FileMove>,
    /// The appended or rewritten range of each file.
    pub parts: Vec<Part>,
    /// The bytes of the parts.
    pub bodies: Vec<Vec<u8>>,
    /// The cursors to store once the changes are durable.
    pub cursors: BTreeMap<RelPath, FileCursor>,
    /// Whether there are more changes than fit into one entry.
    pub has_more: bool,
    /// Bytes after the last newline of the transcripts.
    pub partial_line_bytes: u64,
    /// The fingerprint of the files, valid once all changes are durable; 0 if they must be read
    /// again.
    pub fingerprint: u64,
    /// The existing files.
    pub files: BTreeSet<RelPath>,
    /// The errors of files that could not be read.
    pub read_errors: Vec<Error>,
    /// The parsed transcript parts.
    pub transcripts: ParsedTranscripts,
    /// The turn tracker to store once the changes are durable.
    pub turns: TurnTracker,
}

impl ChangeSet {
    /// Whether there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty() && self.moves.is_empty()
    }

    /// The length of each transcript once the changes are durable.
    pub fn transcript_lengths(&self) -> BTreeMap<RelPath, u64> {
        self.cursors
            .iter()
            .filter(|(_, cursor)| cursor.kind == FileKind::Append)
            .map(|(path, cursor)| (path.clone(), cursor.len))
            .collect()
    }
}

/// The files that were found, each with its kind and metadata.
type Files = BTreeMap<RelPath, (FileKind, FileStat)>;

/// Detects changes in the files of one log.
pub struct ChangeDetector<'a> {
    /// The agent's directory.
    pub directory: &'a dyn Directory,
    /// The agent's profile.
    pub profile: &'a dyn Profile,
    /// The log.
    pub name: &'a LogName,
    /// Whether the agent has exited, so that partial lines are final.
    pub agent_exited: bool,
    /// The current time.
    pub now: Timestamp,
}

impl ChangeDetector<'_> {
    /// Compares `paths`, the files that have a cursor, and new files in their directories.
    pub fn detect(
        &self,
        cursors: &BTreeMap<RelPath, FileCursor>,
        paths: &BTreeSet<RelPath>,
    ) -> ChangeSet {
        let mut changes = ChangeSet {
            cursors: cursors.clone(),
            ..ChangeSet::default()
        };
        let files = self.find_files(cursors, paths, &mut changes.read_errors);
        self.find_moves(&files, &mut changes);
        self.read_changes(&files, &mut changes);
        let current = files.keys().filter_map(|path| changes.cursors.get(path));
        changes.partial_line_bytes = current
            .clone()
            .map(|cursor| cursor.partial_line_bytes)
            .sum();
        // Files never have the fingerprint 0, so the next scan reads them again.
        changes.fingerprint = if current.clone().any(|cursor| cursor.is_recent) {
            0
        } else {
            fingerprint(files.iter().map(|(path, (_, stat))| (path, stat)))
        };
        changes.files = files.into_keys().collect();
        changes
    }

    /// Finds the files of the log. Reads the lengths of transcripts first and the side files after
    /// them, so that a file that a line refers to is in the same change set.
    fn find_files(
        &self,
        cursors: &BTreeMap<RelPath, FileCursor>,
        paths: &BTreeSet<RelPath>,
        errors: &mut Vec<Error>,
    ) -> Files {
        let mut files = Files::new();
        let known: BTreeSet<&RelPath> = cursors.keys().chain(paths).collect();
        for kind in [FileKind::Append, FileKind::Whole] {
            for path in &known {
                self.stat(path, Some(kind), &mut files, errors);
            }
        }
        for directory in self.profile.log_directories(self.name, &known) {
            self.find_new(&directory, &mut files, errors);
        }
        files
    }

    fn stat(
        &self,
        path: &RelPath,
        only: Option<FileKind>,
        files: &mut Files,
        errors: &mut Vec<Error>,
    ) {
        let found = (|| -> std::io::Result<_> {
            let (name, kind) = match self.profile.classify(path) {
                // Only the files that a transcript of the log names are known.
                FileClass::NamedInTranscript(kind) => (self.name.clone(), kind),
                _ => match log_of(self.directory, self.profile, path)? {
                    Some(found) => found,
                    None => return Ok(None),
                },
            };
            if name != *self.name || only.is_some_and(|only| only != kind) {
                return Ok(None);
            }
            Ok(self.directory.stat(path)?.map(|stat| (kind, stat)))
        })();
        match found {
            Ok(Some(found)) => {
                files.insert(path.clone(), found);
            }
            Ok(None) => {}
            Err(cause) => errors.push(Error::io(format!("read {path}"), cause)),
        }
    }

    fn find_new(&self, directory: &RelPath, files: &mut Files, errors: &mut Vec<Error>) {
        let items = match self.directory.list(Some(directory)) {
            Ok(items) => items,
            Err(cause) => return errors.push(Error::io(format!("list {directory}"), cause)),
        };
        for item in items {
            let Ok(path) = directory.join(&item.name) else {
                continue;
            };
            match item.kind {
                ItemKind::Directory if self.profile.is_scanned(&path) => {
                    self.find_new(&path, files, errors)
                }
                ItemKind::File if !files.contains_key(&path) => {
                    self.stat(&path, None, files, errors)
                }
                _ => {}
            }
        }
    }

    /// Finds renamed files: a missing path and a new path with the same content. Their bytes are not
    /// uploaded again.
    fn find_moves(&self, files: &Files, changes: &mut ChangeSet) {
        // In a project's log, another machine may have replaced the file at the path since.
        if self.name.is_project() {
            return;
        }
        let missing: Vec<RelPath> = changes
            .cursors
            .keys()
            .filter(|path| !files.contains_key(*path))
            .cloned()
            .collect();
        for from in missing {
            let Some(cursor) = changes.cursors.get(&from).filter(|cursor| cursor.len > 0) else {
                continue;
            };
            let mut new_files = files
                .iter()
                .filter(|(path, _)| !changes.cursors.contains_key(*path));
            // The kernel reuses the inodes of deleted files, and small files often have the same
            // content. A rename keeps the mtime, and only a transcript may have grown since.
            let is_unchanged = |stat: &FileStat| {
                stat.mtime_ns == cursor.stat.mtime_ns
                    || (cursor.kind == FileKind::Append && stat.size > cursor.stat.size)
            };
            let is_candidate = |kind: FileKind, stat: &FileStat| {
                kind == cursor.kind && stat.is_same_file(&cursor.stat) && is_unchanged(stat)
            };
            let Some((to, _)) = new_files.find(|(_, (kind, stat))| is_candidate(*kind, stat))
            else {
                continue;
            };
            let moved = self.directory.open(to).ok().flatten().and_then(|file| {
                FileCursor::read(&*file, cursor.kind, cursor.len)
                    .ok()
                    .flatten()
            });
            if moved.is_none_or(|moved| moved.hash != cursor.hash) {
                continue;
            }
            let to = to.clone();
            if let Some(cursor) = changes.cursors.remove(&from) {
                changes.cursors.insert(to.clone(), cursor);
                changes.moves.push(FileMove { from, to });
            }
        }
    }

    /// Reads the changes of every file, side files first, until the entry is full.
    fn read_changes(&self, files: &Files, changes: &mut ChangeSet) {
        let mut budget = TARGET_RAW_BYTES;
        for kind in [FileKind::Whole, FileKind::Append] {
            for (path, (_, stat)) in files.iter().filter(|(_, (of, _))| *of == kind) {
                if budget == 0 {
                    changes.has_more = true;
                    break;
                }
                match self.read_change(path, kind, stat, changes.cursors.get(path), budget) {
                    Ok(None) => {}
                    Ok(Some(change)) => {
                        changes.has_more |= change.has_more;
                        if change.is_part {
                            let path_len = path.as_str().len() as u64;
                            budget = budget.saturating_sub(
                                change.bytes.len() as u64 + path_len + PART_OVERHEAD,
                            );
                            changes.parts.push(change.part(path));
                            changes.bodies.push(change.bytes);
                        }
                        changes.cursors.insert(path.clone(), change.cursor);
                    }
                    Err(cause) => {
                        let error = Error::io(format!("read {path}"), cause);
                        changes.read_errors.push(error);
                    }
                }
            }
        }
    }

    fn read_change(
        &self,
        path: &RelPath,
        kind: FileKind,
        stat: &FileStat,
        cursor: Option<&FileCursor>,
        budget: u64,
    ) -> std::io::Result<Option<FileChange>> {
        let is_complete = |cursor: &FileCursor| {
            cursor.len + cursor.partial_line_bytes == stat.size
                && !(self.agent_exited && cursor.partial_line_bytes > 0)
        };
        if cursor
            .is_some_and(|cursor| cursor.stat == *stat && is_complete(cursor) && !cursor.is_recent)
        {
            return Ok(None);
        }
        let Some(file) = self.directory.open(path)? else {
            return Ok(None);
        };
        let opened = file.stat()?;
        if !opened.is_same_file(stat) {
            // The file was replaced in the meantime. The next flush reads the new file from the
            // start.
            return Ok(None);
        }
        // Only the bytes up to the length from the file search are read: a later line may refer to
        // a side file that the search did not find.
        let stat = FileStat {
            size: stat.size.min(opened.size),
            ..opened
        };
        let keeps_prefix = match cursor {
            None => false,
            // Another writer may have changed the stored file: upload all of it, or nothing.
            Some(cursor)
                if self.name.is_project()
                    && cursor.len == cursor.stat.size
                    && cursor.stat != stat =>
            {
                false
            }
            Some(cursor) => has_same_prefix(&*file, &stat, cursor)?,
        };
        let mut change = match cursor {
            Some(cursor)
                if keeps_prefix
                    && (cursor.len == stat.size || !is_active(Mutation::UploadFromStart)) =>
            {
                FileChange::new(cursor.len, cursor.clone())
            }
            _ => FileChange::new(0, FileCursor::new(kind, stat)),
        };
        let is_touched = cursor.is_some_and(|cursor| {
            (cursor.stat.mode, cursor.stat.mtime_ns) != (stat.mode, stat.mtime_ns)
        });
        let age = i64::try_from(self.now.as_nanosecond())
            .unwrap_or(i64::MAX)
            .saturating_sub(stat.mtime_ns);
        change.cursor.is_recent = kind == FileKind::Whole && age < MTIME_GRANULARITY_NS;
        change.cursor.kind = kind;
        change.cursor.stat = stat;
        change.read(&*file, budget, self.agent_exited)?;
        let is_rewritten = change.start == 0 && !keeps_prefix;
        // A rewritten file without a complete line is not uploaded: the stored version stays until
        // there is something to replace it with.
        change.is_part = !change.bytes.is_empty()
            || ((is_rewritten || is_touched) && change.cursor.partial_line_bytes == 0);
        Ok(Some(change))
    }
}

/// Whether a file still starts with the bytes that were uploaded.
fn has_same_prefix(
    file: &dyn OpenFile,
    stat: &FileStat,
    cursor: &FileCursor,
) -> std::io::Result<bool> {
    if stat.size < cursor.len {
        return Ok(false);
    }
    // A transcript that only grew has the same prefix if the window before the cursor is equal. Any
    // other change of size, time or identity requires a comparison of all uploaded bytes.
    let grew = cursor.kind == FileKind::Append
        && stat.is_same_file(&cursor.stat)
        && stat.size > cursor.stat.size;
    let is_unchanged = !cursor.is_recent
        && stat.is_same_file(&cursor.stat)
        && (stat.size, stat.mtime_ns) == (cursor.stat.size, cursor.stat.mtime_ns);
    if !grew && !is_unchanged {
        let current = FileCursor::read(file, cursor.kind, cursor.len)?;
        return Ok(current.is_some_and(|current| current.hash == cursor.hash));
    }
    let window = cursor.len.min(TAIL_WINDOW);
    let mut bytes = vec![0; window as usize];
    let read = read_full(file, &mut bytes, cursor.len - window)?;
    Ok(read == bytes.len() && tail_fingerprint(&bytes) == cursor.tail_fingerprint)
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
struct FileChange {
    /// The offset of the first byte to upload.
    start: u64,
    /// The bytes to upload.
    bytes: Vec<u8>,
    /// The cursor after the change.
    cursor: FileCursor,
    /// Whether the change is uploaded. Otherwise it only updates the cursor.
    is_part: bool,
    /// Whether the file has more bytes than fit into the entry.
    has_more: bool,
}

impl FileChange {
    fn new(start: u64, cursor: FileCursor) -> FileChange {
        FileChange {
            start,
            bytes: Vec::new(),
            cursor,
            is_part: false,
            has_more: false,
        }
    }

    fn part(&self, path: &RelPath) -> Part {
        Part {
            path: path.clone(),
            kind: self.cursor.kind,
            start: self.start,
            len: self.bytes.len() as u64,
            file_sha256: self.cursor.hash.digest(),
            mode: self.cursor.stat.mode,
            mtime_ns: self.cursor.stat.mtime_ns,
            seq: None,
        }
    }

    /// Reads the bytes from `start` up to the last complete line, and advances the cursor.
    fn read(
        &mut self,
        file: &dyn OpenFile,
        budget: u64,
        agent_exited: bool,
    ) -> std::io::Result<()> {
        let (kind, size) = (self.cursor.kind, self.cursor.stat.size);
        let includes_partial_line = agent_exited || is_active(Mutation::UploadPartialLine);
        let remaining = size.saturating_sub(self.start);
        // The budget includes the parts that the entry already has.
        let max_len = remaining.min(MAX_RAW_BYTES - (TARGET_RAW_BYTES - budget));
        // A side file is uploaded in one part, if it fits.
        let mut len = if kind == FileKind::Whole {
            max_len
        } else {
            remaining.min(budget)
        };
        loop {
            self.bytes.resize(len as usize, 0);
            let read = read_full(file, &mut self.bytes, self.start)?;
            self.bytes.truncate(read);
            let is_at_end = len == remaining || (read as u64) < len;
            if kind == FileKind::Whole || (is_at_end && includes_partial_line) {
                break;
            }
            let complete_len = complete_prefix_len(&self.bytes);
            if complete_len > 0 {
                self.bytes.truncate(complete_len);
                break;
            }
            if is_at_end {
                self.bytes.clear();
                break;
            }
            if len == max_len {
                // A line that is longer than the maximum entry is uploaded in parts.
                break;
            }
            len = len.saturating_mul(4).min(max_len);
        }
        let uploaded = self.start + self.bytes.len() as u64;
        let rest = size.saturating_sub(uploaded);
        let mut window = self.window(file)?;
        self.cursor.advance(&mut window, &self.bytes);
        self.cursor.partial_line_bytes = 0;
        if rest > 0 {
            // The rest is a partial line, or did not fit.
            let is_partial_line =
                kind == FileKind::Append && !contains_newline(file, uploaded, size)?;
            if is_partial_line {
                self.cursor.partial_line_bytes = rest;
            } else {
                self.has_more = true;
            }
        }
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
fn contains_newline(file: &dyn OpenFile, start: u64, end: u64) -> std::io::Result<bool> {
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
