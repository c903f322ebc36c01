//! Text that cannot control a terminal. Names, titles, messages and errors contain text from files,
//! objects and transcripts.
//!
//! Owns which characters are unsafe. Everything that is printed passes through `guard`, `escape_json`
//! or `GuardedStderr`, even if its parts were cleaned before.

use std::borrow::Cow;
use std::io::{self, Write};

/// The replacement of an unsafe character.
const REPLACEMENT: char = '\u{fffd}';

/// Whether a character can control a terminal or change the order of the text around it: the control
/// characters of ASCII and of Latin-1 (C1), line separators, and bidirectional formatting.
pub fn is_unsafe(letter: char) -> bool {
    letter.is_control()
        || matches!(letter,
            '\u{061c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Replaces unsafe characters, line breaks included.
pub fn clean(text: &str) -> String {
    replace(text, is_unsafe)
}

/// Replaces unsafe characters, but keeps line breaks and tabs.
pub fn clean_lines(text: &str) -> String {
    replace(text, |letter| {
        is_unsafe(letter) && !matches!(letter, '\n' | '\t')
    })
}

fn replace(text: &str, is_replaced: impl Fn(char) -> bool) -> String {
    let replaced = |letter| {
        if is_replaced(letter) {
            REPLACEMENT
        } else {
            letter
        }
    };
    text.chars().map(replaced).collect()
}

/// Replaces unsafe characters in output, but keeps line breaks, tabs, and the sequences that set a
/// color.
pub fn guard(text: &str) -> Cow<'_, str> {
    let is_kept = |letter: char| matches!(letter, '\n' | '\t');
    if !text
        .chars()
        .any(|letter| is_unsafe(letter) && !is_kept(letter))
    {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(letter) = rest.chars().next() {
        let len = match color_len(rest) {
            0 if is_unsafe(letter) && !is_kept(letter) => {
                out.push(REPLACEMENT);
                letter.len_utf8()
            }
            0 => {
                out.push(letter);
                letter.len_utf8()
            }
            len => {
                out.push_str(&rest[..len]);
                len
            }
        };
        rest = &rest[len..];
    }
    Cow::Owned(out)
}

/// The length of the sequence at the start of `text` that sets a color; 0 if there is none.
fn color_len(text: &str) -> usize {
    let Some(parameters) = text.strip_prefix("\x1b[") else {
        return 0;
    };
    let digits = parameters
        .bytes()
        .take_while(|byte| byte.is_ascii_digit() || *byte == b';')
        .count();
    match parameters.as_bytes().get(digits) {
        Some(b'm') => "\x1b[".len() + digits + 1,
        _ => 0,
    }
}

/// Escapes the unsafe characters of a JSON document that JSON itself allows. They occur only in
/// strings.
pub fn escape_json(json: &str) -> Cow<'_, str> {
    let is_escaped = |letter: char| is_unsafe(letter) && letter != '\n';
    if !json.chars().any(is_escaped) {
        return Cow::Borrowed(json);
    }
    let mut out = String::with_capacity(json.len() + 16);
    for letter in json.chars() {
        if is_escaped(letter) {
            out.push_str(&format!("\\u{:04x}", u32::from(letter)));
        } else {
            out.push(letter);
        }
    }
    Cow::Owned(out)
}

/// Standard error, for log lines.
#[derive(Debug, Default)]
pub struct GuardedStderr;

impl Write for GuardedStderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        io::stderr().write_all(guard(&text).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_but_colors_and_line_breaks_reaches_a_terminal() {
        let hostile = "a\x1b]0;title\x07b\u{9b}31mc\u{202e}d\u{2066}e\r\x7f";
        assert!(!clean(hostile).chars().any(is_unsafe));
        assert_eq!(clean("a\x1b[31mb\nc"), "a\u{fffd}[31mb\u{fffd}c");
        assert_eq!(clean_lines("a\tb\nc\u{85}"), "a\tb\nc\u{fffd}");
        let colored = format!("\x1b[1;31merror:\x1b[0m\t{hostile}\n");
        let guarded = guard(&colored);
        assert!(guarded.starts_with("\x1b[1;31merror:\x1b[0m\ta\u{fffd}]0;"));
        let rest = guarded.replace("\x1b[1;31m", "").replace("\x1b[0m", "");
        assert!(
            !rest
                .chars()
                .any(|letter| is_unsafe(letter) && !"\n\t".contains(letter))
        );
        assert!(matches!(guard("plain\n"), Cow::Borrowed(_)));
    }

    #[test]
    fn json_stays_the_same_value() {
        let text = "a\u{202e}b\u{9b}c\x7f\u{1f600}\n";
        let json = serde_json::to_string(&vec![text]).unwrap();
        let escaped = escape_json(&json);
        assert!(!escaped.chars().any(is_unsafe), "{escaped}");
        assert_eq!(
            serde_json::from_str::<Vec<String>>(&escaped).unwrap(),
            [text]
        );
    }
}
