//! The transcript reader: parses appended transcript bytes into messages and turn events.
//!
//! Owns joining lines that arrive in several parts, and the count of lines that cannot be parsed.
//! Does not own the meaning of a line (the profile). Parsing is best effort and never fails.

use std::collections::BTreeMap;

use serde::de::IgnoredAny;

use super::Profile;
use crate::model::message::{MAX_COST, ParsedSpan, ParsedTranscripts, Tokens, TurnEvent};
use crate::model::{
    Block, FileKind, FileMove, LocatedMessage, Message, Part, RelPath, Role, TranscriptLine,
    TurnBoundary,
};
use crate::sys::lines::one_line;

/// Maximum length of a line that is parsed. It bounds the memory for a partial line.
const MAX_LINE_LEN: u64 = 16 << 20;

/// Maximum length of the first prompt that serves as a title, in bytes.
const MAX_TITLE_LEN: usize = 80;

/// Maximum number of files that the lines of one entry can name. A session has one plan, and one
/// more for each sub-agent that plans.
const MAX_NAMED_FILES: usize = 64;

/// Parses the bytes that are appended to transcripts.
#[derive(Debug, Clone, Default)]
pub struct TranscriptReader {
    partial_lines: BTreeMap<RelPath, PartialLine>,
    /// The model of each transcript whose messages do not have it.
    models: BTreeMap<RelPath, String>,
}

/// The start of a line whose end has not been read yet.
#[derive(Debug, Clone)]
struct PartialLine {
    /// Offset of its first byte.
    start: u64,
    /// Length so far.
    len: u64,
    /// The bytes, unless they are longer than `MAX_LINE_LEN`.
    bytes: Vec<u8>,
}

/// The position of a JSON value in a transcript.
#[derive(Clone, Copy)]
struct ValueRange {
    start: u64,
    len: usize,
    /// Offset after the line, or after the value if the line has several.
    end: u64,
}

impl TranscriptReader {
    /// Applies renames: partial lines continue in the renamed files.
    pub fn move_files(&mut self, moves: &[FileMove]) {
        FileMove::apply_all(moves, &mut self.partial_lines);
        FileMove::apply_all(moves, &mut self.models);
    }

    /// The model of each transcript whose messages do not have it, after the lines read so far.
    pub fn models(&self) -> &BTreeMap<RelPath, String> {
        &self.models
    }

    /// Continues after lines that another reader has read.
    pub fn continue_with(&mut self, models: &BTreeMap<RelPath, String>) {
        self.models.clone_from(models);
    }

    /// Parses the parts of the next entry.
    pub fn read<'a>(
        &mut self,
        profile: &dyn Profile,
        parts: impl Iterator<Item = (&'a Part, &'a [u8])>,
    ) -> ParsedTranscripts {
        let mut parsed = ParsedTranscripts::default();
        for (part, bytes) in parts {
            if part.kind == FileKind::Append && profile.has_messages(&part.path) {
                parsed.is_from_start |= part.start == 0 && profile.is_transcript(&part.path);
                self.read_part(profile, part, bytes, &mut parsed);
            }
        }
        parsed
    }

    fn read_part(
        &mut self,
        profile: &dyn Profile,
        part: &Part,
        bytes: &[u8],
        parsed: &mut ParsedTranscripts,
    ) {
        let PartialLine {
            start,
            len,
            bytes: mut buffer,
        } = self
            .partial_lines
            .remove(&part.path)
            .filter(|partial| partial.start + partial.len == part.start)
            .unwrap_or(PartialLine {
                start: part.start,
                len: 0,
                bytes: Vec::new(),
            });
        if part.start == 0 {
            self.models.remove(&part.path);
        }
        let (mut offset, mut partial_len) = (start, len);
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            let len = partial_len + line.len() as u64;
            let fits = len <= MAX_LINE_LEN && buffer.len() as u64 == partial_len;
            match (line.ends_with(b"\n"), fits) {
                (true, true) if partial_len == 0 => {
                    self.read_line(profile, &part.path, offset, line, parsed);
                }
                (true, true) => {
                    buffer.extend_from_slice(line);
                    self.read_line(profile, &part.path, offset, &buffer, parsed);
                }
                (true, false) => count_unparsed(&part.path, parsed),
                (false, true) => buffer.extend_from_slice(line),
                (false, false) => buffer.clear(),
            }
            if line.ends_with(b"\n") {
                (offset, partial_len) = (offset + len, 0);
                buffer.clear();
            } else {
                partial_len = len;
            }
        }
        let span = ParsedSpan {
            start,
            partial_line_bytes: partial_len,
        };
        parsed.spans.insert(part.path.clone(), span);
        if partial_len > 0 {
            self.partial_lines.insert(
                part.path.clone(),
                PartialLine {
                    start: offset,
                    len: partial_len,
                    bytes: buffer,
                },
            );
        }
    }

    /// Parses one line, which ends with a newline. Some agents write two values on one line; each
    /// is parsed by itself.
    fn read_line(
        &mut self,
        profile: &dyn Profile,
        path: &RelPath,
        offset: u64,
        line: &[u8],
        parsed: &mut ParsedTranscripts,
    ) {
        let text = trim(line);
        if text.is_empty() {
            return;
        }
        let start = offset + line.iter().take_while(|byte| is_blank(byte)).count() as u64;
        if let Some(read) = profile.parse_line(path, text) {
            let range = ValueRange {
                start,
                len: text.len(),
                end: offset + line.len() as u64,
            };
            return self.add_line(profile, path, range, read, parsed);
        }
        let mut values = serde_json::Deserializer::from_slice(text).into_iter::<IgnoredAny>();
        let mut previous_end = 0;
        while let Some(Ok(_)) = values.next() {
            let end = values.byte_offset();
            let value = text[previous_end..end].trim_ascii_start();
            let range = ValueRange {
                start: start + (end - value.len()) as u64,
                len: value.len(),
                end: start + end as u64,
            };
            match profile.parse_line(path, value) {
                Some(read) => self.add_line(profile, path, range, read, parsed),
                None => count_unparsed(path, parsed),
            }
            previous_end = end;
        }
        if !text[previous_end..].trim_ascii().is_empty() {
            count_unparsed(path, parsed);
        }
    }

    fn add_line(
        &mut self,
        profile: &dyn Profile,
        path: &RelPath,
        range: ValueRange,
        line: TranscriptLine,
        parsed: &mut ParsedTranscripts,
    ) {
        let TranscriptLine {
            mut message,
            boundary,
            mut facts,
            named_file,
            next_model,
            is_sub_agent,
            pending_call,
        } = line;
        if parsed.named_files.len() < MAX_NAMED_FILES {
            parsed.named_files.extend(named_file);
        }
        if let Some(model) = next_model {
            self.models.insert(path.clone(), model);
        }
        if profile.is_transcript(path) {
            facts.first_prompt = message.as_ref().and_then(prompt_title);
        }
        parsed.facts = std::mem::take(&mut parsed.facts).updated_with(facts);
        if let Some(message) = &mut message {
            message.tokens = message.tokens.filter(Tokens::is_plausible);
            message.cost = message.cost.filter(|cost| *cost < MAX_COST);
            if message.role == Role::Assistant || message.tokens.is_some() {
                let model = message.model.take();
                message.model = model.or_else(|| self.models.get(path).cloned());
            }
        }
        if profile.is_transcript(path) {
            let mut event = turn_event(path, range.end, boundary, message.as_ref());
            event.calls.extend(pending_call);
            event.is_sub_agent |= is_sub_agent;
            if event.boundary.is_some() || !event.calls.is_empty() || !event.tool_results.is_empty()
            {
                parsed.turn_events.push(event);
            }
        }
        parsed
            .messages
            .extend(message.map(|message| LocatedMessage {
                path: path.clone(),
                start: range.start,
                len: range.len as u64,
                message,
            }));
    }
}

/// A crash can leave zero bytes in a transcript; they count as whitespace.
fn is_blank(byte: &u8) -> bool {
    byte.is_ascii_whitespace() || *byte == 0
}

fn trim(line: &[u8]) -> &[u8] {
    let start = line.iter().position(|byte| !is_blank(byte));
    let last = line.iter().rposition(|byte| !is_blank(byte));
    match start.zip(last) {
        Some((start, last)) => &line[start..=last],
        None => &[],
    }
}

fn count_unparsed(path: &RelPath, parsed: &mut ParsedTranscripts) {
    *parsed.unparsed_lines.entry(path.clone()).or_default() += 1;
}

/// The beginning of a prompt, if the message is one.
fn prompt_title(message: &Message) -> Option<String> {
    let is_prompt =
        message.role == Role::User && message.kind == "text" && message.sub_agent.is_none();
    let title = is_prompt.then(|| one_line(&message.text(), MAX_TITLE_LEN));
    title.filter(|title| !title.is_empty())
}

fn turn_event(
    path: &RelPath,
    end: u64,
    boundary: Option<TurnBoundary>,
    message: Option<&Message>,
) -> TurnEvent {
    let mut event = TurnEvent {
        path: path.clone(),
        end,
        at: message.and_then(|message| message.at),
        message_id: message.and_then(|message| message.message_id.clone()),
        response_id: message.and_then(|message| message.response_id.clone()),
        boundary,
        calls: Vec::new(),
        tool_results: Vec::new(),
        is_sub_agent: message.is_some_and(|message| message.sub_agent.is_some()),
    };
    for block in message.iter().flat_map(|message| &message.blocks) {
        match block {
            Block::ToolCall(call) => event.calls.push(call.clone()),
            Block::ToolResult { call_id, text, .. } => {
                event.tool_results.push((call_id.clone(), text.clone()));
            }
            _ => {}
        }
    }
    event
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::claude_code::ClaudeCode;
    use crate::model::{CheckpointInterval, Digest, TurnTracker};

    const PATH: &str = "projects/-w/s1.jsonl";

    fn part(start: u64, len: usize) -> Part {
        let path = PATH.parse().unwrap();
        Part {
            path,
            kind: FileKind::Append,
            start,
            len: len as u64,
            file_sha256: Digest::of(b""),
            mode: 0,
            mtime_ns: 0,
            seq: None,
            upload: None,
        }
    }

    fn read(reader: &mut TranscriptReader, start: u64, bytes: &[u8]) -> ParsedTranscripts {
        let profile = ClaudeCode::new("claude-code".parse().unwrap());
        reader.read(&profile, [(&part(start, bytes.len()), bytes)].into_iter())
    }

    const TURN: &str = concat!(
        r#"{"type":"user","uuid":"u1","timestamp":"2026-05-01T10:00:00.000Z","cwd":"/w","version":"2.1","message":{"role":"user","content":"do it"}}"#,
        "\n",
        r#"{"type":"assistant","uuid":"a1","parentUuid":"u1","timestamp":"2026-05-01T10:00:01.000Z","message":{"id":"m1","model":"opus","content":[{"type":"tool_use","id":"t1","name":"Bash","input":{"command":"ls"}}],"stop_reason":"tool_use","usage":{"input_tokens":3,"output_tokens":4,"cache_read_input_tokens":5,"cache_creation_input_tokens":6}}}"#,
        "\n",
        r#"{"type":"user","uuid":"r1","parentUuid":"a1","timestamp":"2026-05-01T10:00:02.000Z","message":{"role":"user","content":[{"type":"tool_result","tool_use_id":"t1","content":"a b"}]}}"#,
        "\n",
        r#"{"type":"assistant","uuid":"a2","parentUuid":"r1","timestamp":"2026-05-01T10:00:03.000Z","message":{"id":"m2","model":"opus","content":[{"type":"text","text":"done"}],"stop_reason":"end_turn","usage":{"input_tokens":1,"output_tokens":2}}}"#,
        "\n",
    );

    #[test]
    fn implausible_token_counts_are_unknown() {
        let parsed = |count: &str| {
            read(
                &mut TranscriptReader::default(),
                0,
                TURN.replace("\"input_tokens\":3", &format!("\"input_tokens\":{count}"))
                    .as_bytes(),
            )
        };
        assert!(parsed("3").messages[1].message.tokens.is_some());
        for count in ["9223372036854775808", "9223372036854775807", "1e30"] {
            assert!(
                parsed(count).messages.iter().all(|located| located
                    .message
                    .tokens
                    .is_none_or(|tokens| tokens.input < 10)),
                "{count}"
            );
        }
    }

    #[test]
    fn parsing_does_not_depend_on_where_the_bytes_are_split() {
        let whole = read(&mut TranscriptReader::default(), 0, TURN.as_bytes());
        assert_eq!(
            whole
                .messages
                .iter()
                .map(|located| located.message.role)
                .collect::<Vec<_>>(),
            [Role::User, Role::Assistant, Role::Tool, Role::Assistant]
        );
        let located = &whole.messages[2];
        assert_eq!(
            &TURN[located.start as usize..][..located.len as usize],
            TURN.lines().nth(2).unwrap()
        );
        for split in 0..TURN.len() {
            let mut reader = TranscriptReader::default();
            let first = read(&mut reader, 0, &TURN.as_bytes()[..split]);
            let second = read(&mut reader, split as u64, &TURN.as_bytes()[split..]);
            let span = second.spans[&PATH.parse().unwrap()];
            assert_eq!(
                span.start + first.spans.values().next().unwrap().partial_line_bytes,
                split as u64,
                "split at {split}"
            );
            let both: Vec<LocatedMessage> =
                first.messages.into_iter().chain(second.messages).collect();
            assert_eq!(both, whole.messages, "split at {split}");
        }
    }

    #[test]
    fn unparsable_lines_are_counted_and_their_neighbors_are_parsed() {
        let piece = b"\xff\xfe\n\0\0{\"type\":\"user\",\"cwd\":\"/w\"}\n}{\n\n{\"type\":\"user\"}{\"type\":\"user\",\"cwd\":7}\n[1]\n";
        let parsed = read(&mut TranscriptReader::default(), 0, piece);
        assert_eq!(
            (
                parsed.messages.len(),
                parsed.unparsed_lines[&PATH.parse().unwrap()]
            ),
            (3, 3)
        );
        assert_eq!(parsed.facts.cwd.as_deref(), Some("/w"));
        assert_eq!(parsed.facts.project.as_deref(), Some("-w"));
    }

    #[test]
    fn an_endless_line_uses_bounded_memory_and_the_next_line_is_parsed() {
        let mut reader = TranscriptReader::default();
        let (mut at, huge) = (0, vec![b'x'; 9 << 20]);
        for _ in 0..3 {
            read(&mut reader, at, &huge);
            at += huge.len() as u64;
            assert!(
                reader
                    .partial_lines
                    .values()
                    .all(|partial| partial.bytes.len() as u64 <= MAX_LINE_LEN)
            );
        }
        let parsed = read(&mut reader, at, format!("\n{TURN}").as_bytes());
        assert_eq!(
            (
                parsed.messages.len(),
                parsed.unparsed_lines.values().sum::<u64>()
            ),
            (4, 1)
        );
        assert_eq!(parsed.spans.values().next().unwrap().start, 0);
    }

    #[test]
    fn a_complete_turn_has_a_checkpoint_after_those_of_its_steps() {
        let parsed = read(&mut TranscriptReader::default(), 0, TURN.as_bytes());
        let mut turns = TurnTracker::default();
        let lengths = [(PATH.parse().unwrap(), 9000)].into();
        let made = turns.apply(&parsed.turn_events, &lengths, CheckpointInterval::default());
        assert_eq!(made.len(), 2);
        assert_eq!((made[0].number, made[0].stop_reason.as_deref()), (1, None));
        let point = &made[1];
        assert_eq!(
            (
                point.number,
                point.turn,
                point.parent,
                point.stop_reason.as_deref()
            ),
            (2, 1, Some(1), Some("end_turn"))
        );
        assert_eq!(
            point.transcript_lengths[&PATH.parse().unwrap()],
            TURN.len() as u64
        );
        assert!(point.pending_calls.is_empty());
        // The file was rewritten with the same content.
        assert_eq!(
            turns.apply(&parsed.turn_events, &lengths, CheckpointInterval::default()),
            []
        );
        // The agent was killed while the tool ran.
        let mut turns = TurnTracker::default();
        turns.apply(
            &parsed.turn_events[..2],
            &lengths,
            CheckpointInterval::default(),
        );
        assert_eq!(
            turns
                .pending_calls
                .iter()
                .map(|call| call.name.as_str())
                .collect::<Vec<_>>(),
            ["Bash"]
        );
    }
}
