//! Commands that assemble a session without restoring it: they need no writable file system and
//! leave nothing behind.

use std::io::Read;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use sessiond::capture::flush::LogFlusher;
use sessiond::restore;

use crate::retention::age_objects;
use crate::support::TempHome;
use crate::support::backend::{Backend, Ran, Running, transcript};
use crate::support::counting_directory::CountingDirectory;
use crate::support::files::{append, write};
use crate::support::world::World;
use crate::support::writer::FlushAll;

/// A directory in which nobody can create a file, not even root.
const READ_ONLY: &str = "/proc";

fn run_read_only(backend: &Backend, home: &TempHome, arguments: &[&str]) -> Ran {
    let mut command = backend.command(home, arguments);
    command.env("TMPDIR", READ_ONLY);
    Ran(command.output().unwrap())
}

#[test]
fn verify_fork_export_and_gc_work_without_a_writable_temporary_directory() {
    let backend = Backend::file();
    let home = TempHome::new();
    let daemon = backend.daemon(&home, &["--flush-interval", "10ms"]);
    for number in 0..80 {
        append(&transcript(&home, "s1"), format!("{{\"n\":{number}}}\n"));
        backend.run(&home, &["flush", "--wait"]).ok();
    }
    drop(daemon);
    run_read_only(&backend, &home, &["verify", "--all", "--deep"]).ok();
    run_read_only(&backend, &home, &["fork", "s1"]).ok();
    let exported = run_read_only(&backend, &home, &["export", "s1"]);
    assert!(exported.ok().0.stdout.len() > 100);
    age_objects(&backend, Duration::from_secs(9 * 24 * 60 * 60));
    let report = run_read_only(&backend, &home, &["gc", "--json"]).json();
    assert!(report["objects"].as_u64() > Some(10), "{report}");
}

#[test]
fn a_killed_export_leaves_no_file_behind() {
    let backend = Backend::file();
    let home = TempHome::new();
    let temporary = home.path().join("tmp-of-export");
    std::fs::create_dir(&temporary).unwrap();
    // More than fits into memory, and more than a pipe holds after compression.
    let mut state = 1u64;
    let mut noise = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        format!("{{\"n\":\"{state:x}\"}}\n")
    };
    let text: String = (0..900_000).map(|_| noise()).collect();
    write(&transcript(&home, "s1"), text);
    let daemon = backend.daemon(&home, &[]);
    backend.run(&home, &["flush", "--wait"]).ok();
    drop(daemon);
    let mut command = backend.command(&home, &["export", "s1"]);
    command.env("TMPDIR", &temporary).stdout(Stdio::piped());
    let mut export = Running(command.spawn().unwrap());
    let mut output = export.0.stdout.take().unwrap();
    output.read_exact(&mut [0; 1]).unwrap();
    let count = |path: &Path| std::fs::read_dir(path).unwrap().count();
    assert_eq!(count(&temporary), 0, "while it runs");
    export.kill();
    assert_eq!(count(&temporary), 0, "after the kill");
}

#[test]
fn gc_continues_after_a_log_that_cannot_be_read() {
    let backend = Backend::file();
    let home = TempHome::new();
    let daemon = backend.daemon(&home, &[]);
    for session in ["s1", "s2", "s3"] {
        append(&transcript(&home, session), "{\"n\":1}\n");
    }
    backend.run(&home, &["flush", "--wait"]).ok();
    drop(daemon);
    age_objects(&backend, Duration::from_secs(2 * 24 * 60 * 60));
    let log = backend.path().join("bucket/v1/default/claude-code/s1/log");
    std::fs::rename(&log, log.with_extension("away")).unwrap();
    std::os::unix::fs::symlink("log", &log).unwrap();
    let report = backend
        .run(&home, &["gc", "--ttl", "1d", "--json"])
        .fails(5, "cannot clean up 1 of 3 logs", "sessiond gc")
        .json();
    assert_eq!(
        (&report["expired"], &report["failed"]),
        (&2.into(), &1.into()),
        "{report}"
    );
}

#[tokio::test]
async fn a_restore_of_many_files_syncs_them_together_and_before_they_get_their_names() {
    let world = World::in_memory();
    let transcript = "projects/-work-app/s1.jsonl";
    world.append(transcript, "{\"n\":1}\n");
    let mut flusher = LogFlusher::new(world.id("s1"));
    flusher.paths.insert(transcript.parse().unwrap());
    for number in 0..200 {
        let path = format!("projects/-work-app/s1/tool-results/{number}.txt");
        world.write(&path, format!("result {number}"));
        flusher.paths.insert(path.parse().unwrap());
    }
    flusher.flush(&world.context(), false).await.unwrap();
    let directory = Arc::new(CountingDirectory::new(world.path("elsewhere")));
    let context = restore::RestoreContext {
        directory: directory.clone(),
        profile: world.writer.context.profile.clone(),
        logs: world.logs(),
    };
    let options = restore::Options {
        claim: true,
        ..Default::default()
    };
    restore::restore(&context, &world.id("s1"), &options)
        .await
        .unwrap();
    let actions = directory.actions();
    assert_eq!(actions.len(), 203, "{actions:?}");
    assert_eq!(actions[0], "sync 201 files");
    assert_eq!(actions[201], format!("rename to {transcript}"));
    assert_eq!(actions[202], "sync 201 names");
    let restored =
        std::fs::read_to_string(world.path("elsewhere/projects/-work-app/s1/tool-results/199.txt"));
    assert_eq!(restored.unwrap(), "result 199");
}
