//! A command line option whose values are keys, or files with one key per line.

use std::path::Path;
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::sys::private_file::is_open_to_others;

/// The prefixes of secret keys, which are never part of an error.
const SECRET_PREFIXES: [&str; 2] = ["AGE-SECRET-KEY-", "SESSIOND-SIGNING-KEY-"];

/// A command line option for keys: its name and hints for errors.
#[derive(Clone, Copy)]
pub(in crate::store) struct KeyOption {
    pub(in crate::store) name: &'static str,
    pub(in crate::store) file_hint: &'static str,
    pub(in crate::store) line_hint: &'static str,
    pub(in crate::store) empty_hint: &'static str,
}

impl KeyOption {
    /// The error for an invalid value.
    pub(in crate::store) fn invalid(&self, value: &str, why: &str) -> Error {
        Error::usage(format!("invalid {} value {value:?}: {why}", self.name))
    }

    /// Reads a file with one secret key per line, which other users must not read or change.
    pub(in crate::store) fn read_secret_file<T: FromStr<Err = &'static str>>(
        &self,
        path: &Path,
        keys: &mut Vec<T>,
    ) -> Result<()> {
        let text = path.to_string_lossy();
        self.read_file(&text, path, keys)?;
        if is_open_to_others(path).unwrap_or(false) {
            return Err(self
                .invalid(&text, "other users can read or change the file")
                .hint(format!(
                    "run \"chmod 600 {text}\"; for a Kubernetes secret, set defaultMode to 0400"
                )));
        }
        Ok(())
    }

    /// Reads a file with one key per line. No error contains a line of the file, because it may be
    /// a secret.
    pub(in crate::store) fn read_file<T: FromStr<Err = &'static str>>(
        &self,
        text: &str,
        path: &Path,
        keys: &mut Vec<T>,
    ) -> Result<()> {
        if SECRET_PREFIXES
            .iter()
            .any(|prefix| text.to_ascii_uppercase().starts_with(prefix))
        {
            return Err(Error::usage(format!(
                "invalid {} value: it is the secret key itself, which is visible in the process list",
                self.name
            ))
            .hint("create a new key with \"sessiond keygen -o FILE\" and specify the path of the file"));
        }
        if text.is_empty() {
            return Err(self.invalid(text, "it is empty").hint(self.empty_hint));
        }
        let content = std::fs::read_to_string(path)
            .map_err(|cause| self.invalid(text, &cause.to_string()).hint(self.file_hint))?;
        for (index, line) in content.lines().map(str::trim).enumerate() {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let key = line.parse().map_err(|why| {
                self.invalid(text, &format!("line {}: {why}", index + 1))
                    .hint(self.line_hint)
            })?;
            keys.push(key);
        }
        Ok(())
    }
}
