//! The session with which `run` starts the agent.
//!
//! Owns which session a start continues or begins, and how the command receives it. Does not own
//! the restore, or the agent's arguments (`agent`).

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::Arc;

use crate::agent::{NewSessionArgs, Profile};
use crate::capture::scan;
use crate::error::{Error, Result};
use crate::model::{Digest, LogName, SessionId};
use crate::sessions::find::{self, LatestFilter, SessionSelector};
use crate::wire::Parts;

use super::restore::{IfMissing, RestoreRequest, RestoreService, RestoreSummary, SessionSet};

/// The placeholder in a command that stands for the agent's arguments for the session.
pub const PLACEHOLDER: &str = "{session-args}";

/// The session of a start.
#[derive(Clone)]
pub struct Launch {
    /// The session; none if the agent starts a new one and chooses its ID.
    session: Option<SessionId>,
    /// Whether the session exists, so that the agent resumes it.
    is_resumed: bool,
    profile: Arc<dyn Profile>,
}

impl Launch {
    /// A start without a session that sessiond knows.
    pub fn unknown(profile: &Arc<dyn Profile>) -> Launch {
        Launch {
            session: None,
            is_resumed: false,
            profile: profile.clone(),
        }
    }

    /// The session, if it is known.
    pub fn session(&self) -> Option<SessionId> {
        self.session.clone()
    }

    /// Replaces the placeholder in a command by the agent's arguments for the session.
    pub fn expand(&self, command: &[OsString]) -> Result<Vec<OsString>> {
        if !command.iter().any(|arg| position(arg).is_some()) {
            return Ok(command.to_vec());
        }
        Ok(replace_placeholder(command, &self.args()?))
    }

    fn args(&self) -> Result<Vec<String>> {
        let Some(session) = &self.session else {
            return Ok(Vec::new());
        };
        if self.is_resumed {
            return Ok(self.profile.resume_args(session));
        }
        match self.profile.new_session_args(session) {
            NewSessionArgs::Args(args) => Ok(args),
            NewSessionArgs::ChosenByAgent => Ok(Vec::new()),
            NewSessionArgs::InvalidId(reason) => Err(Error::usage(format!(
                "invalid --session value {:?}: no stored session has this ID, and {reason} for a new one",
                session.as_str()
            ))
            .hint("pass an ID of your own to --request instead")),
        }
    }

    /// The variables that tell the command about the session. The ID is empty if it is unknown.
    pub fn variables(&self) -> [(&'static str, String); 2] {
        let session = self.session.as_ref().map_or("", SessionId::as_str);
        let is_resumed = if self.is_resumed { "1" } else { "0" };
        [
            ("SESSIOND_SESSION_ID", session.to_owned()),
            ("SESSIOND_RESTORED", is_resumed.to_owned()),
        ]
    }
}

/// Restores the session of a start, and decides with which session the agent starts.
pub struct Starter<'a> {
    /// The parts.
    pub parts: &'a Parts,
    /// Restores into the agent's directory.
    pub restorer: &'a RestoreService,
    /// The session that the arguments select; none if they select none.
    pub selector: Option<SessionSelector>,
    /// What happens if the session does not exist.
    pub if_missing: IfMissing,
    /// The options of the restore.
    pub request: RestoreRequest,
}

impl Starter<'_> {
    /// Restores the selected session. Returns the session of the start and the restored logs.
    pub async fn restore(&self) -> Result<(Launch, Vec<LogName>)> {
        let Some(selector) = &self.selector else {
            return Ok((self.launch(None, false), Vec::new()));
        };
        let selected = SessionSet::Selected(selector.clone());
        let mut summary = self.restore_set(selected).await?;
        if summary.is_empty()
            && let Some(first) = self.first_session_of_request()
        {
            let id = self.parts.logs.id(LogName::Session(first));
            summary = self.restore_set(SessionSet::Exact(id)).await?;
        }
        if summary.is_empty() {
            if self.if_missing == IfMissing::Fail {
                return Err(find::no_match(&self.parts.logs, selector));
            }
            tracing::info!("the session does not exist yet; starting a new one");
            return Ok((self.without_restore().await, Vec::new()));
        }
        summary.log();
        let restored = summary.log_names()?;
        let session = restored.iter().find_map(LogName::session).cloned();
        Ok((self.launch(session, true), restored))
    }

    async fn restore_set(&self, sessions: SessionSet) -> Result<RestoreSummary> {
        let request = RestoreRequest {
            sessions,
            if_missing: IfMissing::Skip,
            ..self.request.clone()
        };
        self.restorer.restore(&request).await
    }

    /// The session of a start that restores nothing.
    pub async fn without_restore(&self) -> Launch {
        match &self.selector {
            Some(SessionSelector::Id(id)) => match id.trim().parse() {
                Ok(session) => self.start_with(session).await,
                Err(_) => self.launch(None, false),
            },
            Some(SessionSelector::Latest(_)) => match self.first_session_of_request() {
                Some(first) => self.start_with_unless_removed(first).await,
                None => self.launch(None, false),
            },
            None => self.launch(None, false),
        }
    }

    /// A start with this session: resumes it if it is in the agent's directory. It can be there
    /// although nothing is stored, if the store was unavailable until the last container stopped.
    async fn start_with(&self, session: SessionId) -> Launch {
        let profile = &self.parts.profile;
        if self.is_local(&session).await {
            return self.launch(Some(session), true);
        }
        if profile.new_session_args(&session) == NewSessionArgs::ChosenByAgent {
            tracing::warn!(
                agent = %profile.name(),
                "the agent chooses the ID of a new session itself; use --request to find the session again"
            );
            return self.launch(None, false);
        }
        self.launch(Some(session), false)
    }

    async fn start_with_unless_removed(&self, first: SessionId) -> Launch {
        let logs = &self.parts.logs;
        let id = logs.id(LogName::Session(first.clone()));
        let is_removed = match logs.list_segments(&id).await {
            Ok(segments) => !segments.is_empty(),
            // The restore failed for the same reason, and the caller continues nevertheless.
            Err(_) => false,
        };
        if !is_removed {
            return self.start_with(first).await;
        }
        let random = u128::from(logs.rng.next()) << 64 | u128::from(logs.rng.next());
        self.launch(new_session(&*self.parts.profile, random), false)
    }

    /// The ID of the first session of the selected request, derived from the request ID. A restart
    /// therefore finds the session even if the first container stopped before it could set the
    /// request ID. None if the agent chooses the ID itself.
    fn first_session_of_request(&self) -> Option<SessionId> {
        let Some(SessionSelector::Latest(LatestFilter {
            project: None,
            request_id: Some(request_id),
        })) = &self.selector
        else {
            return None;
        };
        let logs = &self.parts.logs;
        let seed = format!("{}\n{}\n{request_id}", logs.namespace, logs.agent);
        let digest = Digest::of(seed.as_bytes()).to_string();
        let number = u128::from_str_radix(digest.get(..32)?, 16).ok()?;
        new_session(&*self.parts.profile, number)
    }

    /// Whether the session is in the agent's directory or database.
    async fn is_local(&self, session: &SessionId) -> bool {
        if let Some(mirror) = &self.parts.mirror {
            return mirror.has_session(session.as_str()).await;
        }
        let (parts, name) = (self.parts.clone(), LogName::Session(session.clone()));
        let search = tokio::task::spawn_blocking(move || {
            let scanned = scan::scan(&*parts.directory()?, &*parts.profile, None)?;
            let files = scanned.logs.get(&name).map_or(&[][..], Vec::as_slice);
            let has_transcript = files
                .iter()
                .any(|file| parts.profile.is_transcript(&file.path));
            Ok::<_, Error>(has_transcript)
        });
        // An unreadable directory has no session that the agent could resume.
        matches!(search.await, Ok(Ok(true)))
    }

    fn launch(&self, session: Option<SessionId>, is_resumed: bool) -> Launch {
        Launch {
            session,
            is_resumed,
            profile: self.parts.profile.clone(),
        }
    }
}

/// The ID of a new session; none if the agent chooses the ID itself.
fn new_session(profile: &dyn Profile, random: u128) -> Option<SessionId> {
    let id: SessionId = profile.new_session_id(random).parse().ok()?;
    matches!(profile.new_session_args(&id), NewSessionArgs::Args(_)).then_some(id)
}

/// The command of a start about whose session nothing is known.
pub fn without_placeholder(command: &[OsString]) -> Vec<OsString> {
    replace_placeholder(command, &[])
}

fn replace_placeholder(command: &[OsString], args: &[String]) -> Vec<OsString> {
    let mut expanded = Vec::with_capacity(command.len() + args.len());
    for arg in command {
        if arg.as_os_str() == PLACEHOLDER {
            expanded.extend(args.iter().map(OsString::from));
        } else {
            expanded.push(expand_within(arg, &args.join(" ")));
        }
    }
    expanded
}

/// Where the placeholder starts in an argument.
fn position(arg: &OsStr) -> Option<usize> {
    let bytes = arg.as_bytes();
    bytes
        .windows(PLACEHOLDER.len())
        .position(|window| window == PLACEHOLDER.as_bytes())
}

/// Replaces the placeholder within an argument, such as the script of `sh -c`. Session IDs contain
/// no character that a shell would interpret.
fn expand_within(arg: &OsStr, args: &str) -> OsString {
    let mut expanded = Vec::new();
    let mut rest = arg;
    while let Some(at) = position(rest) {
        let bytes = rest.as_bytes();
        expanded.extend_from_slice(&bytes[..at]);
        expanded.extend_from_slice(args.as_bytes());
        rest = OsStr::from_bytes(&bytes[at + PLACEHOLDER.len()..]);
    }
    expanded.extend_from_slice(rest.as_bytes());
    OsString::from_vec(expanded)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::claude_code::ClaudeCode;
    use crate::agent::codex::Codex;

    const ID: &str = "0b5e551d-0000-4000-8000-00000000d340";

    fn launch(agent: &str, id: &str, is_resumed: bool) -> Launch {
        let name = agent.parse().unwrap();
        let profile: Arc<dyn Profile> = match agent {
            "codex" => Arc::new(Codex::new(name)),
            _ => Arc::new(ClaudeCode::new(name)),
        };
        Launch {
            session: (!id.is_empty()).then(|| id.parse().unwrap()),
            is_resumed,
            profile,
        }
    }

    fn expand(launch: &Launch, command: &[&str]) -> Result<String> {
        let command: Vec<OsString> = command.iter().map(OsString::from).collect();
        let words = launch.expand(&command)?;
        let words = words.iter().map(|word| word.to_str().unwrap().to_owned());
        Ok(words.collect::<Vec<_>>().join("|"))
    }

    #[test]
    fn the_placeholder_becomes_what_the_agent_needs() {
        for (agent, id, is_resumed, args) in [
            ("claude-code", ID, false, format!("--session-id|{ID}|")),
            ("claude-code", ID, true, format!("--resume|{ID}|")),
            ("claude-code", "", false, String::new()),
            ("codex", ID, false, String::new()),
            ("codex", ID, true, format!("resume|{ID}|")),
        ] {
            let launch = launch(agent, id, is_resumed);
            assert_eq!(
                expand(&launch, &["agent", "{session-args}", "-p", "go"]).unwrap(),
                format!("agent|{args}-p|go"),
                "{agent}"
            );
        }
    }

    #[test]
    fn the_placeholder_can_be_part_of_a_script() {
        let script = ["sh", "-c", "claude {session-args}; echo {session-args}"];
        assert_eq!(
            expand(&launch("claude-code", ID, true), &script).unwrap(),
            format!("sh|-c|claude --resume {ID}; echo --resume {ID}"),
        );
    }

    #[test]
    fn an_id_that_the_agent_rejects_is_an_error_only_if_the_command_needs_it() {
        let launch = launch("claude-code", "job-7", false);
        assert!(expand(&launch, &["claude", "{session-args}"]).is_err());
        assert!(expand(&launch, &["claude"]).is_ok());
    }
}
