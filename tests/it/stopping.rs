//! A daemon that is stopped while it starts, and clients of a daemon that does not respond.

use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::backend::{Backend, Ran, Running, Signal, eventually, transcript};
use crate::support::files::append;
use crate::support::{TempHome, slow};

/// A store that accepts connections and never responds.
struct HangingStore {
    listener: TcpListener,
}

impl HangingStore {
    fn new() -> HangingStore {
        HangingStore {
            listener: TcpListener::bind("127.0.0.1:0").unwrap(),
        }
    }

    /// A daemon that restores from this store before it streams.
    fn daemon(&self, backend: &Backend, home: &TempHome) -> Command {
        let address = self.listener.local_addr().unwrap();
        let mut command = backend.command(home, &["daemon", "--session", "s1"]);
        command
            .args(["--flush-deadline", "4s"])
            .env(
                "SESSIOND_STORE",
                format!("s3://bucket?endpoint=http://{address}"),
            )
            .env("AWS_ACCESS_KEY_ID", "test")
            .env("AWS_SECRET_ACCESS_KEY", "test")
            .stderr(std::fs::File::create(home.path().join("daemon.log")).unwrap())
            .stdout(Stdio::null());
        command
    }

    /// Starts a daemon, and stops it while it waits for the store. Returns its exit code.
    fn stop_while_starting(&self, home: &TempHome) -> Option<i32> {
        let backend = Backend::file();
        let mut daemon = Running(self.daemon(&backend, home).spawn().unwrap());
        let connection = self.listener.accept().unwrap();
        daemon.signal(Signal::TERM);
        let stopped = Instant::now();
        let code = daemon.code();
        assert!(stopped.elapsed() < Duration::from_secs(10));
        drop(connection);
        code
    }
}

#[test]
fn a_daemon_that_is_stopped_while_it_starts_reports_what_is_not_durable() {
    let home = TempHome::new();
    append(&transcript(&home, "s1"), "{\"n\":1}\n");
    let code = HangingStore::new().stop_while_starting(&home);
    let log = std::fs::read_to_string(home.path().join("daemon.log")).unwrap();
    assert_eq!(code, Some(9), "{log}");
    assert!(log.contains("not durable"), "{log}");
}

#[test]
fn a_daemon_that_is_stopped_while_it_starts_and_has_nothing_to_save_exits_with_0() {
    let home = TempHome::new();
    let code = HangingStore::new().stop_while_starting(&home);
    let log = std::fs::read_to_string(home.path().join("daemon.log")).unwrap();
    assert_eq!(code, Some(0), "{log}");
}

#[test]
fn clients_of_a_suspended_daemon_time_out() {
    let backend = Backend::file();
    let home = TempHome::new();
    let daemon = backend.daemon(&home, &[]);
    append(&transcript(&home, "s1"), "{\"n\":1}\n");
    backend.run(&home, &["flush", "--wait"]).ok();
    daemon.signal(Signal::STOP);
    let run = |arguments: &[&str]| {
        let started = Instant::now();
        let mut client = Running(
            backend
                .command(&home, arguments)
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap(),
        );
        eventually("the client ends", || client.0.try_wait().unwrap().is_some());
        assert!(started.elapsed() < Duration::from_secs(15), "{arguments:?}");
        let mut child = std::mem::ManuallyDrop::new(client);
        let (out, err) = (child.0.stdout.take(), child.0.stderr.take());
        let read = |pipe: Option<Box<dyn std::io::Read>>| {
            let mut text = Vec::new();
            pipe.unwrap().read_to_end(&mut text).unwrap();
            text
        };
        Ran(std::process::Output {
            status: child.0.wait().unwrap(),
            stdout: read(out.map(|pipe| Box::new(pipe) as _)),
            stderr: read(err.map(|pipe| Box::new(pipe) as _)),
        })
    };
    run(&["flush", "--wait", "--timeout", "1s"]).fails(5, "not everything is durable", "status");
    run(&["flush", "--wait", "--session", "s1", "--timeout", "1s"]).fails(5, "not everything", "");
    run(&["status"]).fails(5, "did not respond within 5 seconds", "ps -o");
    let doctor = run(&["doctor"]);
    assert!(doctor.out().contains("did not respond"), "{}", doctor.out());
    assert_ne!(doctor.code(), 0);
    daemon.signal(Signal::CONT);
    backend.run(&home, &["status"]).ok();
}

slow!(a_flush_without_a_timeout_does_not_wait_for_a_suspended_daemon);
fn a_flush_without_a_timeout_does_not_wait_for_a_suspended_daemon() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let daemon = backend.daemon(&home, &[]);
    append(&transcript(&home, "s1"), "{\"n\":1}\n");
    backend.run(&home, &["flush", "--wait"]).ok();
    daemon.signal(Signal::STOP);
    let started = Instant::now();
    let flush = backend.run(&home, &["flush", "--wait"]);
    assert!(started.elapsed() < Duration::from_secs(50));
    daemon.signal(Signal::CONT);
    flush.fails(5, "cannot wait for the flush: the sessiond for", "ps -o");
}
