//! Abbreviation of untrusted text in error messages and logs.

/// The characters that are quoted: more than any plausible reference has.
const MAX_CHARS: usize = 300;

/// Returns the text as an error message quotes it: a plausible reference whole, a hostile one cut.
pub fn abbreviate(text: &str) -> String {
    match text.char_indices().nth(MAX_CHARS) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}
