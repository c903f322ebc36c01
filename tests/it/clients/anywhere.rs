//! Scenarios for every client: power loss, SIGTERM, two containers at once, a fork.

use std::collections::BTreeMap;

use super::client::Client;
use super::container::{Container, assert_continues, kill_process_tree, scenarios, transcripts};
use super::model::{CALL, Request, conversation, hanging_reply, prompt, text_reply};
use crate::support::backend::{Running, Signal, eventually};
use crate::support::files::files_below;

scenarios!(claude_new ClaudeNew, claude_old ClaudeOld, codex Codex, opencode OpenCode: (
    a_power_loss_loses_no_acknowledged_byte,
    writes_after_sigterm_are_stored,
    two_concurrent_containers_get_main_log_and_branch,
    a_fork_and_its_origin_both_continue,
));

fn a_power_loss_loses_no_acknowledged_byte(container: &Container<'_>) {
    let (model, client) = (container.model, container.client);
    let session = container.begin(&prompt("first", &[vec![text_reply("first turn done")]]));
    let end_of_first = model.last("first PLAN");

    // While the model responds. The output of the command is not in the prompt.
    let second = [
        vec![client.shell("echo two-$((1+1))-out")],
        vec![hanging_reply("half an answ")],
    ];
    let mut run = container.start(&session, &prompt("second", &second));
    let answered = |request: &Request| {
        conversation(request)
            .iter()
            .any(|said| said.starts_with("result: ") && said.contains("two-2-out"))
    };
    eventually("the model is in the middle of its answer", || {
        model.requests().iter().any(answered)
    });
    check_power_loss(container, &session, &mut run, "two-2-out");

    // While a tool runs.
    let mut run = container.start(
        &session,
        &prompt(
            "third",
            &[vec![
                text_reply("I run it"),
                client.shell("touch runs; sleep 300"),
            ]],
        ),
    );
    let earlier = ["first turn done", "second PLAN", "two-2-out", "third PLAN"];
    assert_continues(
        &end_of_first,
        &model.wait_for_request("third PLAN"),
        &earlier,
    );
    eventually("the tool runs", || container.cwd.join("runs").exists());
    let calls = |record: String| record.contains("sleep 300") && record.matches(CALL).count() > 1;
    eventually("the call is on disk", || calls(container.record(&session)));
    check_power_loss(container, &session, &mut run, CALL);

    container.resume(
        &session,
        &prompt("fourth", &[vec![text_reply("fourth turn done")]]),
    );
    assert_continues(
        &end_of_first,
        &model.wait_for_request("fourth PLAN"),
        &[&earlier[..], &["fourth PLAN"]].concat(),
    );
}

/// Waits until the words are on disk and flushed, kills everything, and restores: the restored
/// files are those at the acknowledgment or later ones.
fn check_power_loss(container: &Container<'_>, session: &str, run: &mut Running, words: &str) {
    eventually("it is on disk", || {
        container.record(session).contains(words)
    });
    let acknowledged = container.record(session);
    container.sessiond(&["flush", "--wait"]).ok();
    kill_process_tree(run);
    let lost = container.replace_home();
    container.sessiond(&["restore", session]).ok();
    let (on_disk, restored) = (
        container.client.record(&lost, session),
        container.record(session),
    );
    if container.client == Client::OpenCode {
        // Rows change in place: each is as acknowledged, or as at the end.
        let by_id = |rows: &'_ str| {
            rows.lines()
                .filter_map(|row| row.split_once(' '))
                .map(|(id, row)| (id.to_owned(), row.to_owned()))
                .collect()
        };
        let [acknowledged, restored, on_disk]: [BTreeMap<String, String>; 3] =
            [&acknowledged, &restored, &on_disk].map(|rows| by_id(rows));
        assert!(
            acknowledged.keys().all(|id| restored.contains_key(id)),
            "{acknowledged:#?}\n{restored:#?}"
        );
        for (id, row) in &restored {
            assert!(
                [&acknowledged, &on_disk]
                    .iter()
                    .any(|rows| rows.get(id) == Some(row)),
                "{id} {row}\n{acknowledged:#?}\n{on_disk:#?}"
            );
        }
        return;
    }
    assert!(
        restored.starts_with(&acknowledged),
        "{} bytes of {} that were acknowledged",
        restored.len(),
        acknowledged.len()
    );
    assert!(
        on_disk.starts_with(&restored),
        "what was restored was never on disk"
    );
}

fn writes_after_sigterm_are_stored(container: &Container<'_>) {
    let (model, client) = (container.model, container.client);
    let session = container.begin(&prompt("first", &[vec![text_reply("first turn done")]]));
    let end_of_first = model.last("first PLAN");
    let mut run = container.start(
        &session,
        &prompt(
            "second",
            &[vec![
                text_reply("I run it"),
                client.shell("touch runs; sleep 300"),
            ]],
        ),
    );
    eventually("the tool runs", || container.cwd.join("runs").exists());
    eventually("the call is on disk", || {
        container.record(&session).contains(CALL)
    });
    container.sessiond(&["flush", "--wait"]).ok();
    let before = container.record(&session);
    run.signal(Signal::TERM);
    let code = run.code();
    assert!(code.is_some_and(|code| code != 0), "{code:?}");
    // On a very busy machine Claude Code sometimes exits with 1 and writes nothing more.
    if matches!(client, Client::ClaudeNew | Client::ClaudeOld) && code != Some(1) {
        let after = container.record(&session);
        assert_eq!(code, Some(143));
        assert!(
            after.starts_with(&before) && after.len() > before.len(),
            "it wrote nothing after the signal"
        );
    }
    let lost = container.replace_home();
    container.sessiond(&["restore", &session]).ok();
    assert_eq!(client.record(&lost, &session), container.record(&session));
    container.resume(
        &session,
        &prompt("third", &[vec![text_reply("third turn done")]]),
    );
    assert_continues(
        &end_of_first,
        &model.wait_for_request("third PLAN"),
        &["first turn done", "second PLAN", "third PLAN"],
    );
}

fn two_concurrent_containers_get_main_log_and_branch(one: &Container<'_>) {
    let (model, client) = (one.model, one.client);
    let session = one.begin(&prompt("first", &[vec![text_reply("first turn done")]]));
    let end_of_first = model.last("first PLAN");
    one.replace_home();
    let two = one.second_container();
    // Both clients run, each with its own turn, before either continues.
    let go = one.cwd.join("go");
    let turn = |who: &str| {
        let waits = client.shell(&format!(
            "while ! test -e {}; do sleep 0.05; done; echo {who}-$((1+1))-out",
            go.display()
        ));
        prompt(
            who,
            &[vec![waits], vec![text_reply(&format!("{who} is done"))]],
        )
    };
    let mut runs = [
        one.start(&session, &turn("alpha")),
        two.start(&session, &turn("beta")),
    ];
    for who in ["alpha", "beta"] {
        assert_continues(
            &end_of_first,
            &model.wait_for_request(&format!("{who} PLAN")),
            &["first turn done", who],
        );
    }
    std::fs::write(&go, "").unwrap();
    let mut codes = runs.each_mut().map(Running::code);
    codes.sort();
    assert_eq!(
        codes,
        [Some(0), Some(4)],
        "one owns the session, and the other reports that it does not"
    );
    let disks = [one, &two].map(|container| container.record(&session));

    // A third home gets one of the two completely, and nothing of the other.
    let three = one.second_container();
    three.sessiond(&["restore", &session]).ok();
    let main = three.record(&session);
    let winner = usize::from(main == disks[1]);
    assert!(
        main == disks[winner],
        "the log is neither the one's nor the other's"
    );
    let (won, lost) = if winner == 0 {
        ("alpha", "beta")
    } else {
        ("beta", "alpha")
    };
    assert!(
        main.contains(&format!("{won}-2-out")) && !main.contains(&format!("{lost} PLAN")),
        "{main}"
    );
    let branches =
        || three.sessiond(&["ls", "--json"]).ok().json()["sessions"][0]["branches"].clone();
    eventually("ls shows the branch", || {
        branches()
            .as_array()
            .is_some_and(|branches| branches.len() == 1)
    });
    let branch = branches()[0].as_str().unwrap().to_owned();
    three
        .sessiond(&["pull", &session, "--branch", &branch, "--to", "branch"])
        .ok();
    let pulled: String = files_below(&three.cwd.join("branch"))
        .into_values()
        .map(|bytes| String::from_utf8(bytes).unwrap())
        .collect();
    match client {
        Client::OpenCode => assert!(pulled.contains(&format!("{lost}-2-out")), "{pulled}"),
        Client::Codex => assert_eq!(pulled, disks[1 - winner]),
        _ => {
            let transcript = transcripts(&three.cwd.join("branch"), &session).remove(0);
            assert_eq!(
                std::fs::read_to_string(transcript).unwrap(),
                disks[1 - winner]
            );
        }
    }
    std::fs::remove_dir_all(three.cwd.join("branch")).unwrap();

    three.resume(
        &session,
        &prompt("fourth", &[vec![text_reply("fourth turn done")]]),
    );
    let request = conversation(&model.wait_for_request("fourth PLAN")).join("\n");
    assert!(
        request.contains(&format!("{won}-2-out")) && !request.contains(&format!("{lost}-2-out")),
        "{request}"
    );
}

fn a_fork_and_its_origin_both_continue(container: &Container<'_>) {
    let (model, client) = (container.model, container.client);
    let session = container.begin(&prompt(
        "first",
        &[
            vec![client.shell("echo one-out")],
            vec![text_reply("first turn done")],
        ],
    ));
    let end_of_first = model.last("first PLAN");
    container.resume(
        &session,
        &prompt("second", &[vec![text_reply("second turn done")]]),
    );
    let end_of_second = model.last("second PLAN");
    let fork = container
        .sessiond(&["fork", &session, "--at", "turn:1", "--quiet"])
        .ok()
        .out()
        .trim()
        .to_owned();
    let lost = container.replace_home();

    container.resume(
        &fork,
        &prompt("in the fork", &[vec![text_reply("the fork goes on")]]),
    );
    let request = model.wait_for_request("in the fork PLAN");
    assert_continues(&end_of_first, &request, &["first turn done", "in the fork"]);
    assert!(
        !conversation(&request).join("\n").contains("second PLAN"),
        "{request:?}"
    );
    let forked = container.record(&fork);
    assert!(
        !forked.contains(&session) && forked.contains(&fork),
        "the fork carries its own id: {forked}"
    );

    container.replace_home();
    container.resume(
        &session,
        &prompt("third", &[vec![text_reply("third turn done")]]),
    );
    let request = model.wait_for_request("third PLAN");
    assert_continues(
        &end_of_second,
        &request,
        &["second turn done", "third PLAN"],
    );
    assert!(
        !conversation(&request).join("\n").contains("in the fork"),
        "{request:?}"
    );
    let (before, now) = (client.record(&lost, &session), container.record(&session));
    assert!(
        now.starts_with(&before) || client == Client::OpenCode,
        "the session is another beside its fork"
    );

    // A third home restores the fork with its messages.
    container.replace_home();
    container.sessiond(&["restore", &fork]).ok();
    assert_eq!(container.record(&fork), forked);
}
