//! Tables for people.

use std::fmt::Write;

/// Aligns columns, `gap` spaces apart and without trailing spaces. kubectl has a gap of three.
pub fn align_columns<R: AsRef<[String]>>(rows: &[R], gap: usize) -> String {
    let cells = || rows.iter().map(AsRef::as_ref);
    let columns = cells().map(<[String]>::len).max().unwrap_or(0);
    let width = |column: usize| cells().filter_map(|row| row.get(column)).map(|c| c.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in cells() {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            // Writing to a String does not fail.
            let _ = write!(line, "{cell:<width$}{:gap$}", "");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}
