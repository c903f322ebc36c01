//! Reading and writing `tar.gz` files: the one implementation for snapshots and archive files.
//!
//! The reader limits every size that a file declares. It replaces the reader of the `tar` crate,
//! which accepts names and attributes of any size.

use std::io::{BufReader, Read, Write};

use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};
use base64::read::DecoderReader;
use flate2::bufread::MultiGzDecoder;

use super::version::invalid;
use crate::error::{Error, Result};

/// The first bytes of every gzip stream.
pub(super) const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// Size of a tar block.
pub(super) const BLOCK: u64 = 512;

/// Maximum number of zero bytes after the last member: `tar` writes two blocks, other tools up to
/// twenty.
pub(super) const MAX_END_PADDING: u64 = 64 << 10;

/// Maximum length of a path that does not fit into a header, its terminator included.
pub(super) const MAX_NAME_LEN: u64 = 4096;

/// Maximum compression ratio. Transcripts reach 5 to 20.
const MAX_RATIO: u64 = 200;

/// Inflated size up to which any ratio is allowed: a file of zeros must be restorable too.
const ANY_RATIO_UP_TO: u64 = 1 << 30;

/// Appends a regular file of exactly `len` bytes.
pub(super) fn append<W: Write>(
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
    let mut bytes = bytes.take(len);
    tar.append_data(&mut header, path, &mut bytes)?;
    if bytes.limit() > 0 {
        Err(std::io::ErrorKind::UnexpectedEof.into())
    } else {
        Ok(())
    }
}

/// A stream of tar blocks whose length can be limited.
pub(super) trait Source: Read {
    /// Limits the stream to `max` bytes from its start.
    fn set_limit(&mut self, max: u64);
}

/// A stream whose length is limited elsewhere.
pub(super) struct Unlimited<R>(pub(super) R);

impl<R: Read> Read for Unlimited<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.0.read(buffer)
    }
}

impl<R: Read> Source for Unlimited<R> {
    fn set_limit(&mut self, _max: u64) {}
}

/// The header of a regular file in a tar.
pub(super) struct Member {
    /// Its path, not validated.
    pub(super) path: Vec<u8>,
    /// Its length.
    pub(super) len: u64,
}

/// Reads the members of a tar one after the other.
pub(super) struct TarReader<'a> {
    /// Name of the tar in errors.
    name: &'a str,
    source: &'a mut dyn Source,
}

impl<'a> TarReader<'a> {
    pub(super) fn new(name: &'a str, source: &'a mut dyn Source) -> TarReader<'a> {
        TarReader { name, source }
    }

    /// Limits the tar to `max` bytes.
    pub(super) fn set_limit(&mut self, max: u64) {
        self.source.set_limit(max);
    }

    /// The content of the first member, which must be at `path`; none if another file is first, or
    /// it is longer than `max_len`.
    pub(super) fn read_first(&mut self, path: &str, max_len: u64) -> Result<Option<Vec<u8>>> {
        let first = self
            .next_member()?
            .ok_or_else(|| invalid(self.name, "it is empty"))?;
        if first.path != path.as_bytes() || first.len > max_len {
            return Ok(None);
        }
        let mut text = vec![0; first.len as usize];
        self.read_exact(&mut text)?;
        self.skip_padding(first.len)?;
        Ok(Some(text))
    }

    /// Reads the next member, which must be a file at `path` of `len` bytes, and passes its bytes
    /// to `sink` with their offset. `declared_by` names the document that lists it.
    pub(super) fn read_member(
        &mut self,
        (path, len): (&str, u64),
        declared_by: &str,
        mut sink: impl FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let member = self
            .next_member()?
            .ok_or_else(|| invalid(self.name, format!("{path} is missing")))?;
        if member.path != path.as_bytes() || member.len != len {
            return Err(invalid(
                self.name,
                format!("{path} differs from its {declared_by}"),
            ));
        }
        let mut buffer = vec![0; len.min(128 << 10) as usize];
        let mut offset = 0;
        while offset < len {
            let wanted = buffer
                .len()
                .min(usize::try_from(len - offset).unwrap_or(usize::MAX));
            let got = self
                .source
                .read(&mut buffer[..wanted])
                .map_err(|cause| damaged(self.name, cause))?;
            if got == 0 {
                return Err(invalid(self.name, TRUNCATED));
            }
            sink(offset, &buffer[..got])?;
            offset += got as u64;
        }
        self.skip_padding(len)
    }

    /// Checks that nothing but zeros follows. Reads to the end, so that gzip's checksum is
    /// verified.
    pub(super) fn finish(mut self, declared_by: &str) -> Result<()> {
        if self.next_member()?.is_some() {
            return Err(invalid(
                self.name,
                format!("it contains a file that its {declared_by} does not list"),
            ));
        }
        let mut end = Vec::new();
        self.source
            .take(MAX_END_PADDING)
            .read_to_end(&mut end)
            .map_err(|cause| damaged(self.name, cause))?;
        if end.len() as u64 == MAX_END_PADDING || end.iter().any(|byte| *byte != 0) {
            return Err(invalid(self.name, "data follows its last file"));
        }
        Ok(())
    }

    /// The header of the next regular file; none at the end.
    fn next_member(&mut self) -> Result<Option<Member>> {
        let mut long_path = None;
        loop {
            let mut block = [0; BLOCK as usize];
            self.read_exact(&mut block)?;
            if block.iter().all(|byte| *byte == 0) {
                return Ok(None);
            }
            let header = tar::Header::from_byte_slice(&block);
            if header.cksum().ok() != Some(checksum(&block)) {
                return Err(invalid(self.name, "it is not a tar file, or it is damaged"));
            }
            let len = header
                .entry_size()
                .map_err(|cause| damaged(self.name, cause))?;
            match header.entry_type() {
                tar::EntryType::GNULongName if len <= MAX_NAME_LEN && long_path.is_none() => {
                    let mut path = vec![0; len as usize];
                    self.read_exact(&mut path)?;
                    self.skip_padding(len)?;
                    path.truncate(
                        path.iter()
                            .position(|byte| *byte == 0)
                            .unwrap_or(path.len()),
                    );
                    long_path = Some(path);
                }
                tar::EntryType::Regular => {
                    let path = long_path.unwrap_or_else(|| header.path_bytes().into_owned());
                    return Ok(Some(Member { path, len }));
                }
                other => {
                    return Err(invalid(
                        self.name,
                        format!("it contains a member that is not a regular file ({other:?})"),
                    ));
                }
            }
        }
    }

    fn skip_padding(&mut self, len: u64) -> Result<()> {
        let mut rest = [0; BLOCK as usize];
        let rest = &mut rest[..(BLOCK - 1 - (len + BLOCK - 1) % BLOCK) as usize];
        self.read_exact(rest)
    }

    fn read_exact(&mut self, buffer: &mut [u8]) -> Result<()> {
        self.source
            .read_exact(buffer)
            .map_err(|cause| damaged(self.name, cause))
    }
}

/// The checksum of a tar header: the sum of its bytes, its own field counted as spaces.
fn checksum(block: &[u8]) -> u32 {
    block
        .iter()
        .enumerate()
        .map(|(at, byte)| match at {
            148..156 => u32::from(b' '),
            _ => u32::from(*byte),
        })
        .sum()
}

const TRUNCATED: &str = "it is truncated";

/// A failed read of a stream that may be damaged.
pub(super) fn damaged(name: &str, cause: std::io::Error) -> Error {
    match cause.kind() {
        std::io::ErrorKind::UnexpectedEof => invalid(name, TRUNCATED),
        _ => invalid(name, format!("it is damaged ({cause})")),
    }
}

/// A gzip stream, plain or as base64, with a limit on its length and on its compression ratio.
pub(super) struct BoundedGzip<R: Read> {
    gzip: MultiGzDecoder<BufReader<CountingReader<R>>>,
    inflated: u64,
    left: u64,
    any_ratio_up_to: u64,
}

/// Standard base64, with or without padding.
static BASE64: GeneralPurpose = GeneralPurpose::new(
    &base64::alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

impl<'a> BoundedGzip<Box<dyn Read + 'a>> {
    /// Detects whether the input is gzip or base64 of it.
    pub(super) fn new(name: &str, mut input: impl Read + 'a) -> Result<Self> {
        let mut first = [0; 2];
        input
            .read_exact(&mut first)
            .map_err(|cause| match cause.kind() {
                std::io::ErrorKind::UnexpectedEof => invalid(name, "it is empty"),
                _ => Error::io(format!("read {name}"), cause),
            })?;
        let all = std::io::Cursor::new(first).chain(input);
        let input: Box<dyn Read + 'a> = if first == GZIP_MAGIC {
            Box::new(all)
        } else {
            let mut decoded = DecoderReader::new(WithoutWhitespace(all), &BASE64);
            let mut magic = [0; 2];
            if decoded.read_exact(&mut magic).is_err() || magic != GZIP_MAGIC {
                return Err(invalid(name, "it is neither gzip nor base64 of gzip")
                    .hint("run \"sessiond export ID -o FILE\" to create an archive file"));
            }
            Box::new(std::io::Cursor::new(magic).chain(decoded))
        };
        Ok(BoundedGzip {
            gzip: MultiGzDecoder::new(BufReader::new(CountingReader {
                inner: input,
                count: 0,
            })),
            inflated: 0,
            left: u64::MAX,
            any_ratio_up_to: ANY_RATIO_UP_TO,
        })
    }

    /// Checks the compression ratio from `bytes` inflated bytes on.
    #[cfg(test)]
    pub(super) fn with_any_ratio_up_to(mut self, bytes: u64) -> Self {
        self.any_ratio_up_to = bytes;
        self
    }
}

impl<R: Read> Read for BoundedGzip<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let got = self.gzip.read(buffer)?;
        self.inflated += got as u64;
        let too_long = |why: String| Err(std::io::Error::new(std::io::ErrorKind::InvalidData, why));
        let Some(left) = self.left.checked_sub(got as u64) else {
            return too_long("it is longer than allowed".to_owned());
        };
        self.left = left;
        let stored = self.gzip.get_ref().get_ref().count;
        if self.inflated > self.any_ratio_up_to && self.inflated / MAX_RATIO > stored {
            return too_long(format!(
                "it inflates to more than {MAX_RATIO} times its size"
            ));
        }
        Ok(got)
    }
}

impl<R: Read> Source for BoundedGzip<R> {
    fn set_limit(&mut self, max: u64) {
        self.left = max.saturating_sub(self.inflated);
    }
}

/// Counts the bytes that are read.
struct CountingReader<R> {
    inner: R,
    count: u64,
}

impl<R: Read> Read for CountingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let got = self.inner.read(buffer)?;
        self.count += got as u64;
        Ok(got)
    }
}

/// Drops whitespace: base64 is often broken into lines.
struct WithoutWhitespace<R>(R);

impl<R: Read> Read for WithoutWhitespace<R> {
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
