//! The streamer: runs the flushes that the flush state of each log requires.
//!
//! Owns the scans, the queue of due logs and the running flushes, whose number is bounded. Does not
//! own the decision when a log is flushed (`flush_state`) or the steps of a flush (`flush`). On
//! shutdown, after the agent has exited, it scans once more and then writes the last entries.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::task::{self, JoinHandle, JoinSet};
use tokio::time::{Instant, sleep_until};

use super::CaptureContext;
use super::flush::{FlushOutcome, LogFlusher};
use super::flush_state::{FlushAction, FlushEvent, RunningFlush};
use super::handle::{Command, FinishReport, FlushReport, StreamerHandle};
use super::limits::MAX_LARGE_FLUSHES;
use super::outage::OutageLog;
use super::scan::{DirectoryScan, LogCache, ScannedFile, log_of, scan};
use super::tracked_log::{LogStatus, StreamSummary, TrackedLog};
use super::waiters::{Waiter, Waiters};
use super::watch::{EventBuffer, Watcher};
use crate::agent::FileClass;
use crate::error::{Error, ErrorKind, Result};
use crate::index::Failure;
use crate::log::ledger::Ledger;
use crate::model::{LogName, RelPath, SessionId};
use crate::store::Store;
use crate::sys::lines::one_line;
use crate::sys::{Backoff, Directory, blocking};

/// Maximum time between two full scans while logs change. A scan finds changes without an event.
const SCAN_INTERVAL: Duration = Duration::from_secs(15);
/// The same while nothing changes: an idle agent must not keep a machine awake.
const IDLE_SCAN_INTERVAL: Duration = Duration::from_secs(60);
/// Delay of an extra scan after a new directory: its watch starts a little after its event, and
/// files that are created in between cause no event.
const NEW_DIRECTORY_SCAN_DELAY: Duration = Duration::from_secs(1);
/// Events within this time are handled together.
const EVENT_DEBOUNCE: Duration = Duration::from_millis(30);
/// Delay between attempts during the final flush, which has a deadline of its own.
const FINAL_RETRY_DELAY: Duration = Duration::from_millis(250);
/// Failed attempts of a final flush from one log line to the next: one line every two seconds.
const FINAL_LOG_ATTEMPTS: u32 = 8;
/// Maximum length of an error in a log line, in bytes.
const MAX_ERROR_LEN: usize = 500;
/// After this long without a change, the flusher is unloaded from memory. The ledger on disk has
/// its state.
const UNLOAD_AFTER: Duration = Duration::from_secs(60);

/// The result of a flush task.
type JoinedFlush =
    std::result::Result<(task::Id, (Box<LogFlusher>, Result<FlushOutcome>)), task::JoinError>;

/// The result of a scan, and the cache that it used.
type ScanOutcome = (LogCache, Result<DirectoryScan>);

/// The result of a scan task.
type JoinedScan = std::result::Result<ScanOutcome, task::JoinError>;

/// A running scan, and what it is for.
struct RunningScan {
    task: JoinHandle<ScanOutcome>,
    purposes: Vec<ScanPurpose>,
}

/// What a scan is for.
enum ScanPurpose {
    /// Changes without an event.
    Changes { started: Instant },
    /// A caller that waits for the changes of one session, or of all.
    Flush(Option<SessionId>, oneshot::Sender<Result<FlushReport>>),
    /// The final flush.
    Finish,
}

struct Shutdown {
    started: Instant,
    deadline: Instant,
    reply: oneshot::Sender<FinishReport>,
}

/// The streamer.
pub struct Streamer {
    context: CaptureContext,
    root: PathBuf,
    events: Arc<EventBuffer>,
    watcher: Box<dyn Watcher>,
    /// Why file events are unreliable, if they are.
    watch_problem: Option<String>,
    next_scan: Instant,
    /// The time to handle the events that have arrived.
    handle_events_at: Option<Instant>,
    logs: BTreeMap<LogName, TrackedLog>,
    /// The logs with a due flush, ordered by time.
    due_logs: BTreeSet<(Instant, LogName)>,
    flushes: JoinSet<(Box<LogFlusher>, Result<FlushOutcome>)>,
    flushing_logs: HashMap<task::Id, LogName>,
    /// The number of running flushes that write a large entry.
    large_flushes: usize,
    scan: Option<RunningScan>,
    /// What the next scan is for. A running scan may have missed a change before the request.
    scan_requests: Vec<ScanPurpose>,
    waiters: Waiters,
    /// The callers that wait for the end of a running flush to hold its log.
    hold_replies: BTreeMap<LogName, oneshot::Sender<()>>,
    shutdown: Option<Shutdown>,
    outage: OutageLog,
    /// The skipped files that were logged already.
    logged_skips: BTreeSet<String>,
    log_cache: LogCache,
}

impl Streamer {
    /// Scans the directory, then streams in the background until `StreamerHandle::finish`. Returns
    /// when all existing files are known and watched.
    pub fn start(
        context: CaptureContext,
        root: PathBuf,
        events: Arc<EventBuffer>,
        watcher: Box<dyn Watcher>,
    ) -> Result<StreamerHandle> {
        let mut streamer = Streamer {
            context,
            root,
            events,
            watcher,
            watch_problem: None,
            next_scan: Instant::now() + SCAN_INTERVAL,
            handle_events_at: None,
            logs: BTreeMap::new(),
            due_logs: BTreeSet::new(),
            flushes: JoinSet::new(),
            flushing_logs: HashMap::new(),
            large_flushes: 0,
            scan: None,
            scan_requests: Vec::new(),
            waiters: Waiters::default(),
            hold_replies: BTreeMap::new(),
            shutdown: None,
            outage: OutageLog::default(),
            logged_skips: BTreeSet::new(),
            log_cache: LogCache::new(),
        };
        blocking(|| {
            streamer.refresh_watches();
            streamer.load_logs()
        })?;
        let (commands, inbox) = mpsc::channel(16);
        tokio::spawn(streamer.run(inbox));
        Ok(StreamerHandle::new(commands))
    }

    /// Finds the logs on disk. A log whose files still match its ledger needs no flush.
    fn load_logs(&mut self) -> Result<()> {
        let store = self.context.logs.store.address();
        let mut cache = std::mem::take(&mut self.log_cache);
        let found = self.context.scan(&mut cache);
        self.log_cache = cache;
        let found = self.scan_ended(found)?;
        for (name, mut files) in found.logs {
            let id = self.context.logs.id(name.clone());
            let ledger = Ledger::load(&*self.context.directory, &store, &id);
            if let Some(ledger) = &ledger {
                found.named.add_known(ledger.files.keys(), &mut files);
            }
            let fingerprint = ScannedFile::fingerprint(&files);
            let tracked = self.tracked(&name);
            tracked.scanned_bytes = ScannedFile::total_size(&files);
            tracked.paths = files.into_iter().map(|file| file.path).collect();
            match ledger {
                Some(ledger) if ledger.clean_fingerprint == fingerprint => {
                    tracked.fingerprint = fingerprint;
                    tracked.update_from_ledger(&ledger);
                }
                _ => self.apply(&name, FlushEvent::Changed),
            }
        }
        Ok(())
    }

    async fn run(mut self, mut inbox: mpsc::Receiver<Command>) {
        loop {
            self.start_scan();
            self.start_due_flushes();
            if self.is_finished() {
                break;
            }
            let wake_at = self.next_wake();
            tokio::select! {
                biased;
                command = inbox.recv() => match command {
                    Some(command) => self.handle_command(command),
                    // All handles are dropped. Without a final flush there is nothing to wait for.
                    None if self.shutdown.is_none() => break,
                    None => {}
                },
                Some(joined) = self.flushes.join_next_with_id(), if !self.flushes.is_empty() => {
                    self.flush_ended(joined);
                }
                joined = join_scan(&mut self.scan), if self.scan.is_some() => {
                    self.apply_scan_result(joined);
                }
                () = self.events.wait() => {
                    let debounce = EVENT_DEBOUNCE.min(self.context.flush_interval);
                    self.handle_events_at.get_or_insert_with(|| Instant::now() + debounce);
                }
                () = sleep_until(wake_at) => {}
            }
            if self.handle_events_at.is_some_and(|at| Instant::now() >= at) {
                self.handle_events_at = None;
                blocking(|| self.handle_events());
            }
            if Instant::now() >= self.next_scan {
                self.request_full_scan();
            }
        }
        if let Some(shutdown) = self.shutdown.take() {
            self.flushes.abort_all();
            let not_durable = self.statuses(|log| log.state.unsaved_since().is_some());
            let fenced = self.context.counters.branches().borrow().clone();
            let _ = shutdown.reply.send(FinishReport {
                not_durable,
                fenced: fenced.into_iter().collect(),
            });
        }
    }

    fn next_wake(&self) -> Instant {
        let next_flush = self.next_flush().map(|(due, _)| *due);
        let deadline = self.shutdown.as_ref().map(|shutdown| shutdown.deadline);
        [next_flush, deadline, self.handle_events_at]
            .into_iter()
            .flatten()
            .fold(self.next_scan, Instant::min)
    }

    fn is_finished(&self) -> bool {
        let is_scanning = self.scan.is_some() || !self.scan_requests.is_empty();
        let is_idle = self.flushes.is_empty() && self.due_logs.is_empty() && !is_scanning;
        self.shutdown
            .as_ref()
            .is_some_and(|shutdown| is_idle || Instant::now() >= shutdown.deadline)
    }

    fn tracked(&mut self, name: &LogName) -> &mut TrackedLog {
        self.logs
            .entry(name.clone())
            .or_insert_with(|| TrackedLog::new(name))
    }

    /// Applies an event to the flush state of a log, and executes the resulting action.
    fn apply(&mut self, name: &LogName, event: FlushEvent) {
        if let Some(action) = self.transition(name, event) {
            self.execute(name, action);
        }
    }

    /// Updates the flush state of a log and its place among the due logs.
    fn transition(&mut self, name: &LogName, event: FlushEvent) -> Option<FlushAction> {
        let flush_interval = self.context.flush_interval;
        let tracked = self.tracked(name);
        let before = tracked.state;
        let (state, action) = before.transition(event, Instant::now(), flush_interval);
        tracked.state = state;
        if before.due() != state.due() {
            if let Some(due) = before.due() {
                self.due_logs.remove(&(due, name.clone()));
            }
            if let Some(due) = state.due() {
                self.due_logs.insert((due, name.clone()));
            }
        }
        action
    }

    fn execute(&mut self, name: &LogName, action: FlushAction) {
        match action {
            FlushAction::ConfirmHold => {
                if let Some(tracked) = self.logs.get_mut(name) {
                    tracked.reset(name);
                }
                if let Some(reply) = self.hold_replies.remove(name) {
                    let _ = reply.send(());
                }
            }
        }
    }

    fn file_changed(&mut self, name: &LogName, path: RelPath) {
        self.tracked(name).paths.insert(path);
        self.apply(name, FlushEvent::Changed);
    }

    /// The next flush that can start. Large flushes have slots of their own, so that they delay no
    /// other flush.
    fn next_flush(&self) -> Option<&(Instant, LogName)> {
        let max = self.context.max_concurrent_flushes;
        let has_large_slot = self.large_flushes < MAX_LARGE_FLUSHES.min(max);
        let has_small_slot = self.flushes.len() - self.large_flushes < max;
        let is_large = |name: &LogName| self.logs.get(name).is_some_and(|log| log.is_large);
        self.due_logs.iter().find(|(_, name)| match is_large(name) {
            true => has_large_slot,
            false => has_small_slot,
        })
    }

    fn start_due_flushes(&mut self) {
        let now = Instant::now();
        while let Some((_, name)) = self.next_flush().filter(|(due, _)| *due <= now) {
            let name = name.clone();
            self.apply(&name, FlushEvent::FlushStarted);
            self.spawn_flush(name);
        }
    }

    fn spawn_flush(&mut self, name: LogName) {
        let id = self.context.logs.id(name.clone());
        let agent_exited = self.shutdown.is_some();
        let tracked = self.tracked(&name);
        tracked.flushes_started += 1;
        let mut flusher = tracked
            .flusher
            .take()
            .unwrap_or_else(|| LogFlusher::new(id));
        flusher.paths.extend(tracked.paths.iter().cloned());
        self.large_flushes += usize::from(tracked.is_large);
        let context = self.context.clone();
        let task = self.flushes.spawn(async move {
            let result = flusher.flush_turn(&context, agent_exited).await;
            (Box::new(flusher), result)
        });
        self.flushing_logs.insert(task.id(), name);
    }

    fn flush_ended(&mut self, joined: JoinedFlush) {
        let id = joined
            .as_ref()
            .map_or_else(task::JoinError::id, |(id, _)| *id);
        let Some(name) = self.flushing_logs.remove(&id) else {
            return;
        };
        let (flusher, result) = match joined {
            Ok((_, ended)) => ended,
            // A panic in one flush must not stop the streaming of its session: a new flusher starts
            // from the ledger.
            Err(panic) => {
                let flusher = LogFlusher::new(self.context.logs.id(name.clone()));
                let error = Error::new(ErrorKind::Internal, format!("flush {name}"));
                (Box::new(flusher), Err(error.caused_by(panic)))
            }
        };
        let Some(running) = self.tracked(&name).state.running_flush() else {
            return;
        };
        let now = self.context.logs.clock.now();
        self.context
            .counters
            .flush_ended(&result, running.started.elapsed(), now);
        let tracked = self.tracked(&name);
        if let Some(ledger) = &flusher.ledger {
            tracked.update_writer(ledger);
        }
        let was_large = std::mem::replace(&mut tracked.is_large, flusher.is_large());
        tracked.flusher = Some(*flusher);
        self.large_flushes -= usize::from(was_large);
        let wrote_nothing =
            matches!(&result, Ok(outcome) if outcome.is_unfinished && outcome.entries == 0);
        if !wrote_nothing {
            self.log_outage(&name, result.as_ref().err());
        }
        let action = match result {
            Ok(outcome) if outcome.is_unfinished => self.flush_yielded(&name, outcome),
            Ok(outcome) => self.flush_succeeded(&name, running, outcome),
            Err(error) => self.flush_failed(&name, running, &error),
        };
        // This comes after the replies to the callers, because a hold discards the state that the
        // replies contain.
        if let Some(action) = action {
            self.execute(&name, action);
        }
    }

    /// Logs the first failed flush of an outage, a reminder from time to time, and the recovery.
    fn log_outage(&mut self, name: &LogName, error: Option<&Error>) {
        let now = Instant::now();
        let Some(error) = error else {
            if let Some(ended) = self.outage.succeeded(name, now) {
                let (elapsed, attempts) = (ended.elapsed, ended.attempts);
                tracing::info!(?elapsed, attempts, "flushes succeed again");
            }
            return;
        };
        // The final flush logs each attempt with the time that remains.
        if let Some(outage) = self.outage.failed(name, error.kind(), now)
            && self.shutdown.is_none()
        {
            let (attempts, sessions) = (outage.attempts, outage.sessions);
            let error = one_line(&error.to_string(), MAX_ERROR_LEN);
            if attempts == 1 {
                tracing::warn!(session = %name, error, "flush failed; retrying until it succeeds");
            } else {
                let elapsed = outage.elapsed;
                tracing::warn!(session = %name, ?elapsed, attempts, sessions, error, "flushes still fail");
            }
        }
    }

    fn flush_succeeded(
        &mut self,
        name: &LogName,
        running: RunningFlush,
        outcome: FlushOutcome,
    ) -> Option<FlushAction> {
        let tracked = self.tracked(name);
        let number = tracked.flushes_started;
        tracked.status.last_error = None;
        tracked.status.failed_attempts = 0;
        tracked.status.partial_line_bytes = outcome.partial_line_bytes;
        tracked.status.durable_bytes = outcome.durable_bytes;
        tracked.fingerprint = outcome.fingerprint;
        if running.changed_meanwhile {
            // The flush may have missed a new file, which the next one finds only by its path.
            tracked.paths.extend(outcome.files);
        } else {
            tracked.paths = outcome.files;
        }
        let wrote = outcome.entries > 0;
        if wrote {
            let head = tracked.status.head;
            tracing::debug!(session = %name, head, bytes = outcome.raw_bytes, "flushed");
        }
        let urgent = self.shutdown.is_some() || self.waiters.needs_flush_after(name, number);
        let action = self.transition(name, FlushEvent::FlushFinished { wrote, urgent });
        self.waiters.flush_finished(name, number);
        self.reply_to_complete_waiters();
        action
    }

    fn flush_yielded(&mut self, name: &LogName, outcome: FlushOutcome) -> Option<FlushAction> {
        let tracked = self.tracked(name);
        if outcome.entries > 0 {
            tracked.status.last_error = None;
            tracked.status.failed_attempts = 0;
            tracked.status.partial_line_bytes = outcome.partial_line_bytes;
            tracked.status.durable_bytes = outcome.durable_bytes;
            tracked.paths.extend(outcome.files);
        }
        self.transition(name, FlushEvent::FlushYielded)
    }

    /// Bounds the memory of large entries that wait for a retry. The log starts again from its
    /// ledger, as after a restart of the process, and reads the same files again.
    fn drop_large_entry(&mut self, name: &LogName) {
        let has_entry = |log: &&TrackedLog| {
            let flusher = log.flusher.as_ref();
            flusher.is_some_and(LogFlusher::has_large_pending_entry)
        };
        if self.logs.values().filter(has_entry).count() > MAX_LARGE_FLUSHES
            && let Some(tracked) = self.logs.get_mut(name).filter(|log| has_entry(&&**log))
        {
            tracked.flusher = None;
        }
    }

    fn flush_failed(
        &mut self,
        name: &LogName,
        running: RunningFlush,
        error: &Error,
    ) -> Option<FlushAction> {
        let attempt = running.failures.saturating_add(1);
        let retry_in = match &self.shutdown {
            Some(Shutdown {
                started, deadline, ..
            }) => {
                if attempt % FINAL_LOG_ATTEMPTS == 1 {
                    let elapsed = started.elapsed();
                    let remaining = deadline.saturating_duration_since(Instant::now());
                    let error = one_line(&error.to_string(), MAX_ERROR_LEN);
                    tracing::warn!(session = %name, attempt, ?elapsed, ?remaining, error, "final flush failed; retrying");
                }
                FINAL_RETRY_DELAY
            }
            None => Backoff::delay(running.failures, self.context.logs.rng.next()),
        };
        self.drop_large_entry(name);
        let status = &mut self.tracked(name).status;
        status.last_error = Some(error.to_string());
        status.failed_attempts = attempt;
        self.context.index_queue.push_failure(Failure {
            namespace: self.context.logs.namespace.clone(),
            agent: self.context.logs.agent.clone(),
            session: Some(name.to_string()),
            at: self.context.logs.clock.now(),
            attempt,
            message: error.to_string(),
        });
        let action = self.transition(name, FlushEvent::FlushFailed { retry_in });
        // After a retryable error, callers wait for the retry. They receive any other error at
        // once.
        if !error.is_retryable() {
            self.reject_waiters(name, error);
        }
        action
    }

    fn handle_command(&mut self, command: Command) {
        match command {
            Command::Status(reply) => {
                let _ = reply.send(self.statuses(|_| true));
            }
            Command::Summary(reply) => {
                let _ = reply.send(StreamSummary::new(
                    self.logs.values(),
                    &*self.context.directory,
                    self.watch_problem.is_some(),
                ));
            }
            Command::Flush(session, reply) => {
                self.scan_requests.push(ScanPurpose::Flush(session, reply));
            }
            Command::FlushFiles(name, paths, reply) => {
                self.waiters.remove_closed();
                self.tracked(&name).paths.extend(paths);
                self.apply(&name, FlushEvent::FlushRequested);
                let first_flush = self.tracked(&name).flushes_started + 1;
                self.waiters.push(Waiter {
                    pending: BTreeMap::from([(name.clone(), first_flush)]),
                    reported: BTreeSet::from([name]),
                    reply,
                });
            }
            Command::Hold(name, reply) => {
                self.hold_replies.insert(name.clone(), reply);
                self.apply(&name, FlushEvent::HoldRequested);
            }
            Command::Release(name) => {
                self.hold_replies.remove(&name);
                let has_files = !self.tracked(&name).paths.is_empty();
                self.apply(&name, FlushEvent::Released { has_files });
            }
            Command::Finish(deadline, reply) => self.finish(deadline, reply),
        }
    }

    /// Flushes the logs that changed, of one session or of all, and replies when they are durable.
    fn flush(
        &mut self,
        found: &DirectoryScan,
        session: Option<SessionId>,
        reply: oneshot::Sender<Result<FlushReport>>,
    ) {
        let is_selected = |name: &LogName| session.is_none() || name.session() == session.as_ref();
        self.request_flush_of_changed(found, is_selected);
        let selected = || self.logs.iter().filter(|(name, _)| is_selected(name));
        let pending: BTreeMap<LogName, u64> = selected()
            .filter(|(_, log)| log.state.has_pending_flush())
            .map(|(name, log)| (name.clone(), log.flushes_started + 1))
            .collect();
        // A fenced log is reported too: its branch is durable, but no restore includes it.
        let is_reported = |(name, log): &(&LogName, &TrackedLog)| {
            pending.contains_key(*name) || session.is_some() || log.status.is_branch()
        };
        let reported = selected()
            .filter(is_reported)
            .map(|(name, _)| name.clone())
            .collect();
        self.waiters.push(Waiter {
            pending,
            reported,
            reply,
        });
        self.reply_to_complete_waiters();
    }

    fn finish(&mut self, deadline: Instant, reply: oneshot::Sender<FinishReport>) {
        self.shutdown = Some(Shutdown {
            started: Instant::now(),
            deadline,
            reply,
        });
        self.scan_requests.push(ScanPurpose::Finish);
    }

    /// Requests the final flush of every log, after the scan.
    fn flush_unfinished(&mut self) {
        // This includes logs that are backing off, and partial lines, which are uploaded now.
        let is_unfinished = |log: &TrackedLog| {
            log.state.unsaved_since().is_some() || log.status.partial_line_bytes > 0
        };
        let unfinished: Vec<LogName> = self
            .logs
            .iter()
            .filter(|(_, log)| is_unfinished(log))
            .map(|(name, _)| name.clone())
            .collect();
        for name in &unfinished {
            self.apply(name, FlushEvent::FlushRequested);
        }
    }

    /// Requests a flush of every selected log whose files changed since its last flush.
    fn request_flush_of_changed(
        &mut self,
        found: &DirectoryScan,
        is_selected: impl Fn(&LogName) -> bool,
    ) {
        for (name, files) in found.logs.iter().filter(|(name, _)| is_selected(name)) {
            let fingerprint = ScannedFile::fingerprint(files);
            let tracked = self.tracked(name);
            if tracked.fingerprint != fingerprint || tracked.state.unsaved_since().is_some() {
                let paths = files.iter().map(|file| file.path.clone());
                tracked.paths.extend(paths);
                self.apply(name, FlushEvent::FlushRequested);
            }
        }
    }

    /// Starts the requested scan, unless another one is running.
    fn start_scan(&mut self) {
        if self.scan.is_some() || self.scan_requests.is_empty() {
            return;
        }
        let purposes = std::mem::take(&mut self.scan_requests);
        let mut cache = std::mem::take(&mut self.log_cache);
        let context = self.context.clone();
        let task = tokio::spawn(async move {
            let found = blocking(|| context.scan(&mut cache));
            (cache, found)
        });
        self.scan = Some(RunningScan { task, purposes });
    }

    fn apply_scan_result(&mut self, joined: JoinedScan) {
        let Some(RunningScan { purposes, .. }) = self.scan.take() else {
            return;
        };
        let found = match joined {
            Ok((cache, found)) => {
                self.log_cache = cache;
                found
            }
            Err(panic) => Err(Error::new(ErrorKind::Internal, "scan").caused_by(panic)),
        };
        let found = self.scan_ended(found);
        for purpose in purposes {
            match (purpose, &found) {
                (ScanPurpose::Changes { started }, found) => {
                    match found {
                        Ok(found) => self.apply_scan(found),
                        Err(error) => tracing::warn!(%error, "the scan failed; retrying"),
                    }
                    self.schedule_scan(started);
                }
                (ScanPurpose::Flush(session, reply), Ok(found)) => {
                    self.flush(found, session, reply)
                }
                (ScanPurpose::Flush(_, reply), Err(error)) => {
                    let _ = reply.send(Err(copy_of(error)));
                }
                (ScanPurpose::Finish, found) => {
                    match found {
                        Ok(found) => self.request_flush_of_changed(found, |_| true),
                        Err(error) => {
                            tracing::error!(%error, "the scan of the final flush failed; flushing the known changes")
                        }
                    }
                    self.flush_unfinished();
                }
            }
        }
    }

    /// Adds what the streamer knows to a scan.
    fn scan_ended(&mut self, found: Result<DirectoryScan>) -> Result<DirectoryScan> {
        self.context.counters.scan_ended();
        let mut found = found?;
        for (name, files) in &mut found.logs {
            if let Some(tracked) = self.logs.get_mut(name) {
                found.named.add_known(&tracked.paths, files);
                tracked.scanned_bytes = ScannedFile::total_size(files);
            }
        }
        for skipped in &found.skipped {
            if self.logged_skips.insert(skipped.clone()) {
                tracing::warn!("skipped: {skipped}");
            }
        }
        Ok(found)
    }

    fn handle_events(&mut self) {
        let changes = self.events.take();
        if changes.rescan {
            self.next_scan = Instant::now();
            return;
        }
        let (context, root) = (self.context.clone(), self.root.clone());
        for path in changes.paths {
            if path == root {
                self.refresh_watches();
            }
            let relative = path.strip_prefix(&root).ok().and_then(|path| path.to_str());
            let Some(relative) = relative.and_then(|path| path.parse::<RelPath>().ok()) else {
                continue;
            };
            match context.directory.stat(&relative) {
                Ok(Some(_)) => {
                    for name in self.logs_of(&relative) {
                        self.file_changed(&name, relative.clone());
                    }
                }
                // A directory. Files may have been created in it before it was watched.
                Ok(None) if context.profile.is_scanned(&relative) => {
                    self.scan_directory(&*context.directory, &relative);
                    let soon = Instant::now() + NEW_DIRECTORY_SCAN_DELAY;
                    self.next_scan = self.next_scan.min(soon);
                }
                _ => {}
            }
        }
    }

    /// The logs that a file belongs to. Several sessions can name the same file.
    fn logs_of(&self, path: &RelPath) -> Vec<LogName> {
        let profile = &*self.context.profile;
        if let FileClass::NamedInTranscript(_) = profile.classify(path) {
            let is_known = |(_, log): &(&LogName, &TrackedLog)| log.paths.contains(path);
            let logs = self.logs.iter().filter(is_known);
            return logs.map(|(name, _)| name.clone()).collect();
        }
        let found = log_of(&*self.context.directory, profile, path);
        found
            .ok()
            .flatten()
            .map(|(name, _)| name)
            .into_iter()
            .collect()
    }

    fn scan_directory(&mut self, directory: &dyn Directory, path: &RelPath) {
        if path.parent().is_none() {
            self.refresh_watches();
        }
        let profile = self.context.profile.clone();
        let Ok(found) = scan(directory, &*profile, Some(path)) else {
            return;
        };
        for (name, files) in found.logs {
            for file in files {
                // Only new files are added, because creating a file also changes its directory.
                if !self.tracked(&name).paths.contains(&file.path) {
                    self.file_changed(&name, file.path);
                }
            }
        }
    }

    /// Requests a scan of the root for changes without an event.
    fn request_full_scan(&mut self) {
        let started = Instant::now();
        blocking(|| self.refresh_watches());
        self.scan_requests.push(ScanPurpose::Changes { started });
        self.next_scan = started + IDLE_SCAN_INTERVAL;
    }

    /// Unloads quiet logs and schedules the next scan.
    fn schedule_scan(&mut self, started: Instant) {
        let mut is_idle = true;
        for log in self.logs.values_mut() {
            if log.state.is_quiet(started, UNLOAD_AFTER) {
                log.flusher = None;
            } else {
                is_idle = false;
            }
        }
        let pause = match self.watch_problem.is_some() {
            // Without events the scan determines the lag. It may use 5% of one core.
            true => self.context.flush_interval.max(started.elapsed() * 20),
            false if is_idle => IDLE_SCAN_INTERVAL,
            false => SCAN_INTERVAL,
        };
        self.next_scan = Instant::now() + pause;
    }

    fn apply_scan(&mut self, found: &DirectoryScan) {
        for (name, files) in &found.logs {
            let fingerprint = ScannedFile::fingerprint(files);
            // Also during a flush: it may have read the files before the change.
            if self
                .logs
                .get(name)
                .is_none_or(|log| log.fingerprint != fingerprint)
            {
                let paths = files.iter().map(|file| file.path.clone());
                self.tracked(name).paths.extend(paths);
                self.apply(name, FlushEvent::Changed);
            }
        }
    }

    fn refresh_watches(&mut self) {
        let problem = self.watcher.refresh().err();
        if self.watch_problem != problem {
            match &problem {
                Some(reason) => {
                    tracing::warn!(reason, "file events are unreliable; scanning instead")
                }
                None => tracing::info!("file events are reliable again"),
            }
            self.next_scan = Instant::now();
        }
        self.watch_problem = problem;
    }

    fn reply_to_complete_waiters(&mut self) {
        for waiter in self.waiters.take_complete() {
            let logs = self.statuses_of(waiter.reported.iter());
            let _ = waiter.reply.send(Ok(FlushReport { logs }));
        }
    }

    fn reject_waiters(&mut self, name: &LogName, error: &Error) {
        for waiter in self.waiters.take_waiting_for(name) {
            let _ = waiter.reply.send(Err(copy_of(error)));
        }
    }

    fn statuses(&self, is_selected: impl Fn(&TrackedLog) -> bool) -> Vec<LogStatus> {
        let selected = self.logs.iter().filter(|(_, log)| is_selected(log));
        self.statuses_of(selected.map(|(name, _)| name))
    }

    fn statuses_of<'a>(&'a self, names: impl Iterator<Item = &'a LogName>) -> Vec<LogStatus> {
        names
            .filter_map(|name| self.logs.get(name))
            .map(|log| log.status(&*self.context.directory))
            .collect()
    }
}

/// The error for another caller.
fn copy_of(error: &Error) -> Error {
    let copy = Error::new(error.kind(), error.to_string());
    match error.hint_text() {
        Some(hint) => copy.hint(hint),
        None => copy,
    }
}

/// Waits for the running scan.
async fn join_scan(scan: &mut Option<RunningScan>) -> JoinedScan {
    match scan {
        Some(running) => (&mut running.task).await,
        None => std::future::pending().await,
    }
}
