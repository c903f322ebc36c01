//! Installs and removes sessiond's hooks in Claude Code's `settings.json`. Pure: works on the text
//! of the file.
//!
//! Owns the list of hooks and the rule to recognize them. Does not own reading or writing the file.
//! Everything else in the settings keeps its text and order, including unknown keys.

use std::fmt;
use std::path::Path;

use serde::de::{MapAccess, Visitor};
use serde::ser::{SerializeMap, SerializeSeq};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::ser::PrettyFormatter;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};

use crate::error::{Error, ErrorKind, Result};
use crate::sys::shell::quote;

/// The events of every installation: the start of a session, and the ends of turns, sub-agents and
/// sessions, which become durable before the agent continues.
const BASE_EVENTS: [&str; 5] = [
    "SessionStart",
    "Stop",
    "StopFailure",
    "SubagentStop",
    "SessionEnd",
];
/// The events after a tool call, which are optional.
const TOOL_EVENTS: [&str; 2] = ["PostToolUse", "PostToolUseFailure"];

/// The command of the hook.
#[derive(Debug, Clone)]
pub struct HookCommand {
    /// The absolute path of the program.
    pub program: String,
    /// The arguments after `hook`.
    pub flags: Vec<String>,
    /// The time in seconds after which Claude Code kills the hook.
    pub timeout: u64,
    /// Whether the hook also runs after each tool call.
    pub after_tools: bool,
}

impl HookCommand {
    /// The events that run the hook.
    pub fn events(&self) -> Vec<&'static str> {
        let tools = TOOL_EVENTS.iter().filter(|_| self.after_tools);
        BASE_EVENTS.iter().chain(tools).copied().collect()
    }

    /// The command line for `sh`.
    fn command(&self) -> String {
        let words = [self.program.as_str(), "hook"]
            .into_iter()
            .chain(self.flags.iter().map(String::as_str));
        words.map(quote).collect::<Vec<_>>().join(" ")
    }

    fn group(&self, event: &str) -> Value {
        let hook = json!({"type": "command", "command": self.command(), "timeout": self.timeout});
        if TOOL_EVENTS.contains(&event) {
            json!({"matcher": "*", "hooks": [hook]})
        } else {
            json!({"hooks": [hook]})
        }
    }

    /// Settings that contain only these hooks.
    pub fn standalone_settings(&self) -> Result<String> {
        Ok(install("", self)?.unwrap_or_default())
    }
}

/// Returns the settings with the hooks; none if they are already installed.
pub fn install(text: &str, hook: &HookCommand) -> Result<Option<String>> {
    let mut root = parse_settings(text)?;
    let invalid = |what: &str, expected: &str| {
        Error::conflict(format!("{what} is not {expected}"))
            .hint("fix the file and run the command again; nothing was changed")
    };
    let hooks = member(&mut root, "hooks", Node::Object(Vec::new()));
    hooks.expand();
    let Node::Object(hooks) = hooks else {
        return Err(invalid("\"hooks\"", "an object"));
    };
    remove_hooks(hooks, &hook.program, &hook.events());
    for event in hook.events() {
        let list = member(hooks, event, Node::List(Vec::new()));
        list.expand();
        let Node::List(list) = list else {
            return Err(invalid(&format!("\"hooks\".{event:?}"), "a list"));
        };
        let index = remove(list, &hook.program).unwrap_or(list.len());
        let group = Node::from_value(&hook.group(event))?;
        list.insert(index, group);
    }
    serialize_if_changed(text, &Node::Object(root))
}

/// Returns the settings without the hooks; none if there were none.
pub fn uninstall(text: &str, program: &str) -> Result<Option<String>> {
    let mut root = parse_settings(text)?;
    if let Some(index) = root.iter().position(|(key, _)| key == "hooks") {
        root[index].1.expand();
        if let Node::Object(hooks) = &mut root[index].1 {
            let before = hooks.len();
            remove_hooks(hooks, program, &[]);
            if hooks.is_empty() && before > 0 {
                root.remove(index);
            }
        }
    }
    serialize_if_changed(text, &Node::Object(root))
}

/// Removes the hooks from all events except `kept`, and the events that become empty.
fn remove_hooks(hooks: &mut Vec<(String, Node)>, program: &str, kept: &[&str]) {
    hooks.retain_mut(|(event, list)| {
        if kept.contains(&event.as_str()) {
            return true;
        }
        list.expand();
        let Node::List(list) = list else { return true };
        remove(list, program).is_none() || !list.is_empty()
    });
}

/// Removes the hooks from the groups of an event; returns the index of the first one.
fn remove(groups: &mut Vec<Node>, program: &str) -> Option<usize> {
    let mut first = None;
    let mut kept: Vec<Node> = Vec::new();
    for mut group in std::mem::take(groups) {
        if !group.has_sessiond_hook(program) {
            kept.push(group);
            continue;
        }
        first.get_or_insert(kept.len());
        group.expand();
        let Node::Object(members) = &mut group else {
            continue;
        };
        for (_, hooks) in members.iter_mut().filter(|(key, _)| key == "hooks") {
            hooks.expand();
            let Node::List(hooks) = hooks else { continue };
            hooks.retain(|hook| {
                !hook
                    .value()
                    .is_some_and(|hook| is_sessiond_hook(&hook, program))
            });
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

/// Whether a hook only runs `sessiond hook`.
fn is_sessiond_hook(hook: &Value, program: &str) -> bool {
    let field = |key: &str| hook.get(key).and_then(Value::as_str);
    let Some(words) = field("command")
        .filter(|_| field("type") == Some("command"))
        .and_then(split_words)
    else {
        return false;
    };
    let is_program = |path: &str| {
        path == program
            || Path::new(path)
                .file_name()
                .is_some_and(|name| name == "sessiond")
    };
    matches!(words.as_slice(), [path, verb, ..] if is_program(path) && verb == "hook")
}

/// Splits a command line into words; none if it is not a simple command.
fn split_words(command: &str) -> Option<Vec<String>> {
    let (mut words, mut word, mut in_quotes) = (Vec::new(), None::<String>, false);
    let mut letters = command.trim().chars();
    while let Some(letter) = letters.next() {
        match letter {
            '\'' => {
                in_quotes = !in_quotes;
                word.get_or_insert_default();
            }
            _ if in_quotes => word.get_or_insert_default().push(letter),
            '\\' => word.get_or_insert_default().push(letters.next()?),
            ' ' | '\t' => words.extend(word.take()),
            _ if "|&;<>()$`\"*?[]#~!{}\n".contains(letter) => return None,
            _ => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    (!in_quotes).then_some(words)
}

/// JSON that is parsed only where necessary, so that the rest keeps its text.
enum Node {
    Raw(Box<RawValue>),
    Object(Vec<(String, Node)>),
    List(Vec<Node>),
}

impl Node {
    fn from_value(value: &Value) -> Result<Node> {
        let failed =
            |cause| Error::new(ErrorKind::Internal, "serialize the settings").caused_by(cause);
        Ok(match value {
            Value::Object(members) => {
                let members = members
                    .iter()
                    .map(|(key, value)| Ok((key.clone(), Node::from_value(value)?)));
                Node::Object(members.collect::<Result<_>>()?)
            }
            Value::Array(items) => {
                Node::List(items.iter().map(Node::from_value).collect::<Result<_>>()?)
            }
            plain => Node::Raw(to_raw_value(plain).map_err(failed)?),
        })
    }

    /// Parses one level of an object or a list.
    fn expand(&mut self) {
        let Node::Raw(raw) = self else { return };
        let expanded = if raw.get().starts_with('{') {
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
        if let Ok(expanded) = expanded {
            *self = expanded;
        }
    }

    fn value(&self) -> Option<Value> {
        serde_json::to_string(self)
            .ok()
            .and_then(|text| serde_json::from_str(&text).ok())
    }

    /// Whether it is a group with a hook of sessiond.
    fn has_sessiond_hook(&self, program: &str) -> bool {
        let group = self.value();
        let hooks = group
            .as_ref()
            .and_then(|group| group.get("hooks")?.as_array());
        hooks.is_some_and(|hooks| hooks.iter().any(|hook| is_sessiond_hook(hook, program)))
    }
}

impl Serialize for Node {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Node::Raw(raw) => raw.serialize(serializer),
            Node::Object(members) => {
                let mut map = serializer.serialize_map(Some(members.len()))?;
                members
                    .iter()
                    .try_for_each(|(key, value)| map.serialize_entry(key, value))?;
                map.end()
            }
            Node::List(items) => {
                let mut list = serializer.serialize_seq(Some(items.len()))?;
                items
                    .iter()
                    .try_for_each(|item| list.serialize_element(item))?;
                list.end()
            }
        }
    }
}

/// The members of an object, in their order in the text.
struct Members(Vec<(String, Box<RawValue>)>);

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct MembersVisitor;
        impl<'de> Visitor<'de> for MembersVisitor {
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
        deserializer.deserialize_map(MembersVisitor)
    }
}

/// Parses one level of the settings. An empty text is an empty object.
fn parse_settings(text: &str) -> Result<Vec<(String, Node)>> {
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
            .hint("fix the file and run the command again; nothing was changed")
        })?;
    let mut root = Node::Raw(raw);
    root.expand();
    match root {
        Node::Object(members) => Ok(members),
        _ => Err(Error::conflict("the settings are not a JSON object")
            .hint("fix the file and run the command again; nothing was changed")),
    }
}

fn member<'a>(members: &'a mut Vec<(String, Node)>, key: &str, new: Node) -> &'a mut Node {
    let index = members
        .iter()
        .position(|(known, _)| known == key)
        .unwrap_or_else(|| {
            members.push((key.to_owned(), new));
            members.len() - 1
        });
    &mut members[index].1
}

/// Serializes the settings with the indentation of the old text; none if nothing changed.
fn serialize_if_changed(old: &str, new: &Node) -> Result<Option<String>> {
    let failed = |cause| Error::new(ErrorKind::Internal, "serialize the settings").caused_by(cause);
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

    fn hook() -> HookCommand {
        HookCommand {
            program: "/opt/my tools/sessiond".to_owned(),
            flags: vec!["--deadline".to_owned(), "5s".to_owned()],
            timeout: 6,
            after_tools: false,
        }
    }

    const OTHER_SETTINGS: &str = r#"{
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
    fn other_settings_keep_their_text() {
        let with = install(OTHER_SETTINGS, &hook()).unwrap().unwrap();
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
        assert_eq!(value(&without), value(OTHER_SETTINGS));
        assert_eq!(uninstall(&without, "/elsewhere/sessiond").unwrap(), None);
    }

    #[test]
    fn a_new_installation_replaces_the_previous_one() {
        let old = install(
            "",
            &HookCommand {
                after_tools: true,
                ..hook()
            },
        )
        .unwrap()
        .unwrap();
        let new = HookCommand {
            program: "/usr/bin/sessiond".to_owned(),
            ..hook()
        };
        let with = install(&old, &new).unwrap().unwrap();
        assert!(
            !with.contains("/opt/") && !with.contains("PostToolUse"),
            "{with}"
        );
        assert_eq!(with, new.standalone_settings().unwrap());
        assert_eq!(uninstall(&with, "x").unwrap().unwrap(), "{}\n");
    }

    #[test]
    fn only_a_simple_sessiond_hook_command_is_recognized() {
        let is_recognized = |command: &str| {
            is_sessiond_hook(&json!({"type": "command", "command": command}), "/opt/sd")
        };
        for command in [
            "sessiond hook",
            "/usr/bin/sessiond hook --deadline 3s",
            "'/a b/sessiond' hook",
            "/opt/sd hook",
            r"'/it'\''s/sessiond' hook",
        ] {
            assert!(is_recognized(command), "{command}");
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
            assert!(!is_recognized(command), "{command}");
        }
        // In one group with another hook.
        let shared = r#"{"hooks":{"Stop":[{"hooks":[{"type":"command","command":"a"},{"type":"command","command":"sessiond hook"}],"x":1}]}}"#;
        let left = uninstall(shared, "/opt/sd").unwrap().unwrap();
        assert_eq!(
            serde_json::from_str::<Value>(&left).unwrap(),
            json!({"hooks":{"Stop":[{"hooks":[{"type":"command","command":"a"}],"x":1}]}})
        );
    }

    #[test]
    fn invalid_settings_are_rejected() {
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
    fn quoted_words_are_split_again() {
        for word in ["a b", "it's", "$HOME", "", "ä"] {
            assert_eq!(split_words(&quote(word)), Some(vec![word.to_owned()]));
        }
    }
}
