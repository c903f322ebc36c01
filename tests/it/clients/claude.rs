//! Claude Code, conversations that lose their home: history, tools, tasks, sub-agents, rewind, forks, compaction.

use std::os::unix::fs::MetadataExt;

use serde_json::json;

use super::anthropic::{SUMMARY, conversation};
use super::container::{Container, Version, assert_goes_on, assert_restored, bash, both_versions, id, kept, lines};
use super::model::{call, fill, prompt, say};
use crate::support::backend::Ran;

both_versions!(
    the_whole_conversation_goes_on_in_a_new_home,
    a_transcript_that_the_client_rewrites_is_restored_as_it_is_then,
    a_fork_and_the_session_it_began_with_both_go_on,
);

fn the_whole_conversation_goes_on_in_a_new_home(container: &Container<'_>) {
    let (model, session) = (container.model, id());
    let file = container.cwd.join("a.txt");
    let write = |text: &str| call("Write", json!({ "file_path": file, "content": text }));
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
    let files = kept(&lost);
    for part in [format!("{session}.jsonl"), "/subagents/agent-".into(), "/tool-results/".into(), format!("tasks/{session}/1.json")] {
        assert!(files.keys().any(|path| path.contains(&part)), "{part}: {:?}", files.keys());
    }

    // A new home: the next request holds all of it.
    container.resume(&session, &prompt("second", &[vec![write("two\n")], vec![say("second turn done")]]));
    assert_restored(&lost, &container.home.home(), "after the first turn");
    assert_goes_on(&end_of_first, &model.asked("second PLAN"), &["first turn done", "second PLAN"]);
    let end_of_second = model.last("second PLAN");

    // And once more: the task list, the sub-agent and the large result are where the client looks for them.
    let lost = container.throw_away();
    let find = |part: &str| kept(&lost).into_keys().find(|path| path.contains(part)).unwrap();
    let agent = find("/subagents/agent-").split_once("/agent-").unwrap().1.split_once('.').unwrap().0.to_owned();
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
    assert!(kept(&lost).keys().any(|path| path.starts_with("file-history/")), "{:?}", kept(&lost).keys());
    let transcript = Container::transcripts(&lost, &session).remove(0);
    let before = lines(&transcript).into_iter().find(|line| line["type"] == "user" && line["message"].to_string().contains("second PLAN"));
    let before = before.unwrap()["uuid"].as_str().unwrap().to_owned();
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "two\n");
    Ran(container.command(&session, &["-p", "--resume", &session, "--rewind-files", &before]).output().unwrap()).ok();
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "one\n");
    assert_restored(&lost, &container.home.home(), "after the rewind");
}

fn a_transcript_that_the_client_rewrites_is_restored_as_it_is_then(container: &Container<'_>) {
    let (model, session) = (container.model, id());
    // Seven answers of 800 KB: the client collects only in a transcript of 5 MiB and more.
    let mut rounds = vec![vec![fill(800_000), bash("true")]; 7];
    rounds.push(vec![say("enough was said")]);
    container.begin(&session, &prompt("long", &rounds));
    let long = std::fs::read(container.transcript(&session)).unwrap();
    let inode = std::fs::metadata(container.transcript(&session)).unwrap().ino();
    assert!(long.len() >= 5 << 20, "{} bytes", long.len());
    container.resume(&session, "/compact");
    let compact = std::fs::read(container.transcript(&session)).unwrap();
    match container.version {
        Version::New => {
            assert!(compact.len() < long.len() / 10, "{} bytes of {}", compact.len(), long.len());
            assert_ne!(std::fs::metadata(container.transcript(&session)).unwrap().ino(), inode);
        }
        // It knows the variable not, and appends.
        Version::Old => assert!(compact.starts_with(&long) && compact.len() > long.len()),
    }
    let lost = container.throw_away();
    container.sessiond(&["restore", &session]).ok();
    assert_eq!(kept(&lost), kept(&container.home.home()), "{:?}", container.version);
    container.throw_away();
    container.resume(&session, &prompt("after", &[vec![say("I go on from the summary")]]));
    assert_restored(&lost, &container.home.home(), "after the compaction");
    let said = conversation(&model.asked("after PLAN")).join("\n");
    assert!(said.contains(SUMMARY) && !said.contains("lorem ipsum dolor"), "{said}");
    container.sessiond(&["verify", &session]).ok();
}

fn a_fork_and_the_session_it_began_with_both_go_on(container: &Container<'_>) {
    let (model, session) = (container.model, id());
    container.begin(&session, &prompt("first", &[vec![bash("echo one-out")], vec![say("first turn done")]]));
    let end_of_first = model.last("first PLAN");
    container.resume(&session, &prompt("second", &[vec![say("second turn done")]]));
    let end_of_second = model.last("second PLAN");
    let fork = container.sessiond(&["fork", &session, "--at", "turn:1", "--quiet"]).ok().out().trim().to_owned();
    let lost = container.throw_away();

    container.resume(&fork, &prompt("in the fork", &[vec![say("the fork goes on")]]));
    let asked = model.asked("in the fork PLAN");
    assert_goes_on(&end_of_first, &asked, &["first turn done", "in the fork"]);
    assert!(!conversation(&asked).join("\n").contains("second"), "{asked:?}");
    let forked = std::fs::read_to_string(container.transcript(&fork)).unwrap();
    assert!(!forked.contains(&session) && forked.contains(&fork), "the fork's lines carry its own id");
    assert!(Container::transcripts(&container.home.home(), &session).is_empty());

    container.throw_away();
    container.resume(&session, &prompt("third", &[vec![say("third turn done")]]));
    let asked = model.asked("third PLAN");
    assert_goes_on(&end_of_second, &asked, &["second turn done", "third PLAN"]);
    assert!(!conversation(&asked).join("\n").contains("in the fork"), "{asked:?}");
    assert_restored(&lost, &container.home.home(), "beside its fork");

    // And the fork has what was said in it, from another home still.
    container.throw_away();
    container.sessiond(&["restore", &fork]).ok();
    assert_eq!(std::fs::read_to_string(container.transcript(&fork)).unwrap(), forked);
}
