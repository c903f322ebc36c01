//! A store whose objects only those can read who hold a key: bodies are encrypted with age on the way out and opened on the
//! way in, and keys, sizes and times stay as they are.
//!
//! Owns which objects are sealed, how, and what it means that one cannot be opened. Does not own who can open them
//! (`keyring`). Nobody above knows of it: digests are those of what was sealed, and a sealed and a plain entry compete for
//! the same number, so a session may begin plain and go on sealed.

pub mod keyring;

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::sync::{Arc, Mutex, PoisonError};

use age::{DecryptError, Decryptor, Encryptor};
use async_trait::async_trait;
use bytes::Bytes;

use self::keyring::Keyring;
use super::{Created, Page, Store};
use crate::error::{Error, Kind, Result};
use crate::model::keys;

/// What a sealed object begins with; what is stored plain begins with gzip's two bytes or a brace.
const MAGIC: &[u8] = b"age-encryption.org/v1";

/// What the header, one recipient and the last tag take; only to ask for memory once.
const OVERHEAD: usize = 512;

/// Seals and opens what tells of conversations.
pub struct Sealed {
    inner: Arc<dyn Store>,
    keyring: Keyring,
    /// Logs in which something sealed was met that nothing can be written behind in plain.
    sealed_logs: Mutex<BTreeSet<String>>,
}

impl Sealed {
    /// Seals what goes to `inner`, if the keyring has anybody to seal it to, and opens what comes from there.
    pub fn new(inner: Arc<dyn Store>, keyring: Keyring) -> Self {
        Sealed { inner, keyring, sealed_logs: Mutex::default() }
    }

    fn seal(&self, key: &str, body: Bytes) -> Result<Bytes> {
        if !keys::holds_content(key) {
            return Ok(body);
        }
        if !self.keyring.is_on() {
            return match self.is_sealed_log(key) {
                true => {
                    Err(Error::new(Kind::Sealed, format!("write {key}: the session is encrypted, and nobody is named to encrypt this to"))
                        .hint("--encrypt-to RECIPIENT or --identity FILE, as when the session was written"))
                }
                false => Ok(body),
            };
        }
        let failed = |cause: &dyn std::fmt::Display| Error::new(Kind::Internal, format!("encrypt {key}: {cause}"));
        let recipients = self.keyring.to();
        let recipients = recipients.iter().map(|recipient| recipient as &dyn age::Recipient);
        let encryptor = Encryptor::with_recipients(recipients).map_err(|cause| failed(&cause))?;
        let mut sealed = Vec::with_capacity(body.len() + body.len() / 4096 + OVERHEAD);
        let mut writer = encryptor.wrap_output(&mut sealed).map_err(|cause| failed(&cause))?;
        writer.write_all(&body).and_then(|()| writer.finish().map(drop)).map_err(|cause| failed(&cause))?;
        Ok(Bytes::from(sealed))
    }

    fn open(&self, key: &str, stored: Bytes) -> Result<Bytes> {
        if !keys::holds_content(key) || !stored.starts_with(MAGIC) {
            return Ok(stored);
        }
        if !self.keyring.is_on() {
            self.sealed_logs.lock().unwrap_or_else(PoisonError::into_inner).insert(keys::log_of(key).to_owned());
        }
        let damaged = |cause: &dyn std::fmt::Display| Error::corrupt(format!("read {key}: its encryption is damaged ({cause})"));
        let decryptor = Decryptor::new(&stored[..]).map_err(|cause| match cause {
            DecryptError::Io(cause) if cause.kind() == std::io::ErrorKind::UnexpectedEof => damaged(&"it ends too soon"),
            cause => damaged(&cause),
        })?;
        let identities = self.keyring.with();
        let count = identities.len();
        let opened = decryptor.decrypt(identities.into_iter().map(|identity| identity as &dyn age::Identity));
        let mut reader = match opened {
            Ok(reader) => reader,
            Err(DecryptError::NoMatchingKeys) => return Err(refused(key, count)),
            Err(cause) => return Err(damaged(&cause)),
        };
        let mut body = Vec::with_capacity(stored.len());
        reader.read_to_end(&mut body).map_err(|cause| damaged(&cause))?;
        Ok(Bytes::from(body))
    }

    fn is_sealed_log(&self, key: &str) -> bool {
        self.sealed_logs.lock().unwrap_or_else(PoisonError::into_inner).contains(keys::log_of(key))
    }
}

fn refused(key: &str, identities: usize) -> Error {
    let (why, hint) = match identities {
        0 => ("it is encrypted, and no identity is given".to_owned(), "--identity FILE (or SESSIOND_IDENTITY) names the file with the key"),
        1 => (
            "it is encrypted, and not to the identity that is given".to_owned(),
            "add the file with the right key: --identity may be given several times",
        ),
        many => (
            format!("it is encrypted, and not to any of the {many} identities that are given"),
            "add the file with the right key: --identity may be given several times",
        ),
    };
    Error::new(Kind::Sealed, format!("read {key}: {why}")).hint(hint)
}

#[async_trait]
impl Store for Sealed {
    async fn create(&self, key: &str, body: Bytes) -> Result<Created> {
        self.inner.create(key, self.seal(key, body)?).await
    }

    async fn put(&self, key: &str, body: Bytes) -> Result<()> {
        self.inner.put(key, self.seal(key, body)?).await
    }

    async fn get(&self, key: &str) -> Result<Option<Bytes>> {
        self.inner.get(key).await?.map(|stored| self.open(key, stored)).transpose()
    }

    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<Page> {
        self.inner.list(prefix, after).await
    }

    async fn delete(&self, key: &str) -> Result<()> {
        self.inner.delete(key).await
    }

    fn fences_by_itself(&self) -> Option<bool> {
        self.inner.fences_by_itself()
    }

    fn address(&self) -> String {
        self.inner.address()
    }
}
