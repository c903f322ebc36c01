//! Lines: where the last complete one ends, in a file or in a byte slice, and texts on one line.

use std::io::{ErrorKind, Result};

use super::directory::OpenFile;

/// Number of bytes read at a time, from the end of the file.
const CHUNK_LEN: usize = 64 << 10;

/// The text on one line, cut to about `max` bytes with an ellipsis.
pub fn one_line(text: &str, max: usize) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let end = line.floor_char_boundary(max);
    if end < line.len() {
        format!("{}…", &line[..end])
    } else {
        line
    }
}

/// The length of the complete lines within the first `len` bytes of a file.
pub fn complete_lines_len(file: &dyn OpenFile, len: u64) -> Result<u64> {
    let mut end = len;
    let mut buffer = vec![0; CHUNK_LEN];
    while end > 0 {
        let start = end.saturating_sub(CHUNK_LEN as u64);
        let wanted = (end - start) as usize;
        let mut filled = 0;
        while filled < wanted {
            match file.read_at(&mut buffer[filled..wanted], start + filled as u64)? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                count => filled += count,
            }
        }
        match complete_prefix_len(&buffer[..wanted]) {
            0 => {}
            len => return Ok(start + len as u64),
        }
        end = start;
    }
    Ok(0)
}

/// The length of the complete lines in `bytes`; 0 if there is no newline.
pub fn complete_prefix_len(bytes: &[u8]) -> usize {
    bytes
        .iter()
        .rposition(|byte| *byte == b'\n')
        .map_or(0, |newline| newline + 1)
}
