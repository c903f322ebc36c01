//! The difference between the main line of a session and a branch, as deltas.
//!
//! Owns which bytes of which files a delta replaces, and the checkpoints of the branch under their
//! new numbers. Reads the assembled files of both lines; does not own the log.

use std::collections::{BTreeMap, VecDeque};

use crate::agent::Profile;
use crate::codec::entry::MAX_RAW_BYTES;
use crate::error::{Error, Result};
use crate::log::assemble::{FileAssembler, StagedFile};
use crate::log::branches::Branch;
use crate::log::state::LogState;
use crate::model::{
    Checkpoint, CheckpointStatus, FileKind, FileMove, FileState, ForkOrigin, Part, RelPath,
    RunningHash, UploadPart,
};
use crate::sys::lines::complete_prefix_len;
use crate::sys::{Directory, OpenFile};

/// Raw bytes of one delta. Most adoptions are then one delta, and so one atomic step; it is half of
/// the maximum, so that a line that does not fit can be added.
const MAX_DELTA_BYTES: u64 = MAX_RAW_BYTES / 2;

/// Number of bytes that are compared at a time.
const CHUNK_LEN: usize = 64 << 10;

/// A delta of an adoption.
#[derive(Debug, Default)]
pub(super) struct Delta {
    pub moves: Vec<FileMove>,
    pub parts: Vec<Part>,
    pub bodies: Vec<Vec<u8>>,
    pub checkpoints: Vec<Checkpoint>,
    /// Whether the main line has the content of the branch after it.
    pub is_last: bool,
}

/// A file that an adoption changes: its bytes from `start` on are replaced.
#[derive(Debug, Clone)]
struct ChangedFile {
    path: RelPath,
    state: FileState,
    /// The assembled file of the branch; none if the branch does not have it.
    staged: Option<RelPath>,
    start: u64,
}

/// The steps from the main line to the branch.
#[derive(Debug)]
pub(super) struct AdoptionPlan {
    moves: Vec<FileMove>,
    files: Vec<ChangedFile>,
    checkpoints: Vec<Checkpoint>,
    /// Number of complete turns afterwards.
    pub turn: u64,
}

impl AdoptionPlan {
    /// Compares two lines of a session. The branch has `turn` complete turns.
    pub fn new(
        (main, line): (&FileAssembler<'_>, &FileAssembler<'_>),
        branch: &Branch,
        turn: u64,
        fork: Option<&ForkOrigin>,
        profile: &dyn Profile,
        directory: &dyn Directory,
    ) -> Result<AdoptionPlan> {
        let moves = moves(&main.state, &line.state);
        let moved_from: BTreeMap<&RelPath, &RelPath> =
            moves.iter().map(|step| (&step.to, &step.from)).collect();
        let staged: BTreeMap<&RelPath, &StagedFile> = main
            .files()
            .map(|(path, _, staged)| (path, staged))
            .collect();
        // The messages of a fork's origin have no offsets in the fork, so a delta cannot keep some
        // of them: it replaces the whole file.
        let inherited = fork.map_or(0, inherited_len);
        let mut files = Vec::new();
        for (path, file, copy) in line.files() {
            let former = moved_from.get(path).copied().unwrap_or(path);
            let before = main.state.files.get(former);
            if before.is_some_and(|before| (before.len, before.sha256) == (file.len, file.sha256)) {
                continue;
            }
            let start = match (staged.get(former), file.kind) {
                (Some(former), FileKind::Append) => {
                    common_lines_len(directory, &former.path(), &copy.path())?
                }
                _ => 0,
            };
            files.push(ChangedFile {
                path: path.clone(),
                state: file.clone(),
                staged: Some(copy.path()),
                start: if start < inherited { 0 } else { start },
            });
        }
        files.extend(emptied_transcripts(&main.state, &line.state, &moves));
        // Side files come first, because transcripts refer to them.
        files.sort_by_key(|file| {
            let is_transcript = profile.is_transcript(&file.path);
            (
                is_transcript,
                file.state.kind == FileKind::Append,
                file.path.clone(),
            )
        });
        Ok(AdoptionPlan {
            moves,
            files,
            checkpoints: checkpoints(&main.state, &line.state, branch, turn),
            turn,
        })
    }

    /// Whether the lines are equal.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty() && self.moves.is_empty()
    }

    /// Number of files that change.
    pub fn changed_files(&self) -> usize {
        self.files.len()
    }

    /// Bytes of all deltas.
    pub fn bytes(&self) -> u64 {
        self.files
            .iter()
            .map(|file| file.state.len.saturating_sub(file.start))
            .sum()
    }

    /// The deltas, in order.
    pub fn into_deltas(self, directory: &dyn Directory) -> Deltas<'_> {
        Deltas {
            directory,
            moves: self.moves,
            files: self.files.into_iter().map(FileReader::new).collect(),
            checkpoints: self.checkpoints,
            is_done: false,
        }
    }
}

/// Transcripts that have the same name in another directory: the session was restored into another
/// project.
fn moves(main: &LogState, line: &LogState) -> Vec<FileMove> {
    let only_in = |one: &LogState, other: &LogState| -> Vec<RelPath> {
        let files = one.files.iter();
        files
            .filter(|(path, file)| {
                file.kind == FileKind::Append && !other.files.contains_key(*path)
            })
            .map(|(path, _)| path.clone())
            .collect()
    };
    let (former, new) = (only_in(main, line), only_in(line, main));
    let name = |path: &RelPath| path.as_str().rsplit('/').next().map(str::to_owned);
    let same_name = |paths: &[RelPath], wanted: &RelPath| -> Option<RelPath> {
        let mut same = paths.iter().filter(|path| name(path) == name(wanted));
        match (same.next(), same.next()) {
            (Some(only), None) => Some(only.clone()),
            _ => None,
        }
    };
    former
        .iter()
        .filter_map(|from| {
            let to = same_name(&new, from)?;
            (same_name(&former, &to)? == *from).then(|| FileMove {
                from: from.clone(),
                to,
            })
        })
        .collect()
}

/// The transcripts that only the former main line has. They become empty, so that their messages
/// are not part of the new main line. Other files stay, as if the agent had deleted them.
fn emptied_transcripts(
    main: &LogState,
    line: &LogState,
    moves: &[FileMove],
) -> impl Iterator<Item = ChangedFile> {
    main.files
        .iter()
        .filter(|(path, file)| {
            file.kind == FileKind::Append
                && file.len > 0
                && !line.files.contains_key(*path)
                && moves.iter().all(|step| step.from != **path)
        })
        .map(|(path, file)| ChangedFile {
            path: path.clone(),
            state: FileState {
                len: 0,
                sha256: RunningHash::default().digest(),
                ..file.clone()
            },
            staged: None,
            start: 0,
        })
}

/// Length of the longest transcript that a fork starts with.
fn inherited_len(fork: &ForkOrigin) -> u64 {
    let transcripts = fork.files.iter();
    transcripts
        .filter(|part| part.kind == FileKind::Append)
        .map(|part| part.len)
        .max()
        .unwrap_or(0)
}

/// The checkpoints that the adoption adds: those of the branch, after the last number of the main
/// line.
fn checkpoints(main: &LogState, line: &LogState, branch: &Branch, turn: u64) -> Vec<Checkpoint> {
    let mut numbers: BTreeMap<u64, u64> = BTreeMap::new();
    let mut next = main.turns.last_number;
    let mut renumber = |checkpoint: &Checkpoint, parent: Option<u64>| {
        next += 1;
        numbers.insert(checkpoint.number, next);
        Checkpoint {
            number: next,
            seq: None,
            parent: parent.map(|parent| numbers.get(&parent).copied().unwrap_or(parent)),
            ..checkpoint.clone()
        }
    };
    let own: Vec<&Checkpoint> = line
        .checkpoints
        .iter()
        .filter(|checkpoint| checkpoint.seq.is_some_and(|seq| seq > branch.base))
        .collect();
    if !own.is_empty() {
        return own
            .into_iter()
            .map(|checkpoint| renumber(checkpoint, checkpoint.parent))
            .collect();
    }
    if main.turns.turn == turn {
        return Vec::new();
    }
    // The branch ended before its first turn was complete. The last checkpoint that both lines have
    // is repeated, so that the turns of the former main line do not count.
    let lengths = transcript_lengths(line);
    let is_shared = |checkpoint: &&Checkpoint| {
        checkpoint.step.is_none()
            && checkpoint.turn == turn
            && checkpoint
                .transcript_lengths
                .iter()
                .all(|(path, len)| lengths.get(path).is_some_and(|end| len <= end))
    };
    if let Some(shared) = main.checkpoints.iter().rfind(is_shared) {
        return vec![renumber(shared, shared.parent)];
    }
    vec![Checkpoint {
        number: next + 1,
        seq: None,
        turn,
        step: None,
        status: CheckpointStatus::Completed,
        parent: None,
        parent_session: None,
        at: branch.first_at.unwrap_or_default(),
        message_id: None,
        stop_reason: None,
        transcript_lengths: lengths,
        pending_calls: Vec::new(),
    }]
}

fn transcript_lengths(state: &LogState) -> BTreeMap<RelPath, u64> {
    let transcripts = state.files.iter();
    transcripts
        .filter(|(_, file)| file.kind == FileKind::Append)
        .map(|(path, file)| (path.clone(), file.len))
        .collect()
}

/// Yields the deltas of an adoption.
pub(super) struct Deltas<'a> {
    directory: &'a dyn Directory,
    moves: Vec<FileMove>,
    files: VecDeque<FileReader>,
    checkpoints: Vec<Checkpoint>,
    is_done: bool,
}

impl Deltas<'_> {
    /// The next delta; none after the last one.
    pub fn next(&mut self) -> Result<Option<Delta>> {
        if self.is_done {
            return Ok(None);
        }
        let mut delta = Delta {
            moves: std::mem::take(&mut self.moves),
            ..Delta::default()
        };
        let mut room = MAX_DELTA_BYTES;
        while let Some(reader) = self.files.front_mut() {
            if room == 0 {
                return Ok(Some(delta));
            }
            let (part, body) = reader.next(self.directory, room)?;
            room = room.saturating_sub(part.len + 1);
            // An entry has at most one part per file.
            let is_complete = reader.offset >= reader.file.state.len;
            delta.parts.push(part);
            delta.bodies.push(body);
            if !is_complete {
                return Ok(Some(delta));
            }
            self.files.pop_front();
        }
        self.is_done = true;
        delta.checkpoints = std::mem::take(&mut self.checkpoints);
        delta.is_last = true;
        Ok(Some(delta))
    }
}

/// Reads the bytes of a changed file.
struct FileReader {
    file: ChangedFile,
    /// Offset of the next byte.
    offset: u64,
    hash: Option<RunningHash>,
}

impl FileReader {
    fn new(file: ChangedFile) -> FileReader {
        FileReader {
            offset: file.start,
            file,
            hash: None,
        }
    }

    /// The next part, of about `room` bytes. A transcript is split between lines.
    fn next(&mut self, directory: &dyn Directory, room: u64) -> Result<(Part, Vec<u8>)> {
        let start = self.offset;
        let mut body = Vec::new();
        if let Some(staged) = &self.file.staged {
            let opened = open(directory, staged)?;
            let mut hash = match self.hash.take() {
                Some(hash) => hash,
                None => hash_of(&*opened, start)?,
            };
            body = self.read(&*opened, room)?;
            hash.update(&body);
            self.hash = Some(hash);
        }
        self.offset += body.len() as u64;
        let file = &self.file.state;
        let file_sha256 = match &self.hash {
            Some(hash) => hash.digest(),
            None => file.sha256,
        };
        let part = Part {
            path: self.file.path.clone(),
            kind: file.kind,
            start,
            len: body.len() as u64,
            file_sha256,
            mode: file.mode,
            mtime_ns: file.mtime_ns,
            seq: None,
            upload: match self.offset < file.len {
                _ if file.kind == FileKind::Append => None,
                true => Some(UploadPart::More),
                false => (start > self.file.start).then_some(UploadPart::Last),
            },
        };
        Ok((part, body))
    }

    fn read(&self, file: &dyn OpenFile, room: u64) -> Result<Vec<u8>> {
        let left = self.file.state.len - self.offset;
        let mut wanted = left.min(room);
        loop {
            let mut body = vec![0; wanted as usize];
            read_exact(file, self.offset, &mut body)?;
            let complete_len = complete_prefix_len(&body);
            match self.file.state.kind {
                _ if wanted == left => {}
                FileKind::Whole => {}
                FileKind::Append if complete_len > 0 => body.truncate(complete_len),
                // A line that is longer than the maximum entry is written in parts.
                FileKind::Append if wanted < left.min(MAX_DELTA_BYTES) => {
                    wanted = left.min(MAX_DELTA_BYTES);
                    continue;
                }
                FileKind::Append => {}
            }
            return Ok(body);
        }
    }
}

fn open(directory: &dyn Directory, staged: &RelPath) -> Result<Box<dyn OpenFile>> {
    directory
        .open(staged)
        .and_then(|file| file.ok_or_else(|| std::io::ErrorKind::NotFound.into()))
        .map_err(failed)
}

fn failed(cause: std::io::Error) -> Error {
    Error::io("read an assembled file", cause)
}

fn read_exact(file: &dyn OpenFile, offset: u64, buffer: &mut [u8]) -> Result<()> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read_at(&mut buffer[filled..], offset + filled as u64) {
            Ok(0) => return Err(failed(std::io::ErrorKind::UnexpectedEof.into())),
            Ok(count) => filled += count,
            Err(cause) => return Err(failed(cause)),
        }
    }
    Ok(())
}

/// The hash of the first `len` bytes.
fn hash_of(file: &dyn OpenFile, len: u64) -> Result<RunningHash> {
    let mut hash = RunningHash::default();
    let mut buffer = vec![0; CHUNK_LEN];
    let mut offset = 0;
    while offset < len {
        let wanted = (len - offset).min(CHUNK_LEN as u64) as usize;
        read_exact(file, offset, &mut buffer[..wanted])?;
        hash.update(&buffer[..wanted]);
        offset += wanted as u64;
    }
    Ok(hash)
}

/// Length of the complete lines at the start that two files have in common.
fn common_lines_len(directory: &dyn Directory, one: &RelPath, other: &RelPath) -> Result<u64> {
    let (one, other) = (open(directory, one)?, open(directory, other)?);
    let len = {
        let size = |file: &dyn OpenFile| file.stat().map(|stat| stat.size).map_err(failed);
        size(&*one)?.min(size(&*other)?)
    };
    let (mut left, mut right) = (vec![0; CHUNK_LEN], vec![0; CHUNK_LEN]);
    let (mut offset, mut lines) = (0, 0);
    while offset < len {
        let wanted = (len - offset).min(CHUNK_LEN as u64) as usize;
        read_exact(&*one, offset, &mut left[..wanted])?;
        read_exact(&*other, offset, &mut right[..wanted])?;
        let pairs = left[..wanted].iter().zip(&right[..wanted]);
        let same = pairs.take_while(|(one, other)| one == other).count();
        match complete_prefix_len(&left[..same]) {
            0 => {}
            complete_len => lines = offset + complete_len as u64,
        }
        offset += same as u64;
        if same < wanted {
            break;
        }
    }
    Ok(lines)
}
