//! The streamer: runs the flushes that the flush state of each log requires.
//!
//! Owns the scans, the queue of due logs and the running flushes, whose number is bounded. Does not
//! own the decision when a log is flushed (`flush_state`) or the steps of a flush (`flush`). On
//! shutdown, after the agent has exited, it scans once more and then writes the last entries.

mod results;
mod scans;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::task::{self, JoinHandle, JoinSet};
use tokio::time::{Instant, sleep_until};

use super::CaptureContext;
use super::flush::{FlushOutcome, LogFlusher};
use super::flush_state::{FlushAction, FlushEvent};
use super::handle::{Command, FinishReport, FlushReport, StreamerHandle};
use super::limits::MAX_LARGE_FLUSHES;
use super::outage::OutageLog;
use super::scan::{DirectoryScan, LogCache, ScannedFile, log_of, scan};
use super::tracked_log::{LogStatus, StreamSummary, TrackedLog};
use super::waiters::{Waiter, Waiters};
use super::watch::{EventBuffer, Watcher};
use crate::agent::FileClass;
use crate::error::{Error, Result};
use crate::log::ledger::Ledger;
use crate::model::{LogName, RelPath, SessionId};
use crate::store::Store;
use crate::sys::{Directory, blocking};

/// Maximum time between two full scans while logs change. A scan finds changes without an event.
const SCAN_INTERVAL: Duration = Duration::from_secs(15);
/// The same while nothing changes: an idle agent must not keep a machine awake.
const IDLE_SCAN_INTERVAL: Duration = Duration::from_secs(60);
/// Delay of an extra scan after a new directory: its watch starts a little after its event, and
/// files that are created in between cause no event.
const NEW_DIRECTORY_SCAN_DELAY: Duration = Duration::from_secs(1);
/// Events within this time are handled together.
const EVENT_DEBOUNCE: Duration = Duration::from_millis(30);
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
    /// Why the scan of the final flush did not read everything.
    unread: Vec<String>,
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
            unread: Vec::new(),
            log_cache: LogCache::default(),
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
                unread: std::mem::take(&mut self.unread),
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
                self.waiters
                    .push(Waiter::new([(name.clone(), first_flush)], [name], reply));
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
        let pending = selected()
            .filter(|(_, log)| log.state.has_pending_flush())
            .map(|(name, log)| (name.clone(), log.flushes_started + 1));
        // A fenced log is reported too: its branch is durable, but no restore includes it.
        let reported = selected()
            .filter(|(_, log)| {
                log.state.has_pending_flush() || session.is_some() || log.status.is_branch()
            })
            .map(|(name, _)| name.clone());
        let waiter = Waiter::new(pending, reported, reply);
        self.waiters.push(waiter);
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
            waiter.reply(FlushReport { logs });
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
