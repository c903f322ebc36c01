//! Assembles files from entries in a temporary directory. Verifies the digest of a file after each
//! part.

use std::collections::BTreeMap;

use crate::codec::entry::Entry;
use crate::error::{Error, Result};
use crate::log::fork::{SessionRenamer, truncated_lengths};
use crate::log::ledger::FileCursor;
use crate::log::sink::EntrySink;
use crate::log::state::LogState;
use crate::model::{
    Checkpoint, Digest, FileKind, FileMove, FileState, ForkOrigin, RelPath, RunningHash, Seq,
    WriterId,
};
use crate::sys::Directory;
use crate::sys::mutation::{Mutation, is_active};

/// Assembles the files of a log.
pub struct FileAssembler<'a> {
    directory: &'a dyn Directory,
    stage: RelPath,
    attempt: u32,
    /// The state of the log so far.
    pub state: LogState,
    staged: BTreeMap<RelPath, StagedFile>,
    created: usize,
    /// The last entry of each writer.
    writers: BTreeMap<WriterId, Seq>,
}

/// A file in the temporary directory. Its name is a number, because paths from a log must not be
/// used before all of them are checked.
#[derive(Clone)]
pub struct StagedFile {
    /// Its path below the root.
    pub path: RelPath,
    /// The hash of its bytes.
    pub hash: RunningHash,
    len: u64,
}

impl<'a> FileAssembler<'a> {
    /// An assembler that writes to the directory `stage`, which may hold files of earlier attempts.
    pub fn new(directory: &'a dyn Directory, stage: RelPath, attempt: u32) -> Self {
        FileAssembler {
            directory,
            stage,
            attempt,
            state: LogState::default(),
            staged: BTreeMap::new(),
            created: 0,
            writers: BTreeMap::new(),
        }
    }
}

impl EntrySink for FileAssembler<'_> {
    fn apply_entry(&mut self, entry: &Entry) -> Result<()> {
        // The state comes first, so that an invalid entry changes no file.
        let forked: BTreeMap<RelPath, FileState> = if entry.header.fork.is_some() {
            self.state.files.clone()
        } else {
            BTreeMap::new()
        };
        self.state.apply(&entry.header, entry.digest)?;
        for (path, before) in forked {
            if self
                .state
                .files
                .get(&path)
                .is_none_or(|after| (after.len, after.sha256) != (before.len, before.sha256))
            {
                return Err(Error::corrupt(format!(
                    "{path} differs from the file that the fork starts with"
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
        FileMove::apply_all(&entry.header.moves, &mut self.staged);
        for (part, bytes) in entry.parts() {
            if !self.staged.contains_key(&part.path) {
                self.new_file(&part.path)?;
            }
            self.write(&part.path, part.start, bytes)?;
            self.verify_digest(&part.path, part.file_sha256, entry.header.seq)?;
        }
        Ok(())
    }

    fn needs_fork_origin(&self) -> bool {
        true
    }

    fn start_fork(&mut self, fork: &ForkOrigin, renamer: &SessionRenamer) -> Result<()> {
        self.fork(fork.transcript_lengths.as_ref(), renamer)
    }
}

impl FileAssembler<'_> {
    /// Changes the paths of files, for a restore to other paths than those in the log.
    pub fn relocate(&mut self, moves: &[FileMove]) {
        FileMove::apply_all(moves, &mut self.state.files);
        FileMove::apply_all(moves, &mut self.staged);
    }

    /// The lengths of transcripts after the session ID in them was replaced.
    pub fn renamed_lengths(
        &self,
        lengths: &BTreeMap<RelPath, u64>,
        renamer: &SessionRenamer,
    ) -> Result<BTreeMap<RelPath, u64>> {
        let scratch = self.stage.join("measured")?;
        let mut renamed = BTreeMap::new();
        for (path, len) in lengths {
            let Some(staged) = self.staged.get(path).filter(|staged| staged.len >= *len) else {
                continue;
            };
            let opened = self
                .directory
                .open(&staged.path)
                .map_err(|cause| Error::io(format!("read {path}"), cause))?;
            let opened = opened.ok_or_else(|| {
                Error::corrupt(format!("the temporary copy of {path} no longer exists"))
            })?;
            let (len, _) = renamer.copy(
                self.directory,
                &*opened,
                path,
                (FileKind::Append, *len),
                &scratch,
            )?;
            renamed.insert(renamer.path(path)?, len);
        }
        Ok(renamed)
    }

    /// Turns the files into the start of a fork: truncated to `lengths`, under new names, with the new
    /// session ID in their lines.
    pub fn fork(
        &mut self,
        lengths: Option<&BTreeMap<RelPath, u64>>,
        renamer: &SessionRenamer,
    ) -> Result<()> {
        let lengths = truncated_lengths(&self.state.files, lengths);
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
                .open(&from.path)
                .map_err(failed)?
                .ok_or_else(|| {
                    Error::corrupt(format!("the temporary copy of {path} no longer exists"))
                })?;
            let name = renamer.path(&path)?;
            self.new_file(&name)?;
            let Some(to) = self.staged.get_mut(&name) else {
                continue;
            };
            let (len, hash) =
                renamer.copy(self.directory, &*opened, &path, (file.kind, len), &to.path)?;
            let sha256 = hash.digest();
            (to.len, to.hash) = (len, hash);
            // A fork of a fork must not need space for every session in between.
            self.directory.remove(&from.path).map_err(|cause| {
                Error::io(format!("remove the temporary copy of {path}"), cause)
            })?;
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
        self.created += 1;
        let staged_path = self
            .stage
            .join(&format!("{}-{:08}", self.attempt, self.created))?;
        self.staged.insert(
            path.clone(),
            StagedFile {
                path: staged_path,
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
            staged.hash = match self.directory.open(&staged.path).map_err(failed)? {
                Some(file) => FileCursor::read(&*file, FileKind::Whole, start)
                    .map_err(failed)?
                    .map(|cursor| cursor.hash)
                    .unwrap_or_default(),
                None => RunningHash::default(),
            };
        }
        self.directory
            .write_at(&staged.path, start, bytes)
            .map_err(failed)?;
        staged.hash.update(bytes);
        staged.len = start + bytes.len() as u64;
        Ok(())
    }

    fn verify_digest(&self, path: &RelPath, digest: Digest, seq: Seq) -> Result<()> {
        let matches = self
            .staged
            .get(path)
            .is_some_and(|staged| staged.hash.digest() == digest);
        if matches || is_active(Mutation::SkipDigestCheck) {
            return Ok(());
        }
        Err(Error::corrupt(format!(
            "the digest of {path} differs from the one in entry {seq}"
        )))
    }

    /// Truncates the transcripts to their lengths at a checkpoint of the last entry.
    pub fn truncate_to(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        let transcripts: Vec<RelPath> = self
            .state
            .files
            .iter()
            .filter(|(_, file)| file.kind == FileKind::Append)
            .map(|(path, _)| path.clone())
            .collect();
        for path in transcripts {
            let length = checkpoint.transcript_lengths.get(&path).copied();
            let (Some(file), Some(staged)) =
                (self.state.files.get_mut(&path), self.staged.get_mut(&path))
            else {
                continue;
            };
            if file.len <= length.unwrap_or(0) {
                continue;
            }
            let Some(length) = length else {
                // The transcript did not exist at the checkpoint.
                self.state.files.remove(&path);
                self.staged.remove(&path);
                continue;
            };
            let failed = |cause| Error::io(format!("truncate {path}"), cause);
            self.directory
                .write_at(&staged.path, length, &[])
                .map_err(failed)?;
            let opened = self
                .directory
                .open(&staged.path)
                .map_err(failed)?
                .ok_or_else(|| {
                    Error::corrupt(format!("the temporary copy of {path} no longer exists"))
                })?;
            let cursor = FileCursor::read(&*opened, FileKind::Append, length).map_err(failed)?;
            let cursor = cursor.ok_or_else(|| {
                Error::corrupt(format!("{path} is shorter than at the checkpoint"))
            })?;
            (file.len, file.sha256) = (length, cursor.hash.digest());
            (staged.len, staged.hash) = (length, cursor.hash);
        }
        self.state.turns.roll_back(Some(checkpoint));
        Ok(())
    }

    /// Leaves out a file.
    pub fn forget(&mut self, path: &RelPath) {
        self.state.files.remove(path);
        self.staged.remove(path);
    }

    /// Whether `writer` wrote all entries after `seq`.
    pub fn is_only_writer_after(&self, writer: &WriterId, seq: Seq) -> bool {
        self.writers
            .iter()
            .all(|(other, last)| other == writer || *last <= seq)
    }

    /// Each file: its path, its state in the log, and its staged copy.
    pub fn files(&self) -> impl Iterator<Item = (&RelPath, &FileState, &StagedFile)> {
        self.state
            .files
            .iter()
            .filter_map(|(path, file)| Some((path, file, self.staged.get(path)?)))
    }
}
