//! Renders a conversation for a terminal or as Markdown. Pure.
//!
//! Control characters in messages are replaced, so that a message cannot manipulate the terminal.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;

use super::conversation::ToolOutcome;
use super::display::{DisplayBlock, DisplayMessage};
use crate::model::Role;
use crate::sys::terminal::is_unsafe;

/// Maximum length of a call's input on one line, in characters.
const MAX_LINE_LEN: usize = 80;

/// How a conversation is rendered.
#[derive(Debug, Clone, Copy, Default)]
pub struct Style {
    /// With colors.
    pub color: bool,
    /// As Markdown.
    pub markdown: bool,
    /// With thinking, complete tool inputs and results, and attachments.
    pub verbose: bool,
}

/// Renders the messages of one conversation.
#[derive(Debug)]
pub struct Renderer {
    style: Style,
    outcomes: HashMap<String, ToolOutcome>,
    /// The calls that were rendered.
    calls: HashSet<String>,
    previous: Option<Author>,
}

/// The author of a message. A change of author begins with a heading.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Author {
    role: Role,
    depth: usize,
    sub_agent: Option<String>,
    kind: Option<String>,
}

impl Renderer {
    /// A renderer. `outcomes` are the known outcomes of tool calls: they are rendered with the
    /// call, and the result is then left out.
    pub fn new(style: Style, outcomes: HashMap<String, ToolOutcome>) -> Renderer {
        Renderer {
            style,
            outcomes,
            calls: HashSet::new(),
            previous: None,
        }
    }

    /// Renders the next message. Returns an empty string if nothing of it is shown.
    pub fn message(&mut self, message: &DisplayMessage, depth: usize) -> String {
        self.calls.extend(message.calls().map(str::to_owned));
        let blocks: Vec<String> = message
            .blocks
            .iter()
            .filter_map(|block| self.block(message, block))
            .collect();
        if blocks.is_empty() && !self.style.verbose {
            return String::new();
        }
        // The agent's text, its calls and their results belong under one heading.
        let role = if message.role == Role::Tool {
            Role::Assistant
        } else {
            message.role
        };
        let is_special = !matches!(
            message.kind.as_str(),
            "text" | "thinking" | "tool_use" | "tool_result"
        );
        let author = Author {
            role,
            depth,
            sub_agent: message.sub_agent.clone(),
            kind: is_special.then(|| message.kind.clone()),
        };
        let mut lines = String::new();
        if self.previous.as_ref() != Some(&author) {
            // In Markdown every block ends with an empty line. Only the end of a quotation needs
            // one.
            if self
                .previous
                .as_ref()
                .is_some_and(|previous| !self.style.markdown || previous.depth > depth)
            {
                lines.push('\n');
            }
            lines.push_str(&self.heading(message, &author));
            self.previous = Some(author);
        }
        for block in blocks {
            lines.push_str(&block);
        }
        self.indent(&lines, depth)
    }

    fn heading(&self, message: &DisplayMessage, author: &Author) -> String {
        let mut details = Vec::new();
        details.extend(author.kind.as_deref().map(line));
        details.extend(
            message
                .sub_agent
                .as_deref()
                .map(|name| format!("sub-agent {}", line(name))),
        );
        details.extend(
            message
                .at
                .map(|at| at.strftime("%Y-%m-%d %H:%M:%S UTC").to_string()),
        );
        details.extend(message.model.as_deref().map(line));
        let (role, details) = (author.role.as_str(), details.join(" · "));
        if self.style.markdown {
            return format!("### {role} · {details}\n\n").replace(" · \n", "\n");
        }
        let color = match author.role {
            Role::User => "\x1b[1;32m",
            Role::Assistant => "\x1b[1;36m",
            Role::System | Role::Tool => "\x1b[1;35m",
        };
        format!(
            "{}  {}\n",
            self.paint(color, role),
            self.paint("\x1b[2m", &details)
        )
    }

    fn block(&self, message: &DisplayMessage, block: &DisplayBlock) -> Option<String> {
        match block {
            DisplayBlock::Text(text) if message.role == Role::System && !self.style.verbose => {
                let first = text
                    .lines()
                    .find(|line| !line.trim().is_empty())
                    .unwrap_or_default();
                let has_more = text.trim().len() > first.trim().len();
                Some(self.note(&format!(
                    "{}{}",
                    short(first).trim_end_matches('…'),
                    if has_more { " …" } else { "" }
                )))
            }
            DisplayBlock::Text(text) => Some(self.text(text)),
            DisplayBlock::Thinking(text) => Some(self.quoted("thinking", text)),
            DisplayBlock::ToolCall {
                id, name, input, ..
            } => Some(self.call(id, name, input)),
            // Rendered with its call.
            DisplayBlock::ToolResult { call_id, .. }
                if !self.style.verbose
                    && self.calls.contains(call_id)
                    && self.outcomes.contains_key(call_id) =>
            {
                None
            }
            DisplayBlock::ToolResult {
                text,
                bytes,
                is_error,
                ..
            } if self.style.verbose => {
                Some(self.quoted(&describe_outcome(*is_error, *bytes), text))
            }
            DisplayBlock::ToolResult {
                bytes, is_error, ..
            } => Some(self.note(&format!("⎿ {}", describe_outcome(*is_error, *bytes)))),
            DisplayBlock::Other(kind) => Some(self.note(&format!("[{}]", line(kind)))),
        }
    }

    fn call(&self, id: &str, name: &str, input: &str) -> String {
        let known = self.outcomes.get(id);
        let result = known.map(|known| describe_outcome(known.is_error, known.bytes));
        let failed = known.is_some_and(|known| known.is_error);
        let name = line(name);
        if self.style.verbose {
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
                result
                    .map(|result| format!(" — {result}"))
                    .unwrap_or_default()
            ) + "\n";
        }
        let result = result.map(|result| {
            format!(
                "  {}",
                self.paint(if failed { "\x1b[31m" } else { "\x1b[2m" }, &result)
            )
        });
        format!(
            "  ▸ {} {input}{}\n",
            self.paint("\x1b[1m", &name),
            result.unwrap_or_default()
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

    /// A line that is not part of the message's text.
    fn note(&self, text: &str) -> String {
        if self.style.markdown {
            format!("*{text}*\n\n")
        } else {
            format!("  {}\n", self.paint("\x1b[2m", text))
        }
    }

    /// A block of text under a title.
    fn quoted(&self, title: &str, text: &str) -> String {
        let text = clean(text);
        let text = text.trim_matches('\n');
        if self.style.markdown {
            let fence = "`".repeat(longest_run(text, '`').max(2) + 1);
            return format!("*{title}*\n\n{fence}\n{text}\n{fence}\n\n");
        }
        let mut lines = format!("  {}\n", self.paint("\x1b[2m", title));
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

    /// Indents the messages of sub-agents.
    fn indent(&self, lines: &str, depth: usize) -> String {
        if depth == 0 {
            return lines.to_owned();
        }
        let prefix = if self.style.markdown {
            "> ".repeat(depth)
        } else {
            "    ".repeat(depth)
        };
        let indent = |line: &str| {
            if line.is_empty() {
                format!("{}\n", prefix.trim_end())
            } else {
                format!("{prefix}{line}\n")
            }
        };
        lines.lines().map(indent).collect()
    }

    fn paint(&self, color: &str, text: &str) -> String {
        if self.style.color && !text.is_empty() {
            format!("{color}{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }
}

fn describe_outcome(is_error: bool, bytes: usize) -> String {
    let size = match bytes {
        0..1000 => format!("{bytes} B"),
        1000..1_000_000 => format!("{:.1} KB", bytes as f64 / 1e3),
        _ => format!("{:.1} MB", bytes as f64 / 1e6),
    };
    format!("{}, {size}", if is_error { "failed" } else { "ok" })
}

/// Replaces all unsafe characters but newlines.
pub fn clean(text: &str) -> String {
    let mut cleaned = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '\n' => cleaned.push('\n'),
            '\t' => cleaned.push_str("    "),
            '\r' => {}
            letter if is_unsafe(letter) => cleaned.push('\u{fffd}'),
            letter => cleaned.push(letter),
        }
    }
    cleaned
}

/// The text on one line.
fn line(text: &str) -> String {
    clean(text).split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The beginning of the text, on one line.
fn short(text: &str) -> String {
    let text = line(text);
    match text.char_indices().nth(MAX_LINE_LEN) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

/// Indented JSON; any other text unchanged.
fn pretty(input: &str) -> String {
    let value: Option<serde_json::Value> = serde_json::from_str(input).ok();
    value
        .and_then(|value| serde_json::to_string_pretty(&value).ok())
        .unwrap_or_else(|| input.to_owned())
}

/// A code span in Markdown.
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

    fn message(role: Role, kind: &str, blocks: Vec<DisplayBlock>) -> DisplayMessage {
        DisplayMessage {
            message_id: None,
            position: 0,
            role,
            kind: kind.into(),
            at: Some("2026-05-01T12:00:00Z".parse().unwrap()),
            model: None,
            sub_agent: None,
            key: 0,
            prompt_hash: None,
            blocks,
        }
    }

    #[test]
    fn messages_cannot_send_control_sequences_to_the_terminal() {
        let evil = "a\x1b[31mb\r\n\tc\u{9b}2J\u{7}";
        let blocks = vec![
            DisplayBlock::Text(evil.into()),
            DisplayBlock::Thinking(evil.into()),
            DisplayBlock::ToolCall {
                id: "1".into(),
                name: evil.into(),
                input: evil.into(),
                prompt_hash: None,
            },
            DisplayBlock::ToolResult {
                call_id: "2".into(),
                text: evil.into(),
                bytes: 3,
                is_error: true,
            },
            DisplayBlock::Other(evil.into()),
        ];
        let mut message = message(Role::Assistant, evil, blocks);
        (message.model, message.sub_agent) = (Some(evil.into()), Some(evil.into()));
        for (markdown, verbose) in [(false, false), (false, true), (true, false), (true, true)] {
            let shown = Renderer::new(
                Style {
                    color: false,
                    markdown,
                    verbose,
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
    fn code_with_backticks_stays_code() {
        assert_eq!(
            (code("a"), code("a`b"), code("`a")),
            ("`a`".into(), "``a`b``".into(), "`` `a ``".into())
        );
        let blocks = vec![DisplayBlock::ToolResult {
            call_id: "1".into(),
            text: "```\nx\n````".into(),
            bytes: 9,
            is_error: false,
        }];
        let shown = Renderer::new(
            Style {
                verbose: true,
                markdown: true,
                color: false,
            },
            HashMap::new(),
        )
        .message(&message(Role::Tool, "tool_result", blocks), 0);
        assert!(shown.contains("\n`````\n```\nx\n````\n`````\n"), "{shown}");
    }

    #[test]
    fn a_result_is_shown_once_with_its_call_or_alone_without_it() {
        let call = message(
            Role::Assistant,
            "tool_use",
            vec![DisplayBlock::ToolCall {
                id: "1".into(),
                name: "Bash".into(),
                input: "ls\n-l".into(),
                prompt_hash: None,
            }],
        );
        let result = message(
            Role::Tool,
            "tool_result",
            vec![DisplayBlock::ToolResult {
                call_id: "1".into(),
                text: "x".into(),
                bytes: 1234,
                is_error: true,
            }],
        );
        let outcome = ToolOutcome {
            is_error: true,
            bytes: 1234,
        };
        let mut renderer =
            Renderer::new(Style::default(), HashMap::from([("1".to_owned(), outcome)]));
        assert_eq!(
            renderer.message(&call, 0),
            "assistant  2026-05-01 12:00:00 UTC\n  ▸ Bash ls -l  failed, 1.2 KB\n"
        );
        assert_eq!(renderer.message(&result, 0), "");
        let mut renderer = Renderer::new(Style::default(), HashMap::new());
        assert!(
            renderer
                .message(&result, 0)
                .ends_with("  ⎿ failed, 1.2 KB\n")
        );
        assert_eq!(renderer.message(&call, 0), "  ▸ Bash ls -l\n");
    }
}
