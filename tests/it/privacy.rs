//! Privacy: created files and directories are private to their user, and neither conversation text
//! nor a secret appears in logs, errors, status or the process list at any log level.

use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;
use std::process::Stdio;

use crate::support::TempHome;
use crate::support::backend::{Backend, Signal, eventually, transcript};
use crate::support::files::append;
use crate::support::needs_servers;
use crate::support::proxy::{Mode, TcpProxy};
use crate::support::servers::{Postgres, postgres, s3};

const WORD: &str = "quetzalmarmalade";

/// A turn with the word in a prompt, a tool call, its result and a response.
fn lines(turn: u32) -> String {
    let time = format!("\"cwd\":\"/work/app\",\"timestamp\":\"2026-05-01T10:{turn:02}:00.000Z\"");
    format!(
        "{{\"type\":\"user\",\"uuid\":\"u{turn}\",{time},\"message\":{{\"role\":\"user\",\"content\":\"please {WORD}\"}}}}\n\
         {{\"type\":\"assistant\",\"uuid\":\"a{turn}\",{time},\"message\":{{\"id\":\"m{turn}\",\"role\":\"assistant\",\"model\":\"opus\",\"content\":[{{\"type\":\"tool_use\",\"id\":\"t{turn}\",\"name\":\"Bash\",\"input\":{{\"command\":\"echo {WORD}\"}}}}],\"stop_reason\":\"tool_use\"}}}}\n\
         {{\"type\":\"user\",\"uuid\":\"r{turn}\",{time},\"message\":{{\"role\":\"user\",\"content\":[{{\"type\":\"tool_result\",\"tool_use_id\":\"t{turn}\",\"content\":\"{WORD}\"}}]}}}}\n\
         {{\"type\":\"assistant\",\"uuid\":\"b{turn}\",{time},\"message\":{{\"id\":\"n{turn}\",\"role\":\"assistant\",\"model\":\"opus\",\"content\":[{{\"type\":\"text\",\"text\":\"{WORD}\"}}],\"stop_reason\":\"end_turn\"}}}}\n"
    )
}

/// Everything in a directory, and the directory itself, that other users can read or write.
fn readable_by_others(directory: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut left = vec![directory.to_owned()];
    while let Some(path) = left.pop() {
        let meta = std::fs::symlink_metadata(&path).unwrap();
        if meta.is_dir() {
            left.extend(
                std::fs::read_dir(&path)
                    .unwrap()
                    .map(|item| item.unwrap().path()),
            );
        }
        let wanted = if meta.is_dir() { 0o700 } else { 0o600 };
        let mode = meta.permissions().mode() & 0o777;
        if mode != wanted && !meta.is_symlink() {
            found.push(format!(
                "{} has {mode:o} and not {wanted:o}",
                path.display()
            ));
        }
    }
    found
}

#[test]
fn created_files_are_private() {
    // No setting, so that all paths are the default, with the usual umask.
    let home = TempHome::new();
    let mut nothing = Backend::file();
    nothing.unset("SESSIOND_STORE");
    nothing.unset("SESSIOND_INDEX");
    let key = home.path().join("key.txt");
    nothing
        .run(&home, &["keygen", "-o", key.to_str().unwrap()])
        .ok();
    for sealed in [false, true] {
        if sealed {
            let text = std::fs::read_to_string(&key).unwrap();
            nothing.set(
                "SESSIOND_ENCRYPT_TO",
                text.lines().next().unwrap().rsplit(' ').next().unwrap(),
            );
            nothing.set("SESSIOND_NAMESPACE", "sealed");
        }
        let mut daemon = nothing.daemon(&home, &[]);
        append(&transcript(&home, "s1"), lines(1));
        nothing.run(&home, &["flush", "--wait"]).ok();
        let state = home.home().join(".claude/.sessiond");
        let socket = std::fs::metadata(state.join("socket")).unwrap();
        assert!(socket.file_type().is_socket());
        assert_eq!(readable_by_others(&state), [""; 0]);
        daemon.kill();
    }
    nothing.unset("SESSIOND_ENCRYPT_TO");
    nothing.set("SESSIOND_NAMESPACE", "default");
    for command in [
        vec!["label", "s1", "a=b"],
        vec!["checkpoint", "s1", "--name", "x"],
        vec!["export", "s1", "-o", "s1.tar.gz"],
        vec!["pull", "s1", "--to", "copy"],
        vec!["pull", "s1", "--raw", "--to", "raw"],
        vec!["gc"],
        vec!["verify", "--deep"],
        vec!["reindex"],
    ] {
        nothing.run(&home, &command).ok();
    }
    let ours = [
        ".local/share/sessiond",
        ".claude/.sessiond",
        "s1.tar.gz",
        "raw",
    ];
    for path in ours.map(|path| home.home().join(path)) {
        assert_eq!(readable_by_others(&path), [""; 0]);
    }
    // A copy has the modes of the agent's files; its directory is private.
    assert_eq!(
        std::fs::metadata(home.home().join("copy"))
            .unwrap()
            .permissions()
            .mode()
            & 0o777,
        0o700
    );
    let left: Vec<_> = std::fs::read_dir(home.path().join("tmp"))
        .unwrap()
        .collect();
    assert!(left.is_empty(), "scratch is removed: {left:?}");
}

needs_servers!(no_content_or_secret_appears_in_logs_errors_status_or_process_list);
fn no_content_or_secret_appears_in_logs_errors_status_or_process_list() {
    let (Some(server), Some(database)) = (s3(), postgres()) else {
        return;
    };
    let (to_s3, to_postgres) = (
        TcpProxy::start(server.addr()),
        TcpProxy::start(database.addr()),
    );
    let mut url = url::Url::parse(&database.url_with_password(Postgres::PASSWORD)).unwrap();
    url.set_port(Some(to_postgres.addr().port())).unwrap();
    let mut backend = Backend::on(
        &format!("http://{}", to_s3.addr()),
        &server.fresh_bucket(),
        url.as_str(),
    );
    let keys = backend.path().join("key.txt");
    backend
        .run(&TempHome::new(), &["keygen", "-o", keys.to_str().unwrap()])
        .ok();
    let secret_key = std::fs::read_to_string(&keys)
        .unwrap()
        .lines()
        .last()
        .unwrap()
        .to_owned();
    let secrets = [WORD, &server.secret_key, Postgres::PASSWORD, &secret_key];
    // Log all libraries too.
    backend.set("SESSIOND_LOG", "trace,sessiond=trace");
    backend.set("SESSIOND_REQUEST_TIMEOUT", "2s");
    let mut output = String::new();
    for sealed in [false, true] {
        if sealed {
            backend.set("SESSIOND_IDENTITY", keys.to_str().unwrap());
            backend.set("SESSIOND_NAMESPACE", "sealed");
        }
        let (home, other) = (TempHome::new(), TempHome::new());
        let mut daemon = backend.daemon(&home, &[]);
        append(&transcript(&home, "s1"), lines(1));
        backend.run(&home, &["flush", "--wait"]).ok();
        let of_process =
            |name: &str| std::fs::read(format!("/proc/{}/{name}", daemon.0.id())).unwrap();
        let command = String::from_utf8_lossy(&of_process("cmdline")).into_owned();
        assert!(
            command.contains("daemon") && secrets.iter().all(|secret| !command.contains(secret)),
            "{command}"
        );
        // Both servers fail, and everything about it is logged.
        to_s3.set(Mode::DropResponses);
        to_postgres.set(Mode::Refuse);
        append(&transcript(&home, "s1"), lines(2));
        append(&transcript(&home, "s1"), "{\"torn\": \"quetzalmarma");
        let status = || backend.run(&home, &["status", "--json"]).ok();
        eventually("it fails", || {
            status().json()["sessions"][0]["failed_attempts"].as_u64() >= Some(1)
        });
        for command in [
            vec!["status"],
            vec!["status", "--json"],
            vec!["ls"],
            vec!["doctor"],
        ] {
            let ran = backend.run(&home, &command);
            output += &(ran.out() + &ran.err());
        }
        to_s3.set(Mode::Pass);
        to_postgres.set(Mode::Pass);
        append(&transcript(&home, "s1"), "lade\"}\n");
        backend
            .run(&home, &["flush", "--wait", "--timeout", "40s"])
            .ok();
        daemon.signal(Signal::TERM);
        assert_eq!(daemon.code(), Some(0));
        output += &std::fs::read_to_string(home.path().join("daemon.log")).unwrap();
        // These commands may print content; their logs may not contain it.
        for command in [
            vec!["restore", "s1"],
            vec!["show", "s1"],
            vec!["messages", "s1"],
            vec!["checkpoint", "s1", "--name", "x"],
            vec!["diff", "s1", "seq:1", "latest"],
            vec!["fork", "s1"],
            vec!["export", "s1", "-o", "s1.tar.gz"],
            vec!["import", "s1.tar.gz", "--as", "s2"],
            vec!["verify", "--all", "--deep"],
            vec!["reindex"],
            vec!["gc"],
            vec!["doctor"],
            vec!["stats"],
            vec!["run", "--", "true"],
        ] {
            let ran = backend.run(&other, &command);
            output += &format!("$ {command:?} gave {}\n{}", ran.code(), ran.err());
            let asked = ["show", "messages", "diff", "checkpoint"].contains(&command[0]);
            output += if asked { String::new() } else { ran.out() }.as_str();
        }
        // Failing commands.
        let refused = backend
            .command(&other, &["restore", "s1"])
            .env("AWS_SECRET_ACCESS_KEY", "wrong-wrong")
            .stdin(Stdio::null())
            .output()
            .unwrap();
        output += &String::from_utf8_lossy(&refused.stderr);
        let refused = backend
            .command(&other, &["ls"])
            .env(
                "SESSIOND_INDEX",
                url.as_str().replace(Postgres::PASSWORD, "wrong-wrong"),
            )
            .output()
            .unwrap();
        output += &String::from_utf8_lossy(&refused.stderr);
    }
    assert!(
        output.lines().count() > 1000 && output.contains("TRACE"),
        "the log is read"
    );
    for secret in secrets.iter().chain(&["wrong-wrong", "quetzal"]) {
        let told: Vec<&str> = output
            .lines()
            .filter(|line| line.contains(secret))
            .collect();
        assert!(
            told.is_empty(),
            "{secret} is in {} lines, such as {}",
            told.len(),
            &told[0][..told[0].len().min(600)]
        );
    }
}
