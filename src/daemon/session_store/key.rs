//! The keys of the SDK's `SessionStore`, and the file of each: the path that Claude Code itself
//! would use. Pure.

use serde::Deserialize;

use crate::agent::{FileClass, Profile};
use crate::error::{Error, Result};
use crate::model::{FileKind, LogName, ProjectId, RelPath, SessionId};

/// A key as the client sends it.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RequestKey {
    /// The client's name of the project or tenant.
    pub project_key: String,
    /// The session.
    pub session_id: String,
    /// The name of a sub-agent's transcript; `None` for the main transcript.
    #[serde(default)]
    pub subpath: Option<String>,
}

/// A valid key of one transcript. Its path belongs to the log of the session and to no other log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TranscriptKey {
    project: ProjectId,
    session: SessionId,
    subpath: Option<String>,
    path: RelPath,
}

impl TranscriptKey {
    /// Checks a key.
    pub fn parse(profile: &dyn Profile, key: &RequestKey) -> Result<TranscriptKey> {
        let project = project_id(&key.project_key)?;
        let session: SessionId = key.session_id.parse()?;
        let path = match &key.subpath {
            None => format!("projects/{project}/{session}.jsonl"),
            Some(subpath) => format!("projects/{project}/{session}/{subpath}.jsonl"),
        };
        let path: RelPath = path
            .parse()
            .map_err(|cause: Error| Error::usage(format!("invalid key: {cause}")))?;
        let log = LogName::Session(session.clone());
        let has_empty_component = key
            .subpath
            .as_ref()
            .is_some_and(|subpath| subpath.split('/').any(str::is_empty));
        if has_empty_component
            || profile.classify(&path) != FileClass::Stored(log, FileKind::Append)
            || key.subpath.is_none() != profile.is_transcript(&path)
        {
            return Err(Error::usage(format!(
                "invalid key: {path} is not the path of a transcript of session {session}"
            ))
            .hint(
                "use a UUID as session_id and a subpath such as subagents/agent-1; \
                 omit the subpath for the main transcript",
            ));
        }
        Ok(TranscriptKey {
            project,
            session,
            subpath: key.subpath.clone(),
            path,
        })
    }

    /// The name of the session's log.
    pub fn log_name(&self) -> LogName {
        LogName::Session(self.session.clone())
    }

    /// The session.
    pub fn session(&self) -> &SessionId {
        &self.session
    }

    /// The name of a sub-agent's transcript; `None` for the main transcript.
    pub fn subpath(&self) -> Option<&str> {
        self.subpath.as_deref()
    }

    /// The path of the transcript.
    pub fn path(&self) -> &RelPath {
        &self.path
    }

    /// The path of the session's main transcript.
    pub fn main_transcript(&self) -> Result<RelPath> {
        transcript_path(&self.project, self.session.as_str())
    }

    /// The directory of the session's other files.
    pub fn directory(&self) -> Result<RelPath> {
        session_directory(&self.project, self.session.as_str())
    }

    /// The path of the session's append record.
    pub fn record_path(&self) -> Result<RelPath> {
        record_path(&self.project, self.session.as_str())
    }
}

/// The directory name of a project. Characters that a directory name cannot have are escaped.
pub fn project_id(key: &str) -> Result<ProjectId> {
    if key.is_empty() {
        return Err(Error::usage("invalid project_key \"\": it is empty"));
    }
    Ok(ProjectId::escape(key))
}

/// The directory of a project's sessions.
pub fn project_directory(project: &ProjectId) -> Result<RelPath> {
    format!("projects/{project}").parse()
}

/// The path of a session's main transcript.
pub fn transcript_path(project: &ProjectId, session: &str) -> Result<RelPath> {
    format!("projects/{project}/{session}.jsonl").parse()
}

/// The directory of a session's other files.
fn session_directory(project: &ProjectId, session: &str) -> Result<RelPath> {
    format!("projects/{project}/{session}").parse()
}

/// The path of a session's append record.
pub fn record_path(project: &ProjectId, session: &str) -> Result<RelPath> {
    format!("projects/{project}/{session}/session-store.json").parse()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::claude_code::ClaudeCode;

    fn parse(project: &str, session: &str, subpath: Option<&str>) -> Result<TranscriptKey> {
        let profile = ClaudeCode::new("claude-code".parse().unwrap());
        let key = RequestKey {
            project_key: project.to_owned(),
            session_id: session.to_owned(),
            subpath: subpath.map(str::to_owned),
        };
        TranscriptKey::parse(&profile, &key)
    }

    #[test]
    fn a_key_has_the_path_that_claude_code_uses() {
        let path = |project, session, subpath| {
            parse(project, session, subpath)
                .map(|key| key.path().to_string())
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
    fn a_key_with_a_path_outside_the_session_is_rejected() {
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
            let result = parse(project, session, subpath).map(|key| key.path().to_string());
            assert_eq!(
                result.map_err(|error| error.kind()),
                Err(crate::error::ErrorKind::Usage),
                "{project:?} {session:?} {subpath:?}"
            );
        }
    }
}
