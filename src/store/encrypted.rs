//! A store whose objects only those can read who hold a key: bodies are encrypted with age on the way out and opened on the
//! way in, and keys, sizes and times stay as they are.
//!
//! Owns which objects are sealed, how, and what it means that one cannot be opened. Does not own who can open them
//! (`keyring`). Nobody above knows of it: digests are those of what was sealed, and a sealed and a plain entry compete for
//! the same number, so a session may begin plain and go on sealed.

pub mod keyring;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::sync::{Arc, Mutex, PoisonError};

use age::x25519::Identity;
use age::{DecryptError, Decryptor, Encryptor};
use async_trait::async_trait;
use bytes::Bytes;

use self::keyring::Keyring;
use super::{Created, Page, Store};
use crate::error::{Error, ErrorKind, Result};
use crate::model::keys;

/// What a sealed object begins with; what is stored plain begins with gzip's two bytes or a brace.
const MAGIC: &[u8] = b"age-encryption.org/v1";

/// What each recipient adds to the header begins with.
const STANZA: &[u8] = b"-> X25519 ";

/// What the header, one recipient and the last tag take; only to ask for memory once.
const OVERHEAD: usize = 512;

/// Seals and opens what tells of conversations.
pub struct EncryptedStore {
    inner: Arc<dyn Store>,
    keyring: Keyring,
    /// What was read of which log, where nobody says to whom to seal what is written to it.
    met: Mutex<BTreeMap<String, Met>>,
}

/// What a log was found to be.
#[derive(Debug, Clone, Copy, Default)]
struct Met {
    /// Something in it is plain.
    plain: bool,
    /// Something is sealed.
    sealed: bool,
    /// Something that was read since the last merge is sealed to others than us too.
    to_others: bool,
    /// That was said.
    said: bool,
}

impl EncryptedStore {
    /// Seals what goes to `inner`, if the keyring has anybody to seal it to, and opens what comes from there.
    pub fn new(inner: Arc<dyn Store>, keyring: Keyring) -> Self {
        EncryptedStore {
            inner,
            keyring,
            met: Mutex::default(),
        }
    }

    fn seal(&self, key: &str, body: Bytes) -> Result<Bytes> {
        if !keys::holds_content(key) {
            return Ok(body);
        }
        if !self.keyring.is_named() && self.stays_plain(key)? {
            return Ok(body);
        }
        let failed = |cause: &dyn std::fmt::Display| {
            Error::new(ErrorKind::Internal, format!("encrypt {key}: {cause}"))
        };
        let recipients = self.keyring.to();
        let recipients = recipients
            .iter()
            .map(|recipient| recipient as &dyn age::Recipient);
        let encryptor = Encryptor::with_recipients(recipients).map_err(|cause| failed(&cause))?;
        let mut sealed = Vec::with_capacity(body.len() + body.len() / 4096 + OVERHEAD);
        let mut writer = encryptor
            .wrap_output(&mut sealed)
            .map_err(|cause| failed(&cause))?;
        writer
            .write_all(&body)
            .and_then(|()| writer.finish().map(drop))
            .map_err(|cause| failed(&cause))?;
        Ok(Bytes::from(sealed))
    }

    fn open(&self, key: &str, stored: Bytes) -> Result<Bytes> {
        if !keys::holds_content(key) {
            return Ok(stored);
        }
        let sealed = stored.starts_with(MAGIC);
        if !self.keyring.is_named() {
            let to_others = sealed && self.keyring.is_on() && self.is_for_others(&stored);
            self.with_met(key, |met| {
                met.plain |= !sealed;
                met.sealed |= sealed;
                met.to_others |= to_others;
            });
        }
        if !sealed {
            return Ok(stored);
        }
        let damaged = |cause: &dyn std::fmt::Display| {
            Error::corrupt(format!("read {key}: its encryption is damaged ({cause})"))
        };
        let decryptor = Decryptor::new(&stored[..]).map_err(|cause| match cause {
            DecryptError::Io(cause) if cause.kind() == std::io::ErrorKind::UnexpectedEof => {
                damaged(&"it ends too soon")
            }
            cause => damaged(&cause),
        })?;
        let identities = self.keyring.with();
        let count = identities.len();
        let opened = decryptor.decrypt(
            identities
                .into_iter()
                .map(|identity| identity as &dyn age::Identity),
        );
        let mut reader = match opened {
            Ok(reader) => reader,
            Err(DecryptError::NoMatchingKeys) => return Err(refused(key, count)),
            Err(cause) => return Err(damaged(&cause)),
        };
        let mut body = Vec::with_capacity(stored.len());
        reader
            .read_to_end(&mut body)
            .map_err(|cause| damaged(&cause))?;
        Ok(Bytes::from(body))
    }

    /// Nobody says to whom to seal: whether this stays plain. What is there is never made unreadable for those who can read it
    /// now.
    fn stays_plain(&self, key: &str) -> Result<bool> {
        let refuse = |why, hint: &str| {
            Err(Error::new(ErrorKind::Encrypted, format!("write {key}: {why}")).hint(hint))
        };
        let composite = keys::is_composite(key);
        let met = self.with_met(key, |met| {
            let before = *met;
            met.said |= met.to_others;
            // What the next one is made of is read before it.
            met.to_others &= !composite;
            before
        });
        if !self.keyring.is_on() {
            return match met.sealed {
                true => refuse(
                    "the session is encrypted, and nobody is named to encrypt this to",
                    "--encrypt-to RECIPIENT or --identity FILE, as when the session was written",
                ),
                false => Ok(true),
            };
        }
        if met.to_others && composite {
            return refuse(
                "what it is made of is encrypted to others too, and they are not named",
                "--encrypt-to RECIPIENT for everybody who shall read it, as when the session was written",
            );
        }
        if met.to_others && !met.said {
            let log = keys::log_of(key);
            tracing::warn!(
                log,
                "it was encrypted to others too; what is written now opens with the identity that is given alone. --encrypt-to names them"
            );
        }
        // What is new is sealed also where a session began plain; what stands for what is there, or points at it, stays as that is.
        let plain = met.plain && !met.sealed && !keys::is_entry(key);
        if !plain {
            self.with_met(key, |met| met.sealed = true);
        }
        Ok(plain)
    }

    fn with_met<T>(&self, key: &str, look: impl FnOnce(&mut Met) -> T) -> T {
        let mut met = self.met.lock().unwrap_or_else(PoisonError::into_inner);
        look(met.entry(keys::log_of(key).to_owned()).or_default())
    }

    /// Whether what is sealed opens with keys that are not at hand. Who they are is not in it, only how many.
    fn is_for_others(&self, stored: &[u8]) -> bool {
        let header = stored
            .split(|byte| *byte == b'\n')
            .take_while(|line| !line.starts_with(b"---"));
        let keys = header.filter(|line| line.starts_with(STANZA)).count();
        let opens = |identity: &Identity| {
            Decryptor::new(stored).is_ok_and(|sealed| {
                sealed
                    .decrypt(std::iter::once(identity as &dyn age::Identity))
                    .is_ok()
            })
        };
        self.keyring
            .with()
            .into_iter()
            .filter(|identity| opens(identity))
            .count()
            < keys
    }
}

fn refused(key: &str, identities: usize) -> Error {
    let (why, hint) = match identities {
        0 => (
            "it is encrypted, and no identity is given".to_owned(),
            "--identity FILE (or SESSIOND_IDENTITY) names the file with the key",
        ),
        1 => (
            "it is encrypted, and not to the identity that is given".to_owned(),
            "add the file with the right key: --identity may be given several times",
        ),
        many => (
            format!("it is encrypted, and not to any of the {many} identities that are given"),
            "add the file with the right key: --identity may be given several times",
        ),
    };
    Error::new(ErrorKind::Encrypted, format!("read {key}: {why}")).hint(hint)
}

#[async_trait]
impl Store for EncryptedStore {
    async fn create(&self, key: &str, body: Bytes) -> Result<Created> {
        self.inner.create(key, self.seal(key, body)?).await
    }

    async fn put(&self, key: &str, body: Bytes) -> Result<()> {
        self.inner.put(key, self.seal(key, body)?).await
    }

    async fn get(&self, key: &str) -> Result<Option<Bytes>> {
        self.inner
            .get(key)
            .await?
            .map(|stored| self.open(key, stored))
            .transpose()
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
