//! A conversation for display: the messages of all transcripts, each sub-agent below the call that
//! started it.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

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
#[derive(Debug, Clone, Serialize, schemars::JsonSchema)]
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
        let mut agents: Vec<(&String, &Vec<DisplayMessage>)> = threads
            .iter()
            .filter_map(|(name, thread)| Some((name.as_ref()?, thread)))
            .collect();
        agents.sort_by_key(|(name, thread)| (thread.first().map(|first| first.position), *name));
        let mut parents = ParentSearch::new(&threads);
        for (name, thread) in agents {
            let parent = parents.parent_of(name, thread);
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

/// Finds the message that each sub-agent follows. Transcripts determine how many sub-agents there are,
/// so the search of one must not read all messages.
struct ParentSearch<'t> {
    /// The calls that start a sub-agent and have none yet, by the hash of the prompt.
    calls: HashMap<u64, VecDeque<(&'t Option<String>, usize)>>,
    /// The messages of the main thread, in order.
    main: &'t [DisplayMessage],
    /// The last message with a call up to each message of the main thread.
    last_calls: Vec<Option<usize>>,
    /// The messages that a sub-agent follows already.
    used: HashSet<(&'t Option<String>, usize)>,
}

impl<'t> ParentSearch<'t> {
    fn new(threads: &'t BTreeMap<Option<String>, Vec<DisplayMessage>>) -> ParentSearch<'t> {
        let mut calls: HashMap<u64, VecDeque<_>> = HashMap::new();
        for (name, thread) in threads {
            for (index, message) in thread.iter().enumerate() {
                for prompt in message.agent_prompts() {
                    calls.entry(prompt).or_default().push_back((name, index));
                }
            }
        }
        let main = threads.get(&None).map_or(&[][..], Vec::as_slice);
        let last_calls = main
            .iter()
            .enumerate()
            .scan(None, |last, (index, message)| {
                if message.calls().next().is_some() {
                    *last = Some(index);
                }
                Some(*last)
            });
        ParentSearch {
            calls,
            main,
            last_calls: last_calls.collect(),
            used: HashSet::new(),
        }
    }

    /// The message that a sub-agent follows: the call with the sub-agent's prompt, or else the last
    /// call before its first message.
    fn parent_of(&mut self, name: &str, thread: &[DisplayMessage]) -> ThreadPosition {
        let first = thread.first();
        let prompt = first.and_then(|first| first.prompt_hash);
        let (parent, index) = prompt
            .and_then(|prompt| self.take_call(name, prompt))
            .unwrap_or_else(|| {
                let started = first.map_or(i64::MAX, |first| first.position);
                let end = self
                    .main
                    .partition_point(|message| message.position <= started);
                let last_message = end.checked_sub(1);
                let last_call = last_message.and_then(|last| self.last_calls[last]);
                (&None, last_call.or(last_message).unwrap_or(0))
            });
        self.used.insert((parent, index));
        (parent.clone(), index)
    }

    /// Takes the first call with this prompt in another thread.
    fn take_call(&mut self, name: &str, prompt: u64) -> Option<(&'t Option<String>, usize)> {
        let calls = self.calls.get_mut(&prompt)?;
        let mut own = 0;
        while let Some(call) = calls.get(own).copied() {
            if call.0.as_deref() == Some(name) {
                own += 1;
            } else {
                calls.remove(own);
                if !self.used.contains(&call) {
                    return Some(call);
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Role;

    fn message(position: i64, sub_agent: Option<String>, prompt: Option<u64>) -> DisplayMessage {
        DisplayMessage {
            position,
            message_id: None,
            role: Role::User,
            kind: "user".into(),
            at: None,
            model: None,
            sub_agent,
            key: 0,
            prompt_hash: prompt,
            blocks: Vec::new(),
        }
    }

    fn call(position: i64, sub_agent: Option<String>, prompt: u64) -> DisplayMessage {
        let call = DisplayBlock::ToolCall {
            id: String::new(),
            name: "Task".into(),
            input: String::new(),
            prompt_hash: Some(prompt),
        };
        DisplayMessage {
            blocks: vec![call],
            ..message(position, sub_agent, None)
        }
    }

    /// Each of many sub-agents starts the next one. A search through all messages for each of them
    /// would take hours.
    #[test]
    fn a_hundred_thousand_nested_sub_agents_are_threaded() {
        const AGENTS: u64 = 100_000;
        for has_same_prompt in [false, true] {
            let prompt = |agent: u64| if has_same_prompt { 7 } else { agent };
            let name = |agent: u64| Some(format!("agent-{agent:06}"));
            let mut threads = BTreeMap::from([(None, vec![call(0, None, prompt(1))])]);
            for agent in 1..=AGENTS {
                let position = i64::try_from(agent).unwrap() * 2;
                let mut thread = vec![message(position, name(agent), Some(prompt(agent)))];
                thread.push(call(position + 1, name(agent), prompt(agent + 1)));
                threads.insert(name(agent), thread);
            }
            let messages = ThreadTree::new(threads).flatten();
            let positions: Vec<i64> = messages
                .iter()
                .map(|shown| shown.message.position)
                .collect();
            assert_eq!(messages.len() as u64, 1 + 2 * AGENTS);
            assert!(positions.is_sorted(), "the same prompt: {has_same_prompt}");
            assert_eq!(messages[3].depth, 2);
        }
    }
}
