//! `show` and `tail`, from the bucket alone.

use std::process::Stdio;
use std::time::Duration;

use sessiond::capture::flush::LogFlusher;
use sessiond::history::display::DisplayBlock;
use sessiond::history::{Conversation, ConversationReader, Extent, FollowEvent, Follower};
use sessiond::log::schedule;
use sessiond::model::{LogPoint, ResolvedPoint};
use sessiond::sys::Disk;
use sessiond::upkeep::collect::RetentionPolicy;
use sessiond::upkeep::compact::compact;
use sessiond::upkeep::{gc, remove};

use crate::messages::{fixture, line};
use crate::support::TempHome;
use crate::support::backend::{Backend, Running, Signal, eventually, transcript};
use crate::support::files::append;
use crate::support::on_each_backend;
use crate::support::world::World;
use crate::support::writer::FlushAll;

const PATH: &str = "projects/-work-app/s1.jsonl";

/// Streams a session that a real agent wrote. Returns its ID.
fn streamed(backend: &Backend, name: &str) -> (TempHome, String) {
    let home = TempHome::new();
    let (session, files) = fixture(name);
    for (path, bytes) in files {
        append(
            &home.home().join(".claude").join(path),
            String::from_utf8(bytes).unwrap(),
        );
    }
    backend.run(&home, &["run", "--", "true"]).ok();
    (home, session)
}

on_each_backend!(a_conversation_is_shown_with_its_sub_agents_where_they_were_started);
fn a_conversation_is_shown_with_its_sub_agents_where_they_were_started(mut backend: Backend) {
    let (home, session) = streamed(&backend, "subagent");
    // The index is not needed.
    backend.set("SESSIOND_INDEX", "postgres://nobody@127.0.0.1:1/nothing");
    let shown = backend.run(&home, &["show", &session[..8]]).ok().out();
    let want = format!(
        "Do it SCRIPT:agent  {session} · /work/work · claude-opus-5-5 · 2.1.325

user  2026-11-16 10:58:09 UTC
  Do it SCRIPT:agent

assistant  2026-11-16 10:58:10 UTC · claude-opus-5-5
  I start a sub-agent.
  ▸ Agent Look around  ok, 754 B

    user  sub-agent a9a329da92180d99f · 2026-11-16 10:58:10 UTC
      SCRIPT:child do it

    assistant  sub-agent a9a329da92180d99f · 2026-11-16 10:58:10 UTC · claude-opus-5-5
      Child runs.
      ▸ Bash echo child; sleep 1  ok, 5 B
      Child result: ok.

assistant  2026-11-16 10:58:12 UTC · claude-opus-5-5
  The sub-agent is done.
"
    );
    assert_eq!(shown, want);
    let markdown = backend
        .run(&home, &["show", &session, "--markdown"])
        .ok()
        .out();
    let want = format!(
        "# Do it SCRIPT:agent

{session} · /work/work · claude-opus-5-5 · 2.1.325

### user · 2026-11-16 10:58:09 UTC

Do it SCRIPT:agent

### assistant · 2026-11-16 10:58:10 UTC · claude-opus-5-5

I start a sub-agent.

- **Agent** `Look around` — ok, 754 B

> ### user · sub-agent a9a329da92180d99f · 2026-11-16 10:58:10 UTC
>
> SCRIPT:child do it
>
> ### assistant · sub-agent a9a329da92180d99f · 2026-11-16 10:58:10 UTC · claude-opus-5-5
>
> Child runs.
>
> - **Bash** `echo child; sleep 1` — ok, 5 B
>
> Child result: ok.
>

### assistant · 2026-11-16 10:58:12 UTC · claude-opus-5-5

The sub-agent is done.

"
    );
    assert_eq!(markdown, want);
    let full = backend
        .run(&home, &["show", &session, "--verbose"])
        .ok()
        .out();
    assert!(
        full.contains("\"run_in_background\": false") && full.contains("system  environment"),
        "{full}"
    );
    let last = backend
        .run(&home, &["show", &session, "--last", "1"])
        .ok()
        .out();
    assert!(
        last.ends_with("The sub-agent is done.\n") && !last.contains("user"),
        "{last}"
    );
    let tail = backend
        .run(&home, &["tail", &session, "-n", "2"])
        .ok()
        .out();
    assert!(
        tail.contains("⎿ ok, 754 B\n  The sub-agent is done.\n") && !tail.contains("Child"),
        "{tail}"
    );
    backend.run(&home, &["show", "nobody"]).fails(
        3,
        "session nobody does not exist",
        "sessiond ls",
    );
    backend
        .run(&home, &["show", &session, "--at", "a/b"])
        .fails(2, "a/b", "");
}

#[test]
fn show_at_an_earlier_point_stops_there() {
    let backend = Backend::file();
    let home = TempHome::new();
    let daemon = backend.daemon(&home, &[]);
    for number in 1..=3 {
        append(
            &transcript(&home, "s1"),
            line(number, "user", &format!("number {number}\x1b]0;title\x07")),
        );
        backend.run(&home, &["flush", "--wait"]).ok();
    }
    drop(daemon);
    let shown = backend
        .run(&home, &["show", "s1", "--at", "seq:3"])
        .ok()
        .out();
    assert!(
        shown.contains("number 2") && !shown.contains("number 3") && !shown.contains('\x1b'),
        "{shown}"
    );
    // Also within an entry: the whole session is in one.
    let (home, session) = streamed(&backend, "resumed");
    let shown = backend
        .run(&home, &["show", &session, "--at", "turn:2"])
        .ok()
        .out();
    assert!(
        shown.contains("Second prompt") && shown.ends_with("The command printed hi.\n"),
        "{shown}"
    );
    backend
        .run(&home, &["show", &session, "--at", "turn:9"])
        .fails(3, "has no complete turn 9", "sessiond checkpoints");
}

fn texts(events: &[FollowEvent]) -> Vec<String> {
    let text = |event: &FollowEvent| match event {
        FollowEvent::Message(message) => match &message.blocks[..] {
            [DisplayBlock::Text(text)] => text.clone(),
            blocks => format!("{blocks:?}"),
        },
        other => format!("{other:?}"),
    };
    events.iter().map(text).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tail_follow_costs_one_request_per_poll_and_survives_changes() {
    let world = World::new();
    let (logs, id) = (world.logs(), world.id("s1"));
    let mut shipment = LogFlusher::new(id.clone());
    shipment.paths.insert(PATH.parse().unwrap());
    let mut number = 0;
    let mut write = async |shipment: &mut LogFlusher| {
        number += 1;
        world.append(PATH, line(number, "user", &format!("n{number}")));
        shipment.flush(&world.context(), false).await.unwrap();
    };
    for _ in 0..3 {
        write(&mut shipment).await;
    }
    let (mut follower, events) = Follower::start(&logs, world.profile(), &id, 2, false)
        .await
        .unwrap();
    assert_eq!(texts(&events), ["n2", "n3"]);
    // Without new entries each poll is one request.
    let before = world.store.requests();
    for _ in 0..3 {
        assert_eq!(follower.poll(false).await.unwrap(), []);
    }
    assert_eq!(world.store.requests() - before, 3);
    write(&mut shipment).await;
    write(&mut shipment).await;
    let before = world.store.requests();
    assert_eq!(texts(&follower.poll(false).await.unwrap()), ["n4", "n5"]);
    assert_eq!(
        world.store.requests() - before,
        3,
        "two entries, and none behind them"
    );
    // An outage only delays the output.
    write(&mut shipment).await;
    world.store.fail_requests("log/");
    assert!(follower.poll(true).await.unwrap_err().is_retryable());
    world.store.recover();
    assert_eq!(texts(&follower.poll(true).await.unwrap()), ["n6"]);
    // Rewritten with one more line.
    let whole = std::fs::read_to_string(world.root().join(PATH)).unwrap();
    world.write(
        PATH,
        whole.replacen("n1", "N1", 1) + &line(50, "user", "after the rewrite"),
    );
    shipment.flush(&world.context(), false).await.unwrap();
    assert_eq!(
        texts(&follower.poll(true).await.unwrap()),
        ["after the rewrite"]
    );
    // Merged and collected between two polls: every entry is gone.
    number = 100;
    let mut write = async |shipment: &mut LogFlusher| {
        number += 1;
        world.append(PATH, line(number, "user", &format!("n{number}")));
        shipment.flush(&world.context(), false).await.unwrap();
    };
    for _ in 0..80 {
        write(&mut shipment).await;
    }
    let scratch = tempfile::tempdir().unwrap();
    let policy = RetentionPolicy {
        history: Duration::ZERO,
        ttl: None,
        grace: Duration::ZERO,
        include_archived: false,
        include_checkpoints: false,
    };
    let collect = async || {
        let now = gc::store_time(&logs).await.unwrap();
        gc::collect(&logs, &id, &policy, now, &Disk::new(scratch.path()), false)
            .await
            .unwrap()
    };
    for seq in
        (1..=shipment.ledger.as_ref().unwrap().log_writer.seq).filter(|seq| schedule::is_due(*seq))
    {
        compact(&logs, &id, seq).await.unwrap();
    }
    for _ in 0..3 {
        collect().await;
    }
    assert!(logs.list_entries(&id, 0).await.unwrap().is_empty());
    assert_eq!(
        follower.poll(false).await.unwrap(),
        [],
        "the next number alone does not tell it"
    );
    assert_eq!(
        texts(&follower.poll(true).await.unwrap()),
        (101..=180).map(|n| format!("n{n}")).collect::<Vec<_>>()
    );
    assert_eq!(follower.poll(true).await.unwrap(), []);
    write(&mut shipment).await;
    assert_eq!(texts(&follower.poll(true).await.unwrap()), ["n181"]);
    // Removed, and revived by its writer.
    remove::remove(&logs, &id).await.unwrap();
    assert_eq!(texts(&follower.poll(true).await.unwrap()), ["Removed"]);
    write(&mut shipment).await;
    assert_eq!(texts(&follower.poll(true).await.unwrap()), ["n182"]);
    // Deleted completely; it starts again with everything its writer still has.
    remove::remove(&logs, &id).await.unwrap();
    assert_eq!(texts(&follower.poll(true).await.unwrap()), ["Removed"]);
    for _ in 0..4 {
        collect().await;
    }
    assert!(logs.list_segments(&id).await.unwrap().is_empty());
    assert_eq!(follower.poll(true).await.unwrap(), []);
    let mut shipment = LogFlusher::new(id.clone());
    shipment.paths.insert(PATH.parse().unwrap());
    write(&mut shipment).await;
    assert!(
        shipment.ledger.as_ref().unwrap().log_writer.seq < 10,
        "it starts again"
    );
    assert_eq!(texts(&follower.poll(true).await.unwrap()), ["n183"]);
    // The end is read from few objects, for `tail` and for `show`.
    for _ in 0..20 {
        write(&mut shipment).await;
    }
    let before = world.store.requests();
    let (_, events) = Follower::start(&logs, world.profile(), &id, 1, false)
        .await
        .unwrap();
    assert_eq!(texts(&events), ["n203"]);
    assert!(
        world.store.requests() - before <= 10,
        "{} requests for one message",
        world.store.requests() - before
    );
    for (at, text) in [
        (LogPoint::Latest, "n203"),
        (
            LogPoint::Seq(shipment.ledger.as_ref().unwrap().log_writer.seq - 1),
            "n202",
        ),
    ] {
        let point = ResolvedPoint {
            at,
            ..ResolvedPoint::default()
        };
        let reader = ConversationReader::new(&logs, world.profile(), &id);
        let read = reader
            .read(&point, Extent::Last(1), || Conversation::new(false))
            .await
            .unwrap();
        assert!(
            read.objects <= 2,
            "{} objects for one message",
            read.objects
        );
        let shown = read.visitor.threaded(Some(1));
        assert_eq!(
            shown[0].message.blocks,
            [DisplayBlock::Text(text.to_owned())]
        );
    }
}

on_each_backend!(tail_of_a_new_fork_shows_its_origin);
fn tail_of_a_new_fork_shows_its_origin(backend: Backend) {
    let (home, session) = streamed(&backend, "resumed");
    let fork = backend
        .run(&home, &["fork", &session, "--at", "turn:2", "--json"])
        .ok()
        .json();
    let id = fork["session"].as_str().unwrap();
    let rows = |command: &[&str]| -> Vec<serde_json::Value> {
        let out = backend.run(&home, command).ok().out();
        out.lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    };
    let tail = rows(&["tail", id, "-n", "2", "--json"]);
    assert_eq!(
        tail[1]["content"][0]["text"], "The command printed hi.",
        "{tail:?}"
    );
    assert_eq!(
        (tail.len(), &tail[1]["role"]),
        (2, &serde_json::json!("assistant"))
    );
    let shown = backend.run(&home, &["show", id, "--json"]).ok().json();
    let shown = shown.as_array().unwrap();
    assert_eq!(shown.last().unwrap()["message_id"], tail[1]["message_id"]);
    assert!(
        shown.len() > 2
            && tail[1]["message_id"].is_string()
            && shown.iter().all(|row| row["depth"] == 0)
    );
    assert_eq!(
        backend
            .run(&home, &["show", id, "--json", "--last", "2"])
            .ok()
            .json()
            .as_array()
            .unwrap()
            .len(),
        2
    );
}

on_each_backend!(tail_follow_shows_messages_from_another_machine);
fn tail_follow_shows_messages_from_another_machine(backend: Backend) {
    let (home, other) = (TempHome::new(), TempHome::new());
    let _daemon = backend.daemon(&home, &["--flush-interval", "1s"]);
    append(&transcript(&home, "s1"), line(1, "user", "before"));
    backend.run(&home, &["flush", "--wait"]).ok();
    let out = other.path().join("tail.out");
    let mut command = backend.command(&other, &["tail", "-f", "s1"]);
    command
        .stdout(std::fs::File::create(&out).unwrap())
        .stderr(Stdio::null());
    let mut tail = Running(command.spawn().unwrap());
    let shown = || std::fs::read_to_string(&out).unwrap();
    eventually("the last message is shown", || shown().contains("before"));
    for number in 2..6 {
        append(
            &transcript(&home, "s1"),
            line(number, "assistant", &format!("answer {number}")),
        );
        eventually("the new message is shown", || {
            shown().contains(&format!("answer {number}"))
        });
    }
    tail.signal(Signal::INT);
    assert_eq!(tail.code(), Some(0));
    assert_eq!(shown().matches("answer").count(), 4);
}
