//! Tables with long text in the last column.

use prepull_program::table::align_columns;

use crate::screen::wrap;

/// Spaces between columns, as kubectl has them.
pub(crate) const GAP: usize = 3;
/// A last column narrower than this is put below its row.
const NARROWEST_TEXT: usize = 28;

/// Aligns the rows and wraps their last column; the first row is the head. Without a width it doesn't wrap.
pub(crate) fn with_text(rows: &[Vec<String>], width: Option<usize>) -> String {
    let Some(width) = width else { return align_columns(rows, GAP) };
    let columns = rows.first().map_or(0, Vec::len).saturating_sub(1);
    let widest =
        |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let before: usize = (0..columns).map(|column| widest(column).unwrap_or(0) + GAP).sum();
    let room = width.saturating_sub(before);
    let is_below = room < NARROWEST_TEXT;
    let mut lines: Vec<Vec<String>> = Vec::new();
    let mut below = Vec::new();
    for (index, row) in rows.iter().enumerate() {
        let text = row.last().map(String::as_str).unwrap_or_default();
        let mut line = row.clone();
        if is_below {
            line.truncate(columns);
            lines.push(line);
            below.push(if index == 0 { Vec::new() } else { wrap(text, width - 2) });
            continue;
        }
        for (index, part) in wrap(text, room).into_iter().enumerate() {
            if index > 0 {
                line = vec![String::new(); columns + 1];
            }
            line.truncate(columns);
            line.push(part);
            lines.push(line.clone());
        }
    }
    if !is_below {
        return align_columns(&lines, GAP);
    }
    let table = align_columns(&lines, GAP);
    let mut all = Vec::new();
    for (line, texts) in table.lines().zip(below) {
        all.push(line.to_owned());
        all.extend(texts.into_iter().filter(|text| !text.is_empty()).map(|text| format!("  {text}")));
    }
    format!("{}\n", all.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wraps_the_last_column() {
        let rows = [["NODE", "REASON"], ["edge-1", "one two three four five six seven"]];
        let rows: Vec<_> = rows.iter().map(|row| row.map(str::to_owned).to_vec()).collect();
        let beside = "NODE     REASON\nedge-1   one two three four five six\n         seven\n";
        assert_eq!(with_text(&rows, Some(37)), beside);
        let below = "NODE\nedge-1\n  one two three four five\n  six seven\n";
        assert_eq!(with_text(&rows, Some(26)), below);
        assert_eq!(with_text(&rows, None), "NODE     REASON\nedge-1   one two three four five six seven\n");
    }
}
