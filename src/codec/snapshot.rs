//! A snapshot as stored: a plain `tar.gz` of the session's files, with a manifest as its first member.

use std::io::Read;

use bytes::Bytes;
use flate2::Compression;
use flate2::bufread::MultiGzDecoder;
use flate2::write::GzEncoder;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Result};
use crate::model::entry::FORMAT;
use crate::model::{AgentName, Digest, LogName, NamedFile, Seq};

/// The manifest's name in the archive.
pub const MANIFEST: &str = ".sessiond-manifest.json";

/// The longest manifest.
const LONGEST_MANIFEST: u64 = 64 << 20;

/// The most that may follow the last file: tar programs fill up with zeroes to a block of theirs, which can be chosen.
const LONGEST_END: u64 = 1 << 20;

/// What a snapshot says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of the format.
    pub v: u32,
    /// Whose files these are.
    pub agent: AgentName,
    /// The session.
    pub session: LogName,
    /// It stands for all entries up to this one.
    pub seq: Seq,
    /// SHA-256 of that entry as stored.
    pub digest: Digest,
    /// When it was taken.
    pub at: Timestamp,
    /// The files, in the order they are in.
    pub files: Vec<NamedFile>,
}

/// Writes a snapshot; `open` gives the bytes of each file of the manifest, of which exactly `len` are taken.
pub fn build<R: Read>(manifest: &Manifest, mut open: impl FnMut(&NamedFile) -> std::io::Result<R>) -> Result<Bytes> {
    let failed = |cause: std::io::Error| Error::io(format!("take a snapshot of {} at {}", manifest.session, manifest.seq), cause);
    let text = serde_json::to_vec(manifest).map_err(|cause| Error::new(Kind::Internal, "write a manifest").because(cause))?;
    let mut tar = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::new(6)));
    append(&mut tar, MANIFEST, text.len() as u64, 0o600, 0, &text[..]).map_err(failed)?;
    for file in &manifest.files {
        let reader = open(file).map_err(failed)?;
        let seconds = u64::try_from(file.at.mtime_ns / 1_000_000_000).unwrap_or(0);
        append(&mut tar, file.path.as_str(), file.at.len, file.at.mode, seconds, Exactly { inner: reader, left: file.at.len })
            .map_err(failed)?;
    }
    let gzip = tar.into_inner().map_err(failed)?;
    Ok(Bytes::from(gzip.finish().map_err(failed)?))
}

fn append<W: std::io::Write>(
    tar: &mut tar::Builder<W>,
    path: &str,
    len: u64,
    mode: u32,
    mtime: u64,
    bytes: impl Read,
) -> std::io::Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_size(len);
    header.set_mode(mode & 0o777);
    header.set_mtime(mtime);
    header.set_entry_type(tar::EntryType::Regular);
    tar.append_data(&mut header, path, bytes)
}

/// Gives exactly so many bytes: a source that ends sooner is an error, not a short member.
struct Exactly<R> {
    inner: R,
    left: u64,
}

impl<R: Read> Read for Exactly<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let want = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        if want == 0 {
            return Ok(0);
        }
        let got = self.inner.read(&mut buffer[..want])?;
        if got == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        self.left -= got as u64;
        Ok(got)
    }
}

/// A snapshot whose manifest is read and checked.
pub struct Snapshot {
    /// What it says of itself.
    pub manifest: Manifest,
    /// Its size as stored.
    pub stored: u64,
    name: String,
    bytes: Bytes,
}

impl Snapshot {
    /// Opens a snapshot that was found under `name`.
    pub fn open(name: &str, bytes: Bytes) -> Result<Snapshot> {
        let refuse = |why: String| Error::corrupt(format!("read {name}: {why}"));
        let mut tar = tar::Archive::new(MultiGzDecoder::new(&bytes[..]));
        let mut members = tar.entries().map_err(|cause| refuse(cause.to_string()))?;
        let first = members.next().ok_or_else(|| refuse("it is empty".to_owned()))?.map_err(|cause| refuse(cause.to_string()))?;
        if first.path_bytes() != MANIFEST.as_bytes() {
            return Err(refuse("its first member is not a manifest".to_owned()));
        }
        let mut text = Vec::new();
        first.take(LONGEST_MANIFEST).read_to_end(&mut text).map_err(|cause| refuse(cause.to_string()))?;
        let manifest: Manifest = serde_json::from_slice(&text).map_err(|cause| refuse(format!("its manifest is damaged ({cause})")))?;
        if manifest.v != FORMAT {
            return Err(refuse(format!("it has format {}, this sessiond reads {FORMAT}", manifest.v))
                .hint("upgrade sessiond: a newer one wrote this"));
        }
        Ok(Snapshot { manifest, stored: bytes.len() as u64, name: name.to_owned(), bytes })
    }

    /// Hands each file's bytes to `sink`, piece by piece with their offset. Only what the manifest names comes out, in
    /// its order and length; the caller checks the digests.
    pub fn unpack(&self, mut sink: impl FnMut(&NamedFile, u64, &[u8]) -> Result<()>) -> Result<()> {
        let refuse = |why: String| Error::corrupt(format!("read {}: {why}", self.name));
        let mut tar = tar::Archive::new(MultiGzDecoder::new(&self.bytes[..]));
        let mut members = tar.entries().map_err(|cause| refuse(cause.to_string()))?.skip(1);
        let mut buffer = vec![0; 256 << 10];
        for file in &self.manifest.files {
            let member = members.next().ok_or_else(|| refuse(format!("{} is missing in it", file.path)))?;
            let mut member = member.map_err(|cause| refuse(cause.to_string()))?;
            let regular = member.header().entry_type() == tar::EntryType::Regular;
            if !regular || member.path_bytes() != file.path.as_str().as_bytes() || member.size() != file.at.len {
                return Err(refuse(format!("{} is not what its manifest says", file.path)));
            }
            let mut offset = 0;
            loop {
                let got = member.read(&mut buffer).map_err(|cause| refuse(cause.to_string()))?;
                if got == 0 && (offset == file.at.len) {
                    // An empty file has to be made all the same.
                    if file.at.len == 0 {
                        sink(file, 0, &[])?;
                    }
                    break;
                }
                if got == 0 {
                    return Err(refuse(format!("{} ends too soon", file.path)));
                }
                sink(file, offset, &buffer[..got])?;
                offset += got as u64;
            }
        }
        let more = || refuse("there is more in it than its manifest says".to_owned());
        if members.next().is_some() {
            return Err(more());
        }
        // The checksum of the stream stands at its end, and nothing else covers the manifest.
        let mut end = Vec::new();
        tar.into_inner().take(LONGEST_END).read_to_end(&mut end).map_err(|cause| refuse(cause.to_string()))?;
        if end.len() as u64 == LONGEST_END || end.iter().any(|byte| *byte != 0) {
            return Err(more());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{FileAt, FileKind};

    fn manifest(files: &[(&str, &[u8])]) -> Manifest {
        let file = |(path, bytes): &(&str, &[u8])| NamedFile {
            path: path.parse().unwrap(),
            at: FileAt {
                kind: FileKind::Whole,
                len: bytes.len() as u64,
                sha256: Digest::of(bytes),
                mode: 0o600,
                mtime_ns: 5_000_000_000,
                seq: 1,
            },
        };
        Manifest {
            v: FORMAT,
            agent: "a".parse().unwrap(),
            session: "s".parse().unwrap(),
            seq: 7,
            digest: Digest::of(b""),
            at: "2026-05-01T12:00:00Z".parse().unwrap(),
            files: files.iter().map(file).collect(),
        }
    }

    #[test]
    fn files_come_back_and_a_damaged_archive_is_refused() {
        let files: [(&str, &[u8]); 3] = [("projects/x/s.jsonl", b"one\ntwo\n"), ("empty", b""), ("tasks/s/1.json", b"{}")];
        let manifest = manifest(&files);
        let mut sources = files.iter().map(|(_, bytes)| *bytes);
        let bytes = build(&manifest, |_| Ok(sources.next().unwrap())).unwrap();
        let snapshot = Snapshot::open("x", bytes.clone()).unwrap();
        assert_eq!(snapshot.manifest, manifest);
        let mut out = std::collections::BTreeMap::<String, Vec<u8>>::new();
        snapshot
            .unpack(|file, offset, piece| {
                let bytes = out.entry(file.path.to_string()).or_default();
                assert_eq!(bytes.len() as u64, offset);
                bytes.extend_from_slice(piece);
                Ok(())
            })
            .unwrap();
        assert!(files.iter().all(|(path, bytes)| out[*path] == *bytes));
        let cut = Snapshot::open("x", bytes.slice(..bytes.len() - 20)).and_then(|snapshot| snapshot.unpack(|_, _, _| Ok(())));
        assert_eq!(cut.unwrap_err().kind(), Kind::Corrupt);
        assert!(Snapshot::open("x", Bytes::from_static(b"nonsense")).is_err());
    }

    #[test]
    fn a_source_that_shrank_is_an_error() {
        let manifest = manifest(&[("f", b"hello")]);
        assert!(build(&manifest, |_| Ok(&b"hel"[..])).is_err());
    }
}
