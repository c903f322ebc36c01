//! Search, statistics and verification.

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::Deserialize;

use super::access::Role;
use super::endpoint::{Answer, Call, Endpoint, Reply, get};
use crate::error::{Error, ErrorKind};
use crate::index::{GroupBy, SearchFilter, SearchQuery, SearchResults, StatsFilter};
use crate::log::errors;
use crate::model::Label;
use crate::operations::stats::{Stats, stats};
use crate::operations::verify::verify;
use crate::verify::VerifyReport;

/// Number of hits if the client names none.
const DEFAULT_HITS: u32 = 20;

pub fn endpoints() -> Vec<Endpoint> {
    vec![
        get(
            "/search",
            "search",
            Role::Reader,
            "Search the texts of messages, best match first.",
        )
        .json(search),
        get(
            "/stats",
            "getStats",
            Role::Metadata,
            "Count sessions, messages, turns, tokens, cost and bytes. By day, the rows are a time series.",
        )
        .without_content()
        .json(get_stats),
        get(
            "/sessions/{agent}/{session}/verify",
            "verifySession",
            Role::Metadata,
            "Check that a session can be restored.",
        )
        .without_content()
        .json(verify_session),
    ]
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SearchParameters {
    /// The words to find. "Quotes" search for a phrase, -word excludes a word, and OR separates
    /// alternatives.
    q: String,
    /// Only sessions of this agent.
    agent: Option<String>,
    /// Only sessions of this project.
    project: Option<String>,
    /// Only messages at or after this time.
    since: Option<Timestamp>,
    /// Only messages before this time.
    until: Option<Timestamp>,
    /// Only sessions with this label, as NAME=VALUE.
    label: Option<String>,
    /// Maximum number of hits; 20 if absent.
    #[schemars(range(min = 1, max = 1000))]
    limit: Option<u32>,
}

async fn search(call: Call, query: SearchParameters) -> Answer<SearchResults> {
    let label: Option<Label> = query.label.as_deref().map(str::parse).transpose()?;
    let filter = SearchFilter {
        namespace: call.namespace.clone(),
        agent: query.agent.as_deref().map(str::parse).transpose()?,
        query: SearchQuery::parse(&query.q)?,
        project: query.project,
        since: query.since,
        until: query.until,
        label: label.map(|label| (label.name, label.value)),
        limit: query.limit.unwrap_or(DEFAULT_HITS),
    };
    Ok(Reply::ok(call.api.parts.index.search(&filter).await?))
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct StatsQuery {
    /// Group by day, project, model or label; one total without it.
    by: Option<Grouping>,
    /// Only sessions of this agent.
    agent: Option<String>,
    /// Only messages at or after this time.
    since: Option<Timestamp>,
    /// Only messages before this time.
    until: Option<Timestamp>,
}

#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Grouping {
    Day,
    Project,
    Model,
    Label,
}

async fn get_stats(call: Call, query: StatsQuery) -> Answer<Stats> {
    let group_by = query.by.map(|by| match by {
        Grouping::Day => GroupBy::Day,
        Grouping::Project => GroupBy::Project,
        Grouping::Model => GroupBy::Model,
        Grouping::Label => GroupBy::Label,
    });
    let filter = StatsFilter {
        namespace: call.namespace.clone(),
        agent: query.agent.as_deref().map(str::parse).transpose()?,
        group_by: None,
        since: query.since,
        until: query.until,
    };
    let stats = stats(&*call.api.parts.index, filter, group_by).await?;
    Ok(Reply::ok(stats))
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct VerifyQuery {
    /// Read every object, not only those that a restore needs.
    #[serde(default)]
    deep: bool,
}

async fn verify_session(call: Call, query: VerifyQuery) -> Answer<VerifyReport> {
    let (parts, id) = call.session()?;
    let _permit = call.api.log_read().await?;
    let exact = id.name.to_string();
    let reports = verify(&parts, Some(&exact), query.deep, |_| Ok(())).await?;
    match reports.into_iter().next() {
        Some(report) if report.session == exact => Ok(Reply::ok(report)),
        // The ID is a prefix of another.
        Some(_) => Err(errors::not_found(&id).into()),
        None => Err(Error::new(ErrorKind::Internal, "there is no report").into()),
    }
}
