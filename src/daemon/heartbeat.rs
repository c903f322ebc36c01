//! The heartbeat: a request to a monitoring URL at a fixed interval, sent only while everything is
//! durable. The monitoring service raises an alarm when the requests stop for any reason.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior};

use crate::daemon::health::{HealthSnapshot, HealthState};
use crate::error::{Error, Result};
use crate::sys::counters::HeartbeatResult;
use crate::sys::outbound::OutboundEndpoint;

/// Minimum interval between two heartbeats.
const MIN_INTERVAL: Duration = Duration::from_secs(1);

/// The settings of a heartbeat.
#[derive(Debug, Clone)]
pub struct Heartbeat {
    /// The monitoring service.
    endpoint: Arc<OutboundEndpoint>,
    /// Time between two heartbeats.
    interval: Duration,
    /// Maximum age of a change that is not durable yet; an older one withholds the heartbeat.
    max_lag: Duration,
}

impl Heartbeat {
    /// Checks the settings.
    pub fn new(
        endpoint: OutboundEndpoint,
        interval: Duration,
        max_lag: Duration,
    ) -> Result<Heartbeat> {
        if interval < MIN_INTERVAL {
            return Err(Error::usage(format!(
                "invalid --heartbeat-interval value \"{interval:?}\": the minimum is {MIN_INTERVAL:?}"
            ))
            .hint("use a longer interval, such as --heartbeat-interval 60s"));
        }
        Ok(Heartbeat {
            endpoint: Arc::new(endpoint),
            interval,
            max_lag,
        })
    }

    /// Sends heartbeats forever; drop the future to stop.
    pub async fn run(self, health: Arc<HealthState>) {
        let mut ticks = tokio::time::interval_at(Instant::now(), self.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut previous = None;
        loop {
            ticks.tick().await;
            let outcome = self.send_once(&health).await;
            let result = outcome.result();
            health.counters.record_heartbeat(result, health.clock.now());
            // Only a change is logged. The reason is not compared, because its figures vary.
            if previous.replace(result) != Some(result) {
                self.log(outcome);
            }
        }
    }

    async fn send_once(&self, health: &HealthState) -> HeartbeatOutcome {
        if let Err(reason) = check_durable(&health.snapshot().await, self.max_lag) {
            return HeartbeatOutcome::Withheld(reason);
        }
        match self.endpoint.get().await {
            Ok(()) => HeartbeatOutcome::Sent,
            Err(error) => HeartbeatOutcome::Failed(error),
        }
    }

    fn log(&self, outcome: HeartbeatOutcome) {
        let to = self.endpoint.origin();
        match outcome {
            HeartbeatOutcome::Sent => {
                tracing::info!(to, interval = ?self.interval, "sending heartbeats: everything is durable")
            }
            HeartbeatOutcome::Failed(error) => {
                tracing::warn!(to, %error, "the heartbeat failed; streaming continues")
            }
            HeartbeatOutcome::Withheld(reason) => {
                tracing::warn!(
                    to,
                    reason,
                    "withholding heartbeats: not everything is durable"
                )
            }
        }
    }
}

/// The outcome of one heartbeat.
enum HeartbeatOutcome {
    Sent,
    Failed(Error),
    Withheld(String),
}

impl HeartbeatOutcome {
    fn result(&self) -> HeartbeatResult {
        match self {
            HeartbeatOutcome::Sent => HeartbeatResult::Sent,
            HeartbeatOutcome::Failed(_) => HeartbeatResult::Failed,
            HeartbeatOutcome::Withheld(_) => HeartbeatResult::Withheld,
        }
    }
}

/// Checks that every change is durable or younger than `max_lag`; returns the reason if not. The
/// changes of a fenced writer are durable once its branch holds them. The index does not count,
/// because it is derived from the store.
fn check_durable(snapshot: &HealthSnapshot, max_lag: Duration) -> Result<(), String> {
    let report = &snapshot.report;
    if !report.ready {
        let reason = report.reason.clone();
        return Err(reason.unwrap_or_else(|| report.phase.to_owned()));
    }
    let Some(streams) = snapshot.streams else {
        return Err("the streaming loop is unresponsive".to_owned());
    };
    if snapshot.has_database_error {
        return Err("the agent's database cannot be read".to_owned());
    }
    if streams.lag_max_seconds > max_lag.as_secs_f64() {
        let age = Duration::from_secs(streams.lag_max_seconds as u64);
        return Err(format!(
            "{} bytes in {} logs are not durable; the oldest change is {age:?} old",
            streams.lag_sum_bytes, streams.unflushed
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::StreamSummary;
    use crate::daemon::health::{HealthReport, IndexHealth};

    #[test]
    fn a_heartbeat_is_withheld_while_a_change_is_late_or_its_state_unknown() {
        let snapshot = |ready, lag: Option<f64>, has_database_error| HealthSnapshot {
            report: HealthReport {
                healthy: true,
                ready,
                phase: "streaming",
                reason: None,
            },
            streams: lag.map(|lag_max_seconds| StreamSummary {
                lag_max_seconds,
                unflushed: 1,
                fenced: 1,
                ..StreamSummary::default()
            }),
            index: Some(IndexHealth {
                reachable: false,
                lag_entries: 100,
            }),
            has_database_error,
        };
        let is_sent =
            |snapshot: &HealthSnapshot| check_durable(snapshot, Duration::from_secs(8)).is_ok();
        assert!(is_sent(&snapshot(true, Some(0.0), false)));
        assert!(is_sent(&snapshot(true, Some(8.0), false)));
        assert!(!is_sent(&snapshot(true, Some(8.1), false)));
        assert!(!is_sent(&snapshot(true, None, false)));
        assert!(!is_sent(&snapshot(false, Some(0.0), false)));
        assert!(!is_sent(&snapshot(true, Some(0.0), true)));
    }
}
