//! The order of plaintext and encrypted segments in a log, which a reader checks.
//!
//! Owns the order. Does not own which plaintext is accepted (`store/encrypted/policy.rs`).

use std::collections::BTreeSet;

use super::Logs;
use super::segments::{Granularity, Segment, select_segments};
use crate::error::Result;
use crate::model::{LogId, Seq, WriterId};
use crate::store::encrypted::policy::Protection;

/// Rejects plaintext that follows or replaces an encrypted segment of its log: whoever can write to
/// the bucket can write plaintext, but cannot encrypt it as the previous writers did.
pub struct ProtectionOrder<'a> {
    logs: &'a Logs,
    id: &'a LogId,
    listed: &'a [Segment],
    has_encrypted: bool,
}

impl<'a> ProtectionOrder<'a> {
    /// The order of the segments of `listed` after entry `after`.
    pub async fn after(
        logs: &'a Logs,
        id: &'a LogId,
        listed: &'a [Segment],
        after: Seq,
    ) -> Result<ProtectionOrder<'a>> {
        let mut order = ProtectionOrder {
            logs,
            id,
            listed,
            has_encrypted: false,
        };
        if after > 0 && logs.store.policy().depends_on_order() {
            let before = select_segments(listed, 0, after, Granularity::Coarse, &BTreeSet::new());
            order.has_encrypted = order.is_encrypted(before.last()).await?;
        }
        Ok(order)
    }

    /// Checks the next segment of the log, or of the branch of a writer.
    pub async fn push(
        &mut self,
        segment: &Segment,
        branch: Option<&WriterId>,
        is_encrypted: bool,
    ) -> Result<()> {
        let policy = self.logs.store.policy();
        if !is_encrypted && (self.has_encrypted || self.replaces_encrypted(segment).await?) {
            let key = segment.key_in(self.id, branch);
            policy
                .check_plaintext(true)
                .map_err(|error| error.context(format_args!("read {key}")))?;
        }
        self.has_encrypted |= is_encrypted;
        Ok(())
    }

    /// Whether the newest segment that a merge or a snapshot covers exists and is encrypted.
    async fn replaces_encrypted(&self, segment: &Segment) -> Result<bool> {
        if !segment.is_compacted() || !self.logs.store.policy().depends_on_order() {
            return Ok(false);
        }
        let covered = self.listed.iter().filter(|other| segment.contains(other));
        self.is_encrypted(covered.max_by_key(|other| other.last_seq))
            .await
    }

    async fn is_encrypted(&self, segment: Option<&Segment>) -> Result<bool> {
        let Some(segment) = segment else {
            return Ok(false);
        };
        let protection = self.logs.store.protection_of(&segment.key(self.id)).await?;
        Ok(protection.is_some_and(Protection::is_encrypted))
    }
}
