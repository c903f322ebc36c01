//! One unchanged command for the first start, a restart, a crash and a second host.

use super::container::{Container, assert_continues, kill_process_tree, scenarios};
use super::model::{prompt, text_reply};
use crate::support::backend::eventually;

scenarios!(claude_new ClaudeNew, claude_old ClaudeOld, codex Codex, opencode OpenCode: (
    one_command_starts_and_restarts_the_session_of_a_request,
));

fn one_command_starts_and_restarts_the_session_of_a_request(container: &Container<'_>) {
    let (model, client) = (container.model, container.client);
    let turn = |home: &Container<'_>, name: &str| {
        let text = prompt(name, &[vec![text_reply(&format!("{name} turn done"))]]);
        home.run_to_end(home.job("job-7", &text)).ok();
        model.last(&format!("{name} PLAN"))
    };
    let first = turn(container, "first");
    let second = turn(container, "second");
    assert_continues(&first, &second, &["first turn done", "second PLAN"]);

    let text = prompt(
        "third",
        &[vec![
            text_reply("I run it"),
            client.shell("touch runs; sleep 300"),
        ]],
    );
    let mut run = container.start_command(container.job("job-7", &text));
    eventually("the tool runs", || container.cwd.join("runs").exists());
    container.sessiond(&["flush", "--wait"]).ok();
    kill_process_tree(&mut run);
    let fourth = turn(container, "fourth");
    assert_continues(&second, &fourth, &["second turn done", "fourth PLAN"]);

    let fifth = turn(&container.second_container(), "fifth");
    assert_continues(&fourth, &fifth, &["fourth turn done", "fifth PLAN"]);
}
