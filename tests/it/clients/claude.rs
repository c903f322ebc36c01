//! Claude Code conversations that lose their home: history, tools, tasks, sub-agents, rewind,
//! compaction, another working directory.

use std::os::unix::fs::MetadataExt;

use serde_json::{Value, json};

use super::anthropic::SUMMARY;
use super::client::Client;
use super::container::{
    Container, assert_continues, assert_restored, bash, scenarios, session_files, transcript,
};
use super::model::{conversation, prompt, reply_of_size, text_reply, tool_call_reply};
use crate::support::TempHome;

scenarios!(new ClaudeNew, old ClaudeOld: (
    a_conversation_continues_in_a_new_home,
    a_conversation_continues_from_a_step,
    a_rewritten_transcript_is_restored,
    a_session_moves_to_another_directory_and_home,
    a_plan_is_restored_in_a_new_home,
));

fn a_plan_is_restored_in_a_new_home(container: &Container<'_>) {
    let model = container.model;
    let planning = |session: Option<&str>, prompt: &str| {
        let resume: Vec<&str> = session.iter().flat_map(|id| ["--resume", id]).collect();
        let session: Vec<&str> = session.iter().flat_map(|id| ["--session", id]).collect();
        let arguments = [
            &["run"],
            &session[..],
            &["--", "claude"],
            &resume,
            &["-p", prompt, "--permission-mode", "plan"],
        ];
        container.sessiond(&arguments.concat()).ok();
    };
    planning(None, &prompt("first", &[vec![text_reply("I think")]]));
    let listed = container.sessiond(&["ls", "--json"]).ok().json();
    let session = listed["sessions"][0]["id"].as_str().unwrap().to_owned();
    let asked = model.last("first PLAN").body.to_string();
    assert!(asked.contains("No plan file exists yet"), "{asked}");
    let (_, rest) = asked.split_once("/.claude/plans/").unwrap();
    let file = format!(".claude/plans/{}.md", rest.split_once(".md").unwrap().0);
    let plan = container.home.home().join(&file);
    let write = tool_call_reply(
        "Write",
        json!({ "file_path": plan, "content": "# The plan\n" }),
    );
    planning(
        Some(&session),
        &prompt("second", &[vec![write], vec![text_reply("written")]]),
    );
    assert_eq!(std::fs::read_to_string(&plan).unwrap(), "# The plan\n");

    // It leaves the plan mode, and loses its home before it enters it again.
    container.resume(&session, &prompt("third", &[vec![text_reply("I work")]]));
    container.replace_home();
    planning(
        Some(&session),
        &prompt("fourth", &[vec![text_reply("I go on")]]),
    );
    assert_eq!(std::fs::read_to_string(&plan).unwrap(), "# The plan\n");
    let asked = model.last("fourth PLAN").body["messages"].to_string();
    let (_, asked) = asked.rsplit_once("third PLAN").unwrap();
    assert!(
        asked.contains("A plan file already exists at") && !asked.contains("No plan file"),
        "{asked}"
    );
}

/// Claude Code resumes a transcript that was cut within a turn: after the results of a step.
fn a_conversation_continues_from_a_step(container: &Container<'_>) {
    let model = container.model;
    let steps = [
        vec![bash("echo one-out")],
        vec![bash("echo two-out"), bash("echo both-out")],
        vec![bash("echo three-out")],
        vec![text_reply("first turn done")],
    ];
    let session = container.begin(&prompt("first", &steps));
    container.replace_home();
    let at = ["restore", &session, "--at", "turn:1.step:2"];
    container.sessiond(&at).ok();
    let next = prompt("second", &[vec![text_reply("second turn done")]]);
    let resume = ["run", "--", "claude", "--resume", &session, "-p", &next];
    container.sessiond(&resume).ok();
    let request = model.last("second PLAN");
    let text = conversation(&request).join("\n");
    for (words, is_kept) in [
        ("one-out", true),
        ("both-out", true),
        ("three-out", false),
        ("first turn done", false),
    ] {
        // The plan in the prompt names the commands; only a result is a line of its own.
        let is_result = request.body["messages"]
            .to_string()
            .contains(&format!("\"content\":\"{words}"));
        assert_eq!(is_result, is_kept, "{words}: {text}");
    }
    let listed = container.sessiond(&["checkpoints", &session, "--json"]);
    let listed = listed.ok().json();
    let last = listed["checkpoints"].as_array().unwrap().last().unwrap();
    assert_eq!(
        (&last["status"], &last["step"]),
        (&json!("completed"), &Value::Null)
    );
}

fn a_conversation_continues_in_a_new_home(container: &Container<'_>) {
    let model = container.model;
    let file = container.cwd.join("a.txt");
    let write =
        |text: &str| tool_call_reply("Write", json!({ "file_path": file, "content": text }));
    let child = prompt(
        "child",
        &[
            vec![text_reply("child runs"), bash("echo child-out")],
            vec![text_reply("child is done")],
        ],
    );
    let child = json!({ "description": "Look", "prompt": child, "subagent_type": "general-purpose", "run_in_background": false });
    let first = [
        vec![text_reply("I write a file"), write("one\n")],
        vec![bash("seq -f 'line %g' 9000")],
        vec![tool_call_reply(
            "TaskCreate",
            json!({ "subject": "Task number one", "description": "To be done" }),
        )],
        vec![tool_call_reply("Agent", child)],
        vec![text_reply("first turn done")],
    ];
    let session = container.begin(&prompt("first", &first));
    let end_of_first = model.last("first PLAN");
    let text = conversation(&end_of_first).join("\n");
    for words in [
        "File created successfully",
        "Output too large",
        "Task #1 created",
        "child is done",
    ] {
        assert!(text.contains(words), "{words:?}: {text}");
    }
    let lost = container.replace_home();
    let files = session_files(&lost);
    for part in [
        format!("{session}.jsonl"),
        "/subagents/agent-".into(),
        "/tool-results/".into(),
        format!("tasks/{session}/1.json"),
    ] {
        assert!(
            files.keys().any(|path| path.contains(&part)),
            "{part}: {:?}",
            files.keys()
        );
    }

    // A new home: the next request contains the whole conversation.
    container.resume(
        &session,
        &prompt(
            "second",
            &[vec![write("two\n")], vec![text_reply("second turn done")]],
        ),
    );
    assert_restored(&lost, &container.home.home(), "after the first turn");
    assert_continues(
        &end_of_first,
        &model.wait_for_request("second PLAN"),
        &["first turn done", "second PLAN"],
    );
    let end_of_second = model.last("second PLAN");

    // Again: the client finds the task list, the sub-agent and the large result.
    let lost = container.replace_home();
    let find = |part: &str| {
        session_files(&lost)
            .into_keys()
            .find(|path| path.contains(part))
            .unwrap()
    };
    let agent = find("/subagents/agent-")
        .split_once("/agent-")
        .unwrap()
        .1
        .split_once('.')
        .unwrap()
        .0
        .to_owned();
    let result = container
        .home
        .home()
        .join(".claude")
        .join(find("/tool-results/"));
    let go_on = prompt("child again", &[vec![text_reply("child goes on")]]);
    let third = [
        vec![tool_call_reply("TaskList", json!({}))],
        vec![tool_call_reply(
            "SendMessage",
            json!({ "to": agent, "summary": "Go on with it please", "message": go_on }),
        )],
        vec![tool_call_reply(
            "Read",
            json!({ "file_path": result, "offset": 8999, "limit": 2 }),
        )],
        vec![text_reply("third turn done")],
    ];
    container.resume(&session, &prompt("third", &third));
    assert_restored(&lost, &container.home.home(), "after the second turn");
    assert_continues(
        &end_of_second,
        &model.wait_for_request("third PLAN"),
        &["second turn done", "third PLAN"],
    );
    let text = conversation(&model.last("third PLAN")).join("\n");
    assert!(
        text.contains("[pending] Task number one") && text.contains("line 9000"),
        "{text}"
    );
    let continued = conversation(&model.wait_for_request("child again PLAN")).join("\n");
    for words in ["child runs", "child-out", "child is done", "child again"] {
        assert!(
            continued.contains(words),
            "the sub-agent has forgotten {words:?}: {continued}"
        );
    }

    // Rewind needs the file history, but reports success without it too.
    let lost = container.replace_home();
    assert!(
        session_files(&lost)
            .keys()
            .any(|path| path.starts_with("file-history/")),
        "{:?}",
        session_files(&lost).keys()
    );
    let transcript = container.client.record(&lost, &session);
    let lines = transcript
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap());
    let mut prompts = lines.filter(|line| {
        line["type"] == "user" && line["message"].to_string().contains("second PLAN")
    });
    let before = prompts.next().unwrap()["uuid"].as_str().unwrap().to_owned();
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "two\n");
    container
        .run_to_end(container.command(
            Some(&session),
            &["-p", "--resume", &session, "--rewind-files", &before],
        ))
        .ok();
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "one\n");
    assert_restored(&lost, &container.home.home(), "after the rewind");
}

fn a_rewritten_transcript_is_restored(container: &Container<'_>) {
    let model = container.model;
    // Seven responses of 800 KB: the client rewrites only a transcript of 5 MiB or more.
    let mut rounds = vec![vec![reply_of_size(800_000), bash("true")]; 7];
    rounds.push(vec![text_reply("enough was text")]);
    let session = container.begin(&prompt("long", &rounds));
    let long = std::fs::read(transcript(&container.home.home(), &session)).unwrap();
    let inode = std::fs::metadata(transcript(&container.home.home(), &session))
        .unwrap()
        .ino();
    assert!(long.len() >= 5 << 20, "{} bytes", long.len());
    container.resume(&session, "/compact");
    let compact = std::fs::read(transcript(&container.home.home(), &session)).unwrap();
    match container.client {
        Client::ClaudeNew => {
            assert!(
                compact.len() < long.len() / 10,
                "{} bytes of {}",
                compact.len(),
                long.len()
            );
            assert_ne!(
                std::fs::metadata(transcript(&container.home.home(), &session))
                    .unwrap()
                    .ino(),
                inode
            );
        }
        // This version does not know the variable, and appends.
        _ => assert!(compact.starts_with(&long) && compact.len() > long.len()),
    }
    let lost = container.replace_home();
    container.sessiond(&["restore", &session]).ok();
    assert_eq!(
        session_files(&lost),
        session_files(&container.home.home()),
        "{:?}",
        container.client
    );
    container.replace_home();
    container.resume(
        &session,
        &prompt("after", &[vec![text_reply("I go on from the summary")]]),
    );
    assert_restored(&lost, &container.home.home(), "after the compaction");
    let text = conversation(&model.wait_for_request("after PLAN")).join("\n");
    assert!(
        text.contains(SUMMARY) && !text.contains("lorem ipsum dolor"),
        "{text}"
    );
    container.sessiond(&["verify", &session]).ok();
}

fn a_session_moves_to_another_directory_and_home(one: &Container<'_>) {
    let model = one.model;
    let session = one.begin(&prompt(
        "first",
        &[
            vec![bash("seq -f 'line %g' 9000")],
            vec![text_reply("first turn done")],
        ],
    ));
    let end_of_first = model.last("first PLAN");
    let before = std::fs::read(transcript(&one.home.home(), &session)).unwrap();
    let directory = TempHome::new();
    let mut two = one.second_container();
    two.cwd = directory.path().join("elsewhere, with a long name.d");
    std::fs::create_dir(&two.cwd).unwrap();
    if two.client == Client::ClaudeOld {
        // The purpose of `--cwd`: the client does not find the session in its old project.
        two.sessiond(&["restore", &session]).ok();
        let ran =
            two.run_to_end(two.command(Some(&session), &["--resume", &session, "-p", "hello"]));
        assert!(
            ran.code() != 0
                && format!("{}{}", ran.out(), ran.err()).contains("No conversation found"),
            "{}{}",
            ran.out(),
            ran.err()
        );
    }
    let cwd = two.cwd.to_string_lossy().into_owned();
    two.sessiond(&["restore", &session, "--cwd", &cwd]).ok();
    assert_eq!(
        std::fs::read(transcript(&two.home.home(), &session)).unwrap(),
        before
    );
    two.resume(
        &session,
        &prompt("second", &[vec![text_reply("second turn done")]]),
    );
    assert_continues(
        &end_of_first,
        &model.wait_for_request("second PLAN"),
        &["first turn done", "second PLAN"],
    );
    let end_of_second = model.last("second PLAN");
    let after = std::fs::read(transcript(&two.home.home(), &session)).unwrap();
    assert!(after.starts_with(&before) && after.len() > before.len());

    // From now on, a restore without `--cwd` writes it into that project only.
    let mut three = two.second_container();
    three.cwd = two.cwd.clone();
    three.resume(
        &session,
        &prompt("third", &[vec![text_reply("third turn done")]]),
    );
    assert!(
        std::fs::read(transcript(&three.home.home(), &session))
            .unwrap()
            .starts_with(&after)
    );
    assert_continues(
        &end_of_second,
        &model.wait_for_request("third PLAN"),
        &["second turn done", "third PLAN"],
    );
    let end_of_third = model.last("third PLAN");
    three.sessiond(&["verify", &session]).ok();

    // Back to the first directory, in one step.
    let mut four = one.second_container();
    four.cwd = one.cwd.clone();
    let back = four.cwd.to_string_lossy().into_owned();
    four.sessiond(&["restore", &session, "--cwd", &back]).ok();
    four.resume(
        &session,
        &prompt("fourth", &[vec![text_reply("fourth turn done")]]),
    );
    assert_continues(
        &end_of_third,
        &model.wait_for_request("fourth PLAN"),
        &["third turn done", "fourth PLAN"],
    );
    assert_eq!(
        transcript(&four.home.home(), &session)
            .parent()
            .unwrap()
            .file_name(),
        transcript(&one.home.home(), &session)
            .parent()
            .unwrap()
            .file_name()
    );
}
