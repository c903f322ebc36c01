//! Gemini CLI: two directories with the same base name, and a client that is interrupted.

use std::path::Path;
use std::process::Command;

use super::container::{Container, assert_goes_on, scenarios, switch_off};
use super::model::{Request, conversation, hang, prompt, say};
use crate::support::backend::{Running, eventually};

scenarios!(gemini Gemini: (
    two_directories_with_one_name_both_go_on_in_a_new_home,
    a_machine_that_is_switched_off_loses_nothing_that_was_acknowledged,
));

/// The first turn is done, and in the second one the model is in the middle of its answer.
fn interrupted(container: &Container<'_>) -> (String, Request, Running) {
    let model = container.model;
    let session = container.begin(&prompt("first", &[vec![say("first turn done")]]));
    let end_of_first = model.last("first PLAN");
    // What the command prints is nowhere in the prompt. The client refuses substitutions.
    let second = [
        vec![container.client.shell("printf 'two-%d-out' 2")],
        vec![hang("half an answ")],
    ];
    let run = container.start(&session, &prompt("second", &second));
    let answered = |request: &Request| {
        let said = conversation(request);
        said.iter()
            .any(|said| said.starts_with("result: ") && said.contains("two-2-out"))
    };
    eventually("the model is in the middle of its answer", || {
        model.requests().iter().any(answered)
    });
    (session, end_of_first, run)
}

fn goes_on(container: &Container<'_>, session: &str, end_of_first: &Request) {
    container.throw_away();
    container.resume(session, &prompt("third", &[vec![say("third turn done")]]));
    let asked = container.model.asked("third PLAN");
    let earlier = ["first turn done", "second PLAN", "two-2-out", "third PLAN"];
    assert_goes_on(end_of_first, &asked, &earlier);
    container.sessiond(&["verify", session]).ok();
}

fn a_machine_that_is_switched_off_loses_nothing_that_was_acknowledged(container: &Container<'_>) {
    let (session, end_of_first, mut run) = interrupted(container);
    container.sessiond(&["flush", "--wait"]).ok();
    switch_off(&mut run);
    goes_on(container, &session, &end_of_first);
}

fn two_directories_with_one_name_both_go_on_in_a_new_home(container: &Container<'_>) {
    let model = container.model;
    let mut session_of = Vec::new();
    let directories = ["x", "y"].map(|parent| container.home.path().join(parent).join("app"));
    for (number, directory) in directories.iter().enumerate() {
        std::fs::create_dir_all(directory).unwrap();
        let id = format!("{number}aaaaaaa-0000-4000-8000-000000000001");
        let words = prompt(&format!("begin {number}"), &[vec![say("begun")]]);
        let first = container.command(None, &["--session-id", &id, "-p", &words]);
        container.ran(in_directory(first, directory)).ok();
        session_of.push((id, model.last(&format!("begin {number} PLAN"))));
    }
    container.throw_away();
    // The second one first: it finds its directory, not that of the first.
    for (number, directory) in directories.iter().enumerate().rev() {
        let (id, earlier) = &session_of[number];
        let words = prompt(&format!("go on {number}"), &[vec![say("went on")]]);
        let next = container.command(Some(id), &["--resume", id, "-p", &words]);
        container.ran(in_directory(next, directory)).ok();
        let asked = model.asked(&format!("go on {number} PLAN"));
        assert_goes_on(earlier, &asked, &["begun", "go on"]);
    }
    // Another directory with that name, in a home where the name is taken.
    let elsewhere = container.home.path().join("z/app");
    std::fs::create_dir_all(&elsewhere).unwrap();
    let (id, earlier) = &session_of[0];
    let cwd = elsewhere.to_string_lossy().into_owned();
    container.sessiond(&["restore", id, "--cwd", &cwd]).ok();
    let words = prompt("elsewhere", &[vec![say("went on there")]]);
    let next = container.command(None, &["--resume", id, "-p", &words]);
    container.ran(in_directory(next, &elsewhere)).ok();
    assert_goes_on(
        earlier,
        &model.asked("elsewhere PLAN"),
        &["begun", "elsewhere"],
    );
    for (id, _) in &session_of {
        container.sessiond(&["verify", id]).ok();
    }
}

fn in_directory(mut command: Command, directory: &Path) -> Command {
    command.current_dir(directory);
    command
}
