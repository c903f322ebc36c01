//! Change detection: compares the files of one log with their cursors.
//!
//! Owns the decision whether a file was appended to, rewritten, moved or only touched, and where an
//! entry ends. Reads only the bytes to upload, and the bytes to compare if a file may have been
//! rewritten.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use jiff::Timestamp;

use super::file_change::{FileChange, contains_newline, has_uploaded_bytes, matching_cursor};
use super::limits::EntryLimits;
use super::scan::{fingerprint, log_of};
use crate::agent::{FileClass, Profile};
use crate::codec::entry::PART_OVERHEAD;
use crate::error::Error;
use crate::log::ledger::FileCursor;
use crate::model::{
    FileKind, FileMove, FileStat, LogName, ParsedTranscripts, Part, RelPath, TurnTracker,
    UploadPart,
};
use crate::sys::lines::complete_prefix_len;
use crate::sys::mutation::{Mutation, is_active};
use crate::sys::packed::{PACK_INTERVAL, insert_packed, pack};
use crate::sys::{Directory, ItemKind, OpenFile};

/// A side file that changed more recently than this may change again with the same mtime and
/// length, because the kernel updates its file clock every few milliseconds.
const MTIME_GRANULARITY_NS: i64 = 50_000_000;

/// The changes in the files of one log since their cursors.
#[derive(Debug, Default)]
pub struct ChangeSet {
    /// Files that were renamed.
    pub moves: Vec<FileMove>,
    /// The appended or rewritten range of each file.
    pub parts: Vec<Part>,
    /// The bytes of the parts.
    pub bodies: Vec<Vec<u8>>,
    /// The cursors to update once the changes are durable.
    pub cursors: CursorUpdates,
    /// Whether there are more changes than fit into one entry.
    pub has_more: bool,
    /// Whether all changes are in this entry or in earlier ones, except for those of side files that
    /// changed during their upload.
    pub is_caught_up: bool,
    /// The side files that were rewritten during their upload. Nothing of them is durable.
    pub rewritten: Vec<RelPath>,
    /// Bytes of the existing files that are durable once the changes are.
    pub durable_bytes: u64,
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
    pub fn transcript_lengths(
        &self,
        before: &BTreeMap<RelPath, FileCursor>,
    ) -> BTreeMap<RelPath, u64> {
        let is_replaced = |path: &RelPath| self.cursors.0.contains_key(path);
        let kept = before.iter().filter(|(path, _)| !is_replaced(path));
        let updated = self.cursors.0.iter();
        kept.chain(updated.filter_map(|(path, cursor)| Some((path, cursor.as_ref()?))))
            .filter(|(_, cursor)| cursor.kind == FileKind::Append)
            .map(|(path, cursor)| (path.clone(), cursor.len))
            .collect()
    }
}

/// The cursors that change; none for a path that has no cursor any more. The other cursors are not
/// copied, because a session can have a hundred thousand files.
#[derive(Debug, Clone, Default)]
pub struct CursorUpdates(BTreeMap<RelPath, Option<FileCursor>>);

impl CursorUpdates {
    /// The cursor of a file after the updates.
    fn get<'a>(
        &'a self,
        before: &'a BTreeMap<RelPath, FileCursor>,
        path: &RelPath,
    ) -> Option<&'a FileCursor> {
        match self.0.get(path) {
            Some(updated) => updated.as_ref(),
            None => before.get(path),
        }
    }

    /// Applies the updates. Returns whether a cursor changed.
    pub fn apply(self, cursors: &mut BTreeMap<RelPath, FileCursor>) -> bool {
        let mut has_changes = false;
        let is_large = self.0.len() >= PACK_INTERVAL / 4;
        for (path, cursor) in self.0 {
            has_changes |= cursors.get(&path) != cursor.as_ref();
            match cursor {
                Some(cursor) => cursors.insert(path, cursor),
                None => cursors.remove(&path),
            };
        }
        if is_large {
            pack(cursors);
        }
        has_changes
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
    /// The sizes of entries.
    pub limits: EntryLimits,
    /// Whether the entry may be large. If it may not, and the changes do not fit, they are
    /// incomplete and `has_more` is set.
    pub is_large: bool,
}

impl ChangeDetector<'_> {
    /// Compares `paths`, the files that have a cursor, and new files in their directories.
    pub fn detect(
        &self,
        cursors: &BTreeMap<RelPath, FileCursor>,
        paths: &BTreeSet<RelPath>,
    ) -> ChangeSet {
        let mut changes = ChangeSet::default();
        let files = self.find_files(cursors, paths, &mut changes.read_errors);
        let mut room = if self.is_large {
            self.limits.target
        } else {
            self.limits.small
        };
        self.find_moves(&files, cursors, &mut changes, &mut room);
        // A file that is not moved in this entry must not be uploaded at its new path.
        if !changes.has_more {
            self.read_changes(&files, cursors, &mut changes, room);
        }
        let updates = &changes.cursors;
        let current = files.keys().filter_map(|path| updates.get(cursors, path));
        changes.partial_line_bytes = current
            .clone()
            .map(|cursor| cursor.partial_line_bytes)
            .sum();
        changes.durable_bytes = current.clone().map(FileCursor::durable_len).sum();
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
            Ok(Some(found)) => insert_packed(files, path.clone(), found),
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
    fn find_moves(
        &self,
        files: &Files,
        cursors: &BTreeMap<RelPath, FileCursor>,
        changes: &mut ChangeSet,
        room: &mut u64,
    ) {
        // In a project's log, another machine may have replaced the file at the path since.
        if self.name.is_project() {
            return;
        }
        // A file whose upload is not complete is not at its old path in the log.
        let can_move = |cursor: &FileCursor| cursor.len > 0 && cursor.uploading.is_none();
        let mut missing = cursors
            .iter()
            .filter(|(path, cursor)| !files.contains_key(*path) && can_move(cursor))
            .peekable();
        if missing.peek().is_none() {
            return;
        }
        // The kernel reuses the inodes of deleted files, so the content is compared as well.
        // A file can have several paths.
        let mut new_files: BTreeMap<(u64, u64), VecDeque<&RelPath>> = BTreeMap::new();
        for (path, (_, stat)) in files {
            if !cursors.contains_key(path) {
                let paths = new_files.entry((stat.dev, stat.ino)).or_default();
                paths.push_back(path);
            }
        }
        for (from, cursor) in missing {
            let Some(paths) = new_files.get_mut(&(cursor.stat.dev, cursor.stat.ino)) else {
                continue;
            };
            let Some(to) = paths.front().copied() else {
                continue;
            };
            if !self.is_moved(files, to, cursor) {
                continue;
            }
            let used = (from.as_str().len() + to.as_str().len()) as u64 + PART_OVERHEAD;
            if *room < used && !changes.moves.is_empty() {
                changes.has_more = true;
                return;
            }
            *room = room.saturating_sub(used);
            paths.pop_front();
            changes.cursors.0.insert(from.clone(), None);
            changes.cursors.0.insert(to.clone(), Some(cursor.clone()));
            changes.moves.push(FileMove {
                from: from.clone(),
                to: to.clone(),
            });
        }
    }

    /// Whether the file at `to` has the content of a cursor.
    fn is_moved(&self, files: &Files, to: &RelPath, cursor: &FileCursor) -> bool {
        let Some((kind, stat)) = files.get(to) else {
            return false;
        };
        // Small files often have the same content. A rename keeps the mtime, and only a transcript
        // may have grown since.
        let is_unchanged = stat.mtime_ns == cursor.stat.mtime_ns
            || (cursor.kind == FileKind::Append && stat.size > cursor.stat.size);
        if *kind != cursor.kind || !stat.is_same_file(&cursor.stat) || !is_unchanged {
            return false;
        }
        let moved = self.directory.open(to).ok().flatten().and_then(|file| {
            FileCursor::read(&*file, cursor.kind, cursor.len)
                .ok()
                .flatten()
        });
        moved.is_some_and(|moved| moved.hash == cursor.hash)
    }

    /// Reads the changes of every file, side files first, until the entry is full. A side file that
    /// a line refers to is therefore in the same entry as the line, or in an earlier one.
    fn read_changes(
        &self,
        files: &Files,
        cursors: &BTreeMap<RelPath, FileCursor>,
        changes: &mut ChangeSet,
        room: u64,
    ) {
        let mut room = EntryRoom {
            left: room,
            is_empty: changes.moves.is_empty(),
        };
        // A side file that changes all the time must not delay the transcripts.
        let mut has_changing_file = false;
        for kind in [FileKind::Whole, FileKind::Append] {
            for (path, (_, stat)) in files.iter().filter(|(_, (of, _))| *of == kind) {
                changes.has_more |= room.left == 0;
                if changes.has_more {
                    return;
                }
                let cursor = changes.cursors.get(cursors, path);
                match self.read_change(path, kind, stat, cursor, room) {
                    Ok(FileOutcome::Unchanged) => {}
                    Ok(FileOutcome::Deferred) => changes.has_more = true,
                    Ok(FileOutcome::ChangedDuringUpload) => {
                        // Without a cursor, the next entry starts a new upload.
                        changes.cursors.0.insert(path.clone(), None);
                        changes.rewritten.push(path.clone());
                        has_changing_file = true;
                    }
                    Ok(FileOutcome::Changed(change)) => {
                        let mut change = *change;
                        changes.has_more |= change.has_more;
                        has_changing_file |= change.has_changed;
                        if change.is_part {
                            room.add_part(path, change.bytes.len());
                            changes.parts.push(change.part(path));
                            changes.bodies.push(change.bytes);
                        }
                        change.cursor.settle();
                        changes.cursors.0.insert(path.clone(), Some(change.cursor));
                    }
                    Err(cause) => {
                        let error = Error::io(format!("read {path}"), cause);
                        changes.read_errors.push(error);
                    }
                }
            }
        }
        changes.is_caught_up = !changes.has_more;
        changes.has_more |= has_changing_file;
    }

    fn read_change(
        &self,
        path: &RelPath,
        kind: FileKind,
        stat: &FileStat,
        cursor: Option<&FileCursor>,
        room: EntryRoom,
    ) -> std::io::Result<FileOutcome> {
        let is_complete = |cursor: &FileCursor| {
            cursor.uploading.is_none()
                && cursor.len.saturating_add(cursor.partial_line_bytes) == stat.size
                && !(self.agent_exited && cursor.partial_line_bytes > 0)
        };
        if cursor
            .is_some_and(|cursor| cursor.stat == *stat && is_complete(cursor) && !cursor.is_recent)
        {
            return Ok(FileOutcome::Unchanged);
        }
        let Some(file) = self.directory.open(path)? else {
            return Ok(FileOutcome::Unchanged);
        };
        let opened = file.stat()?;
        if !opened.is_same_file(stat) {
            // The file was replaced in the meantime. The next flush reads the new file from the
            // start.
            return Ok(FileOutcome::Unchanged);
        }
        // Only the bytes up to the length from the file search are read: a later line may refer to
        // a side file that the search did not find.
        let stat = FileStat {
            size: stat.size.min(opened.size),
            ..opened
        };
        if let Some(cursor) = cursor
            && let Some(total) = cursor.uploading
        {
            return self.continue_upload(&*file, &stat, cursor, total, room);
        }
        let matching = match cursor {
            None => None,
            // Another writer may have changed the stored file: upload all of it, or nothing.
            Some(cursor)
                if self.name.is_project()
                    && cursor.len == cursor.stat.size
                    && cursor.stat != stat =>
            {
                None
            }
            Some(cursor) => matching_cursor(&*file, &stat, cursor)?,
        };
        let keeps_prefix = matching.is_some();
        let mut change = match matching {
            Some(cursor) if cursor.len == stat.size || !is_active(Mutation::UploadFromStart) => {
                FileChange::new(cursor.len, cursor)
            }
            _ => FileChange::new(0, FileCursor::new(kind, stat)),
        };
        let is_touched = cursor.is_some_and(|cursor| {
            (cursor.stat.mode, cursor.stat.mtime_ns) != (stat.mode, stat.mtime_ns)
        });
        change.cursor.kind = kind;
        change.cursor.stat = stat;
        change.cursor.is_recent = self.is_recent(kind, &stat);
        let is_read = match kind {
            FileKind::Whole => self.read_side_file(&mut change, &*file, room)?,
            FileKind::Append => self.read_transcript(&mut change, &*file, room)?,
        };
        if !is_read {
            return Ok(FileOutcome::Deferred);
        }
        let is_rewritten = change.start == 0 && !keeps_prefix;
        // A rewritten file without a complete line is not uploaded: the stored version stays until
        // there is something to replace it with.
        change.is_part = !change.bytes.is_empty()
            || ((is_rewritten || is_touched) && change.cursor.partial_line_bytes == 0);
        Ok(FileOutcome::Changed(Box::new(change)))
    }

    fn is_recent(&self, kind: FileKind, stat: &FileStat) -> bool {
        let age = i64::try_from(self.now.as_nanosecond())
            .unwrap_or(i64::MAX)
            .saturating_sub(stat.mtime_ns);
        kind == FileKind::Whole && age < MTIME_GRANULARITY_NS
    }

    /// Reads the next part of a side file that is being uploaded in several. The bytes of the upload
    /// are compared with the file once, before the last part: a file that grows all the time would
    /// otherwise be read again for each part.
    fn continue_upload(
        &self,
        file: &dyn OpenFile,
        stat: &FileStat,
        cursor: &FileCursor,
        total: u64,
        room: EntryRoom,
    ) -> std::io::Result<FileOutcome> {
        let can_continue = cursor.hash.running().is_some() && cursor.len <= total;
        if !stat.is_same_file(&cursor.stat) || stat.size < total || !can_continue {
            return Ok(FileOutcome::ChangedDuringUpload);
        }
        if !self.can_split(room) {
            return Ok(FileOutcome::Deferred);
        }
        let left = total.saturating_sub(cursor.len);
        let is_last = left <= self.limits.part;
        let is_unchanged = !cursor.is_recent
            && (stat.size, stat.mtime_ns) == (cursor.stat.size, cursor.stat.mtime_ns);
        if is_last && !is_unchanged && !has_uploaded_bytes(file, cursor)? {
            return Ok(FileOutcome::ChangedDuringUpload);
        }
        let mut change = FileChange::new(cursor.len, cursor.clone());
        change.is_part = true;
        if !change.read_exact(file, left.min(self.limits.part))? {
            return Ok(FileOutcome::ChangedDuringUpload);
        }
        if is_last {
            change.upload = Some(UploadPart::Last);
            change.has_changed = stat.size > total;
            change.cursor.uploading = None;
            change.cursor.is_recent = self.is_recent(cursor.kind, stat);
            change.cursor.stat = FileStat {
                size: total,
                ..*stat
            };
        } else {
            change.upload = Some(UploadPart::More);
            change.has_more = true;
        }
        Ok(FileOutcome::Changed(Box::new(change)))
    }

    /// Whether the entry may contain a part of a side file: it is large, and has nothing else.
    fn can_split(&self, room: EntryRoom) -> bool {
        self.is_large && room.is_empty
    }

    /// Reads the changed bytes of a side file, or the first part of them. Returns false if they do
    /// not fit into this entry.
    fn read_side_file(
        &self,
        change: &mut FileChange,
        file: &dyn OpenFile,
        room: EntryRoom,
    ) -> std::io::Result<bool> {
        let size = change.cursor.stat.size;
        let left = size.saturating_sub(change.start);
        let fits = left <= room.left.min(self.limits.part);
        if !fits && !self.can_split(room) {
            return Ok(false);
        }
        if !change.read_exact(file, left.min(self.limits.part))? {
            // The file became shorter. The next flush reads it again.
            change.has_changed = true;
        } else if !fits {
            change.upload = Some(UploadPart::More);
            change.cursor.uploading = Some(size);
            change.has_more = true;
        }
        Ok(true)
    }

    /// Reads the new bytes of a transcript up to the last complete line. Returns false if a line
    /// does not fit into this entry.
    fn read_transcript(
        &self,
        change: &mut FileChange,
        file: &dyn OpenFile,
        room: EntryRoom,
    ) -> std::io::Result<bool> {
        let size = change.cursor.stat.size;
        let includes_partial_line = self.agent_exited || is_active(Mutation::UploadPartialLine);
        let left = size.saturating_sub(change.start);
        let max_len = left.min(match self.can_split(room) {
            true => self.limits.max,
            false => room.left,
        });
        let mut len = left.min(room.left);
        loop {
            change.read_up_to(file, len)?;
            let is_at_end = len == left || (change.bytes.len() as u64) < len;
            if is_at_end && includes_partial_line {
                break;
            }
            let complete_len = complete_prefix_len(&change.bytes);
            if complete_len > 0 || is_at_end {
                change.bytes.truncate(complete_len);
                break;
            }
            if len == max_len && !self.can_split(room) {
                return Ok(false);
            }
            if len == max_len {
                // A line that is longer than the maximum entry is uploaded in parts.
                break;
            }
            len = len.saturating_mul(4).min(max_len);
        }
        change.advance(file)?;
        let rest = size.saturating_sub(change.cursor.len);
        // A longer rest does not have to be searched: it does not fit into an entry as one line.
        let is_partial_line = rest > 0
            && rest <= self.limits.max
            && !contains_newline(file, change.cursor.len, size)?;
        change.cursor.partial_line_bytes = if is_partial_line { rest } else { 0 };
        change.has_more = rest > 0 && !is_partial_line;
        Ok(true)
    }
}

/// The room for more parts in an entry.
#[derive(Clone, Copy)]
struct EntryRoom {
    /// Raw bytes that still fit.
    left: u64,
    /// Whether the entry has no change so far.
    is_empty: bool,
}

impl EntryRoom {
    fn add_part(&mut self, path: &RelPath, len: usize) {
        let used = (path.as_str().len() + len) as u64 + PART_OVERHEAD;
        self.left = self.left.saturating_sub(used);
        self.is_empty = false;
    }
}

/// What an entry includes of one file.
enum FileOutcome {
    /// Nothing: the file has not changed.
    Unchanged,
    /// Nothing: the change does not fit. A later entry includes it.
    Deferred,
    /// Nothing: the file is not the one whose upload began. A later entry starts a new upload.
    ChangedDuringUpload,
    /// This change.
    Changed(Box<FileChange>),
}
