-- What transcripts say, and what people say of sessions.
--
-- All of it follows from the bucket: messages and checkpoints from the entries of a log, labels and the like from the objects
-- beside it.

ALTER TABLE sessions ADD COLUMN messages BIGINT NOT NULL DEFAULT 0;
ALTER TABLE sessions ADD COLUMN turns BIGINT NOT NULL DEFAULT 0;
ALTER TABLE sessions ADD COLUMN input_tokens BIGINT NOT NULL DEFAULT 0;
ALTER TABLE sessions ADD COLUMN output_tokens BIGINT NOT NULL DEFAULT 0;
ALTER TABLE sessions ADD COLUMN cache_read_tokens BIGINT NOT NULL DEFAULT 0;
ALTER TABLE sessions ADD COLUMN cache_write_tokens BIGINT NOT NULL DEFAULT 0;
-- Millionths of a dollar, as far as they are known; and how many answers there are of which they are not.
ALTER TABLE sessions ADD COLUMN cost BIGINT NOT NULL DEFAULT 0;
ALTER TABLE sessions ADD COLUMN uncosted BIGINT NOT NULL DEFAULT 0;
-- What the transcript itself says that the session has cost.
ALTER TABLE sessions ADD COLUMN told_cost BIGINT;
-- Lines that could not be read.
ALTER TABLE sessions ADD COLUMN unread BIGINT NOT NULL DEFAULT 0;
ALTER TABLE sessions ADD COLUMN request_id bytewise_text;
-- Seconds to keep it after the last change, -1 for ever; NULL: as the collector is told.
ALTER TABLE sessions ADD COLUMN ttl BIGINT;
-- What somebody said of its status, and the raw_bytes it had then: once it has others, this does not hold any more.
ALTER TABLE sessions ADD COLUMN rest TEXT;
ALTER TABLE sessions ADD COLUMN rest_bytes BIGINT;
-- Number of the object that says all this; 0 where nothing was said.
ALTER TABLE sessions ADD COLUMN wishes BIGINT NOT NULL DEFAULT 0;

CREATE INDEX sessions_by_request ON sessions (namespace, request_id, updated DESC);

-- Bytes of an unfinished line at the end.
ALTER TABLE files ADD COLUMN open BIGINT NOT NULL DEFAULT 0;
-- Where the last message of it stands in the conversation.
ALTER TABLE files ADD COLUMN position BIGINT NOT NULL DEFAULT 0;
-- Lines of it that could not be read.
ALTER TABLE files ADD COLUMN unread BIGINT NOT NULL DEFAULT 0;

-- One row for each message at the head of its log.
CREATE TABLE messages (
    namespace     bytewise_text NOT NULL,
    agent         bytewise_text NOT NULL,
    session       bytewise_text NOT NULL,
    -- Orders a conversation: microseconds since 1970, and within a file never less than what comes before.
    position      BIGINT NOT NULL,
    -- SHA-256 of the path of the file, and where in it the message stands.
    file          bytewise_text NOT NULL,
    start         BIGINT NOT NULL,
    len           BIGINT NOT NULL,
    -- Unique within a session only, and only as far as the agent keeps to it.
    uuid          bytewise_text,
    parent        bytewise_text,
    role          TEXT NOT NULL,
    kind          TEXT NOT NULL,
    at            bytewise_text,
    model         TEXT,
    -- The answer it is a piece of. What an answer took stands in the first of its rows and counts once.
    answer        bytewise_text,
    input_tokens  BIGINT,
    output_tokens BIGINT,
    cache_read_tokens BIGINT,
    cache_write_tokens BIGINT,
    cost          BIGINT,
    sub_agent     TEXT,
    PRIMARY KEY (namespace, agent, session, position, file, start)
);

CREATE INDEX messages_by_file ON messages (namespace, agent, session, file, start);
CREATE INDEX messages_by_role ON messages (namespace, agent, session, role, position, file, start);
CREATE INDEX messages_by_answer ON messages (namespace, agent, session, answer);

-- What was said is in the table texts, which each engine searches in its own way: src/index/sql/texts.rs makes it.

-- One row for each point to go back to.
CREATE TABLE checkpoints (
    namespace     bytewise_text NOT NULL,
    agent         bytewise_text NOT NULL,
    session       bytewise_text NOT NULL,
    -- The end of a turn has a number, what somebody named has a name.
    number        BIGINT NOT NULL,
    name          bytewise_text NOT NULL,
    seq           BIGINT NOT NULL,
    turn          BIGINT NOT NULL,
    at            bytewise_text NOT NULL,
    -- All that is known of it, as JSON.
    body          TEXT NOT NULL,
    PRIMARY KEY (namespace, agent, session, number, name)
);

CREATE TABLE labels (
    namespace     bytewise_text NOT NULL,
    agent         bytewise_text NOT NULL,
    session       bytewise_text NOT NULL,
    name          bytewise_text NOT NULL,
    value         bytewise_text NOT NULL,
    PRIMARY KEY (namespace, agent, session, name)
);

CREATE INDEX labels_by_value ON labels (namespace, name, value);
