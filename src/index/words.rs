//! Words to search for, and where they stand in a text: pure, the same for every database.
//!
//! Owns how a search is written: words that must all be there, `"words in this order"`, `-without`, and `or` between
//! alternatives. A word is a run of letters and digits, so that `main.rs` finds `src/main.rs`.

use serde::Serialize;

use crate::error::{Error, Result};

/// Bytes of a text that are shown around what was found.
const SNIPPET: usize = 240;

/// Bytes of them that stand before the first word that was found.
const BEFORE: usize = 60;

/// What to search for: any of these alternatives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Words(Vec<Alternative>);

/// Phrases that must be there, and phrases that must not. A phrase is words one behind the other.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Alternative {
    /// These are there.
    pub with: Vec<Vec<String>>,
    /// None of these is.
    pub without: Vec<Vec<String>>,
}

impl Words {
    /// Reads what a person wrote.
    pub fn read(text: &str) -> Result<Words> {
        let mut all = vec![Alternative::default()];
        let mut rest = text.trim_start();
        while !rest.is_empty() {
            let (minus, term) = rest
                .strip_prefix('-')
                .map_or((false, rest), |term| (true, term));
            let (term, quoted, after) = match term.strip_prefix('"') {
                Some(open) => {
                    let (inner, after) = open.split_once('"').unwrap_or((open, ""));
                    (inner, true, after)
                }
                None => {
                    let (word, after) =
                        term.split_at(term.find(char::is_whitespace).unwrap_or(term.len()));
                    (word, false, after)
                }
            };
            rest = after.trim_start();
            if !quoted && !minus && term.eq_ignore_ascii_case("or") {
                all.push(Alternative::default());
                continue;
            }
            let phrase: Vec<String> = words(term).map(|(_, _, word)| word).collect();
            if let (Some(last), false) = (all.last_mut(), phrase.is_empty()) {
                if minus {
                    last.without.push(phrase)
                } else {
                    last.with.push(phrase)
                }
            }
        }
        // Everything but some words is not a search.
        all.retain(|alternative| !alternative.with.is_empty());
        if all.is_empty() {
            return Err(Error::usage(format!("search for {text:?}: there is no word in it"))
                .hint("words, \"words in this order\", -without, this or that; put the whole in single quotes"));
        }
        Ok(Words(all))
    }

    /// The alternatives.
    pub fn alternatives(&self) -> &[Alternative] {
        &self.0
    }

    /// The part of a text that shows what was found, on one line.
    pub fn snippet(&self, text: &str) -> Snippet {
        let marks = self.marks(text);
        let first = marks.iter().map(|(from, _)| from.saturating_sub(BEFORE));
        // Where most of it can be seen, and of several such places the first.
        let seen = |from: usize| {
            marks
                .iter()
                .filter(|(start, end)| from <= *start && *end <= from + SNIPPET)
                .count()
        };
        let from = first
            .min_by_key(|from| std::cmp::Reverse(seen(*from)))
            .unwrap_or(0);
        let from = text.ceil_char_boundary(from);
        let to = text.floor_char_boundary(from + SNIPPET);
        let mut snippet = Snippet {
            text: if from > 0 { "…" } else { "" }.to_owned(),
            marks: Vec::new(),
        };
        let mut open = None;
        for (at, letter) in text[from..to]
            .char_indices()
            .map(|(at, letter)| (from + at, letter))
        {
            if let Some(start) = open.take_if(|_| marks.iter().any(|(_, end)| *end == at)) {
                snippet.marks.push((start, snippet.text.len()));
            }
            if open.is_none() && marks.iter().any(|(start, end)| *start == at && *end <= to) {
                open = Some(snippet.text.len());
            }
            snippet
                .text
                .push(if letter.is_control() || letter.is_whitespace() {
                    ' '
                } else {
                    letter
                });
        }
        snippet
            .marks
            .extend(open.map(|start| (start, snippet.text.len())));
        if to < text.len() {
            snippet.text.push('…');
        }
        snippet
    }

    /// Where the phrases stand: from and to, in order, none within another.
    fn marks(&self, text: &str) -> Vec<(usize, usize)> {
        let said: Vec<(usize, usize, String)> = words(text).collect();
        let phrases: Vec<&Vec<String>> = self
            .0
            .iter()
            .flat_map(|alternative| &alternative.with)
            .collect();
        let mut marks = Vec::new();
        let mut at = 0;
        while at < said.len() {
            let here = |phrase: &&Vec<String>| {
                said[at..]
                    .iter()
                    .map(|(_, _, word)| word)
                    .take(phrase.len())
                    .eq(phrase.iter())
            };
            let length = phrases
                .iter()
                .copied()
                .filter(here)
                .map(Vec::len)
                .max()
                .unwrap_or(0);
            if length > 0 {
                marks.push((said[at].0, said[at + length - 1].1));
            }
            at += length.max(1);
        }
        marks
    }
}

/// A part of a text, and where in it the words are.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Snippet {
    /// The part, on one line.
    #[serde(rename = "snippet")]
    pub text: String,
    /// First byte and the byte behind the last of each, in order.
    pub marks: Vec<(usize, usize)>,
}

/// The words of a text, in small letters, with their first byte and the one behind their last.
fn words(text: &str) -> impl Iterator<Item = (usize, usize, String)> {
    let mut rest = 0;
    std::iter::from_fn(move || {
        let start = rest + text[rest..].find(char::is_alphanumeric)?;
        rest = text[start..]
            .find(|letter: char| !letter.is_alphanumeric())
            .map_or(text.len(), |len| start + len);
        Some((start, rest, text[start..rest].to_lowercase()))
    })
}

/// A text as its words, with blanks between: for a database that would make other words of it.
pub fn plain(text: &str) -> String {
    words(text)
        .map(|(_, _, word)| word)
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Option<Vec<(String, String)>> {
        let phrases = |phrases: &[Vec<String>]| {
            phrases
                .iter()
                .map(|phrase| phrase.join(" "))
                .collect::<Vec<_>>()
                .join(",")
        };
        let all = Words::read(text).ok()?;
        Some(
            all.0
                .iter()
                .map(|one| (phrases(&one.with), phrases(&one.without)))
                .collect(),
        )
    }

    #[test]
    fn searches_are_read_as_search_engines_read_them() {
        let one = |with: &str, without: &str| Some(vec![(with.to_owned(), without.to_owned())]);
        assert_eq!(read("Fix main.rs"), one("fix,main rs", ""));
        assert_eq!(read("\"a  B\" c -d -\"e f\""), one("a b,c", "d,e f"));
        assert_eq!(read("\"open end"), one("open end", ""));
        assert_eq!(read("a or b OR -c").unwrap().len(), 2);
        assert_eq!(read("ÄPFEL 日本"), one("äpfel,日本", ""));
        assert_eq!(read("a ' OR NEAR(x) * ^ : {").unwrap().len(), 2);
        for nothing in ["", "  ", "-a", "***", "or", "\"\"", "-"] {
            assert_eq!(read(nothing), None, "{nothing:?}");
        }
    }

    #[test]
    fn a_snippet_shows_what_was_found_wherever_it_is() {
        let show = |search: &str, text: &str| {
            let snippet = Words::read(search).unwrap().snippet(text);
            let mut shown = snippet.text.clone();
            for (from, to) in snippet.marks.iter().rev() {
                shown.insert(*to, ']');
                shown.insert(*from, '[');
            }
            shown
        };
        assert_eq!(
            show("main.rs", "look\nat src/Main.RS, main"),
            "look at src/[Main.RS], main"
        );
        assert_eq!(show("\"b c\" c", "a b c c"), "a [b c] [c]");
        assert_eq!(show("nowhere", "a\tb"), "a b");
        let long = format!("{} needle {}", "ä".repeat(500), "hay ".repeat(200));
        let shown = show("needle", &long);
        assert!(
            shown.starts_with('…')
                && shown.ends_with('…')
                && shown.contains("[needle]")
                && shown.len() < 300,
            "{shown}"
        );
        // Two of them are better than one.
        let text = format!("one {} one two", "x ".repeat(300));
        assert!(show("one two", &text).contains("[one] [two]"));
    }

    #[test]
    fn plain_text_is_words_and_blanks() {
        assert_eq!(
            plain("It's src/main.rs:7 — ÄB_c"),
            "it s src main rs 7 äb c"
        );
    }
}
