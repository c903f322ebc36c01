//! Versions of agents: numbers separated by dots.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// A version. A suffix such as `-beta` is ignored.
#[derive(Debug, Clone)]
pub struct Version(Vec<u64>);

impl Version {
    /// The first version in the output of a program's `--version`.
    pub fn find(text: &str) -> Option<Version> {
        text.split_whitespace().find_map(|word| word.parse().ok())
    }
}

impl Version {
    /// The numbers without trailing zeros: 2.1 and 2.1.0 are equal.
    fn significant(&self) -> &[u64] {
        let end = self
            .0
            .iter()
            .rposition(|number| *number != 0)
            .map_or(0, |last| last + 1);
        &self.0[..end]
    }
}

impl PartialEq for Version {
    fn eq(&self, other: &Self) -> bool {
        self.significant() == other.significant()
    }
}

impl Eq for Version {}

impl Ord for Version {
    fn cmp(&self, other: &Self) -> Ordering {
        self.significant().cmp(other.significant())
    }
}

impl PartialOrd for Version {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl FromStr for Version {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        let invalid = || {
            Error::usage(format!(
                "invalid version {text:?}: expected numbers separated by dots, such as 2.1.325"
            ))
        };
        let mut numbers = Vec::new();
        for part in text.strip_prefix('v').unwrap_or(text).split('.') {
            let digits = part.len()
                - part
                    .trim_start_matches(|letter: char| letter.is_ascii_digit())
                    .len();
            match (digits, numbers.is_empty()) {
                (0, true) => return Err(invalid()),
                (0, false) => break,
                _ => {}
            }
            numbers.push(part[..digits].parse().unwrap_or(u64::MAX));
            if digits < part.len() {
                break;
            }
        }
        Ok(Version(numbers))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            &self
                .0
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join("."),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(text: &str) -> Version {
        text.parse().unwrap()
    }

    #[test]
    fn versions_are_compared_by_their_numbers() {
        for (older, newer) in [
            ("2.1.99", "2.1.325"),
            ("2.1.325", "2.2"),
            ("2.9", "2.10"),
            ("9", "10.0.1"),
            ("2.1", "2.1.1"),
        ] {
            assert!(version(older) < version(newer), "{older} {newer}");
        }
        for (one, other) in [
            ("2.1", "2.1.0"),
            ("v2.1.3", "2.1.3"),
            ("2.1.3-beta.4", "2.1.3"),
            ("0", "0.0"),
        ] {
            assert_eq!(version(one), version(other));
        }
        assert!(version("99999999999999999999999") > version("5"));
        for bad in ["", "v", "latest", ".1", "-1", "auto"] {
            assert!(bad.parse::<Version>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn the_version_is_found_in_the_output_of_a_program() {
        assert_eq!(
            Version::find("2.1.325 (Claude Code)\n"),
            Some(version("2.1.325"))
        );
        assert_eq!(Version::find("codex-cli 0.166.0"), Some(version("0.166")));
        assert_eq!(Version::find("command not found"), None);
        assert_eq!(version("2.1.325").to_string(), "2.1.325");
    }
}
