//! Checkpoints within a turn, with the program, on every back end.

use serde_json::{Value, json};
use sqlx::Connection;

use crate::support::TempHome;
use crate::support::backend::{Backend, Signal, eventually, transcript};
use crate::support::files::append;
use crate::support::on_each_backend;

fn line(kind: &str, second: u64, message: Value) -> String {
    let (minute, second) = (second / 60, second % 60);
    let line = json!({
        "type": kind, "uuid": format!("{kind}-{minute}-{second}"), "sessionId": "s1", "cwd": "/work/app",
        "timestamp": format!("2026-05-01T12:{minute:02}:{second:02}.000Z"), "message": message,
    });
    format!("{line}\n")
}

fn prompt(second: u64) -> String {
    line("user", second, json!({"role": "user", "content": "go"}))
}

/// The lines of a tool round: two calls of one response, and their results.
fn step(second: u64) -> String {
    let call = |name: &str| {
        json!({"id": format!("m{second}"), "role": "assistant", "model": "opus", "stop_reason": "tool_use",
               "content": [{"type": "tool_use", "id": format!("{name}{second}"), "name": name, "input": {"n": second}}]})
    };
    let result = |name: &str| {
        json!({"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": format!("{name}{second}"), "content": format!("made {second}")}]})
    };
    line("assistant", second, call("Bash"))
        + &line("assistant", second, call("Read"))
        + &line("user", second + 1, result("Bash"))
        + &line("user", second + 2, result("Read"))
}

fn end(second: u64) -> String {
    let content = json!([{"type": "text", "text": "done"}]);
    line(
        "assistant",
        second,
        json!({"id": format!("m{second}"), "role": "assistant", "stop_reason": "end_turn", "content": content}),
    )
}

/// A prompt at `second`, and one step every 10 seconds after it.
fn open_turn(second: u64, steps: u64) -> String {
    let steps = (1..=steps).map(|number| step(second + 10 * number));
    prompt(second) + &steps.collect::<String>()
}

fn stream(backend: &Backend, home: &TempHome, flags: &[&str], pieces: &[&str]) {
    let flags = [&["--flush-interval", "10ms"], flags].concat();
    let mut daemon = backend.daemon(home, &flags);
    for piece in pieces {
        append(&transcript(home, "s1"), piece);
        backend.run(home, &["flush", "--wait"]).ok();
    }
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.code(), Some(0));
}

fn listed(backend: &Backend, session: &str) -> Vec<Value> {
    let arguments = ["checkpoints", session, "--json"];
    let mut list = backend.run(&TempHome::new(), &arguments).ok().json();
    serde_json::from_value(list["checkpoints"].take()).unwrap()
}

/// Turn, step, status, number and parent of each checkpoint.
fn summary(checkpoints: &[Value]) -> Vec<String> {
    let number = |point: &Value, field: &str| {
        let number = point[field].as_u64();
        number.map_or_else(|| "-".to_owned(), |number| number.to_string())
    };
    let checkpoints = checkpoints.iter().map(|point| {
        let [turn, step, id, parent] =
            ["turn", "step", "number", "parent"].map(|field| number(point, field));
        let rewound = if point["rewound"] == true {
            " rewound"
        } else {
            ""
        };
        let status = point["status"].as_str().unwrap();
        format!("{turn}.{step} {status} {id}<{parent}{rewound}")
    });
    checkpoints.collect()
}

fn pulled(backend: &Backend, at: &str) -> String {
    let home = TempHome::new();
    let arguments = ["pull", "s1", "--at", at, "--to", "copy"];
    backend.run(&home, &arguments).ok();
    let copy = home.home().join("copy/projects/-work-app/s1.jsonl");
    std::fs::read_to_string(copy).unwrap()
}

on_each_backend!(a_running_turn_has_a_checkpoint_after_every_step);
fn a_running_turn_has_a_checkpoint_after_every_step(backend: Backend) {
    let home = TempHome::new();
    let pending = &step(50)[..step(50).find("made").unwrap()];
    let pending = &pending[..pending.rfind('\n').unwrap() + 1];
    let pieces = [&open_turn(0, 3), &*step(40), pending];
    stream(&backend, &home, &[], &pieces);
    let points = listed(&backend, "s1");
    assert_eq!(
        summary(&points),
        [
            "1.1 running 1<-",
            "1.2 running 2<1",
            "1.3 running 3<2",
            "1.4 running 4<3"
        ]
    );
    assert_eq!(points[2]["transcript_bytes"], open_turn(0, 3).len());
    assert_eq!(points[2]["at"], "2026-05-01T12:00:32Z");
    for (point, steps) in [("turn:1.step:2", 2), ("turn:1.step", 4), ("3", 3)] {
        assert_eq!(pulled(&backend, point), open_turn(0, steps), "{point}");
    }
    // A time selects the last step before it.
    assert_eq!(pulled(&backend, "2026-05-01T12:00:25Z"), open_turn(0, 2));
    let seen = backend.run(&home, &["inspect", "s1@turn:1.step:2", "--json"]);
    let seen = seen.ok().json();
    assert_eq!(
        (&seen["turn"], &seen["turn_open"], &seen["pending_calls"]),
        (&json!(0), &json!(true), &json!([]))
    );
    let difference = ["diff", "s1", "turn:1.step:1", "turn:1.step:2", "--json"];
    let difference = backend.run(&home, &difference).ok().json();
    assert_eq!(difference["added"].as_array().unwrap().len(), 4);

    // A turn is complete only at its end.
    backend
        .run(&home, &["pull", "s1", "--at", "turn", "--to", "copy"])
        .fails(3, "has no complete turn", "sessiond checkpoints s1");
    backend
        .run(
            &home,
            &["pull", "s1", "--at", "turn:1.step:9", "--to", "copy"],
        )
        .fails(
            3,
            "has no checkpoint at step 9 of turn 1",
            "sessiond checkpoints s1 --steps",
        );
    let table = backend.run(&home, &["checkpoints", "s1"]).ok().out();
    assert_eq!(table.lines().count(), 2, "only the last step: {table}");
    let table = backend.run(&home, &["checkpoints", "s1", "--steps"]).ok();
    assert_eq!(table.out().lines().count(), 5, "{}", table.out());
}

on_each_backend!(a_session_continues_from_a_step);
fn a_session_continues_from_a_step(backend: Backend) {
    let home = TempHome::new();
    let first = open_turn(0, 4) + &end(50);
    stream(&backend, &home, &[], &[&first]);
    let other = TempHome::new();
    backend
        .run(&other, &["restore", "s1", "--at", "turn:1.step:2"])
        .ok();
    let restored = std::fs::read_to_string(transcript(&other, "s1")).unwrap();
    assert_eq!(restored, open_turn(0, 2));
    stream(&backend, &other, &[], &[&step(70), &end(80)]);
    assert_eq!(
        summary(&listed(&backend, "s1")),
        [
            "1.1 running 1<-",
            "1.2 running 2<1",
            "1.3 running 3<2 rewound",
            "1.4 running 4<3 rewound",
            "1.- completed 5<4 rewound",
            "1.3 running 6<2",
            "1.- completed 7<6",
        ]
    );
    let continued = open_turn(0, 2) + &step(70);
    assert_eq!(pulled(&backend, "turn:1.step:3"), continued);
    assert_eq!(pulled(&backend, "turn:1"), continued + &end(80));
    assert_eq!(pulled(&backend, "4"), open_turn(0, 4));
}

on_each_backend!(a_fork_starts_from_a_step);
fn a_fork_starts_from_a_step(backend: Backend) {
    let home = TempHome::new();
    let first = open_turn(0, 1) + &end(20) + &open_turn(60, 3);
    stream(&backend, &home, &[], &[&first]);
    let fork = [
        "fork",
        "s1",
        "--at",
        "turn:2.step:2",
        "--id",
        "s2",
        "--json",
    ];
    backend.run(&home, &fork).ok();
    let points = listed(&backend, "s2");
    assert_eq!(summary(&points), ["2.2 running 1<4"]);
    assert_eq!(points[0]["parent_session"], "s1");
    let other = TempHome::new();
    backend.run(&other, &["restore", "s2"]).ok();
    let restored = std::fs::read_to_string(transcript(&other, "s2")).unwrap();
    let cut = open_turn(0, 1) + &end(20) + &open_turn(60, 2);
    assert_eq!(restored, cut.replace("s1", "s2"));
    let mut daemon = backend.daemon(&other, &["--flush-interval", "10ms"]);
    append(&transcript(&other, "s2"), step(100).replace("s1", "s2"));
    backend.run(&other, &["flush", "--wait"]).ok();
    daemon.signal(Signal::TERM);
    daemon.code();
    assert_eq!(
        summary(&listed(&backend, "s2")),
        ["2.2 running 1<4", "2.3 running 2<1"]
    );
}

on_each_backend!(old_steps_are_thinned_in_the_log_and_in_the_index);
fn old_steps_are_thinned_in_the_log_and_in_the_index(mut backend: Backend) {
    let home = TempHome::new();
    let steps: Vec<String> = (1..=300).map(|number| step(10 * number)).collect();
    let pieces: Vec<String> = steps.chunks(60).map(<[String]>::concat).collect();
    let mut pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
    let prompt = prompt(0);
    pieces.insert(0, &prompt);
    stream(&backend, &home, &["--keep-checkpoints", "8steps"], &pieces);
    let points = listed(&backend, "s1");
    let kept: Vec<u64> = points
        .iter()
        .map(|point| point["number"].as_u64().unwrap())
        .collect();
    assert!(kept.len() < 60, "{kept:?}");
    assert!((293..=300).all(|number| kept.contains(&number)), "{kept:?}");
    assert_eq!(kept[0], 1, "the first checkpoint has no parent");
    eventually("the index has the kept checkpoints", || {
        indexed(backend.index_url()) == kept
    });
    let database = backend.path().join("new.db");
    backend.set("SESSIOND_INDEX", format!("sqlite://{}", database.display()));
    backend.run(&home, &["reindex"]).ok();
    assert_eq!(indexed(backend.index_url()), kept);
}

/// The numbers of the checkpoints in the index.
#[tokio::main(flavor = "current_thread")]
async fn indexed(url: &str) -> Vec<u64> {
    let _ = sqlx::any::install_drivers(&[sqlx::sqlite::any::DRIVER, sqlx::postgres::any::DRIVER]);
    let mut connection = sqlx::AnyConnection::connect(url).await.unwrap();
    let numbers: Vec<i64> = sqlx::query_scalar("SELECT number FROM checkpoints ORDER BY number")
        .fetch_all(&mut connection)
        .await
        .unwrap();
    numbers.into_iter().map(|number| number as u64).collect()
}

on_each_backend!(the_interval_of_checkpoints_is_a_setting);
fn the_interval_of_checkpoints_is_a_setting(backend: Backend) {
    let home = TempHome::new();
    let late = step(70) + &step(200) + &step(210);
    let turn = open_turn(0, 6) + &late;
    stream(
        &backend,
        &home,
        &["--checkpoint-every", "4steps,100s"],
        &[&turn],
    );
    let points = listed(&backend, "s1");
    let steps: Vec<&Value> = points.iter().map(|point| &point["step"]).collect();
    // The first step; four steps later; 100 seconds later.
    assert_eq!(steps, [&json!(1), &json!(5), &json!(8)]);
    backend
        .run(&home, &["daemon", "--checkpoint-every", "often"])
        .fails(
            2,
            "invalid --checkpoint-every value \"often\": expected a number of steps, a duration, or both",
            "use a value such as 10steps, 60s or 10steps,60s; turn for no checkpoints within a turn",
        );
    backend
        .run(&home, &["daemon", "--keep-checkpoints", "1000"])
        .fails(
            2,
            "invalid --keep-checkpoints value \"1000\": expected at most 400 turns and 100 steps",
            "use a value such as 100turns,16steps",
        );
}

on_each_backend!(a_failed_turn_is_not_a_running_one);
fn a_failed_turn_is_not_a_running_one(backend: Backend) {
    let home = TempHome::new();
    let error = json!({
        "type": "assistant", "uuid": "e", "sessionId": "s1", "timestamp": "2026-05-01T12:01:00Z",
        "isApiErrorMessage": true, "message": {"role": "assistant", "model": "<synthetic>",
        "stop_reason": "stop_sequence", "content": [{"type": "text", "text": "API Error: 529"}]},
    });
    let interruption = line(
        "user",
        140,
        json!({"role": "user", "content": "[Request interrupted by user]"}),
    );
    let turns = open_turn(0, 1) + &format!("{error}\n") + &open_turn(120, 1) + &interruption;
    stream(&backend, &home, &[], &[&turns]);
    assert_eq!(
        summary(&listed(&backend, "s1")),
        [
            "1.1 running 1<-",
            "1.- failed 2<1",
            "2.1 running 3<2",
            "2.- interrupted 4<3"
        ]
    );
}

on_each_backend!(inspect_and_messages_show_tools_turns_and_errors);
fn inspect_and_messages_show_tools_turns_and_errors(backend: Backend) {
    let home = TempHome::new();
    let denied = step(90).replace(
        "\"content\":\"made 90\"",
        "\"is_error\":true,\"content\":\"The user doesn't want to proceed with this tool use.\"",
    );
    let turns = open_turn(0, 2) + &end(50) + &prompt(60) + &denied;
    stream(&backend, &home, &[], &[&turns]);
    let inspect = ["inspect", "s1", "--full", "--json"];
    let seen = backend.run(&home, &inspect).ok().json();
    assert_eq!(
        (&seen["status"], &seen["turn"], &seen["step"]),
        (&json!("running"), &json!(1), &json!(1)),
        "{seen}"
    );
    assert_eq!(
        seen["tools"]["Bash"],
        json!({"calls": 3, "errors": 1, "denials": 1, "pending": 0})
    );
    let calls = seen["completed_calls"].as_array().unwrap();
    assert_eq!(calls.len(), 6, "{seen}");
    assert_eq!(calls[0]["input"], "{\"n\":10}");
    assert_eq!(seen["started_at"], "2026-05-01T12:00:00Z");
    let ended = backend.run(&home, &["inspect", "s1@turn:1", "--json"]);
    assert_eq!(ended.ok().json()["status"], "completed");

    let listed = |flags: &[&str]| {
        let arguments = [&["messages", "s1", "--json"], flags].concat();
        let mut page = backend.run(&home, &arguments).ok().json();
        let messages: Vec<Value> = serde_json::from_value(page["messages"].take()).unwrap();
        messages
    };
    let second = listed(&["--turn", "2"]);
    assert_eq!(second.len(), 5, "a prompt, two calls and two results");
    assert!(second.iter().all(|message| message["turn"] == 2));
    let bash = listed(&["--tool", "Bash", "--role", "tool", "--turn", "1", "--full"]);
    let texts: Vec<&str> = bash.iter().filter_map(|row| row["text"].as_str()).collect();
    assert_eq!(texts, ["made 10", "made 20"]);
    assert_eq!(listed(&["--until", "2026-05-01T12:00:10Z"]).len(), 1);
    assert_eq!(listed(&["--sub-agent", "a1"]).len(), 0);
}
