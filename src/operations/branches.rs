//! The branches of a session, and which of them were adopted.

use serde::Serialize;

use crate::error::Result;
use crate::log::branches::Branch;
use crate::log::read::ReadOptions;
use crate::log::state::LogState;
use crate::model::{LogId, Seq};
use crate::wire::Parts;

/// A branch, and the entry of the main line that adopted it.
#[derive(Debug, Serialize, schemars::JsonSchema)]
pub struct ListedBranch {
    /// The branch.
    #[serde(flatten)]
    pub branch: Branch,
    /// None if it was not adopted, or not with all its entries.
    pub adopted_at: Option<Seq>,
}

/// Lists the branches of a session, oldest first.
pub async fn branches(parts: &Parts, id: &LogId) -> Result<Vec<ListedBranch>> {
    let branches = parts.logs.branches(id).await?;
    let adopted = match branches.is_empty() {
        true => Vec::new(),
        false => {
            let options = ReadOptions::default();
            let main = parts.logs.read_log(id, options, LogState::default).await?;
            main.sink.adopted
        }
    };
    let listed = branches.into_iter().map(|branch| {
        let adopted_at = adopted
            .iter()
            .rfind(|adopted| adopted.writer == branch.writer && adopted.branch_seq == branch.head)
            .and_then(|adopted| adopted.seq);
        ListedBranch { branch, adopted_at }
    });
    Ok(listed.collect())
}
