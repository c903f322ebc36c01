//! `tail`: the end of a conversation, and what comes next.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::cli::start::FLUSH_INTERVAL;
use crate::cli::{exit, print};
use crate::config::{self, Settings};
use crate::daemon::signals::Signals;
use crate::error::{Error, ErrorKind, Result};
use crate::history::{Follow, News, Renderer, Style};
use crate::restore::find;
use crate::wire::Parts;

/// The next entry is asked for all the time; what that does not tell is looked for as often as this.
const THOROUGH: Duration = Duration::from_secs(15);

/// Show the last messages of a session, and with -f what comes next; from the bucket, wherever it is written
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  sessiond tail -f 3f2a\n\nAsks for the next entry once in a flush interval, and lists the log every 15 seconds when nothing comes. Ctrl-C ends it."
)]
pub struct Args {
    /// The session's id, or the beginning of it
    #[arg(value_name = "ID")]
    pub id: String,

    /// Go on with what comes next
    #[arg(short, long, env = "SESSIOND_FOLLOW")]
    pub follow: bool,

    /// So many messages
    #[arg(
        short = 'n',
        long,
        env = "SESSIOND_LAST",
        value_name = "N",
        default_value_t = 10
    )]
    pub last: usize,

    /// All of it: thoughts, what tools were given and answered, what the agent added
    #[arg(long, env = "SESSIOND_FULL")]
    pub full: bool,

    /// Print each message as JSON on a line of its own
    #[arg(long, env = "SESSIOND_JSON")]
    pub json: bool,

    /// How often whoever writes it flushes: so often is looked for more [default: 1s]
    #[arg(long, env = "SESSIOND_FLUSH_INTERVAL", value_name = "TIME")]
    pub flush_interval: Option<String>,
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
    let interval = config::duration(
        "--flush-interval",
        args.flush_interval.as_deref(),
        FLUSH_INTERVAL,
    )?;
    let mut look = Renderer::new(
        Style {
            colour: print::colour(),
            full: args.full,
            markdown: false,
        },
        HashMap::new(),
    );
    let mut show = |news: Vec<News>| {
        news.into_iter().try_fold(true, |goes_on, news| {
            Ok(goes_on && show(&mut look, news, args.json)?)
        })
    };
    let (mut follow, news) =
        Follow::begin(&parts.logs, &*parts.profile, &id, args.last, args.full).await?;
    let damaged = news.iter().any(|news| matches!(news, News::Damaged(_)));
    let mut goes_on = show(news)?;
    let mut thorough = Instant::now();
    let mut fails = false;
    while args.follow && goes_on {
        tokio::time::sleep(interval).await;
        match follow.look(thorough.elapsed() >= THOROUGH).await {
            Ok(news) => {
                if std::mem::take(&mut fails) {
                    tracing::info!("the store answers again");
                }
                if !news.is_empty() || thorough.elapsed() >= THOROUGH {
                    thorough = Instant::now();
                }
                goes_on = show(news)?;
            }
            Err(error) if error.is_retryable() => {
                if !std::mem::replace(&mut fails, true) {
                    tracing::warn!(%error, "the store does not answer; going on when it does");
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(if damaged { exit::CORRUPT } else { exit::OK })
}

/// False if nobody reads any more.
fn show(look: &mut Renderer, news: News, json: bool) -> Result<bool> {
    match news {
        News::LocatedMessage(spoken) if json => {
            let line = serde_json::to_string(&spoken)
                .map_err(|cause| Error::new(ErrorKind::Internal, "print JSON").caused_by(cause))?;
            print::text(&format!("{line}\n"))
        }
        News::LocatedMessage(spoken) => {
            print::text(&look.message(&spoken, usize::from(spoken.sub_agent.is_some())))
        }
        News::Removed => {
            tracing::warn!("the session was removed; it goes on here if it comes back");
            Ok(true)
        }
        News::Damaged(damage) => {
            print::error(&Error::corrupt(damage).hint("sessiond verify says what can be restored"));
            Ok(true)
        }
    }
}
