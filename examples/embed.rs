//! sessiond as a library: a program that streams an agent's folder itself, and puts it back elsewhere.
//!
//!     cargo run --example embed
//!
//! Everything is in a temporary folder. A real program would have `store::s3::S3Store` and a PostgreSQL here; `sessiond::wire` makes
//! either of an URL.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use sessiond::agent::Profile;
use sessiond::agent::claude_code::ClaudeCode;
use sessiond::capture::watch::{DiskWatch, Hints};
use sessiond::capture::{self, Feed, Streamer};
use sessiond::index::sql::SqlIndex;
use sessiond::log::fence::Wanted;
use sessiond::log::{Fencing, Logs};
use sessiond::model::SessionId;
use sessiond::restore;
use sessiond::store::file::FileStore;
use sessiond::sys::{Disk, SystemChance, SystemClock};
use tokio::time::Instant;

const SESSION: &str = "3f2a0000-0000-4000-8000-000000000001";
const LINE: &str = "{\"type\":\"user\",\"cwd\":\"/work/app\",\"message\":{\"role\":\"user\",\"content\":\"hello\"}}\n";

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let place = std::env::temp_dir().join(format!("sessiond-embed-{}", std::process::id()));
    let told = tell(&place).await;
    std::fs::remove_dir_all(&place)?;
    told
}

async fn tell(place: &Path) -> Result<(), Box<dyn Error>> {
    let (here, there) = (place.join("here"), place.join("there"));
    std::fs::create_dir_all(&here)?;
    std::fs::create_dir_all(&there)?;
    let profile: Arc<dyn Profile> = Arc::new(ClaudeCode::new("claude-code".parse()?));
    let logs = logs(place, &profile)?;
    let session: SessionId = SESSION.parse()?;

    // Stream a folder. From here on whatever the agent appends is uploaded within the interval.
    let folder = Arc::new(Disk::new(&here));
    let context = capture::Context {
        folder: folder.clone(),
        profile: profile.clone(),
        logs: logs.clone(),
        feed: Arc::new(Feed::default()),
        flush_interval: Duration::from_millis(200),
        parallel: 8,
    };
    let hints = Arc::new(Hints::default());
    let watch = DiskWatch::new(here.clone(), folder, profile.clone(), hints.clone());
    let streamer = Streamer::start(context, here.clone(), hints, Box::new(watch))?;

    // The agent writes.
    let transcript = format!("projects/-work-app/{SESSION}.jsonl");
    std::fs::create_dir_all(here.join("projects/-work-app"))?;
    std::fs::write(here.join(&transcript), LINE)?;

    // Make it durable now; then end, with the last of it.
    let flushed = streamer.flush(Some(session.clone())).await?;
    println!("durable: {} log", flushed.logs.len());
    std::fs::write(here.join(&transcript), LINE.repeat(2))?;
    let left = streamer.finish(Instant::now() + Duration::from_secs(8)).await?.left;
    if !left.is_empty() {
        return Err(format!("not durable: {left:?}").into());
    }

    // Put it back in another folder, and take the session over: the writer above could write no more.
    let context = restore::Context { folder: Arc::new(Disk::new(&there)), profile, logs: logs.clone() };
    let options = restore::Options { claim: true, ..restore::Options::default() };
    let report = restore::restore(&context, &logs.id(SESSION.parse()?), &options).await?;
    println!("restored: {} bytes from {} objects", report.bytes, report.objects);
    let (before, after) = (std::fs::read(here.join(&transcript))?, std::fs::read(there.join(&transcript))?);
    if before != after || after.is_empty() {
        return Err("the bytes differ".into());
    }
    println!("equal");
    Ok(())
}

/// Where the sessions are kept, who keeps two writers apart, and whose sessions these are.
fn logs(place: &Path, profile: &Arc<dyn Profile>) -> Result<Logs, Box<dyn Error>> {
    let index = Arc::new(SqlIndex::open(&format!("sqlite://{}", place.join("index.db").display()))?);
    Ok(Logs {
        store: Arc::new(FileStore::open(place.join("bucket"))?),
        fence: Arc::new(Fencing::new(Wanted::Auto, index, false)),
        namespace: "default".parse()?,
        agent: profile.name().clone(),
        clock: Arc::new(SystemClock),
        chance: Arc::new(SystemChance),
    })
}
