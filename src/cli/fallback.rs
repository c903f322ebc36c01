//! What `restore` does where a session cannot be restored in a form that its agent takes: the conversation as text for a
//! prompt.
//!
//! Owns when that is so. Nothing is claimed then, and no file of the agent is written.

use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use serde::Serialize;

use crate::agent::Profile;
use crate::cli::print::Target;
use crate::cli::{installed, print, restore};
use crate::error::{Error, ErrorContext, ErrorKind, Result};
use crate::model::{LogId, PointSpec, RelPath, Version};
use crate::restore::history::{History, history};
use crate::restore::{Options, RestoreReport, point};
use crate::sys::{Directory, Disk, STATE_DIR};
use crate::wire::Parts;

/// What to do instead of a restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Instead {
    /// Write the end of the conversation as text for a prompt.
    History,
}

/// Arguments of `restore`.
#[derive(Debug, Clone, clap::Args)]
#[group(skip)]
pub struct Args {
    /// Where the session cannot be restored in a form that its agent takes, write the conversation as text; exit 10
    #[arg(long, env = "SESSIOND_FALLBACK", value_name = "HOW")]
    pub fallback: Option<Instead>,

    /// With --fallback: so many messages, the last ones
    #[arg(long, env = "SESSIOND_FALLBACK_MESSAGES", value_name = "N", default_value = "40", value_parser = clap::value_parser!(u16).range(1..))]
    pub fallback_messages: u16,

    /// With --fallback: where to write it [default: .sessiond/history-ID.md in the agent's directory]
    #[arg(
        long,
        env = "SESSIOND_FALLBACK_FILE",
        value_name = "FILE",
        requires = "fallback",
        conflicts_with = "all"
    )]
    pub fallback_file: Option<PathBuf>,

    /// Do not restore what a newer agent than this wrote; auto asks the one that is installed
    #[arg(long, env = "SESSIOND_MAX_AGENT_VERSION", value_name = "VERSION")]
    pub max_agent_version: Option<String>,
}

/// What became of a session.
pub enum Outcome {
    /// It is in place, and what belongs to its project.
    Restored(Vec<RestoreReport>),
    /// Its conversation was written as text.
    WrittenHistory(WrittenHistory),
}

/// A conversation that was written as text.
#[derive(Debug, Clone, Serialize)]
pub struct WrittenHistory {
    /// The session.
    pub session: String,
    /// In which form: `history`.
    pub fallback: &'static str,
    /// Where.
    pub file: PathBuf,
    /// Messages in it.
    pub messages: usize,
    /// Messages that could be read.
    pub of: usize,
    /// Up to this entry the log is sound.
    pub sound_to: u64,
    /// The last entry of all.
    pub head: u64,
    /// The version of the agent that wrote last.
    pub agent_version: Option<String>,
    /// Why it was not restored.
    pub reason: String,
    /// Whether nothing was written on purpose.
    pub dry_run: bool,
}

/// A row of what is printed as JSON.
#[derive(Serialize)]
#[serde(untagged)]
pub enum Row<'a> {
    /// Restored.
    Restored(&'a RestoreReport),
    /// Written as text.
    WrittenHistory(&'a WrittenHistory),
}

/// What was restored, then what was told.
pub fn rows<'a>(reports: &'a [RestoreReport], told: &'a [WrittenHistory]) -> Vec<Row<'a>> {
    reports
        .iter()
        .map(Row::Restored)
        .chain(told.iter().map(Row::WrittenHistory))
        .collect()
}

/// Tells where the text is; nothing else, so that a script can take it.
pub fn say(told: &WrittenHistory) -> Result<()> {
    print::line(told.file.display())
}

/// The arguments, understood.
pub struct Fallback {
    args: Args,
    newest: Option<Version>,
}

impl Fallback {
    /// Reads the arguments, and asks the agent for its version where they say so.
    pub async fn of(args: Args, profile: &dyn Profile) -> Result<Fallback> {
        let newest = match args.max_agent_version.as_deref().map(str::trim) {
            None => None,
            Some("auto") => newest(profile).await?,
            Some(version) => Some(version.parse().context("--max-agent-version")?),
        };
        Ok(Fallback { args, newest })
    }

    /// Restores a session, or does what was asked for where that cannot be.
    pub async fn session(
        &self,
        parts: &Parts,
        id: &LogId,
        point: &PointSpec,
        options: &Options,
    ) -> Result<Outcome> {
        let most = usize::from(self.args.fallback_messages);
        let goal = point::find_in(
            &parts.logs,
            id,
            point,
            options.salvage || self.args.fallback.is_some(),
        )
        .await?;
        let listen = || history(&parts.logs, &*parts.profile, id, &goal, most);
        let mut heard = None;
        let mut refused = None;
        if let Some(newest) = self.newest.as_ref().filter(|_| !id.name.is_project()) {
            let history = listen().await?;
            refused = history
                .version()
                .filter(|version| version > newest)
                .map(|version| too_new(id, &version, newest));
            heard = Some(history);
        }
        let (error, why) = match refused {
            Some(error) => (error, "a newer version of the agent wrote it"),
            None => match restore::one(parts, id, point, &goal, options).await {
                Ok(report) => return restore::all(parts, report, options).map(Outcome::Restored),
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    (error, "what is stored of it is damaged")
                }
                Err(error) => return Err(error),
            },
        };
        if self.args.fallback.is_none() || id.name.is_project() {
            return Err(error);
        }
        let heard = match heard {
            Some(heard) => heard,
            None => listen().await?,
        };
        if heard.prose.told() == 0 {
            return Err(error.context("nothing that was said can be read"));
        }
        print::error(&error);
        self.tell(parts, id, options, &heard, why, &error)
            .map(Outcome::WrittenHistory)
    }

    fn tell(
        &self,
        parts: &Parts,
        id: &LogId,
        options: &Options,
        heard: &History,
        why: &str,
        error: &Error,
    ) -> Result<WrittenHistory> {
        let disk = parts.directory()?;
        let state: RelPath = format!("{STATE_DIR}/history-{}.md", id.name).parse()?;
        let file = match &self.args.fallback_file {
            Some(file) => std::path::absolute(file).unwrap_or_else(|_| file.clone()),
            None => state.below(disk.root()),
        };
        let ran = heard
            .facts
            .cwd
            .as_ref()
            .map(|cwd| format!(" It ran in {cwd}."))
            .unwrap_or_default();
        let about = format!(
            "Session {} of {} could not be resumed: {why}.{ran}",
            id.name, id.agent
        );
        let text = heard.prose.text(&about);
        if !options.dry_run {
            let written = match &self.args.fallback_file {
                Some(_) => write(&file, &text, options),
                None => disk
                    .replace(&state, text.as_bytes(), true)
                    .and_then(|()| hand_over(&disk, options)),
            };
            written.map_err(|cause| Error::named(format!("write {}", file.display()), cause))?;
        }
        Ok(WrittenHistory {
            session: id.name.to_string(),
            fallback: "history",
            file,
            messages: heard.prose.told(),
            of: heard.prose.heard(),
            sound_to: heard.sound_to,
            head: heard.head,
            agent_version: heard.facts.agent_version.clone(),
            reason: error.to_string(),
            dry_run: options.dry_run,
        })
    }
}

fn hand_over(disk: &Disk, options: &Options) -> std::io::Result<()> {
    options.owner.map_or(Ok(()), |owner| disk.give_state(owner))
}

/// Writes the text where somebody said, for the agent's user alone.
fn write(file: &Path, text: &str, options: &Options) -> std::io::Result<()> {
    let file = &*match print::target(file)? {
        Target::File(file) => file,
        Target::Other(mut file) => return std::io::Write::write_all(&mut file, text.as_bytes()),
    };
    let beside = file.with_file_name(format!(
        ".{}.new",
        file.file_name().unwrap_or_default().to_string_lossy()
    ));
    let put = || -> std::io::Result<()> {
        let mut to = std::fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&beside)?;
        std::io::Write::write_all(&mut to, text.as_bytes())?;
        if let Some(owner) = options.owner {
            std::os::unix::fs::fchown(&to, Some(owner.uid), Some(owner.gid))?;
        }
        std::fs::rename(&beside, file)
    };
    put().inspect_err(|_| {
        let _ = std::fs::remove_file(&beside);
    })
}

fn too_new(id: &LogId, version: &Version, newest: &Version) -> Error {
    Error::conflict(format!(
        "restore {id}: version {version} of the agent wrote it, and {newest} is the newest that may"
    ))
    .hint("upgrade the agent; --fallback history writes the conversation as text instead")
}

/// The version of the agent that is installed; none if it cannot be asked, which is told.
async fn newest(profile: &dyn Profile) -> Result<Option<Version>> {
    let program = profile.program().ok_or_else(|| {
        Error::usage(format!(
            "--max-agent-version auto: nothing is known of how {} says its version",
            profile.name()
        ))
        .hint("give a version, such as 2.1.325")
    })?;
    let asked = installed::version(program, None).await;
    if let Err(error) = &asked {
        tracing::warn!(%error, "restoring whatever wrote the session");
    }
    Ok(asked.ok())
}
