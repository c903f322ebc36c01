//! Claude Code, ends without warning and with: a machine that is switched off while the model speaks or a tool runs, and SIGTERM.

use serde_json::Value;

use super::anthropic::conversation;
use super::container::{Container, assert_goes_on, bash, both_versions, id, lines, switch_off};
use super::model::{Request, hang, prompt, say};
use crate::support::backend::{Running, eventually};

both_versions!(a_machine_that_is_switched_off_loses_nothing_that_was_acknowledged, what_the_client_writes_after_sigterm_is_in_the_bucket);

fn a_machine_that_is_switched_off_loses_nothing_that_was_acknowledged(container: &Container<'_>) {
    let (model, session) = (container.model, id());
    container.begin(&session, &prompt("first", &[vec![say("first turn done")]]));
    let end_of_first = model.last("first PLAN");

    // While the model speaks.
    let mut run = container.start(&session, "--resume", &prompt("second", &[vec![bash("echo two-out")], vec![hang("half an answ")]]));
    let answered = |request: &Request| conversation(request).iter().any(|said| said.starts_with("result: ") && said.contains("two-out"));
    eventually("the model is in the middle of its answer", || model.requests().iter().any(answered));
    let restored = switched_off(container, &session, &mut run, |line| line["toolUseResult"]["stdout"] == "two-out");
    let half = |line: &Value| line["type"] == "assistant" && line["message"]["content"].to_string().contains("half an answ");
    assert!(!restored.iter().any(half), "half of an answer is none");

    // While a tool runs.
    let mut run = container.start(&session, "--resume", &prompt("third", &[vec![say("I run it"), bash("sleep 300")]]));
    let second = ["first turn done", "second PLAN", "result: \"two-out", "third PLAN"];
    assert_goes_on(&end_of_first, &model.asked("third PLAN"), &second);
    switched_off(container, &session, &mut run, |line| line["message"]["content"][0]["input"]["command"] == "sleep 300");

    container.resume(&session, &prompt("fourth", &[vec![say("fourth turn done")]]));
    assert_goes_on(&end_of_first, &model.asked("fourth PLAN"), &[&second[..], &["fourth PLAN"]].concat());
}

/// Waits until the transcript has a line, has it acknowledged, switches everything off, and restores: what comes back is what
/// was on disk when it was acknowledged, or later. Answers its lines.
fn switched_off(container: &Container<'_>, session: &str, run: &mut Running, line: impl Fn(&Value) -> bool) -> Vec<Value> {
    let transcript = container.transcript(session);
    eventually("the transcript has it", || lines(&transcript).iter().any(&line));
    let acknowledged = std::fs::read(&transcript).unwrap();
    container.sessiond(&["flush", "--wait"]).ok();
    switch_off(run);
    let on_disk = std::fs::read(&transcript).unwrap();
    container.throw_away();
    container.sessiond(&["restore", session]).ok();
    let restored = std::fs::read(container.transcript(session)).unwrap();
    assert!(restored.starts_with(&acknowledged), "{} bytes of {} that were acknowledged", restored.len(), acknowledged.len());
    assert!(on_disk.starts_with(&restored), "what was restored was never on disk");
    lines(&container.transcript(session))
}

fn what_the_client_writes_after_sigterm_is_in_the_bucket(container: &Container<'_>) {
    let (model, session) = (container.model, id());
    let mut run = container.start(&session, "--session-id", &prompt("first", &[vec![say("I run it"), bash("sleep 300")]]));
    let first = model.asked("first PLAN");
    let there = || Container::transcripts(&container.home.home(), &session).pop();
    let runs = |line: &Value| line["message"]["content"][0]["input"]["command"] == "sleep 300";
    eventually("the tool runs", || there().is_some_and(|transcript| lines(&transcript).iter().any(runs)));
    container.sessiond(&["flush", "--wait"]).ok();
    let read = || std::fs::read(container.transcript(&session)).unwrap();
    let before = read();
    run.signal("TERM");
    assert_eq!(run.code(), Some(143));
    let on_disk = read();
    assert!(on_disk.starts_with(&before) && on_disk.len() > before.len(), "it wrote nothing after the signal");
    container.throw_away();
    container.sessiond(&["restore", &session]).ok();
    assert_eq!(read(), on_disk);
    container.resume(&session, &prompt("second", &[vec![say("second turn done")]]));
    assert_goes_on(&first, &model.asked("second PLAN"), &["second PLAN"]);
}
