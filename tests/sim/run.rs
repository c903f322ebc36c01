//! Runs a schedule: performs each action, advances time, and checks the invariants after every
//! step. In the end the faults stop, and everything must become durable within a bounded time.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use sessiond::capture::handle::FlushReport;
use sessiond::error::ErrorKind;
use sessiond::model::{Digest, LogId, LogPoint, ResolvedPoint, Seq, WriterId, keys};
use sessiond::restore::{self, Options, RestoreReport};
use sessiond::store::encrypted::EncryptedStore;
use sessiond::sys::Rng;
use sessiond::upkeep::reindex::rebuild;
use tokio::time::{Instant, sleep, timeout};

use super::attacks;
use super::bucket::{Bucket, Objects, Plain};
use super::disk::{Disk, Events, Mount};
use super::history::Files;
use super::machine::{Cloud, Machine, Process};
use super::oracle::{Ack, Oracle};
use super::process::ProcessLifetime;
use super::rng::{ProcessRng, SeededRng};
use super::schedule::{Action, Schedule};
use super::tables::Tables;
use super::upkeep::{ProtectedPoint, Upkeep};
use super::world::{FaultConditions, HostClock, World};

/// Maximum time until everything is durable after the faults stop: a few steps of the longest
/// backoff.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// The reply to a flush: the version on disk at the request, and the report.
type Reply = (u64, sessiond::error::Result<FlushReport>);

/// Counters of a run.
#[derive(Debug, Clone, Copy, Default)]
pub struct Outcome {
    pub acks: u64,
    pub restores: u64,
    pub entries: u64,
    /// Processes that crashed at a step.
    pub crashes: u64,
}

/// Why a run failed.
#[derive(Debug)]
pub struct Violation {
    pub what: String,
    /// The action after which it was detected; the number of actions if after the last one.
    pub at: usize,
}

/// A run.
pub struct Run {
    cloud: Cloud,
    machines: Vec<Machine>,
    oracle: Oracle,
    agent_rng: SeededRng,
    lifetimes: u64,
    volumes: u64,
    checked: Option<u64>,
    upkeeps: Vec<Upkeep>,
    /// The last acknowledged entry of the log.
    last_acknowledged: Seq,
    complete_deletions: u64,
    /// Number of maintenance processes that were started.
    task_count: usize,
    /// The files that each fork must restore.
    forks: Vec<(LogId, Files)>,
    /// The files that each named checkpoint must restore.
    named: Vec<(Seq, Files)>,
    replies: Arc<Mutex<Vec<Reply>>>,
    outcome: Outcome,
}

/// Runs a schedule in its own world. Returns the outcome, and the trace if requested.
pub fn run(schedule: &Schedule, traced: bool) -> (Result<Outcome, Violation>, Vec<String>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let world = World::new(schedule.seed, traced);
        let mut run = Run::new(&world, schedule);
        let done = run.run_schedule(schedule).await;
        (done, world.trace())
    })
}

impl Run {
    fn new(world: &Arc<World>, schedule: &Schedule) -> Run {
        let cloud = Cloud::new(
            world.clone(),
            !schedule.mix.ignores_conditions,
            schedule.seed,
        );
        let oracle = Oracle::new(cloud.id(), !schedule.mix.ignores_conditions);
        let machines: Vec<Machine> = (1..=schedule.mix.machines as u64)
            .map(|volume| Machine::new(world, volume))
            .collect();
        Run {
            volumes: machines.len() as u64,
            cloud,
            machines,
            oracle,
            agent_rng: SeededRng::new(schedule.seed, 3),
            lifetimes: 0,
            checked: None,
            upkeeps: Vec::new(),
            last_acknowledged: 0,
            complete_deletions: 0,
            task_count: 0,
            forks: Vec::new(),
            named: Vec::new(),
            replies: Arc::default(),
            outcome: Outcome::default(),
        }
    }

    async fn run_schedule(&mut self, schedule: &Schedule) -> Result<Outcome, Violation> {
        for (at, action) in schedule.actions.iter().enumerate() {
            self.cloud.world.note(|| format!("— {at} {action:?}"));
            let step = async {
                self.apply_action(action);
                let pause = match action {
                    Action::Advance { millis } => *millis,
                    _ => self.agent_rng.below(120),
                };
                self.advance_time(Duration::from_millis(pause)).await
            };
            step.await.map_err(|what| Violation { what, at })?;
        }
        self.cloud.world.note(|| "— the faults stop".to_owned());
        let settled = self.settle().await;
        let encrypted = settled.and_then(|()| self.cloud.bucket.check_encryption());
        let attacked = match encrypted {
            Ok(()) => attacks::check(&self.cloud).await,
            Err(what) => Err(what),
        };
        attacked.map_err(|what| Violation {
            what,
            at: schedule.actions.len(),
        })?;
        Ok(self.outcome)
    }

    /// Advances time in steps and checks everything after each step.
    async fn advance_time(&mut self, time: Duration) -> Result<(), String> {
        let until = Instant::now() + time;
        let steps = if time > Duration::from_secs(1) { 3 } else { 1 };
        for step in (0..steps).rev() {
            let left = until.saturating_duration_since(Instant::now());
            sleep(left / (step + 1)).await;
            self.observe().await?;
        }
        Ok(())
    }

    fn lifetime(&mut self) -> u64 {
        self.lifetimes += 1;
        self.lifetimes
    }

    fn record_version(&mut self, on: usize) -> u64 {
        let machine = &self.machines[on];
        self.oracle
            .record_version(machine.volume(), machine.disk.files())
    }

    fn apply_action(&mut self, action: &Action) {
        match action {
            Action::Append { on, .. }
            | Action::BeginLine { on, .. }
            | Action::Rewrite { on, .. }
            | Action::Truncate { on, .. }
            | Action::FileMove { on }
            | Action::Tool { on }
            | Action::Side { on, .. } => self.run_agent_action(*on, action),
            Action::Start { on } => {
                if self.machines[*on].process.is_none() {
                    let lifetime = self.lifetime();
                    let machine = &mut self.machines[*on];
                    machine.has_agent_exited = false;
                    machine.agent.launch(&machine.disk);
                    machine.start(&self.cloud, lifetime);
                }
            }
            Action::Flush { on } => self.flush(*on),
            Action::Finish { on } => {
                if matches!(self.machines[*on].process, Some(Process::Daemon { .. })) {
                    self.machines[*on].has_agent_exited = true;
                    self.record_version(*on);
                    if let Some(version) = self.oracle.last(self.machines[*on].volume()) {
                        version.allow_partial_lines();
                    }
                    self.machines[*on].finish();
                }
            }
            Action::Restore { on, wipe } => {
                self.machines[*on].kill();
                if *wipe {
                    self.volumes += 1;
                    self.machines[*on] = Machine::new(&self.cloud.world, self.volumes);
                }
                let lifetime = self.lifetime();
                self.machines[*on].restore(&self.cloud, lifetime);
            }
            Action::Kill { on } => self.machines[*on].kill(),
            Action::CutPower { on } => {
                self.machines[*on].kill();
                let machine = &self.machines[*on];
                machine.disk.cut_power(&mut self.agent_rng);
            }
            Action::CrashIn { on, steps, after } => self.machines[*on].crash_in(*steps, *after),
            Action::Pause { on } => self.with_lifetime(*on, ProcessLifetime::pause),
            Action::Wake { on } => self.with_lifetime(*on, ProcessLifetime::wake),
            Action::LoseState { on } => {
                if self.machines[*on].process.is_none() {
                    self.machines[*on].disk.lose_state();
                }
            }
            Action::FullDisk { on, full } => self.machines[*on].disk.set_full(*full),
            Action::ClockJump { on, minutes } => {
                self.machines[*on].disk.clock.jump(minutes * 60_000_000)
            }
            Action::Watching { on, events } => self.machines[*on].disk.set_events(*events),
            Action::FaultConditions(fault_conditions) => {
                if fault_conditions.index_old {
                    self.cloud.tables.freeze_copy();
                }
                *self.cloud.world.fault_conditions() = fault_conditions.clone();
            }
            Action::Advance { millis } => {
                // Hours in which every write takes effect and every reply is lost produce thousands
                // of claims, which only costs time.
                if *millis >= 3_600_000 {
                    let mut fault_conditions = self.cloud.world.fault_conditions();
                    (fault_conditions.late, fault_conditions.after) = (0, 0);
                }
            }
            Action::Upkeep {
                task_kind,
                ends,
                hangs,
            } => {
                let lifetime = self.lifetime();
                if let Some(upkeep) =
                    Upkeep::start(&self.cloud, lifetime, *task_kind, self.last_acknowledged)
                {
                    if let Some((steps, after)) = ends {
                        upkeep.lifetime.crash_in(*steps, *after);
                    }
                    if *hangs {
                        upkeep.lifetime.pause();
                    }
                    self.task_count += 1;
                    self.upkeeps.push(upkeep);
                }
            }
            Action::WakeUpkeep => self
                .upkeeps
                .iter()
                .for_each(|upkeep| upkeep.lifetime.wake()),
        }
    }

    fn with_lifetime(&self, on: usize, call: impl Fn(&ProcessLifetime)) {
        if let Some(process) = &self.machines[on].process {
            call(process.lifetime());
        }
    }

    fn run_agent_action(&mut self, on: usize, action: &Action) {
        let rng = &mut self.agent_rng;
        let Machine {
            disk,
            agent,
            has_agent_exited,
            process,
            ..
        } = &mut self.machines[on];
        if *has_agent_exited || matches!(process, Some(Process::Restore { .. })) {
            return;
        }
        match action {
            Action::Append { which, lines, .. } => agent.append(disk, *which, *lines, rng),
            Action::BeginLine { which, .. } => agent.begin_line(disk, *which, rng),
            Action::Rewrite {
                which, in_place, ..
            } => agent.rewrite(disk, *which, *in_place, rng),
            Action::Truncate {
                which, anywhere, ..
            } => agent.truncate_file(disk, *which, *anywhere, rng),
            Action::FileMove { .. } => agent.change_project(disk, rng),
            Action::Tool { .. } => {
                let name = agent.write_tool_result(disk, rng);
                self.record_version(on);
                let Machine { disk, agent, .. } = &mut self.machines[on];
                agent.name_tool(disk, &name, &mut self.agent_rng);
            }
            Action::Side { in_place, .. } => agent.replace_side_file(disk, *in_place, rng),
            _ => {}
        }
        self.record_version(on);
    }

    fn flush(&mut self, on: usize) {
        let version = self.record_version(on);
        let Some(Process::Daemon { handle, .. }) = &self.machines[on].process else {
            return;
        };
        let (handle, replies) = (handle.clone(), self.replies.clone());
        let session = self.cloud.id().name.session().cloned();
        tokio::spawn(async move {
            let reply = handle.flush(session).await;
            replies.lock().expect("no panic").push((version, reply));
        });
    }

    /// Records what has ended, and checks the invariants.
    async fn observe(&mut self) -> Result<(), String> {
        for on in 0..self.machines.len() {
            self.reap(on).await?;
        }
        let (ended, running) = std::mem::take(&mut self.upkeeps)
            .into_iter()
            .partition(Upkeep::has_ended);
        self.upkeeps = running;
        let mut promises = Vec::new();
        for upkeep in ended {
            promises.extend(upkeep.end().await?);
        }
        let (complete_deletions, _) = self.cloud.bucket.losses();
        if complete_deletions != self.complete_deletions {
            self.complete_deletions = complete_deletions;
            self.last_acknowledged = 0;
            self.named.clear();
            self.oracle.reset();
        }
        for promise in promises {
            self.record_promise(promise)?;
        }
        let replies = std::mem::take(&mut *self.replies.lock().expect("no panic"));
        let mut has_promise = false;
        for (version, reply) in replies {
            has_promise |= self.handle_reply(version, reply)?;
        }
        let generation = self.cloud.bucket.generation();
        if has_promise || self.checked != Some(generation) {
            self.checked = Some(generation);
            self.check().await?;
        }
        Ok(())
    }

    /// Records that a process reported a point as protected.
    fn record_promise(&mut self, promise: ProtectedPoint) -> Result<(), String> {
        let archive = self.cloud.bucket.archive();
        match promise {
            ProtectedPoint::Fork(id, seq) => {
                self.cloud
                    .world
                    .note(|| format!("{} is forked from entry {seq}", id.name));
                let held = self.oracle.at(&archive, seq)?;
                self.forks.push((
                    id.clone(),
                    super::restored_files::rename_session(&held, &self.cloud.id(), &id),
                ));
            }
            ProtectedPoint::Checkpoint(name, seq) => {
                self.cloud
                    .world
                    .note(|| format!("entry {seq} is checkpoint {name}"));
                let held = self.oracle.at(&archive, seq)?;
                self.named.push((seq, held));
            }
        }
        self.checked = None;
        Ok(())
    }

    /// Records the reply to a flush. Returns whether it acknowledged a version.
    fn handle_reply(
        &mut self,
        version: u64,
        reply: sessiond::error::Result<FlushReport>,
    ) -> Result<bool, String> {
        let report = match reply {
            Ok(report) => report,
            Err(error)
                if error.kind() == ErrorKind::Internal
                    && !error.to_string().contains("has stopped") =>
            {
                return Err(format!("a flush failed with an internal error: {error}"));
            }
            Err(_) => return Ok(false),
        };
        let Some(log) = report.logs.first() else {
            return Ok(false);
        };
        self.cloud.world.note(|| {
            format!(
                "version {version} is acknowledged on {} {} as entry {}",
                log.write_target, log.writer, log.head
            )
        });
        let branch = match log.write_target.as_str() {
            "main" => {
                self.last_acknowledged = self.last_acknowledged.max(log.head);
                None
            }
            "branch" => Some(
                log.writer
                    .parse::<WriterId>()
                    .map_err(|error| error.to_string())?,
            ),
            // Nothing was written: the files equal what another writer wrote.
            _ => return Ok(false),
        };
        self.outcome.acks += 1;
        self.oracle.record_ack(Ack {
            version,
            head: log.head,
            branch,
        });
        Ok(true)
    }

    /// Handles a process that has ended or crashed.
    async fn reap(&mut self, on: usize) -> Result<(), String> {
        let Some(process) = &self.machines[on].process else {
            return Ok(());
        };
        if process.lifetime().is_killed() {
            self.outcome.crashes += 1;
            self.machines[on].kill();
            self.record_version(on);
            return Ok(());
        }
        match process {
            Process::Daemon { .. } => {}
            Process::Ending { task, .. } if task.is_finished() => {
                let Some(Process::Ending { tasks, .. }) = self.machines[on].process.take() else {
                    return Ok(());
                };
                tasks.iter().for_each(tokio::task::JoinHandle::abort);
                self.machines[on].disk.set_watcher(None);
            }
            Process::Restore { task, .. } if task.is_finished() => {
                let Some(Process::Restore { task, before, .. }) = self.machines[on].process.take()
                else {
                    return Ok(());
                };
                let done = task
                    .await
                    .map_err(|error| format!("a restore panicked: {error}"))?;
                self.check_restore(on, done, &before)?;
            }
            Process::Ending { .. } | Process::Restore { .. } => {}
        }
        Ok(())
    }

    fn check_restore(
        &mut self,
        on: usize,
        done: sessiond::error::Result<RestoreReport>,
        before: &Files,
    ) -> Result<(), String> {
        self.record_version(on);
        let report = match done {
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::Unavailable | ErrorKind::NotFound | ErrorKind::Conflict
                ) =>
            {
                self.cloud
                    .world
                    .note(|| format!("the restore failed: {error}"));
                return Ok(());
            }
            Err(error) => return Err(format!("a restore failed: {error}")),
            Ok(report) => report,
        };
        self.outcome.restores += 1;
        self.cloud.world.note(|| {
            format!(
                "restored entry {} on volume {}",
                report.seq,
                self.machines[on].volume()
            )
        });
        let held = self.oracle.at(&self.cloud.bucket.archive(), report.seq)?;
        let placed = self.machines[on].disk.files();
        super::restored_files::check_restored_files(&report, &held, before, &placed)
    }

    /// Checks the bucket, and that a restore gives the files that the format rules give.
    async fn check(&mut self) -> Result<(), String> {
        let objects = self.cloud.bucket.objects();
        let archive = self.cloud.bucket.archive();
        let expected = self.oracle.check(&archive)?;
        self.check_object_count(&objects, &archive)?;
        if expected.removed
            && self
                .pull(objects.clone(), &self.cloud.id(), LogPoint::Latest, None)
                .await
                .is_ok()
        {
            return Err("a removed session is restored".to_owned());
        }
        self.check_rollback(&objects, &archive).await?;
        if expected.removed {
            self.named.clear();
        }
        for (seq, held) in &self.named {
            let pulled = self
                .pull(objects.clone(), &self.cloud.id(), LogPoint::Seq(*seq), None)
                .await?;
            compare_files(&format!("named entry {seq}"), &pulled, held)?;
        }
        for (id, held) in &self.forks {
            let pulled = self
                .pull(objects.clone(), id, LogPoint::Latest, None)
                .await?;
            compare_files(&format!("a restore of {}", id.name), &pulled, held)?;
        }
        if let Some(held) = &expected.main {
            let pulled = self
                .pull(objects.clone(), &self.cloud.id(), LogPoint::Latest, None)
                .await?;
            compare_files("a restore", &pulled, held)?;
        }
        for (writer, held) in &expected.branches {
            let pulled = self
                .pull(
                    objects.clone(),
                    &self.cloud.id(),
                    LogPoint::Latest,
                    Some(writer),
                )
                .await?;
            compare_files(&format!("a restore of branch {writer}"), &pulled, held)?;
        }
        Ok(())
    }

    /// Maintenance that fails, hangs and is repeated leaves at most as many compacted segments as
    /// there are entries and started maintenance processes.
    fn check_object_count(&self, objects: &Objects, archive: &Objects) -> Result<(), String> {
        let count = objects
            .keys()
            .filter(|key| key.contains("/merge/") || key.contains("/snap/"))
            .count();
        let max = archive.len() + self.task_count;
        if count <= max {
            Ok(())
        } else {
            Err(format!(
                "{count} compacted segments of {} entries and {} maintenance processes",
                archive.len(),
                self.task_count
            ))
        }
    }

    /// An entry that is still stored can be restored, whatever was compacted.
    async fn check_rollback(&mut self, objects: &Objects, archive: &Objects) -> Result<(), String> {
        let directory = keys::entries_dir(&self.cloud.id());
        let stored_seqs: Vec<Seq> = objects
            .keys()
            .filter(|key| key.starts_with(&directory))
            .filter_map(|key| keys::entry_seq(key))
            .collect();
        let has_compacted = objects
            .keys()
            .any(|key| key.contains("/merge/") || key.contains("/snap/"));
        if stored_seqs.is_empty() || !has_compacted {
            return Ok(());
        }
        let seq = stored_seqs[self.agent_rng.below(stored_seqs.len() as u64) as usize];
        let Some(held) = self.oracle.find_files_at(archive, seq)? else {
            return Ok(());
        };
        match self
            .pull(objects.clone(), &self.cloud.id(), LogPoint::Seq(seq), None)
            .await
        {
            Ok(pulled) => compare_files(&format!("a restore of entry {seq}"), &pulled, &held),
            Err(error) if error.contains("can no longer be restored") => Ok(()),
            Err(error) => Err(format!("a restore of entry {seq} failed: {error}")),
        }
    }

    /// Returns the files of a restore on a new machine without faults.
    async fn pull(
        &self,
        objects: Objects,
        id: &LogId,
        at: LogPoint,
        branch: Option<&WriterId>,
    ) -> Result<Files, String> {
        let clock = HostClock::new(self.cloud.world.clone());
        let disk = Disk::new(0, clock.clone());
        let quiet = World::new(0, false);
        let lifetime = Arc::new(ProcessLifetime::new(0, 0));
        let rng: Arc<dyn Rng> = Arc::new(ProcessRng::new(SeededRng::new(0, 0)));
        let (mut logs, _) = self.cloud.logs(&lifetime, clock);
        let store = Arc::new(Plain(Bucket::of(objects)));
        (logs.store, logs.rng) = (Arc::new(EncryptedStore::without_keys(store)), rng);
        let directory = Arc::new(Mount {
            disk: disk.clone(),
            world: quiet,
            lifetime,
        });
        let context = restore::RestoreContext {
            directory,
            profile: self.cloud.profile.clone(),
            logs,
        };
        let point = ResolvedPoint {
            at,
            checkpoint: None,
            branch: branch.cloned(),
        };
        let options = Options {
            point,
            ..Options::default()
        };
        let restored = restore::restore(&context, id, &options).await;
        restored.map_err(|error| format!("{} cannot be restored: {error}", id.name))?;
        Ok(disk.files())
    }

    /// Stops the faults. Everything on a volume must become durable, the index must catch up, and
    /// then an idle daemon must send no requests.
    async fn settle(&mut self) -> Result<(), String> {
        *self.cloud.world.fault_conditions() = FaultConditions::default();
        for on in 0..self.machines.len() {
            self.machines[on].disarm();
            self.machines[on].disk.set_full(false);
            self.machines[on].disk.set_events(Events::All);
            self.with_lifetime(on, ProcessLifetime::wake);
        }
        for upkeep in &self.upkeeps {
            upkeep.lifetime.cancel_crash();
            upkeep.lifetime.wake();
        }
        // Late writes arrive. Paused writers that were fenced detect it.
        self.advance_time(Duration::from_secs(60)).await?;
        for on in 0..self.machines.len() {
            let waited = timeout(PATIENCE, async {
                while matches!(
                    self.machines[on].process,
                    Some(Process::Restore { .. } | Process::Ending { .. })
                ) {
                    self.advance_time(Duration::from_millis(500)).await?;
                }
                Ok::<(), String>(())
            });
            waited
                .await
                .map_err(|_| "a process does not end".to_owned())??;
            self.apply_action(&Action::Start { on });
            self.advance_time(Duration::from_millis(50)).await?;
        }
        for on in 0..self.machines.len() {
            self.wait_until_durable(on).await?;
        }
        self.advance_time(Duration::from_secs(40)).await?;
        let before = self.cloud.bucket.traffic();
        self.advance_time(Duration::from_secs(600)).await?;
        if self.cloud.bucket.traffic() != before {
            return Err("an idle daemon made requests".to_owned());
        }
        self.outcome.entries = self.cloud.bucket.objects().len() as u64;
        self.check_restore_on_new_machine().await
    }

    async fn wait_until_durable(&mut self, on: usize) -> Result<(), String> {
        let acks = self.outcome.acks;
        let volume = self.machines[on].volume();
        self.flush(on);
        let Some(Process::Daemon { handle, .. }) = &self.machines[on].process else {
            return Err(format!("no daemon runs on volume {volume} without a fault"));
        };
        let handle = handle.clone();
        let waited = timeout(
            PATIENCE,
            handle.flush(self.cloud.id().name.session().cloned()),
        )
        .await;
        let report = waited.map_err(|_| {
            format!("volume {volume} is not durable {PATIENCE:?} after the faults stopped")
        })?;
        let report =
            report.map_err(|error| format!("volume {volume} cannot be flushed: {error}"))?;
        self.observe().await?;
        let written = self
            .oracle
            .last(volume)
            .is_some_and(|last| last.files.values().any(|file| file.cut > 0));
        if written && report.logs.is_empty() {
            return Err(format!("a flush of volume {volume} reports no log"));
        }
        let unclaimed = report
            .logs
            .first()
            .is_some_and(|log| log.write_target == "unclaimed");
        if written && !unclaimed && self.outcome.acks == acks {
            return Err(format!(
                "volume {volume} was flushed without an acknowledgment"
            ));
        }
        Ok(())
    }

    /// Checks that the index has the entries of the log. It may lack a branch whose writer was
    /// killed, until it is rebuilt from the bucket.
    async fn check_index(&mut self) -> Result<(), String> {
        let expected = self.oracle.entries(&self.cloud.bucket.archive())?;
        let known = |tables: &Tables, id: &LogId| -> Vec<_> {
            tables
                .entries(id)
                .into_iter()
                .map(|row| (row.branch, row.seq, row.digest))
                .collect()
        };
        let id = self.cloud.id();
        // A log that was reset does not need its earlier entries, and the index may not have
        // received them.
        let starts_at_first_entry = expected.first().is_none_or(|(_, seq, _)| *seq == 1);
        if self.cloud.bucket.losses().1 > 0 || !starts_at_first_entry {
            return self.check_indexed_head(&expected).await;
        }
        let rows = known(&self.cloud.tables, &id);
        let (main, branches): (Vec<_>, Vec<_>) = rows
            .into_iter()
            .partition(|(branch, _, _)| branch.is_none());
        let all = expected.iter().filter(|(branch, _, _)| branch.is_none());
        if !all.eq(&main) || branches.iter().any(|row| !expected.contains(row)) {
            return Err(format!(
                "the index has {main:?} and {branches:?}, and the bucket has {expected:?}"
            ));
        }
        let (logs, index) = self.cloud.logs(
            &Arc::new(ProcessLifetime::new(0, 0)),
            HostClock::new(self.cloud.world.clone()),
        );
        rebuild(&logs, &*index, &*self.cloud.profile, |_, _| {})
            .await
            .map_err(|error| format!("reindex: {error}"))?;
        let rows = known(&self.cloud.tables, &id);
        if rows == expected {
            Ok(())
        } else {
            Err(format!(
                "a rebuilt index has {rows:?}, and the bucket has {expected:?}"
            ))
        }
    }

    /// Checks the head only: after garbage collection the index has other rows for older entries.
    async fn check_indexed_head(
        &mut self,
        expected: &[(Option<String>, Seq, Digest)],
    ) -> Result<(), String> {
        let end = expected
            .iter()
            .rfind(|(branch, _, _)| branch.is_none())
            .map(|(_, seq, digest)| (*seq, *digest));
        let id = self.cloud.id();
        let known = |tables: &Tables| {
            tables
                .entries(&id)
                .into_iter()
                .rfind(|row| row.branch.is_none())
                .map(|row| (row.seq, row.digest))
        };
        if known(&self.cloud.tables) != end {
            return Err(format!(
                "the index ends with {:?} and the log with {end:?}",
                known(&self.cloud.tables)
            ));
        }
        let (logs, index) = self.cloud.logs(
            &Arc::new(ProcessLifetime::new(0, 0)),
            HostClock::new(self.cloud.world.clone()),
        );
        rebuild(&logs, &*index, &*self.cloud.profile, |_, _| {})
            .await
            .map_err(|error| format!("reindex: {error}"))?;
        if known(&self.cloud.tables) == end {
            Ok(())
        } else {
            Err("a rebuilt index has another head".to_owned())
        }
    }

    /// A new machine takes over the session. It must receive the content of the log, and its agent
    /// must be able to continue.
    async fn check_restore_on_new_machine(&mut self) -> Result<(), String> {
        let Some(held) = self.oracle.check(&self.cloud.bucket.archive())?.main else {
            return Ok(());
        };
        self.volumes += 1;
        self.machines
            .push(Machine::new(&self.cloud.world, self.volumes));
        let on = self.machines.len() - 1;
        let before = self.outcome.restores;
        self.apply_action(&Action::Restore { on, wipe: false });
        self.advance_time(Duration::from_secs(30)).await?;
        if self.outcome.restores == before {
            return Err("a restore did not end without a fault".to_owned());
        }
        let placed = self.machines[on].disk.files();
        self.apply_action(&Action::Start { on });
        self.apply_action(&Action::Append {
            on,
            which: super::agent::FileChoice::Transcript,
            lines: 1,
        });
        self.wait_until_durable(on).await?;
        let objects = self.cloud.bucket.objects();
        super::restored_files::check_uploaded_bytes(
            &placed,
            &self.machines[on].disk.files(),
            self.oracle
                .raw_bytes_by(&self.cloud.bucket.archive(), self.volumes)?,
        )?;
        let now = self
            .oracle
            .check(&self.cloud.bucket.archive())?
            .main
            .unwrap_or_default();
        super::restored_files::check_continuation(&held, &now)?;
        if let Some(damaged) = super::restored_files::with_damaged_entry(&objects, &self.cloud.id())
            && self
                .pull(damaged, &self.cloud.id(), LogPoint::Latest, None)
                .await
                .is_ok()
        {
            return Err(
                "a restore accepts bytes whose digest differs from the digest in the entry"
                    .to_owned(),
            );
        }
        self.advance_time(Duration::from_secs(40)).await?;
        self.check_index().await
    }
}

fn compare_files(what: &str, got: &Files, held: &Files) -> Result<(), String> {
    let differs = got
        .keys()
        .chain(held.keys())
        .find(|path| got.get(*path) != held.get(*path));
    match differs {
        Some(path) => Err(format!("{what} gives another {path} than the log")),
        None => Ok(()),
    }
}
