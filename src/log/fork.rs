//! A session that begins with another's entries: what its files are then.
//!
//! Owns giving the other's files their new names and putting the new id into their lines. Both follow from the two ids alone,
//! so no byte is stored for it.

use std::collections::BTreeMap;

use super::ledger::FileCursor;
use crate::error::{Error, Result};
use crate::model::{FileKind, FileState, LogName, RelPath, RunningHash};
use crate::sys::{Directory, OpenFile};

/// Bytes read at a time.
const PIECE: usize = 256 << 10;

/// So many digits of an id stand in the names of Gemini CLI's files.
const DIGITS: usize = 8;

/// From one session's names to another's.
pub struct SessionRenamer {
    from: String,
    to: String,
}

impl SessionRenamer {
    /// The ids, as they stand in files.
    pub fn new(from: &LogName, to: &LogName) -> SessionRenamer {
        SessionRenamer {
            from: from.to_string(),
            to: to.to_string(),
        }
    }

    /// What a file of the other session is called in this one. A directory is renamed that is the id, by itself or behind `session-`;
    /// others that have it in their names are projects'.
    pub fn path(&self, path: &RelPath) -> Result<RelPath> {
        let directory = |part: &str| match part.strip_suffix(self.from.as_str()) {
            Some(before @ ("" | "session-")) => format!("{before}{}", self.to),
            _ => part.to_owned(),
        };
        let mut parts: Vec<&str> = path.parts().collect();
        let name = parts.pop().map(|name| self.name(name));
        parts
            .into_iter()
            .map(directory)
            .chain(name)
            .collect::<Vec<_>>()
            .join("/")
            .parse()
    }

    /// A file's name with the other id: where it stands as a word of its own, or its first digits last before the ending.
    fn name(&self, name: &str) -> String {
        let within = |letter: Option<char>| letter.is_some_and(char::is_alphanumeric);
        let word = name.match_indices(&self.from).find(|(at, id)| {
            let (before, after) = (
                name[..*at].chars().next_back(),
                name[at + id.len()..].chars().next(),
            );
            !within(before) && !within(after)
        });
        if let Some((at, id)) = word {
            return format!("{}{}{}", &name[..at], self.to, &name[at + id.len()..]);
        }
        let digits = |id: &str| id.get(..DIGITS).unwrap_or(id).to_owned();
        match name.split_once(&digits(&self.from)) {
            Some((before, rest)) if before.ends_with('-') && rest.starts_with('.') => {
                format!("{before}{}{rest}", digits(&self.to))
            }
            _ => name.to_owned(),
        }
    }

    /// Whether the id stands in the file for what it is, and not as something that somebody said.
    fn is_rewritten(path: &RelPath, kind: FileKind) -> bool {
        kind == FileKind::Append || path.name().ends_with(".json")
    }

    /// Puts the new id into bytes.
    pub fn bytes(&self, path: &RelPath, kind: FileKind, bytes: &[u8]) -> Vec<u8> {
        if !Self::is_rewritten(path, kind) {
            return bytes.to_vec();
        }
        let mut out = Vec::with_capacity(bytes.len());
        let rest = self.replace(bytes, true, &mut out);
        debug_assert!(rest == bytes.len());
        out
    }

    /// Writes `bytes` with the new id to `out`; answers how many bytes were taken: without `last`, the end may be the beginning
    /// of an id and waits.
    fn replace(&self, bytes: &[u8], last: bool, out: &mut Vec<u8>) -> usize {
        let from = self.from.as_bytes();
        let mut at = 0;
        while let Some(found) = bytes[at..]
            .windows(from.len())
            .position(|window| window == from)
        {
            out.extend_from_slice(&bytes[at..at + found]);
            out.extend_from_slice(self.to.as_bytes());
            at += found + from.len();
        }
        let end = if last {
            bytes.len()
        } else {
            bytes.len().saturating_sub(from.len() - 1).max(at)
        };
        out.extend_from_slice(&bytes[at..end]);
        end
    }

    /// Writes a file with the new id to another place; answers its length and hash.
    pub fn copy(
        &self,
        directory: &dyn Directory,
        from: &dyn OpenFile,
        path: &RelPath,
        (kind, len): (FileKind, u64),
        to: &RelPath,
    ) -> Result<(u64, RunningHash)> {
        let failed = |cause| Error::io(format!("write {path} under another id"), cause);
        let rewritten = Self::is_rewritten(path, kind);
        let (mut read, mut written, mut hash) = (0, 0, RunningHash::default());
        let (mut held, mut buffer) = (Vec::new(), vec![0; PIECE]);
        directory.write_at(to, 0, &[]).map_err(failed)?;
        loop {
            let want = buffer
                .len()
                .min(usize::try_from(len - read).unwrap_or(usize::MAX));
            let got = if want == 0 {
                0
            } else {
                from.read_at(&mut buffer[..want], read).map_err(failed)?
            };
            read += got as u64;
            held.extend_from_slice(&buffer[..got]);
            let mut out = Vec::new();
            let taken = if rewritten {
                self.replace(&held, got == 0, &mut out)
            } else {
                out.extend_from_slice(&held);
                held.len()
            };
            held.drain(..taken);
            directory.write_at(to, written, &out).map_err(failed)?;
            hash.update(&out);
            written += out.len() as u64;
            if got == 0 {
                break;
            }
        }
        if read < len {
            Err(Error::corrupt(format!(
                "{path} is shorter than the log says"
            )))
        } else {
            Ok((written, hash))
        }
    }
}

/// Cuts lengths: the transcripts of a session as they were at a point.
pub fn cut_lengths(
    files: &BTreeMap<RelPath, FileState>,
    cut: Option<&BTreeMap<RelPath, u64>>,
) -> BTreeMap<RelPath, u64> {
    let length = |path: &RelPath, file: &FileState| match (cut, file.kind) {
        (Some(cut), FileKind::Append) => cut.get(path).map(|len| file.len.min(*len)),
        _ => Some(file.len),
    };
    files
        .iter()
        .filter_map(|(path, file)| Some((path.clone(), length(path, file)?)))
        .collect()
}

/// The cursor over a file, for its digest.
pub fn cursor(file: &dyn OpenFile, kind: FileKind, len: u64) -> Result<FileCursor> {
    let read =
        FileCursor::over(file, kind, len).map_err(|cause| Error::io("read a file", cause))?;
    read.ok_or_else(|| Error::corrupt("a file is shorter than it should be"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_lines_get_the_new_id() {
        let renaming = SessionRenamer::new(&"3f2a".parse().unwrap(), &"new-id".parse().unwrap());
        let path = |text: &str| renaming.path(&text.parse().unwrap()).unwrap().to_string();
        assert_eq!(path("projects/-w/3f2a.jsonl"), "projects/-w/new-id.jsonl");
        assert_eq!(
            path("projects/-w/3f2a/subagents/agent-1.jsonl"),
            "projects/-w/new-id/subagents/agent-1.jsonl"
        );
        assert_eq!(
            path("projects/-w-3f2a/3f2ab.jsonl"),
            "projects/-w-3f2a/3f2ab.jsonl"
        );
        assert_eq!(
            path("sessions/2026/rollout-3f2a1-3f2a.jsonl"),
            "sessions/2026/rollout-3f2a1-new-id.jsonl"
        );
        let renaming = SessionRenamer::new(
            &"01234567-89ab".parse().unwrap(),
            &"fedcba98-7654".parse().unwrap(),
        );
        let path = |text: &str| renaming.path(&text.parse().unwrap()).unwrap().to_string();
        assert_eq!(
            path("tmp/w/chats/session-x-01234567.jsonl"),
            "tmp/w/chats/session-x-fedcba98.jsonl"
        );
        assert_eq!(
            path("tmp/w/tool-outputs/session-01234567-89ab/a.txt"),
            "tmp/w/tool-outputs/session-fedcba98-7654/a.txt"
        );
        assert_eq!(
            path("projects/-w-01234567-89ab/x-01234567"),
            "projects/-w-01234567-89ab/x-01234567"
        );
        let renaming = SessionRenamer::new(&"3f2a".parse().unwrap(), &"new-id".parse().unwrap());
        let text = b"{\"sessionId\":\"3f2a\"}\n{\"path\":\"/x/3f2a/tool-results/3f2\"}3f";
        let wanted =
            b"{\"sessionId\":\"new-id\"}\n{\"path\":\"/x/new-id/tool-results/3f2\"}3f".to_vec();
        let transcript: RelPath = "a.jsonl".parse().unwrap();
        assert_eq!(renaming.bytes(&transcript, FileKind::Append, text), wanted);
        assert_eq!(
            renaming.bytes(&"a.txt".parse().unwrap(), FileKind::Whole, text),
            text
        );
        // However it comes in pieces.
        for piece in 1..text.len() {
            let (mut held, mut out) = (Vec::new(), Vec::new());
            for chunk in text.chunks(piece) {
                held.extend_from_slice(chunk);
                let taken = renaming.replace(&held, false, &mut out);
                held.drain(..taken);
            }
            renaming.replace(&held, true, &mut out);
            assert_eq!(out, wanted, "pieces of {piece}");
        }
    }
}
