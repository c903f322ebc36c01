//! Compares generated histories, merged in any way, with their single entries.

use std::collections::BTreeSet;

use proptest::prelude::*;
use proptest::sample::Index;

use super::*;
use crate::error::ErrorKind;
use crate::log::chain::EntryChain;
use crate::log::state::LogState;
use crate::model::FileKind;

/// An action of a writer.
#[derive(Debug, Clone)]
enum Action {
    Claim,
    /// A claim after a purge.
    Reset,
    Remove {
        permanent: bool,
    },
    Delta {
        moves: Vec<(u8, u8)>,
        parts: BTreeMap<u8, (Start, Vec<u8>)>,
    },
}

/// Where a part starts.
#[derive(Debug, Clone)]
enum Start {
    End,
    Beginning,
    Middle(Index),
}

fn path(number: u8) -> RelPath {
    format!("f{number}").parse().unwrap()
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let start = prop_oneof![4 => Just(Start::End), 2 => Just(Start::Beginning), 1 => any::<Index>().prop_map(Start::Middle)];
    let part = (start, proptest::collection::vec(any::<u8>(), 0..12));
    let parts = proptest::collection::btree_map(0u8..4, part, 0..4);
    // Several moves can swap files, directly or through a third path.
    let moves =
        prop_oneof![3 => Just(Vec::new()), 2 => proptest::collection::vec((0u8..4, 0u8..4), 1..4)];
    let delta = (moves, parts).prop_map(|(moves, parts)| Action::Delta { moves, parts });
    let remove = any::<bool>().prop_map(|permanent| Action::Remove { permanent });
    proptest::collection::vec(
        prop_oneof![12 => delta, 2 => Just(Action::Claim), 1 => Just(Action::Reset), 1 => remove],
        2..16,
    )
}

/// A log as it is read: its `LogState`, and the bytes, assembled in the simplest way.
#[derive(Debug, Default, PartialEq)]
struct Model {
    state: LogState,
    files: BTreeMap<RelPath, Vec<u8>>,
}

impl Model {
    fn of(segments: &[Entry]) -> Model {
        let mut model = Model::default();
        segments.iter().for_each(|segment| model.apply(segment));
        model
    }

    fn apply(&mut self, entry: &Entry) {
        self.state.apply(&entry.header, entry.digest).unwrap();
        if entry.header.resets_log() || entry.header.kind == EntryKind::Snapshot {
            self.files.clear();
        }
        for moved in &entry.header.moves {
            if let Some(file) = self.files.remove(&moved.from) {
                self.files.insert(moved.to.clone(), file);
            }
        }
        for (part, bytes) in entry.parts() {
            let file = self.files.entry(part.path.clone()).or_default();
            file.truncate(part.start as usize);
            file.extend_from_slice(bytes);
            assert_eq!(
                Digest::of(file),
                part.file_sha256,
                "{} after entry {}",
                part.path,
                entry.header.seq
            );
        }
    }
}

/// The entries that these actions write.
fn history(actions: Vec<Action>) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    let mut model = Model::default();
    let mut writer = 0;
    for action in [Action::Claim].into_iter().chain(actions) {
        // Only a claim follows a removal.
        let action = match (model.state.removed, action) {
            (Some(EntryKind::Purge), _) => Action::Reset,
            (Some(_), _) => Action::Claim,
            (None, action) => action,
        };
        let seq = entries.len() as Seq + 1;
        let (kind, after, moves, parts) = match action {
            Action::Claim => (EntryKind::Claim, None, Vec::new(), BTreeMap::new()),
            Action::Reset => (EntryKind::Claim, Some(0), Vec::new(), BTreeMap::new()),
            Action::Remove { permanent: true } => {
                (EntryKind::Purge, None, Vec::new(), BTreeMap::new())
            }
            Action::Remove { permanent: false } => {
                (EntryKind::Tombstone, None, Vec::new(), BTreeMap::new())
            }
            Action::Delta { moves, parts } => (EntryKind::Delta, None, moves, parts),
        };
        if kind != EntryKind::Delta {
            writer += 1;
        }
        let moves: Vec<FileMove> = moves
            .into_iter()
            .map(|(from, to)| FileMove {
                from: path(from),
                to: path(to),
            })
            .collect();
        let mut moved = model.files.clone();
        for FileMove { from, to } in &moves {
            if let Some(file) = moved.remove(from) {
                moved.insert(to.clone(), file);
            }
        }
        let (mut written, mut bodies) = (Vec::new(), Vec::new());
        for (number, (start, bytes)) in parts {
            let mut file = moved.get(&path(number)).cloned().unwrap_or_default();
            let start = match start {
                Start::End => file.len(),
                Start::Beginning => 0,
                Start::Middle(at) => at.index(file.len() + 1),
            };
            file.truncate(start);
            file.extend_from_slice(&bytes);
            written.push(Part {
                path: path(number),
                kind: if number % 2 == 0 {
                    FileKind::Append
                } else {
                    FileKind::Whole
                },
                start: start as u64,
                len: bytes.len() as u64,
                file_sha256: Digest::of(&file),
                mode: 0o600 + (seq % 8) as u32,
                mtime_ns: seq as i64,
                seq: None,
                upload: None,
            });
            bodies.push(bytes);
        }
        let header = EntryHeader {
            version: version::ENTRY,
            kind,
            namespace: "n".parse().unwrap(),
            agent: "a".parse().unwrap(),
            session: "s".parse().unwrap(),
            seq,
            writer: format!("w{writer}").parse().unwrap(),
            at: Timestamp::from_second(seq as i64).unwrap(),
            prev_digest: if after == Some(0) {
                None
            } else {
                entries.last().map(|entry| entry.digest)
            },
            prev_seq: after,
            covers: None,
            moves,
            parts: written,
            checkpoints: Vec::new(),
            keep_checkpoints: None,
            fork: None,
            rollback_to: None,
            rollback_checkpoint: None,
            adopted: Vec::new(),
        };
        let entry = entry::decode("x", &entry::encode(header, &bodies).unwrap().bytes).unwrap();
        model.apply(&entry);
        entries.push(entry);
    }
    entries
}

/// The one case that a merge cannot decide: a file from before the range replaces one of the range,
/// and is not rewritten there before it moves again.
fn is_ambiguous(segments: &[Entry]) -> bool {
    let mut seen: BTreeSet<&RelPath> = BTreeSet::new();
    let mut starts_log = false;
    for Entry { header, .. } in segments {
        if header.resets_log() || header.kind == EntryKind::Snapshot || header.predecessor() == 0 {
            (seen, starts_log) = (BTreeSet::new(), true);
        }
        for (index, moved) in header.moves.iter().enumerate() {
            let moves_again = header
                .moves
                .iter()
                .skip(index + 1)
                .any(|next| next.from == moved.to);
            let is_rewritten = !moves_again
                && header
                    .parts
                    .iter()
                    .any(|part| part.path == moved.to && part.start == 0);
            if seen.remove(&moved.from) {
                seen.insert(&moved.to);
            } else if !starts_log && seen.contains(&moved.to) && !is_rewritten {
                return true;
            }
        }
        seen.extend(header.parts.iter().map(|part| &part.path));
    }
    false
}

/// Replaces a range of segments by one, as a reader would.
fn merge(segments: &mut Vec<Entry>, first: usize, last: usize) -> Result<(), TestCaseError> {
    let range = &segments[first..=last];
    let mut merger = Merger::default();
    for segment in range {
        if let Err(error) = merger.apply_entry(segment) {
            prop_assert_eq!(error.kind(), ErrorKind::Conflict);
            prop_assert!(
                is_ambiguous(range),
                "{} in {:#?}",
                error,
                range
                    .iter()
                    .map(|segment| &segment.header)
                    .collect::<Vec<_>>()
            );
            return Ok(());
        }
    }
    let header = &range[0].header;
    let first_seq = header
        .covers
        .as_ref()
        .map_or(header.seq, |covers| covers.first_seq);
    let Some(merged) = merger.finish(first_seq).unwrap() else {
        prop_assert!(
            range.last().unwrap().header.kind.is_removal(),
            "nothing was merged"
        );
        return Ok(());
    };
    let is_snapshot = merged.header.kind == EntryKind::Snapshot;
    let decoded = if is_snapshot {
        snapshot::decode("x", &merged.bytes)
    } else {
        entry::decode("x", &merged.bytes)
    };
    // A snapshot covers everything before it, too.
    segments.splice(
        if is_snapshot { 0 } else { first }..=last,
        [decoded.unwrap()],
    );
    Ok(())
}

fn assert_linked(segments: &[Entry]) {
    let mut chain = EntryChain::new("the log", 0, None);
    let mut released = Vec::new();
    for segment in segments {
        released.extend(chain.push(segment.header.seq, Ok(segment.clone())).unwrap());
    }
    while let Some(segment) = chain.pop().unwrap() {
        released.push(segment);
    }
    // Entries before a reset need not be released.
    let reset = segments
        .iter()
        .rposition(|segment| segment.header.resets_log())
        .unwrap_or(0);
    let seqs = |segments: &[Entry]| {
        segments
            .iter()
            .map(|segment| segment.header.seq)
            .collect::<Vec<_>>()
    };
    assert!(seqs(&released).ends_with(&seqs(&segments[reset..])));
    assert_eq!(Model::of(&released), Model::of(segments));
}

proptest! {
    #[test]
    fn a_merged_history_equals_the_single_entries(
        actions in actions(),
        merges in proptest::collection::vec((any::<Index>(), 1usize..6), 1..8),
    ) {
        let mut segments = history(actions);
        let expected = Model::of(&segments);
        for (start, more) in merges {
            if segments.len() < 2 {
                break;
            }
            let first = start.index(segments.len() - 1);
            let last = (first + more).min(segments.len() - 1);
            merge(&mut segments, first, last)?;
            prop_assert_eq!(&Model::of(&segments), &expected);
            assert_linked(&segments);
        }
    }

    #[test]
    fn a_range_from_the_first_entry_always_merges_into_a_snapshot(actions in actions(), parts in 1usize..5) {
        let mut segments = history(actions);
        let expected = Model::of(&segments);
        // In steps, as in the schedule: each includes the previous one.
        let step = segments.len().div_ceil(parts).max(2);
        while segments.len() > 1 {
            let before = segments.len();
            let last = (step - 1).min(before - 1);
            merge(&mut segments, 0, last)?;
            prop_assert_eq!(&Model::of(&segments), &expected);
            if segments.len() == before {
                // The range ends with a removal, which stays an entry.
                prop_assert!(segments[last].header.kind.is_removal());
                break;
            }
            prop_assert_eq!(segments[0].header.kind, EntryKind::Snapshot);
        }
    }
}

#[test]
fn a_file_that_moves_again_is_not_mistaken_for_the_one_it_replaced() {
    let delta = |moves: &[(u8, u8)], parts: &[(u8, &[u8])]| Action::Delta {
        moves: moves.to_vec(),
        parts: parts
            .iter()
            .map(|(number, bytes)| (*number, (Start::End, bytes.to_vec())))
            .collect(),
    };
    let mut segments = history(vec![
        delta(&[], &[(0, b"zero")]),
        delta(&[], &[(1, b"one")]),
        // Merged: 0 becomes 1, 1 becomes 2, and 1 is rewritten.
        delta(&[(0, 1)], &[]),
        delta(&[(1, 2)], &[(1, b"new"), (2, b" and more")]),
    ]);
    let expected = Model::of(&segments);
    merge(&mut segments, 3, 4).unwrap();
    assert_eq!((segments.len(), &Model::of(&segments)), (4, &expected));
    merge(&mut segments, 2, 3).unwrap();
    assert_eq!(
        (segments.len(), &Model::of(&segments)),
        (4, &expected),
        "it is unknown which file is 2"
    );
    merge(&mut segments, 0, 3).unwrap();
    assert_eq!(
        (segments.len(), &Model::of(&segments)),
        (1, &expected),
        "from the first entry on it is known"
    );
}

#[test]
fn a_range_that_ends_with_a_removal_is_not_merged() {
    let write = |number: u8| {
        let parts = BTreeMap::from([(number, (Start::End, b"text".to_vec()))]);
        Action::Delta {
            moves: Vec::new(),
            parts,
        }
    };
    let entries = history(vec![
        write(0),
        Action::Remove { permanent: false },
        Action::Claim,
        write(1),
    ]);
    let merged = |range: &[Entry]| {
        let mut merger = Merger::default();
        range
            .iter()
            .for_each(|entry| merger.apply_entry(entry).unwrap());
        merger.finish(range[0].header.seq).unwrap()
    };
    assert!(merged(&entries[..3]).is_none());
    assert!(merged(&entries[1..3]).is_none());
    assert_eq!(merged(&entries[2..]).unwrap().header.kind, EntryKind::Merge);
}
