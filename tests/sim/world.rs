//! What all processes share: time, the weather that makes requests fail, and the trace of what happened.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use sessiond::sys::Clock;
use tokio::time::{Instant, sleep};

use super::dice::Dice;

/// The world begins here, in microseconds since 1970.
const BEGIN: i64 = 1_800_000_000_000_000;

/// What goes wrong, in so many of a hundred requests.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Weather {
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
    weather: Mutex<Weather>,
    dice: Mutex<Dice>,
    trace: Option<Mutex<Vec<String>>>,
}

impl World {
    pub fn new(seed: u64, traced: bool) -> Arc<World> {
        Arc::new(World {
            began: Instant::now(),
            weather: Mutex::default(),
            dice: Mutex::new(Dice::new(seed, 2)),
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

    pub fn weather(&self) -> MutexGuard<'_, Weather> {
        self.weather.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn dice(&self) -> MutexGuard<'_, Dice> {
        self.dice.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What becomes of a write.
    pub fn fate_of_write(&self) -> Fate {
        let weather = self.weather().clone();
        let mut dice = self.dice();
        if dice.percent(weather.before) {
            Fate::Before
        } else if dice.percent(weather.after) {
            Fate::After
        } else if dice.percent(weather.late) {
            // Some arrive before the next try, some long after it.
            Fate::Late(if dice.coin() {
                1 + dice.below(400)
            } else {
                1 + dice.below(60_000)
            })
        } else {
            Fate::Well
        }
    }

    pub fn read_fails(&self) -> bool {
        let reads = self.weather().reads;
        self.dice().percent(reads)
    }

    /// What becomes of a statement.
    pub fn fate_of_statement(&self) -> Fate {
        let (down, faults) = {
            let weather = self.weather();
            (weather.index_down, weather.index)
        };
        let mut dice = self.dice();
        match down || dice.percent(faults) {
            true if down || dice.coin() => Fate::Before,
            true => Fate::After,
            false => Fate::Well,
        }
    }

    /// The way of a request or an answer.
    pub async fn delay(&self) {
        let most = self.weather().delay;
        if most > 0 {
            let took = self.dice().below(most);
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
