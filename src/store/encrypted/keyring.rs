//! Who can open what is sealed: the recipients that are named, the identities that are given, and a key of our own.
//!
//! Who has recipients alone can write and not read. But a writer must be able to read what it wrote itself: a reply may be
//! lost, a process may be killed between a write and its ledger, and a run of entries is to be merged. So where no identity
//! opens what is sealed, it is sealed to one more key, which stands in sessiond's own directory beside the agent's files: who can
//! read that directory can read the conversations anyway.

use std::path::Path;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};

use age::secrecy::ExposeSecret;
use age::x25519::{Identity, Recipient};

use crate::config::Settings;
use crate::error::{Error, Result};
use crate::model::RelPath;
use crate::sys::{Directory, STATE_DIR};

/// What a recipient begins with.
const RECIPIENT: &str = "age1";

/// What an identity begins with: a secret, which no error repeats.
const SECRET: &str = "AGE-SECRET-KEY-";

/// Who can open what is sealed.
#[derive(Clone, Default)]
pub struct Keyring {
    recipients: Vec<Recipient>,
    /// Somebody said who they are.
    named: bool,
    identities: Vec<Identity>,
    own: Option<Arc<Own>>,
}

/// The key of our own, once it is needed or found.
struct Own {
    directory: Arc<dyn Directory>,
    key: OnceLock<Identity>,
}

impl Keyring {
    /// What the settings name. Without recipients, what is new is sealed to the identities themselves: a session that was
    /// encrypted does not go on in plain because a setting is missing.
    pub fn read(settings: &Settings) -> Result<Keyring> {
        let mut keyring = Keyring::default();
        for path in &settings.identity {
            let found = keyring.identities.len();
            read_lines(
                &path.to_string_lossy(),
                "identity",
                path,
                &mut keyring.identities,
            )?;
            if keyring.identities.len() == found {
                return Err(Error::usage(format!(
                    "read --identity {}: there is no identity in it",
                    path.display()
                ))
                .hint("sessiond keygen makes one"));
            }
        }
        for name in &settings.encrypt_to {
            let (name, found) = (name.trim(), keyring.recipients.len());
            if name.starts_with(RECIPIENT) {
                keyring.recipients.push(parse(name).map_err(|why| {
                    Error::usage(format!("read --encrypt-to {name}: {why}")).hint(
                        "a recipient is the public key that sessiond keygen or age-keygen says",
                    )
                })?);
                continue;
            }
            let path = Path::new(name.strip_prefix('@').unwrap_or(name));
            read_lines(name, "encrypt-to", path, &mut keyring.recipients)?;
            if keyring.recipients.len() == found {
                return Err(Error::usage(format!(
                    "read --encrypt-to {name}: there is no recipient in it"
                ))
                .hint("one recipient a line, age1…"));
            }
        }
        keyring.named = !keyring.recipients.is_empty();
        if !keyring.named {
            keyring.recipients = keyring.identities.iter().map(Identity::to_public).collect();
        }
        Ok(keyring)
    }

    /// The same, with a key of our own in that directory where one is needed.
    #[must_use]
    pub fn at(&self, directory: Arc<dyn Directory>) -> Keyring {
        Keyring {
            own: Some(Arc::new(Own {
                directory,
                key: OnceLock::new(),
            })),
            ..self.clone()
        }
    }

    /// Whether what is written is sealed.
    pub fn is_on(&self) -> bool {
        !self.recipients.is_empty()
    }

    /// Whether somebody said to whom it is sealed.
    pub(super) fn is_named(&self) -> bool {
        self.named
    }

    /// How many recipients are named, and how many identities are given.
    pub fn counts(&self) -> (usize, usize) {
        (self.recipients.len(), self.identities.len())
    }

    /// Whether one of the identities opens what is sealed from now on.
    pub fn opens_its_own(&self) -> bool {
        self.identities
            .iter()
            .any(|identity| self.recipients.contains(&identity.to_public()))
    }

    /// To whom to seal; nobody means: not at all.
    pub(super) fn to(&self) -> Vec<Recipient> {
        let mut to = self.recipients.clone();
        if self.is_on() && !self.opens_its_own() {
            to.extend(self.own.as_ref().map(|own| own.made().to_public()));
        }
        to
    }

    /// With what to open.
    pub(super) fn with(&self) -> Vec<&Identity> {
        self.identities
            .iter()
            .chain(self.own.as_ref().and_then(|own| own.found()))
            .collect()
    }
}

impl Own {
    fn path() -> Result<RelPath> {
        format!("{STATE_DIR}/seal.key").parse()
    }

    /// The key, if there is one.
    fn found(&self) -> Option<&Identity> {
        if self.key.get().is_none() {
            let bytes = self.directory.read(&Self::path().ok()?).ok()??;
            let _ = self.key.set(first_identity(&bytes)?);
        }
        self.key.get()
    }

    /// The key, made if there is none. One that cannot be kept still opens what this process writes.
    fn made(&self) -> &Identity {
        if let Some(found) = self.found() {
            return found;
        }
        self.key.get_or_init(|| {
            let identity = Identity::generate();
            let kept = Self::path().and_then(|path| {
                let text = file_of(&identity);
                self.directory.replace(&path, text.as_bytes(), true).map_err(|cause| Error::io(format!("write {path}"), cause))
            });
            if let Err(error) = kept {
                tracing::warn!(%error, "the key of this writer is not kept; after a restart it cannot read what it wrote");
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

/// An identity as a file, and the recipient that stands for it.
pub fn generate() -> (String, String) {
    let identity = Identity::generate();
    (file_of(&identity), identity.to_public().to_string())
}

fn file_of(identity: &Identity) -> String {
    format!(
        "# public key: {}\n{}\n",
        identity.to_public(),
        identity.to_string().expose_secret()
    )
}

/// Reads what a file holds, one a line.
fn read_lines<T: FromStr<Err = &'static str>>(
    name: &str,
    setting: &str,
    path: &Path,
    into: &mut Vec<T>,
) -> Result<()> {
    let secret = |text: &str| text.to_ascii_uppercase().starts_with(SECRET);
    if secret(name) {
        return Err(Error::usage(format!(
            "read --{setting}: that is the secret key itself, which everybody sees in the list of processes"
        ))
        .hint("put it into a file that only you can read, and name the file; and make a new key"));
    }
    if name.is_empty() {
        return Err(Error::usage(format!("read --{setting}: it names nothing"))
            .hint("unset the variable to store without encryption"));
    }
    let text = std::fs::read_to_string(path).map_err(|cause| {
        let error = Error::usage(format!("read --{setting} {}", path.display())).caused_by(cause);
        match setting {
            "identity" => error.hint("it names a file with an identity; sessiond keygen makes one"),
            _ => error.hint("a recipient begins with age1; anything else is a file"),
        }
    })?;
    for (at, line) in text
        .lines()
        .map(str::trim)
        .enumerate()
        .filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
    {
        let wrong = |why| {
            // What stands there may be a secret.
            let error = Error::usage(format!(
                "read --{setting} {}: line {} is none ({why})",
                path.display(),
                at + 1
            ));
            match setting {
                "identity" => error.hint("one identity a line, AGE-SECRET-KEY-1…; files with a passphrase and SSH keys are not read"),
                _ => error.hint("one recipient a line, age1…; SSH keys and plugins are not read"),
            }
        };
        into.push(parse(line).map_err(wrong)?);
    }
    Ok(())
}

fn parse<T: FromStr<Err = &'static str>>(text: &str) -> Result<T, &'static str> {
    text.parse()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(encrypt_to: &[&str], identity: &[&Path]) -> Settings {
        let encrypt_to = encrypt_to.iter().map(|text| (*text).to_owned()).collect();
        Settings {
            encrypt_to,
            identity: identity.iter().map(|path| path.to_path_buf()).collect(),
            ..Settings::default()
        }
    }

    #[test]
    fn recipients_come_from_words_and_files_and_by_default_from_identities() {
        let directory = tempfile::tempdir().unwrap();
        let ((one, first), (other, second)) = (generate(), generate());
        let (keys, people) = (
            directory.path().join("keys.txt"),
            directory.path().join("people"),
        );
        std::fs::write(&keys, format!("{one}\n{other}")).unwrap();
        std::fs::write(&people, format!("# the team\n\n  {first}\n{second}\n")).unwrap();
        let at = format!("@{}", people.display());
        let keyring = Keyring::read(&settings(&[&at], &[])).unwrap();
        assert_eq!(
            (
                keyring.counts(),
                keyring.opens_its_own(),
                keyring.with().len()
            ),
            ((2, 0), false, 0)
        );
        let keyring = Keyring::read(&settings(&[], &[&keys])).unwrap();
        assert_eq!((keyring.counts(), keyring.opens_its_own()), ((2, 2), true));
        assert_eq!(
            keyring
                .to()
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>(),
            [first.clone(), second]
        );
        let keyring = Keyring::read(&settings(&[&first, people.to_str().unwrap()], &[])).unwrap();
        assert_eq!(keyring.counts().0, 3);
        assert!(!Keyring::read(&Settings::default()).unwrap().is_on());
    }

    #[test]
    fn what_is_no_key_is_refused_and_a_secret_is_not_repeated() {
        let directory = tempfile::tempdir().unwrap();
        let (file, recipient) = generate();
        let secret = file.lines().last().unwrap();
        let path = directory.path().join("key.txt");
        std::fs::write(&path, format!("# a note\n{secret}x\n")).unwrap();
        let error = Keyring::read(&settings(&[], &[&path])).err().unwrap();
        assert!(
            error.to_string().contains("line 2") && !error.to_string().contains(secret),
            "{error}"
        );
        std::fs::write(&path, "# nothing\n").unwrap();
        let error = Keyring::read(&settings(&[], &[&path])).err().unwrap();
        assert!(error.to_string().contains("no identity in it"), "{error}");
        for bad in [
            secret,
            &secret.to_lowercase(),
            "",
            &recipient[..20],
            "/no/such/file",
        ] {
            let error = Keyring::read(&settings(&[bad], &[])).err().unwrap();
            assert_eq!(error.kind(), crate::error::ErrorKind::Usage, "{error}");
            assert!(
                !error.to_string().to_uppercase().contains(secret),
                "{error}"
            );
        }
        let error = Keyring::read(&settings(&[], &[Path::new(secret)]))
            .err()
            .unwrap();
        assert!(
            error.to_string().contains("list of processes") && !error.to_string().contains(secret),
            "{error}"
        );
    }
}
