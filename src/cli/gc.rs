//! `gc`: retention. Deletes what is not needed any more.

use serde::Serialize;

use crate::cli::{exit, print, progress};
use crate::config::{self, Settings};
use crate::error::{Error, ErrorKind, Result};
use crate::log::writer::GRACE;
use crate::model::LogId;
use crate::sys::Disk;
use crate::upkeep::collect::Rules;
use crate::upkeep::gc::{self, Outcome};
use crate::upkeep::reindex::catch_up;
use crate::wire::Parts;

/// A week, for both: long enough to go back in time, short enough not to pile up.
const WEEK: std::time::Duration = std::time::Duration::from_secs(7 * 24 * 60 * 60);

/// Delete old history, expired sessions and what was removed, for this agent in this namespace
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  sessiond gc --dry-run\n\nSafe beside running daemons, restores and other collectors, on any number of machines. An expired session is\nremoved first, as by sessiond rm, and deleted for good when the grace period of 24 hours has passed.\nSessions that are encrypted and cannot be opened are left alone; if there are any, it exits with 11."
)]
pub struct Args {
    /// Keep every entry of the last so long, to go back to
    #[arg(
        long,
        env = "SESSIOND_HISTORY",
        value_name = "TIME",
        default_value = "7d"
    )]
    pub history: String,

    /// Remove sessions that have not changed for so long, or never; sessiond ttl says otherwise for one session
    #[arg(long, env = "SESSIOND_TTL", value_name = "TIME", default_value = "7d")]
    pub ttl: String,

    /// Only say what would be done
    #[arg(long, env = "SESSIOND_DRY_RUN")]
    pub dry_run: bool,

    /// Print the result as JSON
    #[arg(long, env = "SESSIOND_JSON")]
    pub json: bool,
}

#[derive(Debug, Default, Serialize)]
struct Done {
    dry_run: bool,
    logs: usize,
    objects: usize,
    bytes: u64,
    scratch: usize,
    failed: usize,
    sealed: usize,
    #[serde(skip)]
    unopened: Option<Error>,
    outcomes: Vec<Outcome>,
}

/// Does it.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let ttl = if args.ttl.trim() == "never" {
        None
    } else {
        Some(config::duration("--ttl", Some(&args.ttl), WEEK)?)
    };
    let rules = Rules {
        history: config::duration("--history", Some(&args.history), WEEK)?,
        ttl,
        grace: GRACE,
    };
    let parts = Parts::make(settings, None).await?;
    // A dry run writes nothing, not even the scratch key that tells the store's time.
    let now = if args.dry_run {
        parts.logs.clock.now()
    } else {
        gc::store_time(&parts.logs).await?
    };
    let scratch = std::env::temp_dir().join(format!("sessiond-gc-{:016x}", parts.logs.rng.next()));
    let shown = progress::show(settings, &parts, "collecting");
    let collected = all(&parts, &rules, now, &Disk::new(&scratch), &args).await;
    if let Err(cause) = std::fs::remove_dir_all(&scratch)
        && cause.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!(%cause, "the scratch directory {} was not removed", scratch.display());
    }
    drop(shown);
    let done = collected?;
    if args.json {
        print::json(&done)?;
    } else {
        let would = if args.dry_run {
            "would delete"
        } else {
            "deleted"
        };
        print::line(format_args!(
            "{} logs; {would} {} objects ({})",
            done.logs,
            done.objects + done.scratch,
            print::bytes(done.bytes)
        ))?;
    }
    if done.failed > 0 {
        print::error(
            &Error::corrupt(format!(
                "{} of {} logs were left as they are",
                done.failed, done.logs
            ))
            .hint("sessiond verify --all --deep says what is wrong with them"),
        );
        return Ok(exit::CORRUPT);
    }
    if let Some(first) = done.unopened {
        print::error(&first.context(format_args!(
            "{} of {} logs were left as they are",
            done.sealed, done.logs
        )));
        return Ok(exit::SEALED);
    }
    Ok(exit::OK)
}

async fn all(
    parts: &Parts,
    rules: &Rules,
    now: jiff::Timestamp,
    scratch: &Disk,
    args: &Args,
) -> Result<Done> {
    let mut done = Done {
        dry_run: args.dry_run,
        ..Done::default()
    };
    let names = parts.logs.names("").await?;
    parts.logs.progress.logs(names.len());
    for name in names {
        let id = parts.logs.id(name);
        done.logs += 1;
        parts.logs.progress.next_log();
        match gc::collect(&parts.logs, &id, rules, now, scratch, args.dry_run).await {
            Ok(outcome) if outcome.steps.is_empty() => {}
            Ok(outcome) => {
                if !args.json {
                    say(&outcome)?;
                }
                if !args.dry_run {
                    tell_index(parts, &id, &outcome).await;
                }
                done.objects += outcome.objects;
                done.bytes += outcome.bytes;
                done.outcomes.push(outcome);
            }
            // Without the store there is no point in going on; a damaged log does not hold up the others.
            Err(error) if error.is_retryable() => return Err(error),
            // What cannot be read cannot be judged.
            Err(error) if error.kind() == ErrorKind::Encrypted => {
                tracing::debug!(%error, "left as it is");
                done.sealed += 1;
                done.unopened.get_or_insert(error);
            }
            Err(error) => {
                print::error(&error);
                done.failed += 1;
            }
        }
    }
    done.scratch = gc::sweep_scratch(&parts.logs, rules, now, args.dry_run).await?;
    Ok(done)
}

fn say(outcome: &Outcome) -> Result<()> {
    let session = print::clean(&outcome.session);
    print::line(format_args!(
        "{session}  {}  {} objects ({})",
        outcome.steps.join(", "),
        outcome.objects,
        print::bytes(outcome.bytes)
    ))
}

/// The index is a view of the bucket: what is gone there is gone here.
async fn tell_index(parts: &Parts, id: &LogId, outcome: &Outcome) {
    let told = async {
        if outcome.objects > 0 {
            parts.index.forget(id).await?;
        }
        catch_up(&parts.logs, &*parts.index, &*parts.profile, id).await
    };
    if let Err(error) = told.await {
        tracing::warn!(%error, %id, "the index was not told; sessiond reindex does it");
    }
}
