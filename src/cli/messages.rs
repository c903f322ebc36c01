//! `messages`: what a session's transcripts hold, by the index.

use crate::cli::{exit, print, select, when};
use crate::config::Settings;
use crate::error::Result;
use crate::index::{MessageFilter, MessageRow};
use crate::model::Role;
use crate::restore::find;
use crate::wire::Parts;

/// List the messages of a session in order, with what they took and cost
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond messages 3f2a --role assistant --since 2h")]
pub struct Args {
    /// The session's id, or the beginning of it
    #[arg(value_name = "ID")]
    pub id: String,

    /// Only what they say: user, assistant, system or tool
    #[arg(long, env = "SESSIOND_ROLE", value_name = "ROLE", value_parser = ["user", "assistant", "system", "tool"])]
    pub role: Option<String>,

    /// Only from then on: a time, a day, or 2h for two hours ago
    #[arg(long, env = "SESSIOND_SINCE", value_name = "TIME")]
    pub since: Option<String>,

    /// Which part of them, and in which form.
    #[command(flatten)]
    pub page: select::Page,
}

/// Does it.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let parts = Parts::make(settings, None).await?;
    let id = find::by_id(&parts.logs, &args.id).await?;
    let filter = MessageFilter {
        role: Role::ALL
            .into_iter()
            .find(|role| Some(role.word()) == args.role.as_deref()),
        since: when::maybe("--since", args.since.as_deref(), parts.logs.clock.now())?,
        limit: args.page.limit,
        cursor: args.page.cursor.clone(),
    };
    let page = parts.index.messages(&id, &filter).await?;
    if page.messages.is_empty()
        && args.page.cursor.is_none()
        && parts.index.session(&id).await?.is_none()
    {
        tracing::warn!(%id, "the index does not know the session: sessiond reindex fills it");
    }
    if args.page.json {
        print::json(&page)?;
        return Ok(exit::OK);
    }
    let rows: Vec<Vec<String>> = page.messages.iter().map(row).collect();
    print::table(
        &[
            "TIME",
            "ROLE",
            "KIND",
            "MODEL",
            "TOKENS",
            "COST",
            "SUB-AGENT",
            "WHERE",
        ],
        &rows,
    )?;
    if let Some(next) = page.next {
        let role = args
            .role
            .map(|role| format!(" --role {role}"))
            .unwrap_or_default();
        print::line(format_args!(
            "more: sessiond messages {}{role} --cursor '{next}'",
            id.name
        ))?;
    }
    Ok(exit::OK)
}

fn row(row: &MessageRow) -> Vec<String> {
    let tokens = row.tokens.map(|tokens| {
        // In and out, as the price list has them; what a cache gave is most of a long session.
        format!(
            "{} in, {} out",
            print::count(tokens.input + tokens.cache_read + tokens.cache_write),
            print::count(tokens.output)
        )
    });
    // The name is enough to find it: the directory is the session's own.
    let file = row
        .path
        .as_deref()
        .and_then(|path| path.rsplit('/').next())
        .unwrap_or("?");
    vec![
        row.at.map(print::time).unwrap_or_default(),
        row.role.clone(),
        row.kind.clone(),
        row.model.clone().unwrap_or_default(),
        tokens.unwrap_or_default(),
        row.tokens
            .map(|_| print::cost(row.cost))
            .unwrap_or_default(),
        row.sub_agent.clone().unwrap_or_default(),
        format!("{file}:{}", row.start),
    ]
}
