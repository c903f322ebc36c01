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

use super::bucket::{Bucket, Objects, Plain};
use super::disk::{Disk, Events, Mount};
use super::history::Files;
use super::machine::{Cloud, Machine, Process};
use super::oracle::{Ack, Oracle};
use super::process::ProcessLifetime;
use super::rng::{ProcessRng, SeededRng};
use super::schedule::{Action, Schedule};
use super::tables::Tables;
use super::upkeep::{Kept, Upkeep};
use super::world::{FaultConditions, HostClock, World};

/// Once the faults have stopped, everything is durable within this: a few steps of the longest back-off.
const PATIENCE: Duration = Duration::from_secs(120);

/// What a flush answered: the version it was asked about, and where it is.
type Answer = (u64, sessiond::error::Result<FlushReport>);

/// What a run amounts to.
#[derive(Debug, Clone, Copy, Default)]
pub struct Outcome {
    pub acks: u64,
    pub restores: u64,
    pub entries: u64,
    /// Processes that ended at a step.
    pub crashes: u64,
}

/// Why a run failed.
#[derive(Debug)]
pub struct Violation {
    pub what: String,
    /// The action behind which it was seen; the number of actions if in the end.
    pub at: usize,
}

/// A run.
pub struct Run {
    cloud: Cloud,
    machines: Vec<Machine>,
    oracle: Oracle,
    agents_dice: SeededRng,
    lives: u64,
    volumes: u64,
    checked: Option<u64>,
    upkeeps: Vec<Upkeep>,
    /// The last entry of the log that somebody was told of.
    acknowledged: Seq,
    forgotten: u64,
    /// Chores that somebody asked for.
    chores: usize,
    /// What each fork must bring.
    forks: Vec<(LogId, Files)>,
    /// What each entry must bring that has a name.
    named: Vec<(Seq, Files)>,
    answers: Arc<Mutex<Vec<Answer>>>,
    outcome: Outcome,
}

/// Runs a schedule in a world of its own; answers what happened, with the trace if wanted.
pub fn run(schedule: &Schedule, traced: bool) -> (Result<Outcome, Violation>, Vec<String>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let world = World::new(schedule.seed, traced);
        let mut run = Run::new(&world, schedule);
        let done = run.go(schedule).await;
        (done, world.trace())
    })
}

impl Run {
    fn new(world: &Arc<World>, schedule: &Schedule) -> Run {
        let cloud = Cloud::new(world.clone(), !schedule.mix.lax, schedule.seed);
        let oracle = Oracle::new(cloud.id(), !schedule.mix.lax);
        let machines: Vec<Machine> = (1..=schedule.mix.machines as u64)
            .map(|volume| Machine::new(world, volume))
            .collect();
        Run {
            volumes: machines.len() as u64,
            cloud,
            machines,
            oracle,
            agents_dice: SeededRng::new(schedule.seed, 3),
            lives: 0,
            checked: None,
            upkeeps: Vec::new(),
            acknowledged: 0,
            forgotten: 0,
            chores: 0,
            forks: Vec::new(),
            named: Vec::new(),
            answers: Arc::default(),
            outcome: Outcome::default(),
        }
    }

    async fn go(&mut self, schedule: &Schedule) -> Result<Outcome, Violation> {
        for (at, action) in schedule.actions.iter().enumerate() {
            self.cloud.world.note(|| format!("— {at} {action:?}"));
            let step = async {
                self.act(action);
                let pause = match action {
                    Action::Advance { millis } => *millis,
                    _ => self.agents_dice.below(120),
                };
                self.pass(Duration::from_millis(pause)).await
            };
            step.await.map_err(|what| Violation { what, at })?;
        }
        self.cloud.world.note(|| "— the faults stop".to_owned());
        let settled = self.settle().await;
        let encrypted = settled.and_then(|()| self.cloud.bucket.check_encryption());
        encrypted.map_err(|what| Violation {
            what,
            at: schedule.actions.len(),
        })?;
        Ok(self.outcome)
    }

    /// Lets time pass, in pieces, with a look at everything behind each.
    async fn pass(&mut self, time: Duration) -> Result<(), String> {
        let until = Instant::now() + time;
        let pieces = if time > Duration::from_secs(1) { 3 } else { 1 };
        for piece in (0..pieces).rev() {
            let left = until.saturating_duration_since(Instant::now());
            sleep(left / (piece + 1)).await;
            self.look().await?;
        }
        Ok(())
    }

    fn lifetime(&mut self) -> u64 {
        self.lives += 1;
        self.lives
    }

    fn saw(&mut self, on: usize) -> u64 {
        let machine = &self.machines[on];
        self.oracle.saw(machine.volume(), machine.disk.files())
    }

    fn act(&mut self, action: &Action) {
        match action {
            Action::Append { on, .. }
            | Action::BeginLine { on, .. }
            | Action::Rewrite { on, .. }
            | Action::CutBack { on, .. }
            | Action::FileMove { on }
            | Action::Tool { on }
            | Action::Side { on, .. } => self.agent_acts(*on, action),
            Action::Start { on } => {
                if self.machines[*on].process.is_none() {
                    let lifetime = self.lifetime();
                    let machine = &mut self.machines[*on];
                    machine.agent_gone = false;
                    machine.agent.launch(&machine.disk);
                    machine.start(&self.cloud, lifetime);
                }
            }
            Action::Flush { on } => self.flush(*on),
            Action::Finish { on } => {
                if matches!(self.machines[*on].process, Some(Process::Daemon { .. })) {
                    self.machines[*on].agent_gone = true;
                    self.saw(*on);
                    if let Some(version) = self.oracle.last(self.machines[*on].volume()) {
                        version.allow_tails();
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
                machine.disk.cut_power(&mut self.agents_dice);
            }
            Action::CrashIn { on, steps, after } => self.machines[*on].crash_in(*steps, *after),
            Action::Pause { on } => self.with_life(*on, ProcessLifetime::pause),
            Action::Wake { on } => self.with_life(*on, ProcessLifetime::wake),
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
                    self.cloud.tables.copy();
                }
                *self.cloud.world.fault_conditions() = fault_conditions.clone();
            }
            Action::Advance { millis } => {
                // Hours in which every write arrives and none is answered make a log of thousands of claims, which only takes time.
                if *millis >= 3_600_000 {
                    let mut fault_conditions = self.cloud.world.fault_conditions();
                    (fault_conditions.late, fault_conditions.after) = (0, 0);
                }
            }
            Action::Upkeep { chore, ends, hangs } => {
                let lifetime = self.lifetime();
                if let Some(upkeep) =
                    Upkeep::start(&self.cloud, lifetime, *chore, self.acknowledged)
                {
                    if let Some((steps, after)) = ends {
                        upkeep.lifetime.crash_in(*steps, *after);
                    }
                    if *hangs {
                        upkeep.lifetime.pause();
                    }
                    self.chores += 1;
                    self.upkeeps.push(upkeep);
                }
            }
            Action::WakeUpkeep => self
                .upkeeps
                .iter()
                .for_each(|upkeep| upkeep.lifetime.wake()),
        }
    }

    fn with_life(&self, on: usize, act: impl Fn(&ProcessLifetime)) {
        if let Some(process) = &self.machines[on].process {
            act(process.lifetime());
        }
    }

    fn agent_acts(&mut self, on: usize, action: &Action) {
        let rng = &mut self.agents_dice;
        let Machine {
            disk,
            agent,
            agent_gone,
            process,
            ..
        } = &mut self.machines[on];
        if *agent_gone || matches!(process, Some(Process::Restore { .. })) {
            return;
        }
        match action {
            Action::Append { which, lines, .. } => agent.append(disk, *which, *lines, rng),
            Action::BeginLine { which, .. } => agent.begin_line(disk, *which, rng),
            Action::Rewrite {
                which, in_place, ..
            } => agent.rewrite(disk, *which, *in_place, rng),
            Action::CutBack {
                which, anywhere, ..
            } => agent.cut_back(disk, *which, *anywhere, rng),
            Action::FileMove { .. } => agent.move_on(disk, rng),
            Action::Tool { .. } => {
                let name = agent.tool(disk, rng);
                self.saw(on);
                let Machine { disk, agent, .. } = &mut self.machines[on];
                agent.name_tool(disk, &name, &mut self.agents_dice);
            }
            Action::Side { in_place, .. } => agent.side(disk, *in_place, rng),
            _ => {}
        }
        self.saw(on);
    }

    fn flush(&mut self, on: usize) {
        let version = self.saw(on);
        let Some(Process::Daemon { handle, .. }) = &self.machines[on].process else {
            return;
        };
        let (handle, answers) = (handle.clone(), self.answers.clone());
        let session = self.cloud.id().name.session().cloned();
        tokio::spawn(async move {
            let answer = handle.flush(session).await;
            answers.lock().expect("no panic").push((version, answer));
        });
    }

    /// Takes note of what has ended, and checks everything.
    async fn look(&mut self) -> Result<(), String> {
        for on in 0..self.machines.len() {
            self.reap(on).await?;
        }
        let (ended, running) = std::mem::take(&mut self.upkeeps)
            .into_iter()
            .partition(Upkeep::has_ended);
        self.upkeeps = running;
        let mut kept = Vec::new();
        for upkeep in ended {
            kept.extend(upkeep.end().await?);
        }
        let (forgotten, _) = self.cloud.bucket.losses();
        if forgotten != self.forgotten {
            self.forgotten = forgotten;
            self.acknowledged = 0;
            self.named.clear();
            self.oracle.forget();
        }
        for kept in kept {
            self.keep(kept)?;
        }
        let answers = std::mem::take(&mut *self.answers.lock().expect("no panic"));
        let mut promised = false;
        for (version, answer) in answers {
            promised |= self.answered(version, answer)?;
        }
        let generation = self.cloud.bucket.generation();
        if promised || self.checked != Some(generation) {
            self.checked = Some(generation);
            self.check().await?;
        }
        Ok(())
    }

    /// Somebody was told that a point stays as it was.
    fn keep(&mut self, kept: Kept) -> Result<(), String> {
        let archive = self.cloud.bucket.archive();
        match kept {
            Kept::ForkOrigin(id, seq) => {
                self.cloud
                    .world
                    .note(|| format!("{} begins with entry {seq}", id.name));
                let held = self.oracle.at(&archive, seq)?;
                self.forks.push((
                    id.clone(),
                    super::restored_files::under_another_id(&held, &self.cloud.id(), &id),
                ));
            }
            Kept::Named(name, seq) => {
                self.cloud
                    .world
                    .note(|| format!("entry {seq} is called {name}"));
                let held = self.oracle.at(&archive, seq)?;
                self.named.push((seq, held));
            }
        }
        self.checked = None;
        Ok(())
    }

    /// True if something was promised.
    fn answered(
        &mut self,
        version: u64,
        answer: sessiond::error::Result<FlushReport>,
    ) -> Result<bool, String> {
        let report = match answer {
            Ok(report) => report,
            Err(error)
                if error.kind() == ErrorKind::Internal
                    && !error.to_string().contains("has stopped") =>
            {
                return Err(format!("a flush failed for a fault of ours: {error}"));
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
                self.acknowledged = self.acknowledged.max(log.head);
                None
            }
            "branch" => Some(
                log.writer
                    .parse::<WriterId>()
                    .map_err(|error| error.to_string())?,
            ),
            // Nothing was written: the files equal what another wrote.
            _ => return Ok(false),
        };
        self.outcome.acks += 1;
        self.oracle.acknowledged(Ack {
            version,
            head: log.head,
            branch,
        });
        Ok(true)
    }

    /// A process that has ended, well or not.
    async fn reap(&mut self, on: usize) -> Result<(), String> {
        let Some(process) = &self.machines[on].process else {
            return Ok(());
        };
        if process.lifetime().is_dead() {
            self.outcome.crashes += 1;
            self.machines[on].kill();
            self.saw(on);
            return Ok(());
        }
        match process {
            Process::Daemon { .. } => {}
            Process::Ending { task, .. } if task.is_finished() => {
                let Some(Process::Ending { tasks, .. }) = self.machines[on].process.take() else {
                    return Ok(());
                };
                tasks.iter().for_each(tokio::task::JoinHandle::abort);
                self.machines[on].disk.watched_by(None);
            }
            Process::Restore { task, .. } if task.is_finished() => {
                let Some(Process::Restore { task, before, .. }) = self.machines[on].process.take()
                else {
                    return Ok(());
                };
                let done = task
                    .await
                    .map_err(|error| format!("a restore panicked: {error}"))?;
                self.restored(on, done, &before)?;
            }
            Process::Ending { .. } | Process::Restore { .. } => {}
        }
        Ok(())
    }

    fn restored(
        &mut self,
        on: usize,
        done: sessiond::error::Result<RestoreReport>,
        before: &Files,
    ) -> Result<(), String> {
        self.saw(on);
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
        super::restored_files::is_the_log(&report, &held, before, &placed)
    }

    /// Checks the bucket, and that a restore makes of it what the rules say.
    async fn check(&mut self) -> Result<(), String> {
        let objects = self.cloud.bucket.objects();
        let archive = self.cloud.bucket.archive();
        let expected = self.oracle.check(&archive)?;
        self.are_few(&objects, &archive)?;
        if expected.removed
            && self
                .pull(objects.clone(), &self.cloud.id(), LogPoint::Latest, None)
                .await
                .is_ok()
        {
            return Err("a removed session is restored".to_owned());
        }
        self.goes_back(&objects, &archive).await?;
        if expected.removed {
            self.named.clear();
        }
        for (seq, held) in &self.named {
            let pulled = self
                .pull(objects.clone(), &self.cloud.id(), LogPoint::Seq(*seq), None)
                .await?;
            same(&format!("entry {seq}, which has a name,"), &pulled, held)?;
        }
        for (id, held) in &self.forks {
            let pulled = self
                .pull(objects.clone(), id, LogPoint::Latest, None)
                .await?;
            same(&format!("a restore of {}", id.name), &pulled, held)?;
        }
        if let Some(held) = &expected.main {
            let pulled = self
                .pull(objects.clone(), &self.cloud.id(), LogPoint::Latest, None)
                .await?;
            same("a restore", &pulled, held)?;
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
            same(&format!("a restore of branch {writer}"), &pulled, held)?;
        }
        Ok(())
    }

    /// Upkeep that fails, hangs and is begun again leaves no more pieces than there are entries and chores that were asked for.
    fn are_few(&self, objects: &Objects, archive: &Objects) -> Result<(), String> {
        let made = objects
            .keys()
            .filter(|key| key.contains("/merge/") || key.contains("/snap/"))
            .count();
        let most = archive.len() + self.chores;
        if made <= most {
            Ok(())
        } else {
            Err(format!(
                "{made} merges of {} entries and {} chores",
                archive.len(),
                self.chores
            ))
        }
    }

    /// Whatever was merged, one can go back to an entry that is still there.
    async fn goes_back(&mut self, objects: &Objects, archive: &Objects) -> Result<(), String> {
        let directory = keys::entries_dir(&self.cloud.id());
        let there: Vec<Seq> = objects
            .keys()
            .filter(|key| key.starts_with(&directory))
            .filter_map(|key| keys::entry_seq(key))
            .collect();
        let composites = objects
            .keys()
            .any(|key| key.contains("/merge/") || key.contains("/snap/"));
        if there.is_empty() || !composites {
            return Ok(());
        }
        let seq = there[self.agents_dice.below(there.len() as u64) as usize];
        let Some(held) = self.oracle.passes(archive, seq)? else {
            return Ok(());
        };
        match self
            .pull(objects.clone(), &self.cloud.id(), LogPoint::Seq(seq), None)
            .await
        {
            Ok(pulled) => same(&format!("going back to entry {seq}"), &pulled, &held),
            Err(error) if error.contains("can no longer be restored") => Ok(()),
            Err(error) => Err(format!("going back to entry {seq}: {error}")),
        }
    }

    /// What a restore elsewhere would bring, without any fault.
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
        };
        let options = Options {
            point,
            branch: branch.cloned(),
            ..Options::default()
        };
        let restored = restore::restore(&context, id, &options).await;
        restored.map_err(|error| format!("{} cannot be restored: {error}", id.name))?;
        Ok(disk.files())
    }

    /// The faults stop: everything that is on a volume becomes durable, the index follows, and then nobody asks anything.
    async fn settle(&mut self) -> Result<(), String> {
        *self.cloud.world.fault_conditions() = FaultConditions::default();
        for on in 0..self.machines.len() {
            self.machines[on].disarm();
            self.machines[on].disk.set_full(false);
            self.machines[on].disk.set_events(Events::All);
            self.with_life(on, ProcessLifetime::wake);
        }
        for upkeep in &self.upkeeps {
            upkeep.lifetime.never_mind_the_crash();
            upkeep.lifetime.wake();
        }
        // What is still on its way arrives; what was paused and lost its session finds out.
        self.pass(Duration::from_secs(60)).await?;
        for on in 0..self.machines.len() {
            let waited = timeout(PATIENCE, async {
                while matches!(
                    self.machines[on].process,
                    Some(Process::Restore { .. } | Process::Ending { .. })
                ) {
                    self.pass(Duration::from_millis(500)).await?;
                }
                Ok::<(), String>(())
            });
            waited
                .await
                .map_err(|_| "a process does not end".to_owned())??;
            self.act(&Action::Start { on });
            self.pass(Duration::from_millis(50)).await?;
        }
        for on in 0..self.machines.len() {
            self.is_durable_soon(on).await?;
        }
        self.pass(Duration::from_secs(40)).await?;
        let before = self.cloud.bucket.traffic();
        self.pass(Duration::from_secs(600)).await?;
        if self.cloud.bucket.traffic() != before {
            return Err("an idle daemon made requests".to_owned());
        }
        self.outcome.entries = self.cloud.bucket.objects().len() as u64;
        self.comes_back_elsewhere().await
    }

    async fn is_durable_soon(&mut self, on: usize) -> Result<(), String> {
        let acks = self.outcome.acks;
        let volume = self.machines[on].volume();
        self.flush(on);
        let Some(Process::Daemon { handle, .. }) = &self.machines[on].process else {
            return Err(format!(
                "no daemon runs on volume {volume} although nothing fails"
            ));
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
        self.look().await?;
        let written = self
            .oracle
            .last(volume)
            .is_some_and(|last| last.files.values().any(|file| file.cut > 0));
        if written && report.logs.is_empty() {
            return Err(format!(
                "a flush of volume {volume} does not say where its files are"
            ));
        }
        let unclaimed = report
            .logs
            .first()
            .is_some_and(|log| log.write_target == "unclaimed");
        if written && !unclaimed && self.outcome.acks == acks {
            return Err(format!(
                "volume {volume} was flushed and nothing was acknowledged"
            ));
        }
        Ok(())
    }

    /// The index knows the log; of a branch whose writer died it may not, until somebody rebuilds it from the bucket.
    async fn index_follows(&mut self) -> Result<(), String> {
        let expected = self.oracle.entries(&self.cloud.bucket.archive())?;
        let known = |tables: &Tables, id: &LogId| -> Vec<_> {
            tables
                .entries(id)
                .into_iter()
                .map(|row| (row.branch, row.seq, row.digest))
                .collect()
        };
        let id = self.cloud.id();
        // What was begun anew needs nothing that was before, and the index may not have heard of it.
        let begins = expected.first().is_none_or(|(_, seq, _)| *seq == 1);
        if self.cloud.bucket.losses().1 > 0 || !begins {
            return self.index_knows_the_end(&expected).await;
        }
        let rows = known(&self.cloud.tables, &id);
        let (main, branches): (Vec<_>, Vec<_>) = rows
            .into_iter()
            .partition(|(branch, _, _)| branch.is_none());
        let all = expected.iter().filter(|(branch, _, _)| branch.is_none());
        if !all.eq(&main) || branches.iter().any(|row| !expected.contains(row)) {
            return Err(format!(
                "the index knows {main:?} and {branches:?}, and the bucket holds {expected:?}"
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
                "a rebuilt index knows {rows:?} and the bucket holds {expected:?}"
            ))
        }
    }

    /// Where entries were collected the index has other rows for them, and the same end.
    async fn index_knows_the_end(
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
            Err("a rebuilt index has another end".to_owned())
        }
    }

    /// A new machine takes the session over: what it gets is the log, and its agent goes on as if nothing had been.
    async fn comes_back_elsewhere(&mut self) -> Result<(), String> {
        let Some(held) = self.oracle.check(&self.cloud.bucket.archive())?.main else {
            return Ok(());
        };
        self.volumes += 1;
        self.machines
            .push(Machine::new(&self.cloud.world, self.volumes));
        let on = self.machines.len() - 1;
        let before = self.outcome.restores;
        self.act(&Action::Restore { on, wipe: false });
        self.pass(Duration::from_secs(30)).await?;
        if self.outcome.restores == before {
            return Err("a restore did not end although nothing fails".to_owned());
        }
        let placed = self.machines[on].disk.files();
        self.act(&Action::Start { on });
        self.act(&Action::Append {
            on,
            which: super::agent::Which::Transcript,
            lines: 1,
        });
        self.is_durable_soon(on).await?;
        let objects = self.cloud.bucket.objects();
        super::restored_files::only_what_is_new(
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
        super::restored_files::goes_on(&held, &now)?;
        if let Some(rotten) = super::restored_files::rotten(&objects, &self.cloud.id())
            && self
                .pull(rotten, &self.cloud.id(), LogPoint::Latest, None)
                .await
                .is_ok()
        {
            return Err(
                "a restore brings bytes that do not have the digest that the entry says".to_owned(),
            );
        }
        self.pass(Duration::from_secs(40)).await?;
        self.index_follows().await
    }
}

fn same(what: &str, got: &Files, held: &Files) -> Result<(), String> {
    let differs = got
        .keys()
        .chain(held.keys())
        .find(|path| got.get(*path) != held.get(*path));
    match differs {
        Some(path) => Err(format!("{what} brings another {path} than the log holds")),
        None => Ok(()),
    }
}
