//! Reading a log from its beginning to a point, whatever it is made of: pieces come in parallel and go out in order, each
//! checked to follow the one before.
//!
//! Owns what is read instead when a piece is damaged. Does not own what is made of the entries (a `EntrySink`).

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use futures_util::future::BoxFuture;
use tokio::task::{JoinError, JoinHandle};
use tracing::Instrument;

use super::chain::EntryChain;
use super::fork::SessionRenamer;
use super::segments::{self, Name, Prefer, Segment, SegmentKind, cover};
use super::state::LogState;
use super::{Logs, decode};
use crate::codec::entry::Entry;
use crate::error::{Error, ErrorContext, ErrorKind, Result};
use crate::model::{Digest, EntryHeader, ForkOrigin, LogId, LogPoint, Seq, WriterId};
use crate::sys::TRACED;

/// So many objects are on their way at a time: all that a restore reads of a log that is merged.
const AT_ONCE: usize = 32;

/// So many stored bytes of them. What has arrived waits as it is stored, for it takes several times as much once it is inflated.
const AT_ONCE_BYTES: u64 = 16 << 20;

/// So many stored bytes are inflated ahead of what takes them in.
const INFLATED_BYTES: u64 = 2 << 20;

/// So often a log is listed again because something of it was collected in between.
const MOST_RELISTED: u32 = 5;

/// What takes a log in, entry by entry.
pub trait EntrySink {
    /// Takes the next entry, merge or snapshot.
    fn take(&mut self, entry: &Entry) -> Result<()>;

    /// Whether it needs the bytes of the session that a fork begins with.
    fn wants_origin(&self) -> bool {
        false
    }

    /// It has taken that session in: makes of it what the fork begins with.
    fn begin(&mut self, _fork: &ForkOrigin, _renaming: &SessionRenamer) -> Result<()> {
        Ok(())
    }
}

impl EntrySink for LogState {
    fn take(&mut self, entry: &Entry) -> Result<()> {
        self.apply(&entry.header, entry.digest)
    }

    fn begin(&mut self, _fork: &ForkOrigin, _renaming: &SessionRenamer) -> Result<()> {
        *self = LogState::default();
        Ok(())
    }
}

/// Both take everything.
impl<A: EntrySink, B: EntrySink> EntrySink for (A, B) {
    fn take(&mut self, entry: &Entry) -> Result<()> {
        self.0.take(entry)?;
        self.1.take(entry)
    }

    fn wants_origin(&self) -> bool {
        self.0.wants_origin() || self.1.wants_origin()
    }

    fn begin(&mut self, fork: &ForkOrigin, renaming: &SessionRenamer) -> Result<()> {
        self.0.begin(fork, renaming)?;
        self.1.begin(fork, renaming)
    }
}

/// How to read.
#[derive(Debug, Clone, Copy)]
pub struct ReadOptions<'a> {
    /// Up to which point.
    pub at: LogPoint,
    /// Go on with this writer's branch.
    pub branch: Option<&'a WriterId>,
    /// Only what comes behind this entry; the first link is then not checked.
    pub after: Seq,
    /// Few large pieces, or every entry there is.
    pub prefer: Prefer,
    /// So many objects at a time.
    pub parallel: usize,
    /// As if these were not there.
    pub without: Option<&'a BTreeSet<Name>>,
}

impl Default for ReadOptions<'_> {
    fn default() -> Self {
        ReadOptions {
            at: LogPoint::Latest,
            branch: None,
            after: 0,
            prefer: Prefer::Long,
            parallel: AT_ONCE,
            without: None,
        }
    }
}

/// What was read.
pub struct ReadOutcome<S> {
    /// What took it in. After damage it may hold part of the entry that was refused.
    pub sink: S,
    /// The last entry that was taken in.
    pub seq: Seq,
    /// Its digest.
    pub digest: Option<Digest>,
    /// The last number of the log as listed, read or not; 0 if there is no log.
    pub head: Seq,
    /// Objects read.
    pub objects: usize,
    /// What was found damaged and did not matter, because other objects stand for it too.
    pub spared: Vec<String>,
    /// What was found damaged and does not count any more, because somebody went back to before it and went on.
    pub passed_over: Vec<String>,
    /// What ended the reading before the point was reached.
    pub damage: Option<Error>,
}

impl<S> ReadOutcome<S> {
    /// The sink, if all of it was read.
    pub fn sound(self) -> Result<S> {
        let hint = "sessiond verify says from which point the session can be restored";
        self.damage
            .map_or(Ok(self.sink), |error| Err(error.hint(hint)))
    }
}

/// Where reading stopped.
struct Stop {
    /// The piece that was refused; none if something is missing that nothing passes over.
    piece: Option<Name>,
    error: Error,
    /// It was listed and is gone: collected meanwhile.
    gone: bool,
    /// The refused piece follows this one, and passes over what was read since.
    passed_from: Option<Seq>,
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        Stop {
            piece: None,
            error,
            gone: false,
            passed_from: None,
        }
    }
}

/// What earlier attempts found out.
#[derive(Default)]
struct Doubts {
    /// Not to be read from the beginning.
    left_out: BTreeSet<Name>,
    now: Beliefs,
    /// Composites that were suspected once.
    suspected: BTreeSet<Name>,
    trial: Option<Trial>,
}

#[derive(Default, Clone)]
struct Beliefs {
    without: BTreeSet<Name>,
    bad: BTreeMap<Seq, String>,
    /// What was found damaged.
    told: Vec<String>,
    /// Entries alone may do. A number that was never written looks like one that was collected; only reading tells.
    entries_only: bool,
}

/// An entry contradicts what was read before it. The composites before it may be to blame: it is tried without them.
struct Trial {
    seq: Seq,
    error: String,
    before: Beliefs,
}

impl Doubts {
    fn new(left_out: Option<&BTreeSet<Name>>) -> Doubts {
        let left_out = left_out.cloned().unwrap_or_default();
        Doubts {
            now: Beliefs {
                without: left_out.clone(),
                ..Beliefs::default()
            },
            left_out,
            ..Doubts::default()
        }
    }

    /// Takes in why an attempt at `listed` stopped, which had come to entry `reached` through these composites; answers
    /// whether there is another way to try.
    fn learn(
        &mut self,
        stop: &Stop,
        reached: Seq,
        composites: &[Segment],
        listed: &[Segment],
        id: &LogId,
    ) -> bool {
        if stop.piece.is_none() && std::mem::take(&mut self.now.entries_only) {
            return true;
        }
        let error = stop.error.to_string();
        if let (Some(from), Some((SegmentKind::Entry, _, seq))) = (stop.passed_from, stop.piece) {
            let passed = listed
                .iter()
                .filter(|piece| from < piece.to && piece.to < seq)
                .map(Segment::name);
            let before = self.now.without.len();
            self.now.without.extend(passed);
            if self.now.without.len() > before {
                return true;
            }
        }
        if let Some(piece) = stop.piece.filter(|piece| piece.0 != SegmentKind::Entry) {
            // What it stands for may still be there.
            self.now.tell(error);
            return self.now.without.insert(piece);
        }
        if let Some(trial) = self.trial.take().filter(|trial| reached < trial.seq) {
            // Without them it comes no further, so it is the entry.
            self.now = trial.before;
            self.now.bad.insert(trial.seq, trial.error);
            return true;
        }
        let Some((_, _, seq)) = stop.piece else {
            return false;
        };
        let suspects: Vec<&Segment> = composites
            .iter()
            .filter(|piece| !self.suspected.contains(&piece.name()))
            .collect();
        if suspects.is_empty() {
            // Somebody may have gone back to before it and gone on.
            return self.now.bad.insert(seq, error).is_none();
        }
        let keys: Vec<String> = suspects.iter().map(|piece| piece.key(id)).collect();
        let names: BTreeSet<Name> = suspects.iter().map(|piece| piece.name()).collect();
        let before = self.now.clone();
        self.now.without = self.left_out.union(&names).copied().collect();
        self.now.told = vec![format!(
            "read {}: what follows contradicts it: {error}",
            keys.join(" and ")
        )];
        self.suspected.extend(names);
        self.trial = Some(Trial { seq, error, before });
        true
    }
}

impl Beliefs {
    fn tell(&mut self, told: String) {
        if !self.told.contains(&told) {
            self.told.push(told);
        }
    }
}

impl Logs {
    /// Reads a log up to a point. `fresh` makes a sink: another one is begun where a damaged piece can be done without. An
    /// error means that the log could not be read; damage is in the answer.
    pub async fn read_log<S: EntrySink + Send>(
        &self,
        id: &LogId,
        reading: ReadOptions<'_>,
        mut fresh: impl FnMut() -> S + Send,
    ) -> Result<ReadOutcome<S>> {
        self.read_with(id, reading, &mut fresh).await
    }

    async fn read_with<S: EntrySink + Send>(
        &self,
        id: &LogId,
        reading: ReadOptions<'_>,
        fresh: Fresh<'_, S>,
    ) -> Result<ReadOutcome<S>> {
        let newest = matches!(
            (reading.at, reading.prefer, reading.branch),
            (LogPoint::Latest, Prefer::Long, None)
        );
        let mut all = !newest || reading.after > 0 || reading.without.is_some();
        let mut listed = self.list(id, all).await?;
        let mut relisted = 0;
        let begins =
            |piece: &Segment| piece.kind == SegmentKind::Entry && piece.from == reading.after + 1;
        let mut doubts = Doubts::new(reading.without);
        doubts.now.entries_only = reading.prefer == Prefer::Short && listed.iter().any(begins);
        let mut unopened = None;
        loop {
            let (sink, seq) = (fresh(), reading.after);
            let mut walk = Walk {
                logs: self,
                id,
                reading,
                fresh: &mut *fresh,
                sink,
                seq,
                digest: None,
                objects: 0,
                composites: Vec::new(),
            };
            let mut walked = walk
                .all(&listed, &doubts.now)
                .instrument(tracing::info_span!(target: TRACED, "fetch"))
                .await;
            if walked.is_ok()
                && reading.at == LogPoint::Latest
                && reading.branch.is_none()
                && walk.seq < segments::head(&listed)
            {
                walked = Err(Error::corrupt(format!(
                    "read {id}: what comes behind entry {} cannot be read",
                    walk.seq
                ))
                .into());
            }
            let error = match walked {
                Ok(()) => None,
                Err(stop) if stop.gone && relisted < MOST_RELISTED => {
                    relisted += 1;
                    listed = self.list(id, all).await?;
                    continue;
                }
                // Who sealed it was not told of us; what it stands for may be sealed to us.
                Err(stop)
                    if stop.error.kind() == ErrorKind::Encrypted
                        && stop
                            .piece
                            .is_some_and(|piece| doubts.now.without.insert(piece)) =>
                {
                    unopened.get_or_insert(stop.error);
                    if !all {
                        all = true;
                        listed = self.list(id, all).await?;
                    }
                    continue;
                }
                Err(stop) if stop.error.kind() != ErrorKind::Corrupt => {
                    return Err(unopened.unwrap_or(stop.error));
                }
                Err(stop) => {
                    if doubts.learn(&stop, walk.seq, &walk.composites, &listed, id) {
                        if !all {
                            all = true;
                            listed = self.list(id, all).await?;
                        }
                        continue;
                    }
                    if let Some(error) = unopened {
                        return Err(error);
                    }
                    Some(stop.error)
                }
            };
            let Walk {
                sink,
                seq,
                digest,
                objects,
                ..
            } = walk;
            let Beliefs {
                bad,
                told: mut spared,
                ..
            } = doubts.now;
            if let Some(error) = &error {
                spared.retain(|told| *told != error.to_string());
            }
            let passed_over = bad
                .into_iter()
                .filter(|(bad, _)| *bad < seq)
                .map(|(_, error)| error)
                .collect();
            // What is not there any more, and a larger piece stands for, was collected and not damaged.
            let collected = error.is_none()
                || !listed
                    .iter()
                    .any(|piece| piece.from == seq + 1 && piece.kind == SegmentKind::Entry);
            if let (LogPoint::Seq(wanted), None, true) = (reading.at, reading.branch, collected)
                && let Some(piece) = listed.iter().find(|piece| {
                    (error.is_some() || seq < piece.from)
                        && piece.from <= wanted
                        && wanted < piece.to
                })
            {
                return Err(Error::not_found(format!(
                    "{id} cannot go back to entry {wanted} any more: its history was collected"
                ))
                .hint(format!(
                    "the points next to it are seq:{seq} and seq:{}",
                    piece.to
                )));
            }
            return Ok(ReadOutcome {
                sink,
                seq,
                digest,
                head: segments::head(&listed),
                objects,
                spared,
                passed_over,
                damage: error,
            });
        }
    }

    async fn list(&self, id: &LogId, all: bool) -> Result<Vec<Segment>> {
        let listed = async {
            if all {
                self.pieces(id).await
            } else {
                self.few_pieces(id).await
            }
        };
        listed
            .instrument(tracing::info_span!(target: TRACED, "plan"))
            .await
    }

    /// What a log amounts to at its end, removed or not.
    pub async fn read_state(&self, id: &LogId) -> Result<LogState> {
        self.read_log(id, ReadOptions::default(), LogState::default)
            .await?
            .sound()
    }
}

/// Makes a sink.
type Fresh<'a, S> = &'a mut (dyn FnMut() -> S + Send);

struct Walk<'a, S> {
    logs: &'a Logs,
    id: &'a LogId,
    reading: ReadOptions<'a>,
    fresh: Fresh<'a, S>,
    sink: S,
    seq: Seq,
    digest: Option<Digest>,
    objects: usize,
    /// The merges and snapshots that were taken in.
    composites: Vec<Segment>,
}

/// Pieces in their order, each with the task that works on it.
struct Queue<T> {
    held: VecDeque<(Segment, JoinHandle<T>)>,
    /// As stored.
    bytes: u64,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Queue {
            held: VecDeque::new(),
            bytes: 0,
        }
    }
}

impl<T> Queue<T> {
    fn push(&mut self, piece: Segment, task: JoinHandle<T>) {
        self.bytes += piece.size;
        self.held.push_back((piece, task));
    }

    fn pop_if(
        &mut self,
        wanted: impl FnOnce(&Segment) -> bool,
    ) -> Option<(Segment, JoinHandle<T>)> {
        let (piece, task) = self.held.pop_front_if(|(piece, _)| wanted(piece))?;
        self.bytes -= piece.size;
        Some((piece, task))
    }
}

fn broke(cause: JoinError) -> Error {
    Error::new(ErrorKind::Internal, "read an entry").caused_by(cause)
}

/// What became of a piece.
enum Taken {
    Whole,
    /// The point lies before it.
    Behind,
}

impl<S: EntrySink + Send> Walk<'_, S> {
    async fn all(&mut self, listed: &[Segment], doubts: &Beliefs) -> std::result::Result<(), Stop> {
        let branch = match self.reading.branch {
            None => None,
            Some(writer) => Some((
                writer.clone(),
                self.logs.branch_pieces(self.id, writer).await?,
            )),
        };
        let most = match (&branch, self.reading.at) {
            (Some((writer, pieces)), _) => Self::base(self.logs, self.id, writer, pieces).await?,
            (None, LogPoint::Seq(seq)) => seq,
            (None, LogPoint::Latest | LogPoint::Time(_)) => Seq::MAX,
        };
        let mut chain = EntryChain::new(self.id.to_string(), self.seq, None);
        let mut without = doubts.without.clone();
        if doubts.entries_only {
            without.extend(
                listed
                    .iter()
                    .filter(|piece| piece.kind != SegmentKind::Entry)
                    .map(Segment::name),
            );
        }
        loop {
            let picked = cover(listed, self.seq, most, self.reading.prefer, &without);
            match self.run(&picked, None, &mut chain, doubts).await? {
                None => break,
                // The point lies within it: read what it stands for instead, as far as that is there.
                Some(piece) => {
                    let finer = listed
                        .iter()
                        .any(|other| piece.contains(other) && other.from > self.seq);
                    if !finer {
                        break;
                    }
                    without.insert(piece.name());
                    chain = EntryChain::new(self.id.to_string(), self.seq, self.digest);
                }
            }
        }
        if let Some((writer, pieces)) = branch {
            let mut chain = EntryChain::new(
                format!("branch {writer} of {}", self.id),
                self.seq,
                self.digest,
            );
            self.run(&pieces, Some(&writer), &mut chain, doubts).await?;
        }
        Ok(())
    }

    /// The entry of the log that a branch goes on from.
    async fn base(logs: &Logs, id: &LogId, writer: &WriterId, pieces: &[Segment]) -> Result<Seq> {
        let Some(first) = pieces.first() else {
            return Ok(0);
        };
        let entry = logs.read_branch(id, writer, first.to).await?;
        Ok(entry.map_or(0, |entry| entry.header.follows()))
    }

    /// Reads these pieces; answers the one that the point lies in, if it is reached.
    async fn run(
        &mut self,
        picked: &[Segment],
        branch: Option<&WriterId>,
        chain: &mut EntryChain,
        doubts: &Beliefs,
    ) -> std::result::Result<Option<Segment>, Stop> {
        let by_number: BTreeMap<Seq, Segment> =
            picked.iter().map(|piece| (piece.to, *piece)).collect();
        let id = self.id.clone();
        let mut waiting = picked.iter().copied().peekable();
        self.logs
            .progress
            .expect(picked.iter().map(|piece| piece.size).sum());
        let (mut fetched, mut inflated) = (Queue::default(), Queue::default());
        loop {
            let parallel = self.reading.parallel;
            while let Some(piece) = waiting.next_if(|piece| {
                let held = fetched.held.len() + inflated.held.len();
                held == 0
                    || held < parallel
                        && fetched.bytes + inflated.bytes + piece.size <= AT_ONCE_BYTES
            }) {
                let (store, key) = (self.logs.store.clone(), piece.key_in(&id, branch));
                let fetch = async move { Ok(store.get(&key).await?.map(|stored| (key, stored))) };
                fetched.push(piece, tokio::spawn(fetch));
            }
            while let Some((piece, fetch)) = fetched.pop_if(|piece| {
                inflated.held.is_empty() || inflated.bytes + piece.size <= INFLATED_BYTES
            }) {
                let id = id.clone();
                let inflate = async move {
                    let fetched: Result<_> = fetch.await.map_err(broke)?;
                    fetched?
                        .map(|(key, stored)| decode(&id, &piece, &key, &stored))
                        .transpose()
                };
                // A task of its own, so that inflating uses every core.
                inflated.push(piece, tokio::spawn(inflate));
            }
            let Some((piece, read)) = inflated.pop_if(|_| true) else {
                break;
            };
            let read = read.await;
            self.logs.progress.did(piece.size);
            let mut read = read.map_err(broke)?;
            self.objects += 1;
            if let Some(doubt) = doubts
                .bad
                .get(&piece.to)
                .filter(|_| piece.kind == SegmentKind::Entry && branch.is_none())
            {
                read = Err(Error::corrupt(doubt));
            }
            let read = match read {
                Ok(Some(entry)) => Ok(entry),
                Ok(None) => {
                    let error = Error::unavailable(format!(
                        "read {}: it was listed and is gone",
                        piece.key(&id)
                    ));
                    return Err(Stop {
                        piece: None,
                        error: error.hint("try again: it was collected meanwhile"),
                        gone: true,
                        passed_from: None,
                    });
                }
                Err(error) => Err(error),
            };
            match read {
                Err(error)
                    if piece.kind != SegmentKind::Entry
                        && matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Encrypted) =>
                {
                    return Err(Stop {
                        piece: Some(piece.name()),
                        ..Stop::from(error)
                    });
                }
                read => {
                    if let Some(entry) = chain
                        .push(piece.to, read)
                        .map_err(|error| self.refused(chain, &by_number, error))?
                        && let Taken::Behind = self.take(&entry, &by_number).await?
                    {
                        return Ok(by_number.get(&entry.header.seq).copied());
                    }
                }
            }
        }
        while let Some(entry) = chain
            .pop()
            .map_err(|error| self.refused(chain, &by_number, error))?
        {
            if let Taken::Behind = self.take(&entry, &by_number).await? {
                return Ok(by_number.get(&entry.header.seq).copied());
            }
        }
        Ok(None)
    }

    fn refused(
        &self,
        chain: &EntryChain,
        by_number: &BTreeMap<Seq, Segment>,
        error: Error,
    ) -> Stop {
        let piece = chain
            .refused()
            .and_then(|seq| by_number.get(&seq))
            .map(Segment::name);
        Stop {
            piece,
            passed_from: chain.passed_from(),
            ..Stop::from(error)
        }
    }

    /// Takes in the session that a fork begins with.
    fn begin<'b>(&'b mut self, fork: &'b ForkOrigin) -> BoxFuture<'b, Result<()>> {
        Box::pin(async move {
            let id = self.logs.id(fork.from.clone());
            let reading = ReadOptions {
                at: LogPoint::Seq(fork.seq),
                parallel: self.reading.parallel,
                ..ReadOptions::default()
            };
            let origin = self.logs.read_with(&id, reading, &mut *self.fresh).await;
            let origin =
                origin.with_context(|| format!("read {id}, from which {} was forked", self.id))?;
            self.objects += origin.objects;
            let seq = origin.seq;
            let mut sink = origin.sound()?;
            if seq != fork.seq {
                return Err(Error::corrupt(format!(
                    "{id} has no entry {}, with which {} begins",
                    fork.seq, self.id
                )));
            }
            sink.begin(fork, &SessionRenamer::new(&fork.from, &self.id.name))?;
            self.sink = sink;
            Ok(())
        })
    }

    async fn take(
        &mut self,
        entry: &Entry,
        by_number: &BTreeMap<Seq, Segment>,
    ) -> std::result::Result<Taken, Stop> {
        let header = &entry.header;
        if !includes(self.reading, header) {
            return Ok(Taken::Behind);
        }
        let piece = by_number.get(&header.seq);
        if let Some(fork) = header.fork.as_ref().filter(|_| self.sink.wants_origin()) {
            self.begin(fork).await?;
        }
        self.sink.take(entry).map_err(|error| {
            let damaged = piece
                .filter(|_| error.kind() == ErrorKind::Corrupt && self.reading.branch.is_none());
            let error = match damaged {
                Some(piece) => error.context(format_args!("read {}", piece.key(self.id))),
                None => error,
            };
            Stop {
                piece: piece.map(Segment::name),
                ..Stop::from(error)
            }
        })?;
        self.composites
            .extend(piece.filter(|piece| piece.kind != SegmentKind::Entry));
        (self.seq, self.digest) = (header.seq, Some(entry.digest));
        Ok(Taken::Whole)
    }
}

fn includes(reading: ReadOptions<'_>, header: &EntryHeader) -> bool {
    reading.branch.is_some() || reading.at.includes(header)
}
