//! One machine: a volume, its agent, and the sessiond that runs there, if any.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use age::x25519::Identity;
use sessiond::agent::Profile;
use sessiond::agent::claude_code::ClaudeCode;
use sessiond::capture::watch::EventBuffer;
use sessiond::capture::{self, EntryLimits, IndexQueue, Streamer, StreamerHandle};
use sessiond::daemon::compactor;
use sessiond::daemon::indexer::{Indexer, queue_stale_logs};
use sessiond::error::Result;
use sessiond::index::Index;
use sessiond::log::fence::FencingPolicy;
use sessiond::log::witness::{Witness, WitnessMode};
use sessiond::log::{Fencing, Logs};
use sessiond::model::LogId;
use sessiond::restore::{self, Options, RestoreReport};
use sessiond::store::Store;
use sessiond::store::encrypted::EncryptedStore;
use sessiond::store::encrypted::keyring::Keyring;
use sessiond::store::encrypted::policy::{EncryptionPolicy, PlaintextReads};
use sessiond::store::retrying::RetryingReads;
use sessiond::store::signature::{self, SignaturePolicy, SignatureSettings};
use sessiond::sys::{Directory, Rng};
use tokio::task::JoinHandle;

use super::agent::{Agent, SESSION};
use super::bucket::{Bucket, Connection};
use super::disk::{Disk, Mount, SimWatch};
use super::history::Files;
use super::process::ProcessLifetime;
use super::rng::{ProcessRng, SeededRng};
use super::schedule::MIXES;
use super::tables::{Session, Tables};
use super::world::{HostClock, World};

/// The key that all machines share.
static IDENTITY: LazyLock<Identity> = LazyLock::new(Identity::generate);

/// The keys of a run: one seed in eight encrypts to the shared identity, one to a configured
/// recipient.
fn keyring_of(seed: u64) -> Option<Keyring> {
    let recipients = match seed / MIXES.len() as u64 % 8 {
        3 => Vec::new(),
        6 => vec![IDENTITY.to_public()],
        _ => return None,
    };
    Some(Keyring::new(recipients, vec![IDENTITY.clone()]))
}

/// The signing key that all machines share.
static SIGNATURES: LazyLock<SignaturePolicy> = LazyLock::new(|| {
    let (file, public) = signature::generate().expect("random numbers");
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("signing.key");
    std::fs::write(&path, file).expect("a temporary file");
    // A key that other users can read is refused.
    let private = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(&path, private).expect("a temporary file");
    SignaturePolicy::load(&SignatureSettings {
        signing_key: Some(path),
        trusted_keys: vec![public],
    })
    .expect("valid keys")
});

/// The signatures of a run: one seed in eight signs, and one in eight signs and encrypts.
fn signatures_of(seed: u64) -> Option<SignaturePolicy> {
    matches!(seed / MIXES.len() as u64 % 8, 5 | 6).then(|| SIGNATURES.clone())
}

/// What all machines share.
#[derive(Clone)]
pub struct Cloud {
    pub world: Arc<World>,
    pub bucket: Arc<Bucket>,
    pub tables: Arc<Tables>,
    pub profile: Arc<dyn Profile>,
    pub seed: u64,
    /// The sizes of entries.
    limits: EntryLimits,
    /// How all processes encrypt.
    encryption: EncryptionPolicy,
    /// How all processes sign.
    signatures: Option<SignaturePolicy>,
}

impl Cloud {
    /// Whether a process without keys cannot write anything that the others accept.
    pub fn is_protected(&self) -> bool {
        self.signatures.is_some() || self.encryption.keyring.encrypts()
    }

    pub fn new(world: Arc<World>, honors_conditions: bool, seed: u64) -> Cloud {
        let keyring = keyring_of(seed);
        let identity = keyring.is_some().then(|| IDENTITY.clone());
        let bucket = Bucket::new(honors_conditions, identity);
        let keyring = keyring.unwrap_or_default();
        let plaintext_reads = PlaintextReads::default_for(&keyring);
        let encryption = EncryptionPolicy::new(keyring, plaintext_reads);
        let profile = Arc::new(ClaudeCode::new(ClaudeCode::NAME.parse().expect("plain")));
        Cloud {
            world,
            bucket,
            tables: Arc::default(),
            profile,
            seed,
            // Every second tool result is uploaded in parts.
            limits: EntryLimits {
                part: 40,
                ..EntryLimits::default()
            },
            encryption,
            signatures: signatures_of(seed),
        }
    }

    /// Logs as one process sees them.
    pub fn logs(
        &self,
        lifetime: &Arc<ProcessLifetime>,
        clock: Arc<HostClock>,
    ) -> (Logs, Arc<Session>) {
        let connection = Connection {
            bucket: self.bucket.clone(),
            world: self.world.clone(),
            lifetime: lifetime.clone(),
        };
        let index = Arc::new(Session {
            tables: self.tables.clone(),
            world: self.world.clone(),
            lifetime: lifetime.clone(),
        });
        let rng: Arc<dyn Rng> = Arc::new(ProcessRng::new(SeededRng::new(
            self.seed,
            1000 + lifetime.number,
        )));
        let store = Arc::new(RetryingReads::new(Arc::new(connection), rng.clone()));
        let fence = Arc::new(Fencing::new(FencingPolicy::Auto, index.clone(), true));
        (self.logs_of(store, fence, clock, rng), index)
    }

    pub fn logs_of(
        &self,
        store: Arc<dyn Store>,
        fence: Arc<Fencing>,
        clock: Arc<HostClock>,
        rng: Arc<dyn Rng>,
    ) -> Logs {
        Logs {
            store: Arc::new(
                EncryptedStore::new(store, self.encryption.clone())
                    .with_signatures(self.signatures.clone().unwrap_or_default()),
            ),
            fence,
            namespace: "sim".parse().expect("plain"),
            agent: self.profile.name().clone(),
            clock,
            rng,
            recent: Arc::default(),
            progress: Arc::default(),
        }
    }

    pub fn id(&self) -> LogId {
        LogId {
            namespace: "sim".parse().expect("plain"),
            agent: self.profile.name().clone(),
            name: SESSION.parse().expect("plain"),
        }
    }
}

/// What runs on a machine.
pub enum Process {
    Daemon {
        lifetime: Arc<ProcessLifetime>,
        handle: StreamerHandle,
        tasks: Vec<JoinHandle<()>>,
    },
    Restore {
        lifetime: Arc<ProcessLifetime>,
        task: JoinHandle<Result<RestoreReport>>,
        before: Files,
    },
    /// The final flush. The handle stays until it has ended: a streamer without a handle spins.
    Ending {
        lifetime: Arc<ProcessLifetime>,
        task: JoinHandle<()>,
        tasks: Vec<JoinHandle<()>>,
    },
}

impl Process {
    pub fn lifetime(&self) -> &Arc<ProcessLifetime> {
        match self {
            Process::Daemon { lifetime, .. }
            | Process::Restore { lifetime, .. }
            | Process::Ending { lifetime, .. } => lifetime,
        }
    }
}

/// Queues entries of an earlier process that the index has not received.
async fn find_stale(
    queue: Arc<IndexQueue>,
    index: Arc<dyn Index>,
    logs: Logs,
    directory: Arc<dyn Directory>,
) {
    let names = vec![SESSION.parse().expect("plain")];
    while queue_stale_logs(&queue, &*index, &logs, &*directory, &names)
        .await
        .is_err()
    {
        tokio::time::sleep(Duration::from_secs(2)).await;
    }
}

/// One machine.
pub struct Machine {
    pub disk: Arc<Disk>,
    pub agent: Agent,
    /// The agent has exited.
    pub has_agent_exited: bool,
    pub process: Option<Process>,
    /// The next process crashes at this step.
    armed: Option<(u64, bool)>,
}

impl Machine {
    pub fn new(world: &Arc<World>, volume: u64) -> Machine {
        let disk = Disk::new(volume, HostClock::new(world.clone()));
        Machine {
            disk,
            agent: Agent::default(),
            has_agent_exited: false,
            process: None,
            armed: None,
        }
    }

    pub fn volume(&self) -> u64 {
        self.disk.volume
    }

    /// Crashes the process at one of its next steps, or the next process if none runs.
    pub fn crash_in(&mut self, steps: u64, after: bool) {
        match &self.process {
            Some(process) => process.lifetime().crash_in(steps, after),
            None => self.armed = Some((steps, after)),
        }
    }

    pub fn disarm(&mut self) {
        self.armed = None;
        if let Some(process) = &self.process {
            process.lifetime().cancel_crash();
        }
    }

    fn start_process(&mut self, number: u64) -> Arc<ProcessLifetime> {
        let lifetime = Arc::new(ProcessLifetime::new(number, self.volume()));
        if let Some((steps, after)) = self.armed.take() {
            lifetime.crash_in(steps, after);
        }
        lifetime
    }

    fn mount(&self, cloud: &Cloud, lifetime: &Arc<ProcessLifetime>) -> Arc<dyn Directory> {
        Arc::new(Mount {
            disk: self.disk.clone(),
            world: cloud.world.clone(),
            lifetime: lifetime.clone(),
        })
    }

    /// Starts a daemon, as `daemon/service.rs` does.
    pub fn start(&mut self, cloud: &Cloud, number: u64) {
        let lifetime = self.start_process(number);
        let (logs, index) = cloud.logs(&lifetime, self.disk.clock.clone());
        let directory = self.mount(cloud, &lifetime);
        let hints = Arc::new(EventBuffer::default());
        let context = capture::CaptureContext {
            directory: directory.clone(),
            profile: cloud.profile.clone(),
            logs: logs.clone(),
            index_queue: Arc::default(),
            compaction_queue: Arc::default(),
            metadata_queue: None,
            counters: Arc::default(),
            flush_interval: Duration::from_millis(200),
            checkpoints: Default::default(),
            max_concurrent_flushes: 8,
            limits: cloud.limits,
            session_limit: capture::SessionLimit::default(),
        };
        let index_queue = context.index_queue.clone();
        let compaction_queue = context.compaction_queue.clone();
        self.disk.set_watcher(Some(hints.clone()));
        let root: PathBuf = self.disk.root();
        let Ok(handle) =
            Streamer::start(context, root, hints, Box::new(SimWatch(self.disk.clone())))
        else {
            return self.disk.set_watcher(None);
        };
        let follower = Indexer {
            queue: index_queue.clone(),
            counters: Arc::default(),
            index: index.clone(),
            logs: logs.clone(),
            profile: cloud.profile.clone(),
            reachable: Arc::new(AtomicBool::new(true)),
        };
        let compactor = compactor::run(compaction_queue, Arc::default(), logs.clone());
        let tasks = vec![
            tokio::spawn(follower.run()),
            tokio::spawn(compactor),
            tokio::spawn(find_stale(index_queue, index, logs, directory)),
        ];
        self.process = Some(Process::Daemon {
            lifetime,
            handle,
            tasks,
        });
    }

    /// Takes the session over.
    pub fn restore(&mut self, cloud: &Cloud, number: u64) {
        let before = self.disk.files();
        let lifetime = self.start_process(number);
        let (logs, index) = cloud.logs(&lifetime, self.disk.clock.clone());
        let witness = Witness::new(Some(index), WitnessMode::Auto);
        let context = restore::RestoreContext {
            directory: self.mount(cloud, &lifetime),
            profile: cloud.profile.clone(),
            logs,
        };
        let id = cloud.id();
        let task = tokio::task::spawn_local(async move {
            let options = Options {
                claim: true,
                witness,
                ..Options::default()
            };
            let restored = restore::restore(&context, &id, &options).await;
            restored.map(|restored| restored.report)
        });
        self.process = Some(Process::Restore {
            lifetime,
            task,
            before,
        });
    }

    /// The agent has exited: runs the final flush, with a deadline of ten seconds.
    pub fn finish(&mut self) {
        match self.process.take() {
            Some(Process::Daemon {
                lifetime,
                handle,
                tasks,
            }) => {
                let task = tokio::spawn(async move {
                    let _ = handle
                        .finish(tokio::time::Instant::now() + Duration::from_secs(10))
                        .await;
                });
                self.process = Some(Process::Ending {
                    lifetime,
                    task,
                    tasks,
                });
            }
            other => self.process = other,
        }
    }

    /// Kills the process without warning.
    pub fn kill(&mut self) {
        self.disk.set_watcher(None);
        let Some(process) = self.process.take() else {
            return;
        };
        process.lifetime().kill();
        match process {
            Process::Daemon { tasks, .. } => tasks.iter().for_each(JoinHandle::abort),
            Process::Restore { task, .. } => task.abort(),
            // It ends at its deadline, without any effect.
            Process::Ending { tasks, .. } => tasks.iter().for_each(JoinHandle::abort),
        }
    }
}
