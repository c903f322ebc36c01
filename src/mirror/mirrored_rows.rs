//! The rows that the file of a session has.

use std::collections::{HashMap, HashSet};
use std::io::{self, BufRead, BufReader, Read};

use super::database::MirrorRow;
use super::files::MirrorFiles;
use super::lines::{LineHeader, deleted_row_line, row_line};
use super::tables::{TABLES, table_index, table_name};
use crate::error::{Error, Result};
use crate::model::Digest;
use crate::sys::OpenFile;

/// Lines are written to the file when this many bytes are waiting.
const WRITE_BUFFER_BYTES: usize = 1 << 20;

/// The fingerprint of a deleted row.
const DELETED: u64 = 0;

/// The rows that the file of a session has.
#[derive(Default)]
pub struct MirroredRows {
    /// The fingerprint of the last line of each row, by table and key.
    rows: [HashMap<Box<str>, u64>; TABLES.len() + 1],
    schema: Option<u64>,
    /// The time of the newest change that the file has.
    pub last_change_ms: i64,
}

impl MirroredRows {
    /// Reads the file of a session. Cuts off a partial line: its row is written again.
    pub fn load(files: &dyn MirrorFiles, session: &str) -> Result<MirroredRows> {
        let read = || -> io::Result<MirroredRows> {
            let mut mirrored = MirroredRows::default();
            let Some(file) = files.open(session)? else {
                return Ok(mirrored);
            };
            let complete = mirrored.read_lines(&*file)?;
            if file.stat()?.size > complete {
                files.truncate(session, complete)?;
            }
            Ok(mirrored)
        };
        read().map_err(|cause| Error::io(format!("read {}", files.name(session)), cause))
    }

    /// Reads all complete lines; returns their length.
    fn read_lines(&mut self, file: &dyn OpenFile) -> io::Result<u64> {
        let mut reader = BufReader::new(FileReader { file, offset: 0 });
        let (mut line, mut complete) = (Vec::new(), 0);
        loop {
            line.clear();
            if reader.read_until(b'\n', &mut line)? == 0 || !line.ends_with(b"\n") {
                return Ok(complete);
            }
            complete += line.len() as u64;
            let Ok(header) = serde_json::from_slice::<LineHeader<'_>>(&line) else {
                continue;
            };
            match (header.table.as_deref().and_then(table_index), header.key) {
                (Some(table), Some(key)) => {
                    let fingerprint = header.row.map_or(DELETED, |_| fingerprint(&line));
                    self.rows[table].insert(key.into(), fingerprint);
                }
                _ if header.schema.is_some() => self.schema = Some(fingerprint(&line)),
                _ => {}
            }
        }
    }

    /// Writes the schema, unless the file has it.
    pub fn update_schema(&mut self, line: &str, writer: &mut LineWriter<'_>) -> Result<()> {
        let fingerprint = Some(fingerprint(line.as_bytes()));
        if self.schema != fingerprint {
            writer.add(line)?;
            self.schema = fingerprint;
        }
        Ok(())
    }

    /// Writes a row, unless the file has this version of it.
    pub fn update(&mut self, row: &MirrorRow, writer: &mut LineWriter<'_>) -> Result<()> {
        let line = row_line(
            table_name(row.table),
            &row.key,
            row.role.as_deref(),
            row.model.as_deref(),
            &row.json,
        );
        let fingerprint = fingerprint(line.as_bytes());
        if self.rows[row.table].insert(row.key.as_str().into(), fingerprint) == Some(fingerprint) {
            Ok(())
        } else {
            writer.add(&line)
        }
    }

    /// Whether every table has this number of rows.
    pub fn has_counts(&self, counts: &[(usize, usize)]) -> bool {
        counts.iter().all(|(table, count)| {
            self.rows.get(*table).is_some_and(|rows| {
                rows.values()
                    .filter(|fingerprint| **fingerprint != DELETED)
                    .count()
                    == *count
            })
        })
    }

    /// Writes the rows that are not in `present` as deleted.
    pub fn delete_missing(
        &mut self,
        present: &HashSet<(usize, String)>,
        writer: &mut LineWriter<'_>,
    ) -> Result<()> {
        for (index, (table, _)) in TABLES.iter().enumerate() {
            let mut deleted: Vec<Box<str>> = Vec::new();
            for (key, fingerprint) in &mut self.rows[index] {
                if *fingerprint != DELETED && !present.contains(&(index, key.to_string())) {
                    *fingerprint = DELETED;
                    deleted.push(key.clone());
                }
            }
            deleted.sort();
            deleted
                .iter()
                .try_for_each(|key| writer.add(&deleted_row_line(table, key)))?;
        }
        Ok(())
    }
}

/// The fingerprint of a line. Never 0, which marks a deleted row.
fn fingerprint(line: &[u8]) -> u64 {
    Digest::of(line).fingerprint().max(1)
}

/// Reads an open file from its start.
struct FileReader<'a> {
    file: &'a dyn OpenFile,
    offset: u64,
}

impl Read for FileReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(buffer, self.offset)?;
        self.offset += read as u64;
        Ok(read)
    }
}

/// Appends lines to the file of a session.
pub struct LineWriter<'a> {
    files: &'a dyn MirrorFiles,
    session: &'a str,
    buffer: String,
}

impl<'a> LineWriter<'a> {
    /// A writer for the file of a session.
    pub fn new(files: &'a dyn MirrorFiles, session: &'a str) -> LineWriter<'a> {
        LineWriter {
            files,
            session,
            buffer: String::new(),
        }
    }

    fn add(&mut self, line: &str) -> Result<()> {
        self.buffer.push_str(line);
        if self.buffer.len() > WRITE_BUFFER_BYTES {
            self.flush()
        } else {
            Ok(())
        }
    }

    /// Writes the lines that are waiting.
    pub fn flush(&mut self) -> Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        self.files
            .append(self.session, self.buffer.as_bytes())
            .map_err(|cause| {
                Error::io(format!("write {}", self.files.name(self.session)), cause)
            })?;
        self.buffer.clear();
        Ok(())
    }
}
