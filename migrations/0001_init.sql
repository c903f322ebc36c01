-- The index schema, one text for PostgreSQL and SQLite.
--
-- All tables but `failures` and `fences` are derived from the store: `sessiond reindex` rebuilds
-- them.
--
-- `bytewise_text` is text that compares byte by byte. SQLite compares all text that way and treats
-- the unknown type as TEXT. In PostgreSQL it is a domain with COLLATE "C", which sessiond creates
-- before it applies this file. Both databases therefore sort in the same order, and a prefix search
-- is an index range in every locale.
--
-- Times are UTC text of a fixed width, such as 2026-11-16T04:21:49.123456Z. They sort as text and
-- cast to timestamptz.
--
-- The table `message_texts` is missing here: its full-text index differs between the databases, so
-- src/index/sql/message_texts.rs creates it.

-- One row per log: a session, or a project (its ID starts with '@').
CREATE TABLE sessions (
    namespace          bytewise_text NOT NULL,
    agent              bytewise_text NOT NULL,
    id                 bytewise_text NOT NULL,
    project            bytewise_text,
    cwd                TEXT,
    -- The agent's title.
    title              TEXT,
    -- The beginning of the first prompt: the title where the agent gives none.
    first_prompt       TEXT,
    -- Of a fork: the session it was forked from, and the number of turns it started with.
    origin             bytewise_text,
    origin_turn        BIGINT,
    -- Model of the last response.
    model              TEXT,
    agent_version      TEXT,
    -- created, active, completed, archived or removed.
    status             TEXT NOT NULL,
    -- Time of the first entry.
    created            bytewise_text NOT NULL,
    -- Time of the newest entry that wrote content. A claim does not change it.
    updated            bytewise_text NOT NULL,
    -- Highest seq of the main log. 0 if only branches are known.
    head               BIGINT NOT NULL,
    -- Writer of the newest entry.
    writer             TEXT NOT NULL,
    raw_bytes          BIGINT NOT NULL,
    stored_bytes       BIGINT NOT NULL,

    -- Totals of the transcripts.
    messages           BIGINT NOT NULL DEFAULT 0,
    turns              BIGINT NOT NULL DEFAULT 0,
    input_tokens       BIGINT NOT NULL DEFAULT 0,
    output_tokens      BIGINT NOT NULL DEFAULT 0,
    cache_read_tokens  BIGINT NOT NULL DEFAULT 0,
    cache_write_tokens BIGINT NOT NULL DEFAULT 0,
    -- Sum of the known costs of all responses, in millionths of a US dollar.
    cost               BIGINT NOT NULL DEFAULT 0,
    -- Number of responses without a known cost.
    unpriced_responses BIGINT NOT NULL DEFAULT 0,
    -- Cost of the whole session as the agent reports it, in millionths of a US dollar.
    reported_cost      BIGINT,
    -- Number of transcript lines that could not be parsed.
    unparsed_lines     BIGINT NOT NULL DEFAULT 0,

    -- User metadata.
    request_id         bytewise_text,
    -- Seconds to keep the session after its last change, -1 to keep it forever, NULL for the default
    -- of `sessiond gc`.
    ttl                BIGINT,
    -- completed or archived, and the value of raw_bytes when a user closed the session. The closed
    -- status ends when raw_bytes changes.
    closed_status      TEXT,
    closed_raw_bytes   BIGINT,
    -- Version of the metadata object that the columns above come from. 0 if there is none.
    metadata_version   BIGINT NOT NULL DEFAULT 0,

    PRIMARY KEY (namespace, agent, id)
);

CREATE INDEX sessions_by_time ON sessions (namespace, updated DESC, agent, id);
CREATE INDEX sessions_by_agent ON sessions (namespace, agent, updated DESC, id);
CREATE INDEX sessions_by_project ON sessions (namespace, project, updated DESC, agent, id);
CREATE INDEX sessions_by_id ON sessions (namespace, id);
CREATE INDEX sessions_by_request ON sessions (namespace, request_id, updated DESC);

-- One row per label of a session.
CREATE TABLE labels (
    namespace          bytewise_text NOT NULL,
    agent              bytewise_text NOT NULL,
    session            bytewise_text NOT NULL,
    name               bytewise_text NOT NULL,
    value              bytewise_text NOT NULL,
    PRIMARY KEY (namespace, agent, session, name)
);

CREATE INDEX labels_by_value ON labels (namespace, name, value);

-- One row per file at the head of its log.
CREATE TABLE files (
    namespace          bytewise_text NOT NULL,
    agent              bytewise_text NOT NULL,
    session            bytewise_text NOT NULL,
    -- SHA-256 of the path: a path can be longer than PostgreSQL accepts in an index.
    path_sha256        bytewise_text NOT NULL,
    path               bytewise_text NOT NULL,
    -- append (a transcript) or whole (a side file).
    kind               TEXT NOT NULL,
    len                BIGINT NOT NULL,
    sha256             TEXT NOT NULL,
    mode               BIGINT NOT NULL,
    mtime_ns           BIGINT NOT NULL,
    -- The entry that last changed the file.
    seq                BIGINT NOT NULL,
    -- Bytes after the last newline.
    partial_line_bytes BIGINT NOT NULL DEFAULT 0,
    -- messages.position of the last message of the file.
    position           BIGINT NOT NULL DEFAULT 0,
    -- Number of lines that could not be parsed.
    unparsed_lines     BIGINT NOT NULL DEFAULT 0,
    PRIMARY KEY (namespace, agent, session, path_sha256)
);

-- One row per entry of a log and of its branches.
CREATE TABLE entries (
    namespace          bytewise_text NOT NULL,
    agent              bytewise_text NOT NULL,
    session            bytewise_text NOT NULL,
    -- The writer that owns the branch. '' for the main log.
    branch             bytewise_text NOT NULL,
    seq                BIGINT NOT NULL,
    -- claim, delta, tombstone, purge, merge or snapshot.
    kind               TEXT NOT NULL,
    writer             TEXT NOT NULL,
    at                 bytewise_text NOT NULL,
    raw_bytes          BIGINT NOT NULL,
    stored_bytes       BIGINT NOT NULL,
    digest             TEXT NOT NULL,
    PRIMARY KEY (namespace, agent, session, branch, seq)
);

-- One row per message of the transcripts at the head of a log.
CREATE TABLE messages (
    namespace          bytewise_text NOT NULL,
    agent              bytewise_text NOT NULL,
    session            bytewise_text NOT NULL,
    -- Orders the messages of a session: microseconds since 1970, increasing within a file.
    position           BIGINT NOT NULL,
    -- files.path_sha256 of the transcript, and the bytes of the message in it.
    file               bytewise_text NOT NULL,
    start              BIGINT NOT NULL,
    len                BIGINT NOT NULL,
    -- The agent's ID of the message. Agents do not guarantee that it is unique.
    message_id         bytewise_text,
    parent_id          bytewise_text,
    role               TEXT NOT NULL,
    kind               TEXT NOT NULL,
    at                 bytewise_text,
    model              TEXT,
    -- The response that the message belongs to. The first message of a response has its tokens and
    -- its cost, so that they count once.
    response_id        bytewise_text,
    input_tokens       BIGINT,
    output_tokens      BIGINT,
    cache_read_tokens  BIGINT,
    cache_write_tokens BIGINT,
    -- Millionths of a US dollar.
    cost               BIGINT,
    sub_agent          TEXT,
    PRIMARY KEY (namespace, agent, session, position, file, start)
);

CREATE INDEX messages_by_file ON messages (namespace, agent, session, file, start);
CREATE INDEX messages_by_role ON messages (namespace, agent, session, role, position, file, start);
CREATE INDEX messages_by_response ON messages (namespace, agent, session, response_id);

-- One row per checkpoint.
CREATE TABLE checkpoints (
    namespace          bytewise_text NOT NULL,
    agent              bytewise_text NOT NULL,
    session            bytewise_text NOT NULL,
    -- Number of the checkpoint within the session.
    number             BIGINT NOT NULL,
    -- Name that a user gave it. '' for the end of a turn or a step.
    name               bytewise_text NOT NULL,
    seq                BIGINT NOT NULL,
    turn               BIGINT NOT NULL,
    -- Number of the step within its turn. 0 for the end of a turn.
    step               BIGINT NOT NULL,
    -- Number of the checkpoint it continues from. 0 if there is none.
    parent             BIGINT NOT NULL,
    -- running, completed, failed or interrupted.
    status             TEXT NOT NULL,
    at                 bytewise_text NOT NULL,
    -- The complete checkpoint as JSON.
    detail             TEXT NOT NULL,
    PRIMARY KEY (namespace, agent, session, number, name)
);

-- The newest 1000 failures of each namespace. Not derived from the store.
CREATE TABLE failures (
    namespace          bytewise_text NOT NULL,
    at                 bytewise_text NOT NULL,
    -- Orders failures with the same time.
    id                 bytewise_text NOT NULL,
    agent              TEXT NOT NULL,
    session            TEXT,
    attempt            BIGINT NOT NULL,
    message            TEXT NOT NULL,
    PRIMARY KEY (namespace, at, id)
);

-- The head of each log, if the store cannot fence. Not derived from the store.
CREATE TABLE fences (
    namespace          bytewise_text NOT NULL,
    agent              bytewise_text NOT NULL,
    session            bytewise_text NOT NULL,
    seq                BIGINT NOT NULL,
    writer             TEXT NOT NULL,
    PRIMARY KEY (namespace, agent, session)
);
