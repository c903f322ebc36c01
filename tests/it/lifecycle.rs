//! Session metadata: labels, request IDs, TTL and closed status.

use std::sync::Arc;
use std::time::Duration;

use sessiond::capture::MetadataQueue;
use sessiond::daemon::metadata_writer;
use sessiond::model::{SessionMetadata, Ttl};

use crate::support::TempHome;
use crate::support::backend::{Backend, Signal, transcript};
use crate::support::files::append;
use crate::support::on_each_backend;
use crate::support::world::World;

fn stream(backend: &Backend, home: &TempHome, session: &str, lines: &str) {
    let mut daemon = backend.daemon(home, &[]);
    append(&transcript(home, session), lines);
    backend.run(home, &["flush", "--wait"]).ok();
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.code(), Some(0));
}

fn row(backend: &Backend, home: &TempHome) -> serde_json::Value {
    backend.run(home, &["ls", "--json"]).ok().json()["sessions"][0].clone()
}

/// Checks that a reindex from the bucket gives the same rows.
#[track_caller]
fn assert_reindex_gives_the_same_row(backend: &Backend, home: &TempHome) {
    let before = row(backend, home);
    backend.run(home, &["reindex"]).ok();
    assert_eq!(row(backend, home), before);
}

on_each_backend!(status_changes_follow_the_life_cycle);
fn status_changes_follow_the_life_cycle(backend: Backend) {
    let home = TempHome::new();
    stream(&backend, &home, "s1", "{\"n\":1}\n");
    let go = |verb: &str| backend.run(&home, &[verb, "s1"]);
    let status = || row(&backend, &home)["status"].as_str().unwrap().to_owned();
    go("archive").fails(
        7,
        "cannot archive session s1: the session is active",
        "run \"sessiond close s1\" first",
    );
    assert_eq!(go("reopen").ok().out(), "s1 is active\n");
    assert_eq!(go("close").ok().out(), "s1 is completed\n");
    assert_eq!(status(), "completed");
    assert_eq!(go("close").ok().out(), "s1 is completed\n");
    assert_reindex_gives_the_same_row(&backend, &home);
    go("archive").ok();
    assert_eq!(status(), "archived");
    assert_eq!(go("archive").ok().out(), "s1 is archived\n");
    go("close").fails(
        7,
        "the session is archived",
        "run \"sessiond reopen s1\" first",
    );
    assert_reindex_gives_the_same_row(&backend, &home);
    go("reopen").ok();
    assert_eq!(status(), "active");
    go("close").ok();

    // A restore claims the session and writes nothing: the status stays. A writer that continues
    // makes it active.
    let other = TempHome::new();
    backend.run(&other, &["restore", "s1"]).ok();
    assert_eq!(status(), "completed");
    stream(&backend, &other, "s1", "{\"n\":2}\n");
    assert_eq!(status(), "active");
    go("archive").fails(7, "the session is active", "sessiond close s1");
    assert_reindex_gives_the_same_row(&backend, &home);
    go("close").ok();
    backend.run(&home, &["rm", "s1", "--yes"]).ok();
    go("reopen").fails(3, "was removed", "undelete");
    backend.run(&home, &["undelete", "s1"]).ok();
    assert_eq!(status(), "completed");
    backend
        .run(&home, &["close", "nobody"])
        .fails(3, "does not exist", "sessiond ls");
}

on_each_backend!(labels_are_set_listed_removed_and_found);
fn labels_are_set_listed_removed_and_found(backend: Backend) {
    let home = TempHome::new();
    stream(&backend, &home, "s1", "{\"n\":1}\n");
    stream(&backend, &home, "s2", "{\"n\":1}\n");
    let label = |arguments: &[&str]| backend.run(&home, &[&["label", "s1"], arguments].concat());
    assert_eq!(label(&[]).ok().out(), "no labels on session s1\n");
    label(&["team=infra", "ticket=47=11"]).ok();
    assert_eq!(
        label(&["env=prod", "ticket-"]).ok().out(),
        "env=prod\nteam=infra\n"
    );
    assert_eq!(
        label(&["--json"]).json(),
        serde_json::json!({"env": "prod", "team": "infra"})
    );
    let found = |arguments: &[&str]| {
        let page = backend
            .run(&home, &[&["ls", "--json"], arguments].concat())
            .ok()
            .json();
        page["sessions"]
            .as_array()
            .unwrap()
            .iter()
            .map(|row| row["id"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        found(&["--label", "team=infra", "--label", "env=prod"]),
        ["s1"]
    );
    assert!(found(&["--label", "team=infra", "--label", "env=dev"]).is_empty());
    assert_eq!(found(&[]).len(), 2);
    label(&["team"]).fails(2, "invalid label \"team\": expected NAME=VALUE", "");
    label(&["a\nb=c"]).fails(2, "control character", "");
    label(&[&format!("a={}", "x".repeat(2000))]).fails(2, "1024", "");
    backend.run(&home, &["ttl", "s1", "never"]).ok();
    let before = backend.run(&home, &["ls", "--json"]).ok().json();
    let of_s1 = before["sessions"]
        .as_array()
        .unwrap()
        .iter()
        .find(|row| row["id"] == "s1")
        .unwrap();
    assert_eq!(
        (&of_s1["labels"]["team"], &of_s1["ttl"]),
        (&"infra".into(), &"never".into())
    );
    backend.run(&home, &["reindex"]).ok();
    assert_eq!(backend.run(&home, &["ls", "--json"]).ok().json(), before);
}

#[test]
fn metadata_set_during_an_index_outage_is_in_the_bucket() {
    let mut backend = Backend::file();
    let home = TempHome::new();
    stream(&backend, &home, "s1", "{\"n\":1}\n");
    backend.set("SESSIOND_INDEX", "postgres://nobody@127.0.0.1:1/none");
    backend.run(&home, &["close", "s1"]).ok();
    backend.run(&home, &["label", "s1", "a=b"]).ok();
    // Only a completed session can be archived.
    backend.run(&home, &["archive", "s1"]).ok();
    backend.set(
        "SESSIOND_INDEX",
        format!("sqlite://{}", backend.path().join("other.db").display()),
    );
    backend.run(&home, &["reindex"]).ok();
    let row = row(&backend, &home);
    assert_eq!(
        (&row["status"], &row["labels"]),
        (&"archived".into(), &serde_json::json!({"a": "b"}))
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_metadata_updates_are_all_kept() {
    let world = World::new();
    let (logs, id) = (world.logs(), world.id("s1"));
    let says = (0..16).map(|number| {
        let (logs, id) = (logs.clone(), id.clone());
        tokio::spawn(async move {
            for turn in 0..3 {
                let add = |before: &SessionMetadata| {
                    let mut after = before.clone();
                    after
                        .labels
                        .insert(format!("{number}-{turn}"), String::new());
                    Ok(after)
                };
                // With sixteen concurrent updates, one may run out of retries.
                while let Err(error) = logs.update_metadata(&id, add).await {
                    assert!(error.is_retryable(), "{error}");
                }
            }
        })
    });
    for said in says.collect::<Vec<_>>() {
        said.await.unwrap();
    }
    assert_eq!(logs.metadata(&id).await.unwrap().metadata.labels.len(), 48);
    assert_eq!(
        logs.list_metadata_versions(&id).await.unwrap().len(),
        1,
        "older ones are deleted"
    );
}

fn text(home: &TempHome, session: &str) -> String {
    std::fs::read_to_string(transcript(home, session)).unwrap()
}

on_each_backend!(a_daemon_tags_every_session_it_writes_and_a_request_finds_the_latest);
fn a_daemon_tags_every_session_it_writes_and_a_request_finds_the_latest(mut backend: Backend) {
    let home = TempHome::new();
    let config = home.path().join("config.toml");
    std::fs::write(
        &config,
        "label = [\"team=infra\", \"env=test\"]\nttl = \"1d\"\n",
    )
    .unwrap();
    let mut daemon = backend.daemon(
        &home,
        &[
            "--request",
            "r 1",
            "--ttl",
            "30d",
            "--config",
            &config.to_string_lossy(),
        ],
    );
    for session in ["s1", "s2"] {
        append(
            &transcript(&home, session),
            format!("{{\"n\":\"{session}\"}}\n"),
        );
        backend.run(&home, &["flush", "--wait"]).ok();
    }
    append(
        &home
            .home()
            .join(".claude/projects/-work-app/memory/MEMORY.md"),
        "remember",
    );
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.code(), Some(0));
    // Another process changes the metadata of one of them: fields that it does not set stay.
    backend.set("SESSIOND_LABEL", "env=prod,more=yes");
    stream(&backend, &home, "s2", "{\"n\":2}\n");
    stream(&backend, &home, "s3", "{\"n\":3}\n");
    backend.set("SESSIOND_LABEL", "");

    let rows = || {
        let page = backend.run(&home, &["ls", "--json"]).ok().json();
        let said = |row: &serde_json::Value| {
            serde_json::json!([row["id"], row["labels"], row["request_id"], row["ttl"]])
        };
        page["sessions"]
            .as_array()
            .unwrap()
            .iter()
            .map(said)
            .collect::<Vec<_>>()
    };
    let expected = [
        serde_json::json!(["s3", {"env": "prod", "more": "yes"}, null, null]),
        serde_json::json!(["s2", {"env": "prod", "more": "yes", "team": "infra"}, "r 1", {"seconds": 30 * 86400}]),
        serde_json::json!(["s1", {"env": "test", "team": "infra"}, "r 1", {"seconds": 30 * 86400}]),
    ];
    assert_eq!(rows(), expected, "{}", backend.name);
    backend.run(&home, &["reindex"]).ok();
    assert_eq!(rows(), expected);

    let restored = |backend: &Backend| {
        let other = TempHome::new();
        let said = backend
            .run(&other, &["restore", "--request", "r 1"])
            .ok()
            .out();
        assert!(said.contains("resume with session ID s2"), "{said}");
        assert_eq!(text(&other, "s2"), text(&home, "s2"));
        backend
            .run(&other, &["pull", "--request", "r 1", "--to", "copy"])
            .ok();
        assert!(
            other
                .home()
                .join("copy/projects/-work-app/s2.jsonl")
                .exists()
        );
        backend
            .run(&other, &["restore", "--request", "other"])
            .fails(3, "no session with request ID \"other\"", "sessiond ls");
        backend
            .run(&other, &["restore", "--request", "other", "--if-exists"])
            .ok();
    };
    restored(&backend);
    let other = TempHome::new();
    let ran = backend.run(
        &other,
        &[
            "run",
            "--request",
            "r 1",
            "--",
            "sh",
            "-c",
            "wc -l < $HOME/.claude/projects/-work-app/s2.jsonl",
        ],
    );
    assert_eq!(ran.ok().out().trim(), "2");
    // The bucket has the metadata without the index.
    if backend.name == "file+sqlite" {
        backend.set("SESSIOND_INDEX", "postgres://nobody@127.0.0.1:1/none");
        restored(&backend);
    }
    backend.run(&home, &["daemon", "--label", "odd"]).fails(
        2,
        "invalid label \"odd\": expected NAME=VALUE",
        "",
    );
    backend
        .run(&home, &["run", "--ttl", "soon", "--", "true"])
        .fails(2, "invalid --ttl value \"soon\"", "7d");
    backend
        .run(&home, &["run", "--request", "a\nb", "--", "true"])
        .fails(2, "invalid request ID", "");
    backend
        .run(&home, &["restore", "--request", ""])
        .fails(2, "invalid request ID", "");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metadata_writes_never_delay_a_flush_and_are_retried() {
    let mut world = World::new();
    let (logs, id) = (world.logs(), world.id("s1"));
    world.store.fail_requests("meta/");
    let queue = Arc::<MetadataQueue>::default();
    world.writer.context.metadata_queue = Some(queue.clone());
    let handle = world.stream();
    let wishes = SessionMetadata {
        ttl: Some(Ttl::Never),
        ..SessionMetadata::default()
    };
    let task = tokio::spawn(metadata_writer::run(
        queue.clone(),
        world.writer.context.index_queue.clone(),
        Arc::default(),
        logs.clone(),
        wishes.clone(),
    ));
    world.append("projects/-w/s1.jsonl", "{\"n\":1}\n");
    world.write("projects/-w/memory/m.md", "a project is no session");
    handle.flush(None).await.unwrap();
    assert!(
        !metadata_writer::wait_until_idle(
            &queue,
            tokio::time::Instant::now() + Duration::from_millis(300)
        )
        .await
    );
    assert!(world.stored("s1").await.is_some());
    world.store.recover();
    assert!(
        metadata_writer::wait_until_idle(
            &queue,
            tokio::time::Instant::now() + Duration::from_secs(30)
        )
        .await
    );
    assert_eq!(logs.metadata(&id).await.unwrap().metadata, wishes);
    assert!(
        logs.list_metadata_versions(&world.id("@-w"))
            .await
            .unwrap()
            .is_empty()
    );
    // Once per session and process.
    logs.update_metadata(&id, |_| Ok(SessionMetadata::default()))
        .await
        .unwrap();
    world.append("projects/-w/s1.jsonl", "{\"n\":2}\n");
    handle.flush(None).await.unwrap();
    assert!(
        metadata_writer::wait_until_idle(
            &queue,
            tokio::time::Instant::now() + Duration::from_secs(30)
        )
        .await
    );
    assert_eq!(
        logs.metadata(&id).await.unwrap().metadata,
        SessionMetadata::default()
    );
    task.abort();
}
