//! Generates the damaged stores, byte-identical every time: an undamaged history of two sessions,
//! then one kind of damage.
//!
//! Owns the content of `tests/fixtures/broken` and the expected state of each session after each
//! entry, derived from what was written and not from what a reader returns.

use std::collections::BTreeMap;

use crate::support::files::Files;
use sessiond::codec::entry::{self, EncodedEntry};
use sessiond::codec::version;
use sessiond::log::merge::Merger;
use sessiond::log::read::EntrySink;
use sessiond::model::{Digest, EntryHeader, EntryKind, FileKind, LogId, Part, Seq, keys};

/// The session that is spoiled.
pub const BROKEN: &str = "broken";
/// The one beside it.
pub const HEALTHY: &str = "healthy";
/// The entry that is spoiled.
const SPOILED: Seq = 4;
/// Turns of the agent.
const ROUNDS: u64 = 7;
/// A claim comes before them.
const LAST: Seq = ROUNDS + 1;

/// A store, and what can be had of its broken session.
pub struct Fixture {
    pub name: &'static str,
    /// Every object by its key.
    pub objects: BTreeMap<String, Vec<u8>>,
    /// The entry that `restore --salvage` must go back to and what it was then; none if it must bring back nothing.
    pub sound: Option<(Seq, Files)>,
    /// What the healthy session is.
    pub healthy: Files,
}

/// A session in the making.
#[derive(Clone)]
struct Session {
    id: LogId,
    writer: &'static str,
    entries: BTreeMap<Seq, EncodedEntry>,
    composites: BTreeMap<String, Vec<u8>>,
    last: Seq,
    digest: Option<Digest>,
    files: Files,
    /// What it was after each entry.
    points: BTreeMap<Seq, Files>,
}

/// What one entry changes of a file: from where on, and with what.
type Change = (String, FileKind, u64, Vec<u8>);

impl Session {
    fn new(name: &str) -> Session {
        let id = LogId {
            namespace: "default".parse().unwrap(),
            agent: "claude-code".parse().unwrap(),
            name: name.parse().unwrap(),
        };
        let (entries, composites, files, points) = Default::default();
        Session {
            id,
            writer: "writer-a",
            entries,
            composites,
            last: 0,
            digest: None,
            files,
            points,
        }
    }

    /// A claim and so many rounds.
    fn sound(name: &str, rounds: u64) -> Session {
        let mut session = Session::new(name);
        session.claim(None);
        (1..=rounds).for_each(|round| session.round(round, |_| {}));
        session
    }

    fn write(
        &mut self,
        kind: EntryKind,
        after: Option<(Seq, Seq)>,
        changes: Vec<Change>,
        edit: impl FnOnce(&mut EntryHeader),
    ) {
        let seq = after.map_or(self.last, |(end, _)| end) + 1;
        let (mut parts, mut bodies) = (Vec::new(), Vec::new());
        for (path, kind, start, bytes) in changes {
            let file = self.files.entry(path.clone()).or_default();
            file.truncate(start as usize);
            file.extend_from_slice(&bytes);
            let file_sha256 = Digest::of(file);
            let (len, mtime_ns) = (
                bytes.len() as u64,
                (1_777_000_000 + seq as i64) * 1_000_000_000,
            );
            parts.push(Part {
                path: path.parse().unwrap(),
                kind,
                start,
                len,
                file_sha256,
                mode: 0o600,
                mtime_ns,
                seq: None,
            });
            bodies.push(bytes);
        }
        let mut header = EntryHeader {
            version: version::ENTRY,
            kind,
            agent: self.id.agent.clone(),
            session: self.id.name.clone(),
            seq,
            writer: self.writer.parse().unwrap(),
            at: format!("2026-05-01T12:{seq:02}:00Z").parse().unwrap(),
            prev_digest: self.digest,
            prev_seq: after.map(|(_, before)| before),
            covers: None,
            moves: Vec::new(),
            parts,
            checkpoints: Vec::new(),
            fork: None,
            rollback_to: None,
        };
        edit(&mut header);
        let encoded = entry::encode(header, &bodies).unwrap();
        (self.last, self.digest) = (seq, Some(encoded.digest));
        self.entries.insert(seq, encoded);
        self.points.insert(seq, self.files.clone());
    }

    fn claim(&mut self, after: Option<(Seq, Seq)>) {
        self.write(EntryKind::Claim, after, Vec::new(), |_| {});
    }

    /// A turn of the agent: two lines, a task that is replaced, and in the second round a result that stays.
    fn round(&mut self, round: u64, edit: impl FnOnce(&mut EntryHeader)) {
        let id = self.id.name.to_string();
        let transcript = format!("projects/-work-app/{id}.jsonl");
        let start = self
            .files
            .get(&transcript)
            .map_or(0, |file| file.len() as u64);
        let by = self.writer;
        let lines = format!(
            "{{\"type\":\"user\",\"uuid\":\"{round}u\",\"by\":\"{by}\",\"text\":\"question {round}\"}}\n{{\"type\":\"assistant\",\"uuid\":\"{round}a\",\"text\":\"answer {}\"}}\n",
            round * round
        );
        let mut changes = vec![
            (transcript, FileKind::Append, start, lines.into_bytes()),
            (
                format!("tasks/{id}/1.json"),
                FileKind::Whole,
                0,
                format!("{{\"round\":{round}}}").into_bytes(),
            ),
        ];
        if round == 2 {
            changes.push((
                result(&id),
                FileKind::Whole,
                0,
                b"what a tool said in round 2".to_vec(),
            ));
        }
        self.write(EntryKind::Delta, None, changes, edit);
    }

    /// Goes back to how it was after an entry, to write on from there.
    fn rollback_to(&mut self, seq: Seq) {
        (self.last, self.digest, self.files) = (
            seq,
            Some(self.entries[&seq].digest),
            self.points[&seq].clone(),
        );
    }

    /// What the compactor makes of these entries.
    fn composite(&self, from: Seq, to: Seq) -> (String, EncodedEntry) {
        let mut merger = Merger::default();
        for seq in from..=to {
            merger
                .apply_entry(&entry::decode("made", &self.entries[&seq].bytes).unwrap())
                .unwrap();
        }
        let made = merger.finish(from).unwrap().unwrap();
        let key = if from == 1 {
            keys::snapshot(&self.id, to)
        } else {
            keys::merge(&self.id, from, to)
        };
        (key, made)
    }

    fn add_composite(&mut self, from: Seq, to: Seq) -> String {
        let (key, made) = self.composite(from, to);
        self.composites.insert(key.clone(), made.bytes.to_vec());
        key
    }

    fn objects(&self) -> BTreeMap<String, Vec<u8>> {
        let entries = self
            .entries
            .iter()
            .map(|(seq, encoded)| (keys::entry(&self.id, *seq), encoded.bytes.to_vec()));
        entries.chain(self.composites.clone()).collect()
    }

    fn key(&self, seq: Seq) -> String {
        keys::entry(&self.id, seq)
    }
}

fn result(id: &str) -> String {
    format!("projects/-work-app/{id}/tool-results/a.txt")
}

/// Near the end, in what was compressed and not in the checksum behind it.
fn flip(bytes: &mut [u8]) {
    let at = bytes.len() - 12;
    bytes[at] ^= 0x10;
}

/// The store of a session and what is done to its objects; `sound` is the entry that can be brought back, if any.
fn fixture(
    name: &'static str,
    session: &Session,
    sound: Option<Seq>,
    spoil: impl FnOnce(&mut BTreeMap<String, Vec<u8>>),
) -> Fixture {
    let healthy = Session::sound(HEALTHY, 2);
    let mut objects = session.objects();
    spoil(&mut objects);
    objects.extend(healthy.objects());
    Fixture {
        name,
        objects,
        sound: sound.map(|seq| (seq, session.points[&seq].clone())),
        healthy: healthy.files,
    }
}

/// All of them.
pub fn all() -> Vec<Fixture> {
    let mut all = spoiled_entries();
    all.extend(wrong_entries());
    all.extend(spoiled_composites());
    all.extend(lying_snapshots());
    all.extend(gone_on());
    all
}

/// Bytes that came to harm.
fn spoiled_entries() -> Vec<Fixture> {
    let session = Session::sound(BROKEN, ROUNDS);
    let key = session.key(SPOILED);
    let before = Some(SPOILED - 1);
    vec![
        fixture("missing-entry", &session, before, |objects| {
            drop(objects.remove(&key))
        }),
        fixture("missing-first-entry", &session, None, |objects| {
            drop(objects.remove(&session.key(1)))
        }),
        fixture("flipped-byte", &session, before, |objects| {
            flip(objects.get_mut(&key).unwrap())
        }),
        fixture("truncated-gzip", &session, before, |objects| {
            let bytes = objects.get_mut(&key).unwrap();
            bytes.truncate(bytes.len() / 2);
        }),
        fixture(
            "truncated-last-entry",
            &session,
            Some(LAST - 1),
            |objects| {
                let bytes = objects.get_mut(&session.key(LAST)).unwrap();
                bytes.truncate(bytes.len() / 2);
            },
        ),
    ]
}

/// Whole entries that say what cannot be; those behind them follow.
fn wrong_entries() -> Vec<Fixture> {
    let wrong = |edit: &dyn Fn(&mut EntryHeader)| {
        let mut session = Session::new(BROKEN);
        session.claim(None);
        (1..=ROUNDS).for_each(|round| {
            session.round(round, |header| {
                if header.seq == SPOILED {
                    edit(header)
                }
            })
        });
        session
    };
    let before = Some(SPOILED - 1);
    let prev = wrong(&|header| header.prev_digest = Some(Digest::of(b"another entry")));
    let digest = wrong(&|header| header.parts[0].file_sha256 = Digest::of(b"another file"));
    let version = wrong(&|header| header.version = version::ENTRY + 1);
    // Two writers on a store that does not fence: both wrote entry 4, the second over the first, which went on.
    let mut first = Session::sound(BROKEN, ROUNDS);
    let mut second = first.clone();
    second.rollback_to(SPOILED - 1);
    second.writer = "writer-b";
    second.round(100, |_| {});
    first
        .entries
        .insert(SPOILED, second.entries[&SPOILED].clone());
    first.points.insert(SPOILED, second.files);
    vec![
        fixture("wrong-prev", &prev, before, |_| {}),
        fixture("wrong-file-digest", &digest, before, |_| {}),
        // Not damage: nothing of it may be cut off.
        fixture("newer-format", &version, None, |_| {}),
        fixture("doubled-number", &first, Some(SPOILED), |_| {}),
    ]
}

/// Merges and snapshots that came to harm, with and without the entries they stand for.
fn spoiled_composites() -> Vec<Fixture> {
    let mut merged = Session::sound(BROKEN, ROUNDS);
    let merge = merged.add_composite(2, 5);
    let mut collected = Session::sound(BROKEN, ROUNDS);
    let snapshot = collected.add_composite(1, 5);
    let mut older = collected.clone();
    older.add_composite(1, 3);
    let without_entries = |objects: &mut BTreeMap<String, Vec<u8>>| {
        (1..=5).for_each(|seq| drop(objects.remove(&collected.key(seq))));
        flip(objects.get_mut(&snapshot).unwrap());
    };
    vec![
        fixture("flipped-byte-in-a-merge", &merged, Some(LAST), |objects| {
            flip(objects.get_mut(&merge).unwrap())
        }),
        fixture(
            "flipped-byte-in-the-only-snapshot",
            &collected,
            None,
            without_entries,
        ),
        fixture(
            "flipped-byte-in-the-newer-snapshot",
            &older,
            Some(3),
            without_entries,
        ),
    ]
}

/// Snapshots that are whole and say something else than the entries.
fn lying_snapshots() -> Vec<Fixture> {
    let lie = |path: String, bytes: &[u8]| {
        let mut truth = Session::sound(BROKEN, ROUNDS);
        let (key, made) = truth.composite(1, 5);
        let mut header = made.header;
        let mut files = truth.points[&5].clone();
        files.insert(path.clone(), bytes.to_vec());
        for part in &mut header.parts {
            let file = &files[part.path.as_str()];
            (part.len, part.file_sha256) = (file.len() as u64, Digest::of(file));
        }
        let bodies: Vec<&Vec<u8>> = header
            .parts
            .iter()
            .map(|part| &files[part.path.as_str()])
            .collect();
        let lying = sessiond::codec::snapshot::encode(header.clone(), &bodies).unwrap();
        truth.composites.insert(key, lying.bytes.to_vec());
        truth
    };
    let transcript = lie(
        format!("projects/-work-app/{BROKEN}.jsonl"),
        b"{\"type\":\"user\",\"text\":\"never said\"}\n",
    );
    let mut unnoticed = lie(result(BROKEN), b"what no tool said");
    // Nothing that a restore reads contradicts it: it is what comes back.
    unnoticed
        .points
        .get_mut(&LAST)
        .unwrap()
        .insert(result(BROKEN), b"what no tool said".to_vec());
    vec![
        fixture("lying-snapshot", &transcript, Some(LAST), |_| {}),
        fixture(
            "lying-snapshot-about-a-file-that-stayed",
            &unnoticed,
            Some(LAST),
            |_| {},
        ),
    ]
}

/// Logs that are as they should be, and not plain.
fn gone_on() -> Vec<Fixture> {
    let mut removed = Session::sound(BROKEN, ROUNDS);
    removed.write(EntryKind::Tombstone, None, Vec::new(), |_| {});
    // Somebody salvaged it and went on: the claim names the last sound entry as the one before.
    let mut session = Session::sound(BROKEN, ROUNDS);
    session.rollback_to(SPOILED - 1);
    session.writer = "writer-b";
    session.claim(Some((LAST, SPOILED - 1)));
    session.round(9, |_| {});
    session.round(10, |_| {});
    let key = session.key(SPOILED);
    vec![
        fixture("removed", &removed, None, |_| {}),
        fixture(
            "gone-on-behind-the-damage",
            &session,
            Some(LAST + 3),
            |objects| flip(objects.get_mut(&key).unwrap()),
        ),
    ]
}
