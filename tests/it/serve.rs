//! `sessiond serve`: the API, who may use it, and what it never shows.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::{Value, json};

use sessiond::capture::flush::LogFlusher;
use sessiond::serve::feed::{Feeds, SessionChange};

use crate::messages::{fixture, line};
use crate::support::backend::{Backend, Running, eventually};
use crate::support::files::append;
use crate::support::http::exchange;
use crate::support::world::World;
use crate::support::writer::FlushAll;
use crate::support::{PATIENCE, TempHome, fetch, needs_tools, on_each_backend, or_skip};

const PATH: &str = "projects/-work-app/s1.jsonl";

const NAMESPACE: &str = "/api/v1/namespaces/default";

/// A server on a free port.
pub struct Server {
    pub process: Running,
    pub address: String,
    audit: PathBuf,
}

/// A response: its status, headers in lower case, and body.
pub struct Reply {
    status: u16,
    headers: String,
    body: String,
}

impl Reply {
    #[track_caller]
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.headers.lines();
        lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }
}

impl Server {
    pub fn start(backend: &Backend, home: &TempHome, arguments: &[&str]) -> Server {
        let audit = home.path().join("audit.log");
        let mut command = backend.command(home, &["serve", "--listen", "http://127.0.0.1:0"]);
        command.arg("--audit-log").arg(&audit).args(arguments);
        let log = std::fs::File::create(home.path().join("serve.log")).unwrap();
        let mut process = Running(command.stdout(Stdio::piped()).stderr(log).spawn().unwrap());
        let mut line = String::new();
        BufReader::new(process.0.stdout.as_mut().unwrap())
            .read_line(&mut line)
            .unwrap();
        let log = || std::fs::read_to_string(home.path().join("serve.log")).unwrap();
        let address = line.trim().strip_prefix("listening on http://");
        let address = address.unwrap_or_else(|| panic!("{line:?}: {}", log()));
        Server {
            address: address.to_owned(),
            process,
            audit,
        }
    }

    /// Sends a request to a path below the namespace, or to an absolute one.
    pub fn request(&self, method: &str, path: &str, headers: &str, body: &str) -> Reply {
        let path = match path.starts_with("/api") {
            true => path.to_owned(),
            false => format!("{NAMESPACE}{path}"),
        };
        let host = match headers.to_lowercase().contains("host: ") {
            true => String::new(),
            false => format!("host: {}\r\n", self.address),
        };
        let content = match body.is_empty() {
            true => String::new(),
            false => format!(
                "content-type: application/json\r\ncontent-length: {}\r\n",
                body.len()
            ),
        };
        let request = format!(
            "{method} {path} HTTP/1.1\r\n{host}{headers}{content}connection: close\r\n\r\n{body}"
        );
        let (head, body) = exchange(&self.address, request.as_bytes()).unwrap();
        Reply {
            status: head.split(' ').nth(1).unwrap().parse().unwrap(),
            headers: head.to_lowercase(),
            body: String::from_utf8_lossy(&body).into_owned(),
        }
    }

    pub fn get(&self, path: &str) -> Reply {
        self.request("GET", path, "", "")
    }

    fn get_as(&self, token: &str, path: &str) -> Reply {
        let header = format!("authorization: Bearer {token}\r\n");
        self.request("GET", path, &header, "")
    }

    #[track_caller]
    fn ok(&self, path: &str) -> Value {
        let reply = self.get(path);
        assert_eq!(reply.status, 200, "{path}: {}", reply.body);
        reply.json()
    }

    fn audit(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(&self.audit).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
        lines.collect()
    }
}

/// Streams a session that a real agent wrote. Returns its ID.
pub fn streamed(backend: &Backend, home: &TempHome, name: &str) -> String {
    let (session, files) = fixture(name);
    for (path, bytes) in files {
        let path = home.home().join(".claude").join(path);
        append(&path, String::from_utf8(bytes).unwrap());
    }
    backend.run(home, &["run", "--", "true"]).ok();
    eventually("the session is in the index", || {
        let listed = backend.run(home, &["ls", "--json"]).ok().json();
        listed["sessions"].as_array().unwrap().len() == 1
    });
    session
}

fn token(backend: &Backend, home: &TempHome, access: &Path, name: &str, roles: &[&str]) -> String {
    let access = access.to_str().unwrap();
    let mut arguments = vec!["token", "--access", access, "--name", name];
    arguments.extend(roles.iter().flat_map(|role| ["--role", role]));
    let ran = backend.run(home, &arguments).ok();
    ran.out().trim().to_owned()
}

on_each_backend!(
    a_session_is_listed_and_read_over_http,
    what_the_api_returns_is_what_the_commands_print,
    a_transcript_is_read_by_range_and_by_turn,
    labels_status_forks_and_removal_work_over_http,
    a_role_opens_only_its_operations,
);

fn a_session_is_listed_and_read_over_http(backend: Backend) {
    let home = TempHome::new();
    let session = streamed(&backend, &home, "subagent");
    let server = Server::start(&backend, &home, &[]);
    let page = server.ok("/sessions?limit=10&agent=claude-code&status=active&project=-work-work");
    assert_eq!(page["sessions"][0]["id"], session.as_str());
    assert_eq!(page["next"], Value::Null);
    for none in [
        "agent=codex",
        "status=archived",
        "project=/elsewhere",
        "request=r1",
        "label=a%3Db",
        "model=none",
        "since=2999-01-01T00:00:00Z",
        "until=2000-01-01T00:00:00Z",
        "text=no+such%25words",
    ] {
        let page = server.ok(&format!("/sessions?{none}"));
        assert_eq!(page["sessions"], json!([]), "{none}");
    }
    for some in [
        "text=script%3AAGENT",
        "model=claude-opus-5-5",
        "project=/work/work",
    ] {
        let page = server.ok(&format!("/sessions?{some}"));
        assert_eq!(page["sessions"].as_array().unwrap().len(), 1, "{some}");
    }
    let one = format!("/sessions/claude-code/{session}");
    assert_eq!(server.ok(&one)["turns"], page["sessions"][0]["turns"]);
    let messages = server.ok(&format!("{one}/messages?role=assistant&limit=2"));
    let first = &messages["messages"][0];
    assert_eq!(first["role"], "assistant");
    let next = messages["next"].as_str().unwrap();
    let more = server.ok(&format!("{one}/messages?role=assistant&cursor={next}"));
    assert_ne!(more["messages"][0]["message_id"], first["message_id"]);
    let id = first["message_id"].as_str().unwrap();
    let message = server.ok(&format!("{one}/messages/{id}"));
    assert_eq!(message["message_id"], id);
    let stats = server.ok("/stats?by=day");
    assert_eq!(stats["total"]["sessions"], 1);
    let verified = server.ok(&format!("{one}/verify?deep=true"));
    assert_eq!(verified["damage"], json!([]));
    assert_eq!(server.ok(&format!("{one}/branches"))["branches"], json!([]));
    let state = server.ok(&format!("{one}/checkpoints/latest"));
    assert_eq!(state["session"], session.as_str());
    // An unchanged answer is not sent again.
    let reply = server.get(&one);
    let etag = reply.header("etag").unwrap().to_owned();
    let again = server.request("GET", &one, &format!("if-none-match: {etag}\r\n"), "");
    assert_eq!((again.status, again.body.as_str()), (304, ""));
    for (name, value) in [
        ("cache-control", "no-store"),
        ("x-content-type-options", "nosniff"),
        ("x-frame-options", "deny"),
    ] {
        assert_eq!(reply.header(name), Some(value));
    }
    assert!(
        reply
            .header("content-security-policy")
            .unwrap()
            .contains("default-src 'none'")
    );
    let (code, _) = server.process.stop();
    assert_eq!(code, Some(0));
}

/// The API adds no second way to compute an answer.
fn what_the_api_returns_is_what_the_commands_print(backend: Backend) {
    let home = TempHome::new();
    let session = streamed(&backend, &home, "subagent");
    let server = Server::start(&backend, &home, &[]);
    let one = format!("/sessions/claude-code/{session}");
    let printed = |arguments: &[&str]| backend.run(&home, arguments).ok().json();
    assert_eq!(server.ok("/sessions"), printed(&["ls", "--json"]));
    assert_eq!(
        server.ok("/stats?by=model"),
        printed(&["stats", "--by", "model", "--json"])
    );
    assert_eq!(
        server.ok(&format!("{one}/conversation?verbose=true"))["messages"],
        printed(&["show", &session, "--verbose", "--json"])
    );
    let inspected = printed(&["inspect", &session, "--json"]);
    assert_eq!(server.ok(&format!("{one}/checkpoints/latest")), inspected);
    let listed = printed(&["checkpoints", &session, "--json"]);
    let checkpoints = server.ok(&format!("{one}/checkpoints"));
    assert_eq!(checkpoints["checkpoints"], listed["checkpoints"]);
    let reports = printed(&["verify", &session, "--json"]);
    assert_eq!(server.ok(&format!("{one}/verify")), reports[0]);
    let files = server.ok(&format!("{one}/files"));
    let files = files["files"].as_array().unwrap();
    let lengths: serde_json::Map<String, Value> = files
        .iter()
        .map(|file| {
            (
                file["path"].as_str().unwrap().to_owned(),
                file["bytes"].clone(),
            )
        })
        .collect();
    assert_eq!(Value::Object(lengths), inspected["files"]);
    for file in files {
        let path = file["path"].as_str().unwrap();
        let stored = std::fs::read_to_string(home.home().join(".claude").join(path)).unwrap();
        assert_eq!(
            server.get(&format!("{one}/files/{path}")).body,
            stored,
            "{path}"
        );
    }
}

fn a_transcript_is_read_by_range_and_by_turn(backend: Backend) {
    let home = TempHome::new();
    let session = streamed(&backend, &home, "subagent");
    let server = Server::start(&backend, &home, &[]);
    let path = format!("/sessions/claude-code/{session}/transcript");
    let all = server.get(&path);
    assert_eq!(all.status, 200, "{}", all.body);
    assert!(all.body.lines().count() > 3);
    let range =
        |range: &str| server.request("GET", &path, &format!("range: bytes={range}\r\n"), "");
    let part = range("10-19");
    assert_eq!((part.status, part.body.as_str()), (206, &all.body[10..20]));
    let total = all.body.len();
    assert_eq!(
        part.header("content-range"),
        Some(format!("bytes 10-19/{total}").as_str())
    );
    assert_eq!(range("-5").body, all.body[total - 5..]);
    let after = range(&format!("{total}-"));
    assert_eq!(after.status, 416);
    assert_eq!(
        after.header("content-range"),
        Some(format!("bytes */{total}").as_str())
    );
    let etag = all.header("etag").unwrap().to_owned();
    let again = server.request("GET", &path, &format!("if-none-match: {etag}\r\n"), "");
    assert_eq!(again.status, 304);
    // The turns are the transcript.
    let turns = server.ok(&format!("/sessions/claude-code/{session}"))["turns"]
        .as_u64()
        .unwrap();
    let by_turn = (1..=turns).map(|turn| server.get(&format!("{path}?turn={turn}")).body);
    let by_turn: String = by_turn.collect();
    assert!(turns > 0 && all.body.starts_with(&by_turn), "{turns}");
    assert_eq!(server.get(&format!("{path}?turn=99")).status, 404);
    // An archive can be imported.
    let archive = server.get(&format!("/sessions/claude-code/{session}/export"));
    assert_eq!(archive.status, 200);
    assert_eq!(archive.header("content-type"), Some("application/gzip"));
}

fn labels_status_forks_and_removal_work_over_http(backend: Backend) {
    let home = TempHome::new();
    let session = streamed(&backend, &home, "subagent");
    let server = Server::start(&backend, &home, &[]);
    let one = format!("/sessions/claude-code/{session}");
    let send = |method: &str, path: &str, body: Value| {
        let body = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        server.request(method, &format!("{one}{path}"), "", &body)
    };
    let before = server.get(&format!("{one}/metadata"));
    let etag = before.header("etag").unwrap().to_owned();
    let change = json!({ "labels": { "team": "infra" }, "request_id": "job-1", "ttl": "30d" });
    let changed = send("PATCH", "/metadata", change);
    assert_eq!(changed.status, 200, "{}", changed.body);
    let labels = backend
        .run(&home, &["label", &session, "--json"])
        .ok()
        .json();
    assert_eq!(labels, json!({ "team": "infra" }));
    let listed = server.ok("/sessions?label=team%3Dinfra&request=job-1");
    assert_eq!(
        listed["sessions"][0]["ttl"],
        json!({ "seconds": 2_592_000 })
    );
    // A change that is based on an older version is rejected.
    let outdated = server.request(
        "PATCH",
        &format!("{one}/metadata"),
        &format!("if-match: {etag}\r\n"),
        "{\"labels\":{\"team\":null}}",
    );
    assert_eq!(outdated.status, 412, "{}", outdated.body);
    assert_eq!(
        send("PATCH", "/metadata", json!({ "labels": { "team": null } })).status,
        200
    );
    assert_eq!(server.ok(&format!("{one}/metadata"))["labels"], json!({}));
    assert_eq!(
        send("PATCH", "/metadata", json!({ "labels": { "a=b": "c" } })).status,
        400
    );
    assert_eq!(
        send("PATCH", "/metadata", json!({ "unknown": 1 })).status,
        400
    );
    // The status moves only along the valid ways.
    assert_eq!(
        send("PUT", "/status", json!({ "status": "archived" })).status,
        409
    );
    for status in ["completed", "archived", "active"] {
        let moved = send("PUT", "/status", json!({ "status": status }));
        assert_eq!(
            (moved.status, moved.json()["status"].as_str()),
            (200, Some(status))
        );
    }
    let named = send(
        "POST",
        "/checkpoints",
        json!({ "name": "before", "at": "latest" }),
    );
    assert_eq!(named.status, 201, "{}", named.body);
    assert_eq!(
        send("POST", "/checkpoints", json!({ "name": "before" })).status,
        409
    );
    let fork = send("POST", "/forks", json!({ "at": "before" }));
    assert_eq!(fork.status, 201, "{}", fork.body);
    let fork = fork.json()["session"].as_str().unwrap().to_owned();
    let forked = server.ok(&format!("/sessions/claude-code/{fork}"));
    assert_eq!(forked["origin"], session.as_str());
    assert_eq!(
        send("DELETE", "/checkpoints/before", Value::Null).status,
        200
    );
    assert_eq!(
        send("DELETE", "/checkpoints/before", Value::Null).status,
        404
    );
    assert_eq!(
        send("DELETE", "", Value::Null).json(),
        json!({ "changed": true })
    );
    assert_eq!(
        send("DELETE", "", Value::Null).json(),
        json!({ "changed": false })
    );
    assert_eq!(server.ok(&one)["status"], "removed");
    assert_eq!(
        send("POST", "/undelete", Value::Null).json(),
        json!({ "changed": true })
    );
    assert_eq!(server.ok(&one)["status"], "active");
    // A session that does not exist stays so.
    let missing = server.request(
        "PATCH",
        "/sessions/claude-code/missing/metadata",
        "",
        "{\"labels\":{\"a\":\"b\"}}",
    );
    assert_eq!(missing.status, 404, "{}", missing.body);
    let actions = server.audit();
    let actions: Vec<&str> = actions
        .iter()
        .map(|line| line["action"].as_str().unwrap())
        .collect();
    for action in [
        "updateMetadata",
        "setStatus",
        "forkSession",
        "removeSession",
        "undeleteSession",
    ] {
        assert!(actions.contains(&action), "{action}: {actions:?}");
    }
}

fn a_role_opens_only_its_operations(backend: Backend) {
    let home = TempHome::new();
    let session = streamed(&backend, &home, "subagent");
    let access = home.path().join("access.toml");
    let make = |name: &str, roles: &[&str]| token(&backend, &home, &access, name, roles);
    let metadata = make("meta", &["metadata"]);
    let reader = make("reader", &["reader@default"]);
    let elsewhere = make("elsewhere", &["admin@other"]);
    let operator = make("operator", &["operator"]);
    let path = access.to_str().unwrap();
    let server = Server::start(&backend, &home, &["--access", path]);
    let one = format!("/sessions/claude-code/{session}");
    let words = "SCRIPT:agent";
    // Without a token, with a wrong one, and in another namespace, nothing is shown.
    for reply in [
        server.get("/sessions"),
        server.get_as("sdt_wrong", "/sessions"),
        server.request("GET", "/sessions", "x-forwarded-user: admin\r\n", ""),
    ] {
        assert_eq!(reply.status, 401, "{}", reply.body);
        assert_eq!(reply.header("www-authenticate"), Some("bearer"));
        assert_eq!(
            reply.header("content-type"),
            Some("application/problem+json")
        );
    }
    assert_eq!(server.get_as(&elsewhere, "/sessions").status, 403);
    // A role without content sees counts and costs, and no words.
    let titled = server.get_as(&reader, "/sessions");
    assert!(titled.body.contains(words), "{}", titled.body);
    for path in [
        "/sessions".to_owned(),
        one.clone(),
        format!("{one}/messages"),
        format!("{one}/checkpoints"),
        format!("{one}/verify"),
        format!("{one}/branches"),
        "/stats".to_owned(),
    ] {
        let reply = server.get_as(&metadata, &path);
        assert_eq!(reply.status, 200, "{path}: {}", reply.body);
        for secret in [words, "sub-agent is done", "echo child"] {
            assert!(!reply.body.contains(secret), "{path}: {}", reply.body);
        }
    }
    assert_eq!(
        server.get_as(&metadata, "/sessions?text=script").status,
        403
    );
    for path in [
        "/conversation",
        "/files",
        "/transcript",
        "/export",
        "/checkpoints/latest",
    ] {
        let path = format!("{one}{path}");
        assert_eq!(server.get_as(&metadata, &path).status, 403, "{path}");
        assert_eq!(server.get_as(&reader, &path).status, 200, "{path}");
    }
    assert_eq!(server.get_as(&metadata, "/search?q=agent").status, 403);
    // A reader changes nothing, an operator removes nothing.
    let send = |token: &str, method: &str, path: &str, body: &str| {
        let header = format!("authorization: Bearer {token}\r\n");
        server
            .request(method, &format!("{one}{path}"), &header, body)
            .status
    };
    let label = "{\"labels\":{\"a\":\"b\"}}";
    assert_eq!(send(&reader, "PATCH", "/metadata", label), 403);
    assert_eq!(send(&operator, "PATCH", "/metadata", label), 200);
    assert_eq!(
        send(&operator, "PATCH", "/metadata", "{\"ttl\":\"1d\"}"),
        403
    );
    assert_eq!(send(&operator, "DELETE", "", ""), 403);
    // Who saw what is recorded, and the words are not.
    let audit = std::fs::read_to_string(&server.audit).unwrap();
    assert!(!audit.contains(words) && !audit.contains(&reader));
    let views = server.audit();
    assert!(views.iter().any(|view| view["who"] == "token:reader"
        && view["action"] == "getTranscript"
        && view["session"] == session.as_str()
        && view["status"] == 200));
    assert!(views.iter().any(|view| view["who"] == "token:operator"
        && view["action"] == "removeSession"
        && view["status"] == 403));
    assert!(
        views
            .iter()
            .any(|view| view["who"] == "token:elsewhere" && view["status"] == 403)
    );
    // A revoked token is rejected at once, and a damaged file admits nobody.
    let text = std::fs::read_to_string(&access).unwrap();
    assert!(!text.contains(&reader));
    let without = text.replace("name = \"reader\"", "name = \"revoked\"");
    let digest = sessiond::model::Digest::of(reader.as_bytes()).to_string();
    std::fs::write(&access, without.replace(&digest, &"0".repeat(64))).unwrap();
    assert_eq!(server.get_as(&reader, "/sessions").status, 401);
    std::fs::write(&access, "not toml").unwrap();
    assert_eq!(server.get_as(&metadata, "/sessions").status, 503);
}

#[test]
fn a_web_page_cannot_use_a_local_server() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let server = Server::start(&backend, &home, &[]);
    let status = |headers: &str| server.request("GET", "/sessions", headers, "").status;
    assert_eq!(status(""), 200);
    assert_eq!(
        status(&format!("origin: http://{}\r\n", server.address)),
        200
    );
    for headers in [
        "host: evil.example\r\n",
        "host: evil.example:80\r\n",
        "origin: http://evil.example\r\n",
        "origin: null\r\n",
        "sec-fetch-site: cross-site\r\n",
    ] {
        assert_eq!(status(headers), 403, "{headers}");
    }
    let simple = "content-type: text/plain\r\ncontent-length: 2\r\n";
    let sent = server.request("PUT", "/sessions/claude-code/x/status", simple, "");
    assert_eq!(sent.status, 415, "{}", sent.body);
}

#[test]
fn a_server_for_other_machines_needs_authentication() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let serve = |arguments: &[&str]| backend.run(&home, &[&["serve"], arguments].concat());
    serve(&["--listen", "http://0.0.0.0:0"]).fails(
        2,
        "an address of other machines needs --access",
        "sessiond token --access access.toml",
    );
    serve(&["--access", "missing.toml"]).fails(2, "read the access file", "check the path");
    let open = home.home().join("open.toml");
    std::fs::write(&open, "").unwrap();
    let open = open.to_str().unwrap();
    serve(&["--access", open]).fails(2, "other users can read or change it", "chmod 600");
    let token = |arguments: &[&str]| {
        let fixed = ["token", "--access", "new.toml", "--name", "ci"];
        backend.run(&home, &[&fixed, arguments].concat())
    };
    token(&["--role", "root"]).fails(2, "invalid role \"root\"", "metadata, reader");
    token(&["--role", "reader"]).ok();
    token(&["--role", "reader"]).fails(7, "already has a token named ci", "another --name");
    let proxy = ["--access", "new.toml", "--trusted-proxy", "proxy.example"];
    serve(&proxy).fails(2, "invalid --trusted-proxy value", "10.1.0.0/16");
}

#[test]
fn a_user_of_a_trusted_proxy_has_the_roles_of_the_access_file() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let access = home.path().join("access.toml");
    token(&backend, &home, &access, "ci", &["reader"]);
    let user = "\n[[user]]\nname = \"ada@example.com\"\nroles = { default = \"reader\" }\n";
    let text = std::fs::read_to_string(&access).unwrap();
    std::fs::write(&access, text + user).unwrap();
    let access = access.to_str().unwrap();
    let status = |proxy: &str, headers: &str| {
        let server = Server::start(
            &backend,
            &home,
            &["--access", access, "--trusted-proxy", proxy],
        );
        server.request("GET", "/sessions", headers, "").status
    };
    let ada = "x-forwarded-user: ada@example.com\r\n";
    assert_eq!(status("127.0.0.0/8", ada), 200);
    assert_eq!(status("127.0.0.0/8", "x-forwarded-user: eve\r\n"), 403);
    assert_eq!(status("127.0.0.0/8", &ada.repeat(2)), 401);
    assert_eq!(status("10.0.0.1", ada), 401, "another address");
    let page = format!("{ada}origin: https://evil.example\r\n");
    assert_eq!(
        status("127.0.0.0/8", &page),
        403,
        "a page of another origin"
    );
}

#[test]
fn requests_are_bounded_and_errors_are_problems() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let server = Server::start(&backend, &home, &[]);
    let problem = |method: &str, path: &str, headers: &str, body: &str| {
        let reply = server.request(method, path, headers, body);
        assert_eq!(
            reply.header("content-type"),
            Some("application/problem+json"),
            "{path}"
        );
        assert_eq!(reply.json()["status"], reply.status, "{path}");
        reply.status
    };
    assert_eq!(problem("GET", "/sessions?limit=0", "", ""), 400);
    assert_eq!(problem("GET", "/sessions?limit=1001", "", ""), 400);
    assert_eq!(problem("GET", "/sessions?unknown=1", "", ""), 400);
    assert_eq!(problem("GET", "/sessions?cursor=x", "", ""), 400);
    assert_eq!(problem("GET", "/sessions/claude-code/missing", "", ""), 404);
    assert_eq!(problem("GET", "/sessions/claude-code/..%2Fx", "", ""), 400);
    assert_eq!(
        problem("GET", "/sessions/claude-code/x/files/..%2F..%2Fetc", "", ""),
        400
    );
    assert_eq!(problem("GET", "/api/v2", "", ""), 404);
    assert_eq!(problem("DELETE", "/sessions", "", ""), 405);
    let large = "x".repeat(300 << 10);
    let path = "/sessions/claude-code/x/status";
    assert_eq!(
        problem("PUT", path, "", &format!("{{\"status\":\"{large}\"}}")),
        413
    );
    assert_eq!(problem("PUT", path, "", "{\"status\":"), 400);
    // Headers are bounded before anything reads them.
    let long = server.request(
        "GET",
        "/sessions",
        &format!("x: {}\r\n", "y".repeat(20 << 10)),
        "",
    );
    assert_eq!(long.status, 431);
}

#[test]
fn the_openapi_document_describes_every_operation() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let server = Server::start(&backend, &home, &[]);
    let document = server.ok("/api/v1/openapi.json");
    assert_eq!(document["openapi"], "3.1.0");
    let paths = document["paths"].as_object().unwrap();
    let operations: Vec<&Value> = paths
        .values()
        .flat_map(|item| item.as_object().unwrap().values())
        .collect();
    assert!(operations.len() >= 20, "{}", operations.len());
    let reference = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference/api.md");
    let reference = std::fs::read_to_string(reference).unwrap();
    for operation in operations {
        let name = operation["operationId"].as_str().unwrap();
        assert!(
            reference.contains(&format!("`{name}`")),
            "{name} is not in api.md"
        );
    }
    let text = document.to_string();
    for (at, _) in text.match_indices("\"#/components/schemas/") {
        let name = text[at + 22..].split('"').next().unwrap();
        assert!(
            document["components"]["schemas"].get(name).is_some(),
            "{name}"
        );
    }
}

/// A connection that receives events.
struct Subscription(BufReader<std::net::TcpStream>);

impl Subscription {
    fn open(server: &Server, path: &str) -> Subscription {
        let mut stream = std::net::TcpStream::connect(&server.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let request = format!(
            "GET {NAMESPACE}{path} HTTP/1.1\r\nhost: {}\r\n\r\n",
            server.address
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut subscription = Subscription(BufReader::new(stream));
        subscription.line(": subscribed");
        subscription
    }

    /// Reads up to the next line that starts with a text. None at the end of the stream.
    fn line(&mut self, start: &str) -> Option<String> {
        loop {
            let mut line = String::new();
            if self.0.read_line(&mut line).unwrap() == 0 {
                return None;
            }
            if line.starts_with(start) {
                return Some(line);
            }
        }
    }

    fn event(&mut self, name: &str) -> Value {
        self.line(&format!("event: {name}")).unwrap();
        let data = self.line("data: ").unwrap();
        serde_json::from_str(data.trim_start_matches("data: ")).unwrap()
    }
}

on_each_backend!(clients_follow_a_session_and_the_list);
fn clients_follow_a_session_and_the_list(backend: Backend) {
    let home = TempHome::new();
    let session = streamed(&backend, &home, "subagent");
    let server = Server::start(&backend, &home, &[]);
    let path = format!("/sessions/claude-code/{session}/events");
    let mut followers: Vec<Subscription> =
        (0..3).map(|_| Subscription::open(&server, &path)).collect();
    let mut list = Subscription::open(&server, "/events");
    let daemon = backend.daemon(&home, &[]);
    let (_, files) = fixture("subagent");
    let name = format!("{session}.jsonl");
    let own = files.keys().find(|path| path.ends_with(&name)).unwrap();
    let transcript = home.home().join(".claude").join(own);
    // A poller may still be starting: a later message is certainly new to it.
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0.. {
                let line = json!({
                    "type": "user", "uuid": format!("00000000-0000-4000-8000-{number:012}"), "sessionId": session,
                    "timestamp": format!("2026-12-02T03:{:02}:{:02}.000Z", number / 60 % 60, number % 60),
                    "message": { "role": "user", "content": "a live question" },
                });
                append(&transcript, format!("{line}\n"));
                std::thread::sleep(std::time::Duration::from_secs(1));
                if stop.load(std::sync::atomic::Ordering::Relaxed) {
                    break;
                }
            }
        });
        for follower in &mut followers {
            let message = follower.event("message");
            assert_eq!(message["content"][0]["text"], "a live question");
        }
        assert_eq!(list.event("session")["id"], session.as_str());
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    daemon.stop();
    assert_eq!(server.get(&path.replace(&session, "missing")).status, 404);
    // A stream without an end does not delay the end of the server.
    let (code, took) = server.process.stop();
    assert_eq!(code, Some(0));
    assert!(took < std::time::Duration::from_secs(9), "{took:?}");
    assert_eq!(list.line("never"), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_subscribers_cost_no_more_requests_than_one() {
    let world = World::new();
    let id = world.id("s1");
    let mut flusher = LogFlusher::new(id.clone());
    flusher.paths.insert(PATH.parse().unwrap());
    let mut write = async |number: u32| {
        world.append(PATH, line(number, "user", &format!("n{number}")));
        flusher.flush(&world.context(), false).await.unwrap();
    };
    write(1).await;
    let (feeds, profile) = (Feeds::default(), world.writer.context.profile.clone());
    let (before, started) = (world.store.requests(), std::time::Instant::now());
    let subscribe = || feeds.session(&world.logs(), &profile, &id);
    let mut subscribers: Vec<_> = (0..50).map(|_| subscribe()).collect();
    // The poller starts in the background. Once a message has arrived, it runs.
    let mut number = 1;
    let mut written = 0;
    while subscribers[0].is_empty() {
        number += 1;
        let requests = world.store.requests();
        write(number).await;
        written += world.store.requests() - requests;
        tokio::time::sleep(std::time::Duration::from_millis(700)).await;
        assert!(started.elapsed() < PATIENCE, "no message arrived");
    }
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    for subscriber in &mut subscribers {
        let change = subscriber.recv().await.unwrap();
        assert!(matches!(change, SessionChange::Message(_)), "{change:?}");
    }
    let polls = started.elapsed().as_secs() + 1;
    let requests = world.store.requests() - before - written;
    // One per poll and per new entry, and a few to find the end of the log.
    assert!(
        requests <= polls + u64::from(number) + 20,
        "{requests} requests for {polls} polls"
    );
    // Without subscribers, nothing is polled.
    drop(subscribers);
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    let idle = world.store.requests();
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    assert_eq!(world.store.requests(), idle);
}

needs_tools!(schemathesis_finds_no_difference_between_the_api_and_its_document);
/// Sends generated requests, valid and invalid ones, and compares each response with the OpenAPI
/// document.
fn schemathesis_finds_no_difference_between_the_api_and_its_document() {
    let Some(packages) = or_skip(fetch::schemathesis()) else {
        return;
    };
    for backend in Backend::all() {
        let home = TempHome::new();
        let session = streamed(&backend, &home, "subagent");
        let server = Server::start(&backend, &home, &[]);
        let config = home.path().join("schemathesis.toml");
        let parameters = format!(
            "[parameters]\n\"path.namespace\" = \"default\"\n\"path.agent\" = \"claude-code\"\n\"path.session\" = \"{session}\"\n"
        );
        std::fs::write(&config, parameters).unwrap();
        let mut command = home.command(Path::new("python3"));
        command
            .env("PYTHONPATH", &packages)
            .args(["-m", "schemathesis.cli", "--config-file"])
            .arg(&config)
            .args([
                "run",
                &format!("http://{}/api/v1/openapi.json", server.address),
            ])
            .args([
                "--max-examples",
                "20",
                "--phases",
                "examples,coverage,fuzzing",
            ])
            .args(["--exclude-operation-id", "followSession"])
            .args(["--exclude-operation-id", "followSessions"])
            // The other operations need the session.
            .args(["--exclude-operation-id", "removeSession"])
            .args(["--seed", "1", "--request-timeout", "60"])
            .args(["--checks", CHECKS]);
        let ran = command.output().unwrap();
        let out = String::from_utf8_lossy(&ran.stdout);
        assert!(ran.status.success(), "{}: {out}", backend.name);
        // Valid requests were among them.
        let audit = server.audit();
        for action in [
            "listSessions",
            "getConversation",
            "getTranscript",
            "updateMetadata",
        ] {
            let succeeded = |line: &Value| line["action"] == action && line["status"] == 200;
            assert!(audit.iter().any(succeeded), "{}: {action}", backend.name);
        }
    }
}

const CHECKS: &str = "not_a_server_error,status_code_conformance,content_type_conformance,\
    response_schema_conformance,negative_data_rejection,unsupported_method";
