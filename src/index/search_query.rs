//! Search queries and snippets, independent of the database.
//!
//! Owns the query syntax: words that must all match, `"a phrase"`, `-excluded`, and `or` between
//! alternatives. A word is a run of letters and digits, so that `main.rs` finds `src/main.rs`.

use serde::Serialize;

use crate::error::{Error, Result};

/// Length of a snippet, in bytes.
const SNIPPET_LEN: usize = 240;

/// Bytes of the snippet before its first match.
const LEAD_LEN: usize = 60;

/// A search query: a text matches if one of the alternatives does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SearchQuery(Vec<Conjunction>);

/// Phrases that must all occur, and phrases that must not. A phrase is a sequence of words.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Conjunction {
    /// Phrases that must occur.
    pub required: Vec<Vec<String>>,
    /// Phrases that must not occur.
    pub excluded: Vec<Vec<String>>,
}

impl SearchQuery {
    /// Parses a query.
    pub fn parse(text: &str) -> Result<SearchQuery> {
        let mut all = vec![Conjunction::default()];
        let mut rest = text.trim_start();
        while !rest.is_empty() {
            let (is_excluded, term) = rest
                .strip_prefix('-')
                .map_or((false, rest), |term| (true, term));
            let (term, is_quoted, after) = match term.strip_prefix('"') {
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
            if !is_quoted && !is_excluded && term.eq_ignore_ascii_case("or") {
                all.push(Conjunction::default());
                continue;
            }
            let phrase: Vec<String> = words(term).map(|(_, _, word)| word).collect();
            if let (Some(last), false) = (all.last_mut(), phrase.is_empty()) {
                if is_excluded {
                    last.excluded.push(phrase)
                } else {
                    last.required.push(phrase)
                }
            }
        }
        // An alternative with only excluded words would match almost everything.
        all.retain(|alternative| !alternative.required.is_empty());
        if all.is_empty() {
            return Err(Error::usage(format!(
                "invalid search {text:?}: it contains no word to find"
            ))
            .hint("run \"sessiond search 'WORD \"A PHRASE\" -EXCLUDED or OTHER'\""));
        }
        Ok(SearchQuery(all))
    }

    /// Returns the alternatives.
    pub fn alternatives(&self) -> &[Conjunction] {
        &self.0
    }

    /// Returns the part of a text with the most matches, on one line.
    pub fn snippet(&self, text: &str) -> Snippet {
        let matches = self.matches(text);
        let starts = matches
            .iter()
            .map(|(from, _)| from.saturating_sub(LEAD_LEN));
        // The window with the most matches, and of several such windows the first.
        let matches_in = |from: usize| {
            matches
                .iter()
                .filter(|(start, end)| from <= *start && *end <= from + SNIPPET_LEN)
                .count()
        };
        let from = starts
            .min_by_key(|from| std::cmp::Reverse(matches_in(*from)))
            .unwrap_or(0);
        let from = text.ceil_char_boundary(from);
        let to = text.floor_char_boundary(from + SNIPPET_LEN);
        let mut snippet = Snippet {
            text: if from > 0 { "…" } else { "" }.to_owned(),
            matches: Vec::new(),
        };
        let mut open = None;
        for (at, letter) in text[from..to]
            .char_indices()
            .map(|(at, letter)| (from + at, letter))
        {
            if let Some(start) = open.take_if(|_| matches.iter().any(|(_, end)| *end == at)) {
                snippet.matches.push((start, snippet.text.len()));
            }
            if open.is_none()
                && matches
                    .iter()
                    .any(|(start, end)| *start == at && *end <= to)
            {
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
            .matches
            .extend(open.map(|start| (start, snippet.text.len())));
        if to < text.len() {
            snippet.text.push('…');
        }
        snippet
    }

    /// Returns the byte ranges of the required phrases, in order, without overlaps.
    fn matches(&self, text: &str) -> Vec<(usize, usize)> {
        let words: Vec<(usize, usize, String)> = words(text).collect();
        let phrases: Vec<&Vec<String>> = self
            .0
            .iter()
            .flat_map(|alternative| &alternative.required)
            .collect();
        let mut matches = Vec::new();
        let mut at = 0;
        while at < words.len() {
            let starts_here = |phrase: &&Vec<String>| {
                words[at..]
                    .iter()
                    .map(|(_, _, word)| word)
                    .take(phrase.len())
                    .eq(phrase.iter())
            };
            let length = phrases
                .iter()
                .copied()
                .filter(starts_here)
                .map(Vec::len)
                .max()
                .unwrap_or(0);
            if length > 0 {
                matches.push((words[at].0, words[at + length - 1].1));
            }
            at += length.max(1);
        }
        matches
    }
}

/// A part of a text with its matches.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Snippet {
    /// The part, on one line.
    #[serde(rename = "snippet")]
    pub text: String,
    /// Start and end offset of each match, in bytes, in order.
    pub matches: Vec<(usize, usize)>,
}

/// Returns the words of a text in lower case, with their start and end offsets.
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

/// Returns the words of a text, separated by spaces, for databases with other word rules.
pub fn plain_words(text: &str) -> String {
    words(text)
        .map(|(_, _, word)| word)
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Option<Vec<(String, String)>> {
        let phrases = |phrases: &[Vec<String>]| {
            phrases
                .iter()
                .map(|phrase| phrase.join(" "))
                .collect::<Vec<_>>()
                .join(",")
        };
        let query = SearchQuery::parse(text).ok()?;
        Some(
            query
                .0
                .iter()
                .map(|one| (phrases(&one.required), phrases(&one.excluded)))
                .collect(),
        )
    }

    #[test]
    fn queries_have_the_syntax_of_search_engines() {
        let one =
            |required: &str, excluded: &str| Some(vec![(required.to_owned(), excluded.to_owned())]);
        assert_eq!(parse("Fix main.rs"), one("fix,main rs", ""));
        assert_eq!(parse("\"a  B\" c -d -\"e f\""), one("a b,c", "d,e f"));
        assert_eq!(parse("\"open end"), one("open end", ""));
        assert_eq!(parse("a or b OR -c").unwrap().len(), 2);
        assert_eq!(parse("ÄPFEL 日本"), one("äpfel,日本", ""));
        assert_eq!(parse("a ' OR NEAR(x) * ^ : {").unwrap().len(), 2);
        for nothing in ["", "  ", "-a", "***", "or", "\"\"", "-"] {
            assert_eq!(parse(nothing), None, "{nothing:?}");
        }
    }

    #[test]
    fn a_snippet_shows_the_matches_wherever_they_are() {
        let show = |search: &str, text: &str| {
            let snippet = SearchQuery::parse(search).unwrap().snippet(text);
            let mut shown = snippet.text.clone();
            for (from, to) in snippet.matches.iter().rev() {
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
        // A window with two matches wins over one with one.
        let text = format!("one {} one two", "x ".repeat(300));
        assert!(show("one two", &text).contains("[one] [two]"));
    }

    #[test]
    fn plain_words_are_separated_by_spaces() {
        assert_eq!(
            plain_words("It's src/main.rs:7 — ÄB_c"),
            "it s src main rs 7 äb c"
        );
    }
}
