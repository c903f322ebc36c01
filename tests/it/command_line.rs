//! Settings, variables, completion, colors and tables of the program.

use std::process::{Command, Stdio};

use crate::support::backend::{Backend, transcript};
use crate::support::files::append;
use crate::support::{TempHome, sessiond};

const SESSION: &str = "0b5e551d-1111-4000-8000-000000000001";
const OTHER: &str = "0b5e551d-2222-4000-8000-000000000002";

const LINE: &str = "{\"type\":\"user\",\"uuid\":\"u1\",\"timestamp\":\"2026-05-01T12:00:00Z\",\"cwd\":\"/work/app\",\"message\":{\"role\":\"user\",\"content\":\"please fix the build\"}}\n";

/// Stores one session.
fn store(backend: &Backend, home: &TempHome, session: &str) {
    append(&transcript(home, session), LINE);
    backend.run(home, &["run", "--", "true"]).ok();
}

/// Runs a command on a terminal of 100 columns.
fn on_terminal(backend: &Backend, home: &TempHome, arguments: &str) -> String {
    let command = backend.command(home, &[]);
    let program = command.get_program().to_string_lossy().into_owned();
    let output = Command::new("script")
        .env_clear()
        .env("TERM", "xterm")
        .envs(
            command
                .get_envs()
                .filter_map(|(name, value)| Some((name, value?))),
        )
        .current_dir(home.path())
        .args([
            "-qec",
            &format!("stty columns 100; {program} {arguments}"),
            "/dev/null",
        ])
        .stdin(Stdio::null())
        .output()
        .expect("script is part of util-linux");
    String::from_utf8_lossy(&output.stdout).replace('\r', "")
}

#[test]
fn boolean_variables_accept_the_usual_words_and_an_empty_variable_is_unset() {
    let home = TempHome::new();
    let setting = |name: &'static str, value: &str, key: &str| {
        let mut backend = Backend::file();
        backend.set(name, value);
        let shown = backend.run(&home, &["config", "show", "--json"]).ok();
        let settings = shown.json()["settings"].as_array().unwrap().clone();
        let found = settings.into_iter().find(|setting| setting["name"] == key);
        let found = found.unwrap_or_else(|| panic!("no setting {key}"));
        (
            found["value"].as_str().unwrap_or_default().to_owned(),
            found["source"].as_str().unwrap().to_owned(),
        )
    };
    for yes in ["1", "yes", "true", "on", "YES"] {
        let expected = ("true".to_owned(), "variable".to_owned());
        assert_eq!(setting("SESSIOND_INDEX_TEXT", yes, "index-text"), expected);
        assert_eq!(setting("SESSIOND_QUIET", yes, "quiet"), expected);
    }
    for no in ["0", "no", "false", "off"] {
        let expected = ("false".to_owned(), "variable".to_owned());
        assert_eq!(setting("SESSIOND_INDEX_TEXT", no, "index-text"), expected);
    }
    for (name, key) in [
        ("SESSIOND_INDEX_TEXT", "index-text"),
        ("SESSIOND_FLUSH_INTERVAL", "flush-interval"),
        ("SESSIOND_STORE", "store"),
        ("SESSIOND_LABEL", "label"),
        ("SESSIOND_PARALLEL", "parallel"),
    ] {
        assert_eq!(setting(name, "", key).1, "default", "{name}");
    }
    let mut backend = Backend::file();
    backend.set("SESSIOND_INDEX_TEXT", "perhaps");
    backend.run(&home, &["ls"]).fails(2, "--index-text", "");
}

#[test]
fn an_unknown_variable_is_reported() {
    let home = TempHome::new();
    let mut backend = Backend::file();
    backend.set("SESSIOND_NAMESAPCE", "x");
    backend.set("SESSIOND_SERVICE_HOST", "10.0.0.1");
    let stderr = backend.run(&home, &["ls"]).ok().err();
    assert!(
        stderr.contains("unknown variable SESSIOND_NAMESAPCE; did you mean SESSIOND_NAMESPACE?"),
        "{stderr}"
    );
    assert!(!stderr.contains("SERVICE_HOST"), "{stderr}");
}

#[test]
fn one_call_switches_are_not_read_from_variables() {
    let (backend, home) = (Backend::file(), TempHome::new());
    store(&backend, &home, SESSION);
    let output = backend
        .command(&home, &["ls"])
        .env("SESSIOND_JSON", "true")
        .env("SESSIOND_LIMIT", "0")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success() && text.contains("SESSION"),
        "{text}"
    );
}

#[test]
fn config_show_names_the_source_of_every_setting_and_no_secret() {
    let home = TempHome::new();
    let file = home.home().join("config.toml");
    std::fs::write(
        &file,
        "namespace = \"team\"\nflush-interval = \"2s\"\nheartbeat-url = \"https://hc.example/ping/hunter2\"\n",
    )
    .unwrap();
    let mut backend = Backend::file();
    backend.set("SESSIOND_INDEX", "postgres://sessiond:hunter2@db/sessiond");
    let config = file.to_str().unwrap();
    let arguments = ["config", "show", "--config", config, "--agent", "codex"];
    let shown = backend
        .run(&home, &[&arguments[..], &["--json"]].concat())
        .ok();
    assert!(!shown.out().contains("hunter2"), "{}", shown.out());
    let json = shown.json();
    assert_eq!(json["file"], config);
    let source = |name: &str| {
        let settings = json["settings"].as_array().unwrap().iter();
        let found: Vec<_> = settings.filter(|it| it["name"] == name).collect();
        assert_eq!(found.len(), 1, "{name}");
        found[0]["source"].as_str().unwrap().to_owned()
    };
    for (name, expected) in [
        ("agent", "flag"),
        ("config", "flag"),
        ("index", "variable"),
        ("namespace", "file"),
        ("flush-interval", "file"),
        ("heartbeat-url", "file"),
        ("flush-deadline", "default"),
        ("fencing", "default"),
    ] {
        assert_eq!(source(name), expected, "{name}");
    }
    let text = backend.run(&home, &arguments).ok().out();
    for row in [
        "namespace",
        "team",
        "file",
        "default",
        "8s",
        "postgres://…@db",
    ] {
        assert!(text.contains(row), "{row} is not in\n{text}");
    }
    assert!(!text.contains("hunter2"), "{text}");
}

#[test]
fn config_validate_checks_a_file_or_the_effective_settings() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let validate = |text: &str| {
        std::fs::write(home.home().join("c.toml"), text).unwrap();
        backend.run(&home, &["config", "validate", "c.toml"])
    };
    let valid = validate("store = \"file:///tmp/x\"\nhttp = \"off\"\nttl = \"never\"\n").ok();
    assert!(valid.out().contains("c.toml is valid"), "{}", valid.out());
    for (text, error) in [
        ("sotre = \"x\"", "unknown setting \"sotre\""),
        ("store = \"ftp://x\"", "unknown scheme"),
        ("flush-interval = \"soon\"", "--flush-interval"),
        ("http = \"here\"", "--http"),
        ("fencing = \"maybe\"", "maybe"),
        ("label = [\"x\"]", "label"),
        ("heartbeat-url = \"x\"", "--heartbeat-url"),
        ("index = 5", "index"),
        ("store = ", "line 1"),
    ] {
        validate(text).fails(2, error, "");
    }
    backend.run(&home, &["config", "validate"]).ok();
    assert!(!home.home().join(".local").exists(), "it creates nothing");
    let mut wrong = Backend::file();
    wrong.set("SESSIOND_FENCING", "maybe");
    wrong
        .run(&home, &["config", "validate"])
        .fails(2, "maybe", "");
}

#[test]
fn the_version_names_the_build() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let json = backend.run(&home, &["version", "--json"]).ok().json();
    assert_eq!(json["version"], env!("CARGO_PKG_VERSION"));
    for key in ["commit", "profile", "target"] {
        assert!(json[key].as_str().is_some_and(|text| !text.is_empty()));
    }
    assert!(json["features"].as_array().unwrap().contains(&"s3".into()));
    let text = backend.run(&home, &["version"]).ok().out();
    assert!(
        text.starts_with("sessiond ") && text.contains("commit"),
        "{text}"
    );
}

#[test]
fn session_ids_are_completed() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let complete = |words: &[&str]| {
        let mut command = home.command(&sessiond());
        let backend = backend.command(&home, &[]);
        command
            .envs(
                backend
                    .get_envs()
                    .filter_map(|(name, value)| Some((name, value?))),
            )
            .env("SESSIOND_COMPLETE", "bash")
            .env("_CLAP_COMPLETE_INDEX", (words.len() - 1).to_string())
            .env("_CLAP_COMPLETE_COMP_TYPE", "9")
            .env("_CLAP_COMPLETE_SPACE", "true")
            .env("_CLAP_IFS", "\n")
            .arg("--")
            .args(words);
        let output = command.stdin(Stdio::null()).output().unwrap();
        assert!(output.stderr.is_empty(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    // Nothing is stored yet: it is silent and creates nothing.
    assert!(!complete(&["sessiond", "show", "0b5"]).contains(SESSION));
    assert!(!backend.path().join("index.db").exists());
    store(&backend, &home, SESSION);
    store(&backend, &home, OTHER);
    let offered = complete(&["sessiond", "show", "0b5e551d-1"]);
    assert!(
        offered.contains(SESSION) && !offered.contains(OTHER),
        "{offered}"
    );
    assert!(complete(&["sessiond", "run", "--session", "0b5"]).contains(OTHER));
    assert!(
        complete(&["sessiond", "--namespace", "other", "show", "0b5"])
            .trim()
            .is_empty()
    );
    for shell in ["bash", "zsh", "fish"] {
        let script = backend.run(&home, &["completions", shell]).ok().out();
        assert!(script.contains("SESSIOND_COMPLETE"), "{script}");
    }
}

#[test]
fn tables_fit_the_terminal_and_ids_are_short_and_unambiguous() {
    let (backend, home) = (Backend::file(), TempHome::new());
    assert_eq!(
        backend.run(&home, &["ls"]).ok().out(),
        "no sessions in namespace default\n"
    );
    store(&backend, &home, SESSION);
    store(&backend, &home, OTHER);
    let table = on_terminal(&backend, &home, "ls --color never");
    assert!(
        table.lines().all(|line| line.chars().count() <= 100),
        "{table}"
    );
    assert!(
        table.contains("0b5e551d-1 ") && table.contains("0b5e551d-2 "),
        "{table}"
    );
    assert!(on_terminal(&backend, &home, "ls --full").contains(SESSION));
    assert!(backend.run(&home, &["ls"]).ok().out().contains(SESSION));
    let messages = backend.run(&home, &["messages", SESSION]).ok().out();
    assert!(
        messages.contains("please fix the build") && messages.contains("2026-05-01T12:00:00Z"),
        "{messages}"
    );
    let without = backend.run(&home, &["messages", SESSION, "--no-text"]).ok();
    assert!(!without.out().contains("please fix"), "{}", without.out());
}

#[test]
fn color_follows_the_flag_the_variable_and_no_color() {
    let (backend, home) = (Backend::file(), TempHome::new());
    store(&backend, &home, SESSION);
    let is_colored = |arguments: &[&str], variables: &[(&str, &str)]| {
        let output = backend
            .command(&home, arguments)
            .envs(variables.iter().copied())
            .output()
            .unwrap();
        [output.stdout, output.stderr].concat().contains(&0x1b)
    };
    for arguments in [
        &["ls"][..],
        &["show", SESSION],
        &["show", "nobody"],
        &["ls", "--nonsense"],
    ] {
        let with = |choice| [arguments, &["--color", choice]].concat();
        assert!(!is_colored(arguments, &[]), "{arguments:?}");
        assert!(is_colored(&with("always"), &[]), "{arguments:?}");
        assert!(is_colored(&with("always"), &[("NO_COLOR", "1")]));
        assert!(is_colored(arguments, &[("SESSIOND_COLOR", "always")]));
        assert!(!is_colored(&with("never"), &[("SESSIOND_COLOR", "always")]));
    }
    assert!(on_terminal(&backend, &home, "ls").contains('\x1b'));
    assert!(!on_terminal(&backend, &home, "ls --color never").contains('\x1b'));
}
