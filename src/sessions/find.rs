//! Finds a session by its ID, by a prefix of its ID, or as the latest of a project or request.

use std::time::Duration;

use jiff::Timestamp;

use crate::agent::is_uuid;
use crate::error::{Error, ErrorKind, Result};
use crate::index::{Index, SessionFilter};
use crate::log::{Logs, errors, segments};
use crate::model::{LogId, LogName, metadata};

/// How long the index may take to name the latest session. The agent that is about to start waits
/// for it, and the store knows it too.
const INDEX_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum number of candidates that an error about an ambiguous prefix lists.
const MAX_CANDIDATES: usize = 5;

/// The session that a user selects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SessionSelector {
    /// The session with this ID, or the only one whose ID has this prefix.
    Id(String),
    /// The session to which content was written last.
    Latest(LatestFilter),
}

/// The sessions among which the latest is selected.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LatestFilter {
    /// Only sessions of this project.
    pub project: Option<String>,
    /// Only sessions with this request ID.
    pub request_id: Option<String>,
}

/// Finds the selected session. Returns `None` if no session matches.
///
/// A complete UUID is not looked up: the reader of its log reports whether it exists.
pub async fn select(
    logs: &Logs,
    index: &dyn Index,
    selector: &SessionSelector,
) -> Result<Option<LogId>> {
    match selector {
        SessionSelector::Id(id) if is_uuid(id) => Ok(Some(logs.id(id.parse()?))),
        SessionSelector::Id(id) => match by_id(logs, id).await {
            Ok(found) => Ok(Some(found)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        },
        SessionSelector::Latest(filter) => {
            if let Some(request_id) = &filter.request_id {
                metadata::validate_request_id(request_id)?;
            }
            latest(logs, index, filter).await
        }
    }
}

/// Whether `error` was reported because the session that `select` did not look up has no log.
pub async fn is_missing(logs: &Logs, selector: &SessionSelector, error: &Error) -> Result<bool> {
    match selector {
        SessionSelector::Id(id) if error.kind() == ErrorKind::NotFound && is_uuid(id) => {
            Ok(logs.list_segments(&logs.id(id.parse()?)).await?.is_empty())
        }
        _ => Ok(false),
    }
}

/// The error for a selector that matches no session.
pub fn no_match(logs: &Logs, selector: &SessionSelector) -> Error {
    let statement = match selector {
        SessionSelector::Id(id) => format!("session {id} does not exist"),
        SessionSelector::Latest(LatestFilter {
            request_id: Some(request_id),
            ..
        }) => format!("no session with request ID {request_id:?} exists"),
        SessionSelector::Latest(LatestFilter {
            project: Some(project),
            ..
        }) => format!("no session of project {project} exists"),
        SessionSelector::Latest(_) => "no session exists".to_owned(),
    };
    Error::not_found(format!(
        "{statement} in namespace {} of agent {}",
        logs.namespace, logs.agent
    ))
    .hint("run \"sessiond ls\" to list the sessions; check --store, --namespace and --agent")
}

/// Finds the session whose ID is `text`, or the only one whose ID starts with it. Lists the store,
/// which is authoritative.
pub async fn by_id(logs: &Logs, text: &str) -> Result<LogId> {
    let text = text.trim();
    if text.is_empty() {
        return Err(Error::usage("invalid session ID \"\": it is empty")
            .hint("run \"sessiond ls\" to list the sessions"));
    }
    // A prefix of a valid ID is itself a valid ID.
    let name: LogName = text.parse()?;
    let names = logs.log_names(text).await?;
    if names.contains(&name) {
        return Ok(logs.id(name));
    }
    match names.as_slice() {
        [] => Err(errors::not_found(&logs.id(name))),
        [only] => Ok(logs.id(only.clone())),
        candidates => {
            let shown: Vec<String> = candidates
                .iter()
                .take(MAX_CANDIDATES)
                .map(LogName::to_string)
                .collect();
            let more = if candidates.len() > MAX_CANDIDATES {
                ", …"
            } else {
                ""
            };
            Err(Error::usage(format!(
                "ambiguous session ID {text:?}: it is a prefix of {} sessions: {}{more}",
                candidates.len(),
                shown.join(", ")
            ))
            .hint("use more characters of the ID"))
        }
    }
}

/// Finds the session to which content was written last. The sessions of a request ID are found in
/// the store, so that a container can start while the database is down.
async fn latest(logs: &Logs, index: &dyn Index, filter: &LatestFilter) -> Result<Option<LogId>> {
    if let Some(request_id) = &filter.request_id {
        let referenced = logs.referenced_sessions(request_id).await?;
        return latest_in_store(logs, filter, referenced).await;
    }
    let query = SessionFilter {
        namespace: logs.namespace.clone(),
        agent: Some(logs.agent.clone()),
        id_prefix: None,
        project: filter.project.clone(),
        status: None,
        request: None,
        labels: Vec::new(),
        model: None,
        since: None,
        until: None,
        title: None,
        limit: 1,
        cursor: None,
    };
    match tokio::time::timeout(INDEX_TIMEOUT, index.sessions(&query)).await {
        Ok(Ok(page)) => {
            if let Some(row) = page.sessions.first() {
                return Ok(Some(logs.id(row.id.parse()?)));
            }
        }
        Ok(Err(error)) => {
            tracing::warn!(%error, "index query failed; reading the latest session from the store")
        }
        Err(_) => tracing::warn!(
            timeout = ?INDEX_TIMEOUT,
            "the index does not respond; reading the latest session from the store"
        ),
    }
    let names = logs.log_names("").await?;
    let sessions = names.into_iter().filter(|name| !name.is_project());
    latest_in_store(logs, filter, sessions.map(|name| logs.id(name)).collect()).await
}

/// Finds the latest of `sessions` without an index: reads the newest segments of each.
async fn latest_in_store(
    logs: &Logs,
    filter: &LatestFilter,
    sessions: Vec<LogId>,
) -> Result<Option<LogId>> {
    let mut newest = None;
    for id in sessions {
        if let Some(request_id) = &filter.request_id
            && !has_request_id(logs, &id, request_id).await?
        {
            continue;
        }
        let Some(written_at) = written_at(logs, &id).await? else {
            continue;
        };
        if let Some(project) = &filter.project
            && !is_in_project(logs, &id, project).await?
        {
            continue;
        }
        if newest.as_ref().is_none_or(|(at, _)| written_at > *at) {
            newest = Some((written_at, id));
        }
    }
    Ok(newest.map(|(_, id)| id))
}

/// The time at which content was written to a session; none if the session is removed. Claims at
/// the end of the log do not count, because a restore writes them. Without content, the time of the
/// first entry counts.
async fn written_at(logs: &Logs, id: &LogId) -> Result<Option<Timestamp>> {
    let segments = segments::select_all(&logs.list_newest_segments(id).await?);
    let mut earliest = None;
    for segment in segments.iter().rev() {
        let Some(entry) = logs.read_segment(id, segment, None).await? else {
            continue;
        };
        let header = entry.header;
        if earliest.is_none() && header.kind.is_removal() {
            return Ok(None);
        }
        if let Some(written_at) = header.written_at() {
            return Ok(Some(written_at));
        }
        earliest = Some(header.at);
        if header.resets_log() {
            break;
        }
    }
    Ok(earliest)
}

/// Whether the session's metadata has this request ID.
async fn has_request_id(logs: &Logs, id: &LogId, request_id: &str) -> Result<bool> {
    match logs.metadata(id).await {
        Ok(current) => Ok(current.metadata.request_id.as_deref() == Some(request_id)),
        Err(error) if error.kind() == ErrorKind::Corrupt => {
            tracing::warn!(%error, session = %id.name, "skipping a session with damaged metadata");
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Whether the session has a file in the project's directory.
async fn is_in_project(logs: &Logs, id: &LogId, project: &str) -> Result<bool> {
    let state = logs.read_state(id).await?;
    Ok(state
        .files
        .keys()
        .any(|path| path.components().nth(1) == Some(project)))
}
