//! Error messages: every file in `tests/it/errors` is a terminal session with commands, their
//! output and their exit codes, so that every changed word is visible.
//!
//! Owns the runner and the comparison of the files, and the check that every hint is covered. The
//! files own the commands and their output.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::net::TcpListener;
use std::path::{Path, PathBuf};

use regex_lite::Regex;

use crate::support::files::{files_below, write};
use crate::support::needs_servers;
use crate::support::servers::{Postgres, postgres, s3};
use crate::support::shell_blocks::shell;
use crate::support::slow;
use crate::support::small_disk::{SmallDisk, in_own_mount_namespace};
use crate::support::{TempHome, is_update};

const UPDATE_HINT: &str = "if the change is intended: SESSIOND_TEST_UPDATE=1 cargo test --test it errors::, then read the difference";

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/errors")
}

/// A command, its output, and the text up to the next one.
struct Step {
    /// The command as it is run.
    command: String,
    /// The command as in the file.
    typed: Vec<String>,
    output: Vec<String>,
    /// The text before the next command.
    prose: Vec<String>,
}

/// Parses a file into its introduction and its commands: indented lines with a `$`, and
/// continuation lines with a `>`.
fn read(text: &str) -> (Vec<String>, Vec<Step>) {
    let (mut title, mut steps): (Vec<String>, Vec<Step>) = (Vec::new(), Vec::new());
    for line in text.lines() {
        if let Some(command) = line.strip_prefix("    $ ") {
            steps.push(Step {
                command: command.to_owned(),
                typed: vec![line.to_owned()],
                output: Vec::new(),
                prose: Vec::new(),
            });
        } else if let Some(step) = steps.last_mut() {
            match line.strip_prefix("    > ") {
                Some(more) if step.output.is_empty() => {
                    write!(step.command, "\n{more}").unwrap();
                    step.typed.push(line.to_owned());
                }
                _ if step.prose.is_empty() && (line.is_empty() || line.starts_with("    ")) => {
                    step.output.push(line.to_owned())
                }
                _ => step.prose.push(line.to_owned()),
            }
        } else {
            title.push(line.to_owned());
        }
    }
    for step in &mut steps {
        // An empty line after the output is not part of it.
        let end = step
            .output
            .iter()
            .rposition(|line| !line.is_empty())
            .map_or(0, |last| last + 1);
        let empty: Vec<String> = step.output.drain(end..).collect();
        step.prose.splice(0..0, empty);
    }
    (title, steps)
}

/// Runs the commands in one shell. Returns the output and the exit code of each.
fn run(steps: &[Step], home: &TempHome, environment: &[(&str, String)]) -> Vec<Vec<String>> {
    let outputs = home.path().join("outputs");
    std::fs::create_dir(&outputs).unwrap();
    // Tests run concurrently, and there is one default port.
    write(
        &home.home().join(".config/sessiond/config.toml"),
        "http = \"off\"\n",
    );
    let mut script = "set -o pipefail\ntrap 'kill -9 $(jobs -p) 2> /dev/null' EXIT\n".to_owned();
    for (at, step) in steps.iter().enumerate() {
        let file = outputs.join(at.to_string());
        writeln!(
            script,
            "{{\n{}\n}} > {file} 2>&1 < /dev/null; echo $? > {file}.code",
            step.command,
            file = file.display()
        )
        .unwrap();
    }
    let mut bash = shell(&script, home);
    bash.env("FIXTURES", directory().with_file_name("../fixtures"));
    // No request leaves this machine.
    bash.env("AWS_EC2_METADATA_DISABLED", "true")
        .envs(environment.iter().map(|(name, value)| (name, value)));
    let output = bash.output().unwrap();
    assert!(
        output.stderr.is_empty(),
        "the shell says: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let read_output = |at: usize| -> Vec<String> {
        let file = outputs.join(at.to_string());
        let code = std::fs::read_to_string(file.with_extension("code"))
            .unwrap_or_else(|_| panic!("never came to {}", steps[at].command));
        let text = String::from_utf8_lossy(&std::fs::read(&file).unwrap()).into_owned();
        let code = if code.trim() == "0" {
            String::new()
        } else {
            format!("[exit code {}]", code.trim())
        };
        normalize(&text, home, environment)
            .lines()
            .chain(code.lines())
            .map(|line| format!("    {line}").trim_end().to_owned())
            .collect()
    };
    (0..steps.len()).map(read_output).collect()
}

/// Replaces what differs between runs: directories, servers, times and random names.
fn normalize(text: &str, home: &TempHome, environment: &[(&str, String)]) -> String {
    let mut text = text
        .replace(&home.home().display().to_string(), "/home/me")
        .replace(&home.path().display().to_string(), "");
    for (name, value) in environment {
        text = text.replace(value, &format!("${name}"));
    }
    for (pattern, instead) in [
        (r"(?m)^\d{4}-\d\d-\d\dT[0-9:.]+Z", "<time>"),
        (r"\b[0-9a-f]{16}\b", "<writer>"),
        (r"\bprocess \d+", "process <pid>"),
        (r"\bage1[0-9a-z]{58}\b", "<recipient>"),
        (r"\bed25519:[0-9A-Za-z+/]{43}=", "<public key>"),
    ] {
        text = Regex::new(pattern)
            .unwrap()
            .replace_all(&text, instead)
            .into_owned();
    }
    text
}

/// Runs a file and compares the output, or records it.
#[track_caller]
fn compare(name: &str, home: &TempHome, environment: &[(&str, String)]) {
    let path = directory().join(name).with_extension("md");
    let (title, steps) = read(&std::fs::read_to_string(&path).unwrap());
    let now = run(&steps, home, environment);
    if is_update() {
        let output = steps
            .iter()
            .zip(&now)
            .flat_map(|(step, output)| step.typed.iter().chain(output).chain(&step.prose));
        let text: String = title
            .iter()
            .chain(output)
            .map(|line| format!("{line}\n"))
            .collect();
        return std::fs::write(&path, text).unwrap();
    }
    let mut wrong = String::new();
    for (step, now) in steps
        .iter()
        .zip(&now)
        .filter(|(step, now)| step.output != **now)
    {
        writeln!(wrong, "$ {}", step.command).unwrap();
        step.output
            .iter()
            .for_each(|line| writeln!(wrong, "  -{line}").unwrap());
        now.iter()
            .for_each(|line| writeln!(wrong, "  +{line}").unwrap());
    }
    assert!(
        wrong.is_empty(),
        "{name}.md: the output differs:\n{wrong}{UPDATE_HINT}"
    );
}

macro_rules! compare_recordings {
    ($($name:ident),+) => { $(
        #[test]
        fn $name() {
            compare(stringify!($name), &TempHome::new(), &[]);
        }
    )+ };
}

compare_recordings!(
    settings,
    options,
    finding,
    local_files,
    points,
    damage,
    encryption,
    exchange,
    hooks,
    opencode,
    trust
);

#[test]
fn streaming() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    compare(
        "streaming",
        &TempHome::new(),
        &[("TAKEN", taken.local_addr().unwrap().to_string())],
    );
}

#[test]
fn full_disk() {
    if in_own_mount_namespace("errors::full_disk") {
        let home = TempHome::new();
        for (directory, kilobytes) in [("full", 256), ("readonly", 256)] {
            std::fs::create_dir(home.home().join(directory)).unwrap();
            SmallDisk::mount_on(&home.home().join(directory), kilobytes).fill_until(0);
        }
        compare("full_disk", &home, &[]);
    }
}

needs_servers!(servers);
fn servers() {
    let (Some(s3), Some(postgres)) = (s3(), postgres()) else {
        return;
    };
    let database = url::Url::parse(&postgres.fresh_database()).unwrap();
    let environment = [
        ("S3", s3.addr().to_string()),
        ("BUCKET", s3.fresh_bucket()),
        ("AWS_ACCESS_KEY_ID", s3.access_key.clone()),
        ("AWS_SECRET_ACCESS_KEY", s3.secret_key.clone()),
        ("DENIED_KEY", s3.denied_access_key.clone()),
        ("DENIED_SECRET", s3.denied_secret_key.clone()),
        ("PG", postgres.addr().to_string()),
        ("DB", database.path().trim_start_matches('/').to_owned()),
        ("PASSWORD", Postgres::PASSWORD.to_owned()),
    ];
    compare("servers", &TempHome::new(), &environment);
}

/// The hints in the source: literals at the call, and constants.
fn hints() -> BTreeSet<String> {
    let at_a_call = Regex::new(r#"\.hint\(\s*(?:format!\(\s*)?"((?:[^"\\]|\\[^n])*)""#).unwrap();
    let constant = Regex::new(r#"const [A-Z]+: &str =\s*"((?:[^"\\]|\\[^n])*)";"#).unwrap();
    let mut hints = BTreeSet::new();
    for (_, source) in files_below(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src")) {
        let source = String::from_utf8(source).unwrap();
        let source = source.split("#[cfg(test)]").next().unwrap_or_default();
        let named = |name: &str| {
            source.contains(&format!("hint({name})")) || source.contains(&format!("Some({name})"))
        };
        hints.extend(
            at_a_call
                .captures_iter(source)
                .map(|found| found[1].to_owned()),
        );
        let constants = constant
            .captures_iter(source)
            .filter(|found| named(found[0][6..].split(':').next().unwrap_or_default()));
        hints.extend(
            constants
                .map(|found| found[1].to_owned())
                .filter(|text| text.contains(' ')),
        );
    }
    let line_goes_on = Regex::new(r"\\\n\s*").unwrap();
    hints
        .iter()
        .map(|hint| line_goes_on.replace_all(hint, "").replace("\\\"", "\""))
        .collect()
}

slow!(every_hint_is_covered_or_listed_with_a_reason);
/// A new hint must occur in one of the files, or in `unseen.md` with the reason.
fn every_hint_is_covered_or_listed_with_a_reason() {
    let (mut seen, mut excused) = (String::new(), String::new());
    for (name, text) in files_below(&directory()) {
        let text = String::from_utf8(text).unwrap();
        if name == "unseen.md" {
            excused = text
        } else {
            seen.push_str(&text)
        }
    }
    let open = Regex::new(r"\\\{[^{}]*\\\}").unwrap();
    let (mut forgotten, mut stale) = (Vec::new(), Vec::new());
    for hint in hints() {
        let pattern = open
            .replace_all(
                &regex_lite::escape(&hint.replace("{{", "(").replace("}}", ")")),
                ".*",
            )
            .into_owned();
        let shown = Regex::new(&format!("(?m)hint: {pattern}$"))
            .unwrap()
            .is_match(&seen.replace(['{', '}'], "("));
        match (shown, excused.contains(&format!("`{hint}`"))) {
            (false, false) => forgotten.push(hint),
            (true, true) => stale.push(hint),
            _ => {}
        }
    }
    assert!(
        forgotten.is_empty(),
        "show these in tests/it/errors, or say in unseen.md why not:\n{}",
        forgotten.join("\n")
    );
    assert!(
        stale.is_empty(),
        "these are shown, and unseen.md says that they are not:\n{}",
        stale.join("\n")
    );
    let known = hints();
    let gone: Vec<&str> = excused
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once("` |"))
        .map(|(hint, _)| hint)
        .collect();
    let gone: Vec<&str> = gone
        .into_iter()
        .filter(|hint| !known.contains(*hint))
        .collect();
    assert!(
        gone.is_empty(),
        "unseen.md names hints that the source does not have:\n{}",
        gone.join("\n")
    );
}
