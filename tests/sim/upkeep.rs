//! Maintenance processes: compaction, garbage collection, removal and undelete. They belong to no
//! machine, and can end or hang at any step.

use std::sync::Arc;
use std::time::Duration;

use sessiond::error::{ErrorKind, Result};
use sessiond::fork;
use sessiond::log::writer::GRACE;
use sessiond::model::{LogId, ResolvedPoint, Seq};
use sessiond::sessions::point;
use sessiond::upkeep::collect::RetentionPolicy;
use sessiond::upkeep::{compact, gc, remove};
use tokio::task::JoinHandle;

use super::disk::{Disk, Mount};
use super::machine::Cloud;
use super::process::ProcessLifetime;
use super::schedule::MaintenanceTask;
use super::world::HostClock;

/// Volumes from this number on belong to no machine.
const FIRST_VOLUME: u64 = 1_000_000;

/// A point that must stay restorable.
pub enum ProtectedPoint {
    /// The new session, and the entry it is forked from.
    Fork(LogId, Seq),
    /// The checkpoint, and its entry.
    Checkpoint(String, Seq),
}

/// A maintenance process.
pub struct Upkeep {
    pub lifetime: Arc<ProcessLifetime>,
    pub task_kind: MaintenanceTask,
    task: JoinHandle<Result<Option<ProtectedPoint>>>,
}

impl Upkeep {
    /// Starts one. A merge covers a range up to the last acknowledged entry.
    pub fn start(
        cloud: &Cloud,
        number: u64,
        task_kind: MaintenanceTask,
        last_acknowledged: Seq,
    ) -> Option<Upkeep> {
        let lifetime = Arc::new(ProcessLifetime::new(number, FIRST_VOLUME + number));
        let clock = HostClock::new(cloud.world.clone());
        let (logs, _) = cloud.logs(&lifetime, clock.clone());
        let id = cloud.id();
        let scratch = Mount {
            disk: Disk::new(FIRST_VOLUME + number, clock),
            world: cloud.world.clone(),
            lifetime: lifetime.clone(),
        };
        let task = match task_kind {
            MaintenanceTask::Merge { from, to } => {
                let at = |percent: u64| 1 + (last_acknowledged.saturating_sub(1)) * percent / 100;
                let (from, to) = (at(from), at(to));
                if from >= to || last_acknowledged == 0 {
                    return None;
                }
                tokio::spawn(async move {
                    compact::merge_range(&logs, &id, from, to)
                        .await
                        .map(|_| None)
                })
            }
            MaintenanceTask::Collect { history, ttl } => {
                let hours = |hours: u64| Duration::from_secs(hours * 3600);
                let policy = RetentionPolicy {
                    history: hours(history),
                    ttl: ttl.map(hours),
                    grace: GRACE,
                };
                tokio::task::spawn_local(async move {
                    let now = gc::store_time(&logs).await?;
                    gc::collect(&logs, &id, &policy, now, &scratch, false)
                        .await
                        .map(|_| None)
                })
            }
            MaintenanceTask::Remove => {
                tokio::spawn(async move { remove::remove(&logs, &id).await.map(|_| None) })
            }
            MaintenanceTask::Undelete => {
                tokio::spawn(async move { remove::undelete(&logs, &id).await.map(|_| None) })
            }
            MaintenanceTask::Fork => {
                let new = logs.id(format!("fork-{number}").parse().expect("plain"));
                tokio::task::spawn_local(async move {
                    let point = ResolvedPoint::default();
                    let forked = fork::fork(&logs, &id, &point, &new, &scratch).await?;
                    Ok(Some(ProtectedPoint::Fork(new, forked.seq)))
                })
            }
            MaintenanceTask::NameCheckpoint => {
                let (profile, name) = (cloud.profile.clone(), format!("name-{number}"));
                tokio::task::spawn_local(async move {
                    let point = ResolvedPoint::default();
                    let named = point::create(&logs, &*profile, &id, &name, &point).await?;
                    Ok(named
                        .checkpoint
                        .seq
                        .map(|seq| ProtectedPoint::Checkpoint(name, seq)))
                })
            }
        };
        Some(Upkeep {
            lifetime,
            task_kind,
            task,
        })
    }

    pub fn has_ended(&self) -> bool {
        self.lifetime.is_killed() || self.task.is_finished()
    }

    /// Waits for it to end. Returns the point that it reported as protected.
    pub async fn end(self) -> std::result::Result<Option<ProtectedPoint>, String> {
        if self.lifetime.is_killed() {
            self.task.abort();
            return Ok(None);
        }
        match self.task.await {
            Err(error) => Err(format!("{:?} panicked: {error}", self.task_kind)),
            Ok(Err(error))
                if !matches!(
                    error.kind(),
                    ErrorKind::Unavailable | ErrorKind::NotFound | ErrorKind::Conflict
                ) =>
            {
                Err(format!("{:?} failed: {error}", self.task_kind))
            }
            Ok(promise) => Ok(promise.unwrap_or_default()),
        }
    }
}
