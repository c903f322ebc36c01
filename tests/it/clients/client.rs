//! The clients: where their programs are, how they are started, and how they reach the model on
//! loopback.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, Connection, Row};

use super::container::transcript;
use super::install::Agents;
use super::model::tool_call_reply;
use crate::support::block_on;
use crate::support::files::files_below;

/// A client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Client {
    ClaudeNew,
    ClaudeOld,
    Codex,
    OpenCode,
}

impl Client {
    /// Its profile.
    pub fn agent(self) -> &'static str {
        match self {
            Client::ClaudeNew | Client::ClaudeOld => "claude-code",
            Client::Codex => "codex",
            Client::OpenCode => "opencode",
        }
    }

    pub fn program(self) -> &'static str {
        match self {
            Client::ClaudeNew | Client::ClaudeOld => "claude",
            Client::Codex => "codex",
            Client::OpenCode => "opencode",
        }
    }

    /// The directory of its program.
    pub fn bin(self, agents: &Agents) -> PathBuf {
        match self {
            Client::ClaudeNew => agents.claude_new(),
            Client::ClaudeOld => agents.claude_old(),
            Client::Codex => agents.codex(),
            Client::OpenCode => agents.opencode(),
        }
    }

    /// Writes the settings that its image has in the home.
    pub fn write_settings(self, home: &Path, model: &str) {
        let (path, text) = match self {
            Client::ClaudeNew | Client::ClaudeOld => return,
            Client::Codex => (
                ".codex/config.toml",
                format!(
                    "model = \"test\"\nmodel_provider = \"loopback\"\napproval_policy = \"never\"\nsandbox_mode = \"danger-full-access\"\n\
                     [model_providers.loopback]\nname = \"loopback\"\nbase_url = \"{model}/v1\"\nwire_api = \"responses\"\nenv_key = \"MODEL_KEY\"\n"
                ),
            ),
            Client::OpenCode => {
                let options = json!({ "baseURL": format!("{model}/v1"), "apiKey": "no-key" });
                let provider = json!({ "npm": "@ai-sdk/openai-compatible", "options": options, "models": { "test": {} } });
                let config = json!({ "model": "loopback/test", "autoupdate": false, "permission": "allow", "provider": { "loopback": provider } });
                (".config/opencode/opencode.json", config.to_string())
            }
        };
        crate::support::files::append(&home.join(path), &text);
    }

    /// Its environment, in addition to that of every program here.
    pub fn environment(self, command: &mut Command, tmp: &Path, model: &str) {
        command.env("SESSIOND_AGENT", self.agent());
        let on: &[&str] = match self {
            Client::ClaudeNew | Client::ClaudeOld => {
                command
                    .env("ANTHROPIC_BASE_URL", model)
                    .env("ANTHROPIC_API_KEY", "no-key")
                    .env("CLAUDE_CODE_TMPDIR", tmp);
                &[
                    "DISABLE_TELEMETRY",
                    "DISABLE_AUTOUPDATER",
                    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
                    // As root it refuses to skip permission prompts, unless IS_SANDBOX is set.
                    "IS_SANDBOX",
                    // Enables file history in print mode, and the task tools of the new version.
                    "CLAUDE_CODE_ENABLE_SDK_FILE_CHECKPOINTING",
                    "CLAUDE_CODE_ENABLE_TODO_TOOLS",
                    // The new version enables this for remote workers.
                    "CLAUDE_CODE_TRANSCRIPT_LOCAL_GC",
                ]
            }
            Client::Codex => {
                command.env("MODEL_KEY", "no-key");
                &[]
            }
            Client::OpenCode => {
                // Otherwise it installs its plugin library into every new home.
                command.env("npm_config_offline", "true");
                &[
                    "OPENCODE_DISABLE_AUTOUPDATE",
                    "OPENCODE_DISABLE_MODELS_FETCH",
                ]
            }
        };
        command.envs(on.iter().map(|name| (*name, "1")));
    }

    /// The arguments of a turn of a session, or of the first turn of a new one, and its stdin.
    pub fn turn<'p>(
        self,
        session: Option<&'p str>,
        prompt: &'p str,
    ) -> (Vec<&'p str>, Option<&'p str>) {
        match (self, session) {
            (Client::ClaudeNew | Client::ClaudeOld, None) => (vec!["-p", prompt], None),
            (Client::ClaudeNew | Client::ClaudeOld, Some(id)) => {
                (vec!["--resume", id, "-p", prompt], None)
            }
            (Client::Codex, None) => (vec!["exec", "--skip-git-repo-check", prompt], None),
            (Client::Codex, Some(id)) => (
                vec!["exec", "--skip-git-repo-check", "resume", id, prompt],
                None,
            ),
            // It quotes arguments.
            (Client::OpenCode, None) => (vec!["run"], Some(prompt)),
            (Client::OpenCode, Some(id)) => (vec!["run", "-s", id], Some(prompt)),
        }
    }

    /// The arguments of a turn that starts or resumes a session, and what the client reads.
    pub fn turn_with_placeholder(self, prompt: &str) -> (Vec<&str>, Option<&str>) {
        const PLACEHOLDER: &str = "{session-args}";
        match self {
            Client::ClaudeNew | Client::ClaudeOld => (vec![PLACEHOLDER, "-p", prompt], None),
            Client::Codex => (
                vec!["exec", "--skip-git-repo-check", PLACEHOLDER, prompt],
                None,
            ),
            Client::OpenCode => (vec!["run", PLACEHOLDER], Some(prompt)),
        }
    }

    /// More arguments of every turn.
    pub fn flags(self) -> &'static [&'static str] {
        match self {
            Client::ClaudeNew | Client::ClaudeOld => &[
                "--output-format",
                "stream-json",
                "--verbose",
                "--permission-mode",
                "bypassPermissions",
            ],
            Client::Codex | Client::OpenCode => &[],
        }
    }

    /// The content of a session in a home: its transcript, or its rows.
    #[track_caller]
    pub fn record(self, home: &Path, session: &str) -> String {
        if self == Client::OpenCode {
            return block_on(rows(
                &home.join(".local/share/opencode/opencode.db"),
                session,
            ))
            .unwrap();
        }
        if self != Client::Codex {
            return std::fs::read_to_string(transcript(home, session)).unwrap();
        }
        let rollouts = files_below(&home.join(".codex/sessions"));
        let mut found = rollouts
            .into_iter()
            .filter(|(path, _)| path.contains(session));
        let (_, bytes) = found
            .next()
            .unwrap_or_else(|| panic!("no rollout of {session} in {}", home.display()));
        assert!(found.next().is_none(), "two rollouts of {session}");
        String::from_utf8(bytes).unwrap()
    }

    /// The model calls the shell tool.
    pub fn shell(self, command: &str) -> Value {
        match self {
            Client::ClaudeNew | Client::ClaudeOld => tool_call_reply(
                "Bash",
                json!({ "command": command, "description": "Run it" }),
            ),
            Client::Codex => tool_call_reply(
                "exec_command",
                json!({ "cmd": command, "yield_time_ms": 30_000 }),
            ),
            Client::OpenCode => tool_call_reply(
                "bash",
                json!({ "command": command, "description": "Run it" }),
            ),
        }
    }
}

/// The rows of a session in OpenCode's database.
async fn rows(database: &Path, session: &str) -> sqlx::Result<String> {
    let mut connection = SqliteConnectOptions::new()
        .filename(database)
        .read_only(true)
        .connect()
        .await?;
    let mut all = String::new();
    for sql in [
        "SELECT id, directory, title FROM session WHERE id = ?",
        "SELECT id, session_id, data FROM message WHERE session_id = ? ORDER BY id",
        "SELECT id, message_id, data FROM part WHERE session_id = ? ORDER BY id",
    ] {
        for row in sqlx::query(sql)
            .bind(session)
            .fetch_all(&mut connection)
            .await?
        {
            let columns = [0, 1, 2].map(|at| row.get::<String, _>(at));
            all.push_str(&format!("{}\n", columns.join(" ")));
        }
    }
    connection.close().await?;
    Ok(all)
}
