"""A million sessions and twenty million messages in the index: the time of the database for the usual queries.

The statements are those of the program: PostgreSQL logs them with their plans while `sessiond ls`, `messages` and `restore` run. SQLite
then runs the same statements, at a tenth of the size.
"""

import re
import shutil
import sqlite3
import tempfile
import time
from dataclasses import dataclass, field

import lab
from figures import Figure, Measured, ms, plain
from rows.filling import LONG, START, TABLES, fill_postgres, fill_sqlite, session_id
from transcripts import Transcript

# Sessions, in the short form and in the full one.
COUNT = {True: 10_000, False: 1_000_000}
# Seconds.
LIMIT = 0.010
# Bytes on disk for one session with its messages, indexes included, as measured; and the space to leave free.
EACH, SPARE = 24_000, 4 << 30


@dataclass
class Statement:
    """One statement that the program sent."""

    sql: str
    planning: float = 0.0
    running: float = 0.0
    plan: str = ""
    values: list = field(default_factory=list)

    @property
    def duration(self) -> float:
        return self.planning + self.running

    @property
    def is_from_sessiond(self) -> bool:
        """Whether it uses one of sessiond's tables, in contrast to the setup of a connection."""
        return any(re.search(rf"\b(FROM|JOIN|INTO|UPDATE) {table}\b", self.sql) for table in TABLES)

    @property
    def has_seq_scan(self) -> bool:
        return bool(re.search(rf"Seq Scan on ({'|'.join(TABLES)})", self.plan))


def parse_log(text: str) -> list[Statement]:
    """Parses PostgreSQL's log, which has the times of parse, bind and execute of each statement."""
    found: list[Statement] = []
    for block in re.split(r"^@@", text, flags=re.MULTILINE)[1:]:
        head, _, body = block.partition("@@")
        if head.split(" ", 1)[1].strip() == "psql":
            continue
        body = body.strip()
        if match := re.match(r"LOG:\s+duration: [\d.]+ ms\s+plan:\s*Query Text:.*?\n\t(\S.*\(cost.*)", body, re.DOTALL):
            # A plan follows its statement, but for a simple query: the setup of a connection, which comes first.
            if found:
                found[-1].plan = re.sub(r"^\t", "", match[1], flags=re.MULTILINE)
        elif match := re.match(r"LOG:\s+duration: ([\d.]+) ms\s+(parse|bind|execute|statement)[^:]*: (.*)", body, re.DOTALL):
            sql = re.sub(r"\s+", " ", match[3]).strip()
            if match[2] in ("parse", "statement") or not found or found[-1].sql != sql:
                found.append(Statement(sql))
            if match[2] in ("parse", "bind"):
                found[-1].planning += float(match[1]) / 1000
            else:
                found[-1].running += float(match[1]) / 1000
        elif found and (match := re.match(r"DETAIL:\s+parameters: (.*)", body, re.DOTALL)):
            found[-1].values = [value.replace("''", "'") for value in re.findall(r"\$\d+ = '((?:[^']|'')*)'", match[1])]
    return found


def smaller(value: str, count: int) -> str:
    """Returns the value for a session that exists among the first `count` sessions."""
    if match := re.fullmatch(r"[0-9a-f]{8}-0000-4000-8000-([0-9a-f]{12})", value):
        return session_id(int(match[1], 16) % count or count)
    return f"{int(value, 16) % count or count:064x}" if re.fullmatch(r"0{40}[0-9a-f]{24}", value) else value


def query_sqlite(path, statements: list[Statement]) -> tuple[float, list[str]]:
    """Returns the median time of five runs of all statements, and the steps that scan a whole table."""
    database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    times, scans = [], []
    for run in range(6):
        total = 0.0
        for one in statements:
            sql = re.sub(r"\$(\d+)", r"?\1", one.sql)
            began = time.perf_counter()
            database.execute(sql, one.values).fetchall()
            total += time.perf_counter() - began
            if run == 0:
                plan = [row[3] for row in database.execute("EXPLAIN QUERY PLAN " + sql, one.values)]
                scans += [line for line in plan if re.match(rf"SCAN ({'|'.join(TABLES)})\b(?!.*USING)", line)]
        # The first run reads from the disk.
        times += [total] if run else []
    return lab.median(times), scans


def commands(count: int) -> dict[str, list[str]]:
    long, short = count // 2000 * 1000 + 7, count // 3
    middle = f"{START + LONG // 2 * 4_000_000}|{long:064x}|{LONG // 2 * 2000}"
    return {
        "ls": ["ls", "--json"],
        "ls --project": ["ls", "--json", "--project", "/work/app/7"],
        "messages, first page": ["messages", session_id(short), "--json"],
        "messages, page in the middle of 5,000": ["messages", session_id(long), "--json", "--cursor", middle],
        "restore lookup, by ID": ["restore", session_id(short + 1)],
        "restore lookup, --latest": ["restore", "--latest"],
        "restore lookup, --request": ["restore", "--request", f"r-{short + 1}"],
    }


def store(bench, directory, count: int) -> None:
    """Stores the sessions whose messages are listed: the command checks that the session is in the bucket."""
    sessiond = lab.Sessiond(bench.program, directory / "writer", f"file://{directory}/store")
    for session in (session_id(count // 2000 * 1000 + 7), session_id(count // 3)):
        sessiond.transcript(session).write_bytes(b"".join(Transcript(session).bytes(4000)))
    with sessiond.daemon() as daemon:
        sessiond.flush()
        daemon.stop()


def measure(bench) -> Measured:
    wanted = COUNT[bench.short]
    room = int((shutil.disk_usage(tempfile.gettempdir()).free - SPARE) / (EACH * 1.1))
    count = max(1000, min(wanted, room // 1000 * 1000))
    settings = [
        "shared_buffers=512MB",
        "maintenance_work_mem=512MB",
        "wal_level=minimal",
        "max_wal_senders=0",
        "max_wal_size=4GB",
        "autovacuum=off",
        "synchronous_commit=off",
    ]
    settings += [
        "session_preload_libraries=auto_explain",
        "auto_explain.log_analyze=on",
        "auto_explain.log_timing=off",
        "auto_explain.log_buffers=on",
    ]
    settings += ["log_line_prefix=@@%p %a@@", "log_checkpoints=off"]
    figures, texts, sent, without_index, shown = [], [], {}, [], set()
    with bench.directory("index") as directory, lab.postgres(*settings) as (port, log):
        lab.psql(port, "CREATE DATABASE bench")
        sessiond = lab.Sessiond(bench.program, directory, f"file://{directory}/store", f"postgres://postgres@127.0.0.1:{port}/bench")
        sessiond.call("ls")
        store(bench, directory, count)
        began = time.monotonic()
        fill_postgres(port, count)
        filled = time.monotonic() - began
        rows = int(lab.psql(port, "SELECT count(*) FROM messages", "bench").stdout)
        size = int(lab.psql(port, "SELECT pg_database_size('bench')").stdout)
        lab.psql(port, "ALTER DATABASE bench SET log_min_duration_statement = 0; ALTER DATABASE bench SET auto_explain.log_min_duration = 0;")
        for name, args in commands(count).items():
            runs = []
            for _ in range(5):
                at = log.stat().st_size
                # The session is not in the store, so a restore ends after the lookup, unless it asks the index for
                # the newest entry: that would be a rollback.
                is_restore = args[0] == "restore"
                more = ("--witness", "off") if is_restore else ()
                sessiond.call(*args, *more, codes=(3,) if is_restore else (0,), timeout=120)
                with open(log, errors="replace") as written:
                    written.seek(at)
                    runs.append(parse_log(written.read()))
            took = [sum(one.duration for one in run if one.is_from_sessiond) for run in runs]
            middle = runs[sorted(range(len(runs)), key=lambda number: took[number])[len(runs) // 2]]
            sent[name] = [one for one in middle if one.is_from_sessiond]
            set_up = sum(one.duration for one in middle if not one.is_from_sessiond)
            scanned = [one.sql for one in sent[name] if one.has_seq_scan]
            without_index += scanned
            by_index = f", {len(scanned)} without an index scan" if scanned else ", all with index scans"
            result = f"{ms(lab.median(took))} in {len(sent[name])} statements{by_index}" if sent[name] else "no SQL statement: the lookup uses the bucket"
            figures.append(
                Figure(
                    "index",
                    name,
                    lab.median(took) * 1000,
                    "ms",
                    result,
                    f"{ms(set_up)} for the connection",
                    LIMIT * 1000,
                    "under 10 ms, index scans only",
                    noise=10,
                )
            )
            for one in sent[name]:
                # The statements for labels and branches are the same for all commands.
                if (short := shortened(one.sql)) not in shown:
                    shown.add(short)
                    texts.append(f"`{name}` (parse and bind {ms(one.planning)}, execute {ms(one.running)}):\n\n```\n{short}\n{one.plan.strip()}\n```")
    # A scan of a small table is cheaper than an index.
    if not bench.short:
        figures.append(
            Figure(
                "index", "statements without an index scan", len(without_index), "", f"{len(without_index)} of {sum(map(len, sent.values()))}", "–", 0, "none"
            )
        )
    texts.insert(
        0,
        f"PostgreSQL: {count:,} sessions, {rows:,} messages, {plain(size / 1e9)} GB, filled in {ms(filled)}. "
        "Medians of five; database time only (parse, bind, execute), as reported by PostgreSQL.",
    )
    small = max(1000, count // 10_000 * 1000)
    with bench.directory("index") as directory:
        sessiond = lab.Sessiond(bench.program, directory, f"file://{directory}/store")
        sessiond.call("ls")
        fill_sqlite(directory / "index.db", small)
        size = (directory / "index.db").stat().st_size
        for name, statements in sent.items():
            if statements and all(one.sql.startswith(("SELECT", "WITH")) for one in statements):
                for one in statements:
                    one.values = [smaller(value, small) for value in one.values]
                took, scans = query_sqlite(directory / "index.db", statements)
                result = f"{ms(took)} in {len(statements)} statements" + (f"; full scans: {'; '.join(scans)}" if scans else ", all with index scans")
                figures.append(
                    Figure(
                        "index",
                        f"{name}, SQLite",
                        took * 1000,
                        "ms",
                        result,
                        f"{small:,} sessions, {plain(size / 1e9)} GB",
                        LIMIT * 1000,
                        "under 10 ms, index scans only",
                        noise=10,
                    )
                )
    return Measured(figures, texts)


def shortened(sql: str) -> str:
    """Omits the columns, and all but the first value."""
    sql = re.sub(r"SELECT (namespace, agent, id|position), .*? FROM", r"SELECT \1, … FROM", sql)
    sql = re.sub(r"namespace = \$\d+ AND", "namespace = $… AND", sql)
    return re.sub(r"(\(\$\d+, \$\d+\))(, \(\$\d+, \$\d+\))+", r"\1, …", sql)
