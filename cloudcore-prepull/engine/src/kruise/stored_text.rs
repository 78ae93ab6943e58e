//! The bytes that texts take in etcd, which has custom resources as JSON by Go's encoder.

/// Bytes of a text in etcd: six for a control character, and for each of `<`, `>` and `&` too.
pub(super) fn stored_len(text: &str) -> usize {
    text.chars().map(stored_char_len).sum()
}

fn stored_char_len(char: char) -> usize {
    match char {
        '"' | '\\' | '\n' | '\r' | '\t' => 2,
        '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => 6,
        control if control < ' ' => 6,
        other => other.len_utf8(),
    }
}

/// Cuts a text to at most `most` bytes in etcd. A text that was cut ends in `…`.
pub(super) fn truncate_stored(text: String, most: usize) -> String {
    const MARK: &str = " …";
    if stored_len(&text) <= most {
        return text;
    }
    let mut left = most.saturating_sub(MARK.len());
    let fits = |char: &char| {
        let rest = left.checked_sub(stored_char_len(*char));
        left = rest.unwrap_or_default();
        rest.is_some()
    };
    let kept: String = text.chars().take_while(fits).collect();
    kept + MARK
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn go_escapes_more_than_we_do() {
        for (text, bytes) in [
            ("a", 1),
            ("é…", 5),
            ("\"\\\n\r\t", 10),
            ("<>&", 18),
            ("\u{1}\u{8}\u{1f}", 18),
            ("\u{2028}\u{7f}", 7),
        ] {
            assert_eq!(stored_len(text), bytes, "{text:?}");
        }
    }

    #[test]
    fn a_text_is_cut_to_its_bytes_in_etcd() {
        for (text, expected) in
            [("<<", "<<"), ("<<<", "< …"), ("é<<<", "é< …"), ("0123456789abc", "01234567 …")]
        {
            assert_eq!(truncate_stored(text.to_owned(), 12), expected);
        }
    }
}
