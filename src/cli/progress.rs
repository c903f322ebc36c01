//! The progress of long work: a line that is redrawn on a terminal, a log line every ten seconds
//! elsewhere.

use std::io::IsTerminal;
use std::sync::Arc;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tokio::task::JoinHandle;
use tokio::time::{Instant, interval, interval_at};

use crate::cli::print;
use crate::config::Settings;
use crate::sys::Progress;
use crate::sys::progress::ProgressSnapshot;
use crate::wire::Parts;

/// Delay before the line appears: for shorter work, it would only flicker.
const DRAW_DELAY: Duration = Duration::from_millis(500);
/// How often the line is redrawn.
const DRAW_INTERVAL: Duration = Duration::from_millis(100);
/// How often the progress is logged.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Minimum time before the remaining time is estimated: an earlier estimate is inaccurate.
const MIN_ELAPSED: Duration = Duration::from_secs(2);

/// A progress display; it ends when it is dropped.
#[must_use]
pub struct ProgressDisplay(Option<JoinHandle<()>>);

impl Drop for ProgressDisplay {
    fn drop(&mut self) {
        if let Some(task) = self.0.take() {
            task.abort();
        }
    }
}

/// Shows the progress of `work`, such as "restoring".
pub fn show(settings: &Settings, parts: &Parts, work: &'static str) -> ProgressDisplay {
    let progress = parts.logs.progress.clone();
    if settings.output.is_quiet() {
        return ProgressDisplay(None);
    }
    ProgressDisplay(Some(if std::io::stderr().is_terminal() {
        tokio::spawn(draw(progress, work))
    } else {
        tokio::spawn(log(progress, work))
    }))
}

async fn draw(progress: Arc<Progress>, work: &'static str) {
    let mut meter = Meter::new(work);
    let start = Instant::now();
    tokio::time::sleep(DRAW_DELAY).await;
    // Dropped with this task, which clears the line.
    let line = Line(ProgressBar::with_draw_target(
        None,
        ProgressDrawTarget::stderr(),
    ));
    line.0.set_style(
        ProgressStyle::with_template("{spinner} {msg}")
            .unwrap_or_else(|_| ProgressStyle::default_spinner()),
    );
    let mut ticks = interval(DRAW_INTERVAL);
    loop {
        ticks.tick().await;
        let text = meter.text(progress.snapshot(), start.elapsed());
        line.0.set_message(text);
        line.0.tick();
    }
}

struct Line(ProgressBar);

impl Drop for Line {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

async fn log(progress: Arc<Progress>, work: &'static str) {
    let mut meter = Meter::new(work);
    let start = Instant::now();
    let mut ticks = interval_at(start + LOG_INTERVAL, LOG_INTERVAL);
    loop {
        ticks.tick().await;
        let text = meter.text(progress.snapshot(), start.elapsed());
        tracing::info!("{text}");
    }
}

/// Formats the counters as text. The completed share never decreases, although the expected number
/// of bytes grows with every log that is opened.
struct Meter {
    work: &'static str,
    /// The largest share that was shown, from 0 to 1.
    share: f64,
}

impl Meter {
    fn new(work: &'static str) -> Meter {
        Meter { work, share: 0.0 }
    }

    fn text(&mut self, snapshot: ProgressSnapshot, elapsed: Duration) -> String {
        let ProgressSnapshot {
            expected_bytes: expected,
            done_bytes: done,
            started_logs: logs,
            total_logs,
        } = snapshot;
        let bytes_share = match expected {
            0 => 0.0,
            _ => done.min(expected) as f64 / expected as f64,
        };
        let share = match (logs, total_logs) {
            // One log, or an unknown number of logs: the share of the bytes.
            (_, 0 | 1) => (logs <= 1 && expected > 0).then_some(bytes_share),
            // Several logs: the share of the completed logs, because the size of the others is
            // unknown.
            (logs, all) => Some(logs.saturating_sub(1) as f64 / all as f64),
        };
        let position = match (logs, total_logs) {
            (0, _) => String::new(),
            (at, 0) => format!(" log {at}:"),
            (at, all) => format!(" log {at} of {all}:"),
        };
        let mut text = format!("{}{position} {}", self.work, print::bytes(done));
        if total_logs <= 1 && logs <= 1 && expected > 0 {
            text.push_str(&format!(" of {}", print::bytes(expected.max(done))));
        }
        if let Some(share) = share {
            self.share = self.share.max(share);
            text.push_str(&format!(" ({:.0}%", (self.share * 100.0).floor()));
            if let Some(left) = remaining(self.share, elapsed) {
                text.push_str(&format!(", about {left} left"));
            }
            text.push(')');
        }
        text
    }
}

/// The estimated remaining time.
fn remaining(share: f64, elapsed: Duration) -> Option<String> {
    if share <= 0.0 || share >= 1.0 || elapsed < MIN_ELAPSED {
        return None;
    }
    let left = elapsed.as_secs_f64() * (1.0 - share) / share;
    let seconds = left.ceil().min(f64::from(u32::MAX)) as u64;
    Some(match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m {}s", seconds / 60, seconds % 60),
        _ => format!("{}h {}m", seconds / 3600, seconds % 3600 / 60),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(expected: u64, done: u64, logs: u64, total_logs: u64) -> ProgressSnapshot {
        ProgressSnapshot {
            expected_bytes: expected,
            done_bytes: done,
            started_logs: logs,
            total_logs,
        }
    }

    #[test]
    fn the_text_shows_what_is_known() {
        let text = |counted| Meter::new("restoring").text(counted, Duration::from_secs(1));
        assert_eq!(text(counted(0, 0, 0, 0)), "restoring 0 B");
        assert_eq!(
            text(counted(4000, 1000, 0, 0)),
            "restoring 1.0 KB of 4.0 KB (25%)"
        );
        assert_eq!(
            text(counted(4000, 1000, 1, 1)),
            "restoring log 1 of 1: 1.0 KB of 4.0 KB (25%)"
        );
        assert_eq!(
            text(counted(4000, 1000, 31, 120)),
            "restoring log 31 of 120: 1.0 KB (25%)"
        );
        assert_eq!(text(counted(4000, 1000, 3, 0)), "restoring log 3: 1.0 KB");
    }

    #[test]
    fn the_remaining_time_is_estimated() {
        let text = |done, seconds| {
            let counted = counted(4000, done, 0, 0);
            Meter::new("restoring").text(counted, Duration::from_secs(seconds))
        };
        assert!(text(1000, 10).ends_with("(25%, about 30s left)"));
        assert!(text(1000, 50).ends_with("(25%, about 2m 30s left)"));
        assert!(text(1, 10).ends_with("left)"), "{}", text(1, 10));
        assert!(text(4000, 10).ends_with("(100%)"));
    }

    #[test]
    fn progress_never_goes_backwards() {
        let mut meter = Meter::new("restoring");
        let elapsed = Duration::from_secs(1);
        assert!(
            meter
                .text(counted(1000, 500, 0, 0), elapsed)
                .ends_with("(50%)")
        );
        // Another log was opened: twice as much is expected now.
        assert!(
            meter
                .text(counted(2000, 600, 0, 0), elapsed)
                .ends_with("(50%)")
        );
        assert!(
            meter
                .text(counted(2000, 1200, 0, 0), elapsed)
                .ends_with("(60%)")
        );
    }
}
