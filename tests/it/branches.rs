//! Branches: two machines ran the same session. The branch of the one that lost it can be read,
//! compared, forked and exported, and can become the main line.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use serde_json::{Value, json};
use sessiond::adopt::{AdoptOptions, adopt};
use sessiond::model::{LogPoint, PointSpec};
use sessiond::sessions::point;
use sessiond::sys::SystemRng;
use sessiond::sys::scratch::ScratchDirectory;

use crate::support::TempHome;
use crate::support::backend::{Backend, Running, eventually, transcript};
use crate::support::faulty_store::{FaultyStore, WriteFault};
use crate::support::files::{append, files_below, write};
use crate::support::storage::{Storage, assert_same_rows, profile};
use crate::support::writer::Writer;
use crate::support::{on_each_backend, on_each_storage};

/// The lines of a complete turn.
fn turn(by: &str, number: u64) -> String {
    let line = |kind: &str, second: u64, message: Value| {
        let line = json!({
            "type": kind,
            "uuid": format!("{by}-{number}-{second}"),
            "sessionId": "s1",
            "timestamp": format!("2026-05-01T12:{number:02}:{second:02}.000Z"),
            "cwd": "/work/app",
            "message": message,
        });
        format!("{line}\n")
    };
    let prompt = json!({"role": "user", "content": format!("prompt {number} of {by}")});
    let response = json!({
        "id": format!("m-{by}-{number}"),
        "role": "assistant",
        "model": "claude-opus-4-1",
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 10, "output_tokens": 5},
        "content": [{"type": "text", "text": format!("answer {number} of {by}")}],
    });
    line("user", 1, prompt) + &line("assistant", 2, response)
}

/// Two machines with the session: `winner` owns it, and `loser` continued on a branch.
struct Takeover {
    winner: TempHome,
    loser: TempHome,
    branch: String,
    _daemons: Vec<Running>,
}

fn text(home: &TempHome) -> String {
    std::fs::read_to_string(transcript(home, "s1")).unwrap()
}

/// One shared turn; then two turns on the main line, and two others on the branch.
fn take_over(backend: &Backend) -> Takeover {
    let (loser, winner) = (TempHome::new(), TempHome::new());
    let first = backend.daemon(&loser, &[]);
    append(&transcript(&loser, "s1"), turn("both", 1));
    backend.run(&loser, &["flush", "--wait"]).ok();
    backend.run(&winner, &["restore", "s1"]).ok();
    let second = backend.daemon(&winner, &[]);
    for number in [2, 3] {
        append(&transcript(&winner, "s1"), turn("winner", number));
        backend.run(&winner, &["flush", "--wait"]).ok();
        append(&transcript(&loser, "s1"), turn("loser", number));
        let ran = backend.run(&loser, &["flush", "--wait"]);
        let ran = ran.fails(4, "another writer owns", "sessiond adopt s1 --branch");
        assert!(
            ran.err().contains("sessiond show s1 --branch"),
            "{}",
            ran.err()
        );
    }
    let listed = backend
        .run(&winner, &["branches", "s1", "--json"])
        .ok()
        .json();
    let branch = listed["branches"][0]["writer"].as_str().unwrap().to_owned();
    Takeover {
        winner,
        loser,
        branch,
        _daemons: vec![first, second],
    }
}

/// Runs a command on a machine that has nothing.
fn elsewhere(backend: &Backend, arguments: &[&str]) -> crate::support::backend::Ran {
    backend.run(&TempHome::new(), arguments)
}

/// The texts that `show`, `messages` and `inspect` give, on the main line or a branch.
#[track_caller]
fn assert_conversation(backend: &Backend, flags: &[&str], by: &str, other: &str) {
    let run = |words: &[&str]| {
        let ran = elsewhere(backend, &[words, flags].concat()).ok();
        (ran.out(), ran)
    };
    let (shown, _) = run(&["show", "s1"]);
    // The daemon records the entries of a flush in the index a little later.
    eventually("the index has the messages", || {
        let (listed, _) = run(&["messages", "s1", "--json"]);
        listed.contains(&format!("answer 3 of {by}"))
    });
    let (listed, messages) = run(&["messages", "s1", "--json"]);
    for number in [2, 3] {
        for text in [&shown, &listed] {
            assert!(text.contains(&format!("answer {number} of {by}")), "{text}");
            assert!(!text.contains(&format!("of {other}")), "{text}");
        }
    }
    assert!(shown.contains("answer 1 of both"), "{shown}");
    let rows = messages.json()["messages"].as_array().unwrap().clone();
    assert_eq!(rows.len(), 6, "{listed}");
    let costs: Vec<&Value> = rows
        .iter()
        .filter(|row| row["role"] == "assistant")
        .map(|row| &row["cost_usd"])
        .collect();
    assert!(costs.iter().all(|cost| cost.is_number()), "{listed}");
    let (_, inspected) = run(&["inspect", "s1", "--json"]);
    assert_eq!(inspected.json()["turn"], 3);
    let (_, points) = run(&["checkpoints", "s1", "--json"]);
    let points = points.json();
    let last = points["checkpoints"].as_array().unwrap().last().unwrap();
    assert_eq!(last["turn"], 3, "{points}");
    assert_eq!(last["message_id"], format!("{by}-3-2"), "{points}");
}

#[track_caller]
fn assert_branches_can_be_read_and_adopted(backend: &Backend) {
    let Takeover {
        winner,
        loser,
        branch,
        _daemons,
    } = take_over(backend);
    let short = &branch[..6];
    let on_branch = ["--branch", short];
    let listed = elsewhere(backend, &["branches", "s1", "--json"])
        .ok()
        .json();
    let row = &listed["branches"][0];
    assert_eq!(row["entries"], 2, "{listed}");
    assert!(row["base"].as_u64().unwrap() > 0, "{listed}");
    assert!(row["stored_bytes"].as_u64().unwrap() > 0, "{listed}");
    assert!(
        row["first_at"].is_string() && row["last_at"].is_string(),
        "{listed}"
    );
    assert_eq!(row["adopted_at"], Value::Null);
    let table = elsewhere(backend, &["branches", "s1"]).ok().out();
    assert!(table.contains(&branch), "{table}");

    assert_conversation(backend, &on_branch, "loser", "winner");
    assert_conversation(backend, &[], "winner", "loser");
    let difference = elsewhere(backend, &["diff", "s1", "--branch", short])
        .ok()
        .out();
    assert!(
        difference.contains("- assistant answer 3 of winner"),
        "{difference}"
    );
    assert!(
        difference.contains("+ assistant answer 3 of loser"),
        "{difference}"
    );
    let at = ["show", "s1", "--branch", short, "--at", "turn:2"];
    let shown = elsewhere(backend, &at).ok().out();
    assert!(
        shown.contains("answer 2 of loser") && !shown.contains("answer 3"),
        "{shown}"
    );
    for words in [
        &["show", "s1", "--branch", "zzz"][..],
        &["messages", "s1", "--branch", "zzz"],
        &["adopt", "s1", "--branch", "zzz"],
        &["pull", "s1", "--branch", "zzz"],
    ] {
        elsewhere(backend, words).fails(3, "has no branch", "sessiond branches s1");
    }

    // A fork and an export of the branch are sessions like any other.
    elsewhere(backend, &["fork", "s1", "--branch", short, "--id", "s2"]).ok();
    let fork = TempHome::new();
    backend.run(&fork, &["restore", "s2"]).ok();
    let forked = std::fs::read_to_string(transcript(&fork, "s2")).unwrap();
    assert_eq!(forked, text(&loser).replace("\"s1\"", "\"s2\""));
    let archive = TempHome::new();
    let file = archive.path().join("s1.tar.gz");
    let file = file.to_str().unwrap();
    backend
        .run(&archive, &["export", "s1", "--branch", short, "-o", file])
        .ok();
    backend.run(&archive, &["import", file, "--id", "s3"]).ok();
    let imported = TempHome::new();
    backend.run(&imported, &["restore", "s3"]).ok();
    let imported = std::fs::read_to_string(transcript(&imported, "s3")).unwrap();
    assert_eq!(imported, text(&loser).replace("\"s1\"", "\"s3\""));

    assert_adoption(backend, &winner, &loser, &branch);
}

#[track_caller]
fn assert_adoption(backend: &Backend, winner: &TempHome, loser: &TempHome, branch: &str) {
    let adopt = ["adopt", "s1", "--branch", &branch[..6]];
    elsewhere(backend, &adopt).fails(7, "may still run", "--force");
    let dry = elsewhere(backend, &[&adopt[..], &["--force", "--dry-run"]].concat());
    assert!(dry.ok().out().starts_with("would adopt branch"));
    assert_conversation(backend, &[], "winner", "loser");

    let forced = [&adopt[..], &["--force", "--json"]].concat();
    let report = elsewhere(backend, &forced).ok().json();
    assert_eq!(report["already_adopted"], false, "{report}");
    assert_eq!(report["turn"], 3, "{report}");
    let checkpoint = report["former_checkpoint"].as_str().unwrap().to_owned();
    // Every reader has the content of the branch now; nothing of the former main line is lost.
    assert_conversation(backend, &[], "loser", "winner");
    let restored = TempHome::new();
    backend.run(&restored, &["restore", "s1"]).ok();
    assert_eq!(text(&restored), text(loser));
    let copy = TempHome::new();
    backend
        .run(&copy, &["pull", "s1", "--at", &checkpoint, "--to", "copy"])
        .ok();
    let former = copy.home().join("copy/projects/-work-app/s1.jsonl");
    assert_eq!(std::fs::read_to_string(former).unwrap(), text(winner));
    let stats = |what: &str| {
        let ran = elsewhere(backend, &["stats", "--json"]).ok();
        let shown = ran.json();
        assert!(ran.out().contains("\"turns\""), "{what}: {shown}");
        shown
    };
    let rows = || {
        let list = elsewhere(backend, &["messages", "s1", "--json"])
            .ok()
            .json();
        let row = elsewhere(backend, &["ls", "--json"]).ok().json()["sessions"]
            .as_array()
            .unwrap()
            .iter()
            .find(|row| row["id"] == "s1")
            .unwrap()
            .clone();
        (list, row)
    };
    let (before, counted) = (rows(), stats("after the adoption"));
    assert_eq!(before.1["turns"], 3);
    elsewhere(backend, &["verify", "--all", "--deep"]).ok();
    elsewhere(backend, &["reindex"]).ok();
    assert_eq!(rows(), before);
    assert_eq!(stats("after the rebuild"), counted);

    // Once more: nothing to do, even after the session has continued.
    let again = elsewhere(backend, &[&adopt[..], &["--json"]].concat())
        .ok()
        .json();
    assert_eq!(again["already_adopted"], true, "{again}");
    let listed = elsewhere(backend, &["branches", "s1", "--json"])
        .ok()
        .json();
    let adopted: Vec<&Value> = listed["branches"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|row| row["adopted_at"].is_u64())
        .map(|row| &row["writer"])
        .collect();
    assert_eq!(adopted, [branch], "{listed}");
    let _daemon = backend.daemon(&restored, &[]);
    append(&transcript(&restored, "s1"), turn("loser", 4));
    backend.run(&restored, &["flush", "--wait"]).ok();
    let again = elsewhere(backend, &adopt).ok().out();
    assert!(again.starts_with("nothing to do"), "{again}");
    // The former owner was fenced by the adoption, and loses nothing either.
    append(&transcript(winner, "s1"), turn("winner", 4));
    backend
        .run(winner, &["flush", "--wait"])
        .fails(4, "another writer owns", "sessiond adopt");
}

on_each_backend!(a_branch_can_be_read_forked_exported_and_adopted);
fn a_branch_can_be_read_forked_exported_and_adopted(backend: Backend) {
    assert_branches_can_be_read_and_adopted(&backend);
}

on_each_backend!(a_branch_of_an_encrypted_session_can_be_adopted);
fn a_branch_of_an_encrypted_session_can_be_adopted(mut backend: Backend) {
    let file = backend.path().join("key.txt");
    let file = file.to_str().unwrap().to_owned();
    let ran = elsewhere(&backend, &["keygen", "-o", &file]).ok();
    backend.set("SESSIOND_ENCRYPT_TO", ran.out().trim());
    backend.set("SESSIOND_IDENTITY", file);
    assert_branches_can_be_read_and_adopted(&backend);
}

const SESSION: &str = "s1";
const TRANSCRIPT: &str = "projects/-work-app/s1.jsonl";

/// A session on shared storage whose branch differs in every way: other lines, a rewritten side
/// file, a transcript of a sub-agent on each line.
async fn diverged(storage: &Storage) -> (Writer, Writer) {
    let mut loser = Writer::new(storage);
    loser.append(TRANSCRIPT, &turn("both", 1));
    write(&loser.path("file-history/s1/a"), "shared");
    loser.flush().await.unwrap();
    let mut winner = Writer::new(storage);
    let options = sessiond::restore::Options {
        claim: true,
        ..Default::default()
    };
    winner.restore(SESSION, options).await.unwrap();
    for number in [2, 3] {
        winner.append(TRANSCRIPT, &turn("winner", number));
        write(&winner.path("file-history/s1/a"), "of the winner");
        winner.append(
            "projects/-work-app/s1/subagents/agent-w.jsonl",
            &turn("w", number),
        );
        winner.flush().await.unwrap();
    }
    loser.append(TRANSCRIPT, &turn("loser", 2));
    write(&loser.path("file-history/s1/a"), "of the loser, and longer");
    loser.append(
        "projects/-work-app/s1/subagents/agent-l.jsonl",
        &turn("l", 2),
    );
    loser.flush().await.unwrap();
    assert_eq!(loser.write_target(SESSION), "branch");
    (winner, loser)
}

on_each_storage!(an_adoption_that_is_killed_at_any_step_can_be_completed);
async fn an_adoption_that_is_killed_at_any_step_can_be_completed(storage: Storage) {
    let (storage, faults) = storage.decorate(FaultyStore::new);
    let (winner, loser) = diverged(&storage).await;
    let writer = loser.ledger(SESSION).unwrap().log_writer.writer;
    let (main, branch) = (
        winner.files(),
        storage.files_of_branch(SESSION, &writer).await,
    );
    assert_eq!(branch, loser.files());
    let id = storage.id(SESSION);
    let scratch = ScratchDirectory::new(&SystemRng);
    let options = AdoptOptions {
        force: true,
        dry_run: false,
    };
    let mut completed = None;
    // The process is killed at its first write, then at its second, and so on.
    for writes in 0..20 {
        let left = Arc::new(AtomicU64::new(writes));
        faults.inject(move |_| {
            let is_dead = left
                .fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1))
                .is_err();
            if is_dead {
                WriteFault::Fail
            } else {
                WriteFault::None
            }
        });
        let logs = storage.logs();
        let profile = profile();
        let run = adopt(&logs, &*profile, &id, &writer, options, &scratch);
        let done = tokio::time::timeout(std::time::Duration::from_millis(700), run).await;
        faults.recover();
        let files = storage.files_of(SESSION).await;
        if let Ok(Ok(report)) = done {
            completed = Some((writes, report));
            break;
        }
        assert_eq!(
            files, main,
            "one delta is one step; killed at write {writes}"
        );
    }
    let (writes, report) = completed.expect("an adoption needs few writes");
    assert!(writes >= 3, "a claim, a checkpoint and a delta: {writes}");
    let mut expected = branch.clone();
    // It belonged to the former main line only.
    let emptied = "projects/-work-app/s1/subagents/agent-w.jsonl";
    expected.insert(emptied.to_owned(), Vec::new());
    assert_eq!(storage.files_of(SESSION).await, expected);
    // The former main line has one name, and the branch is unchanged.
    let name = report.former_checkpoint.clone().unwrap();
    let named = storage.logs().named_checkpoints(&id).await.unwrap();
    assert_eq!(named.len(), 1, "{named:?}");
    let spec = PointSpec::Name(name);
    let at = point::resolve(&storage.logs(), &id, &spec).await.unwrap();
    let LogPoint::Seq(seq) = at.at else {
        panic!("{at:?}")
    };
    let former = storage.files_at(SESSION, LogPoint::Seq(seq), None).await;
    assert_eq!(former.unwrap(), main);
    assert_eq!(storage.files_of_branch(SESSION, &writer).await, branch);
    // The index that followed the entries equals the one that is made from the bucket.
    storage.reindex().await;
    let rows = storage.rows().await;
    assert_eq!(rows[0].1.as_ref().unwrap().totals.turns, 2);
    storage.reindex().await;
    assert_same_rows(&rows, &storage.rows().await, "rebuilt");
    // The machine that lost the session continues where it was.
    let mut again = Writer::new(&storage);
    let restore = sessiond::restore::Options {
        claim: true,
        ..Default::default()
    };
    again.restore(SESSION, restore).await.unwrap();
    again.append(TRANSCRIPT, &turn("loser", 3));
    again.flush().await.unwrap();
    assert_eq!(again.write_target(SESSION), "main");
    let inspected = point::list(&storage.logs(), &id, None).await.unwrap();
    let turns: Vec<u64> = inspected.all.iter().map(|point| point.turn).collect();
    assert_eq!(
        turns,
        [1, 2, 3, 2, 3],
        "shared, twice the winner, twice the loser"
    );
    assert!(!files_below(&again.root).is_empty());
}
