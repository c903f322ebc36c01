//! Encoding of snapshots: a plain `tar.gz` of the session's files, whose first member is the
//! header.

use bytes::Bytes;
use flate2::bufread::MultiGzDecoder;
use flate2::write::GzEncoder;

use super::entry::{self, EncodedEntry, Entry};
use super::tar_gz::{self, TarReader, Unlimited};
use super::version::invalid;
use crate::error::{Error, ErrorKind, Result};
use crate::model::limits::{MAX_HEADER_LEN, MAX_RAW_BYTES};
use crate::model::{Digest, EntryHeader, EntryKind, Part};

/// The header's name in the tar.
pub const HEADER: &str = ".sessiond-header.json";

/// Encodes a snapshot; `bodies` are the complete files of the header's parts.
pub fn encode<B: AsRef<[u8]>>(mut header: EntryHeader, bodies: &[B]) -> Result<EncodedEntry> {
    let text = entry::encode_header(&mut header)?;
    let failed = |cause: std::io::Error| {
        Error::new(
            ErrorKind::Internal,
            format!("encode snapshot {} of {}", header.seq, header.session),
        )
        .caused_by(cause)
    };
    let mut tar = tar::Builder::new(GzEncoder::new(Vec::new(), entry::level(header.kind)));
    let mut append = |path: &str, mode: u32, mtime: u64, bytes: &[u8]| {
        tar_gz::append(&mut tar, path, (mode, mtime), bytes.len() as u64, bytes)
    };
    append(HEADER, 0o600, 0, &text).map_err(failed)?;
    for (part, body) in header.parts.iter().zip(bodies) {
        let seconds = u64::try_from(part.mtime_ns / 1_000_000_000).unwrap_or(0);
        append(part.path.as_str(), part.mode, seconds, body.as_ref()).map_err(failed)?;
    }
    let bytes = Bytes::from(
        tar.into_inner()
            .and_then(GzEncoder::finish)
            .map_err(failed)?,
    );
    Ok(EncodedEntry {
        digest: Digest::of(&bytes),
        header,
        bytes,
    })
}

/// Decodes the snapshot that is stored at `key`. Only the files that the header lists are read, in
/// its order and with its lengths.
pub fn decode(key: &str, stored: &[u8]) -> Result<Entry> {
    decode_up_to(key, stored, MAX_RAW_BYTES)?.ok_or_else(|| invalid(key, "it is too large"))
}

/// Like `decode`; none if the files have more than `max` bytes, which are then not decompressed.
pub fn decode_up_to(key: &str, stored: &[u8], max: u64) -> Result<Option<Entry>> {
    let mut gzip = Unlimited(MultiGzDecoder::new(stored));
    let mut tar = TarReader::new(key, &mut gzip);
    let text = tar
        .read_first(HEADER, MAX_HEADER_LEN)?
        .ok_or_else(|| invalid(key, "its first member is not a header"))?;
    let header = entry::decode_header(key, &text, stored)?;
    let is_incomplete = |part: &Part| part.start > 0 || part.upload.is_some();
    if header.kind != EntryKind::Snapshot || header.parts.iter().any(is_incomplete) {
        return Err(invalid(key, "it does not hold complete files"));
    }
    if header.body_len() > max {
        return Ok(None);
    }
    let mut body = Vec::with_capacity(header.body_len() as usize);
    for part in &header.parts {
        tar.read_member((part.path.as_str(), part.len), "header", |_, bytes| {
            body.extend_from_slice(bytes);
            Ok(())
        })?;
    }
    tar.finish("header")?;
    Ok(Some(Entry::new(header, body, stored)))
}
