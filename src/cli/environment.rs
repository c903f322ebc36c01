//! The `SESSIOND_*` variables: an empty one counts as unset, an unknown one is reported.
//!
//! A flag that configures a deployment has a variable. A flag that selects what one command does
//! (`--all`, `--json`, `--dry-run`, `--at` and the like) has none: a variable has one meaning in
//! every command.

use std::collections::BTreeSet;
use std::ffi::OsStr;

use clap::Command;
use clap::builder::Resettable;

/// The prefix of all variables.
const PREFIX: &str = "SESSIOND_";

/// The variable by which a shell requests completions.
pub const COMPLETE: &str = "SESSIOND_COMPLETE";

/// Variables that belong to sessiond but set no flag: the address that the Agent SDK adapters
/// connect to, the session that `run` tells its command, and the completion request.
const NON_FLAG_VARIABLES: [&str; 4] = [
    "SESSIOND_ADDRESS",
    "SESSIOND_SESSION_ID",
    "SESSIOND_RESTORED",
    COMPLETE,
];

/// The largest edit distance at which a name is suggested.
const MAX_DISTANCE: usize = 3;

/// Variables that are rejected if they are empty: ignoring them would store plaintext or unsigned
/// objects, or trust everyone.
const NEVER_EMPTY: [&str; 4] = [
    "SESSIOND_ENCRYPT_TO",
    "SESSIOND_IDENTITY",
    "SESSIOND_SIGNING_KEY",
    "SESSIOND_TRUST_KEY",
];

/// Makes every flag ignore its variable if the variable is empty.
pub fn ignore_empty(command: Command) -> Command {
    let is_empty = |name: &OsStr| {
        let value = std::env::var_os(name);
        value.is_some_and(|value| value.is_empty())
            && !NEVER_EMPTY.iter().any(|never| *never == name)
    };
    command
        .mut_args(|arg| match arg.get_env() {
            Some(name) if is_empty(name) => arg.env(Resettable::Reset),
            _ => arg,
        })
        .mut_subcommands(ignore_empty)
}

/// The variables of all flags of a command and its subcommands.
pub fn names(command: &Command) -> BTreeSet<String> {
    let own = command
        .get_arguments()
        .filter_map(|arg| Some(arg.get_env()?.to_string_lossy().into_owned()));
    own.chain(command.get_subcommands().flat_map(names))
        .collect()
}

/// The variables in `set` that are unknown, each with the most similar known name.
pub fn unknown(
    known: &BTreeSet<String>,
    set: impl IntoIterator<Item = String>,
) -> Vec<(String, Option<String>)> {
    set.into_iter()
        .filter(|name| name.starts_with(PREFIX) && !is_service_link(name))
        .filter(|name| !known.contains(name) && !NON_FLAG_VARIABLES.contains(&name.as_str()))
        .map(|name| {
            let closest = closest(&name, known.iter().map(String::as_str)).map(str::to_owned);
            (name, closest)
        })
        .collect()
}

/// Logs a warning for every unknown variable.
pub fn warn_about_unknown(command: &Command) {
    let set = std::env::vars_os()
        .filter(|(_, value)| !value.is_empty())
        .filter_map(|(name, _)| name.into_string().ok());
    for (variable, closest) in unknown(&names(command), set) {
        match closest {
            Some(closest) => {
                tracing::warn!("unknown variable {variable}; did you mean {closest}?")
            }
            None => tracing::warn!("unknown variable {variable}"),
        }
    }
}

/// Whether Kubernetes set the variable in every pod because a service is called `sessiond`.
fn is_service_link(name: &str) -> bool {
    let has_port_number = name
        .split("_PORT_")
        .skip(1)
        .any(|rest| rest.starts_with(|letter: char| letter.is_ascii_digit()));
    name.contains("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || name.ends_with("_PORT")
        || has_port_number
}

/// The name most similar to `text`, if any is within `MAX_DISTANCE`.
pub fn closest<'a>(text: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    names
        .map(|name| (edit_distance(text, name), name))
        .filter(|(distance, _)| *distance <= MAX_DISTANCE)
        .min()
        .map(|(_, name)| name)
}

/// The number of characters to insert, delete or replace to turn one text into the other.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, left) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, right) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(left != *right);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_variables_are_found_and_a_name_suggested() {
        let known = BTreeSet::from(["SESSIOND_STORE".to_owned(), "SESSIOND_INDEX".to_owned()]);
        let set = [
            "SESSIOND_STORE",
            "SESSIOND_STROE",
            "SESSIOND_WHATEVER_ELSE",
            "SESSIOND_ADDRESS",
            "SESSIOND_SERVICE_HOST",
            "SESSIOND_PORT",
            "SESSIOND_PORT_9464_TCP_ADDR",
            "HOME",
        ];
        assert_eq!(
            unknown(&known, set.map(str::to_owned)),
            [
                (
                    "SESSIOND_STROE".to_owned(),
                    Some("SESSIOND_STORE".to_owned())
                ),
                ("SESSIOND_WHATEVER_ELSE".to_owned(), None),
            ]
        );
    }

    #[test]
    fn edit_distances_are_counted() {
        let pairs = [("", "abc", 3), ("abc", "abc", 0), ("stroe", "store", 2)];
        for (a, b, distance) in pairs {
            assert_eq!(edit_distance(a, b), distance, "{a} {b}");
        }
    }
}
