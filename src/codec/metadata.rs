//! Encoding of the metadata object of a session, `meta/<number>.json`.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::owner::Owner;
use super::version::{self, invalid};
use crate::error::{Error, ErrorKind, Result};
use crate::model::{LogId, SessionMetadata};

#[derive(Serialize, Deserialize)]
struct Object {
    version: u32,
    #[serde(flatten)]
    owner: Owner,
    #[serde(flatten)]
    metadata: SessionMetadata,
}

/// Encodes the metadata of the session `id`.
pub fn encode(id: &LogId, metadata: &SessionMetadata) -> Result<Bytes> {
    let object = Object {
        version: version::METADATA,
        owner: id.into(),
        metadata: metadata.clone(),
    };
    serde_json::to_vec(&object)
        .map(Bytes::from)
        .map_err(|cause| Error::new(ErrorKind::Internal, "encode metadata").caused_by(cause))
}

/// Decodes the metadata object of the session `id` at `key`, by its format version.
pub fn decode(id: &LogId, key: &str, bytes: &[u8]) -> Result<SessionMetadata> {
    let object: Object = match version::read(key, bytes, version::METADATA)? {
        1 => serde_json::from_slice(bytes)
            .map_err(|cause| invalid(key, format!("it is damaged ({cause})")))?,
        other => return Err(version::unknown(key, other)),
    };
    id.check_owner(key, &object.owner.into())?;
    object
        .metadata
        .validate()
        .map_err(|error| invalid(key, error))?;
    Ok(object.metadata)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Closed, ClosedStatus, Namespace};

    #[test]
    fn metadata_round_trips_and_newer_objects_are_distinguished_from_damaged_ones() {
        let metadata = SessionMetadata {
            labels: [("team".to_owned(), "infra".to_owned())].into(),
            closed: Some(Closed {
                status: ClosedStatus::Completed,
                raw_bytes: 4711,
            }),
            ..SessionMetadata::default()
        };
        let id = LogId {
            namespace: "n".parse().unwrap(),
            agent: "a".parse().unwrap(),
            name: "s".parse().unwrap(),
        };
        let bytes = encode(&id, &metadata).unwrap();
        assert_eq!(
            std::str::from_utf8(&bytes).unwrap(),
            r#"{"version":1,"namespace":"n","agent":"a","session":"s","labels":{"team":"infra"},"closed":{"status":"completed","raw_bytes":4711}}"#
        );
        assert_eq!(decode(&id, "x", &bytes).unwrap(), metadata);
        // Metadata of another tenant, copied to this session.
        let namespace: Namespace = "other".parse().unwrap();
        let copied = encode(
            &LogId {
                namespace,
                ..id.clone()
            },
            &metadata,
        )
        .unwrap();
        let error = decode(&id, "x", &copied).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains("in namespace other"), "{error}");
        let newer = decode(&id, "x", br#"{"version":2,"labels":7}"#).unwrap_err();
        assert_eq!(newer.kind(), ErrorKind::NewerFormat);
        let long = format!(
            r#"{{"version":1,"namespace":"n","agent":"a","session":"s","request_id":"{}"}}"#,
            "x".repeat(600)
        );
        for damaged in ["", "{}", r#"{"version":1,"labels":7}"#, long.as_str()] {
            let error = decode(&id, "x", damaged.as_bytes()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{damaged}");
        }
    }
}
