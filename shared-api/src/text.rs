//! Text from machines that we don't trust, made safe for a terminal.

/// Whether a terminal acts on this character instead of showing it.
///
/// These are the C0 and C1 controls, the bidirectional controls (they change the order in which the rest of a line is
/// shown), and the two separators that some programs take for a line break. Joiners stay, since Persian and Hindi need
/// them.
pub fn is_display_control(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// The text as one line of at most `max_chars` characters, with a mark where it was cut.
///
/// A line feed or a tab becomes a space. Other control characters become U+FFFD, so that people see that something was
/// there.
pub fn to_plain_line(text: &str, max_chars: usize) -> String {
    let plain = |c: char| match c {
        '\n' | '\t' => ' ',
        c if is_display_control(c) => char::REPLACEMENT_CHARACTER,
        c => c,
    };
    let mut chars = text.chars().map(plain);
    let mut line: String = chars.by_ref().take(max_chars).collect();
    if chars.next().is_some() {
        line.push('…');
    }
    line
}

/// Bytes in the largest binary unit that gives at least one: `12.3 MiB`, `512 B`.
pub fn human_bytes(bytes: u64) -> String {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let Some((unit, shift)) = units.into_iter().find(|(_, shift)| bytes >> shift > 0) else {
        return format!("{bytes} B");
    };
    let tenths = ((u128::from(bytes) * 10) + (1 << (shift - 1))) >> shift;
    format!("{}.{} {unit}", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knows_what_a_terminal_acts_on() {
        for range in
            [0..=0x1f, 0x7f..=0x9f, 0x202a..=0x202e, 0x2066..=0x2069, 0x200e..=0x200f, 0x2028..=0x2029]
        {
            assert!(range.clone().filter_map(char::from_u32).all(is_display_control), "{range:x?}");
        }
        assert!(is_display_control('\u{61c}'));
        for c in [
            ' ', 'a', '~', '\u{a0}', 'é', '漢', '\u{200c}', '\u{200d}', '\u{2027}', '\u{202f}', '\u{2065}',
            '😀',
        ] {
            assert!(!is_display_control(c), "{c:?}");
        }
    }

    #[test]
    fn bytes_have_the_largest_unit() {
        let texts = [0, 1023, 1024, 12_897_485, 3 << 30].map(human_bytes);
        assert_eq!(texts, ["0 B", "1023 B", "1.0 KiB", "12.3 MiB", "3.0 GiB"]);
    }

    #[test]
    fn makes_any_text_one_plain_line() {
        for (text, line) in [
            ("containerd 1.7.24", "containerd 1.7.24"),
            ("a\nb\tc\r", "a b c\u{fffd}"),
            ("\u{1b}]52;c;eA==\u{7}", "\u{fffd}]52;c;eA==\u{fffd}"),
            ("\u{9b}2K\u{7f}", "\u{fffd}2K\u{fffd}"),
            ("x\u{202e}y\u{2029}z", "x\u{fffd}y\u{fffd}z"),
            ("größer als zwanzig Zeichen", "größer als zwanzig Z…"),
        ] {
            assert_eq!(to_plain_line(text, 20), line, "{text:?}");
        }
    }
}
