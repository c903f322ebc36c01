//! One machine: a volume, its agent, and the sessiond that runs there, if any.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use sessiond::agent::Profile;
use sessiond::agent::claude_code::ClaudeCode;
use sessiond::capture::watch::EventBuffer;
use sessiond::capture::{self, Feed, Streamer, StreamerHandle};
use sessiond::daemon::compactor;
use sessiond::daemon::indexer::{Indexer, mark_stale};
use sessiond::error::Result;
use sessiond::index::Index;
use sessiond::log::fence::FencingPolicy;
use sessiond::log::{Fencing, Logs};
use sessiond::model::LogId;
use sessiond::restore::{self, Options, RestoreReport};
use sessiond::store::Store;
use sessiond::store::retrying::RetryingReads;
use sessiond::sys::{Directory, Rng};
use tokio::task::JoinHandle;

use super::agent::{Agent, SESSION};
use super::bucket::{Bucket, Way};
use super::dice::{Coins, Dice};
use super::disk::{Disk, Mount, SimWatch};
use super::history::Files;
use super::life::Life;
use super::tables::{Session, Tables};
use super::world::{HostClock, World};

/// What all machines reach.
#[derive(Clone)]
pub struct Cloud {
    pub world: Arc<World>,
    pub bucket: Arc<Bucket>,
    pub tables: Arc<Tables>,
    pub profile: Arc<dyn Profile>,
    pub seed: u64,
}

impl Cloud {
    pub fn new(world: Arc<World>, bucket: Arc<Bucket>, seed: u64) -> Cloud {
        let profile = Arc::new(ClaudeCode::new(ClaudeCode::NAME.parse().expect("plain")));
        Cloud {
            world,
            bucket,
            tables: Arc::default(),
            profile,
            seed,
        }
    }

    /// Logs as one process sees them.
    pub fn logs(&self, life: &Arc<Life>, clock: Arc<HostClock>) -> (Logs, Arc<Session>) {
        let way = Way {
            bucket: self.bucket.clone(),
            world: self.world.clone(),
            life: life.clone(),
        };
        let index = Arc::new(Session {
            tables: self.tables.clone(),
            world: self.world.clone(),
            life: life.clone(),
        });
        let rng: Arc<dyn Rng> = Arc::new(Coins::new(Dice::new(self.seed, 1000 + life.number)));
        let store = Arc::new(RetryingReads::new(Arc::new(way), rng.clone()));
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
            store,
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
        life: Arc<Life>,
        handle: StreamerHandle,
        tasks: Vec<JoinHandle<()>>,
    },
    Restore {
        life: Arc<Life>,
        task: JoinHandle<Result<RestoreReport>>,
        before: Files,
    },
    /// The final flush. The handle stays until it has ended: a streamer that nobody can ask any more spins.
    Ending {
        life: Arc<Life>,
        task: JoinHandle<()>,
        tasks: Vec<JoinHandle<()>>,
    },
}

impl Process {
    pub fn life(&self) -> &Arc<Life> {
        match self {
            Process::Daemon { life, .. }
            | Process::Restore { life, .. }
            | Process::Ending { life, .. } => life,
        }
    }
}

/// Finds out whether an earlier life wrote what the index has not heard of.
async fn find_stale(
    feed: Arc<Feed>,
    index: Arc<dyn Index>,
    logs: Logs,
    directory: Arc<dyn Directory>,
) {
    let names = vec![SESSION.parse().expect("plain")];
    while mark_stale(&feed, &*index, &logs, &*directory, &names)
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
    pub agent_gone: bool,
    pub process: Option<Process>,
    /// The next life ends at this step.
    armed: Option<(u64, bool)>,
}

impl Machine {
    pub fn new(world: &Arc<World>, volume: u64) -> Machine {
        let disk = Disk::new(volume, HostClock::new(world.clone()));
        Machine {
            disk,
            agent: Agent::default(),
            agent_gone: false,
            process: None,
            armed: None,
        }
    }

    pub fn volume(&self) -> u64 {
        self.disk.volume
    }

    /// Ends the process at one of its next steps, or at one of the next process's.
    pub fn crash_in(&mut self, steps: u64, after: bool) {
        match &self.process {
            Some(process) => process.life().crash_in(steps, after),
            None => self.armed = Some((steps, after)),
        }
    }

    pub fn disarm(&mut self) {
        self.armed = None;
        if let Some(process) = &self.process {
            process.life().never_mind_the_crash();
        }
    }

    fn new_life(&mut self, number: u64) -> Arc<Life> {
        let life = Arc::new(Life::new(number, self.volume()));
        if let Some((steps, after)) = self.armed.take() {
            life.crash_in(steps, after);
        }
        life
    }

    fn mount(&self, cloud: &Cloud, life: &Arc<Life>) -> Arc<dyn Directory> {
        Arc::new(Mount {
            disk: self.disk.clone(),
            world: cloud.world.clone(),
            life: life.clone(),
        })
    }

    /// Starts a daemon, as `daemon/service.rs` does.
    pub fn start(&mut self, cloud: &Cloud, number: u64) {
        let life = self.new_life(number);
        let (logs, index) = cloud.logs(&life, self.disk.clock.clone());
        let (directory, feed, hints) = (
            self.mount(cloud, &life),
            Arc::new(Feed::default()),
            Arc::new(EventBuffer::default()),
        );
        let context = capture::Context {
            directory: directory.clone(),
            profile: cloud.profile.clone(),
            logs: logs.clone(),
            feed: feed.clone(),
            flush_interval: Duration::from_millis(200),
            parallel: 8,
        };
        self.disk.watched_by(Some(hints.clone()));
        let root: PathBuf = self.disk.root();
        let Ok(handle) =
            Streamer::start(context, root, hints, Box::new(SimWatch(self.disk.clone())))
        else {
            return self.disk.watched_by(None);
        };
        let follower = Indexer {
            feed: feed.clone(),
            index: index.clone(),
            logs: logs.clone(),
            profile: cloud.profile.clone(),
            answers: Arc::new(AtomicBool::new(true)),
        };
        let merges = tokio::spawn(compactor::run(feed.clone(), logs.clone()));
        let tasks = vec![
            tokio::spawn(follower.run()),
            merges,
            tokio::spawn(find_stale(feed, index, logs, directory)),
        ];
        self.process = Some(Process::Daemon {
            life,
            handle,
            tasks,
        });
    }

    /// Takes the session over.
    pub fn restore(&mut self, cloud: &Cloud, number: u64) {
        let before = self.disk.files();
        let life = self.new_life(number);
        let (logs, _) = cloud.logs(&life, self.disk.clock.clone());
        let context = restore::Context {
            directory: self.mount(cloud, &life),
            profile: cloud.profile.clone(),
            logs,
        };
        let id = cloud.id();
        let task = tokio::task::spawn_local(async move {
            restore::restore(
                &context,
                &id,
                &Options {
                    claim: true,
                    ..Options::default()
                },
            )
            .await
        });
        self.process = Some(Process::Restore { life, task, before });
    }

    /// The agent is gone: the final flush, which gives up after ten seconds.
    pub fn finish(&mut self) {
        match self.process.take() {
            Some(Process::Daemon {
                life,
                handle,
                tasks,
            }) => {
                let task = tokio::spawn(async move {
                    let _ = handle
                        .finish(tokio::time::Instant::now() + Duration::from_secs(10))
                        .await;
                });
                self.process = Some(Process::Ending { life, task, tasks });
            }
            other => self.process = other,
        }
    }

    /// The process is gone, from one moment to the next.
    pub fn kill(&mut self) {
        self.disk.watched_by(None);
        let Some(process) = self.process.take() else {
            return;
        };
        process.life().kill();
        match process {
            Process::Daemon { tasks, .. } => tasks.iter().for_each(JoinHandle::abort),
            Process::Restore { task, .. } => task.abort(),
            // It ends by itself at its deadline, without any effect.
            Process::Ending { tasks, .. } => tasks.iter().for_each(JoinHandle::abort),
        }
    }
}
