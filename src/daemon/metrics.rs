//! The metrics in the OpenMetrics text format, which Prometheus scrapes.
//!
//! Owns every metric name, label and help text. Does not own the values (`sys/counters.rs`,
//! `daemon/health.rs`). There are few labels, and none identifies a session, a file or a person.

use jiff::Timestamp;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

use crate::capture::StreamSummary;
use crate::daemon::health::{HealthReport, HealthSnapshot, IndexHealth};
use crate::error::{Error, ErrorKind, Result};
use crate::sys::Counters;
use crate::sys::counters::unix_seconds;

/// The content type of the metrics page.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Renders the metrics page.
///
/// The library appends `_total` to the name of a counter, the unit to the name of a metric that
/// has one, and a full stop to each help text.
pub fn render(
    started_at: Timestamp,
    snapshot: &HealthSnapshot,
    counters: &Counters,
) -> Result<String> {
    let mut registry = Registry::default();
    register_process(&mut registry, started_at, &snapshot.report);
    if let Some(streams) = &snapshot.streams {
        register_streams(&mut registry, streams);
    }
    if let Some(index) = &snapshot.index {
        register_index(&mut registry, *index);
    }
    register_uploads(&mut registry, counters);
    register_operations(&mut registry, counters);
    let mut page = String::new();
    encode(&mut page, &registry).map_err(|cause| {
        Error::new(ErrorKind::Internal, "render the metrics page").caused_by(cause)
    })?;
    Ok(page)
}

fn register_process(registry: &mut Registry, started_at: Timestamp, report: &HealthReport) {
    registry.register(
        "sessiond_build",
        "The running version",
        Info::new([("version", env!("CARGO_PKG_VERSION"))]),
    );
    registry.register_with_unit(
        "process_start_time",
        "Start time of the process since the Unix epoch",
        Unit::Seconds,
        ConstGauge::new(unix_seconds(started_at)),
    );
    registry.register(
        "sessiond_healthy",
        "1 if /healthz returns 200: the streaming loop responds, has not started, or is stopping",
        ConstGauge::new(u32::from(report.healthy)),
    );
    registry.register(
        "sessiond_ready",
        "1 if /readyz returns 200: the session is restored and sessiond is streaming",
        ConstGauge::new(u32::from(report.ready)),
    );
}

/// Registers the state of all logs, which is known only while the streaming loop responds.
fn register_streams(registry: &mut Registry, streams: &StreamSummary) {
    registry.register(
        "sessiond_logs",
        "Logs that this process writes (sessions and projects)",
        ConstGauge::new(streams.logs),
    );
    registry.register(
        "sessiond_logs_unflushed",
        "Logs with changes that are not durable yet",
        ConstGauge::new(streams.unflushed),
    );
    registry.register(
        "sessiond_sessions_fenced",
        "Sessions that another writer took over; this process writes them to a branch",
        ConstGauge::new(streams.fenced),
    );
    registry.register(
        "sessiond_watched_files",
        "Files that this process uploads",
        ConstGauge::new(streams.files),
    );
    registry.register(
        "sessiond_watch_degraded",
        "1 while file events are unreliable and periodic scans replace them",
        ConstGauge::new(u32::from(streams.is_watch_degraded)),
    );
    registry.register_with_unit(
        "sessiond_lag_max",
        "Age of the oldest change that is not durable",
        Unit::Seconds,
        ConstGauge::new(streams.lag_max_seconds),
    );
    registry.register_with_unit(
        "sessiond_lag_sum",
        "Age of the oldest change that is not durable, summed over all logs",
        Unit::Seconds,
        ConstGauge::new(streams.lag_sum_seconds),
    );
    registry.register_with_unit(
        "sessiond_lag_max",
        "Bytes that are not durable, in the log with the largest backlog",
        Unit::Bytes,
        ConstGauge::new(streams.lag_max_bytes),
    );
    registry.register_with_unit(
        "sessiond_lag_sum",
        "Bytes that are not durable, summed over all logs",
        Unit::Bytes,
        ConstGauge::new(streams.lag_sum_bytes),
    );
}

fn register_index(registry: &mut Registry, index: IndexHealth) {
    registry.register(
        "sessiond_index_up",
        "1 if the last update of the index succeeded",
        ConstGauge::new(u32::from(index.reachable)),
    );
    registry.register(
        "sessiond_index_backlog_entries",
        "Entries that are not in the index yet; a log whose entries were dropped from the queue counts as one",
        ConstGauge::new(index.lag_entries),
    );
}

fn register_uploads(registry: &mut Registry, counters: &Counters) {
    registry.register(
        "sessiond_flushes",
        "Flushes that made bytes durable",
        counters.flushes.clone(),
    );
    registry.register_with_unit(
        "sessiond_flush_duration",
        "Duration of flushes that made bytes durable",
        Unit::Seconds,
        counters.flush_duration.clone(),
    );
    registry.register_with_unit(
        "sessiond_flush_last_success_timestamp",
        "Unix time of the last flush that made bytes durable; 0 if none",
        Unit::Seconds,
        counters.flush_last_success.clone(),
    );
    registry.register(
        "sessiond_entries_written",
        "Entries written: claims and deltas",
        counters.entries.clone(),
    );
    registry.register_with_unit(
        "sessiond_uploaded_raw",
        "Size of the written claims and deltas before compression",
        Unit::Bytes,
        counters.raw_bytes.clone(),
    );
    registry.register_with_unit(
        "sessiond_uploaded_stored",
        "Size of the written claims and deltas as stored",
        Unit::Bytes,
        counters.stored_bytes.clone(),
    );
    registry.register(
        "sessiond_branches",
        "Branches started",
        counters.branches.clone(),
    );
    registry.register(
        "sessiond_compacted_segments",
        "Merges and snapshots written",
        counters.compacted_segments.clone(),
    );
    registry.register_with_unit(
        "sessiond_compacted_stored",
        "Size of the written merges and snapshots as stored",
        Unit::Bytes,
        counters.compacted_stored_bytes.clone(),
    );
}

fn register_operations(registry: &mut Registry, counters: &Counters) {
    registry.register(
        "sessiond_errors",
        "Failed attempts, by operation and kind of error",
        counters.errors.clone(),
    );
    registry.register_with_unit(
        "sessiond_index_last_success_timestamp",
        "Unix time of the last successful index update; 0 if none",
        Unit::Seconds,
        counters.index_last_success.clone(),
    );
    registry.register(
        "sessiond_restores",
        "Restores completed by this process",
        counters.restores.clone(),
    );
    registry.register_with_unit(
        "sessiond_restored",
        "Bytes written by restores of this process",
        Unit::Bytes,
        counters.restored_bytes.clone(),
    );
    registry.register_with_unit(
        "sessiond_restore_last_duration",
        "Duration of the last restore; 0 if none",
        Unit::Seconds,
        counters.restore_last_duration.clone(),
    );
    registry.register_with_unit(
        "sessiond_restore_last_success_timestamp",
        "Unix time of the last restore; 0 if none",
        Unit::Seconds,
        counters.restore_last_success.clone(),
    );
    registry.register(
        "sessiond_heartbeats",
        "Heartbeats by result: sent, failed, or withheld",
        counters.heartbeats.clone(),
    );
    registry.register_with_unit(
        "sessiond_heartbeat_last_success_timestamp",
        "Unix time of the last acknowledged heartbeat; 0 if none",
        Unit::Seconds,
        counters.heartbeat_last_success.clone(),
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn page(snapshot: &HealthSnapshot) -> String {
        let counters = Counters::default();
        let now = Timestamp::from_second(1_700_000_000).unwrap();
        counters.record_flush(Duration::from_millis(20), now);
        counters.record_entry(100, 40);
        render(now, snapshot, &counters).unwrap()
    }

    fn report() -> HealthReport {
        HealthReport {
            healthy: true,
            ready: false,
            phase: "restoring",
            reason: None,
        }
    }

    #[test]
    fn values_carry_their_unit_and_the_page_ends_properly() {
        let page = page(&HealthSnapshot {
            report: report(),
            streams: Some(StreamSummary {
                logs: 3,
                lag_max_seconds: 1.5,
                ..StreamSummary::default()
            }),
            index: Some(IndexHealth {
                reachable: true,
                lag_entries: 7,
            }),
            has_database_error: false,
        });
        for line in [
            "# TYPE sessiond_flushes counter",
            "sessiond_flushes_total 1",
            "sessiond_uploaded_raw_bytes_total 100",
            "sessiond_uploaded_stored_bytes_total 40",
            "sessiond_flush_duration_seconds_bucket{le=\"0.025\"} 1",
            "sessiond_flush_duration_seconds_bucket{le=\"+Inf\"} 1",
            "sessiond_flush_last_success_timestamp_seconds 1700000000.0",
            "sessiond_errors_total{operation=\"flush\",kind=\"fenced\"} 0",
            "sessiond_heartbeats_total{result=\"sent\"} 0",
            "sessiond_logs 3",
            "sessiond_lag_max_seconds 1.5",
            "sessiond_lag_max_bytes 0",
            "sessiond_index_backlog_entries 7",
            "sessiond_ready 0",
        ] {
            assert!(page.lines().any(|found| found == line), "{line}\n{page}");
        }
        assert!(page.ends_with("# EOF\n"), "{page}");
    }

    #[test]
    fn unknown_values_are_left_out() {
        let page = page(&HealthSnapshot {
            report: report(),
            streams: None,
            index: None,
            has_database_error: false,
        });
        assert!(!page.contains("sessiond_lag") && !page.contains("sessiond_index_up"));
        assert!(page.contains("sessiond_healthy 1"));
    }
}
