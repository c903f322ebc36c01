//! sessiond as a library: streams an agent's directory, and restores the session into another one.
//!
//!     cargo run --example embed
//!
//! All files are in a temporary directory. A real program uses `s3://…` and `postgres://…`.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use sessiond::{
    AgentConfig, CheckpointPolicy, Counters, HealthState, IndexConfig, IndexUpdate, Parts,
    RestoreRequest, RestoreService, Service, ServiceOptions, SessionLimit, SessionMetadata,
    SessionSelector, SessionSet, Settings, StoreConfig, SystemClock,
};
use tokio::time::Instant;

const SESSION: &str = "3f2a0000-0000-4000-8000-000000000001";
const LINE: &str = "{\"type\":\"user\",\"cwd\":\"/work/app\",\"message\":{\"role\":\"user\",\"content\":\"hello\"}}\n";

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let directory = std::env::temp_dir().join(format!("sessiond-embed-{}", std::process::id()));
    std::fs::create_dir_all(&directory)?;
    let result = stream_and_restore(&directory).await;
    std::fs::remove_dir_all(&directory)?;
    result
}

async fn stream_and_restore(directory: &Path) -> Result<(), Box<dyn Error>> {
    let (first, second) = (directory.join("first"), directory.join("second"));
    std::fs::create_dir(&first)?;
    std::fs::create_dir(&second)?;

    // The parts of a daemon: the store, the index, the agent's profile and its directory.
    let settings = Settings {
        agent: AgentConfig {
            root: Some(first.clone()),
            ..AgentConfig::default()
        },
        store: StoreConfig {
            url: Some(format!("file://{}", directory.join("bucket").display())),
            ..StoreConfig::default()
        },
        index: IndexConfig {
            url: Some(format!("sqlite://{}", directory.join("index.db").display())),
            ..IndexConfig::default()
        },
        ..Settings::default()
    };
    let parts = Parts::build(&settings, None).await?;

    // Lock the directory, then stream it: the service uploads changes within the flush interval.
    let counters = Arc::new(Counters::default());
    let lock = RestoreService::open(&parts, counters.clone(), IndexUpdate::Deferred)?;
    let options = ServiceOptions {
        flush_interval: Duration::from_millis(200),
        checkpoints: CheckpointPolicy::default(),
        max_concurrent_flushes: 8,
        ready_file: None,
        metadata: SessionMetadata::default(),
        heartbeat: None,
        limit: SessionLimit::default(),
    };
    let health = HealthState::new(Arc::new(SystemClock));
    let service = Service::start(&parts, options, Vec::new(), &health).await?;

    // The agent writes a transcript.
    let transcript = format!("projects/-work-app/{SESSION}.jsonl");
    std::fs::create_dir_all(first.join("projects/-work-app"))?;
    std::fs::write(first.join(&transcript), LINE)?;

    // Flush, then stop with a final flush.
    let flushed = service.handle().flush(Some(SESSION.parse()?)).await?;
    println!("durable: {} log", flushed.logs.len());
    std::fs::write(first.join(&transcript), LINE.repeat(2))?;
    let deadline = Instant::now() + Duration::from_secs(8);
    let not_durable = service.stop(deadline).await?.not_durable;
    if !not_durable.is_empty() {
        return Err(format!("not durable: {not_durable:?}").into());
    }

    drop(lock);

    // Restore the session into another directory and claim it. This fences the first writer.
    let parts = parts.with_root(second.clone());
    let service = RestoreService::open(&parts, counters, IndexUpdate::Immediate)?;
    let selector = SessionSelector::Id(SESSION.to_owned());
    let request = RestoreRequest::new(SessionSet::Selected(selector));
    let summary = service.restore(&request).await?;
    for report in &summary.restored {
        println!(
            "restored: {} bytes from {} objects",
            report.bytes, report.objects
        );
    }
    let before = std::fs::read(first.join(&transcript))?;
    let after = std::fs::read(second.join(&transcript))?;
    if before != after || after.is_empty() {
        return Err("the restored transcript differs".into());
    }
    println!("equal");
    Ok(())
}
