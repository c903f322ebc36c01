//! A connection for one call.

use std::ops::{Deref, DerefMut};

use sqlx::pool::PoolConnection;
use sqlx::{Any, AnyConnection};

/// The first connection of the process, or a connection of the pool.
pub(super) enum IndexConnection {
    First(AnyConnection),
    Pooled(PoolConnection<Any>),
}

impl Deref for IndexConnection {
    type Target = AnyConnection;

    fn deref(&self) -> &AnyConnection {
        match self {
            IndexConnection::First(connection) => connection,
            IndexConnection::Pooled(connection) => connection,
        }
    }
}

impl DerefMut for IndexConnection {
    fn deref_mut(&mut self) -> &mut AnyConnection {
        match self {
            IndexConnection::First(connection) => connection,
            IndexConnection::Pooled(connection) => connection,
        }
    }
}
