//! The fence between writers, and its selection by the configuration or by a probe of the store.

use std::str::FromStr;
use std::sync::Arc;

use tokio::sync::OnceCell;

use super::probe::has_conditional_create;
use crate::error::{Error, Result};
use crate::index::FenceTable;
use crate::store::Store;
use crate::sys::Rng;

/// The mechanism that lets exactly one writer create a `seq`.
#[derive(Clone)]
pub enum Fence {
    /// The store's conditional create.
    Store,
    /// A row per log in the database, for stores that ignore conditions.
    Database(Arc<dyn FenceTable>),
    /// No fence, as configured.
    Off,
}

impl Fence {
    /// Its name in `status`, logs and settings.
    pub fn as_str(&self) -> &'static str {
        match self {
            Fence::Store => "store",
            Fence::Database(_) => "database",
            Fence::Off => "off",
        }
    }
}

/// The configured choice of the fence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FencingPolicy {
    /// The store if a probe shows that it can fence, otherwise the database.
    #[default]
    Auto,
    /// The store, without a probe.
    Store,
    /// The database.
    Database,
    /// No fence: two writers may interleave.
    Off,
}

impl FromStr for FencingPolicy {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(FencingPolicy::Auto),
            "store" => Ok(FencingPolicy::Store),
            "database" => Ok(FencingPolicy::Database),
            "off" => Ok(FencingPolicy::Off),
            _ => Err(Error::usage(format!(
                "invalid --fencing value {text:?}: expected auto, store, database or off"
            ))),
        }
    }
}

/// The fence, chosen at the first write, so that a process can start while the store is down.
pub struct Fencing {
    policy: FencingPolicy,
    table: Arc<dyn FenceTable>,
    /// Whether other machines use the same database.
    table_is_shared: bool,
    chosen: OnceCell<Fence>,
}

impl Fencing {
    /// A selection by `policy`; `table` is for stores that cannot fence.
    pub fn new(policy: FencingPolicy, table: Arc<dyn FenceTable>, table_is_shared: bool) -> Self {
        Fencing {
            policy,
            table,
            table_is_shared,
            chosen: OnceCell::new(),
        }
    }

    /// Returns the fence, and chooses it at the first call. After an `Unavailable` error, call
    /// again.
    pub async fn choose(&self, store: &dyn Store, rng: &Arc<dyn Rng>) -> Result<Fence> {
        self.chosen
            .get_or_try_init(|| self.choose_by_policy(store, rng))
            .await
            .cloned()
    }

    /// The name of the fence, once it is chosen.
    pub fn as_str(&self) -> &'static str {
        self.chosen.get().map_or("not chosen yet", Fence::as_str)
    }

    async fn choose_by_policy(&self, store: &dyn Store, rng: &Arc<dyn Rng>) -> Result<Fence> {
        match self.policy {
            FencingPolicy::Store => return Ok(Fence::Store),
            FencingPolicy::Database => return Ok(Fence::Database(self.table.clone())),
            FencingPolicy::Off => return Ok(Fence::Off),
            FencingPolicy::Auto => {}
        }
        if has_conditional_create(store, rng).await? {
            return Ok(Fence::Store);
        }
        if self.table_is_shared {
            tracing::info!(
                store = store.address(),
                "the store ignores conditional creates; fencing through the database"
            );
            return Ok(Fence::Database(self.table.clone()));
        }
        Err(Error::usage(format!(
            "{} ignores conditional creates, so it cannot fence writers",
            store.address()
        ))
        .hint("set --index postgres://… to fence through the database, or --fencing off if there is never more than one writer"))
    }
}
