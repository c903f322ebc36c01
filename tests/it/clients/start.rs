//! One unchanged command for the first start, a restart, a crash and a second host.

use super::container::{Container, assert_goes_on, scenarios, switch_off};
use super::model::{prompt, say};
use crate::support::backend::eventually;

scenarios!(claude_new ClaudeNew, claude_old ClaudeOld, codex Codex, opencode OpenCode: (
    one_command_starts_and_restarts_the_session_of_a_request,
));

fn one_command_starts_and_restarts_the_session_of_a_request(container: &Container<'_>) {
    let (model, client) = (container.model, container.client);
    let turn = |home: &Container<'_>, name: &str| {
        let text = prompt(name, &[vec![say(&format!("{name} turn done"))]]);
        home.run_to_end(home.job("job-7", &text)).ok();
        model.last(&format!("{name} PLAN"))
    };
    let first = turn(container, "first");
    let second = turn(container, "second");
    assert_goes_on(&first, &second, &["first turn done", "second PLAN"]);

    let text = prompt(
        "third",
        &[vec![say("I run it"), client.shell("touch runs; sleep 300")]],
    );
    let mut run = container.start_command(container.job("job-7", &text));
    eventually("the tool runs", || container.cwd.join("runs").exists());
    container.sessiond(&["flush", "--wait"]).ok();
    switch_off(&mut run);
    let fourth = turn(container, "fourth");
    assert_goes_on(&second, &fourth, &["second turn done", "fourth PLAN"]);

    let fifth = turn(&container.beside(), "fifth");
    assert_goes_on(&fourth, &fifth, &["fourth turn done", "fifth PLAN"]);
}
