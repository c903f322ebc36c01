"""Rows for an index of any size, in the schema that the program made: written by the database itself, from series of numbers.

Secondary indexes are dropped before and made again after, by their own definitions, as that is many times faster.
"""

import sqlite3

import lab

MESSAGES_EACH = 15
# One session in a thousand is long.
LONG = 5000
TABLES = ("sessions", "files", "entries", "messages", "labels", "checkpoints")
# The first message of each, in microseconds since 1970.
START = 1_790_812_800_000_000


def session_id(number: int) -> str:
    return f"{number * 4000:08x}-0000-4000-8000-{number:012x}"


def filling(count: int, engine: str) -> list[str]:
    """Statements that fill the tables. Numbers that look like chance are a multiplication away from their neighbours."""
    if engine == "postgres":
        series = f"generate_series(1::bigint, {count}) AS n"
        stamp = "to_char(timestamp '2026-10-01' + ({}) * interval '1 second', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')"
        ident, digest = "lpad(to_hex({0} * 4000), 8, '0') || '-0000-4000-8000-' || lpad(to_hex({0}), 12, '0')", "lpad(to_hex({}), 64, '0')"
    else:
        series = f"(SELECT n FROM numbers WHERE n <= {count})"
        stamp = "strftime('%Y-%m-%dT%H:%M:%S.000000Z', 1790812800 + ({}), 'unixepoch')"
        ident, digest = "printf('%08x-0000-4000-8000-%012x', {0} * 4000, {0})", "printf('%064x', {})"
    one, at = ident.format("n"), stamp.format("n * 7919 % 2592000")
    log = f"'default', 'claude-code', {one}"
    sizes = f"CASE WHEN n % 1000 = 7 THEN {LONG} ELSE {MESSAGES_EACH} END"
    made = [
        "INSERT INTO sessions (namespace, agent, id, project, cwd, title, model, agent_version, status, created, updated, head, writer, "
        "raw_bytes, stored_bytes, messages, turns, request_id) "
        f"SELECT {log}, '-work-app-' || (n % 1000), '/work/app', 'a title of some words ' || n, 'claude-opus-5-5', '2.1.325', 'active', "
        f"{at}, {at}, 3, 'w' || n, 90000, 20000, {sizes}, 3, 'r-' || n FROM {series}",
        f"INSERT INTO files (namespace, agent, session, path_sha256, path, kind, len, sha256, mode, mtime_ns, seq) "
        f"SELECT {log}, {digest.format('n')}, 'projects/-work-app/' || {one} || '.jsonl', 'append', 90000, {digest.format('n')}, 384, 1, 3 FROM {series}",
        f"INSERT INTO labels (namespace, agent, session, name, value) SELECT {log}, 'team', 't' || (n % 50) FROM {series} WHERE n % 10 = 0",
    ]
    for seq in (1, 2, 3):
        made.append(
            f"INSERT INTO entries (namespace, agent, session, branch, seq, kind, writer, at, raw_bytes, stored_bytes, digest) "
            f"SELECT {log}, '', {seq}, 'delta', 'w' || n, {at}, 30000, 7000, {digest.format('n')} FROM {series}"
        )
    if engine == "postgres":
        number, other, within = "n", "m", f"{series}, LATERAL generate_series(1::bigint, {sizes}) AS m"
    else:
        number, other = "a.n", "b.n"
        within = f"{series} AS a CROSS JOIN numbers AS b ON b.n <= {sizes.replace('n %', 'a.n %')}"
    ident, role = ident.format(number), f"CASE WHEN {other} % 2 = 0 THEN 'assistant' ELSE 'user' END"
    counted = f"CASE WHEN {other} % 2 = 0 THEN {other} END"
    made.append(
        "INSERT INTO messages (namespace, agent, session, position, file, start, len, message_id, parent_id, role, kind, at, model, response_id, "
        "input_tokens, output_tokens, cache_read_tokens, cache_write_tokens) "
        f"SELECT 'default', 'claude-code', {ident}, {START} + {other} * 4000000, {digest.format(number)}, {other} * 2000, 2000, "
        f"'u' || {number} || '-' || {other}, 'u' || {number} || '-' || ({other} - 1), {role}, 'text', '2026-10-01T00:00:00.000000Z', 'claude-opus-5-5', "
        f"CASE WHEN {other} % 2 = 0 THEN 'msg_' || {number} || '_' || {other} END, {counted}, {counted}, {counted}, {counted} FROM {within}"
    )
    return made


def fill_postgres(port: int, count: int) -> None:
    tables = ", ".join(f"'{table}'" for table in TABLES)
    listed = f"SELECT indexname || '|' || indexdef FROM pg_indexes WHERE tablename IN ({tables}) AND indexname NOT LIKE '%\\_pkey'"
    indexes = [line.split("|", 1) for line in lab.psql(port, listed, "bench").stdout.splitlines()]
    drop = "".join(f"DROP INDEX {name};" for name, _ in indexes)
    lab.psql(port, drop + ";".join(filling(count, "postgres")) + ";", "bench")
    lab.psql(port, "".join(f"{definition};" for _, definition in indexes) + "VACUUM ANALYZE;", "bench")


def fill_sqlite(path, count: int) -> None:
    database = sqlite3.connect(path, isolation_level=None)
    listed = "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL AND tbl_name IN ({})"
    indexes = database.execute(listed.format(", ".join("?" * len(TABLES))), TABLES).fetchall()
    database.execute("PRAGMA synchronous = OFF")
    database.execute("PRAGMA cache_size = -200000")
    for name, _ in indexes:
        database.execute(f"DROP INDEX {name}")
    database.execute("CREATE TEMP TABLE numbers (n INTEGER PRIMARY KEY)")
    database.execute(
        "WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < ?) INSERT INTO numbers SELECT n FROM n", (max(count, LONG),)
    )
    for sql in filling(count, "sqlite"):
        database.execute(sql)
    for _, sql in indexes:
        database.execute(sql)
    database.execute("ANALYZE")
    database.close()
