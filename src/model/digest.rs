//! SHA-256 digests and resumable hashes. The ledger stores the state of a running hash, so that no
//! byte is hashed twice.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::digest::common::hazmat::SerializableState;
use sha2::{Digest as _, Sha256};

use crate::error::{Error, Result};

/// A SHA-256 digest, printed as 64 hex digits.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(try_from = "String", into = "String")]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Digest {
        Digest(Sha256::digest(bytes).into())
    }

    /// The bytes of the digest.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The first eight bytes as a number, for use as a fingerprint.
    pub fn fingerprint(&self) -> u64 {
        let mut first = [0; 8];
        first.copy_from_slice(&self.0[..8]);
        u64::from_be_bytes(first)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&to_hex(&self.0))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Digest {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        from_hex(text)
            .and_then(|bytes| bytes.try_into().ok())
            .map(Digest)
            .ok_or_else(|| {
                Error::corrupt(format!("invalid digest {text:?}: expected 64 hex digits"))
            })
    }
}

impl TryFrom<String> for Digest {
    type Error = Error;
    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> String {
        digest.to_string()
    }
}

/// A SHA-256 computation that can be stored and resumed.
#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RunningHash(Sha256);

impl RunningHash {
    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest of all bytes so far.
    pub fn digest(&self) -> Digest {
        Digest(self.0.clone().finalize().into())
    }
}

impl fmt::Debug for RunningHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RunningHash({})", self.digest())
    }
}

impl PartialEq for RunningHash {
    fn eq(&self, other: &Self) -> bool {
        self.digest() == other.digest()
    }
}

impl TryFrom<String> for RunningHash {
    type Error = Error;
    fn try_from(text: String) -> Result<Self> {
        from_hex(&text)
            .filter(|bytes| has_plausible_length(bytes))
            .and_then(|bytes| bytes.as_slice().try_into().ok())
            .and_then(|state| Sha256::deserialize(&state).ok())
            .map(RunningHash)
            .ok_or_else(|| Error::corrupt("invalid running hash: not a state of SHA-256"))
    }
}

impl From<RunningHash> for String {
    fn from(hash: RunningHash) -> String {
        to_hex(&hash.0.serialize())
    }
}

/// The hash of a file so far: one that can be resumed, or only its digest, which needs less memory. The
/// digest suffices for a side file: if it changes, all of it is read again.
#[derive(Clone, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum FileHash {
    /// The digest.
    Digest(Digest),
    /// A hash that can be resumed.
    Running(Box<RunningHash>),
}

impl FileHash {
    /// The digest.
    pub fn digest(&self) -> Digest {
        match self {
            FileHash::Digest(digest) => *digest,
            FileHash::Running(hash) => hash.digest(),
        }
    }

    /// The hash, if it can be resumed.
    pub fn running(&self) -> Option<&RunningHash> {
        match self {
            FileHash::Digest(_) => None,
            FileHash::Running(hash) => Some(hash),
        }
    }

    /// Keeps only the digest.
    pub fn settle(&mut self) {
        *self = FileHash::Digest(self.digest());
    }
}

impl From<RunningHash> for FileHash {
    fn from(hash: RunningHash) -> FileHash {
        FileHash::Running(Box::new(hash))
    }
}

impl fmt::Debug for FileHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FileHash({})", self.digest())
    }
}

impl PartialEq for FileHash {
    fn eq(&self, other: &Self) -> bool {
        self.digest() == other.digest()
    }
}

impl TryFrom<String> for FileHash {
    type Error = Error;
    fn try_from(text: String) -> Result<Self> {
        match text.len() {
            64 => text.parse().map(FileHash::Digest),
            _ => RunningHash::try_from(text).map(FileHash::from),
        }
    }
}

impl From<FileHash> for String {
    fn from(hash: FileHash) -> String {
        match hash {
            FileHash::Digest(digest) => digest.to_string(),
            FileHash::Running(hash) => String::from(*hash),
        }
    }
}

/// Whether the block count in a SHA-256 state, which follows its eight words, is that of a file.
/// SHA-256 counts bits; a count near the maximum would overflow and panic.
fn has_plausible_length(state: &[u8]) -> bool {
    let blocks = state
        .get(32..40)
        .and_then(|bytes| bytes.try_into().ok())
        .map(u64::from_le_bytes);
    blocks.is_some_and(|blocks| blocks < u64::MAX / 1024)
}

fn to_hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    bytes
        .iter()
        .flat_map(|byte| {
            [
                DIGITS[usize::from(byte >> 4)] as char,
                DIGITS[usize::from(byte & 15)] as char,
            ]
        })
        .collect()
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| (byte as char).to_digit(16).map(|value| value as u8);
    let pairs = text.as_bytes().chunks_exact(2);
    if !pairs.remainder().is_empty() {
        return None;
    }
    pairs
        .map(|pair| Some(digit(pair[0])? << 4 | digit(pair[1])?))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_running_hash_resumes_from_its_text() {
        let mut hash = RunningHash::default();
        hash.update(b"hello ");
        let text = String::from(hash.clone());
        let mut resumed = RunningHash::try_from(text).expect("a state");
        resumed.update(b"world");
        assert_eq!(resumed.digest(), Digest::of(b"hello world"));
    }

    #[test]
    fn a_damaged_text_is_rejected() {
        for bad in ["", "zz", "0", &"ab".repeat(31)] {
            assert!(bad.parse::<Digest>().is_err());
            assert!(RunningHash::try_from(bad.to_owned()).is_err());
        }
    }
}
