//! Finds the session that is meant: by id, by the beginning of an id, or the latest (of a project, of a request).

use crate::error::{Error, ErrorKind, Result};
use crate::index::{Filter, Index};
use crate::log::Logs;
use crate::model::{LogId, LogName};

/// The answer where there is no such session.
pub fn unknown(id: &LogId) -> Error {
    Error::not_found(format!(
        "there is no {id} in namespace {} of agent {}",
        id.namespace, id.agent
    ))
    .hint("sessiond ls shows the sessions; --store, --namespace and --agent say where to look")
}

/// The session whose id is `text` or, if only one does, begins with it. The bucket is asked: it is the truth.
pub async fn by_id(logs: &Logs, text: &str) -> Result<LogId> {
    let text = text.trim();
    if text.is_empty() {
        return Err(
            Error::usage("find a session: its id is empty").hint("sessiond ls shows the sessions")
        );
    }
    // A prefix must itself be a legal id, or nothing can begin with it.
    let name: LogName = text.parse()?;
    let names = logs.names(text).await?;
    if names.contains(&name) {
        return Ok(logs.id(name));
    }
    match names.as_slice() {
        [] => Err(unknown(&logs.id(name))),
        [only] => Ok(logs.id(only.clone())),
        many => {
            let shown: Vec<String> = many.iter().take(5).map(LogName::to_string).collect();
            let more = if many.len() > 5 { ", …" } else { "" };
            Err(Error::usage(format!(
                "{text:?} is the beginning of {} sessions: {}{more}",
                many.len(),
                shown.join(", ")
            ))
            .hint("give more of the id"))
        }
    }
}

/// Of which sessions the latest is meant.
#[derive(Debug, Clone, Copy, Default)]
pub struct LatestFilter<'a> {
    /// Only those of this project.
    pub project: Option<&'a str>,
    /// Only those of this request.
    pub request: Option<&'a str>,
}

/// The session that was written last.
pub async fn latest(
    logs: &Logs,
    index: &dyn Index,
    among: LatestFilter<'_>,
) -> Result<Option<LogId>> {
    let filter = Filter {
        namespace: logs.namespace.clone(),
        agent: Some(logs.agent.clone()),
        id_prefix: None,
        project: among.project.map(str::to_owned),
        status: None,
        request: among.request.map(str::to_owned),
        labels: Vec::new(),
        limit: 1,
        cursor: None,
    };
    match index.sessions(&filter).await {
        Ok(page) => {
            if let Some(row) = page.sessions.first() {
                return Ok(Some(logs.id(row.id.parse()?)));
            }
        }
        Err(error) => tracing::warn!(%error, "the index does not answer; asking the bucket"),
    }
    latest_in_bucket(logs, among).await
}

/// The same without an index: reads the newest object of every session.
async fn latest_in_bucket(logs: &Logs, among: LatestFilter<'_>) -> Result<Option<LogId>> {
    let mut newest = None;
    for name in logs
        .names("")
        .await?
        .into_iter()
        .filter(|name| !name.is_project())
    {
        let id = logs.id(name);
        if let Some(request) = among.request
            && !of_request(logs, &id, request).await?
        {
            continue;
        }
        let pieces = logs.newest_pieces(&id).await?;
        let Some(last) = pieces.iter().max_by_key(|piece| (piece.to, piece.kind)) else {
            continue;
        };
        let Some(entry) = logs.read_piece(&id, last, None).await? else {
            continue;
        };
        if entry.header.kind.is_removal() {
            continue;
        }
        if let Some(project) = among.project
            && !belongs(logs, &id, project).await?
        {
            continue;
        }
        if newest.as_ref().is_none_or(|(at, _)| entry.header.at > *at) {
            newest = Some((entry.header.at, id));
        }
    }
    Ok(newest.map(|(_, id)| id))
}

/// Whether somebody said that the session belongs to the request.
async fn of_request(logs: &Logs, id: &LogId, request: &str) -> Result<bool> {
    match logs.said(id).await {
        Ok(said) => Ok(said.wishes.request_id.as_deref() == Some(request)),
        Err(error) if error.kind() == ErrorKind::Corrupt => {
            tracing::warn!(%error, "passed over");
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Whether the session's files lie in the project's directory.
async fn belongs(logs: &Logs, id: &LogId, project: &str) -> Result<bool> {
    let state = logs.read_state(id).await?;
    Ok(state
        .files
        .keys()
        .any(|path| path.parts().nth(1) == Some(project)))
}
