//! Property tests of the pure parts of the log: chains with gaps, late foreign entries and damage;
//! log states against a model of bytes.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::sample::Index;
use sessiond::codec::entry::{Entry, decode, encode};
use sessiond::error::{Error, ErrorKind};
use sessiond::log::chain::EntryChain;
use sessiond::log::state::LogState;
use sessiond::model::{
    CoveredRange, Digest, EntryHeader, EntryKind, FileKind, FileMove, Part, RelPath, Seq,
};

fn header(seq: Seq, prev: Option<Digest>, after: Option<Seq>, writer: &str) -> EntryHeader {
    let text = serde_json::json!({
        "version": 1, "kind": EntryKind::Delta, "namespace": "n", "agent": "a", "session": "s", "seq": seq, "writer": writer, "at": "2026-05-01T12:00:00Z",
        "prev_digest": prev,
    });
    EntryHeader {
        prev_seq: after,
        ..serde_json::from_value(text).unwrap()
    }
}

fn read_back(header: EntryHeader) -> Result<Entry, Error> {
    // A writer refuses what a reader rejects.
    let encoded = encode::<Vec<u8>>(header, &[]);
    let encoded = encoded.map_err(|error| Error::corrupt(error.to_string()))?;
    decode("x", &encoded.bytes)
}

fn entry(header: EntryHeader) -> Entry {
    read_back(header).unwrap()
}

/// The content of one seq.
#[derive(Debug, Clone)]
struct SeqSlot {
    entry: Entry,
    /// Written by a process that crashed between reserving the seq and writing. Only other orphans
    /// continue from it.
    is_orphan: bool,
}

/// A log as its writers left it. `gaps` gives the number of skipped seqs before each entry, and
/// whether the orphans there form a chain.
fn history(gaps: &[(usize, bool)]) -> Vec<SeqSlot> {
    let mut all: Vec<SeqSlot> = Vec::new();
    let (mut last, mut digest, mut seq) = (0, None, 0);
    for (gap, linked) in gaps {
        for nth in 0..*gap {
            seq += 1;
            let (last, digest) = match all.last() {
                Some(before) if *linked && nth > 0 => (seq - 1, Some(before.entry.digest)),
                _ => (last, digest),
            };
            let after = (seq != last + 1).then_some(last);
            // Each has its own writer: a crashed writer wrote nothing after it.
            all.push(SeqSlot {
                entry: entry(header(seq, digest, after, &format!("dead{seq}"))),
                is_orphan: true,
            });
        }
        seq += 1;
        let after = (seq != last + 1).then_some(last);
        let entry = entry(header(seq, digest, after, "w"));
        (last, digest) = (seq, Some(entry.digest));
        all.push(SeqSlot {
            entry,
            is_orphan: false,
        });
    }
    all
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Damage {
    Sound,
    Missing,
    Corrupt,
}

/// All entries that are read, and the final error.
fn read(
    numbers: impl IntoIterator<Item = (Seq, Result<Entry, Error>)>,
) -> (Vec<Entry>, Option<Error>) {
    let mut chain = EntryChain::new("session s", 0, None);
    let mut out = Vec::new();
    for (seq, read) in numbers {
        match chain.push(seq, read) {
            Ok(certain) => out.extend(certain),
            Err(error) => return (out, Some(error)),
        }
    }
    loop {
        match chain.pop() {
            Ok(Some(entry)) => out.push(entry),
            Ok(None) => return (out, None),
            Err(error) => return (out, Some(error)),
        }
    }
}

fn is_linked(out: &[Entry]) -> bool {
    let begins = out
        .first()
        .is_none_or(|first| first.header.predecessor() == 0);
    begins
        && out.windows(2).all(|two| {
            two[1].header.predecessor() == two[0].header.seq
                && two[1].header.prev_digest == Some(two[0].digest)
        })
}

fn numbers(entries: &[Entry]) -> Vec<Seq> {
    entries.iter().map(|entry| entry.header.seq).collect()
}

/// Up to as many consecutive orphans as the chain buffers.
fn gaps() -> impl Strategy<Value = Vec<(usize, bool)>> {
    proptest::collection::vec(
        (
            prop_oneof![5 => Just(0usize), 1 => 1usize..=4],
            any::<bool>(),
        ),
        1..14,
    )
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config(600))]

    #[test]
    fn the_undamaged_prefix_is_read_and_damage_is_reported(
        gaps in gaps(),
        fates in proptest::collection::vec(prop_oneof![12 => Just(Damage::Sound), 1 => Just(Damage::Missing), 1 => Just(Damage::Corrupt)], 70),
        late in proptest::collection::vec(any::<bool>(), 70),
        all_is_there in any::<bool>(),
    ) {
        let all = history(&gaps);
        let fate = |at: usize| match all[at].is_orphan {
            _ if all_is_there => Damage::Sound,
            // The write of an orphan may or may not have arrived.
            true if !late[at] => Damage::Missing,
            _ => fates[at],
        };
        let given = all.iter().enumerate().filter(|(at, _)| fate(*at) != Damage::Missing).map(|(at, number)| {
            let seq = number.entry.header.seq;
            (seq, if fate(at) == Damage::Corrupt { Err(Error::corrupt("damaged")) } else { Ok(number.entry.clone()) })
        });
        let (out, error) = read(given);
        prop_assert!(is_linked(&out), "{:?}", numbers(&out));

        let ours: Vec<usize> = (0..all.len()).filter(|at| !all[*at].is_orphan).collect();
        let damage = ours.iter().position(|at| fate(*at) != Damage::Sound);
        let undamaged: Vec<Entry> = ours[..damage.unwrap_or(ours.len())].iter().map(|at| all[*at].entry.clone()).collect();
        prop_assert!(numbers(&out).starts_with(&numbers(&undamaged)), "{:?} of {:?}", numbers(&out), numbers(&undamaged));
        let Some(damage) = damage else {
            prop_assert_eq!(numbers(&out), numbers(&undamaged));
            prop_assert!(error.is_none());
            return Ok(());
        };
        // Of the later entries only an orphan can be read, because no later entry skips it.
        let (before, at) = (damage.checked_sub(1).map(|before| ours[before]), ours[damage]);
        let rest = &out[undamaged.len()..];
        prop_assert!(rest.iter().all(|entry| entry.header.seq < all[at].entry.header.seq && entry.header.writer.as_str().starts_with("dead")));
        // A log that only ends earlier is valid.
        let goes_on = (at + 1..all.len()).any(|at| fate(at) != Damage::Missing);
        let first = before.map_or(0, |before| before + 1);
        let unread = (first..all.len()).any(|at| fate(at) == Damage::Corrupt);
        let follows = |at: usize, before: usize| all[at].entry.header.prev_digest == Some(all[before].entry.digest);
        let torn = (first + 1..at).any(|at| fate(at) == Damage::Sound && fate(at - 1) == Damage::Missing && follows(at, at - 1));
        prop_assert_eq!(error.map(|error| error.kind()), (goes_on || unread || torn).then_some(ErrorKind::Corrupt));
    }

    #[test]
    fn only_a_linked_chain_is_read_from_any_bucket(
        numbers in proptest::collection::vec((1u64..4, after(), any::<Index>(), link()), 0..14),
    ) {
        let mut seq = 0;
        let mut entries: Vec<Entry> = Vec::new();
        let mut given = Vec::new();
        for (step, after, any, link) in numbers {
            seq += step;
            let prev = match link {
                LinkKind::Nothing => None,
                LinkKind::Any if !entries.is_empty() => Some(&entries[any.index(entries.len())]),
                _ => entries.last(),
            };
            let after = match after {
                Predecessor::Back(back) => Some(seq.saturating_sub(back)),
                Predecessor::Anything(number) => Some(number),
                Predecessor::Right => prev.map(|prev| prev.header.seq),
            };
            // The codec rejects invalid seqs, but they may be in the bucket.
            let entry = read_back(header(seq, prev.map(|prev| prev.digest), after, "w"));
            entries.extend(entry.as_ref().ok().cloned());
            given.push((seq, if link == LinkKind::Damaged { Err(Error::corrupt("damaged")) } else { entry }));
        }
        let (out, error) = read(given);
        prop_assert!(is_linked(&out), "{:?}", self::numbers(&out));
        prop_assert!(error.as_ref().is_none_or(|error| error.kind() == ErrorKind::Corrupt));
        // A log that is one chain is read completely.
        prop_assert!(!is_linked(&entries) || error.is_some() || out.len() == entries.len());
    }
}

/// How an entry refers to its predecessor.
#[derive(Debug, Clone)]
enum Predecessor {
    Right,
    Back(u64),
    Anything(u64),
}

fn after() -> impl Strategy<Value = Predecessor> {
    prop_oneof![4 => Just(Predecessor::Right), 2 => (0u64..6).prop_map(Predecessor::Back), 1 => any::<u64>().prop_map(Predecessor::Anything)]
}

/// The entry that a `prev_digest` refers to.
#[derive(Debug, Clone, Copy, PartialEq)]
enum LinkKind {
    Last,
    Any,
    Nothing,
    /// The entry is unreadable.
    Damaged,
}

fn link() -> impl Strategy<Value = LinkKind> {
    prop_oneof![6 => Just(LinkKind::Last), 2 => Just(LinkKind::Any), 1 => Just(LinkKind::Nothing), 1 => Just(LinkKind::Damaged)]
}

const PATHS: [&str; 4] = [
    "projects/a/s.jsonl",
    "projects/b/s.jsonl",
    "tasks/s/1",
    "tasks/s/2",
];

/// One entry: moves between files, and parts that truncate a file and append some bytes.
type Change = (Vec<(usize, usize)>, Vec<(usize, u8, Vec<u8>)>);

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let file = || 0..PATHS.len();
    let moves =
        prop_oneof![3 => Just(vec![]), 1 => proptest::collection::vec((file(), file()), 1..3)];
    let parts = proptest::collection::vec(
        (
            file(),
            any::<u8>(),
            proptest::collection::vec(any::<u8>(), 0..6),
        ),
        0..4,
    );
    proptest::collection::vec((moves, parts), 1..12)
}

proptest! {
    #![proptest_config(config(400))]

    #[test]
    fn the_log_state_matches_the_bytes(changes in changes(), beyond in any::<bool>()) {
        let path = |file: usize| PATHS[file].parse::<RelPath>().unwrap();
        let mut model: BTreeMap<RelPath, Vec<u8>> = BTreeMap::new();
        let mut state = LogState::default();
        for (at, (moves, parts)) in changes.into_iter().enumerate() {
            let mut header = header(at as Seq + 1, None, None, "w");
            for (from, to) in moves {
                if let Some(bytes) = model.remove(&path(from)) {
                    model.insert(path(to), bytes);
                }
                header.moves.push(FileMove { from: path(from), to: path(to) });
            }
            for (file, cut, more) in parts {
                let bytes = model.entry(path(file)).or_default();
                // Most appends are at the end.
                let start = if cut < 128 { bytes.len() } else { bytes.len() * usize::from(cut - 128) / 127 };
                bytes.truncate(start);
                bytes.extend_from_slice(&more);
                let (start, len, file_sha256) = (start as u64, more.len() as u64, Digest::of(bytes));
                header.parts.push(Part { path: path(file), kind: FileKind::Whole, start, len, file_sha256, mode: 0o600, mtime_ns: 7, seq: None, upload: None });
            }
            let digest = Digest::of(&[at as u8]);
            state.apply(&header, digest).unwrap();
            prop_assert_eq!((state.seq, state.digest), (header.seq, Some(digest)));
            let found: BTreeMap<_, _> = state.files.iter().map(|(path, file)| (path.clone(), (file.len, file.sha256))).collect();
            prop_assert_eq!(found, model.iter().map(|(path, bytes)| (path.clone(), (bytes.len() as u64, Digest::of(bytes)))).collect());
        }
        // A snapshot of it gives the same state, whatever the previous state was.
        let parts = state.files.iter().map(|(path, file)| Part {
            path: path.clone(),
            kind: file.kind,
            start: 0,
            len: file.len,
            file_sha256: file.sha256,
            mode: file.mode,
            mtime_ns: file.mtime_ns,
            seq: Some(file.seq),
            upload: None,
        });
        let first = header(state.seq, None, Some(0), "w");
        let (digest, began) = (state.digest.unwrap(), first.at);
        let covers = CoveredRange { first_seq: 1, digest, first_at: began, written_at: None, entries: state.seq, raw_bytes: state.raw_bytes, stored_bytes: 0, writers: BTreeMap::new() };
        let snapshot = EntryHeader { kind: EntryKind::Snapshot, parts: parts.collect(), covers: Some(covers), ..first };
        let mut again = LogState::default();
        let stray = Part { path: "stray".parse().unwrap(), kind: FileKind::Whole, start: 0, len: 1, file_sha256: Digest::of(b"x"), mode: 0, mtime_ns: 0, seq: None, upload: None };
        again.apply(&EntryHeader { parts: vec![stray], ..header(1, None, None, "w") }, Digest::of(b"")).unwrap();
        again.apply(&snapshot, state.digest.unwrap()).unwrap();
        prop_assert_eq!(&again, &state);
        // A part after the end of a file would leave a hole.
        let last = path(0);
        let start = model.get(&last).map_or(0, Vec::len) as u64 + u64::from(beyond);
        let part = Part { path: last, kind: FileKind::Whole, start, len: 1, file_sha256: Digest::of(b""), mode: 0, mtime_ns: 0, seq: None, upload: None };
        let gap = EntryHeader { parts: vec![part], ..header(state.seq + 1, None, None, "w") };
        prop_assert_eq!(state.apply(&gap, Digest::of(b"")).err().map(|error| error.kind()), beyond.then_some(ErrorKind::Corrupt));
    }
}
