//! Codex, OpenCode and Gemini CLI conversations that lose their home.

use super::client::Client;
use super::container::{Container, assert_goes_on, scenarios};
use super::model::{conversation, prompt, say};
use crate::support::TempHome;

scenarios!(codex Codex, opencode OpenCode, gemini Gemini: (the_whole_conversation_goes_on_in_a_new_home));

fn the_whole_conversation_goes_on_in_a_new_home(container: &Container<'_>) {
    let (model, client) = (container.model, container.client);
    let run = |command: &str| client.shell(command);
    let first = [
        vec![say("I run it"), run("seq -f 'line %g' 9000")],
        vec![run("echo one-out")],
        vec![say("first turn done")],
    ];
    let session = container.begin(&prompt("first", &first));
    let end_of_first = model.last("first PLAN");
    assert!(
        conversation(&end_of_first)
            .iter()
            .any(|said| said.starts_with("result: ") && said.contains("line 9000"))
    );
    let lost = container.throw_away();
    container.sessiond(&["restore", &session]).ok();
    assert_eq!(client.record(&lost, &session), container.record(&session));
    container.throw_away();
    container.resume(
        &session,
        &prompt(
            "second",
            &[vec![run("echo two-out")], vec![say("second turn done")]],
        ),
    );
    assert_goes_on(
        &end_of_first,
        &model.asked("second PLAN"),
        &["first turn done", "second PLAN"],
    );
    let end_of_second = model.last("second PLAN");

    // Another home; and another directory for Codex, which looks everywhere. OpenCode runs a session where it began, and does not
    // end when it is started elsewhere.
    let (directory, mut other) = (TempHome::new(), container.beside());
    if client == Client::Codex {
        other.cwd = directory.path().join("elsewhere");
        std::fs::create_dir(&other.cwd).unwrap();
    }
    other.resume(&session, &prompt("third", &[vec![say("third turn done")]]));
    assert_goes_on(
        &end_of_second,
        &model.asked("third PLAN"),
        &["second turn done", "third PLAN"],
    );
    other.sessiond(&["verify", &session]).ok();
}
