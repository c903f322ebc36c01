//! Changes of a session: metadata, status, removal, forks and named checkpoints.
//!
//! They use the operations of the command line, which write to the store with the same fence.

use std::collections::BTreeMap;

use axum::http::{Method, StatusCode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::access::Role;
use super::endpoint::{Answer, Call, Endpoint, NoQuery, Reply, change, expects_other_version, get};
use super::problem::Problem;
use crate::codec::pin::NamedCheckpoint;
use crate::config;
use crate::error::{Error, Result};
use crate::fork::ForkReport;
use crate::log::errors;
use crate::log::metadata::VersionedMetadata;
use crate::model::{Digest, LogId, SessionMetadata, Ttl, metadata};
use crate::operations::fork::fork;
use crate::operations::index::{update, update_checkpoints};
use crate::sessions::point;
use crate::upkeep::remove;
use crate::upkeep::status::{StatusChange, change_status};
use crate::wire::Parts;

pub fn endpoints() -> Vec<Endpoint> {
    let session = "/sessions/{agent}/{session}";
    let (put, post, patch, delete) = (Method::PUT, Method::POST, Method::PATCH, Method::DELETE);
    vec![
        get(
            "/sessions/{agent}/{session}/metadata",
            "getMetadata",
            Role::Metadata,
            "Get the labels, request ID and TTL of a session from the store.",
        )
        .without_content()
        .json(get_metadata),
        change(
            patch,
            "/sessions/{agent}/{session}/metadata",
            "updateMetadata",
            Role::Operator,
            "Change labels, request ID and TTL. A label with the value null is removed. The TTL needs the role admin.",
        )
        .json_body(StatusCode::OK, update_metadata),
        change(
            put,
            "/sessions/{agent}/{session}/status",
            "setStatus",
            Role::Operator,
            "Close, archive or reopen a session.",
        )
        .json_body(StatusCode::OK, set_status),
        change(
            delete.clone(),
            session,
            "removeSession",
            Role::Admin,
            "Remove a session. It can be undeleted for 24 hours.",
        )
        .json(remove_session),
        change(
            post.clone(),
            "/sessions/{agent}/{session}/undelete",
            "undeleteSession",
            Role::Admin,
            "Bring back a session that was removed or has expired.",
        )
        .json(undelete),
        change(
            post.clone(),
            "/sessions/{agent}/{session}/forks",
            "forkSession",
            Role::Operator,
            "Start a new session from a point of this one.",
        )
        .json_body(StatusCode::CREATED, fork_session),
        change(
            post,
            "/sessions/{agent}/{session}/checkpoints",
            "nameCheckpoint",
            Role::Operator,
            "Name a point of a session. Garbage collection keeps it until the name is deleted.",
        )
        .json_body(StatusCode::CREATED, name_checkpoint),
        change(
            delete,
            "/sessions/{agent}/{session}/checkpoints/{item}",
            "deleteCheckpoint",
            Role::Operator,
            "Delete the name of a checkpoint.",
        )
        .json(delete_checkpoint),
    ]
}

/// The session of a call, if it exists: nothing is written next to a log that does not exist.
async fn existing(call: &Call) -> Result<(Parts, LogId)> {
    let (parts, id) = call.session()?;
    match parts.logs.list_newest_segments(&id).await?.is_empty() {
        true => Err(errors::not_found(&id)),
        false => Ok((parts, id)),
    }
}

/// The metadata of a session.
#[derive(Debug, Serialize, JsonSchema)]
struct MetadataView {
    /// The number of changes.
    version: u64,
    /// The labels.
    labels: BTreeMap<String, String>,
    /// The caller's own ID for the job that the session belongs to.
    request_id: Option<String>,
    /// How long to keep the session after its last change; none for the default of `gc`.
    ttl: Option<Ttl>,
}

fn view(current: VersionedMetadata) -> Reply<MetadataView> {
    let etag = etag(&current.metadata);
    let SessionMetadata {
        ttl,
        labels,
        request_id,
        ..
    } = current.metadata;
    Reply::ok(MetadataView {
        version: current.version,
        labels,
        request_id,
        ttl,
    })
    .with_etag(etag)
}

/// Identifies metadata by its content, because a change is applied again after a lost race.
fn etag(metadata: &SessionMetadata) -> String {
    let text = serde_json::to_vec(metadata).unwrap_or_default();
    format!("\"{:.32}\"", Digest::of(&text).to_string())
}

async fn get_metadata(call: Call, NoQuery {}: NoQuery) -> Answer<MetadataView> {
    let (parts, id) = existing(&call).await?;
    Ok(view(parts.logs.metadata(&id).await?))
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct MetadataChange {
    /// The labels to set; null removes a label.
    #[serde(default)]
    labels: BTreeMap<String, Option<String>>,
    /// The caller's own ID for the job that the session belongs to.
    request_id: Option<String>,
    /// A duration such as `30d`, `never`, or `default` for the TTL of `gc`.
    ttl: Option<String>,
}

async fn update_metadata(call: Call, change: MetadataChange) -> Answer<MetadataView> {
    if change.ttl.is_some() && call.role < Role::Admin {
        return Err(Problem::forbidden(
            "a change of the TTL needs the role admin",
        ));
    }
    let ttl: Option<Option<Ttl>> = match change.ttl.as_deref().map(str::trim) {
        None => None,
        Some("default") => Some(None),
        Some(text) => Some(Some(config::ttl("ttl", text)?)),
    };
    for (name, value) in &change.labels {
        metadata::validate_label_name(name)?;
        if let Some(value) = value {
            format!("{name}={value}").parse::<crate::model::Label>()?;
        }
    }
    if let Some(request_id) = &change.request_id {
        metadata::validate_request_id(request_id)?;
    }
    let (parts, id) = existing(&call).await?;
    let mut is_other_version = false;
    let updated = parts
        .logs
        .update_metadata(&id, |before| {
            is_other_version = expects_other_version(&call.headers, &etag(before));
            if is_other_version {
                return Err(Error::conflict("the metadata has changed"));
            }
            let mut after = before.clone();
            for (name, value) in &change.labels {
                match value {
                    Some(value) => after.labels.insert(name.clone(), value.clone()),
                    None => after.labels.remove(name),
                };
            }
            if let Some(request_id) = &change.request_id {
                after.request_id = Some(request_id.clone());
            }
            if let Some(ttl) = ttl {
                after.ttl = ttl;
            }
            Ok(after)
        })
        .await;
    if is_other_version {
        return Err(Problem::new(
            StatusCode::PRECONDITION_FAILED,
            "precondition_failed",
            "the metadata has changed since the version in If-Match",
        )
        .hint("get the metadata again, and repeat the change with its ETag"));
    }
    let updated = updated?;
    update(&parts, &id).await;
    Ok(view(updated))
}

/// The status to set.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum NewStatus {
    /// Reopens the session.
    Active,
    /// Closes the session.
    Completed,
    /// Archives a completed session.
    Archived,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct StatusBody {
    /// The status.
    status: NewStatus,
}

/// The status of a session.
#[derive(Debug, Serialize, JsonSchema)]
struct StatusView {
    /// The status after the change.
    status: String,
}

async fn set_status(call: Call, body: StatusBody) -> Answer<StatusView> {
    let (parts, id) = existing(&call).await?;
    let change = match body.status {
        NewStatus::Active => StatusChange::Reopen,
        NewStatus::Completed => StatusChange::Close,
        NewStatus::Archived => StatusChange::Archive,
    };
    let _permit = call.api.log_read().await?;
    let status = change_status(&parts.logs, &id, change).await?;
    update(&parts, &id).await;
    Ok(Reply::ok(StatusView {
        status: status.as_str().to_owned(),
    }))
}

/// Whether a call changed anything.
#[derive(Debug, Serialize, JsonSchema)]
struct Changed {
    /// False if the session was in this state already.
    changed: bool,
}

async fn remove_session(call: Call, NoQuery {}: NoQuery) -> Answer<Changed> {
    let (parts, id) = existing(&call).await?;
    let _permit = call.api.log_read().await?;
    let changed = remove::remove(&parts.logs, &id).await?;
    update(&parts, &id).await;
    Ok(Reply::ok(Changed { changed }))
}

async fn undelete(call: Call, NoQuery {}: NoQuery) -> Answer<Changed> {
    let (parts, id) = existing(&call).await?;
    let _permit = call.api.log_read().await?;
    let changed = remove::undelete(&parts.logs, &id).await?;
    update(&parts, &id).await;
    Ok(Reply::ok(Changed { changed }))
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ForkBody {
    /// The point: latest, turn, turn:N, seq:N, a time or a checkpoint.
    at: Option<String>,
    /// The writer of a branch, or a prefix.
    branch: Option<String>,
    /// ID of the new session; random in the agent's form if absent.
    id: Option<String>,
}

async fn fork_session(call: Call, body: ForkBody) -> Answer<ForkReport> {
    let spec = Call::point(body.at.as_deref())?;
    let (parts, id) = existing(&call).await?;
    let _permit = call.api.log_read().await?;
    let branch = Call::branch(&parts, &id, body.branch.as_deref()).await?;
    let forked = fork(&parts, &id, branch.as_ref(), &spec, body.id.as_deref()).await?;
    Ok(Reply::created(forked))
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CheckpointBody {
    /// The name.
    name: String,
    /// The point: latest, turn, turn:N, seq:N, a time or a checkpoint.
    at: Option<String>,
}

async fn name_checkpoint(call: Call, body: CheckpointBody) -> Answer<NamedCheckpoint> {
    let spec = Call::point(body.at.as_deref())?;
    let (parts, id) = existing(&call).await?;
    let _permit = call.api.log_read().await?;
    let point = point::resolve(&parts.logs, &id, &spec).await?;
    let profile = &*parts.profile;
    let named = point::create(&parts.logs, profile, &id, &body.name, &point).await?;
    update_checkpoints(&parts, &id).await;
    Ok(Reply::created(named))
}

async fn delete_checkpoint(call: Call, NoQuery {}: NoQuery) -> Answer<Changed> {
    let (parts, id) = existing(&call).await?;
    point::delete(&parts.logs, &id, call.item()).await?;
    update_checkpoints(&parts, &id).await;
    Ok(Reply::ok(Changed { changed: true }))
}
