//! `verify`: can everything be restored?

use crate::cli::{exit, print, progress};
use crate::config::Settings;
use crate::error::{Error, ErrorKind, Result};
use crate::restore::{find, verify};
use crate::sys::Disk;
use crate::wire::Parts;

/// Read a session (or all) as a restore does and say whether it can be restored
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  sessiond verify --all\n\nExits with 6 if anything is damaged, and with 11 if nothing is and something is encrypted\nto others: without a key, verify says which numbers are there and how many objects it could not open."
)]
pub struct Args {
    /// The session's id, or the beginning of it; none: every session and project log
    #[arg(value_name = "ID", conflicts_with = "all")]
    pub id: Option<String>,

    /// Every session and project log of the agent, which is what happens without an id
    #[arg(long, env = "SESSIOND_ALL")]
    pub all: bool,

    /// Read every object there is, also those that a restore does not need
    #[arg(long, env = "SESSIOND_DEEP")]
    pub deep: bool,

    /// Print the verdicts as JSON
    #[arg(long, env = "SESSIOND_JSON")]
    pub json: bool,
}

/// Does it.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let parts = Parts::make(settings, None).await?;
    let ids = match &args.id {
        Some(id) => vec![find::by_id(&parts.logs, id).await?],
        None => parts
            .logs
            .names("")
            .await?
            .into_iter()
            .map(|name| parts.logs.id(name))
            .collect(),
    };
    let scratch =
        std::env::temp_dir().join(format!("sessiond-verify-{:016x}", parts.logs.rng.next()));
    let disk = Disk::new(&scratch);
    let mut verdicts = Vec::new();
    let mut failed = None;
    let _shown = progress::show(settings, &parts, "verifying");
    parts.logs.progress.logs(ids.len());
    for id in &ids {
        parts.logs.progress.next_log();
        match verify::verify(&parts.logs, id, &disk, args.deep).await {
            Ok(verdict) => {
                if !args.json {
                    say(&verdict)?;
                }
                verdicts.push(verdict);
            }
            Err(error) => {
                failed = Some(error);
                break;
            }
        }
    }
    if let Err(cause) = std::fs::remove_dir_all(&scratch)
        && cause.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!(%cause, "the scratch directory {} was not removed", scratch.display());
    }
    if let Some(error) = failed {
        return Err(error);
    }
    let damaged = verdicts
        .iter()
        .filter(|verdict| !verdict.damage.is_empty())
        .count();
    let sealed = verdicts.iter().filter(|verdict| verdict.sealed > 0).count();
    if args.json {
        print::json(&verdicts)?;
    } else {
        let not_opened = if sealed > 0 {
            format!(", {sealed} not opened")
        } else {
            String::new()
        };
        print::line(format_args!(
            "{} logs, {damaged} damaged{not_opened}",
            verdicts.len()
        ))?;
    }
    if damaged > 0 {
        let error = Error::corrupt(format!("{damaged} of {} logs are damaged", verdicts.len()));
        let cut_short = verdicts
            .iter()
            .any(|verdict| 0 < verdict.sound_to && verdict.sound_to < verdict.head);
        print::error(&match cut_short {
            true => {
                error.hint("sessiond restore ID --salvage brings back the longest sound beginning")
            }
            false => error,
        });
        return Ok(exit::CORRUPT);
    }
    if sealed > 0 {
        let error = Error::new(
            ErrorKind::Encrypted,
            format!(
                "{sealed} of {} logs are encrypted, and not to any identity at hand",
                verdicts.len()
            ),
        );
        print::error(&error.hint("--identity FILE names the file with the key"));
        return Ok(exit::SEALED);
    }
    Ok(exit::OK)
}

fn say(verdict: &verify::VerifyReport) -> Result<()> {
    let session = print::clean(&verdict.session);
    let word = match (verdict.damage.is_empty(), verdict.sealed) {
        (true, 0) => "ok",
        (true, _) => "SEALED",
        (false, _) => "DAMAGED",
    };
    let branches = if verdict.branches.is_empty() {
        String::new()
    } else {
        format!(", {} branches", verdict.branches.len())
    };
    if verdict.sealed > 0 {
        return say_sealed(verdict, word, &branches);
    }
    let removed = if verdict.removed { ", removed" } else { "" };
    print::line(format_args!(
        "{word:<8} {session}  {} objects, {} files, {}{branches}{removed}",
        verdict.objects,
        verdict.files,
        print::bytes(verdict.bytes)
    ))?;
    for damage in &verdict.damage {
        print::line(format_args!("         {}", print::clean(damage)))?;
    }
    for passed in &verdict.passed_over {
        print::line(format_args!(
            "         not part of it any more: {}",
            print::clean(passed)
        ))?;
    }
    if verdict.damage.is_empty() {
        return Ok(());
    }
    for key in &verdict.misleading {
        print::line(format_args!(
            "         delete {}: the entries that it stands for are read then",
            print::clean(key)
        ))?;
    }
    if verdict.sound_to == verdict.head && !verdict.misleading.is_empty() {
        print::line("         until then a restore may bring back what it says")?;
    } else if verdict.sound_to == verdict.head {
        print::line(
            "         it can be restored in full: other objects stand for what is damaged",
        )?;
    } else if verdict.sound_to > 0 {
        print::line(format_args!(
            "         sound up to entry {sound} of {}: sessiond restore {session} --at seq:{sound}, or --salvage",
            verdict.head,
            sound = verdict.sound_to
        ))?;
    } else {
        print::line(format_args!(
            "         nothing of its {} entries can be restored: bring the object back from a copy of the bucket, or an older version of it",
            verdict.head
        ))?;
    }
    Ok(())
}

/// What can be said of a log without the key to it.
fn say_sealed(verdict: &verify::VerifyReport, word: &str, branches: &str) -> Result<()> {
    let (session, head) = (print::clean(&verdict.session), verdict.head);
    let missing: Vec<String> = verdict
        .missing
        .iter()
        .map(|(from, to)| {
            if from == to {
                from.to_string()
            } else {
                format!("{from} to {to}")
            }
        })
        .collect();
    let numbers = match missing.is_empty() {
        true => format!("entries 1 to {head} are all there"),
        false => format!(
            "of entries 1 to {head}, these are lost or were passed over: {}",
            missing.join(", ")
        ),
    };
    let (sealed, objects) = (verdict.sealed, verdict.objects);
    print::line(format_args!(
        "{word:<8} {session}  {sealed} of {objects} objects could not be opened; {numbers}{branches}"
    ))?;
    verdict
        .damage
        .iter()
        .try_for_each(|damage| print::line(format_args!("         {}", print::clean(damage))))
}
