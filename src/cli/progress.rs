//! Shows how far long work has come: a line that changes on a terminal, a line in the log now and then elsewhere.

use std::io::IsTerminal;
use std::sync::Arc;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tokio::task::JoinHandle;
use tokio::time::{Instant, interval, interval_at};

use crate::cli::print;
use crate::config::Settings;
use crate::sys::Progress;
use crate::sys::progress::Counted;
use crate::wire::Parts;

/// What takes no longer is not shown: a line that comes and goes is a flicker.
const SHORT: Duration = Duration::from_millis(500);
/// How often the line changes.
const PACE: Duration = Duration::from_millis(100);
/// How often the log tells.
const TELL: Duration = Duration::from_secs(10);

/// Shown until it is dropped.
#[must_use]
pub struct Shown(Option<JoinHandle<()>>);

impl Drop for Shown {
    fn drop(&mut self) {
        if let Some(task) = self.0.take() {
            task.abort();
        }
    }
}

/// Shows how far `context` has come with the logs.
pub fn show(settings: &Settings, parts: &Parts, context: &'static str) -> Shown {
    let progress = parts.logs.progress.clone();
    Shown(match (settings.quiet, std::io::stderr().is_terminal()) {
        (true, _) => None,
        (false, true) => Some(tokio::spawn(draw(progress, context))),
        (false, false) => Some(tokio::spawn(tell(progress, context))),
    })
}

async fn draw(progress: Arc<Progress>, context: &'static str) {
    tokio::time::sleep(SHORT).await;
    // Dropped with this task, and with it the line is gone: what comes next begins at its beginning.
    let line = Line(ProgressBar::with_draw_target(
        None,
        ProgressDrawTarget::stderr(),
    ));
    line.0.set_style(
        ProgressStyle::with_template("{spinner} {msg}")
            .unwrap_or_else(|_| ProgressStyle::default_spinner()),
    );
    let mut pace = interval(PACE);
    loop {
        pace.tick().await;
        line.0.set_message(text(context, progress.counted()));
        line.0.tick();
    }
}

struct Line(ProgressBar);

impl Drop for Line {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

async fn tell(progress: Arc<Progress>, context: &'static str) {
    let mut pace = interval_at(Instant::now() + TELL, TELL);
    loop {
        pace.tick().await;
        tracing::info!("{}", text(context, progress.counted()));
    }
}

/// Pure: what has been counted, in words.
fn text(context: &str, counted: Counted) -> String {
    let Counted {
        expected,
        done,
        logs,
        of_logs,
    } = counted;
    let which = match (logs, of_logs) {
        (0, _) => String::new(),
        (at, 0) => format!(" log {at}:"),
        (at, all) => format!(" log {at} of {all}:"),
    };
    // What is expected grows with each log, so it says something of one alone.
    match expected {
        0 => format!("{context}{which} {}", print::bytes(done)),
        _ if logs > 1 || of_logs > 1 => format!("{context}{which} {}", print::bytes(done)),
        _ => format!(
            "{context}{which} {} of {} ({}%)",
            print::bytes(done),
            print::bytes(expected),
            done.min(expected) * 100 / expected
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_says_what_is_known() {
        let say = |expected, done, logs, of_logs| {
            text(
                "restoring",
                Counted {
                    expected,
                    done,
                    logs,
                    of_logs,
                },
            )
        };
        assert_eq!(say(0, 0, 0, 0), "restoring 0 B");
        assert_eq!(say(4000, 1000, 0, 0), "restoring 1.0 KB of 4.0 KB (25%)");
        assert_eq!(
            say(4000, 1000, 1, 1),
            "restoring log 1 of 1: 1.0 KB of 4.0 KB (25%)"
        );
        assert_eq!(say(4000, 1000, 3, 120), "restoring log 3 of 120: 1.0 KB");
        assert_eq!(say(4000, 1000, 3, 0), "restoring log 3: 1.0 KB");
    }
}
