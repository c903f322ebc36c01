//! Claude Code's `settings.json`: puts our hooks in and takes them out. Text in, text out.
//!
//! Owns which hooks there are and how ours are told from others'. Does not own the file. What is not ours stays as it is
//! written, in its order, unknown keys too: only the lists that change are taken apart.

use std::fmt;
use std::path::Path;

use serde::de::{MapAccess, Visitor};
use serde::ser::{SerializeMap, SerializeSeq};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::ser::PrettyFormatter;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};

use crate::error::{Error, ErrorKind, Result};

/// What begins, and what ends and is made durable before the agent goes on.
const ALWAYS: [&str; 5] = [
    "SessionStart",
    "Stop",
    "StopFailure",
    "SubagentStop",
    "SessionEnd",
];
/// A tool has answered: only on request.
const TOOLS: [&str; 2] = ["PostToolUse", "PostToolUseFailure"];

/// How our hook is called.
#[derive(Debug, Clone)]
pub struct Hook {
    /// The program, by its whole path.
    pub program: String,
    /// What follows `hook`.
    pub flags: Vec<String>,
    /// Seconds after which the agent kills it.
    pub timeout: u64,
    /// Also after each tool.
    pub at_tools: bool,
}

impl Hook {
    /// The events it is called at.
    pub fn events(&self) -> Vec<&'static str> {
        let tools = TOOLS.iter().filter(|_| self.at_tools);
        ALWAYS.iter().chain(tools).copied().collect()
    }

    /// The command, for `sh`.
    fn command(&self) -> String {
        let words = [self.program.as_str(), "hook"]
            .into_iter()
            .chain(self.flags.iter().map(String::as_str));
        words.map(quoted).collect::<Vec<_>>().join(" ")
    }

    fn group(&self, event: &str) -> Value {
        let hook = json!({"type": "command", "command": self.command(), "timeout": self.timeout});
        if TOOLS.contains(&event) {
            json!({"matcher": "*", "hooks": [hook]})
        } else {
            json!({"hooks": [hook]})
        }
    }

    /// The settings that hold our hooks and nothing else.
    pub fn alone(&self) -> Result<String> {
        Ok(install("", self)?.unwrap_or_default())
    }
}

/// The settings with our hooks in them; none if they are there already.
pub fn install(text: &str, hook: &Hook) -> Result<Option<String>> {
    let mut root = top(text)?;
    let wrong = |what: &str, should: &str| {
        Error::conflict(format!("{what} is not {should}"))
            .hint("mend it by hand; nothing was changed")
    };
    let hooks = member(&mut root, "hooks", Node::Object(Vec::new()));
    hooks.open();
    let Node::Object(hooks) = hooks else {
        return Err(wrong("\"hooks\"", "an object"));
    };
    take_out(hooks, &hook.program, &hook.events());
    for event in hook.events() {
        let list = member(hooks, event, Node::List(Vec::new()));
        list.open();
        let Node::List(list) = list else {
            return Err(wrong(&format!("\"hooks\".{event:?}"), "a list"));
        };
        let at = remove(list, &hook.program).unwrap_or(list.len());
        let group = Node::of(&hook.group(event))?;
        list.insert(at, group);
    }
    changed(text, &Node::Object(root))
}

/// The settings without our hooks; none if there were none.
pub fn uninstall(text: &str, program: &str) -> Result<Option<String>> {
    let mut root = top(text)?;
    if let Some(at) = root.iter().position(|(key, _)| key == "hooks") {
        root[at].1.open();
        if let Node::Object(hooks) = &mut root[at].1 {
            let before = hooks.len();
            take_out(hooks, program, &[]);
            if hooks.is_empty() && before > 0 {
                root.remove(at);
            }
        }
    }
    changed(text, &Node::Object(root))
}

/// Removes our hooks from every event but these, and the events that nothing is left of.
fn take_out(hooks: &mut Vec<(String, Node)>, program: &str, but: &[&str]) {
    hooks.retain_mut(|(event, list)| {
        if but.contains(&event.as_str()) {
            return true;
        }
        list.open();
        let Node::List(list) = list else { return true };
        remove(list, program).is_none() || !list.is_empty()
    });
}

/// Removes our hooks from the groups of an event; answers where the first of them was.
fn remove(groups: &mut Vec<Node>, program: &str) -> Option<usize> {
    let mut first = None;
    let mut kept: Vec<Node> = Vec::new();
    for mut group in std::mem::take(groups) {
        if !group.has(program) {
            kept.push(group);
            continue;
        }
        first.get_or_insert(kept.len());
        group.open();
        let Node::Object(members) = &mut group else {
            continue;
        };
        for (_, hooks) in members.iter_mut().filter(|(key, _)| key == "hooks") {
            hooks.open();
            let Node::List(hooks) = hooks else { continue };
            hooks.retain(|hook| !hook.value().is_some_and(|hook| is_ours(&hook, program)));
        }
        let empty = |(key, hooks): &(String, Node)| {
            key == "hooks" && matches!(hooks, Node::List(hooks) if hooks.is_empty())
        };
        if !members.iter().any(empty) {
            kept.push(group);
        }
    }
    *groups = kept;
    first
}

/// Whether a hook calls `sessiond hook`, and nothing else.
fn is_ours(hook: &Value, program: &str) -> bool {
    let said = |key: &str| hook.get(key).and_then(Value::as_str);
    let Some(words) = said("command")
        .filter(|_| said("type") == Some("command"))
        .and_then(words)
    else {
        return false;
    };
    let named = |path: &str| {
        path == program
            || Path::new(path)
                .file_name()
                .is_some_and(|name| name == "sessiond")
    };
    matches!(words.as_slice(), [path, verb, ..] if named(path) && verb == "hook")
}

/// A word for `sh`.
fn quoted(word: &str) -> String {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "/._-+:=@%,".contains(letter);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// The words of a command as `quoted` writes them; none if it does more than call a program.
fn words(command: &str) -> Option<Vec<String>> {
    let (mut words, mut word, mut within) = (Vec::new(), None::<String>, false);
    let mut letters = command.trim().chars();
    while let Some(letter) = letters.next() {
        match letter {
            '\'' => {
                within = !within;
                word.get_or_insert_default();
            }
            _ if within => word.get_or_insert_default().push(letter),
            '\\' => word.get_or_insert_default().push(letters.next()?),
            ' ' | '\t' => words.extend(word.take()),
            _ if "|&;<>()$`\"*?[]#~!{}\n".contains(letter) => return None,
            _ => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    (!within).then_some(words)
}

/// JSON that is taken apart only where it is looked at: the rest stays as it is written.
enum Node {
    Raw(Box<RawValue>),
    Object(Vec<(String, Node)>),
    List(Vec<Node>),
}

impl Node {
    fn of(value: &Value) -> Result<Node> {
        let failed = |cause| Error::new(ErrorKind::Internal, "write JSON").caused_by(cause);
        Ok(match value {
            Value::Object(members) => {
                let members = members
                    .iter()
                    .map(|(key, value)| Ok((key.clone(), Node::of(value)?)));
                Node::Object(members.collect::<Result<_>>()?)
            }
            Value::Array(items) => Node::List(items.iter().map(Node::of).collect::<Result<_>>()?),
            plain => Node::Raw(to_raw_value(plain).map_err(failed)?),
        })
    }

    /// Takes an object or a list apart, one level.
    fn open(&mut self) {
        let Node::Raw(raw) = self else { return };
        let opened = if raw.get().starts_with('{') {
            let members = serde_json::from_str::<Members>(raw.get());
            members.map(|members| {
                Node::Object(
                    members
                        .0
                        .into_iter()
                        .map(|(key, value)| (key, Node::Raw(value)))
                        .collect(),
                )
            })
        } else if raw.get().starts_with('[') {
            let items = serde_json::from_str::<Vec<Box<RawValue>>>(raw.get());
            items.map(|items| Node::List(items.into_iter().map(Node::Raw).collect()))
        } else {
            return;
        };
        if let Ok(opened) = opened {
            *self = opened;
        }
    }

    fn value(&self) -> Option<Value> {
        serde_json::to_string(self)
            .ok()
            .and_then(|text| serde_json::from_str(&text).ok())
    }

    /// Whether it is a group with a hook of ours.
    fn has(&self, program: &str) -> bool {
        let group = self.value();
        let hooks = group
            .as_ref()
            .and_then(|group| group.get("hooks")?.as_array());
        hooks.is_some_and(|hooks| hooks.iter().any(|hook| is_ours(hook, program)))
    }
}

impl Serialize for Node {
    fn serialize<S: Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Node::Raw(raw) => raw.serialize(to),
            Node::Object(members) => {
                let mut map = to.serialize_map(Some(members.len()))?;
                members
                    .iter()
                    .try_for_each(|(key, value)| map.serialize_entry(key, value))?;
                map.end()
            }
            Node::List(items) => {
                let mut list = to.serialize_seq(Some(items.len()))?;
                items
                    .iter()
                    .try_for_each(|item| list.serialize_element(item))?;
                list.end()
            }
        }
    }
}

/// An object in the order in which it is written.
struct Members(Vec<(String, Box<RawValue>)>);

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        struct InOrder;
        impl<'de> Visitor<'de> for InOrder {
            type Value = Members;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> std::result::Result<Members, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }
        }
        from.deserialize_map(InOrder)
    }
}

/// The settings, taken apart one level. Nothing at all is no settings.
fn top(text: &str) -> Result<Vec<(String, Node)>> {
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    let raw: Box<RawValue> =
        serde_json::from_str(text.trim_start_matches('\u{feff}')).map_err(|cause| {
            Error::conflict(format!(
                "line {}, column {} is not valid JSON",
                cause.line(),
                cause.column()
            ))
            .hint("mend it, then try again; nothing was changed")
        })?;
    let mut root = Node::Raw(raw);
    root.open();
    match root {
        Node::Object(members) => Ok(members),
        _ => Err(
            Error::conflict("it holds something else than settings: they are a JSON object")
                .hint("nothing was changed"),
        ),
    }
}

fn member<'a>(members: &'a mut Vec<(String, Node)>, key: &str, new: Node) -> &'a mut Node {
    let at = members
        .iter()
        .position(|(known, _)| known == key)
        .unwrap_or_else(|| {
            members.push((key.to_owned(), new));
            members.len() - 1
        });
    &mut members[at].1
}

/// The new text, indented like the old one; none if it says the same.
fn changed(old: &str, new: &Node) -> Result<Option<String>> {
    let failed = |cause| Error::new(ErrorKind::Internal, "write JSON").caused_by(cause);
    let value: Option<Value> = serde_json::from_str(old.trim_start_matches('\u{feff}')).ok();
    if value.or_else(|| Some(json!({}))) == new.value() {
        return Ok(None);
    }
    let indent = old
        .lines()
        .find(|line| line.starts_with([' ', '\t']))
        .unwrap_or("  ");
    let indent = &indent[..indent.len() - indent.trim_start().len()];
    let mut text = Vec::new();
    let mut writer = serde_json::Serializer::with_formatter(
        &mut text,
        PrettyFormatter::with_indent(indent.as_bytes()),
    );
    new.serialize(&mut writer).map_err(failed)?;
    let end = if old.is_empty() || old.ends_with('\n') {
        "\n"
    } else {
        ""
    };
    Ok(Some(format!("{}{end}", String::from_utf8_lossy(&text))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hook() -> Hook {
        Hook {
            program: "/opt/my tools/sessiond".to_owned(),
            flags: vec!["--deadline".to_owned(), "5s".to_owned()],
            timeout: 6,
            at_tools: false,
        }
    }

    const OTHERS: &str = r#"{
    "zeta": 1.50,
    "env": {"B": "2", "A": "1"},
    "hooks": {
        "Stop": [
            {"hooks": [{"type": "command", "command": "say done"}]}
        ],
        "Notification": []
    },
    "alpha": [ 1,2 ]
}
"#;

    #[test]
    fn what_is_there_stays_as_it_is_written() {
        let with = install(OTHERS, &hook()).unwrap().unwrap();
        for kept in [
            "\"zeta\": 1.50,",
            "\"env\": {\"B\": \"2\", \"A\": \"1\"},",
            "\"alpha\": [ 1,2 ]",
            "\"Notification\": []",
            "say done",
        ] {
            assert!(with.contains(kept), "{kept} is not in {with}");
        }
        assert!(
            with.find("zeta") < with.find("\"env\"")
                && with.find("say done") < with.find("/opt/my tools"),
            "{with}"
        );
        assert!(
            with.contains(r#""command": "'/opt/my tools/sessiond' hook --deadline 5s""#),
            "{with}"
        );
        assert_eq!(
            install(&with, &hook()).unwrap(),
            None,
            "it is not idempotent"
        );
        let without = uninstall(&with, "/elsewhere/sessiond").unwrap().unwrap();
        let value = |text: &str| serde_json::from_str::<Value>(text).unwrap();
        assert_eq!(value(&without), value(OTHERS));
        assert_eq!(uninstall(&without, "/elsewhere/sessiond").unwrap(), None);
    }

    #[test]
    fn a_newer_program_takes_the_place_of_the_older_one() {
        let old = install(
            "",
            &Hook {
                at_tools: true,
                ..hook()
            },
        )
        .unwrap()
        .unwrap();
        let new = Hook {
            program: "/usr/bin/sessiond".to_owned(),
            ..hook()
        };
        let with = install(&old, &new).unwrap().unwrap();
        assert!(
            !with.contains("/opt/") && !with.contains("PostToolUse"),
            "{with}"
        );
        assert_eq!(with, new.alone().unwrap());
        assert_eq!(uninstall(&with, "x").unwrap().unwrap(), "{}\n");
    }

    #[test]
    fn only_what_calls_us_and_nothing_else_is_ours() {
        let ours =
            |command: &str| is_ours(&json!({"type": "command", "command": command}), "/opt/sd");
        for command in [
            "sessiond hook",
            "/usr/bin/sessiond hook --deadline 3s",
            "'/a b/sessiond' hook",
            "/opt/sd hook",
            r"'/it'\''s/sessiond' hook",
        ] {
            assert!(ours(command), "{command}");
        }
        for command in [
            "sessiond flush --wait",
            "sessiond hook | tee x",
            "sessiond hook; true",
            "mysessiond hook",
            "echo sessiond hook",
            "sessiond hook > $X",
            "'sessiond hook",
            "",
        ] {
            assert!(!ours(command), "{command}");
        }
        // Beside another hook in one group.
        let shared = r#"{"hooks":{"Stop":[{"hooks":[{"type":"command","command":"a"},{"type":"command","command":"sessiond hook"}],"x":1}]}}"#;
        let left = uninstall(shared, "/opt/sd").unwrap().unwrap();
        assert_eq!(
            serde_json::from_str::<Value>(&left).unwrap(),
            json!({"hooks":{"Stop":[{"hooks":[{"type":"command","command":"a"}],"x":1}]}})
        );
    }

    #[test]
    fn what_cannot_be_read_is_refused() {
        let fails = |text: &str| install(text, &hook()).unwrap_err().to_string();
        assert_eq!(
            fails("{\n \"a\": 1,\n}"),
            "line 3, column 1 is not valid JSON"
        );
        assert!(fails("[]").contains("JSON object"));
        assert_eq!(fails(r#"{"hooks":[]}"#), "\"hooks\" is not an object");
        assert_eq!(
            fails(r#"{"hooks":{"Stop":{}}}"#),
            "\"hooks\".\"Stop\" is not a list"
        );
        assert!(uninstall("{", "x").is_err());
        assert_eq!(uninstall(r#"{"hooks":7}"#, "x").unwrap(), None);
    }

    #[test]
    fn a_word_is_quoted_for_sh() {
        assert_eq!(quoted("/usr/bin/sessiond"), "/usr/bin/sessiond");
        assert_eq!(quoted("/it's here/sessiond"), r"'/it'\''s here/sessiond'");
        for odd in ["a b", "it's", "$HOME", "", "ä"] {
            assert_eq!(words(&quoted(odd)), Some(vec![odd.to_owned()]));
        }
    }
}
