//! Runs every example as its own text says.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::clients::container::{assert_continues, transcript};
use crate::clients::install::agents;
use crate::clients::model::{Model, prompt, text_reply};
use crate::session_store::Server;
use crate::support::backend::{Backend, Ran, Running, Signal, eventually, transcript as of_home};
use crate::support::files::append;
use crate::support::needs_tools;
use crate::support::on_each_backend;
use crate::support::{TempHome, fetch, or_skip, run, sessiond};

const SESSION: &str = "3f2a0000-0000-4000-8000-000000000001";

fn example(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("examples")
        .join(path)
}

/// A command with the environment of sessiond, which finds only sessiond.
fn command_with_sessiond(backend: &Backend, home: &TempHome, program: &Path) -> Command {
    let sessionds = backend.command(home, &[]);
    let mut command = home.command(program);
    command.envs(
        sessionds
            .get_envs()
            .filter_map(|(name, value)| Some((name, value?))),
    );
    let directory = sessiond().parent().unwrap().to_owned();
    let path = std::env::var_os("PATH").unwrap();
    command.env(
        "PATH",
        std::env::join_paths(std::iter::once(directory).chain(std::env::split_paths(&path)))
            .unwrap(),
    );
    // Several run concurrently on this machine.
    command.env("SESSIOND_HTTP", "off").stdin(Stdio::null());
    command
}

/// An agent that prints the number of lines, appends one, waits for SIGTERM, and then writes again.
const AGENT: &str = "d=$HOME/.claude/projects/-work-app; mkdir -p $d; t=$d/$0.jsonl; touch $t; wc -l < $t\n\
    trap 'sleep 0.2; echo \"{\\\"last\\\":1}\" >> $t; exit 7' TERM\n\
    echo '{\"first\":1}' >> $t; touch $HOME/up; while :; do sleep 0.05; done";

on_each_backend!(the_entrypoint_and_sidecar_examples_restore_and_flush_the_last_line);
fn the_entrypoint_and_sidecar_examples_restore_and_flush_the_last_line(backend: Backend) {
    for script in ["entrypoint.sh", "sidecar.sh"] {
        let session = format!("{}-{script}", backend.name.replace('+', "-")).replace('.', "-");
        for life in 0..2 {
            // A new disk for each run.
            let home = TempHome::new();
            let mut command = command_with_sessiond(&backend, &home, &example(script));
            let out = std::fs::File::create(home.path().join("out")).unwrap();
            let err = std::fs::File::create(home.path().join("err")).unwrap();
            let said = |name: &str| std::fs::read_to_string(home.path().join(name)).unwrap();
            command
                .args([session.as_str(), "sh", "-c", AGENT, &session])
                .stdout(out)
                .stderr(err);
            let mut running = Running(command.spawn().unwrap());
            eventually("the agent is up", || {
                assert!(
                    running.0.try_wait().unwrap().is_none(),
                    "{script}: {}",
                    said("err")
                );
                home.home().join("up").exists()
            });
            running.signal(Signal::TERM);
            assert_eq!(
                running.code(),
                Some(7),
                "{script} on {}: {}",
                backend.name,
                said("err")
            );
            let expected = if life == 0 { "0" } else { "2" };
            assert!(
                said("out").lines().any(|line| line.trim() == expected),
                "{script}, life {life}: {}",
                said("out")
            );
            let local = std::fs::read_to_string(of_home(&home, &session)).unwrap();
            assert_eq!(local.matches("last").count(), life + 1, "{local}");
        }
    }
}

#[test]
fn the_sidecar_example_reports_why_it_did_not_start() {
    let (mut backend, home) = (Backend::file(), TempHome::new());
    backend.set("SESSIOND_STORE", "nonsense://");
    let ran = Ran(
        command_with_sessiond(&backend, &home, &example("sidecar.sh"))
            .args([SESSION, "true"])
            .output()
            .unwrap(),
    );
    ran.fails(2, "nonsense", "");
    // The restore succeeds, and the daemon does not start: another process has the directory.
    let backend = Backend::file();
    append(&of_home(&home, "other"), "{}\n");
    let _other = backend.daemon(&home, &[]);
    let ran = Ran(
        command_with_sessiond(&backend, &home, &example("sidecar.sh"))
            .args([SESSION, "touch", "launched"])
            .output()
            .unwrap(),
    );
    assert!(
        ran.code() != 0 && ran.err().contains("is running for"),
        "{}",
        ran.err()
    );
    assert!(!home.home().join("launched").exists());
}

needs_tools!(the_library_can_be_embedded);
fn the_library_can_be_embedded() {
    // If all tests run, cargo has built it with them.
    let mut build = Command::new(env!("CARGO"));
    run(build
        .args(["build", "--locked", "--offline", "--example", "embed"])
        .current_dir(env!("CARGO_MANIFEST_DIR")))
    .unwrap();
    let built = std::env::current_exe()
        .unwrap()
        .parent()
        .unwrap()
        .with_file_name("examples")
        .join("embed");
    let home = TempHome::new();
    let ran = Ran(home.command(&built).output().unwrap()).ok();
    assert!(
        ran.out().contains("durable: 1 log") && ran.out().ends_with("equal\n"),
        "{}",
        ran.out()
    );
    assert_eq!(
        std::fs::read_dir(home.path().join("tmp")).unwrap().count(),
        0,
        "it leaves something behind"
    );
}

/// A program that uses an SDK: its command and its environment.
struct Program {
    name: &'static str,
    command: Vec<PathBuf>,
    environment: Vec<(&'static str, PathBuf)>,
    _place: TempHome,
}

impl Program {
    /// The example in Python. Its SDK uses the client of the TypeScript SDK: the wheel with a
    /// client is half a gigabyte.
    fn python() -> Option<Program> {
        let sdk = or_skip(fetch::python_agent_sdk())?;
        let path = std::env::join_paths([sdk, example("session-store-py")]).unwrap();
        Some(Program {
            name: "python",
            command: vec!["python3".into(), example("sdk-py/ask.py")],
            environment: vec![
                ("PYTHONPATH", path.into()),
                ("PYTHONDONTWRITEBYTECODE", "1".into()),
            ],
            _place: TempHome::new(),
        })
    }

    /// The example in TypeScript, with its types checked, as JavaScript for any Node.
    fn typescript() -> Option<Program> {
        const PACKAGE: &str = include_str!("../tools/npm/package.json");
        const LOCK: &str = include_str!("../tools/npm/package-lock.json");
        let tools = or_skip(fetch::npm_packages("typescript", PACKAGE, LOCK))?.join("node_modules");
        or_skip(fetch::program_of("nodejs", "node"))?;
        let place = TempHome::new();
        for name in ["sdk-ts", "session-store-ts"] {
            crate::support::files::copy_dir(&example(name), &place.home().join(name));
        }
        // As after `npm install`.
        std::os::unix::fs::symlink(agents()?.node_modules(), place.home().join("node_modules"))
            .unwrap();
        std::fs::write(place.home().join("package.json"), "{\"type\":\"module\"}").unwrap();
        let compile = |source: &str| {
            let mut compile = place.command(Path::new("node"));
            compile.arg(tools.join("typescript/bin/tsc")).args([
                "--strict",
                "--target",
                "es2022",
                "--module",
                "nodenext",
                "--skipLibCheck",
            ]);
            compile.args([
                "--rewriteRelativeImportExtensions",
                "--outDir",
                "built",
                "--rootDir",
                ".",
                "--types",
                "node",
                "--typeRoots",
            ]);
            run(compile.arg(tools.join("@types")).arg(source))
        };
        compile("sdk-ts/ask.ts").unwrap();
        // The type check detects an error.
        let broken = std::fs::read_to_string(place.home().join("sdk-ts/ask.ts"))
            .unwrap()
            .replace("\"eager\"", "\"egar\"");
        std::fs::write(place.home().join("sdk-ts/broken.ts"), broken).unwrap();
        assert!(compile("sdk-ts/broken.ts").is_err_and(|error| error.contains("egar")));
        let command = vec!["node".into(), place.home().join("built/sdk-ts/ask.js")];
        Some(Program {
            name: "typescript",
            command,
            environment: Vec::new(),
            _place: place,
        })
    }

    /// Its environment, with a client that uses the model.
    fn prepare(&self, command: &mut Command, home: &TempHome, cwd: &Path, model: &Model) {
        use crate::clients::client::Client;
        Client::ClaudeNew.environment(command, &home.path().join("tmp"), &model.url());
        let bin = agents().unwrap().claude_new();
        let path = command
            .get_envs()
            .find(|(name, _)| *name == "PATH")
            .unwrap()
            .1
            .unwrap()
            .to_owned();
        command.env(
            "PATH",
            std::env::join_paths(std::iter::once(bin).chain(std::env::split_paths(&path))).unwrap(),
        );
        command
            .envs(self.environment.iter().cloned())
            .current_dir(cwd);
    }
}

fn programs() -> Vec<Program> {
    if agents().is_none() {
        return Vec::new();
    }
    [Program::python(), Program::typescript()]
        .into_iter()
        .flatten()
        .collect()
}

/// The ID that the program printed.
#[track_caller]
fn session_of(ran: &Ran) -> String {
    let out = ran.out();
    out.lines()
        .find_map(|line| line.strip_prefix("session "))
        .unwrap_or_else(|| panic!("{out}\n{}", ran.err()))
        .to_owned()
}

needs_tools!(an_sdk_program_resumes_in_a_new_home_with_a_sidecar);
/// Two homes in sequence: the second request contains the messages of the first.
fn an_sdk_program_resumes_in_a_new_home_with_a_sidecar() {
    for program in programs() {
        for backend in Backend::all() {
            let (model, directory) = (Model::start(), TempHome::new());
            let ask = |home: &TempHome, session: Option<&str>, words: &str| {
                let mut command = command_with_sessiond(&backend, home, &sessiond());
                let named = session.map(|id| ["--session", id]);
                command
                    .arg("run")
                    .args(named.into_iter().flatten())
                    .arg("--")
                    .args(&program.command)
                    .arg(words)
                    .args(session);
                program.prepare(&mut command, home, &directory.home(), &model);
                Ran(command.output().unwrap()).ok()
            };
            let (one, two) = (TempHome::new(), TempHome::new());
            let ran = ask(
                &one,
                None,
                &prompt("first", &[vec![text_reply("first turn done")]]),
            );
            assert!(
                ran.out().contains("first turn done"),
                "{}: {}",
                program.name,
                ran.out()
            );
            let session = session_of(&ran);
            let ran = ask(
                &two,
                Some(&session),
                &prompt("second", &[vec![text_reply("second turn done")]]),
            );
            assert!(
                ran.out().contains("second turn done") && session_of(&ran) == session,
                "{}: {}",
                program.name,
                ran.out()
            );
            assert_continues(
                &model.wait_for_request("first PLAN"),
                &model.wait_for_request("second PLAN"),
                &["first turn done", "second PLAN"],
            );
            let before = std::fs::read(transcript(&one.home(), &session)).unwrap();
            assert!(
                std::fs::read(transcript(&two.home(), &session))
                    .unwrap()
                    .starts_with(&before),
                "{}",
                program.name
            );
        }
    }
}

needs_tools!(an_sdk_program_resumes_in_a_new_home_with_the_session_store);
/// The same with sessiond as the SDK's session store: servers and homes are new each time, and only
/// the bucket stays.
fn an_sdk_program_resumes_in_a_new_home_with_the_session_store() {
    for program in programs() {
        for backend in Backend::all() {
            let (model, directory) = (Model::start(), TempHome::new());
            let mut told = Vec::new();
            let mut session: Option<String> = None;
            for turn in ["first", "second", "third"] {
                let (home, place) = (TempHome::new(), TempHome::new());
                let mut server = Server::start(&backend, &place);
                let mut command = home.command(&program.command[0]);
                command
                    .args(&program.command[1..])
                    .arg(prompt(
                        turn,
                        &[vec![text_reply(&format!("{turn} turn done"))]],
                    ))
                    .args(session.as_deref());
                program.prepare(&mut command, &home, &directory.home(), &model);
                command
                    .env("SESSIOND_ADDRESS", format!("http://{}", server.address))
                    .stdin(Stdio::null());
                let ran = Ran(command.output().unwrap()).ok();
                assert!(
                    ran.out().contains(&format!("{turn} turn done")),
                    "{}: {}",
                    program.name,
                    ran.out()
                );
                assert!(
                    session
                        .as_ref()
                        .is_none_or(|known| *known == session_of(&ran)),
                    "{}",
                    ran.out()
                );
                session = Some(session_of(&ran));
                let wait_for_request = model.wait_for_request(&format!("{turn} PLAN"));
                if let Some(earlier) = told.last() {
                    assert_continues(earlier, &wait_for_request, &[&format!("{turn} PLAN")]);
                }
                told.push(wait_for_request);
                server.process.signal(Signal::TERM);
                assert_eq!(server.process.code(), Some(0));
            }
            // It is a session like any other.
            let session = session.unwrap();
            let home = TempHome::new();
            let shown = backend.run(&home, &["show", &session]).ok().out();
            for turn in ["first", "second", "third"] {
                assert!(
                    shown.contains(&format!("{turn} turn done")),
                    "{}: {shown}",
                    program.name
                );
            }
            backend.run(&home, &["verify", &session]).ok();
        }
    }
}
