//! Settings → parts: the only file that names concrete back ends.

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
use crate::error::{Error, ErrorContext, Result, without_secret};
use crate::index::Catalog;
use crate::index::sql::{IndexOptions, SqlIndex};
use crate::log::Logs;
use crate::log::fence::{Fencing, FencingPolicy};
use crate::mirror::Mirror;
use crate::model::{AgentName, Namespace};
use crate::store::Store;
use crate::store::encrypted::EncryptedStore;
use crate::store::encrypted::keyring::Keyring;
use crate::store::file::FileStore;
use crate::store::limited::ConcurrencyLimited;
use crate::store::retrying::RetryingReads;
use crate::store::s3::{S3Settings, S3Store, Sse};
use crate::sys::{Disk, Rng, SystemClock, SystemRng};

/// Sessions flushed at a time, unless the user says otherwise.
pub const PARALLEL: usize = 8;

/// Requests to the store at a time, unless the user says otherwise: all that a restore reads of a log that is merged.
const REQUESTS: usize = 32;

/// The working parts.
#[derive(Clone)]
pub struct Parts {
    /// Where the logs are.
    pub store: Arc<dyn Store>,
    /// The view of them.
    pub index: Arc<dyn Catalog>,
    /// What we know of the agent.
    pub profile: Arc<dyn Profile>,
    /// The logs of the agent.
    pub logs: Logs,
    /// What keeps the files in step with a database, where the agent has its sessions in one.
    pub mirror: Option<Arc<Mirror>>,
    /// Who can open what is stored.
    pub keyring: Keyring,
    /// The store as it is, where encrypted things are encrypted.
    bare: Arc<dyn Store>,
    root: Option<PathBuf>,
}

impl Parts {
    /// Makes the parts; nothing is asked of any server yet.
    pub async fn make(settings: &Settings, parallel: Option<usize>) -> Result<Parts> {
        let environment = Environment::of_process();
        let keyring = Keyring::read(settings)?;
        if keyring.is_on() && settings.index_text {
            return Err(Error::usage(
                "keep text in the index: what is stored is encrypted, and the index would not be",
            )
            .hint("leave --index-text out, or --encrypt-to and --identity"));
        }
        let index_url = match &settings.index {
            Some(url) => url.clone(),
            None => format!(
                "sqlite://{}",
                environment.data()?.join("index.db").display()
            ),
        };
        let store = ConcurrencyLimited::new(
            store(settings, &environment).await?,
            parallel.unwrap_or(REQUESTS),
        );
        let rng: Arc<dyn Rng> = Arc::new(SystemRng);
        let bare: Arc<dyn Store> = Arc::new(RetryingReads::new(Arc::new(store), rng.clone()));
        let store: Arc<dyn Store> = Arc::new(EncryptedStore::new(bare.clone(), keyring.clone()));
        let terms = IndexOptions {
            prices: settings.prices.clone(),
            text: settings.index_text,
            sealed: keyring.is_on(),
        };
        let index: Arc<dyn Catalog> = Arc::new(SqlIndex::open(&index_url)?.on(terms));
        let profile = profile(settings)?;
        let root = find_root(settings, &*profile, &environment)?;
        let namespace: Namespace = settings.namespace.as_deref().unwrap_or("default").parse()?;
        let wanted: FencingPolicy = settings.fencing.as_deref().unwrap_or("auto").parse()?;
        let shared = index_url.starts_with("postgres");
        let logs = Logs {
            store: store.clone(),
            fence: Arc::new(Fencing::new(wanted, index.clone(), shared)),
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
            keyring,
            bare,
            root: None,
        };
        Ok(root.map_or(parts.clone(), |root| parts.rooted_at(root)))
    }

    /// The agent's directory.
    pub fn root(&self) -> Result<&Path> {
        self.root.as_deref().ok_or_else(|| no_root(&*self.profile))
    }

    /// The agent's directory, to read and write. A root that is itself a link is followed, once.
    pub fn directory(&self) -> Result<Arc<Disk>> {
        Ok(Arc::new(Disk::new(self.root()?)))
    }

    /// The same parts for another directory of the agent's.
    #[must_use]
    pub fn rooted_at(&self, root: PathBuf) -> Parts {
        let mirror = mirror(&*self.profile, &root).map(Arc::new);
        let root = mirror.as_ref().map_or(root, |mirror| mirror.directory());
        let keyring = self.keyring.at(Arc::new(Disk::new(&root)));
        let store: Arc<dyn Store> = Arc::new(EncryptedStore::new(self.bare.clone(), keyring));
        let logs = Logs {
            store: store.clone(),
            ..self.logs.clone()
        };
        Parts {
            root: Some(root),
            mirror,
            store,
            logs,
            ..self.clone()
        }
    }
}

/// The agent's directory, for who only wants to speak to the daemon that keeps it.
pub fn root_of(settings: &Settings) -> Result<PathBuf> {
    let profile = profile(settings)?;
    let root = find_root(settings, &*profile, &Environment::of_process())?
        .ok_or_else(|| no_root(&*profile))?;
    Ok(mirror(&*profile, &root).map_or(root, |mirror| mirror.directory()))
}

/// The directory of a session store, which is nobody else's: one that is named, or one in the data directory.
pub fn store_dir(settings: &Settings) -> Result<PathBuf> {
    let environment = Environment::of_process();
    let profile = profile(settings)?;
    let Some(named) =
        find_root(settings, &*profile, &environment)?.filter(|_| settings.root.is_some())
    else {
        return Ok(environment.data()?.join("session-store"));
    };
    if profile
        .root(environment.home.as_deref(), &variable)
        .is_some_and(|agents| agents == named)
    {
        return Err(Error::usage(format!(
            "keep a session store in {}: that is the agent's own directory",
            named.display()
        ))
        .hint("sessiond daemon keeps that one; give --root another directory, or none"));
    }
    Ok(named)
}

/// What keeps the files in step with the database in the agent's directory, if it has its sessions in one.
fn mirror(profile: &dyn Profile, root: &Path) -> Option<Mirror> {
    (profile.name().as_str() == OpenCode::NAME).then(|| Mirror::new(root))
}

fn find_root(
    settings: &Settings,
    profile: &dyn Profile,
    environment: &Environment,
) -> Result<Option<PathBuf>> {
    match &settings.root {
        Some(root) => std::path::absolute(root)
            .map(Some)
            .map_err(|cause| Error::io(format!("find {}", root.display()), cause)),
        None => Ok(profile.root(environment.home.as_deref(), &variable)),
    }
}

fn no_root(profile: &dyn Profile) -> Error {
    Error::usage(format!(
        "agent {} has no directory of its own",
        profile.name()
    ))
    .hint("--root DIR says where its files are")
}

/// What a variable of the environment says; nothing if it is empty.
fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
}

/// What the environment says about where things are.
struct Environment {
    home: Option<PathBuf>,
    data: Option<PathBuf>,
}

impl Environment {
    fn of_process() -> Environment {
        let home = variable("HOME");
        // The XDG specification: a path that is not absolute is to be ignored.
        let data = variable("XDG_DATA_HOME")
            .filter(|path| path.is_absolute())
            .or_else(|| home.as_ref().map(|home| home.join(".local/share")));
        Environment { home, data }
    }

    fn data(&self) -> Result<PathBuf> {
        let data = self.data.as_ref().map(|data| data.join("sessiond"));
        data.ok_or_else(|| {
            Error::usage("find the data directory: neither HOME nor XDG_DATA_HOME is set")
                .hint("give --store and --index")
        })
    }
}

/// The configuration file that is read where none is named.
pub fn default_config_file() -> Option<PathBuf> {
    let configuration = variable("XDG_CONFIG_HOME")
        .filter(|path| path.is_absolute())
        .or_else(|| variable("HOME").map(|home| home.join(".config")));
    configuration.map(|path| path.join("sessiond/config.toml"))
}

async fn store(settings: &Settings, environment: &Environment) -> Result<Arc<dyn Store>> {
    let timeout = config::duration(
        "--request-timeout",
        settings.request_timeout.as_deref(),
        Duration::ZERO,
    )?;
    if settings.request_timeout.is_some() && timeout.is_zero() {
        return Err(
            Error::usage("--request-timeout: no request is answered in no time")
                .hint("leave it out, or give some seconds, such as 30s"),
        );
    }
    let Some(url) = &settings.store else {
        return Ok(Arc::new(FileStore::open(
            environment.data()?.join("store"),
        )?));
    };
    if url.starts_with("s3://") {
        let mut s3 = S3Settings::from_url(url)?;
        s3.region = settings.region.clone().or(s3.region);
        s3.endpoint = settings.endpoint.clone().or(s3.endpoint);
        s3.path_style = settings.path_style.or(s3.path_style);
        s3.ca_file = settings.ca_file.clone().or(s3.ca_file);
        s3.timeout = if settings.request_timeout.is_some() {
            timeout
        } else {
            s3.timeout
        };
        if let Some(sse) = &settings.sse {
            s3.sse = Some(sse_of(sse)?);
        }
        return Ok(Arc::new(
            S3Store::connect(s3)
                .await
                .with_context(|| "connect to the store")?,
        ));
    }
    if let Some(path) = url.strip_prefix("file://") {
        let path = percent_encoding::percent_decode_str(path)
            .decode_utf8_lossy()
            .into_owned();
        if !path.starts_with('/') {
            return Err(Error::usage(format!(
                "read store {}: the path must be absolute",
                without_secret(url)
            ))
            .hint("name a directory, such as file:///var/lib/sessiond"));
        }
        if path.trim_matches('/').is_empty() {
            return Err(Error::usage("read store file:///: that is the whole disk")
                .hint("name a directory, such as file:///var/lib/sessiond"));
        }
        return Ok(Arc::new(FileStore::open(PathBuf::from(path))?));
    }
    Err(Error::usage(format!(
        "read store {}: unknown kind of store",
        without_secret(url)
    ))
    .hint("use file:///PATH or s3://BUCKET/PREFIX?endpoint=URL"))
}

fn sse_of(text: &str) -> Result<Sse> {
    match text.split_once('=').unwrap_or((text, "")) {
        ("AES256", "") => Ok(Sse::Aes256),
        ("aws:kms", key) => Ok(Sse::Kms(Some(key.to_owned()).filter(|key| !key.is_empty()))),
        _ => Err(Error::usage(format!("read --sse {text:?}"))
            .hint("use AES256, aws:kms or aws:kms=KEY-ID")),
    }
}

fn profile(settings: &Settings) -> Result<Arc<dyn Profile>> {
    let name: AgentName = settings
        .agent
        .as_deref()
        .unwrap_or(ClaudeCode::NAME)
        .parse()?;
    if let Some(known) = known(&name) {
        return Ok(known);
    }
    match (name.as_str(), &settings.profile) {
        (_, Some(patterns)) => Ok(Arc::new(Generic::new(name, patterns)?)),
        (Generic::NAME, None) => Ok(Arc::new(Generic::new(name, &config::Patterns::default())?)),
        (other, None) => Err(
            Error::usage(format!("unknown agent {other:?}")).hint(format!(
                "{} and {} are known; for another, give a [profile] in the configuration file",
                AGENTS.join(", "),
                Generic::NAME
            )),
        ),
    }
}

/// The agents that we know something of.
pub const AGENTS: [&str; 4] = [ClaudeCode::NAME, Codex::NAME, Gemini::NAME, OpenCode::NAME];

/// Each of them and where it keeps its files, here.
pub fn agents_here() -> Vec<(Arc<dyn Profile>, PathBuf)> {
    let home = Environment::of_process().home;
    let profiles = AGENTS.iter().filter_map(|name| known(&name.parse().ok()?));
    profiles
        .filter_map(|profile| {
            profile
                .root(home.as_deref(), &variable)
                .map(|root| (profile, root))
        })
        .collect()
}

/// What we know of one of them.
fn known(name: &AgentName) -> Option<Arc<dyn Profile>> {
    Some(match name.as_str() {
        ClaudeCode::NAME => Arc::new(ClaudeCode::new(name.clone()).told(&variable)),
        Codex::NAME => Arc::new(Codex::new(name.clone())),
        Gemini::NAME => Arc::new(Gemini::new(name.clone())),
        OpenCode::NAME => Arc::new(OpenCode::new(name.clone())),
        _ => return None,
    })
}
