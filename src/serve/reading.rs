//! Conversations: messages, checkpoints, the state at a point, and branches.

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::access::Role;
use super::endpoint::{Answer, Call, Endpoint, NoQuery, Reply, get};
use super::sessions::DEFAULT_LIMIT;
use crate::error::Error;
use crate::history::inspect::{InspectOptions, Inspection, inspect};
use crate::history::{Conversation, ConversationReader, Extent, ThreadedMessage};
use crate::index::MessageFilter;
use crate::log::errors;
use crate::model::{self, ResolvedPoint};
use crate::operations::branches::{ListedBranch, branches};
use crate::operations::messages::{ListedPage, page};
use crate::sessions::point::{self, CheckpointList};

/// Number of messages of a conversation if the client names none.
const DEFAULT_LAST: usize = 100;

pub fn endpoints() -> Vec<Endpoint> {
    vec![
        get(
            "/sessions/{agent}/{session}/messages",
            "listMessages",
            Role::Metadata,
            "List messages with tokens and cost, in conversation order. Readers also get the beginning of each text.",
        )
        .json(messages),
        get(
            "/sessions/{agent}/{session}/messages/{item}",
            "getMessage",
            Role::Reader,
            "Get one message by its ID, with its complete content.",
        )
        .json(message),
        get(
            "/sessions/{agent}/{session}/conversation",
            "getConversation",
            Role::Reader,
            "Get the last messages up to a point, each sub-agent below the call that started it.",
        )
        .json(conversation),
        get(
            "/sessions/{agent}/{session}/checkpoints",
            "listCheckpoints",
            Role::Metadata,
            "List the checkpoints of a session, and the named ones.",
        )
        .json(checkpoints),
        get(
            "/sessions/{agent}/{session}/checkpoints/{item}",
            "getCheckpoint",
            Role::Reader,
            "Get the state of a session at a point: latest, turn:N, seq:N, a time, or the number or name of a checkpoint.",
        )
        .json(checkpoint),
        get(
            "/sessions/{agent}/{session}/branches",
            "listBranches",
            Role::Metadata,
            "List the branches of a session.",
        )
        .without_content()
        .json(list_branches),
    ]
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct MessagesQuery {
    /// Only messages with this role.
    role: Option<model::Role>,
    /// Only messages at or after this time.
    since: Option<Timestamp>,
    /// Maximum number of messages; 50 if absent.
    #[schemars(range(min = 1, max = 1000))]
    limit: Option<u32>,
    /// The `next` value of the previous page.
    cursor: Option<String>,
    /// Leave out the texts, which are read from the store.
    #[serde(default)]
    no_text: bool,
}

async fn messages(call: Call, query: MessagesQuery) -> Answer<ListedPage> {
    let (parts, id) = call.session()?;
    let filter = MessageFilter {
        role: query.role,
        since: query.since,
        limit: query.limit.unwrap_or(DEFAULT_LIMIT),
        cursor: query.cursor,
    };
    let texts = call.reads_content() && !query.no_text;
    let _permit = call.api.log_read().await?;
    let page = page(&parts, &id, &filter, texts).await?;
    if page.messages.is_empty() && parts.index.session(&id).await?.is_none() {
        return Err(errors::not_found(&id).into());
    }
    Ok(Reply::ok(page))
}

async fn message(call: Call, NoQuery {}: NoQuery) -> Answer<ThreadedMessage> {
    let (parts, id) = call.session()?;
    let _permit = call.api.log_read().await?;
    let reader = ConversationReader::new(&parts.logs, &*parts.profile, &id);
    let read = reader
        .read(&ResolvedPoint::latest(None), Extent::All, || {
            Conversation::new(true)
        })
        .await?;
    if read.head == 0 {
        return Err(errors::not_found(&id).into());
    }
    let wanted = call.item();
    let found = read
        .visitor
        .threaded(None)
        .into_iter()
        .find(|threaded| threaded.message.message_id.as_deref() == Some(wanted));
    let found = found
        .ok_or_else(|| Error::not_found(format!("{id} has no message with the ID {wanted:?}")))?;
    Ok(Reply::ok(found))
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ConversationQuery {
    /// The point: latest, turn, turn:N, seq:N, a time or a checkpoint.
    at: Option<String>,
    /// The writer of a branch, or a prefix.
    branch: Option<String>,
    /// Number of messages, from the end; 100 if absent.
    #[schemars(range(min = 1, max = 1000))]
    last: Option<usize>,
    /// Include thinking, complete tool inputs and results, and system messages.
    #[serde(default)]
    verbose: bool,
}

/// The end of a conversation.
#[derive(Debug, Serialize, JsonSchema)]
struct ConversationPage {
    /// The messages, oldest first.
    messages: Vec<ThreadedMessage>,
    /// Whether the session was removed and can be undeleted.
    removed: bool,
    /// The first damage of the log: messages after it are missing.
    damage: Option<String>,
}

async fn conversation(call: Call, query: ConversationQuery) -> Answer<ConversationPage> {
    let spec = Call::point(query.at.as_deref())?;
    let (parts, id) = call.session()?;
    let _permit = call.api.log_read().await?;
    let branch = Call::branch(&parts, &id, query.branch.as_deref()).await?;
    let point = point::resolve_on(&parts.logs, &id, branch.as_ref(), &spec).await?;
    let last = query.last.unwrap_or(DEFAULT_LAST);
    let read = ConversationReader::new(&parts.logs, &*parts.profile, &id)
        .read(&point, Extent::Last(last), || {
            Conversation::new(query.verbose)
        })
        .await?;
    if read.head == 0 {
        return Err(errors::not_found(&id).into());
    }
    Ok(Reply::ok(ConversationPage {
        messages: read.visitor.threaded(Some(last)),
        removed: read.is_removed,
        damage: read.damage.map(|damage| damage.to_string()),
    }))
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct BranchQuery {
    /// The writer of a branch, or a prefix.
    branch: Option<String>,
}

/// The checkpoints of a session, and its damage.
#[derive(Debug, Serialize, JsonSchema)]
struct CheckpointPage {
    #[serde(flatten)]
    list: CheckpointList,
    /// Damage of the log: there may be more checkpoints after it.
    damage: Option<String>,
}

async fn checkpoints(call: Call, query: BranchQuery) -> Answer<CheckpointPage> {
    let (parts, id) = call.session()?;
    let _permit = call.api.log_read().await?;
    let branch = Call::branch(&parts, &id, query.branch.as_deref()).await?;
    let mut found = point::list(&parts.logs, &id, branch.as_ref()).await?;
    let damage = found.damage.take().map(|damage| damage.to_string());
    let mut list = found.into_list(&id);
    if !call.reads_content() {
        let listed = list.checkpoints.iter_mut();
        let named = list.named.iter_mut().map(|named| &mut named.checkpoint);
        let all = listed.map(|listed| &mut listed.checkpoint).chain(named);
        for pending in all.flat_map(|checkpoint| &mut checkpoint.pending_calls) {
            pending.input.clear();
        }
    }
    Ok(Reply::ok(CheckpointPage { list, damage }))
}

async fn checkpoint(call: Call, query: BranchQuery) -> Answer<Inspection> {
    let spec = Call::point(Some(call.item()))?;
    let (parts, id) = call.session()?;
    let _permit = call.api.log_read().await?;
    let branch = Call::branch(&parts, &id, query.branch.as_deref()).await?;
    let point = point::resolve_on(&parts.logs, &id, branch.as_ref(), &spec).await?;
    let reader = ConversationReader::new(&parts.logs, &*parts.profile, &id);
    let options = InspectOptions {
        prices: call.api.prices.clone(),
        ..InspectOptions::default()
    };
    let inspection = inspect(reader, &point, &options).await?;
    if inspection.head == 0 {
        return Err(errors::not_found(&id).into());
    }
    Ok(Reply::ok(inspection))
}

/// The branches of a session.
#[derive(Debug, Serialize, JsonSchema)]
struct BranchList {
    /// The branches, oldest first.
    branches: Vec<ListedBranch>,
}

async fn list_branches(call: Call, NoQuery {}: NoQuery) -> Answer<BranchList> {
    let (parts, id) = call.session()?;
    let _permit = call.api.log_read().await?;
    if parts.logs.list_newest_segments(&id).await?.is_empty() {
        return Err(errors::not_found(&id).into());
    }
    let branches = branches(&parts, &id).await?;
    Ok(Reply::ok(BranchList { branches }))
}
