//! Format versions: one number per stored format, and the function that reads it.
//!
//! Every decoder reads the version first and dispatches on it. A version that this build does not
//! know is [`ErrorKind::NewerFormat`](crate::error::ErrorKind::NewerFormat), never damage.

use std::fmt;
use std::io::Read;

use serde::Deserialize;

use crate::error::{Error, Result};
use crate::model::keys;

/// Entries, merges and snapshots.
pub const ENTRY: u32 = 1;

/// The manifest of an archive file.
pub const ARCHIVE: u32 = 1;

/// The metadata object of a session.
pub const METADATA: u32 = 1;

/// Named checkpoints and the origins of forks.
pub const PIN: u32 = 1;

/// The ledger file.
pub const LEDGER: u32 = 1;

/// The stored result of the store probe.
pub const PROBE: u32 = 1;

/// The append record of the session store.
pub const APPEND_RECORD: u32 = 1;

#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

/// Reads the `version` field of a JSON object; `newest` is the last version that this build reads.
/// `name` is the key or the file name of the object.
pub fn read(name: &str, json: &[u8], newest: u32) -> Result<u32> {
    check(name, serde_json::from_slice(json), newest)
}

/// The same for a JSON object that is not in memory.
pub fn read_from(name: &str, json: impl Read, newest: u32) -> Result<u32> {
    check(name, serde_json::from_reader(json), newest)
}

fn check(name: &str, read: serde_json::Result<Versioned>, newest: u32) -> Result<u32> {
    let version = read
        .map_err(|cause| invalid(name, format!("it has no readable format version ({cause})")))?
        .version;
    if version > newest {
        return Err(Error::newer_format(keys::describe(name), version, newest));
    }
    Ok(version)
}

/// The error for a version that no sessiond has ever written, in the last arm of each dispatch.
pub fn unknown(name: &str, version: u32) -> Error {
    invalid(name, format!("its format version {version} is invalid"))
}

/// The object `name` is damaged.
pub(super) fn invalid(name: &str, why: impl fmt::Display) -> Error {
    Error::corrupt(why.to_string()).context(format_args!("read {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn a_newer_version_is_distinguished_from_damage() {
        assert_eq!(read("x", br#"{"version":1,"other":[]}"#, 2).unwrap(), 1);
        let key = "v1/default/claude-code/3f2a/log/000000000004.gz";
        let newer = read(key, br#"{"version":3,"header":"in another form"}"#, 2).unwrap_err();
        assert_eq!(newer.kind(), ErrorKind::NewerFormat);
        assert_eq!(
            newer.to_string(),
            "entry 4 of session 3f2a has format version 3; this sessiond reads up to version 2"
        );
        assert_eq!(newer.hint_text(), Some("upgrade sessiond"));
        for damaged in [
            "",
            "{}",
            "[]",
            "{\"version\":\"1\"}",
            "{\"version\":-1}",
            "{\"version\":1",
        ] {
            let error = read("x", damaged.as_bytes(), 2).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{damaged}");
        }
        assert_eq!(unknown("x", 0).kind(), ErrorKind::Corrupt);
    }
}
