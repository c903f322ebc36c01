//! Processes that keep the bucket clean: merging, collecting, removing, bringing back. They belong to no machine, and can end
//! or hang at any step.

use std::sync::Arc;
use std::time::Duration;

use sessiond::error::{Kind, Result};
use sessiond::log::pen::GRACE;
use sessiond::model::Seq;
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

/// Such a process.
pub struct Upkeep {
    pub life: Arc<Life>,
    pub chore: Chore,
    task: JoinHandle<Result<()>>,
}

impl Upkeep {
    /// Starts one; `acknowledged` is the last entry that somebody was told of.
    pub fn start(cloud: &Cloud, number: u64, chore: Chore, acknowledged: Seq) -> Option<Upkeep> {
        let life = Arc::new(Life::new(number, NOWHERE + number));
        let clock = HostClock::new(cloud.world.clone());
        let (logs, _) = cloud.logs(&life, clock.clone());
        let id = cloud.id();
        let scratch = Mount { disk: Disk::new(NOWHERE + number, clock), world: cloud.world.clone(), life: life.clone() };
        let task = match chore {
            Chore::Merge { from, to } => {
                let at = |percent: u64| 1 + (acknowledged.saturating_sub(1)) * percent / 100;
                let (from, to) = (at(from), at(to));
                if from >= to || acknowledged == 0 {
                    return None;
                }
                tokio::spawn(async move { compact::merge(&logs, &id, from, to).await.map(|_| ()) })
            }
            Chore::Collect { history, ttl } => {
                let hours = |hours: u64| Duration::from_secs(hours * 3600);
                let rules = Rules { history: hours(history), ttl: ttl.map(hours), grace: GRACE };
                tokio::task::spawn_local(async move {
                    let now = gc::store_time(&logs).await?;
                    gc::collect(&logs, &id, &rules, now, &scratch, false).await.map(|_| ())
                })
            }
            Chore::Remove => tokio::spawn(async move { remove::remove(&logs, &id).await.map(|_| ()) }),
            Chore::Undelete => tokio::spawn(async move { remove::undelete(&logs, &id).await.map(|_| ()) }),
        };
        Some(Upkeep { life, chore, task })
    }

    pub fn has_ended(&self) -> bool {
        self.life.is_dead() || self.task.is_finished()
    }

    /// How it ended.
    pub async fn end(self) -> std::result::Result<(), String> {
        if self.life.is_dead() {
            self.task.abort();
            return Ok(());
        }
        match self.task.await {
            Err(error) => Err(format!("{:?} panicked: {error}", self.chore)),
            Ok(Err(error)) if !matches!(error.kind(), Kind::Unavailable | Kind::NotFound | Kind::Conflict) => {
                Err(format!("{:?} failed: {error}", self.chore))
            }
            Ok(_) => Ok(()),
        }
    }
}
