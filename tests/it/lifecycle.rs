//! What people say of sessions: labels, requests, how long to keep them, and where they are in their life.

use sessiond::model::Wishes;

use crate::support::TempHome;
use crate::support::backend::{Backend, append, transcript};
use crate::support::world::World;

fn stream(backend: &Backend, home: &TempHome, session: &str, lines: &str) {
    let mut daemon = backend.daemon(home, &[]);
    append(&transcript(home, session), lines);
    backend.run(home, &["flush", "--wait"]).ok();
    daemon.signal("TERM");
    assert_eq!(daemon.code(), Some(0));
}

fn row(backend: &Backend, home: &TempHome) -> serde_json::Value {
    backend.run(home, &["ls", "--json"]).ok().json()["sessions"][0].clone()
}

/// Rows are the same when they are made again from the bucket alone.
#[track_caller]
fn reindexed_is_the_same(backend: &Backend, home: &TempHome) {
    let before = row(backend, home);
    backend.run(home, &["reindex"]).ok();
    assert_eq!(row(backend, home), before);
}

#[test]
fn a_session_is_closed_archived_and_reopened_and_only_so() {
    for backend in Backend::all() {
        let home = TempHome::new();
        stream(&backend, &home, "s1", "{\"n\":1}\n");
        let go = |verb: &str| backend.run(&home, &[verb, "s1"]);
        let status = || row(&backend, &home)["status"].as_str().unwrap().to_owned();
        go("archive").fails(7, "archive session s1: it is active", "sessiond close s1");
        go("reopen").fails(7, "it is active", "sessiond close s1");
        assert_eq!(go("close").ok().out(), "s1 is completed\n");
        assert_eq!(status(), "completed");
        go("close").fails(7, "it is completed", "sessiond archive s1, sessiond reopen s1");
        reindexed_is_the_same(&backend, &home);
        go("archive").ok();
        assert_eq!(status(), "archived");
        go("archive").fails(7, "it is archived", "sessiond reopen s1");
        go("close").fails(7, "it is archived", "sessiond reopen s1");
        reindexed_is_the_same(&backend, &home);
        go("reopen").ok();
        assert_eq!(status(), "active");
        go("close").ok();

        // A restore takes it over and writes nothing: it stays as it is. A writer that goes on makes it active.
        let other = TempHome::new();
        backend.run(&other, &["restore", "s1"]).ok();
        assert_eq!(status(), "completed");
        stream(&backend, &other, "s1", "{\"n\":2}\n");
        assert_eq!(status(), "active");
        go("archive").fails(7, "it is active", "sessiond close s1");
        reindexed_is_the_same(&backend, &home);
        go("close").ok();
        backend.run(&home, &["rm", "s1", "--yes"]).ok();
        go("reopen").fails(3, "was removed", "undelete");
        backend.run(&home, &["undelete", "s1"]).ok();
        assert_eq!(status(), "completed");
        backend.run(&home, &["close", "nobody"]).fails(3, "there is no", "sessiond ls");
    }
}

#[test]
fn labels_are_set_listed_removed_and_found() {
    for backend in Backend::all() {
        let home = TempHome::new();
        stream(&backend, &home, "s1", "{\"n\":1}\n");
        stream(&backend, &home, "s2", "{\"n\":1}\n");
        let label = |arguments: &[&str]| backend.run(&home, &[&["label", "s1"], arguments].concat());
        assert_eq!(label(&[]).ok().out(), "");
        label(&["team=infra", "ticket=47=11"]).ok();
        assert_eq!(label(&["env=prod", "ticket-"]).ok().out(), "env=prod\nteam=infra\n");
        assert_eq!(label(&["--json"]).json(), serde_json::json!({"env": "prod", "team": "infra"}));
        let found = |arguments: &[&str]| {
            let page = backend.run(&home, &[&["ls", "--json"], arguments].concat()).ok().json();
            page["sessions"].as_array().unwrap().iter().map(|row| row["id"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(found(&["--label", "team=infra", "--label", "env=prod"]), ["s1"]);
        assert!(found(&["--label", "team=infra", "--label", "env=dev"]).is_empty());
        assert_eq!(found(&[]).len(), 2);
        label(&["team"]).fails(2, "read label", "NAME=VALUE");
        label(&["a\nb=c"]).fails(2, "control character", "");
        label(&[&format!("a={}", "x".repeat(2000))]).fails(2, "1024", "");
        backend.run(&home, &["ttl", "s1", "never"]).ok();
        let before = backend.run(&home, &["ls", "--json"]).ok().json();
        let of_s1 = before["sessions"].as_array().unwrap().iter().find(|row| row["id"] == "s1").unwrap();
        assert_eq!((&of_s1["labels"]["team"], &of_s1["ttl"]), (&"infra".into(), &"never".into()));
        backend.run(&home, &["reindex"]).ok();
        assert_eq!(backend.run(&home, &["ls", "--json"]).ok().json(), before);
    }
}

#[test]
fn what_is_said_with_the_index_down_is_in_the_bucket() {
    let mut backend = Backend::file();
    let home = TempHome::new();
    stream(&backend, &home, "s1", "{\"n\":1}\n");
    backend.set("SESSIOND_INDEX", "postgres://nobody@127.0.0.1:1/none");
    backend.run(&home, &["close", "s1"]).ok();
    backend.run(&home, &["label", "s1", "a=b"]).ok();
    backend.run(&home, &["close", "s1"]).fails(7, "it is completed", "sessiond archive s1");
    backend.set("SESSIOND_INDEX", format!("sqlite://{}", backend.path().join("other.db").display()));
    backend.run(&home, &["reindex"]).ok();
    let row = row(&backend, &home);
    assert_eq!((&row["status"], &row["labels"]), (&"completed".into(), &serde_json::json!({"a": "b"})));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_that_say_something_at_once_none_is_lost() {
    let world = World::new();
    let (logs, id) = (world.logs(), world.id("s1"));
    let says = (0..16).map(|number| {
        let (logs, id) = (logs.clone(), id.clone());
        tokio::spawn(async move {
            for turn in 0..3 {
                let add = |before: &Wishes| {
                    let mut after = before.clone();
                    after.labels.insert(format!("{number}-{turn}"), String::new());
                    Ok(after)
                };
                // Sixteen at once may keep one of them waiting for longer than it has patience.
                while let Err(error) = logs.say(&id, add).await {
                    assert!(error.is_retryable(), "{error}");
                }
            }
        })
    });
    for said in says.collect::<Vec<_>>() {
        said.await.unwrap();
    }
    assert_eq!(logs.said(&id).await.unwrap().wishes.labels.len(), 48);
    assert_eq!(logs.wishes(&id).await.unwrap().len(), 1, "older ones are deleted");
}
