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

/// Volumes of these numbers are nobody's.
const NOWHERE: u64 = 1_000_000;

/// A point that must stay as it was.
pub enum Kept {
    /// Another session begins with this entry.
    ForkOrigin(LogId, Seq),
    /// This entry has a name.
    Named(String, Seq),
}

/// Such a process.
pub struct Upkeep {
    pub lifetime: Arc<ProcessLifetime>,
    pub chore: MaintenanceTask,
    task: JoinHandle<Result<Option<Kept>>>,
}

impl Upkeep {
    /// Starts one; `acknowledged` is the last entry that somebody was told of.
    pub fn start(
        cloud: &Cloud,
        number: u64,
        chore: MaintenanceTask,
        acknowledged: Seq,
    ) -> Option<Upkeep> {
        let lifetime = Arc::new(ProcessLifetime::new(number, NOWHERE + number));
        let clock = HostClock::new(cloud.world.clone());
        let (logs, _) = cloud.logs(&lifetime, clock.clone());
        let id = cloud.id();
        let scratch = Mount {
            disk: Disk::new(NOWHERE + number, clock),
            world: cloud.world.clone(),
            lifetime: lifetime.clone(),
        };
        let task = match chore {
            MaintenanceTask::Merge { from, to } => {
                let at = |percent: u64| 1 + (acknowledged.saturating_sub(1)) * percent / 100;
                let (from, to) = (at(from), at(to));
                if from >= to || acknowledged == 0 {
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
                    include_archived: false,
                    include_checkpoints: true,
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
            MaintenanceTask::ForkOrigin => {
                let new = logs.id(format!("fork-{number}").parse().expect("plain"));
                tokio::task::spawn_local(async move {
                    let point = ResolvedPoint::default();
                    let forked = fork::fork(&logs, &id, &point, &new, &scratch).await?;
                    Ok(Some(Kept::ForkOrigin(new, forked.seq)))
                })
            }
            MaintenanceTask::Name => {
                let (profile, name) = (cloud.profile.clone(), format!("name-{number}"));
                tokio::task::spawn_local(async move {
                    let point = ResolvedPoint::default();
                    let named = point::create(&logs, &*profile, &id, &name, &point).await?;
                    Ok(named.checkpoint.seq.map(|seq| Kept::Named(name, seq)))
                })
            }
        };
        Some(Upkeep {
            lifetime,
            chore,
            task,
        })
    }

    pub fn has_ended(&self) -> bool {
        self.lifetime.is_dead() || self.task.is_finished()
    }

    /// How it ended: what it promised to keep.
    pub async fn end(self) -> std::result::Result<Option<Kept>, String> {
        if self.lifetime.is_dead() {
            self.task.abort();
            return Ok(None);
        }
        match self.task.await {
            Err(error) => Err(format!("{:?} panicked: {error}", self.chore)),
            Ok(Err(error))
                if !matches!(
                    error.kind(),
                    ErrorKind::Unavailable | ErrorKind::NotFound | ErrorKind::Conflict
                ) =>
            {
                Err(format!("{:?} failed: {error}", self.chore))
            }
            Ok(kept) => Ok(kept.unwrap_or_default()),
        }
    }
}
