//! Repairs restored transcripts: removes damaged bytes, and splits records that share a line.
//!
//! Owns what counts as damage and what replaces it. The log is never changed: it keeps every byte,
//! and a repaired file is uploaded again from the first difference.

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use super::options::{Options, RestoreContext};
use crate::agent::Profile;
use crate::log::ledger::FileCursor;
use crate::model::{RelPath, SessionFacts, TranscriptLine};
use crate::sys::lines::complete_prefix_len;
use crate::sys::{Directory, FileAttributes, OpenFile};

/// Number of bytes read at a time.
const CHUNK_LEN: usize = 256 << 10;

/// Maximum length of a line that is repaired: bounds the cost of finding a record in it.
const MAX_LINE_LEN: usize = 16 << 20;

/// Maximum number of positions in a line at which a record is tried.
const MAX_RECORD_STARTS: usize = 4096;

/// A kind of damage to a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LineDamage {
    /// Zero bytes, as in a file that lost blocks. They are removed.
    ZeroBytes,
    /// The start of a record, with another record written after it. The start is removed.
    TornRecord,
    /// Several records on one line. Each gets its own line.
    JoinedRecords,
    /// A line without a record. It is removed.
    InvalidLine,
    /// A last record without a newline. The newline is added.
    MissingNewline,
    /// A partial line at the end. It is removed.
    PartialLine,
}

/// The repair of one line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LineRepair {
    /// The number of the line in the original, from 1.
    pub line: u64,
    /// The offset of the line in the original, in bytes.
    pub offset: u64,
    /// What was wrong.
    pub damage: LineDamage,
    /// Number of bytes removed or added.
    pub bytes: u64,
}

/// A transcript that was repaired.
#[derive(Debug, Clone, Serialize)]
pub struct RepairedFile {
    /// Its path.
    pub path: RelPath,
    /// The path of the original; none in a dry run.
    pub original: Option<RelPath>,
    /// The repairs, in order.
    pub changes: Vec<LineRepair>,
}

/// Copies the first `len` bytes of a file to `to` without damage, and returns the repairs. If there
/// are none, `to` does not exist afterwards. With `complete_lines`, a partial line at the end is
/// left out too, because the agent would append to it.
pub fn repair(
    directory: &dyn Directory,
    profile: &dyn Profile,
    path: &RelPath,
    (from, len): (&dyn OpenFile, u64),
    to: &RelPath,
    complete_lines: bool,
) -> std::io::Result<Vec<LineRepair>> {
    let mut repairer = LineRepairer {
        profile,
        path,
        changes: Vec::new(),
        line: 0,
        offset: 0,
    };
    let (mut read, mut written) = (0, 0);
    let (mut pending, mut buffer, mut out) = (Vec::new(), vec![0; CHUNK_LEN], Vec::new());
    while read < len {
        let wanted = CHUNK_LEN.min(usize::try_from(len - read).unwrap_or(CHUNK_LEN));
        match from.read_at(&mut buffer[..wanted], read)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            count => {
                pending.extend_from_slice(&buffer[..count]);
                read += count as u64;
            }
        }
        let lines = complete_prefix_len(&pending);
        for line in pending[..lines].split_inclusive(|byte| *byte == b'\n') {
            repairer.push_line(line, &mut out);
        }
        pending.drain(..lines);
        directory.write_at(to, written, &out)?;
        written += out.len() as u64;
        out.clear();
    }
    repairer.push_rest(&pending, complete_lines, &mut out);
    directory.write_at(to, written, &out)?;
    if repairer.changes.is_empty() {
        directory.remove(to)?;
    }
    Ok(repairer.changes)
}

struct LineRepairer<'a> {
    profile: &'a dyn Profile,
    path: &'a RelPath,
    changes: Vec<LineRepair>,
    line: u64,
    offset: u64,
}

impl LineRepairer<'_> {
    fn record(&mut self, damage: LineDamage, bytes: usize) {
        self.changes.push(LineRepair {
            line: self.line,
            offset: self.offset,
            damage,
            bytes: bytes as u64,
        });
    }

    /// Repairs a line that ends with a newline.
    fn push_line(&mut self, line: &[u8], out: &mut Vec<u8>) {
        self.line += 1;
        let text = &line[..line.len() - 1];
        if text.len() > MAX_LINE_LEN || text.trim_ascii().is_empty() || is_value(text) {
            out.extend_from_slice(line);
        } else {
            self.repair(text, out);
        }
        self.offset += line.len() as u64;
    }

    /// Repairs the bytes after the last newline, which may be a record that lacks only its newline.
    fn push_rest(&mut self, rest: &[u8], complete_lines: bool, out: &mut Vec<u8>) {
        self.line += 1;
        match record_without_newline(rest) {
            Some(record) => {
                if record.len() < rest.len() {
                    self.record(LineDamage::ZeroBytes, rest.len() - record.len());
                }
                self.record(LineDamage::MissingNewline, 1);
                out.extend_from_slice(&record);
                out.push(b'\n');
            }
            None if complete_lines && !rest.is_empty() => {
                self.record(LineDamage::PartialLine, rest.len());
            }
            None => out.extend_from_slice(rest),
        }
    }

    fn repair(&mut self, text: &[u8], out: &mut Vec<u8>) {
        let clean: Vec<u8> = text.iter().copied().filter(|byte| *byte != 0).collect();
        if clean.len() < text.len() {
            self.record(LineDamage::ZeroBytes, text.len() - clean.len());
        }
        if clean.trim_ascii().is_empty() {
            return;
        }
        let (mut records, rest) = leading_records(&clean);
        let rest = rest.trim_ascii();
        if !rest.is_empty() {
            match self.start_of_last_record(rest) {
                Some(start) => {
                    self.record(LineDamage::TornRecord, start);
                    records.push(&rest[start..]);
                }
                None => self.record(LineDamage::InvalidLine, rest.len()),
            }
        }
        if records.len() > 1 {
            self.record(LineDamage::JoinedRecords, records.len() - 1);
        }
        for record in records {
            out.extend_from_slice(record);
            out.push(b'\n');
        }
    }

    /// The start of a record that extends to the end of the text. An object nested in a truncated
    /// record does not count.
    fn start_of_last_record(&self, text: &[u8]) -> Option<usize> {
        let first_key = text.split(|byte| *byte == b':').next().unwrap_or_default();
        let mut starts = text
            .windows(2)
            .enumerate()
            .skip(1)
            .filter(|(_, pair)| *pair == b"{\"")
            .map(|(at, _)| at)
            .take(MAX_RECORD_STARTS);
        starts.find(|at| is_value(&text[*at..]) && self.is_record(&text[*at..], first_key))
    }

    /// Whether an object is a record: the profile can parse it, it has a timestamp or an ID, or it
    /// starts with the same key as the torn record.
    fn is_record(&self, object: &[u8], first_key: &[u8]) -> bool {
        let parsed = self.profile.parse_line(self.path, object);
        // The project is known from the path alone.
        let has_facts = |line: &TranscriptLine| {
            SessionFacts {
                project: None,
                ..line.facts.clone()
            } != SessionFacts::default()
        };
        let is_known = |line: TranscriptLine| {
            has_facts(&line) || line.message.is_some_and(|message| message.at.is_some())
        };
        let is_identified = serde_json::from_slice::<RecordFields>(object).is_ok_and(|fields| {
            fields
                .timestamp
                .or(fields.uuid)
                .or(fields.session)
                .is_some()
        });
        let has_same_key = first_key.len() > 2 && object.starts_with(first_key);
        // Nested objects often start with "type" as well.
        let has_distinctive_key = has_same_key && first_key != b"{\"type\"";
        parsed.is_some_and(is_known) || is_identified || has_distinctive_key
    }
}

/// Fields that identify a record of any agent.
#[derive(Deserialize)]
struct RecordFields {
    timestamp: Option<IgnoredAny>,
    uuid: Option<IgnoredAny>,
    #[serde(rename = "sessionId")]
    session: Option<IgnoredAny>,
}

/// Whether the bytes of a file from `start` on are a record that lacks only its newline.
pub fn ends_with_record(file: &dyn OpenFile, start: u64, len: u64) -> std::io::Result<bool> {
    let mut rest = vec![
        0;
        usize::try_from(len - start)
            .unwrap_or(usize::MAX)
            .min(MAX_LINE_LEN + 1)
    ];
    let mut filled = 0;
    while filled < rest.len() {
        match file.read_at(&mut rest[filled..], start + filled as u64)? {
            0 => break,
            count => filled += count,
        }
    }
    Ok(record_without_newline(&rest[..filled]).is_some())
}

/// The bytes after the last newline without zero bytes, if they are a record.
fn record_without_newline(rest: &[u8]) -> Option<Vec<u8>> {
    let text: Vec<u8> = rest.iter().copied().filter(|byte| *byte != 0).collect();
    (text.trim_ascii_start().starts_with(b"{") && text.len() <= MAX_LINE_LEN && is_value(&text))
        .then_some(text)
}

fn is_value(text: &[u8]) -> bool {
    let text = text.strip_prefix("\u{feff}".as_bytes()).unwrap_or(text);
    serde_json::from_slice::<IgnoredAny>(text).is_ok()
}

/// The records at the start of a line, and the text after them.
fn leading_records(text: &[u8]) -> (Vec<&[u8]>, &[u8]) {
    let mut values = serde_json::Deserializer::from_slice(text).into_iter::<IgnoredAny>();
    let (mut records, mut start) = (Vec::new(), 0);
    while let Some(Ok(_)) = values.next() {
        let end = values.byte_offset();
        let record = text[start..end].trim_ascii();
        if !record.starts_with(b"{") {
            break;
        }
        records.push(record);
        start = end;
    }
    (records, &text[start..])
}

/// Repairs a local file, and keeps the original at `original`. The cursor moves back to the first
/// difference: the file is uploaded again from there.
pub(super) fn repair_in_place(
    context: &RestoreContext,
    path: &RelPath,
    (staged, original): (&RelPath, &RelPath),
    cursor: &mut Option<FileCursor>,
    options: &Options,
) -> std::io::Result<Vec<LineRepair>> {
    let directory = &*context.directory;
    let Some(file) = directory.open(path)? else {
        return Ok(Vec::new());
    };
    let stat = file.stat()?;
    let changes = repair(
        directory,
        &*context.profile,
        path,
        (&*file, stat.size),
        staged,
        options.claim,
    )?;
    let Some(first) = changes.iter().map(|change| change.offset).min() else {
        return Ok(changes);
    };
    copy(directory, &*file, stat.size, original)?;
    let attributes = FileAttributes {
        mode: stat.mode,
        mtime_ns: stat.mtime_ns,
        owner: options.owner,
    };
    directory.finish(original, &attributes)?;
    directory.finish(staged, &attributes)?;
    directory.sync_files(&[original.clone(), staged.clone()])?;
    directory.sync_names(std::slice::from_ref(original))?;
    directory.rename(staged, path, options.owner)?;
    let Some(file) = directory.open(path)? else {
        return Ok(changes);
    };
    if let Some(cursor) = cursor {
        let len = cursor.len.min(first);
        if let Some(earlier) = FileCursor::read(&*file, cursor.kind, len)? {
            *cursor = earlier;
        }
        // The next scan finds the bytes after the cursor as new.
        cursor.stat.size = len;
    }
    Ok(changes)
}

fn copy(
    directory: &dyn Directory,
    from: &dyn OpenFile,
    len: u64,
    to: &RelPath,
) -> std::io::Result<()> {
    let mut buffer = vec![0; CHUNK_LEN];
    let mut offset = 0;
    directory.write_at(to, 0, &[])?;
    while offset < len {
        match from.read_at(&mut buffer, offset)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            count => {
                directory.write_at(to, offset, &buffer[..count])?;
                offset += count as u64;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::claude_code::ClaudeCode;
    use crate::sys::Disk;

    const GOOD: &str = r#"{"type":"user","uuid":"u","timestamp":"2026-05-01T10:00:00.000Z","message":{"content":[{"type":"text","text":"a"}]}}"#;

    fn repaired(text: &[u8]) -> (String, Vec<(u64, LineDamage, u64)>) {
        let root = tempfile::tempdir().unwrap();
        let disk = Disk::new(root.path());
        let (from, to): (RelPath, RelPath) = ("from".parse().unwrap(), "to".parse().unwrap());
        disk.write_at(&from, 0, text).unwrap();
        let profile = ClaudeCode::new("claude-code".parse().unwrap());
        let opened = disk.open(&from).unwrap().unwrap();
        let path = "projects/-w/s.jsonl".parse().unwrap();
        let changes = repair(
            &disk,
            &profile,
            &path,
            (&*opened, text.len() as u64),
            &to,
            false,
        )
        .unwrap();
        let repaired = disk.read(&to).unwrap().unwrap_or_else(|| text.to_vec());
        (
            String::from_utf8(repaired).unwrap(),
            changes
                .iter()
                .map(|change| (change.line, change.damage, change.bytes))
                .collect(),
        )
    }

    #[test]
    fn undamaged_lines_stay_unchanged() {
        let undamaged = format!("{GOOD}\r\n\n\u{feff}{GOOD}\n  {GOOD}  \n{{\"unknown\":1}}\n");
        assert_eq!(repaired(undamaged.as_bytes()), (undamaged.clone(), vec![]));
        assert_eq!(repaired(b""), (String::new(), vec![]));
    }

    #[test]
    fn every_kind_of_damage_is_repaired_and_reported() {
        let line = format!("{GOOD}\n");
        let torn = &GOOD[..40];
        for (damaged, expected, changes) in [
            (
                format!("{line}{torn}{GOOD}\n"),
                line.repeat(2),
                vec![(2, LineDamage::TornRecord, 40)],
            ),
            (
                format!("{line}\0\0\0{GOOD}\n\0\0\n{line}"),
                line.repeat(3),
                vec![(2, LineDamage::ZeroBytes, 3), (3, LineDamage::ZeroBytes, 2)],
            ),
            (
                format!("{line}{GOOD}"),
                line.repeat(2),
                vec![(2, LineDamage::MissingNewline, 1)],
            ),
            (
                format!("{line}{GOOD}{GOOD}\n"),
                line.repeat(3),
                vec![(2, LineDamage::JoinedRecords, 1)],
            ),
            (
                format!("{line}{torn}\n{line}"),
                line.repeat(2),
                vec![(2, LineDamage::InvalidLine, 40)],
            ),
            (
                format!("{line}{GOOD}{torn}{GOOD}\n"),
                line.repeat(3),
                vec![
                    (2, LineDamage::TornRecord, 40),
                    (2, LineDamage::JoinedRecords, 1),
                ],
            ),
            // A record of an unknown kind.
            (
                format!("{torn}{{\"type\":\"new\",\"sessionId\":\"s\"}}\n"),
                "{\"type\":\"new\",\"sessionId\":\"s\"}\n".to_owned(),
                vec![(1, LineDamage::TornRecord, 40)],
            ),
            // A partial line: a copy keeps it.
            (format!("{line}{torn}"), format!("{line}{torn}"), vec![]),
        ] {
            assert_eq!(
                repaired(damaged.as_bytes()),
                (expected, changes),
                "{damaged}"
            );
        }
        // Cut right after a nested object, which is not a record.
        let nested = &GOOD[..GOOD.len() - 3];
        assert!(nested.ends_with('}'));
        assert_eq!(repaired(format!("{nested}\n{line}").as_bytes()).0, line);
    }

    #[test]
    fn damage_is_found_across_chunk_boundaries() {
        let line = format!("{GOOD}\n");
        let many = line.repeat(3 * CHUNK_LEN / line.len());
        let damaged = format!("{many}{}{line}{many}", &GOOD[..30]);
        let (repaired, changes) = repaired(damaged.as_bytes());
        assert_eq!(
            (repaired, changes.len()),
            (format!("{many}{line}{many}"), 1)
        );
    }
}
