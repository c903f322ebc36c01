//! What transcripts say, in the index: on both databases, from what the real program wrote, and the same again from the bucket.

use std::path::Path;

use sessiond::capture::feed::News;
use sessiond::capture::ship::Shipment;
use sessiond::config::Prices;
use sessiond::error::Kind;
use sessiond::index::sql::{SqlIndex, Terms};
use sessiond::index::{Catalog, Index, MessageFilter, MessageRow, Recorded, SessionRow};
use sessiond::model::{LogId, Role};
use sessiond::upkeep::reindex::catch_up;
use sqlx::{AnyConnection, Connection};

use crate::index_contract::{Place, entry, log, postgres_place, sqlite_place};
use crate::support::world::{Files, World, files_below};

/// Makes one test of each case for each database.
macro_rules! both {
    ($($case:ident),* $(,)?) => {
        mod sqlite { $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() { super::$case(super::sqlite_place()).await }
        )* }
        mod postgres { $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                if let Some(place) = super::postgres_place() { super::$case(place).await }
            }
        )* }
    };
}

both!(
    what_an_answer_took_counts_once_and_costs_what_is_known,
    pages_show_each_message_once_and_in_order,
    a_page_is_found_by_an_index_however_deep_it_lies,
);

fn prices(text: &str) -> Terms {
    Terms { prices: toml::from_str::<Prices>(text).unwrap(), text: true }
}

/// The files of a session that the real program wrote, and its id.
pub fn fixture(name: &str) -> (String, Files) {
    let files = files_below(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/claude").join(name));
    let main = files.keys().find(|path| path.split('/').count() == 3 && path.ends_with(".jsonl")).unwrap();
    (Path::new(main).file_stem().unwrap().to_str().unwrap().to_owned(), files)
}

/// Tells the index what was shipped since the last time.
pub async fn tell(world: &World, index: &SqlIndex) {
    while let Some(news) = world.feed.try_next() {
        let News::Entry(record) = news else { continue };
        if let Recorded::Gap { .. } = index.record(&record).await.unwrap() {
            catch_up(&world.logs(), index, &*world.profile, &record.log).await.unwrap();
        }
    }
}

/// Streams files in so many flushes, as an agent that writes all of them at once.
pub async fn stream(world: &World, index: &SqlIndex, shipment: &mut Shipment, files: &Files, flushes: usize) {
    for step in 1..=flushes {
        for (path, bytes) in files {
            let (from, to) = (bytes.len() * (step - 1) / flushes, bytes.len() * step / flushes);
            world.append(path, &bytes[from..to]);
            shipment.hints.insert(path.parse().unwrap());
        }
        shipment.flush(&world.context(), step == flushes).await.unwrap();
        tell(world, index).await;
    }
}

async fn said(index: &SqlIndex, log: &LogId) -> Vec<MessageRow> {
    let mut all = Vec::new();
    let mut filter = MessageFilter { limit: 7, ..MessageFilter::default() };
    loop {
        let page = index.messages(log, &filter).await.unwrap();
        all.extend(page.messages);
        match page.next {
            Some(next) => filter.cursor = Some(next),
            None => return all,
        }
    }
}

/// A session that the real program wrote, streamed in a few flushes.
async fn streamed(place: &Place, terms: Terms, name: &str) -> (SessionRow, Vec<MessageRow>) {
    let (world, (session, files), index) = (World::new(), fixture(name), place.open().on(terms));
    let id = world.id(&session);
    index.forget(&id).await.unwrap();
    stream(&world, &index, &mut Shipment::new(id.clone()), &files, 4).await;
    (index.session(&id).await.unwrap().unwrap(), said(&index, &id).await)
}

async fn what_an_answer_took_counts_once_and_costs_what_is_known(place: Place) {
    let tokens = |row: &SessionRow| {
        let tokens = row.totals.tokens;
        [tokens.input, tokens.output, tokens.cache_read, tokens.cache_write]
    };
    // No prices: what the transcript says of the whole is known, and of an answer nothing.
    let (row, said) = streamed(&place, Terms::default(), "subagent").await;
    assert_eq!((tokens(&row), row.totals.cost, row.totals.turns, row.totals.unread), ([480, 168, 4000, 120], Some(6680), 1, 0));
    assert_eq!(row.totals.messages as usize, said.len());
    let counted: Vec<&MessageRow> = said.iter().filter(|row| row.tokens.is_some()).collect();
    let answers: std::collections::BTreeSet<&str> = said.iter().filter_map(|row| row.answer.as_deref()).collect();
    assert_eq!((counted.len(), answers.len()), (4, 4), "an answer comes in several messages and counts once");
    assert!(counted.iter().all(|row| row.cost.is_none() && row.role == "assistant" && row.model.as_deref() == Some("claude-opus-5-5")));
    assert!(said.iter().any(|row| row.sub_agent.is_some() && row.path.as_deref().unwrap().contains("/subagents/")));
    assert!(said.is_sorted_by_key(|row| row.position));
    // Killed before it could say what it cost.
    let (row, _) = streamed(&place, Terms::default(), "killed-mid-tool").await;
    assert_eq!((tokens(&row), row.totals.cost), ([120, 42, 1000, 30], None));
    // Prices, of the model that answered.
    let dear = || {
        prices(
            "claude-opus-5 = { input = 10.0, output = 20.0, cache-read = 1.0, cache-write = 2.0 }\nclaude = { input = 0.0, output = 0.0 }",
        )
    };
    let each = 120 * 10 + 42 * 20 + 1000 + 30 * 2;
    let (row, _) = streamed(&place, dear(), "killed-mid-tool").await;
    assert_eq!(row.totals.cost, Some(each));
    let (row, said) = streamed(&place, dear(), "tools").await;
    assert_eq!((tokens(&row), row.totals.cost), ([600, 210, 5000, 150], Some(5 * each)));
    assert_eq!(said.iter().filter_map(|row| row.cost).collect::<Vec<_>>(), [each; 5]);
    // The transcript says more than the prices: what was spent before the price list was right.
    let (row, _) = streamed(&place, prices("claude-opus-5-5 = { input = 1.0, output = 0.0 }"), "tools").await;
    assert_eq!(row.totals.cost, Some(8350));
    // A model that no price is known of, in a session that does not say: unknown, not nothing.
    let (row, said) = streamed(&place, prices("gpt = { input = 1.0, output = 1.0 }"), "old-2.1.197-subagent").await;
    assert_eq!((tokens(&row), row.totals.cost), ([480, 168, 4000, 120], None));
    assert!(said.iter().all(|row| row.cost.is_none()));
    // What the client made up itself took nothing.
    let (row, said) = streamed(&place, dear(), "api-error").await;
    assert_eq!((tokens(&row), row.totals.cost), ([0; 4], Some(0)));
    assert!(said.iter().all(|row| row.tokens.is_none()));
}

/// So many messages of one session, of every role, some at the same time in two files.
async fn many(place: &Place, log: &LogId, count: u32) {
    const FILL: &str = "INSERT INTO messages (namespace, agent, session, position, file, start, len, role, kind, at) \
         WITH RECURSIVE numbers (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n + 1 < COUNT) \
         SELECT $1, $2, $3, CAST(1000000 AS BIGINT) * (n / 2), CASE n % 2 WHEN 0 THEN 'FILE-A' ELSE 'FILE-B' END, n, 1, \
         CASE n % 4 WHEN 0 THEN 'user' WHEN 1 THEN 'assistant' WHEN 2 THEN 'tool' ELSE 'system' END, 'text', NULL FROM numbers";
    let index = place.open();
    index.record(&entry(log, 1, vec![])).await.unwrap();
    let mut connection = AnyConnection::connect(&place.url).await.unwrap();
    let sql = FILL.replace("COUNT", &count.to_string()).replace("FILE-A", &"a".repeat(64)).replace("FILE-B", &"b".repeat(64));
    let fill = sqlx::query(sqlx::AssertSqlSafe(sql)).bind(log.namespace.as_str()).bind(log.agent.as_str()).bind(log.name.to_string());
    assert_eq!(fill.execute(&mut connection).await.unwrap().rows_affected(), u64::from(count));
    sqlx::raw_sql("ANALYZE").execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();
}

async fn pages_show_each_message_once_and_in_order(place: Place) {
    let (index, log) = (place.open(), log("s1"));
    assert!(index.messages(&log, &MessageFilter::default()).await.unwrap().messages.is_empty());
    many(&place, &log, 2500).await;
    for role in [None, Some(Role::Tool)] {
        let mut filter = MessageFilter { role, limit: 101, ..MessageFilter::default() };
        let mut seen: Vec<(i64, u64)> = Vec::new();
        loop {
            let page = index.messages(&log, &filter).await.unwrap();
            assert!(page.messages.len() <= 101);
            seen.extend(page.messages.iter().map(|row| (row.position, row.start)));
            match page.next {
                Some(next) => filter.cursor = Some(next),
                None => break,
            }
        }
        let step = if role.is_some() { 4 } else { 1 };
        let want: Vec<(i64, u64)> = (0..2500).filter(|n| role.is_none() || n % 4 == 2).map(|n| (1_000_000 * (n as i64 / 2), n)).collect();
        assert_eq!(seen.len(), 2500 / step);
        assert_eq!(seen, want);
    }
    // From a time on; and no page is longer than a thousand.
    let since = Some("1970-01-01T00:10:00Z".parse().unwrap());
    let page = index.messages(&log, &MessageFilter { since, limit: 1, ..MessageFilter::default() }).await.unwrap();
    assert_eq!((page.messages.len(), page.messages[0].position), (1, 600_000_000));
    let page = index.messages(&log, &MessageFilter { limit: u32::MAX, ..MessageFilter::default() }).await.unwrap();
    assert_eq!(page.messages.len(), 1000);
    // A cursor of before that time changes nothing, one of behind it does.
    let page = index.messages(&log, &MessageFilter { since, cursor: page.next, limit: 2, ..MessageFilter::default() }).await.unwrap();
    assert_eq!(page.messages[0].position, 600_000_000);
    for bad in ["", "x", "1|2|3", "1|x", &format!("x|{}|1", "a".repeat(64)), &format!("1|{}|", "a".repeat(64))] {
        let filter = MessageFilter { cursor: Some(bad.to_string()), limit: 1, ..MessageFilter::default() };
        assert_eq!(index.messages(&log, &filter).await.unwrap_err().kind(), Kind::Usage, "{bad:?}");
    }
}

async fn a_page_is_found_by_an_index_however_deep_it_lies(place: Place) {
    let (index, log) = (place.open(), log("s1"));
    many(&place, &log, 200_000).await;
    let deep = Some(format!("{}|{}|{}", 95_000_000_000_i64, "a".repeat(64), 190_000));
    let since = [None, Some("1970-01-01T20:00:00Z".parse().unwrap())];
    for (role, since, cursor) in [None, Some(Role::Assistant)]
        .into_iter()
        .flat_map(|role| since.map(|since| [None, deep.clone()].map(|cursor| (role, since, cursor))))
        .flatten()
    {
        let filter = MessageFilter { role, since, cursor, limit: 100 };
        let plan = index.plan_of_messages(&log, &filter).await.unwrap().join("\n");
        let sorted = plan.to_lowercase().contains("sort") || plan.contains("TEMP B-TREE");
        // SQLite says SEARCH where it goes to a place, PostgreSQL Index Cond.
        let searched =
            plan.contains("SEARCH messages USING INDEX") || plan.contains("Index Scan using messages_") && plan.contains("Index Cond");
        assert!(
            searched && !sorted && !plan.contains("SCAN") && !plan.contains("Seq Scan") && !plan.contains("Bitmap"),
            "{filter:?}:\n{plan}"
        );
        // The place is where the page begins, not where the session does.
        if filter.cursor.is_some() || filter.since.is_some() {
            let from_there = plan.lines().any(|line| (line.contains("Index Cond") || line.contains("SEARCH")) && line.contains("position"));
            assert!(from_there, "{filter:?}:\n{plan}");
        }
        let began = std::time::Instant::now();
        assert_eq!(index.messages(&log, &filter).await.unwrap().messages.len(), 100);
        println!("{filter:?}: {:?}", began.elapsed());
    }
}
