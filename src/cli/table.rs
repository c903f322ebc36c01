//! Tables that fit the terminal.

use std::io::IsTerminal;

use crate::cli::print::{clean, colors_stdout, line};
use crate::error::Result;

/// Minimum width of a column that is cut.
const MIN_FLEXIBLE: usize = 12;

/// The gap between columns.
const GAP: &str = "  ";

/// A table with a heading. On a terminal, empty columns are left out, the widest of the flexible
/// columns are cut until every row fits, and optional columns are left out if that is not enough.
/// Elsewhere, every cell is printed in full.
pub struct Table<'a> {
    heading: &'a [&'a str],
    flexible: &'a [usize],
    optional: &'a [usize],
}

/// The width of the terminal that standard output is connected to.
pub fn terminal_width() -> Option<usize> {
    let out = std::io::stdout();
    if !out.is_terminal() {
        return None;
    }
    let size = rustix::termios::tcgetwinsize(&out).ok()?;
    Some(usize::from(size.ws_col)).filter(|width| *width > 0)
}

impl<'a> Table<'a> {
    /// A table with these column names.
    pub fn new(heading: &'a [&'a str]) -> Table<'a> {
        Table {
            heading,
            flexible: &[],
            optional: &[],
        }
    }

    /// Names the columns that can be cut, by number: those with free text.
    #[must_use]
    pub fn flexible(self, columns: &'a [usize]) -> Table<'a> {
        Table {
            flexible: columns,
            ..self
        }
    }

    /// Names the columns that can be left out, by number: the least important first.
    #[must_use]
    pub fn optional(self, columns: &'a [usize]) -> Table<'a> {
        Table {
            optional: columns,
            ..self
        }
    }

    /// Prints the table.
    pub fn print(&self, rows: &[Vec<String>]) -> Result<()> {
        let (bold, reset) = if colors_stdout() {
            ("\x1b[1m", "\x1b[0m")
        } else {
            ("", "")
        };
        let lines = self.render(rows, terminal_width());
        let (heading, rows) = lines.split_at(1);
        heading
            .iter()
            .try_for_each(|text| line(format_args!("{bold}{text}{reset}")))?;
        rows.iter().try_for_each(line)
    }

    /// The lines of the table, heading first.
    fn render(&self, rows: &[Vec<String>], terminal_width: Option<usize>) -> Vec<String> {
        let heading = self.heading.iter().map(|name| (*name).to_owned()).collect();
        let rows: Vec<Vec<String>> = std::iter::once(heading)
            .chain(
                rows.iter()
                    .map(|row| row.iter().map(|cell| clean(cell)).collect()),
            )
            .collect();
        let natural = |column: usize| {
            let cells = rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let mut widths: Vec<usize> = (0..self.heading.len()).map(natural).collect();
        if let Some(width) = terminal_width {
            let is_empty = |column: usize| {
                let mut cells = rows.iter().skip(1).filter_map(|row| row.get(column));
                cells.all(String::is_empty)
            };
            for (column, width) in widths.iter_mut().enumerate() {
                if is_empty(column) {
                    *width = 0;
                }
            }
            self.shrink(&mut widths, width);
        }
        rows.iter()
            .map(|row| {
                let cells = row.iter().zip(&widths);
                let text: String = cells
                    .filter(|(_, width)| **width > 0)
                    .map(|(cell, width)| format!("{:<width$}{GAP}", cut(cell, *width)))
                    .collect();
                text.trim_end().to_owned()
            })
            .collect()
    }

    /// Drops optional columns if cutting flexible columns is not enough, then takes characters from
    /// the widest flexible column until the row fits. A column of width 0 is not printed.
    fn shrink(&self, widths: &mut [usize], terminal_width: usize) {
        let excess = |widths: &[usize]| {
            let columns = widths.iter().filter(|width| **width > 0).count();
            let gaps = GAP.len() * columns.saturating_sub(1);
            (widths.iter().sum::<usize>() + gaps).saturating_sub(terminal_width)
        };
        let can_cut = |widths: &[usize]| -> usize {
            let cut = self
                .flexible
                .iter()
                .filter_map(|column| widths.get(*column));
            cut.map(|width| width.saturating_sub(MIN_FLEXIBLE)).sum()
        };
        for column in self.optional {
            if excess(widths) > can_cut(widths) {
                widths[*column] = 0;
            }
        }
        while excess(widths) > 0 {
            let widest = self
                .flexible
                .iter()
                .copied()
                .filter(|column| widths.get(*column).is_some_and(|it| *it > MIN_FLEXIBLE))
                .max_by_key(|column| widths[*column]);
            match widest {
                Some(column) => widths[column] -= 1,
                None => return,
            }
        }
    }
}

/// The text in at most `width` characters, with an ellipsis if it is cut.
fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let kept: String = text.chars().take(width.saturating_sub(1)).collect();
    format!("{}…", kept.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> Vec<Vec<String>> {
        let row = |cells: [&str; 3]| cells.map(str::to_owned).to_vec();
        vec![
            row([
                "s1",
                "/a/rather/long/directory/name",
                "a title of some length",
            ]),
            row(["s2", "", "\x1b[31mshort"]),
        ]
    }

    #[test]
    fn a_table_is_whole_when_it_is_not_on_a_terminal() {
        let table = Table::new(&["ID", "DIR", "TITLE"]).flexible(&[1, 2]);
        assert_eq!(
            table.render(&rows(), None),
            [
                "ID  DIR                            TITLE",
                "s1  /a/rather/long/directory/name  a title of some length",
                "s2                                 \u{fffd}[31mshort",
            ]
        );
    }

    #[test]
    fn a_table_fits_the_terminal() {
        let table = Table::new(&["ID", "DIR", "TITLE"]).flexible(&[1, 2]);
        let lines = table.render(&rows(), Some(40));
        assert!(
            lines.iter().all(|line| line.chars().count() <= 40),
            "{lines:?}"
        );
        assert_eq!(lines[1], "s1  /a/rather/long/d…  a title of some…");
        // A terminal that is too narrow for the other columns gets the minimum.
        assert!(table.render(&rows(), Some(10))[1].contains("/a/rather/l…"));
        let table = table.optional(&[0]);
        let lines = table.render(&rows(), Some(28));
        assert_eq!(lines[1], "/a/rather/lo…  a title of s…");
        assert_eq!(
            table.render(&rows(), Some(40))[0],
            "ID  DIR                TITLE"
        );
    }
}
