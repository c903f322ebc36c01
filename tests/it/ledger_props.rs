//! Damaged ledgers: any file content yields a valid ledger or none.

use proptest::prelude::*;
use proptest::sample::Index;
use sessiond::log::ledger::{FileCursor, Ledger};
use sessiond::log::writer::LogWriter;
use sessiond::model::{Digest, FileKind, FileStat, LogId, RunningHash};
use sessiond::sys::Disk;

#[path = "../../fuzz/src/mutate.rs"]
pub mod mutate;

const STORE: &str = "file:///x";

fn ledger() -> Ledger {
    let id = LogId {
        namespace: "n".parse().unwrap(),
        agent: "a".parse().unwrap(),
        name: "s".parse().unwrap(),
    };
    let log_writer = LogWriter::unclaimed(
        "w".parse().unwrap(),
        3,
        Some(Digest::of(b"entry 3")),
        "2026-05-01T12:00:00Z".parse().unwrap(),
    );
    let mut ledger = Ledger::new(STORE.to_owned(), id, log_writer);
    for (path, len) in [("projects/-w/s.jsonl", 100), ("tasks/s/1", 0)] {
        let mut cursor = FileCursor::new(
            FileKind::Append,
            FileStat {
                dev: 1,
                ino: 2,
                size: len,
                mtime_ns: 4,
                mode: 0o600,
            },
        );
        cursor.advance(&mut Vec::new(), &vec![b'x'; len as usize]);
        ledger.files.insert(path.parse().unwrap(), cursor);
    }
    ledger
}

/// A directory with a ledger in it, and the bytes of the file.
struct StoredLedger {
    root: tempfile::TempDir,
    disk: Disk,
    ledger: Ledger,
    bytes: Vec<u8>,
}

impl StoredLedger {
    fn new() -> StoredLedger {
        let root = tempfile::tempdir().unwrap();
        let disk = Disk::new(root.path());
        let ledger = ledger();
        ledger.save(&disk, false).unwrap();
        let bytes = std::fs::read(root.path().join(".sessiond/ledger/n/a/s.json")).unwrap();
        StoredLedger {
            root,
            disk,
            ledger,
            bytes,
        }
    }

    fn load(&self, bytes: &[u8]) -> Option<Ledger> {
        std::fs::write(self.root.path().join(".sessiond/ledger/n/a/s.json"), bytes).unwrap();
        Ledger::load(&self.disk, STORE, &self.ledger.id)
    }
}

#[test]
fn a_damaged_ledger_is_ignored() {
    let kept = StoredLedger::new();
    assert_eq!(kept.load(&kept.bytes).as_ref(), Some(&kept.ledger));
    proptest!(|(at in any::<Index>(), flip in 1u8..)| {
        let at = at.index(kept.bytes.len());
        let mut bytes = kept.bytes.clone();
        bytes[at] ^= flip;
        prop_assert_eq!(kept.load(&bytes), None);
        prop_assert_eq!(kept.load(&kept.bytes[..at]), None);
    });
}

/// Another version may have written it: its checksum is correct, and its values may be anything.
#[test]
fn a_forged_ledger_value_does_no_harm() {
    let kept = StoredLedger::new();
    let (mut taken, mut refused) = (0, 0);
    for seed in 0..1000 {
        let body = mutate::change_a_value(&kept.bytes[65..], 1, seed).unwrap();
        // Two values are changed in every second case.
        let body = if seed % 2 == 0 {
            body
        } else {
            mutate::change_a_value(&body, 1, seed / 2).unwrap()
        };
        let body = [b"\n", body.as_slice()].concat();
        let bytes = [Digest::of(&body).to_string().as_bytes(), &body].concat();
        let Some(loaded) = kept.load(&bytes) else {
            refused += 1;
            continue;
        };
        taken += 1;
        assert_eq!(loaded.id, kept.ledger.id, "seed {seed}");
        for mut cursor in loaded.files.values().cloned() {
            cursor.advance(&mut Vec::new(), b"more");
            cursor.hash.digest();
        }
        loaded.save(&kept.disk, false).unwrap();
        assert_eq!(
            Ledger::load(&kept.disk, STORE, &kept.ledger.id),
            Some(loaded),
            "seed {seed}"
        );
    }
    assert!(
        taken > 50 && refused > 50,
        "{taken} taken, {refused} refused: hardly anything was tried"
    );
}

proptest! {
    #[test]
    fn a_resumed_hash_state_continues_or_is_rejected(
        state in proptest::collection::vec(any::<u8>(), 0..120),
        whole in any::<bool>(),
        more in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        let mut text: String = state.iter().map(|byte| format!("{byte:02x}")).collect();
        if whole {
            // The correct length, which random data hardly ever has; the first bytes are unchanged.
            let real = String::from(RunningHash::default());
            text.truncate(real.len());
            text.push_str(&real[text.len()..]);
        }
        if let Ok(mut hash) = RunningHash::try_from(text) {
            hash.update(&more);
            let again = RunningHash::try_from(String::from(hash.clone())).unwrap();
            prop_assert_eq!(again.digest(), hash.digest());
        }
    }
}
