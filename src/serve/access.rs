//! Who may call the API: bearer tokens, users of a trusted proxy, and their roles per namespace.
//!
//! Owns the access file and its rules. The file has only digests of tokens. It is read again when
//! it changes, so that a token can be revoked without a restart. While it cannot be read, nobody is
//! admitted.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};

use axum::http::header::{AUTHORIZATION, HeaderMap, HeaderName};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jiff::Timestamp;
use ring::rand::{SecureRandom, SystemRandom};
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};
use crate::http::server::Peer;
use crate::model::{Digest, Namespace};
use crate::sys::private_file::is_open_to_others;

/// Maximum size of an access file: some thousand tokens.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Maximum length of a name of a token or user.
const MAX_NAME_LEN: usize = 128;

/// Marks a token, so that scanners for leaked secrets can find it.
const TOKEN_PREFIX: &str = "sdt_";

/// Random bytes in a token. Nobody can guess that many, so that a fast hash protects them.
const TOKEN_BYTES: usize = 32;

/// The name that stands for all namespaces.
const ALL_NAMESPACES: &str = "*";

/// What a caller may do in a namespace. Each role includes the previous ones.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Sees counts, costs, sizes and times, but no text of a conversation.
    Metadata,
    /// Reads conversations and files.
    Reader,
    /// Changes labels and status, names checkpoints and forks.
    Operator,
    /// Removes sessions and sets their TTL.
    Admin,
}

impl Role {
    /// The name in the access file.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Metadata => "metadata",
            Role::Reader => "reader",
            Role::Operator => "operator",
            Role::Admin => "admin",
        }
    }
}

impl FromStr for Role {
    type Err = Error;
    fn from_str(text: &str) -> Result<Role> {
        let all = [Role::Metadata, Role::Reader, Role::Operator, Role::Admin];
        let found = all.into_iter().find(|role| role.as_str() == text);
        found.ok_or_else(|| {
            Error::usage(format!("invalid role {text:?}: unknown role"))
                .hint("use metadata, reader, operator or admin")
        })
    }
}

/// A role in one namespace, or in all of them: `reader` or `reader@team-a`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoleGrant {
    /// The namespace, or `*`.
    namespace: String,
    role: Role,
}

impl FromStr for RoleGrant {
    type Err = Error;
    fn from_str(text: &str) -> Result<RoleGrant> {
        let (role, namespace) = text.split_once('@').unwrap_or((text, ALL_NAMESPACES));
        if namespace != ALL_NAMESPACES {
            namespace.parse::<Namespace>()?;
        }
        Ok(RoleGrant {
            namespace: namespace.to_owned(),
            role: role.parse()?,
        })
    }
}

/// The roles of a caller by namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Roles(BTreeMap<String, Role>);

impl Roles {
    /// One role in all namespaces.
    pub fn everywhere(role: Role) -> Roles {
        Roles(BTreeMap::from([(ALL_NAMESPACES.to_owned(), role)]))
    }

    /// The role in a namespace: the one that the namespace names, or else the one of all
    /// namespaces.
    pub fn in_namespace(&self, namespace: &Namespace) -> Option<Role> {
        let named = self.0.get(namespace.as_str());
        named.or_else(|| self.0.get(ALL_NAMESPACES)).copied()
    }
}

/// Somebody who calls the API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// The name in the audit log: `local`, `token:NAME` or `user:NAME`.
    pub name: String,
    /// What the caller may do.
    pub roles: Roles,
}

/// The content of an access file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct AccessFile {
    #[serde(default)]
    token: Vec<TokenEntry>,
    #[serde(default)]
    user: Vec<UserEntry>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TokenEntry {
    name: String,
    sha256: Digest,
    expires: Timestamp,
    roles: Roles,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct UserEntry {
    name: String,
    roles: Roles,
}

impl AccessFile {
    fn parse(text: &str) -> Result<AccessFile> {
        let file: AccessFile = toml::from_str(text)
            .map_err(|cause| Error::usage(format!("invalid access file: {}", cause.message())))?;
        let tokens = file.token.iter().map(|token| (&token.name, &token.roles));
        let users = file.user.iter().map(|user| (&user.name, &user.roles));
        for (name, roles) in tokens.chain(users) {
            validate_name(name)?;
            for namespace in roles.0.keys().filter(|name| *name != ALL_NAMESPACES) {
                namespace.parse::<Namespace>()?;
            }
        }
        Ok(file)
    }

    fn read(path: &Path) -> Result<AccessFile> {
        let failed = |cause| {
            Error::unreadable_file(format!("read the access file {}", path.display()), cause)
        };
        if is_open_to_others(path).map_err(failed)? {
            return Err(Error::usage(format!(
                "invalid access file {}: other users can read or change it",
                path.display()
            ))
            .hint(format!("run \"chmod 600 {}\"", path.display())));
        }
        let size = std::fs::metadata(path).map_err(failed)?.len();
        if size > MAX_FILE_BYTES {
            return Err(Error::usage(format!(
                "invalid access file {}: {size} bytes, but the maximum is {MAX_FILE_BYTES}",
                path.display()
            )));
        }
        let text = std::fs::read_to_string(path).map_err(failed)?;
        AccessFile::parse(&text).map_err(|error| error.context(format!("read {}", path.display())))
    }

    /// The caller that a token belongs to. Every token of the file is compared, and no comparison
    /// stops at the first difference, so that the time does not depend on the token.
    fn caller_of_token(&self, token: &[u8], now: Timestamp) -> Option<Caller> {
        let given = Digest::of(token);
        let mut found = None;
        for entry in &self.token {
            let pairs = entry.sha256.as_bytes().iter().zip(given.as_bytes());
            let difference = pairs.fold(0, |difference, (one, other)| difference | (one ^ other));
            if difference == 0 {
                found = Some(entry);
            }
        }
        found
            .filter(|entry| now < entry.expires)
            .map(|entry| Caller {
                name: format!("token:{}", entry.name),
                roles: entry.roles.clone(),
            })
    }

    fn caller_of_user(&self, name: &str) -> Caller {
        let user = self.user.iter().find(|user| user.name == name);
        Caller {
            name: format!("user:{name}"),
            roles: user.map(|user| user.roles.clone()).unwrap_or_default(),
        }
    }
}

fn validate_name(name: &str) -> Result<()> {
    let is_valid = (1..=MAX_NAME_LEN).contains(&name.len())
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_.@+".contains(&byte));
    match is_valid {
        true => Ok(()),
        false => Err(Error::usage(format!(
            "invalid name {name:?}: expected 1 to {MAX_NAME_LEN} letters, digits or -_.@+"
        ))),
    }
}

/// A new token, and the text that adds it to an access file.
pub struct NewToken {
    /// The token. It is not stored anywhere.
    pub token: String,
    /// A table of the access file.
    pub entry: String,
}

impl NewToken {
    /// Creates a token with roles, which expires.
    pub fn generate(name: &str, grants: &[RoleGrant], expires: Timestamp) -> Result<NewToken> {
        validate_name(name)?;
        let mut bytes = [0; TOKEN_BYTES];
        SystemRandom::new()
            .fill(&mut bytes)
            .map_err(|_| Error::new(ErrorKind::Internal, "the system has no random numbers"))?;
        let token = format!("{TOKEN_PREFIX}{}", URL_SAFE_NO_PAD.encode(bytes));
        let roles: Vec<String> = grants
            .iter()
            .map(|grant| format!("\"{}\" = \"{}\"", grant.namespace, grant.role.as_str()))
            .collect();
        let entry = format!(
            "[[token]]\nname = \"{name}\"\nsha256 = \"{}\"\nexpires = \"{expires}\"\nroles = {{ {} }}\n",
            Digest::of(token.as_bytes()),
            roles.join(", ")
        );
        Ok(NewToken { token, entry })
    }

    /// The content of an access file with the token added.
    pub fn add_to(&self, name: &str, text: &str) -> Result<String> {
        let current = AccessFile::parse(text)?;
        if current.token.iter().any(|token| token.name == name) {
            return Err(Error::conflict(format!(
                "the access file already has a token named {name}"
            ))
            .hint("choose another --name, or delete the [[token]] table from the file"));
        }
        let separator = match text.trim_end() {
            "" => "",
            _ => "\n\n",
        };
        let added = format!("{}{separator}{}", text.trim_end(), self.entry);
        AccessFile::parse(&added)?;
        Ok(added)
    }
}

/// The addresses of trusted proxies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProxyAddress {
    /// Clients of the Unix socket.
    Unix,
    /// Addresses that have these leading bits in common.
    Network {
        /// An address of the network.
        address: IpAddr,
        /// Number of leading bits.
        bits: u8,
    },
}

impl FromStr for ProxyAddress {
    type Err = Error;
    fn from_str(text: &str) -> Result<ProxyAddress> {
        let invalid = || {
            Error::usage(format!(
                "invalid --trusted-proxy value {text:?}: expected an address, a network or unix"
            ))
            .hint(
                "use --trusted-proxy 10.1.2.3, --trusted-proxy 10.1.0.0/16 or --trusted-proxy unix",
            )
        };
        if text == "unix" {
            return Ok(ProxyAddress::Unix);
        }
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits.parse().map_err(|_| invalid())?)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| invalid())?;
        let max = if address.is_ipv4() { 32 } else { 128 };
        match bits.unwrap_or(max) {
            bits if bits <= max => Ok(ProxyAddress::Network { address, bits }),
            _ => Err(invalid()),
        }
    }
}

impl ProxyAddress {
    fn contains(&self, peer: Peer) -> bool {
        match (self, peer.0.map(|address| address.to_canonical())) {
            (ProxyAddress::Unix, None) => true,
            (ProxyAddress::Network { address, bits }, Some(peer)) => match (address, peer) {
                (IpAddr::V4(one), IpAddr::V4(other)) => {
                    let difference = one.to_bits() ^ other.to_bits();
                    difference.leading_zeros() >= u32::from(*bits)
                }
                (IpAddr::V6(one), IpAddr::V6(other)) => {
                    let difference = one.to_bits() ^ other.to_bits();
                    difference.leading_zeros() >= u32::from(*bits)
                }
                _ => false,
            },
            _ => false,
        }
    }
}

/// The proxies that authenticate users, and the header in which they name them.
#[derive(Debug, Clone)]
pub struct TrustedProxies {
    /// Their addresses.
    pub addresses: Vec<ProxyAddress>,
    /// The header.
    pub user_header: HeaderName,
}

/// What identifies a version of a file.
type FileVersion = (Option<std::time::SystemTime>, u64, u64);

/// The access file, as it was read last.
struct Loaded {
    version: FileVersion,
    file: Arc<AccessFile>,
}

/// Decides who calls.
pub struct AccessControl {
    path: PathBuf,
    proxies: TrustedProxies,
    loaded: Mutex<Loaded>,
}

impl fmt::Debug for AccessControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AccessControl")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

/// Why a caller is not admitted.
#[derive(Debug)]
pub enum Denied {
    /// There is no valid token and no user of a trusted proxy.
    Unauthenticated,
    /// The access file cannot be read.
    Unavailable(Error),
}

impl AccessControl {
    /// Reads the access file.
    pub fn open(path: PathBuf, proxies: TrustedProxies) -> Result<AccessControl> {
        let version = file_version(&path)?;
        let file = Arc::new(AccessFile::read(&path)?);
        Ok(AccessControl {
            path,
            proxies,
            loaded: Mutex::new(Loaded { version, file }),
        })
    }

    /// Whether the access file and its entries admit anybody at all.
    pub fn is_empty(&self) -> bool {
        let loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.file.token.is_empty() && loaded.file.user.is_empty()
    }

    /// The caller of a request. The header of a user counts only if a trusted proxy sent it, and
    /// only once: a client may have added another.
    pub fn authenticate(
        &self,
        headers: &HeaderMap,
        peer: Peer,
        now: Timestamp,
    ) -> Result<Caller, Denied> {
        let file = self.current().map_err(Denied::Unavailable)?;
        let is_proxy = self
            .proxies
            .addresses
            .iter()
            .any(|address| address.contains(peer));
        let mut users = headers.get_all(&self.proxies.user_header).iter();
        if is_proxy && let Some(user) = users.next() {
            let user = user.to_str().ok().filter(|_| users.next().is_none());
            let user = user.filter(|name| validate_name(name).is_ok());
            let user = user.ok_or(Denied::Unauthenticated)?;
            return Ok(file.caller_of_user(user));
        }
        let mut headers = headers.get_all(AUTHORIZATION).iter();
        let (header, other) = (headers.next(), headers.next());
        let bearer = header
            .filter(|_| other.is_none())
            .and_then(|header| header.as_bytes().split_at_checked(7))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case(b"bearer "));
        bearer
            .and_then(|(_, token)| file.caller_of_token(token.trim_ascii(), now))
            .ok_or(Denied::Unauthenticated)
    }

    /// The access file; read again if it has changed.
    fn current(&self) -> Result<Arc<AccessFile>> {
        let version = file_version(&self.path)?;
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if loaded.version != version {
            let file = Arc::new(AccessFile::read(&self.path)?);
            tracing::info!(path = %self.path.display(), "read the access file again");
            *loaded = Loaded { version, file };
        }
        Ok(loaded.file.clone())
    }
}

fn file_version(path: &Path) -> Result<FileVersion> {
    use std::os::unix::fs::MetadataExt;
    let found = std::fs::metadata(path).map_err(|cause| {
        Error::unreadable_file(format!("read the access file {}", path.display()), cause)
    })?;
    Ok((found.modified().ok(), found.len(), found.ino()))
}

#[cfg(test)]
mod tests;
