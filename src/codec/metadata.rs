//! Encoding of the metadata object of a session, `meta/<number>.json`.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::version::{self, invalid};
use crate::error::{Error, ErrorKind, Result};
use crate::model::SessionMetadata;

#[derive(Serialize, Deserialize)]
struct Object {
    version: u32,
    #[serde(flatten)]
    metadata: SessionMetadata,
}

/// Encodes metadata.
pub fn encode(metadata: &SessionMetadata) -> Result<Bytes> {
    let object = Object {
        version: version::METADATA,
        metadata: metadata.clone(),
    };
    serde_json::to_vec(&object)
        .map(Bytes::from)
        .map_err(|cause| Error::new(ErrorKind::Internal, "encode metadata").caused_by(cause))
}

/// Decodes the metadata object at `key`, by its format version.
pub fn decode(key: &str, bytes: &[u8]) -> Result<SessionMetadata> {
    let object: Object = match version::read(key, bytes, version::METADATA)? {
        1 => serde_json::from_slice(bytes)
            .map_err(|cause| invalid(key, format!("it is damaged ({cause})")))?,
        other => return Err(version::unknown(key, other)),
    };
    object
        .metadata
        .validate()
        .map_err(|error| invalid(key, error))?;
    Ok(object.metadata)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Closed, ClosedStatus};

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
        let bytes = encode(&metadata).unwrap();
        assert_eq!(
            std::str::from_utf8(&bytes).unwrap(),
            r#"{"version":1,"labels":{"team":"infra"},"closed":{"status":"completed","raw_bytes":4711}}"#
        );
        assert_eq!(decode("x", &bytes).unwrap(), metadata);
        let newer = decode("x", br#"{"version":2,"labels":7}"#).unwrap_err();
        assert_eq!(newer.kind(), ErrorKind::NewerFormat);
        let long = format!(r#"{{"version":1,"request_id":"{}"}}"#, "x".repeat(600));
        for damaged in ["", "{}", r#"{"version":1,"labels":7}"#, long.as_str()] {
            let error = decode("x", damaged.as_bytes()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{damaged}");
        }
    }
}
