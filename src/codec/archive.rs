//! Archive files: a session exported to one `tar.gz` that plain `tar` opens. Its first member is a
//! manifest.
//!
//! Owns the format. An archive file is untrusted: only the files that the manifest lists are read,
//! in its order, with its lengths and digests.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};

use base64::engine::general_purpose::STANDARD;
use base64::write::EncoderWriter;
use flate2::Compression;
use flate2::write::GzEncoder;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::tar_gz::{
    self, BLOCK, BoundedGzip, MAX_END_PADDING, MAX_NAME_LEN, Source, TarReader, Unlimited,
};
use super::version::{self, invalid};
use crate::error::{Error, ErrorKind, Result};
use crate::model::{
    AgentName, Digest, FileKind, RelPath, RunningHash, Seq, SessionId, SessionMetadata,
};

/// The manifest's name in the tar.
pub const MANIFEST: &str = ".sessiond-manifest.json";

/// Maximum length of a manifest: enough for tens of thousands of files.
const MAX_MANIFEST_LEN: u64 = 16 << 20;

/// Maximum size of all files in one archive. A session that runs for months has several hundred
/// megabytes.
pub const MAX_BYTES: u64 = 64 << 30;

/// The manifest of an archive file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of the format.
    pub version: u32,
    /// The agent whose files these are.
    pub agent: AgentName,
    /// The session.
    pub session: SessionId,
    /// The last entry of the log that the files include.
    pub seq: Seq,
    /// Time of the export.
    pub exported_at: Timestamp,
    /// The labels of the session.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// The request ID of the session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// The files, in the order of the archive.
    pub files: Vec<Member>,
}

/// One file of an archive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Path below the agent's root.
    pub path: RelPath,
    /// How the agent writes it.
    pub kind: FileKind,
    /// Length in bytes.
    pub len: u64,
    /// Permission bits.
    pub mode: u32,
    /// Modification time, in nanoseconds since 1970.
    pub mtime_ns: i64,
    /// SHA-256 of the content.
    pub sha256: Digest,
}

impl Manifest {
    /// A manifest without files.
    pub fn new(
        agent: AgentName,
        session: SessionId,
        seq: Seq,
        exported_at: Timestamp,
        metadata: &SessionMetadata,
    ) -> Manifest {
        Manifest {
            version: version::ARCHIVE,
            agent,
            session,
            seq,
            exported_at,
            labels: metadata.labels.clone(),
            request_id: metadata.request_id.clone(),
            files: Vec::new(),
        }
    }

    /// The metadata of the session.
    pub fn metadata(&self) -> SessionMetadata {
        SessionMetadata {
            labels: self.labels.clone(),
            request_id: self.request_id.clone(),
            ..SessionMetadata::default()
        }
    }

    /// Total size of the files.
    pub fn bytes(&self) -> u64 {
        self.files
            .iter()
            .map(|file| file.len)
            .fold(0, u64::saturating_add)
    }

    fn validate(&self, name: &str) -> Result<()> {
        let mut paths = BTreeSet::new();
        if let Some(twice) = self.files.iter().find(|file| !paths.insert(&file.path)) {
            return Err(invalid(name, format!("it lists {} twice", twice.path)));
        }
        let below = |file: &&Member| {
            std::iter::successors(file.path.parent(), RelPath::parent)
                .any(|directory| paths.contains(&directory))
        };
        if let Some(inside) = self.files.iter().find(below) {
            return Err(invalid(
                name,
                format!("the parent directory of {} is a file", inside.path),
            ));
        }
        if self.bytes() > MAX_BYTES {
            return Err(invalid(name, format!("it declares {} bytes", self.bytes())));
        }
        self.metadata()
            .validate()
            .map_err(|error| invalid(name, error))
    }

    /// Maximum length of the tar, with a manifest of `manifest_len` bytes.
    fn max_tar_len(&self, manifest_len: u64) -> u64 {
        let files = self
            .files
            .iter()
            .map(|file| 4 * BLOCK + MAX_NAME_LEN + file.len.saturating_add(BLOCK));
        files.fold(
            manifest_len + 4 * BLOCK + MAX_END_PADDING,
            u64::saturating_add,
        )
    }
}

/// Writes an archive; `open` opens each file. `base64` writes it as text, for a request body or an
/// environment variable.
pub fn write<'a, W: Write>(
    mut out: W,
    base64: bool,
    manifest: &'a Manifest,
    open: impl FnMut(&'a Member) -> std::io::Result<Box<dyn Read + 'a>>,
) -> Result<()> {
    let failed = |cause| Error::io("write the archive file", cause);
    let text = serde_json::to_vec_pretty(manifest)
        .map_err(|cause| Error::new(ErrorKind::Internal, "encode the manifest").caused_by(cause))?;
    let done = if base64 {
        let mut encoder = EncoderWriter::new(&mut out, &STANDARD);
        pack(&mut encoder, &text, manifest, open).and_then(|()| encoder.finish().map(|_| ()))
    } else {
        pack(&mut out, &text, manifest, open)
    };
    done.and_then(|()| out.flush()).map_err(failed)
}

fn pack<'a, W: Write>(
    out: W,
    text: &[u8],
    manifest: &'a Manifest,
    mut open: impl FnMut(&'a Member) -> std::io::Result<Box<dyn Read + 'a>>,
) -> std::io::Result<()> {
    let mut tar = tar::Builder::new(GzEncoder::new(out, Compression::new(6)));
    let seconds = u64::try_from(manifest.exported_at.as_second()).unwrap_or(0);
    tar_gz::append(
        &mut tar,
        MANIFEST,
        (0o600, seconds),
        text.len() as u64,
        text,
    )?;
    for file in &manifest.files {
        let seconds = u64::try_from(file.mtime_ns / 1_000_000_000).unwrap_or(0);
        tar_gz::append(
            &mut tar,
            file.path.as_str(),
            (file.mode, seconds),
            file.len,
            open(file)?,
        )?;
    }
    tar.into_inner()?.finish()?;
    Ok(())
}

/// Receives the files of an archive.
pub trait ArchiveSink {
    /// Receives the manifest, which is valid.
    fn begin(&mut self, manifest: &Manifest) -> Result<()>;
    /// Receives bytes of file number `file`, before its digest is verified.
    fn write(&mut self, file: usize, offset: u64, bytes: &[u8]) -> Result<()>;
}

/// Keeps the files in memory, for archives from an environment variable.
#[derive(Debug, Default)]
pub struct InMemoryFiles(pub Vec<Vec<u8>>);

impl ArchiveSink for InMemoryFiles {
    fn begin(&mut self, manifest: &Manifest) -> Result<()> {
        self.0 = vec![Vec::new(); manifest.files.len()];
        Ok(())
    }

    fn write(&mut self, file: usize, _offset: u64, bytes: &[u8]) -> Result<()> {
        self.0[file].extend_from_slice(bytes);
        Ok(())
    }
}

/// Reads an archive, plain or as base64. On success, every file was passed to `sink` and its digest
/// was verified.
pub fn read(name: &str, input: impl Read, sink: &mut dyn ArchiveSink) -> Result<Manifest> {
    let mut gzip = BoundedGzip::new(name, input)?;
    gzip.set_limit(MAX_MANIFEST_LEN + 4 * BLOCK);
    read_tar(name, &mut gzip, sink)
}

/// Decompresses a gzip stream of at most `max` bytes, plain or as base64. The content does not have
/// to be an archive.
pub fn inflate(name: &str, input: impl Read, max: u64) -> Result<Vec<u8>> {
    let mut gzip = BoundedGzip::new(name, input)?;
    gzip.set_limit(max);
    let mut bytes = Vec::new();
    gzip.read_to_end(&mut bytes)
        .map_err(|cause| tar_gz::damaged(name, cause))?;
    Ok(bytes)
}

/// Whether decompressed bytes are an archive.
pub fn is_archive(inflated: &[u8]) -> bool {
    inflated.starts_with(MANIFEST.as_bytes()) && inflated.get(257..262) == Some(b"ustar")
}

/// Reads an archive that is already decompressed.
pub fn read_inflated(name: &str, inflated: &[u8], sink: &mut dyn ArchiveSink) -> Result<Manifest> {
    read_tar(name, &mut Unlimited(inflated), sink)
}

fn read_tar(name: &str, source: &mut dyn Source, sink: &mut dyn ArchiveSink) -> Result<Manifest> {
    let mut tar = TarReader::new(name, source);
    let text = tar.read_first(MANIFEST, MAX_MANIFEST_LEN)?.ok_or_else(|| {
        invalid(name, "its first member is not a manifest")
            .hint("run \"sessiond export ID -o FILE\" to create an archive file")
    })?;
    let manifest = decode_manifest(name, &text)?;
    tar.set_limit(manifest.max_tar_len(text.len() as u64));
    sink.begin(&manifest)?;
    for (number, file) in manifest.files.iter().enumerate() {
        let mut hash = RunningHash::default();
        tar.read_member(
            (file.path.as_str(), file.len),
            "manifest",
            |offset, bytes| {
                hash.update(bytes);
                sink.write(number, offset, bytes)
            },
        )?;
        if hash.digest() != file.sha256 {
            return Err(invalid(
                name,
                format!("{} does not have the digest in its manifest", file.path),
            ));
        }
    }
    tar.finish("manifest")?;
    Ok(manifest)
}

/// Decodes and validates a manifest, by its format version.
fn decode_manifest(name: &str, json: &[u8]) -> Result<Manifest> {
    let manifest: Manifest = match version::read(name, json, version::ARCHIVE)? {
        1 => serde_json::from_slice(json)
            .map_err(|cause| invalid(name, format!("its manifest is damaged ({cause})")))?,
        other => return Err(version::unknown(name, other)),
    };
    manifest.validate(name)?;
    Ok(manifest)
}

#[cfg(test)]
mod tests;
