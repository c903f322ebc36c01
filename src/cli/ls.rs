//! `ls`: the sessions in the index.

use std::path::PathBuf;

use crate::cli::table::Table;
use crate::cli::{exit, print, select};
use crate::config::{self, Settings};
use crate::error::Result;
use crate::index::{SessionFilter, SessionRow};
use crate::wire::Parts;

/// List sessions, most recently changed first
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  sessiond ls --project . --limit 5
  sessiond ls --label team=infra --status completed")]
pub struct Args {
    /// Only sessions of the project in this directory
    #[arg(long, value_name = "DIR")]
    pub project: Option<PathBuf>,

    /// Only sessions with this status [default: all but removed ones]
    #[arg(long, value_name = "STATUS", value_parser = ["created", "active", "completed", "archived", "removed"])]
    pub status: Option<String>,

    /// Only sessions with this request ID
    #[arg(long, value_name = "ID")]
    pub request: Option<String>,

    /// Only sessions with this label (repeatable: all must match)
    #[arg(long, value_name = "NAME=VALUE", value_delimiter = ',')]
    pub label: Vec<String>,

    /// Print complete session IDs on a terminal
    #[arg(long)]
    pub full: bool,

    /// The page.
    #[command(flatten)]
    pub page: select::PageArgs,
}

impl Args {
    fn has_filter(&self) -> bool {
        self.project.is_some()
            || self.status.is_some()
            || self.request.is_some()
            || !self.label.is_empty()
            || self.page.cursor.is_some()
    }
}

/// Lists the sessions.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let labels = config::labels(&args.label)?;
    let parts = Parts::build(settings, None).await?;
    let project = args.project.as_deref();
    let filter = SessionFilter {
        namespace: parts.logs.namespace.clone(),
        agent: select::agent_filter(settings, &parts),
        id_prefix: None,
        project: project.map(|directory| select::project_of(&parts, directory)),
        status: args.status.clone(),
        request: args.request.clone(),
        labels,
        model: None,
        since: None,
        until: None,
        title: None,
        limit: args.page.limit,
        cursor: args.page.cursor.clone(),
    };
    let page = parts.index.sessions(&filter).await?;
    if page.sessions.is_empty() && !args.has_filter() && is_index_empty(&parts).await? {
        tracing::warn!(
            "the index is empty, but the store is not; run \"sessiond reindex\" to fill the index"
        );
    }
    if args.page.json {
        print::json(&page)?;
        return Ok(exit::OK);
    }
    if page.sessions.is_empty() {
        let matching = if args.has_filter() { "matching " } else { "" };
        let namespace = &parts.logs.namespace;
        print::line(format_args!(
            "no {matching}sessions in namespace {namespace}"
        ))?;
        return Ok(exit::OK);
    }
    let ids = select::ShortIds::load(
        &parts,
        args.full,
        page.sessions.iter().map(|row| &*row.agent),
    );
    let ids = ids.await;
    let now = parts.logs.clock.now();
    let rows: Vec<Vec<String>> = page
        .sessions
        .iter()
        .map(|session| {
            let origin = session.origin.as_deref().map(|origin| ids.shorten(origin));
            row(session, ids.shorten(&session.id), origin, now)
        })
        .collect();
    Table::new(&[
        "SESSION", "AGENT", "STATUS", "UPDATED", "SIZE", "HEAD", "TURNS", "COST", "DIR", "TITLE",
        "BRANCHES",
    ])
    .flexible(&[8, 9])
    .optional(&[10, 5, 1, 7])
    .print(&rows)?;
    if let Some(next) = page.next {
        print::next_page(&next)?;
    }
    Ok(exit::OK)
}

/// Whether the index has no log of the agent although the store has some.
async fn is_index_empty(parts: &Parts) -> Result<bool> {
    let (namespace, agent) = (&parts.logs.namespace, &parts.logs.agent);
    Ok(parts.index.logs(namespace, agent).await?.is_empty()
        && !parts.logs.log_names("").await?.is_empty())
}

fn row(
    session: &SessionRow,
    id: String,
    origin: Option<String>,
    now: jiff::Timestamp,
) -> Vec<String> {
    let origin = origin.map(|origin| {
        let turn = session.origin_turn.unwrap_or(0);
        format!("[fork of {}]", print::origin(&origin, turn))
    });
    let title = origin.into_iter().chain(session.title.clone());
    let directory = session.cwd.clone().or_else(|| session.project.clone());
    let branches: Vec<String> = session
        .branches
        .iter()
        .map(|writer| writer.chars().take(8).collect())
        .collect();
    vec![
        id,
        session.agent.clone(),
        session.status.clone(),
        print::age(session.updated, now),
        print::bytes(session.raw_bytes),
        session.head.to_string(),
        session.totals.turns.to_string(),
        print::cost(session.totals.cost),
        directory.unwrap_or_default(),
        title.collect::<Vec<_>>().join(" "),
        branches.join(" "),
    ]
}
