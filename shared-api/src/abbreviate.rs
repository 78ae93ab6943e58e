//! Abbreviation of untrusted text in error messages.

/// Returns the text as an error message quotes it: a plausible reference whole, a hostile one cut.
pub(crate) fn abbreviate(text: &str) -> String {
    const MAX_CHARS: usize = 300;
    match text.char_indices().nth(MAX_CHARS) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}
