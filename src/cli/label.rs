//! `label`: the labels of a session.

use crate::cli::{exit, print};
use crate::config::Settings;
use crate::error::Result;
use crate::model::{Label, SessionMetadata, metadata};
use crate::operations::index;
use crate::sessions::find;
use crate::wire::Parts;

/// Set, remove or list the labels of a session
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  sessiond label 3f2a team=infra ticket=4711
  sessiond label 3f2a ticket-
  sessiond ls --label team=infra")]
pub struct Args {
    /// Session ID or unambiguous prefix
    #[arg(value_name = "ID")]
    pub id: String,

    /// NAME=VALUE to set a label, NAME- to remove it [default: list the labels]
    #[arg(value_name = "LABEL")]
    pub labels: Vec<String>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// A change of one label.
enum LabelChange {
    Set(Label),
    Remove(String),
}

fn parse_change(text: &str) -> Result<LabelChange> {
    match text.strip_suffix('-').filter(|_| !text.contains('=')) {
        Some(name) => {
            metadata::validate_label_name(name).map(|()| LabelChange::Remove(name.to_owned()))
        }
        None => text.parse().map(LabelChange::Set),
    }
}

fn apply(changes: &[LabelChange], before: &SessionMetadata) -> SessionMetadata {
    let mut after = before.clone();
    for change in changes {
        match change {
            LabelChange::Set(label) => after.labels.insert(label.name.clone(), label.value.clone()),
            LabelChange::Remove(name) => after.labels.remove(name),
        };
    }
    after
}

/// Changes and prints the labels.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let changes = args
        .labels
        .iter()
        .map(|text| parse_change(text))
        .collect::<Result<Vec<_>>>()?;
    let parts = Parts::build(settings, None).await?;
    let id = find::by_id(&parts.logs, &args.id).await?;
    let current = if changes.is_empty() {
        parts.logs.metadata(&id).await?
    } else {
        let update = |before: &SessionMetadata| Ok(apply(&changes, before));
        let updated = parts.logs.update_metadata(&id, update).await?;
        index::update(&parts, &id).await;
        updated
    };
    let labels = &current.metadata.labels;
    if args.json {
        print::json(labels)?;
    } else if labels.is_empty() {
        let session = print::clean(&id.name.to_string());
        print::line(format_args!("no labels on session {session}"))?;
    }
    if !args.json {
        labels.iter().try_for_each(|(name, value)| {
            print::line(format_args!(
                "{}={}",
                print::clean(name),
                print::clean(value)
            ))
        })?;
    }
    Ok(exit::OK)
}
