//! The streamer: decides when each log is flushed, keeps a bounded number of flushes going, and tries again what failed.
//!
//! Owns the agenda and what is known of each log between flushes. Does not own what a flush does (`ship`). Stops in
//! order: first the agent is gone, then a last look at everything, then the last entries.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::task::{self, JoinSet};
use tokio::time::{Instant, sleep_until};

use super::Context;
use super::flush::{FlushOutcome, LogFlusher};
use super::handle::{Command, FinishReport, FlushReport, StreamerHandle};
use super::scan::{Asked, DirectoryScan, fingerprint, survey, survey_again, whose};
use super::tracked_log::{LogStatus, StreamSummary, TrackedLog};
use super::watch::{EventBuffer, Watcher};
use crate::error::{Error, ErrorKind, Result};
use crate::index::Failure;
use crate::log::ledger::Ledger;
use crate::model::{LogName, RelPath};
use crate::sys::{Backoff, Directory};

/// A full scan happens this often at least; what an event failed to tell waits no longer.
const RECONCILE: Duration = Duration::from_secs(15);
/// The same where nothing has changed for a while: an agent that is away is no reason to wake a machine.
const RECONCILE_IDLE: Duration = Duration::from_secs(60);
/// A new directory is looked into when it is heard of and once more after this long: its watch comes a little later than its
/// event, and what is made in between has none.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// Changes that come within this are one.
const SETTLE: Duration = Duration::from_millis(30);
/// The pace of tries during the final flush, which has a deadline of its own.
const FINAL_PACE: Duration = Duration::from_millis(250);
/// What is known of a log that has been quiet this long is left to its ledger.
const FORGET_AFTER: Duration = Duration::from_secs(60);

/// What a flush that has ended leaves.
type Landed =
    std::result::Result<(task::Id, (Box<LogFlusher>, Result<FlushOutcome>)), task::JoinError>;

struct Waiter {
    /// Each log that is waited for, and the flush of it that counts: one that began after the question.
    left: BTreeMap<LogName, u64>,
    asked: BTreeSet<LogName>,
    reply: oneshot::Sender<Result<FlushReport>>,
}

struct Ending {
    deadline: Instant,
    began: Instant,
    reply: oneshot::Sender<FinishReport>,
}

/// The streamer.
pub struct Streamer {
    context: Context,
    root: PathBuf,
    hints: Arc<EventBuffer>,
    watch: Box<dyn Watcher>,
    /// Why events cannot be relied on, if so.
    scanning: Option<String>,
    next_scan: Instant,
    /// When the events that have arrived are looked at.
    settle: Option<Instant>,
    slots: BTreeMap<LogName, TrackedLog>,
    agenda: BTreeSet<(Instant, LogName)>,
    jobs: JoinSet<(Box<LogFlusher>, Result<FlushOutcome>)>,
    flights: HashMap<task::Id, LogName>,
    waiters: Vec<Waiter>,
    /// Logs that somebody else writes to now, and who waits until the flush under way has ended.
    held: BTreeMap<LogName, Option<oneshot::Sender<()>>>,
    ending: Option<Ending>,
    oddities: BTreeSet<String>,
    asked: Asked,
}

impl Streamer {
    /// Scans the directory, then streams in the background until told to finish. When this answers, what is on disk is
    /// known and what comes is watched.
    pub fn start(
        context: Context,
        root: PathBuf,
        hints: Arc<EventBuffer>,
        mut watch: Box<dyn Watcher>,
    ) -> Result<StreamerHandle> {
        let scanning = watch.refresh();
        let mut streamer = Streamer {
            context,
            root,
            hints,
            watch,
            scanning: None,
            next_scan: Instant::now() + RECONCILE,
            settle: None,
            slots: BTreeMap::new(),
            agenda: BTreeSet::new(),
            jobs: JoinSet::new(),
            flights: HashMap::new(),
            waiters: Vec::new(),
            held: BTreeMap::new(),
            ending: None,
            oddities: BTreeSet::new(),
            asked: Asked::new(),
        };
        streamer.note_scanning(scanning);
        streamer.first_look()?;
        let (commands, inbox) = mpsc::channel(16);
        tokio::spawn(streamer.run(inbox));
        Ok(StreamerHandle::new(commands))
    }

    /// What the ledgers say is shipped and has not changed needs no request.
    fn first_look(&mut self) -> Result<()> {
        let found = self.survey()?;
        let store = self.context.logs.store.address();
        let now = Instant::now();
        for (name, files) in found.logs {
            let id = self.context.logs.id(name.clone());
            let print = fingerprint(files.iter().map(|file| (&file.path, &file.stat)));
            let paths: BTreeSet<RelPath> = files.into_iter().map(|file| file.path).collect();
            let ledger = Ledger::load(&*self.context.directory, &store, &id);
            let slot = self.slot(&name);
            slot.paths = paths;
            match ledger {
                Some(ledger) if ledger.seen == print => {
                    slot.seen = print;
                    slot.note_ledger(&ledger);
                }
                _ => self.mark(&name, now),
            }
        }
        Ok(())
    }

    async fn run(mut self, mut inbox: mpsc::Receiver<Command>) {
        loop {
            self.start_due();
            if self.finished() {
                break;
            }
            let wake = self.next_wake();
            tokio::select! {
                biased;
                command = inbox.recv() => match command {
                    Some(command) => self.command(command),
                    // Nobody can ask any more; without a last flush there is nothing to wait for.
                    None if self.ending.is_none() => break,
                    None => {}
                },
                Some(done) = self.jobs.join_next_with_id(), if !self.jobs.is_empty() => self.landed(done),
                () = self.hints.arrived() => {
                    self.settle.get_or_insert_with(|| Instant::now() + SETTLE.min(self.context.flush_interval));
                }
                () = sleep_until(wake) => {}
            }
            if self.settle.is_some_and(|settle| Instant::now() >= settle) {
                self.settle = None;
                self.take_hints();
            }
            if Instant::now() >= self.next_scan {
                self.reconcile();
            }
        }
        if let Some(ending) = self.ending.take() {
            self.jobs.abort_all();
            let left = self.statuses(|slot| slot.dirty.is_some() || slot.flying);
            let _ = ending.reply.send(FinishReport { left });
        }
    }

    fn next_wake(&self) -> Instant {
        let due = if self.jobs.len() < self.context.parallel {
            self.agenda.first().map(|(due, _)| *due)
        } else {
            None
        };
        let deadline = self.ending.as_ref().map(|ending| ending.deadline);
        [due, deadline, self.settle]
            .into_iter()
            .flatten()
            .fold(self.next_scan, Instant::min)
    }

    fn finished(&self) -> bool {
        let Some(ending) = &self.ending else {
            return false;
        };
        Instant::now() >= ending.deadline || (self.jobs.is_empty() && self.agenda.is_empty())
    }

    fn slot(&mut self, name: &LogName) -> &mut TrackedLog {
        let rng = &self.context.logs.rng;
        self.slots
            .entry(name.clone())
            .or_insert_with(|| TrackedLog::new(name, Backoff::new(rng.clone())))
    }

    /// A log has something to ship: flush it `at` that time, or sooner if that is planned.
    fn mark(&mut self, name: &LogName, at: Instant) {
        let slot = self.slot(name);
        slot.dirty.get_or_insert_with(Instant::now);
        if slot.flying {
            slot.again = true;
            return;
        }
        if self.held.contains_key(name) {
            return;
        }
        let slot = self.slot(name);
        if slot.due.is_some_and(|due| due <= at) {
            return;
        }
        if let Some(due) = slot.due.replace(at) {
            self.agenda.remove(&(due, name.clone()));
        }
        self.agenda.insert((at, name.clone()));
    }

    /// When a change that is seen now is flushed: at once after a quiet time, else an interval after the last flush.
    fn soon(&mut self, name: &LogName) -> Instant {
        let interval = self.context.flush_interval;
        let started = self.slot(name).started;
        let now = Instant::now();
        started.map_or(now, |started| now.max(started + interval))
    }

    fn touch(&mut self, name: &LogName, path: RelPath) {
        self.slot(name).paths.insert(path);
        // What failed is tried again when its time has come, not at each append.
        if self.slot(name).backoff.failed() == 0 || self.slot(name).due.is_none() {
            let at = self.soon(name);
            self.mark(name, at);
        }
    }

    fn start_due(&mut self) {
        let now = Instant::now();
        while self.jobs.len() < self.context.parallel {
            let Some((due, _)) = self.agenda.first() else {
                return;
            };
            if *due > now {
                return;
            }
            let Some((_, name)) = self.agenda.pop_first() else {
                return;
            };
            let id = self.context.logs.id(name.clone());
            let last = self.ending.is_some();
            let slot = self.slot(&name);
            slot.due = None;
            slot.flying = true;
            slot.again = false;
            slot.flushes += 1;
            slot.started = Some(now);
            let mut shipment = slot.shipment.take().unwrap_or_else(|| LogFlusher::new(id));
            shipment.hints.extend(slot.paths.iter().cloned());
            let context = self.context.clone();
            let job = self.jobs.spawn(async move {
                let result = shipment.flush(&context, last).await;
                (Box::new(shipment), result)
            });
            self.flights.insert(job.id(), name);
        }
    }

    fn landed(&mut self, done: Landed) {
        let id = done
            .as_ref()
            .map_or_else(task::JoinError::id, |(id, _)| *id);
        let Some(name) = self.flights.remove(&id) else {
            return;
        };
        match done {
            Ok((_, (shipment, result))) => self.done(&name, shipment, result),
            // A fault of ours in one flush must not end the streaming of that session: begin anew from its ledger.
            Err(error) => {
                let shipment = Box::new(LogFlusher::new(self.context.logs.id(name.clone())));
                self.done(
                    &name,
                    shipment,
                    Err(Error::new(ErrorKind::Internal, format!("flush {name}")).caused_by(error)),
                );
            }
        }
        if let Some(waiting) = self.held.get_mut(&name) {
            let reply = waiting.take();
            self.forget(&name);
            reply.map(|reply| reply.send(()));
        }
    }

    /// What is known of a log is left to its ledger, which somebody else may write now.
    fn forget(&mut self, name: &LogName) {
        let backoff = Backoff::new(self.context.logs.rng.clone());
        if let Some(slot) = self.slots.get_mut(name) {
            let before = std::mem::replace(slot, TrackedLog::new(name, backoff));
            slot.flushes = before.flushes;
            before
                .due
                .map(|due| self.agenda.remove(&(due, name.clone())));
        }
    }

    fn done(&mut self, name: &LogName, shipment: Box<LogFlusher>, result: Result<FlushOutcome>) {
        let began = self.slot(name).started;
        let now = Instant::now();
        self.context.feed.flushed(
            &result,
            began.map_or(Duration::ZERO, |began| now - began),
            self.context.logs.clock.now(),
        );
        let ending = self
            .ending
            .as_ref()
            .map(|ending| (ending.began, ending.deadline));
        let slot = self.slot(name);
        slot.flying = false;
        if let Some(ledger) = &shipment.ledger {
            slot.note_ledger(ledger);
        }
        slot.shipment = Some(*shipment);
        match result {
            Ok(shipped) => {
                slot.backoff.reset();
                slot.status.last_error = None;
                slot.status.failed_attempts = 0;
                slot.status.unfinished_bytes = shipped.torn;
                slot.status.durable_bytes = shipped.durable;
                slot.seen = shipped.seen;
                if slot.again {
                    // Some may have come since the look, and only their names say where to find them.
                    slot.paths.extend(shipped.present);
                } else {
                    slot.paths = shipped.present;
                }
                if shipped.entries == 0 {
                    // A look that found nothing is no flush: the next change need not wait for an interval.
                    slot.started = None;
                } else {
                    tracing::debug!(session = %name, head = slot.status.head, bytes = shipped.bytes, "flushed");
                }
                let (again, flushes) = (slot.again, slot.flushes);
                if !again {
                    slot.dirty = None;
                }
                self.satisfied(name, flushes);
                if again {
                    self.slot(name).dirty = began;
                    let waited_for = self
                        .waiters
                        .iter()
                        .any(|waiter| waiter.left.contains_key(name));
                    let at = if waited_for || ending.is_some() {
                        now
                    } else {
                        self.soon(name)
                    };
                    self.mark(name, at);
                }
            }
            Err(error) => {
                let wait = match ending {
                    Some((began, deadline)) => {
                        let (elapsed, remaining) =
                            (now - began, deadline.saturating_duration_since(now));
                        tracing::warn!(session = %name, ?elapsed, ?remaining, %error, "final flush: trying again");
                        slot.backoff.wait_after_failure();
                        FINAL_PACE
                    }
                    None => slot.backoff.wait_after_failure(),
                };
                let attempt = slot.backoff.failed();
                slot.status.last_error = Some(error.to_string());
                slot.status.failed_attempts = attempt;
                slot.dirty = slot.dirty.or(began);
                if ending.is_none() {
                    tracing::warn!(session = %name, attempt, retry_in = ?wait, %error, "flush failed");
                }
                self.context.feed.failed(Failure {
                    namespace: self.context.logs.namespace.clone(),
                    agent: self.context.logs.agent.clone(),
                    session: Some(name.to_string()),
                    at: self.context.logs.clock.now(),
                    attempt,
                    message: error.to_string(),
                });
                self.mark(name, now + wait);
                if !error.is_retryable() {
                    self.refuse(name, &error);
                }
            }
        }
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Status(reply) => {
                let _ = reply.send(self.statuses(|_| true));
            }
            Command::StreamSummary(reply) => {
                let _ = reply.send(StreamSummary::of(
                    self.slots.values(),
                    &*self.context.directory,
                    self.scanning.is_some(),
                ));
            }
            Command::Flush(session, reply) => {
                let wanted =
                    |name: &LogName| session.is_none() || name.session() == session.as_ref();
                match self.mark_changed(Instant::now(), wanted) {
                    Err(error) => {
                        let _ = reply.send(Err(error));
                    }
                    Ok(()) => {
                        let open = self.slots.iter().filter(|(name, slot)| {
                            wanted(name) && (slot.flying || slot.due.is_some())
                        });
                        let left: BTreeMap<LogName, u64> = open
                            .map(|(name, slot)| (name.clone(), slot.flushes + 1))
                            .collect();
                        // Also those that lost their session: they are durable, and yet not in a later restore.
                        let told = |(name, slot): &(&LogName, &TrackedLog)| {
                            wanted(name)
                                && (left.contains_key(*name)
                                    || session.is_some()
                                    || slot.status.is_branch())
                        };
                        let asked = self
                            .slots
                            .iter()
                            .filter(told)
                            .map(|(name, _)| name.clone())
                            .collect();
                        self.waiters.push(Waiter { left, asked, reply });
                        self.answer_waiters();
                    }
                }
            }
            Command::Wrote(name, paths, reply) => {
                // Who gave up waiting during an outage is not remembered.
                self.waiters.retain(|waiter| !waiter.reply.is_closed());
                self.slot(&name).paths.extend(paths);
                self.mark(&name, Instant::now());
                let left = BTreeMap::from([(name.clone(), self.slot(&name).flushes + 1)]);
                self.waiters.push(Waiter {
                    left,
                    asked: BTreeSet::from([name]),
                    reply,
                });
            }
            Command::Hold(name, reply) => {
                let flying = self.slot(&name).flying;
                if !flying {
                    self.forget(&name);
                }
                let waiting = if flying {
                    Some(reply)
                } else {
                    reply.send(()).ok().and(None)
                };
                self.held.insert(name, waiting);
            }
            Command::Release(name) => {
                self.held.remove(&name);
                if !self.slot(&name).paths.is_empty() {
                    self.mark(&name, Instant::now());
                }
            }
            Command::Finish(deadline, reply) => {
                let now = Instant::now();
                self.ending = Some(Ending {
                    deadline,
                    began: now,
                    reply,
                });
                if let Err(error) = self.mark_changed(now, |_| true) {
                    tracing::error!(%error, "final flush: cannot scan the directory; flushing what is known");
                }
                // What waits for another try, and unfinished lines, which go out now.
                let more = self
                    .slots
                    .iter()
                    .filter(|(_, slot)| slot.dirty.is_some() || slot.status.unfinished_bytes > 0);
                let more: Vec<LogName> = more.map(|(name, _)| name.clone()).collect();
                more.iter().for_each(|name| self.mark(name, now));
            }
        }
    }

    /// Scans, and marks every log that does not look as it did when it was shipped.
    fn mark_changed(&mut self, at: Instant, wanted: impl Fn(&LogName) -> bool) -> Result<()> {
        let found = self.survey()?;
        self.apply(found, at, wanted);
        Ok(())
    }

    fn apply(&mut self, found: DirectoryScan, at: Instant, wanted: impl Fn(&LogName) -> bool) {
        for (name, files) in found.logs.into_iter().filter(|(name, _)| wanted(name)) {
            let print = fingerprint(files.iter().map(|file| (&file.path, &file.stat)));
            let slot = self.slot(&name);
            if slot.flying || slot.seen != print || slot.dirty.is_some() {
                slot.paths.extend(files.into_iter().map(|file| file.path));
                self.mark(&name, at);
            }
        }
    }

    fn survey(&mut self) -> Result<DirectoryScan> {
        let found = survey_again(
            &*self.context.directory,
            &*self.context.profile,
            None,
            &mut self.asked,
        )?;
        for oddity in &found.oddities {
            if self.oddities.insert(oddity.clone()) {
                tracing::warn!("not kept: {oddity}");
            }
        }
        Ok(found)
    }

    fn take_hints(&mut self) {
        let changed = self.hints.take();
        if changed.rescan {
            self.next_scan = Instant::now();
            return;
        }
        let (context, root) = (self.context.clone(), self.root.clone());
        for path in changed.paths {
            if path == root {
                let scanning = self.watch.refresh();
                self.note_scanning(scanning);
            }
            let relative = path.strip_prefix(&root).ok().and_then(|path| path.to_str());
            let Some(relative) = relative.and_then(|path| path.parse::<RelPath>().ok()) else {
                continue;
            };
            match context.directory.stat(&relative) {
                Ok(Some(_)) => {
                    if let Ok(Some((name, _))) =
                        whose(&*context.directory, &*context.profile, &relative)
                    {
                        self.touch(&name, relative);
                    }
                }
                // A directory, made perhaps with files in it before it was watched.
                Ok(None) if context.profile.enter(&relative) => {
                    self.look_into(&*context.directory, &relative);
                    self.next_scan = self.next_scan.min(Instant::now() + LOOK_AGAIN);
                }
                _ => {}
            }
        }
    }

    fn look_into(&mut self, directory: &dyn Directory, path: &RelPath) {
        if path.parent().is_none() {
            let scanning = self.watch.refresh();
            self.note_scanning(scanning);
        }
        let profile = self.context.profile.clone();
        if let Ok(found) = survey(directory, &*profile, Some(path)) {
            for (name, files) in found.logs {
                for file in files {
                    // Only what is new here: a directory's own time changes with each file in it.
                    if !self.slot(&name).paths.contains(&file.path) {
                        self.touch(&name, file.path);
                    }
                }
            }
        }
    }

    /// The scan that finds what events did not tell.
    fn reconcile(&mut self) {
        let began = Instant::now();
        let scanning = self.watch.refresh();
        self.note_scanning(scanning);
        match self.survey() {
            Ok(found) => {
                let changed: Vec<LogName> = found
                    .logs
                    .iter()
                    .filter(|(name, files)| {
                        let print = fingerprint(files.iter().map(|file| (&file.path, &file.stat)));
                        // Also while a flush is under way: it may have looked before the change.
                        self.slots.get(*name).is_none_or(|slot| slot.seen != print)
                    })
                    .map(|(name, _)| name.clone())
                    .collect();
                for (name, files) in found.logs {
                    if changed.contains(&name) {
                        for file in files {
                            self.touch(&name, file.path);
                        }
                    }
                }
            }
            Err(error) => tracing::warn!(%error, "cannot scan the agent's directory"),
        }
        let quiet = |slot: &TrackedLog| {
            slot.dirty.is_none()
                && !slot.flying
                && slot
                    .started
                    .is_none_or(|started| began - started > FORGET_AFTER)
        };
        for slot in self.slots.values_mut().filter(|slot| quiet(slot)) {
            slot.shipment = None;
        }
        let idle = self.slots.values().all(quiet);
        let took = began.elapsed();
        // Where only scanning finds changes, it sets the lag; it may take a twentieth of one core.
        let pause = match self.scanning.is_some() {
            true => self.context.flush_interval.max(took * 20),
            false if idle => RECONCILE_IDLE,
            false => RECONCILE,
        };
        self.next_scan = Instant::now() + pause;
    }

    fn note_scanning(&mut self, why: Option<String>) {
        if self.scanning != why {
            match &why {
                Some(why) => tracing::warn!(why, "events cannot be relied on; scanning instead"),
                None => tracing::info!("events can be relied on again"),
            }
            self.next_scan = Instant::now();
        }
        self.scanning = why;
    }

    fn satisfied(&mut self, name: &LogName, flushes: u64) {
        for waiter in &mut self.waiters {
            if waiter
                .left
                .get(name)
                .is_some_and(|needed| *needed <= flushes)
            {
                waiter.left.remove(name);
            }
        }
        self.answer_waiters();
    }

    fn answer_waiters(&mut self) {
        let (ready, waiting): (Vec<_>, Vec<_>) = std::mem::take(&mut self.waiters)
            .into_iter()
            .partition(|waiter| waiter.left.is_empty());
        self.waiters = waiting;
        for waiter in ready {
            let logs = self.statuses_of(waiter.asked.iter());
            let _ = waiter.reply.send(Ok(FlushReport { logs }));
        }
    }

    /// What waits for a log that cannot be written learns why; what can be tried again is waited for.
    fn refuse(&mut self, name: &LogName, error: &Error) {
        let (hit, waiting): (Vec<_>, Vec<_>) = std::mem::take(&mut self.waiters)
            .into_iter()
            .partition(|waiter| waiter.left.contains_key(name));
        self.waiters = waiting;
        for waiter in hit {
            let mut copy = Error::new(error.kind(), error.to_string());
            if let Some(hint) = error.hint_text() {
                copy = copy.hint(hint);
            }
            let _ = waiter.reply.send(Err(copy));
        }
    }

    fn statuses(&self, wanted: impl Fn(&TrackedLog) -> bool) -> Vec<LogStatus> {
        self.statuses_of(
            self.slots
                .iter()
                .filter(|(_, slot)| wanted(slot))
                .map(|(name, _)| name),
        )
    }

    fn statuses_of<'a>(&'a self, names: impl Iterator<Item = &'a LogName>) -> Vec<LogStatus> {
        names
            .filter_map(|name| self.slots.get(name))
            .map(|slot| slot.report(&*self.context.directory))
            .collect()
    }
}
