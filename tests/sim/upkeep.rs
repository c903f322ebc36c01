//! Processes that keep the bucket clean: merging, collecting, removing, bringing back. They belong to no machine, and can end
//! or hang at any step.

use std::sync::Arc;
use std::time::Duration;

use sessiond::error::{ErrorKind, Result};
use sessiond::log::writer::GRACE;
use sessiond::model::{LogId, LogPoint, Seq};
use sessiond::restore::fork;
use sessiond::restore::point::{self, ResolvedPoint};
use sessiond::upkeep::collect::Rules;
use sessiond::upkeep::{compact, gc, remove};
use tokio::task::JoinHandle;

use super::disk::{Disk, Mount};
use super::life::Life;
use super::machine::Cloud;
use super::schedule::Chore;
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
    pub life: Arc<Life>,
    pub chore: Chore,
    task: JoinHandle<Result<Option<Kept>>>,
}

impl Upkeep {
    /// Starts one; `acknowledged` is the last entry that somebody was told of.
    pub fn start(cloud: &Cloud, number: u64, chore: Chore, acknowledged: Seq) -> Option<Upkeep> {
        let life = Arc::new(Life::new(number, NOWHERE + number));
        let clock = HostClock::new(cloud.world.clone());
        let (logs, _) = cloud.logs(&life, clock.clone());
        let id = cloud.id();
        let scratch = Mount {
            disk: Disk::new(NOWHERE + number, clock),
            world: cloud.world.clone(),
            life: life.clone(),
        };
        let task = match chore {
            Chore::Merge { from, to } => {
                let at = |percent: u64| 1 + (acknowledged.saturating_sub(1)) * percent / 100;
                let (from, to) = (at(from), at(to));
                if from >= to || acknowledged == 0 {
                    return None;
                }
                tokio::spawn(
                    async move { compact::merge(&logs, &id, from, to).await.map(|_| None) },
                )
            }
            Chore::Collect { history, ttl } => {
                let hours = |hours: u64| Duration::from_secs(hours * 3600);
                let rules = Rules {
                    history: hours(history),
                    ttl: ttl.map(hours),
                    grace: GRACE,
                };
                tokio::task::spawn_local(async move {
                    let now = gc::store_time(&logs).await?;
                    gc::collect(&logs, &id, &rules, now, &scratch, false)
                        .await
                        .map(|_| None)
                })
            }
            Chore::Remove => {
                tokio::spawn(async move { remove::remove(&logs, &id).await.map(|_| None) })
            }
            Chore::Undelete => {
                tokio::spawn(async move { remove::undelete(&logs, &id).await.map(|_| None) })
            }
            Chore::ForkOrigin => {
                let new = logs.id(format!("fork-{number}").parse().expect("plain"));
                tokio::task::spawn_local(async move {
                    let goal = ResolvedPoint {
                        at: LogPoint::Latest,
                        cut: None,
                    };
                    let forked = fork::fork(&logs, &id, &goal, &new, &scratch).await?;
                    Ok(Some(Kept::ForkOrigin(new, forked.seq)))
                })
            }
            Chore::Name => {
                let (profile, name) = (cloud.profile.clone(), format!("name-{number}"));
                tokio::task::spawn_local(async move {
                    let goal = ResolvedPoint {
                        at: LogPoint::Latest,
                        cut: None,
                    };
                    let named = point::name(&logs, &*profile, &id, &name, &goal).await?;
                    Ok(named.point.seq.map(|seq| Kept::Named(name, seq)))
                })
            }
        };
        Some(Upkeep { life, chore, task })
    }

    pub fn has_ended(&self) -> bool {
        self.life.is_dead() || self.task.is_finished()
    }

    /// How it ended: what it promised to keep.
    pub async fn end(self) -> std::result::Result<Option<Kept>, String> {
        if self.life.is_dead() {
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
