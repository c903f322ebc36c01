//! Damaged buckets: a restore rejects them with a clear error and leaves the agent's directory
//! unchanged, `verify` reports the undamaged prefix, and restoring to that point works.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::Arc;

use bytes::Bytes;
use serde_json::{Value, json};
use sessiond::index::sql::SqlIndex;
use sessiond::model::{LogPoint, ResolvedPoint, Seq, keys};
use sessiond::restore::Options;
use sessiond::store::file::FileStore;

use crate::support::files::{Files, files_below};
use crate::support::slow;
use crate::support::storage::{SESSION, Storage, TRANSCRIPT};
use crate::support::writer::Writer;
use crate::support::{TempHome, sessiond};

/// The damaged entry; the last is 6.
const DAMAGED_SEQ: Seq = 4;
const LAST: Seq = 6;

/// A stored session of a claim and five deltas, and its files after each.
pub struct Bucket {
    pub home: TempHome,
    pub storage: Storage,
    points: Vec<(Seq, Files)>,
}

impl Bucket {
    pub async fn new() -> Bucket {
        let home = TempHome::new();
        let store = Arc::new(FileStore::open(home.path().join("store")).unwrap());
        let index = Arc::new(
            SqlIndex::open(&format!("sqlite://{}/index.db", home.path().display())).unwrap(),
        );
        let storage = Storage {
            store,
            index,
            ..Storage::files()
        };
        let mut writer = Writer::new(&storage);
        let mut points = Vec::new();
        for round in 0..5 {
            writer.append(TRANSCRIPT, &format!("{{\"round\":{round}}}\n"));
            writer.replace("tasks/s1/1.json", &format!("{{\"v\":{round}}}"));
            writer.flush().await.unwrap();
            points.push((
                writer.ledger(SESSION).unwrap().log_writer.seq,
                writer.files(),
            ));
        }
        assert_eq!(points.last().unwrap().0, LAST);
        Bucket {
            home,
            storage,
            points,
        }
    }

    fn key(&self, seq: Seq) -> String {
        keys::entry(&self.storage.id(SESSION), seq)
    }

    async fn get(&self, seq: Seq) -> Vec<u8> {
        self.storage
            .store
            .get(&self.key(seq))
            .await
            .unwrap()
            .unwrap()
            .to_vec()
    }

    async fn put(&self, seq: Seq, bytes: Vec<u8>) {
        self.storage
            .store
            .put(&self.key(seq), Bytes::from(bytes))
            .await
            .unwrap();
    }

    /// Rewrites an entry with another header, and optionally another body.
    async fn edit(&self, seq: Seq, edit: impl FnOnce(&mut Value, &mut Vec<u8>)) {
        let entry = self.storage.entries(SESSION).await.remove(seq as usize - 1);
        let mut header = serde_json::to_value(&entry.header).unwrap();
        let mut body = entry.body;
        edit(&mut header, &mut body);
        self.put(
            seq,
            gzip(&[header.to_string().as_bytes(), b"\n", &body].concat()),
        )
        .await;
    }

    fn files_at(&self, seq: Seq) -> &Files {
        &self.points.iter().find(|(at, _)| *at == seq).unwrap().1
    }

    fn run(&self, root: &Path, args: &[&str]) -> Output {
        self.command(root, args).output().unwrap()
    }

    fn command(&self, root: &Path, args: &[&str]) -> std::process::Command {
        let mut command = self.home.command(&sessiond());
        command
            .args(args)
            .args(["--namespace", "team", "--root", root.to_str().unwrap()]);
        command.arg("--store").arg(format!(
            "file://{}",
            self.home.path().join("store").display()
        ));
        command.arg("--index").arg(format!(
            "sqlite://{}",
            self.home.path().join("index.db").display()
        ));
        command
    }

    /// An agent's directory that contains a file.
    fn root(&self, name: &str) -> PathBuf {
        let root = self.home.home().join(name);
        std::fs::create_dir_all(root.join("projects/-other")).unwrap();
        std::fs::write(root.join("settings.json"), "{}").unwrap();
        std::fs::write(root.join("projects/-other/s9.jsonl"), "{}\n").unwrap();
        root
    }

    /// The restore is rejected and changes nothing; `verify` names the session and the last undamaged
    /// entry, if there is one.
    fn assert_rejected(&self, what: &str, message: &str, undamaged_to: Seq) {
        let root = self.root("refused");
        let before = (files_below(&root), paths_below(&root));
        let restored = self.run(&root, &["restore", SESSION]);
        let text = String::from_utf8_lossy(&restored.stderr);
        assert_eq!(restored.status.code(), Some(6), "{what}: {text}");
        assert!(
            text.contains("error: ") && text.contains(message) && text.contains("s1"),
            "{what}: {text}"
        );
        assert_eq!(
            (files_below(&root), paths_below(&root)),
            before,
            "{what}: something was left behind"
        );
        assert!(
            std::fs::read_dir(root.join(".sessiond/tmp")).map_or(0, Iterator::count) == 0,
            "{what}: a temporary directory stays"
        );

        let verified = self.run(&root, &["verify", "--all", "--json"]);
        assert_eq!(verified.status.code(), Some(6), "{what}");
        let verdicts: Value = serde_json::from_slice(&verified.stdout).unwrap();
        assert_eq!(
            (&verdicts[0]["session"], &verdicts[0]["undamaged_to"]),
            (&json!("s1"), &json!(undamaged_to)),
            "{what}: {verdicts}"
        );
        assert!(
            verdicts[0]["damage"][0].as_str().unwrap().contains(message),
            "{what}: {verdicts}"
        );
        let output =
            String::from_utf8_lossy(&self.run(&root, &["verify", SESSION]).stdout).into_owned();
        assert!(
            undamaged_to == 0 || output.contains(&format!("restore s1 --at seq:{undamaged_to}")),
            "{what}: {output}"
        );
    }

    fn assert_restores_at(&self, what: &str, seq: Seq) {
        let root = self.home.home().join("sound");
        let restored = self.run(&root, &["restore", SESSION, "--at", &format!("seq:{seq}")]);
        assert_eq!(
            restored.status.code(),
            Some(0),
            "{what}: {}",
            String::from_utf8_lossy(&restored.stderr)
        );
        assert_eq!(&files_below(&root), self.files_at(seq), "{what}");
    }
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(bytes).unwrap();
    gzip.finish().unwrap()
}

/// Every path below a root, with directories and without sessiond's state.
fn paths_below(root: &Path) -> BTreeSet<PathBuf> {
    let mut all = BTreeSet::new();
    let mut open = vec![root.to_owned()];
    while let Some(directory) = open.pop() {
        for name in std::fs::read_dir(&directory)
            .unwrap()
            .flatten()
            .filter(|name| name.file_name() != ".sessiond")
        {
            if name.file_type().unwrap().is_dir() {
                open.push(name.path());
            }
            all.insert(name.path());
        }
    }
    all
}

/// Damages one entry and checks `restore`, `verify` and a restore of the undamaged part.
fn check_damage(what: &str, message: &str, damage: impl AsyncFnOnce(&Bucket)) -> Bucket {
    let bucket = local(async {
        let bucket = Bucket::new().await;
        damage(&bucket).await;
        bucket
    });
    bucket.assert_rejected(what, message, DAMAGED_SEQ - 1);
    bucket.assert_restores_at(what, DAMAGED_SEQ - 1);
    bucket
}

pub fn local<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(future)
}

#[test]
fn bytes_with_a_wrong_digest_are_never_restored() {
    check_damage(
        "a wrong digest",
        "differs from the one in entry 4",
        async |bucket| {
            bucket
                .edit(DAMAGED_SEQ, |header, _| {
                    header["parts"][0]["file_sha256"] = json!("ab".repeat(32))
                })
                .await;
        },
    );
    check_damage(
        "a flipped bit",
        "differs from the one in entry 4",
        async |bucket| {
            bucket.edit(DAMAGED_SEQ, |_, body| body[3] ^= 1).await;
        },
    );
    check_damage("half a gzip stream", "000000000004.gz", async |bucket| {
        let bytes = bucket.get(DAMAGED_SEQ).await;
        bucket
            .put(DAMAGED_SEQ, bytes[..bytes.len() / 2].to_vec())
            .await;
    });
    check_damage("an empty object", "000000000004.gz", async |bucket| {
        bucket.put(DAMAGED_SEQ, Vec::new()).await
    });
    check_damage(
        "another entry's bytes",
        "its header names entry 3",
        async |bucket| {
            let bytes = bucket.get(3).await;
            bucket.put(DAMAGED_SEQ, bytes).await;
        },
    );
}

slow!(a_path_outside_the_root_or_of_another_session_is_rejected);
fn a_path_outside_the_root_or_of_another_session_is_rejected() {
    for path in [
        "../../etc/cron.d/x",
        "/etc/cron.d/x",
        "projects/../../x",
        "projects//x.jsonl",
        "projects/-w/a\nb.jsonl",
        "",
    ] {
        check_damage(path, "000000000004.gz", async |bucket| {
            bucket
                .edit(DAMAGED_SEQ, |header, _| {
                    header["parts"][0]["path"] = json!(path)
                })
                .await;
        });
    }
    // Valid paths of files that are not part of this session.
    for path in [
        "settings.json",
        ".credentials.json",
        ".sessiond/ledger/team/claude-code/s9.json",
        "projects/-w/s2.jsonl",
    ] {
        let bucket = local(async {
            let bucket = Bucket::new().await;
            let text = b"{\"hooks\":{}}";
            bucket
                .edit(LAST, |header, body| {
                    let mut part = header["parts"][0].clone();
                    part["path"] = json!(path);
                    (part["kind"], part["start"], part["len"]) =
                        (json!("whole"), json!(0), json!(text.len()));
                    part["file_sha256"] = json!(sessiond::model::Digest::of(text).to_string());
                    header["parts"].as_array_mut().unwrap().push(part);
                    body.extend_from_slice(text);
                })
                .await;
            bucket
        });
        let root = bucket.root("planted");
        let before = (files_below(&root), paths_below(&root));
        let restored = bucket.run(&root, &["restore", SESSION]);
        let text = String::from_utf8_lossy(&restored.stderr);
        assert_eq!(restored.status.code(), Some(6), "{path}: {text}");
        assert!(
            text.contains(path) && text.contains("is not a file of session s1"),
            "{path}: {text}"
        );
        assert_eq!((files_below(&root), paths_below(&root)), before, "{path}");
        assert!(!root.join(".sessiond/ledger").exists(), "{path}");
        for args in [&["verify", SESSION][..], &["verify", "--deep", "--all"]] {
            let verified = bucket.run(&root, args);
            let text = String::from_utf8_lossy(&verified.stdout);
            assert_eq!(verified.status.code(), Some(6), "{path}: {text}");
            assert!(
                text.contains(&format!("{path} is not a file of the session")),
                "{path}: {text}"
            );
        }
    }
}

#[test]
fn an_oversized_object_is_rejected_before_it_is_decompressed() {
    let zeros = vec![0; 17 << 20];
    check_damage("more bytes than it says", "more", async |bucket| {
        bucket
            .edit(DAMAGED_SEQ, |_, body| body.extend(&zeros))
            .await
    });
    check_damage(
        "a length that no stream can have",
        "it declares",
        async |bucket| {
            bucket
                .edit(DAMAGED_SEQ, |header, _| {
                    header["parts"][0]["len"] = json!(1u64 << 40)
                })
                .await;
        },
    );
    check_damage("lengths that overflow", "it declares", async |bucket| {
        bucket
            .edit(DAMAGED_SEQ, |header, _| {
                header["parts"][0]["len"] = json!(u64::MAX);
                header["parts"][1]["len"] = json!(u64::MAX);
            })
            .await;
    });
    check_damage(
        "a header without an end",
        "its header is incomplete",
        async |bucket| {
            bucket.put(DAMAGED_SEQ, gzip(&vec![b'{'; 17 << 20])).await;
        },
    );
}

#[test]
fn a_gap_a_newer_format_and_a_part_past_the_end_are_distinguished() {
    check_damage("a missing entry", "entry 4 of session", async |bucket| {
        bucket
            .storage
            .store
            .delete(&bucket.key(DAMAGED_SEQ))
            .await
            .unwrap();
    });
    let newer = local(async {
        let bucket = Bucket::new().await;
        bucket
            .edit(DAMAGED_SEQ, |header, _| header["version"] = json!(2))
            .await;
        bucket
    });
    let root = newer.root("newer");
    let before = files_below(&root);
    let restored = newer.run(&root, &["restore", SESSION]);
    let text = String::from_utf8_lossy(&restored.stderr);
    assert_eq!(restored.status.code(), Some(12), "a newer format: {text}");
    assert!(
        text.contains("has format version 2") && text.contains("hint: upgrade sessiond"),
        "{text}"
    );
    assert_eq!(files_below(&root), before, "a newer format: files changed");
    check_damage(
        "a part beyond the end",
        "at offset 999, but the file has",
        async |bucket| {
            bucket
                .edit(DAMAGED_SEQ, |header, _| {
                    let parts = header["parts"].as_array_mut().unwrap();
                    parts
                        .iter_mut()
                        .find(|part| part["path"] == TRANSCRIPT)
                        .unwrap()["start"] = json!(999);
                })
                .await;
        },
    );
    check_damage(
        "a claim that carries bytes",
        "a claim with parts",
        async |bucket| {
            bucket
                .edit(DAMAGED_SEQ, |header, _| header["kind"] = json!("claim"))
                .await;
        },
    );
    // The next entry was written by a writer that had not read it.
    let bucket = local(async {
        let bucket = Bucket::new().await;
        bucket
            .edit(DAMAGED_SEQ, |header, _| {
                header["at"] = json!("2020-01-01T00:00:00Z")
            })
            .await;
        bucket
    });
    bucket.assert_rejected("a rewritten entry", "does not follow entry 4", DAMAGED_SEQ);
    bucket.assert_restores_at("a rewritten entry", DAMAGED_SEQ);
}

#[test]
fn a_damaged_snapshot_is_reported_and_its_entries_are_read_instead() {
    let bucket = local(async {
        let bucket = Bucket::new().await;
        let key = keys::snapshot(&bucket.storage.id(SESSION), DAMAGED_SEQ);
        bucket
            .storage
            .store
            .put(&key, Bytes::from_static(b"not a tar"))
            .await
            .unwrap();
        bucket
    });
    let root = bucket.home.home().join("whole");
    let restored = bucket.run(&root, &["restore", SESSION]);
    assert_eq!(
        restored.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&restored.stderr)
    );
    assert_eq!(&files_below(&root), bucket.files_at(LAST));
    let verified = bucket.run(&root, &["verify", SESSION]);
    let output = String::from_utf8_lossy(&verified.stdout).into_owned();
    assert_eq!(verified.status.code(), Some(6), "{output}");
    assert!(
        output.contains("000000000004.tar.gz") && output.contains("can be restored completely"),
        "{output}"
    );
    bucket.assert_restores_at("a snapshot of garbage", DAMAGED_SEQ - 1);
}

#[test]
fn unknown_keys_are_ignored() {
    let bucket = local(async {
        let bucket = Bucket::new().await;
        let root = keys::log_root(&bucket.storage.id(SESSION));
        for key in [
            "v1/x/y",
            "README",
            &format!("{root}log/notes.txt"),
            &format!("{root}log/7.gz"),
            &format!("{root}snap/x.tar.gz"),
        ] {
            bucket
                .storage
                .store
                .put(key, Bytes::from_static(b"nonsense"))
                .await
                .unwrap();
        }
        bucket
            .storage
            .store
            .put(
                "v1/team/claude-code/no session here/log/x",
                Bytes::from_static(b"x"),
            )
            .await
            .ok();
        bucket
    });
    let root = bucket.home.home().join("fine");
    let restored = bucket.run(&root, &["restore", SESSION]);
    assert_eq!(
        restored.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&restored.stderr)
    );
    assert_eq!(&files_below(&root), bucket.files_at(LAST));
    assert_eq!(
        bucket.run(&root, &["verify", "--all"]).status.code(),
        Some(0)
    );
    assert_eq!(bucket.run(&root, &["reindex"]).status.code(), Some(0));
}

#[test]
fn a_file_that_became_a_directory_does_not_stop_a_restore_halfway() {
    local(async {
        let storage = Storage::files();
        let mut writer = Writer::new(&storage);
        writer.append(TRANSCRIPT, "{}\n");
        writer.replace("projects/-w/s1/tool-results/a", "a file");
        writer.flush().await.unwrap();
        std::fs::remove_file(writer.root.join("projects/-w/s1/tool-results/a")).unwrap();
        writer.replace("projects/-w/s1/tool-results/a/b", "in a directory");
        writer.flush().await.unwrap();
        let mut new = Writer::new(&storage);
        new.take_over(SESSION).await.unwrap();
        assert_eq!(new.files(), writer.files());
    });
}

#[test]
fn a_salvaged_session_continues_and_later_entries_restore() {
    let cases: [(&str, Seq, bool); 4] = [
        ("damaged", DAMAGED_SEQ, false),
        ("missing", DAMAGED_SEQ, true),
        ("damaged at its end", LAST, false),
        ("damaged early", 2, false),
    ];
    for (what, seq, missing) in cases {
        local(async {
            let bucket = Bucket::new().await;
            let storage = &bucket.storage;
            storage.reindex().await;
            if missing {
                storage.store.delete(&bucket.key(seq)).await.unwrap();
            } else {
                bucket.put(seq, b"garbage".to_vec()).await;
            }
            // To the last undamaged entry, and to one before it.
            for rollback_to in [seq - 1, 2].into_iter().filter(|at| *at >= 2 && *at < seq) {
                let mut writer = Writer::new(storage);
                let options = Options {
                    point: ResolvedPoint {
                        at: LogPoint::Seq(rollback_to),
                        ..ResolvedPoint::default()
                    },
                    claim: true,
                    ..Options::default()
                };
                writer.restore(SESSION, options).await.unwrap();
                writer.append(TRANSCRIPT, "{\"after\":\"the damage\"}\n");
                writer.flush().await.unwrap();
                writer.append(TRANSCRIPT, "{\"and\":\"more\"}\n");
                writer.flush().await.unwrap();
                assert_eq!(
                    writer.write_target(SESSION),
                    "main",
                    "{what}, back to {rollback_to}"
                );
                assert_eq!(
                    storage.files_of(SESSION).await,
                    writer.files(),
                    "{what}, back to {rollback_to}"
                );
                writer.update_index().await;
                let rows = storage.rows().await;
                storage.reindex().await;
                crate::support::storage::assert_same_rows(&rows, &storage.rows().await, what);
                // A normal takeover works again, with and without a ledger.
                let mut next = Writer::new(storage);
                next.take_over(SESSION).await.unwrap();
                std::fs::remove_dir_all(next.root.join(".sessiond")).unwrap();
                next.restart();
                next.append(TRANSCRIPT, "{\"taken\":\"over\"}\n");
                next.flush().await.unwrap();
                assert_eq!(
                    next.write_target(SESSION),
                    "main",
                    "{what}, back to {rollback_to}"
                );
                assert_eq!(
                    storage.files_of(SESSION).await,
                    next.files(),
                    "{what}, back to {rollback_to}"
                );
            }
        });
    }
}

/// Runs a command with limits on its memory and time, and returns its output.
fn run_bounded(bucket: &Bucket, root: &Path, args: &[&str]) -> Output {
    let started = std::time::Instant::now();
    let inner = bucket.command(root, args);
    let mut command = bucket.home.command(Path::new("/bin/sh"));
    // The data limit counts memory that can be written, and not the address space that the
    // allocator reserves.
    command
        .args(["-c", "ulimit -d 262144 && exec \"$@\"", "sh"])
        .arg(inner.get_program())
        .args(inner.get_args());
    let output = command.output().unwrap();
    assert!(
        started.elapsed() < std::time::Duration::from_secs(60),
        "{args:?} took {:?}",
        started.elapsed()
    );
    assert!(
        output.status.code().is_some(),
        "{args:?} was killed: {:?}, {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

#[test]
fn a_number_that_no_writer_reaches_does_not_stop_a_reader() {
    let bucket = local(async {
        let bucket = Bucket::new().await;
        let root = keys::log_root(&bucket.storage.id(SESSION));
        for name in [
            "log/18446744073709551615.gz",
            "log/1000000000000.gz",
            "merge/000000000007-18446744073709551615.gz",
            "snap/18446744073709551615.tar.gz",
            "meta/18446744073709551615.json",
            "branch/w9/18446744073709551615.gz",
        ] {
            let key = format!("{root}{name}");
            bucket.storage.store.put(&key, Bytes::new()).await.unwrap();
        }
        bucket
    });
    let root = bucket.home.home().join("numbers");
    for args in [
        &["restore", SESSION][..],
        &["verify", "--all", "--deep"],
        &["reindex"],
        &["gc", "--dry-run"],
        &["label", SESSION, "team=infra"],
    ] {
        let output = run_bounded(&bucket, &root, args);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{args:?}: {text}");
    }
    assert_eq!(&files_below(&root), bucket.files_at(LAST));
}

#[test]
fn the_highest_number_stops_a_restore_before_it_writes_a_file() {
    let bucket = local(async {
        let bucket = Bucket::new().await;
        let key = keys::entry(&bucket.storage.id(SESSION), 999_999_999_999);
        let garbage = Bytes::from_static(b"garbage");
        bucket.storage.store.put(&key, garbage).await.unwrap();
        bucket
    });
    let root = bucket.root("full");
    let before = paths_below(&root);
    let restored = bucket.run(&root, &["restore", SESSION, "--salvage"]);
    let text = String::from_utf8_lossy(&restored.stderr);
    assert_eq!(restored.status.code(), Some(6), "{text}");
    assert!(
        text.contains("cannot be continued") && text.contains("log/999999999999.gz"),
        "{text}"
    );
    assert_eq!(paths_below(&root), before);
}

#[test]
fn numbers_in_a_header_are_bounded() {
    type Edit = fn(&mut Value);
    let edits: [(&str, Edit); 7] = [
        ("offset", |header| {
            header["parts"][0]["start"] = json!(u64::MAX)
        }),
        ("seq of a part", |header| {
            header["parts"][0]["seq"] = json!(u64::MAX)
        }),
        ("rollback", |header| header["rollback_to"] = json!(u64::MAX)),
        ("moves", |header| {
            let moved = json!({"from": "a", "to": "b"});
            header["moves"] = json!(vec![moved; 20_001]);
        }),
        ("turn", |header| {
            header["checkpoints"] = json!([{"number": 1, "turn": u64::MAX,
                "at": "2026-05-01T12:00:00Z", "transcript_lengths": {}}]);
        }),
        ("length of a transcript", |header| {
            header["checkpoints"] = json!([{"number": 1, "turn": 1,
                "at": "2026-05-01T12:00:00Z", "transcript_lengths": {TRANSCRIPT: u64::MAX}}]);
        }),
        ("origin", |header| {
            header["fork"] = json!({"session": "s2", "seq": 1, "turn": 1, "files": []});
        }),
    ];
    for (what, edit) in edits {
        check_damage(what, "000000000004.gz", async |bucket| {
            bucket.edit(DAMAGED_SEQ, |header, _| edit(header)).await;
        });
    }
}

/// Stores a session that consists of the first entry of a fork. Its transcript is that of `s1`.
pub async fn put_fork(bucket: &Bucket, session: &str, origin: &str, seq: Seq) {
    let files = bucket.files_at(LAST);
    let transcript = &files[TRANSCRIPT];
    let header = json!({
        "version": 1, "kind": "claim", "namespace": "team", "agent": "claude-code",
        "session": session, "seq": 1, "writer": "w1", "at": "2026-05-01T12:00:00Z",
        "prev_digest": null,
        "fork": {
            "session": origin, "seq": seq, "turn": 0,
            "transcript_lengths": {TRANSCRIPT.replace(SESSION, origin): transcript.len()},
            "files": [{
                "path": TRANSCRIPT.replace(SESSION, session), "kind": "append", "start": 0,
                "len": transcript.len(), "mode": 384, "mtime_ns": 0,
                "file_sha256": sessiond::model::Digest::of(transcript).to_string(),
            }],
        },
    });
    let key = format!("v1/team/claude-code/{session}/log/000000000001.gz");
    let bytes = Bytes::from(gzip(format!("{header}\n").as_bytes()));
    bucket.storage.store.put(&key, bytes).await.unwrap();
}

#[test]
fn forks_of_forks_are_read_one_after_the_other() {
    let bucket = local(async {
        let bucket = Bucket::new().await;
        // Without the side file, every fork is the transcript only.
        put_fork(&bucket, "f1", SESSION, LAST).await;
        for depth in 2..=400 {
            put_fork(&bucket, &format!("f{depth}"), &format!("f{}", depth - 1), 1).await;
        }
        put_fork(&bucket, "itself", "itself", 1).await;
        put_fork(&bucket, "ping", "pong", 1).await;
        put_fork(&bucket, "pong", "ping", 1).await;
        bucket
    });
    for (session, message) in [
        ("f101", "session f101 has more than 100 origins"),
        ("f400", "session f400 has more than 100 origins"),
        ("itself", "session itself is a fork of itself"),
        ("ping", "session ping is a fork of itself"),
    ] {
        let root = bucket.home.home().join(session);
        for command in ["restore", "show"] {
            let output = run_bounded(&bucket, &root, &[command, session]);
            let text = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(6), "{command} {session}: {text}");
            assert!(text.contains(message), "{command} {session}: {text}");
        }
    }
    let root = bucket.home.home().join("deep");
    let restored = run_bounded(&bucket, &root, &["restore", "f100"]);
    let text = String::from_utf8_lossy(&restored.stderr);
    assert_eq!(restored.status.code(), Some(0), "{text}");
    assert_eq!(
        files_below(&root)[&TRANSCRIPT.replace(SESSION, "f100")],
        bucket.files_at(LAST)[TRANSCRIPT]
    );
    let forked = run_bounded(&bucket, &root, &["fork", "f100", "--id", "one-more"]);
    let text = String::from_utf8_lossy(&forked.stderr);
    assert_eq!(forked.status.code(), Some(7), "{text}");
    assert!(
        text.contains("100 times in a row, which is the maximum")
            && text.contains("hint: run \"sessiond export f100 -o f100.tar.gz\""),
        "{text}"
    );
}

#[test]
fn an_object_of_another_session_agent_or_namespace_is_rejected() {
    for (field, value) in [
        ("namespace", "other"),
        ("agent", "codex"),
        ("session", "s2"),
    ] {
        check_damage(field, "it belongs to session", async |bucket| {
            bucket
                .edit(DAMAGED_SEQ, |header, _| header[field] = json!(value))
                .await;
        });
    }
    // Metadata of another tenant.
    let bucket = local(async {
        let bucket = Bucket::new().await;
        let text = br#"{"version":1,"namespace":"other","agent":"claude-code","session":"s1","ttl":{"seconds":1}}"#;
        let key = keys::metadata(&bucket.storage.id(SESSION), 1);
        let body = Bytes::from_static(text);
        bucket.storage.store.put(&key, body).await.unwrap();
        bucket
    });
    let root = bucket.home.home().join("metadata");
    let output = bucket.run(&root, &["label", SESSION, "team=infra"]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(6), "{text}");
    assert!(text.contains("in namespace other"), "{text}");
}

#[test]
fn an_object_that_is_larger_than_any_writer_makes_it_is_not_read() {
    let bucket = local(Bucket::new());
    let path = |key: &str| bucket.home.path().join("store").join(key);
    let sparse = |key: &str, len: u64| {
        let path = path(key);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let file = std::fs::OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(path)
            .unwrap();
        file.set_len(len).unwrap();
    };
    let id = bucket.storage.id(SESSION);
    // A snapshot is not needed; its entries are read instead.
    sparse(&keys::snapshot(&id, 3), 3 << 30);
    let root = bucket.home.home().join("large");
    let restored = run_bounded(&bucket, &root, &["restore", SESSION]);
    let text = String::from_utf8_lossy(&restored.stderr);
    assert_eq!(restored.status.code(), Some(0), "{text}");
    sparse(&bucket.key(DAMAGED_SEQ), 3 << 30);
    sparse(&keys::metadata(&id, 1), 2 << 20);
    bucket.assert_rejected("3 GiB", "the object has more than", DAMAGED_SEQ - 1);
    for args in [
        &["reindex"][..],
        &["gc", "--dry-run"],
        &["verify", "--all", "--deep"],
    ] {
        run_bounded(&bucket, &root, args);
    }
}

/// Stores a session of a claim and one delta with these files.
async fn put_session(bucket: &Bucket, agent: &str, session: &str, files: &[(&str, &str)]) {
    let digest = |bytes: &[u8]| sessiond::model::Digest::of(bytes).to_string();
    let header = |kind: &str, seq: Seq| {
        json!({
            "version": 1, "kind": kind, "namespace": "team", "agent": agent, "session": session,
            "seq": seq, "writer": "w1", "at": "2026-05-01T12:00:00Z", "prev_digest": null,
        })
    };
    let claim = gzip(format!("{}\n", header("claim", 1)).as_bytes());
    let mut delta = header("delta", 2);
    delta["prev_digest"] = json!(digest(&claim));
    let parts = files.iter().map(|(path, text)| {
        json!({
            "path": path, "kind": "append", "start": 0, "len": text.len(), "mode": 384,
            "mtime_ns": 0, "file_sha256": digest(text.as_bytes()),
        })
    });
    delta["parts"] = parts.collect();
    let body: String = files.iter().map(|(_, text)| *text).collect();
    let delta = gzip(format!("{delta}\n{body}").as_bytes());
    for (seq, bytes) in [(1, claim), (2, delta)] {
        let key = format!("v1/team/{agent}/{session}/log/{seq:012}.gz");
        let body = Bytes::from(bytes);
        bucket.storage.store.put(&key, body).await.unwrap();
    }
}

#[test]
fn a_log_brings_no_file_of_another_session() {
    const A: &str = "01a1e49d-7687-7f82-b27f-241a8389801d";
    const B: &str = "01a1e49d-4e2a-73f0-97e6-fda286973bd3";
    let rollout = |id: &str| format!("sessions/2026/11/16/rollout-2026-11-16T13-48-07-{id}.jsonl");
    let meta = |session: &str| format!("{{\"payload\":{{\"session_id\":\"{session}\"}}}}\n");
    let chat = |id: &str| format!("tmp/app/chats/session-2026-11-16T13-48-{}.jsonl", &id[..8]);
    let line = |session: &str| format!("{{\"sessionId\":\"{session}\"}}\n");
    let plan = "plans/wild-otter.md".to_owned();
    let own = format!("projects/-w/{A}.jsonl");
    // The own files of a session, and a file that is not its own.
    let cases = [
        ("codex", rollout(A), meta(A), rollout(B), meta(B)),
        ("codex", rollout(A), meta(A), rollout(B), "{}\n".to_owned()),
        (
            "gemini",
            chat(A),
            line(A),
            "tmp/x/chats/session-b.jsonl".to_owned(),
            line(B),
        ),
        (
            "gemini",
            chat(A),
            line(A),
            "tmp/other/.project_root".to_owned(),
            "/w".to_owned(),
        ),
        (
            "claude-code",
            own.clone(),
            line(A),
            plan.clone(),
            "a plan of B".to_owned(),
        ),
        (
            "claude-code",
            own,
            line(A),
            "settings.json".to_owned(),
            "{}".to_owned(),
        ),
    ];
    for (agent, own, text, foreign, content) in cases {
        let bucket = local(async {
            let bucket = Bucket::new().await;
            let files = [(own.as_str(), text.as_str()), (&foreign, &content)];
            put_session(&bucket, agent, A, &files).await;
            bucket
        });
        let root = bucket.home.home().join("agent");
        std::fs::create_dir(&root).unwrap();
        let restored = bucket.run(&root, &["restore", A, "--agent", agent]);
        let text = String::from_utf8_lossy(&restored.stderr);
        // A file that belongs to a session only if its transcript names it is left out: the session
        // may have named it once.
        if foreign == plan || foreign.ends_with(".project_root") {
            assert_eq!(restored.status.code(), Some(0), "{agent} {foreign}: {text}");
            assert!(!root.join(&foreign).exists(), "{agent} {foreign}");
        } else {
            assert_eq!(restored.status.code(), Some(6), "{agent} {foreign}: {text}");
            assert!(
                text.contains(&format!("{foreign} is not a file of session {A}")),
                "{agent}: {text}"
            );
            assert!(paths_below(&root).is_empty(), "{agent} {foreign}");
        }
        // A copy leaves the file out.
        let copy = bucket.home.home().join("copy");
        let to = copy.to_str().unwrap();
        let pulled = bucket.run(&root, &["pull", A, "--agent", agent, "--to", to]);
        let text = String::from_utf8_lossy(&pulled.stderr);
        assert_eq!(pulled.status.code(), Some(0), "{agent} {foreign}: {text}");
        assert!(
            text.contains("the file is left out"),
            "{agent} {foreign}: {text}"
        );
        let names: Vec<String> = files_below(&copy).into_keys().collect();
        assert_eq!(names, [own], "{agent}");
    }
}

#[test]
fn a_copy_is_not_written_into_or_above_the_agents_directory() {
    let bucket = local(Bucket::new());
    let root = bucket.home.home().join("deep/agent");
    std::fs::create_dir_all(&root).unwrap();
    let link = bucket.home.home().join("link");
    std::os::unix::fs::symlink(bucket.home.home().join("deep"), &link).unwrap();
    for (to, relation) in [
        (root.clone(), "is in"),
        (root.join("new/below"), "is in"),
        (bucket.home.home().join("deep"), "contains"),
        (bucket.home.home(), "contains"),
        (link.clone(), "contains"),
        (link.join("agent/new"), "is in"),
    ] {
        let to = to.to_str().unwrap();
        let pulled = bucket.run(&root, &["pull", SESSION, "--to", to]);
        let text = String::from_utf8_lossy(&pulled.stderr);
        assert_eq!(pulled.status.code(), Some(2), "{to}: {text}");
        assert!(
            text.contains(&format!("it {relation} the agent's directory")),
            "{to}: {text}"
        );
    }
    assert!(paths_below(&root).is_empty());
}

#[test]
fn text_from_a_bucket_cannot_control_the_terminal() {
    const HOSTILE: &str = "title\u{202e}gpj.exe\u{9b}31m\u{2066}\u{85}";
    let bucket = local(async {
        let bucket = Bucket::new().await;
        let line = json!({
            "type": "user", "sessionId": "s7", "uuid": "u1", "timestamp": "2026-05-01T12:00:00Z",
            "cwd": HOSTILE, "message": {"role": "user", "content": HOSTILE},
        });
        let text = format!("{line}\n");
        put_session(
            &bucket,
            "claude-code",
            "s7",
            &[("projects/-w/s7.jsonl", &text)],
        )
        .await;
        let pins = keys::pins_dir(&bucket.storage.id("s7"));
        let key = format!("{pins}checkpoint.a\u{1b}[8mb.json");
        let empty = Bytes::from_static(b"{}");
        bucket.storage.store.put(&key, empty).await.unwrap();
        bucket
    });
    let root = bucket.home.home().join("agent");
    assert_eq!(bucket.run(&root, &["reindex"]).status.code(), Some(0));
    for args in [
        &["ls"][..],
        &["checkpoints", "s7"],
        &["gc", "--dry-run"],
        &["ls", "--json"],
        &["show", "s7"],
        &["show", "s7", "--json"],
        &["messages", "s7"],
        &["messages", "s7", "--json"],
        &["tail", "s7"],
        &["tail", "s7", "--json"],
        &["inspect", "s7"],
        &["restore", HOSTILE],
    ] {
        let output = bucket.run(&root, args);
        for bytes in [&output.stdout, &output.stderr] {
            let text = std::str::from_utf8(bytes).unwrap();
            let found = text.chars().find(|letter| {
                sessiond::sys::terminal::is_unsafe(*letter) && !"\n\t".contains(*letter)
            });
            assert_eq!(found, None, "{args:?}: {text:?}");
        }
    }
}
