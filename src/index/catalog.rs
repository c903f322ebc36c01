//! What transcripts say, as the index tells it: messages a page at a time, what is found in them, what sessions amount to.
//!
//! Owns the contract and the rows. Only a database that keeps messages can answer; what streams and restores does without.

use async_trait::async_trait;
use jiff::Timestamp;
use serde::{Serialize, Serializer};

use super::Index;
use super::words::{Snippet, Words};
use crate::error::Result;
use crate::model::{AgentName, LogId, Namespace, Role, Tokens};

/// What a session amounts to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// Messages in its transcripts.
    pub messages: u64,
    /// Turns that are complete.
    pub turns: u64,
    /// What its answers took.
    pub tokens: Tokens,
    /// Millionths of a dollar; none if that of any answer is unknown. As JSON it is dollars.
    #[serde(rename = "cost_usd", serialize_with = "dollars")]
    pub cost: Option<u64>,
    /// Lines that could not be read.
    pub unread: u64,
}

/// Millionths of a dollar as dollars.
pub fn dollars<S: Serializer>(
    cost: &Option<u64>,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    cost.map(|cost| cost as f64 / 1e6).serialize(serializer)
}

/// The cost of a session: what its transcript says of the whole, or the sum of its answers, whichever is more; the first is
/// written when the agent exits, so it can be behind. None if neither is known in full.
pub fn cost_of(sum: u64, uncosted: u64, told: Option<u64>) -> Option<u64> {
    match told {
        Some(told) => Some(told.max(sum)),
        None => (uncosted == 0).then_some(sum),
    }
}

/// Which messages of a session to list, in the order they were said.
#[derive(Debug, Clone, Default)]
pub struct MessageFilter {
    /// Only what they say.
    pub role: Option<Role>,
    /// Only from then on.
    pub since: Option<Timestamp>,
    /// At most so many; at most 1000.
    pub limit: u32,
    /// Go on behind a page.
    pub cursor: Option<String>,
}

/// A message as listed. What it says is in the bucket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MessageRow {
    /// Orders a conversation: microseconds since 1970, and within a file never less than what comes before.
    pub position: i64,
    /// The file it stands in; none if that is gone from the index.
    pub path: Option<String>,
    /// Its first byte there.
    pub start: u64,
    /// Its bytes.
    pub len: u64,
    /// Its id.
    pub uuid: Option<String>,
    /// The message it answers.
    pub parent: Option<String>,
    /// Who speaks.
    pub role: String,
    /// What it is.
    pub kind: String,
    /// When.
    pub at: Option<Timestamp>,
    /// The model that answered.
    pub model: Option<String>,
    /// The answer it is a piece of.
    pub answer: Option<String>,
    /// What that answer took; in the first of its messages alone.
    pub tokens: Option<Tokens>,
    /// What that cost, in millionths of a dollar, if it is known. As JSON it is dollars.
    #[serde(rename = "cost_usd", serialize_with = "dollars")]
    pub cost: Option<u64>,
    /// The sub-agent that speaks or is spoken to.
    pub sub_agent: Option<String>,
}

/// One page of messages.
#[derive(Debug, Clone, Default, Serialize)]
pub struct MessagePage {
    /// The messages, in order.
    pub messages: Vec<MessageRow>,
    /// Pass this as `cursor` for the next page.
    pub next: Option<String>,
}

/// What to search for, and where.
#[derive(Debug, Clone)]
pub struct SearchFilter {
    /// The tenant.
    pub namespace: Namespace,
    /// Only this agent's sessions.
    pub agent: Option<AgentName>,
    /// The words.
    pub words: Words,
    /// Only in sessions of this project.
    pub project: Option<String>,
    /// Only what was said from then on.
    pub since: Option<Timestamp>,
    /// Only what was said before.
    pub until: Option<Timestamp>,
    /// Only in sessions with this label of this value.
    pub label: Option<(String, String)>,
    /// At most so many; at most 1000.
    pub limit: u32,
}

/// A message that was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Hit {
    /// The agent.
    pub agent: String,
    /// The session.
    pub session: String,
    /// Its project.
    pub project: Option<String>,
    /// Its title.
    pub title: Option<String>,
    /// Who speaks.
    pub role: String,
    /// When.
    pub at: Option<Timestamp>,
    /// The message.
    pub uuid: Option<String>,
    /// The sub-agent that speaks or is spoken to.
    pub sub_agent: Option<String>,
    /// The words and what is around them.
    #[serde(flatten)]
    pub snippet: Snippet,
}

/// What was found.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Found {
    /// The messages, the best first.
    pub hits: Vec<Hit>,
    /// There are more.
    pub more: bool,
    /// There is text to search in at all.
    pub indexed: bool,
}

/// What to count by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// The day, in UTC, that something was said.
    Day,
    /// The session's project.
    Project,
    /// The model that answered.
    Model,
    /// Each label of the session; one with several counts several times.
    Label,
}

/// What to count.
#[derive(Debug, Clone)]
pub struct StatsFilter {
    /// The tenant.
    pub namespace: Namespace,
    /// Only this agent's sessions.
    pub agent: Option<AgentName>,
    /// In one row, or a row for each of these.
    pub by: Option<By>,
    /// Only from then on.
    pub since: Option<Timestamp>,
    /// Only before.
    pub until: Option<Timestamp>,
}

/// What some sessions amount to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct StatsRow {
    /// What they have in common; none: nothing, or it is not known.
    pub group: Option<String>,
    /// Sessions.
    pub sessions: u64,
    /// Messages in their transcripts.
    pub messages: u64,
    /// Turns that are complete; none where they cannot be told apart.
    pub turns: Option<u64>,
    /// What their answers took.
    pub tokens: Tokens,
    /// Millionths of a dollar; none if that of any answer is unknown. As JSON it is dollars.
    #[serde(rename = "cost_usd", serialize_with = "dollars")]
    pub cost: Option<u64>,
    /// Bytes shipped; none where they cannot be told apart.
    pub bytes: Option<u64>,
}

/// An index that knows what transcripts say.
///
/// # Contract
/// As for [`Index`]. No answer is larger than its limit says, and no page costs more than the one before it.
#[async_trait]
pub trait Catalog: Index {
    /// The messages of a session, in order, a page at a time.
    async fn messages(&self, log: &LogId, filter: &MessageFilter) -> Result<MessagePage>;

    /// Searches what people and agents said, where it is kept.
    async fn search(&self, filter: &SearchFilter) -> Result<Found>;

    /// What sessions amount to, by group.
    async fn stats(&self, filter: &StatsFilter) -> Result<Vec<StatsRow>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_cost_is_unknown_and_the_larger_of_two_counts() {
        assert_eq!(cost_of(5, 0, None), Some(5));
        assert_eq!(cost_of(5, 1, None), None);
        assert_eq!(cost_of(5, 1, Some(7)), Some(7));
        assert_eq!(cost_of(9, 0, Some(7)), Some(9));
        assert_eq!(
            serde_json::to_value(Totals {
                cost: Some(11_690),
                ..Totals::default()
            })
            .unwrap()["cost_usd"],
            0.01169
        );
        assert!(serde_json::to_value(Totals::default()).unwrap()["cost_usd"].is_null());
    }
}
