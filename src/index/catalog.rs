//! Queries on the content of transcripts: messages, full-text search and statistics.
//!
//! Owns the contract and the row types. Streaming and restoring never need it.

use async_trait::async_trait;
use jiff::Timestamp;
use serde::{Serialize, Serializer};

use super::Index;
use super::search_query::{SearchQuery, Snippet};
use crate::error::Result;
use crate::model::{AgentName, LogId, Namespace, Role, Tokens};

/// Totals of the transcripts of one session.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct SessionTotals {
    /// Number of messages.
    pub messages: u64,
    /// Number of completed turns.
    pub turns: u64,
    /// Token usage of all responses.
    pub tokens: Tokens,
    /// Cost in millionths of a US dollar, in JSON in dollars; none if the cost of a response is
    /// unknown.
    #[serde(rename = "cost_usd", serialize_with = "serialize_dollars")]
    #[schemars(with = "Option<f64>")]
    pub cost: Option<u64>,
    /// Number of lines that could not be parsed.
    pub unparsed_lines: u64,
}

/// Serializes millionths of a dollar as dollars.
pub fn serialize_dollars<S: Serializer>(
    cost: &Option<u64>,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    cost.map(|cost| cost as f64 / 1e6).serialize(serializer)
}

/// Returns the cost of a session: the larger of the sum of its responses and the cost that the
/// agent reports. The agent writes its own figure when it exits, so it can be out of date. None if
/// neither covers the whole session.
pub fn total_cost(sum: u64, unpriced_responses: u64, reported: Option<u64>) -> Option<u64> {
    match reported {
        Some(reported) => Some(reported.max(sum)),
        None => (unpriced_responses == 0).then_some(sum),
    }
}

/// Selects messages of a session, in conversation order.
#[derive(Debug, Clone, Default)]
pub struct MessageFilter {
    /// Only messages with this role.
    pub role: Option<Role>,
    /// Only messages at or after this time.
    pub since: Option<Timestamp>,
    /// Maximum number of messages in the page; at most 1000.
    pub limit: u32,
    /// The `next` value of the previous page; none for the first page.
    pub cursor: Option<String>,
}

/// A row of the message list. The text of the message is in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct MessageRow {
    /// Orders the messages of a session: microseconds since 1970, increasing within a file.
    pub position: i64,
    /// The transcript that contains the message; none if the index no longer has that file.
    pub path: Option<String>,
    /// Offset of its first byte in the transcript.
    pub start: u64,
    /// Its length in bytes.
    pub len: u64,
    /// The agent's ID of the message.
    pub message_id: Option<String>,
    /// The ID of the message that it replies to.
    pub parent_id: Option<String>,
    /// The role of its author.
    pub role: String,
    /// Its kind.
    pub kind: String,
    /// Its time.
    pub at: Option<Timestamp>,
    /// The model of the response.
    pub model: Option<String>,
    /// The response that it belongs to.
    pub response_id: Option<String>,
    /// Token usage of that response; only in its first message.
    pub tokens: Option<Tokens>,
    /// Cost of that response in millionths of a US dollar, in JSON in dollars; none if unknown.
    #[serde(rename = "cost_usd", serialize_with = "serialize_dollars")]
    #[schemars(with = "Option<f64>")]
    pub cost: Option<u64>,
    /// The sub-agent that wrote or received the message.
    pub sub_agent: Option<String>,
}

/// One page of messages.
#[derive(Debug, Clone, Default, Serialize)]
pub struct MessagePage {
    /// The messages, in conversation order.
    pub messages: Vec<MessageRow>,
    /// The `cursor` of the next page; none for the last page.
    pub next: Option<String>,
}

/// Selects messages by their text.
#[derive(Debug, Clone)]
pub struct SearchFilter {
    /// The namespace.
    pub namespace: Namespace,
    /// Only sessions of this agent.
    pub agent: Option<AgentName>,
    /// The words to find.
    pub query: SearchQuery,
    /// Only sessions of this project.
    pub project: Option<String>,
    /// Only messages at or after this time.
    pub since: Option<Timestamp>,
    /// Only messages before this time.
    pub until: Option<Timestamp>,
    /// Only sessions with this label.
    pub label: Option<(String, String)>,
    /// Maximum number of hits; at most 1000.
    pub limit: u32,
}

/// A message that matches a search.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct SearchHit {
    /// The agent.
    pub agent: String,
    /// The session ID.
    pub session: String,
    /// The project of the session.
    pub project: Option<String>,
    /// The title of the session.
    pub title: Option<String>,
    /// The role of the author.
    pub role: String,
    /// The time of the message.
    pub at: Option<Timestamp>,
    /// The agent's ID of the message.
    pub message_id: Option<String>,
    /// The sub-agent that wrote or received the message.
    pub sub_agent: Option<String>,
    /// The matching words with the text around them.
    #[serde(flatten)]
    pub snippet: Snippet,
}

/// The result of a search.
#[derive(Debug, Clone, Default, Serialize, schemars::JsonSchema)]
pub struct SearchResults {
    /// The matching messages, best match first.
    pub hits: Vec<SearchHit>,
    /// Whether there are more hits than the limit.
    pub has_more: bool,
    /// Whether the index contains any message text to search.
    pub has_text: bool,
}

/// The attribute by which statistics are grouped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupBy {
    /// The UTC day of a message.
    Day,
    /// The project of the session.
    Project,
    /// The model of the response.
    Model,
    /// Each label of the session. A session with several labels counts once per label.
    Label,
}

/// Selects sessions for statistics.
#[derive(Debug, Clone)]
pub struct StatsFilter {
    /// The namespace.
    pub namespace: Namespace,
    /// Only sessions of this agent.
    pub agent: Option<AgentName>,
    /// The grouping; none for a single row.
    pub group_by: Option<GroupBy>,
    /// Only messages at or after this time.
    pub since: Option<Timestamp>,
    /// Only messages before this time.
    pub until: Option<Timestamp>,
}

/// Totals of one group of sessions.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct StatsRow {
    /// The common value of the grouping attribute; none if it is unknown or there is no grouping.
    pub group: Option<String>,
    /// Number of sessions.
    pub sessions: u64,
    /// Number of messages.
    pub messages: u64,
    /// Number of completed turns; none if they cannot be assigned to a group.
    pub turns: Option<u64>,
    /// Token usage of all responses.
    pub tokens: Tokens,
    /// Cost in millionths of a US dollar, in JSON in dollars; none if the cost of a response is
    /// unknown.
    #[serde(rename = "cost_usd", serialize_with = "serialize_dollars")]
    #[schemars(with = "Option<f64>")]
    pub cost: Option<u64>,
    /// Bytes before compression; none if they cannot be assigned to a group.
    pub raw_bytes: Option<u64>,
}

/// An index that knows the messages of each session.
///
/// # Contract
/// As for [`Index`]. No result is larger than its limit, and every page has the same cost,
/// regardless of its position.
#[async_trait]
pub trait Catalog: Index {
    /// Returns one page of the messages of a session, in conversation order.
    async fn messages(&self, log: &LogId, filter: &MessageFilter) -> Result<MessagePage>;

    /// Searches the text of prompts and responses, if the index contains it.
    async fn search(&self, filter: &SearchFilter) -> Result<SearchResults>;

    /// Returns totals per group.
    async fn stats(&self, filter: &StatsFilter) -> Result<Vec<StatsRow>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cost_is_the_larger_of_both_figures_and_unknown_if_a_response_has_no_price() {
        assert_eq!(total_cost(5, 0, None), Some(5));
        assert_eq!(total_cost(5, 1, None), None);
        assert_eq!(total_cost(5, 1, Some(7)), Some(7));
        assert_eq!(total_cost(9, 0, Some(7)), Some(9));
        assert_eq!(
            serde_json::to_value(SessionTotals {
                cost: Some(11_690),
                ..SessionTotals::default()
            })
            .unwrap()["cost_usd"],
            0.01169
        );
        assert!(serde_json::to_value(SessionTotals::default()).unwrap()["cost_usd"].is_null());
    }
}
