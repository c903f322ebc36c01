//! The difference between two points of a session: messages and files.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::messages::AllMessages;
use super::reader::{ConversationReader, Extent};
use crate::error::Result;
use crate::log::state::LogState;
use crate::model::{FileKind, LocatedMessage, Message, RelPath, ResolvedPoint};

/// The difference between two points.
#[derive(Debug, Serialize)]
pub struct Difference {
    /// The session.
    pub session: String,
    /// Messages at the first point only.
    pub removed: Vec<MessageLine>,
    /// Messages at the second point only.
    pub added: Vec<MessageLine>,
    /// Files that differ.
    pub files: Vec<ChangedFile>,
}

/// A message of a difference.
#[derive(Debug, Serialize)]
pub struct MessageLine {
    /// Its author.
    pub role: &'static str,
    /// Its kind.
    pub kind: String,
    /// Its ID.
    pub message_id: Option<String>,
    /// The sub-agent it belongs to.
    pub sub_agent: Option<String>,
    /// Its content as text.
    pub text: String,
}

/// A file that differs between the points.
#[derive(Debug, Serialize)]
pub struct ChangedFile {
    /// Its path below the root.
    pub path: RelPath,
    /// Its length at the first point; none if it did not exist.
    pub bytes_before: Option<u64>,
    /// Its length at the second point; none if it did not exist.
    pub bytes_after: Option<u64>,
}

impl Difference {
    /// Whether the points are equal.
    pub fn is_empty(&self) -> bool {
        self.removed.is_empty() && self.added.is_empty() && self.files.is_empty()
    }
}

/// Compares a session at two points.
pub async fn diff(
    reader: ConversationReader<'_>,
    before: &ResolvedPoint,
    after: &ResolvedPoint,
) -> Result<Difference> {
    let before = Contents::read(reader, before).await?;
    let after = Contents::read(reader, after).await?;
    let paths: BTreeSet<&RelPath> = before.files.keys().chain(after.files.keys()).collect();
    let length = |contents: &Contents, path: &RelPath| Some(contents.files.get(path)?.0);
    let files = paths
        .into_iter()
        .filter(|path| before.files.get(*path) != after.files.get(*path))
        .map(|path| ChangedFile {
            path: path.clone(),
            bytes_before: length(&before, path),
            bytes_after: length(&after, path),
        })
        .collect();
    Ok(Difference {
        session: reader.id().name.to_string(),
        removed: before.messages_not_in(&after),
        added: after.messages_not_in(&before),
        files,
    })
}

/// The messages and files at a point.
struct Contents {
    /// The messages in order, each with its key: its ID, or its position.
    messages: Vec<(String, Message)>,
    /// Length and version of each file.
    files: BTreeMap<RelPath, (u64, String)>,
}

impl Contents {
    async fn read(reader: ConversationReader<'_>, point: &ResolvedPoint) -> Result<Contents> {
        let read = reader.read(point, Extent::All, AllMessages::default);
        let read = read.await?.require_undamaged(reader.id())?;
        let mut messages: Vec<(String, Message)> = read
            .visitor
            .messages
            .iter()
            .map(|(path, located)| (key(path, located), located.message.clone()))
            .collect();
        messages.sort_by_key(|(_, message)| message.at);
        let files = read
            .state
            .map(|state| file_versions(state, point))
            .unwrap_or_default();
        Ok(Contents { messages, files })
    }

    fn messages_not_in(&self, other: &Contents) -> Vec<MessageLine> {
        let others: BTreeSet<&str> = other.messages.iter().map(|(key, _)| key.as_str()).collect();
        self.messages
            .iter()
            .filter(|(key, _)| !others.contains(key.as_str()))
            .map(|(_, message)| MessageLine {
                role: message.role.as_str(),
                kind: message.kind.clone(),
                message_id: message.message_id.clone(),
                sub_agent: message.sub_agent.clone(),
                text: message.summary(),
            })
            .collect()
    }
}

/// The key of a message within its session.
fn key(path: &RelPath, located: &LocatedMessage) -> String {
    let message = &located.message;
    let sub_agent = message.sub_agent.as_deref().unwrap_or_default();
    match &message.message_id {
        Some(id) => format!("{sub_agent}/{id}"),
        None => format!("{sub_agent}/{path}:{}", located.start),
    }
}

fn file_versions(state: LogState, point: &ResolvedPoint) -> BTreeMap<RelPath, (u64, String)> {
    let lengths = point
        .checkpoint
        .as_ref()
        .map(|checkpoint| &checkpoint.transcript_lengths);
    let mut versions = BTreeMap::new();
    for (path, file) in state.files {
        let at_checkpoint = lengths.and_then(|lengths| lengths.get(&path)).copied();
        if lengths.is_some() && at_checkpoint.is_none() && file.kind == FileKind::Append {
            continue;
        }
        let len = at_checkpoint.unwrap_or(file.len).min(file.len);
        // A cut transcript has no known digest. Transcripts only grow, so its length is enough.
        let version = if len == file.len {
            file.sha256.to_string()
        } else {
            format!("{len} bytes")
        };
        versions.insert(path, (len, version));
    }
    versions
}
