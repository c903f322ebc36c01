//! The events that Claude Code sends to its hooks.
//!
//! Owns parsing an event, and checking whether a transcript ends with the event's message. Does not
//! own waiting for the message or the reaction to an event.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::lines::{self, lenient};
use crate::model::{Block, Role, SessionId};

/// The input of a hook, as far as sessiond uses it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct HookEvent {
    #[serde(rename = "hook_event_name", default, deserialize_with = "lenient")]
    name: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    session_id: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    transcript_path: Option<PathBuf>,
    #[serde(default, deserialize_with = "lenient")]
    agent_transcript_path: Option<PathBuf>,
    #[serde(default, deserialize_with = "lenient")]
    last_assistant_message: Option<String>,
}

/// The kind of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HookEventKind {
    /// A session starts. It has no transcript yet.
    SessionStart,
    /// A turn, a sub-agent or the session has ended.
    End,
    /// A tool has returned. Claude Code writes the result after its hooks have finished.
    ToolResult,
    /// Any other event.
    Other,
}

impl HookEvent {
    /// Parses an event; none if the text is not one.
    pub fn parse(text: &[u8]) -> Option<HookEvent> {
        serde_json::from_slice(text)
            .ok()
            .filter(|event: &HookEvent| event.name.is_some())
    }

    /// The name of the event.
    pub fn name(&self) -> &str {
        self.name.as_deref().unwrap_or_default()
    }

    /// The kind of the event.
    pub fn kind(&self) -> HookEventKind {
        match self.name() {
            "SessionStart" => HookEventKind::SessionStart,
            "Stop" | "StopFailure" | "SubagentStop" | "SessionEnd" => HookEventKind::End,
            "PostToolUse" | "PostToolUseFailure" => HookEventKind::ToolResult,
            _ => HookEventKind::Other,
        }
    }

    /// The transcript of the session. It may not exist.
    pub fn transcript(&self) -> Option<&Path> {
        self.transcript_path
            .as_deref()
            .filter(|path| path.is_absolute())
    }

    /// The session ID, from the name of its transcript.
    pub fn session(&self) -> Option<SessionId> {
        let stem = self
            .transcript()
            .and_then(Path::file_stem)
            .and_then(|stem| stem.to_str());
        stem.or(self.session_id.as_deref())
            .filter(|id| !id.is_empty())
            .map(SessionId::escape)
    }

    /// The last message of the agent, and the transcript that will contain it. The transcript may
    /// not exist: a compaction names a sub-agent that never writes one.
    pub fn expected_message(&self) -> Option<(&Path, &str)> {
        let path = match self.name() {
            "Stop" | "StopFailure" => self.transcript(),
            "SubagentStop" => self.agent_transcript_path.as_deref(),
            _ => None,
        };
        path.zip(
            self.last_assistant_message
                .as_deref()
                .filter(|message| !message.trim().is_empty()),
        )
    }
}

/// Whether a message is the last message of the agent in a transcript. `tail` is the end of the
/// transcript and may start within a line.
pub fn ends_with_message(tail: &[u8], message: &str) -> bool {
    let mut texts: Vec<String> = Vec::new();
    let mut response_id = None;
    for line in tail
        .split_inclusive(|byte| *byte == b'\n')
        .filter(|line| line.ends_with(b"\n"))
    {
        let Some(message) = lines::read(line).and_then(|line| line.message) else {
            continue;
        };
        let has_tool_call = message
            .blocks
            .iter()
            .any(|block| matches!(block, Block::ToolCall(_)));
        match message.role {
            Role::Assistant => {
                // Each block of a response is a separate line.
                if has_tool_call
                    || message.response_id.is_none()
                    || message.response_id != response_id
                {
                    texts.clear();
                }
                response_id = message.response_id;
                if !has_tool_call {
                    texts.extend(message.blocks.into_iter().filter_map(|block| {
                        if let Block::Text(text) = block {
                            Some(text)
                        } else {
                            None
                        }
                    }));
                }
            }
            // The message must come after the last input, because the agent may repeat an earlier
            // message.
            Role::User | Role::Tool => texts.clear(),
            Role::System
                if matches!(
                    message.kind.as_str(),
                    "meta" | "summary" | "task_notification"
                ) =>
            {
                texts.clear()
            }
            Role::System => {}
        }
    }
    let normalize = |text: &str| text.split_whitespace().collect::<String>();
    let expected = normalize(message);
    texts.last().is_some_and(|last| normalize(last) == expected)
        || normalize(&texts.concat()) == expected
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROMPT: &str = r#"{"type":"user","message":{"role":"user","content":"do it"}}"#;

    fn response(id: &str, text: &str) -> String {
        format!(
            r#"{{"type":"assistant","message":{{"id":"{id}","content":[{{"type":"text","text":"{text}"}}]}}}}"#
        )
    }

    fn tail(lines: &[&str]) -> Vec<u8> {
        lines
            .iter()
            .flat_map(|line| [line.as_bytes(), b"\n"].concat())
            .collect()
    }

    #[test]
    fn only_a_message_after_the_last_input_counts() {
        let call = r#"{"type":"assistant","message":{"id":"m1","content":[{"type":"tool_use","id":"t","name":"Bash","input":{}}]}}"#;
        let result = r#"{"type":"user","message":{"content":[{"type":"tool_result","tool_use_id":"t","content":"x"}]}}"#;
        let meta = r#"{"type":"user","isMeta":true,"message":{"content":"Stop hook feedback"}}"#;
        let done = response("m1", "Done.");
        assert!(!ends_with_message(&tail(&[PROMPT]), "Done."));
        assert!(ends_with_message(&tail(&[PROMPT, &done]), "Done."));
        // Claude Code writes notes after it.
        assert!(ends_with_message(
            &tail(&[
                PROMPT,
                &done,
                r#"{"type":"last-prompt"}"#,
                r#"{"type":"system","subtype":"turn_duration"}"#
            ]),
            "Done."
        ));
        assert!(!ends_with_message(&tail(&[PROMPT, &done, PROMPT]), "Done."));
        assert!(!ends_with_message(&tail(&[PROMPT, &done, call]), "Done."));
        assert!(!ends_with_message(
            &tail(&[PROMPT, &done, call, result]),
            "Done."
        ));
        assert!(!ends_with_message(&tail(&[PROMPT, &done, meta]), "Done."));
        assert!(ends_with_message(
            &tail(&[PROMPT, &done, meta, &response("m2", "Done.")]),
            "Done."
        ));
        // A partial line does not count.
        assert!(!ends_with_message(done.as_bytes(), "Done."));
        // The tail starts within a line, and invalid lines are ignored.
        assert!(ends_with_message(
            &[b"\"}}\n\xff\xfe\n".as_slice(), &tail(&[PROMPT, &done])].concat(),
            " Done.\n"
        ));
        // Several blocks of one response.
        let both = tail(&[
            PROMPT,
            &response("m3", "First."),
            &response("m3", "Second."),
        ]);
        assert!(
            ends_with_message(&both, "Second.")
                && ends_with_message(&both, "First.\\n\\nSecond.".replace("\\n", "\n").as_str())
                && !ends_with_message(&both, "First.")
        );
    }

    #[test]
    fn an_event_is_parsed_and_garbage_is_none() {
        let event = HookEvent::parse(br#"{"hook_event_name":"Stop","session_id":"a","transcript_path":"/r/projects/-w/s1.jsonl","last_assistant_message":"ok","background_tasks":[]}"#).unwrap();
        assert_eq!(
            (event.kind(), event.session().unwrap().as_str()),
            (HookEventKind::End, "s1")
        );
        assert_eq!(
            event.expected_message(),
            Some((Path::new("/r/projects/-w/s1.jsonl"), "ok"))
        );
        let unknown = HookEvent::parse(
            br#"{"hook_event_name":"Brand new","session_id":7,"transcript_path":null}"#,
        )
        .unwrap();
        assert_eq!(
            (
                unknown.kind(),
                unknown.session(),
                unknown.expected_message()
            ),
            (HookEventKind::Other, None, None)
        );
        for garbage in [
            &b""[..],
            b"{",
            b"[]",
            b"null",
            b"\xff",
            b"{}",
            b"{\"hook_event_name\":3}",
        ] {
            assert_eq!(HookEvent::parse(garbage), None, "{garbage:?}");
        }
    }
}
