//! Codex and OpenCode conversations that lose their home.

use super::client::Client;
use super::container::{Container, assert_continues, scenarios};
use super::model::{conversation, prompt, text_reply};
use crate::support::TempHome;

scenarios!(codex Codex, opencode OpenCode: (a_conversation_continues_in_a_new_home));

fn a_conversation_continues_in_a_new_home(container: &Container<'_>) {
    let (model, client) = (container.model, container.client);
    let run = |command: &str| client.shell(command);
    let first = [
        vec![text_reply("I run it"), run("seq -f 'line %g' 9000")],
        vec![run("echo one-out")],
        vec![text_reply("first turn done")],
    ];
    let session = container.begin(&prompt("first", &first));
    let end_of_first = model.last("first PLAN");
    assert!(
        conversation(&end_of_first)
            .iter()
            .any(|said| said.starts_with("result: ") && said.contains("line 9000"))
    );
    let lost = container.replace_home();
    container.sessiond(&["restore", &session]).ok();
    assert_eq!(client.record(&lost, &session), container.record(&session));
    container.replace_home();
    container.resume(
        &session,
        &prompt(
            "second",
            &[
                vec![run("echo two-out")],
                vec![text_reply("second turn done")],
            ],
        ),
    );
    assert_continues(
        &end_of_first,
        &model.wait_for_request("second PLAN"),
        &["first turn done", "second PLAN"],
    );
    let end_of_second = model.last("second PLAN");

    // Another home, and another directory for Codex, which searches all directories. OpenCode runs
    // a session only in its first directory, and hangs in another one.
    let (directory, mut other) = (TempHome::new(), container.second_container());
    if client == Client::Codex {
        other.cwd = directory.path().join("elsewhere");
        std::fs::create_dir(&other.cwd).unwrap();
    }
    other.resume(
        &session,
        &prompt("third", &[vec![text_reply("third turn done")]]),
    );
    assert_continues(
        &end_of_second,
        &model.wait_for_request("third PLAN"),
        &["second turn done", "third PLAN"],
    );
    other.sessiond(&["verify", &session]).ok();
}
