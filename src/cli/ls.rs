//! `ls`: the sessions in the index.

use std::path::PathBuf;

use crate::cli::{exit, print, select};
use crate::config::Settings;
use crate::error::Result;
use crate::index::Filter;
use crate::wire::Parts;

/// List sessions, newest change first
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond ls --project . --limit 5")]
pub struct Args {
    /// Only sessions of the project in this directory
    #[arg(long, env = "SESSIOND_PROJECT", value_name = "DIR")]
    pub project: Option<PathBuf>,

    /// Only sessions in this status: created, active, completed, archived, or removed, which are not shown otherwise
    #[arg(long, env = "SESSIOND_STATUS", value_name = "STATUS", value_parser = ["created", "active", "completed", "archived", "removed"])]
    pub status: Option<String>,

    /// Only sessions of this request
    #[arg(long, env = "SESSIOND_REQUEST", value_name = "ID")]
    pub request: Option<String>,

    /// Only sessions with this label; give it several times for several labels
    #[arg(
        long,
        env = "SESSIOND_LS_LABELS",
        value_name = "NAME=VALUE",
        value_delimiter = ','
    )]
    pub label: Vec<String>,

    /// Which part of them, and in which form.
    #[command(flatten)]
    pub page: select::Page,
}

/// Does it.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let parts = Parts::make(settings, None).await?;
    let filter = Filter {
        namespace: parts.logs.namespace.clone(),
        // Every agent's, unless one is named.
        agent: settings.agent.as_ref().map(|_| parts.logs.agent.clone()),
        id_prefix: None,
        project: args
            .project
            .as_deref()
            .map(|directory| select::project_of(&parts, directory)),
        status: args.status.clone(),
        request: args.request.clone(),
        labels: args
            .label
            .iter()
            .map(|label| label.parse())
            .collect::<Result<_>>()?,
        limit: args.page.limit,
        cursor: args.page.cursor.clone(),
    };
    let page = parts.index.sessions(&filter).await?;
    if page.sessions.is_empty()
        && args.project.is_none()
        && args.status.is_none()
        && args.request.is_none()
        && args.label.is_empty()
        && args.page.cursor.is_none()
        && parts
            .index
            .logs(&parts.logs.namespace, &parts.logs.agent)
            .await?
            .is_empty()
        && !parts.logs.names("").await?.is_empty()
    {
        tracing::warn!("the index is empty and the store is not: sessiond reindex fills it");
    }
    if args.page.json {
        print::json(&page)?;
        return Ok(exit::OK);
    }
    let now = parts.logs.clock.now();
    let rows: Vec<Vec<String>> = page
        .sessions
        .iter()
        .map(|row| {
            let place = row
                .cwd
                .clone()
                .or_else(|| row.project.clone())
                .unwrap_or_default();
            let branches: Vec<String> = row
                .branches
                .iter()
                .map(|writer| writer.chars().take(8).collect())
                .collect();
            vec![
                row.id.clone(),
                row.agent.clone(),
                row.status.clone(),
                print::age(row.updated, now),
                print::bytes(row.raw_bytes),
                row.head.to_string(),
                row.totals.turns.to_string(),
                print::cost(row.totals.cost),
                place,
                row.title
                    .clone()
                    .unwrap_or_default()
                    .chars()
                    .take(40)
                    .collect(),
                branches.join(" "),
            ]
        })
        .collect();
    print::table(
        &[
            "SESSION", "AGENT", "STATUS", "CHANGED", "SHIPPED", "HEAD", "TURNS", "COST", "DIR",
            "TITLE", "BRANCHES",
        ],
        &rows,
    )?;
    if let Some(next) = page.next {
        print::line(format_args!("more: sessiond ls --cursor '{next}'"))?;
    }
    Ok(exit::OK)
}
