//! The files of a fork: the files of its origin with the new session ID.
//!
//! Owns renaming the origin's files and replacing the session ID in their lines. Both depend only
//! on the two IDs, so the fork stores no bytes for them.

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::model::{FileKind, FileState, LogName, RelPath, RunningHash};
use crate::sys::{Directory, OpenFile};

/// Number of bytes read at a time.
const CHUNK: usize = 256 << 10;

/// Number of digits of an ID in the file names of Gemini CLI.
const SHORT_ID_LEN: usize = 8;

/// Maps the paths and lines of one session to another.
pub struct SessionRenamer {
    from: String,
    to: String,
}

impl SessionRenamer {
    /// A renamer between two sessions.
    pub fn new(from: &LogName, to: &LogName) -> SessionRenamer {
        SessionRenamer {
            from: from.to_string(),
            to: to.to_string(),
        }
    }

    /// The path of a file of the origin in the fork. A directory is renamed if its name is the ID, or
    /// `session-` and the ID; other directories that contain it belong to projects.
    pub fn path(&self, path: &RelPath) -> Result<RelPath> {
        let directory = |part: &str| match part.strip_suffix(self.from.as_str()) {
            Some(before @ ("" | "session-")) => format!("{before}{}", self.to),
            _ => part.to_owned(),
        };
        let mut parts: Vec<&str> = path.components().collect();
        let name = parts.pop().map(|name| self.name(name));
        parts
            .into_iter()
            .map(directory)
            .chain(name)
            .collect::<Vec<_>>()
            .join("/")
            .parse()
    }

    /// A file name with the new ID. The old ID is replaced if it is a separate word, or if its
    /// first digits precede the extension.
    fn name(&self, name: &str) -> String {
        let is_word = |letter: Option<char>| letter.is_some_and(char::is_alphanumeric);
        let word = name.match_indices(&self.from).find(|(at, id)| {
            let (before, after) = (
                name[..*at].chars().next_back(),
                name[at + id.len()..].chars().next(),
            );
            !is_word(before) && !is_word(after)
        });
        if let Some((at, id)) = word {
            return format!("{}{}{}", &name[..at], self.to, &name[at + id.len()..]);
        }
        let digits = |id: &str| id.get(..SHORT_ID_LEN).unwrap_or(id).to_owned();
        match name.split_once(&digits(&self.from)) {
            Some((before, rest)) if before.ends_with('-') && rest.starts_with('.') => {
                format!("{before}{}{rest}", digits(&self.to))
            }
            _ => name.to_owned(),
        }
    }

    /// Whether the ID in the file refers to the session, rather than being content.
    fn is_rewritten(path: &RelPath, kind: FileKind) -> bool {
        kind == FileKind::Append || path.name().ends_with(".json")
    }

    /// Replaces the ID in bytes.
    pub fn bytes(&self, path: &RelPath, kind: FileKind, bytes: &[u8]) -> Vec<u8> {
        if !Self::is_rewritten(path, kind) {
            return bytes.to_vec();
        }
        let mut out = Vec::with_capacity(bytes.len());
        let rest = self.replace(bytes, true, &mut out);
        debug_assert!(rest == bytes.len());
        out
    }

    /// Appends `bytes` with the new ID to `out`; returns the number of bytes consumed. Unless
    /// `last` is set, trailing bytes that could be the start of an ID are not consumed.
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

    /// Copies a file with the new ID; returns the length and hash of the copy.
    pub fn copy(
        &self,
        directory: &dyn Directory,
        from: &dyn OpenFile,
        path: &RelPath,
        (kind, len): (FileKind, u64),
        to: &RelPath,
    ) -> Result<(u64, RunningHash)> {
        let failed = |cause| Error::io(format!("copy {path} with the new session ID"), cause);
        let is_rewritten = Self::is_rewritten(path, kind);
        let (mut read, mut written, mut hash) = (0, 0, RunningHash::default());
        let (mut pending, mut buffer) = (Vec::new(), vec![0; CHUNK]);
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
            pending.extend_from_slice(&buffer[..got]);
            let mut out = Vec::new();
            let consumed = if is_rewritten {
                self.replace(&pending, got == 0, &mut out)
            } else {
                out.extend_from_slice(&pending);
                pending.len()
            };
            pending.drain(..consumed);
            directory.write_at(to, written, &out).map_err(failed)?;
            hash.update(&out);
            written += out.len() as u64;
            if got == 0 {
                break;
            }
        }
        if read < len {
            Err(Error::corrupt(format!(
                "{path} is shorter than its length in the log"
            )))
        } else {
            Ok((written, hash))
        }
    }
}

/// The lengths of a session's files with its transcripts truncated to `lengths`; a transcript without
/// a length is left out.
pub fn truncated_lengths(
    files: &BTreeMap<RelPath, FileState>,
    lengths: Option<&BTreeMap<RelPath, u64>>,
) -> BTreeMap<RelPath, u64> {
    let length = |path: &RelPath, file: &FileState| match (lengths, file.kind) {
        (Some(lengths), FileKind::Append) => lengths.get(path).map(|len| file.len.min(*len)),
        _ => Some(file.len),
    };
    files
        .iter()
        .filter_map(|(path, file)| Some((path.clone(), length(path, file)?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_lines_get_the_new_id() {
        let renamer = SessionRenamer::new(&"3f2a".parse().unwrap(), &"new-id".parse().unwrap());
        let path = |text: &str| renamer.path(&text.parse().unwrap()).unwrap().to_string();
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
        let renamer = SessionRenamer::new(
            &"01234567-89ab".parse().unwrap(),
            &"fedcba98-7654".parse().unwrap(),
        );
        let path = |text: &str| renamer.path(&text.parse().unwrap()).unwrap().to_string();
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
        let renamer = SessionRenamer::new(&"3f2a".parse().unwrap(), &"new-id".parse().unwrap());
        let text = b"{\"sessionId\":\"3f2a\"}\n{\"path\":\"/x/3f2a/tool-results/3f2\"}3f";
        let expected =
            b"{\"sessionId\":\"new-id\"}\n{\"path\":\"/x/new-id/tool-results/3f2\"}3f".to_vec();
        let transcript: RelPath = "a.jsonl".parse().unwrap();
        assert_eq!(renamer.bytes(&transcript, FileKind::Append, text), expected);
        assert_eq!(
            renamer.bytes(&"a.txt".parse().unwrap(), FileKind::Whole, text),
            text
        );
        // Whatever the size of the chunks.
        for size in 1..text.len() {
            let (mut pending, mut out) = (Vec::new(), Vec::new());
            for chunk in text.chunks(size) {
                pending.extend_from_slice(chunk);
                let consumed = renamer.replace(&pending, false, &mut out);
                pending.drain(..consumed);
            }
            renamer.replace(&pending, true, &mut out);
            assert_eq!(out, expected, "chunks of {size} bytes");
        }
    }
}
