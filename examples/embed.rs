//! sessiond as a library: a program that streams an agent's directory itself, and puts it back elsewhere.
//!
//!     cargo run --example embed
//!
//! Everything is in a temporary directory here; a real program says `s3://…` and `postgres://…` in the settings.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use sessiond::capture::watch::{EventBuffer, InotifyWatcher};
use sessiond::capture::{self, Feed, Streamer};
use sessiond::config::Settings;
use sessiond::restore;
use sessiond::wire::Parts;
use tokio::time::Instant;

const SESSION: &str = "3f2a0000-0000-4000-8000-000000000001";
const LINE: &str = "{\"type\":\"user\",\"cwd\":\"/work/app\",\"message\":{\"role\":\"user\",\"content\":\"hello\"}}\n";

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let place = std::env::temp_dir().join(format!("sessiond-embed-{}", std::process::id()));
    std::fs::create_dir_all(&place)?;
    let told = tell(&place).await;
    std::fs::remove_dir_all(&place)?;
    told
}

async fn tell(place: &Path) -> Result<(), Box<dyn Error>> {
    let (here, there) = (place.join("here"), place.join("there"));
    std::fs::create_dir(&here)?;
    std::fs::create_dir(&there)?;

    // The parts that a daemon has: a store, an index, what is known of the agent, its directory.
    let settings = Settings {
        store: Some(format!("file://{}", place.join("bucket").display())),
        index: Some(format!("sqlite://{}", place.join("index.db").display())),
        root: Some(here.clone()),
        ..Settings::default()
    };
    let parts = Parts::make(&settings, None).await?;

    // Stream the directory. From here on whatever the agent appends is uploaded within the interval.
    let context = capture::Context {
        directory: parts.directory()?,
        profile: parts.profile.clone(),
        logs: parts.logs.clone(),
        feed: Arc::new(Feed::default()),
        flush_interval: Duration::from_millis(200),
        parallel: 8,
    };
    let hints = Arc::new(EventBuffer::default());
    let watch = InotifyWatcher::new(
        here.clone(),
        parts.directory()?,
        parts.profile.clone(),
        hints.clone(),
    );
    let streamer = Streamer::start(context, here.clone(), hints, Box::new(watch))?;

    // The agent writes.
    let transcript = format!("projects/-work-app/{SESSION}.jsonl");
    std::fs::create_dir_all(here.join("projects/-work-app"))?;
    std::fs::write(here.join(&transcript), LINE)?;

    // Make it durable now; then end, with the last of it.
    let flushed = streamer.flush(Some(SESSION.parse()?)).await?;
    println!("durable: {} log", flushed.logs.len());
    std::fs::write(here.join(&transcript), LINE.repeat(2))?;
    let left = streamer
        .finish(Instant::now() + Duration::from_secs(8))
        .await?
        .left;
    if !left.is_empty() {
        return Err(format!("not durable: {left:?}").into());
    }

    // Put it back in another directory, and take the session over: the writer above could write no more.
    let parts = parts.rooted_at(there.clone());
    let context = restore::Context {
        directory: parts.directory()?,
        profile: parts.profile.clone(),
        logs: parts.logs.clone(),
    };
    let options = restore::Options {
        claim: true,
        ..restore::Options::default()
    };
    let report = restore::restore(&context, &parts.logs.id(SESSION.parse()?), &options).await?;
    println!(
        "restored: {} bytes from {} objects",
        report.bytes, report.objects
    );
    let (before, after) = (
        std::fs::read(here.join(&transcript))?,
        std::fs::read(there.join(&transcript))?,
    );
    if before != after || after.is_empty() {
        return Err("the bytes differ".into());
    }
    println!("equal");
    Ok(())
}
