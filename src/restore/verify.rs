//! Checks that a log and its branches can be restored: everything a restore does, in a scratch folder, nothing placed.

use serde::Serialize;

use super::assemble::Assembly;
use super::fetch;
use crate::error::{Doing, Kind, Result};
use crate::log::Logs;
use crate::model::{At, LogId, RelPath, Seq, WriterId};
use crate::sys::Folder;

/// What was found of one log.
#[derive(Debug, Clone, Serialize)]
pub struct Verdict {
    /// The session, or `@` and the project.
    pub session: String,
    /// The last entry that can be restored.
    pub sound_to: Seq,
    /// The last entry of all.
    pub head: Seq,
    /// Objects that the log is made of.
    pub objects: usize,
    /// Files at the last sound entry.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Writers whose branches were checked too.
    pub branches: Vec<String>,
    /// What is wrong, each as a person reads it.
    pub damage: Vec<String>,
}

/// Reads every byte of a log and its branches. An error means that it could not be checked; damage is in the verdict.
pub async fn verify(logs: &Logs, id: &LogId, scratch: &dyn Folder) -> Result<Verdict> {
    let mut verdict = check(logs, id, None, scratch).await.doing_with(|| format!("verify {id}"))?;
    for writer in logs.branches(id).await? {
        let branch = check(logs, id, Some(&writer), scratch).await.doing_with(|| format!("verify branch {writer} of {id}"))?;
        verdict.damage.extend(branch.damage.into_iter().filter(|damage| !verdict.damage.contains(damage)).collect::<Vec<_>>());
        verdict.branches.push(writer.to_string());
    }
    Ok(verdict)
}

async fn check(logs: &Logs, id: &LogId, branch: Option<&WriterId>, scratch: &dyn Folder) -> Result<Verdict> {
    let plan = fetch::plan(logs, id, At::Latest, branch).await?;
    let stage: RelPath = format!("verify-{:016x}", logs.chance.next()).parse()?;
    let mut assembly = Assembly::new(scratch, stage.clone());
    let fetched = fetch::fetch(logs, &plan, &mut assembly).await;
    let verdict = Verdict {
        session: id.name.to_string(),
        sound_to: assembly.sound,
        head: plan.head,
        objects: plan.objects(),
        files: assembly.state.files.len(),
        bytes: assembly.state.files.values().map(|file| file.len).sum(),
        branches: Vec::new(),
        damage: match &fetched {
            Err(error) if error.kind() == Kind::Corrupt => vec![error.to_string()],
            _ => Vec::new(),
        },
    };
    if let Err(cause) = scratch.remove(&stage) {
        tracing::warn!(%cause, %stage, "the scratch folder was not removed");
    }
    match fetched {
        Err(error) if error.kind() != Kind::Corrupt => Err(error),
        _ => Ok(verdict),
    }
}
