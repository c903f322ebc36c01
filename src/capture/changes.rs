//! A look at the files of one log: what changed since the cursors, and where to cut.
//!
//! Owns the decision what is appended, rewritten, moved or only touched. Reads only what it ships (and, where a file
//! may have been rewritten, what it must compare).

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;

use super::scan::{fingerprint, whose};
use crate::agent::Profile;
use crate::codec::entry::{CUT_AT, MOST_RAW};
use crate::error::Error;
use crate::log::ledger::{FileCursor, WINDOW, tail_of};
use crate::model::{
    FileKind, FileMove, FileStat, LogName, ParsedTranscripts, Part, RelPath, TurnTracker,
};
use crate::sys::{Directory, ItemKind, OpenFile};

/// A change less than this before a look may be followed by another that leaves time and length as they are: the
/// kernel's clock for files ticks every few milliseconds. Only what is replaced as one is written so.
const TICK_NS: i64 = 50_000_000;

/// What a part takes of the room besides its bytes and its path: bounds the header of an entry of many small files.
const PART: u64 = 1 << 10;

/// What a look found.
#[derive(Debug, Default)]
pub struct ChangeSet {
    /// Files that got another path.
    pub moves: Vec<FileMove>,
    /// What each file gained.
    pub parts: Vec<Part>,
    /// The bytes of the parts.
    pub bodies: Vec<Vec<u8>>,
    /// The cursors as they are once this is durable.
    pub cursors: BTreeMap<RelPath, FileCursor>,
    /// More is there than fits into one entry.
    pub more: bool,
    /// Bytes of unfinished lines.
    pub torn: u64,
    /// What the files looked like: their fingerprint once all of them is shipped.
    pub seen: u64,
    /// Every file that is there.
    pub present: BTreeSet<RelPath>,
    /// Files that could not be read, and why.
    pub unread: Vec<Error>,
    /// What the parts say.
    pub told: ParsedTranscripts,
    /// How far the turns are once this is durable.
    pub turns: TurnTracker,
}

impl ChangeSet {
    /// Whether there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty() && self.moves.is_empty()
    }

    /// How long each transcript is once this is durable.
    pub fn lengths(&self) -> BTreeMap<RelPath, u64> {
        let here = self
            .cursors
            .iter()
            .filter(|(_, cursor)| cursor.kind == FileKind::Append);
        here.map(|(path, cursor)| (path.clone(), cursor.len))
            .collect()
    }
}

/// What to look at.
pub struct ChangeDetector<'a> {
    /// The agent's directory.
    pub directory: &'a dyn Directory,
    /// What we know of the agent.
    pub profile: &'a dyn Profile,
    /// The log whose files to look at.
    pub name: &'a LogName,
    /// The agent is gone: take an unfinished line too.
    pub last: bool,
    /// The time.
    pub now: Timestamp,
}

impl ChangeDetector<'_> {
    /// Looks at the files named in `hints` and those that have a cursor, and at what is new in their directories.
    pub fn take(
        &self,
        cursors: &BTreeMap<RelPath, FileCursor>,
        hints: &BTreeSet<RelPath>,
    ) -> ChangeSet {
        let mut cut = ChangeSet {
            cursors: cursors.clone(),
            ..ChangeSet::default()
        };
        let mut seen: BTreeMap<RelPath, (FileKind, FileStat)> = BTreeMap::new();
        let known: BTreeSet<&RelPath> = cursors.keys().chain(hints).collect();
        // Lengths of transcripts first, then side files: what a transcript line names is then in the same cut.
        for kind in [FileKind::Append, FileKind::Whole] {
            for path in &known {
                self.stat(path, Some(kind), &mut seen, &mut cut.unread);
            }
        }
        for directory in self.profile.directories(self.name, &known) {
            self.find_new(&directory, &mut seen, &mut cut.unread);
        }
        self.find_moves(&seen, &mut cut);
        let mut room = CUT_AT;
        for kind in [FileKind::Whole, FileKind::Append] {
            for (path, (_, stat)) in seen.iter().filter(|(_, (of, _))| *of == kind) {
                if room == 0 {
                    cut.more = true;
                    break;
                }
                match self.look_at(path, kind, stat, cut.cursors.get(path), room) {
                    Ok(None) => {}
                    Ok(Some(found)) => {
                        cut.more |= found.more;
                        if let Some(start) = found.start {
                            room = room.saturating_sub(
                                found.bytes.len() as u64 + path.as_str().len() as u64 + PART,
                            );
                            cut.parts.push(part(path, start, &found));
                            cut.bodies.push(found.bytes);
                        }
                        cut.cursors.insert(path.clone(), found.cursor);
                    }
                    Err(cause) => cut.unread.push(Error::io(format!("read {path}"), cause)),
                }
            }
        }
        cut.torn = seen
            .keys()
            .filter_map(|path| cut.cursors.get(path))
            .map(|cursor| cursor.torn)
            .sum();
        let fresh = seen
            .keys()
            .filter_map(|path| cut.cursors.get(path))
            .any(|cursor| cursor.fresh);
        // 0 is like nothing that a scan sees: the next one looks again.
        cut.seen = if fresh {
            0
        } else {
            fingerprint(seen.iter().map(|(path, (_, stat))| (path, stat)))
        };
        cut.present = seen.into_keys().collect();
        cut
    }

    fn stat(
        &self,
        path: &RelPath,
        only: Option<FileKind>,
        seen: &mut BTreeMap<RelPath, (FileKind, FileStat)>,
        unread: &mut Vec<Error>,
    ) {
        let found = (|| -> std::io::Result<_> {
            let Some((name, kind)) = whose(self.directory, self.profile, path)? else {
                return Ok(None);
            };
            if name != *self.name || only.is_some_and(|only| only != kind) {
                return Ok(None);
            }
            Ok(self.directory.stat(path)?.map(|stat| (kind, stat)))
        })();
        match found {
            Ok(Some(found)) => {
                seen.insert(path.clone(), found);
            }
            Ok(None) => {}
            Err(cause) => unread.push(Error::io(format!("read {path}"), cause)),
        }
    }

    fn find_new(
        &self,
        directory: &RelPath,
        seen: &mut BTreeMap<RelPath, (FileKind, FileStat)>,
        unread: &mut Vec<Error>,
    ) {
        let items = match self.directory.list(Some(directory)) {
            Ok(items) => items,
            Err(cause) => return unread.push(Error::io(format!("list {directory}"), cause)),
        };
        for item in items {
            let Ok(path) = directory.join(&item.name) else {
                continue;
            };
            match item.kind {
                ItemKind::Directory if self.profile.enter(&path) => {
                    self.find_new(&path, seen, unread)
                }
                ItemKind::File if !seen.contains_key(&path) => self.stat(&path, None, seen, unread),
                _ => {}
            }
        }
    }

    /// A path that is gone and a new one that is the same file: it was moved, and nothing needs to be shipped again.
    fn find_moves(&self, seen: &BTreeMap<RelPath, (FileKind, FileStat)>, cut: &mut ChangeSet) {
        // What stands under a path of a project's log may be another's by now.
        if self.name.is_project() {
            return;
        }
        let gone: Vec<RelPath> = cut
            .cursors
            .keys()
            .filter(|path| !seen.contains_key(*path))
            .cloned()
            .collect();
        for from in gone {
            let Some(cursor) = cut.cursors.get(&from).filter(|cursor| cursor.len > 0) else {
                continue;
            };
            let mut new = seen
                .iter()
                .filter(|(path, _)| !cut.cursors.contains_key(*path));
            // The number of a deleted file is given to the next one made: only the same bytes make it the same file, and
            // small files often have the same. A rename leaves the time as it was; only a transcript may have grown since.
            let kept = |stat: &FileStat| {
                stat.mtime_ns == cursor.stat.mtime_ns
                    || (cursor.kind == FileKind::Append && stat.size > cursor.stat.size)
            };
            let same = |kind: FileKind, stat: &FileStat| {
                kind == cursor.kind && stat.same_file(&cursor.stat) && kept(stat)
            };
            let Some((to, _)) = new.find(|(_, (kind, stat))| same(*kind, stat)) else {
                continue;
            };
            let moved = self.directory.open(to).ok().flatten().and_then(|file| {
                FileCursor::over(&*file, cursor.kind, cursor.len)
                    .ok()
                    .flatten()
            });
            if moved.is_none_or(|moved| moved.hash != cursor.hash) {
                continue;
            }
            let to = to.clone();
            if let Some(cursor) = cut.cursors.remove(&from) {
                cut.cursors.insert(to.clone(), cursor);
                cut.moves.push(FileMove { from, to });
            }
        }
    }

    fn look_at(
        &self,
        path: &RelPath,
        kind: FileKind,
        stat: &FileStat,
        cursor: Option<&FileCursor>,
        room: u64,
    ) -> std::io::Result<Option<Found>> {
        let done = |cursor: &FileCursor| {
            cursor.len + cursor.torn == stat.size && !(self.last && cursor.torn > 0)
        };
        if cursor.is_some_and(|cursor| cursor.stat == *stat && done(cursor) && !cursor.fresh) {
            return Ok(None);
        }
        let Some(file) = self.directory.open(path)? else {
            return Ok(None);
        };
        let now = file.stat()?;
        if !now.same_file(stat) {
            // Replaced since the scan: the next look sees the new one from the start.
            return Ok(None);
        }
        // Bytes behind the length that was read first may belong to a line whose side files we have not seen.
        let stat = FileStat {
            size: stat.size.min(now.size),
            ..now
        };
        let unchanged_so_far = match cursor {
            None => false,
            // Another may have changed the stored one meanwhile: all of it, or nothing.
            Some(cursor)
                if self.name.is_project()
                    && cursor.len == cursor.stat.size
                    && cursor.stat != stat =>
            {
                false
            }
            Some(cursor) => still_begins(&*file, &stat, cursor)?,
        };
        let mut found = match cursor {
            Some(cursor) if unchanged_so_far => Found::from(cursor.len, cursor.clone()),
            _ => Found::from(0, FileCursor::new(kind, stat)),
        };
        let touched = cursor.is_some_and(|cursor| {
            (cursor.stat.mode, cursor.stat.mtime_ns) != (stat.mode, stat.mtime_ns)
        });
        let age = i64::try_from(self.now.as_nanosecond())
            .unwrap_or(i64::MAX)
            .saturating_sub(stat.mtime_ns);
        found.cursor.fresh = kind == FileKind::Whole && age < TICK_NS;
        found.cursor.kind = kind;
        found.cursor.stat = stat;
        found.read(&*file, &stat, kind, room, self.last)?;
        let rewritten = found.from == 0 && !unchanged_so_far;
        // A rewrite that has no whole line yet is not shipped: what is stored stays until there is something to put there.
        if !found.bytes.is_empty() || ((rewritten || touched) && found.cursor.torn == 0) {
            found.start = Some(found.from);
        }
        Ok(Some(found))
    }
}

fn part(path: &RelPath, start: u64, found: &Found) -> Part {
    Part {
        path: path.clone(),
        kind: found.cursor.kind,
        start,
        len: found.bytes.len() as u64,
        file_sha256: found.cursor.hash.digest(),
        mode: found.cursor.stat.mode,
        mtime_ns: found.cursor.stat.mtime_ns,
        seq: None,
    }
}

/// Whether a file still begins with what we shipped of it.
fn still_begins(
    file: &dyn OpenFile,
    stat: &FileStat,
    cursor: &FileCursor,
) -> std::io::Result<bool> {
    if stat.size < cursor.len {
        return Ok(false);
    }
    // A file that is replaced as one says nothing by growing, and one with another identity or another time and the
    // same length may hold anything: compare all of it. One that only grew: compare the window.
    let grew = cursor.kind == FileKind::Append
        && stat.same_file(&cursor.stat)
        && stat.size > cursor.stat.size;
    let as_before = !cursor.fresh
        && stat.same_file(&cursor.stat)
        && (stat.size, stat.mtime_ns) == (cursor.stat.size, cursor.stat.mtime_ns);
    if !grew && !as_before {
        let again = FileCursor::over(file, cursor.kind, cursor.len)?;
        return Ok(again.is_some_and(|again| again.hash == cursor.hash));
    }
    let window = cursor.len.min(WINDOW);
    let mut bytes = vec![0; window as usize];
    let got = read_full(file, &mut bytes, cursor.len - window)?;
    Ok(got == bytes.len() && tail_of(&bytes) == cursor.tail)
}

fn read_full(file: &dyn OpenFile, buffer: &mut [u8], offset: u64) -> std::io::Result<usize> {
    let mut got = 0;
    while got < buffer.len() {
        match file.read_at(&mut buffer[got..], offset + got as u64)? {
            0 => break,
            more => got += more,
        }
    }
    Ok(got)
}

/// What one file gained.
struct Found {
    /// Where its bytes begin.
    from: u64,
    /// Set if it makes a part.
    start: Option<u64>,
    bytes: Vec<u8>,
    cursor: FileCursor,
    more: bool,
}

impl Found {
    fn from(from: u64, cursor: FileCursor) -> Found {
        Found {
            from,
            start: None,
            bytes: Vec::new(),
            cursor,
            more: false,
        }
    }

    fn read(
        &mut self,
        file: &dyn OpenFile,
        stat: &FileStat,
        kind: FileKind,
        room: u64,
        last: bool,
    ) -> std::io::Result<()> {
        let left = stat.size.saturating_sub(self.from);
        // Together with what is in the entry already.
        let most = left.min(MOST_RAW - (CUT_AT - room));
        // What is replaced as one goes out as one, if it can.
        let mut want = if kind == FileKind::Whole {
            most
        } else {
            left.min(room)
        };
        loop {
            self.bytes.resize(want as usize, 0);
            let got = read_full(file, &mut self.bytes, self.from)?;
            self.bytes.truncate(got);
            let all = want == left || (got as u64) < want;
            if kind == FileKind::Whole || (all && last) {
                break;
            }
            if let Some(end) = self.bytes.iter().rposition(|byte| *byte == b'\n') {
                self.bytes.truncate(end + 1);
                break;
            }
            if all {
                self.bytes.clear();
                break;
            }
            if want == most {
                // A line longer than an entry may be goes out in pieces.
                break;
            }
            want = want.saturating_mul(4).min(most);
        }
        let shipped = self.from + self.bytes.len() as u64;
        let rest = stat.size.saturating_sub(shipped);
        let mut window = self.window(file)?;
        let bytes = std::mem::take(&mut self.bytes);
        self.cursor.advance(&mut window, &bytes);
        self.bytes = bytes;
        self.cursor.torn = 0;
        if rest > 0 {
            // Either a line is unfinished, or there was no room for all.
            let unfinished = kind == FileKind::Append && !ends_in_line(file, shipped, stat.size)?;
            if unfinished {
                self.cursor.torn = rest;
            } else {
                self.more = true;
            }
        }
        Ok(())
    }

    /// The bytes before `from`, of which the cursor's fingerprint is made.
    fn window(&self, file: &dyn OpenFile) -> std::io::Result<Vec<u8>> {
        let size = self.from.min(WINDOW);
        let mut bytes = vec![0; size as usize];
        let got = read_full(file, &mut bytes, self.from - size)?;
        bytes.truncate(got);
        Ok(bytes)
    }
}

/// Whether a line ends between `from` and `to`.
fn ends_in_line(file: &dyn OpenFile, from: u64, to: u64) -> std::io::Result<bool> {
    let mut at = from;
    let mut buffer = vec![0; 64 << 10];
    while at < to {
        let want = buffer.len().min((to - at) as usize);
        let got = file.read_at(&mut buffer[..want], at)?;
        if got == 0 {
            return Ok(false);
        }
        if buffer[..got].contains(&b'\n') {
            return Ok(true);
        }
        at += got as u64;
    }
    Ok(false)
}
