//! The help texts: the grouped command list, the templates, and where global options appear.
//!
//! Owns the layout of the help. The texts themselves are the doc comments of the arguments.

use std::fmt::Write as _;

use clap::builder::StyledStr;
use clap::{Arg, Command, CommandFactory};

use crate::cli::{Cli, complete, environment};

/// The commands grouped by purpose, in the order of `sessiond --help`.
pub const GROUPS: [(&str, &[&str]); 6] = [
    (
        "Run",
        &[
            "run",
            "daemon",
            "restore",
            "flush",
            "status",
            "hook",
            "serve-store",
            "serve",
        ],
    ),
    (
        "Inspect",
        &[
            "ls", "show", "tail", "messages", "search", "stats", "inspect", "pull",
        ],
    ),
    (
        "Time travel",
        &[
            "checkpoints",
            "checkpoint",
            "diff",
            "fork",
            "branches",
            "adopt",
        ],
    ),
    (
        "Life cycle",
        &[
            "label", "close", "archive", "reopen", "ttl", "rm", "undelete", "export", "import",
        ],
    ),
    (
        "Operate",
        &[
            "doctor", "verify", "gc", "reindex", "config", "keygen", "token",
        ],
    ),
    ("Other", &["demo", "version", "completions", "man", "help"]),
];

/// The name of the positional argument and of the flags that take a session ID.
const SESSION_VALUE: &str = "ID";

/// The heading of the options that every command takes.
pub const GLOBAL_HEADING: &str = "Global options";

/// The command line definition: the arguments as they are declared, with grouped help and with
/// empty variables ignored.
pub fn command() -> Command {
    finish(environment::ignore_empty(Cli::command()))
}

/// The definition for generated documents: it does not depend on the environment.
pub fn plain_command() -> Command {
    finish(Cli::command())
}

fn finish(command: Command) -> Command {
    let globals: Vec<Arg> = command
        .get_arguments()
        .filter(|arg| arg.is_global_set())
        // Otherwise, global options would fill two thirds of every command's short help.
        .map(|arg| arg.clone().hide_short_help(true).hide_long_help(true))
        .collect();
    let command = command
        .mut_args(|arg| arg.hide_short_help(true))
        .mut_subcommands(|subcommand| finish_subcommand(subcommand, &globals));
    let template = root_template(&command);
    command.help_template(template)
}

fn finish_subcommand(command: Command, globals: &[Arg]) -> Command {
    let has_subcommands = command.has_subcommands();
    let command = command
        .mut_args(complete_sessions)
        .args(globals)
        .mut_subcommands(|nested| finish_subcommand(nested, globals));
    let list = if has_subcommands {
        "{all-args}"
    } else {
        "{all-args}\n\nRun 'sessiond --help' for the global options."
    };
    command.help_template(format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{list}{{after-help}}\n"
    ))
}

/// Lets the shell complete session IDs.
fn complete_sessions(arg: Arg) -> Arg {
    let takes_session = matches!(arg.get_id().as_str(), "id" | "session")
        && arg.get_value_names().is_some_and(|names| {
            names
                .first()
                .is_some_and(|name| name.starts_with(SESSION_VALUE))
        });
    match takes_session {
        true => arg.add(complete::session_completer()),
        false => arg,
    }
}

/// The template of `sessiond --help`, with the command list in it.
fn root_template(command: &Command) -> StyledStr {
    let styles = command.get_styles();
    let (header, literal) = (styles.get_header(), styles.get_literal());
    let width = GROUPS
        .iter()
        .flat_map(|(_, names)| names.iter())
        .map(|name| name.len())
        .max()
        .unwrap_or(0);
    let mut text = "{about-with-newline}\n{usage-heading} {usage}\n".to_owned();
    for (group, names) in GROUPS {
        let _ = writeln!(text, "\n{header}{group}:{header:#}");
        for name in names {
            let about = about(command, name);
            let _ = writeln!(text, "  {literal}{name:<width$}{literal:#}  {about}");
        }
    }
    let _ = write!(
        text,
        "\n{header}{GLOBAL_HEADING}:{header:#}\n{{options}}{{after-help}}\n"
    );
    StyledStr::from(text)
}

/// The one-line description of a command.
pub fn about(command: &Command, name: &str) -> String {
    if name == "help" {
        return "Print this help, or the help of a command".to_owned();
    }
    command
        .find_subcommand(name)
        .and_then(Command::get_about)
        .map(ToString::to_string)
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    /// The longest help text of a flag, in characters, with its default.
    const MAX_HELP: usize = 80;

    fn visit(command: &Command, check: &mut impl FnMut(&Command)) {
        check(command);
        command
            .get_subcommands()
            .filter(|subcommand| !subcommand.is_hide_set())
            .for_each(|subcommand| visit(subcommand, check));
    }

    #[test]
    fn the_definition_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn every_command_is_in_exactly_one_group() {
        let command = command();
        let real: BTreeSet<&str> = command
            .get_subcommands()
            .filter(|subcommand| !subcommand.is_hide_set())
            .map(Command::get_name)
            .chain(["help"])
            .collect();
        let listed: Vec<&str> = GROUPS
            .iter()
            .flat_map(|(_, names)| names.iter().copied())
            .collect();
        assert_eq!(listed.iter().copied().collect::<BTreeSet<_>>(), real);
        assert_eq!(listed.len(), real.len(), "a command is listed twice");
    }

    #[test]
    fn help_texts_are_short_and_every_command_has_an_example() {
        let mut wrong = Vec::new();
        let root = plain_command();
        visit(&root, &mut |command| {
            let name = command.get_name().to_owned();
            let mut texts: Vec<(String, String)> = command
                .get_arguments()
                .filter(|arg| !arg.is_hide_set())
                .map(|arg| {
                    let help = arg.get_help().map(ToString::to_string);
                    (arg.get_id().to_string(), help.unwrap_or_default())
                })
                .collect();
            let about = command.get_about().map(ToString::to_string);
            texts.push(("about".to_owned(), about.unwrap_or_default()));
            for (id, text) in texts {
                if text.is_empty() || text.chars().count() >= MAX_HELP || text.ends_with('.') {
                    wrong.push(format!("{name} {id}: {} {text}", text.chars().count()));
                }
            }
            let after = command.get_after_help().map(ToString::to_string);
            if !after.unwrap_or_default().contains("Example") {
                wrong.push(format!("{name} has no example"));
            }
        });
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }

    #[test]
    fn a_variable_is_named_after_its_flag_and_has_one_meaning_in_all_commands() {
        let mut wrong = Vec::new();
        let mut meanings = BTreeMap::new();
        let root = plain_command();
        visit(&root, &mut |command| {
            for arg in command.get_arguments() {
                let Some(variable) = arg.get_env() else {
                    continue;
                };
                let help = arg.get_help().map(ToString::to_string);
                let meaning = (arg.get_long().map(str::to_owned), help);
                let known = meanings
                    .entry(variable.to_owned())
                    .or_insert_with(|| meaning.clone());
                if *known != meaning {
                    let name = command.get_name();
                    wrong.push(format!("{name} {variable:?}: {meaning:?} and {known:?}"));
                }
                let Some(long) = arg.get_long() else {
                    continue;
                };
                let upper = |text: &str| text.to_uppercase().replace('-', "_");
                let own = format!("SESSIOND_{}", upper(long));
                let of_command = format!("SESSIOND_{}_{}", upper(command.get_name()), upper(long));
                if variable != own.as_str() && variable != of_command.as_str() {
                    wrong.push(format!("{} --{long}: {variable:?}", command.get_name()));
                }
            }
        });
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }

    #[test]
    fn switches_of_one_call_have_no_variable() {
        const ONE_CALL: [&str; 10] = [
            "all", "latest", "force", "json", "dry-run", "to", "at", "yes", "full", "limit",
        ];
        visit(&plain_command(), &mut |command| {
            for arg in command.get_arguments() {
                if arg.get_long().is_some_and(|long| ONE_CALL.contains(&long)) {
                    assert_eq!(arg.get_env(), None, "{} {arg}", command.get_name());
                }
            }
        });
    }
}
