//! Damage that happens to transcripts in the wild, and a view of them without it.
//!
//! Owns what counts as damage and what is put in its place. What is stored is never changed: the log keeps every byte, and a
//! repaired file goes on from where it first differs.

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use super::place::Action;
use super::{Context, Options, RestoreReport};
use crate::agent::Profile;
use crate::error::{Error, Result};
use crate::log::assemble::FileAssembler;
use crate::log::ledger::FileCursor;
use crate::model::{FileKind, RelPath, SessionFacts, TranscriptLine};
use crate::sys::{Directory, Meta, OpenFile};

/// Bytes read at a time.
const PIECE: usize = 256 << 10;

/// A longer line is left as it is: bounds what looking for a record in it costs.
const LONGEST_LINE: usize = 16 << 20;

/// So many places in a line are tried where a record may begin.
const MOST_STARTS: usize = 4096;

/// What was done to a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum What {
    /// Zeros were left out, as a file has them that lost its blocks.
    Zeros,
    /// The beginning of a record was left out that another was written behind.
    Torn,
    /// Records on one line got a line each.
    Split,
    /// A line that holds no record was left out.
    Unreadable,
    /// The last record got the end of its line.
    Ended,
    /// A line at the end that was not finished was left out.
    Unfinished,
}

/// One change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Change {
    /// The line, from 1, as it was.
    pub line: u64,
    /// Where it begins, in bytes, as it was.
    pub at: u64,
    /// What was done.
    pub what: What,
    /// Bytes that were left out, or put in.
    pub bytes: u64,
}

/// A file that was repaired.
#[derive(Debug, Clone, Serialize)]
pub struct Repaired {
    /// The file.
    pub path: RelPath,
    /// Where it is as it was; none if nothing was written.
    pub original: Option<RelPath>,
    /// What was changed.
    pub changes: Vec<Change>,
}

/// Writes the first `len` bytes of a file to another without what is damaged in them; answers the changes, and nothing is left of the
/// other if there are none. `whole` also leaves out a line at the end that is not finished: the agent would write behind it.
pub fn repair(
    directory: &dyn Directory,
    profile: &dyn Profile,
    path: &RelPath,
    (from, len): (&dyn OpenFile, u64),
    to: &RelPath,
    whole: bool,
) -> std::io::Result<Vec<Change>> {
    let mut view = View {
        profile,
        path,
        changes: Vec::new(),
        line: 0,
        at: 0,
    };
    let (mut read, mut written) = (0, 0);
    let (mut held, mut buffer, mut out) = (Vec::new(), vec![0; PIECE], Vec::new());
    while read < len {
        let want = PIECE.min(usize::try_from(len - read).unwrap_or(PIECE));
        match from.read_at(&mut buffer[..want], read)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            got => {
                held.extend_from_slice(&buffer[..got]);
                read += got as u64;
            }
        }
        let lines = held
            .iter()
            .rposition(|byte| *byte == b'\n')
            .map_or(0, |end| end + 1);
        for line in held[..lines].split_inclusive(|byte| *byte == b'\n') {
            view.take(line, &mut out);
        }
        held.drain(..lines);
        directory.write_at(to, written, &out)?;
        written += out.len() as u64;
        out.clear();
    }
    view.take_last(&held, whole, &mut out);
    directory.write_at(to, written, &out)?;
    if view.changes.is_empty() {
        directory.remove(to)?;
    }
    Ok(view.changes)
}

struct View<'a> {
    profile: &'a dyn Profile,
    path: &'a RelPath,
    changes: Vec<Change>,
    line: u64,
    at: u64,
}

impl View<'_> {
    fn note(&mut self, what: What, bytes: usize) {
        self.changes.push(Change {
            line: self.line,
            at: self.at,
            what,
            bytes: bytes as u64,
        });
    }

    /// A line that ends with a newline.
    fn take(&mut self, line: &[u8], out: &mut Vec<u8>) {
        self.line += 1;
        let text = &line[..line.len() - 1];
        if text.len() > LONGEST_LINE || text.trim_ascii().is_empty() || is_value(text) {
            out.extend_from_slice(line);
        } else {
            self.mend(text, out);
        }
        self.at += line.len() as u64;
    }

    /// What stands behind the last newline: a record may lack only that.
    fn take_last(&mut self, rest: &[u8], whole: bool, out: &mut Vec<u8>) {
        self.line += 1;
        match ended(rest) {
            Some(record) => {
                if record.len() < rest.len() {
                    self.note(What::Zeros, rest.len() - record.len());
                }
                self.note(What::Ended, 1);
                out.extend_from_slice(&record);
                out.push(b'\n');
            }
            None if whole && !rest.is_empty() => self.note(What::Unfinished, rest.len()),
            None => out.extend_from_slice(rest),
        }
    }

    fn mend(&mut self, text: &[u8], out: &mut Vec<u8>) {
        let clean: Vec<u8> = text.iter().copied().filter(|byte| *byte != 0).collect();
        if clean.len() < text.len() {
            self.note(What::Zeros, text.len() - clean.len());
        }
        if clean.trim_ascii().is_empty() {
            return;
        }
        let (mut records, rest) = leading(&clean);
        let rest = rest.trim_ascii();
        if !rest.is_empty() {
            match self.last_record(rest) {
                Some(from) => {
                    self.note(What::Torn, from);
                    records.push(&rest[from..]);
                }
                None => self.note(What::Unreadable, rest.len()),
            }
        }
        if records.len() > 1 {
            self.note(What::Split, records.len() - 1);
        }
        for record in records {
            out.extend_from_slice(record);
            out.push(b'\n');
        }
    }

    /// Where a record begins that goes on to the end. An object within a record that lost its end is none.
    fn last_record(&self, text: &[u8]) -> Option<usize> {
        let first_key = text.split(|byte| *byte == b':').next().unwrap_or_default();
        let mut starts = text
            .windows(2)
            .enumerate()
            .skip(1)
            .filter(|(_, pair)| *pair == b"{\"")
            .map(|(at, _)| at)
            .take(MOST_STARTS);
        starts.find(|at| is_value(&text[*at..]) && self.is_record(&text[*at..], first_key))
    }

    /// Whether an object is a record of its own: the profile reads it, it says when or whose it is, or it begins as the torn one
    /// does and as nothing within a record.
    fn is_record(&self, object: &[u8], first_key: &[u8]) -> bool {
        let read = self.profile.line(self.path, object);
        // Its path alone says which project it is of.
        let facts = |line: &TranscriptLine| {
            SessionFacts {
                project: None,
                ..line.facts.clone()
            } != SessionFacts::default()
        };
        let known = |line: TranscriptLine| {
            facts(&line) || line.message.is_some_and(|message| message.at.is_some())
        };
        let says = serde_json::from_slice::<Named>(object)
            .is_ok_and(|named| named.timestamp.or(named.uuid).or(named.session).is_some());
        let alike = first_key.len() > 2 && object.starts_with(first_key);
        read.is_some_and(known) || says || (alike && first_key != b"{\"type\"")
    }
}

/// What a record says of itself, whatever the agent.
#[derive(Deserialize)]
struct Named {
    timestamp: Option<IgnoredAny>,
    uuid: Option<IgnoredAny>,
    #[serde(rename = "sessionId")]
    session: Option<IgnoredAny>,
}

/// Whether what a file has behind its last whole line, at `from`, is a record that lacks only the end of its line.
pub fn is_record(file: &dyn OpenFile, from: u64, len: u64) -> std::io::Result<bool> {
    let mut rest = vec![
        0;
        usize::try_from(len - from)
            .unwrap_or(usize::MAX)
            .min(LONGEST_LINE + 1)
    ];
    let mut got = 0;
    while got < rest.len() {
        match file.read_at(&mut rest[got..], from + got as u64)? {
            0 => break,
            more => got += more,
        }
    }
    Ok(ended(&rest[..got]).is_some())
}

/// What stands behind the last newline, without zeros, if it is a record.
fn ended(rest: &[u8]) -> Option<Vec<u8>> {
    let text: Vec<u8> = rest.iter().copied().filter(|byte| *byte != 0).collect();
    (text.trim_ascii_start().starts_with(b"{") && text.len() <= LONGEST_LINE && is_value(&text))
        .then_some(text)
}

fn is_value(text: &[u8]) -> bool {
    let text = text.strip_prefix("\u{feff}".as_bytes()).unwrap_or(text);
    serde_json::from_slice::<IgnoredAny>(text).is_ok()
}

/// The records that a line begins with, and what is behind them.
fn leading(text: &[u8]) -> (Vec<&[u8]>, &[u8]) {
    let mut values = serde_json::Deserializer::from_slice(text).into_iter::<IgnoredAny>();
    let (mut records, mut from) = (Vec::new(), 0);
    while let Some(Ok(_)) = values.next() {
        let to = values.byte_offset();
        let record = text[from..to].trim_ascii();
        if !record.starts_with(b"{") {
            break;
        }
        records.push(record);
        from = to;
    }
    (records, &text[from..])
}

/// What would be repaired.
pub(super) fn foresee(
    context: &Context,
    assembly: &FileAssembler<'_>,
    report: &mut RestoreReport,
    options: &Options,
) -> Result<()> {
    let directory = &*context.directory;
    for (path, _, staged) in assembly
        .files()
        .filter(|(_, at, _)| options.repair && at.kind == FileKind::Append)
    {
        let Some(plan) = report.files.iter().find(|plan| plan.path == *path) else {
            continue;
        };
        let failed = |cause| Error::io(format!("read {path}"), cause);
        let from = if plan.action == Action::Keep {
            &plan.stands_at
        } else {
            &staged.at
        };
        let Some(file) = directory.open(from).map_err(failed)? else {
            continue;
        };
        let len = if plan.action == Action::Keep {
            file.stat().map_err(failed)?.size
        } else {
            plan.bytes
        };
        let view = staged
            .at
            .parent()
            .unwrap_or_else(|| staged.at.clone())
            .join("view")?;
        let changes = repair(
            directory,
            &*context.profile,
            path,
            (&*file, len),
            &view,
            options.claim,
        )
        .map_err(failed)?;
        if !changes.is_empty() {
            report.repaired.push(Repaired {
                path: path.clone(),
                original: None,
                changes,
            });
        }
    }
    Ok(())
}

/// Repairs a file that is in place, and keeps it as it was at `original`. Its cursor goes back to where it first differs: from there
/// on it is shipped anew, and the log keeps what it held.
pub(super) fn in_place(
    context: &Context,
    path: &RelPath,
    (view, original): (&RelPath, &RelPath),
    cursor: &mut Option<FileCursor>,
    options: &Options,
) -> std::io::Result<Vec<Change>> {
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
        view,
        options.claim,
    )?;
    let Some(first) = changes.iter().map(|change| change.at).min() else {
        return Ok(changes);
    };
    copy(directory, &*file, stat.size, original)?;
    let meta = Meta {
        mode: stat.mode,
        mtime_ns: stat.mtime_ns,
        owner: options.owner,
    };
    directory.finish(original, &meta)?;
    directory.finish(view, &meta)?;
    directory.rename(view, path, options.owner)?;
    let Some(file) = directory.open(path)? else {
        return Ok(changes);
    };
    if let Some(behind) = cursor {
        let len = behind.len.min(first);
        if let Some(over) = FileCursor::over(&*file, behind.kind, len)? {
            *behind = over;
        }
        // What is more than that is new to the next look.
        behind.stat.size = len;
    }
    Ok(changes)
}

fn copy(
    directory: &dyn Directory,
    from: &dyn OpenFile,
    len: u64,
    to: &RelPath,
) -> std::io::Result<()> {
    let mut buffer = vec![0; 256 << 10];
    let mut at = 0;
    directory.write_at(to, 0, &[])?;
    while at < len {
        match from.read_at(&mut buffer, at)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            got => {
                directory.write_at(to, at, &buffer[..got])?;
                at += got as u64;
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

    fn repaired(text: &[u8]) -> (String, Vec<(u64, What, u64)>) {
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
        let view = disk.read(&to).unwrap().unwrap_or_else(|| text.to_vec());
        (
            String::from_utf8(view).unwrap(),
            changes
                .iter()
                .map(|change| (change.line, change.what, change.bytes))
                .collect(),
        )
    }

    #[test]
    fn what_is_sound_stays_as_it_is() {
        let sound = format!("{GOOD}\r\n\n\u{feff}{GOOD}\n  {GOOD}  \n{{\"unknown\":1}}\n");
        assert_eq!(repaired(sound.as_bytes()), (sound.clone(), vec![]));
        assert_eq!(repaired(b""), (String::new(), vec![]));
    }

    #[test]
    fn each_damage_is_mended_and_told() {
        let line = format!("{GOOD}\n");
        let torn = &GOOD[..40];
        for (damaged, view, told) in [
            (
                format!("{line}{torn}{GOOD}\n"),
                line.repeat(2),
                vec![(2, What::Torn, 40)],
            ),
            (
                format!("{line}\0\0\0{GOOD}\n\0\0\n{line}"),
                line.repeat(3),
                vec![(2, What::Zeros, 3), (3, What::Zeros, 2)],
            ),
            (
                format!("{line}{GOOD}"),
                line.repeat(2),
                vec![(2, What::Ended, 1)],
            ),
            (
                format!("{line}{GOOD}{GOOD}\n"),
                line.repeat(3),
                vec![(2, What::Split, 1)],
            ),
            (
                format!("{line}{torn}\n{line}"),
                line.repeat(2),
                vec![(2, What::Unreadable, 40)],
            ),
            (
                format!("{line}{GOOD}{torn}{GOOD}\n"),
                line.repeat(3),
                vec![(2, What::Torn, 40), (2, What::Split, 1)],
            ),
            // A record of a kind that nobody knows.
            (
                format!("{torn}{{\"type\":\"new\",\"sessionId\":\"s\"}}\n"),
                "{\"type\":\"new\",\"sessionId\":\"s\"}\n".to_owned(),
                vec![(1, What::Torn, 40)],
            ),
            // Not finished: a copy has it as it is.
            (format!("{line}{torn}"), format!("{line}{torn}"), vec![]),
        ] {
            assert_eq!(repaired(damaged.as_bytes()), (view, told), "{damaged}");
        }
        // Cut right behind an object within: that is no record.
        let within = &GOOD[..GOOD.len() - 3];
        assert!(within.ends_with('}'));
        assert_eq!(repaired(format!("{within}\n{line}").as_bytes()).0, line);
    }

    #[test]
    fn damage_is_found_wherever_the_pieces_end() {
        let line = format!("{GOOD}\n");
        let many = line.repeat(3 * PIECE / line.len());
        let damaged = format!("{many}{}{line}{many}", &GOOD[..30]);
        let (view, told) = repaired(damaged.as_bytes());
        assert_eq!((view, told.len()), (format!("{many}{line}{many}"), 1));
    }
}
