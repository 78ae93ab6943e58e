//! The screen or pipe of the output: its width and colours.

use std::borrow::Cow;
use std::io::IsTerminal;

use prepull_api::text::{is_display_control, to_plain_line};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Screen {
    /// Columns. `None` where nothing is to be cut or wrapped.
    pub(crate) width: Option<usize>,
    /// Whether it is a terminal, so that we can redraw lines.
    pub(crate) is_terminal: bool,
    pub(crate) paint: Paint,
}

/// A terminal narrower than this is served as if it had this width: nothing useful fits.
const NARROWEST: usize = 40;

impl Screen {
    /// Standard output. Without a terminal, `COLUMNS` is the width.
    pub(crate) fn of_stdout(no_color: bool) -> Self {
        let is_terminal = std::io::stdout().is_terminal();
        let of_terminal = || terminal_size::terminal_size().map(|(width, _)| usize::from(width.0));
        let of_variable = || std::env::var("COLUMNS").ok()?.parse().ok();
        let width = if is_terminal { of_terminal() } else { of_variable() };
        let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let has_colors = is_terminal && !no_color && !is_set("NO_COLOR") && !is_dumb;
        Self { width: width.map(|width| width.max(NARROWEST)), is_terminal, paint: Paint(has_colors) }
    }

    /// A width without a terminal, for texts that are compared.
    #[cfg(test)]
    pub(crate) fn plain(width: usize) -> Self {
        Self { width: Some(width), is_terminal: false, paint: Paint(false) }
    }
}

/// The escape sequences of [`Paint`].
const COLORS: [&str; 6] = ["\u{1b}[32m", "\u{1b}[31m", "\u{1b}[33m", "\u{1b}[2m", "\u{1b}[1m", "\u{1b}[0m"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Paint(pub(crate) bool);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tone {
    Good,
    Bad,
    /// Waiting, or worth a look.
    Wait,
    Dim,
    Bold,
}

impl Paint {
    /// The text in the colour of its tone. It has no other width: pad it before.
    pub(crate) fn with_tone(self, tone: Tone, text: &str) -> String {
        let code = match tone {
            Tone::Good => 32,
            Tone::Bad => 31,
            Tone::Wait => 33,
            Tone::Dim => 2,
            Tone::Bold => 1,
        };
        if self.0 { format!("\u{1b}[{code}m{text}\u{1b}[0m") } else { text.to_owned() }
    }
}

/// The text as one line without control characters. Reasons come from edges and registries, which we don't trust with the
/// terminal of an operator: an escape sequence could hide or forge what is shown.
pub(crate) fn sanitize_line(text: &str) -> String {
    to_plain_line(text, usize::MAX)
}

/// A whole output in which no control character is left but line feeds, tabs and our own colours. [`sanitize_line`] makes the single
/// texts safe; this holds for one that we forgot.
pub(crate) fn sanitize_output(output: &str) -> Cow<'_, str> {
    let is_safe = |c: char| matches!(c, '\n' | '\t') || !is_display_control(c);
    if output.chars().all(is_safe) {
        return Cow::Borrowed(output);
    }
    let mut guarded = String::with_capacity(output.len());
    let mut rest = output;
    while let Some(c) = rest.chars().next() {
        let color = COLORS.iter().find(|color| rest.starts_with(**color));
        let (taken, length) = match color {
            Some(color) => (*color, color.len()),
            None if is_safe(c) => (&rest[..c.len_utf8()], c.len_utf8()),
            None => ("\u{fffd}", c.len_utf8()),
        };
        guarded.push_str(taken);
        rest = &rest[length..];
    }
    Cow::Owned(guarded)
}

/// Cuts a text into lines of at most `width` characters, at spaces where there are any.
pub(crate) fn wrap(text: &str, width: usize) -> Vec<String> {
    let width = width.max(1);
    let mut lines: Vec<String> = Vec::new();
    let mut line = String::new();
    let mut used = 0;
    for word in text.split_whitespace() {
        let mut word: Vec<char> = word.chars().collect();
        if used > 0 && used + 1 + word.len() > width {
            lines.push(std::mem::take(&mut line));
            used = 0;
        }
        // A word such as a reference that no line has room for.
        while word.len() > width {
            lines.push(word.drain(..width).collect());
        }
        if used > 0 {
            line.push(' ');
            used += 1;
        }
        used += word.len();
        line.extend(word);
    }
    if used > 0 || lines.is_empty() {
        lines.push(line);
    }
    lines
}

/// Cuts a text to `width` characters, and ends it with an ellipsis if there was more.
pub(crate) fn truncate_text(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_wrap_and_long_words_are_cut() {
        assert_eq!(wrap("one two three", 7), ["one two", "three"]);
        assert_eq!(wrap("a abcdefghij b", 4), ["a", "abcd", "efgh", "ij b"]);
        assert_eq!(wrap("", 4), [""]);
        assert_eq!(wrap("éé éé", 2), ["éé", "éé"]);
    }

    #[test]
    fn foreign_texts_cannot_move_the_cursor() {
        assert_eq!(sanitize_line("a\u{1b}[2Jb\u{9b}1mc\nd é"), "a\u{fffd}[2Jb\u{fffd}1mc d é");
    }

    #[test]
    fn only_our_own_colours_reach_the_terminal() {
        let painted: String = [Tone::Good, Tone::Bad, Tone::Wait, Tone::Dim, Tone::Bold]
            .map(|tone| Paint(true).with_tone(tone, "größer\n\tx"))
            .concat();
        assert_eq!(sanitize_output(&painted), painted);
        for (hostile, shown) in [
            ("a\u{1b}]52;c;eA==\u{7}b", "a\u{fffd}]52;c;eA==\u{fffd}b"),
            ("\u{1b}[2K\r\u{1b}[31mx", "\u{fffd}[2K\u{fffd}\u{1b}[31mx"),
            ("x\u{202e}y\u{9b}8m\u{2028}", "x\u{fffd}y\u{fffd}8m\u{fffd}"),
        ] {
            assert_eq!(sanitize_output(hostile), shown, "{hostile:?}");
        }
        assert_eq!(sanitize_output("größer\n"), "größer\n");
    }

    #[test]
    fn a_text_that_is_cut_says_so() {
        assert_eq!((truncate_text("abcd", 4).as_str(), truncate_text("abcde", 4).as_str()), ("abcd", "abc…"));
    }

    #[test]
    fn without_colours_texts_stay_plain() {
        assert_eq!(Paint(false).with_tone(Tone::Bad, "x"), "x");
        assert_eq!(Paint(true).with_tone(Tone::Bad, "x"), "\u{1b}[31mx\u{1b}[0m");
    }
}
