//! A conversation as text: for a terminal, or as Markdown. Pure.
//!
//! Nothing that was said can play tricks on a terminal: control characters are replaced, and only our own colours are left.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;

use super::display::{DisplayBlock, DisplayMessage};
use crate::model::Role;

/// What is shown of a call's input on one line, in characters.
const LINE: usize = 80;

/// How a conversation looks.
#[derive(Debug, Clone, Copy, Default)]
pub struct Style {
    /// With colours.
    pub colour: bool,
    /// As Markdown.
    pub markdown: bool,
    /// All of it: thoughts, inputs, answers, attachments.
    pub full: bool,
}

/// A conversation that is being shown.
#[derive(Debug)]
pub struct Renderer {
    style: Style,
    answers: HashMap<String, (bool, usize)>,
    calls: HashSet<String>,
    last: Option<Speaker>,
}

/// Who spoke last: another begins with a heading.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Speaker {
    role: Role,
    depth: usize,
    sub_agent: Option<String>,
    kind: Option<String>,
}

impl Renderer {
    /// Nothing shown yet. `answers` is what tools answered, as far as it is known: a call shows it, and the answer is not shown
    /// again.
    pub fn new(style: Style, answers: HashMap<String, (bool, usize)>) -> Renderer {
        Renderer {
            style,
            answers,
            calls: HashSet::new(),
            last: None,
        }
    }

    /// The next message; empty if there is nothing to show of it.
    pub fn message(&mut self, spoken: &DisplayMessage, depth: usize) -> String {
        self.calls.extend(spoken.calls().map(str::to_owned));
        let bits: Vec<String> = spoken
            .bits
            .iter()
            .filter_map(|bit| self.bit(spoken, bit))
            .collect();
        if bits.is_empty() && !self.style.full {
            return String::new();
        }
        // The agent's words, its calls and what they answer are one to who reads.
        let role = if spoken.role == Role::Tool {
            Role::Assistant
        } else {
            spoken.role
        };
        let odd = !matches!(
            spoken.kind.as_str(),
            "text" | "thinking" | "tool_use" | "tool_result"
        );
        let speaker = Speaker {
            role,
            depth,
            sub_agent: spoken.sub_agent.clone(),
            kind: odd.then(|| spoken.kind.clone()),
        };
        let mut lines = String::new();
        if self.last.as_ref() != Some(&speaker) {
            // In Markdown every block ends with an empty line already; only a quotation has to be left.
            if self
                .last
                .as_ref()
                .is_some_and(|last| !self.style.markdown || last.depth > depth)
            {
                lines.push('\n');
            }
            lines.push_str(&self.heading(spoken, &speaker));
            self.last = Some(speaker);
        }
        for bit in bits {
            lines.push_str(&bit);
        }
        self.indent(&lines, depth)
    }

    fn heading(&self, spoken: &DisplayMessage, speaker: &Speaker) -> String {
        let mut about = Vec::new();
        about.extend(speaker.kind.as_deref().map(line));
        about.extend(
            spoken
                .sub_agent
                .as_deref()
                .map(|name| format!("sub-agent {}", line(name))),
        );
        about.extend(
            spoken
                .at
                .map(|at| at.strftime("%Y-%m-%d %H:%M:%S").to_string()),
        );
        about.extend(spoken.model.as_deref().map(line));
        let (role, about) = (speaker.role.word(), about.join(" · "));
        if self.style.markdown {
            return format!("### {role} · {about}\n\n").replace(" · \n", "\n");
        }
        let colour = match speaker.role {
            Role::User => "\x1b[1;32m",
            Role::Assistant => "\x1b[1;36m",
            Role::System | Role::Tool => "\x1b[1;35m",
        };
        format!(
            "{}  {}\n",
            self.paint(colour, role),
            self.paint("\x1b[2m", &about)
        )
    }

    fn bit(&self, spoken: &DisplayMessage, bit: &DisplayBlock) -> Option<String> {
        match bit {
            DisplayBlock::Text(text) if spoken.role == Role::System && !self.style.full => {
                let first = text
                    .lines()
                    .find(|line| !line.trim().is_empty())
                    .unwrap_or_default();
                let rest = text.trim().len() > first.trim().len();
                Some(self.note(&format!(
                    "{}{}",
                    short(first).trim_end_matches('…'),
                    if rest { " …" } else { "" }
                )))
            }
            DisplayBlock::Text(text) => Some(self.text(text)),
            DisplayBlock::Thought(text) => Some(self.quoted("thought", text)),
            DisplayBlock::ToolCall {
                id, name, input, ..
            } => Some(self.call(id, name, input)),
            // Shown with its call.
            DisplayBlock::Answer { id, .. }
                if !self.style.full && self.calls.contains(id) && self.answers.contains_key(id) =>
            {
                None
            }
            DisplayBlock::Answer {
                text,
                bytes,
                failed,
                ..
            } if self.style.full => Some(self.quoted(&verdict(*failed, *bytes), text)),
            DisplayBlock::Answer { bytes, failed, .. } => {
                Some(self.note(&format!("⎿ {}", verdict(*failed, *bytes))))
            }
            DisplayBlock::Other(kind) => Some(self.note(&format!("[{}]", line(kind)))),
        }
    }

    fn call(&self, id: &str, name: &str, input: &str) -> String {
        let answer = self
            .answers
            .get(id)
            .map(|(failed, bytes)| verdict(*failed, *bytes));
        let failed = self.answers.get(id).is_some_and(|(failed, _)| *failed);
        let name = line(name);
        if self.style.full {
            return self.quoted(&format!("▸ {name}"), &pretty(input));
        }
        let input = short(input);
        if self.style.markdown {
            let input = if input.is_empty() {
                input
            } else {
                format!(" {}", code(&input))
            };
            return format!(
                "- **{name}**{input}{}\n",
                answer
                    .map(|answer| format!(" — {answer}"))
                    .unwrap_or_default()
            ) + "\n";
        }
        let answer = answer.map(|answer| {
            format!(
                "  {}",
                self.paint(if failed { "\x1b[31m" } else { "\x1b[2m" }, &answer)
            )
        });
        format!(
            "  ▸ {} {input}{}\n",
            self.paint("\x1b[1m", &name),
            answer.unwrap_or_default()
        )
    }

    fn text(&self, text: &str) -> String {
        let text = clean(text);
        let mut lines: String = text
            .trim_matches('\n')
            .lines()
            .map(|line| self.indented(line))
            .collect();
        if self.style.markdown {
            lines.push('\n');
        }
        lines
    }

    /// A line of ours.
    fn note(&self, text: &str) -> String {
        if self.style.markdown {
            format!("*{text}*\n\n")
        } else {
            format!("  {}\n", self.paint("\x1b[2m", text))
        }
    }

    /// Text of another kind, under a word for it.
    fn quoted(&self, what: &str, text: &str) -> String {
        let text = clean(text);
        let text = text.trim_matches('\n');
        if self.style.markdown {
            let fence = "`".repeat(longest_run(text, '`').max(2) + 1);
            return format!("*{what}*\n\n{fence}\n{text}\n{fence}\n\n");
        }
        let mut lines = format!("  {}\n", self.paint("\x1b[2m", what));
        for line in text.lines() {
            let _ = writeln!(lines, "    {}", self.paint("\x1b[2m", line));
        }
        lines
    }

    fn indented(&self, line: &str) -> String {
        match (self.style.markdown, line.is_empty()) {
            (true, _) => format!("{line}\n"),
            (false, true) => "\n".to_owned(),
            (false, false) => format!("  {line}\n"),
        }
    }

    /// Sub-agents stand below who started them.
    fn indent(&self, lines: &str, depth: usize) -> String {
        if depth == 0 {
            return lines.to_owned();
        }
        let before = if self.style.markdown {
            "> ".repeat(depth)
        } else {
            "    ".repeat(depth)
        };
        let indent = |line: &str| {
            if line.is_empty() {
                format!("{}\n", before.trim_end())
            } else {
                format!("{before}{line}\n")
            }
        };
        lines.lines().map(indent).collect()
    }

    fn paint(&self, colour: &str, text: &str) -> String {
        if self.style.colour && !text.is_empty() {
            format!("{colour}{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }
}

fn verdict(failed: bool, bytes: usize) -> String {
    let size = match bytes {
        0..1000 => format!("{bytes} B"),
        1000..1_000_000 => format!("{:.1} KB", bytes as f64 / 1e3),
        _ => format!("{:.1} MB", bytes as f64 / 1e6),
    };
    format!("{}, {size}", if failed { "failed" } else { "ok" })
}

/// Text without control characters but the ends of lines.
pub fn clean(text: &str) -> String {
    let mut cleaned = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '\n' => cleaned.push('\n'),
            '\t' => cleaned.push_str("    "),
            '\r' => {}
            letter if letter.is_control() => cleaned.push('\u{fffd}'),
            letter => cleaned.push(letter),
        }
    }
    cleaned
}

/// Text on one line.
fn line(text: &str) -> String {
    clean(text).split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The beginning of a text, on one line.
fn short(text: &str) -> String {
    let text = line(text);
    match text.char_indices().nth(LINE) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

/// JSON with a line for each field; anything else as it is.
fn pretty(input: &str) -> String {
    let value: Option<serde_json::Value> = serde_json::from_str(input).ok();
    value
        .and_then(|value| serde_json::to_string_pretty(&value).ok())
        .unwrap_or_else(|| input.to_owned())
}

/// A span of code in Markdown, whatever is in it.
fn code(text: &str) -> String {
    let fence = "`".repeat(longest_run(text, '`') + 1);
    let blank = if text.starts_with('`') || text.ends_with('`') {
        " "
    } else {
        ""
    };
    format!("{fence}{blank}{text}{blank}{fence}")
}

fn longest_run(text: &str, letter: char) -> usize {
    text.split(|other| other != letter)
        .map(str::len)
        .max()
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(role: Role, kind: &str, bits: Vec<DisplayBlock>) -> DisplayMessage {
        DisplayMessage {
            uuid: None,
            position: 0,
            role,
            kind: kind.into(),
            at: Some("2026-05-01T12:00:00Z".parse().unwrap()),
            model: None,
            sub_agent: None,
            name: 0,
            prompt: None,
            bits,
        }
    }

    #[test]
    fn nothing_that_was_said_plays_tricks_on_a_terminal() {
        let evil = "a\x1b[31mb\r\n\tc\u{9b}2J\u{7}";
        let bits = vec![
            DisplayBlock::Text(evil.into()),
            DisplayBlock::Thought(evil.into()),
            DisplayBlock::ToolCall {
                id: "1".into(),
                name: evil.into(),
                input: evil.into(),
                prompt: None,
            },
            DisplayBlock::Answer {
                id: "2".into(),
                text: evil.into(),
                bytes: 3,
                failed: true,
            },
            DisplayBlock::Other(evil.into()),
        ];
        let mut message = said(Role::Assistant, evil, bits);
        (message.model, message.sub_agent) = (Some(evil.into()), Some(evil.into()));
        for (markdown, full) in [(false, false), (false, true), (true, false), (true, true)] {
            let shown = Renderer::new(
                Style {
                    colour: false,
                    markdown,
                    full,
                },
                HashMap::new(),
            )
            .message(&message, 1);
            assert!(
                shown
                    .chars()
                    .all(|letter| letter == '\n' || !letter.is_control()),
                "{shown:?}"
            );
            assert!(shown.contains("a\u{fffd}[31mb\n"), "{shown}");
        }
    }

    #[test]
    fn code_stays_code_whatever_is_in_it() {
        assert_eq!(
            (code("a"), code("a`b"), code("`a")),
            ("`a`".into(), "``a`b``".into(), "`` `a ``".into())
        );
        let bits = vec![DisplayBlock::Answer {
            id: "1".into(),
            text: "```\nx\n````".into(),
            bytes: 9,
            failed: false,
        }];
        let shown = Renderer::new(
            Style {
                full: true,
                markdown: true,
                colour: false,
            },
            HashMap::new(),
        )
        .message(&said(Role::Tool, "tool_result", bits), 0);
        assert!(shown.contains("\n`````\n```\nx\n````\n`````\n"), "{shown}");
    }

    #[test]
    fn a_call_shows_its_answer_once_and_an_answer_without_its_call_is_shown() {
        let call = said(
            Role::Assistant,
            "tool_use",
            vec![DisplayBlock::ToolCall {
                id: "1".into(),
                name: "Bash".into(),
                input: "ls\n-l".into(),
                prompt: None,
            }],
        );
        let answer = said(
            Role::Tool,
            "tool_result",
            vec![DisplayBlock::Answer {
                id: "1".into(),
                text: "x".into(),
                bytes: 1234,
                failed: true,
            }],
        );
        let mut look = Renderer::new(
            Style::default(),
            HashMap::from([("1".to_owned(), (true, 1234))]),
        );
        assert_eq!(
            look.message(&call, 0),
            "assistant  2026-05-01 12:00:00\n  ▸ Bash ls -l  failed, 1.2 KB\n"
        );
        assert_eq!(look.message(&answer, 0), "");
        let mut look = Renderer::new(Style::default(), HashMap::new());
        assert!(look.message(&answer, 0).ends_with("  ⎿ failed, 1.2 KB\n"));
        assert_eq!(look.message(&call, 0), "  ▸ Bash ls -l\n");
    }
}
