//! Attacks at the end of a run by someone who can write to the bucket but has no key: the newest
//! entry is deleted, or an entry is appended. A restore on a new machine must not accept either.

use std::sync::Arc;

use sessiond::codec::entry;
use sessiond::log::Fencing;
use sessiond::log::fence::FencingPolicy;
use sessiond::log::witness::{Witness, WitnessMode};
use sessiond::model::{EntryHeader, EntryKind, Seq, keys};
use sessiond::restore::{self, Options};
use sessiond::sys::Rng;

use super::bucket::{Bucket, Objects, Plain, Stored};
use super::disk::{Disk, Mount};
use super::machine::Cloud;
use super::process::ProcessLifetime;
use super::rng::{ProcessRng, SeededRng};
use super::tables::Session;
use super::world::{HostClock, World};

/// Restores on a new machine after each attack.
pub async fn check(cloud: &Cloud) -> Result<(), String> {
    // What the bucket stores, encrypted and signed.
    let mut objects = cloud.bucket.objects();
    for stored in objects.values_mut() {
        std::mem::swap(&mut stored.bytes, &mut stored.raw);
    }
    let Some((seq, newest)) = newest_entry(cloud, &objects) else {
        return Ok(());
    };
    // Without an attack, the witness raises no alarm.
    if let Err(error) = restore(cloud, objects.clone()).await {
        return match error.contains("was removed") || error.contains("was deleted") {
            true => Ok(()),
            false => Err(format!("a restore with the witness failed: {error}")),
        };
    }
    let mut truncated = objects.clone();
    truncated.remove(&keys::entry(&cloud.id(), seq));
    expect_rejected(cloud, truncated, "without its newest entry", "rolled back").await?;
    if !cloud.is_protected() {
        return Ok(());
    }
    let previous = entry::decode("newest", &newest.raw).map_err(|error| error.to_string())?;
    let header = EntryHeader {
        kind: EntryKind::Claim,
        seq: seq + 1,
        prev_seq: None,
        prev_digest: Some(previous.digest),
        covers: None,
        moves: Vec::new(),
        parts: Vec::new(),
        checkpoints: Vec::new(),
        keep_checkpoints: None,
        fork: None,
        rollback_to: None,
        rollback_checkpoint: None,
        ..previous.header
    };
    let forged = entry::encode::<Vec<u8>>(header, &[]).map_err(|error| error.to_string())?;
    let forged = Stored {
        bytes: forged.bytes.clone(),
        raw: forged.bytes,
        ..newest
    };
    objects.insert(keys::entry(&cloud.id(), seq + 1), forged);
    expect_rejected(cloud, objects, "with a forged entry", "it is not ").await
}

/// The entry with the highest number, if it is the head of the log.
fn newest_entry(cloud: &Cloud, objects: &Objects) -> Option<(Seq, Stored)> {
    let directory = keys::entries_dir(&cloud.id());
    let entries = objects
        .iter()
        .filter(|(key, _)| key.starts_with(&directory));
    let (seq, newest) = entries
        .filter_map(|(key, stored)| Some((keys::entry_seq(key)?, stored.clone())))
        .max_by_key(|(seq, _)| *seq)?;
    let is_covered = objects.keys().any(|key| {
        let last = keys::merge_range(key).map(|(_, last)| last);
        last.or(keys::snapshot_seq(key))
            .is_some_and(|last| last >= seq)
    });
    (seq > 1 && !is_covered).then_some((seq, newest))
}

async fn expect_rejected(
    cloud: &Cloud,
    objects: Objects,
    attack: &str,
    why: &str,
) -> Result<(), String> {
    match restore(cloud, objects).await {
        Ok(()) => Err(format!("a log {attack} is restored")),
        Err(error) if error.contains(why) => Ok(()),
        Err(error) => Err(format!(
            "a log {attack} is rejected for another reason: {error}"
        )),
    }
}

/// Plans a restore on a new machine, without faults.
async fn restore(cloud: &Cloud, objects: Objects) -> Result<(), String> {
    let clock = HostClock::new(cloud.world.clone());
    let disk = Disk::new(0, clock.clone());
    let quiet = World::new(0, false);
    let lifetime = Arc::new(ProcessLifetime::new(0, 0));
    let rng: Arc<dyn Rng> = Arc::new(ProcessRng::new(SeededRng::new(0, 0)));
    let index = Arc::new(Session {
        tables: cloud.tables.clone(),
        world: quiet.clone(),
        lifetime: lifetime.clone(),
    });
    let fence = Arc::new(Fencing::new(FencingPolicy::Store, index.clone(), true));
    let store = Arc::new(Plain(Bucket::of(objects)));
    let logs = cloud.logs_of(store, fence, clock, rng);
    let context = restore::RestoreContext {
        directory: Arc::new(Mount {
            disk,
            world: quiet,
            lifetime,
        }),
        profile: cloud.profile.clone(),
        logs,
    };
    let options = Options {
        claim: true,
        dry_run: true,
        witness: Witness::new(Some(index), WitnessMode::Require),
        ..Options::default()
    };
    let restored = restore::restore(&context, &cloud.id(), &options).await;
    restored.map(drop).map_err(|error| error.to_string())
}
