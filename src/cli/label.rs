//! `label`: words by which sessions are found.

use crate::cli::{exit, print, select};
use crate::config::Settings;
use crate::error::Result;
use crate::model::{Label, SessionMetadata, metadata};
use crate::restore::find;
use crate::wire::Parts;

/// Set, remove or list a session's labels
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  sessiond label 3f2a team=infra ticket=4711\n  sessiond label 3f2a ticket-\n  sessiond ls --label team=infra"
)]
pub struct Args {
    /// The session's id, or the beginning of it
    #[arg(value_name = "ID")]
    pub id: String,

    /// NAME=VALUE sets a label, NAME- removes it; without any, list them
    #[arg(value_name = "LABEL")]
    pub labels: Vec<String>,

    /// Print them as JSON
    #[arg(long, env = "SESSIOND_JSON")]
    pub json: bool,
}

enum Change {
    Set(Label),
    Remove(String),
}

fn change(text: &str) -> Result<Change> {
    match text.strip_suffix('-').filter(|_| !text.contains('=')) {
        Some(name) => metadata::check_name(name).map(|()| Change::Remove(name.to_owned())),
        None => text.parse().map(Change::Set),
    }
}

/// Does it.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let changes = args
        .labels
        .iter()
        .map(|text| change(text))
        .collect::<Result<Vec<_>>>()?;
    let parts = Parts::make(settings, None).await?;
    let id = find::by_id(&parts.logs, &args.id).await?;
    let said = if changes.is_empty() {
        parts.logs.said(&id).await?
    } else {
        let said = parts.logs.say(&id, |before| {
            let mut labels = before.labels.clone();
            for change in &changes {
                match change {
                    Change::Set(label) => labels.insert(label.name.clone(), label.value.clone()),
                    Change::Remove(name) => labels.remove(name),
                };
            }
            Ok(SessionMetadata {
                labels,
                ..before.clone()
            })
        });
        let said = said.await?;
        select::index_learns(&parts, &id).await;
        said
    };
    if args.json {
        print::json(&said.wishes.labels)?;
    } else {
        said.wishes.labels.iter().try_for_each(|(name, value)| {
            print::line(format_args!(
                "{}={}",
                print::clean(name),
                print::clean(value)
            ))
        })?;
    }
    Ok(exit::OK)
}
