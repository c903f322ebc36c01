//! A snapshot as stored: a plain `tar.gz` of the session's files, whose first member is the header.

use std::io::Read;

use bytes::Bytes;
use flate2::bufread::MultiGzDecoder;
use flate2::write::GzEncoder;

use super::entry::{self, Encoded, Entry};
use crate::error::{Error, Kind, Result};
use crate::model::{Digest, EntryKind, Header};

/// The header's name in the archive.
pub const HEADER: &str = ".sessiond-header.json";

/// The longest header.
const LONGEST_HEADER: u64 = 16 << 20;

/// Encodes a snapshot; `bodies` are the files that the header's parts name, each as a whole.
pub fn encode<B: AsRef<[u8]>>(header: Header, bodies: &[B]) -> Result<Encoded> {
    let failed = |cause: std::io::Error| Error::io(format!("take a snapshot of {} at {}", header.session, header.seq), cause);
    let text = serde_json::to_vec(&header).map_err(|cause| Error::new(Kind::Internal, "write a header").because(cause))?;
    let mut tar = tar::Builder::new(GzEncoder::new(Vec::new(), entry::level(header.kind)));
    append(&mut tar, HEADER, 0o600, 0, &text).map_err(failed)?;
    for (part, body) in header.parts.iter().zip(bodies) {
        let seconds = u64::try_from(part.mtime_ns / 1_000_000_000).unwrap_or(0);
        append(&mut tar, part.path.as_str(), part.mode, seconds, body.as_ref()).map_err(failed)?;
    }
    let bytes = Bytes::from(tar.into_inner().and_then(GzEncoder::finish).map_err(failed)?);
    Ok(Encoded { digest: Digest::of(&bytes), header, bytes })
}

fn append<W: std::io::Write>(tar: &mut tar::Builder<W>, path: &str, mode: u32, mtime: u64, bytes: &[u8]) -> std::io::Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_size(bytes.len() as u64);
    header.set_mode(mode & 0o777);
    header.set_mtime(mtime);
    header.set_entry_type(tar::EntryType::Regular);
    tar.append_data(&mut header, path, bytes)
}

/// Decodes a snapshot that was found under `name`. Only what the header names comes out, in its order and length.
pub fn decode(name: &str, stored: &[u8]) -> Result<Entry> {
    let refuse = |why: &dyn std::fmt::Display| entry::refuse(name, &why.to_string());
    let mut tar = tar::Archive::new(MultiGzDecoder::new(stored));
    let mut members = tar.entries().map_err(|cause| refuse(&cause))?;
    let first = members.next().ok_or_else(|| refuse(&"it is empty"))?.map_err(|cause| refuse(&cause))?;
    if first.path_bytes() != HEADER.as_bytes() {
        return Err(refuse(&"its first member is not a header"));
    }
    let mut text = Vec::new();
    first.take(LONGEST_HEADER).read_to_end(&mut text).map_err(|cause| refuse(&cause))?;
    let header = entry::header(name, &text, stored.len() as u64)?;
    if header.kind != EntryKind::Snapshot || header.parts.iter().any(|part| part.start > 0) {
        return Err(refuse(&"it does not stand for all files"));
    }
    let mut body = Vec::with_capacity(header.body_len() as usize);
    for part in &header.parts {
        let member = members.next().ok_or_else(|| refuse(&format!("{} is missing in it", part.path)))?;
        let member = member.map_err(|cause| refuse(&cause))?;
        let regular = member.header().entry_type() == tar::EntryType::Regular;
        if !regular || member.path_bytes() != part.path.as_str().as_bytes() || member.size() != part.len {
            return Err(refuse(&format!("{} is not what its header says", part.path)));
        }
        let before = body.len() as u64;
        member.take(part.len).read_to_end(&mut body).map_err(|cause| refuse(&cause))?;
        if body.len() as u64 - before != part.len {
            return Err(refuse(&format!("{} ends too soon", part.path)));
        }
    }
    if members.next().is_some() {
        return Err(refuse(&"it has a file that its header does not name"));
    }
    // To the end, so that the checksum is read too.
    std::io::copy(&mut tar.into_inner().take(END), &mut std::io::sink()).map_err(|cause| refuse(&cause))?;
    Ok(Entry::new(header, body, stored))
}

/// Zeros behind the last member: `tar` writes two blocks, others fill up to twenty.
const END: u64 = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Covers, FileKind, Part};
    use proptest::prelude::*;

    fn snapshot(files: &[(String, Vec<u8>)]) -> Encoded {
        let part = |(path, bytes): &(String, Vec<u8>)| Part {
            path: path.parse().unwrap(),
            kind: FileKind::Whole,
            start: 0,
            len: bytes.len() as u64,
            file_sha256: Digest::of(bytes),
            mode: 0o600,
            mtime_ns: 5_000_000_000,
            seq: Some(3),
        };
        let began = "2026-05-01T12:00:00Z".parse().unwrap();
        let covers =
            Covers { from: 1, digest: Digest::of(b"7"), began, entries: 7, raw: 9, stored: 9, writers: std::collections::BTreeMap::new() };
        let header = Header {
            v: 1,
            kind: EntryKind::Snapshot,
            agent: "a".parse().unwrap(),
            session: "s".parse().unwrap(),
            seq: 7,
            writer: "w".parse().unwrap(),
            at: began,
            prev: None,
            after: Some(0),
            covers: Some(covers),
            moves: Vec::new(),
            parts: files.iter().map(part).collect(),
        };
        encode(header, &files.iter().map(|(_, bytes)| bytes).collect::<Vec<_>>()).unwrap()
    }

    fn files() -> impl Strategy<Value = Vec<(String, Vec<u8>)>> {
        let name = prop_oneof!["[a-z]{1,8}", "[a-z]{90,120}/[a-z]{90,120}"];
        proptest::collection::btree_map(name, proptest::collection::vec(any::<u8>(), 0..300), 0..6)
            .prop_map(|files| files.into_iter().enumerate().map(|(at, (name, bytes))| (format!("f{at}/{name}"), bytes)).collect())
    }

    proptest! {
        #[test]
        fn files_come_back(files in files()) {
            let encoded = snapshot(&files);
            let entry = decode("x", &encoded.bytes).unwrap();
            prop_assert_eq!(&entry.header, &encoded.header);
            prop_assert_eq!(entry.digest, Digest::of(b"7"));
            let out: Vec<(String, Vec<u8>)> = entry.parts().map(|(part, bytes)| (part.path.to_string(), bytes.to_vec())).collect();
            prop_assert_eq!(out, files);
        }

        #[test]
        fn a_flipped_byte_is_noticed(files in files(), at in any::<proptest::sample::Index>(), flip in 1u8..) {
            let encoded = snapshot(&files);
            let mut bytes = encoded.bytes.to_vec();
            // Behind the gzip header, which holds a time and a flag that carry no data.
            let at = 10 + at.index(bytes.len() - 10);
            bytes[at] ^= flip;
            prop_assert_eq!(decode("x", &bytes).unwrap_err().kind(), Kind::Corrupt);
        }

        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            prop_assert!(decode("x", &bytes).is_err());
        }
    }

    #[test]
    fn a_truncated_archive_is_refused() {
        let encoded = snapshot(&[("f".to_owned(), vec![7; 4000])]);
        for end in 0..encoded.bytes.len() {
            assert!(decode("x", &encoded.bytes[..end]).is_err(), "cut at {end}");
        }
    }
}
