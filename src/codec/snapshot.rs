//! A snapshot as stored: a plain `tar.gz` of the session's files, whose first member is the header.

use std::io::Read;

use bytes::Bytes;
use flate2::bufread::MultiGzDecoder;
use flate2::write::GzEncoder;

use super::entry::{self, Encoded, Entry};
use crate::error::{Error, ErrorKind, Result};
use crate::model::{Digest, EntryHeader, EntryKind};

/// The header's name in the archive.
pub const HEADER: &str = ".sessiond-header.json";

/// The longest header.
const LONGEST_HEADER: u64 = 16 << 20;

/// Encodes a snapshot; `bodies` are the files that the header's parts name, each as a whole.
pub fn encode<B: AsRef<[u8]>>(header: EntryHeader, bodies: &[B]) -> Result<Encoded> {
    let failed = |cause: std::io::Error| {
        Error::io(
            format!("take a snapshot of {} at {}", header.session, header.seq),
            cause,
        )
    };
    let text = serde_json::to_vec(&header)
        .map_err(|cause| Error::new(ErrorKind::Internal, "write a header").caused_by(cause))?;
    let mut tar = tar::Builder::new(GzEncoder::new(Vec::new(), entry::level(header.kind)));
    append(&mut tar, HEADER, 0o600, 0, &text).map_err(failed)?;
    for (part, body) in header.parts.iter().zip(bodies) {
        let seconds = u64::try_from(part.mtime_ns / 1_000_000_000).unwrap_or(0);
        append(
            &mut tar,
            part.path.as_str(),
            part.mode,
            seconds,
            body.as_ref(),
        )
        .map_err(failed)?;
    }
    let bytes = Bytes::from(
        tar.into_inner()
            .and_then(GzEncoder::finish)
            .map_err(failed)?,
    );
    Ok(Encoded {
        digest: Digest::of(&bytes),
        header,
        bytes,
    })
}

fn append<W: std::io::Write>(
    tar: &mut tar::Builder<W>,
    path: &str,
    mode: u32,
    mtime: u64,
    bytes: &[u8],
) -> std::io::Result<()> {
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
    let first = members
        .next()
        .ok_or_else(|| refuse(&"it is empty"))?
        .map_err(|cause| refuse(&cause))?;
    if first.path_bytes() != HEADER.as_bytes() {
        return Err(refuse(&"its first member is not a header"));
    }
    let mut text = Vec::new();
    first
        .take(LONGEST_HEADER)
        .read_to_end(&mut text)
        .map_err(|cause| refuse(&cause))?;
    let header = entry::header(name, &text, stored.len() as u64)?;
    if header.kind != EntryKind::Snapshot || header.parts.iter().any(|part| part.start > 0) {
        return Err(refuse(&"it does not stand for all files"));
    }
    let mut body = Vec::with_capacity(header.body_len() as usize);
    for part in &header.parts {
        let member = members
            .next()
            .ok_or_else(|| refuse(&format!("{} is missing in it", part.path)))?;
        let member = member.map_err(|cause| refuse(&cause))?;
        let regular = member.header().entry_type() == tar::EntryType::Regular;
        if !regular
            || member.path_bytes() != part.path.as_str().as_bytes()
            || member.size() != part.len
        {
            return Err(refuse(&format!(
                "{} is not what its header says",
                part.path
            )));
        }
        let before = body.len() as u64;
        member
            .take(part.len)
            .read_to_end(&mut body)
            .map_err(|cause| refuse(&cause))?;
        if body.len() as u64 - before != part.len {
            return Err(refuse(&format!("{} ends too soon", part.path)));
        }
    }
    if members.next().is_some() {
        return Err(refuse(&"it has a file that its header does not name"));
    }
    // To the end, so that the checksum is read too.
    let mut end = Vec::new();
    tar.into_inner()
        .take(END)
        .read_to_end(&mut end)
        .map_err(|cause| refuse(&cause))?;
    if end.len() as u64 == END || end.iter().any(|byte| *byte != 0) {
        return Err(refuse(&"there is something behind its last file"));
    }
    Ok(Entry::new(header, body, stored))
}

/// Zeros behind the last member: `tar` writes two blocks, others fill up to twenty.
const END: u64 = 64 << 10;
