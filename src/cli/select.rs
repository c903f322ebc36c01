//! The arguments that several commands share: sessions, points, pages, projects and owners.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::cli::{print, time};
use crate::config::Settings;
use crate::error::{Error, Result};
use crate::model::{AgentName, LogId, LogPoint, PointSpec, WriterId};
use crate::restore::{TargetProject, find_project};
use crate::sessions::find::{self, LatestFilter, SessionSelector};
use crate::sys::{Clock, SystemClock, account};
use crate::wire::Parts;

/// The help text of `--at`.
pub const AT_HELP: &str =
    "Point: latest, turn, turn:N, turn:N.step:N, seq:N, TIME, NAME [default: latest]";

/// The page of a listing, and its format.
#[derive(Debug, Clone, clap::Args)]
#[group(skip)]
pub struct PageArgs {
    /// Maximum number of rows
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub limit: u32,

    /// Cursor of the next page, as the previous page printed it
    #[arg(long, value_name = "CURSOR")]
    pub cursor: Option<String>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The agent to list, if one is named; none for all agents.
pub fn agent_filter(settings: &Settings, parts: &Parts) -> Option<AgentName> {
    let name = settings.agent.name.as_ref();
    name.map(|_| parts.logs.agent.clone())
}

/// Shortens session IDs on a terminal.
pub struct ShortIds {
    /// All IDs that a prefix must be unambiguous among; none if IDs are not shortened.
    known: Option<Vec<String>>,
}

impl ShortIds {
    /// Loads the IDs of all sessions of the agents, if IDs are to be shortened.
    pub async fn load(parts: &Parts, full: bool, agents: impl Iterator<Item = &str>) -> ShortIds {
        if !print::shortens_ids(full) {
            return ShortIds { known: None };
        }
        let agents: BTreeSet<&str> = agents.collect();
        let mut known = Vec::new();
        for agent in agents.into_iter().filter_map(|agent| agent.parse().ok()) {
            match parts.index.logs(&parts.logs.namespace, &agent).await {
                Ok(logs) => known.extend(logs.into_iter().map(|log| log.name.to_string())),
                Err(error) => {
                    tracing::debug!(%error, "session IDs are not shortened");
                    return ShortIds { known: None };
                }
            }
        }
        ShortIds { known: Some(known) }
    }

    /// The ID, or its shortest unambiguous prefix.
    pub fn shorten(&self, id: &str) -> String {
        match &self.known {
            Some(known) => print::short_id(id, known.iter().map(String::as_str)),
            None => id.to_owned(),
        }
    }
}

/// The session that arguments select: by ID, or the last written one of a project or request ID.
/// None if no argument selects one.
pub fn selector(
    parts: &Parts,
    id: Option<&str>,
    latest: bool,
    project: Option<&Path>,
    request: Option<&str>,
) -> Option<SessionSelector> {
    if let Some(id) = id {
        return Some(SessionSelector::Id(id.to_owned()));
    }
    (latest || request.is_some()).then(|| {
        SessionSelector::Latest(LatestFilter {
            project: project.map(|directory| project_of(parts, directory)),
            request_id: request.map(str::to_owned),
        })
    })
}

/// The help text of `--branch`.
pub const BRANCH_HELP: &str = "Writer of a branch, or a prefix; \"sessiond branches\" lists them";

/// Finds the branch that `--branch` names; none is the main line.
pub async fn branch(parts: &Parts, id: &LogId, text: Option<&str>) -> Result<Option<WriterId>> {
    match text {
        Some(text) => parts.logs.find_branch(id, text.trim()).await.map(Some),
        None => Ok(None),
    }
}

/// Parses the value of `--at`; none is the end of the session.
pub fn at(text: Option<&str>) -> Result<PointSpec> {
    text.map_or(Ok(PointSpec::default()), |text| point("--at value", text))
}

/// Parses a point. `what` names it in errors.
pub fn point(what: &str, text: &str) -> Result<PointSpec> {
    match PointSpec::parse(what, text)? {
        // An age such as 2h. A checkpoint with such a name is written ckpt:2h.
        PointSpec::Name(name)
            if name == text.trim() && name.starts_with(|letter: char| letter.is_ascii_digit()) =>
        {
            Ok(time::parse("--at", &name, SystemClock.now())
                .map_or(PointSpec::Name(name), |time| {
                    PointSpec::Log(LogPoint::Time(time))
                }))
        }
        point => Ok(point),
    }
}

/// Finds the session of `ID@POINT` and parses the point.
pub async fn session_at(parts: &Parts, text: &str) -> Result<(LogId, PointSpec)> {
    let (id, spec) = match text.split_once('@') {
        Some((id, at)) if !id.is_empty() => (id, point("point", at)?),
        _ => (text, PointSpec::default()),
    };
    Ok((find::by_id(&parts.logs, id).await?, spec))
}

/// The agent's name for the project in a directory.
pub fn project_of(parts: &Parts, directory: &Path) -> String {
    project_in(parts, &real_path(directory))
}

fn project_in(parts: &Parts, root: &Path) -> String {
    match parts.directory() {
        Ok(disk) => find_project(&*parts.profile, &*disk, root),
        Err(_) => parts.profile.project_name(root),
    }
}

/// The agent resolves symbolic links before it names the project.
fn real_path(directory: &Path) -> PathBuf {
    directory
        .canonicalize()
        .or_else(|_| std::path::absolute(directory))
        .unwrap_or_else(|_| PathBuf::from(directory))
}

/// The project into which a session is restored for an agent that runs in `directory`.
pub fn target_project(parts: &Parts, directory: &Path) -> Result<TargetProject> {
    if parts.profile.is_relocatable() {
        let root = real_path(directory);
        return Ok(TargetProject {
            name: project_in(parts, &root),
            root,
        });
    }
    Err(Error::usage(format!(
        "invalid --cwd value {:?}: sessions of {} can only continue in the directory where they started",
        directory.display(),
        parts.profile.name()
    ))
    .hint("remove --cwd"))
}

/// The parts, with the rights of the user in `--owner`, if it is given.
pub fn with_owner(parts: Parts, argument: Option<&str>) -> Result<Parts> {
    let Some(text) = argument else {
        return Ok(parts);
    };
    let parts = parts.with_owner(account::parse_owner(text)?);
    let Some(directory) = &parts.agent_directory else {
        return Ok(parts);
    };
    // Otherwise the user could make root read a directory of somebody else: a link to it is enough.
    let Some(found) = directory.foreign_owner() else {
        return Ok(parts);
    };
    let root = directory.root().display();
    Err(Error::usage(format!(
        "invalid --owner value {text:?}: {root} belongs to user {found}"
    ))
    .hint(format!(
        "run \"chown -R {text} {root}\", or remove --owner: new files then belong to user {found}"
    )))
}
