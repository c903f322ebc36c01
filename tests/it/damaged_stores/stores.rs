//! Generates the damaged stores, byte-identical every time: an undamaged history of two sessions,
//! then one kind of damage.
//!
//! Owns the content of `tests/fixtures/damaged` and the expected state of each session after each
//! entry, derived from what was written and not from what a reader returns.

use std::collections::BTreeMap;

use crate::support::files::Files;
use sessiond::codec::entry::{self, EncodedEntry};
use sessiond::codec::version;
use sessiond::log::merge::Merger;
use sessiond::log::read::EntrySink;
use sessiond::model::{Digest, EntryHeader, EntryKind, FileKind, LogId, Part, Seq, keys};

/// The damaged session.
pub const DAMAGED: &str = "broken";
/// The undamaged session next to it.
pub const HEALTHY: &str = "healthy";
/// The damaged entry.
const DAMAGED_SEQ: Seq = 4;
/// Turns of the agent.
const ROUNDS: u64 = 7;
/// The last entry; the first is a claim.
const LAST: Seq = ROUNDS + 1;

/// A store, and what can be restored from its damaged session.
pub struct Fixture {
    pub name: &'static str,
    /// Every object by its key.
    pub objects: BTreeMap<String, Vec<u8>>,
    /// The entry that `restore --salvage` must restore, and its files; none if nothing can be
    /// restored.
    pub undamaged: Option<(Seq, Files)>,
    /// The files of the undamaged session.
    pub healthy: Files,
}

/// A session that is being written.
#[derive(Clone)]
struct Session {
    id: LogId,
    writer: &'static str,
    entries: BTreeMap<Seq, EncodedEntry>,
    compacted_segments: BTreeMap<String, Vec<u8>>,
    last: Seq,
    digest: Option<Digest>,
    files: Files,
    /// The files after each entry.
    points: BTreeMap<Seq, Files>,
}

/// The change of one file by one entry: path, kind, offset and bytes.
type Change = (String, FileKind, u64, Vec<u8>);

impl Session {
    fn new(name: &str) -> Session {
        let id = LogId {
            namespace: "default".parse().unwrap(),
            agent: "claude-code".parse().unwrap(),
            name: name.parse().unwrap(),
        };
        let (entries, compacted_segments, files, points) = Default::default();
        Session {
            id,
            writer: "writer-a",
            entries,
            compacted_segments,
            last: 0,
            digest: None,
            files,
            points,
        }
    }

    /// A session of a claim and the given number of rounds.
    fn undamaged(name: &str, rounds: u64) -> Session {
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
                upload: None,
            });
            bodies.push(bytes);
        }
        let mut header = EntryHeader {
            version: version::ENTRY,
            kind,
            namespace: self.id.namespace.clone(),
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
            keep_checkpoints: None,
            fork: None,
            rollback_to: None,
            rollback_checkpoint: None,
            adopted: Vec::new(),
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

    /// A turn of the agent: two lines, a replaced task, and in the second round a tool result.
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

    /// Resets the files to an entry, to continue from there.
    fn rollback_to(&mut self, seq: Seq) {
        (self.last, self.digest, self.files) = (
            seq,
            Some(self.entries[&seq].digest),
            self.points[&seq].clone(),
        );
    }

    /// Returns the compacted segment of these entries.
    fn compacted(&self, from: Seq, to: Seq) -> (String, EncodedEntry) {
        let mut merger = Merger::default();
        for seq in from..=to {
            merger
                .apply_entry(&entry::decode("made", &self.entries[&seq].bytes).unwrap())
                .unwrap();
        }
        let encoded = merger.finish(from).unwrap().unwrap();
        let key = if from == 1 {
            keys::snapshot(&self.id, to)
        } else {
            keys::merge(&self.id, from, to)
        };
        (key, encoded)
    }

    fn add_compacted(&mut self, from: Seq, to: Seq) -> String {
        let (key, encoded) = self.compacted(from, to);
        self.compacted_segments
            .insert(key.clone(), encoded.bytes.to_vec());
        key
    }

    fn objects(&self) -> BTreeMap<String, Vec<u8>> {
        let entries = self
            .entries
            .iter()
            .map(|(seq, encoded)| (keys::entry(&self.id, *seq), encoded.bytes.to_vec()));
        entries.chain(self.compacted_segments.clone()).collect()
    }

    fn key(&self, seq: Seq) -> String {
        keys::entry(&self.id, seq)
    }
}

fn result(id: &str) -> String {
    format!("projects/-work-app/{id}/tool-results/a.txt")
}

/// Flips a bit near the end, in the compressed data and not in the checksum after it.
fn flip(bytes: &mut [u8]) {
    let at = bytes.len() - 12;
    bytes[at] ^= 0x10;
}

/// Creates the store of a session and damages its objects. `undamaged` is the entry that can be
/// restored, if any.
fn fixture(
    name: &'static str,
    session: &Session,
    undamaged: Option<Seq>,
    damage: impl FnOnce(&mut BTreeMap<String, Vec<u8>>),
) -> Fixture {
    let healthy = Session::undamaged(HEALTHY, 2);
    let mut objects = session.objects();
    damage(&mut objects);
    objects.extend(healthy.objects());
    Fixture {
        name,
        objects,
        undamaged: undamaged.map(|seq| (seq, session.points[&seq].clone())),
        healthy: healthy.files,
    }
}

/// All damaged stores.
pub fn all() -> Vec<Fixture> {
    let mut all = damaged_entries();
    all.extend(wrong_entries());
    all.extend(damaged_compacted_segments());
    all.extend(contradicting_snapshots());
    all.extend(continued_logs());
    all
}

/// Entries with damaged bytes.
fn damaged_entries() -> Vec<Fixture> {
    let session = Session::undamaged(DAMAGED, ROUNDS);
    let key = session.key(DAMAGED_SEQ);
    let before = Some(DAMAGED_SEQ - 1);
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

/// Complete entries with a wrong header; later entries refer to them.
fn wrong_entries() -> Vec<Fixture> {
    let wrong = |edit: &dyn Fn(&mut EntryHeader)| {
        let mut session = Session::new(DAMAGED);
        session.claim(None);
        (1..=ROUNDS).for_each(|round| {
            session.round(round, |header| {
                if header.seq == DAMAGED_SEQ {
                    edit(header)
                }
            })
        });
        session
    };
    let before = Some(DAMAGED_SEQ - 1);
    let prev = wrong(&|header| header.prev_digest = Some(Digest::of(b"another entry")));
    let digest = wrong(&|header| header.parts[0].file_sha256 = Digest::of(b"another file"));
    let version = wrong(&|header| header.version = version::ENTRY + 1);
    // Two writers on a store that does not fence: both wrote entry 4. The second replaced the first
    // one's entry, and the first continued.
    let mut first = Session::undamaged(DAMAGED, ROUNDS);
    let mut second = first.clone();
    second.rollback_to(DAMAGED_SEQ - 1);
    second.writer = "writer-b";
    second.round(100, |_| {});
    first
        .entries
        .insert(DAMAGED_SEQ, second.entries[&DAMAGED_SEQ].clone());
    first.points.insert(DAMAGED_SEQ, second.files);
    vec![
        fixture("wrong-prev-digest", &prev, before, |_| {}),
        fixture("wrong-file-digest", &digest, before, |_| {}),
        // This is not damage: nothing may be discarded.
        fixture("newer-format", &version, None, |_| {}),
        fixture("duplicate-seq", &first, Some(DAMAGED_SEQ), |_| {}),
    ]
}

/// Damaged merges and snapshots, with and without the entries they cover.
fn damaged_compacted_segments() -> Vec<Fixture> {
    let mut merged = Session::undamaged(DAMAGED, ROUNDS);
    let merge = merged.add_compacted(2, 5);
    let mut collected = Session::undamaged(DAMAGED, ROUNDS);
    let snapshot = collected.add_compacted(1, 5);
    let mut older = collected.clone();
    older.add_compacted(1, 3);
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

/// Complete snapshots that contradict the entries.
fn contradicting_snapshots() -> Vec<Fixture> {
    let contradict = |path: String, bytes: &[u8]| {
        let mut session = Session::undamaged(DAMAGED, ROUNDS);
        let (key, encoded) = session.compacted(1, 5);
        let mut header = encoded.header;
        let mut files = session.points[&5].clone();
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
        let contradicting = sessiond::codec::snapshot::encode(header.clone(), &bodies).unwrap();
        session
            .compacted_segments
            .insert(key, contradicting.bytes.to_vec());
        session
    };
    let transcript = contradict(
        format!("projects/-work-app/{DAMAGED}.jsonl"),
        b"{\"type\":\"user\",\"text\":\"never said\"}\n",
    );
    let mut unnoticed = contradict(result(DAMAGED), b"what no tool said");
    // Nothing that a restore reads contradicts it: the restore returns it.
    unnoticed
        .points
        .get_mut(&LAST)
        .unwrap()
        .insert(result(DAMAGED), b"what no tool said".to_vec());
    vec![
        fixture("contradicting-snapshot", &transcript, Some(LAST), |_| {}),
        fixture(
            "contradicting-snapshot-of-an-unchanged-file",
            &unnoticed,
            Some(LAST),
            |_| {},
        ),
    ]
}

/// Undamaged logs with a removal or a salvage.
fn continued_logs() -> Vec<Fixture> {
    let mut removed = Session::undamaged(DAMAGED, ROUNDS);
    removed.write(EntryKind::Tombstone, None, Vec::new(), |_| {});
    // The session was salvaged and continued: the claim refers to the last undamaged entry.
    let mut session = Session::undamaged(DAMAGED, ROUNDS);
    session.rollback_to(DAMAGED_SEQ - 1);
    session.writer = "writer-b";
    session.claim(Some((LAST, DAMAGED_SEQ - 1)));
    session.round(9, |_| {});
    session.round(10, |_| {});
    let key = session.key(DAMAGED_SEQ);
    vec![
        fixture("removed", &removed, None, |_| {}),
        fixture(
            "continued-after-damage",
            &session,
            Some(LAST + 3),
            |objects| flip(objects.get_mut(&key).unwrap()),
        ),
    ]
}
