//! A daemon whose index or directory is replaced while it runs.

use crate::support::TempHome;
use crate::support::backend::{Backend, eventually, transcript};
use crate::support::files::append;
use crate::support::needs_servers;
use crate::support::servers::postgres;

fn listed(backend: &Backend, home: &TempHome) -> usize {
    let ran = backend.run(home, &["ls", "--json"]);
    if ran.code() != 0 {
        return 0;
    }
    ran.json()["sessions"].as_array().unwrap().len()
}

/// Streams two sessions, replaces the index with `replace`, and expects both to be listed again.
fn a_replaced_index_is_filled_again(backend: &Backend, replace: impl FnOnce()) {
    let home = TempHome::new();
    let _daemon = backend.daemon(&home, &[]);
    for session in ["s1", "s2"] {
        append(&transcript(&home, session), "{\"n\":1}\n");
    }
    backend.run(&home, &["flush", "--wait"]).ok();
    eventually("both are listed", || listed(backend, &home) == 2);
    backend.run(&home, &["status"]).ok();
    replace();
    eventually("the daemon notices", || {
        let status = backend.run(&home, &["status", "--json"]).ok().json();
        status["index_losses"] == 1
    });
    eventually("both are listed again", || listed(backend, &home) == 2);
    eventually("the index is reachable", || {
        let status = backend.run(&home, &["status", "--json"]).ok().json();
        status["index_reachable"] == true && status["index_backlog"] == 0
    });
    let status = backend.run(&home, &["status"]);
    assert!(
        status.out().contains("lost its entries 1 time"),
        "{}",
        status.out()
    );
    let log = std::fs::read_to_string(home.path().join("daemon.log")).unwrap();
    assert!(log.contains("the index lost entries"), "{log}");
}

#[test]
fn a_deleted_index_file_is_filled_again() {
    let backend = Backend::file();
    a_replaced_index_is_filled_again(&backend, || {
        for name in ["index.db", "index.db-wal", "index.db-shm"] {
            let _ = std::fs::remove_file(backend.path().join(name));
        }
    });
}

needs_servers!(a_recreated_database_is_filled_again);
fn a_recreated_database_is_filled_again() {
    let Some(backend) = Backend::servers() else {
        return;
    };
    let url = backend
        .env("SESSIOND_INDEX")
        .expect("a database")
        .to_owned();
    a_replaced_index_is_filled_again(&backend, || {
        postgres().expect("it is running").recreate_database(&url);
    });
}

#[test]
fn a_daemon_continues_after_its_directory_was_removed_and_created_again() {
    let backend = Backend::file();
    let home = TempHome::new();
    let _daemon = backend.daemon(&home, &[]);
    append(&transcript(&home, "s1"), "{\"n\":1}\n");
    backend.run(&home, &["flush", "--wait"]).ok();
    std::fs::remove_dir_all(home.home().join(".claude")).unwrap();
    append(&transcript(&home, "s2"), "{\"n\":2}\n");
    eventually("the daemon responds again", || {
        backend.run(&home, &["status"]).code() == 0
    });
    backend
        .run(&home, &["flush", "--wait", "--session", "s2"])
        .ok();
    let copy = home.path().join("copy");
    backend
        .run(&home, &["pull", "s2", "--to", &copy.to_string_lossy()])
        .ok();
    // The lock is held again.
    backend
        .run(&home, &["daemon"])
        .fails(7, "another sessiond", "sessiond status");
    // The session whose files were removed stays in the store.
    backend.run(&home, &["show", "s1"]).ok();
}
