//! Signed entries: with trusted keys, every reader rejects what no trusted writer signed for its
//! place in the store, and everything that a writer creates is signed.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::encryption::{
    assert_pulled, assert_restored, bucket, conversation, entries, keygen, stream,
};
use crate::support::backend::Backend;
use crate::support::files::{files_below, write};
use crate::support::{TempHome, needs_servers};

/// A signing key: its file and its public key.
struct SigningKey {
    file: PathBuf,
    public: String,
}

fn signing_key(backend: &Backend, name: &str) -> SigningKey {
    let file = backend.path().join(name);
    let output = file.to_str().unwrap().to_owned();
    let ran = backend
        .run(&TempHome::new(), &["keygen", "--signing", "-o", &output])
        .ok();
    let public = ran.out().trim().to_owned();
    assert!(public.starts_with("ed25519:"), "{public}");
    SigningKey { file, public }
}

impl Backend {
    fn sign(&mut self, key: Option<&SigningKey>, trusted: &[&SigningKey]) {
        self.unset("SESSIOND_SIGNING_KEY");
        self.unset("SESSIOND_TRUST_KEY");
        if let Some(key) = key {
            self.set("SESSIOND_SIGNING_KEY", key.file.to_str().unwrap());
        }
        if !trusted.is_empty() {
            let keys: Vec<&str> = trusted.iter().map(|key| key.public.as_str()).collect();
            self.set("SESSIOND_TRUST_KEY", keys.join(","));
        }
    }
}

/// The directory of the agent's sessions in the bucket.
fn sessions(backend: &Backend) -> PathBuf {
    bucket(backend).join("v1/default/claude-code")
}

/// Whether a plaintext object has a signature.
fn is_signed(name: &str, bytes: &[u8]) -> bool {
    match name.ends_with(".json") {
        true => {
            serde_json::from_slice::<serde_json::Value>(bytes).unwrap()["signature"].is_string()
        }
        false => {
            let member = bytes.len().checked_sub(122).map(|start| &bytes[start..]);
            member.is_some_and(|member| member.starts_with(&[0x1f, 0x8b, 8, 4]))
        }
    }
}

/// Everything that a session can do, with a daemon, `gc` and derived objects of every kind.
fn use_everything(backend: &Backend, home: &TempHome) {
    (1..=9).for_each(|turn| stream(backend, home, &conversation(turn)));
    assert_restored(backend, home);
    let run = |arguments: &[&str]| backend.run(home, arguments).ok();
    run(&["checkpoint", "s1", "--name", "green"]);
    run(&["fork", "s1", "--at", "ckpt:green"]);
    run(&["label", "s1", "team=core"]);
    run(&["gc", "--history", "0s"]);
    run(&["verify", "--deep"]);
    run(&["reindex"]);
    run(&["show", "s1"]);
    run(&["export", "s1", "-o", "s1.tar.gz"]);
    assert_pulled(backend, home);
}

#[test]
fn everything_that_a_writer_creates_is_signed() {
    let mut backend = Backend::file();
    let key = signing_key(&backend, "signing.key");
    backend.sign(Some(&key), &[&key]);
    backend.set("SESSIOND_REQUEST", "job-7");
    let home = TempHome::new();
    use_everything(&backend, &home);
    backend.unset("SESSIOND_REQUEST");
    let objects = files_below(&sessions(&backend));
    for kind in [
        "/log/",
        "/snap/",
        "/meta/",
        "/pins/checkpoint.",
        "/pins/fork.",
        ".requests/",
    ] {
        assert!(objects.keys().any(|name| name.contains(kind)), "{kind}");
    }
    for (name, bytes) in &objects {
        assert!(is_signed(name, bytes), "{name} is not signed");
    }
    // A machine without keys reads the same bytes; so do zcat and tail.
    backend.sign(None, &[]);
    assert_pulled(&backend, &home);
    let entry = entries(&backend).pop().unwrap();
    let shell = |script: &str| {
        let output = Command::new("sh")
            .args(["-c", script, "sh"])
            .arg(&entry)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert!(output.stderr.is_empty(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(shell("zcat \"$1\" | head -n 1").contains("\"kind\""));
    let body = shell("zcat \"$1\" | tail -n +2");
    assert!(body.is_empty() || body.ends_with("}\n"), "{body}");
}

needs_servers!(a_signed_and_encrypted_session_on_servers);
fn a_signed_and_encrypted_session_on_servers() {
    let mut backend = Backend::servers().unwrap();
    let (key, identity) = (
        signing_key(&backend, "signing.key"),
        keygen(&backend, "key.txt"),
    );
    backend.with(None, &[&identity]);
    backend.sign(Some(&key), &[&key]);
    let home = TempHome::new();
    use_everything(&backend, &home);
    // The key of another writer.
    let other = signing_key(&backend, "other.key");
    backend.sign(Some(&other), &[&other]);
    backend.run(&TempHome::new(), &["restore", "s1"]).fails(
        6,
        "which is not a trusted key",
        "--trust-key",
    );
}

/// A signed session, and a store of the attacker with the same session without signatures.
fn attacked() -> (Backend, SigningKey, TempHome, Backend) {
    let mut backend = Backend::file();
    let key = signing_key(&backend, "signing.key");
    let (home, attacker) = (TempHome::new(), TempHome::new());
    backend.sign(Some(&key), &[&key]);
    stream(&backend, &home, &conversation(1));
    let elsewhere = Backend::file();
    for (name, bytes) in files_below(&bucket(&backend)) {
        write(&bucket(&elsewhere).join(name), bytes);
    }
    elsewhere.run(&attacker, &["restore", "s1"]).ok();
    stream(&elsewhere, &attacker, &conversation(2));
    elsewhere.run(&attacker, &["label", "s1", "team=evil"]).ok();
    elsewhere
        .run(&attacker, &["checkpoint", "s1", "--name", "evil"])
        .ok();
    (backend, key, home, elsewhere)
}

fn insert(from: &Path, to: &Path) {
    write(to, std::fs::read(from).unwrap());
}

#[test]
fn forged_entries_are_rejected_by_every_reader() {
    let (backend, _, home, elsewhere) = attacked();
    let signed = entries(&backend).len();
    for forged in entries(&elsewhere).split_off(signed) {
        let name = forged.file_name().unwrap();
        insert(&forged, &sessions(&backend).join("s1/log").join(name));
    }
    let before = files_below(&bucket(&backend));
    for arguments in [
        &["restore", "s1"][..],
        &["pull", "s1", "--to", "copy"],
        &["show", "s1"],
        &["fork", "s1"],
        &["export", "s1", "-o", "s1.tar.gz"],
        &["reindex"],
        &["checkpoint", "s1", "--name", "here"],
    ] {
        let other = TempHome::new();
        let ran = backend.run(&other, arguments);
        assert_eq!(ran.code(), 6, "{arguments:?}: {}", ran.err());
        assert!(
            ran.err().contains("it is not signed"),
            "{arguments:?}: {}",
            ran.err()
        );
        assert!(!other.home().join(".claude/projects").exists());
    }
    let verified = backend.run(&home, &["verify", "--deep"]);
    assert_eq!(verified.code(), 6, "{}", verified.out());
    assert!(
        verified.out().contains("it is not signed"),
        "{}",
        verified.out()
    );
    assert_ne!(backend.run(&home, &["gc", "--history", "0s"]).code(), 0);
    assert_eq!(files_below(&bucket(&backend)), before);
    // The owner continues without the forged entries.
    let other = TempHome::new();
    backend.run(&other, &["restore", "s1", "--salvage"]).ok();
    stream(&backend, &other, &conversation(3));
    assert_restored(&backend, &other);
}

#[test]
fn forged_metadata_checkpoints_and_moved_entries_are_rejected() {
    let (backend, _, home, elsewhere) = attacked();
    // A checkpoint and metadata of the attacker.
    for name in ["pins/checkpoint.evil.json", "meta/000000000001.json"] {
        let (from, to) = (sessions(&elsewhere), sessions(&backend));
        insert(&from.join("s1").join(name), &to.join("s1").join(name));
        let arguments = match name.starts_with("pins") {
            true => ["pull", "s1", "--at", "ckpt:evil", "--to", "copy"].as_slice(),
            false => &["label", "s1", "team=core"],
        };
        backend
            .run(&TempHome::new(), arguments)
            .fails(6, "it is not signed", "--signing-key");
        std::fs::remove_file(to.join("s1").join(name)).unwrap();
    }
    // An entry that the trusted writer signed for another session.
    for entry in entries(&backend) {
        let name = entry.file_name().unwrap();
        insert(&entry, &sessions(&backend).join("s2/log").join(name));
    }
    backend
        .run(&TempHome::new(), &["pull", "s2", "--to", "copy"])
        .fails(6, "its signature is not valid", "");
    assert_pulled(&backend, &home);
}

#[test]
fn keys_rotate_and_a_reader_cannot_write_by_mistake() {
    let mut backend = Backend::file();
    let old = signing_key(&backend, "old.key");
    let new = signing_key(&backend, "new.key");
    let home = TempHome::new();
    backend.sign(Some(&old), &[&old]);
    stream(&backend, &home, &conversation(1));
    backend.sign(Some(&new), &[&old, &new]);
    stream(&backend, &home, &conversation(2));
    assert_restored(&backend, &home);
    // A machine that only reads.
    backend.sign(None, &[&old, &new]);
    assert_pulled(&backend, &home);
    backend.run(&home, &["show", "s1"]).ok();
    let other = TempHome::new();
    backend.run(&other, &["restore", "s1"]).fails(
        2,
        "no signing key is configured",
        "--signing-key",
    );
    let doctor = backend.run(&home, &["doctor"]).out();
    assert!(
        doctor.contains("2 trusted keys; no signing key"),
        "{doctor}"
    );
    // The old key is no longer trusted.
    backend.sign(Some(&new), &[&new]);
    backend
        .run(&TempHome::new(), &["pull", "s1", "--to", "copy"])
        .fails(6, "which is not a trusted key", "--trust-key");
    backend.sign(Some(&old), &[&new]);
    backend.run(&TempHome::new(), &["ls"]).fails(
        2,
        "its public key is not one of the trusted keys",
        "--trust-key",
    );
    backend.sign(None, &[]);
    backend.set("SESSIOND_TRUST_KEY", "");
    backend
        .run(&TempHome::new(), &["ls"])
        .fails(2, "--trust-key value \"\": it is empty", "unset");
}

#[test]
fn a_key_that_is_no_longer_trusted_is_rejected_on_the_machine_that_used_it() {
    let mut backend = Backend::file();
    let (kept, stolen) = (
        signing_key(&backend, "kept.key"),
        signing_key(&backend, "stolen.key"),
    );
    let home = TempHome::new();
    backend.sign(Some(&stolen), &[&kept, &stolen]);
    stream(&backend, &home, &conversation(1));
    backend.run(&home, &["restore", "s1"]).ok();
    backend.sign(Some(&kept), &[&kept]);
    for (arguments, code) in [
        (&["restore", "s1"][..], 6),
        (&["run", "--session", "s1", "--", "true"], 8),
    ] {
        backend
            .run(&home, arguments)
            .fails(code, "which is not a trusted key", "--trust-key");
    }
}
