//! `sessiond serve-store`: the SDK's conformance suite, killed servers, and takeovers between
//! servers.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::backend::{Backend, Running, Signal, send_signal};
use crate::support::fetch;
use crate::support::http;
use crate::support::needs_tools;
use crate::support::on_each_backend;
use crate::support::rng::TestRng;
use crate::support::{TempHome, or_skip, sessiond};
use crate::torture::seed;

const PROJECT: &str = "-work-app";
const SESSION: &str = "3f2a0000-0000-4000-8000-000000000001";

/// A session store with its own directory.
pub struct Server {
    pub process: Running,
    pub address: String,
}

impl Server {
    pub fn start(backend: &Backend, home: &TempHome) -> Server {
        let mut command = backend.command(home, &["serve-store", "--listen", "http://127.0.0.1:0"]);
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(home.path().join("server.log"))
            .unwrap();
        let mut process = Running(command.stdout(Stdio::piped()).stderr(log).spawn().unwrap());
        let mut line = String::new();
        BufReader::new(process.0.stdout.as_mut().unwrap())
            .read_line(&mut line)
            .unwrap();
        let log_text = || std::fs::read_to_string(home.path().join("server.log")).unwrap();
        let address = line
            .trim()
            .strip_prefix("listening on http://")
            .unwrap_or_else(|| panic!("{line:?}: {}", log_text()))
            .to_owned();
        Server { process, address }
    }

    /// Returns none if the server was killed during the request.
    fn post(&self, call: &str, body: &Value) -> Option<(u16, String)> {
        self.send(
            &format!(
                "POST /v1/{call} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            ),
            &body.to_string(),
        )
    }

    fn send(&self, head: &str, body: &str) -> Option<(u16, String)> {
        let request = format!(
            "{head}connection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        let response =
            http::send(&self.address, &request).filter(|response| response.is_complete)?;
        Some((response.status, response.body))
    }

    #[track_caller]
    fn expect(&self, status: u16, call: &str, body: &Value) -> String {
        let (got, text) = self.post(call, body).unwrap();
        assert_eq!(got, status, "{call} {body}: {text}");
        text
    }

    fn load(&self, key: &Value) -> Vec<Value> {
        let text = self.expect(200, "load", &json!({ "key": key }));
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }
}

fn main_key() -> Value {
    json!({ "project_key": PROJECT, "session_id": SESSION })
}

fn sub_key() -> Value {
    json!({ "project_key": PROJECT, "session_id": SESSION, "subpath": "subagents/agent-1" })
}

/// A user message, as Claude Code writes it.
fn user_entry(number: usize) -> Value {
    json!({
        "type": "user", "uuid": format!("00000000-0000-4000-8000-{number:012}"), "sessionId": SESSION, "cwd": "/work/app",
        "timestamp": "2026-01-02T03:04:05.000Z", "message": { "role": "user", "content": format!("question number {number}") },
    })
}

fn append(key: &Value, batch: &str, entries: &[Value]) -> Value {
    json!({ "key": key, "batch_id": batch, "entries": entries })
}

needs_tools!(the_python_sdks_conformance_suite_passes);
/// Runs every contract of the SDK's suite on both backends, over a port and over a socket.
fn the_python_sdks_conformance_suite_passes() {
    let Some(sdk) = or_skip(fetch::python_agent_sdk()) else {
        return;
    };
    let tree = Path::new(env!("CARGO_MANIFEST_DIR"));
    for backend in Backend::all() {
        let home = TempHome::new();
        let environment = backend.command(&home, &[]);
        let mut suite = Command::new("python3");
        suite.env_clear().envs(
            environment
                .get_envs()
                .filter_map(|(name, value)| Some((name, value?))),
        );
        suite.env(
            "PYTHONPATH",
            std::env::join_paths([sdk.clone(), tree.join("examples/session-store-py")]).unwrap(),
        );
        suite
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .current_dir(home.home());
        suite
            .arg(tree.join("tests/agents/python/conformance.py"))
            .arg(sessiond())
            .arg(home.path());
        let ran = suite.output().unwrap();
        let (out, err) = (
            String::from_utf8_lossy(&ran.stdout),
            String::from_utf8_lossy(&ran.stderr),
        );
        assert!(ran.status.success(), "{}: {out}\n{err}", backend.name);
        // One to probe the store, and one for each of the 14 contracts.
        assert_eq!(out.trim(), "15 stores", "{}", backend.name);
    }
}

on_each_backend!(a_killed_session_store_loses_and_duplicates_nothing);
/// Servers are killed at any moment, half of them lose their disk. The client repeats requests without a
/// response, as the SDK does.
fn a_killed_session_store_loses_and_duplicates_nothing(backend: Backend) {
    const RESTARTS: usize = 10;
    let seed = seed();
    let context = format!("{}, replay with SESSIOND_TEST_SEED={seed}", backend.name);
    let mut dice = TestRng::new(seed);
    let mut home = TempHome::new();
    let (mut sent, mut sent_below) = (Vec::new(), Vec::new());
    let mut number = 0;
    for restart in 0..=RESTARTS {
        let server = Server::start(&backend, &home);
        let victim = server.process.0.id();
        let last = restart == RESTARTS;
        // After some responses, at a random moment of the next calls.
        let (answers, after) = (
            1 + dice.below(6) as usize,
            Duration::from_micros(dice.below(30_000)),
        );
        let (answered, responses) = std::sync::mpsc::channel();
        let killer = std::thread::spawn(move || {
            if !last {
                responses.iter().take(answers).for_each(drop);
                std::thread::sleep(after);
                send_signal(victim, Signal::KILL);
            }
        });
        for step in 0.. {
            if last && step == 3 {
                break;
            }
            // A batch with entries without an ID, one with only such entries, one of a sub-agent.
            // Each is repeated until there is a response.
            let title = json!({ "type": "custom-title", "customTitle": format!("title {number}"), "sessionId": SESSION });
            let (key, entries) = match number % 3 {
                0 => (
                    main_key(),
                    vec![user_entry(number), title, user_entry(number + 100_000)],
                ),
                1 => (main_key(), vec![title]),
                _ => (sub_key(), vec![user_entry(number), title]),
            };
            let Some((status, response)) = server.post(
                "append",
                &append(&key, &format!("batch-{number}"), &entries),
            ) else {
                break;
            };
            assert_eq!(status, 200, "{context}: {response}");
            if number % 3 == 2 {
                sent_below.extend(entries)
            } else {
                sent.extend(entries)
            }
            number += 1;
            // No client reads the response once the server is to be killed.
            let _ = answered.send(());
        }
        drop(answered);
        killer.join().unwrap();
        if last {
            assert_eq!(server.load(&main_key()), sent, "{context}");
            assert_eq!(server.load(&sub_key()), sent_below, "{context}");
            assert_eq!(
                server.expect(200, "list-subkeys", &json!({ "key": main_key() })),
                r#"{"subkeys":["subagents/agent-1"]}"#
            );
        } else if restart % 2 == 0 {
            home = TempHome::new();
        }
    }
    // The log is like any other: an agent continues it on another machine.
    let elsewhere = TempHome::new();
    backend.run(&elsewhere, &["restore", SESSION]).ok();
    let text = std::fs::read_to_string(
        elsewhere
            .home()
            .join(format!(".claude/projects/{PROJECT}/{SESSION}.jsonl")),
    )
    .unwrap();
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines, sent, "{context}");
    let shown = backend.run(&elsewhere, &["show", SESSION]).ok().out();
    assert!(
        shown.contains("question number 0")
            && shown.contains(&format!("question number {}", (number - 1) / 3 * 3)),
        "{shown}"
    );
}

on_each_backend!(the_last_session_store_to_append_owns_the_session);
fn the_last_session_store_to_append_owns_the_session(backend: Backend) {
    let (home_a, home_b) = (TempHome::new(), TempHome::new());
    let (a, b) = (
        Server::start(&backend, &home_a),
        Server::start(&backend, &home_b),
    );
    let key = main_key();
    a.expect(200, "append", &append(&key, "1", &[user_entry(1)]));
    // Reading does not take over the session.
    assert_eq!(b.load(&key), [user_entry(1)]);
    a.expect(200, "append", &append(&key, "2", &[user_entry(2)]));
    assert_eq!(b.load(&key), [user_entry(1), user_entry(2)]);
    b.expect(200, "append", &append(&key, "3", &[user_entry(3)]));
    let refused = a.expect(409, "append", &append(&key, "4", &[user_entry(4)]));
    assert!(
        refused.contains("took over") && refused.contains("branch"),
        "{refused}"
    );
    a.expect(409, "append", &append(&key, "4", &[user_entry(4)]));
    assert_eq!(b.load(&key), [user_entry(1), user_entry(2), user_entry(3)]);
    // A server that reads the session again continues from there.
    assert_eq!(a.load(&key), [user_entry(1), user_entry(2), user_entry(3)]);
    a.expect(200, "append", &append(&key, "5", &[user_entry(5)]));
    assert_eq!(
        a.load(&key),
        [user_entry(1), user_entry(2), user_entry(3), user_entry(5)]
    );
    b.expect(409, "append", &append(&key, "6", &[user_entry(6)]));
    // A session of another server is listed too.
    let home_c = TempHome::new();
    let c = Server::start(&backend, &home_c);
    let listed = c.expect(200, "list-sessions", &json!({ "project_key": PROJECT }));
    assert!(listed.contains(SESSION), "{listed}");
    c.expect(200, "delete", &json!({ "key": key }));
    c.expect(404, "load", &json!({ "key": key }));
    a.expect(404, "load", &json!({ "key": key }));
}

#[test]
fn a_stopping_session_store_responds_and_flushes_first() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let mut server = Server::start(&backend, &home);
    server.expect(200, "append", &append(&main_key(), "1", &[user_entry(1)]));
    server.process.signal(Signal::TERM);
    assert_eq!(server.process.code(), Some(0));
    // The files were deleted, and the ledger still exists.
    std::fs::remove_dir_all(
        home.home()
            .join(".local/share/sessiond/session-store/projects"),
    )
    .unwrap();
    let server = Server::start(&backend, &home);
    assert_eq!(server.load(&main_key()), [user_entry(1)]);
    server.expect(
        200,
        "append",
        &append(&main_key(), "2", &[user_entry(1), user_entry(2)]),
    );
    assert_eq!(server.load(&main_key()), [user_entry(1), user_entry(2)]);
}

#[test]
fn invalid_session_store_requests_are_rejected() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let refused = |arguments: &[&str]| backend.run(&home, &[&["serve-store"], arguments].concat());
    refused(&["--listen", "http://0.0.0.0:80"]).fails(
        2,
        "expected a loopback address",
        "127.0.0.1",
    );
    refused(&["--agent", "codex"]).fails(2, "claude-code only", "--agent");
    refused(&["--root", home.home().join(".claude").to_str().unwrap()]).fails(
        2,
        "the agent's own directory",
        "--root",
    );
    let server = Server::start(&backend, &home);
    let bad = |status: u16, call: &str, body: Value, why: &str| {
        let text = server.expect(status, call, &body);
        assert!(text.contains(why), "{call} {body}: {text}");
    };
    bad(404, "no-such-call", json!({}), "unknown path");
    bad(400, "append", json!([]), "invalid request body");
    bad(
        400,
        "append",
        json!({ "key": main_key(), "entries": [1] }),
        "entry 0 is not a JSON object",
    );
    bad(
        400,
        "append",
        json!({ "key": main_key(), "entries": [], "colour": 1 }),
        "colour",
    );
    bad(
        400,
        "load",
        json!({ "key": { "project_key": "p", "session_id": "../x" } }),
        "session ID",
    );
    bad(
        400,
        "load",
        json!({ "key": { "project_key": "p", "session_id": "s", "subpath": "../../x" } }),
        "are not allowed",
    );
    bad(404, "load", json!({ "key": main_key() }), "not found");
    let head = |more: &str| {
        format!(
            "POST /v1/load HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{more}"
        )
    };
    let key = json!({ "key": main_key() }).to_string();
    assert_eq!(
        server
            .send(&head("origin: http://evil.example\r\n"), &key)
            .unwrap()
            .0,
        400
    );
    assert_eq!(
        server
            .send(&head("").replace("localhost", "evil.example:80"), &key)
            .unwrap()
            .0,
        400
    );
    assert_eq!(
        server
            .send(&head("").replace("application/json", "text/plain"), &key)
            .unwrap()
            .0,
        400
    );
    let mut stream = TcpStream::connect(&server.address).unwrap();
    write!(
        stream,
        "{}content-length: 70000000\r\n\r\n",
        head("connection: close\r\n")
    )
    .unwrap();
    let mut response = String::new();
    BufReader::new(stream).read_line(&mut response).unwrap();
    assert!(response.contains("413"), "{response}");
    // A second server on the same directory.
    refused(&[]).fails(7, "is running for", "--root");
}
