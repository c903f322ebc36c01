//! What keeps two writers apart, and the choice of it: by what the store can do, or by what the user said.

use std::str::FromStr;
use std::sync::Arc;

use tokio::sync::OnceCell;

use super::probe::conditional_create;
use crate::error::{Error, Result};
use crate::index::Index;
use crate::store::Store;
use crate::sys::Rng;

/// What keeps two writers apart.
#[derive(Clone)]
pub enum Fence {
    /// The store's conditional create: the number itself is the fence.
    Store,
    /// One row a session in the database, for stores that ignore conditions.
    Database(Arc<dyn Index>),
    /// Nothing; the user said so.
    Off,
}

impl Fence {
    /// The word for it in `status`, logs and settings.
    pub fn word(&self) -> &'static str {
        match self {
            Fence::Store => "store",
            Fence::Database(_) => "database",
            Fence::Off => "off",
        }
    }
}

/// What the user said about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FencingPolicy {
    /// Ask the store; if it cannot, the database.
    #[default]
    Auto,
    /// The store, without asking it.
    Store,
    /// The database.
    Database,
    /// Nothing: two writers may interleave.
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
            _ => Err(Error::usage(format!("read fencing {text:?}"))
                .hint("use auto, store, database or off")),
        }
    }
}

/// The choice, made at the first write: a store that is down at the start does not keep us from starting.
pub struct Fencing {
    wanted: FencingPolicy,
    index: Arc<dyn Index>,
    /// Whether other machines see the same database.
    index_is_shared: bool,
    chosen: OnceCell<Fence>,
}

impl Fencing {
    /// Fences as `wanted`, through `index` where the store cannot.
    pub fn new(wanted: FencingPolicy, index: Arc<dyn Index>, index_is_shared: bool) -> Self {
        Fencing {
            wanted,
            index,
            index_is_shared,
            chosen: OnceCell::new(),
        }
    }

    /// The fence. An error of kind `Unavailable` means: ask again.
    pub async fn choose(&self, store: &dyn Store, rng: &Arc<dyn Rng>) -> Result<Fence> {
        self.chosen
            .get_or_try_init(|| self.find(store, rng))
            .await
            .cloned()
    }

    /// The word for the fence, once it is chosen.
    pub fn word(&self) -> &'static str {
        self.chosen.get().map_or("not chosen yet", Fence::word)
    }

    async fn find(&self, store: &dyn Store, rng: &Arc<dyn Rng>) -> Result<Fence> {
        match self.wanted {
            FencingPolicy::Store => return Ok(Fence::Store),
            FencingPolicy::Database => return Ok(Fence::Database(self.index.clone())),
            FencingPolicy::Off => return Ok(Fence::Off),
            FencingPolicy::Auto => {}
        }
        if conditional_create(store, rng).await? {
            return Ok(Fence::Store);
        }
        if self.index_is_shared {
            tracing::info!(
                store = store.address(),
                "the store ignores conditions; fencing through the database"
            );
            return Ok(Fence::Database(self.index.clone()));
        }
        Err(Error::usage(format!("{} ignores conditional writes, so it cannot keep two writers apart", store.address()))
            .hint("use --index postgres://… to fence through the database, or --fencing off if there is never a second writer"))
    }
}
