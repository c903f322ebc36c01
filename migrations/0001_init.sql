-- The index, one text for PostgreSQL and SQLite.
--
-- Everything here but `errors` and `fences` follows from the bucket and can be made again from it (`sessiond reindex`).
--
-- bytewise_text is text that is compared byte by byte: SQLite does that with any text (it takes the name as TEXT), and
-- in PostgreSQL it is a domain with COLLATE "C" that sessiond makes before it runs this file. So both databases sort
-- alike, and a prefix is a range of an index whatever the locale of the cluster.
--
-- Times are text of one width, in UTC, such as 2026-11-16T04:21:49.123456Z: they sort as text and cast to timestamptz.

-- One row for each log: a session, or what belongs to a project (its id begins with '@').
CREATE TABLE sessions (
    namespace     bytewise_text NOT NULL,
    agent         bytewise_text NOT NULL,
    id            bytewise_text NOT NULL,
    project       bytewise_text,
    cwd           TEXT,
    title         TEXT,
    model         TEXT,
    agent_version TEXT,
    status        TEXT NOT NULL,
    created       bytewise_text NOT NULL,
    updated       bytewise_text NOT NULL,
    -- Number of the newest entry of the log itself; 0 where only branches are known.
    head          BIGINT NOT NULL,
    writer        TEXT NOT NULL,
    raw_bytes     BIGINT NOT NULL,
    stored_bytes  BIGINT NOT NULL,
    PRIMARY KEY (namespace, agent, id)
);

CREATE INDEX sessions_by_time ON sessions (namespace, updated DESC, agent, id);
CREATE INDEX sessions_by_agent ON sessions (namespace, agent, updated DESC, id);
CREATE INDEX sessions_by_project ON sessions (namespace, project, updated DESC, agent, id);
CREATE INDEX sessions_by_id ON sessions (namespace, id);

-- One row for each file at the head of its log.
CREATE TABLE files (
    namespace     bytewise_text NOT NULL,
    agent         bytewise_text NOT NULL,
    session       bytewise_text NOT NULL,
    -- SHA-256 of the path: a path may be longer than PostgreSQL takes into an index.
    path_sha256   bytewise_text NOT NULL,
    path          bytewise_text NOT NULL,
    kind          TEXT NOT NULL,
    len           BIGINT NOT NULL,
    sha256        TEXT NOT NULL,
    mode          BIGINT NOT NULL,
    mtime_ns      BIGINT NOT NULL,
    seq           BIGINT NOT NULL,
    PRIMARY KEY (namespace, agent, session, path_sha256)
);

-- One row for each entry of a log and of its branches.
CREATE TABLE entries (
    namespace     bytewise_text NOT NULL,
    agent         bytewise_text NOT NULL,
    session       bytewise_text NOT NULL,
    -- The writer whose branch it is on; '' on the log itself.
    branch        bytewise_text NOT NULL,
    seq           BIGINT NOT NULL,
    kind          TEXT NOT NULL,
    writer        TEXT NOT NULL,
    at            bytewise_text NOT NULL,
    raw_bytes     BIGINT NOT NULL,
    stored_bytes  BIGINT NOT NULL,
    digest        TEXT NOT NULL,
    PRIMARY KEY (namespace, agent, session, branch, seq)
);

-- What failed, the newest 1000 of a namespace.
CREATE TABLE errors (
    namespace     bytewise_text NOT NULL,
    at            bytewise_text NOT NULL,
    -- Tells failures of the same time apart, in the order they were noted.
    id            bytewise_text NOT NULL,
    agent         TEXT NOT NULL,
    session       TEXT,
    attempt       BIGINT NOT NULL,
    message       TEXT NOT NULL,
    PRIMARY KEY (namespace, at, id)
);

-- The head of each log, where the store cannot fence it.
CREATE TABLE fences (
    namespace     bytewise_text NOT NULL,
    agent         bytewise_text NOT NULL,
    session       bytewise_text NOT NULL,
    seq           BIGINT NOT NULL,
    writer        TEXT NOT NULL,
    PRIMARY KEY (namespace, agent, session)
);
