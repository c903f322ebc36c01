//! Each built-in agent profile: files that the real program wrote are streamed from one home and
//! restored in another; secrets stay behind.

use std::io::Read;
use std::path::{Path, PathBuf};

use crate::support::TempHome;
use crate::support::backend::{Backend, Ran};
use crate::support::files::{append, files_below};

/// A secret that must not reach the bucket.
const SECRET: &str = "sk-not-for-the-bucket";

/// An agent, its directory, and the other files in it.
struct Agent {
    name: &'static str,
    fixture: &'static str,
    root: &'static str,
    id: &'static str,
    others: &'static [&'static str],
    turns: u64,
}

const AGENTS: [Agent; 2] = [
    Agent {
        name: "codex",
        fixture: "codex/tools-resumed",
        root: ".codex",
        id: "01a1e49d-459f-77d3-8086-c3bc57821b5a",
        others: &[
            "auth.json",
            "state_5.sqlite",
            "state_5.sqlite-wal",
            "history.jsonl",
            "sessions/2026/11/16/notes.txt",
        ],
        turns: 2,
    },
    Agent {
        name: "gemini",
        fixture: "gemini/tools-resumed",
        root: ".gemini",
        id: "b9259b26-1335-4f5a-b0d2-13f914129298",
        others: &[
            "oauth_creds.json",
            "settings.json",
            "tmp/app/shell_history",
            "tmp/app/logs.json",
        ],
        turns: 2,
    },
];

fn fixture(agent: &Agent) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(agent.fixture)
}

/// A home with the files of a fixture and with secrets.
fn home_with_fixture(agent: &Agent) -> TempHome {
    let home = TempHome::new();
    let root = home.home().join(agent.root);
    for (path, bytes) in files_below(&fixture(agent)) {
        append(&root.join(path), String::from_utf8(bytes).unwrap());
    }
    for other in agent.others {
        append(&root.join(other), format!("{{\"key\":\"{SECRET}\"}}\n"));
    }
    home
}

/// Every object of a bucket in a directory, decompressed.
pub fn objects(bucket: &Path) -> Vec<Vec<u8>> {
    let inflate = |bytes: Vec<u8>| {
        let mut inflated = Vec::new();
        match flate2::read::MultiGzDecoder::new(bytes.as_slice()).read_to_end(&mut inflated) {
            Ok(_) => inflated,
            Err(_) => bytes,
        }
    };
    files_below(bucket).into_values().map(inflate).collect()
}

pub fn contains_text(bytes: &[u8], text: &str) -> bool {
    bytes
        .windows(text.len())
        .any(|window| window == text.as_bytes())
}

mod each_agents_session_restores_completely_and_alone {
    use super::*;

    #[test]
    fn on_files() {
        for agent in AGENTS {
            session_restores_completely_and_alone(agent, Backend::file());
        }
    }

    #[test]
    fn needs_servers() {
        for agent in AGENTS {
            if let Some(backend) = Backend::servers() {
                session_restores_completely_and_alone(agent, backend);
            }
        }
    }
}

fn session_restores_completely_and_alone(agent: Agent, mut backend: Backend) {
    backend.set("SESSIOND_AGENT", agent.name);
    let home = home_with_fixture(&agent);
    backend.run(&home, &["run", "--", "true"]).ok();
    let row = backend.run(&home, &["ls", "--json"]).ok().json()["sessions"][0].clone();
    assert_eq!(
        (row["id"].as_str(), row["turns"].as_u64()),
        (Some(agent.id), Some(agent.turns)),
        "{row}"
    );

    let other = TempHome::new();
    backend.run(&other, &["restore", agent.id]).ok();
    assert_eq!(
        files_below(&other.home().join(agent.root)),
        files_below(&fixture(&agent)),
        "{} on {}",
        agent.name,
        backend.name
    );

    // The session continues there, and nothing is uploaded again.
    let transcript = files_below(&fixture(&agent)).into_keys().next().unwrap();
    append(
        &other.home().join(agent.root).join(&transcript),
        "{\"type\":\"more\"}\n",
    );
    backend.run(&other, &["run", "--", "true"]).ok();
    let now = backend.run(&other, &["ls", "--json"]).ok().json()["sessions"][0].clone();
    assert_eq!(
        now["raw_bytes"].as_u64().unwrap(),
        row["raw_bytes"].as_u64().unwrap() + 16,
        "{now}"
    );

    if backend.name == "file+sqlite" {
        let objects = objects(&backend.path().join("bucket"));
        assert!(
            objects.iter().any(|object| contains_text(object, agent.id)),
            "the objects are read"
        );
        assert!(
            !objects.iter().any(|object| contains_text(object, SECRET)),
            "{}: a secret is in the bucket",
            agent.name
        );
    }
}

#[test]
fn a_sub_agents_rollout_belongs_to_its_parent_session() {
    let agent = Agent {
        fixture: "codex/subagent",
        id: "01a1e4c6-e869-72a1-b904-32a2c4d1e613",
        turns: 1,
        ..AGENTS[0]
    };
    let mut backend = Backend::file();
    backend.set("SESSIOND_AGENT", agent.name);
    let home = home_with_fixture(&agent);
    backend.run(&home, &["run", "--", "true"]).ok();
    let sessions = backend.run(&home, &["ls", "--json"]).ok().json()["sessions"].clone();
    assert_eq!(
        (
            sessions.as_array().unwrap().len(),
            sessions[0]["turns"].as_u64()
        ),
        (1, Some(1)),
        "{sessions}"
    );
    let other = TempHome::new();
    backend.run(&other, &["restore", agent.id]).ok();
    let restored = files_below(&other.home().join(agent.root));
    assert_eq!(
        (restored.len(), restored),
        (2, files_below(&fixture(&agent)))
    );
}

#[test]
fn claude_config_dir_selects_the_root() {
    let backend = Backend::file();
    let home = TempHome::new();
    let config = home.home().join("config");
    append(
        &config.join("projects/tenant_7/s1.jsonl"),
        "{\"type\":\"user\",\"cwd\":\"/work/app\"}\n",
    );
    let run = |home: &TempHome, arguments: &[&str]| {
        let mut command = backend.command(home, arguments);
        command
            .env("CLAUDE_CONFIG_DIR", home.home().join("config"))
            .env("CLAUDE_CODE_PROJECT_DIR_NAME", "tenant_7");
        Ran(command.output().unwrap()).ok()
    };
    run(&home, &["run", "--", "true"]);
    let other = TempHome::new();
    // In any working directory: the project keeps its name.
    run(&other, &["restore", "--latest", "--project", "/"]);
    assert_eq!(
        files_below(&other.home().join("config")),
        files_below(&config)
    );
}

#[test]
fn a_fork_restores_next_to_its_origin_under_its_own_id() {
    for agent in AGENTS {
        let mut backend = Backend::file();
        backend.set("SESSIOND_AGENT", agent.name);
        let home = home_with_fixture(&agent);
        backend.run(&home, &["run", "--", "true"]).ok();
        let fork = backend
            .run(&home, &["fork", agent.id, "--at", "turn:1", "--quiet"])
            .ok()
            .out()
            .trim()
            .to_owned();
        let other = TempHome::new();
        for id in [agent.id, &fork] {
            backend.run(&other, &["restore", id]).ok();
        }
        let files = files_below(&other.home().join(agent.root));
        let of = |id: &str| {
            files
                .values()
                .filter(|bytes| contains_text(bytes, id))
                .collect::<Vec<_>>()
        };
        let wanted = files_below(&fixture(&agent));
        assert!(
            of(agent.id)
                .iter()
                .all(|bytes| wanted.values().any(|file| file == *bytes)),
            "{}",
            agent.name
        );
        assert_eq!(of(agent.id).len(), wanted.len(), "{}", agent.name);
        let forked = of(&fork);
        assert!(
            !forked.is_empty() && forked.iter().all(|bytes| !contains_text(bytes, agent.id)),
            "{}",
            agent.name
        );
        // The first turn only.
        assert!(
            forked
                .iter()
                .any(|bytes| contains_text(bytes, "please USE TOOL"))
                && !forked.iter().any(|bytes| contains_text(bytes, "once more"))
        );
    }
}
