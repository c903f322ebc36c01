//! Compaction bounds the log: objects read by a restore, total bytes uploaded, and what remains
//! once the history has expired.

use std::collections::BTreeSet;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use sessiond::capture::flush::LogFlusher;
use sessiond::log::segments::{Granularity, Segment, SegmentKind, select_segments};
use sessiond::restore;
use sessiond::sys::Disk;
use sessiond::upkeep::compact::compact;

use crate::support::slow;
use crate::support::transcripts::Transcript;
use crate::support::world::World;
use crate::support::writer::FlushAll;

const FLUSHES: usize = 5000;

fn gzip(bytes: &[u8]) -> u64 {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::new(6));
    gzip.write_all(bytes).unwrap();
    gzip.finish().unwrap().len() as u64
}

fn read(segments: &[Segment]) -> Vec<Segment> {
    select_segments(segments, 0, u64::MAX, Granularity::Coarse, &BTreeSet::new())
}

slow!(async five_thousand_flushes_restore_from_a_bounded_number_of_objects);
async fn five_thousand_flushes_restore_from_a_bounded_number_of_objects() {
    let world = World::in_memory();
    let (logs, id, path) = (world.logs(), world.id("s1"), "projects/-work-app/s1.jsonl");
    let mut transcript = Transcript::new(1);
    let mut shipment = LogFlusher::new(id.clone());
    shipment.paths.insert(path.parse().unwrap());
    let (mut whole, mut most) = (Vec::new(), 0);
    for _ in 0..FLUSHES {
        let lines = transcript.flush(2048);
        world.append(path, &lines);
        whole.extend_from_slice(lines.as_bytes());
        shipment.flush(&world.context(), false).await.unwrap();
        // Before a merge that has just become due is made.
        let head = shipment.ledger.as_ref().unwrap().log_writer.seq;
        if sessiond::log::schedule::is_due(head) {
            most = most.max(read(&logs.list_newest_segments(&id).await.unwrap()).len());
        }
        if sessiond::log::schedule::is_due(head) {
            compact(&logs, &id, head).await.unwrap();
        }
    }
    let ideal = gzip(&whole);
    let ratio = whole.len() as f64 / ideal as f64;
    assert!(
        (4.0..5.0).contains(&ratio),
        "gzip makes this {ratio:.2} times smaller: not like a real transcript"
    );
    let segments = logs.list_segments(&id).await.unwrap();
    let left: u64 = read(&segments).iter().map(|segment| segment.size).sum();
    let uploaded = world.store.uploaded() as f64 / ideal as f64;
    let entries: u64 = segments
        .iter()
        .filter(|segment| segment.kind == SegmentKind::Entry)
        .map(|segment| segment.size)
        .sum();
    println!(
        "{FLUSHES} flushes of {} bytes, {ratio:.2} times smaller by gzip -6; at most {most} objects to read; uploaded {uploaded:.3} times that \
         (entries {:.3}), left {:.3} times",
        whole.len() / FLUSHES,
        entries as f64 / ideal as f64,
        left as f64 / ideal as f64
    );
    let bound = 72 + (left >> 20) as usize;
    assert!(
        most <= bound,
        "a restore reads {most} objects, more than 72 and one for each MiB of {left} bytes"
    );
    assert!(uploaded <= 3.8, "{uploaded:.3} times the data was uploaded");
    assert!(
        left as f64 <= 1.15 * ideal as f64,
        "{:.3} times the data is left",
        left as f64 / ideal as f64
    );
    assert_eq!(world.stored_file("s1", path).await.unwrap(), whole);
}

/// Appends and flushes; returns the uploaded bytes as a multiple of the gzip size of each append
/// alone.
async fn upload_ratio(appends: usize, len: usize) -> f64 {
    let world = World::in_memory();
    let (logs, id, path) = (world.logs(), world.id("s1"), "projects/-work-app/s1.jsonl");
    let mut transcript = Transcript::new(3);
    let mut shipment = LogFlusher::new(id.clone());
    shipment.paths.insert(path.parse().unwrap());
    let mut alone = 0;
    for _ in 0..appends {
        let lines = transcript.flush(len);
        alone += gzip(lines.as_bytes());
        world.append(path, &lines);
        shipment.flush(&world.context(), false).await.unwrap();
        let head = shipment.ledger.as_ref().unwrap().log_writer.seq;
        if sessiond::log::schedule::is_due(head) {
            compact(&logs, &id, head).await.unwrap();
        }
    }
    world.store.uploaded() as f64 / alone as f64
}

#[tokio::test]
async fn two_hundred_small_appends_upload_at_most_1_65_times_their_compressed_size() {
    let ratio = upload_ratio(200, 3072).await;
    assert!(ratio <= 1.65, "{ratio:.3} times the compressed appends");
}

#[tokio::test]
async fn entries_upload_little_more_than_the_appended_bytes() {
    // No range is merged yet.
    let ratio = upload_ratio(32, 3072).await;
    assert!(ratio <= 1.2, "{ratio:.3} times the compressed appends");
}

#[tokio::test(start_paused = true)]
async fn a_restore_takes_three_sequential_round_trips() {
    let world = World::in_memory();
    let (logs, id, path) = (world.logs(), world.id("s1"), "projects/-work-app/s1.jsonl");
    let mut transcript = Transcript::new(2);
    let mut shipment = LogFlusher::new(id.clone());
    shipment.paths.insert(path.parse().unwrap());
    for _ in 0..300 {
        world.append(path, transcript.flush(2048));
        shipment.flush(&world.context(), false).await.unwrap();
        let head = shipment.ledger.as_ref().unwrap().log_writer.seq;
        if sessiond::log::schedule::is_due(head) {
            compact(&logs, &id, head).await.unwrap();
        }
    }
    let elsewhere = Arc::new(Disk::new(world.path("elsewhere")));
    let context = restore::RestoreContext {
        directory: elsewhere,
        profile: world.writer.context.profile.clone(),
        logs: world.logs(),
    };
    // Only requests take time here: concurrent requests take as long as one.
    world.store.set_latency(Duration::from_secs(1));
    let lists_before = world.store.lists();
    let began = tokio::time::Instant::now();
    let report = restore::restore(
        &context,
        &id,
        &restore::Options {
            claim: true,
            ..Default::default()
        },
    )
    .await
    .unwrap()
    .report;
    assert!(
        report.objects > 8,
        "so few objects prove nothing: {}",
        report.objects
    );
    // List, read, claim.
    assert_eq!(began.elapsed().as_secs(), 3);
    assert_eq!(world.store.lists() - lists_before, 1);
    let missing =
        restore::restore(&context, &world.id("nobody"), &restore::Options::default()).await;
    assert!(
        missing.is_err() && began.elapsed().as_secs() == 4,
        "what is not there takes one more: {:?}",
        began.elapsed()
    );
}
