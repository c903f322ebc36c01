//! Downgrades: whoever can write to the bucket, but has no key, inserts plaintext. Every reader
//! rejects it, and compaction does not turn it into an encrypted object.

use std::path::PathBuf;

use crate::encryption::{
    Key, assert_pulled, assert_restored, bucket, conversation, entries, is_encrypted, keygen,
    stream,
};
use crate::support::TempHome;
use crate::support::backend::Backend;
use crate::support::files::{files_below, write};

const LOG: &str = "v1/default/claude-code/s1/log";

/// An encrypted session, and the plaintext entries that an attacker appended to it. They link to
/// the encrypted entries: the attacker knows their digests from the index.
struct Attacked {
    backend: Backend,
    key: Key,
    home: TempHome,
    /// The number of encrypted entries.
    encrypted: usize,
}

impl Attacked {
    fn new() -> Attacked {
        let mut backend = Backend::file();
        let key = keygen(&backend, "key.txt");
        let home = TempHome::new();
        backend.with(None, &[&key]);
        stream(&backend, &home, &conversation(1));
        let encrypted = entries(&backend).len();

        // The attacker's plaintext copy of the session continues with a line of the attacker.
        let elsewhere = Backend::file();
        let to = elsewhere.path().join("raw");
        backend
            .run(
                &home,
                &["pull", "s1", "--raw", "--to", to.to_str().unwrap()],
            )
            .ok();
        let objects = files_below(&to);
        for (path, bytes) in &objects {
            let path = bucket(&elsewhere)
                .join("v1/default/claude-code/s1")
                .join(path);
            write(&path, bytes);
        }
        let attacker = TempHome::new();
        elsewhere.run(&attacker, &["restore", "s1"]).ok();
        stream(&elsewhere, &attacker, &conversation(2));
        let forged = entries(&elsewhere).split_off(encrypted);
        assert!(forged.len() > 1 && forged.iter().all(|entry| !is_encrypted(entry)));
        for entry in forged {
            let name = entry.file_name().unwrap();
            std::fs::copy(&entry, bucket(&backend).join(LOG).join(name)).unwrap();
        }
        Attacked {
            backend,
            key,
            home,
            encrypted,
        }
    }

    fn forged(&self) -> PathBuf {
        entries(&self.backend)[self.encrypted].clone()
    }
}

#[test]
fn plaintext_behind_encrypted_entries_is_rejected_by_every_reader() {
    let mut attacked = Attacked::new();
    let forged = attacked.forged();
    let forged = forged.file_name().unwrap().to_str().unwrap().to_owned();
    let before = files_below(&bucket(&attacked.backend));
    // A session may begin as plaintext, but it never returns to it.
    for (rule, why) in [
        (None, "it is not encrypted, and plaintext is not accepted"),
        (
            Some("before-encrypted"),
            "it is not encrypted, but an earlier segment of the log is",
        ),
    ] {
        match rule {
            Some(rule) => attacked.backend.set("SESSIOND_PLAINTEXT", rule),
            None => attacked.backend.unset("SESSIOND_PLAINTEXT"),
        }
        for arguments in [
            &["restore", "s1"][..],
            &["pull", "s1", "--to", "copy"],
            &["show", "s1"],
            &["diff", "s1", "seq:1", "latest"],
            &["fork", "s1"],
            &["export", "s1", "-o", "s1.tar.gz"],
            &["checkpoint", "s1", "--name", "here"],
            &["reindex"],
        ] {
            let home = TempHome::new();
            let ran = attacked.backend.run(&home, arguments);
            let stderr = ran.err();
            assert_eq!(ran.code(), 6, "{rule:?} {arguments:?}: {stderr}");
            assert!(
                stderr.contains(why) && stderr.contains(&forged),
                "{rule:?} {arguments:?}: {stderr}"
            );
            assert!(!home.home().join(".claude/projects").exists());
        }
        let ran = attacked
            .backend
            .run(&TempHome::new(), &["verify", "--deep"]);
        assert_eq!(ran.code(), 6, "{rule:?}: {}", ran.err());
        assert!(ran.out().contains(why), "{rule:?}: {}", ran.out());
        let ran = attacked
            .backend
            .run(&TempHome::new(), &["gc", "--history", "0s"]);
        assert_ne!(ran.code(), 0, "{rule:?}: {}", ran.err());
        let after = files_below(&bucket(&attacked.backend));
        assert_eq!(after, before, "{rule:?}");
    }
}

#[test]
fn the_owner_recovers_from_inserted_plaintext() {
    let attacked = Attacked::new();
    let other = TempHome::new();
    attacked
        .backend
        .run(&other, &["restore", "s1", "--salvage"])
        .ok();
    assert_eq!(
        files_below(&other.home().join(".claude")),
        files_below(&attacked.home.home().join(".claude"))
    );
    // From now on, every reader skips the inserted entries.
    stream(&attacked.backend, &other, &conversation(3));
    assert_restored(&attacked.backend, &other);
    assert_pulled(&attacked.backend, &other);
}

#[test]
fn inserted_plaintext_is_restored_only_if_all_plaintext_is_accepted_by_name() {
    let mut attacked = Attacked::new();
    attacked.backend.with(None, &[&attacked.key]);
    let other = TempHome::new();
    attacked
        .backend
        .run(&other, &["restore", "s1", "--plaintext", "accept"])
        .ok();
    let restored = other.home().join(".claude/projects/-work-app/s1.jsonl");
    let restored = std::fs::read_to_string(restored).unwrap();
    assert!(restored.contains("u2-1"), "{restored}");
}

#[test]
fn a_forged_plaintext_snapshot_is_not_read() {
    let mut backend = Backend::file();
    let key = keygen(&backend, "key.txt");
    let (home, other) = (TempHome::new(), TempHome::new());
    // The snapshot of another conversation with the same ID.
    let elsewhere = Backend::file();
    (1..=9).for_each(|turn| stream(&elsewhere, &other, &conversation(40 + turn)));
    elsewhere.run(&other, &["gc", "--history", "0s"]).ok();
    backend.with(None, &[&key]);
    (1..=9).for_each(|turn| stream(&backend, &home, &conversation(turn)));
    let directory = "v1/default/claude-code/s1/snap";
    for (name, bytes) in files_below(&bucket(&elsewhere).join(directory)) {
        let path = bucket(&backend).join(directory).join(name);
        write(&path, bytes);
    }
    for rule in ["reject", "before-encrypted"] {
        backend.set("SESSIOND_PLAINTEXT", rule);
        let copy = TempHome::new();
        backend.run(&copy, &["pull", "s1", "--to", "copy"]).ok();
        let copied = files_below(&copy.home().join("copy"));
        assert!(
            copied == files_below(&home.home().join(".claude")),
            "{rule}"
        );
    }
}

#[test]
fn compaction_keeps_the_border_between_plaintext_and_encryption() {
    let mut backend = Backend::file();
    let key = keygen(&backend, "key.txt");
    let home = TempHome::new();
    (1..=5).for_each(|turn| stream(&backend, &home, &conversation(turn)));
    let plain = entries(&backend).len();
    // Also with explicit recipients, old plaintext does not become an encrypted object.
    backend.with(Some(&key), &[&key]);
    backend
        .run(&TempHome::new(), &["pull", "s1", "--to", "copy"])
        .fails(
            6,
            "it is not encrypted, and plaintext is not accepted",
            "--plaintext before-encrypted",
        );
    backend.set("SESSIOND_PLAINTEXT", "before-encrypted");
    (6..=12).for_each(|turn| stream(&backend, &home, &conversation(turn)));
    backend.run(&home, &["gc", "--history", "0s"]).ok();
    let session = bucket(&backend).join("v1/default/claude-code/s1");
    let mut compacted = 0;
    for (name, bytes) in files_below(&session) {
        let path = session.join(&name);
        let Some(kind) = name
            .split('/')
            .next()
            .filter(|kind| ["merge", "snap"].contains(kind))
        else {
            continue;
        };
        compacted += 1;
        let number = path.file_name().unwrap().to_str().unwrap();
        let first: usize = match kind {
            "merge" => number.split('-').next().unwrap().parse().unwrap(),
            _ => 1,
        };
        assert_eq!(
            bytes.starts_with(b"age-encryption.org/v1"),
            first > plain,
            "{name}: {plain} entries are plaintext"
        );
    }
    assert!(compacted > 0, "gc merged nothing");
    assert_pulled(&backend, &home);
    backend.run(&home, &["verify", "--deep"]).ok();
}
