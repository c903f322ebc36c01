//! Rollback, named checkpoints, forks and diff, with the program, on every back end.

use std::fmt::Write as _;

use serde_json::Value;

use crate::retention::age_objects;
use crate::support::TempHome;
use crate::support::backend::{Backend, Signal, transcript};
use crate::support::files::append;
use crate::support::on_each_backend;

/// The lines of a turn: a prompt, a tool call and its result, the end. Without the last lines it is
/// incomplete.
fn turn(session: &str, number: u64) -> Vec<String> {
    let stamp = |second: u64| format!("2026-05-01T12:{number:02}:{second:02}.000Z");
    let line = |kind: &str, second: u64, message: String| {
        let at = stamp(second);
        format!(
            "{{\"type\":\"{kind}\",\"uuid\":\"{number}-{second}\",\"sessionId\":\"{session}\",\"timestamp\":\"{at}\",\"cwd\":\"/work/app\",\"message\":{message}}}\n"
        )
    };
    let answer = |second: u64, stop: &str, block: String| {
        let message = format!(
            "{{\"id\":\"m{number}-{second}\",\"role\":\"assistant\",\"model\":\"opus\",\"stop_reason\":\"{stop}\",\"usage\":{{\"input_tokens\":10,\"output_tokens\":5}},\"content\":[{block}]}}"
        );
        line("assistant", second, message)
    };
    vec![
        line(
            "user",
            0,
            format!("{{\"role\":\"user\",\"content\":\"prompt {number}\"}}"),
        ),
        answer(
            1,
            "tool_use",
            format!(
                "{{\"type\":\"tool_use\",\"id\":\"t{number}\",\"name\":\"Bash\",\"input\":{{\"command\":\"make {number}\"}}}}"
            ),
        ),
        line(
            "user",
            2,
            format!(
                "{{\"role\":\"user\",\"content\":[{{\"type\":\"tool_result\",\"tool_use_id\":\"t{number}\",\"content\":\"made {number}\"}}]}}"
            ),
        ),
        answer(
            3,
            "end_turn",
            format!("{{\"type\":\"text\",\"text\":\"done {number}\"}}"),
        ),
    ]
}

fn whole_turns(session: &str, numbers: impl Iterator<Item = u64>) -> String {
    numbers.flat_map(|number| turn(session, number)).collect()
}

/// Streams these lines and flushes after each.
fn stream(backend: &Backend, home: &TempHome, session: &str, pieces: &[String]) {
    let mut daemon = backend.daemon(home, &["--flush-interval", "10ms"]);
    for piece in pieces {
        append(&transcript(home, session), piece);
        backend.run(home, &["flush", "--wait"]).ok();
    }
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.code(), Some(0));
}

fn text(home: &TempHome, session: &str) -> String {
    std::fs::read_to_string(transcript(home, session)).unwrap()
}

fn pulled(backend: &Backend, session: &str, at: &str) -> String {
    let home = TempHome::new();
    backend
        .run(&home, &["pull", session, "--at", at, "--to", "copy"])
        .ok();
    std::fs::read_to_string(
        home.home()
            .join(format!("copy/projects/-work-app/{session}.jsonl")),
    )
    .unwrap()
}

/// A field of each end of a turn. Each turn has one step before it.
fn numbers(points: &Value, field: &str) -> Vec<Option<u64>> {
    points["checkpoints"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|point| point["step"].is_null())
        .map(|point| point[field].as_u64())
        .collect()
}

on_each_backend!(a_rollback_without_new_writes_keeps_the_turns);
fn a_rollback_without_new_writes_keeps_the_turns(backend: Backend) {
    let home = TempHome::new();
    stream(
        &backend,
        &home,
        "s1",
        &[whole_turns("s1", 1..=2), whole_turns("s1", 3..=4)],
    );
    backend
        .run(&TempHome::new(), &["restore", "s1", "--at", "turn:2"])
        .ok();
    for point in ["latest", "turn", "turn:4"] {
        assert_eq!(
            pulled(&backend, "s1", point),
            whole_turns("s1", 1..=4),
            "{point}"
        );
    }
    let third = TempHome::new();
    backend.run(&third, &["restore", "s1"]).ok();
    stream(&backend, &third, "s1", &[whole_turns("s1", 5..=5)]);
    let points = backend
        .run(&third, &["checkpoints", "s1", "--json"])
        .ok()
        .json();
    assert_eq!(
        numbers(&points, "turn"),
        [Some(1), Some(2), Some(3), Some(4), Some(5)]
    );
    assert_eq!(
        numbers(&points, "parent"),
        [Some(1), Some(3), Some(5), Some(7), Some(9)]
    );
}

on_each_backend!(a_rollback_to_a_turn_keeps_later_entries);
fn a_rollback_to_a_turn_keeps_later_entries(backend: Backend) {
    let home = TempHome::new();
    let mut cut_short = whole_turns("s1", 1..=3);
    turn("s1", 4)[..2]
        .iter()
        .for_each(|line| cut_short.push_str(line));
    stream(&backend, &home, "s1", &[cut_short.clone()]);
    let points = backend
        .run(&home, &["checkpoints", "s1", "--json"])
        .ok()
        .json();
    assert_eq!(numbers(&points, "number"), [Some(2), Some(4), Some(6)]);
    assert_eq!(numbers(&points, "parent"), [Some(1), Some(3), Some(5)]);

    // The last complete turn; the rest is reported and stays in the log.
    let other = TempHome::new();
    let report = backend
        .run(&other, &["restore", "s1", "--at", "turn", "--json"])
        .ok()
        .json();
    assert_eq!(text(&other, "s1"), whole_turns("s1", 1..=3));
    let cut_off = cut_short.len() - whole_turns("s1", 1..=3).len();
    assert_eq!(
        report[0]["rewound_bytes"]["projects/-work-app/s1.jsonl"], cut_off,
        "{report}"
    );
    assert_eq!(
        report[0]["rewound_calls"][0]["input"], "{\"command\":\"make 4\"}",
        "{report}"
    );
    assert_eq!(pulled(&backend, "s1", "latest"), cut_short);

    // The log continues from turn 2, and the later turns stay restorable.
    let third = TempHome::new();
    backend
        .run(&third, &["restore", "s1", "--at", "turn:2"])
        .ok();
    assert_eq!(text(&third, "s1"), whole_turns("s1", 1..=2));
    stream(&backend, &third, "s1", &[whole_turns("s1", 7..=7)]);
    let went_on = whole_turns("s1", 1..=2) + &whole_turns("s1", 7..=7);
    assert_eq!(pulled(&backend, "s1", "latest"), went_on);
    assert_eq!(pulled(&backend, "s1", "6"), whole_turns("s1", 1..=3));
    assert_eq!(pulled(&backend, "s1", "seq:2"), cut_short);
    assert_eq!(
        pulled(&backend, "s1", "turn:3"),
        went_on,
        "a turn is one of the conversation as it went on"
    );
    let points = backend
        .run(&home, &["checkpoints", "s1", "--json"])
        .ok()
        .json();
    assert_eq!(
        numbers(&points, "number"),
        [Some(2), Some(4), Some(6), Some(8)]
    );
    assert_eq!(
        numbers(&points, "parent"),
        [Some(1), Some(3), Some(5), Some(7)]
    );
    assert_eq!(
        numbers(&points, "turn"),
        [Some(1), Some(2), Some(3), Some(3)]
    );
    backend
        .run(&home, &["pull", "s1", "--raw", "--to", "raw"])
        .ok();
    let claims = std::fs::read_dir(home.home().join("raw/log"))
        .unwrap()
        .map(|item| gunzipped(&item.unwrap().path()));
    assert_eq!(
        claims
            .filter(|entry| entry.contains("\"rollback_to\":2"))
            .count(),
        2,
        "the log records that somebody went back, twice"
    );
}

fn gunzipped(path: &std::path::Path) -> String {
    let mut text = String::new();
    std::io::Read::read_to_string(
        &mut flate2::read::GzDecoder::new(std::fs::File::open(path).unwrap()),
        &mut text,
    )
    .unwrap();
    text
}

on_each_backend!(inspect_after_a_crash_lists_running_tools);
fn inspect_after_a_crash_lists_running_tools(backend: Backend) {
    let home = TempHome::new();
    let begun = turn("s1", 2)[..2].concat();
    let agent = turn("s1", 3)[0].replace(
        "\"type\":\"user\"",
        "\"type\":\"user\",\"isSidechain\":true,\"agentId\":\"a1\"",
    );
    append(
        &home
            .home()
            .join(".claude/projects/-work-app/s1/subagents/agent-a1.jsonl"),
        &agent,
    );
    stream(
        &backend,
        &home,
        "s1",
        &[whole_turns("s1", 1..=1), begun.clone()],
    );
    let seen = backend.run(&home, &["inspect", "s1", "--json"]).ok().json();
    assert_eq!(
        (&seen["turn"], &seen["turn_open"]),
        (&1.into(), &true.into()),
        "{seen}"
    );
    assert_eq!(
        (
            &seen["pending_calls"][0]["name"],
            &seen["pending_calls"][0]["input"]
        ),
        (&"Bash".into(), &"{\"command\":\"make 2\"}".into())
    );
    assert_eq!(seen["pending_calls"][0]["started"], "2026-05-01T12:02:01Z");
    assert_eq!(
        (
            &seen["sub_agents"][0]["id"],
            &seen["sub_agents"][0]["active"]
        ),
        (&"a1".into(), &true.into())
    );
    let seen = backend
        .run(&home, &["inspect", "s1@turn:1", "--json"])
        .ok()
        .json();
    assert_eq!(
        (&seen["pending_calls"], &seen["turn_open"]),
        (&serde_json::json!([]), &false.into()),
        "{seen}"
    );
    assert_eq!(seen["checkpoint"]["stop_reason"], "end_turn");
    let output = backend.run(&home, &["inspect", "s1"]).ok().out();
    assert!(
        output.contains("pending call  Bash since 2026-05-01T12:02:01Z"),
        "{output}"
    );
    // A rollback reports what it skips, in any number of entries.
    let output = backend
        .run(
            &TempHome::new(),
            &["restore", "s1", "--at", "turn", "--dry-run"],
        )
        .ok()
        .out();
    let stays = format!(
        "  {} B after that point stay in the log: projects/-work-app/s1.jsonl",
        begun.len()
    );
    assert!(output.contains(&stays), "{output}");
    assert!(
        output.contains(
            "  pending tool call since 2026-05-01T12:02:01Z: Bash {\"command\":\"make 2\"}"
        ),
        "{output}"
    );
}

on_each_backend!(the_listed_time_of_a_checkpoint_finds_that_checkpoint);
fn the_listed_time_of_a_checkpoint_finds_that_checkpoint(backend: Backend) {
    let home = TempHome::new();
    // All turns arrive in two entries, long after they ended: an import, or a late upload.
    let late = |numbers: std::ops::RangeInclusive<u64>| {
        whole_turns("s1", numbers).replace(":03.000Z", ":03.456Z")
    };
    stream(&backend, &home, "s1", &[late(1..=2), late(3..=4)]);
    let listed = backend
        .run(&home, &["checkpoints", "s1", "--json"])
        .ok()
        .json();
    let table = backend.run(&home, &["checkpoints", "s1"]).ok().out();
    for number in 1..=4 {
        let exact = listed["checkpoints"][2 * number as usize - 1]["at"]
            .as_str()
            .unwrap();
        let seconds = format!("2026-05-01T12:{number:02}:03Z");
        assert!(table.contains(&seconds), "{table}");
        for time in [exact, &seconds, &format!("2026-05-01T12:{number:02}:50Z")] {
            assert_eq!(pulled(&backend, "s1", time), late(1..=number), "{time}");
        }
    }
    let seen = backend
        .run(&home, &["inspect", "s1@2026-05-01T12:02:03Z", "--json"])
        .ok()
        .json();
    assert_eq!(
        (&seen["turn"], &seen["checkpoint"]["number"]),
        (&2.into(), &4.into())
    );
    // A time after the last entry is the end; one before the first turn is no point.
    assert_eq!(pulled(&backend, "s1", "2099-01-01"), late(1..=4));
    let early = ["restore", "s1", "--at", "2026-05-01T12:00:00Z"];
    backend.run(&TempHome::new(), &early).fails(3, "", "");

    // A session that was imported keeps its times.
    backend
        .run(&home, &["export", "s1", "-o", "s1.tar.gz"])
        .ok();
    let (copy, other) = (Backend::file(), TempHome::new());
    let archive = home.home().join("s1.tar.gz");
    copy.run(&other, &["import", &archive.to_string_lossy()])
        .ok();
    assert_eq!(pulled(&copy, "s1", "2026-05-01T12:03:03Z"), late(1..=3));
}

on_each_backend!(the_days_add_up_to_the_total);
fn the_days_add_up_to_the_total(mut backend: Backend) {
    let home = TempHome::new();
    let config = home.path().join("prices.toml");
    std::fs::write(&config, "[prices]\nopus = { input = 3.3, output = 1.1 }\n").unwrap();
    backend.set("SESSIOND_CONFIG", config.to_string_lossy());
    let on_day =
        |day: u32, lines: String| lines.replace("2026-05-01T", &format!("2026-05-{day:02}T"));
    let reported = "{\"type\":\"cost-state\",\"totalCostUSD\":1.000001}\n".to_owned();
    stream(
        &backend,
        &home,
        "s1",
        &[
            whole_turns("s1", 1..=3),
            on_day(2, whole_turns("s1", 4..=4)),
            on_day(3, whole_turns("s1", 5..=5)),
            reported,
        ],
    );
    // A rollback rewinds turns, and the conversation continues on another day.
    stream(
        &backend,
        &home,
        "s2",
        &[
            whole_turns("s2", 1..=2),
            on_day(2, whole_turns("s2", 3..=4)),
        ],
    );
    let other = TempHome::new();
    backend
        .run(&other, &["restore", "s2", "--at", "turn:2"])
        .ok();
    stream(
        &backend,
        &other,
        "s2",
        &[on_day(4, whole_turns("s2", 5..=5))],
    );
    // A fork starts with turns of its origin; another session has no messages at all.
    backend
        .run(&home, &["fork", "s1", "--at", "turn:4", "--id", "fork"])
        .ok();
    stream(&backend, &home, "empty", &["{\"n\":1}\n".to_owned()]);
    for range in [&[][..], &["--since", "2026-05-02", "--until", "2026-05-03"]] {
        let stats = backend
            .run(
                &home,
                &[&["stats", "--by", "day", "--json"], range].concat(),
            )
            .ok()
            .json();
        let column = |row: &Value, name: &str| match name {
            // In millionths of a dollar.
            "/cost_usd" => (row.pointer(name).unwrap().as_f64().unwrap() * 1e6).round() as u64,
            _ => row.pointer(name).unwrap().as_u64().unwrap(),
        };
        for name in [
            "/sessions",
            "/messages",
            "/turns",
            "/tokens/input",
            "/tokens/output",
            "/cost_usd",
            "/raw_bytes",
        ] {
            let rows = stats["rows"].as_array().unwrap().iter();
            assert_eq!(
                rows.map(|row| column(row, name)).sum::<u64>(),
                column(&stats["total"], name),
                "{name} of {range:?}: {stats:#}"
            );
        }
    }
    let stats = backend.run(&home, &["stats", "--json"]).ok().json();
    assert_eq!(
        (&stats["total"]["sessions"], &stats["total"]["turns"]),
        (&4.into(), &(5 + 3 + 4).into()),
        "{stats:#}"
    );
}

on_each_backend!(a_fork_names_its_origin_and_forks_at_inherited_turns);
fn a_fork_names_its_origin_and_forks_at_inherited_turns(backend: Backend) {
    let home = TempHome::new();
    stream(&backend, &home, "s1", &[whole_turns("s1", 1..=4)]);
    let fork = |from: &str, at: &str, new: &str| {
        let arguments = ["fork", from, "--at", at, "--id", new, "--json"];
        backend.run(&home, &arguments).ok().json()
    };
    fork("s1", "turn:3", "f1");
    let named = || {
        let page = backend.run(&home, &["ls", "--json"]).ok().json();
        let rows = page["sessions"].as_array().unwrap().clone();
        let row = rows.iter().find(|row| row["id"] == "f1").unwrap();
        (row["origin"].clone(), row["origin_turn"].clone())
    };
    assert_eq!(named(), ("s1".into(), 3.into()));
    let said = backend.run(&home, &["ls"]).ok().out();
    assert!(said.contains("[fork of s1 after turn 3]"), "{said}");
    let said = backend.run(&home, &["inspect", "f1"]).ok().out();
    assert!(said.contains("\nfork of       s1 after turn 3\n"), "{said}");
    let said = backend.run(&home, &["show", "f1"]).ok().out();
    assert!(said.contains("f1 · fork of s1 after turn 3"), "{said}");
    let seen = backend.run(&home, &["inspect", "f1", "--json"]).ok().json();
    assert_eq!(
        seen["origin"],
        serde_json::json!({"session": "s1", "turn": 3})
    );

    // A turn that the fork inherited is a turn of its origin, at any depth.
    assert_eq!(fork("f1", "turn:2", "f2")["origin"], "s1");
    assert_eq!(pulled(&backend, "f2", "latest"), whole_turns("f2", 1..=2));
    let other = TempHome::new();
    backend.run(&other, &["restore", "f1"]).ok();
    stream(&backend, &other, "f1", &[whole_turns("f1", 7..=7)]);
    fork("f1", "turn:4", "f3");
    assert_eq!(fork("f3", "turn:1", "f4")["origin"], "s1");
    assert_eq!(pulled(&backend, "f4", "latest"), whole_turns("f4", 1..=1));
    // The turns are those that the fork started with, not those of the origin today.
    let third = TempHome::new();
    backend
        .run(&third, &["restore", "s1", "--at", "turn:1"])
        .ok();
    stream(&backend, &third, "s1", &[whole_turns("s1", 8..=9)]);
    fork("f1", "turn:2", "f5");
    assert_eq!(pulled(&backend, "f5", "latest"), whole_turns("f5", 1..=2));
    let restored = backend.run(&TempHome::new(), &["restore", "f1", "--at", "turn:2"]);
    restored.fails(3, "no complete turn 2", "sessiond fork f1 --at turn:2");
    backend.run(&home, &["reindex"]).ok();
    assert_eq!(named(), ("s1".into(), 3.into()));
}

#[test]
fn a_fork_made_while_the_index_was_down_is_indexed_by_the_next_command() {
    let mut backend = Backend::file();
    let home = TempHome::new();
    stream(&backend, &home, "s1", &[whole_turns("s1", 1..=2)]);
    let index = format!("sqlite://{}", backend.path().join("index.db").display());
    let forks = ["f1", "f2", "f3", "f4", "f5", "f6"];
    backend.set("SESSIOND_INDEX", "postgres://nobody@127.0.0.1:1/none");
    for fork in forks {
        let said = backend.run(&home, &["fork", "s1", "--id", fork]).ok().err();
        assert!(said.contains("the next daemon or command"), "{said}");
    }
    backend.set("SESSIOND_INDEX", index);
    let is_listed = |fork: &str| {
        let page = backend.run(&home, &["ls", "--json"]).ok().json();
        let rows = page["sessions"].as_array().unwrap().clone();
        rows.iter().any(|row| row["id"] == fork)
    };
    let others: Vec<TempHome> = (0..2).map(|_| TempHome::new()).collect();
    for (fork, home, arguments) in [
        ("f1", &home, &["show", "f1"][..]),
        ("f2", &home, &["inspect", "f2"]),
        ("f3", &home, &["messages", "f3"]),
        ("f4", &home, &["checkpoints", "f4"]),
        ("f5", &others[0], &["restore", "f5"]),
    ] {
        assert!(!is_listed(fork), "{fork}");
        let said = backend.run(home, arguments).ok().err();
        let added = format!("the index did not contain session {fork}; added it");
        assert!(said.contains(&added), "{arguments:?}: {said}");
        assert!(is_listed(fork), "{fork}");
    }
    // So does the first daemon of the fork.
    backend
        .run(&others[1], &["run", "--session", "f6", "--", "true"])
        .ok();
    assert!(is_listed("f6"));
    let listed = backend.run(&home, &["messages", "f3", "--json"]).ok();
    assert_eq!(listed.json()["messages"].as_array().unwrap().len(), 8);
}

on_each_backend!(the_first_prompt_is_the_title_where_the_agent_gives_none);
fn the_first_prompt_is_the_title_where_the_agent_gives_none(backend: Backend) {
    let home = TempHome::new();
    let title = || {
        let page = backend.run(&home, &["ls", "--json"]).ok().json();
        page["sessions"][0]["title"].clone()
    };
    let long = whole_turns("s1", 1..=1).replace(
        "prompt 1",
        &format!("fix\\n  the   {}", "login ".repeat(50)),
    );
    stream(&backend, &home, "s1", &[long, whole_turns("s1", 2..=2)]);
    let expected = format!("fix the {}", "login ".repeat(50));
    assert_eq!(title(), format!("{}…", &expected[..80]));
    let said = backend.run(&home, &["show", "s1"]).ok().out();
    assert!(said.starts_with("fix the login login"), "{said}");
    let said = backend
        .run(&home, &["show", "s1", "--last", "1"])
        .ok()
        .out();
    assert!(!said.starts_with("prompt 2"), "{said}");
    backend.run(&home, &["reindex"]).ok();
    assert_eq!(title(), format!("{}…", &expected[..80]));
    // The agent's own title wins, whenever it comes.
    let own = "{\"type\":\"custom-title\",\"customTitle\":\"Login\",\"sessionId\":\"s1\"}\n";
    stream(
        &backend,
        &home,
        "s1",
        &[own.to_owned(), whole_turns("s1", 3..=3)],
    );
    assert_eq!(title(), "Login");
}

#[test]
fn known_models_have_a_price_that_the_settings_override() {
    let mut backend = Backend::file();
    let home = TempHome::new();
    let lines = whole_turns("s1", 1..=1).replace("\"opus\"", "\"claude-sonnet-4-5-20250929\"");
    let cost = |backend: &Backend| {
        let stats = backend.run(&home, &["stats", "--json"]).ok().json();
        stats["total"]["cost_usd"].clone()
    };
    stream(&backend, &home, "s1", &[lines]);
    // Two responses of 10 input and 5 output tokens, for $3 and $15 per million.
    assert_eq!(cost(&backend), 0.00021);
    let said = backend.run(&home, &["config", "show"]).ok().out();
    let row = |said: &str| {
        let row = said.lines().find(|line| line.starts_with("prices "));
        row.unwrap_or_else(|| panic!("{said}")).to_owned()
    };
    assert!(row(&said).contains("built-in list of 2026-"), "{said}");
    assert!(row(&said).ends_with("default"), "{said}");
    let config = home.path().join("prices.toml");
    let own = "[prices]\nclaude-sonnet = { input = 30.0, output = 150.0 }\n";
    std::fs::write(&config, own).unwrap();
    backend.set("SESSIOND_CONFIG", config.to_string_lossy());
    backend.run(&home, &["reindex"]).ok();
    assert_eq!(cost(&backend), 0.0021);
    let said = backend.run(&home, &["config", "show"]).ok().out();
    assert!(
        row(&said).contains("overridden by 1 in the file") && row(&said).ends_with("file"),
        "{said}"
    );
}

#[test]
fn a_named_checkpoint_survives_gc() {
    let backend = Backend::file();
    let home = TempHome::new();
    let pieces: Vec<String> = (1..=80)
        .map(|number| whole_turns("s1", number..=number))
        .collect();
    stream(&backend, &home, "s1", &pieces);
    backend
        .run(
            &home,
            &["checkpoint", "s1", "--name", "here", "--at", "turn:3"],
        )
        .ok();
    backend
        .run(&home, &["checkpoint", "s1", "--name", "here"])
        .fails(7, "already has a checkpoint named here", "--delete");
    backend
        .run(&home, &["checkpoint", "s1", "--name", "7"])
        .fails(2, "invalid checkpoint name \"7\"", "letters");
    let three = whole_turns("s1", 1..=3);
    assert_eq!(pulled(&backend, "s1", "here"), three);
    age_objects(&backend, std::time::Duration::from_secs(9 * 24 * 3600));
    backend.run(&home, &["gc", "--ttl", "never"]).ok();
    let left = std::fs::read_dir(backend.path().join("bucket/v1/default/claude-code/s1/log"))
        .unwrap()
        .count();
    assert!(left < 40, "{left} entries are left");
    assert_eq!(pulled(&backend, "s1", "here"), three);
    // A point without a name can be cut from a later one: transcripts only grow.
    assert_eq!(pulled(&backend, "s1", "turn:5"), whole_turns("s1", 1..=5));
    assert_eq!(pulled(&backend, "s1", "latest"), whole_turns("s1", 1..=80));
    let listed = backend.run(&home, &["checkpoints", "s1"]).ok().out();
    assert!(
        listed.lines().any(|line| line.trim_end().ends_with("here")),
        "{listed}"
    );
    backend
        .run(&home, &["checkpoint", "s1", "--name", "here", "--delete"])
        .ok();
    backend
        .run(&home, &["pull", "s1", "--at", "here", "--to", "x"])
        .fails(3, "has no checkpoint named here", "sessiond checkpoints s1");
    backend
        .run(&home, &["pull", "s1", "--at", "turn:99", "--to", "x"])
        .fails(3, "has no complete turn 99", "sessiond checkpoints s1");
    backend
        .run(&home, &["pull", "s1", "--at", "a/b", "--to", "x"])
        .fails(2, "invalid --at value \"a/b\"", "turn:N");
}

on_each_backend!(a_fork_shares_entries_and_both_sessions_continue);
fn a_fork_shares_entries_and_both_sessions_continue(backend: Backend) {
    let home = TempHome::new();
    stream(
        &backend,
        &home,
        "s1",
        &[whole_turns("s1", 1..=2), whole_turns("s1", 3..=3)],
    );
    let forked = backend
        .run(
            &home,
            &[
                "fork",
                "s1",
                "--at",
                "turn:2",
                "--id",
                "s2-longer",
                "--json",
            ],
        )
        .ok()
        .json();
    assert_eq!(
        (&forked["turn"], &forked["origin"]),
        (&2.into(), &"s1".into())
    );
    let other = TempHome::new();
    backend.run(&other, &["restore", "s2-longer"]).ok();
    assert_eq!(
        text(&other, "s2-longer"),
        whole_turns("s2-longer", 1..=2),
        "the new id is in its lines"
    );
    stream(
        &backend,
        &other,
        "s2-longer",
        &(4..=40)
            .map(|number| whole_turns("s2-longer", number..=number))
            .collect::<Vec<_>>(),
    );
    stream(&backend, &home, "s1", &[whole_turns("s1", 5..=5)]);
    let theirs = whole_turns("s2-longer", 1..=2) + &whole_turns("s2-longer", 4..=40);
    assert_eq!(pulled(&backend, "s2-longer", "latest"), theirs);
    assert_eq!(
        pulled(&backend, "s1", "latest"),
        whole_turns("s1", [1, 2, 3, 5].into_iter())
    );
    assert_eq!(
        pulled(&backend, "s2-longer", "turn:3"),
        whole_turns("s2-longer", [1, 2, 4].into_iter())
    );
    // A fork of a fork.
    backend
        .run(
            &home,
            &["fork", "s2-longer", "--at", "turn:3", "--id", "s3"],
        )
        .ok();
    assert_eq!(
        pulled(&backend, "s3", "latest"),
        whole_turns("s3", [1, 2, 4].into_iter())
    );
    backend.run(&home, &["verify", "--deep"]).ok();
    backend
        .run(&home, &["fork", "s1", "--id", "s3"])
        .fails(7, "s3 already exists", "--id");
    // The origin may be removed; the fork keeps the entries it needs.
    backend.run(&home, &["rm", "s1", "--yes"]).ok();
    assert_eq!(
        pulled(&backend, "s3", "latest"),
        whole_turns("s3", [1, 2, 4].into_iter())
    );
    let before = backend.run(&home, &["ls", "--json"]).ok().json();
    backend.run(&home, &["reindex"]).ok();
    assert_eq!(backend.run(&home, &["ls", "--json"]).ok().json(), before);
}

#[test]
fn gc_keeps_the_entries_a_fork_needs() {
    let backend = Backend::file();
    let home = TempHome::new();
    stream(&backend, &home, "s1", &[whole_turns("s1", 1..=2)]);
    backend.run(&home, &["fork", "s1", "--id", "s2"]).ok();
    backend.run(&home, &["rm", "s1", "--yes"]).ok();
    for _ in 0..4 {
        age_objects(&backend, std::time::Duration::from_secs(9 * 24 * 3600));
        backend.run(&home, &["gc", "--ttl", "never"]).ok();
    }
    assert_eq!(pulled(&backend, "s2", "latest"), whole_turns("s2", 1..=2));
    backend.run(&home, &["rm", "s2", "--yes"]).ok();
    let bucket = backend.path().join("bucket/v1/default");
    for _ in 0..12 {
        if !bucket.exists() {
            break;
        }
        age_objects(&backend, std::time::Duration::from_secs(9 * 24 * 3600));
        backend.run(&home, &["gc", "--ttl", "never"]).ok();
    }
    assert!(!bucket.exists(), "without the fork nothing holds it");
}

on_each_backend!(diff_compares_two_points);
fn diff_compares_two_points(backend: Backend) {
    let home = TempHome::new();
    stream(
        &backend,
        &home,
        "s1",
        &[whole_turns("s1", 1..=1), whole_turns("s1", 2..=2)],
    );
    append(
        &home
            .home()
            .join(".claude/projects/-work-app/s1/tool-results/t.txt"),
        "big",
    );
    stream(&backend, &home, "s1", &[turn("s1", 3)[0].clone()]);
    let difference = backend
        .run(&home, &["diff", "s1", "turn:1", "turn:2", "--json"])
        .ok()
        .json();
    let new: Vec<&str> = difference["added"]
        .as_array()
        .unwrap()
        .iter()
        .map(|line| line["text"].as_str().unwrap())
        .collect();
    assert_eq!(
        new,
        [
            "prompt 2",
            "Bash {\"command\":\"make 2\"}",
            "made 2",
            "done 2"
        ]
    );
    assert_eq!(difference["removed"], serde_json::json!([]));
    let mut output = String::new();
    write!(
        output,
        "{}",
        backend
            .run(&home, &["diff", "s1", "latest", "turn:2"])
            .ok()
            .out()
    )
    .unwrap();
    assert!(output.starts_with("- user      prompt 3\n"), "{output}");
    assert!(
        output.contains("- 3 B  projects/-work-app/s1/tool-results/t.txt"),
        "{output}"
    );
    assert!(
        backend
            .run(&home, &["diff", "s1", "latest", "latest"])
            .ok()
            .out()
            .contains("no difference between")
    );
    // Also by name; points are read from the bucket.
    backend
        .run(
            &home,
            &["checkpoint", "s1", "--name", "first", "--at", "turn:1"],
        )
        .ok();
    let named = backend
        .run(&home, &["diff", "s1", "first", "turn:2", "--json"])
        .ok()
        .json();
    assert_eq!(named["added"], difference["added"]);
    let points = backend
        .run(&home, &["checkpoints", "s1", "--json"])
        .ok()
        .json();
    assert!(points.to_string().contains("\"first\""), "{points}");
    backend.run(&home, &["reindex"]).ok();
    assert_eq!(
        backend
            .run(&home, &["checkpoints", "s1", "--json"])
            .ok()
            .json(),
        points
    );
}

#[test]
fn a_fork_inside_a_turn_keeps_earlier_turns() {
    let (backend, home) = (Backend::file(), TempHome::new());
    stream(
        &backend,
        &home,
        "s1",
        &[whole_turns("s1", 1..=2) + &turn("s1", 3)[..2].concat()],
    );
    backend
        .run(&home, &["fork", "s1", "--id", "s2-longer"])
        .ok();
    let points = backend
        .run(&home, &["checkpoints", "s2-longer", "--json"])
        .ok()
        .json();
    assert_eq!(numbers(&points, "turn"), [Some(2)]);
    assert_eq!(
        pulled(&backend, "s2-longer", "turn"),
        whole_turns("s2-longer", 1..=2)
    );
    let other = TempHome::new();
    backend
        .run(
            &other,
            &[
                "run",
                "--session",
                "s2-longer",
                "--at",
                "turn",
                "--",
                "true",
            ],
        )
        .ok();
    assert_eq!(text(&other, "s2-longer"), whole_turns("s2-longer", 1..=2));
    backend.run(&home, &["verify", "--deep"]).ok();
}

/// The lines of a machine with a slow clock have earlier times; the order of the lines counts.
#[test]
fn turns_are_counted_regardless_of_clocks() {
    let (backend, home) = (Backend::file(), TempHome::new());
    stream(
        &backend,
        &home,
        "s1",
        &[
            whole_turns("s1", [5, 4].into_iter()),
            whole_turns("s1", [3, 1].into_iter()),
        ],
    );
    let points = backend
        .run(&home, &["checkpoints", "s1", "--json"])
        .ok()
        .json();
    assert_eq!(
        numbers(&points, "turn"),
        [Some(1), Some(2), Some(3), Some(4)]
    );
    // Rewritten, no turn counts twice.
    let text = text(&home, "s1");
    std::fs::remove_file(transcript(&home, "s1")).unwrap();
    stream(
        &backend,
        &home,
        "s1",
        &[text.replacen("prompt 5", "PROMPT 5", 1)],
    );
    let points = backend
        .run(&home, &["checkpoints", "s1", "--json"])
        .ok()
        .json();
    assert_eq!(
        numbers(&points, "turn"),
        [Some(1), Some(2), Some(3), Some(4)]
    );
}

#[test]
fn the_last_turn_of_a_damaged_log_is_an_error() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let pieces: Vec<String> = (1..=3)
        .map(|number| whole_turns("s1", number..=number))
        .collect();
    stream(&backend, &home, "s1", &pieces);
    let entry = backend
        .path()
        .join("bucket/v1/default/claude-code/s1/log/000000000003.gz");
    let mut bytes = std::fs::read(&entry).unwrap();
    bytes[60] ^= 0x55;
    std::fs::write(&entry, bytes).unwrap();
    let other = TempHome::new();
    for point in ["turn", "turn:3", "6"] {
        backend
            .run(&other, &["restore", "s1", "--at", point])
            .fails(6, "000000000003", "--salvage");
    }
    assert!(!transcript(&other, "s1").exists());
    assert_eq!(backend.run(&home, &["checkpoints", "s1"]).code(), 6);
    assert_eq!(backend.run(&home, &["tail", "s1"]).code(), 6);
    backend
        .run(&other, &["restore", "s1", "--at", "turn", "--salvage"])
        .ok();
    assert_eq!(text(&other, "s1"), whole_turns("s1", 1..=1));
}

/// An entrypoint that always restores the last complete turn, killed before the first flush: later
/// messages are kept.
#[test]
fn appends_after_a_rollback_are_kept_on_the_same_volume() {
    let (backend, home) = (Backend::file(), TempHome::new());
    stream(
        &backend,
        &home,
        "s1",
        &[whole_turns("s1", 1..=2), turn("s1", 3)[..2].concat()],
    );
    let other = TempHome::new();
    backend.run(&other, &["restore", "s1", "--at", "turn"]).ok();
    append(&transcript(&other, "s1"), whole_turns("s1", 4..=4));
    backend.run(&other, &["restore", "s1", "--at", "turn"]).ok();
    assert_eq!(text(&other, "s1"), whole_turns("s1", [1, 2, 4].into_iter()));
    stream(&backend, &other, "s1", &[]);
    assert_eq!(
        pulled(&backend, "s1", "latest"),
        whole_turns("s1", [1, 2, 4].into_iter())
    );
    // Another volume has other content.
    append(&transcript(&home, "s1"), whole_turns("s1", 5..=5));
    backend
        .run(&home, &["restore", "s1", "--at", "turn:1"])
        .fails(7, "local file", "--force");
}
