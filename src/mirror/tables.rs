//! The tables of OpenCode's database that sessiond reads.
//!
//! sessiond reads only these tables, and therefore never accounts, credentials or the secrets of
//! shared sessions.

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
