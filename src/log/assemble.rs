//! Puts files together from entries, in a temporary directory, checking each against its digest after every part.

use std::collections::BTreeMap;

use crate::codec::entry::Entry;
use crate::error::{Error, Result};
use crate::log::fork::{SessionRenamer, cut_lengths};
use crate::log::ledger::FileCursor;
use crate::log::read::EntrySink;
use crate::log::state::LogState;
use crate::model::{
    Checkpoint, FileKind, FileMove, FileState, ForkOrigin, RelPath, RunningHash, Seq, WriterId,
};
use crate::sys::Directory;

/// Files in the making.
pub struct FileAssembler<'a> {
    directory: &'a dyn Directory,
    stage: RelPath,
    attempt: u32,
    /// What the log amounts to so far.
    pub state: LogState,
    staged: BTreeMap<RelPath, StagedFile>,
    made: usize,
    /// The last entry of each writer.
    writers: BTreeMap<WriterId, Seq>,
}

/// A file in the temporary directory. It has a number for a name: paths from a bucket are not used before they are checked
/// as a whole.
#[derive(Clone)]
pub struct StagedFile {
    /// Where it is.
    pub at: RelPath,
    /// The hash over all of it.
    pub hash: RunningHash,
    len: u64,
}

impl<'a> FileAssembler<'a> {
    /// Begins in `stage`, a directory that nobody else uses but earlier attempts.
    pub fn new(directory: &'a dyn Directory, stage: RelPath, attempt: u32) -> Self {
        FileAssembler {
            directory,
            stage,
            attempt,
            state: LogState::default(),
            staged: BTreeMap::new(),
            made: 0,
            writers: BTreeMap::new(),
        }
    }
}

impl EntrySink for FileAssembler<'_> {
    fn take(&mut self, entry: &Entry) -> Result<()> {
        // The rules first: an entry that breaks them changes no file.
        let forked: BTreeMap<RelPath, FileState> = if entry.header.fork.is_some() {
            self.state.files.clone()
        } else {
            BTreeMap::new()
        };
        self.state.apply(&entry.header, entry.digest)?;
        for (path, was) in forked {
            if self
                .state
                .files
                .get(&path)
                .is_none_or(|now| (now.len, now.sha256) != (was.len, was.sha256))
            {
                return Err(Error::corrupt(format!(
                    "{path} is not what the fork says that it begins with"
                )));
            }
        }
        match &entry.header.covers {
            Some(covers) => self.writers.extend(covers.writers.clone()),
            None => {
                self.writers
                    .insert(entry.header.writer.clone(), entry.header.seq);
            }
        }
        if self.state.files.is_empty() {
            self.staged.clear();
        }
        moved(&mut self.staged, &entry.header.moves);
        for (part, bytes) in entry.parts() {
            if !self.staged.contains_key(&part.path) {
                self.new_file(&part.path)?;
            }
            self.write(&part.path, part.start, bytes)?;
            self.check(
                &part.path,
                part.file_sha256,
                &format!("entry {}", entry.header.seq),
            )?;
        }
        Ok(())
    }

    fn wants_origin(&self) -> bool {
        true
    }

    fn begin(&mut self, fork: &ForkOrigin, renaming: &SessionRenamer) -> Result<()> {
        self.fork(fork.cut.as_ref(), renaming)
    }
}

/// Gives files other paths.
fn moved<T>(files: &mut BTreeMap<RelPath, T>, moves: &[FileMove]) {
    for moved in moves {
        if let Some(file) = files.remove(&moved.from) {
            files.insert(moved.to.clone(), file);
        }
    }
}

impl FileAssembler<'_> {
    /// Gives files other paths than the log does.
    pub fn relocate(&mut self, moves: &[FileMove]) {
        moved(&mut self.state.files, moves);
        moved(&mut self.staged, moves);
    }

    /// How long transcripts that are so long now will be under the other id.
    pub fn renamed_lengths(
        &self,
        lengths: &BTreeMap<RelPath, u64>,
        renaming: &SessionRenamer,
    ) -> Result<BTreeMap<RelPath, u64>> {
        let scratch = self.stage.join("measured")?;
        let mut renamed = BTreeMap::new();
        for (path, len) in lengths {
            let Some(staged) = self.staged.get(path).filter(|staged| staged.len >= *len) else {
                continue;
            };
            let opened = self
                .directory
                .open(&staged.at)
                .map_err(|cause| Error::io(format!("read {path}"), cause))?;
            let opened = opened.ok_or_else(|| Error::corrupt(format!("{path} is gone")))?;
            let (len, _) = renaming.copy(
                self.directory,
                &*opened,
                path,
                (FileKind::Append, *len),
                &scratch,
            )?;
            renamed.insert(renaming.path(path)?, len);
        }
        Ok(renamed)
    }

    /// Makes what a fork begins with of the files: cut at a point, under new names, with the new id in their lines.
    pub fn fork(
        &mut self,
        cut: Option<&BTreeMap<RelPath, u64>>,
        renaming: &SessionRenamer,
    ) -> Result<()> {
        let lengths = cut_lengths(&self.state.files, cut);
        let (files, staged) = (
            std::mem::take(&mut self.state.files),
            std::mem::take(&mut self.staged),
        );
        self.state = LogState::default();
        self.writers.clear();
        for (path, len) in lengths {
            let (Some(file), Some(from)) = (files.get(&path), staged.get(&path)) else {
                continue;
            };
            let failed = |cause| Error::io(format!("read {path}"), cause);
            let opened = self
                .directory
                .open(&from.at)
                .map_err(failed)?
                .ok_or_else(|| Error::corrupt(format!("{path} is gone")))?;
            let name = renaming.path(&path)?;
            self.new_file(&name)?;
            let Some(to) = self.staged.get_mut(&name) else {
                continue;
            };
            let (len, hash) =
                renaming.copy(self.directory, &*opened, &path, (file.kind, len), &to.at)?;
            let sha256 = hash.digest();
            (to.len, to.hash) = (len, hash);
            self.state.files.insert(
                name,
                FileState {
                    len,
                    sha256,
                    ..file.clone()
                },
            );
        }
        Ok(())
    }

    fn new_file(&mut self, path: &RelPath) -> Result<()> {
        self.made += 1;
        let at = self
            .stage
            .join(&format!("{}-{:08}", self.attempt, self.made))?;
        self.staged.insert(
            path.clone(),
            StagedFile {
                at,
                hash: RunningHash::default(),
                len: 0,
            },
        );
        Ok(())
    }

    fn write(&mut self, path: &RelPath, start: u64, bytes: &[u8]) -> Result<()> {
        let failed = |cause| Error::io(format!("write {path}"), cause);
        let Some(staged) = self.staged.get_mut(path) else {
            return Ok(());
        };
        if start != staged.len {
            staged.hash = match self.directory.open(&staged.at).map_err(failed)? {
                Some(file) => FileCursor::over(&*file, crate::model::FileKind::Whole, start)
                    .map_err(failed)?
                    .map(|cursor| cursor.hash)
                    .unwrap_or_default(),
                None => RunningHash::default(),
            };
        }
        self.directory
            .write_at(&staged.at, start, bytes)
            .map_err(failed)?;
        staged.hash.update(bytes);
        staged.len = start + bytes.len() as u64;
        Ok(())
    }

    fn check(&self, path: &RelPath, digest: crate::model::Digest, by: &str) -> Result<()> {
        let matches = self
            .staged
            .get(path)
            .is_some_and(|staged| staged.hash.digest() == digest);
        if matches {
            return Ok(());
        }
        Err(Error::corrupt(format!(
            "{path} does not have the digest that {by} says"
        )))
    }

    /// Goes back within the last entry: what was appended behind a checkpoint goes from the files.
    pub fn cut(&mut self, point: &Checkpoint) -> Result<()> {
        let transcripts: Vec<RelPath> = self
            .state
            .files
            .iter()
            .filter(|(_, file)| file.kind == FileKind::Append)
            .map(|(path, _)| path.clone())
            .collect();
        for path in transcripts {
            let keep = point.files.get(&path).copied();
            let (Some(file), Some(staged)) =
                (self.state.files.get_mut(&path), self.staged.get_mut(&path))
            else {
                continue;
            };
            if file.len <= keep.unwrap_or(0) {
                continue;
            }
            let Some(keep) = keep else {
                // It was begun later.
                self.state.files.remove(&path);
                self.staged.remove(&path);
                continue;
            };
            let failed = |cause| Error::io(format!("cut {path}"), cause);
            self.directory
                .write_at(&staged.at, keep, &[])
                .map_err(failed)?;
            let opened = self
                .directory
                .open(&staged.at)
                .map_err(failed)?
                .ok_or_else(|| Error::corrupt(format!("{path} is gone")))?;
            let cursor = FileCursor::over(&*opened, FileKind::Append, keep).map_err(failed)?;
            let cursor = cursor.ok_or_else(|| {
                Error::corrupt(format!("{path} is shorter than the checkpoint says"))
            })?;
            (file.len, file.sha256) = (keep, cursor.hash.digest());
            (staged.len, staged.hash) = (keep, cursor.hash);
        }
        self.state.turns.go_back(Some(point));
        Ok(())
    }

    /// Whether all that was written behind entry `seq` was written by `writer`.
    pub fn only_by(&self, writer: &WriterId, seq: Seq) -> bool {
        self.writers
            .iter()
            .all(|(other, last)| other == writer || *last <= seq)
    }

    /// Each file: its path, what the log says of it, and where its bytes are.
    pub fn files(&self) -> impl Iterator<Item = (&RelPath, &FileState, &StagedFile)> {
        self.state
            .files
            .iter()
            .filter_map(|(path, at)| Some((path, at, self.staged.get(path)?)))
    }
}
