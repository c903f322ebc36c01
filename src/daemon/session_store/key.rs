//! What an SDK calls a session, and where its files are: as Claude Code itself would have them. Pure.

use serde::Deserialize;

use crate::agent::{FileClass, Profile};
use crate::error::{Error, Result};
use crate::model::{FileKind, LogName, RelPath, SessionId};

/// A key as it is sent.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sent {
    /// The caller's name for the project or tenant.
    pub project_key: String,
    /// The session.
    pub session_id: String,
    /// Which of its other transcripts; none: its own.
    #[serde(default)]
    pub subpath: Option<String>,
}

/// A transcript of a session, checked: its path belongs to the session's log and to nothing else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    project: SessionId,
    session: SessionId,
    subpath: Option<String>,
    file: RelPath,
}

impl Key {
    /// Checks what was sent.
    pub fn read(profile: &dyn Profile, sent: &Sent) -> Result<Key> {
        let project = project(&sent.project_key)?;
        let session: SessionId = sent.session_id.parse()?;
        let file = match &sent.subpath {
            None => format!("projects/{project}/{session}.jsonl"),
            Some(subpath) => format!("projects/{project}/{session}/{subpath}.jsonl"),
        };
        let file: RelPath = file
            .parse()
            .map_err(|cause: Error| Error::usage("read the key").caused_by(cause))?;
        let own = LogName::Session(session.clone());
        let unnamed = sent
            .subpath
            .as_ref()
            .is_some_and(|subpath| subpath.split('/').any(str::is_empty));
        if unnamed
            || profile.place(&file) != FileClass::Keep(own, FileKind::Append)
            || sent.subpath.is_none() != profile.is_transcript(&file)
        {
            return Err(Error::usage(format!("read the key: {file} is no place of a transcript of session {session}")).hint(
                "a session id is a UUID; a subpath is one such as subagents/agent-1, and left out for the session's own transcript",
            ));
        }
        Ok(Key {
            project,
            session,
            subpath: sent.subpath.clone(),
            file,
        })
    }

    /// The log that it belongs to.
    pub fn name(&self) -> LogName {
        LogName::Session(self.session.clone())
    }

    /// The session.
    pub fn session(&self) -> &SessionId {
        &self.session
    }

    /// Which of the session's other transcripts it is; none: its own.
    pub fn subpath(&self) -> Option<&str> {
        self.subpath.as_deref()
    }

    /// Where it is.
    pub fn file(&self) -> &RelPath {
        &self.file
    }

    /// The session's own transcript.
    pub fn transcript(&self) -> Result<RelPath> {
        transcript(&self.project, self.session.as_str())
    }

    /// What lies beside it: the directory of everything else in the session.
    pub fn directory(&self) -> Result<RelPath> {
        directory(&self.project, self.session.as_str())
    }

    /// What we keep of the session ourselves.
    pub fn record(&self) -> Result<RelPath> {
        record(&self.project, self.session.as_str())
    }
}

/// The directory name of a project: its own where that is plain.
pub fn project(key: &str) -> Result<SessionId> {
    if key.is_empty() {
        return Err(Error::usage("read the key: the project is empty"));
    }
    Ok(SessionId::escape(key))
}

/// The directory of a project's sessions.
pub fn sessions(project: &SessionId) -> Result<RelPath> {
    format!("projects/{project}").parse()
}

/// Where the transcript of a session is.
pub fn transcript(project: &SessionId, session: &str) -> Result<RelPath> {
    format!("projects/{project}/{session}.jsonl").parse()
}

/// Where everything else of a session is.
pub fn directory(project: &SessionId, session: &str) -> Result<RelPath> {
    format!("projects/{project}/{session}").parse()
}

/// What we keep of a session ourselves.
pub fn record(project: &SessionId, session: &str) -> Result<RelPath> {
    format!("projects/{project}/{session}/session-store.json").parse()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::claude_code::ClaudeCode;

    fn read(project: &str, session: &str, subpath: Option<&str>) -> Result<Key> {
        let profile = ClaudeCode::new("claude-code".parse().unwrap());
        let sent = Sent {
            project_key: project.to_owned(),
            session_id: session.to_owned(),
            subpath: subpath.map(str::to_owned),
        };
        Key::read(&profile, &sent)
    }

    #[test]
    fn a_key_is_the_path_that_claude_code_has() {
        let path = |project, session, subpath| {
            read(project, session, subpath)
                .map(|key| key.file().to_string())
                .unwrap()
        };
        assert_eq!(
            path("-work-app", "3f2a", None),
            "projects/-work-app/3f2a.jsonl"
        );
        assert_eq!(
            path("-work-app", "3f2a", Some("subagents/agent-1")),
            "projects/-work-app/3f2a/subagents/agent-1.jsonl"
        );
        assert_eq!(
            path("tenant/7", "3f2a", None),
            "projects/tenant=2F7/3f2a.jsonl"
        );
        assert_ne!(path("a=2Fb", "s", None), path("a/b", "s", None));
    }

    #[test]
    fn a_key_that_would_be_elsewhere_is_refused() {
        for (project, session, subpath) in [
            ("", "s", None),
            ("p", "", None),
            ("p", "../s", None),
            ("p", "a=20b", None),
            ("p", "agent-1", None),
            ("p", "memory", Some("x")),
            ("p", "s", Some("")),
            ("p", "s", Some("../../t/x")),
            ("p", "s", Some("/etc/x")),
            ("p", "s", Some("a\nb")),
            ("p", "s", Some("x.tmp/y")),
            ("p", "s", Some("resume-head")),
        ] {
            let refused = read(project, session, subpath).map(|key| key.file().to_string());
            assert_eq!(
                refused.map_err(|error| error.kind()),
                Err(crate::error::ErrorKind::Usage),
                "{project:?} {session:?} {subpath:?}"
            );
        }
    }
}
