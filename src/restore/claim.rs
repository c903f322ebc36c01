//! Claims a restored log and writes the ledger from which the daemon continues.

use std::collections::BTreeMap;

use tracing::Instrument;

use super::options::RestoreContext;
use super::report::Restored;
use crate::codec::entry::EncodedEntry;
use crate::error::Result;
use crate::log::ledger::{FileCursor, Ledger};
use crate::log::writer::LogWriter;
use crate::model::{Digest, FileMove, LogId, RelPath, Seq, TurnTracker};
use crate::store::Store;
use crate::sys::clock::new_writer_id;
use crate::sys::mutation::{Mutation, is_active};
use crate::sys::{Backoff, TRACE_TARGET};

/// Maximum number of attempts to write a claim while the store is unavailable.
const MAX_CLAIM_ATTEMPTS: u32 = 4;

/// The end of a log, after which a claim is written.
#[derive(Debug, Clone, Copy)]
pub(super) struct LogEnd {
    /// The last undamaged entry.
    pub seq: Seq,
    /// Its digest.
    pub digest: Option<Digest>,
    /// The last number in use. It is higher than `seq` if the entries after it are damaged.
    pub head: Seq,
    /// The highest checkpoint number.
    pub checkpoint: u64,
}

/// The state from which the daemon continues after a claim.
#[derive(Debug)]
pub(super) struct Takeover {
    /// The end of the log.
    pub end: LogEnd,
    /// How far each file is uploaded.
    pub files: BTreeMap<RelPath, FileCursor>,
    /// The turns so far.
    pub turns: TurnTracker,
    /// Files whose local paths differ from those in the log.
    pub moves: Vec<FileMove>,
    /// The entry to roll back to, if it is not the last one.
    pub rollback_to: Option<Seq>,
    /// The checkpoint within that entry.
    pub rollback_checkpoint: Option<u64>,
}

/// Claims the log and writes its ledger. Returns `None` if another writer appended in between.
pub(super) async fn take_over(
    context: &RestoreContext,
    id: &LogId,
    takeover: Takeover,
    mut restored: Restored,
) -> Result<Option<Restored>> {
    let end = takeover.end;
    let mut log_writer = LogWriter::unclaimed(
        new_writer_id(&context.logs.rng),
        end.seq,
        end.digest,
        context.logs.clock.now(),
    );
    log_writer.moves = takeover.moves;
    let mut ledger = Ledger::new(context.logs.store.address(), id.clone(), log_writer.clone());
    if !is_active(Mutation::ForgetRestoredCursors) {
        ledger.files = takeover.files;
        // Readers abandon an upload that another writer started.
        ledger.files.retain(|_, cursor| cursor.uploading.is_none());
    }
    ledger.turns = takeover.turns;
    log_writer.rollback_to = takeover.rollback_to;
    log_writer.rollback_checkpoint = takeover.rollback_checkpoint;
    // Before the claim: a full disk must not fence the current writer, and an attempt that loses
    // the race must know that the log holds the files it wrote.
    ledger.save(&*context.directory, true)?;
    // Any writer may append to a project's log, so there is nothing to claim.
    if !id.name.is_project() {
        restored.claim = claim(context, id, &mut log_writer, end.head)
            .instrument(tracing::info_span!(target: TRACE_TARGET, "claim"))
            .await?;
        if restored.claim.is_none() {
            return Ok(None);
        }
        restored.report.head = log_writer.seq;
    }
    restored.report.writer = Some(log_writer.writer.to_string());
    ledger.log_writer = log_writer;
    // Not synced, because the agent waits for it. After a power failure, as after an error, the ledger
    // from before the claim exists: the daemon finds the claim, and claims again.
    if let Err(error) = ledger.save(&*context.directory, false) {
        tracing::warn!(%error, "saving the ledger failed; the next daemon will claim the log again");
    }
    Ok(Some(restored))
}

/// Writes a claim. Retries while the store is unavailable: a claim that arrived without an
/// acknowledgment is found by reading it back.
async fn claim(
    context: &RestoreContext,
    id: &LogId,
    log_writer: &mut LogWriter,
    head: Seq,
) -> Result<Option<EncodedEntry>> {
    let mut backoff = Backoff::new(context.logs.rng.clone());
    loop {
        match context.logs.claim(id, log_writer, head).await {
            Ok(claimed) => return Ok(claimed),
            Err(error) => backoff.wait(error, MAX_CLAIM_ATTEMPTS).await?,
        }
    }
}
