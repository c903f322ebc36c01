//! The protection of the objects of a log, which determines the encryption of the next one.
//!
//! Owns the queries to the store. Does not own the decision (`store/encrypted/policy.rs`).

use super::Logs;
use super::attempt::deleted_segment_error;
use super::segments::{Segment, select_all};
use super::writer::{LogWriter, WriteTarget};
use crate::error::Result;
use crate::model::{LogId, WriterId};
use crate::store::encrypted::policy::{EncryptionMode, ProtectionSummary, WriteEncryption};

impl Logs {
    /// How the newest object of a log is protected, and the newest object of a branch. An encrypted
    /// session never continues as plaintext, so the newest object decides whether the session is
    /// encrypted. Objects that cannot be decrypted count too.
    pub async fn protection(
        &self,
        id: &LogId,
        branch: Option<&WriterId>,
    ) -> Result<ProtectionSummary> {
        let log = select_all(&self.list_newest_segments(id).await?);
        let mut newest: Vec<(Segment, Option<&WriterId>)> = log
            .last()
            .map(|segment| (*segment, None))
            .into_iter()
            .collect();
        if let Some(writer) = branch {
            let segments = self.list_branch_segments(id, writer).await?;
            newest.extend(segments.last().map(|segment| (*segment, branch)));
        }
        let mut summary = ProtectionSummary::default();
        for (segment, branch) in newest {
            let protection = self
                .store
                .protection_of(&segment.key_in(id, branch))
                .await?
                .ok_or_else(|| deleted_segment_error(id, &segment))?;
            summary.add(protection);
        }
        Ok(summary)
    }

    /// How this writer's entries are encrypted. The log is queried once per writer and target, and
    /// only if the policy depends on it.
    pub(super) async fn entry_encryption(
        &self,
        id: &LogId,
        writer: &mut LogWriter,
    ) -> Result<WriteEncryption> {
        if let Some((target, encryption)) = writer.encryption
            && target == writer.target
        {
            return Ok(encryption);
        }
        let policy = self.store.policy();
        let branch = (writer.target == WriteTarget::Branch).then_some(&writer.writer);
        // The main log continues from an entry that this process has read; a branch may not.
        let depends_on_log = match branch {
            None => writer.seq > 0 && policy.depends_on_log(true),
            Some(_) => policy.depends_on_log(false),
        };
        let log = if depends_on_log {
            self.protection(id, branch).await?
        } else {
            ProtectionSummary::default()
        };
        if policy.mode() == EncryptionMode::OwnIdentities && log.has_other_recipients {
            tracing::warn!(
                %id,
                "the session is encrypted to other recipients too, but new entries are encrypted only to the configured identity; set --encrypt-to to name all recipients"
            );
        }
        let encryption = policy.for_entry(log)?;
        writer.encryption = Some((writer.target, encryption));
        Ok(encryption)
    }
}
