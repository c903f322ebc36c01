//! The profile of any other agent: patterns map files to sessions.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use regex_lite::Regex;

use super::{FileClass, NewSessionArgs, Profile, is_never_stored};
use crate::error::{Error, Result};
use crate::model::{AgentName, FileKind, LogName, Patterns, RelPath, SessionId, TranscriptLine};

/// A profile made of patterns.
pub struct Generic {
    name: AgentName,
    sessions: Vec<Regex>,
    append: Vec<Regex>,
    never: Vec<Regex>,
    new_session_args: Vec<String>,
    resume_args: Vec<String>,
}

impl Generic {
    /// The name of the profile.
    pub const NAME: &str = "generic";

    /// The profile, under `name`.
    pub fn new(name: AgentName, patterns: &Patterns) -> Result<Self> {
        let compile = |list: &[String]| {
            list.iter()
                .map(|text| pattern(text))
                .collect::<Result<Vec<_>>>()
        };
        if let Some(bad) = patterns
            .sessions
            .iter()
            .find(|text| text.matches("{session}").count() != 1)
        {
            return Err(Error::usage(format!(
                "invalid pattern {bad:?}: {{session}} must occur exactly once"
            ))
            .hint("write a pattern such as \"chats/{session}.jsonl\""));
        }
        Ok(Generic {
            name,
            sessions: compile(&patterns.sessions)?,
            append: compile(&patterns.append)?,
            never: compile(&patterns.never)?,
            new_session_args: patterns.new_session_args.clone(),
            resume_args: patterns.resume_args.clone(),
        })
    }
}

/// Replaces `{session}` in arguments.
fn with_session(args: &[String], id: &SessionId) -> Vec<String> {
    let args = args.iter();
    args.map(|arg| arg.replace("{session}", id.as_str()))
        .collect()
}

fn pattern(text: &str) -> Result<Regex> {
    let mut out = String::from("^");
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let (token, regex) = if rest.starts_with("{session}") {
            ("{session}", r"(?<session>[^/]+)".to_owned())
        } else if rest.starts_with("**/") {
            ("**/", "(?:.*/)?".to_owned())
        } else if rest.starts_with("**") {
            ("**", ".*".to_owned())
        } else {
            let regex = match first {
                '*' => "[^/]*".to_owned(),
                '?' => "[^/]".to_owned(),
                other => regex_lite::escape(&other.to_string()),
            };
            (&rest[..first.len_utf8()], regex)
        };
        out.push_str(&regex);
        rest = &rest[token.len()..];
    }
    out.push('$');
    Regex::new(&out).map_err(|cause| Error::usage(format!("invalid pattern {text:?}: {cause}")))
}

impl Profile for Generic {
    fn name(&self) -> &AgentName {
        &self.name
    }

    fn root(
        &self,
        _home: Option<&Path>,
        _env: &dyn Fn(&str) -> Option<PathBuf>,
    ) -> Option<PathBuf> {
        None
    }

    fn is_scanned(&self, directory: &RelPath) -> bool {
        !is_never_stored(directory.name())
    }

    fn classify(&self, path: &RelPath) -> FileClass {
        let text = path.as_str();
        if path.components().any(is_never_stored)
            || self.never.iter().any(|never| never.is_match(text))
        {
            return FileClass::Ignored;
        }
        let kind = if self.append.iter().any(|append| append.is_match(text)) {
            FileKind::Append
        } else {
            FileKind::Whole
        };
        let found = self
            .sessions
            .iter()
            .find_map(|pattern| pattern.captures(text)?.name("session"));
        found.map_or(FileClass::Ignored, |id| {
            FileClass::Stored(LogName::Session(SessionId::escape(id.as_str())), kind)
        })
    }

    fn log_directories(&self, _name: &LogName, known: &BTreeSet<&RelPath>) -> Vec<RelPath> {
        let directories: BTreeSet<RelPath> =
            known.iter().filter_map(|path| path.parent()).collect();
        directories.into_iter().collect()
    }

    fn is_transcript(&self, _path: &RelPath) -> bool {
        false
    }

    fn knows_transcripts(&self) -> bool {
        false
    }

    fn has_messages(&self, _path: &RelPath) -> bool {
        false
    }

    fn parse_line(&self, _path: &RelPath, _line: &[u8]) -> Option<TranscriptLine> {
        None
    }

    fn new_session_args(&self, id: &SessionId) -> NewSessionArgs {
        match self.new_session_args.as_slice() {
            [] => NewSessionArgs::ChosenByAgent,
            args => NewSessionArgs::Args(with_session(args, id)),
        }
    }

    fn resume_args(&self, id: &SessionId) -> Vec<String> {
        with_session(&self.resume_args, id)
    }

    fn project_name(&self, cwd: &Path) -> String {
        cwd.to_string_lossy().into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn classify(patterns: &Patterns, path: &str) -> Option<(String, FileKind)> {
        match Generic::new("generic".parse().unwrap(), patterns)
            .unwrap()
            .classify(&path.parse().unwrap())
        {
            FileClass::Stored(name, kind) => Some((name.to_string(), kind)),
            _ => None,
        }
    }

    #[test]
    fn by_default_each_top_level_directory_or_file_is_a_session() {
        let patterns = Patterns::default();
        assert_eq!(
            classify(&patterns, "a/b/c.jsonl"),
            Some(("a".into(), FileKind::Append))
        );
        assert_eq!(
            classify(&patterns, "chat.jsonl"),
            Some(("chat".into(), FileKind::Append))
        );
        assert_eq!(
            classify(&patterns, "my notes.txt"),
            Some(("my=20notes.txt".into(), FileKind::Whole))
        );
        assert_eq!(classify(&patterns, "a/x.lock"), None);
        assert_eq!(classify(&patterns, ".sessiond/ledger/a.json"), None);
    }

    #[test]
    fn patterns_select_files_and_their_session() {
        let patterns = Patterns {
            sessions: vec!["chats/{session}-*.json".into()],
            append: vec![],
            never: vec!["**/secret*".into()],
            new_session_args: vec!["--id={session}".to_owned()],
            ..Patterns::default()
        };
        assert_eq!(
            classify(&patterns, "chats/ab-1.json"),
            Some(("ab".into(), FileKind::Whole))
        );
        assert_eq!(classify(&patterns, "chats/x/ab-1.json"), None);
        assert_eq!(classify(&patterns, "chats/secret-1.json"), None);
        let bad = Patterns {
            sessions: vec!["*.json".into()],
            ..patterns
        };
        assert!(Generic::new("generic".parse().unwrap(), &bad).is_err());
    }
}
