//! The alert rules and the dashboard: the programs that use them accept them, and every metric
//! exists.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use sessiond::capture::StreamSummary;
use sessiond::daemon::health::{HealthReport, HealthSnapshot, IndexHealth};
use sessiond::daemon::metrics::render;
use sessiond::sys::{Clock, Counters, SystemClock};

use super::{check_and_detect_failure, file, text};
use crate::support::{fetch, or_skip, run};

/// The checker of Prometheus, in a directory with the rules and their tests.
struct Promtool {
    program: std::path::PathBuf,
    directory: tempfile::TempDir,
}

impl Promtool {
    fn new() -> Option<Promtool> {
        let package = or_skip(fetch::debian_package("prometheus"))?;
        let directory = tempfile::tempdir().unwrap();
        std::fs::copy(
            file("prometheus/alerts_test.yml"),
            directory.path().join("alerts_test.yml"),
        )
        .unwrap();
        Some(Promtool {
            program: package.join("usr/bin/promtool"),
            directory,
        })
    }

    fn check_rules(&self, verb: &str, on: &str, rules: &str) -> Result<(), String> {
        std::fs::write(self.directory.path().join("alerts.yml"), rules).unwrap();
        run(Command::new(&self.program)
            .args([verb, "rules", on])
            .current_dir(self.directory.path()))
    }
}

#[test]
fn the_alerts_fire_when_they_should() {
    let Some(promtool) = Promtool::new() else {
        return;
    };
    let rules = text("prometheus/alerts.yml");
    check_and_detect_failure(
        &rules,
        ("> 60\n", "> > 60\n"),
        "could not parse expression",
        |text| promtool.check_rules("check", "alerts.yml", text),
    );
    // The test of each alert depends on its threshold.
    for broken in [
        (
            "sessiond_lag_max_seconds > 60",
            "sessiond_lag_max_seconds > 6000",
        ),
        ("sessiond_ready == 0", "sessiond_ready == 1"),
        (
            "sessiond_sessions_fenced > 0",
            "sessiond_sessions_fenced >= 0",
        ),
        ("kind=\"corrupt\"}[1h]) > 0", "kind=\"corrupt\"}[1h]) > 5"),
        ("kind=\"usage\"}[15m]) > 0", "kind=\"usage\"}[15m]) >= 0"),
        ("[5m]) > 0.1", "[5m]) > 100"),
        ("sessiond_index_up == 0", "sessiond_index_up == 2"),
        (
            "sessiond_watch_degraded == 1",
            "sessiond_watch_degraded == 0",
        ),
    ] {
        check_and_detect_failure(&rules, broken, "FAILED", |text| {
            promtool.check_rules("test", "alerts_test.yml", text)
        });
    }
    let tests = text("prometheus/alerts_test.yml");
    for name in rules
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "))
    {
        assert!(
            tests.matches(name).count() >= 2,
            "{name} is not tested both ways"
        );
    }
}

/// The dashboard's queries.
fn queries(dashboard: &Value) -> Vec<String> {
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().unwrap());
    targets
        .map(|target| target["expr"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn the_dashboard_is_valid() {
    let Some(promtool) = Promtool::new() else {
        return;
    };
    let whole = text("grafana/sessiond.json");
    let check = |text: &str| {
        let dashboard: Value = serde_json::from_str(text).map_err(|e| e.to_string())?;
        let mut rules = "groups:\n- name: dashboard\n  rules:\n".to_owned();
        for (number, query) in queries(&dashboard).iter().enumerate() {
            // As Grafana sends it.
            let query = query
                .replace("$__rate_interval", "1m")
                .replace("$job", ".*")
                .replace("$instance", ".*");
            if query.contains('$') {
                return Err(format!("an unknown variable: {query}"));
            }
            rules += &format!(
                "  - record: q{number}\n    expr: {}\n",
                serde_json::json!(query)
            );
        }
        promtool.check_rules("check", "alerts.yml", &rules)?;
        let panels = dashboard["panels"].as_array().ok_or("no panels")?;
        let ids: BTreeSet<u64> = panels
            .iter()
            .filter_map(|panel| panel["id"].as_u64())
            .collect();
        if ids.len() != panels.len() {
            return Err("two panels share an id".into());
        }
        for panel in panels {
            let position = |name: &str| {
                panel["gridPos"][name]
                    .as_u64()
                    .ok_or(format!("{} has no position", panel["title"]))
            };
            if position("x")? + position("w")? > 24 {
                return Err(format!("{} is wider than the screen", panel["title"]));
            }
        }
        Ok(())
    };
    check_and_detect_failure(
        &whole,
        ("sum by (le)", "sum by le"),
        "could not parse expression",
        check,
    );
    check_and_detect_failure(
        &whole,
        ("$__rate_interval", "$rate"),
        "an unknown variable",
        check,
    );
    check_and_detect_failure(&whole, ("\"id\": 2,", "\"id\": 1,"), "share an id", check);
    check_and_detect_failure(&whole, ("\"w\": 8", "\"w\": 25"), "wider", check);
}

/// The names of metrics in a text.
fn metrics(text: &str) -> BTreeSet<String> {
    let words = text.split(|letter: char| !(letter.is_ascii_alphanumeric() || letter == '_'));
    words
        .filter(|word| word.starts_with("sessiond_") || word.starts_with("process_"))
        .map(str::to_owned)
        .collect()
}

/// The names of the samples on the metrics page.
fn known() -> BTreeSet<String> {
    let snapshot = HealthSnapshot {
        report: HealthReport {
            healthy: true,
            ready: true,
            phase: "streaming",
            reason: None,
        },
        streams: Some(StreamSummary::default()),
        index: Some(IndexHealth {
            reachable: true,
            lag_entries: 0,
        }),
        has_database_error: false,
    };
    let page = render(SystemClock.now(), &snapshot, &Counters::default()).unwrap();
    let samples = page.lines().filter(|line| !line.starts_with('#'));
    samples
        .filter_map(|line| line.split(['{', ' ']).next())
        .map(str::to_owned)
        .collect()
}

#[test]
fn alerts_and_dashboard_use_only_existing_metrics() {
    let known = known();
    assert!(known.len() > 20, "{known:?}");
    let mut used = metrics(&text("prometheus/alerts.yml"));
    used.extend(metrics(&text("prometheus/alerts_test.yml")));
    used.extend(
        queries(&serde_json::from_str(&text("grafana/sessiond.json")).unwrap())
            .iter()
            .flat_map(|query| metrics(query)),
    );
    assert!(used.len() > 15, "{used:?}");
    let unknown: Vec<_> = used.difference(&known).collect();
    assert!(unknown.is_empty(), "no such metrics: {unknown:?}");
    let documented = metrics(
        &std::fs::read_to_string(
            Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference/metrics.md"),
        )
        .unwrap(),
    );
    let silent: Vec<_> = used
        .iter()
        .filter(|name| !documented.contains(name.trim_end_matches("_bucket")))
        .collect();
    assert!(
        silent.is_empty(),
        "not in docs/reference/metrics.md: {silent:?}"
    );
}
