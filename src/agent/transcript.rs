//! Reads transcripts piece by piece: which messages they hold, where they stand, where a turn is complete.
//!
//! Owns putting lines together that came in pieces, and counting what cannot be read. Does not own what a line means
//! (the profile). Best effort: nothing here fails.

use std::collections::BTreeMap;

use serde::de::IgnoredAny;

use super::Profile;
use crate::model::message::{MOST_COST, ParsedTranscripts, Span, Tokens, TurnEvent};
use crate::model::{Block, FileKind, FileMove, LocatedMessage, Part, RelPath, TranscriptLine};

/// A longer line is not read: bounds what an unfinished one costs.
const LONGEST_LINE: u64 = 16 << 20;

/// Reads what is appended to transcripts.
#[derive(Debug, Clone, Default)]
pub struct Reader {
    tails: BTreeMap<RelPath, Tail>,
}

/// A line that was not finished yet.
#[derive(Debug, Clone)]
struct Tail {
    /// Where it begins.
    from: u64,
    /// Its bytes so far.
    len: u64,
    /// The bytes, unless they are too many.
    bytes: Vec<u8>,
}

impl Reader {
    /// Files have other paths from here on: lines that are not finished go on there.
    pub fn moved(&mut self, moves: &[FileMove]) {
        for moved in moves {
            if let Some(tail) = self.tails.remove(&moved.from) {
                self.tails.insert(moved.to.clone(), tail);
            }
        }
    }

    /// Reads the parts of one entry, which follow those that were read before.
    pub fn read<'a>(
        &mut self,
        profile: &dyn Profile,
        parts: impl Iterator<Item = (&'a Part, &'a [u8])>,
    ) -> ParsedTranscripts {
        let mut told = ParsedTranscripts::default();
        for (part, bytes) in parts {
            if part.kind == FileKind::Append && profile.is_conversation(&part.path) {
                self.read_part(profile, part, bytes, &mut told);
            }
        }
        told
    }

    fn read_part(
        &mut self,
        profile: &dyn Profile,
        part: &Part,
        bytes: &[u8],
        told: &mut ParsedTranscripts,
    ) {
        let tail = self
            .tails
            .remove(&part.path)
            .filter(|tail| tail.from + tail.len == part.start);
        let Tail {
            from,
            len,
            bytes: mut open,
        } = tail.unwrap_or(Tail {
            from: part.start,
            len: 0,
            bytes: Vec::new(),
        });
        let (mut at, mut before) = (from, len);
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            let len = before + line.len() as u64;
            let fits = len <= LONGEST_LINE && open.len() as u64 == before;
            match (line.ends_with(b"\n"), fits) {
                (true, true) if before == 0 => read_line(profile, &part.path, at, line, told),
                (true, true) => {
                    open.extend_from_slice(line);
                    read_line(profile, &part.path, at, &open, told);
                }
                (true, false) => unread(&part.path, told),
                (false, true) => open.extend_from_slice(line),
                (false, false) => open.clear(),
            }
            if line.ends_with(b"\n") {
                (at, before) = (at + len, 0);
                open.clear();
            } else {
                before = len;
            }
        }
        told.read
            .insert(part.path.clone(), Span { from, open: before });
        if before > 0 {
            self.tails.insert(
                part.path.clone(),
                Tail {
                    from: at,
                    len: before,
                    bytes: open,
                },
            );
        }
    }
}

/// Reads one line, which ends with a newline. Two values on a line happen: each is read by itself.
fn read_line(
    profile: &dyn Profile,
    path: &RelPath,
    at: u64,
    line: &[u8],
    told: &mut ParsedTranscripts,
) {
    let blank = |byte: &u8| byte.is_ascii_whitespace() || *byte == 0;
    let skipped = line.iter().take_while(|byte| blank(byte)).count();
    let text = &line[skipped
        ..line.len()
            - line
                .iter()
                .rev()
                .take_while(|byte| blank(byte))
                .count()
                .min(line.len() - skipped)];
    if text.is_empty() {
        return;
    }
    let (at, end) = (at + skipped as u64, at + line.len() as u64);
    if let Some(read) = profile.line(path, text) {
        return take(profile, path, (at, text.len(), end), read, told);
    }
    let mut values = serde_json::Deserializer::from_slice(text).into_iter::<IgnoredAny>();
    let mut from = 0;
    while let Some(Ok(_)) = values.next() {
        let to = values.byte_offset();
        let value = text[from..to].trim_ascii_start();
        match profile.line(path, value) {
            Some(read) => take(
                profile,
                path,
                (at + (to - value.len()) as u64, value.len(), at + to as u64),
                read,
                told,
            ),
            None => unread(path, told),
        }
        from = to;
    }
    if !text[from..].trim_ascii().is_empty() {
        unread(path, told);
    }
}

fn unread(path: &RelPath, told: &mut ParsedTranscripts) {
    *told.unread.entry(path.clone()).or_default() += 1;
}

fn take(
    profile: &dyn Profile,
    path: &RelPath,
    (start, len, end): (u64, usize, u64),
    line: TranscriptLine,
    told: &mut ParsedTranscripts,
) {
    told.facts = std::mem::take(&mut told.facts).then(line.facts);
    let TranscriptLine {
        mut message, mark, ..
    } = line;
    if let Some(message) = &mut message {
        message.tokens = message.tokens.filter(Tokens::is_plausible);
        message.cost = message.cost.filter(|cost| *cost < MOST_COST);
    }
    if profile.is_transcript(path) {
        let mut marked = TurnEvent {
            path: path.clone(),
            end,
            at: None,
            uuid: None,
            answer: None,
            mark,
            calls: Vec::new(),
            answers: Vec::new(),
        };
        if let Some(message) = &message {
            (marked.at, marked.uuid, marked.answer) =
                (message.at, message.uuid.clone(), message.answer.clone());
            for block in &message.blocks {
                match block {
                    Block::ToolCall(call) => marked.calls.push(call.clone()),
                    Block::Answer { id, text, .. } => {
                        marked.answers.push((id.clone(), text.clone()))
                    }
                    _ => {}
                }
            }
        }
        if marked.mark.is_some() || !marked.calls.is_empty() || !marked.answers.is_empty() {
            told.marks.push(marked);
        }
    }
    told.said.extend(message.map(|message| LocatedMessage {
        path: path.clone(),
        start,
        len: len as u64,
        message,
    }));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::claude_code::ClaudeCode;
    use crate::model::{Digest, Role, TurnTracker};

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
        }
    }

    fn read(reader: &mut Reader, start: u64, bytes: &[u8]) -> ParsedTranscripts {
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
    fn numbers_that_cannot_be_are_unknown() {
        let told = |count: &str| {
            read(
                &mut Reader::default(),
                0,
                TURN.replace("\"input_tokens\":3", &format!("\"input_tokens\":{count}"))
                    .as_bytes(),
            )
        };
        assert!(told("3").said[1].message.tokens.is_some());
        for count in ["9223372036854775808", "9223372036854775807", "1e30"] {
            assert!(
                told(count)
                    .said
                    .iter()
                    .all(|said| said.message.tokens.is_none_or(|tokens| tokens.input < 10)),
                "{count}"
            );
        }
    }

    #[test]
    fn the_same_is_said_however_it_is_cut() {
        let whole = read(&mut Reader::default(), 0, TURN.as_bytes());
        assert_eq!(
            whole
                .said
                .iter()
                .map(|said| said.message.role)
                .collect::<Vec<_>>(),
            [Role::User, Role::Assistant, Role::Tool, Role::Assistant]
        );
        let said = &whole.said[2];
        assert_eq!(
            &TURN[said.start as usize..][..said.len as usize],
            TURN.lines().nth(2).unwrap()
        );
        for cut in 0..TURN.len() {
            let mut reader = Reader::default();
            let first = read(&mut reader, 0, &TURN.as_bytes()[..cut]);
            let second = read(&mut reader, cut as u64, &TURN.as_bytes()[cut..]);
            let span = second.read[&PATH.parse().unwrap()];
            assert_eq!(
                span.from + first.read.values().next().unwrap().open,
                cut as u64,
                "cut at {cut}"
            );
            let both: Vec<LocatedMessage> = first.said.into_iter().chain(second.said).collect();
            assert_eq!(both, whole.said, "cut at {cut}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_counted_and_what_is_beside_it_is_read() {
        let piece = b"\xff\xfe\n\0\0{\"type\":\"user\",\"cwd\":\"/w\"}\n}{\n\n{\"type\":\"user\"}{\"type\":\"user\",\"cwd\":7}\n[1]\n";
        let told = read(&mut Reader::default(), 0, piece);
        assert_eq!(
            (told.said.len(), told.unread[&PATH.parse().unwrap()]),
            (3, 3)
        );
        assert_eq!(told.facts.cwd.as_deref(), Some("/w"));
        assert_eq!(told.facts.project.as_deref(), Some("-w"));
    }

    #[test]
    fn a_line_without_end_costs_no_memory_and_the_next_is_read() {
        let mut reader = Reader::default();
        let (mut at, huge) = (0, vec![b'x'; 9 << 20]);
        for _ in 0..3 {
            read(&mut reader, at, &huge);
            at += huge.len() as u64;
            assert!(
                reader
                    .tails
                    .values()
                    .all(|tail| tail.bytes.len() as u64 <= LONGEST_LINE)
            );
        }
        let told = read(&mut reader, at, format!("\n{TURN}").as_bytes());
        assert_eq!((told.said.len(), told.unread.values().sum::<u64>()), (4, 1));
        assert_eq!(told.read.values().next().unwrap().from, 0);
    }

    #[test]
    fn a_turn_that_is_complete_is_a_checkpoint_once() {
        let told = read(&mut Reader::default(), 0, TURN.as_bytes());
        let mut turns = TurnTracker::default();
        let lengths = [(PATH.parse().unwrap(), 9000)].into();
        let made = turns.take(&told.marks, &lengths);
        assert_eq!(made.len(), 1);
        let point = &made[0];
        assert_eq!(
            (
                point.number,
                point.turn,
                point.parent,
                point.stop.as_deref()
            ),
            (1, 1, None, Some("end_turn"))
        );
        assert_eq!(point.files[&PATH.parse().unwrap()], TURN.len() as u64);
        assert!(point.pending.is_empty());
        // The file was written anew.
        assert_eq!(turns.take(&told.marks, &lengths), []);
        // Killed while the tool ran.
        let mut turns = TurnTracker::default();
        turns.take(&told.marks[..2], &lengths);
        assert_eq!(
            turns
                .pending
                .iter()
                .map(|call| call.name.as_str())
                .collect::<Vec<_>>(),
            ["Bash"]
        );
    }
}
