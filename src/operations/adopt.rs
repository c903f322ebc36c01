//! Adopts a branch and indexes the result.

use super::index;
use crate::adopt::{self, AdoptOptions, AdoptReport};
use crate::error::Result;
use crate::model::{LogId, WriterId};
use crate::sys::scratch::ScratchDirectory;
use crate::wire::Parts;

/// Makes the branch of a writer the main line of its session.
pub async fn adopt(
    parts: &Parts,
    id: &LogId,
    writer: &WriterId,
    options: AdoptOptions,
) -> Result<AdoptReport> {
    let scratch = ScratchDirectory::new(&*parts.logs.rng);
    let (logs, profile) = (&parts.logs, &*parts.profile);
    // Boxed, because the future holds two assembled sessions.
    let adopted = adopt::adopt(logs, profile, id, writer, options, &scratch);
    let report = Box::pin(adopted).await?;
    if !options.dry_run && !report.already_adopted {
        index::update(parts, id).await;
        index::update_checkpoints(parts, id).await;
    }
    Ok(report)
}
