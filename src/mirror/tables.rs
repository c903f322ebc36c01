//! The tables and columns of OpenCode's database that sessiond reads and writes.
//!
//! sessiond reads and writes only these, and therefore never accounts, credentials, permissions,
//! commands or the secrets of shared sessions. The list applies in both directions, because neither
//! the database nor the store is trusted.

/// The tables of a session, each with the column that has the session ID. The order is that of the
/// lines: a session before its messages, and those before their parts.
pub const TABLES: [(&str, &str); 7] = [
    ("session", "id"),
    ("message", "session_id"),
    ("part", "session_id"),
    ("todo", "session_id"),
    ("session_message", "session_id"),
    ("session_input", "session_id"),
    ("session_context_epoch", "session_id"),
];

/// The table of projects. Sessions share its rows: a missing row is added, and none is changed.
pub const PROJECT: &str = "project";

/// The index of the project table, after the tables of a session.
pub const PROJECT_INDEX: usize = TABLES.len();

/// The tables with the applied migrations. OpenCode runs the migrations that are missing there.
pub const MIGRATIONS: [&str; 2] = ["migration", "data_migration"];

/// The columns of each table. A column that is not listed is neither stored nor restored.
const COLUMNS: [(&str, &[&str]); 10] = [
    (
        "session",
        &[
            "id",
            "project_id",
            "workspace_id",
            "parent_id",
            "slug",
            "directory",
            "directories",
            "path",
            "title",
            "version",
            "share_url",
            "summary_additions",
            "summary_deletions",
            "summary_files",
            "summary_diffs",
            "metadata",
            "cost",
            "tokens_input",
            "tokens_output",
            "tokens_reasoning",
            "tokens_cache_read",
            "tokens_cache_write",
            "revert",
            "agent",
            "model",
            "time_created",
            "time_updated",
            "time_compacting",
            "time_archived",
        ],
    ),
    (
        "message",
        &["id", "session_id", "time_created", "time_updated", "data"],
    ),
    (
        "part",
        &[
            "id",
            "message_id",
            "session_id",
            "time_created",
            "time_updated",
            "data",
        ],
    ),
    (
        "todo",
        &[
            "id",
            "session_id",
            "content",
            "status",
            "priority",
            "position",
            "time_created",
            "time_updated",
        ],
    ),
    (
        "session_message",
        &[
            "id",
            "session_id",
            "type",
            "seq",
            "time_created",
            "time_updated",
            "data",
        ],
    ),
    (
        "session_input",
        &[
            "id",
            "session_id",
            "prompt",
            "delivery",
            "admitted_seq",
            "promoted_seq",
            "time_created",
            "time_updated",
        ],
    ),
    (
        "session_context_epoch",
        &[
            "session_id",
            "agent",
            "baseline",
            "snapshot",
            "baseline_seq",
            "replacement_seq",
            "revision",
        ],
    ),
    (
        PROJECT,
        &[
            "id",
            "worktree",
            "vcs",
            "name",
            "icon_url",
            "icon_url_override",
            "icon_color",
            "sandboxes",
            "time_created",
            "time_updated",
            "time_initialized",
        ],
    ),
    (
        "migration",
        &["id", "name", "hash", "created_at", "time_completed"],
    ),
    (
        "data_migration",
        &["id", "name", "hash", "created_at", "time_completed"],
    ),
];

/// Whether a column is stored and restored.
pub fn is_stored(table: &str, column: &str) -> bool {
    COLUMNS
        .iter()
        .any(|(name, columns)| *name == table && columns.contains(&column))
}

/// The index of a table.
pub fn table_index(table: &str) -> Option<usize> {
    if table == PROJECT {
        Some(PROJECT_INDEX)
    } else {
        TABLES.iter().position(|(name, _)| *name == table)
    }
}

/// The name of a table.
pub fn table_name(index: usize) -> &'static str {
    TABLES.get(index).map_or(PROJECT, |(name, _)| name)
}
