//! Client-side encryption: an encrypted session can do everything a plain one can, no plaintext
//! reaches the bucket or the index, and a missing or wrong key is reported.

use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sessiond::log::fence::FencingPolicy;
use sessiond::log::{Fencing, Logs};
use sessiond::store::encrypted::EncryptedStore;
use sessiond::store::encrypted::keyring::{KeySettings, Keyring};
use sessiond::store::encrypted::policy::{EncryptionPolicy, PlaintextReads};
use sessiond::store::file::FileStore;
use sessiond::sys::{SystemClock, SystemRng};
use sqlx::{AssertSqlSafe, Connection, PgConnection, Row};

use crate::agents::{contains_text, objects};
use crate::support::backend::{Backend, eventually, transcript};
use crate::support::files::{append, files_below};
use crate::support::needs_servers;
use crate::support::proxy::{Mode, TcpProxy};
use crate::support::servers::{postgres, s3};
use crate::support::{TempHome, block_on};

/// A word that occurs only in the conversation.
const WORD: &str = "quetzalmarmalade";

/// A conversation with the word in every kind of content: a prompt, a title, a tool call, its
/// result, a response, a pending tool call.
pub fn conversation(turn: u32) -> String {
    let line = |number: u32, role: &str, rest: String| {
        format!(
            "{{\"type\":\"{role}\",\"uuid\":\"u{turn}-{number}\",\"cwd\":\"/work/app\",\"timestamp\":\"2026-05-01T10:{turn:02}:{number:02}.000Z\",{rest}}}\n"
        )
    };
    let response = |id: u32, content: String, stop: &str| {
        format!(
            "\"message\":{{\"id\":\"m{turn}-{id}\",\"role\":\"assistant\",\"model\":\"opus\",\"content\":[{content}],\"stop_reason\":\"{stop}\"}}"
        )
    };
    let call = |id: u32| {
        format!(
            "{{\"type\":\"tool_use\",\"id\":\"t{turn}-{id}\",\"name\":\"Bash\",\"input\":{{\"command\":\"echo {WORD}\"}}}}"
        )
    };
    [
        line(1, "user", format!("\"message\":{{\"role\":\"user\",\"content\":\"please {WORD} {turn}\"}}")),
        line(2, "assistant", response(1, call(1), "tool_use")),
        line(3, "user", format!("\"message\":{{\"role\":\"user\",\"content\":[{{\"type\":\"tool_result\",\"tool_use_id\":\"t{turn}-1\",\"content\":\"{WORD} came out\"}}]}}")),
        line(4, "assistant", response(2, format!("{{\"type\":\"text\",\"text\":\"done {WORD}\"}},{}", call(2)), "end_turn")),
        format!("{{\"type\":\"summary\",\"summary\":\"about {WORD}\",\"leafUuid\":\"u{turn}-4\"}}\n"),
    ]
    .concat()
}

/// An identity file and its recipient.
pub struct Key {
    pub file: PathBuf,
    pub recipient: String,
}

pub fn keygen(backend: &Backend, name: &str) -> Key {
    let (home, file) = (TempHome::new(), backend.path().join(name));
    let ran = backend
        .run(&home, &["keygen", "-o", file.to_str().unwrap()])
        .ok();
    let recipient = ran.out().trim().to_owned();
    assert!(recipient.starts_with("age1"), "{recipient}");
    assert_eq!(
        std::fs::metadata(&file).unwrap().permissions().mode() & 0o777,
        0o600
    );
    Key { file, recipient }
}

impl Backend {
    pub fn with(&mut self, encrypt_to: Option<&Key>, identities: &[&Key]) {
        self.unset("SESSIOND_ENCRYPT_TO");
        self.unset("SESSIOND_IDENTITY");
        if let Some(key) = encrypt_to {
            self.set("SESSIOND_ENCRYPT_TO", key.recipient.clone());
        }
        if !identities.is_empty() {
            let files: Vec<&str> = identities
                .iter()
                .map(|key| key.file.to_str().unwrap())
                .collect();
            self.set("SESSIOND_IDENTITY", files.join(","));
        }
    }
}

/// Streams until everything is durable, then kills the daemon.
pub fn stream(backend: &Backend, home: &TempHome, lines: &str) {
    let mut daemon = backend.daemon(home, &[]);
    append(&transcript(home, "s1"), lines);
    backend.run(home, &["flush", "--wait"]).ok();
    daemon.kill();
}

/// Checks that another machine restores the same files.
#[track_caller]
pub fn assert_restored(backend: &Backend, home: &TempHome) {
    let other = TempHome::new();
    backend.run(&other, &["restore", "s1"]).ok();
    assert_eq!(
        files_below(&other.home().join(".claude")),
        files_below(&home.home().join(".claude"))
    );
}

/// The same for `pull`, which does not claim the session.
#[track_caller]
pub fn assert_pulled(backend: &Backend, home: &TempHome) {
    let other = TempHome::new();
    backend.run(&other, &["pull", "s1", "--to", "copy"]).ok();
    assert_eq!(
        files_below(&other.home().join("copy")),
        files_below(&home.home().join(".claude"))
    );
}

pub fn bucket(backend: &Backend) -> PathBuf {
    backend.path().join("bucket")
}

/// The entries of the one session in a bucket that is a directory.
pub fn entries(backend: &Backend) -> Vec<PathBuf> {
    let directory = bucket(backend).join("v1/default/claude-code/s1/log");
    let mut entries: Vec<PathBuf> = std::fs::read_dir(directory)
        .unwrap()
        .map(|item| item.unwrap().path())
        .collect();
    entries.sort();
    entries
}

pub fn is_encrypted(path: &Path) -> bool {
    std::fs::read(path)
        .unwrap()
        .starts_with(b"age-encryption.org/v1")
}

/// All rows of all tables.
fn rows(database: &str) -> String {
    block_on(async {
        let mut connection = PgConnection::connect(database).await.unwrap();
        let tables = sqlx::query(
            "SELECT table_name::text FROM information_schema.tables WHERE table_schema = 'public'",
        );
        let mut all = String::new();
        for table in tables.fetch_all(&mut connection).await.unwrap() {
            let sql = format!(
                "SELECT COALESCE(string_agg(t::text, E'\\n'), '') FROM {} AS t",
                table.get::<String, _>(0)
            );
            all += &sqlx::query(AssertSqlSafe(sql))
                .fetch_one(&mut connection)
                .await
                .unwrap()
                .get::<String, _>(0);
        }
        all
    })
}

/// The location of everything a backend stores: objects, which are decompressed, and the index.
enum StorageLocation {
    Directory,
    Servers { bucket: String, database: String },
}

impl StorageLocation {
    fn objects(&self, backend: &Backend) -> Vec<Vec<u8>> {
        let StorageLocation::Servers { bucket: name, .. } = self else {
            return objects(&bucket(backend));
        };
        let server = s3().unwrap();
        let client = server.client(&server.endpoint);
        block_on(async {
            let mut all = Vec::new();
            for object in client
                .list_objects_v2()
                .bucket(name)
                .send()
                .await
                .unwrap()
                .contents()
            {
                let got = client
                    .get_object()
                    .bucket(name)
                    .key(object.key().unwrap())
                    .send()
                    .await
                    .unwrap();
                let bytes = got.body.collect().await.unwrap().into_bytes().to_vec();
                let mut inflated = Vec::new();
                let is_gzip = flate2::read::MultiGzDecoder::new(bytes.as_slice())
                    .read_to_end(&mut inflated)
                    .is_ok();
                all.push(if is_gzip { inflated } else { bytes });
            }
            all
        })
    }

    fn index(&self, backend: &Backend) -> Vec<u8> {
        match self {
            StorageLocation::Servers { database, .. } => rows(database).into_bytes(),
            StorageLocation::Directory => {
                let files = std::fs::read_dir(backend.path())
                    .unwrap()
                    .map(|item| item.unwrap().path());
                let database = files.filter(|path| {
                    path.file_name()
                        .unwrap()
                        .to_str()
                        .unwrap()
                        .starts_with("index.db")
                });
                database
                    .flat_map(|path| std::fs::read(path).unwrap())
                    .collect()
            }
        }
    }
}

fn all_backends() -> Vec<(Backend, StorageLocation)> {
    let mut all = vec![(Backend::file(), StorageLocation::Directory)];
    if let (Some(server), Some(database)) = (s3(), postgres()) {
        let (bucket, database) = (server.fresh_bucket(), database.fresh_database());
        all.push((
            Backend::on(&server.endpoint, &bucket, &database),
            StorageLocation::Servers { bucket, database },
        ));
    }
    all
}

needs_servers!(an_encrypted_session_leaves_no_plaintext_in_store_or_index);
fn an_encrypted_session_leaves_no_plaintext_in_store_or_index() {
    for (mut backend, location) in all_backends() {
        let key = keygen(&backend, "key.txt");
        let home = TempHome::new();
        append(
            &home
                .home()
                .join(".claude/projects/-work-app/s1/tool-results/r.txt"),
            WORD,
        );
        backend.with(Some(&key), &[]);
        stream(&backend, &home, &conversation(1));

        backend.with(None, &[&key]);
        assert_restored(&backend, &home);
        let other = TempHome::new();
        backend.run(&other, &["restore", "s1"]).ok();
        stream(&backend, &other, &conversation(2));
        assert_restored(&backend, &other);
        assert!(
            backend
                .run(&home, &["show", "s1"])
                .ok()
                .out()
                .contains(WORD),
            "who has the key can look"
        );
        backend
            .run(&home, &["checkpoint", "s1", "--name", "green"])
            .ok();
        backend.run(&home, &["checkpoints", "s1"]).ok();
        backend
            .run(&home, &["fork", "s1", "--at", "ckpt:green"])
            .ok();
        backend.run(&home, &["verify", "--all", "--deep"]).ok();
        backend.run(&home, &["label", "s1", "team=core"]).ok();
        for step in ["streamed", "indexed anew"] {
            if step == "indexed anew" {
                backend.run(&home, &["reindex"]).ok();
            }
            let listed = backend.run(&home, &["ls", "--json"]).ok().json();
            assert_eq!(listed["sessions"].as_array().unwrap().len(), 2, "{listed}");
            assert!(!location.objects(&backend).is_empty());
            assert!(
                !location
                    .objects(&backend)
                    .iter()
                    .any(|object| contains_text(object, WORD)),
                "{} {step}: a word is in the bucket",
                backend.name
            );
            let index = location.index(&backend);
            assert!(
                contains_text(&index, "/work/app") && contains_text(&index, "team"),
                "the index is read"
            );
            assert!(
                !contains_text(&index, WORD),
                "{} {step}: a word is in the index",
                backend.name
            );
        }
    }
}

needs_servers!(the_plaintext_check_finds_the_words_without_encryption);
fn the_plaintext_check_finds_the_words_without_encryption() {
    for (backend, location) in all_backends() {
        let home = TempHome::new();
        stream(&backend, &home, &conversation(1));
        backend.run(&home, &["reindex"]).ok();
        assert!(
            location
                .objects(&backend)
                .iter()
                .any(|object| contains_text(object, WORD)),
            "{}",
            backend.name
        );
        assert!(
            contains_text(&location.index(&backend), WORD),
            "{}",
            backend.name
        );
    }
}

#[test]
fn a_missing_or_wrong_key_is_reported_and_changes_nothing() {
    let mut backend = Backend::file();
    let (key, wrong) = (keygen(&backend, "key.txt"), keygen(&backend, "wrong.txt"));
    let home = TempHome::new();
    backend.with(Some(&key), &[]);
    stream(&backend, &home, &conversation(1));
    stream(&backend, &home, &conversation(2));
    let before = files_below(&bucket(&backend));
    for (identities, why) in [
        (vec![], "no identity is configured"),
        (
            vec![&wrong],
            "the configured identity is not one of its recipients",
        ),
    ] {
        backend.with(None, &identities);
        let other = TempHome::new();
        for command in [
            vec!["restore", "s1"],
            vec!["pull", "s1", "--to", "copy"],
            vec!["show", "s1"],
            vec!["checkpoints", "s1"],
            vec!["export", "s1", "-o", "s1.tar.gz"],
            vec!["rm", "s1", "--yes"],
        ] {
            backend.run(&other, &command).fails(11, why, "--identity");
        }
        assert!(
            !other.home().join(".claude/projects").exists(),
            "nothing was put in place"
        );
        let verdict = backend.run(&other, &["verify"]).fails(
            11,
            "no configured identity can decrypt 1 of 1 log",
            "--identity",
        );
        let entries = entries(&backend).len();
        assert!(
            verdict.out().contains(&format!(
                "{entries} of {entries} objects unreadable; entries 1 to {entries} exist"
            )),
            "{}",
            verdict.out()
        );
        let verdict = backend.run(&other, &["verify", "--deep", "--json"]).json();
        assert_eq!(
            (
                verdict[0]["unreadable"].as_u64(),
                verdict[0]["missing"].as_array().map(Vec::len)
            ),
            (Some(entries as u64), Some(0)),
            "{verdict}"
        );
        // Whatever its age: `gc` deletes nothing that it cannot read.
        backend
            .run(&other, &["gc", "--ttl", "0s", "--history", "0s"])
            .fails(11, "cannot clean up 1 of 1 log", "--identity");
        backend
            .run(&other, &["run", "--session", "s1", "--", "true"])
            .fails(8, why, "--identity");
    }
    assert_eq!(files_below(&bucket(&backend)), before);
    std::fs::remove_file(&entries(&backend)[1]).unwrap();
    backend.with(None, &[]);
    let verdict = backend
        .run(&TempHome::new(), &["verify"])
        .fails(11, "can decrypt", "--identity");
    assert!(
        verdict.out().contains("missing or were skipped: 2"),
        "{}",
        verdict.out()
    );
    // With both keys, the matching one is found.
    backend.with(None, &[&wrong, &key]);
    backend
        .run(&TempHome::new(), &["verify"])
        .fails(6, "damaged", "");
}

#[test]
fn a_writer_without_an_identity_continues_after_a_crash() {
    let mut backend = Backend::file();
    let key = keygen(&backend, "key.txt");
    let home = TempHome::new();
    backend.with(Some(&key), &[]);
    for turn in 1..=4 {
        // Killed each time: the next process recognizes its own entries.
        stream(&backend, &home, &conversation(turn));
    }
    let own = home.home().join(".claude/.sessiond/writer.key");
    assert_eq!(
        std::fs::metadata(&own).unwrap().permissions().mode() & 0o777,
        0o600
    );
    assert!(
        !bucket(&backend)
            .join("v1/default/claude-code/s1/branch")
            .exists()
    );
    backend.with(None, &[&key]);
    assert_restored(&backend, &home);

    // Without its key and its ledger it cannot know the owner of the session, and no byte is lost.
    backend.with(Some(&key), &[]);
    std::fs::remove_dir_all(home.home().join(".claude/.sessiond")).unwrap();
    let mut daemon = backend.daemon(&home, &[]);
    append(&transcript(&home, "s1"), conversation(5));
    backend.run(&home, &["flush", "--wait"]).fails(
        4,
        "the latest bytes are durable on branch",
        "--branch",
    );
    daemon.kill();
    backend.with(None, &[&key]);
    let row = backend.run(&home, &["inspect", "s1", "--json"]).ok().out();
    let branch = std::fs::read_dir(bucket(&backend).join("v1/default/claude-code/s1/branch"))
        .unwrap()
        .next()
        .unwrap()
        .unwrap();
    let writer = branch.file_name().into_string().unwrap();
    let copy = TempHome::new();
    backend
        .run(&copy, &["pull", "s1", "--branch", &writer, "--to", "copy"])
        .ok();
    assert_eq!(
        files_below(&copy.home().join("copy")),
        files_below(&home.home().join(".claude")),
        "{row}"
    );
}

needs_servers!(a_writer_without_an_identity_recognizes_its_entry_after_a_lost_reply);
fn a_writer_without_an_identity_recognizes_its_entry_after_a_lost_reply() {
    let (Some(server), Some(database)) = (s3(), postgres()) else {
        return;
    };
    let proxy = TcpProxy::start(server.addr());
    let (bucket, database) = (server.fresh_bucket(), database.fresh_database());
    for fencing in ["store", "database"] {
        let mut backend = Backend::on(&format!("http://{}", proxy.addr()), &bucket, &database);
        backend.set("SESSIOND_NAMESPACE", fencing);
        backend.set("SESSIOND_FENCING", fencing);
        backend.set("SESSIOND_REQUEST_TIMEOUT", "2s");
        let key = keygen(&backend, "key.txt");
        backend.with(Some(&key), &[]);
        let home = TempHome::new();
        stream(&backend, &home, &conversation(1));
        let status = |backend: &Backend| {
            backend.run(&home, &["status", "--json"]).ok().json()["sessions"][0].clone()
        };
        for (round, crash) in [(2, false), (3, true), (4, false)] {
            let mut daemon = backend.daemon(&home, &[]);
            append(&transcript(&home, "s1"), conversation(10 * round));
            backend.run(&home, &["flush", "--wait"]).ok();
            proxy.set(Mode::DropResponses);
            append(&transcript(&home, "s1"), conversation(10 * round + 1));
            eventually("an attempt has failed", || {
                status(&backend)["failed_attempts"].as_u64() >= Some(1)
            });
            if crash {
                daemon.kill();
                daemon = backend.daemon(&home, &[]);
            }
            proxy.set(Mode::Pass);
            backend
                .run(&home, &["flush", "--wait", "--timeout", "40s"])
                .ok();
            assert_eq!(
                status(&backend)["write_target"].as_str(),
                Some("main"),
                "{fencing} {round}"
            );
            // A late file event makes the log unflushed again for a moment.
            eventually("nothing lags", || status(&backend)["lag_bytes"] == 0);
            daemon.kill();
        }
        backend.with(None, &[&key]);
        assert_restored(&backend, &home);
        backend.run(&home, &["verify", "--deep"]).ok();
    }
}

#[test]
fn keys_rotate_as_old_entries_are_merged() {
    let mut backend = Backend::file();
    let (old, new) = (keygen(&backend, "old.txt"), keygen(&backend, "new.txt"));
    let home = TempHome::new();
    backend.with(None, &[&old]);
    stream(&backend, &home, &conversation(1));
    stream(&backend, &home, &conversation(2));
    backend.with(Some(&new), &[&old, &new]);
    stream(&backend, &home, &conversation(3));
    assert_restored(&backend, &home);
    for key in [&old, &new] {
        backend.with(None, &[key]);
        backend.run(&TempHome::new(), &["restore", "s1"]).fails(
            11,
            "identity is not one of its recipients",
            "--identity",
        );
    }
    // The merge of the old entries is encrypted only to the new recipients. Then the old key is no
    // longer needed.
    let keyring = Keyring::load(&KeySettings {
        recipients: vec![new.recipient.clone()],
        identity_files: vec![old.file.clone(), new.file.clone()],
    })
    .unwrap();
    let store = Arc::new(EncryptedStore::new(
        Arc::new(FileStore::open(bucket(&backend)).unwrap()),
        EncryptionPolicy::new(keyring, PlaintextReads::Accept),
    ));
    let index = sessiond::index::sql::SqlIndex::open(&format!(
        "sqlite://{}",
        backend.path().join("index.db").display()
    ))
    .unwrap();
    let logs = Logs {
        store,
        fence: Arc::new(Fencing::new(FencingPolicy::Store, Arc::new(index), false)),
        namespace: "default".parse().unwrap(),
        agent: "claude-code".parse().unwrap(),
        clock: Arc::new(SystemClock),
        rng: Arc::new(SystemRng),
        recent: Arc::default(),
        progress: Arc::default(),
    };
    let made = block_on(async {
        sessiond::upkeep::compact::merge_range(
            &logs,
            &logs.id("s1".parse().unwrap()),
            1,
            entries(&backend).len() as u64,
        )
        .await
        .unwrap()
    });
    assert_eq!(made.segments, 1);
    backend.with(None, &[&new]);
    assert_restored(&backend, &home);
    backend.with(None, &[&old]);
    backend.run(&TempHome::new(), &["restore", "s1"]).fails(
        11,
        "identity is not one of its recipients",
        "--identity",
    );
    // The history needs the old key until it is collected.
    backend.with(None, &[&new]);
    backend
        .run(&TempHome::new(), &["restore", "s1", "--at", "seq:2"])
        .fails(11, "log/000000000001.gz", "--identity");
    backend.with(None, &[&old, &new]);
    backend
        .run(&TempHome::new(), &["restore", "s1", "--at", "seq:2"])
        .ok();
}

#[test]
fn a_plain_session_becomes_encrypted_and_never_plain_again() {
    let mut backend = Backend::file();
    let key = keygen(&backend, "key.txt");
    let home = TempHome::new();
    stream(&backend, &home, &conversation(1));
    let plain = entries(&backend).len();
    backend.set("SESSIOND_PLAINTEXT", "before-encrypted");
    backend.with(None, &[&key]);
    stream(&backend, &home, &conversation(2));
    let all = entries(&backend);
    assert!(all.len() > plain);
    for (at, entry) in all.iter().enumerate() {
        assert_eq!(is_encrypted(entry), at >= plain, "{}", entry.display());
    }
    assert_pulled(&backend, &home);
    backend.with(None, &[]);
    backend
        .run(&TempHome::new(), &["pull", "s1", "--to", "copy"])
        .fails(11, "no identity is configured", "--identity");
    let before = files_below(&bucket(&backend));
    let mut daemon = backend.daemon(&home, &[]);
    append(&transcript(&home, "s1"), conversation(3));
    backend.run(&home, &["flush", "--wait"]).fails(
        11,
        "the session is encrypted, but no recipient is configured",
        "--encrypt-to",
    );
    assert!(
        backend.run(&home, &["status", "--json"]).ok().json()["sessions"][0]["lag_bytes"].as_u64()
            > Some(0)
    );
    daemon.kill();
    assert_eq!(
        files_below(&bucket(&backend)),
        before,
        "nothing was written in plain"
    );
    // With the key, the daemon catches up.
    backend.with(None, &[&key]);
    stream(&backend, &home, &conversation(4));
    assert_restored(&backend, &home);
    assert!(
        !bucket(&backend)
            .join("v1/default/claude-code/s1/branch")
            .exists()
    );
}

/// A session that is encrypted to two recipients, and its home.
fn session_with_two_recipients(backend: &mut Backend) -> (Key, Key, Key, TempHome) {
    let (user, ops) = (keygen(backend, "user.txt"), keygen(backend, "ops.txt"));
    let both = Key {
        file: user.file.clone(),
        recipient: format!("{},{}", user.recipient, ops.recipient),
    };
    let home = TempHome::new();
    backend.with(Some(&both), &[]);
    (1..=8).for_each(|number| stream(backend, &home, &conversation(number)));
    (user, ops, both, home)
}

#[test]
fn gc_with_some_of_the_keys_never_makes_a_session_unreadable_to_others() {
    let mut backend = Backend::file();
    let (user, ops, both, home) = session_with_two_recipients(&mut backend);
    let before = entries(&backend);
    backend.with(None, &[&ops]);
    let elsewhere = TempHome::new();
    backend.run(&elsewhere, &["gc", "--history", "0s"]).fails(
        11,
        "also encrypted to other recipients",
        "--encrypt-to",
    );
    assert_eq!(entries(&backend), before);
    // With all recipients, `gc` may compact the session.
    for all in [None, Some(&both)] {
        if all.is_some() {
            backend.with(all, &[&ops]);
            backend.run(&elsewhere, &["gc", "--history", "0s"]).ok();
        }
        assert_eq!(
            bucket(&backend)
                .join("v1/default/claude-code/s1/snap")
                .exists(),
            all.is_some()
        );
        for key in [&ops, &user] {
            backend.with(None, &[key]);
            assert_pulled(&backend, &home);
        }
    }
}

#[test]
fn a_snapshot_encrypted_to_others_is_bypassed_while_its_entries_exist() {
    let mut backend = Backend::file();
    let (user, ops, _, home) = session_with_two_recipients(&mut backend);
    backend.with(Some(&ops), &[&ops]);
    backend
        .run(&TempHome::new(), &["gc", "--history", "0s"])
        .ok();
    assert!(
        bucket(&backend)
            .join("v1/default/claude-code/s1/snap")
            .exists()
    );
    backend.with(None, &[&user]);
    assert_pulled(&backend, &home);
}

#[test]
fn gc_with_a_key_leaves_a_plain_session_plain() {
    let mut backend = Backend::file();
    let ops = keygen(&backend, "ops.txt");
    let home = TempHome::new();
    (1..=8).for_each(|number| stream(&backend, &home, &conversation(number)));
    backend.with(None, &[&ops]);
    backend.set("SESSIOND_PLAINTEXT", "before-encrypted");
    let elsewhere = TempHome::new();
    backend.run(&elsewhere, &["gc", "--history", "0s"]).ok();
    backend
        .run(&elsewhere, &["checkpoint", "s1", "--name", "here"])
        .ok();
    assert!(
        bucket(&backend)
            .join("v1/default/claude-code/s1/snap")
            .exists()
    );
    backend.with(None, &[]);
    backend.run(&elsewhere, &["checkpoints", "s1"]).ok();
    backend.run(&elsewhere, &["gc", "--history", "0s"]).ok();
    backend.run(&elsewhere, &["reindex"]).ok();
    assert_restored(&backend, &home);
}

#[test]
fn reindex_without_the_key_keeps_the_rows_of_an_encrypted_session() {
    let mut backend = Backend::file();
    let key = keygen(&backend, "key.txt");
    let home = TempHome::new();
    backend.with(None, &[&key]);
    stream(&backend, &home, &conversation(1));
    // The daemon may have been killed before it updated the index.
    backend.run(&home, &["reindex"]).ok();
    backend.with(None, &[]);
    let known = backend.run(&home, &["ls", "--json"]).ok().json();
    assert_eq!(
        known["sessions"].as_array().map(Vec::len),
        Some(1),
        "{known}"
    );
    backend
        .run(&home, &["reindex"])
        .fails(11, "encrypted", "--identity");
    assert_eq!(backend.run(&home, &["ls", "--json"]).ok().json(), known);
}

#[test]
fn damage_in_an_encrypted_object_is_reported_as_damage() {
    let mut backend = Backend::file();
    let key = keygen(&backend, "key.txt");
    let home = TempHome::new();
    backend.with(None, &[&key]);
    stream(&backend, &home, &conversation(1));
    let entry = entries(&backend).pop().unwrap();
    let whole = std::fs::read(&entry).unwrap();
    let mut flipped = whole.clone();
    *flipped.last_mut().unwrap() ^= 1;
    let header = whole
        .windows(5)
        .position(|window| window == b"\n--- ")
        .unwrap();
    let mut forged = whole.clone();
    forged[header + 7] ^= 3;
    for (what, bytes) in [
        ("cut short", &whole[..whole.len() - 10]),
        ("cut in its header", &whole[..60]),
        ("flipped", &flipped[..]),
        ("with another header", &forged[..]),
    ] {
        std::fs::write(&entry, bytes).unwrap();
        let ran = backend.run(&TempHome::new(), &["restore", "s1"]).fails(
            6,
            "the encrypted object is damaged",
            "--fallback history",
        );
        assert!(
            ran.err().contains("000000000002.gz"),
            "{what}: {}",
            ran.err()
        );
        backend
            .run(&TempHome::new(), &["verify"])
            .fails(6, "1 of 1 log is damaged", "");
    }
    std::fs::write(&entry, &whole).unwrap();
    assert_restored(&backend, &home);
}

#[test]
fn a_header_with_many_recipients_is_rejected_before_it_is_parsed() {
    let mut backend = Backend::file();
    let key = keygen(&backend, "key.txt");
    let home = TempHome::new();
    backend.with(None, &[&key]);
    stream(&backend, &home, &conversation(1));
    let entry = entries(&backend).pop().unwrap();
    let whole = std::fs::read(&entry).unwrap();
    let first = whole.iter().position(|byte| *byte == b'\n').unwrap() + 1;
    let header = whole
        .windows(5)
        .position(|window| window == b"\n--- ")
        .unwrap();
    let recipients = &whole[first..=header];
    // Its parser would need hours.
    let forged = [
        &whole[..first],
        &recipients.repeat(20_000),
        &whole[header + 1..],
    ]
    .concat();
    std::fs::write(&entry, forged).unwrap();
    backend.run(&TempHome::new(), &["restore", "s1"]).fails(
        6,
        "its header has more than 10000 bytes",
        "--fallback history",
    );
    backend
        .run(&TempHome::new(), &["verify"])
        .fails(6, "1 of 1 log is damaged", "");
}

#[test]
fn an_encrypted_entry_is_readable_with_age_gzip_and_tail() {
    let mut backend = Backend::file();
    let key = keygen(&backend, "key.txt");
    let home = TempHome::new();
    backend.with(None, &[&key]);
    stream(&backend, &home, &conversation(1));
    let identity: age::x25519::Identity = std::fs::read_to_string(&key.file)
        .unwrap()
        .lines()
        .find(|line| !line.starts_with('#'))
        .unwrap()
        .parse()
        .unwrap();
    let mut text = String::new();
    for entry in entries(&backend) {
        let gzip = age::decrypt(&identity, &std::fs::read(entry).unwrap()).unwrap();
        let mut plain = String::new();
        flate2::read::MultiGzDecoder::new(gzip.as_slice())
            .read_to_string(&mut plain)
            .unwrap();
        text += plain.split_once('\n').unwrap().1;
    }
    assert_eq!(
        text,
        std::fs::read_to_string(transcript(&home, "s1")).unwrap()
    );
}

#[test]
fn contradicting_encryption_settings_are_rejected_and_doctor_reports_them() {
    let mut backend = Backend::file();
    let (key, other) = (keygen(&backend, "key.txt"), keygen(&backend, "other.txt"));
    let home = TempHome::new();
    std::fs::create_dir(home.home().join(".claude")).unwrap();
    backend
        .run(&home, &["keygen", "-o", key.file.to_str().unwrap()])
        .fails(7, "already exists", "another file");
    backend
        .run(&home, &["ls", "--encrypt-to", "age1nobody"])
        .fails(2, "--encrypt-to value \"age1nobody\"", "public key");
    backend
        .run(&home, &["ls", "--identity", "/no/such/file"])
        .fails(2, "--identity value \"/no/such/file\"", "");
    backend
        .run(
            &home,
            &["ls", "--encrypt-to", &key.recipient, "--index-text"],
        )
        .fails(
            2,
            "the index would store message texts unencrypted",
            "--index-text",
        );
    let secret = std::fs::read_to_string(&key.file)
        .unwrap()
        .lines()
        .last()
        .unwrap()
        .to_owned();
    let ran = backend.run(&home, &["ls", "--identity", &secret]).fails(
        2,
        "the secret key itself",
        "file",
    );
    assert!(!ran.err().contains(&secret));
    backend.run(&home, &["ls", "--plaintext", "reject"]).fails(
        2,
        "without a key, sessiond writes plaintext itself",
        "--identity",
    );
    backend.run(&home, &["ls", "--plaintext", "yes"]).fails(
        2,
        "expected reject, before-encrypted or accept",
        "",
    );
    backend.set("SESSIOND_ENCRYPT_TO", "");
    backend
        .run(&home, &["ls"])
        .fails(2, "--encrypt-to value \"\": it is empty", "unset");
    let doctor = |backend: &Backend| {
        let output = backend.run(&home, &["doctor"]).out();
        output
            .lines()
            .find(|line| line.contains(" encryption "))
            .unwrap_or(&output)
            .to_owned()
    };
    backend.with(None, &[]);
    assert!(
        doctor(&backend).starts_with("ok   encryption off"),
        "{}",
        doctor(&backend)
    );
    backend.with(Some(&key), &[]);
    assert!(
        doctor(&backend).contains("on, to 1 recipient; no identity"),
        "{}",
        doctor(&backend)
    );
    backend.with(Some(&key), &[&key]);
    assert!(
        doctor(&backend).contains("the identity can decrypt new objects"),
        "{}",
        doctor(&backend)
    );
    backend.with(Some(&key), &[&other]);
    assert!(
        doctor(&backend).starts_with("warn encryption")
            && doctor(&backend).contains("no identity can decrypt new objects"),
        "{}",
        doctor(&backend)
    );
    // From the configuration file, with a separate file of recipients.
    backend.with(None, &[]);
    let people = home.path().join("people.txt");
    std::fs::write(
        &people,
        format!("# the team\n{}\n{}\n", key.recipient, other.recipient),
    )
    .unwrap();
    let config = home.path().join("config.toml");
    std::fs::write(
        &config,
        format!(
            "encrypt-to = [\"@{}\"]\nidentity = [{:?}]\n",
            people.display(),
            other.file
        ),
    )
    .unwrap();
    backend.set("SESSIOND_CONFIG", config.to_str().unwrap());
    assert!(
        doctor(&backend).contains("on, to 2 recipients; the identity"),
        "{}",
        doctor(&backend)
    );
    stream(&backend, &home, &conversation(1));
    backend.unset("SESSIOND_CONFIG");
    backend.with(None, &[&key]);
    assert_restored(&backend, &home);
}
