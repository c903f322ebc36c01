//! Claude Code conversations that lose their home: history, tools, tasks, sub-agents, rewind,
//! compaction, another working directory.

use std::os::unix::fs::MetadataExt;

use serde_json::{Value, json};

use super::anthropic::SUMMARY;
use super::client::Client;
use super::container::{
    Container, assert_goes_on, assert_restored, bash, kept, scenarios, transcript,
};
use super::model::{call, conversation, fill, prompt, say};
use crate::support::TempHome;

scenarios!(new ClaudeNew, old ClaudeOld: (
    the_whole_conversation_goes_on_in_a_new_home,
    a_transcript_that_the_client_rewrites_is_restored_as_it_is_then,
    another_directory_and_another_home,
    a_plan_is_there_in_a_new_home,
));

fn a_plan_is_there_in_a_new_home(container: &Container<'_>) {
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
    planning(None, &prompt("first", &[vec![say("I think")]]));
    let listed = container.sessiond(&["ls", "--json"]).ok().json();
    let session = listed["sessions"][0]["id"].as_str().unwrap().to_owned();
    let asked = model.last("first PLAN").body.to_string();
    assert!(asked.contains("No plan file exists yet"), "{asked}");
    let (_, rest) = asked.split_once("/.claude/plans/").unwrap();
    let file = format!(".claude/plans/{}.md", rest.split_once(".md").unwrap().0);
    let plan = container.home.home().join(&file);
    let write = call(
        "Write",
        json!({ "file_path": plan, "content": "# The plan\n" }),
    );
    planning(
        Some(&session),
        &prompt("second", &[vec![write], vec![say("written")]]),
    );
    assert_eq!(std::fs::read_to_string(&plan).unwrap(), "# The plan\n");

    // It leaves the plan mode, and loses its home before it enters it again.
    container.resume(&session, &prompt("third", &[vec![say("I work")]]));
    container.throw_away();
    planning(Some(&session), &prompt("fourth", &[vec![say("I go on")]]));
    assert_eq!(std::fs::read_to_string(&plan).unwrap(), "# The plan\n");
    let asked = model.last("fourth PLAN").body["messages"].to_string();
    let (_, asked) = asked.rsplit_once("third PLAN").unwrap();
    assert!(
        asked.contains("A plan file already exists at") && !asked.contains("No plan file"),
        "{asked}"
    );
}

fn the_whole_conversation_goes_on_in_a_new_home(container: &Container<'_>) {
    let model = container.model;
    let file = container.cwd.join("a.txt");
    let write = |text: &str| call("Write", json!({ "file_path": file, "content": text }));
    let child = prompt(
        "child",
        &[
            vec![say("child runs"), bash("echo child-out")],
            vec![say("child is done")],
        ],
    );
    let child = json!({ "description": "Look", "prompt": child, "subagent_type": "general-purpose", "run_in_background": false });
    let first = [
        vec![say("I write a file"), write("one\n")],
        vec![bash("seq -f 'line %g' 9000")],
        vec![call(
            "TaskCreate",
            json!({ "subject": "Task number one", "description": "To be done" }),
        )],
        vec![call("Agent", child)],
        vec![say("first turn done")],
    ];
    let session = container.begin(&prompt("first", &first));
    let end_of_first = model.last("first PLAN");
    let said = conversation(&end_of_first).join("\n");
    for words in [
        "File created successfully",
        "Output too large",
        "Task #1 created",
        "child is done",
    ] {
        assert!(said.contains(words), "{words:?}: {said}");
    }
    let lost = container.throw_away();
    let files = kept(&lost);
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

    // A new home: the next request holds all of it.
    container.resume(
        &session,
        &prompt(
            "second",
            &[vec![write("two\n")], vec![say("second turn done")]],
        ),
    );
    assert_restored(&lost, &container.home.home(), "after the first turn");
    assert_goes_on(
        &end_of_first,
        &model.asked("second PLAN"),
        &["first turn done", "second PLAN"],
    );
    let end_of_second = model.last("second PLAN");

    // And once more: the task list, the sub-agent and the large result are where the client looks for them.
    let lost = container.throw_away();
    let find = |part: &str| {
        kept(&lost)
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
    let go_on = prompt("child again", &[vec![say("child goes on")]]);
    let third = [
        vec![call("TaskList", json!({}))],
        vec![call(
            "SendMessage",
            json!({ "to": agent, "summary": "Go on with it please", "message": go_on }),
        )],
        vec![call(
            "Read",
            json!({ "file_path": result, "offset": 8999, "limit": 2 }),
        )],
        vec![say("third turn done")],
    ];
    container.resume(&session, &prompt("third", &third));
    assert_restored(&lost, &container.home.home(), "after the second turn");
    assert_goes_on(
        &end_of_second,
        &model.asked("third PLAN"),
        &["second turn done", "third PLAN"],
    );
    let said = conversation(&model.last("third PLAN")).join("\n");
    assert!(
        said.contains("[pending] Task number one") && said.contains("line 9000"),
        "{said}"
    );
    let continued = conversation(&model.asked("child again PLAN")).join("\n");
    for words in ["child runs", "child-out", "child is done", "child again"] {
        assert!(
            continued.contains(words),
            "the sub-agent has forgotten {words:?}: {continued}"
        );
    }

    // Rewind needs the file history, and says that it is done also where there is none.
    let lost = container.throw_away();
    assert!(
        kept(&lost)
            .keys()
            .any(|path| path.starts_with("file-history/")),
        "{:?}",
        kept(&lost).keys()
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
        .ran(container.command(
            Some(&session),
            &["-p", "--resume", &session, "--rewind-files", &before],
        ))
        .ok();
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "one\n");
    assert_restored(&lost, &container.home.home(), "after the rewind");
}

fn a_transcript_that_the_client_rewrites_is_restored_as_it_is_then(container: &Container<'_>) {
    let model = container.model;
    // Seven answers of 800 KB: the client collects only in a transcript of 5 MiB and more.
    let mut rounds = vec![vec![fill(800_000), bash("true")]; 7];
    rounds.push(vec![say("enough was said")]);
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
        // It knows the variable not, and appends.
        _ => assert!(compact.starts_with(&long) && compact.len() > long.len()),
    }
    let lost = container.throw_away();
    container.sessiond(&["restore", &session]).ok();
    assert_eq!(
        kept(&lost),
        kept(&container.home.home()),
        "{:?}",
        container.client
    );
    container.throw_away();
    container.resume(
        &session,
        &prompt("after", &[vec![say("I go on from the summary")]]),
    );
    assert_restored(&lost, &container.home.home(), "after the compaction");
    let said = conversation(&model.asked("after PLAN")).join("\n");
    assert!(
        said.contains(SUMMARY) && !said.contains("lorem ipsum dolor"),
        "{said}"
    );
    container.sessiond(&["verify", &session]).ok();
}

fn another_directory_and_another_home(one: &Container<'_>) {
    let model = one.model;
    let session = one.begin(&prompt(
        "first",
        &[
            vec![bash("seq -f 'line %g' 9000")],
            vec![say("first turn done")],
        ],
    ));
    let end_of_first = model.last("first PLAN");
    let before = std::fs::read(transcript(&one.home.home(), &session)).unwrap();
    let directory = TempHome::new();
    let mut two = one.beside();
    two.cwd = directory.path().join("elsewhere, with a long name.d");
    std::fs::create_dir(&two.cwd).unwrap();
    if two.client == Client::ClaudeOld {
        // This is what it is for: where it was, the client does not find it.
        two.sessiond(&["restore", &session]).ok();
        let ran = two.ran(two.command(Some(&session), &["--resume", &session, "-p", "hello"]));
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
        &prompt("second", &[vec![say("second turn done")]]),
    );
    assert_goes_on(
        &end_of_first,
        &model.asked("second PLAN"),
        &["first turn done", "second PLAN"],
    );
    let end_of_second = model.last("second PLAN");
    let after = std::fs::read(transcript(&two.home.home(), &session)).unwrap();
    assert!(after.starts_with(&before) && after.len() > before.len());

    // From here on it lives there: a plain restore puts it into that project, and only there.
    let mut three = two.beside();
    three.cwd = two.cwd.clone();
    three.resume(&session, &prompt("third", &[vec![say("third turn done")]]));
    assert!(
        std::fs::read(transcript(&three.home.home(), &session))
            .unwrap()
            .starts_with(&after)
    );
    assert_goes_on(
        &end_of_second,
        &model.asked("third PLAN"),
        &["second turn done", "third PLAN"],
    );
    let end_of_third = model.last("third PLAN");
    three.sessiond(&["verify", &session]).ok();

    // And back, in one step.
    let mut four = one.beside();
    four.cwd = one.cwd.clone();
    let back = four.cwd.to_string_lossy().into_owned();
    four.sessiond(&["restore", &session, "--cwd", &back]).ok();
    four.resume(
        &session,
        &prompt("fourth", &[vec![say("fourth turn done")]]),
    );
    assert_goes_on(
        &end_of_third,
        &model.asked("fourth PLAN"),
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
