//! Builds the parts of the program from the settings.
//!
//! The only file that maps settings to the options of each part, and that names concrete back ends.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::agent::Profile;
use crate::agent::claude_code::ClaudeCode;
use crate::agent::codex::Codex;
use crate::agent::gemini::Gemini;
use crate::agent::generic::Generic;
use crate::agent::opencode::OpenCode;
use crate::config::{self, Settings};
use crate::error::{Error, ErrorContext, Result, redact_url};
use crate::index::sql::{IndexOptions, SqlIndex};
use crate::index::{Catalog, Index};
use crate::log::Logs;
use crate::log::fence::{Fencing, FencingPolicy};
use crate::log::witness::{Witness, WitnessMode};
use crate::mirror::Mirror;
use crate::model::{AgentName, Namespace, Patterns};
use crate::store::Store;
use crate::store::encrypted::EncryptedStore;
use crate::store::encrypted::keyring::{KeySettings, Keyring};
use crate::store::encrypted::policy::{EncryptionPolicy, PlaintextReads};
use crate::store::file::FileStore;
use crate::store::limited::ConcurrencyLimited;
use crate::store::retrying::RetryingReads;
use crate::store::s3::{S3Settings, S3Store, Sse};
use crate::store::signature::{SignaturePolicy, SignatureSettings};
use crate::sys::{Disk, Owner, Rng, SystemClock, SystemRng};

/// Default number of concurrent flushes.
pub const DEFAULT_CONCURRENT_FLUSHES: usize = 8;

/// Default number of concurrent store requests: enough to read a compacted log in one round.
const DEFAULT_CONCURRENT_REQUESTS: usize = 72;

/// The parts that commands work with.
#[derive(Clone)]
pub struct Parts {
    /// The store. It encrypts and decrypts if a key is configured.
    pub(crate) store: Arc<dyn Store>,
    /// The index.
    pub(crate) index: Arc<dyn Catalog>,
    /// The profile of the agent.
    pub(crate) profile: Arc<dyn Profile>,
    /// The logs of the agent.
    pub(crate) logs: Logs,
    /// The mirror of the agent's database, for an agent that stores its sessions in one.
    pub(crate) mirror: Option<Arc<Mirror>>,
    /// The index as a witness of the logs.
    pub(crate) witness: Witness,
    /// The recipients and identities.
    pub(crate) keyring: Keyring,
    /// The store without encryption: it returns objects as they are stored.
    unencrypted_store: Arc<dyn Store>,
    /// The agent's directory.
    pub agent_directory: Option<Disk>,
    /// The root: the agent's directory, or the mirror in it.
    root: Option<Arc<Disk>>,
}

impl Parts {
    /// Builds the parts. Sends no request yet. `max_requests` limits the concurrent store requests.
    pub async fn build(settings: &Settings, max_requests: Option<usize>) -> Result<Parts> {
        let environment = Environment::from_process();
        let keyring = load_keyring(settings)?;
        check_index_text(settings, &keyring)?;
        let index_url = index_url(settings, &environment)?;
        let store = ConcurrencyLimited::new(
            open_store(store_target(settings, &environment)?).await?,
            max_requests.unwrap_or(DEFAULT_CONCURRENT_REQUESTS),
        );
        let rng: Arc<dyn Rng> = Arc::new(SystemRng);
        let unencrypted_store: Arc<dyn Store> =
            Arc::new(RetryingReads::new(Arc::new(store), rng.clone()));
        let policy = EncryptionPolicy::new(keyring.clone(), plaintext_reads(settings, &keyring)?);
        let store = EncryptedStore::new(unencrypted_store.clone(), policy)
            .with_signatures(load_signatures(settings)?);
        let store = Arc::new(store);
        let options = IndexOptions {
            prices: settings.prices.clone().with_list(),
            index_text: settings.index.text.unwrap_or(false),
            omit_text: keyring.encrypts(),
        };
        let index = Arc::new(SqlIndex::open(&index_url)?.with_options(options));
        let witness = witness(settings, &index_url, index.clone())?;
        let profile = profile(settings)?;
        let root = find_root(settings, &*profile, &environment)?;
        let namespace = namespace(settings)?;
        let policy: FencingPolicy = fencing_policy(settings)?;
        let is_shared_database = index_url.starts_with("postgres");
        let logs = Logs {
            store: store.clone(),
            fence: Arc::new(Fencing::new(policy, index.clone(), is_shared_database)),
            namespace,
            agent: profile.name().clone(),
            clock: Arc::new(SystemClock),
            rng,
            recent: Arc::default(),
            progress: Arc::default(),
        };
        let parts = Parts {
            store,
            index,
            profile,
            logs,
            mirror: None,
            witness,
            keyring,
            unencrypted_store,
            agent_directory: None,
            root: None,
        };
        Ok(root.map_or(parts.clone(), |root| parts.with_root(root)))
    }

    /// The agent's root.
    pub fn root(&self) -> Result<&Path> {
        match &self.root {
            Some(root) => Ok(root.root()),
            None => Err(unknown_root(&*self.profile)),
        }
    }

    /// The agent's root as a directory to read and write. A root that is a symlink is followed
    /// once.
    pub fn directory(&self) -> Result<Arc<Disk>> {
        let root = self.root.clone();
        root.ok_or_else(|| unknown_root(&*self.profile))
    }

    /// The same parts with another root. As root, the files that sessiond creates belong to the
    /// owner of the directory.
    #[must_use]
    pub fn with_root(&self, root: PathBuf) -> Parts {
        let disk = Disk::new(root);
        let owner = rustix::process::geteuid()
            .is_root()
            .then(|| disk.owner().ok())
            .flatten();
        self.with_agent_directory(disk.on_behalf_of(owner, false))
    }

    /// The same parts, but every access to the agent's directory has the rights of `owner`, and new
    /// files belong to it.
    #[must_use]
    pub fn with_owner(&self, owner: Owner) -> Parts {
        match &self.agent_directory {
            Some(directory) => self.with_agent_directory(directory.on_behalf_of(Some(owner), true)),
            None => self.clone(),
        }
    }

    /// The parts for the logs of another agent or namespace in the same store and index. They have
    /// no root: nothing can be restored with them. The transcripts of an agent without a profile are
    /// not parsed.
    pub fn for_logs_of(&self, namespace: Namespace, agent: AgentName) -> Result<Parts> {
        let profile = match built_in_profile(&agent) {
            _ if agent == *self.profile.name() => self.profile.clone(),
            Some(profile) => profile,
            None => Arc::new(Generic::new(agent.clone(), &Patterns::default())?),
        };
        Ok(Parts {
            profile,
            logs: Logs {
                namespace,
                agent,
                ..self.logs.clone()
            },
            mirror: None,
            agent_directory: None,
            root: None,
            ..self.clone()
        })
    }

    fn with_agent_directory(&self, directory: Disk) -> Parts {
        let mirror = mirror(&*self.profile, &directory).map(Arc::new);
        let root = match &mirror {
            Some(mirror) => mirror.directory(),
            None => directory.clone(),
        };
        let root = Arc::new(root);
        let keyring = self.keyring.with_writer_key_in(root.clone());
        let current = &self.logs.store;
        let policy = EncryptionPolicy::new(keyring, current.policy().plaintext_reads);
        let store = EncryptedStore::new(self.unencrypted_store.clone(), policy)
            .with_signatures(current.signatures().clone());
        let store = Arc::new(store);
        let logs = Logs {
            store: store.clone(),
            ..self.logs.clone()
        };
        Parts {
            agent_directory: Some(directory),
            root: Some(root),
            mirror,
            store,
            logs,
            ..self.clone()
        }
    }
}

/// The agent's root, for a command that only sends requests to the daemon of that root.
pub fn agent_root(settings: &Settings) -> Result<PathBuf> {
    let profile = profile(settings)?;
    let root = find_root(settings, &*profile, &Environment::from_process())?
        .ok_or_else(|| unknown_root(&*profile))?;
    let mirror = mirror(&*profile, &Disk::new(&root));
    Ok(mirror.map_or(root, |mirror| mirror.directory().root().to_owned()))
}

/// The root of a session store: the configured one, or one in the data directory. It must not be
/// the root of an agent.
pub fn session_store_root(settings: &Settings) -> Result<PathBuf> {
    let environment = Environment::from_process();
    let profile = profile(settings)?;
    let Some(named) =
        find_root(settings, &*profile, &environment)?.filter(|_| settings.agent.root.is_some())
    else {
        return Ok(environment.data_directory()?.join("session-store"));
    };
    if profile
        .root(environment.home.as_deref(), &variable)
        .is_some_and(|root| root == named)
    {
        return Err(Error::usage(format!(
            "invalid --root value {:?}: it is the agent's own directory",
            named.display().to_string()
        ))
        .hint("pass another directory to --root, or omit it; \"sessiond daemon\" streams the agent's directory"));
    }
    Ok(named)
}

/// The mirror of the agent's database, if the agent stores its sessions in one.
fn mirror(profile: &dyn Profile, directory: &Disk) -> Option<Mirror> {
    (profile.name().as_str() == OpenCode::NAME).then(|| Mirror::open(directory))
}

fn find_root(
    settings: &Settings,
    profile: &dyn Profile,
    environment: &Environment,
) -> Result<Option<PathBuf>> {
    match &settings.agent.root {
        Some(root) => std::path::absolute(root)
            .map(Some)
            .map_err(|cause| Error::io(format!("resolve {}", root.display()), cause)),
        None => Ok(profile.root(environment.home.as_deref(), &variable)),
    }
}

fn unknown_root(profile: &dyn Profile) -> Error {
    Error::usage(format!("agent {} has no default directory", profile.name()))
        .hint("pass the directory of its files to --root")
}

/// The value of an environment variable; `None` if it is empty.
fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
}

/// The directories that the environment defines.
struct Environment {
    home: Option<PathBuf>,
    data: Option<PathBuf>,
}

impl Environment {
    fn from_process() -> Environment {
        let home = variable("HOME");
        // According to the XDG specification, a relative path is invalid and ignored.
        let data = variable("XDG_DATA_HOME")
            .filter(|path| path.is_absolute())
            .or_else(|| home.as_ref().map(|home| home.join(".local/share")));
        Environment { home, data }
    }

    fn data_directory(&self) -> Result<PathBuf> {
        let data = self.data.as_ref().map(|data| data.join("sessiond"));
        data.ok_or_else(|| {
            Error::usage("the data directory is unknown: neither HOME nor XDG_DATA_HOME is set")
                .hint("set HOME, or pass --store and --index")
        })
    }
}

/// The default configuration file.
pub fn default_config_file() -> Option<PathBuf> {
    let configuration = variable("XDG_CONFIG_HOME")
        .filter(|path| path.is_absolute())
        .or_else(|| variable("HOME").map(|home| home.join(".config")));
    configuration.map(|path| path.join("sessiond/config.toml"))
}

/// The address of the store, with its settings applied.
enum StoreTarget {
    File(PathBuf),
    S3(Box<S3Settings>),
}

/// Parses the settings of the store. Opens nothing.
fn store_target(settings: &Settings, environment: &Environment) -> Result<StoreTarget> {
    let timeout = request_timeout(settings)?;
    let Some(url) = &settings.store.url else {
        return Ok(StoreTarget::File(
            environment.data_directory()?.join("store"),
        ));
    };
    if url.starts_with("s3://") {
        let mut s3 = S3Settings::from_url(url)?;
        s3.region = settings.s3.region.clone().or(s3.region);
        s3.endpoint = settings.s3.endpoint.clone().or(s3.endpoint);
        s3.path_style = settings.s3.path_style.or(s3.path_style);
        s3.ca_file = settings.network.ca_file.clone().or(s3.ca_file);
        s3.timeout = timeout.unwrap_or(s3.timeout);
        if let Some(sse) = &settings.s3.sse {
            s3.sse = Some(parse_sse(sse)?);
        }
        return Ok(StoreTarget::S3(Box::new(s3)));
    }
    let invalid = |reason: &str, hint: &str| {
        let url = redact_url(url);
        Err(Error::usage(format!("invalid store URL {url:?}: {reason}")).hint(hint))
    };
    let example = "use a directory, such as file:///var/lib/sessiond";
    let Some(path) = url.strip_prefix("file://") else {
        let hint = "use file:///DIR or s3://BUCKET/PREFIX?endpoint=URL";
        return invalid("unknown scheme", hint);
    };
    let path = percent_encoding::percent_decode_str(path).decode_utf8_lossy();
    if !path.starts_with('/') {
        return invalid("the path must be absolute", example);
    }
    if path.trim_matches('/').is_empty() {
        return invalid("the root of the filesystem cannot be a store", example);
    }
    Ok(StoreTarget::File(PathBuf::from(path.into_owned())))
}

fn request_timeout(settings: &Settings) -> Result<Option<Duration>> {
    let Some(text) = settings.store.request_timeout.as_deref() else {
        return Ok(None);
    };
    let timeout = config::duration("--request-timeout", Some(text), Duration::ZERO)?;
    if timeout.is_zero() {
        return Err(Error::usage(format!(
            "invalid --request-timeout value {text:?}: must be more than zero"
        ))
        .hint("use a duration such as 30s, or leave the setting out"));
    }
    Ok(Some(timeout))
}

async fn open_store(target: StoreTarget) -> Result<Arc<dyn Store>> {
    match target {
        StoreTarget::File(path) => Ok(Arc::new(FileStore::open(path)?)),
        StoreTarget::S3(s3) => {
            let store = S3Store::connect(*s3).await;
            Ok(Arc::new(store.context("connect to the store")?))
        }
    }
}

/// The URL of the index.
fn index_url(settings: &Settings, environment: &Environment) -> Result<String> {
    match &settings.index.url {
        Some(url) => Ok(url.clone()),
        None => Ok(format!(
            "sqlite://{}",
            environment.data_directory()?.join("index.db").display()
        )),
    }
}

fn namespace(settings: &Settings) -> Result<Namespace> {
    let name = settings.agent.namespace.as_deref();
    name.unwrap_or("default").parse()
}

fn fencing_policy(settings: &Settings) -> Result<FencingPolicy> {
    let mode = settings.store.fencing.as_deref();
    mode.unwrap_or("auto").parse()
}

/// Only the index, for a caller that must not wait for the store or create files; none if the
/// SQLite file does not exist.
pub fn existing_index(settings: &Settings) -> Result<Option<(Namespace, Arc<dyn Catalog>)>> {
    let url = index_url(settings, &Environment::from_process())?;
    let file = url.strip_prefix("sqlite://").map(Path::new);
    if file.is_some_and(|file| !file.exists()) {
        return Ok(None);
    }
    Ok(Some((
        namespace(settings)?,
        Arc::new(SqlIndex::open(&url)?),
    )))
}

/// The locations that the settings leave to the environment: root, store, index and configuration
/// file. A location that cannot be determined is missing.
pub fn default_locations(settings: &Settings) -> BTreeMap<&'static str, String> {
    let environment = Environment::from_process();
    let root = profile(settings)
        .and_then(|profile| find_root(settings, &*profile, &environment))
        .ok()
        .flatten();
    let store = match store_target(settings, &environment) {
        Ok(StoreTarget::File(path)) => Some(format!("file://{}", path.display())),
        _ => None,
    };
    let locations = [
        ("root", root.map(|path| path.display().to_string())),
        ("store", store),
        ("index", index_url(settings, &environment).ok()),
        (
            "config",
            default_config_file().map(|path| path.display().to_string()),
        ),
    ];
    locations
        .into_iter()
        .filter_map(|(name, location)| Some((name, location?)))
        .collect()
}

/// Checks every setting that [`Parts::build`] uses. Connects to nothing and creates nothing.
pub fn check(settings: &Settings) -> Result<()> {
    let environment = Environment::from_process();
    let keyring = load_keyring(settings)?;
    check_index_text(settings, &keyring)?;
    plaintext_reads(settings, &keyring)?;
    load_signatures(settings)?;
    store_target(settings, &environment)?;
    SqlIndex::open(&index_url(settings, &environment)?)?;
    find_root(settings, &*profile(settings)?, &environment)?;
    namespace(settings)?;
    fencing_policy(settings)?;
    settings
        .index
        .witness
        .as_deref()
        .unwrap_or("auto")
        .parse::<WitnessMode>()?;
    Ok(())
}

fn load_signatures(settings: &Settings) -> Result<SignaturePolicy> {
    SignaturePolicy::load(&SignatureSettings {
        signing_key: settings.signatures.signing_key.clone(),
        trusted_keys: settings.signatures.trust_key.clone(),
    })
}

fn load_keyring(settings: &Settings) -> Result<Keyring> {
    Keyring::load(&KeySettings {
        recipients: settings.encryption.encrypt_to.clone(),
        identity_files: settings.encryption.identity.clone(),
    })
}

/// The index as a witness. A file that does not exist yet knows nothing, and is not created.
fn witness(settings: &Settings, url: &str, index: Arc<SqlIndex>) -> Result<Witness> {
    let mode = settings
        .index
        .witness
        .as_deref()
        .unwrap_or("auto")
        .parse()?;
    let file = url.strip_prefix("sqlite://").map(Path::new);
    let exists = file.is_none_or(Path::exists);
    Ok(Witness::new(
        exists.then_some(index as Arc<dyn Index>),
        mode,
    ))
}

/// Which plaintext is accepted.
fn plaintext_reads(settings: &Settings, keyring: &Keyring) -> Result<PlaintextReads> {
    let Some(rule) = settings.encryption.plaintext.as_deref() else {
        return Ok(PlaintextReads::default_for(keyring));
    };
    match rule.parse()? {
        PlaintextReads::Reject if !keyring.encrypts() => Err(Error::usage(
            "invalid --plaintext value \"reject\": without a key, sessiond writes plaintext itself",
        )
        .hint("set --encrypt-to or --identity, or remove --plaintext")),
        rule => Ok(rule),
    }
}

fn check_index_text(settings: &Settings, keyring: &Keyring) -> Result<()> {
    if keyring.encrypts() && settings.index.text.unwrap_or(false) {
        return Err(Error::usage(
            "invalid --index-text: encryption is on, and the index would store message texts unencrypted",
        )
        .hint("remove --index-text, or remove --encrypt-to and --identity"));
    }
    Ok(())
}

fn parse_sse(text: &str) -> Result<Sse> {
    match text.split_once('=').unwrap_or((text, "")) {
        ("AES256", "") => Ok(Sse::Aes256),
        ("aws:kms", key) => Ok(Sse::Kms(Some(key.to_owned()).filter(|key| !key.is_empty()))),
        _ => Err(
            Error::usage(format!("invalid --s3-sse value {text:?}: unknown mode"))
                .hint("use AES256, aws:kms or aws:kms=KEY-ID"),
        ),
    }
}

fn profile(settings: &Settings) -> Result<Arc<dyn Profile>> {
    let name: AgentName = settings
        .agent
        .name
        .as_deref()
        .unwrap_or(ClaudeCode::NAME)
        .parse()?;
    if let Some(profile) = built_in_profile(&name) {
        return Ok(profile);
    }
    match (name.as_str(), &settings.profile) {
        (_, Some(patterns)) => Ok(Arc::new(Generic::new(name, patterns)?)),
        (Generic::NAME, None) => Ok(Arc::new(Generic::new(name, &Patterns::default())?)),
        (other, None) => Err(Error::usage(format!(
            "invalid --agent value {other:?}: unknown agent"
        ))
        .hint(format!(
            "use {} or {}, or add a [profile] table to the configuration file",
            AGENTS.join(", "),
            Generic::NAME
        ))),
    }
}

/// The agents with a built-in profile.
pub const AGENTS: [&str; 4] = [ClaudeCode::NAME, Codex::NAME, Gemini::NAME, OpenCode::NAME];

/// The profile of each of them, and its root on this machine.
pub fn local_agents() -> Vec<(Arc<dyn Profile>, PathBuf)> {
    let home = Environment::from_process().home;
    let profiles = AGENTS
        .iter()
        .filter_map(|name| built_in_profile(&name.parse().ok()?));
    profiles
        .filter_map(|profile| {
            profile
                .root(home.as_deref(), &variable)
                .map(|root| (profile, root))
        })
        .collect()
}

/// The built-in profile of an agent.
fn built_in_profile(name: &AgentName) -> Option<Arc<dyn Profile>> {
    Some(match name.as_str() {
        ClaudeCode::NAME => Arc::new(ClaudeCode::new(name.clone()).with_env(&variable)),
        Codex::NAME => Arc::new(Codex::new(name.clone())),
        Gemini::NAME => Arc::new(Gemini::new(name.clone())),
        OpenCode::NAME => Arc::new(OpenCode::new(name.clone())),
        _ => return None,
    })
}
