//! Live changes: one poller per session and one per namespace, however many clients subscribe.
//!
//! A poller runs while it has subscribers. It costs what `tail -f` costs.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::broadcast::{Receiver, Sender, channel};

use crate::agent::Profile;
use crate::error::{Error, Result};
use crate::history::display::DisplayMessage;
use crate::history::{FollowEvent, Follower};
use crate::index::{Catalog, SessionFilter, SessionRow};
use crate::log::Logs;
use crate::model::{LogId, Namespace};

/// Time between two polls of a session. A writer flushes at most once a second by default.
const SESSION_INTERVAL: Duration = Duration::from_secs(1);

/// Time between two polls of the list.
const LIST_INTERVAL: Duration = Duration::from_secs(2);

/// Number of sessions that a poll of the list compares: those that changed last.
const LIST_LEN: u32 = 200;

/// Events that a subscriber may be behind before it loses the oldest.
const MAX_BEHIND: usize = 1024;

/// A change of a session.
#[derive(Debug, Clone)]
pub enum SessionChange {
    /// A new message.
    Message(Arc<DisplayMessage>),
    /// The session was removed; it can be undeleted.
    Removed,
    /// The entries after the last one cannot be read.
    Damaged(Arc<str>),
    /// The session cannot be followed any longer.
    Failed(Arc<str>),
}

/// The pollers of a server.
#[derive(Default)]
pub struct Feeds {
    sessions: Pollers<LogId, SessionChange>,
    lists: Pollers<Namespace, Arc<SessionRow>>,
}

impl Feeds {
    /// The changes of a session from now on.
    pub fn session(
        &self,
        logs: &Logs,
        profile: &Arc<dyn Profile>,
        id: &LogId,
    ) -> Receiver<SessionChange> {
        let (logs, profile, id) = (logs.clone(), profile.clone(), id.clone());
        self.sessions.subscribe(id.clone(), |pollers, sender| {
            tokio::spawn(async move {
                let followed = follow(&logs, &*profile, &id, &pollers, &sender).await;
                if let Err(error) = followed {
                    let _ = sender.send(SessionChange::Failed(error.to_string().into()));
                    pollers.remove(&id);
                }
            });
        })
    }

    /// The sessions of a namespace that change from now on.
    pub fn list(
        &self,
        index: &Arc<dyn Catalog>,
        namespace: &Namespace,
    ) -> Receiver<Arc<SessionRow>> {
        let (index, namespace) = (index.clone(), namespace.clone());
        self.lists.subscribe(namespace.clone(), |pollers, sender| {
            tokio::spawn(poll_list(index, namespace, pollers, sender));
        })
    }
}

/// The pollers of one kind, by what they poll.
struct Pollers<K, T>(Arc<Mutex<HashMap<K, Sender<T>>>>);

impl<K, T> Default for Pollers<K, T> {
    fn default() -> Self {
        Pollers(Arc::default())
    }
}

impl<K, T> Clone for Pollers<K, T> {
    fn clone(&self) -> Self {
        Pollers(self.0.clone())
    }
}

impl<K: Hash + Eq, T: Clone> Pollers<K, T> {
    fn lock(&self) -> MutexGuard<'_, HashMap<K, Sender<T>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Subscribes to a poller, and starts it if nobody else has.
    fn subscribe(&self, key: K, start: impl FnOnce(Self, Sender<T>)) -> Receiver<T> {
        let mut pollers = self.lock();
        if let Some(sender) = pollers.get(&key) {
            return sender.subscribe();
        }
        let (sender, receiver) = channel(MAX_BEHIND);
        pollers.insert(key, sender.clone());
        drop(pollers);
        start(self.clone(), sender);
        receiver
    }

    fn remove(&self, key: &K) {
        self.lock().remove(key);
    }

    /// Whether a poller has subscribers. One without is removed, so that the next subscriber starts
    /// another. The lock keeps a subscriber from joining in between.
    fn is_needed(&self, key: &K, sender: &Sender<T>) -> bool {
        let mut pollers = self.lock();
        if sender.receiver_count() > 0 {
            return true;
        }
        pollers.remove(key);
        false
    }
}

/// Sends the changes of a session until nobody subscribes.
async fn follow(
    logs: &Logs,
    profile: &dyn Profile,
    id: &LogId,
    pollers: &Pollers<LogId, SessionChange>,
    sender: &Sender<SessionChange>,
) -> Result<()> {
    let (mut follower, _) = Follower::start(logs, profile, id, 0, false).await?;
    let send = |events: Vec<FollowEvent>| -> Result<bool> {
        for event in events {
            let change = match event {
                FollowEvent::Message(message) => SessionChange::Message(Arc::from(message)),
                FollowEvent::Removed => SessionChange::Removed,
                FollowEvent::Damaged(damage) => SessionChange::Damaged(damage.into()),
            };
            let _ = sender.send(change);
        }
        Ok(pollers.is_needed(id, sender))
    };
    follower.follow(SESSION_INTERVAL, send).await
}

/// Sends the sessions whose rows change until nobody subscribes.
async fn poll_list(
    index: Arc<dyn Catalog>,
    namespace: Namespace,
    pollers: Pollers<Namespace, Arc<SessionRow>>,
    sender: Sender<Arc<SessionRow>>,
) {
    let mut known: Option<HashMap<(String, String), SessionRow>> = None;
    while pollers.is_needed(&namespace, &sender) {
        match newest(&*index, &namespace).await {
            Ok(rows) => {
                for (key, row) in &rows {
                    let is_new = |known: &HashMap<_, _>| known.get(key) != Some(row);
                    if known.as_ref().is_some_and(is_new) {
                        let _ = sender.send(Arc::new(row.clone()));
                    }
                }
                known = Some(rows);
            }
            Err(error) => tracing::warn!(%error, "cannot poll the index; retrying"),
        }
        tokio::time::sleep(LIST_INTERVAL).await;
    }
}

async fn newest(
    index: &dyn Catalog,
    namespace: &Namespace,
) -> Result<HashMap<(String, String), SessionRow>, Error> {
    let filter = SessionFilter {
        namespace: namespace.clone(),
        agent: None,
        id_prefix: None,
        project: None,
        status: None,
        request: None,
        labels: Vec::new(),
        model: None,
        since: None,
        until: None,
        title: None,
        limit: LIST_LEN,
        cursor: None,
    };
    let rows = index.sessions(&filter).await?.sessions.into_iter();
    Ok(rows
        .map(|row| ((row.agent.clone(), row.id.clone()), row))
        .collect())
}
