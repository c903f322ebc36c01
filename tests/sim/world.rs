//! What all processes share: time, the fault conditions for requests, and the trace.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use sessiond::sys::Clock;
use tokio::time::{Instant, sleep};

use super::rng::SeededRng;

/// The start of the simulated time, in microseconds since 1970.
const BEGIN: i64 = 1_800_000_000_000_000;

/// The faults of requests, each in percent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FaultConditions {
    /// A write fails and has no effect.
    pub before: u8,
    /// A write takes effect and its reply is lost.
    pub after: u8,
    /// A write fails, and takes effect later.
    pub late: u8,
    /// A read or a listing fails.
    pub reads: u8,
    /// Maximum milliseconds of a request, and of its reply.
    pub delay: u64,
    /// The database is unreachable.
    pub index_down: bool,
    /// The database answers from a lagging replica.
    pub index_old: bool,
    /// A statement fails, with or without effect.
    pub index: u8,
}

/// What happens to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InjectedOutcome {
    Success,
    Before,
    After,
    Late(u64),
}

/// What all processes share.
pub struct World {
    started: Instant,
    fault_conditions: Mutex<FaultConditions>,
    rng: Mutex<SeededRng>,
    trace: Option<Mutex<Vec<String>>>,
}

impl World {
    pub fn new(seed: u64, traced: bool) -> Arc<World> {
        Arc::new(World {
            started: Instant::now(),
            fault_conditions: Mutex::default(),
            rng: Mutex::new(SeededRng::new(seed, 2)),
            trace: traced.then(Mutex::default),
        })
    }

    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// The true time, which no process can read.
    pub fn micros(&self) -> i64 {
        BEGIN + self.elapsed().as_micros() as i64
    }

    /// The true time, as the store reports it.
    pub fn now(&self) -> Timestamp {
        Timestamp::from_microsecond(self.micros()).expect("within a century")
    }

    pub fn fault_conditions(&self) -> MutexGuard<'_, FaultConditions> {
        self.fault_conditions
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub fn rng(&self) -> MutexGuard<'_, SeededRng> {
        self.rng.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Draws the outcome of a write.
    pub fn write_outcome(&self) -> InjectedOutcome {
        let fault_conditions = self.fault_conditions().clone();
        let mut rng = self.rng();
        if rng.percent(fault_conditions.before) {
            InjectedOutcome::Before
        } else if rng.percent(fault_conditions.after) {
            InjectedOutcome::After
        } else if rng.percent(fault_conditions.late) {
            // Some arrive before the next attempt, some long after it.
            InjectedOutcome::Late(if rng.coin() {
                1 + rng.below(400)
            } else {
                1 + rng.below(60_000)
            })
        } else {
            InjectedOutcome::Success
        }
    }

    pub fn read_fails(&self) -> bool {
        let reads = self.fault_conditions().reads;
        self.rng().percent(reads)
    }

    /// Draws the outcome of a statement.
    pub fn statement_outcome(&self) -> InjectedOutcome {
        let (down, faults) = {
            let fault_conditions = self.fault_conditions();
            (fault_conditions.index_down, fault_conditions.index)
        };
        let mut rng = self.rng();
        match down || rng.percent(faults) {
            true if down || rng.coin() => InjectedOutcome::Before,
            true => InjectedOutcome::After,
            false => InjectedOutcome::Success,
        }
    }

    /// Waits as long as a request or a reply takes.
    pub async fn delay(&self) {
        let most = self.fault_conditions().delay;
        if most > 0 {
            let took = self.rng().below(most);
            sleep(Duration::from_millis(took)).await;
        }
    }

    /// Adds a line to the trace, if there is one.
    pub fn note(&self, line: impl FnOnce() -> String) {
        if let Some(trace) = &self.trace {
            let at = self.elapsed().as_millis();
            trace
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(format!("{at:>9} ms  {}", line()));
        }
    }

    pub fn trace(&self) -> Vec<String> {
        self.trace.as_ref().map_or_else(Vec::new, |trace| {
            trace.lock().unwrap_or_else(PoisonError::into_inner).clone()
        })
    }
}

/// The clock of one machine: true time plus an offset.
pub struct HostClock {
    world: Arc<World>,
    offset: AtomicI64,
}

impl HostClock {
    pub fn new(world: Arc<World>) -> Arc<HostClock> {
        Arc::new(HostClock {
            world,
            offset: AtomicI64::new(0),
        })
    }

    pub fn jump(&self, micros: i64) {
        self.offset.store(micros, Ordering::Relaxed);
    }

    pub fn micros(&self) -> i64 {
        self.world.micros() + self.offset.load(Ordering::Relaxed)
    }
}

impl Clock for HostClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_microsecond(self.micros()).expect("within a century")
    }
}
