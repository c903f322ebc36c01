//! Verifies one log, or all logs of an agent.

use crate::error::Result;
use crate::sessions::find;
use crate::sys::scratch::ScratchDirectory;
use crate::verify::{self, VerifyReport};
use crate::wire::Parts;

/// Verifies the session `id`, or every log of the agent. Passes each report to `on_report` as soon
/// as it is complete.
pub async fn verify(
    parts: &Parts,
    id: Option<&str>,
    deep: bool,
    on_report: impl FnMut(&VerifyReport) -> Result<()>,
) -> Result<Vec<VerifyReport>> {
    let logs = &parts.logs;
    let ids = match id {
        Some(id) => vec![find::by_id(logs, id).await?],
        None => {
            let names = logs.log_names("").await?;
            names.into_iter().map(|name| logs.id(name)).collect()
        }
    };
    let scratch = ScratchDirectory::new(&*logs.rng);
    verify::verify_all(logs, &ids, &scratch, deep, on_report).await
}
