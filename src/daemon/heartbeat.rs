//! The heartbeat: a server somewhere is called once in an interval, while everything is durable and only then, so that somebody
//! is told when the calls stop, whatever the reason.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior};

use crate::daemon::health::{HealthSnapshot, HealthState};
use crate::error::{Error, Result};
use crate::sys::outbound::Outbound;

/// How and where.
#[derive(Debug, Clone)]
pub struct Heartbeat {
    /// The server.
    pub server: Arc<Outbound>,
    /// From one call to the next.
    pub interval: Duration,
    /// What is not durable for longer than this keeps the call back.
    pub allowance: Duration,
}

/// The shortest interval.
const SHORTEST: Duration = Duration::from_secs(1);

impl Heartbeat {
    /// Checks what was asked for.
    pub fn new(server: Outbound, interval: Duration, allowance: Duration) -> Result<Heartbeat> {
        if interval < SHORTEST {
            return Err(Error::usage(format!(
                "--heartbeat-interval {interval:?}: at least {SHORTEST:?}"
            )));
        }
        Ok(Heartbeat {
            server: Arc::new(server),
            interval,
            allowance,
        })
    }

    /// Calls for ever; drop it to stop.
    pub async fn run(self, vitals: Arc<HealthState>) {
        let mut ticks = tokio::time::interval_at(Instant::now(), self.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut before = None;
        loop {
            ticks.tick().await;
            let came = self.once(&vitals).await;
            // Only a change is told; the reason is not part of it, for its figures move.
            let now = std::mem::discriminant(&came);
            if before.replace(now) == Some(now) {
                continue;
            }
            let to = self.server.place();
            match came {
                HeartbeatOutcome::Heard => {
                    tracing::info!(to, interval = ?self.interval, "heartbeat: everything is durable")
                }
                HeartbeatOutcome::Failed(error) => {
                    tracing::warn!(to, %error, "the heartbeat is not heard; streaming goes on")
                }
                HeartbeatOutcome::Withheld(why) => {
                    tracing::warn!(to, why, "no heartbeat: not everything is durable")
                }
            }
        }
    }

    async fn once(&self, vitals: &HealthState) -> HeartbeatOutcome {
        if let Err(why) = durable(&vitals.look().await, self.allowance) {
            vitals.counts.note(|tally| tally.withheld_beats += 1);
            return HeartbeatOutcome::Withheld(why);
        }
        match self.server.get().await {
            Ok(()) => {
                let now = vitals.clock.now();
                vitals.counts.note(|tally| {
                    tally.beats += 1;
                    tally.beat_at = Some(now);
                });
                HeartbeatOutcome::Heard
            }
            Err(error) => {
                vitals.counts.note(|tally| tally.missed_beats += 1);
                HeartbeatOutcome::Failed(error)
            }
        }
    }
}

/// What became of a call.
enum HeartbeatOutcome {
    Heard,
    Failed(Error),
    Withheld(String),
}

/// Pure: whether everything is durable, or so new that it is about to be; if not, why. What a writer that lost its session has is
/// durable once it is in its branch. The index does not count: it is a view.
fn durable(look: &HealthSnapshot, allowance: Duration) -> Result<(), String> {
    if !look.verdict.ready {
        return Err(look
            .verdict
            .why
            .clone()
            .unwrap_or_else(|| look.verdict.phase.to_owned()));
    }
    let Some(all) = look.overview else {
        return Err("what streams does not answer".to_owned());
    };
    if look.database_fails {
        return Err("the agent's database cannot be read".to_owned());
    }
    if all.lag_max_seconds > allowance.as_secs_f64() {
        let age = Duration::from_secs(all.lag_max_seconds as u64);
        return Err(format!(
            "{} bytes of {} sessions wait, the oldest for {age:?}",
            all.lag_sum_bytes, all.unflushed
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::StreamSummary;
    use crate::daemon::health::Verdict;

    #[test]
    fn what_is_late_or_unknown_keeps_it_back_and_what_is_new_does_not() {
        let look = |ready, lag: Option<f64>, database_fails| HealthSnapshot {
            verdict: Verdict {
                healthy: true,
                ready,
                phase: "streaming",
                why: None,
            },
            overview: lag.map(|lag_max_seconds| StreamSummary {
                lag_max_seconds,
                unflushed: 1,
                fenced: 1,
                ..StreamSummary::default()
            }),
            index: Some((false, 100)),
            database_fails,
        };
        let beats = |look: &HealthSnapshot| durable(look, Duration::from_secs(8)).is_ok();
        assert!(beats(&look(true, Some(0.0), false)) && beats(&look(true, Some(8.0), false)));
        assert!(!beats(&look(true, Some(8.1), false)) && !beats(&look(true, None, false)));
        assert!(!beats(&look(false, Some(0.0), false)) && !beats(&look(true, Some(0.0), true)));
    }
}
