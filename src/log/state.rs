//! What a log amounts to at a point: each file's length, digest and kind. Pure; fed entry by entry.

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::model::{Digest, FileAt, Header, NamedFile, RelPath, Seq};

/// The files of a log at a point.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    /// The last entry taken in.
    pub seq: Seq,
    /// Its digest.
    pub digest: Option<Digest>,
    /// The files.
    pub files: BTreeMap<RelPath, FileAt>,
}

impl State {
    /// What a snapshot stands for.
    pub fn of_snapshot(seq: Seq, digest: Digest, files: &[NamedFile]) -> State {
        let files = files.iter().map(|file| (file.path.clone(), file.at.clone())).collect();
        State { seq, digest: Some(digest), files }
    }

    /// Takes one more entry in.
    pub fn apply(&mut self, header: &Header, digest: Digest) -> Result<()> {
        for moved in &header.moves {
            if let Some(file) = self.files.remove(&moved.from) {
                self.files.insert(moved.to.clone(), file);
            }
        }
        for part in &header.parts {
            let length = self.files.get(&part.path).map_or(0, |file| file.len);
            if part.start > length {
                return Err(Error::corrupt(format!(
                    "read entry {}: {} goes on at {} and has {length} bytes",
                    header.seq, part.path, part.start
                )));
            }
            let file = FileAt {
                kind: part.kind,
                len: part.end(),
                sha256: part.file_sha256,
                mode: part.mode,
                mtime_ns: part.mtime_ns,
                seq: header.seq,
            };
            self.files.insert(part.path.clone(), file);
        }
        self.seq = header.seq;
        self.digest = Some(digest);
        Ok(())
    }
}
