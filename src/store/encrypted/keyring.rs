//! The keys: configured recipients and identities, and the key of this writer.
//!
//! A process that has only recipients can encrypt but not decrypt. However, a writer must read its
//! own entries: after a lost response, after a crash between a write and the update of the ledger,
//! and for compaction. So if none of the identities can decrypt new objects, they are also
//! encrypted to the writer key, which is stored in sessiond's state directory next to the agent's
//! files. Every user who can read that directory can read the conversations anyway.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use age::secrecy::ExposeSecret;
use age::x25519::{Identity, Recipient};

use super::mode::EncryptionMode;
use crate::error::{Error, Result};
use crate::model::RelPath;
use crate::store::key_option::KeyOption;
use crate::sys::{Directory, STATE_DIR};

/// The prefix of a recipient.
const RECIPIENT_PREFIX: &str = "age1";

/// The option `--identity`.
const IDENTITY: KeyOption = KeyOption {
    name: "--identity",
    file_hint: "run \"sessiond keygen -o FILE\" to create a file with an identity",
    line_hint: "write one identity per line, AGE-SECRET-KEY-1…; files with a passphrase and SSH keys are not supported",
    empty_hint: "remove --identity, or unset SESSIOND_IDENTITY, to store without encryption",
};

/// The option `--encrypt-to`.
const RECIPIENT: KeyOption = KeyOption {
    name: "--encrypt-to",
    file_hint: "specify a recipient, age1…, or a file with one recipient per line",
    line_hint: "write one recipient per line, age1…; SSH keys and plugins are not supported",
    empty_hint: "remove --encrypt-to, or unset SESSIOND_ENCRYPT_TO, to store without encryption",
};

/// Maximum number of recipients. The header of an encrypted object has a line for each.
const MAX_RECIPIENTS: usize = 80;

/// Where the keys come from.
#[derive(Debug, Clone, Default)]
pub struct KeySettings {
    /// Recipients (`age1…`), or files with one recipient per line.
    pub recipients: Vec<String>,
    /// Files with one identity per line.
    pub identity_files: Vec<PathBuf>,
}

/// The keys of a process.
#[derive(Clone, Default)]
pub struct Keyring {
    /// The configured recipients; if there are none, the recipients of the identities.
    recipients: Vec<Recipient>,
    has_configured_recipients: bool,
    identities: Vec<Identity>,
    writer_key: Option<Arc<WriterKey>>,
}

/// The key of this writer, once it was found or created.
struct WriterKey {
    directory: Arc<dyn Directory>,
    identity: OnceLock<Identity>,
}

impl Keyring {
    /// Reads the configured keys.
    pub fn load(settings: &KeySettings) -> Result<Keyring> {
        let mut keyring = Keyring::default();
        for path in &settings.identity_files {
            let count = keyring.identities.len();
            let text = path.to_string_lossy();
            IDENTITY.read_secret_file(path, &mut keyring.identities)?;
            if keyring.identities.len() == count {
                return Err(IDENTITY
                    .invalid(&text, "the file contains no identity")
                    .hint("run \"sessiond keygen -o FILE\" to create one"));
            }
        }
        for text in &settings.recipients {
            let (text, count) = (text.trim(), keyring.recipients.len());
            if text.starts_with(RECIPIENT_PREFIX) {
                keyring
                    .recipients
                    .push(text.parse().map_err(|why: &'static str| {
                        RECIPIENT
                            .invalid(text, why)
                            .hint("use the public key that \"sessiond keygen\" prints")
                    })?);
                continue;
            }
            let path = Path::new(text.strip_prefix('@').unwrap_or(text));
            RECIPIENT.read_file(text, path, &mut keyring.recipients)?;
            if keyring.recipients.len() == count {
                return Err(RECIPIENT
                    .invalid(text, "the file contains no recipient")
                    .hint("write one recipient per line, age1…"));
            }
        }
        let count = keyring.recipients.len().max(keyring.identities.len());
        if count > MAX_RECIPIENTS {
            return Err(Error::usage(format!(
                "too many recipients: {count}, but the maximum is {MAX_RECIPIENTS}"
            ))
            .hint("share one identity among several readers"));
        }
        Ok(Keyring::new(keyring.recipients, keyring.identities))
    }

    /// A keyring of these keys. Without recipients, new objects are encrypted to the identities, so
    /// that an encrypted session does not continue as plaintext because of a missing setting.
    pub fn new(recipients: Vec<Recipient>, identities: Vec<Identity>) -> Keyring {
        let has_configured_recipients = !recipients.is_empty();
        let recipients = if has_configured_recipients {
            recipients
        } else {
            identities.iter().map(Identity::to_public).collect()
        };
        Keyring {
            recipients,
            has_configured_recipients,
            identities,
            writer_key: None,
        }
    }

    /// The same keys, and a writer key in `directory` if one is needed.
    #[must_use]
    pub fn with_writer_key_in(&self, directory: Arc<dyn Directory>) -> Keyring {
        Keyring {
            writer_key: Some(Arc::new(WriterKey {
                directory,
                identity: OnceLock::new(),
            })),
            ..self.clone()
        }
    }

    /// What the configured keys mean for new objects.
    pub fn mode(&self) -> EncryptionMode {
        if self.has_configured_recipients {
            EncryptionMode::Recipients
        } else if self.recipients.is_empty() {
            EncryptionMode::Plaintext
        } else {
            EncryptionMode::OwnIdentities
        }
    }

    /// Whether new objects are encrypted.
    pub fn encrypts(&self) -> bool {
        self.mode() != EncryptionMode::Plaintext
    }

    /// Whether any object could be decrypted.
    pub(super) fn can_decrypt(&self) -> bool {
        !self.identities().is_empty()
    }

    /// Number of recipients and of identities.
    pub fn counts(&self) -> (usize, usize) {
        (self.recipients.len(), self.identities.len())
    }

    /// Whether one of the identities can decrypt new objects.
    pub fn can_decrypt_new_objects(&self) -> bool {
        self.identities
            .iter()
            .any(|identity| self.recipients.contains(&identity.to_public()))
    }

    /// The recipients of new objects; empty if they are not encrypted.
    pub(super) fn recipients(&self) -> Vec<Recipient> {
        let mut recipients = self.recipients.clone();
        if self.encrypts() && !self.can_decrypt_new_objects() {
            let writer_key = self.writer_key.as_ref();
            recipients.extend(writer_key.map(|key| key.find_or_create().to_public()));
        }
        recipients
    }

    /// The identities to decrypt with.
    pub(super) fn identities(&self) -> Vec<&Identity> {
        self.identities
            .iter()
            .chain(self.writer_key.as_ref().and_then(|key| key.find()))
            .collect()
    }
}

impl WriterKey {
    fn path() -> Result<RelPath> {
        format!("{STATE_DIR}/writer.key").parse()
    }

    /// The key, if it exists.
    fn find(&self) -> Option<&Identity> {
        if self.identity.get().is_none() {
            let bytes = self.directory.read(&Self::path().ok()?).ok()??;
            let _ = self.identity.set(first_identity(&bytes)?);
        }
        self.identity.get()
    }

    /// The key, created if it does not exist. If the key cannot be saved, this process can still
    /// decrypt its own objects.
    fn find_or_create(&self) -> &Identity {
        if let Some(found) = self.find() {
            return found;
        }
        self.identity.get_or_init(|| {
            let identity = Identity::generate();
            let stored = Self::path().and_then(|path| {
                self.directory
                    .replace(&path, file_text(&identity).as_bytes(), true)
                    .map_err(|cause| Error::io(format!("write {path}"), cause))
            });
            if let Err(error) = stored {
                tracing::warn!(%error, "the writer key could not be saved; after a restart, this writer cannot read its own entries");
            }
            identity
        })
    }
}

fn first_identity(bytes: &[u8]) -> Option<Identity> {
    std::str::from_utf8(bytes)
        .ok()?
        .lines()
        .find_map(|line| line.trim().parse().ok())
}

/// A new identity: the text of its file, and its recipient.
pub fn generate() -> (String, String) {
    let identity = Identity::generate();
    (file_text(&identity), identity.to_public().to_string())
}

fn file_text(identity: &Identity) -> String {
    format!(
        "# public key: {}\n{}\n",
        identity.to_public(),
        identity.to_string().expose_secret()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::private_file;

    fn settings(recipients: &[&str], identity_files: &[&Path]) -> KeySettings {
        KeySettings {
            recipients: recipients.iter().map(ToString::to_string).collect(),
            identity_files: identity_files
                .iter()
                .map(|path| path.to_path_buf())
                .collect(),
        }
    }

    #[test]
    fn recipients_come_from_values_and_files_and_by_default_from_identities() {
        let directory = tempfile::tempdir().unwrap();
        let ((one, first), (other, second)) = (generate(), generate());
        let (keys, team) = (
            directory.path().join("keys.txt"),
            directory.path().join("team"),
        );
        private_file::write(&keys, &format!("{one}\n{other}"));
        std::fs::write(&team, format!("# the team\n\n  {first}\n{second}\n")).unwrap();
        let at = format!("@{}", team.display());
        let keyring = Keyring::load(&settings(&[&at], &[])).unwrap();
        assert_eq!(
            (
                keyring.counts(),
                keyring.can_decrypt_new_objects(),
                keyring.identities().len()
            ),
            ((2, 0), false, 0)
        );
        let keyring = Keyring::load(&settings(&[], &[&keys])).unwrap();
        assert_eq!(
            (keyring.counts(), keyring.can_decrypt_new_objects()),
            ((2, 2), true)
        );
        assert_eq!(
            keyring
                .recipients()
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>(),
            [first.clone(), second]
        );
        let keyring = Keyring::load(&settings(&[&first, team.to_str().unwrap()], &[])).unwrap();
        assert_eq!(keyring.counts().0, 3);
        assert!(!Keyring::load(&KeySettings::default()).unwrap().encrypts());
    }

    #[test]
    fn invalid_keys_are_rejected_and_a_secret_is_not_repeated() {
        let directory = tempfile::tempdir().unwrap();
        let (file, recipient) = generate();
        let secret = file.lines().last().unwrap();
        let path = directory.path().join("key.txt");
        private_file::write(&path, &format!("# a note\n{secret}x\n"));
        let error = Keyring::load(&settings(&[], &[&path])).err().unwrap();
        assert!(
            error.to_string().contains("line 2") && !error.to_string().contains(secret),
            "{error}"
        );
        std::fs::write(&path, "# nothing\n").unwrap();
        let error = Keyring::load(&settings(&[], &[&path])).err().unwrap();
        assert!(
            error.to_string().contains("contains no identity"),
            "{error}"
        );
        for bad in [
            secret,
            &secret.to_lowercase(),
            "",
            &recipient[..20],
            "/no/such/file",
        ] {
            let error = Keyring::load(&settings(&[bad], &[])).err().unwrap();
            assert_eq!(error.kind(), crate::error::ErrorKind::Usage, "{error}");
            assert!(
                !error.to_string().to_uppercase().contains(secret),
                "{error}"
            );
        }
        let error = Keyring::load(&settings(&[], &[Path::new(secret)]))
            .err()
            .unwrap();
        assert!(
            error.to_string().contains("process list") && !error.to_string().contains(secret),
            "{error}"
        );
    }
}
