//! Messages in the index: on both databases, from real transcripts, and identical after a rebuild
//! from the bucket.

use std::path::Path;

use sessiond::capture::IndexTask;
use sessiond::capture::flush::LogFlusher;
use sessiond::error::ErrorKind;
use sessiond::index::sql::{IndexOptions, SqlIndex};
use sessiond::index::{
    Catalog, GroupBy, Index, MessageFilter, MessageRow, SearchFilter, SearchQuery, SessionRow,
    StatsFilter, StatsRow,
};
use sessiond::model::{LogId, PathState, Prices, Role};
use sessiond::sys::Disk;
use sessiond::upkeep::collect::RetentionPolicy;
use sessiond::upkeep::compact::compact;
use sessiond::upkeep::gc;
use sessiond::upkeep::reindex::{catch_up, rebuild};
use sqlx::{AnyConnection, Connection, Row};

use crate::index_contract::{
    TestDatabase, contract, entry, log, postgres_database, sqlite_database,
};
use crate::support::TempHome;
use crate::support::backend::{Backend, eventually, transcript};
use crate::support::files::{Files, append, files_below};
use crate::support::on_each_backend;
use crate::support::world::World;
use crate::support::writer::FlushAll;

contract!(
    usage_counts_once_per_response_and_unknown_prices_stay_unknown,
    pages_show_each_message_once_and_in_order,
    full_text_search_finds_messages,
    sessions_are_counted_by_day_project_model_and_label,
    a_partial_line_is_parsed_after_its_file_moved,
);
contract!(slow: every_page_is_read_from_a_database_index, reindex_gives_the_same_message_rows);

fn prices(text: &str) -> IndexOptions {
    IndexOptions {
        prices: toml::from_str::<Prices>(text).unwrap(),
        index_text: true,
        ..IndexOptions::default()
    }
}

/// The ID and the files of a session that a real agent wrote.
pub fn fixture(name: &str) -> (String, Files) {
    let files = files_below(
        &Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/fixtures/claude")
            .join(name),
    );
    let main = files
        .keys()
        .find(|path| path.split('/').count() == 3 && path.ends_with(".jsonl"))
        .unwrap();
    (
        Path::new(main)
            .file_stem()
            .unwrap()
            .to_str()
            .unwrap()
            .to_owned(),
        files,
    )
}

/// Sends the entries since the last call to the index.
pub async fn index_new_entries(world: &World, index: &SqlIndex) {
    while let Some(task) = world.writer.context.index_queue.try_next() {
        let IndexTask::Entries(records) = task else {
            continue;
        };
        for (record, outcome) in records
            .iter()
            .zip(index.record_all(&records).await.unwrap())
        {
            if outcome.is_gap() {
                catch_up(&world.logs(), index, world.profile(), &record.log)
                    .await
                    .unwrap();
            }
        }
    }
}

/// Streams files in the given number of flushes, as if an agent wrote all of them at once.
pub async fn stream(
    world: &World,
    index: &SqlIndex,
    shipment: &mut LogFlusher,
    files: &Files,
    flushes: usize,
) {
    for step in 1..=flushes {
        for (path, bytes) in files {
            let (from, to) = (
                bytes.len() * (step - 1) / flushes,
                bytes.len() * step / flushes,
            );
            world.append(path, &bytes[from..to]);
            shipment.paths.insert(path.parse().unwrap());
        }
        shipment
            .flush(&world.context(), step == flushes)
            .await
            .unwrap();
        index_new_entries(world, index).await;
    }
}

async fn messages_of(index: &SqlIndex, log: &LogId) -> Vec<MessageRow> {
    let mut all = Vec::new();
    let mut filter = MessageFilter {
        limit: 7,
        ..MessageFilter::default()
    };
    loop {
        let page = index.messages(log, &filter).await.unwrap();
        all.extend(page.messages);
        match page.next {
            Some(next) => filter.cursor = Some(next),
            None => return all,
        }
    }
}

/// Streams a session that a real agent wrote, in a few flushes.
async fn streamed(
    database: &TestDatabase,
    options: IndexOptions,
    name: &str,
) -> (SessionRow, Vec<MessageRow>) {
    let (world, (session, files), index) = (
        World::new(),
        fixture(name),
        database.open().with_options(options),
    );
    let id = world.id(&session);
    index.delete_log(&id).await.unwrap();
    stream(&world, &index, &mut LogFlusher::new(id.clone()), &files, 4).await;
    (
        index.session(&id).await.unwrap().unwrap(),
        messages_of(&index, &id).await,
    )
}

async fn usage_counts_once_per_response_and_unknown_prices_stay_unknown(database: TestDatabase) {
    let tokens = |row: &SessionRow| {
        let tokens = row.totals.tokens;
        [
            tokens.input,
            tokens.output,
            tokens.cache_read,
            tokens.cache_write,
        ]
    };
    // Without prices, only the total that the transcript reports is known, not the cost of a
    // response.
    let (row, messages) = streamed(&database, IndexOptions::default(), "subagent").await;
    assert_eq!(
        (
            tokens(&row),
            row.totals.cost,
            row.totals.turns,
            row.totals.unparsed_lines
        ),
        ([480, 168, 4000, 120], Some(6680), 1, 0)
    );
    assert_eq!(row.totals.messages as usize, messages.len());
    let counted: Vec<&MessageRow> = messages.iter().filter(|row| row.tokens.is_some()).collect();
    let answers: std::collections::BTreeSet<&str> = messages
        .iter()
        .filter_map(|row| row.response_id.as_deref())
        .collect();
    assert_eq!(
        (counted.len(), answers.len()),
        (4, 4),
        "an answer comes in several messages and counts once"
    );
    assert!(counted.iter().all(|row| row.cost.is_none()
        && row.role == "assistant"
        && row.model.as_deref() == Some("claude-opus-5-5")));
    assert!(
        messages
            .iter()
            .any(|row| row.sub_agent.is_some()
                && row.path.as_deref().unwrap().contains("/subagents/"))
    );
    assert!(messages.is_sorted_by_key(|row| row.position));
    // The agent was killed before it reported its cost.
    let (row, _) = streamed(&database, IndexOptions::default(), "killed-mid-tool").await;
    assert_eq!((tokens(&row), row.totals.cost), ([120, 42, 1000, 30], None));
    // With prices of the model that responded.
    let price_list = || {
        prices(
            "claude-opus-5 = { input = 10.0, output = 20.0, cache-read = 1.0, cache-write = 2.0 }\nclaude = { input = 0.0, output = 0.0 }",
        )
    };
    let each = 120 * 10 + 42 * 20 + 1000 + 30 * 2;
    let (row, _) = streamed(&database, price_list(), "killed-mid-tool").await;
    assert_eq!(row.totals.cost, Some(each));
    let (row, messages) = streamed(&database, price_list(), "tools").await;
    assert_eq!(
        (tokens(&row), row.totals.cost),
        ([600, 210, 5000, 150], Some(5 * each))
    );
    assert_eq!(
        messages
            .iter()
            .filter_map(|row| row.cost)
            .collect::<Vec<_>>(),
        [each; 5]
    );
    // The transcript reports more than the prices give.
    let (row, _) = streamed(
        &database,
        prices("claude-opus-5-5 = { input = 1.0, output = 0.0 }"),
        "tools",
    )
    .await;
    assert_eq!(row.totals.cost, Some(8350));
    // A model without a price, in a session without a reported cost: unknown, not zero.
    let (row, messages) = streamed(
        &database,
        prices("gpt = { input = 1.0, output = 1.0 }"),
        "old-2.1.197-subagent",
    )
    .await;
    assert_eq!(
        (tokens(&row), row.totals.cost),
        ([480, 168, 4000, 120], None)
    );
    assert!(messages.iter().all(|row| row.cost.is_none()));
    // A message that the client created itself has no usage.
    let (row, messages) = streamed(&database, price_list(), "api-error").await;
    assert_eq!((tokens(&row), row.totals.cost), ([0; 4], Some(0)));
    assert!(messages.iter().all(|row| row.tokens.is_none()));
}

/// Records messages of one session, of every role, some at the same time in two files.
async fn many(database: &TestDatabase, log: &LogId, count: u32) {
    const FILL: &str = "INSERT INTO messages (namespace, agent, session, position, file, start, len, role, kind, at) \
         WITH RECURSIVE numbers (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n + 1 < COUNT) \
         SELECT $1, $2, $3, CAST(1000000 AS BIGINT) * (n / 2), CASE n % 2 WHEN 0 THEN 'FILE-A' ELSE 'FILE-B' END, n, 1, \
         CASE n % 4 WHEN 0 THEN 'user' WHEN 1 THEN 'assistant' WHEN 2 THEN 'tool' ELSE 'system' END, 'text', NULL FROM numbers";
    let index = database.open();
    index.record(&entry(log, 1, vec![])).await.unwrap();
    let mut connection = AnyConnection::connect(&database.url).await.unwrap();
    let sql = FILL
        .replace("COUNT", &count.to_string())
        .replace("FILE-A", &"a".repeat(64))
        .replace("FILE-B", &"b".repeat(64));
    let fill = sqlx::query(sqlx::AssertSqlSafe(sql))
        .bind(log.namespace.as_str())
        .bind(log.agent.as_str())
        .bind(log.name.to_string());
    assert_eq!(
        fill.execute(&mut connection).await.unwrap().rows_affected(),
        u64::from(count)
    );
    sqlx::raw_sql("ANALYZE")
        .execute(&mut connection)
        .await
        .unwrap();
    connection.close().await.unwrap();
}

async fn pages_show_each_message_once_and_in_order(database: TestDatabase) {
    let (index, log) = (database.open(), log("s1"));
    assert!(
        index
            .messages(&log, &MessageFilter::default())
            .await
            .unwrap()
            .messages
            .is_empty()
    );
    many(&database, &log, 2500).await;
    for role in [None, Some(Role::Tool)] {
        let mut filter = MessageFilter {
            role,
            limit: 101,
            ..MessageFilter::default()
        };
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
        let want: Vec<(i64, u64)> = (0..2500)
            .filter(|n| role.is_none() || n % 4 == 2)
            .map(|n| (1_000_000 * (n as i64 / 2), n))
            .collect();
        assert_eq!(seen.len(), 2500 / step);
        assert_eq!(seen, want);
    }
    // From a given time on; a page has at most a thousand messages.
    let since = Some("1970-01-01T00:10:00Z".parse().unwrap());
    let page = index
        .messages(
            &log,
            &MessageFilter {
                since,
                limit: 1,
                ..MessageFilter::default()
            },
        )
        .await
        .unwrap();
    assert_eq!(
        (page.messages.len(), page.messages[0].position),
        (1, 600_000_000)
    );
    let page = index
        .messages(
            &log,
            &MessageFilter {
                limit: u32::MAX,
                ..MessageFilter::default()
            },
        )
        .await
        .unwrap();
    assert_eq!(page.messages.len(), 1000);
    // A cursor before that time has no effect, one after it does.
    let page = index
        .messages(
            &log,
            &MessageFilter {
                since,
                cursor: page.next,
                limit: 2,
                ..MessageFilter::default()
            },
        )
        .await
        .unwrap();
    assert_eq!(page.messages[0].position, 600_000_000);
    for bad in [
        "",
        "x",
        "1|2|3",
        "1|x",
        &format!("x|{}|1", "a".repeat(64)),
        &format!("1|{}|", "a".repeat(64)),
    ] {
        let filter = MessageFilter {
            cursor: Some(bad.to_string()),
            limit: 1,
            ..MessageFilter::default()
        };
        assert_eq!(
            index.messages(&log, &filter).await.unwrap_err().kind(),
            ErrorKind::Usage,
            "{bad:?}"
        );
    }
}

async fn every_page_is_read_from_a_database_index(database: TestDatabase) {
    let (index, log) = (database.open(), log("s1"));
    many(&database, &log, 200_000).await;
    let deep = Some(format!(
        "{}|{}|{}",
        95_000_000_000_i64,
        "a".repeat(64),
        190_000
    ));
    let since = [None, Some("1970-01-01T20:00:00Z".parse().unwrap())];
    for (role, since, cursor) in [None, Some(Role::Assistant)]
        .into_iter()
        .flat_map(|role| {
            since.map(|since| [None, deep.clone()].map(|cursor| (role, since, cursor)))
        })
        .flatten()
    {
        let filter = MessageFilter {
            role,
            since,
            cursor,
            limit: 100,
        };
        let plan = index
            .explain_messages(&log, &filter)
            .await
            .unwrap()
            .join("\n");
        let sorted = plan.to_lowercase().contains("sort") || plan.contains("TEMP B-TREE");
        // For an index lookup, SQLite reports SEARCH, and PostgreSQL reports Index Cond.
        let searched = plan.contains("SEARCH messages USING INDEX")
            || plan.contains("Index Scan using messages_") && plan.contains("Index Cond");
        assert!(
            searched
                && !sorted
                && !plan.contains("SCAN")
                && !plan.contains("Seq Scan")
                && !plan.contains("Bitmap"),
            "{filter:?}:\n{plan}"
        );
        // The lookup starts at the page, not at the start of the session.
        if filter.cursor.is_some() || filter.since.is_some() {
            let from_there = plan.lines().any(|line| {
                (line.contains("Index Cond") || line.contains("SEARCH"))
                    && line.contains("position")
            });
            assert!(from_there, "{filter:?}:\n{plan}");
        }
        let began = std::time::Instant::now();
        assert_eq!(
            index.messages(&log, &filter).await.unwrap().messages.len(),
            100
        );
        println!("{filter:?}: {:?}", began.elapsed());
    }
}

fn search(words: &str) -> SearchFilter {
    SearchFilter {
        namespace: "team".parse().unwrap(),
        agent: None,
        query: SearchQuery::parse(words).unwrap(),
        project: None,
        since: None,
        until: None,
        label: None,
        limit: 20,
    }
}

/// A line of a transcript.
pub fn line(number: u32, role: &str, text: &str) -> String {
    let content = serde_json::to_string(text).unwrap();
    let rest = match role {
        "user" => format!(r#""message":{{"role":"user","content":{content}}}"#),
        _ => format!(
            r#""message":{{"id":"m{number}","model":"opus","content":[{{"type":"thinking","thinking":"secretly pondering"}},{{"type":"text","text":{content}}}],"stop_reason":"end_turn","usage":{{"input_tokens":1,"output_tokens":2}}}}"#
        ),
    };
    let (hour, minute) = (10 + number / 60, number % 60);
    format!(
        "{{\"type\":\"{role}\",\"uuid\":\"u{number}\",\"cwd\":\"/work/app\",\"timestamp\":\"2026-05-01T{hour:02}:{minute:02}:00.000Z\",{rest}}}\n"
    )
}

async fn label(database: &TestDatabase, id: &LogId, name: &str, value: &str) {
    const SQL: &str =
        "INSERT INTO labels (namespace, agent, session, name, value) VALUES ($1, $2, $3, $4, $5)";
    let mut connection = AnyConnection::connect(&database.url).await.unwrap();
    let row = sqlx::query(SQL)
        .bind(id.namespace.as_str())
        .bind(id.agent.as_str())
        .bind(id.name.to_string())
        .bind(name)
        .bind(value);
    row.execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();
}

async fn full_text_search_finds_messages(database: TestDatabase) {
    let world = World::new();
    let index = database.open().with_options(prices(""));
    assert!(!index.search(&search("anything")).await.unwrap().has_text);
    let two_lines =
        |first: &str, second: &str| line(1, "user", first) + &line(2, "assistant", second);
    let sessions = [
        (
            "s1",
            "-work-app",
            two_lines(
                "Fix the bug in src/main.rs, please",
                "The *bug* was in Main.RS; ÄPFEL\0 and it's fixed",
            ),
        ),
        (
            "s2",
            "-work-app",
            two_lines("deploy the bug", "no bug bug bug here"),
        ),
        (
            "s3",
            "-other",
            two_lines("something else", "about foo_bar and 日本語 main"),
        ),
    ];
    for (id, project, text) in &sessions {
        let files = Files::from([(
            format!("projects/{project}/{id}.jsonl"),
            text.clone().into_bytes(),
        )]);
        stream(
            &world,
            &index,
            &mut LogFlusher::new(world.id(id)),
            &files,
            2,
        )
        .await;
    }
    label(&database, &world.id("s2"), "team", "infra").await;
    let find = async |filter: SearchFilter| {
        let found = index.search(&filter).await.unwrap();
        assert!(found.has_text);
        found
            .hits
            .iter()
            .map(|hit| format!("{} {} {}", hit.session, hit.role, hit.snippet.matches.len()))
            .collect::<Vec<_>>()
    };
    let sorted = |mut found: Vec<String>| {
        found.sort();
        found
    };
    assert_eq!(
        sorted(find(search("main.rs")).await),
        ["s1 assistant 1", "s1 user 1"]
    );
    assert_eq!(
        sorted(find(search("MAIN")).await),
        ["s1 assistant 1", "s1 user 1", "s3 assistant 1"]
    );
    assert_eq!(
        sorted(find(search("bug -please -deploy")).await),
        ["s1 assistant 1", "s2 assistant 3"]
    );
    assert_eq!(find(search("\"bug in\"")).await, ["s1 user 1"]);
    assert_eq!(
        sorted(find(search("deploy or foo_bar")).await),
        ["s2 user 1", "s3 assistant 1"]
    );
    assert_eq!(find(search("äpfel")).await, ["s1 assistant 1"]);
    assert_eq!(find(search("日本語")).await, ["s3 assistant 1"]);
    // Only the text of messages is searched.
    assert!(find(search("pondering")).await.is_empty());
    assert!(find(search("nowhere")).await.is_empty());
    // The best match is first.
    assert_eq!(find(search("bug")).await[0], "s2 assistant 3");
    // With filters.
    assert_eq!(
        find(SearchFilter {
            project: Some("-other".into()),
            ..search("main")
        })
        .await,
        ["s3 assistant 1"]
    );
    assert_eq!(
        sorted(
            find(SearchFilter {
                label: Some(("team".into(), "infra".into())),
                ..search("bug")
            })
            .await
        ),
        ["s2 assistant 3", "s2 user 1"]
    );
    let late = Some("2026-05-01T10:02:00Z".parse().unwrap());
    assert_eq!(
        sorted(
            find(SearchFilter {
                since: late,
                ..search("bug")
            })
            .await
        ),
        ["s1 assistant 1", "s2 assistant 3"]
    );
    assert_eq!(
        sorted(
            find(SearchFilter {
                until: late,
                ..search("bug")
            })
            .await
        ),
        ["s1 user 1", "s2 user 1"]
    );
    let found = index
        .search(&SearchFilter {
            limit: 1,
            ..search("bug")
        })
        .await
        .unwrap();
    assert_eq!((found.hits.len(), found.has_more), (1, true));
    assert!(
        !index
            .search(&SearchFilter {
                namespace: "others".parse().unwrap(),
                ..search("bug")
            })
            .await
            .unwrap()
            .has_text
    );
    // Query syntax is treated as plain text.
    for odd in [
        "bug'",
        "bug*",
        "text:bug",
        "bug NEAR",
        "a^b bug",
        "bug) OR (x",
        "\"bug",
        "bug & | ! <->",
        "$1 bug ?",
    ] {
        find(search(odd)).await;
    }
    // Only a part of a huge message is indexed, and deleted sessions are no longer found.
    let long = line(3, "user", &format!("{} needle", "straw ".repeat(40_000)));
    world.append("projects/-other/s3.jsonl", long);
    let mut shipment = LogFlusher::new(world.id("s3"));
    shipment
        .paths
        .insert("projects/-other/s3.jsonl".parse().unwrap());
    shipment.flush(&world.context(), true).await.unwrap();
    index_new_entries(&world, &index).await;
    assert_eq!(
        (
            find(search("straw")).await.len(),
            find(search("needle")).await.len()
        ),
        (1, 0)
    );
    index.delete_log(&world.id("s3")).await.unwrap();
    assert_eq!(
        (
            find(search("straw")).await.len(),
            find(search("日本語")).await.len()
        ),
        (0, 0)
    );
    // Without the option, no text is stored.
    let index = database.open();
    index.delete_log(&world.id("s1")).await.unwrap();
    catch_up(&world.logs(), &index, world.profile(), &world.id("s1"))
        .await
        .unwrap();
    assert!(
        index
            .search(&search("please"))
            .await
            .unwrap()
            .hits
            .is_empty()
    );
}

async fn sessions_are_counted_by_day_project_model_and_label(database: TestDatabase) {
    let world = World::new();
    let index = database
        .open()
        .with_options(prices("claude-opus-4 = { input = 1.0, output = 0.0 }"));
    let filter = |group_by| StatsFilter {
        namespace: "team".parse().unwrap(),
        agent: None,
        group_by,
        since: None,
        until: None,
    };
    assert!(
        index
            .stats(&filter(Some(GroupBy::Day)))
            .await
            .unwrap()
            .is_empty()
    );
    // Two sessions report their cost, one has a price, one has neither.
    for name in [
        "tools",
        "compacted",
        "old-2.1.197-subagent",
        "killed-mid-tool",
    ] {
        let (session, files) = fixture(name);
        stream(
            &world,
            &index,
            &mut LogFlusher::new(world.id(&session)),
            &files,
            3,
        )
        .await;
    }
    label(&database, &world.id(&fixture("tools").0), "team", "infra").await;
    let short = |row: &StatsRow| {
        let tokens = row.tokens;
        (
            row.group.clone(),
            row.sessions,
            row.turns,
            [
                tokens.input,
                tokens.output,
                tokens.cache_read,
                tokens.cache_write,
            ],
            row.cost,
        )
    };
    let counted = async |filter: StatsFilter| {
        let rows = index.stats(&filter).await.unwrap();
        rows.iter().map(short).collect::<Vec<_>>()
    };
    let some = |text: &str| Some(text.to_owned());
    let all = [
        720 + 600 + 480 + 120,
        252 + 210 + 168 + 42,
        6000 + 5000 + 4000 + 1000,
        180 + 150 + 120 + 30,
    ];
    assert_eq!(counted(filter(None)).await, [(None, 4, Some(6), all, None)]);
    let labels = counted(filter(Some(GroupBy::Label))).await;
    assert_eq!(
        labels[0],
        (
            some("team=infra"),
            1,
            Some(1),
            [600, 210, 5000, 150],
            Some(8350)
        )
    );
    assert_eq!(
        (labels.len(), labels[1].0.clone(), labels[1].1),
        (2, None, 3)
    );
    assert_eq!(
        counted(filter(Some(GroupBy::Project)))
            .await
            .iter()
            .map(|row| (row.0.clone(), row.1))
            .collect::<Vec<_>>(),
        [(some("-work-work"), 4)]
    );
    // A model's known cost does not depend on the other models.
    let models = counted(filter(Some(GroupBy::Model))).await;
    assert_eq!(
        models[0],
        (
            some("claude-opus-4-8"),
            1,
            None,
            [480, 168, 4000, 120],
            Some(480)
        )
    );
    assert_eq!(
        (models[1].0.clone(), models[1].1, models[1].4),
        (some("claude-opus-5-5"), 3, None)
    );
    // The totals by day are the same.
    let days = index.stats(&filter(Some(GroupBy::Day))).await.unwrap();
    assert!(
        days.iter()
            .all(|row| row.group.as_ref().is_none_or(|day| day.len() == 10)),
        "{days:?}"
    );
    assert_eq!(
        days.iter().map(|row| row.tokens.cache_read).sum::<u64>(),
        16_000
    );
    let [total] = &index.stats(&filter(None)).await.unwrap()[..] else {
        panic!()
    };
    assert_eq!(
        days.iter().map(|row| row.messages).sum::<u64>(),
        total.messages
    );
    assert_eq!(days.iter().filter_map(|row| row.turns).sum::<u64>(), 6);
    assert_eq!(
        days.iter().filter_map(|row| row.raw_bytes).sum::<u64>(),
        total.raw_bytes.unwrap()
    );
    // A time range around everything has no effect; before it there is nothing.
    let wide = StatsFilter {
        since: Some("2020-01-01T00:00:00Z".parse().unwrap()),
        ..filter(None)
    };
    assert_eq!(
        index.stats(&wide).await.unwrap(),
        std::slice::from_ref(total)
    );
    let early = StatsFilter {
        until: wide.since,
        ..filter(None)
    };
    assert!(index.stats(&early).await.unwrap().is_empty());
    // Only the labeled session, in a time range: its reported total still counts.
    let spanned = counted(StatsFilter {
        group_by: Some(GroupBy::Label),
        ..wide
    })
    .await;
    assert_eq!(spanned, labels);
    // Removed sessions are not counted.
    let id = world.id(&fixture("tools").0);
    sessiond::upkeep::remove::remove(&world.logs(), &id)
        .await
        .unwrap();
    catch_up(&world.logs(), &index, world.profile(), &id)
        .await
        .unwrap();
    assert_eq!(counted(filter(None)).await[0].1, 3);
}

/// Everything the index has for a session.
#[derive(Debug, PartialEq)]
struct All {
    session: Option<SessionRow>,
    files: Vec<PathState>,
    messages: Vec<MessageRow>,
    texts: Vec<String>,
    checkpoints: Vec<String>,
}

async fn all(database: &TestDatabase, index: &SqlIndex, id: &LogId) -> All {
    let texts = "SELECT file || ' ' || CAST(start AS TEXT) || ' ' || text AS line FROM message_texts \
         WHERE namespace = $1 AND agent = $2 AND session = $3 ORDER BY file, start";
    let checkpoints = "SELECT CAST(number AS TEXT) || ' ' || CAST(seq AS TEXT) || ' ' || detail AS line FROM checkpoints \
         WHERE namespace = $1 AND agent = $2 AND session = $3 ORDER BY number";
    let mut connection = AnyConnection::connect(&database.url).await.unwrap();
    let mut lines = async |sql: &'static str| {
        let query = sqlx::query(sql)
            .bind(id.namespace.as_str())
            .bind(id.agent.as_str())
            .bind(id.name.to_string());
        query
            .fetch_all(&mut connection)
            .await
            .unwrap()
            .iter()
            .map(|row| row.get("line"))
            .collect::<Vec<String>>()
    };
    let (texts, checkpoints) = (lines(texts).await, lines(checkpoints).await);
    connection.close().await.unwrap();
    All {
        session: index.session(id).await.unwrap(),
        files: index.files(id).await.unwrap(),
        messages: messages_of(index, id).await,
        texts,
        checkpoints,
    }
}

async fn reindex_gives_the_same_message_rows(database: TestDatabase) {
    let world = World::new();
    let index = database.open().with_options(prices(
        "claude-opus-5 = { input = 10.0, output = 20.0, cache-read = 1.0, cache-write = 2.0 }",
    ));
    let mut ids = Vec::new();
    for (name, flushes) in [
        ("subagent", 3),
        ("compacted", 45),
        ("tools", 7),
        ("sigint-mid-tool", 1),
        ("parallel-tools-slow", 70),
    ] {
        let (session, files) = fixture(name);
        let (id, mut shipment) = (world.id(&session), LogFlusher::new(world.id(&session)));
        stream(&world, &index, &mut shipment, &files, flushes).await;
        let path = files
            .keys()
            .find(|path| path.ends_with(&format!("{session}.jsonl")))
            .unwrap();
        match name {
            // Rewritten without its middle; then more is appended.
            "tools" => {
                let lines: Vec<&[u8]> =
                    files[path].split_inclusive(|byte| *byte == b'\n').collect();
                let (half, end) = (
                    lines[..lines.len() / 2].concat(),
                    lines[lines.len() / 2 + 4..].concat(),
                );
                world.write(
                    path,
                    [line(1, "user", "rewritten").as_bytes(), &half, &end].concat(),
                );
                shipment.flush(&world.context(), false).await.unwrap();
                world.append(path, line(2, "assistant", "and on"));
                shipment.flush(&world.context(), false).await.unwrap();
            }
            // Moved to another project between two flushes.
            "compacted" | "subagent" => {
                let moved = path.replace("-work-work", "-elsewhere");
                std::fs::create_dir_all(world.root().join(&moved).parent().unwrap()).unwrap();
                std::fs::rename(world.root().join(path), world.root().join(&moved)).unwrap();
                shipment.paths.insert(moved.parse().unwrap());
                for number in 3..130 {
                    world.append(
                        &moved,
                        line(
                            number,
                            if number % 2 == 0 { "user" } else { "assistant" },
                            &format!("number {number}"),
                        ),
                    );
                    shipment.flush(&world.context(), false).await.unwrap();
                }
            }
            _ => {}
        }
        index_new_entries(&world, &index).await;
        ids.push((id, shipment.ledger.unwrap().log_writer.seq));
    }
    let gathered = async || {
        let mut rows = Vec::new();
        for (id, _) in &ids {
            rows.push(all(&database, &index, id).await);
        }
        rows
    };
    let before = gathered().await;
    assert!(before.iter().all(|all| !all.messages.is_empty()
        && !all.texts.is_empty()
        && !all.checkpoints.is_empty()));
    let again = async || {
        let rebuilt = rebuild(&world.logs(), &index, world.profile(), |_, done| {
            assert!(done.is_ok(), "{done:?}")
        })
        .await
        .unwrap();
        assert_eq!((rebuilt.logs, rebuilt.failed), (ids.len(), 0));
        for (now, before) in gathered().await.iter().zip(&before) {
            assert_eq!(now, before);
        }
    };
    again().await;
    // Merged, then without the merged entries, then as one snapshot each.
    let mut made = 0;
    for (id, head) in &ids {
        for seq in 1..=*head {
            if sessiond::log::schedule::is_due(seq) {
                made += compact(&world.logs(), id, seq).await.unwrap().segments;
            }
        }
    }
    assert!(made > 2, "{made} merges");
    again().await;
    let scratch = tempfile::tempdir().unwrap();
    let rules = RetentionPolicy {
        history: std::time::Duration::ZERO,
        ttl: None,
        grace: std::time::Duration::ZERO,
        include_archived: false,
        include_checkpoints: false,
    };
    for round in 0..3 {
        let mut deleted = 0;
        for (id, _) in &ids {
            let now = gc::store_time(&world.logs()).await.unwrap();
            deleted += gc::collect(
                &world.logs(),
                id,
                &rules,
                now,
                &Disk::new(scratch.path()),
                false,
            )
            .await
            .unwrap()
            .objects;
        }
        assert!(deleted > 0 || round > 1, "round {round}");
        again().await;
    }
    for (id, _) in &ids {
        assert_eq!(
            world.logs().list_segments(id).await.unwrap().len(),
            1,
            "{id}"
        );
    }
}

async fn a_partial_line_is_parsed_after_its_file_moved(database: TestDatabase) {
    let (world, index) = (World::new(), database.open().with_options(prices("")));
    let (id, mut shipment) = (world.id("s1"), LogFlusher::new(world.id("s1")));
    let (one, two) = (line(1, "user", "first"), line(2, "assistant", "second"));
    let (head, tail) = two.split_at(100);
    for (from, to, text) in [
        (None, "projects/-a/s1.jsonl", one + head),
        (
            Some("projects/-a/s1.jsonl"),
            "projects/-b/s1.jsonl",
            tail.to_owned(),
        ),
    ] {
        if let Some(from) = from {
            std::fs::create_dir_all(world.root().join("projects/-b")).unwrap();
            std::fs::rename(world.root().join(from), world.root().join(to)).unwrap();
        }
        world.append(to, text);
        shipment.paths.insert(to.parse().unwrap());
        // The agent has exited: the partial line is uploaded too.
        shipment.flush(&world.context(), true).await.unwrap();
        index_new_entries(&world, &index).await;
    }
    let before = all(&database, &index, &id).await;
    assert_eq!(
        (
            before.texts.len(),
            before.messages.len(),
            before.session.as_ref().unwrap().totals.unparsed_lines
        ),
        (2, 2, 0)
    );
    rebuild(&world.logs(), &index, world.profile(), |_, _| ())
        .await
        .unwrap();
    assert_eq!(all(&database, &index, &id).await, before);
}

on_each_backend!(the_program_lists_searches_and_counts);
fn the_program_lists_searches_and_counts(backend: Backend) {
    let home = TempHome::new();
    let (session, files) = fixture("tools");
    for (path, bytes) in files {
        append(
            &home.home().join(".claude").join(path),
            String::from_utf8(bytes).unwrap(),
        );
    }
    backend.run(&home, &["run", "--", "true"]).ok();
    let row = backend.run(&home, &["ls", "--json"]).ok().json()["sessions"][0].clone();
    assert_eq!(
        (&row["turns"], &row["tokens"]["input"], &row["cost_usd"]),
        (&1.into(), &600.into(), &0.00835.into()),
        "{row}"
    );
    let listed = backend.run(&home, &["ls"]).ok().out();
    assert!(
        listed.contains("COST") && listed.contains("$0.0083"),
        "{listed}"
    );

    // One page, the next one with the printed command, and everything.
    let page = backend
        .run(&home, &["messages", &session[..8], "--limit", "20"])
        .ok()
        .out();
    let more = page
        .lines()
        .last()
        .unwrap()
        .strip_prefix("next page: sessiond ")
        .unwrap_or_else(|| panic!("{page}"))
        .replace('\'', "");
    let rest = backend
        .run(&home, &more.split(' ').collect::<Vec<_>>())
        .ok()
        .out();
    let all = backend
        .run(&home, &["messages", &session, "--json"])
        .ok()
        .json();
    let count = all["messages"].as_array().unwrap().len();
    assert_eq!(
        (
            page.lines().count() - 2 + rest.lines().count() - 1,
            &all["next"]
        ),
        (count, &serde_json::Value::Null)
    );
    assert!(
        rest.contains(&format!("{session}.jsonl:")) && rest.contains("1.1k in, 42 out"),
        "{rest}"
    );
    let users = backend
        .run(
            &home,
            &[
                "messages",
                &session,
                "--role",
                "user",
                "--since",
                "2020-01-01",
                "--json",
            ],
        )
        .ok()
        .json();
    assert_eq!(users["messages"].as_array().unwrap().len(), 1);
    let none = backend
        .run(
            &home,
            &["messages", &session, "--since", "2100-01-01", "--json"],
        )
        .ok()
        .json();
    assert_eq!(none["messages"].as_array().unwrap().len(), 0);
    backend
        .run(&home, &["messages", &session, "--cursor", "x"])
        .fails(2, "cursor", "next page");
    backend
        .run(&home, &["messages", &session, "--since", "soon"])
        .fails(2, "--since", "2026-05-01");

    // Text is not stored for search unless requested.
    backend.run(&home, &["search", "lines"]).fails(
        3,
        "contains no message texts",
        "sessiond reindex --index-text",
    );
    backend
        .run(&home, &["search", "***"])
        .fails(2, "no word", "");
    backend.run(&home, &["reindex", "--index-text"]).ok();
    let found = backend
        .run(&home, &["search", "\"all done\" -nothing"])
        .ok()
        .out();
    assert!(
        found.contains(&session) && found.contains("\n    All done: a.txt has 2 lines."),
        "{found}"
    );
    let found = backend
        .run(&home, &["search", "a.txt", "--json"])
        .ok()
        .json();
    assert_eq!(
        found["hits"][0]["matches"],
        serde_json::json!([[10, 15]]),
        "{found}"
    );
    assert_eq!(
        backend.run(&home, &["search", "nowhere"]).ok().out(),
        "no matches\n"
    );

    let stats = backend.run(&home, &["stats", "--by", "model"]).ok().out();
    assert!(
        stats
            .lines()
            .nth(1)
            .unwrap()
            .starts_with("claude-opus-5-5  1")
            && stats.contains("$0.0083")
            && !stats.contains('█'),
        "{stats}"
    );
    let stats = backend.run(&home, &["stats", "--json"]).ok().json();
    assert_eq!(
        (&stats["total"]["cost_usd"], &stats["total"]["turns"]),
        (&0.00835.into(), &1.into()),
        "{stats}"
    );
}

on_each_backend!(a_line_that_was_written_twice_has_its_text_twice);
fn a_line_that_was_written_twice_has_its_text_twice(backend: Backend) {
    let home = TempHome::new();
    let _daemon = backend.daemon(&home, &[]);
    let line = "{\"type\":\"user\",\"uuid\":\"u1\",\"timestamp\":\"2026-05-01T12:00:00Z\",\"message\":{\"role\":\"user\",\"content\":\"hello\"}}\n";
    let untimed = "{\"type\":\"user\",\"uuid\":\"u2\",\"message\":{\"role\":\"user\",\"content\":\"hello\"}}\n";
    for (session, line) in [("s1", line), ("s2", untimed)] {
        // Two entries, each with the same line.
        for _ in 0..2 {
            append(&transcript(&home, session), line);
            backend.run(&home, &["flush", "--wait"]).ok();
        }
        let listed = || {
            let listed = backend.run(&home, &["messages", session, "--json"]);
            listed.ok().json()["messages"].as_array().unwrap().clone()
        };
        eventually("both lines are in the index", || listed().len() == 2);
        let texts: Vec<_> = listed().iter().map(|row| row["text"].clone()).collect();
        assert_eq!(texts, ["hello", "hello"], "{session}");
    }
}
