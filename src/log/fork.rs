//! The files of a fork: the files of its origin with the new session ID.
//!
//! Owns renaming the origin's files and replacing the IDs in their lines. Both depend only on the
//! IDs of the two sessions and the names of the files, so the fork stores no bytes for them.
//!
//! A fork can be restored next to its origin. Whatever is unique within an agent's directory
//! therefore gets another name in the fork: the session ID, the IDs of OpenCode's rows, and the plan
//! of Claude Code.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::{Error, Result};
use crate::model::{Digest, FileKind, FileState, ForkOrigin, LogName, RelPath, RunningHash};
use crate::sys::{Directory, OpenFile};

/// Number of bytes read at a time.
const CHUNK: usize = 256 << 10;

/// Number of digits of an ID in the file names of Gemini CLI.
const SHORT_ID_LEN: usize = 8;

/// What separates the slug from the ID of a sub-agent in the name of its plan.
const SUB_AGENT_PLAN: &str = "-agent-";

/// The prefixes of the IDs that OpenCode gives to sessions and their rows.
const ROW_PREFIXES: [&[u8]; 4] = [b"ses_", b"msg_", b"prt_", b"evt_"];
/// Hexadecimal digits after the prefix: the time, by which OpenCode sorts rows.
const ROW_TIME_LEN: usize = 12;
/// Random letters and digits after the time.
const ROW_RANDOM_LEN: usize = 14;
/// Length of such an ID.
const ROW_ID_LEN: usize = 4 + ROW_TIME_LEN + ROW_RANDOM_LEN;

/// Maps the paths and lines of one session to another.
pub struct SessionRenamer {
    from: String,
    to: String,
    /// The slugs of the origin's plans, each with its slug in the fork.
    slugs: BTreeMap<String, String>,
    /// Texts to replace in lines, each with its replacement.
    texts: Vec<(Vec<u8>, Vec<u8>)>,
    /// Whether the lines contain IDs of rows.
    has_row_ids: bool,
}

impl SessionRenamer {
    /// A renamer between two sessions. `files` are the files of the first.
    pub fn new<'a>(
        from: &LogName,
        to: &LogName,
        files: impl IntoIterator<Item = &'a RelPath>,
    ) -> SessionRenamer {
        let slugs = files.into_iter().filter_map(plan_slug);
        SessionRenamer::with_slugs(from, to, slugs.map(str::to_owned).collect())
    }

    /// The renamer from the origin of a fork to the fork.
    pub fn of_fork(fork: &ForkOrigin, to: &LogName) -> SessionRenamer {
        let suffix = slug_suffix(to);
        let slugs = fork
            .files
            .iter()
            .filter_map(|part| plan_slug(&part.path)?.strip_suffix(&suffix))
            .map(str::to_owned);
        SessionRenamer::with_slugs(&fork.session, to, slugs.collect())
    }

    fn with_slugs(from: &LogName, to: &LogName, slugs: BTreeSet<String>) -> SessionRenamer {
        let (from, suffix, to) = (from.to_string(), slug_suffix(to), to.to_string());
        let mut texts = vec![(from.clone().into_bytes(), to.clone().into_bytes())];
        let slugs: BTreeMap<String, String> = slugs
            .into_iter()
            .map(|slug| (slug.clone(), format!("{slug}{suffix}")))
            .collect();
        for (old, new) in &slugs {
            for (before, after) in [
                ("\"slug\":\"", "\""),
                ("/plans/", ".md"),
                ("/plans/", SUB_AGENT_PLAN),
            ] {
                let text = |slug: &str| format!("{before}{slug}{after}").into_bytes();
                texts.push((text(old), text(new)));
            }
        }
        SessionRenamer {
            has_row_ids: from.starts_with("ses_"),
            from,
            to,
            slugs,
            texts,
        }
    }

    /// The path of a file of the origin in the fork. A directory is renamed if its name is the ID, or
    /// `session-` and the ID; other directories that contain it belong to projects.
    pub fn path(&self, path: &RelPath) -> Result<RelPath> {
        let directory = |part: &str| match part.strip_suffix(self.from.as_str()) {
            Some(before @ ("" | "session-")) => format!("{before}{}", self.to),
            _ => part.to_owned(),
        };
        if let Some(slug) = plan_slug(path)
            && let Some(new) = self.slugs.get(slug)
        {
            return path.as_str().replacen(slug, new, 1).parse();
        }
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

    /// Appends `bytes` with the new IDs to `out`; returns the number of bytes consumed. Unless
    /// `last` is set, trailing bytes that could be the start of an ID are not consumed.
    fn replace(&self, bytes: &[u8], last: bool, out: &mut Vec<u8>) -> usize {
        let texts = self.texts.iter().map(|(old, _)| old.len());
        let longest = texts.max().unwrap_or(0).max(ROW_ID_LEN);
        let end = if last {
            bytes.len()
        } else {
            bytes.len().saturating_sub(longest - 1)
        };
        let (mut at, mut copied) = (0, 0);
        while at < end {
            let Some((len, new)) = self.replacement(&bytes[at..]) else {
                at += 1;
                continue;
            };
            out.extend_from_slice(&bytes[copied..at]);
            out.extend_from_slice(&new);
            at += len;
            copied = at;
        }
        out.extend_from_slice(&bytes[copied..at]);
        at
    }

    /// The length of the text at the start of `bytes` that is replaced, and its replacement.
    fn replacement(&self, bytes: &[u8]) -> Option<(usize, Vec<u8>)> {
        let text = self.texts.iter().find(|(old, _)| bytes.starts_with(old));
        if let Some((old, new)) = text {
            return Some((old.len(), new.clone()));
        }
        let id = bytes.get(..ROW_ID_LEN).filter(|id| is_row_id(id))?;
        self.has_row_ids.then(|| (ROW_ID_LEN, self.row_id(id)))
    }

    /// The ID of a row in the fork: the same time, and other letters.
    fn row_id(&self, id: &[u8]) -> Vec<u8> {
        const LETTERS: &[u8; 62] =
            b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
        let digest = Digest::of(&[self.to.as_bytes(), b" ", id].concat()).to_string();
        let bytes = digest.as_bytes().chunks_exact(2).take(ROW_RANDOM_LEN);
        let letter = |hex: &[u8]| {
            let digit = |byte: &u8| char::from(*byte).to_digit(16).unwrap_or(0) as usize;
            let byte = hex.iter().fold(0, |sum, hex| sum * 16 + digit(hex));
            LETTERS[byte % LETTERS.len()]
        };
        let time = &id[..ROW_ID_LEN - ROW_RANDOM_LEN];
        time.iter().copied().chain(bytes.map(letter)).collect()
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

/// The slug of a plan of Claude Code, or of the session whose sub-agent's plan it is; none for any
/// other file.
fn plan_slug(path: &RelPath) -> Option<&str> {
    let name = path.as_str().strip_prefix("plans/")?.strip_suffix(".md")?;
    let slug = name
        .split_once(SUB_AGENT_PLAN)
        .map_or(name, |(slug, _)| slug);
    (!slug.is_empty() && !slug.contains('/')).then_some(slug)
}

/// What the slugs of a session get appended in its fork. Claude Code accepts lower-case letters,
/// digits and dashes.
fn slug_suffix(to: &LogName) -> String {
    let id = to.to_string();
    let letters = id.chars().filter(char::is_ascii_alphanumeric);
    let short: String = letters.take(SHORT_ID_LEN).collect();
    format!("-{}", short.to_ascii_lowercase())
}

/// Whether bytes are the ID of a session or row of OpenCode.
fn is_row_id(id: &[u8]) -> bool {
    let Some((prefix, rest)) = id.split_at_checked(4) else {
        return false;
    };
    let Some((time, random)) = rest.split_at_checked(ROW_TIME_LEN) else {
        return false;
    };
    let is_hex = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    ROW_PREFIXES.contains(&prefix)
        && time.iter().all(is_hex)
        && random.len() == ROW_RANDOM_LEN
        && random.iter().all(u8::is_ascii_alphanumeric)
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

    fn renamer_of(from: &str, to: &str) -> SessionRenamer {
        SessionRenamer::new(&from.parse().unwrap(), &to.parse().unwrap(), [])
    }

    fn in_chunks(renamer: &SessionRenamer, text: &[u8], size: usize) -> Vec<u8> {
        let (mut pending, mut out) = (Vec::new(), Vec::new());
        for chunk in text.chunks(size) {
            pending.extend_from_slice(chunk);
            let consumed = renamer.replace(&pending, false, &mut out);
            pending.drain(..consumed);
        }
        renamer.replace(&pending, true, &mut out);
        out
    }

    #[test]
    fn a_plan_gets_another_slug() {
        let plans: [RelPath; 2] = [
            "plans/misty-fox.md".parse().unwrap(),
            "plans/misty-fox-agent-a1.md".parse().unwrap(),
        ];
        let to: LogName = "9F8e7d6c-0000".parse().unwrap();
        let renamer = SessionRenamer::new(&"3f2a".parse().unwrap(), &to, &plans);
        let path = |text: &str| renamer.path(&text.parse().unwrap()).unwrap().to_string();
        assert_eq!(path("plans/misty-fox.md"), "plans/misty-fox-9f8e7d6c.md");
        assert_eq!(
            path("plans/misty-fox-agent-a1.md"),
            "plans/misty-fox-9f8e7d6c-agent-a1.md"
        );
        let text =
            br#"{"slug":"misty-fox","text":"/h/plans/misty-fox.md, misty-fox"}{"slug":"gpt"}"#;
        let expected = br#"{"slug":"misty-fox-9f8e7d6c","text":"/h/plans/misty-fox-9f8e7d6c.md, misty-fox"}{"slug":"gpt"}"#;
        for size in 1..text.len() {
            assert_eq!(in_chunks(&renamer, text, size), expected);
        }
    }

    #[test]
    fn the_ids_of_rows_change_with_the_session() {
        let row = "msg_0123456789abABCDEFghijkl01";
        let text = format!("{{\"key\":\"{row}\",\"x\":\"ses_a msg_count\"}}");
        let renamed = |to: &str| {
            let bytes = renamer_of("ses_a", to).bytes(
                &"a.jsonl".parse().unwrap(),
                FileKind::Append,
                text.as_bytes(),
            );
            String::from_utf8(bytes).unwrap()
        };
        let first = renamed("ses_b");
        assert_eq!(first.len(), text.len());
        assert!(first.contains("\"msg_0123456789ab") && first.contains("ses_b msg_count"));
        assert!(!first.contains(row) && first != renamed("ses_c").replace("ses_c", "ses_b"));
        // Other agents have no such IDs.
        let other = renamer_of("3f2a", "new-id");
        assert_eq!(in_chunks(&other, text.as_bytes(), 7), text.as_bytes());
        for size in 1..text.len() {
            let renamer = renamer_of("ses_a", "ses_b");
            assert_eq!(in_chunks(&renamer, text.as_bytes(), size), first.as_bytes());
        }
    }

    #[test]
    fn paths_and_lines_get_the_new_id() {
        let renamer = renamer_of("3f2a", "new-id");
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
        let renamer = renamer_of("01234567-89ab", "fedcba98-7654");
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
        let renamer = renamer_of("3f2a", "new-id");
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
            let out = in_chunks(&renamer, text, size);
            assert_eq!(out, expected, "chunks of {size} bytes");
        }
    }
}
