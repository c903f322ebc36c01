//! The metrics as Prometheus reads them (text format 0.0.4). Pure: counts and a look in, text out. Few labels, and nothing that
//! names a session, a file or a person.

use std::fmt::{Display, Write};

use jiff::Timestamp;

use crate::daemon::health::HealthSnapshot;
use crate::error::ErrorKind;
use crate::sys::Operation;
use crate::sys::counters::{BOUNDS, CounterValues};

/// The content type.
pub const KIND: &str = "text/plain; version=0.0.4; charset=utf-8";

#[derive(Default)]
struct Page(String);

impl Page {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    fn sample(&mut self, name: impl Display, value: impl Display) {
        let _ = writeln!(self.0, "{name} {value}");
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl Display) {
        self.family(name, "gauge", help);
        self.sample(name, value);
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.family(name, "counter", help);
        self.sample(name, value);
    }

    fn time(&mut self, name: &str, help: &str, at: Option<Timestamp>) {
        self.gauge(name, help, at.map_or(0.0, seconds));
    }
}

fn seconds(at: Timestamp) -> f64 {
    at.as_microsecond() as f64 / 1e6
}

/// All of it.
pub fn text(since: Timestamp, look: &HealthSnapshot, tally: &CounterValues) -> String {
    let mut page = Page::default();
    page.family(
        "sessiond_build_info",
        "gauge",
        "The version that runs; always 1.",
    );
    page.sample(
        format_args!(
            "sessiond_build_info{{version=\"{}\"}}",
            env!("CARGO_PKG_VERSION")
        ),
        1,
    );
    page.gauge(
        "process_start_time_seconds",
        "When the process started, in seconds since 1970.",
        seconds(since),
    );
    page.gauge(
        "sessiond_healthy",
        "1 unless what streams is stuck or has ended; as /healthz.",
        u8::from(look.verdict.healthy),
    );
    page.gauge(
        "sessiond_ready",
        "1 when everything is restored and streaming; as /readyz.",
        u8::from(look.verdict.ready),
    );
    standing(&mut page, look);
    flushes(&mut page, tally);
    rest(&mut page, tally);
    page.0
}

/// How things stand now. What is not known is left out.
fn standing(page: &mut Page, look: &HealthSnapshot) {
    if let Some(all) = &look.overview {
        page.gauge(
            "sessiond_sessions",
            "Logs known here: sessions, and projects with files of their own.",
            all.logs,
        );
        page.gauge(
            "sessiond_sessions_unflushed",
            "Logs with changes that are not durable yet: the queue.",
            all.unflushed,
        );
        page.gauge(
            "sessiond_sessions_fenced",
            "Sessions that another writer took over; what is written here goes to a branch.",
            all.fenced,
        );
        page.gauge("sessiond_watched_files", "Files that are kept.", all.files);
        page.gauge(
            "sessiond_watch_degraded",
            "1 while file events cannot be relied on and the directory is scanned instead.",
            u8::from(all.scanning),
        );
        page.gauge(
            "sessiond_lag_max_seconds",
            "Age of the oldest change that is not durable.",
            all.lag_max_seconds,
        );
        page.gauge(
            "sessiond_lag_sum_seconds",
            "Age of the oldest change that is not durable, added up over logs.",
            all.lag_sum_seconds,
        );
        page.gauge(
            "sessiond_lag_max_bytes",
            "Bytes that are not durable, of the log with the most.",
            all.lag_max_bytes,
        );
        page.gauge(
            "sessiond_lag_sum_bytes",
            "Bytes that are not durable, of all logs.",
            all.lag_sum_bytes,
        );
    }
    if let Some((answers, behind)) = look.index {
        page.gauge(
            "sessiond_index_up",
            "1 if the index took what it was told last.",
            u8::from(answers),
        );
        page.gauge(
            "sessiond_index_lag_entries",
            "Entries not yet in the index; a log that it missed more of counts once.",
            behind,
        );
    }
}

fn flushes(page: &mut Page, tally: &CounterValues) {
    page.counter(
        "sessiond_flushes_total",
        "Flushes that made something durable.",
        tally.flushes,
    );
    let name = "sessiond_flush_duration_seconds";
    page.family(
        name,
        "histogram",
        "From the beginning of such a flush until it was durable.",
    );
    let mut below = 0;
    for (bound, count) in BOUNDS.iter().zip(tally.flush_times.below) {
        below += count;
        page.sample(format_args!("{name}_bucket{{le=\"{bound}\"}}"), below);
    }
    page.sample(
        format_args!("{name}_bucket{{le=\"+Inf\"}}"),
        tally.flush_times.count,
    );
    page.sample(format_args!("{name}_sum"), tally.flush_times.sum);
    page.sample(format_args!("{name}_count"), tally.flush_times.count);
    page.time(
        "sessiond_flush_last_success_timestamp_seconds",
        "When the last such flush was durable; 0 if none was.",
        tally.flushed_at,
    );
    page.counter(
        "sessiond_entries_written_total",
        "Entries written.",
        tally.entries,
    );
    page.counter(
        "sessiond_uploaded_raw_bytes_total",
        "Bytes of the agent's files in them, before compression.",
        tally.raw,
    );
    page.counter(
        "sessiond_uploaded_stored_bytes_total",
        "Bytes of them as stored.",
        tally.stored,
    );
    page.counter(
        "sessiond_branches_written_total",
        "Branches begun, because the session belongs to another writer.",
        tally.branches,
    );
    page.counter(
        "sessiond_merges_total",
        "Merges and snapshots written.",
        tally.merges,
    );
    page.counter(
        "sessiond_merged_stored_bytes_total",
        "Bytes of them as stored.",
        tally.merged,
    );
}

fn rest(page: &mut Page, tally: &CounterValues) {
    page.family(
        "sessiond_errors_total",
        "counter",
        "What failed, by what it was part of and by kind; each try counts.",
    );
    for during in Operation::ALL {
        for kind in ErrorKind::ALL {
            let labels = format_args!(
                "sessiond_errors_total{{during=\"{}\",kind=\"{}\"}}",
                during.word(),
                kind.word()
            )
            .to_string();
            page.sample(labels, tally.errors(during, kind));
        }
    }
    page.time(
        "sessiond_index_last_success_timestamp_seconds",
        "When the index last took something; 0 if never.",
        tally.indexed_at,
    );
    page.counter(
        "sessiond_restores_total",
        "Sessions restored.",
        tally.restores,
    );
    page.gauge(
        "sessiond_restore_last_duration_seconds",
        "How long the last restore took; 0 if there was none.",
        tally.restore_took.as_secs_f64(),
    );
    page.time(
        "sessiond_restore_last_success_timestamp_seconds",
        "When it was done; 0 if there was none.",
        tally.restored_at,
    );
    page.counter(
        "sessiond_restored_bytes_total",
        "Bytes put in place by restores.",
        tally.restored,
    );
    page.family(
        "sessiond_heartbeats_total",
        "counter",
        "Heartbeats: sent and heard, failed, or withheld because not everything was durable.",
    );
    for (result, count) in [
        ("sent", tally.beats),
        ("failed", tally.missed_beats),
        ("withheld", tally.withheld_beats),
    ] {
        page.sample(
            format_args!("sessiond_heartbeats_total{{result=\"{result}\"}}"),
            count,
        );
    }
    page.time(
        "sessiond_heartbeat_last_success_timestamp_seconds",
        "When a heartbeat was last heard; 0 if never.",
        tally.beat_at,
    );
}
