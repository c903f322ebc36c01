//! The health state of the process: its phase, and whether the streaming loop responds.
//!
//! Owns what "healthy" and "ready" mean. Does not own the probes that report them (`probes`) or the
//! counters (`sys/counters.rs`).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;
use tokio::time::Instant;

use crate::capture::{IndexQueue, StreamSummary, StreamerHandle};
use crate::mirror::Mirror;
use crate::sys::{Clock, Counters};

/// Time limit for a response of the streaming loop. Its longest step handles the events of tens of
/// thousands of files. A loop that takes longer than this limit is stuck.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Time limit for a response of the streaming loop to a probe, which must answer within a second.
const PROBE_TIMEOUT: Duration = Duration::from_millis(500);

/// The parts of a running service that health depends on.
#[derive(Clone)]
pub struct StreamingState {
    /// Sends commands to the streaming loop.
    pub handle: StreamerHandle,
    /// The updates that the index has not received yet.
    pub index_queue: Arc<IndexQueue>,
    /// Whether the last update of the index succeeded.
    pub index_reachable: Arc<AtomicBool>,
    /// The mirror of the agent's database, if the agent uses one.
    pub mirror: Option<Arc<Mirror>>,
}

/// The phase of the process.
#[derive(Clone, Default)]
enum Phase {
    #[default]
    Starting,
    Restoring,
    Streaming(StreamingState),
    Stopping,
    /// The agent runs, but streaming failed to start and `--on-restore-error continue` is set.
    NotStreaming,
}

impl Phase {
    fn as_str(&self) -> &'static str {
        match self {
            Phase::Starting => "starting",
            Phase::Restoring => "restoring",
            Phase::Streaming(_) => "streaming",
            Phase::Stopping => "stopping",
            Phase::NotStreaming => "not_streaming",
        }
    }
}

/// The response of the streaming loop to a health check.
#[derive(Debug, Clone, Copy, PartialEq)]
enum LoopResponse {
    Summary(StreamSummary),
    /// No response yet, but not for long.
    Busy,
    TimedOut,
    Ended,
}

/// The health of the process, as the probes report it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HealthReport {
    /// Whether the process streams, or is about to.
    pub healthy: bool,
    /// Whether the session is restored and sessiond is streaming.
    pub ready: bool,
    /// `starting`, `restoring`, `streaming`, `stopping` or `not_streaming`.
    pub phase: &'static str,
    /// Why the process is not healthy or not ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// The state of the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexHealth {
    /// Whether the last update succeeded.
    pub reachable: bool,
    /// Entries that the index lacks. A log that lacks more than one entry can count once.
    pub lag_entries: usize,
}

/// The health of the process and the state of its streams at one moment.
pub struct HealthSnapshot {
    /// The health.
    pub report: HealthReport,
    /// The state of all logs; `None` unless the streaming loop responds.
    pub streams: Option<StreamSummary>,
    /// The state of the index; `None` unless the process streams.
    pub index: Option<IndexHealth>,
    /// Whether the agent's database cannot be read.
    pub has_database_error: bool,
}

/// The health state of the process.
pub struct HealthState {
    /// When the process started.
    pub started_at: Timestamp,
    /// The counters of the process.
    pub counters: Arc<Counters>,
    /// The clock.
    pub clock: Arc<dyn Clock>,
    phase: Mutex<Phase>,
    /// The time of the first request since the last response of the streaming loop.
    unanswered_since: Mutex<Option<Instant>>,
}

impl HealthState {
    /// Creates the state of a process that starts now.
    pub fn new(clock: Arc<dyn Clock>) -> Arc<HealthState> {
        Arc::new(HealthState {
            started_at: clock.now(),
            counters: Arc::default(),
            clock,
            phase: Mutex::default(),
            unanswered_since: Mutex::default(),
        })
    }

    fn set(&self, phase: Phase) {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner) = phase;
    }

    /// Enters the phase `restoring`.
    pub fn set_restoring(&self) {
        self.set(Phase::Restoring);
    }

    /// Enters the phase `streaming`: the session is restored.
    pub fn set_streaming(&self, state: StreamingState) {
        self.set(Phase::Streaming(state));
    }

    /// Enters the phase `stopping`: the final flush has begun.
    pub fn set_stopping(&self) {
        self.set(Phase::Stopping);
    }

    /// Enters the phase `not_streaming`: the agent runs without sessiond.
    pub fn set_not_streaming(&self) {
        self.set(Phase::NotStreaming);
    }

    /// Checks the streaming loop for a probe.
    pub async fn report(&self) -> HealthReport {
        self.snapshot_within(PROBE_TIMEOUT).await.report
    }

    /// Checks the streaming loop, and returns the state of everything.
    pub async fn snapshot(&self) -> HealthSnapshot {
        self.snapshot_within(RESPONSE_TIMEOUT).await
    }

    /// Asks the streaming loop for its state.
    async fn ask(&self, state: &StreamingState, timeout: Duration) -> LoopResponse {
        let asked = Instant::now();
        let response = tokio::time::timeout(timeout, state.handle.summary()).await;
        let mut unanswered_since = self
            .unanswered_since
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        match response {
            Ok(response) => {
                *unanswered_since = None;
                response.map_or(LoopResponse::Ended, LoopResponse::Summary)
            }
            Err(_) => {
                let since = *unanswered_since.get_or_insert(asked);
                match since.elapsed() >= RESPONSE_TIMEOUT {
                    true => LoopResponse::TimedOut,
                    false => LoopResponse::Busy,
                }
            }
        }
    }

    async fn snapshot_within(&self, timeout: Duration) -> HealthSnapshot {
        let phase = self
            .phase
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let Phase::Streaming(state) = &phase else {
            return HealthSnapshot {
                report: assess(&phase, None),
                streams: None,
                index: None,
                has_database_error: false,
            };
        };
        let response = self.ask(state, timeout).await;
        HealthSnapshot {
            report: assess(&phase, Some(response)),
            streams: match response {
                LoopResponse::Summary(summary) => Some(summary),
                LoopResponse::Busy | LoopResponse::TimedOut | LoopResponse::Ended => None,
            },
            index: Some(IndexHealth {
                reachable: state.index_reachable.load(Ordering::Relaxed),
                lag_entries: state.index_queue.backlog(),
            }),
            has_database_error: state
                .mirror
                .as_ref()
                .is_some_and(|mirror| mirror.failure().is_some()),
        }
    }
}

/// Decides health and readiness. An outage of the store or the index does not count: a restart
/// would not end it, and the agent continues without them.
fn assess(phase: &Phase, response: Option<LoopResponse>) -> HealthReport {
    let unresponsive =
        || format!("the streaming loop is unresponsive: no response for {RESPONSE_TIMEOUT:?}");
    let (healthy, ready, reason) = match (phase, response) {
        (Phase::Starting, _) => (true, false, Some("streaming has not started".to_owned())),
        (Phase::Restoring, _) => (true, false, Some("a restore is in progress".to_owned())),
        (Phase::Streaming(_), Some(LoopResponse::Ended)) => (
            false,
            false,
            Some("the streaming loop has ended".to_owned()),
        ),
        (Phase::Streaming(_), Some(LoopResponse::TimedOut)) => (false, false, Some(unresponsive())),
        (Phase::Streaming(_), _) => (true, true, None),
        (Phase::Stopping, _) => (true, false, Some("the final flush is running".to_owned())),
        (Phase::NotStreaming, _) => {
            let reason = "streaming failed to start; see stderr of sessiond for the error";
            (true, false, Some(reason.to_owned()))
        }
    };
    HealthReport {
        healthy,
        ready,
        phase: phase.as_str(),
        reason,
    }
}
