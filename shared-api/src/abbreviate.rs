//! Abbreviation of untrusted text in error messages and logs.

/// Returns the text as an error message quotes it: a plausible reference whole, a hostile one cut.
pub fn abbreviate(text: &str) -> String {
    abbreviate_to(text, 300)
}

/// Returns the first characters of a text, at most so many, and a sign where there are more.
pub fn abbreviate_to(text: &str, max_chars: usize) -> String {
    match text.char_indices().nth(max_chars) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}
