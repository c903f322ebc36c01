//! What all processes share: time, the fault conditions for requests, and the trace.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use sessiond::sys::Clock;
use tokio::time::{Instant, sleep};

use super::rng::SeededRng;

/// The world begins here, in microseconds since 1970.
const BEGIN: i64 = 1_800_000_000_000_000;

/// What goes wrong, in so many of a hundred requests.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FaultConditions {
    /// A write fails and has no effect.
    pub before: u8,
    /// A write takes effect and its answer is lost.
    pub after: u8,
    /// A write fails, and takes effect later.
    pub late: u8,
    /// A read or a listing fails.
    pub reads: u8,
    /// A request and its answer take up to so many milliseconds each.
    pub delay: u64,
    /// The database does not answer.
    pub index_down: bool,
    /// The database answers from a copy that is behind.
    pub index_old: bool,
    /// A statement fails, with or without effect.
    pub index: u8,
}

/// What becomes of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    Well,
    Before,
    After,
    Late(u64),
}

/// What all processes share.
pub struct World {
    began: Instant,
    fault_conditions: Mutex<FaultConditions>,
    rng: Mutex<SeededRng>,
    trace: Option<Mutex<Vec<String>>>,
}

impl World {
    pub fn new(seed: u64, traced: bool) -> Arc<World> {
        Arc::new(World {
            began: Instant::now(),
            fault_conditions: Mutex::default(),
            rng: Mutex::new(SeededRng::new(seed, 2)),
            trace: traced.then(Mutex::default),
        })
    }

    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// True time, which no process knows.
    pub fn micros(&self) -> i64 {
        BEGIN + self.elapsed().as_micros() as i64
    }

    /// The same, as the store tells it.
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

    /// What becomes of a write.
    pub fn fate_of_write(&self) -> Fate {
        let fault_conditions = self.fault_conditions().clone();
        let mut rng = self.rng();
        if rng.percent(fault_conditions.before) {
            Fate::Before
        } else if rng.percent(fault_conditions.after) {
            Fate::After
        } else if rng.percent(fault_conditions.late) {
            // Some arrive before the next try, some long after it.
            Fate::Late(if rng.coin() {
                1 + rng.below(400)
            } else {
                1 + rng.below(60_000)
            })
        } else {
            Fate::Well
        }
    }

    pub fn read_fails(&self) -> bool {
        let reads = self.fault_conditions().reads;
        self.rng().percent(reads)
    }

    /// What becomes of a statement.
    pub fn fate_of_statement(&self) -> Fate {
        let (down, faults) = {
            let fault_conditions = self.fault_conditions();
            (fault_conditions.index_down, fault_conditions.index)
        };
        let mut rng = self.rng();
        match down || rng.percent(faults) {
            true if down || rng.coin() => Fate::Before,
            true => Fate::After,
            false => Fate::Well,
        }
    }

    /// The way of a request or an answer.
    pub async fn delay(&self) {
        let most = self.fault_conditions().delay;
        if most > 0 {
            let took = self.rng().below(most);
            sleep(Duration::from_millis(took)).await;
        }
    }

    /// Adds a line to the trace, if somebody wants to read it.
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

/// The clock of one machine: true time and an error.
pub struct HostClock {
    world: Arc<World>,
    off: AtomicI64,
}

impl HostClock {
    pub fn new(world: Arc<World>) -> Arc<HostClock> {
        Arc::new(HostClock {
            world,
            off: AtomicI64::new(0),
        })
    }

    pub fn jump(&self, micros: i64) {
        self.off.store(micros, Ordering::Relaxed);
    }

    pub fn micros(&self) -> i64 {
        self.world.micros() + self.off.load(Ordering::Relaxed)
    }
}

impl Clock for HostClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_microsecond(self.micros()).expect("within a century")
    }
}
