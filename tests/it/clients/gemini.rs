//! Gemini CLI in two directories with the same base name.

use super::container::{Container, assert_goes_on, scenarios};
use super::model::{prompt, say};

scenarios!(gemini Gemini: (two_directories_with_one_name_both_go_on_in_a_new_home));

fn two_directories_with_one_name_both_go_on_in_a_new_home(container: &Container<'_>) {
    let model = container.model;
    let mut session_of = Vec::new();
    let directories = ["x", "y"].map(|parent| container.home.path().join(parent).join("app"));
    for (number, directory) in directories.iter().enumerate() {
        std::fs::create_dir_all(directory).unwrap();
        let id = format!("{number}aaaaaaa-0000-4000-8000-000000000001");
        let words = prompt(&format!("begin {number}"), &[vec![say("begun")]]);
        let mut first = container.command(None, &["--session-id", &id, "-p", &words]);
        container.ran(first_in(&mut first, directory)).ok();
        session_of.push((id, model.last(&format!("begin {number} PLAN"))));
    }
    container.throw_away();
    // The second one first: it finds its directory, not that of the first.
    for (number, directory) in directories.iter().enumerate().rev() {
        let (id, earlier) = &session_of[number];
        let words = prompt(&format!("go on {number}"), &[vec![say("went on")]]);
        let mut next = container.command(Some(id), &["--resume", id, "-p", &words]);
        container.ran(first_in(&mut next, directory)).ok();
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
    let mut next = container.command(None, &["--resume", id, "-p", &words]);
    container.ran(first_in(&mut next, &elsewhere)).ok();
    assert_goes_on(
        earlier,
        &model.asked("elsewhere PLAN"),
        &["begun", "elsewhere"],
    );
    for (id, _) in &session_of {
        container.sessiond(&["verify", id]).ok();
    }
}

fn first_in(
    command: &mut std::process::Command,
    directory: &std::path::Path,
) -> std::process::Command {
    command.current_dir(directory);
    std::mem::replace(command, std::process::Command::new("true"))
}
