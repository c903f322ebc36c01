//! Gemini CLI: two directories with the same base name, and a client that is interrupted.

use std::path::Path;
use std::process::Command;

use super::container::{Container, assert_continues, kill_process_tree, scenarios};
use super::model::{Request, conversation, hanging_reply, prompt, text_reply};
use crate::support::backend::{Running, eventually};

scenarios!(gemini Gemini: (
    two_directories_with_one_name_continue_in_a_new_home,
    a_power_loss_loses_no_acknowledged_byte,
));

/// Completes the first turn, and interrupts the model in the middle of the second.
fn interrupted(container: &Container<'_>) -> (String, Request, Running) {
    let model = container.model;
    let session = container.begin(&prompt("first", &[vec![text_reply("first turn done")]]));
    let end_of_first = model.last("first PLAN");
    // The output of the command is not in the prompt. The client refuses substitutions.
    let second = [
        vec![container.client.shell("printf 'two-%d-out' 2")],
        vec![hanging_reply("half an answ")],
    ];
    let run = container.start(&session, &prompt("second", &second));
    let answered = |request: &Request| {
        let messages = conversation(request);
        messages
            .iter()
            .any(|text| text.starts_with("result: ") && text.contains("two-2-out"))
    };
    eventually("the model is in the middle of its answer", || {
        model.requests().iter().any(answered)
    });
    (session, end_of_first, run)
}

fn check_continuation(container: &Container<'_>, session: &str, end_of_first: &Request) {
    container.replace_home();
    container.resume(
        session,
        &prompt("third", &[vec![text_reply("third turn done")]]),
    );
    let asked = container.model.wait_for_request("third PLAN");
    let earlier = ["first turn done", "second PLAN", "two-2-out", "third PLAN"];
    assert_continues(end_of_first, &asked, &earlier);
    container.sessiond(&["verify", session]).ok();
}

fn a_power_loss_loses_no_acknowledged_byte(container: &Container<'_>) {
    let (session, end_of_first, mut run) = interrupted(container);
    container.sessiond(&["flush", "--wait"]).ok();
    kill_process_tree(&mut run);
    check_continuation(container, &session, &end_of_first);
}

fn two_directories_with_one_name_continue_in_a_new_home(container: &Container<'_>) {
    let model = container.model;
    let mut session_of = Vec::new();
    let directories = ["x", "y"].map(|parent| container.home.path().join(parent).join("app"));
    for (number, directory) in directories.iter().enumerate() {
        std::fs::create_dir_all(directory).unwrap();
        let id = format!("{number}aaaaaaa-0000-4000-8000-000000000001");
        let words = prompt(&format!("begin {number}"), &[vec![text_reply("begun")]]);
        let first = container.command(None, &["--session-id", &id, "-p", &words]);
        container.run_to_end(in_directory(first, directory)).ok();
        session_of.push((id, model.last(&format!("begin {number} PLAN"))));
    }
    container.replace_home();
    // The second one first: it finds its directory, not that of the first.
    for (number, directory) in directories.iter().enumerate().rev() {
        let (id, earlier) = &session_of[number];
        let words = prompt(&format!("go on {number}"), &[vec![text_reply("went on")]]);
        let next = container.command(Some(id), &["--resume", id, "-p", &words]);
        container.run_to_end(in_directory(next, directory)).ok();
        let asked = model.wait_for_request(&format!("go on {number} PLAN"));
        assert_continues(earlier, &asked, &["begun", "go on"]);
    }
    // Another directory with that name, in a home where the name is taken.
    let elsewhere = container.home.path().join("z/app");
    std::fs::create_dir_all(&elsewhere).unwrap();
    let (id, earlier) = &session_of[0];
    let cwd = elsewhere.to_string_lossy().into_owned();
    container.sessiond(&["restore", id, "--cwd", &cwd]).ok();
    let words = prompt("elsewhere", &[vec![text_reply("went on there")]]);
    let next = container.command(None, &["--resume", id, "-p", &words]);
    container.run_to_end(in_directory(next, &elsewhere)).ok();
    assert_continues(
        earlier,
        &model.wait_for_request("elsewhere PLAN"),
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
