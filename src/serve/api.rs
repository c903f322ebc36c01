//! The state of the server, and who calls it.

use std::sync::Arc;

use axum::http::StatusCode;
use axum::http::header::HeaderMap;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::access::{AccessControl, Caller, Denied, Role, Roles};
use super::audit::{AuditLog, AuditRecord};
use super::feed::Feeds;
use super::problem::Problem;
use crate::error::{Error, ErrorKind, Result};
use crate::http::browser::{has_local_host, is_cross_origin};
use crate::http::server::Peer;
use crate::model::{Namespace, Prices};
use crate::wire::Parts;

/// Maximum number of operations that read a log at the same time. Each can need up to 16 MiB.
const MAX_LOG_READS: usize = 8;

/// Maximum number of connections that follow sessions.
const MAX_SUBSCRIPTIONS: usize = 128;

/// How callers are authenticated.
pub enum Authentication {
    /// Everybody who can connect from this machine is its owner.
    Local,
    /// By tokens, or by a trusted proxy.
    Access(AccessControl),
}

/// The state that all operations share.
pub struct Api {
    /// The store and the index.
    pub(super) parts: Parts,
    /// The prices of models.
    pub(super) prices: Prices,
    /// How callers are authenticated.
    pub(super) authentication: Authentication,
    /// The audit log.
    pub(super) audit: AuditLog,
    log_reads: Arc<Semaphore>,
    /// Places for clients that follow sessions.
    pub(super) subscriptions: Arc<Semaphore>,
    /// What they follow.
    pub(super) feeds: Feeds,
    /// Whether the server is about to stop: streams without an end then end.
    pub(super) stopping: watch::Sender<bool>,
}

impl Api {
    /// The API for a store and an index.
    pub fn new(
        parts: Parts,
        prices: Prices,
        authentication: Authentication,
        audit: AuditLog,
    ) -> Arc<Api> {
        Arc::new(Api {
            parts,
            prices,
            authentication,
            audit,
            log_reads: Arc::new(Semaphore::new(MAX_LOG_READS)),
            subscriptions: Arc::new(Semaphore::new(MAX_SUBSCRIPTIONS)),
            feeds: Feeds::default(),
            stopping: watch::Sender::new(false),
        })
    }

    /// Waits until another operation may read a log.
    pub(super) async fn log_read(&self) -> Result<OwnedSemaphorePermit> {
        let permit = self.log_reads.clone().acquire_owned().await;
        permit.map_err(|cause| Error::new(ErrorKind::Internal, "wait to read").caused_by(cause))
    }

    /// A line of the audit log for a request that is rejected.
    pub(super) fn audit_record<'a>(
        &self,
        caller: &'a Caller,
        peer: Peer,
        action: &'a str,
        namespace: &'a Namespace,
    ) -> AuditRecord<'a> {
        AuditRecord {
            at: self.parts.logs.clock.now(),
            who: &caller.name,
            from: peer.0,
            action,
            namespace: namespace.as_str(),
            agent: None,
            session: None,
            status: StatusCode::FORBIDDEN.as_u16(),
        }
    }

    /// The caller of a request. Requests of web pages of other origins are rejected in any case.
    pub(super) fn authenticate(&self, headers: &HeaderMap, peer: Peer) -> Result<Caller, Problem> {
        if is_cross_origin(headers) {
            return Err(Problem::forbidden(
                "a page of another origin sent the request",
            ));
        }
        match &self.authentication {
            Authentication::Local if !has_local_host(headers) => Err(Problem::forbidden(
                "the Host header names another machine: without --access, the API serves only local programs",
            )),
            Authentication::Local => Ok(Caller {
                name: "local".to_owned(),
                roles: Roles::everywhere(Role::Admin),
            }),
            Authentication::Access(control) => {
                let now = self.parts.logs.clock.now();
                let caller = control.authenticate(headers, peer, now);
                caller.map_err(|denied| match denied {
                    Denied::Unauthenticated => Problem::new(
                        StatusCode::UNAUTHORIZED,
                        "unauthenticated",
                        "the token is missing, wrong or expired",
                    )
                    .hint("send a token of \"sessiond token\" as \"Authorization: Bearer TOKEN\""),
                    Denied::Unavailable(error) => {
                        tracing::error!(%error, "cannot read the access file; nobody is admitted");
                        Problem::new(
                            StatusCode::SERVICE_UNAVAILABLE,
                            "unavailable",
                            "the server cannot read its access file",
                        )
                    }
                })
            }
        }
    }
}
