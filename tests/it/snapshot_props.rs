//! Property tests of snapshots: they round-trip, and any change to a stored one is detected.

use std::io::Read;

use bytes::Bytes;
use proptest::prelude::*;
use proptest::sample::Index;
use sessiond::codec::entry::Entry;
use sessiond::codec::snapshot::{decode, encode};
use sessiond::error::{Error, ErrorKind, Result};
use sessiond::model::{Digest, EntryHeader, EntryKind, FileKind, Part};

type Files = Vec<(Part, Vec<u8>)>;

/// The archive in a snapshot.
fn inflate(stored: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    flate2::bufread::MultiGzDecoder::new(stored)
        .read_to_end(&mut bytes)
        .unwrap();
    bytes
}

fn name() -> impl Strategy<Value = String> {
    // Up to the limit of a file system; the plain tar header holds 100 bytes.
    prop_oneof![6 => "[a-zA-Z0-9_ -]{1,12}", 1 => "[a-z]{80,110}", 1 => "[a-z]{255}", 1 => "[äß😀.]{1,20}x"]
}

fn part(path: &str, bytes: &[u8], mode: u32, mtime_ns: i64, seq: u64) -> Part {
    let kind = if path.ends_with(".jsonl") {
        FileKind::Append
    } else {
        FileKind::Whole
    };
    let (len, file_sha256) = (bytes.len() as u64, Digest::of(bytes));
    Part {
        path: path.parse().unwrap(),
        kind,
        start: 0,
        len,
        file_sha256,
        mode,
        mtime_ns,
        seq: Some(seq),
        upload: None,
    }
}

fn files() -> impl Strategy<Value = Files> {
    let bytes = prop_oneof![1 => Just(Vec::new()), 4 => proptest::collection::vec(any::<u8>(), 1..700), 1 => Just(vec![b'x'; 300_000])];
    let file = (
        proptest::collection::vec(name(), 1..4),
        bytes,
        0u32..0o1000,
        any::<i64>(),
        0u64..8,
    );
    proptest::collection::vec(file, 0..6).prop_map(|files| {
        let files =
            files
                .into_iter()
                .enumerate()
                .map(|(at, (names, bytes, mode, mtime_ns, seq))| {
                    (
                        part(
                            &format!("{at}/{}", names.join("/")),
                            &bytes,
                            mode,
                            mtime_ns,
                            seq,
                        ),
                        bytes,
                    )
                });
        files.collect()
    })
}

fn header(files: &Files) -> EntryHeader {
    let text = serde_json::json!({
        "version": 1, "kind": EntryKind::Snapshot, "namespace": "n", "agent": "a", "session": "s", "seq": 7, "writer": "w", "at": "2026-05-01T12:00:00Z",
        "prev_digest": null, "prev_seq": 0,
        "covers": {
            "first_seq": 1, "digest": Digest::of(b"entry 7"), "first_at": "2026-05-01T11:00:00Z", "entries": 7, "raw_bytes": 9, "stored_bytes": 9, "writers": {},
        },
    });
    EntryHeader {
        parts: files.iter().map(|(part, _)| part.clone()).collect(),
        ..serde_json::from_value(text).unwrap()
    }
}

fn stored(files: &Files) -> Bytes {
    encode(
        header(files),
        &files.iter().map(|(_, bytes)| bytes).collect::<Vec<_>>(),
    )
    .unwrap()
    .bytes
}

/// What a restore does with a snapshot: decode, compare each file with its digest.
fn read(stored: &[u8]) -> Result<Entry> {
    let entry = decode("x", stored)?;
    let right = entry
        .parts()
        .all(|(part, bytes)| Digest::of(bytes) == part.file_sha256);
    if right {
        Ok(entry)
    } else {
        Err(Error::corrupt("another digest"))
    }
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config(96))]

    #[test]
    fn a_snapshot_round_trips(files in files()) {
        let entry = read(&stored(&files)).unwrap();
        prop_assert_eq!(&entry.header, &header(&files));
        prop_assert!(entry.parts().map(|(_, bytes)| bytes).eq(files.iter().map(|(_, bytes)| bytes.as_slice())));
    }

    #[test]
    fn a_truncated_snapshot_is_rejected(files in files(), at in any::<Index>()) {
        let stored = stored(&files);
        let cut = read(&stored[..at.index(stored.len())]);
        prop_assert_eq!(cut.err().map(|error| error.kind()), Some(ErrorKind::Corrupt));
    }
}

#[test]
fn a_flipped_byte_in_a_snapshot_is_detected() {
    let file = |path: &str, bytes: &[u8]| (part(path, bytes, 0o600, 5, 1), bytes.to_vec());
    let one = vec![file(
        "projects/-w/s.jsonl",
        &b"{\"type\":\"user\"}\n".repeat(20),
    )];
    let mut many = one.clone();
    many.extend([
        file("tasks/s/empty", b""),
        file(&format!("tasks/s/{}", "n".repeat(120)), b"{}"),
    ]);
    for files in [one, many] {
        let whole = stored(&files).to_vec();
        for at in 0..whole.len() {
            for flip in 1..=u8::MAX {
                let mut bytes = whole.clone();
                bytes[at] ^= flip;
                match read(&bytes) {
                    Err(error) => assert_eq!(
                        error.kind(),
                        ErrorKind::Corrupt,
                        "byte {at} ^ {flip}: {error}"
                    ),
                    // A gzip stream has bits without data: the time in its header, and the
                    // padding of its last byte.
                    Ok(entry) => {
                        assert!(
                            inflate(&bytes) == inflate(&whole),
                            "byte {at} ^ {flip} was not noticed"
                        );
                        assert_eq!(entry.header, header(&files));
                    }
                }
            }
        }
    }
}
