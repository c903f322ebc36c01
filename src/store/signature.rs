//! Signatures of stored objects: who wrote an object, and for which key of the store.
//!
//! Owns the signature keys, the signed form of an object, and the decision which objects are
//! accepted. Signing happens below the log and above encryption: digests are computed without the
//! signature, and the log does not know about it. An object without the signature stays what it was:
//! `zcat` and `tar` ignore an empty gzip member, and `jq` shows one more field.

use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use ring::rand::{SecureRandom, SystemRandom};
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};

use super::key_option::KeyOption;
use crate::error::{Error, ErrorKind, Result};
use crate::model::{Digest, keys};
use crate::sys::mutation::{Mutation, is_active};

/// The beginning of every signed message: a signature for another purpose is not valid here.
const CONTEXT: &[u8] = b"sessiond object signature v1\0";

/// The prefix of a public key.
const PUBLIC_PREFIX: &str = "ed25519:";

/// The prefix of a private key, which is a secret and never part of an error.
const PRIVATE_PREFIX: &str = "SESSIOND-SIGNING-KEY-1:";

const PUBLIC_LEN: usize = 32;
const SIGNATURE_LEN: usize = 64;

/// A public key and a signature.
const SEAL_LEN: usize = PUBLIC_LEN + SIGNATURE_LEN;

/// The beginning of the gzip member that holds a signature: no file name, time 0, unknown system,
/// and one extra field, `SD`.
const MEMBER_HEAD: [u8; 16] = [
    0x1f, 0x8b, 8, 4, 0, 0, 0, 0, 0, 0xff, 100, 0, b'S', b'D', 96, 0,
];

/// The end of that member: an empty block, the checksum and the length of nothing.
const MEMBER_TAIL: [u8; 10] = [3, 0, 0, 0, 0, 0, 0, 0, 0, 0];

const MEMBER_LEN: usize = MEMBER_HEAD.len() + SEAL_LEN + MEMBER_TAIL.len();

/// The beginning and the end of the field that holds a signature, the last field of a JSON object.
const FIELD_HEAD: &[u8] = b",\"signature\":\"";
const FIELD_TAIL: &[u8] = b"\"}";

/// Length of a seal in base64.
const SEAL_TEXT_LEN: usize = SEAL_LEN / 3 * 4;

const FIELD_LEN: usize = FIELD_HEAD.len() + SEAL_TEXT_LEN + FIELD_TAIL.len();

/// The option `--signing-key`.
const SIGNING_KEY: KeyOption = KeyOption {
    name: "--signing-key",
    file_hint: "run \"sessiond keygen --signing -o FILE\" to create a signing key",
    line_hint: "use a file that \"sessiond keygen --signing\" wrote",
    empty_hint: "remove --signing-key, or unset SESSIOND_SIGNING_KEY, to write without signatures",
};

/// The option `--trust-key`.
const TRUST_KEY: KeyOption = KeyOption {
    name: "--trust-key",
    file_hint: "specify a public key, ed25519:…, or a file with one public key per line",
    line_hint: "write one public key per line, ed25519:…",
    empty_hint: "remove --trust-key, or unset SESSIOND_TRUST_KEY, to accept unsigned objects",
};

/// Where the keys come from.
#[derive(Debug, Clone, Default)]
pub struct SignatureSettings {
    /// A file with one private key.
    pub signing_key: Option<std::path::PathBuf>,
    /// Public keys, or files with one public key per line.
    pub trusted_keys: Vec<String>,
}

/// A public key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PublicKey([u8; PUBLIC_LEN]);

impl std::fmt::Display for PublicKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{PUBLIC_PREFIX}{}", STANDARD.encode(self.0))
    }
}

impl FromStr for PublicKey {
    type Err = &'static str;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.strip_prefix(PUBLIC_PREFIX);
        text.and_then(decode_32)
            .map(PublicKey)
            .ok_or("it is not a public key for signatures")
    }
}

/// A private key. `Arc`, because every clone of a store shares it.
#[derive(Clone)]
struct SigningKey(Arc<Ed25519KeyPair>);

impl SigningKey {
    fn public_key(&self) -> PublicKey {
        let mut bytes = [0; PUBLIC_LEN];
        bytes.copy_from_slice(self.0.public_key().as_ref());
        PublicKey(bytes)
    }
}

impl FromStr for SigningKey {
    type Err = &'static str;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let seed = text.strip_prefix(PRIVATE_PREFIX).and_then(decode_32);
        let pair = seed.and_then(|seed| Ed25519KeyPair::from_seed_unchecked(&seed).ok());
        pair.map(|pair| SigningKey(Arc::new(pair)))
            .ok_or("it is not a signing key")
    }
}

fn decode_32(text: &str) -> Option<[u8; 32]> {
    STANDARD.decode(text).ok()?.try_into().ok()
}

/// A new signing key: the text of its file, and its public key.
pub fn generate() -> Result<(String, String)> {
    let failed = |_| Error::new(ErrorKind::Internal, "the system has no random numbers");
    let mut seed = [0; 32];
    SystemRandom::new().fill(&mut seed).map_err(failed)?;
    let private = format!("{PRIVATE_PREFIX}{}", STANDARD.encode(seed));
    let key: SigningKey = private
        .parse()
        .map_err(|why| Error::new(ErrorKind::Internal, why))?;
    let public = key.public_key().to_string();
    Ok((format!("# public key: {public}\n{private}\n"), public))
}

/// How objects are signed, and whose signatures are accepted.
#[derive(Clone, Default)]
pub struct SignaturePolicy {
    signing_key: Option<SigningKey>,
    /// If there are any, unsigned objects are rejected.
    trusted_keys: Vec<PublicKey>,
}

impl SignaturePolicy {
    /// Reads the configured keys.
    pub fn load(settings: &SignatureSettings) -> Result<SignaturePolicy> {
        let mut policy = SignaturePolicy::default();
        for text in &settings.trusted_keys {
            let (text, count) = (text.trim(), policy.trusted_keys.len());
            if text.starts_with(PUBLIC_PREFIX) {
                let key = text.parse().map_err(|why: &str| {
                    TRUST_KEY
                        .invalid(text, why)
                        .hint("use the public key that \"sessiond keygen --signing\" prints")
                })?;
                policy.trusted_keys.push(key);
                continue;
            }
            let path = Path::new(text.strip_prefix('@').unwrap_or(text));
            TRUST_KEY.read_file(text, path, &mut policy.trusted_keys)?;
            if policy.trusted_keys.len() == count {
                return Err(TRUST_KEY
                    .invalid(text, "the file contains no public key")
                    .hint(TRUST_KEY.line_hint));
            }
        }
        if let Some(path) = &settings.signing_key {
            policy.signing_key = Some(policy.load_signing_key(path)?);
        }
        Ok(policy)
    }

    fn load_signing_key(&self, path: &Path) -> Result<SigningKey> {
        let (text, mut found) = (path.to_string_lossy(), Vec::<SigningKey>::new());
        SIGNING_KEY.read_secret_file(path, &mut found)?;
        let Some(key) = found.pop().filter(|_| found.is_empty()) else {
            return Err(SIGNING_KEY
                .invalid(&text, "the file must contain exactly one signing key")
                .hint(SIGNING_KEY.file_hint));
        };
        let public = key.public_key();
        if !self.trusted_keys.is_empty() && !self.trusted_keys.contains(&public) {
            return Err(SIGNING_KEY
                .invalid(&text, "its public key is not one of the trusted keys")
                .hint(format!(
                    "add it to the settings of all readers: --trust-key {public}"
                )));
        }
        Ok(key)
    }

    /// Whether an object without a signature of a trusted key is rejected.
    pub fn is_checked(&self) -> bool {
        !self.trusted_keys.is_empty()
    }

    /// Number of trusted keys, and whether new objects are signed.
    pub fn summary(&self) -> (usize, bool) {
        (self.trusted_keys.len(), self.signing_key.is_some())
    }

    /// Signs an object that will be stored at `key`.
    pub fn sign(&self, key: &str, body: Bytes) -> Result<Bytes> {
        if !keys::is_signed(key) {
            return Ok(body);
        }
        let Some(signing_key) = &self.signing_key else {
            return match self.trusted_keys.is_empty() {
                true => Ok(body),
                false => Err(Error::usage(
                    "only signed objects are trusted, and no signing key is configured",
                )
                .hint("set --signing-key FILE (or SESSIOND_SIGNING_KEY) to the signing key of this writer")
                .context(format_args!("write {key}"))),
            };
        };
        let public = signing_key.public_key();
        let signature = signing_key.0.sign(&message(key, &body));
        let mut seal = Vec::with_capacity(SEAL_LEN);
        seal.extend_from_slice(&public.0);
        seal.extend_from_slice(signature.as_ref());
        let signed = if key.ends_with(".json") {
            let fields = body.strip_suffix(b"}").unwrap_or(&body);
            [
                fields,
                FIELD_HEAD,
                STANDARD.encode(&seal).as_bytes(),
                FIELD_TAIL,
            ]
            .concat()
        } else {
            [&body[..], &MEMBER_HEAD, &seal, &MEMBER_TAIL].concat()
        };
        Ok(Bytes::from(signed))
    }

    /// Checks the object that is stored at `key`, and returns it without its signature.
    pub fn verify(&self, key: &str, stored: Bytes) -> Result<Bytes> {
        if !keys::is_signed(key) {
            return Ok(stored);
        }
        let (body, seal) = match key.ends_with(".json") {
            true => split_json(&stored),
            false => split_gzip(&stored),
        };
        if !self.trusted_keys.is_empty() && !is_active(Mutation::SkipSignatureCheck) {
            self.check_seal(key, &body, seal.as_deref())
                .map_err(|error| error.context(format_args!("read {key}")))?;
        }
        Ok(body)
    }

    fn check_seal(&self, key: &str, body: &[u8], seal: Option<&[u8]>) -> Result<()> {
        let Some((public, signature)) = seal.and_then(|seal| seal.split_at_checked(PUBLIC_LEN))
        else {
            return Err(Error::corrupt("it is not signed, and only signed objects are trusted")
                .hint("set --signing-key for every writer; remove --trust-key to read objects from before signatures were configured"));
        };
        let Some(trusted) = self.trusted_keys.iter().find(|trusted| trusted.0 == public) else {
            let mut unknown = PublicKey([0; PUBLIC_LEN]);
            unknown.0.copy_from_slice(public);
            return Err(Error::corrupt(format!(
                "it is signed with {unknown}, which is not a trusted key"
            ))
            .hint("add --trust-key for this key if it belongs to one of your writers"));
        };
        UnparsedPublicKey::new(&ED25519, &trusted.0)
            .verify(&message(key, body), signature)
            .map_err(|_| {
                Error::corrupt("its signature is not valid: the object was changed or moved")
            })
    }
}

/// The signed message: the key binds namespace, agent, session, kind and number. The header, which
/// is part of the body, binds the previous entry.
fn message(key: &str, body: &[u8]) -> Vec<u8> {
    let digest = Digest::of(body).to_string();
    [CONTEXT, key.as_bytes(), b"\0", digest.as_bytes()].concat()
}

/// Splits an object that ends with a signature member; none if it does not.
fn split_gzip(stored: &Bytes) -> (Bytes, Option<Vec<u8>>) {
    let split = || {
        let start = stored.len().checked_sub(MEMBER_LEN)?;
        let member = stored[start..].strip_prefix(&MEMBER_HEAD)?;
        let seal = member.strip_suffix(&MEMBER_TAIL)?;
        Some((stored.slice(..start), Some(seal.to_vec())))
    };
    split().unwrap_or_else(|| (stored.clone(), None))
}

/// Splits a JSON object whose last field is a signature; none if it is not.
fn split_json(stored: &Bytes) -> (Bytes, Option<Vec<u8>>) {
    let split = || {
        let start = stored.len().checked_sub(FIELD_LEN)?;
        let text = stored[start..].strip_prefix(FIELD_HEAD)?;
        let seal = STANDARD.decode(text.strip_suffix(FIELD_TAIL)?).ok()?;
        let body = [&stored[..start], b"}"].concat();
        Some((Bytes::from(body), Some(seal)))
    };
    split().unwrap_or_else(|| (stored.clone(), None))
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    const ENTRY: &str = "v1/team/claude-code/3f2a/log/000000000001.gz";
    const METADATA: &str = "v1/team/claude-code/3f2a/meta/000000000001.json";

    fn policy(signing: Option<&str>, trusted: &[&str]) -> Result<SignaturePolicy> {
        let directory = tempfile::tempdir().unwrap();
        let signing_key = signing.map(|text| {
            let path = directory.path().join("signing.key");
            crate::sys::private_file::write(&path, text);
            path
        });
        SignaturePolicy::load(&SignatureSettings {
            signing_key,
            trusted_keys: trusted.iter().map(ToString::to_string).collect(),
        })
    }

    fn objects() -> [(&'static str, Bytes); 2] {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        std::io::Write::write_all(&mut gzip, b"{}\nline\n").unwrap();
        let metadata = Bytes::from_static(b"{\"version\":1,\"labels\":{}}");
        [(ENTRY, gzip.finish().unwrap().into()), (METADATA, metadata)]
    }

    #[test]
    fn a_signed_object_is_accepted_only_at_its_key_unchanged_and_from_a_trusted_writer() {
        let ((file, public), (other_file, other)) = (generate().unwrap(), generate().unwrap());
        let writer = policy(Some(&file), &[&other, &public]).unwrap();
        let reader = policy(None, &[&public]).unwrap();
        for (key, body) in objects() {
            let signed = writer.sign(key, body.clone()).unwrap();
            assert_eq!(reader.verify(key, signed.clone()).unwrap(), body);
            // A reader without trusted keys ignores the signature.
            let anyone = SignaturePolicy::default();
            assert_eq!(anyone.verify(key, signed.clone()).unwrap(), body);
            let mut changed = signed.to_vec();
            changed[3] ^= 1;
            let moved = key.replace("3f2a", "4711");
            let stranger = policy(Some(&other_file), &[]).unwrap();
            for (key, stored, why) in [
                (key, body.clone(), "it is not signed"),
                (key, changed.into(), "its signature is not valid"),
                (&moved, signed.clone(), "its signature is not valid"),
                (
                    key,
                    stranger.sign(key, body.clone()).unwrap(),
                    "not a trusted key",
                ),
            ] {
                let error = reader.verify(key, stored).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Corrupt);
                assert!(error.to_string().contains(why), "{error}");
            }
            assert_eq!(reader.sign(key, body).unwrap_err().kind(), ErrorKind::Usage);
        }
    }

    #[test]
    fn a_signed_object_reads_as_before_for_other_tools() {
        let (file, public) = generate().unwrap();
        let writer = policy(Some(&file), &[&public]).unwrap();
        let [(entry, gzip), (metadata, json)] = objects();
        let signed = writer.sign(entry, gzip).unwrap();
        let mut text = String::new();
        let mut decoder = flate2::read::MultiGzDecoder::new(&signed[..]);
        decoder.read_to_string(&mut text).unwrap();
        assert_eq!(text, "{}\nline\n");
        let signed = writer.sign(metadata, json).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&signed).unwrap();
        assert_eq!(value["version"], 1);
        assert!(value["signature"].is_string());
    }

    #[test]
    fn wrong_keys_are_rejected_without_printing_a_secret() {
        let ((file, public), (_, other)) = (generate().unwrap(), generate().unwrap());
        let secret = file.lines().last().unwrap().to_owned();
        for (signing, trusted, why) in [
            (None, "ed25519:AAAA", "not a public key"),
            (None, secret.as_str(), "the secret key itself"),
            (None, "", "it is empty"),
            (
                Some(file.as_str()),
                other.as_str(),
                "not one of the trusted keys",
            ),
            (Some(public.as_str()), public.as_str(), "not a signing key"),
            (
                Some("# nothing"),
                public.as_str(),
                "exactly one signing key",
            ),
        ] {
            let error = policy(signing, &[trusted]).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Usage);
            let text = format!("{error} {}", error.hint_text().unwrap_or_default());
            assert!(text.contains(why) && !text.contains(&secret), "{text}");
        }
    }
}
