//! How this process is doing: what it is about, whether what streams still answers, and what that means for whoever asks.
//!
//! Owns the verdicts. Does not own how they are asked for (`probes`) or what is counted (`sys/counts.rs`).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;

use crate::capture::{Feed, StreamSummary, StreamerHandle};
use crate::mirror::Mirror;
use crate::sys::{Clock, Counters};

/// What streams answers between two steps; its longest is a scan, which takes a second where there are tens of thousands of
/// files. Who does not answer for this long is stuck.
const PATIENCE: Duration = Duration::from_secs(5);

/// What runs.
#[derive(Clone)]
pub struct Running {
    /// Speaks to what streams.
    pub handle: StreamerHandle,
    /// What the index is to learn.
    pub feed: Arc<Feed>,
    /// Whether the index answered the last time.
    pub index_answers: Arc<AtomicBool>,
    /// What follows the agent's own database, if it has one.
    pub mirror: Option<Arc<Mirror>>,
}

/// What this process is about.
#[derive(Clone, Default)]
enum Phase {
    #[default]
    Starting,
    Restoring,
    Streaming(Running),
    Stopping,
    /// The agent runs, and nothing is streamed, because that was asked for.
    Without,
}

/// What streams, as it was heard.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Heard {
    StreamSummary(StreamSummary),
    Silence,
    Gone,
}

/// What is said to who asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// What streams does so, or is about to.
    pub healthy: bool,
    /// Everything is restored, and streaming.
    pub ready: bool,
    /// What this process is about: `starting`, `restoring`, `streaming`, `stopping`, `not streaming`.
    pub phase: &'static str,
    /// Why it is not healthy, or not ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// All that can be said at one moment.
pub struct HealthSnapshot {
    /// In short.
    pub verdict: Verdict,
    /// How all logs stand; none where nothing answers.
    pub overview: Option<StreamSummary>,
    /// Whether the index answered the last time, and what it is behind by.
    pub index: Option<(bool, usize)>,
    /// The agent's own database cannot be read.
    pub database_fails: bool,
}

/// How this process is doing.
pub struct HealthState {
    /// When it started.
    pub since: Timestamp,
    /// What happened so far.
    pub counts: Arc<Counters>,
    /// Tells the time.
    pub clock: Arc<dyn Clock>,
    phase: Mutex<Phase>,
}

impl HealthState {
    /// Begins.
    pub fn new(clock: Arc<dyn Clock>) -> Arc<HealthState> {
        Arc::new(HealthState {
            since: clock.now(),
            counts: Arc::default(),
            clock,
            phase: Mutex::default(),
        })
    }

    fn set(&self, phase: Phase) {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner) = phase;
    }

    /// A session is being restored.
    pub fn restoring(&self) {
        self.set(Phase::Restoring);
    }

    /// Everything is restored and streaming.
    pub fn streaming(&self, running: Running) {
        self.set(Phase::Streaming(running));
    }

    /// The final flush has begun.
    pub fn stopping(&self) {
        self.set(Phase::Stopping);
    }

    /// The agent runs without us, as was asked for.
    pub fn without(&self) {
        self.set(Phase::Without);
    }

    /// Looks.
    pub async fn look(&self) -> HealthSnapshot {
        let phase = self
            .phase
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let Phase::Streaming(running) = &phase else {
            return HealthSnapshot {
                verdict: verdict(&phase, None),
                overview: None,
                index: None,
                database_fails: false,
            };
        };
        let heard = match tokio::time::timeout(PATIENCE, running.handle.overview()).await {
            Ok(Ok(overview)) => Heard::StreamSummary(overview),
            Ok(Err(_)) => Heard::Gone,
            Err(_) => Heard::Silence,
        };
        HealthSnapshot {
            verdict: verdict(&phase, Some(heard)),
            overview: if let Heard::StreamSummary(overview) = heard {
                Some(overview)
            } else {
                None
            },
            index: Some((
                running.index_answers.load(Ordering::Relaxed),
                running.feed.behind(),
            )),
            database_fails: running
                .mirror
                .as_ref()
                .is_some_and(|mirror| mirror.failure().is_some()),
        }
    }
}

/// Pure: what is said. A store or a database that is away changes nothing here: restarting us would not bring it back, and the
/// agent does without.
fn verdict(phase: &Phase, heard: Option<Heard>) -> Verdict {
    let said = |healthy, ready, phase, why: Option<&str>| Verdict {
        healthy,
        ready,
        phase,
        why: why.map(str::to_owned),
    };
    match (phase, heard) {
        (Phase::Starting, _) => said(true, false, "starting", Some("streaming has not begun")),
        (Phase::Restoring, _) => said(
            true,
            false,
            "restoring",
            Some("the session is being restored"),
        ),
        (Phase::Streaming(_), Some(Heard::Gone)) => {
            said(false, false, "streaming", Some("what streams has ended"))
        }
        (Phase::Streaming(_), Some(Heard::Silence)) => said(
            false,
            false,
            "streaming",
            Some(&format!("what streams has not answered for {PATIENCE:?}")),
        ),
        (Phase::Streaming(_), _) => said(true, true, "streaming", None),
        (Phase::Stopping, _) => said(true, false, "stopping", Some("the final flush")),
        (Phase::Without, _) => said(
            true,
            false,
            "not streaming",
            Some("streaming failed to start; the log says why"),
        ),
    }
}
