//! What Claude Code tells its hooks, and whether a transcript holds yet what the agent has said.
//!
//! Owns reading an event and the last lines of a transcript. Does not own waiting for them or what is done about them.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::lines::{self, lenient};
use crate::model::{Block, Role, SessionId};

/// What a hook is told, as far as it matters here.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct Event {
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

/// What an event means for us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// A session begins; it has no transcript yet.
    Start,
    /// A turn, a sub-agent or the session has ended.
    End,
    /// A tool has answered; its answer is written only when the hooks have returned.
    Tool,
    /// Nothing.
    Other,
}

impl Event {
    /// Reads an event; none if it is not one.
    pub fn read(text: &[u8]) -> Option<Event> {
        serde_json::from_slice(text)
            .ok()
            .filter(|event: &Event| event.name.is_some())
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.name.as_deref().unwrap_or_default()
    }

    /// What it means for us.
    pub fn moment(&self) -> Moment {
        match self.name() {
            "SessionStart" => Moment::Start,
            "Stop" | "StopFailure" | "SubagentStop" | "SessionEnd" => Moment::End,
            "PostToolUse" | "PostToolUseFailure" => Moment::Tool,
            _ => Moment::Other,
        }
    }

    /// The session's transcript, which need not exist.
    pub fn transcript(&self) -> Option<&Path> {
        self.transcript_path
            .as_deref()
            .filter(|path| path.is_absolute())
    }

    /// The session, by the file that it is kept by.
    pub fn session(&self) -> Option<SessionId> {
        let stem = self
            .transcript()
            .and_then(Path::file_stem)
            .and_then(|stem| stem.to_str());
        stem.or(self.session_id.as_deref())
            .filter(|id| !id.is_empty())
            .map(SessionId::escape)
    }

    /// What the agent said last, and the transcript that is to hold it. It need not exist: a compaction names a sub-agent
    /// whose transcript is never written.
    pub fn awaited(&self) -> Option<(&Path, &str)> {
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

/// Whether the end of a transcript holds a message as the last that the agent said. `tail` may begin within a line.
pub fn holds(tail: &[u8], message: &str) -> bool {
    let mut said: Vec<String> = Vec::new();
    let mut answer = None;
    for line in tail
        .split_inclusive(|byte| *byte == b'\n')
        .filter(|line| line.ends_with(b"\n"))
    {
        let Some(message) = lines::read(line).and_then(|line| line.message) else {
            continue;
        };
        let goes_on = message
            .blocks
            .iter()
            .any(|block| matches!(block, Block::ToolCall(_)));
        match message.role {
            Role::Assistant => {
                // An answer comes in lines, a block each.
                if goes_on || message.answer.is_none() || message.answer != answer {
                    said.clear();
                }
                answer = message.answer;
                if !goes_on {
                    said.extend(message.blocks.into_iter().filter_map(|block| {
                        if let Block::Text(text) = block {
                            Some(text)
                        } else {
                            None
                        }
                    }));
                }
            }
            // What was said before somebody spoke is not the last: the same words may come again.
            Role::User | Role::Tool => said.clear(),
            Role::System
                if matches!(
                    message.kind.as_str(),
                    "meta" | "summary" | "task_notification"
                ) =>
            {
                said.clear()
            }
            Role::System => {}
        }
    }
    let bare = |text: &str| text.split_whitespace().collect::<String>();
    let wanted = bare(message);
    said.last().is_some_and(|last| bare(last) == wanted) || bare(&said.concat()) == wanted
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROMPT: &str = r#"{"type":"user","message":{"role":"user","content":"do it"}}"#;

    fn answer(id: &str, text: &str) -> String {
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
    fn the_last_message_is_known_when_it_is_there_and_not_by_the_same_words_before() {
        let call = r#"{"type":"assistant","message":{"id":"m1","content":[{"type":"tool_use","id":"t","name":"Bash","input":{}}]}}"#;
        let result = r#"{"type":"user","message":{"content":[{"type":"tool_result","tool_use_id":"t","content":"x"}]}}"#;
        let meta = r#"{"type":"user","isMeta":true,"message":{"content":"Stop hook feedback"}}"#;
        let done = answer("m1", "Done.");
        assert!(!holds(&tail(&[PROMPT]), "Done."));
        assert!(holds(&tail(&[PROMPT, &done]), "Done."));
        // Behind it stands what the client notes.
        assert!(holds(
            &tail(&[
                PROMPT,
                &done,
                r#"{"type":"last-prompt"}"#,
                r#"{"type":"system","subtype":"turn_duration"}"#
            ]),
            "Done."
        ));
        assert!(!holds(&tail(&[PROMPT, &done, PROMPT]), "Done."));
        assert!(!holds(&tail(&[PROMPT, &done, call]), "Done."));
        assert!(!holds(&tail(&[PROMPT, &done, call, result]), "Done."));
        assert!(!holds(&tail(&[PROMPT, &done, meta]), "Done."));
        assert!(holds(
            &tail(&[PROMPT, &done, meta, &answer("m2", "Done.")]),
            "Done."
        ));
        // A line that is not whole is not there.
        assert!(!holds(done.as_bytes(), "Done."));
        // The window begins within a line, and garbage is passed over.
        assert!(holds(
            &[b"\"}}\n\xff\xfe\n".as_slice(), &tail(&[PROMPT, &done])].concat(),
            " Done.\n"
        ));
        // Several pieces of one answer.
        let both = tail(&[PROMPT, &answer("m3", "First."), &answer("m3", "Second.")]);
        assert!(
            holds(&both, "Second.")
                && holds(&both, "First.\\n\\nSecond.".replace("\\n", "\n").as_str())
                && !holds(&both, "First.")
        );
    }

    #[test]
    fn an_event_is_read_and_garbage_is_none() {
        let event = Event::read(br#"{"hook_event_name":"Stop","session_id":"a","transcript_path":"/r/projects/-w/s1.jsonl","last_assistant_message":"ok","background_tasks":[]}"#).unwrap();
        assert_eq!(
            (event.moment(), event.session().unwrap().as_str()),
            (Moment::End, "s1")
        );
        assert_eq!(
            event.awaited(),
            Some((Path::new("/r/projects/-w/s1.jsonl"), "ok"))
        );
        let odd = Event::read(
            br#"{"hook_event_name":"Brand new","session_id":7,"transcript_path":null}"#,
        )
        .unwrap();
        assert_eq!(
            (odd.moment(), odd.session(), odd.awaited()),
            (Moment::Other, None, None)
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
            assert_eq!(Event::read(garbage), None, "{garbage:?}");
        }
    }
}
