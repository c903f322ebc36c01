//! Checks that a log and its branches can be restored: everything a restore does, in a scratch directory, nothing placed.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::codec::entry::Entry;
use crate::error::{Error, ErrorContext, ErrorKind, Result};
use crate::log::Logs;
use crate::log::assemble::FileAssembler;
use crate::log::fork::SessionRenamer;
use crate::log::read::{EntrySink, ReadOptions, ReadOutcome};
use crate::log::segments::{Prefer, Segment, SegmentKind, cover, head};
use crate::model::{Digest, FileState, ForkOrigin, LogId, RelPath, Seq, WriterId};
use crate::sys::Directory;

/// What was found of one log.
#[derive(Debug, Clone, Serialize)]
pub struct VerifyReport {
    /// The session, or `@` and the project.
    pub session: String,
    /// The last entry that can be restored.
    pub sound_to: Seq,
    /// The last entry of all.
    pub head: Seq,
    /// Objects that were read.
    pub objects: usize,
    /// Files at the last sound entry.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Writers whose branches were checked too.
    pub branches: Vec<String>,
    /// Whether the session was removed and can be brought back.
    pub removed: bool,
    /// Objects that are encrypted to others. If there are any, this is all that can be said without a key: what is damaged
    /// among the others, and which numbers are missing.
    pub sealed: usize,
    /// Numbers that no object stands for, first and last: lost, or passed over by whoever went on. Only told of what could
    /// not be opened.
    pub missing: Vec<(Seq, Seq)>,
    /// What is wrong, each as a person reads it.
    pub damage: Vec<String>,
    /// Merges and snapshots that are whole and say something else than their entries, which are all there: a restore may
    /// read them.
    pub misleading: Vec<String>,
    /// What is damaged and does not count any more: somebody has gone back to before it and gone on.
    pub passed_over: Vec<String>,
}

/// Reads what a restore of a log and its branches reads, or with `deep` every object there is. An error means that it
/// could not be checked; damage is in the verdict.
pub async fn verify(
    logs: &Logs,
    id: &LogId,
    scratch: &dyn Directory,
    deep: bool,
) -> Result<VerifyReport> {
    let checker = Checker {
        logs,
        id,
        scratch,
        stage: format!("verify-{:016x}", logs.rng.next()).parse()?,
    };
    let verdict = match checker.verdict(deep).await {
        Err(error) if error.kind() == ErrorKind::Encrypted => checker.unopened(deep).await,
        verdict => verdict,
    };
    let verdict = verdict.with_context(|| format!("verify {id}"));
    if let Err(cause) = scratch.remove(&checker.stage) {
        tracing::warn!(%cause, stage = %checker.stage, "the scratch directory was not removed");
    }
    verdict
}

struct Checker<'a> {
    logs: &'a Logs,
    id: &'a LogId,
    scratch: &'a dyn Directory,
    stage: RelPath,
}

/// Files as a log says they are after an entry, and that entry's digest.
type Point = (Digest, BTreeMap<RelPath, FileState>);

/// Assembles, and remembers how the log stood at some of its points.
struct Witness<'a> {
    assembly: FileAssembler<'a>,
    wanted: Vec<Seq>,
    points: BTreeMap<Seq, Point>,
    /// The last number of everything that was taken in.
    taken: BTreeSet<Seq>,
    /// Of these, the merges and snapshots.
    composites: BTreeSet<Seq>,
}

impl EntrySink for Witness<'_> {
    fn take(&mut self, entry: &Entry) -> Result<()> {
        self.assembly.take(entry)?;
        self.taken.insert(entry.header.seq);
        if entry.header.kind.is_composite() {
            self.composites.insert(entry.header.seq);
        }
        if self.wanted.contains(&entry.header.seq) {
            self.points.insert(
                entry.header.seq,
                (entry.digest, self.assembly.state.files.clone()),
            );
        }
        Ok(())
    }

    fn wants_origin(&self) -> bool {
        true
    }

    fn begin(&mut self, fork: &ForkOrigin, renaming: &SessionRenamer) -> Result<()> {
        // What was seen of the other session is that one's.
        self.taken.clear();
        self.composites.clear();
        self.points.clear();
        self.assembly.begin(fork, renaming)
    }
}

impl Checker<'_> {
    async fn verdict(&self, deep: bool) -> Result<VerifyReport> {
        let read = self.read(ReadOptions::default(), &[]).await?;
        let state = &read.sink.assembly.state;
        let mut verdict = VerifyReport {
            session: self.id.name.to_string(),
            sound_to: read.seq,
            head: read.head.max(read.seq),
            objects: read.objects,
            files: state.files.len(),
            bytes: state.files.values().map(|file| file.len).sum(),
            branches: Vec::new(),
            removed: state.removed.is_some(),
            sealed: 0,
            missing: Vec::new(),
            damage: Vec::new(),
            misleading: Vec::new(),
            passed_over: Vec::new(),
        };
        verdict.note(&read);
        if deep {
            self.deep(&mut verdict).await?;
        }
        for writer in self.logs.branches(self.id).await? {
            let branch = self
                .read(
                    ReadOptions {
                        branch: Some(&writer),
                        ..ReadOptions::default()
                    },
                    &[],
                )
                .await;
            let branch = branch.with_context(|| format!("branch {writer}"))?;
            verdict.note(&branch);
            verdict.objects += branch.objects;
            verdict.branches.push(writer.to_string());
        }
        Ok(verdict)
    }

    /// What can be said of a log that cannot be opened: whether all numbers are there, and what is sealed.
    async fn unopened(&self, deep: bool) -> Result<VerifyReport> {
        let pieces = self.logs.pieces(self.id).await?;
        let read = cover(&pieces, 0, Seq::MAX, Prefer::Long, &BTreeSet::new());
        let mut verdict = VerifyReport {
            session: self.id.name.to_string(),
            sound_to: 0,
            head: head(&pieces),
            objects: 0,
            files: 0,
            bytes: 0,
            branches: Vec::new(),
            removed: false,
            sealed: 0,
            missing: Vec::new(),
            damage: Vec::new(),
            misleading: Vec::new(),
            passed_over: Vec::new(),
        };
        let mut next = 1;
        for piece in &read {
            if piece.from > next {
                verdict.missing.push((next, piece.from - 1));
            }
            next = piece.to + 1;
        }
        for piece in if deep { &pieces } else { &read } {
            self.try_open(piece, None, &mut verdict).await?;
        }
        for writer in self.logs.branches(self.id).await? {
            for piece in self.logs.branch_pieces(self.id, &writer).await? {
                self.try_open(&piece, Some(&writer), &mut verdict).await?;
            }
            verdict.branches.push(writer.to_string());
        }
        Ok(verdict)
    }

    async fn try_open(
        &self,
        piece: &Segment,
        branch: Option<&WriterId>,
        verdict: &mut VerifyReport,
    ) -> Result<()> {
        verdict.objects += 1;
        match self.logs.read_piece(self.id, piece, branch).await {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::Encrypted => verdict.sealed += 1,
            Err(error) if error.kind() == ErrorKind::Corrupt => verdict.add(with_hint(&error)),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    async fn read(
        &self,
        reading: ReadOptions<'_>,
        wanted: &[Seq],
    ) -> Result<ReadOutcome<Witness<'_>>> {
        let mut made = 0;
        let fresh = || {
            made += 1;
            let assembly = FileAssembler::new(self.scratch, self.stage.clone(), made);
            Witness {
                assembly,
                wanted: wanted.to_vec(),
                points: BTreeMap::new(),
                taken: BTreeSet::new(),
                composites: BTreeSet::new(),
            }
        };
        let read = self.logs.read_log(self.id, reading, fresh).await;
        self.scratch
            .remove(&self.stage)
            .map_err(|cause| Error::io(format!("remove {}", self.stage), cause))?;
        read
    }

    /// Every entry by itself, then every merge and snapshot against the entries it stands for.
    async fn deep(&self, verdict: &mut VerifyReport) -> Result<()> {
        let pieces = self.logs.pieces(self.id).await?;
        let composites: Vec<&Segment> = pieces
            .iter()
            .filter(|piece| piece.kind != SegmentKind::Entry)
            .collect();
        let wanted: Vec<Seq> = composites.iter().map(|piece| piece.to).collect();
        let read = self
            .read(
                ReadOptions {
                    prefer: Prefer::Short,
                    ..ReadOptions::default()
                },
                &wanted,
            )
            .await?;
        verdict.note(&read);
        verdict.objects = pieces.len();
        for piece in pieces.iter() {
            let key = piece.key(self.id);
            let entry = match self.logs.read_piece(self.id, piece, None).await {
                Ok(Some(entry)) => entry,
                // Collected meanwhile.
                Ok(None) => continue,
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    let counts = piece.kind != SegmentKind::Entry
                        || piece.to > read.seq
                        || read.sink.taken.contains(&piece.to);
                    let covered = composites.iter().any(|composite| composite.contains(piece));
                    if counts || covered {
                        verdict.add(with_hint(&error));
                    } else {
                        verdict.pass_over(with_hint(&error));
                    }
                    continue;
                }
                Err(error) => return Err(error),
            };
            if piece.kind == SegmentKind::Entry {
                continue;
            }
            let Some((digest, files)) = read.sink.points.get(&piece.to) else {
                continue;
            };
            let agrees = entry.header.parts.iter().all(|part| {
                files
                    .get(&part.path)
                    .is_some_and(|file| (file.len, file.sha256) == (part.end(), part.file_sha256))
            });
            let whole =
                piece.kind != SegmentKind::Snapshot || entry.header.parts.len() == files.len();
            if entry.digest != *digest || !agrees || !whole {
                if read
                    .sink
                    .composites
                    .range(piece.from..=piece.to)
                    .next()
                    .is_none()
                {
                    verdict.add(format!(
                        "{key} does not say what the entries say that it stands for"
                    ));
                    verdict.misleading.push(key);
                } else {
                    // Not all entries are there any more, and what is there instead may be what is wrong.
                    verdict.add(format!("{key} does not say what smaller pieces say that it stands for: keep all of them"));
                }
            }
        }
        Ok(())
    }
}

/// Where damage has a hint of its own, it is part of the verdict.
fn with_hint(error: &Error) -> String {
    error
        .hint_text()
        .map_or_else(|| error.to_string(), |hint| format!("{error}; {hint}"))
}

impl VerifyReport {
    fn note(&mut self, read: &ReadOutcome<Witness<'_>>) {
        read.spared.iter().cloned().for_each(|told| self.add(told));
        read.passed_over
            .iter()
            .cloned()
            .for_each(|told| self.pass_over(told));
        if let Some(error) = &read.damage {
            self.add(with_hint(error));
        }
    }

    fn pass_over(&mut self, told: String) {
        if !self.passed_over.contains(&told) {
            self.passed_over.push(told);
        }
    }

    fn add(&mut self, told: String) {
        if !self.damage.contains(&told) {
            self.damage.push(told);
        }
    }
}
