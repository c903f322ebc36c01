//! OpenCode in the simulation: a database in memory, its mirror on a simulated volume, and the real
//! capture, log and restore.
//!
//! One machine at a time owns the session. The agent changes rows; the daemon mirrors and flushes
//! them, crashes, and is replaced by another machine. Invariant: after a takeover, every row has a
//! version that is no older than the last acknowledged one.
//!
//! `SESSIOND_SIM_OPENCODE_SEED=7` replays one seed and prints its trace.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Map, Value, json};
use sessiond::agent::opencode::OpenCode;
use sessiond::error::Result as SessiondResult;
use sessiond::mirror::database::{
    DatabaseSnapshot, DatabaseStamp, LastChange, MirrorRow, SessionDatabase, SessionInfo,
};
use sessiond::mirror::files::MirrorFiles;
use sessiond::mirror::lines::SessionRows;
use sessiond::mirror::tables::TABLES;
use sessiond::mirror::{Mirror, UpdateMode};
use sessiond::model::RelPath;
use sessiond::sys::{Directory, OpenFile};
use tokio::time::{sleep, timeout};

use super::agent::SESSION;
use super::disk::{Events, Mount};
use super::machine::{Cloud, Machine, Process};
use super::process::ProcessLifetime;
use super::rng::SeededRng;
use super::run::PATIENCE;
use super::world::{FaultConditions, World};

/// Number of seeds of a plain `cargo test`.
const SEEDS: u64 = 1_500;
const STEPS: usize = 60;

const SESSIONS: usize = 0;
const MESSAGES: usize = 1;
const PARTS: usize = 2;
/// The session of a sub-agent.
const CHILD: &str = "s1child";

type Rows = BTreeMap<(usize, String), Map<String, Value>>;

#[derive(Clone, Default)]
struct Content {
    rows: Rows,
    /// The number of the last event of each session.
    events: HashMap<String, i64>,
    changes: u64,
}

/// The agent's database. It outlives the processes of its machine.
#[derive(Default)]
struct MemoryDatabase(Mutex<Content>);

impl MemoryDatabase {
    fn content(&self) -> MutexGuard<'_, Content> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn rows(&self) -> Rows {
        self.content().rows.clone()
    }

    /// One transaction of the agent. A row gets its time up to 8 seconds before it is committed.
    fn change(&self, now_ms: i64, rng: &mut SeededRng) {
        let mut content = self.content();
        content.changes += 1;
        let updated = now_ms - rng.below(8_000) as i64;
        let session = if rng.percent(20) { CHILD } else { SESSION };
        *content.events.entry(session.to_owned()).or_default() += 1;
        for (id, parent) in [(SESSION, Value::Null), (CHILD, json!(SESSION))] {
            let row = json!({"id": id, "parent_id": parent, "time_updated": now_ms});
            content.insert(SESSIONS, id, row);
        }
        let message = format!("m{}", rng.below(6));
        let row = json!({"id": message, "session_id": session, "data": "{\"role\":\"user\"}", "time_updated": updated});
        content.insert(MESSAGES, &message, row);
        for _ in 0..1 + rng.below(4) {
            let part = format!("p{}", rng.below(12));
            if rng.percent(20) {
                content.rows.remove(&(PARTS, part));
                continue;
            }
            let text = "x".repeat(rng.below(200) as usize);
            let row = json!({"id": part, "session_id": session, "message_id": message,
                "data": format!("{}{text}", rng.next()), "time_created": now_ms, "time_updated": updated});
            content.insert(PARTS, &part, row);
        }
    }
}

impl Content {
    fn insert(&mut self, table: usize, key: &str, row: Value) {
        if let Value::Object(row) = row {
            self.rows.insert((table, key.to_owned()), row);
        }
    }
}

#[async_trait]
impl SessionDatabase for MemoryDatabase {
    fn name(&self) -> String {
        "the simulated database".to_owned()
    }

    fn stamp(&self) -> Option<DatabaseStamp> {
        let changes = self.content().changes;
        (changes > 0).then_some(DatabaseStamp([Some((changes, 0)), None]))
    }

    fn is_being_created(&self) -> bool {
        false
    }

    async fn snapshot(&self) -> SessiondResult<Box<dyn DatabaseSnapshot>> {
        Ok(Box::new(self.content().clone()))
    }

    async fn replace_session(&self, _session: &str, rows: &SessionRows) -> SessiondResult<()> {
        let mut content = self.content();
        content.changes += 1;
        content.rows = rows.rows.clone();
        Ok(())
    }
}

fn number(row: &Map<String, Value>, column: &str) -> i64 {
    row.get(column).and_then(Value::as_i64).unwrap_or(0)
}

#[async_trait]
impl DatabaseSnapshot for Content {
    async fn sessions(&mut self) -> SessiondResult<Option<HashMap<String, SessionInfo>>> {
        let sessions = self
            .rows
            .iter()
            .filter(|((table, _), _)| *table == SESSIONS);
        let info = |((_, id), row): (&(usize, String), &Map<String, Value>)| {
            let parent = row.get("parent_id").and_then(Value::as_str);
            let last_change = LastChange {
                time_ms: number(row, "time_updated"),
                event_seq: Some(self.events.get(id).copied().unwrap_or(0)),
            };
            let parent = parent.map(str::to_owned);
            (
                id.clone(),
                SessionInfo {
                    parent,
                    last_change,
                },
            )
        };
        Ok(Some(sessions.map(info).collect()))
    }

    async fn schema_line(&mut self) -> SessiondResult<String> {
        Ok("{\"schema\":{\"sql\":[],\"migrations\":{}}}\n".to_owned())
    }

    async fn project(&mut self, _session: &str) -> SessiondResult<Option<MirrorRow>> {
        Ok(None)
    }

    async fn changed_rows(
        &mut self,
        _session: &str,
        since_ms: i64,
        add: &mut (dyn FnMut(MirrorRow) -> SessiondResult<()> + Send),
    ) -> SessiondResult<()> {
        let mut rows: Vec<_> = self
            .rows
            .iter()
            .filter(|(_, row)| number(row, "time_updated") >= since_ms)
            .collect();
        rows.sort_by_key(|(key, row)| (number(row, "time_created"), *key));
        rows.into_iter().try_for_each(|((table, key), row)| {
            add(MirrorRow {
                table: *table,
                key: key.clone(),
                role: None,
                model: None,
                json: Value::Object(row.clone()).to_string(),
            })
        })
    }

    async fn row_counts(&mut self, _session: &str) -> SessiondResult<Vec<(usize, usize)>> {
        let count = |table| self.rows.keys().filter(|(of, _)| *of == table).count();
        Ok((0..TABLES.len())
            .map(|table| (table, count(table)))
            .collect())
    }

    async fn row_keys(&mut self, _session: &str) -> SessiondResult<HashSet<(usize, String)>> {
        Ok(self.rows.keys().cloned().collect())
    }

    async fn last_row_change_ms(&mut self, _session: &str) -> SessiondResult<i64> {
        let parts = self.rows.iter().filter(|((table, _), _)| *table == PARTS);
        let newest = parts.map(|(_, row)| number(row, "time_updated")).max();
        Ok(newest.unwrap_or(0))
    }

    async fn close(self: Box<Self>) {}
}

/// The mirror's files on a simulated volume. An append is two steps: a crash can leave a partial
/// line.
struct MountFiles {
    mount: Mount,
    rng: Mutex<SeededRng>,
}

fn path(session: &str) -> RelPath {
    format!("sessions/{session}.jsonl").parse().expect("plain")
}

impl MirrorFiles for MountFiles {
    fn name(&self, session: &str) -> String {
        path(session).to_string()
    }

    fn open(&self, session: &str) -> io::Result<Option<Box<dyn OpenFile>>> {
        self.mount.open(&path(session))
    }

    fn append(&self, session: &str, bytes: &[u8]) -> io::Result<()> {
        let path = path(session);
        let len = self.mount.stat(&path)?.map_or(0, |stat| stat.size);
        let split = self.rng.lock().unwrap().below(bytes.len() as u64) as usize;
        self.mount.write_at(&path, len, &bytes[..split])?;
        self.mount
            .write_at(&path, len + split as u64, &bytes[split..])
    }

    fn truncate(&self, session: &str, len: u64) -> io::Result<()> {
        self.mount.write_at(&path(session), len, &[])
    }
}

struct Run {
    cloud: Cloud,
    machine: Machine,
    database: Arc<MemoryDatabase>,
    /// The mirror of the running process.
    mirror: Option<Mirror>,
    /// The content of the database after each change on this machine.
    versions: Vec<Rows>,
    /// The last version that a flush reported as durable.
    acknowledged: usize,
    rng: SeededRng,
    lifetimes: u64,
    volumes: u64,
    takeovers: u64,
    acks: u64,
}

impl Run {
    fn new(world: &Arc<World>, seed: u64) -> Run {
        let mut cloud = Cloud::new(world.clone(), true, seed);
        cloud.profile = Arc::new(OpenCode::new(OpenCode::NAME.parse().expect("plain")));
        let mut run = Run {
            machine: Machine::new(world, 1),
            cloud,
            database: Arc::default(),
            mirror: None,
            versions: vec![Rows::new()],
            acknowledged: 0,
            rng: SeededRng::new(seed, 7),
            lifetimes: 0,
            volumes: 1,
            takeovers: 0,
            acks: 0,
        };
        run.start();
        run
    }

    fn new_lifetime(&mut self) -> u64 {
        self.lifetimes += 1;
        self.lifetimes
    }

    fn mirror(&mut self, lifetime: Arc<ProcessLifetime>) -> Mirror {
        let files = MountFiles {
            mount: Mount {
                disk: self.machine.disk.clone(),
                world: self.cloud.world.clone(),
                lifetime,
            },
            rng: Mutex::new(SeededRng::new(self.cloud.seed, 100 + self.lifetimes)),
        };
        Mirror::new(
            sessiond::sys::Disk::new(""),
            self.database.clone(),
            Arc::new(files),
        )
    }

    fn start(&mut self) {
        // The mirror's writes cause no simulated events.
        self.machine.disk.set_events(Events::Off);
        let number = self.new_lifetime();
        self.machine.start(&self.cloud, number);
        let lifetime = self
            .machine
            .process
            .as_ref()
            .map(Process::lifetime)
            .cloned();
        self.mirror = lifetime.map(|lifetime| self.mirror(lifetime));
    }

    fn restart(&mut self) {
        self.machine.kill();
        self.start();
    }

    async fn run(&mut self) -> Result<(), String> {
        for step in 0..STEPS {
            let choice = self.rng.below(100);
            self.cloud.world.note(|| format!("— {step}: {choice}"));
            match choice {
                0..50 => {
                    let now_ms = self.machine.disk.clock.micros() / 1000;
                    self.database.change(now_ms, &mut self.rng);
                    self.versions.push(self.database.rows());
                }
                50..70 => self.update(UpdateMode::IfChanged).await.map_or((), drop),
                70..82 => drop(self.flush().await),
                82..86 => {
                    let (steps, after) = (1 + self.rng.below(12), self.rng.coin());
                    self.machine.crash_in(steps, after);
                }
                86..90 => self.restart(),
                90..95 => self.change_faults(),
                _ => self.take_over().await?,
            }
            let millis = 1 + self.rng.below(3_000);
            sleep(Duration::from_millis(millis)).await;
            if self
                .machine
                .process
                .as_ref()
                .is_none_or(|process| process.lifetime().is_killed())
            {
                self.restart();
            }
        }
        self.stop_faults();
        self.restart();
        sleep(Duration::from_secs(60)).await;
        if !self.flush().await {
            return Err("the last flush failed without a fault".to_owned());
        }
        self.take_over().await?;
        if self.acks == 0 {
            return Err("no flush was acknowledged".to_owned());
        }
        Ok(())
    }

    fn change_faults(&mut self) {
        let mut percent = || (self.rng.below(3) * 10) as u8;
        let faults = FaultConditions {
            before: percent(),
            after: percent(),
            late: percent(),
            reads: percent(),
            delay: 50,
            ..FaultConditions::default()
        };
        *self.cloud.world.fault_conditions() = faults;
    }

    fn stop_faults(&mut self) {
        *self.cloud.world.fault_conditions() = FaultConditions::default();
        self.machine.disarm();
    }

    async fn update(&self, mode: UpdateMode) -> Option<()> {
        self.mirror.as_ref()?.update_files(mode).await.ok()
    }

    /// Mirrors and flushes as the control socket does. Returns whether the version is durable.
    async fn flush(&mut self) -> bool {
        let version = self.versions.len() - 1;
        if self.update(UpdateMode::Always).await.is_none() {
            return false;
        }
        let Some(Process::Daemon { handle, .. }) = &self.machine.process else {
            return false;
        };
        let session = self.cloud.id().name.session().cloned();
        let flushed = timeout(PATIENCE, handle.clone().flush(session)).await;
        let is_durable =
            matches!(&flushed, Ok(Ok(report)) if report.logs.iter().all(|log| !log.is_branch()));
        if is_durable {
            self.cloud
                .world
                .note(|| format!("version {version} is acknowledged"));
            (self.acknowledged, self.acks) = (version, self.acks + 1);
        }
        is_durable
    }

    /// Restores the session on another machine, or on this one, as `sessiond restore` does.
    async fn take_over(&mut self) -> Result<(), String> {
        self.machine.kill();
        self.stop_faults();
        // Late writes arrive.
        sleep(Duration::from_secs(61)).await;
        let before = self.versions.last().cloned().unwrap_or_default();
        let is_same_machine = self.rng.percent(30);
        if !is_same_machine {
            self.volumes += 1;
            self.machine = Machine::new(&self.cloud.world, self.volumes);
            self.database = Arc::default();
        }
        let number = self.new_lifetime();
        let mirror = self.mirror(Arc::new(ProcessLifetime::new(number, self.volumes)));
        mirror
            .update_files(UpdateMode::Always)
            .await
            .map_err(|error| error.to_string())?;
        let number = self.new_lifetime();
        self.machine.restore(&self.cloud, number);
        let Some(Process::Restore { task, .. }) = self.machine.process.take() else {
            return Err("the restore did not start".to_owned());
        };
        let restored = timeout(PATIENCE, task)
            .await
            .map_err(|_| "the restore hangs".to_owned())?
            .map_err(|error| error.to_string())?;
        match restored {
            Ok(report) => {
                self.takeovers += 1;
                if report.written() > 0 || !mirror.has_session(SESSION).await {
                    mirror
                        .update_database(SESSION)
                        .await
                        .map_err(|error| error.to_string())?;
                }
            }
            Err(error) if error.kind() == sessiond::error::ErrorKind::NotFound => {}
            Err(error) => return Err(format!("the restore failed: {error}")),
        }
        let rows = self.database.rows();
        self.check(&rows)?;
        if is_same_machine && rows != before {
            return Err("a restore on the same machine changed rows".to_owned());
        }
        (self.versions, self.acknowledged) = (vec![rows], 0);
        self.start();
        Ok(())
    }

    /// Checks that each row is as it was at the acknowledged version or later.
    fn check(&self, restored: &Rows) -> Result<(), String> {
        let candidates = &self.versions[self.acknowledged..];
        let keys: BTreeSet<_> = candidates
            .iter()
            .flat_map(Rows::keys)
            .chain(restored.keys())
            .collect();
        for key in keys {
            let row = restored.get(key);
            if !candidates.iter().any(|version| version.get(key) == row) {
                return Err(format!(
                    "row {key:?} is {row:?}, which it was not since version {}",
                    self.acknowledged
                ));
            }
        }
        Ok(())
    }
}

/// Runs the seeds in order; returns the first one that fails, and why.
pub fn first_failure(seeds: u64) -> Option<(u64, String)> {
    (0..seeds).find_map(|seed| Some((seed, simulate(seed, false).0.err()?)))
}

pub fn simulate(seed: u64, traced: bool) -> (Result<(u64, u64), String>, Vec<String>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let world = World::new(seed, traced);
        let mut run = Run::new(&world, seed);
        let done = run.run().await;
        (done.map(|()| (run.acks, run.takeovers)), world.trace())
    })
}

#[test]
fn no_seed_loses_an_acknowledged_row() {
    if let Ok(seed) = std::env::var("SESSIOND_SIM_OPENCODE_SEED") {
        let (done, trace) = simulate(seed.parse().expect("a number"), true);
        println!("{}", trace.join("\n"));
        return done.map_or_else(|error| panic!("{error}"), drop);
    }
    let threads = std::thread::available_parallelism().map_or(2, std::num::NonZero::get) as u64;
    let totals = Mutex::new((0, 0));
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let totals = &totals;
            scope.spawn(move || {
                for seed in (thread..SEEDS).step_by(threads as usize) {
                    let (acks, takeovers) = simulate(seed, false).0.unwrap_or_else(|error| {
                        panic!("SESSIOND_SIM_OPENCODE_SEED={seed} cargo test --test sim opencode: {error}")
                    });
                    let mut totals = totals.lock().unwrap();
                    *totals = (totals.0 + acks, totals.1 + takeovers);
                }
            });
        }
    });
    let (acks, takeovers) = totals.into_inner().unwrap();
    println!("{SEEDS} seeds: {acks} acknowledged flushes, {takeovers} takeovers");
    // A simulation in which little happens proves nothing.
    assert!(acks > 3 * SEEDS && takeovers > 2 * SEEDS);
}
