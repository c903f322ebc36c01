//! A session as one file to hand around: a `tar.gz` that plain `tar` opens, whose first member says what the others are.
//!
//! Owns the format, and every bound on an archive that comes from anywhere: only what the manifest names comes out, in its
//! order, of its length and with its digest.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufReader, Read, Write};

use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig, STANDARD};
use base64::read::DecoderReader;
use base64::write::EncoderWriter;
use flate2::Compression;
use flate2::bufread::MultiGzDecoder;
use flate2::write::GzEncoder;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};
use crate::model::{
    AgentName, Digest, FileKind, RelPath, RunningHash, Seq, SessionId, SessionMetadata,
};

/// The manifest's name in the archive.
pub const MANIFEST: &str = ".sessiond-manifest.json";

/// The version of the format.
const VERSION: u32 = 1;

/// The longest manifest: some ten thousand files.
const LONGEST_MANIFEST: u64 = 16 << 20;

/// The most bytes of files in one archive. A session of months has some hundred megabytes.
pub const MOST_BYTES: u64 = 64 << 30;

/// Inflated so many times its size an archive is no session any more; transcripts come to 5 to 20. What is small may be anything,
/// for a file of zeros must come back too.
const MOST_RATIO: u64 = 200;
const SMALL: u64 = 1 << 30;

/// Zeros behind the last member: `tar` writes two blocks, others fill up to twenty.
const END: u64 = 64 << 10;

const BLOCK: u64 = 512;

/// The longest path and its end, as `tar` keeps those that do not fit into a header.
const LONGEST_NAME: u64 = 4096;

/// What every gzip stream begins with.
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// What an archive holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of the format.
    pub v: u32,
    /// Whose files these are.
    pub agent: AgentName,
    /// The session.
    pub session: SessionId,
    /// The entry of its log that the files stand at.
    pub seq: Seq,
    /// When the archive was made.
    pub made: Timestamp,
    /// Its labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// The request that it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// The files, in the order of the archive.
    pub files: Vec<Member>,
}

/// One file of an archive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Its path below the agent's root.
    pub path: RelPath,
    /// How the agent writes it.
    pub kind: FileKind,
    /// Its length.
    pub len: u64,
    /// Permission bits.
    pub mode: u32,
    /// Time of the last change, in nanoseconds since 1970.
    pub mtime_ns: i64,
    /// SHA-256 of it.
    pub sha256: Digest,
}

impl Manifest {
    /// A manifest of this version, of no files yet.
    pub fn new(
        agent: AgentName,
        session: SessionId,
        seq: Seq,
        made: Timestamp,
        said: &SessionMetadata,
    ) -> Manifest {
        let (labels, request_id) = (said.labels.clone(), said.request_id.clone());
        Manifest {
            v: VERSION,
            agent,
            session,
            seq,
            made,
            labels,
            request_id,
            files: Vec::new(),
        }
    }

    /// What it says of the session.
    pub fn wishes(&self) -> SessionMetadata {
        SessionMetadata {
            labels: self.labels.clone(),
            request_id: self.request_id.clone(),
            ..SessionMetadata::default()
        }
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files
            .iter()
            .map(|file| file.len)
            .fold(0, u64::saturating_add)
    }

    fn check(&self, name: &str) -> Result<()> {
        let mut paths = BTreeSet::new();
        if let Some(twice) = self.files.iter().find(|file| !paths.insert(&file.path)) {
            return Err(refuse(name, format!("{} is in it twice", twice.path)));
        }
        let below = |file: &&Member| {
            std::iter::successors(file.path.parent(), RelPath::parent)
                .any(|directory| paths.contains(&directory))
        };
        if let Some(inside) = self.files.iter().find(below) {
            return Err(refuse(name, format!("{} lies in a file", inside.path)));
        }
        if self.bytes() > MOST_BYTES {
            return Err(refuse(
                name,
                format!("it claims to hold {} bytes", self.bytes()),
            ));
        }
        self.wishes().check().map_err(|error| refuse(name, error))
    }

    /// The most that its archive can inflate to.
    fn inflated(&self, manifest: u64) -> u64 {
        let files = self
            .files
            .iter()
            .map(|file| 4 * BLOCK + LONGEST_NAME + file.len.saturating_add(BLOCK));
        files.fold(manifest + 4 * BLOCK + END, u64::saturating_add)
    }
}

fn refuse(name: &str, why: impl std::fmt::Display) -> Error {
    Error::corrupt(format!("read {name}: {why}"))
}

/// Writes an archive; `open` gives the bytes of each file. With `base64` as text, for a request body or a variable.
pub fn write<'a, W: Write>(
    mut out: W,
    base64: bool,
    manifest: &'a Manifest,
    open: impl FnMut(&'a Member) -> std::io::Result<Box<dyn Read + 'a>>,
) -> Result<()> {
    let failed = |cause| Error::io(format!("export session {}", manifest.session), cause);
    let text = serde_json::to_vec_pretty(manifest)
        .map_err(|cause| Error::new(ErrorKind::Internal, "write a manifest").caused_by(cause))?;
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
    let seconds = u64::try_from(manifest.made.as_second()).unwrap_or(0);
    append(
        &mut tar,
        MANIFEST,
        (0o600, seconds),
        text.len() as u64,
        text,
    )?;
    for file in &manifest.files {
        let seconds = u64::try_from(file.mtime_ns / 1_000_000_000).unwrap_or(0);
        append(
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

fn append<W: Write>(
    tar: &mut tar::Builder<W>,
    path: &str,
    (mode, mtime): (u32, u64),
    len: u64,
    bytes: impl Read,
) -> std::io::Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_size(len);
    header.set_mode(mode & 0o777);
    header.set_mtime(mtime);
    header.set_entry_type(tar::EntryType::Regular);
    let mut bytes = Exact {
        inner: bytes,
        left: len,
    };
    tar.append_data(&mut header, path, &mut bytes)?;
    if bytes.left > 0 {
        Err(std::io::ErrorKind::UnexpectedEof.into())
    } else {
        Ok(())
    }
}

/// At most so many bytes, and how many are missing.
struct Exact<R> {
    inner: R,
    left: u64,
}

impl<R: Read> Read for Exact<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let most = buffer
            .len()
            .min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let got = self.inner.read(&mut buffer[..most])?;
        self.left -= got as u64;
        Ok(got)
    }
}

/// What takes the files of an archive.
pub trait Taker {
    /// The manifest was read, and is sound in itself.
    fn begin(&mut self, manifest: &Manifest) -> Result<()>;
    /// More bytes of the file numbered `file`. They are not checked yet.
    fn bytes(&mut self, file: usize, offset: u64, bytes: &[u8]) -> Result<()>;
}

/// Keeps the files in memory; for archives that came in a variable.
#[derive(Debug, Default)]
pub struct InMemory(pub Vec<Vec<u8>>);

impl Taker for InMemory {
    fn begin(&mut self, manifest: &Manifest) -> Result<()> {
        self.0 = vec![Vec::new(); manifest.files.len()];
        Ok(())
    }

    fn bytes(&mut self, file: usize, _offset: u64, bytes: &[u8]) -> Result<()> {
        self.0[file].extend_from_slice(bytes);
        Ok(())
    }
}

/// Reads an archive, as it is or as base64. When it answers, every file was given to `taker` and has its digest.
pub fn read(name: &str, input: impl Read, taker: &mut dyn Taker) -> Result<Manifest> {
    let mut gzip = Inflating::new(name, input)?;
    gzip.allow(LONGEST_MANIFEST + 4 * BLOCK);
    read_tar(name, &mut gzip, taker)
}

/// Reads one gzip stream whole, as it is or as base64, of at most `most` bytes; for what may or may not be an archive.
pub fn inflate(name: &str, input: impl Read, most: u64) -> Result<Vec<u8>> {
    let mut gzip = Inflating::new(name, input)?;
    gzip.allow(most);
    let mut bytes = Vec::new();
    gzip.read_to_end(&mut bytes)
        .map_err(|cause| damaged(name, cause))?;
    Ok(bytes)
}

/// Whether these inflated bytes are those of an archive.
pub fn is_archive(inflated: &[u8]) -> bool {
    inflated.starts_with(MANIFEST.as_bytes()) && inflated.get(257..262) == Some(b"ustar")
}

/// Reads an archive that is inflated already.
pub fn read_inflated(name: &str, inflated: &[u8], taker: &mut dyn Taker) -> Result<Manifest> {
    read_tar(name, &mut Plain(inflated), taker)
}

/// What an archive is read from: it can be told how much there may be at most.
trait Source: Read {
    fn allow(&mut self, most: u64);
}

struct Plain<'a>(&'a [u8]);

impl Read for Plain<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Source for Plain<'_> {
    fn allow(&mut self, _most: u64) {}
}

fn damaged(name: &str, cause: std::io::Error) -> Error {
    match cause.kind() {
        std::io::ErrorKind::UnexpectedEof => refuse(name, "it ends too soon"),
        _ => refuse(name, format!("it is damaged ({cause})")),
    }
}

/// The members one after the other, each header checked here: `tar`'s own reader would take names and attributes of any size.
fn read_tar(name: &str, source: &mut dyn Source, taker: &mut dyn Taker) -> Result<Manifest> {
    let first = next_member(name, source)?.ok_or_else(|| refuse(name, "it is empty"))?;
    if first.path != MANIFEST.as_bytes() || first.len > LONGEST_MANIFEST {
        return Err(refuse(name, "its first member is not a manifest")
            .hint("sessiond export makes such archives; a directory of files is not one"));
    }
    let mut text = vec![0; first.len as usize];
    source
        .read_exact(&mut text)
        .map_err(|cause| damaged(name, cause))?;
    skip_padding(name, source, first.len)?;
    let manifest = read_manifest(name, &text)?;
    source.allow(manifest.inflated(first.len));
    taker.begin(&manifest)?;
    let mut buffer = vec![0; 128 << 10];
    for (number, file) in manifest.files.iter().enumerate() {
        let member = next_member(name, source)?
            .ok_or_else(|| refuse(name, format!("{} is missing in it", file.path)))?;
        if member.path != file.path.as_str().as_bytes() || member.len != file.len {
            return Err(refuse(
                name,
                format!("{} is not what its manifest says", file.path),
            ));
        }
        let (mut at, mut hash) = (0, RunningHash::default());
        while at < file.len {
            let most = buffer
                .len()
                .min(usize::try_from(file.len - at).unwrap_or(usize::MAX));
            let got = source
                .read(&mut buffer[..most])
                .map_err(|cause| damaged(name, cause))?;
            if got == 0 {
                return Err(refuse(name, "it ends too soon"));
            }
            hash.update(&buffer[..got]);
            taker.bytes(number, at, &buffer[..got])?;
            at += got as u64;
        }
        if hash.digest() != file.sha256 {
            return Err(refuse(
                name,
                format!(
                    "{} does not have the digest that its manifest says",
                    file.path
                ),
            ));
        }
        skip_padding(name, source, file.len)?;
    }
    if next_member(name, source)?.is_some() {
        return Err(refuse(
            name,
            "it has a file that its manifest does not name",
        ));
    }
    // To the end, so that the checksum is read too.
    let mut end = Vec::new();
    source
        .take(END)
        .read_to_end(&mut end)
        .map_err(|cause| damaged(name, cause))?;
    if end.len() as u64 == END || end.iter().any(|byte| *byte != 0) {
        return Err(refuse(name, "there is something behind its last file"));
    }
    Ok(manifest)
}

fn read_manifest(name: &str, text: &[u8]) -> Result<Manifest> {
    #[derive(Deserialize)]
    struct Version {
        v: u32,
    }
    let version = serde_json::from_slice::<Version>(text)
        .map_err(|cause| refuse(name, format!("its manifest is not ours ({cause})")))?;
    if version.v != VERSION {
        return Err(refuse(
            name,
            format!(
                "it has version {}, this sessiond reads {VERSION}",
                version.v
            ),
        )
        .hint("upgrade sessiond"));
    }
    let manifest: Manifest = serde_json::from_slice(text)
        .map_err(|cause| refuse(name, format!("its manifest is damaged ({cause})")))?;
    manifest.check(name)?;
    Ok(manifest)
}

struct Header {
    path: Vec<u8>,
    len: u64,
}

/// The next regular file; none at the end.
fn next_member(name: &str, source: &mut dyn Source) -> Result<Option<Header>> {
    let mut long = None;
    loop {
        let mut block = [0; BLOCK as usize];
        source
            .read_exact(&mut block)
            .map_err(|cause| damaged(name, cause))?;
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let header = tar::Header::from_byte_slice(&block);
        let sum = block
            .iter()
            .enumerate()
            .map(|(at, byte)| {
                if (148..156).contains(&at) {
                    u32::from(b' ')
                } else {
                    u32::from(*byte)
                }
            })
            .sum();
        if header.cksum().ok() != Some(sum) {
            return Err(refuse(name, "it is no tar archive, or damaged"));
        }
        let len = header.entry_size().map_err(|cause| damaged(name, cause))?;
        match header.entry_type() {
            tar::EntryType::GNULongName if len <= LONGEST_NAME && long.is_none() => {
                let mut path = vec![0; len as usize];
                source
                    .read_exact(&mut path)
                    .map_err(|cause| damaged(name, cause))?;
                skip_padding(name, source, len)?;
                path.truncate(
                    path.iter()
                        .position(|byte| *byte == 0)
                        .unwrap_or(path.len()),
                );
                long = Some(path);
            }
            tar::EntryType::Regular => {
                let path = long.unwrap_or_else(|| header.path_bytes().into_owned());
                return Ok(Some(Header { path, len }));
            }
            other => {
                return Err(refuse(
                    name,
                    format!("it holds something else than files ({other:?})"),
                ));
            }
        }
    }
}

fn skip_padding(name: &str, source: &mut dyn Source, len: u64) -> Result<()> {
    let mut rest = [0; BLOCK as usize];
    let rest = &mut rest[..(BLOCK - 1 - (len + BLOCK - 1) % BLOCK) as usize];
    source
        .read_exact(rest)
        .map_err(|cause| damaged(name, cause))
}

/// A gzip stream that must not become more than it may.
struct Inflating<R: Read> {
    gzip: MultiGzDecoder<BufReader<Counted<R>>>,
    inflated: u64,
    left: u64,
    small: u64,
}

/// Base64 as anybody writes it, with or without padding.
static LETTERS: GeneralPurpose = GeneralPurpose::new(
    &base64::alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

impl<'a> Inflating<Box<dyn Read + 'a>> {
    fn new(name: &str, mut input: impl Read + 'a) -> Result<Self> {
        let mut first = [0; 2];
        input
            .read_exact(&mut first)
            .map_err(|cause| match cause.kind() {
                std::io::ErrorKind::UnexpectedEof => refuse(name, "it is empty"),
                _ => Error::io(format!("read {name}"), cause),
            })?;
        let begun = std::io::Cursor::new(first).chain(input);
        let input: Box<dyn Read + 'a> = if first == GZIP {
            Box::new(begun)
        } else {
            let mut decoded = DecoderReader::new(Letters(begun), &LETTERS);
            let mut magic = [0; 2];
            if decoded.read_exact(&mut magic).is_err() || magic != GZIP {
                return Err(refuse(name, "it is neither gzip nor gzip as base64")
                    .hint("sessiond export makes such archives"));
            }
            Box::new(std::io::Cursor::new(magic).chain(decoded))
        };
        Ok(Inflating {
            gzip: MultiGzDecoder::new(BufReader::new(Counted {
                inner: input,
                count: 0,
            })),
            inflated: 0,
            left: u64::MAX,
            small: SMALL,
        })
    }
}

impl<R: Read> Read for Inflating<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let got = self.gzip.read(buffer)?;
        self.inflated += got as u64;
        let too_much = |why: String| Err(std::io::Error::new(std::io::ErrorKind::InvalidData, why));
        let Some(left) = self.left.checked_sub(got as u64) else {
            return too_much("it is longer than it may be".to_owned());
        };
        self.left = left;
        let stored = self.gzip.get_ref().get_ref().count;
        if self.inflated > self.small && self.inflated / MOST_RATIO > stored {
            return too_much(format!(
                "it inflates to more than {MOST_RATIO} times its size"
            ));
        }
        Ok(got)
    }
}

impl<R: Read> Source for Inflating<R> {
    fn allow(&mut self, most: u64) {
        self.left = most.saturating_sub(self.inflated);
    }
}

/// Counts what is read.
struct Counted<R> {
    inner: R,
    count: u64,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let got = self.inner.read(buffer)?;
        self.count += got as u64;
        Ok(got)
    }
}

/// Text without its white space: base64 is often broken into lines.
struct Letters<R>(R);

impl<R: Read> Read for Letters<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        loop {
            let got = self.0.read(buffer)?;
            let mut kept = 0;
            for at in 0..got {
                if !buffer[at].is_ascii_whitespace() {
                    buffer[kept] = buffer[at];
                    kept += 1;
                }
            }
            if kept > 0 || got == 0 {
                return Ok(kept);
            }
        }
    }
}

#[cfg(test)]
mod tests;
