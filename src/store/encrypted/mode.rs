//! The encryption mode of this process, which follows from its keys.

/// What the configured keys mean for new objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EncryptionMode {
    /// No key is configured: objects are plaintext.
    Plaintext,
    /// Only identities are configured: new objects are encrypted to them, and compaction keeps the
    /// recipients of the segments that it replaces.
    OwnIdentities,
    /// Recipients are configured: every object is encrypted to exactly these.
    Recipients,
}
