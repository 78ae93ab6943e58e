//! The checklist that `why` and `check` print: points, each with its remedy.

use serde::Serialize;

use crate::screen::{Screen, Tone, sanitize_line, wrap};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Mark {
    Good,
    Bad,
    /// It could not be looked at, or is for a person to judge.
    Open,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Point {
    pub(crate) mark: Mark,
    pub(crate) text: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) remedy: Option<String>,
}

impl Point {
    pub(crate) fn good(text: impl Into<String>) -> Self {
        Self { mark: Mark::Good, text: text.into(), remedy: None }
    }

    pub(crate) fn bad(text: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { mark: Mark::Bad, text: text.into(), remedy: Some(remedy.into()) }
    }

    pub(crate) fn open(text: impl Into<String>) -> Self {
        Self { mark: Mark::Open, text: text.into(), remedy: None }
    }

    pub(crate) fn with_remedy(self, remedy: impl Into<String>) -> Self {
        Self { remedy: Some(remedy.into()), ..self }
    }
}

/// The lines of some points; `with_remedies`: each with its own.
pub(crate) fn render_points(points: &[Point], screen: Screen, with_remedies: bool) -> Vec<String> {
    let room = screen.width.map_or(usize::MAX, |width| width - 4);
    let mut lines = Vec::new();
    for point in points {
        let (sign, tone) = match point.mark {
            Mark::Good => ("✓", Tone::Good),
            Mark::Bad => ("✗", Tone::Bad),
            Mark::Open => ("!", Tone::Wait),
        };
        for (index, line) in wrap(&sanitize_line(&point.text), room).into_iter().enumerate() {
            let sign = if index == 0 { screen.paint.with_tone(tone, sign) } else { " ".to_owned() };
            lines.push(format!("{sign} {line}"));
        }
        let remedy = point.remedy.iter().filter(|_| with_remedies);
        lines.extend(
            remedy.flat_map(|remedy| wrap(&sanitize_line(remedy), room)).map(|line| format!("    {line}")),
        );
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_edge_says_moves_no_cursor() {
        let said = "containerd\u{1b}[2K\r\u{202e}1.7\u{2028}\n✗ forged";
        let points = [Point::good(said), Point::bad("x", said)];
        let lines = render_points(&points, Screen::plain(80), true);
        let shown = "containerd\u{fffd}[2K\u{fffd}\u{fffd}1.7\u{fffd} ✗ forged";
        assert_eq!(lines, [format!("✓ {shown}"), "✗ x".to_owned(), format!("    {shown}")]);
    }
}
