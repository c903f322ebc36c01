//! A conversation for display: the messages of all transcripts, each sub-agent below the call that
//! started it.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use jiff::Timestamp;
use serde::Serialize;

use super::display::{DisplayBlock, DisplayMessage};
use super::reader::ConversationVisitor;
use crate::log::replay::{PerTranscript, TranscriptVisitor};
use crate::model::{FileMove, LocatedMessage, RelPath};

/// Number of recent messages among which a rewritten message is looked for.
const REWRITE_WINDOW: usize = 64;

/// A visitor that keeps what is displayed of each message.
pub struct Conversation {
    verbose: bool,
    messages: PerTranscript<DisplayMessage>,
}

/// A message at its place in the conversation.
#[derive(Debug, Clone, Serialize)]
pub struct ThreadedMessage {
    /// 0 in the session's own conversation, plus one for each enclosing sub-agent.
    pub depth: usize,
    /// The message.
    #[serde(flatten)]
    pub message: DisplayMessage,
}

impl ConversationVisitor for Conversation {
    fn message_count(&self) -> usize {
        self.messages.iter().count()
    }
}

impl TranscriptVisitor for Conversation {
    fn visit_message(&mut self, located: LocatedMessage) {
        let (path, end) = (located.path.clone(), located.start + located.len);
        let previous = self.messages.last(&path).map_or(-1, |last| last.position);
        let position = located
            .message
            .at
            .map_or(0, Timestamp::as_microsecond)
            .max(previous.saturating_add(1));
        let Some(message) = DisplayMessage::new(located, position, self.verbose) else {
            return;
        };
        // Some agents write a message again when it has changed.
        let is_same = |earlier: &&mut DisplayMessage| {
            earlier.key == message.key && earlier.role == message.role
        };
        let mut recent = self.messages.recent(&path).take(REWRITE_WINDOW);
        if let Some(earlier) = recent.find(is_same) {
            *earlier = DisplayMessage {
                position: earlier.position,
                at: earlier.at,
                ..message
            };
        } else {
            drop(recent);
            self.messages.push(path, end, message);
        }
    }

    fn truncate(&mut self, path: &RelPath, from: u64) {
        self.messages.truncate(path, from);
    }

    fn apply_move(&mut self, moved: &FileMove) {
        self.messages.apply_move(moved);
    }

    fn start_fork(&mut self, names: &BTreeMap<RelPath, RelPath>) {
        self.messages.start_fork(names);
    }

    fn clear(&mut self) {
        self.messages.clear();
    }
}

impl Conversation {
    /// An empty conversation. With `verbose`, it keeps complete tool inputs and results.
    pub fn new(verbose: bool) -> Conversation {
        Conversation {
            verbose,
            messages: PerTranscript::default(),
        }
    }

    /// All messages in order, each sub-agent below the call that started it; with `last`, only that
    /// many messages of the end.
    pub fn threaded(self, last: Option<usize>) -> Vec<ThreadedMessage> {
        let mut threads: BTreeMap<Option<String>, Vec<DisplayMessage>> = BTreeMap::new();
        for message in self.messages.into_all() {
            threads
                .entry(message.sub_agent.clone())
                .or_default()
                .push(message);
        }
        for thread in threads.values_mut() {
            thread.sort_by_key(|message| message.position);
        }
        let mut messages = ThreadTree::new(threads).flatten();
        if let Some(last) = last {
            messages.drain(..messages.len().saturating_sub(last));
        }
        messages
    }
}

/// The outcome of a tool call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ToolOutcome {
    /// Whether the tool failed.
    pub is_error: bool,
    /// Size of the result in bytes.
    pub bytes: usize,
}

/// The outcome of each tool call that has a result, by call ID.
pub fn tool_outcomes<'m>(
    messages: impl Iterator<Item = &'m DisplayMessage>,
) -> HashMap<String, ToolOutcome> {
    messages
        .flat_map(|message| &message.blocks)
        .filter_map(|block| match block {
            DisplayBlock::ToolResult {
                call_id,
                bytes,
                is_error,
                ..
            } => {
                let (is_error, bytes) = (*is_error, *bytes);
                Some((call_id.clone(), ToolOutcome { is_error, bytes }))
            }
            _ => None,
        })
        .collect()
}

/// The position of a message: its thread, and its index in it. `None` is the main thread.
type ThreadPosition = (Option<String>, usize);

/// The threads of a conversation, and which of them started where in which other.
struct ThreadTree {
    threads: BTreeMap<Option<String>, Vec<DisplayMessage>>,
    /// The sub-agents that follow each message.
    children: BTreeMap<ThreadPosition, Vec<String>>,
}

impl ThreadTree {
    fn new(threads: BTreeMap<Option<String>, Vec<DisplayMessage>>) -> ThreadTree {
        let mut children: BTreeMap<ThreadPosition, Vec<String>> = BTreeMap::new();
        let mut used: BTreeSet<ThreadPosition> = BTreeSet::new();
        let mut agents: Vec<(&String, &Vec<DisplayMessage>)> = threads
            .iter()
            .filter_map(|(name, thread)| Some((name.as_ref()?, thread)))
            .collect();
        agents.sort_by_key(|(name, thread)| (thread.first().map(|first| first.position), *name));
        for (name, thread) in agents {
            let parent = parent_of(&threads, name, thread, &used);
            used.insert(parent.clone());
            children.entry(parent).or_default().push(name.clone());
        }
        ThreadTree { threads, children }
    }

    fn flatten(mut self) -> Vec<ThreadedMessage> {
        let mut messages = Vec::new();
        self.push_thread(None, 0, &mut messages);
        // Threads whose parent is unknown, or that are each other's parents.
        while let Some(name) = self.threads.keys().next().cloned() {
            self.push_thread(name, 1, &mut messages);
        }
        messages
    }

    fn push_thread(
        &mut self,
        name: Option<String>,
        depth: usize,
        messages: &mut Vec<ThreadedMessage>,
    ) {
        // A loop, because transcripts determine how deep sub-agents are nested.
        let mut open: Vec<OpenThread> = self.open_thread(name, depth).into_iter().collect();
        while let Some(thread) = open.last_mut() {
            let Some((index, message)) = thread.rest.next() else {
                open.pop();
                continue;
            };
            let depth = thread.depth;
            messages.push(ThreadedMessage { depth, message });
            let children = self.children.remove(&(thread.name.clone(), index));
            // The first one is on top.
            for child in children.unwrap_or_default().into_iter().rev() {
                open.extend(self.open_thread(Some(child), (depth + 1).min(MAX_DEPTH)));
            }
        }
    }

    /// Takes a thread out of the tree; none if it was taken before.
    fn open_thread(&mut self, name: Option<String>, depth: usize) -> Option<OpenThread> {
        let thread = self.threads.remove(&name)?;
        Some(OpenThread {
            name,
            depth,
            rest: thread.into_iter().enumerate(),
        })
    }
}

/// A thread whose messages are being pushed.
struct OpenThread {
    name: Option<String>,
    depth: usize,
    rest: std::iter::Enumerate<std::vec::IntoIter<DisplayMessage>>,
}

/// Maximum depth that is shown. Deeper sub-agents are indented as if they had this depth.
const MAX_DEPTH: usize = 16;

/// The message that a sub-agent follows: the call with the sub-agent's prompt, or else the last
/// call before its first message.
fn parent_of(
    threads: &BTreeMap<Option<String>, Vec<DisplayMessage>>,
    name: &str,
    thread: &[DisplayMessage],
    used: &BTreeSet<ThreadPosition>,
) -> ThreadPosition {
    let first = thread.first();
    let others = threads
        .iter()
        .filter(|(other, _)| other.as_deref() != Some(name));
    if let Some(prompt) = first.and_then(|first| first.prompt_hash) {
        let mut calls = others.flat_map(|(other, thread)| {
            let calls = thread
                .iter()
                .enumerate()
                .filter(move |(_, message)| message.starts_agent_with(prompt));
            calls.map(move |(index, _)| (other.clone(), index))
        });
        if let Some(found) = calls.find(|position| !used.contains(position)) {
            return found;
        }
    }
    let main = threads.get(&None).map_or(&[][..], Vec::as_slice);
    let started = first.map_or(i64::MAX, |first| first.position);
    let last_call = main
        .iter()
        .rposition(|message| message.position <= started && message.calls().next().is_some());
    let last_message = || main.iter().rposition(|message| message.position <= started);
    (None, last_call.or_else(last_message).unwrap_or(0))
}
