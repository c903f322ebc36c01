//! Puts files together from entries, in a temporary folder, checking each against its digest after every part.

use std::collections::BTreeMap;

use crate::codec::entry::Entry;
use crate::error::{Error, Result};
use crate::log::ledger::FileCursor;
use crate::log::state::State;
use crate::log::walk::Sink;
use crate::model::{FileAt, RelPath, RunningHash, Seq, WriterId};
use crate::sys::Folder;

/// Files in the making.
pub struct Assembly<'a> {
    folder: &'a dyn Folder,
    stage: RelPath,
    attempt: u32,
    /// What the log amounts to so far.
    pub state: State,
    staged: BTreeMap<RelPath, Staged>,
    made: usize,
    /// The last entry of each writer.
    writers: BTreeMap<WriterId, Seq>,
}

/// A file in the temporary folder. It has a number for a name: paths from a bucket are not used before they are checked
/// as a whole.
#[derive(Clone)]
pub struct Staged {
    /// Where it is.
    pub at: RelPath,
    /// The hash over all of it.
    pub hash: RunningHash,
    len: u64,
}

impl<'a> Assembly<'a> {
    /// Begins in `stage`, a folder that nobody else uses but earlier attempts.
    pub fn new(folder: &'a dyn Folder, stage: RelPath, attempt: u32) -> Self {
        Assembly { folder, stage, attempt, state: State::default(), staged: BTreeMap::new(), made: 0, writers: BTreeMap::new() }
    }
}

impl Sink for Assembly<'_> {
    fn take(&mut self, entry: &Entry) -> Result<()> {
        // The rules first: an entry that breaks them changes no file.
        self.state.apply(&entry.header, entry.digest)?;
        match &entry.header.covers {
            Some(covers) => self.writers.extend(covers.writers.clone()),
            None => {
                self.writers.insert(entry.header.writer.clone(), entry.header.seq);
            }
        }
        if self.state.files.is_empty() {
            self.staged.clear();
        }
        for moved in &entry.header.moves {
            if let Some(staged) = self.staged.remove(&moved.from) {
                self.staged.insert(moved.to.clone(), staged);
            }
        }
        for (part, bytes) in entry.parts() {
            if !self.staged.contains_key(&part.path) {
                self.new_file(&part.path)?;
            }
            self.write(&part.path, part.start, bytes)?;
            self.check(&part.path, part.file_sha256, &format!("entry {}", entry.header.seq))?;
        }
        Ok(())
    }
}

impl Assembly<'_> {
    fn new_file(&mut self, path: &RelPath) -> Result<()> {
        self.made += 1;
        let at = self.stage.join(&format!("{}-{:08}", self.attempt, self.made))?;
        self.staged.insert(path.clone(), Staged { at, hash: RunningHash::default(), len: 0 });
        Ok(())
    }

    fn write(&mut self, path: &RelPath, start: u64, bytes: &[u8]) -> Result<()> {
        let failed = |cause| Error::io(format!("write {path}"), cause);
        let Some(staged) = self.staged.get_mut(path) else { return Ok(()) };
        if start != staged.len {
            staged.hash = match self.folder.open(&staged.at).map_err(failed)? {
                Some(file) => FileCursor::over(&*file, crate::model::FileKind::Whole, start)
                    .map_err(failed)?
                    .map(|cursor| cursor.hash)
                    .unwrap_or_default(),
                None => RunningHash::default(),
            };
        }
        self.folder.write_at(&staged.at, start, bytes).map_err(failed)?;
        staged.hash.update(bytes);
        staged.len = start + bytes.len() as u64;
        Ok(())
    }

    fn check(&self, path: &RelPath, digest: crate::model::Digest, by: &str) -> Result<()> {
        let matches = self.staged.get(path).is_some_and(|staged| staged.hash.digest() == digest);
        if matches {
            return Ok(());
        }
        Err(Error::corrupt(format!("{path} does not have the digest that {by} says")))
    }

    /// Whether all that was written behind entry `seq` was written by `writer`.
    pub fn only_by(&self, writer: &WriterId, seq: Seq) -> bool {
        self.writers.iter().all(|(other, last)| other == writer || *last <= seq)
    }

    /// Each file: its path, what the log says of it, and where its bytes are.
    pub fn files(&self) -> impl Iterator<Item = (&RelPath, &FileAt, &Staged)> {
        self.state.files.iter().filter_map(|(path, at)| Some((path, at, self.staged.get(path)?)))
    }
}
