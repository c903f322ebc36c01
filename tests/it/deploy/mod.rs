//! Checks every file in deploy/ with a tool that is shown to reject a broken one. Flags and
//! variables must exist in the program, numbers must be consistent, and the Dockerfile is carried
//! out in an empty directory.
//!
//! Owns the command lines of the tools; `support/fetch.rs` owns fetching them.

mod dockerfile;
mod image;
mod manifests;
mod monitoring;
mod platforms;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::{TempHome, fetch, or_skip, run, sessiond};

/// A file or directory of deploy/.
fn file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("deploy")
        .join(path)
}

fn text(path: &str) -> String {
    std::fs::read_to_string(file(path)).unwrap_or_else(|error| panic!("deploy/{path}: {error}"))
}

/// The tools that come from PyPI.
struct Checkers {
    packages: PathBuf,
    home: TempHome,
}

impl Checkers {
    /// Returns `None` if the test must be skipped.
    fn new() -> Option<Checkers> {
        Some(Checkers {
            packages: or_skip(fetch::checkers())?,
            home: TempHome::new(),
        })
    }

    /// One of the programs.
    fn program(&self, name: &str) -> Command {
        self.home.command(&self.packages.join("bin").join(name))
    }

    /// Python with the modules of the tools.
    fn python(&self, arguments: &[&str]) -> Command {
        let mut python = self.home.command(Path::new("python3"));
        python
            .env("PYTHONPATH", &self.packages)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .args(arguments);
        python
    }

    /// The documents of a YAML file.
    fn yaml(&self, text: &str) -> Vec<Value> {
        let mut read = self.python(&["-c", "import json, sys, yaml; print(json.dumps(list(yaml.safe_load_all(open(sys.argv[1])))))"]);
        let out = read
            .arg(self.write_temp_file("read.yaml", text))
            .output()
            .unwrap();
        assert!(
            out.status.success(),
            "{}",
            String::from_utf8_lossy(&out.stderr)
        );
        serde_json::from_slice(&out.stdout).unwrap()
    }

    /// Writes a file with this text to a temporary directory.
    fn write_temp_file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.home.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }
}

/// Checks that `check` accepts the text, and rejects it with `why` if `from` is replaced by `to`.
#[track_caller]
fn check_and_detect_failure(
    text: &str,
    (from, to): (&str, &str),
    why: &str,
    check: impl Fn(&str) -> Result<(), String>,
) {
    check(text).unwrap_or_else(|error| panic!("{error}"));
    let broken = text.replace(from, to);
    assert_ne!(broken, text, "{from:?} is not in it");
    let error = check(&broken).expect_err("the broken one was not refused");
    assert!(error.contains(why), "{error}");
}

/// Checks that the program accepts these flags and values.
#[track_caller]
fn assert_parses(arguments: &[String]) {
    let home = TempHome::new();
    // Arguments after the two dashes belong to another program.
    let ours: Vec<&String> = arguments
        .iter()
        .take_while(|argument| *argument != "--")
        .collect();
    // --help is last, so that everything before it is parsed.
    let ran = home
        .command(&sessiond())
        .args(&ours)
        .arg("--help")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(
        ran.status.success(),
        "sessiond {ours:?}: {}",
        String::from_utf8_lossy(&ran.stderr)
    );
}

/// Checks that the program knows the variable.
#[track_caller]
fn assert_known(variable: &str) {
    let home = TempHome::new();
    let known = |arguments: &[&str]| {
        let ran = home.command(&sessiond()).args(arguments).output().unwrap();
        let text = String::from_utf8(ran.stdout).unwrap();
        ["=", "]"]
            .iter()
            .any(|end| text.contains(&format!("[env: {variable}{end}")))
    };
    assert!(
        [&["--help"][..], &["daemon", "--help"], &["run", "--help"]]
            .iter()
            .any(|arguments| known(arguments)),
        "no flag has the variable {variable}"
    );
}

/// The seconds of a duration such as `25s`.
#[track_caller]
fn seconds(time: &str) -> u64 {
    time.strip_suffix('s')
        .and_then(|number| number.parse().ok())
        .unwrap_or_else(|| panic!("{time:?} is not in seconds"))
}

/// The seconds of `--flush-deadline` among arguments.
fn flush_deadline(arguments: &[String]) -> Option<u64> {
    let value = arguments
        .iter()
        .find_map(|argument| argument.strip_prefix("--flush-deadline="));
    let after = || {
        arguments
            .iter()
            .skip_while(|argument| *argument != "--flush-deadline")
            .nth(1)
            .map(String::as_str)
    };
    value.or_else(after).map(seconds)
}

fn strings(value: &Value) -> Vec<String> {
    value
        .as_array()
        .into_iter()
        .flatten()
        .map(|item| item.as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn an_unknown_flag_in_a_deploy_file_is_detected() {
    let taken = |arguments: &[&str]| {
        let arguments: Vec<String> = arguments
            .iter()
            .map(|argument| (*argument).to_owned())
            .collect();
        std::panic::catch_unwind(|| assert_parses(&arguments)).is_ok()
    };
    assert!(
        taken(&["daemon", "--flush-deadline=8s"])
            && taken(&["run", "--session=x", "--", "--no-flag-of-ours"])
    );
    assert!(
        !taken(&["daemon", "--no-such-flag=1"])
            && !taken(&["no-such-command"])
            && !taken(&["daemon", "--parallel=many"])
    );
    assert!(std::panic::catch_unwind(|| assert_known("SESSIOND_NO_SUCH_THING")).is_err());
}

#[test]
fn shell_scripts_are_clean() {
    let Some(checkers) = Checkers::new() else {
        return;
    };
    let tree = Path::new(env!("CARGO_MANIFEST_DIR"));
    let check = |text: &str| {
        run(checkers
            .program("shellcheck")
            .arg(checkers.write_temp_file("script.sh", text)))
    };
    let mut scripts = vec![tree.join(".ci/run"), tree.join("fuzz/run")];
    scripts.extend(
        std::fs::read_dir(tree.join("examples"))
            .unwrap()
            .flatten()
            .map(|item| item.path()),
    );
    scripts.retain(|path| path.is_file() && std::fs::read(path).unwrap().starts_with(b"#!"));
    assert!(scripts.len() > 3, "{scripts:?}");
    for script in scripts {
        check(&std::fs::read_to_string(&script).unwrap())
            .unwrap_or_else(|error| panic!("{}: {error}", script.display()));
    }
    let entrypoint = std::fs::read_to_string(tree.join("examples/entrypoint.sh")).unwrap();
    check_and_detect_failure(&entrypoint, ("\"$job\"", "$job"), "SC2086", check);
}

#[test]
fn dockerfiles_are_clean() {
    let Some(checkers) = Checkers::new() else {
        return;
    };
    let check = |text: &str| {
        run(checkers
            .program("hadolint")
            .args(["--no-color"])
            .arg(checkers.write_temp_file("Dockerfile", text)))
    };
    check_and_detect_failure(
        &text("Dockerfile"),
        ("WORKDIR /src", "WORKDIR src"),
        "DL3000",
        check,
    );
    check_and_detect_failure(
        &text("agent.Dockerfile"),
        ("claude-code@2.1.197", "claude-code"),
        "DL3016",
        check,
    );
}
