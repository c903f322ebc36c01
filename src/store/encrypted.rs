//! A store that encrypts the content of logs with age. Keys, sizes and times stay visible.
//!
//! Owns the encrypted format, and the errors for objects that cannot be decrypted. Does not own the
//! decisions (`policy`), the keys (`keyring`) or signatures (`signature`), which it adds before it
//! encrypts. Digests are computed from the plaintext, and
//! encrypted and plaintext entries have the same keys. So a session can start as plaintext and
//! continue encrypted.

pub mod keyring;
mod mode;
pub mod policy;

use std::io::{Read, Write};
use std::sync::Arc;

use age::x25519::Identity;
use age::{DecryptError, Decryptor, Encryptor};
use async_trait::async_trait;
use bytes::Bytes;

use self::policy::{EncryptionMode, EncryptionPolicy, Protection, WriteEncryption};
use super::signature::SignaturePolicy;
use super::{CreateOutcome, ListPage, Store};
use crate::error::{Error, ErrorKind, Result};
use crate::model::keys;

/// The first bytes of an encrypted object. Plaintext objects begin with gzip's magic or a brace.
const MAGIC: &[u8] = b"age-encryption.org/v1";

/// The first bytes of a recipient's line in the header.
const RECIPIENT_LINE: &[u8] = b"-> X25519 ";

/// Maximum length of a header: enough for as many recipients as can be configured.
const MAX_HEADER_LEN: usize = 10_000;

/// Approximate size of a header with one recipient and of the final tag, to allocate memory once.
const OVERHEAD: usize = 512;

/// Encrypts and decrypts the objects that contain conversations, according to an explicit policy.
/// Other objects are stored as they are.
pub struct EncryptedStore {
    inner: Arc<dyn Store>,
    policy: EncryptionPolicy,
    signatures: SignaturePolicy,
}

impl EncryptedStore {
    /// A store that applies `policy` to the objects of `inner`.
    pub fn new(inner: Arc<dyn Store>, policy: EncryptionPolicy) -> Self {
        EncryptedStore {
            inner,
            policy,
            signatures: SignaturePolicy::default(),
        }
    }

    /// The same store; it signs and checks the plaintext of its objects.
    #[must_use]
    pub fn with_signatures(self, signatures: SignaturePolicy) -> Self {
        EncryptedStore { signatures, ..self }
    }

    /// A store without keys: it writes plaintext and rejects encrypted objects.
    #[cfg_attr(not(debug_assertions), expect(dead_code, reason = "only tests use it"))]
    pub fn without_keys(inner: Arc<dyn Store>) -> Self {
        EncryptedStore::new(inner, EncryptionPolicy::default())
    }

    /// The policy.
    pub fn policy(&self) -> &EncryptionPolicy {
        &self.policy
    }

    /// How objects are signed.
    pub fn signatures(&self) -> &SignaturePolicy {
        &self.signatures
    }

    /// Writes `key` if it does not exist. The caller decides about the encryption.
    pub async fn create_with(
        &self,
        key: &str,
        body: Bytes,
        encryption: WriteEncryption,
    ) -> Result<CreateOutcome> {
        let stored = self.encrypt(key, body, encryption)?;
        self.inner.create(key, stored).await
    }

    /// Writes `key`. The caller decides about the encryption.
    pub async fn put_with(
        &self,
        key: &str,
        body: Bytes,
        encryption: WriteEncryption,
    ) -> Result<()> {
        let stored = self.encrypt(key, body, encryption)?;
        self.inner.put(key, stored).await
    }

    /// Reads `key`, and whether it is encrypted; none if it does not exist.
    pub async fn get_with_encryption(&self, key: &str) -> Result<Option<(Bytes, bool)>> {
        let Some(stored) = self.inner.get(key).await? else {
            return Ok(None);
        };
        let is_encrypted = stored.starts_with(MAGIC);
        Ok(Some((self.decrypt(key, stored)?, is_encrypted)))
    }

    /// Reads `key` and how it is protected; none if it does not exist.
    pub async fn get_with_protection(&self, key: &str) -> Result<Option<(Bytes, Protection)>> {
        let Some(stored) = self.inner.get(key).await? else {
            return Ok(None);
        };
        let protection = self.protection(&stored);
        Ok(Some((self.decrypt(key, stored)?, protection)))
    }

    /// The protection of the object at `key`, even if it cannot be decrypted; none if it does not
    /// exist.
    pub async fn protection_of(&self, key: &str) -> Result<Option<Protection>> {
        let stored = self.inner.get(key).await?;
        Ok(stored.map(|stored| self.protection(&stored)))
    }

    fn protection(&self, stored: &[u8]) -> Protection {
        if !stored.starts_with(MAGIC) {
            return Protection::Plaintext;
        }
        // The other modes do not use the recipients.
        let is_relevant = self.policy.mode() == EncryptionMode::OwnIdentities;
        Protection::Encrypted {
            has_other_recipients: is_relevant && self.has_other_recipients(stored),
        }
    }

    /// Whether keys other than the configured identities can decrypt an object. The header does not
    /// name its recipients, but shows their number.
    fn has_other_recipients(&self, stored: &[u8]) -> bool {
        if check_header(stored).is_err() {
            return true;
        }
        let recipients = stored
            .split(|byte| *byte == b'\n')
            .take_while(|line| !line.starts_with(b"---"))
            .filter(|line| line.starts_with(RECIPIENT_LINE))
            .count();
        let can_decrypt = |identity: &&Identity| {
            let identity: &dyn age::Identity = *identity;
            Decryptor::new(stored)
                .is_ok_and(|object| object.decrypt(std::iter::once(identity)).is_ok())
        };
        let identities = self.policy.keyring.identities();
        identities.into_iter().filter(can_decrypt).count() < recipients
    }

    fn encrypt(&self, key: &str, body: Bytes, encryption: WriteEncryption) -> Result<Bytes> {
        let body = self.signatures.sign(key, body)?;
        if encryption == WriteEncryption::Plaintext || !keys::holds_content(key) {
            return Ok(body);
        }
        encrypt(&body, &self.policy.keyring.recipients())
            .map_err(|error| error.context(format_args!("encrypt {key}")))
    }

    fn decrypt(&self, key: &str, stored: Bytes) -> Result<Bytes> {
        let plaintext = if !keys::holds_content(key) {
            stored
        } else if stored.starts_with(MAGIC) {
            decrypt(&stored, &self.policy.keyring.identities())
                .map(Bytes::from)
                .map_err(|error| error.context(format_args!("decrypt {key}")))?
        } else {
            self.policy
                .check_plaintext(false)
                .map_err(|error| error.context(format_args!("read {key}")))?;
            stored
        };
        self.signatures.verify(key, plaintext)
    }
}

fn encrypt(body: &[u8], recipients: &[age::x25519::Recipient]) -> Result<Bytes> {
    let failed = |cause: &dyn std::fmt::Display| Error::new(ErrorKind::Internal, cause.to_string());
    let recipients = recipients
        .iter()
        .map(|recipient| recipient as &dyn age::Recipient);
    let encryptor = Encryptor::with_recipients(recipients).map_err(|cause| failed(&cause))?;
    let mut stored = Vec::with_capacity(body.len() + body.len() / 4096 + OVERHEAD);
    let mut writer = encryptor
        .wrap_output(&mut stored)
        .map_err(|cause| failed(&cause))?;
    writer
        .write_all(body)
        .and_then(|()| writer.finish().map(drop))
        .map_err(|cause| failed(&cause))?;
    Ok(Bytes::from(stored))
}

/// Checks the length of the header, whose last line starts with `---`. The time to parse it grows with
/// the square of its length.
fn check_header(stored: &[u8]) -> Result<()> {
    let start = &stored[..stored.len().min(MAX_HEADER_LEN)];
    if start.len() == stored.len() || start.windows(5).any(|bytes| bytes == b"\n--- ") {
        return Ok(());
    }
    Err(Error::corrupt(format!(
        "the encrypted object is damaged: its header has more than {MAX_HEADER_LEN} bytes"
    )))
}

fn decrypt(stored: &[u8], identities: &[&Identity]) -> Result<Vec<u8>> {
    let damaged = |cause: &dyn std::fmt::Display| {
        Error::corrupt(format!("the encrypted object is damaged: {cause}"))
    };
    check_header(stored)?;
    let decryptor = Decryptor::new(stored).map_err(|cause| match cause {
        DecryptError::Io(cause) if cause.kind() == std::io::ErrorKind::UnexpectedEof => {
            damaged(&"it is truncated")
        }
        cause => damaged(&cause),
    })?;
    let decrypted = decryptor.decrypt(
        identities
            .iter()
            .map(|identity| *identity as &dyn age::Identity),
    );
    let mut reader = match decrypted {
        Ok(reader) => reader,
        Err(DecryptError::NoMatchingKeys) => return Err(no_matching_identity(identities.len())),
        Err(cause) => return Err(damaged(&cause)),
    };
    let mut body = Vec::with_capacity(stored.len());
    reader
        .read_to_end(&mut body)
        .map_err(|cause| damaged(&cause))?;
    Ok(body)
}

fn no_matching_identity(identities: usize) -> Error {
    let (why, hint) = match identities {
        0 => (
            "it is encrypted, and no identity is configured".to_owned(),
            "set --identity FILE (or SESSIOND_IDENTITY) to the file with the private key",
        ),
        1 => (
            "it is encrypted, and the configured identity is not one of its recipients".to_owned(),
            "add the file with the right private key: --identity FILE can be repeated",
        ),
        many => (
            format!(
                "it is encrypted, and none of the {many} configured identities is one of its recipients"
            ),
            "add the file with the right private key: --identity FILE can be repeated",
        ),
    };
    Error::new(ErrorKind::Encrypted, why).hint(hint)
}

/// Writes with the default encryption of the policy. Writers of logs decide per object: see
/// `create_with`.
#[async_trait]
impl Store for EncryptedStore {
    async fn create(&self, key: &str, body: Bytes) -> Result<CreateOutcome> {
        self.create_with(key, body, self.policy.default_encryption())
            .await
    }

    async fn put(&self, key: &str, body: Bytes) -> Result<()> {
        self.put_with(key, body, self.policy.default_encryption())
            .await
    }

    async fn get(&self, key: &str) -> Result<Option<Bytes>> {
        self.inner
            .get(key)
            .await?
            .map(|stored| self.decrypt(key, stored))
            .transpose()
    }

    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<ListPage> {
        self.inner.list(prefix, after).await
    }

    async fn list_tree(&self, directory: &str) -> Result<ListPage> {
        self.inner.list_tree(directory).await
    }

    async fn delete(&self, key: &str) -> Result<()> {
        self.inner.delete(key).await
    }

    fn has_atomic_create(&self) -> Option<bool> {
        self.inner.has_atomic_create()
    }

    fn address(&self) -> String {
        self.inner.address()
    }
}

#[cfg(test)]
mod tests {
    use super::keyring::Keyring;
    use super::policy::PlaintextReads;
    use super::*;
    use crate::store::file::FileStore;

    const KEY: &str = "v1/team/claude-code/3f2a/log/000000000001.gz";

    /// A store with one identity, and the store below it.
    fn store(directory: &std::path::Path, plaintext_reads: PlaintextReads) -> EncryptedStore {
        let keyring = Keyring::new(Vec::new(), vec![Identity::generate()]);
        let inner = Arc::new(FileStore::open(directory.join("store")).unwrap());
        EncryptedStore::new(inner, EncryptionPolicy::new(keyring, plaintext_reads))
    }

    #[tokio::test]
    async fn an_object_is_written_as_the_caller_decides() {
        let directory = tempfile::tempdir().unwrap();
        let store = store(directory.path(), PlaintextReads::Accept);
        let body = Bytes::from_static(b"{}");
        for (encryption, protection) in [
            (WriteEncryption::Plaintext, Protection::Plaintext),
            (
                WriteEncryption::Recipients,
                Protection::Encrypted {
                    has_other_recipients: false,
                },
            ),
        ] {
            store.put_with(KEY, body.clone(), encryption).await.unwrap();
            assert_eq!(
                store.get_with_protection(KEY).await.unwrap(),
                Some((body.clone(), protection))
            );
            assert_eq!(store.protection_of(KEY).await.unwrap(), Some(protection));
        }
        assert_eq!(store.protection_of("v1/a/b/c/log/2").await.unwrap(), None);
    }

    #[tokio::test]
    async fn an_object_of_others_shows_that_it_has_other_recipients() {
        let directory = tempfile::tempdir().unwrap();
        let (one, other) = (Identity::generate(), Identity::generate());
        let inner = Arc::new(FileStore::open(directory.path().join("store")).unwrap());
        let with = |recipients: &[&Identity], identities: &[&Identity]| {
            let recipients = recipients.iter().map(|key| key.to_public()).collect();
            let identities = identities.iter().map(|key| (*key).clone()).collect();
            let keyring = Keyring::new(recipients, identities);
            EncryptedStore::new(
                inner.clone(),
                EncryptionPolicy::new(keyring, PlaintextReads::Accept),
            )
        };
        let body = Bytes::from_static(b"{}");
        let both = with(&[&one, &other], &[]);
        both.put(KEY, body).await.unwrap();
        for (identities, has_other_recipients) in [(vec![&one], true), (vec![&one, &other], false)]
        {
            assert_eq!(
                with(&[], &identities).protection_of(KEY).await.unwrap(),
                Some(Protection::Encrypted {
                    has_other_recipients
                })
            );
        }
        let stranger = Identity::generate();
        let error = with(&[], &[&stranger]).get(KEY).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Encrypted);
    }

    #[tokio::test]
    async fn plaintext_is_rejected_on_request_but_only_as_content() {
        let directory = tempfile::tempdir().unwrap();
        let store = store(directory.path(), PlaintextReads::Reject);
        let body = Bytes::from_static(b"{}");
        let plaintext = WriteEncryption::Plaintext;
        store.put_with(KEY, body.clone(), plaintext).await.unwrap();
        let error = store.get(KEY).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        let metadata = "v1/team/claude-code/3f2a/meta/000000000001.json";
        store
            .put_with(metadata, body.clone(), plaintext)
            .await
            .unwrap();
        assert_eq!(store.get(metadata).await.unwrap(), Some(body));
    }
}
