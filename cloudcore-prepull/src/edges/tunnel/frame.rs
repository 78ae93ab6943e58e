//! Frames of edges, without characters that a terminal acts on.
//!
//! Texts from edges end up in statuses, events, logs and lists, and from there on the terminals of operators. We clean
//! whole frames rather than single fields, so that no field can be forgotten.

use std::borrow::Cow;

use prepull_api::text::is_display_control;
use prepull_api::wire::{DecodeError, EdgeMessage, decode_frame};

/// Decodes a frame of an edge. In all its texts, U+FFFD stands for control characters other than line feeds and tabs.
pub(super) fn decode_from_edge(frame: &str) -> Result<EdgeMessage, DecodeError> {
    decode_frame(&clean_json(frame))
}

/// Replaces control characters in the strings of a JSON text, written as such or as an escape. A text that isn't JSON
/// stays none.
fn clean_json(json: &str) -> Cow<'_, str> {
    // A C0 control is whitespace between the strings, and an error inside of them.
    let is_suspect = |c: char| c == '\\' || (c >= '\u{7f}' && is_display_control(c));
    if !json.contains(is_suspect) {
        return Cow::Borrowed(json);
    }
    let mut clean = String::with_capacity(json.len());
    let mut rest = json;
    while let Some(at) = rest.find(is_suspect) {
        clean.push_str(&rest[..at]);
        rest = &rest[at..];
        let length = escape_length(rest);
        let (found, after) = rest.split_at(length);
        if is_kept(found) {
            clean.push_str(found);
        } else {
            clean.push(char::REPLACEMENT_CHARACTER);
        }
        rest = after;
    }
    clean.push_str(rest);
    Cow::Owned(clean)
}

/// The bytes of the escape, or of the one character, that the text begins with.
fn escape_length(text: &str) -> usize {
    let lengths = text.chars().map(char::len_utf8);
    let chars = match text.as_bytes() {
        [b'\\', b'u', digits @ ..] if digits.len() >= 4 && digits[..4].iter().all(u8::is_ascii_hexdigit) => 6,
        [b'\\', ..] => 2,
        _ => 1,
    };
    lengths.take(chars).sum()
}

fn is_kept(found: &str) -> bool {
    let Some(escape) = found.strip_prefix('\\') else { return false };
    match escape.strip_prefix('u').map(|digits| u32::from_str_radix(digits, 16)) {
        // Half of a surrogate pair is no character of its own; no control character needs one.
        Some(Ok(code)) => {
            char::from_u32(code).is_none_or(|c| matches!(c, '\n' | '\t') || !is_display_control(c))
        }
        _ => !matches!(escape, "r" | "b" | "f"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_replaced() {
        for (json, clean) in [
            (r#"{"a":"plain é 漢 😀"}"#, r#"{"a":"plain é 漢 😀"}"#),
            (r#""\u001b[2K\u009B\u202E""#, "\"\u{fffd}[2K\u{fffd}\u{fffd}\""),
            (r#""\r\b\f\n\t\"\\\/""#, "\"\u{fffd}\u{fffd}\u{fffd}\\n\\t\\\"\\\\\\/\""),
            (r#""\\u001b \\\u001b""#, "\"\\\\u001b \\\\\u{fffd}\""),
            (r#""\ud83d\ude00 \u000a\u0009\u00e9""#, r#""\ud83d\ude00 \u000a\u0009\u00e9""#),
            ("\"\u{7f}\u{9b}\u{2029}\u{2066}\"", "\"\u{fffd}\u{fffd}\u{fffd}\u{fffd}\""),
            ("{\r\n\t\"a\": 1}", "{\r\n\t\"a\": 1}"),
            // No JSON before, and none after.
            (r#""\u00"#, r#""\u00"#),
            ("\"\\", "\"\\"),
            ("\"\\é\u{85}", "\"\\é\u{fffd}"),
        ] {
            assert_eq!(clean_json(json), clean, "{json:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_text_comes_out_clean(text in ".*") {
            let json = serde_json::to_string(&text).unwrap_or_default();
            let read: String = serde_json::from_str(&clean_json(&json)).unwrap_or_default();
            let clean = |c: char| if matches!(c, '\n' | '\t') || !is_display_control(c) { c } else { '\u{fffd}' };
            proptest::prop_assert_eq!(read, text.chars().map(clean).collect::<String>());
            // Text that is no JSON must not make it panic.
            clean_json(&text);
        }
    }
}
