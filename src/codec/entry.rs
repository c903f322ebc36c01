//! Encoding of entries and merges: one gzip stream whose first line is the header, followed by the
//! bytes of its parts.

use std::io::{BufRead, BufReader, Read, Write};

use bytes::Bytes;
use flate2::Compression;
use flate2::bufread::MultiGzDecoder;
use flate2::write::GzEncoder;

use super::tar_gz::GZIP_MAGIC;
use super::version::{self, invalid};
use crate::error::{Error, ErrorKind, Result};
use crate::model::limits::{self, MAX_HEADER_LEN};
use crate::model::{Digest, EntryHeader, EntryKind, Part};

/// Raw bytes at which a delta is complete. A larger backlog is uploaded in several entries of this
/// size. This bounds the memory of writers and readers, and lets a restore decompress in parallel.
pub const TARGET_RAW_BYTES: u64 = 4 << 20;

/// Maximum raw bytes of a delta: a line of a transcript is uploaded in one entry up to this length.
pub const MAX_DELTA_RAW_BYTES: u64 = 8 << 20;

pub use crate::model::limits::MAX_RAW_BYTES;

/// Bytes that a part or a move uses of a size limit, in addition to its content and paths. This
/// bounds the header of an entry with many small files: its text has less than half of that size.
pub const PART_OVERHEAD: u64 = 1 << 10;

/// Length of a body from which on its encoding gets all its memory at once.
const LARGE_BODY: usize = 256 << 10;

/// Maximum compression ratio of deflate. A header that declares more bytes is invalid.
const MAX_RATIO: u64 = 1032;

/// Compression level of entries. Level 6 of zlib-rs has the ratio of flate2's default back end at
/// twice the speed.
const ENTRY_LEVEL: u32 = 6;

/// Compression level of merges and snapshots, which are written once and read often: 2 % smaller
/// than level 6, at two thirds of the speed. Level 9 of zlib-rs is slower, and larger than level 6.
const COMPACTED_LEVEL: u32 = 8;

/// An encoded entry.
#[derive(Debug, Clone)]
pub struct EncodedEntry {
    /// The header.
    pub header: EntryHeader,
    /// The bytes to store.
    pub bytes: Bytes,
    /// Their SHA-256.
    pub digest: Digest,
}

/// A decoded entry.
#[derive(Debug, Clone)]
pub struct Entry {
    /// The header.
    pub header: EntryHeader,
    /// The bytes of its parts, concatenated.
    pub body: Vec<u8>,
    /// Digest of the entry; for a merge or a snapshot that of the last entry it
    /// replaces. It is the `prev_digest` of the next entry.
    pub digest: Digest,
    /// Size as stored.
    pub stored_bytes: u64,
}

impl Entry {
    /// The entry with this header and body, decoded from `stored`.
    pub(super) fn new(header: EntryHeader, body: Vec<u8>, stored: &[u8]) -> Entry {
        let digest = header
            .covers
            .as_ref()
            .map_or_else(|| Digest::of(stored), |covers| covers.digest);
        Entry {
            header,
            body,
            digest,
            stored_bytes: stored.len() as u64,
        }
    }

    /// Each part with its bytes.
    pub fn parts(&self) -> impl Iterator<Item = (&Part, &[u8])> {
        let mut at = 0usize;
        self.header.parts.iter().map(move |part| {
            // `decode` has checked that the lengths add up to the body.
            let bytes = &self.body[at..at + part.len as usize];
            at += part.len as usize;
            (part, bytes)
        })
    }
}

pub(super) fn level(kind: EntryKind) -> Compression {
    Compression::new(if kind.is_compacted() {
        COMPACTED_LEVEL
    } else {
        ENTRY_LEVEL
    })
}

/// Encodes a header, and checks that every reader accepts it. Drops surplus checkpoints.
pub(super) fn encode_header(header: &mut EntryHeader) -> Result<Vec<u8>> {
    let (seq, kind) = (header.seq, header.kind);
    let name = || format!("encode {} {seq}", kind.as_str());
    header.drop_surplus_checkpoints();
    let line = serde_json::to_vec(&header)
        .map_err(|cause| Error::new(ErrorKind::Internal, name()).caused_by(cause))?;
    header
        .check_limits()
        .and_then(|()| {
            limits::check(
                "length of its header",
                line.len() as u64,
                MAX_HEADER_LEN - 1,
            )
        })
        // The content is in conflict with the format, and is not damaged.
        .map_err(|error| Error::conflict(error.to_string()).context(name()))?;
    Ok(line)
}

/// Encodes an entry or a merge; `bodies` are the bytes of the header's parts.
pub fn encode<B: AsRef<[u8]>>(mut header: EntryHeader, bodies: &[B]) -> Result<EncodedEntry> {
    let mut line = encode_header(&mut header)?;
    let failed = |cause: std::io::Error| {
        Error::new(ErrorKind::Internal, format!("encode entry {}", header.seq)).caused_by(cause)
    };
    line.push(b'\n');
    let body_len = header.body_len() as usize;
    let capacity = match body_len > LARGE_BODY {
        // Enough for bytes that do not compress: a vector that grows needs three times the memory.
        true => body_len + body_len / 1000,
        false => body_len / 3,
    };
    let mut gzip = GzEncoder::new(
        Vec::with_capacity(line.len() + capacity + 64),
        level(header.kind),
    );
    let stored = gzip
        .write_all(&line)
        .and_then(|()| {
            bodies
                .iter()
                .try_for_each(|body| gzip.write_all(body.as_ref()))
        })
        .and_then(|()| gzip.finish())
        .map_err(failed)?;
    let bytes = Bytes::from(stored);
    Ok(EncodedEntry {
        header,
        digest: Digest::of(&bytes),
        bytes,
    })
}

/// Decodes the entry that is stored at `key`, and checks everything that can be checked without the
/// previous entry.
pub fn decode(key: &str, stored: &[u8]) -> Result<Entry> {
    decode_up_to(key, stored, MAX_RAW_BYTES)?.ok_or_else(|| invalid(key, "it is too large"))
}

/// Like `decode`; none if the parts have more than `max` bytes, which are then not decompressed.
pub fn decode_up_to(key: &str, stored: &[u8], max: u64) -> Result<Option<Entry>> {
    let invalid = |why: String| invalid(key, why);
    let mut gzip = BufReader::new(MultiGzDecoder::new(stored));
    let mut line = Vec::new();
    let is_gzip = stored.starts_with(&GZIP_MAGIC);
    gzip.by_ref()
        .take(MAX_HEADER_LEN)
        .read_until(b'\n', &mut line)
        .map_err(|cause| match is_gzip {
            true => damaged_gzip(key, &cause),
            false => invalid(format!("it is not a gzip stream ({cause})")),
        })?;
    if line.last() != Some(&b'\n') {
        return Err(invalid("its header is incomplete".to_owned()));
    }
    let header = decode_header(key, &line, stored)?;
    if header.kind == EntryKind::Snapshot {
        return Err(invalid(
            "it is a snapshot where an entry is expected".to_owned(),
        ));
    }
    let declared = header.body_len();
    if declared > max {
        return Ok(None);
    }
    let mut body = Vec::with_capacity(declared as usize);
    gzip.take(declared + 1)
        .read_to_end(&mut body)
        .map_err(|cause| damaged_gzip(key, &cause))?;
    if body.len() as u64 != declared {
        return Err(invalid(format!(
            "its header declares {declared} bytes, but it has {}",
            if body.len() as u64 > declared {
                "more"
            } else {
                "fewer"
            }
        )));
    }
    Ok(Some(Entry::new(header, body, stored)))
}

/// Decodes and validates the header of an object of `stored` bytes, by its format version.
pub(super) fn decode_header(key: &str, json: &[u8], stored: &[u8]) -> Result<EntryHeader> {
    let version = version::read(key, json, version::ENTRY).map_err(|error| match error.kind() {
        ErrorKind::NewerFormat => damage_of(key, stored).unwrap_or(error),
        _ => error,
    })?;
    let header = match version {
        1 => decode_header_v1(key, json)?,
        other => return Err(version::unknown(key, other)),
    };
    validate_header(key, &header, stored.len() as u64)?;
    Ok(header)
}

/// What is wrong with the gzip stream `stored`: a damaged version number is not a newer format.
fn damage_of(key: &str, stored: &[u8]) -> Option<Error> {
    let mut gzip = MultiGzDecoder::new(stored).take(MAX_RAW_BYTES + MAX_HEADER_LEN);
    let read = std::io::copy(&mut gzip, &mut std::io::sink());
    read.err().map(|cause| damaged_gzip(key, &cause))
}

fn damaged_gzip(key: &str, cause: &std::io::Error) -> Error {
    invalid(key, format!("its gzip stream is damaged ({cause})"))
}

fn decode_header_v1(key: &str, json: &[u8]) -> Result<EntryHeader> {
    serde_json::from_slice(json)
        .map_err(|cause| invalid(key, format!("its header is damaged ({cause})")))
}

/// Rejects headers that no writer produces.
fn validate_header(key: &str, header: &EntryHeader, stored: u64) -> Result<()> {
    let declared = header.body_len();
    if declared > MAX_RAW_BYTES || declared > stored.saturating_mul(MAX_RATIO) {
        return Err(invalid(
            key,
            format!("it declares {declared} bytes in an object of {stored} bytes"),
        ));
    }
    if !matches!(header.kind, EntryKind::Delta)
        && !header.kind.is_compacted()
        && !header.parts.is_empty()
    {
        return Err(invalid(
            key,
            format!("it is a {} with parts", header.kind.as_str()),
        ));
    }
    let has_valid_range = match &header.covers {
        Some(covers) => {
            header.kind.is_compacted()
                && covers.first_seq > header.predecessor()
                && covers.first_seq <= header.seq
        }
        None => !header.kind.is_compacted(),
    };
    if !has_valid_range {
        return Err(invalid(key, "its sequence numbers are inconsistent"));
    }
    header.check_limits().map_err(|error| invalid(key, error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{FileKind, Part};
    use proptest::prelude::*;

    fn header(bodies: &[Vec<u8>]) -> EntryHeader {
        let parts = bodies.iter().enumerate().map(|(at, body)| Part {
            path: format!("projects/-w/{at}.jsonl").parse().unwrap(),
            kind: FileKind::Append,
            start: 0,
            len: body.len() as u64,
            file_sha256: Digest::of(body),
            mode: 0o600,
            mtime_ns: 7,
            seq: None,
            upload: None,
        });
        EntryHeader {
            version: version::ENTRY,
            kind: EntryKind::Delta,
            namespace: "team".parse().unwrap(),
            agent: "claude-code".parse().unwrap(),
            session: "s".parse().unwrap(),
            seq: 2,
            writer: "w".parse().unwrap(),
            at: "2026-05-01T12:00:00Z".parse().unwrap(),
            prev_digest: None,
            prev_seq: None,
            covers: None,
            moves: Vec::new(),
            parts: parts.collect(),
            checkpoints: Vec::new(),
            keep_checkpoints: None,
            fork: None,
            rollback_to: None,
            rollback_checkpoint: None,
            adopted: Vec::new(),
        }
    }

    proptest! {
        #[test]
        fn an_entry_round_trips(bodies in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..300), 0..5)) {
            let encoded = encode(header(&bodies), &bodies).unwrap();
            let entry = decode("x", &encoded.bytes).unwrap();
            prop_assert_eq!(&entry.header, &encoded.header);
            prop_assert_eq!(entry.digest, encoded.digest);
            let out: Vec<Vec<u8>> = entry.parts().map(|(_, bytes)| bytes.to_vec()).collect();
            prop_assert_eq!(out, bodies);
        }

        #[test]
        fn a_flipped_byte_is_detected(at in any::<proptest::sample::Index>(), flip in 1u8..) {
            let bodies = vec![b"{\"type\":\"user\"}\n".repeat(20)];
            let encoded = encode(header(&bodies), &bodies).unwrap();
            let mut bytes = encoded.bytes.to_vec();
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            // The gzip header holds a time and a flag that carry no data; the digest covers those.
            let detected = match decode("x", &bytes) {
                Err(error) => error.kind() == ErrorKind::Corrupt,
                Ok(entry) => entry.digest != encoded.digest,
            };
            prop_assert!(detected);
        }

        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = decode("x", &bytes);
            let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
            gzip.write_all(&bytes).unwrap();
            let _ = decode("x", &gzip.finish().unwrap());
        }
    }

    #[test]
    fn a_truncated_stream_and_a_bomb_are_rejected() {
        let bodies = vec![vec![b'x'; 5000]];
        let encoded = encode(header(&bodies), &bodies).unwrap();
        assert!(decode("x", &encoded.bytes[..encoded.bytes.len() - 9]).is_err());

        let mut bomb = header(&bodies);
        bomb.parts[0].len = 1 << 40;
        let error = decode("x", &encode_raw(&bomb, &[0; 10])).unwrap_err();
        assert!(error.to_string().contains("it declares"), "{error}");

        let mut longer = header(&bodies);
        longer.parts[0].len = 10;
        assert!(
            decode("x", &encode_raw(&longer, &[0; 4000]))
                .unwrap_err()
                .to_string()
                .contains("more")
        );
    }

    #[test]
    fn a_newer_format_is_not_damage_even_if_nothing_else_is_readable() {
        let key = "v1/default/claude-code/3f2a/log/000000000004.gz";
        let mut newer = header(&[]);
        newer.version = version::ENTRY + 1;
        let foreign = br#"{"version":2,"body":{"encoding":"zstd"}}"#;
        let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
        gzip.write_all(&[foreign.as_slice(), b"\n\xff\xfe"].concat())
            .unwrap();
        for stored in [encode_raw(&newer, &[]), gzip.finish().unwrap()] {
            let error = decode(key, &stored).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NewerFormat, "{error}");
            assert_eq!(
                error.to_string(),
                "entry 4 of session 3f2a has format version 2; this sessiond reads up to version 1"
            );
        }
        let mut zero = header(&[]);
        zero.version = 0;
        let error = decode(key, &encode_raw(&zero, &[])).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    }

    #[test]
    fn a_path_that_leaves_its_directory_is_rejected() {
        let text = serde_json::to_string(&header(&[vec![1]]))
            .unwrap()
            .replace("projects/-w/0.jsonl", "../../etc/passwd");
        let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
        gzip.write_all(format!("{text}\n\x01").as_bytes()).unwrap();
        let error = decode("x", &gzip.finish().unwrap()).unwrap_err();
        assert!(error.to_string().contains("are not allowed"), "{error}");
    }

    fn encode_raw(header: &EntryHeader, body: &[u8]) -> Vec<u8> {
        let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
        gzip.write_all(&serde_json::to_vec(header).unwrap())
            .unwrap();
        gzip.write_all(b"\n").unwrap();
        gzip.write_all(body).unwrap();
        gzip.finish().unwrap()
    }
}
