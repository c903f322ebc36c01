//! kill -9 of daemon and agent at random moments, with the volume kept, its ledger lost, or
//! everything lost: acknowledged bytes are in every later restore, and every restore is a
//! byte-exact prefix.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::support::TempHome;
use crate::support::backend::{Backend, Running, transcript};
use crate::support::load::{Load, Replay};
use crate::support::rng::TestRng;

/// Number of concurrent agents of one backend, each with its own session.
const AGENTS: u64 = 5;
/// How often each is killed: with five agents a hundred kills on each of two backends.
const RESTARTS: u32 = 20;

pub fn seed() -> u64 {
    let given = std::env::var("SESSIOND_TEST_SEED")
        .ok()
        .and_then(|text| text.parse().ok());
    given.unwrap_or_else(|| u64::from(std::process::id()) << 20)
}

/// The agent: a separate process that appends until it is killed. Run as a plain test, it does
/// nothing.
#[test]
fn an_agent_writes_until_killed() {
    let Some(transcripts) = std::env::var_os("SESSIOND_TEST_AGENT") else {
        return;
    };
    let transcripts: Vec<PathBuf> = std::env::split_paths(&transcripts).collect();
    let parent = rustix::process::getppid();
    let mut rng = TestRng::new(seed());
    for number in 0..100_000 {
        // Each file once, then random ones.
        let at = if number < transcripts.len() {
            number
        } else {
            usize::try_from(rng.below(transcripts.len() as u64)).unwrap()
        };
        let path = &transcripts[at];
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let text = "x".repeat(usize::try_from(rng.below(3000)).unwrap());
        let mut file = std::fs::OpenOptions::new()
            .append(true)
            .create(true)
            .open(path)
            .unwrap();
        file.write_all(
            format!(
                "{{\"type\":\"user\",\"n\":{number},\"cwd\":\"/work/app\",\"text\":\"{text}\"}}\n"
            )
            .as_bytes(),
        )
        .unwrap();
        if rng.below(8) == 0 {
            let side = path.with_extension("").join("tool-results");
            std::fs::create_dir_all(&side).unwrap();
            let name = format!("{}-{number}.txt", std::process::id());
            std::fs::write(side.join(name), &text).unwrap();
        }
        std::thread::sleep(Duration::from_micros(
            (1000 + rng.below(20_000)) / transcripts.len().min(4) as u64,
        ));
        if rustix::process::getppid() != parent {
            // The parent process has ended.
            return;
        }
    }
}

/// Starts an agent that writes to all these transcripts in turn.
pub fn start_agent(transcripts: &[PathBuf], seed: u64) -> Running {
    let mut agent = Command::new(std::env::current_exe().unwrap());
    agent.args(["--exact", "torture::an_agent_writes_until_killed"]);
    agent.env_clear().env(
        "SESSIOND_TEST_AGENT",
        std::env::join_paths(transcripts).unwrap(),
    );
    agent.env("SESSIOND_TEST_SEED", seed.to_string());
    Running(
        agent
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap(),
    )
}

/// Runs one agent and kills it repeatedly. Returns the number of acknowledged bytes.
fn run_agent(backend: &Backend, agent: u64, seed: u64) -> u64 {
    let mut rng = TestRng::new(seed);
    let session = format!("session-{agent}");
    let mut home = TempHome::new();
    let mut acknowledged = 0;
    let mut in_all = 0;
    for life in 0..RESTARTS {
        let mut daemon = backend.daemon(&home, &[]);
        let path = transcript(&home, &session);
        let mut writer = start_agent(std::slice::from_ref(&path), rng.below(u64::MAX));
        std::thread::sleep(Duration::from_millis(rng.below(300)));
        if rng.below(3) > 0 {
            let on_disk = std::fs::read(&path).unwrap_or_default();
            backend.run(&home, &["flush", "--wait"]).ok();
            let lines = on_disk
                .iter()
                .rposition(|byte| *byte == b'\n')
                .map_or(0, |at| at as u64 + 1);
            in_all += lines.saturating_sub(acknowledged);
            acknowledged = acknowledged.max(lines);
        }
        std::thread::sleep(Duration::from_millis(rng.below(200)));
        let mut victims = [&mut daemon, &mut writer];
        if rng.below(2) == 0 {
            victims.reverse();
        }
        for victim in victims {
            victim.kill();
            std::thread::sleep(Duration::from_millis(rng.below(30)));
        }
        let history = std::fs::read(&path).unwrap_or_default();

        let elsewhere = TempHome::new();
        let context = format!("seed {seed}, life {life} of {session} on {}", backend.name);
        let restored = if acknowledged > 0
            || backend.run(&home, &["ls", "--json"]).json()["sessions"]
                .to_string()
                .contains(&session)
        {
            backend
                .run(&elsewhere, &["restore", &session, "--dry-run"])
                .ok();
            backend
                .run(
                    &elsewhere,
                    &[
                        "pull",
                        &session,
                        "--to",
                        &elsewhere.path().join("copy").to_string_lossy(),
                    ],
                )
                .ok();
            std::fs::read(
                elsewhere
                    .path()
                    .join(format!("copy/projects/-work-app/{session}.jsonl")),
            )
            .unwrap()
        } else {
            Vec::new()
        };
        assert!(
            restored.len() as u64 >= acknowledged,
            "{context}: {} restored of {acknowledged} acknowledged",
            restored.len()
        );
        assert!(history.starts_with(&restored), "{context}: not a prefix");
        assert!(
            restored.last().is_none_or(|last| *last == b'\n'),
            "{context}: a torn line"
        );

        match rng.below(3) {
            // The volume survives with its ledger.
            0 => {}
            // The volume survives without its ledger.
            1 => std::fs::remove_dir_all(home.home().join(".claude/.sessiond")).unwrap(),
            // Everything is lost; another container takes over.
            _ => {
                home = TempHome::new();
                backend
                    .run(&home, &["restore", &session, "--if-exists"])
                    .ok();
                let back = std::fs::read(transcript(&home, &session)).unwrap_or_default();
                assert!(
                    back.len() as u64 >= acknowledged && history.starts_with(&back),
                    "{context}: restore"
                );
            }
        }
    }
    in_all
}

fn torture(backend: &Backend) {
    let seed = seed();
    let acknowledged: u64 = std::thread::scope(|scope| {
        let agents: Vec<_> = (0..AGENTS)
            .map(|agent| scope.spawn(move || run_agent(backend, agent, seed + agent)))
            .collect();
        agents
            .into_iter()
            .map(|agent| {
                agent
                    .join()
                    .unwrap_or_else(|_| panic!("replay with SESSIOND_TEST_SEED={seed}"))
            })
            .sum()
    });
    assert!(
        acknowledged > 10_000,
        "hardly anything was acknowledged ({acknowledged} bytes): the test proves nothing"
    );
    let home = TempHome::new();
    backend.run(&home, &["verify", "--all"]).ok();
    let rows = backend.run(&home, &["ls", "--json"]).json();
    let branches: usize = rows["sessions"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["branches"].as_array().unwrap().len())
        .sum();
    assert_eq!(
        branches, 0,
        "nobody lost a session, yet there are branches: {rows}"
    );
}

#[test]
fn a_hundred_kills_lose_nothing_on_file_and_sqlite() {
    torture(&Backend::file());
}

#[test]
fn a_hundred_kills_lose_nothing_on_s3_and_postgres() {
    let Some(backend) = Backend::servers() else {
        return;
    };
    torture(&backend);
}

/// Number of concurrent sessions in one home.
const SESSIONS: usize = 300;

/// The default flush interval; a shorter one only makes more entries to check.
const DEFAULT_INTERVAL: [&str; 2] = ["--flush-interval", "1s"];

/// One daemon and hundreds of growing sessions, with kill -9 of daemon and agent.
fn hundreds(backend: &Backend, test: &'static str) {
    let seed = seed();
    let _replay = Replay { seed, test };
    let mut rng = TestRng::new(seed);
    let mut load = Load::new(TempHome::new());
    let names: Vec<String> = (0..SESSIONS)
        .map(|number| format!("session-{number}"))
        .collect();
    let transcripts: Vec<PathBuf> = names
        .iter()
        .map(|name| transcript(&load.home, name))
        .collect();
    let mut daemon = backend.daemon(&load.home, &DEFAULT_INTERVAL);
    let mut agent = start_agent(&transcripts, rng.below(u64::MAX));
    for _ in 0..2 {
        std::thread::sleep(Duration::from_millis(500 + rng.below(1000)));
        load.flush(backend, "30s").unwrap();
        std::thread::sleep(Duration::from_millis(rng.below(1000)));
        daemon.kill();
        load.kills += 1;
        if rng.below(2) == 0 {
            agent.kill();
            load.kills += 1;
            agent = start_agent(&transcripts, rng.below(u64::MAX));
        }
        daemon = backend.daemon(&load.home, &DEFAULT_INTERVAL);
        for _ in 0..4 {
            let name = &names[usize::try_from(rng.below(SESSIONS as u64)).unwrap()];
            assert!(load.check_copy(backend, name));
        }
    }
    agent.kill();
    load.check_all(backend);
    assert_eq!(load.sessions().len(), SESSIONS);
    load.summarize(&format!("{SESSIONS} sessions at once on {}", backend.name));
    drop(daemon);
}

#[test]
fn hundreds_of_sessions_lose_nothing_on_file_and_sqlite() {
    hundreds(
        &Backend::file(),
        "torture::hundreds_of_sessions_lose_nothing_on_file_and_sqlite",
    );
}

#[test]
fn hundreds_of_sessions_lose_nothing_on_s3_and_postgres() {
    let Some(backend) = Backend::servers() else {
        return;
    };
    hundreds(
        &backend,
        "torture::hundreds_of_sessions_lose_nothing_on_s3_and_postgres",
    );
}
