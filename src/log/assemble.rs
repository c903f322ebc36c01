//! Assembles files from entries in a temporary directory. Verifies the digest of a file after each
//! part.

use std::collections::BTreeMap;

use crate::codec::entry::Entry;
use crate::error::{Error, Result};
use crate::log::fork::{SessionRenamer, truncated_lengths};
use crate::log::ledger::FileCursor;
use crate::log::sink::EntrySink;
use crate::log::state::LogState;
use crate::log::uploads::Uploads;
use crate::model::{
    Checkpoint, Digest, EntryHeader, EntryKind, FileHash, FileKind, FileMove, FileState,
    ForkOrigin, Part, RelPath, RunningHash, Seq, UploadPart, WriterId,
};
use crate::sys::Directory;
use crate::sys::mutation::{Mutation, is_active};
use crate::sys::packed::{PACK_INTERVAL, pack};

/// Size of the buffer that completes an upload.
const COPY_BYTES: usize = 128 << 10;

/// Assembles the files of a log.
pub struct FileAssembler<'a> {
    directory: &'a dyn Directory,
    stage: RelPath,
    attempt: u32,
    /// The state of the log so far.
    pub state: LogState,
    staged: BTreeMap<RelPath, StagedFile>,
    /// The side files of which the last part has not been read yet.
    uploads: Uploads<StagedUpload>,
    created: u32,
    /// The last entry of each writer.
    writers: BTreeMap<WriterId, Seq>,
}

/// A file in the temporary directory. Its name is a number, because paths from a log must not be
/// used before all of them are checked.
#[derive(Clone)]
pub struct StagedFile {
    stage: RelPath,
    attempt: u32,
    number: u32,
    /// The hash of its bytes.
    pub hash: FileHash,
    len: u64,
}

impl StagedFile {
    /// Its path below the root. It is not kept, because a session can have a hundred thousand files.
    pub fn path(&self) -> RelPath {
        self.stage.join_number(self.attempt, self.number)
    }
}

/// The bytes of an upload so far. The file in the log stays as it is until the upload is complete.
struct StagedUpload {
    /// The offset in the file at which the upload starts.
    start: u64,
    /// The bytes from there on.
    file: StagedFile,
    /// The hash of the file from its first byte.
    hash: RunningHash,
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
            uploads: Uploads::default(),
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
        if entry.header.resets_log() || entry.header.kind == EntryKind::Snapshot {
            self.uploads.clear();
        }
        FileMove::apply_all(&entry.header.moves, &mut self.staged);
        self.uploads.start_entry(&entry.header);
        for (part, bytes) in entry.parts() {
            if part.upload.is_some() && !is_active(Mutation::ShowIncompleteUpload) {
                self.apply_upload_part(part, bytes, &entry.header)?;
                continue;
            }
            self.uploads.take(&part.path, part.start);
            if !self.staged.contains_key(&part.path) {
                let file = self.new_file();
                self.staged.insert(part.path.clone(), file);
            }
            self.write(&part.path, part.start, bytes)?;
            if let Some(staged) = self.staged.get_mut(&part.path) {
                check_digest(staged.hash.digest(), part, entry.header.seq)?;
                if part.kind == FileKind::Whole {
                    staged.hash.settle();
                }
            }
        }
        self.uploads.end_entry(&entry.header);
        if entry.header.parts.len() >= PACK_INTERVAL / 4 {
            pack(&mut self.state.files);
            pack(&mut self.staged);
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
                .open(&staged.path())
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
        self.uploads.clear();
        self.writers.clear();
        for (path, len) in lengths {
            let (Some(file), Some(from)) = (files.get(&path), staged.get(&path)) else {
                continue;
            };
            let failed = |cause| Error::io(format!("read {path}"), cause);
            let opened = self
                .directory
                .open(&from.path())
                .map_err(failed)?
                .ok_or_else(|| {
                    Error::corrupt(format!("the temporary copy of {path} no longer exists"))
                })?;
            let name = renamer.path(&path)?;
            let mut to = self.new_file();
            let (len, hash) = renamer.copy(
                self.directory,
                &*opened,
                &path,
                (file.kind, len),
                &to.path(),
            )?;
            let sha256 = hash.digest();
            (to.len, to.hash) = (len, hash.into());
            self.staged.insert(name.clone(), to);
            // A fork of a fork must not need space for every session in between.
            self.directory.remove(&from.path()).map_err(|cause| {
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

    fn new_file(&mut self) -> StagedFile {
        self.created += 1;
        StagedFile {
            stage: self.stage.clone(),
            attempt: self.attempt,
            number: self.created,
            hash: RunningHash::default().into(),
            len: 0,
        }
    }

    /// Adds a part to an upload. The last part replaces the file, or its end.
    fn apply_upload_part(&mut self, part: &Part, bytes: &[u8], header: &EntryHeader) -> Result<()> {
        let failed = |cause| Error::io(format!("write {}", part.path), cause);
        let mut upload = match self.uploads.take(&part.path, part.start) {
            Some(upload) => upload,
            None => StagedUpload {
                start: part.start,
                file: self.new_file(),
                hash: self.hash_up_to(&part.path, part.start).map_err(failed)?,
            },
        };
        self.directory
            .write_at(&upload.file.path(), upload.file.len, bytes)
            .map_err(failed)?;
        upload.hash.update(bytes);
        upload.file.len += bytes.len() as u64;
        check_digest(upload.hash.digest(), part, header.seq)?;
        if part.upload == Some(UploadPart::More) {
            self.uploads.insert(&part.path, header, part.end(), upload);
            return Ok(());
        }
        upload.file.hash = FileHash::Digest(part.file_sha256);
        self.complete_upload(&part.path, upload).map_err(failed)
    }

    fn complete_upload(&mut self, path: &RelPath, upload: StagedUpload) -> std::io::Result<()> {
        if upload.start == 0 {
            if let Some(replaced) = self.staged.insert(path.clone(), upload.file) {
                self.directory.remove(&replaced.path())?;
            }
            return Ok(());
        }
        let (Some(staged), Some(file)) = (
            self.staged.get_mut(path),
            self.directory.open(&upload.file.path())?,
        ) else {
            return Err(std::io::ErrorKind::NotFound.into());
        };
        let mut buffer = vec![0; COPY_BYTES];
        let mut copied = 0;
        while copied < upload.file.len {
            match file.read_at(&mut buffer, copied)? {
                0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                count => {
                    let offset = upload.start + copied;
                    self.directory
                        .write_at(&staged.path(), offset, &buffer[..count])?;
                    copied += count as u64;
                }
            }
        }
        let uploaded = upload.file.path();
        (staged.len, staged.hash) = (upload.start + copied, upload.file.hash);
        self.directory.remove(&uploaded)
    }

    /// The hash of the first bytes of a file.
    fn hash_up_to(&self, path: &RelPath, len: u64) -> std::io::Result<RunningHash> {
        let Some(staged) = self.staged.get(path).filter(|_| len > 0) else {
            return Ok(RunningHash::default());
        };
        if let Some(hash) = staged.hash.running().filter(|_| len == staged.len) {
            return Ok(hash.clone());
        }
        let file = self.directory.open(&staged.path())?;
        let cursor = file.map(|file| FileCursor::read(&*file, FileKind::Whole, len));
        let cursor = cursor.transpose()?.flatten();
        let hash = cursor.and_then(|cursor| cursor.hash.running().cloned());
        Ok(hash.unwrap_or_default())
    }

    fn write(&mut self, path: &RelPath, start: u64, bytes: &[u8]) -> Result<()> {
        let failed = |cause| Error::io(format!("write {path}"), cause);
        let mut hash = self.hash_up_to(path, start).map_err(failed)?;
        let Some(staged) = self.staged.get_mut(path) else {
            return Ok(());
        };
        self.directory
            .write_at(&staged.path(), start, bytes)
            .map_err(failed)?;
        hash.update(bytes);
        (staged.len, staged.hash) = (start + bytes.len() as u64, hash.into());
        Ok(())
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
                .write_at(&staged.path(), length, &[])
                .map_err(failed)?;
            let opened = self
                .directory
                .open(&staged.path())
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

fn check_digest(digest: Digest, part: &Part, seq: Seq) -> Result<()> {
    if digest == part.file_sha256 || is_active(Mutation::SkipDigestCheck) {
        return Ok(());
    }
    Err(Error::corrupt(format!(
        "the digest of {} differs from the one in entry {seq}",
        part.path
    )))
}
