//! The list of sessions, and one session.

use std::path::Path;

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::Deserialize;

use super::access::Role;
use super::endpoint::{Answer, Call, Endpoint, NoQuery, Reply, get};
use super::problem::Problem;
use crate::error::Result;
use crate::index::{SessionFilter, SessionPage, SessionRow};
use crate::log::errors;
use crate::model::AgentName;
use crate::operations::index::try_add_missing;

/// Number of rows of a page.
pub const DEFAULT_LIMIT: u32 = 50;

pub fn endpoints() -> Vec<Endpoint> {
    vec![
        get(
            "/sessions",
            "listSessions",
            Role::Metadata,
            "List sessions, most recently changed first.",
        )
        .json(list),
        get(
            "/sessions/{agent}/{session}",
            "getSession",
            Role::Metadata,
            "Get one session.",
        )
        .json(one),
    ]
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ListQuery {
    /// Only sessions of this agent.
    agent: Option<String>,
    /// Only sessions of this project: the agent's name for it, or the absolute path of its
    /// directory.
    project: Option<String>,
    /// Only sessions with this status; without it, all that are not removed.
    status: Option<StatusFilter>,
    /// Only sessions with this request ID.
    request: Option<String>,
    /// Only sessions with this label, as NAME=VALUE. Repeat it: all must match.
    #[serde(default)]
    label: Vec<String>,
    /// Only sessions whose last response has this model.
    model: Option<String>,
    /// Only sessions changed at or after this time.
    since: Option<Timestamp>,
    /// Only sessions changed before this time.
    until: Option<Timestamp>,
    /// Only sessions whose title contains this text. Needs the role reader.
    text: Option<String>,
    /// Maximum number of sessions; 50 if absent.
    #[schemars(range(min = 1, max = 1000))]
    limit: Option<u32>,
    /// The `next` value of the previous page.
    cursor: Option<String>,
}

#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum StatusFilter {
    Created,
    Active,
    Completed,
    Archived,
    Removed,
}

impl StatusFilter {
    fn as_str(self) -> &'static str {
        match self {
            StatusFilter::Created => "created",
            StatusFilter::Active => "active",
            StatusFilter::Completed => "completed",
            StatusFilter::Archived => "archived",
            StatusFilter::Removed => "removed",
        }
    }
}

async fn list(call: Call, query: ListQuery) -> Answer<SessionPage> {
    // A filter by words would show which words occur.
    if query.text.is_some() && !call.reads_content() {
        return Err(Problem::forbidden(
            "the parameter text needs the role reader",
        ));
    }
    let agent: Option<AgentName> = query.agent.as_deref().map(str::parse).transpose()?;
    let project = match (query.project, &agent) {
        (Some(directory), agent) if directory.starts_with('/') => {
            let agent = agent.as_ref().unwrap_or(&call.api.parts.logs.agent);
            let parts = call
                .api
                .parts
                .for_logs_of(call.namespace.clone(), agent.clone())?;
            Some(parts.profile.project_name(Path::new(&directory)))
        }
        (project, _) => project,
    };
    let filter = SessionFilter {
        namespace: call.namespace.clone(),
        agent,
        id_prefix: None,
        project,
        status: query.status.map(|status| status.as_str().to_owned()),
        request: query.request,
        labels: query
            .label
            .iter()
            .map(|text| text.parse())
            .collect::<Result<_>>()?,
        model: query.model,
        since: query.since,
        until: query.until,
        title: query.text,
        limit: query.limit.unwrap_or(DEFAULT_LIMIT),
        cursor: query.cursor,
    };
    let mut page = call.api.parts.index.sessions(&filter).await?;
    let rows = std::mem::take(&mut page.sessions).into_iter();
    let reads_content = call.reads_content();
    page.sessions = rows.map(|row| redacted(row, reads_content)).collect();
    Ok(Reply::ok(page))
}

async fn one(call: Call, NoQuery {}: NoQuery) -> Answer<SessionRow> {
    let (parts, id) = call.session()?;
    let mut found = parts.index.session(&id).await?;
    if found.is_none() {
        // The index follows the store.
        try_add_missing(&parts, &id).await?;
        found = parts.index.session(&id).await?;
    }
    let row = found.ok_or_else(|| errors::not_found(&id))?;
    Ok(Reply::ok(redacted(row, call.reads_content())))
}

/// The row without words, unless the caller may read them: the title can be the first prompt.
pub fn redacted(row: SessionRow, reads_content: bool) -> SessionRow {
    match reads_content {
        true => row,
        false => SessionRow {
            title: None,
            cwd: None,
            ..row
        },
    }
}
