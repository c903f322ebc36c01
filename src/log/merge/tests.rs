//! Generated histories, merged in any way, against the same entries one by one.

use std::collections::BTreeSet;

use proptest::prelude::*;
use proptest::sample::Index;

use super::*;
use crate::error::ErrorKind;
use crate::log::chain::EntryChain;
use crate::log::state::LogState;
use crate::model::FileKind;

/// What a writer does next.
#[derive(Debug, Clone)]
enum Act {
    Claim,
    /// A claim behind a log that was deleted for good.
    Anew,
    Remove {
        for_good: bool,
    },
    Delta {
        moves: Vec<(u8, u8)>,
        parts: BTreeMap<u8, (Cut, Vec<u8>)>,
    },
}

/// Where a part begins.
#[derive(Debug, Clone)]
enum Cut {
    End,
    Beginning,
    Middle(Index),
}

fn path(number: u8) -> RelPath {
    format!("f{number}").parse().unwrap()
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let cut = prop_oneof![4 => Just(Cut::End), 2 => Just(Cut::Beginning), 1 => any::<Index>().prop_map(Cut::Middle)];
    let part = (cut, proptest::collection::vec(any::<u8>(), 0..12));
    let parts = proptest::collection::btree_map(0u8..4, part, 0..4);
    // More than one makes swaps, through a third path or not at all.
    let moves =
        prop_oneof![3 => Just(Vec::new()), 2 => proptest::collection::vec((0u8..4, 0u8..4), 1..4)];
    let delta = (moves, parts).prop_map(|(moves, parts)| Act::Delta { moves, parts });
    let remove = any::<bool>().prop_map(|for_good| Act::Remove { for_good });
    proptest::collection::vec(
        prop_oneof![12 => delta, 2 => Just(Act::Claim), 1 => Just(Act::Anew), 1 => remove],
        2..16,
    )
}

/// A log as it is read: what `LogState` says, and the bytes, put together in the plainest way.
#[derive(Debug, Default, PartialEq)]
struct Model {
    state: LogState,
    files: BTreeMap<RelPath, Vec<u8>>,
}

impl Model {
    fn of(pieces: &[Entry]) -> Model {
        let mut model = Model::default();
        pieces.iter().for_each(|piece| model.take(piece));
        model
    }

    fn take(&mut self, entry: &Entry) {
        self.state.apply(&entry.header, entry.digest).unwrap();
        if entry.header.begins_anew() || entry.header.kind == EntryKind::Snapshot {
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

/// The entries that these acts write.
fn history(acts: Vec<Act>) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    let mut model = Model::default();
    let mut writer = 0;
    for act in [Act::Claim].into_iter().chain(acts) {
        // Behind a removal comes a claim, and nothing else.
        let act = match (model.state.removed, act) {
            (Some(EntryKind::Purge), _) => Act::Anew,
            (Some(_), _) => Act::Claim,
            (None, act) => act,
        };
        let seq = entries.len() as Seq + 1;
        let (kind, after, moves, parts) = match act {
            Act::Claim => (EntryKind::Claim, None, Vec::new(), BTreeMap::new()),
            Act::Anew => (EntryKind::Claim, Some(0), Vec::new(), BTreeMap::new()),
            Act::Remove { for_good: true } => (EntryKind::Purge, None, Vec::new(), BTreeMap::new()),
            Act::Remove { for_good: false } => {
                (EntryKind::Tombstone, None, Vec::new(), BTreeMap::new())
            }
            Act::Delta { moves, parts } => (EntryKind::Delta, None, moves, parts),
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
        for (number, (cut, bytes)) in parts {
            let mut file = moved.get(&path(number)).cloned().unwrap_or_default();
            let start = match cut {
                Cut::End => file.len(),
                Cut::Beginning => 0,
                Cut::Middle(at) => at.index(file.len() + 1),
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
            });
            bodies.push(bytes);
        }
        let header = EntryHeader {
            v: FORMAT,
            kind,
            agent: "a".parse().unwrap(),
            session: "s".parse().unwrap(),
            seq,
            writer: format!("w{writer}").parse().unwrap(),
            at: Timestamp::from_second(seq as i64).unwrap(),
            prev: if after == Some(0) {
                None
            } else {
                entries.last().map(|entry| entry.digest)
            },
            after,
            covers: None,
            moves,
            parts: written,
            checkpoints: Vec::new(),
            fork: None,
            back_to: None,
        };
        let entry = entry::decode("x", &entry::encode(header, &bodies).unwrap().bytes).unwrap();
        model.take(&entry);
        entries.push(entry);
    }
    entries
}

/// The one thing that a merge may not know: a file that the run has not seen moves onto one that it has, and is not
/// written anew there before it moves on.
fn is_ambiguous(pieces: &[Entry]) -> bool {
    let mut seen: BTreeSet<&RelPath> = BTreeSet::new();
    let mut from_nothing = false;
    for Entry { header, .. } in pieces {
        if header.begins_anew() || header.kind == EntryKind::Snapshot || header.follows() == 0 {
            (seen, from_nothing) = (BTreeSet::new(), true);
        }
        for (at, moved) in header.moves.iter().enumerate() {
            let moves_on = header
                .moves
                .iter()
                .skip(at + 1)
                .any(|next| next.from == moved.to);
            let anew = !moves_on
                && header
                    .parts
                    .iter()
                    .any(|part| part.path == moved.to && part.start == 0);
            if seen.remove(&moved.from) {
                seen.insert(&moved.to);
            } else if !from_nothing && seen.contains(&moved.to) && !anew {
                return true;
            }
        }
        seen.extend(header.parts.iter().map(|part| &part.path));
    }
    false
}

/// Puts one piece in the place of a run of them, as a reader would.
fn merge(pieces: &mut Vec<Entry>, first: usize, last: usize) -> Result<(), TestCaseError> {
    let run = &pieces[first..=last];
    let mut merger = Merger::default();
    for piece in run {
        if let Err(error) = merger.take(piece) {
            prop_assert_eq!(error.kind(), ErrorKind::Conflict);
            prop_assert!(
                is_ambiguous(run),
                "{} in {:#?}",
                error,
                run.iter().map(|piece| &piece.header).collect::<Vec<_>>()
            );
            return Ok(());
        }
    }
    let header = &run[0].header;
    let from = header
        .covers
        .as_ref()
        .map_or(header.seq, |covers| covers.from);
    let Some(made) = merger.finish(from).unwrap() else {
        prop_assert!(
            run.last().unwrap().header.kind.is_removal(),
            "nothing was made"
        );
        return Ok(());
    };
    let is_snapshot = made.header.kind == EntryKind::Snapshot;
    let decoded = if is_snapshot {
        snapshot::decode("x", &made.bytes)
    } else {
        entry::decode("x", &made.bytes)
    };
    // A snapshot stands for all that came before, too.
    pieces.splice(
        if is_snapshot { 0 } else { first }..=last,
        [decoded.unwrap()],
    );
    Ok(())
}

fn assert_linked(pieces: &[Entry]) {
    let mut chain = EntryChain::new("the log", 0, None);
    let mut out = Vec::new();
    for piece in pieces {
        out.extend(chain.push(piece.header.seq, Ok(piece.clone())).unwrap());
    }
    while let Some(piece) = chain.pop().unwrap() {
        out.push(piece);
    }
    // What came before a claim that begins anew does not have to come out.
    let begins = pieces
        .iter()
        .rposition(|piece| piece.header.begins_anew())
        .unwrap_or(0);
    let seqs = |pieces: &[Entry]| {
        pieces
            .iter()
            .map(|piece| piece.header.seq)
            .collect::<Vec<_>>()
    };
    assert!(seqs(&out).ends_with(&seqs(&pieces[begins..])));
    assert_eq!(Model::of(&out), Model::of(pieces));
}

proptest! {
    #[test]
    fn however_a_history_is_merged_it_is_the_same_history(
        acts in acts(),
        merges in proptest::collection::vec((any::<Index>(), 1usize..6), 1..8),
    ) {
        let mut pieces = history(acts);
        let whole = Model::of(&pieces);
        for (at, more) in merges {
            if pieces.len() < 2 {
                break;
            }
            let first = at.index(pieces.len() - 1);
            let last = (first + more).min(pieces.len() - 1);
            merge(&mut pieces, first, last)?;
            prop_assert_eq!(&Model::of(&pieces), &whole);
            assert_linked(&pieces);
        }
    }

    #[test]
    fn from_the_first_entry_everything_can_be_merged_and_is_a_snapshot(acts in acts(), parts in 1usize..5) {
        let mut pieces = history(acts);
        let whole = Model::of(&pieces);
        // In steps, as the schedule does it: each swallows the one before.
        let step = pieces.len().div_ceil(parts).max(2);
        while pieces.len() > 1 {
            let before = pieces.len();
            let last = (step - 1).min(before - 1);
            merge(&mut pieces, 0, last)?;
            prop_assert_eq!(&Model::of(&pieces), &whole);
            if pieces.len() == before {
                // It ends with a removal, which only its entry may tell.
                prop_assert!(pieces[last].header.kind.is_removal());
                break;
            }
            prop_assert_eq!(pieces[0].header.kind, EntryKind::Snapshot);
        }
    }
}

#[test]
fn a_file_that_moves_on_in_the_same_step_is_not_taken_for_the_one_it_replaced() {
    let delta = |moves: &[(u8, u8)], parts: &[(u8, &[u8])]| Act::Delta {
        moves: moves.to_vec(),
        parts: parts
            .iter()
            .map(|(number, bytes)| (*number, (Cut::End, bytes.to_vec())))
            .collect(),
    };
    let mut pieces = history(vec![
        delta(&[], &[(0, b"zero")]),
        delta(&[], &[(1, b"one")]),
        // As one piece: 0 becomes 1, 1 becomes 2, and 1 is written anew.
        delta(&[(0, 1)], &[]),
        delta(&[(1, 2)], &[(1, b"new"), (2, b" and more")]),
    ]);
    let whole = Model::of(&pieces);
    merge(&mut pieces, 3, 4).unwrap();
    assert_eq!((pieces.len(), &Model::of(&pieces)), (4, &whole));
    merge(&mut pieces, 2, 3).unwrap();
    assert_eq!(
        (pieces.len(), &Model::of(&pieces)),
        (4, &whole),
        "it cannot be known which file is 2"
    );
    merge(&mut pieces, 0, 3).unwrap();
    assert_eq!(
        (pieces.len(), &Model::of(&pieces)),
        (1, &whole),
        "from the first entry on it is"
    );
}

#[test]
fn a_run_that_ends_with_a_removal_is_left_alone_and_one_that_begins_with_it_is_not() {
    let write = |number: u8| {
        let parts = BTreeMap::from([(number, (Cut::End, b"text".to_vec()))]);
        Act::Delta {
            moves: Vec::new(),
            parts,
        }
    };
    let entries = history(vec![
        write(0),
        Act::Remove { for_good: false },
        Act::Claim,
        write(1),
    ]);
    let merged = |run: &[Entry]| {
        let mut merger = Merger::default();
        run.iter().for_each(|entry| merger.take(entry).unwrap());
        merger.finish(run[0].header.seq).unwrap()
    };
    assert!(merged(&entries[..3]).is_none());
    assert!(merged(&entries[1..3]).is_none());
    assert_eq!(merged(&entries[2..]).unwrap().header.kind, EntryKind::Merge);
}
