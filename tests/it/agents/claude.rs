//! Claude Code, a conversation that loses its home again and again: history, tools, tasks, sub-agents, rewind, forks, compaction.

use serde_json::json;

use super::anthropic::conversation;
use super::container::{Container, Version, assert_goes_on, assert_restored, kept, lines};
use super::model::{Model, call, prompt, say};
use crate::support::backend::{Backend, Ran};

fn id() -> String {
    uuid::Uuid::new_v4().to_string()
}

/// Runs a scenario with a version on every backend.
pub fn everywhere(version: Version, scenario: impl Fn(&Container<'_>)) {
    for backend in Backend::all() {
        let model = Model::start();
        let Some(container) = Container::new(version, &backend, &model) else { return };
        scenario(&container);
    }
}

/// Makes a test of a scenario for each version.
macro_rules! both_versions {
    ($($scenario:ident),+ $(,)?) => {
        mod new { $(#[test] fn $scenario() { super::everywhere(super::Version::New, super::$scenario) })+ }
        mod old { $(#[test] fn $scenario() { super::everywhere(super::Version::Old, super::$scenario) })+ }
    };
}
pub(super) use both_versions;

both_versions!(the_whole_conversation_goes_on_in_a_new_home);

fn the_whole_conversation_goes_on_in_a_new_home(container: &Container<'_>) {
    let (model, session) = (container.model, id());
    let file = container.cwd.join("a.txt");
    let write = |text: &str| call("Write", json!({ "file_path": file, "content": text }));
    let bash = |command: &str| call("Bash", json!({ "command": command, "description": "Run it" }));
    let child = prompt("child", &[vec![say("child runs"), bash("echo child-out")], vec![say("child is done")]]);
    let child = json!({ "description": "Look", "prompt": child, "subagent_type": "general-purpose", "run_in_background": false });
    let first = [
        vec![say("I write a file"), write("one\n")],
        vec![bash("seq -f 'line %g' 9000")],
        vec![call("TaskCreate", json!({ "subject": "Task number one", "description": "To be done" }))],
        vec![call("Agent", child)],
        vec![say("first turn done")],
    ];
    container.begin(&session, &prompt("first", &first));
    let end_of_first = model.last("first PLAN");
    let said = conversation(&end_of_first).join("\n");
    for words in ["File created successfully", "Output too large", "Task #1 created", "child is done"] {
        assert!(said.contains(words), "{words:?}: {said}");
    }
    let lost = container.throw_away();
    let names: Vec<String> = kept(&lost).keys().map(|path| path.to_string_lossy().into_owned()).collect();
    for name in [format!("{session}.jsonl"), "/subagents/agent-".into(), "/tool-results/".into(), format!("tasks/{session}/1.json")] {
        assert!(names.iter().any(|path| path.contains(&name)), "{name}: {names:?}");
    }

    // A new home: the next request holds all of it.
    container.resume(&session, &prompt("second", &[vec![write("two\n")], vec![say("second turn done")]]));
    assert_restored(&lost, &container.home.home(), "after the first turn");
    assert_goes_on(&end_of_first, &model.asked("second PLAN"), &["first turn done", "second PLAN"]);
    let end_of_second = model.last("second PLAN");

    // And once more: the task list, the sub-agent and the large result are where the client looks for them.
    let lost = container.throw_away();
    let find = |part: &str| kept(&lost).into_keys().find(|path| path.to_string_lossy().contains(part)).unwrap();
    let agent = find("/subagents/agent-").file_name().unwrap().to_string_lossy().split_once('.').unwrap().0.replace("agent-", "");
    let result = container.home.home().join(".claude").join(find("/tool-results/"));
    let go_on = prompt("child again", &[vec![say("child goes on")]]);
    let third = [
        vec![call("TaskList", json!({}))],
        vec![call("SendMessage", json!({ "to": agent, "summary": "Go on with it please", "message": go_on }))],
        vec![call("Read", json!({ "file_path": result, "offset": 8999, "limit": 2 }))],
        vec![say("third turn done")],
    ];
    container.resume(&session, &prompt("third", &third));
    assert_restored(&lost, &container.home.home(), "after the second turn");
    assert_goes_on(&end_of_second, &model.asked("third PLAN"), &["second turn done", "third PLAN"]);
    let said = conversation(&model.last("third PLAN")).join("\n");
    assert!(said.contains("[pending] Task number one") && said.contains("line 9000"), "{said}");
    let continued = conversation(&model.asked("child again PLAN")).join("\n");
    for words in ["child runs", "child-out", "child is done", "child again"] {
        assert!(continued.contains(words), "the sub-agent has forgotten {words:?}: {continued}");
    }

    // Rewind needs the file history, and says that it is done also where there is none.
    let lost = container.throw_away();
    assert!(kept(&lost).keys().any(|path| path.starts_with("file-history")), "{:?}", kept(&lost).keys());
    let transcript = Container::transcripts(&lost, &session).remove(0);
    let before = lines(&transcript).into_iter().find(|line| line["type"] == "user" && line["message"].to_string().contains("second PLAN"));
    let before = before.unwrap()["uuid"].as_str().unwrap().to_owned();
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "two\n");
    Ran(container.command(&session, &["-p", "--resume", &session, "--rewind-files", &before]).output().unwrap()).ok();
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "one\n");
    assert_restored(&lost, &container.home.home(), "after the rewind");
}
