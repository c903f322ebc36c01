//! Snapshots, generated: what goes in comes out, and whatever happens to a stored one is noticed.

use std::io::Read;

use bytes::Bytes;
use proptest::prelude::*;
use proptest::sample::Index;
use sessiond::codec::snapshot::{Manifest, Snapshot, build};
use sessiond::error::{Kind, Result};
use sessiond::model::{Digest, FileAt, FileKind, NamedFile};

type Files = Vec<(NamedFile, Vec<u8>)>;

/// The archive in a snapshot.
fn inflate(stored: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    flate2::bufread::MultiGzDecoder::new(stored).read_to_end(&mut bytes).unwrap();
    bytes
}

fn part() -> impl Strategy<Value = String> {
    // Up to what a file system takes; 100 bytes is where the plain header of tar ends.
    prop_oneof![6 => "[a-zA-Z0-9_ -]{1,12}", 1 => "[a-z]{80,110}", 1 => "[a-z]{255}", 1 => "[äß😀.]{1,20}x"]
}

fn files() -> impl Strategy<Value = Files> {
    let bytes = prop_oneof![1 => Just(Vec::new()), 4 => proptest::collection::vec(any::<u8>(), 1..700), 1 => Just(vec![b'x'; 300_000])];
    let file = (proptest::collection::vec(part(), 1..4), bytes, any::<bool>(), 0u32..0o1000, any::<i64>(), any::<u64>());
    proptest::collection::vec(file, 0..6).prop_map(|files| {
        let named = files.into_iter().enumerate().map(|(at, (parts, bytes, lines, mode, mtime_ns, seq))| {
            let kind = if lines { FileKind::Append } else { FileKind::Whole };
            let at = format!("{at}/{}", parts.join("/"));
            let file = FileAt { kind, len: bytes.len() as u64, sha256: Digest::of(&bytes), mode, mtime_ns, seq };
            (NamedFile { path: at.parse().unwrap(), at: file }, bytes)
        });
        named.collect()
    })
}

fn manifest(files: &Files) -> Manifest {
    Manifest {
        v: 1,
        agent: "a".parse().unwrap(),
        session: "s".parse().unwrap(),
        seq: 7,
        digest: Digest::of(b"entry 7"),
        at: "2026-05-01T12:00:00Z".parse().unwrap(),
        files: files.iter().map(|(file, _)| file.clone()).collect(),
    }
}

fn stored(files: &Files) -> Bytes {
    let mut sources = files.iter().map(|(_, bytes)| bytes.as_slice());
    build(&manifest(files), |_| Ok(sources.next().unwrap())).unwrap()
}

/// What a restore does with a snapshot: open, unpack, compare each file with its digest.
fn read(stored: Bytes) -> Result<(Manifest, Vec<Vec<u8>>)> {
    let snapshot = Snapshot::open("x", stored)?;
    let mut files: Vec<Vec<u8>> = Vec::new();
    snapshot.unpack(|_, offset, piece| {
        if offset == 0 {
            files.push(Vec::new());
        }
        files.last_mut().unwrap().extend_from_slice(piece);
        Ok(())
    })?;
    let wrong = files.iter().zip(&snapshot.manifest.files).any(|(bytes, file)| Digest::of(bytes) != file.at.sha256);
    if wrong { Err(sessiond::error::Error::corrupt("another digest")) } else { Ok((snapshot.manifest, files)) }
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config(96))]

    #[test]
    fn what_goes_into_a_snapshot_comes_out(files in files()) {
        let (found, bytes) = read(stored(&files)).unwrap();
        prop_assert_eq!(found, manifest(&files));
        prop_assert!(bytes.iter().eq(files.iter().map(|(_, bytes)| bytes)));
    }

    #[test]
    fn a_snapshot_that_ends_too_soon_is_refused(files in files(), at in any::<Index>()) {
        let stored = stored(&files);
        let cut = read(stored.slice(..at.index(stored.len())));
        prop_assert_eq!(cut.err().map(|error| error.kind()), Some(Kind::Corrupt));
    }
}

proptest! {
    #![proptest_config(config(1500))]

    #[test]
    fn a_flipped_byte_in_a_snapshot_is_noticed(at in any::<Index>(), flip in 1u8.., many in any::<bool>()) {
        let file = |path: &str, bytes: &[u8]| {
            let at = FileAt { kind: FileKind::Whole, len: bytes.len() as u64, sha256: Digest::of(bytes), mode: 0o600, mtime_ns: 5, seq: 1 };
            (NamedFile { path: path.parse().unwrap(), at }, bytes.to_vec())
        };
        let mut files = vec![file("projects/-w/s.jsonl", &b"{\"type\":\"user\"}\n".repeat(20))];
        if many {
            files.extend([file("tasks/s/empty", b""), file(&format!("tasks/s/{}", "n".repeat(120)), b"{}")]);
        }
        let whole = stored(&files);
        let mut bytes = whole.to_vec();
        let at = at.index(bytes.len());
        bytes[at] ^= flip;
        match read(Bytes::from(bytes.clone())) {
            Err(error) => prop_assert_eq!(error.kind(), Kind::Corrupt),
            // A gzip stream has bits that carry no data: the time in its header, and what fills up its last byte.
            Ok((found, _)) => {
                prop_assert!(inflate(&bytes) == inflate(&whole), "byte {at} of {} was flipped, and nobody noticed", whole.len());
                prop_assert_eq!(found, manifest(&files));
            }
        }
    }
}
