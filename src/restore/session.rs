//! Restores a session together with the logs of its projects.

use std::collections::BTreeSet;

use futures_util::future::join;

use super::log::{self, prepare, traced};
use super::options::{Options, RestoreContext};
use super::plan::{FileAction, FilePlan};
use super::report::Restored;
use crate::error::{ErrorContext, ErrorKind, Result};
use crate::log::race;
use crate::model::{LogId, LogName};

/// Restores a session and the projects that its files are in. Returns the session first. If a
/// project fails, the session stays restored, and the error is part of the list.
pub async fn restore_with_projects(
    context: &RestoreContext,
    id: &LogId,
    options: &Options,
) -> Result<(Restored, Vec<Result<Restored>>)> {
    let attempts = race::retry(id, || async {
        let prepared = prepare(context, id, options).await?;
        let projects = projects_of(context, id, &prepared.restored.report.files);
        // The claim and the projects do not depend on each other. Running them concurrently saves
        // a round trip.
        let (restored, projects) = join(
            prepared.finish(context, id),
            restore_projects(context, projects, options),
        )
        .await;
        Ok(restored?.map(|restored| (restored, projects)))
    });
    let command = options.purpose.as_str();
    let attempts = async { attempts.await.with_context(|| format!("{command} {id}")) };
    traced(id, attempts, |(restored, _)| &restored.report).await
}

/// The projects that the files are in.
fn projects_of(context: &RestoreContext, id: &LogId, files: &[FilePlan]) -> BTreeSet<LogName> {
    files
        .iter()
        .filter(|file| !id.name.is_project() && file.action != FileAction::Aside)
        .filter_map(|file| context.profile.project_log(&file.path))
        .collect()
}

async fn restore_projects(
    context: &RestoreContext,
    projects: BTreeSet<LogName>,
    options: &Options,
) -> Vec<Result<Restored>> {
    // A project is restored at its latest entry, and keeps its name.
    let options = Options {
        force: options.force,
        salvage: options.salvage,
        repair: options.repair,
        dry_run: options.dry_run,
        claim: options.claim,
        owner: options.owner,
        witness: options.witness.clone(),
        ..Options::default()
    };
    let mut restored = Vec::new();
    for name in projects {
        match log::restore(context, &context.logs.id(name), &options).await {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            project => restored.push(project),
        }
    }
    restored
}
