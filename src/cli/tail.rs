//! `tail`: the end of a conversation, and what comes next.

use std::collections::HashMap;
use std::time::Instant;

use crate::cli::{exit, print};
use crate::config::Settings;
use crate::daemon::signals::Signals;
use crate::error::{Error, Result};
use crate::history::follow::pace;
use crate::history::{Follow, Look, News, Style};
use crate::restore::find;
use crate::wire::Parts;

/// Show the last messages of a session, and with -f what comes next; from the bucket, wherever it is written
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  sessiond tail -f 3f2a\n\nLooks every second while something happens, and every 15 seconds at most when nothing does. Ctrl-C ends it."
)]
pub struct Args {
    /// The session's id, or the beginning of it
    #[arg(value_name = "ID")]
    pub id: String,

    /// Go on with what comes next
    #[arg(short, long, env = "SESSIOND_FOLLOW")]
    pub follow: bool,

    /// So many messages
    #[arg(short = 'n', long, env = "SESSIOND_LAST", value_name = "N", default_value_t = 10)]
    pub last: usize,

    /// All of it: thoughts, what tools were given and answered, what the agent added
    #[arg(long, env = "SESSIOND_FULL")]
    pub full: bool,
}

/// Does it.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let mut signals = Signals::to_stop()?;
    tokio::select! {
        done = tail(settings, &args) => done,
        _ = signals.stop() => Ok(exit::OK),
    }
}

async fn tail(settings: &Settings, args: &Args) -> Result<u8> {
    let parts = Parts::make(settings, None).await?;
    let id = find::by_id(&parts.logs, &args.id).await?;
    let mut look = Look::new(Style { colour: print::colour(), full: args.full, markdown: false }, HashMap::new());
    let (mut follow, news) = Follow::begin(&parts.logs, &*parts.profile, &id, args.last, args.full).await?;
    let mut goes_on = show(&mut look, news)?;
    let mut last = Instant::now();
    let mut fails = false;
    while args.follow && goes_on {
        tokio::time::sleep(pace(last.elapsed())).await;
        match follow.look().await {
            Ok(news) => {
                if std::mem::take(&mut fails) {
                    tracing::info!("the store answers again");
                }
                if !news.is_empty() {
                    last = Instant::now();
                    goes_on = show(&mut look, news)?;
                }
            }
            Err(error) if error.is_retryable() => {
                if !std::mem::replace(&mut fails, true) {
                    tracing::warn!(%error, "the store does not answer; going on when it does");
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(exit::OK)
}

/// False if nobody reads any more.
fn show(look: &mut Look, news: Vec<News>) -> Result<bool> {
    for news in news {
        match news {
            News::Said(spoken) => {
                let text = look.message(&spoken, usize::from(spoken.sub_agent.is_some()));
                if !text.is_empty() && !print::text(&text)? {
                    return Ok(false);
                }
            }
            News::Removed => tracing::warn!("the session was removed; it goes on here if it comes back"),
            News::Damaged(damage) => print::error(&Error::corrupt(damage).hint("sessiond verify says what can be restored")),
        }
    }
    Ok(true)
}
