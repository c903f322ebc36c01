//! How this process encrypts, by the keys it has.

/// What the configured keys mean for new objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EncryptionMode {
    /// No key is configured: objects are plaintext.
    Plaintext,
    /// Only identities are configured: new objects are encrypted to these, and rewritten ones keep
    /// their readers.
    OwnIdentities,
    /// Recipients are configured: every object is encrypted to exactly these.
    Recipients,
}
