//! The encryption policy: how an object is encrypted, and whether plaintext is accepted. Pure.
//!
//! Every decision depends only on the configured keys and on the protection of existing objects.
//! The policy has no state. Does not own the keys (`keyring`) or the format (`age`, in
//! `encrypted`).

use std::str::FromStr;

use super::keyring::Keyring;
pub use super::mode::EncryptionMode;
use crate::error::{Error, ErrorKind, Result};
use crate::sys::mutation::{Mutation, is_active};

/// How one stored object is protected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protection {
    /// It is stored as plaintext.
    Plaintext,
    /// It is encrypted.
    Encrypted {
        /// Whether keys other than the configured identities can decrypt it too.
        has_other_recipients: bool,
    },
}

impl Protection {
    /// Whether the object is encrypted.
    pub fn is_encrypted(self) -> bool {
        matches!(self, Protection::Encrypted { .. })
    }
}

/// How a set of stored objects is protected.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProtectionSummary {
    /// At least one object is plaintext.
    pub has_plaintext: bool,
    /// At least one object is encrypted.
    pub has_encrypted: bool,
    /// At least one object can be decrypted by keys other than the configured identities.
    pub has_other_recipients: bool,
}

impl ProtectionSummary {
    /// Adds one object.
    pub fn add(&mut self, protection: Protection) {
        match protection {
            Protection::Plaintext => self.has_plaintext = true,
            Protection::Encrypted {
                has_other_recipients,
            } => {
                self.has_encrypted = true;
                self.has_other_recipients |= has_other_recipients;
            }
        }
    }
}

impl FromIterator<Protection> for ProtectionSummary {
    fn from_iter<T: IntoIterator<Item = Protection>>(protections: T) -> Self {
        let mut summary = ProtectionSummary::default();
        for protection in protections {
            summary.add(protection);
        }
        summary
    }
}

/// How an object is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteEncryption {
    /// As plaintext.
    Plaintext,
    /// Encrypted to the recipients of the policy.
    Recipients,
}

/// Which plaintext objects are accepted when reading. Everyone who can write to the bucket can
/// insert plaintext; encrypting an object takes at least the recipients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PlaintextReads {
    /// None. The default with keys.
    Reject,
    /// Those of a session that began before encryption was configured: plaintext never follows an
    /// encrypted segment of its log. The default without keys.
    #[default]
    BeforeEncrypted,
    /// All.
    Accept,
}

impl PlaintextReads {
    /// The rule of a process with these keys, if the user sets none.
    pub fn default_for(keyring: &Keyring) -> PlaintextReads {
        match keyring.mode() {
            EncryptionMode::Plaintext => PlaintextReads::BeforeEncrypted,
            EncryptionMode::OwnIdentities | EncryptionMode::Recipients => PlaintextReads::Reject,
        }
    }
}

impl FromStr for PlaintextReads {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "reject" => Ok(PlaintextReads::Reject),
            "before-encrypted" => Ok(PlaintextReads::BeforeEncrypted),
            "accept" => Ok(PlaintextReads::Accept),
            _ => Err(Error::usage(format!(
                "invalid --plaintext value {text:?}: expected reject, before-encrypted or accept"
            ))),
        }
    }
}

/// How objects are encrypted, and whether plaintext is accepted.
#[derive(Clone, Default)]
pub struct EncryptionPolicy {
    /// The keys.
    pub keyring: Keyring,
    /// Which plaintext is accepted when reading.
    pub plaintext_reads: PlaintextReads,
}

impl EncryptionPolicy {
    /// A policy with these keys.
    pub fn new(keyring: Keyring, plaintext_reads: PlaintextReads) -> Self {
        EncryptionPolicy {
            keyring,
            plaintext_reads,
        }
    }

    /// What the configured keys mean for new objects.
    pub fn mode(&self) -> EncryptionMode {
        self.keyring.mode()
    }

    /// How this process writes new objects by default.
    pub fn default_encryption(&self) -> WriteEncryption {
        match self.mode() {
            EncryptionMode::Plaintext => WriteEncryption::Plaintext,
            EncryptionMode::OwnIdentities | EncryptionMode::Recipients => {
                WriteEncryption::Recipients
            }
        }
    }

    /// How the objects that this process writes by default are protected.
    pub fn default_protection(&self) -> Protection {
        match self.mode() {
            EncryptionMode::Plaintext => Protection::Plaintext,
            mode => Protection::Encrypted {
                has_other_recipients: mode == EncryptionMode::Recipients,
            },
        }
    }

    /// Whether the protection of an existing log changes how an object is written to it. A process
    /// without keys can read only plaintext, so it does not have to query a log that it has read.
    pub fn depends_on_log(&self, has_read_newest_entry: bool) -> bool {
        match self.mode() {
            EncryptionMode::Recipients => false,
            EncryptionMode::OwnIdentities => true,
            EncryptionMode::Plaintext => !has_read_newest_entry || self.keyring.can_decrypt(),
        }
    }

    /// How a new entry of a log is written. An encrypted session never continues as plaintext; a
    /// plaintext session continues encrypted once a key is configured.
    pub fn for_entry(&self, log: ProtectionSummary) -> Result<WriteEncryption> {
        self.require_key(log)?;
        if is_active(Mutation::WritePlaintext) {
            return Ok(WriteEncryption::Plaintext);
        }
        Ok(self.default_encryption())
    }

    /// Checks a plaintext segment of a log. `follows_encrypted` says whether an earlier segment is
    /// encrypted.
    pub fn check_plaintext(&self, follows_encrypted: bool) -> Result<()> {
        match self.plaintext_reads {
            _ if is_active(Mutation::AcceptPlaintext) => Ok(()),
            PlaintextReads::Accept => Ok(()),
            PlaintextReads::BeforeEncrypted if follows_encrypted => Err(Error::corrupt(
                "it is not encrypted, but an earlier segment of the log is",
            )
            .hint(
                "run \"sessiond restore ID --salvage\" to restore the entries before it, or set --plaintext accept if you trust the bucket",
            )),
            PlaintextReads::BeforeEncrypted => Ok(()),
            PlaintextReads::Reject => Err(Error::corrupt(
                "it is not encrypted, and plaintext is not accepted",
            )
            .hint(
                "set --plaintext before-encrypted if the session began before encryption was configured",
            )),
        }
    }

    /// Whether a reader must know whether a plaintext segment follows an encrypted one.
    pub fn depends_on_order(&self) -> bool {
        self.plaintext_reads == PlaintextReads::BeforeEncrypted && self.keyring.can_decrypt()
    }

    /// Whether a plaintext and an encrypted segment may become one. A merge of both is encrypted,
    /// and nobody could tell afterwards that part of it was plaintext.
    pub fn merges_plaintext_with_encrypted(&self) -> bool {
        self.plaintext_reads == PlaintextReads::Accept
    }

    /// How a merge or a snapshot is written. It keeps the recipients of the segments that it
    /// replaces, unless recipients are configured. Plaintext stays plaintext unless all plaintext is
    /// accepted: encryption would make it look like the work of a writer with keys.
    pub fn for_compacted(&self, replaced: ProtectionSummary) -> Result<WriteEncryption> {
        self.require_key(replaced)?;
        if self.mode() == EncryptionMode::OwnIdentities && replaced.has_other_recipients {
            return Err(Error::new(
                ErrorKind::Encrypted,
                "the segments to merge are also encrypted to other recipients",
            )
            .hint("set --encrypt-to for every recipient of the session"));
        }
        let is_plaintext = replaced.has_plaintext && !replaced.has_encrypted;
        if is_plaintext && !self.merges_plaintext_with_encrypted() {
            return Ok(WriteEncryption::Plaintext);
        }
        Ok(self.same_as(replaced))
    }

    /// How a named checkpoint of a log is written.
    pub fn for_checkpoint(&self, log: ProtectionSummary) -> Result<WriteEncryption> {
        self.require_key(log)?;
        Ok(self.same_as(log))
    }

    /// Plaintext if all existing objects are accepted plaintext and no recipients are configured.
    fn same_as(&self, existing: ProtectionSummary) -> WriteEncryption {
        let is_plaintext = existing.has_plaintext
            && !existing.has_encrypted
            && self.plaintext_reads != PlaintextReads::Reject;
        match self.mode() {
            EncryptionMode::OwnIdentities if is_plaintext => WriteEncryption::Plaintext,
            _ => self.default_encryption(),
        }
    }

    fn require_key(&self, existing: ProtectionSummary) -> Result<()> {
        if self.mode() == EncryptionMode::Plaintext && existing.has_encrypted {
            return Err(Error::new(
                ErrorKind::Encrypted,
                "the session is encrypted, but no recipient is configured",
            )
            .hint(
                "set the same --encrypt-to or --identity as the process that wrote the session",
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::encrypted::keyring::{KeySettings, generate};

    const PLAIN: Protection = Protection::Plaintext;
    const OWN: Protection = Protection::Encrypted {
        has_other_recipients: false,
    };
    const SHARED: Protection = Protection::Encrypted {
        has_other_recipients: true,
    };

    /// Policies without keys, with an identity, and with a recipient.
    fn policies() -> [EncryptionPolicy; 3] {
        let directory = tempfile::tempdir().unwrap();
        let (file, recipient) = generate();
        let path = directory.path().join("key.txt");
        crate::sys::private_file::write(&path, &file);
        let policy = |recipients: &[&str], identity_files: &[&std::path::Path]| {
            let settings = KeySettings {
                recipients: recipients.iter().map(ToString::to_string).collect(),
                identity_files: identity_files
                    .iter()
                    .map(|path| path.to_path_buf())
                    .collect(),
            };
            EncryptionPolicy::new(Keyring::load(&settings).unwrap(), PlaintextReads::Accept)
        };
        [
            policy(&[], &[]),
            policy(&[], &[&path]),
            policy(&[&recipient], &[]),
        ]
    }

    fn summary(protections: &[Protection]) -> ProtectionSummary {
        protections.iter().copied().collect()
    }

    #[test]
    fn an_encrypted_session_never_continues_as_plaintext() {
        let [none, identity, recipient] = policies();
        for existing in [&[OWN][..], &[SHARED], &[PLAIN, OWN]] {
            let error = none.for_entry(summary(existing)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Encrypted);
            assert!(none.for_compacted(summary(existing)).is_err());
            assert!(none.for_checkpoint(summary(existing)).is_err());
        }
        for existing in [&[][..], &[PLAIN], &[PLAIN, SHARED]] {
            for policy in [&identity, &recipient] {
                assert_eq!(
                    policy.for_entry(summary(existing)).unwrap(),
                    WriteEncryption::Recipients
                );
            }
        }
        assert_eq!(
            none.for_entry(summary(&[PLAIN])).unwrap(),
            WriteEncryption::Plaintext
        );
    }

    #[test]
    fn a_compacted_segment_keeps_the_readers_of_what_it_replaces() {
        let [none, identity, recipient] = policies();
        let compacted = |policy: &EncryptionPolicy, replaced: &[Protection]| {
            policy.for_compacted(summary(replaced)).ok()
        };
        assert_eq!(
            compacted(&none, &[PLAIN, PLAIN]),
            Some(WriteEncryption::Plaintext)
        );
        assert_eq!(
            compacted(&identity, &[PLAIN, PLAIN]),
            Some(WriteEncryption::Plaintext)
        );
        assert_eq!(
            compacted(&identity, &[PLAIN, OWN]),
            Some(WriteEncryption::Recipients)
        );
        assert_eq!(compacted(&identity, &[OWN, SHARED]), None);
        // Configured recipients are the user's decision, if all plaintext is accepted.
        for replaced in [&[PLAIN][..], &[OWN], &[SHARED]] {
            assert_eq!(
                compacted(&recipient, replaced),
                Some(WriteEncryption::Recipients)
            );
        }
    }

    #[test]
    fn plaintext_is_accepted_as_configured_and_never_merged_into_encrypted_segments() {
        let [none, identity, recipient] = policies();
        let with = |policy: &EncryptionPolicy, plaintext_reads| {
            EncryptionPolicy::new(policy.keyring.clone(), plaintext_reads)
        };
        for policy in [&none, &identity, &recipient] {
            for (reads, before, after) in [
                (PlaintextReads::Reject, false, false),
                (PlaintextReads::BeforeEncrypted, true, false),
                (PlaintextReads::Accept, true, true),
            ] {
                let policy = with(policy, reads);
                assert_eq!(policy.check_plaintext(false).is_ok(), before);
                assert_eq!(policy.check_plaintext(true).is_ok(), after);
                assert_eq!(policy.merges_plaintext_with_encrypted(), after);
            }
        }
        let reads = PlaintextReads::BeforeEncrypted;
        for policy in [with(&identity, reads), with(&recipient, reads)] {
            let compacted = policy.for_compacted(summary(&[PLAIN, PLAIN])).unwrap();
            assert_eq!(compacted, WriteEncryption::Plaintext);
            let compacted = policy.for_compacted(summary(&[OWN, OWN])).unwrap();
            assert_eq!(compacted, WriteEncryption::Recipients);
        }
        // Inserted plaintext does not turn the encryption of a named checkpoint off.
        let strict = with(&identity, PlaintextReads::Reject);
        let checkpoint = strict.for_checkpoint(summary(&[PLAIN])).unwrap();
        assert_eq!(checkpoint, WriteEncryption::Recipients);
        for (policy, reads) in [
            (&none, PlaintextReads::BeforeEncrypted),
            (&identity, PlaintextReads::Reject),
            (&recipient, PlaintextReads::Reject),
        ] {
            assert_eq!(PlaintextReads::default_for(&policy.keyring), reads);
        }
    }

    #[test]
    fn a_named_checkpoint_is_protected_like_its_log() {
        let [none, identity, recipient] = policies();
        let checkpoint = |policy: &EncryptionPolicy, log: &[Protection]| {
            policy.for_checkpoint(summary(log)).unwrap()
        };
        assert_eq!(checkpoint(&none, &[PLAIN]), WriteEncryption::Plaintext);
        assert_eq!(checkpoint(&identity, &[PLAIN]), WriteEncryption::Plaintext);
        assert_eq!(
            checkpoint(&identity, &[SHARED]),
            WriteEncryption::Recipients
        );
        assert_eq!(
            checkpoint(&recipient, &[PLAIN]),
            WriteEncryption::Recipients
        );
    }

    #[test]
    fn configured_recipients_do_not_depend_on_the_log() {
        let [none, identity, recipient] = policies();
        for has_read in [false, true] {
            assert!(!recipient.depends_on_log(has_read));
            assert!(identity.depends_on_log(has_read));
            assert_eq!(none.depends_on_log(has_read), !has_read);
        }
    }
}
